"""Cases of commits over ranks: training that commits, is killed, rolled back and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tiered
from tests.accelerator.training import case_on
from tests.ranks.processes import case
from tests.ranks.training import ZOO, changes_of, digests_of, group_of, on_device, over_ranks, recipe_of
from tests.zero.training import SEED, Session, start
from tiered.errors import CapacityError, StepAbandonedError
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.state_text import encode
from tiered.store.generations.commit import Committer
from tiered.store.generations.registry import committed_state
from tiered.store.lifetime.confirmation import RanksConfirmation
from tiered.store.residency.residency import Residency

__all__ = ["NUM_STEPS"]

NUM_STEPS = 5
_INSTANTS: dict[str, tuple[Any, str]] = {
    "before the flush": (Committer, "_write"),
    "before the catalog": (SqliteCatalog, "apply"),
    "before the confirmation": (RanksConfirmation, "confirm"),
    "before the first key": (Residency, "create"),
}


def opened(path: str, group: Any, **options: Any) -> tiered.Store:
    size = group.size()
    options = {"rank_deadline": 30, "process_group": group if size > 1 else False} | options
    return tiered.Store(path, dram=(64 << 20) * size, **options)


def begun(
    store: tiered.Store, group: Any, *, model: str, dtype: str, update: str, device: str = "cpu", state: str = "exact"
) -> tuple[Session, int]:
    """Return a session that has resumed, and the step that it is at."""
    zoo = over_ranks(ZOO[model] if device == "cpu" else case_on(device, model), group.rank(), group.size())
    recipe = recipe_of(dtype)
    recipe.adamw["state"] = state
    session = start(zoo, recipe, store, update, seed=SEED, device=device)
    found = store.resume()
    assert found.get("rank", 0) in (group.rank(), 0), "each rank has its own state, a new one that of rank 0"
    return session, found.get("step", 0)


@case
def commit_each_step(
    send: Callable[[Any], None],
    *,
    path: str,
    world: int,
    dtype: str = "fp32",
    update: str = "step",
    model: str = "gpt",
    killed: int = -1,
    instant: str = "",
    kill_step: int = 3,
    waits: bool = True,
    num_steps: int = NUM_STEPS,
    unfreezes: bool = False,
    kind: str = "gloo",
    switch: bool = False,
    state_format: str = "exact",
) -> Any:
    """Train to the end, with a commit after each step; rank ``killed`` kills itself inside of one.

    ``switch``: inside of the opening, which carries the run over from another number of ranks.
    ``unfreezes``: a part of the model is frozen before the first step, values are written, the part is trained again.
    ``kind``: of collectives on the simulated device.
    """
    group, device = group_of(world, kind), "cpu" if kind == "gloo" else "sim"
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if switch and group.rank() == killed:
        _kill_at(instant)
    with on_device(device), opened(path, group) as store:
        recipe = {"model": model, "dtype": dtype, "update": update, "state": state_format}
        session, first = begun(store, group, device=device, **recipe)
        torch.manual_seed(1000 + group.rank()) if not first else None
        changes = changes_of(session.model, tiered.unsharded) if unfreezes else []
        if changes and first in (1, 2):  # freezing is the script's, as always
            changes[0]()
        for step in range(first, num_steps):
            for change in changes[step : step + 1]:
                change()
            session.run_step(step)
            if step == kill_step and group.rank() == killed and not switch:
                _kill_at(instant)
            store.commit({"step": step + 1, "rank": group.rank(), "draw": random.random()}, wait=waits)
            send({"committed": step + 1, "pid": os.getpid()})
        trained = session.collect()
        trained.losses, trained.norms = [], []
        random_state = torch.randint(1 << 30, ()).item()
        return {"digests": digests_of(trained), "first": first, "random": random_state, "state": store.state["step"]}


def _kill_at(instant: str) -> None:
    cls, name = _INSTANTS[instant]
    real = getattr(cls, name)

    def killing(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(cls, name, killing)


@case
def go_back(
    send: Callable[[Any], None], *, path: str, world: int, kind: str, budget: int = 64 << 20, of_device: str = "gloo"
) -> Any:
    """Fail on rank 0 alone, in the step after the second commit; roll back together, and train to the end."""
    group, device = group_of(world, of_device), "cpu" if of_device == "gloo" else "sim"
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    found = []
    with (
        on_device(device),
        tiered.Store(path, dram=budget * world, process_group=group, rank_deadline=30) as store,
    ):
        update = "backward" if kind == "backward" else "step"
        session, _ = begun(store, group, model="gpt", dtype="fp32", update=update, device=device)
        torch.manual_seed(1000 + group.rank())
        failing = kind if group.rank() == 0 else ""
        for attempt in range(3):
            try:
                for step in range(store.state.get("step", 0), NUM_STEPS):
                    if step == 2 and attempt < 2:
                        _fail_in(failing, session, step)
                    else:
                        session.run_step(step)
                    store.commit({"step": step + 1}, wait=False)
                store.wait_for_commit()
            except (StepAbandonedError, FailedHereError) as error:
                found.append(f"{type(error).__name__}: {error}")
                store.rollback()
                assert store.generation == 2 and store.state["step"] == 2
        trained = session.collect()
        trained.losses, trained.norms = [], []
        slots = session.model.get_parameter("ln.weight").segment.unit.comm
        return {"digests": digests_of(trained), "errors": found, "lost": len(slots._lost)}


class FailedHereError(CapacityError):
    """The failure of one rank's own."""


def _fail_in(where: str, session: Session, step: int) -> None:
    """Train ``step``, and fail ``where`` it says."""
    if not where:
        session.run_step(step)
        return

    def fail(*_: Any, **__: Any) -> Any:
        raise FailedHereError(where)

    if where == "exchange":  # the others wait for this one's gradients
        assert session.store.ranks is not None
        failing = mock.patch.object(session.store.ranks.comm_thread, "exchange", fail)
        failing.start()
        handle: Any = SimpleNamespace(remove=failing.stop)
    elif where == "take":  # there is no memory for the unit whose shard was leased
        failing = mock.patch.object(session.model.get_parameter("ln.weight").segment.unit.comm.slots, "take", fail)
        failing.start()
        handle = SimpleNamespace(remove=failing.stop)
    elif where == "forward":
        handle = session.model.get_submodule("blocks.1").register_forward_pre_hook(fail)
    else:
        handle = session.model.get_parameter("ln.weight").register_hook(fail)
    try:
        session.run_step(step)
    finally:
        handle.remove()
        if where != "backward":  # there the rollback itself tells the others
            assert session.store.ranks is not None
            session.store.ranks.abandon(FailedHereError(where), "the loop")


@case
def open_with(
    send: Callable[[Any], None], *, path: str, world: int, kind: str = "", on: int = 1, mode: str = "a"
) -> str:
    """Open, and do one thing; something is wrong on rank ``on`` alone. Return the error, "" for none."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    is_odd = group.rank() == on
    stack = contextlib.ExitStack()
    if kind == "locked" and is_odd:
        own = f"{path}/rank-{on:04d}-of-{world:04d}"
        stack.enter_context(tiered.Store(own, dram="16MiB", mode="r", process_group=False))
    try:
        with stack, opened(path, group, mode=mode) as store:
            store["x"] = torch.full((5000,), float(group.rank()))
            if kind == "no space" and is_odd:
                stack.enter_context(mock.patch.object(store.working_set.space, "flush", _no_space))
            if kind == "leased" and is_odd:
                stack.enter_context(store.lease("x", mode="rw"))
            if kind in ("no space", "leased"):
                store.commit({"step": 1})
            if kind == "changes on one":
                store.commit()
                if is_odd:
                    store["y"] = torch.ones(5)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"generation {store.generation}"


def _no_space() -> None:
    raise CapacityError("no space left on the drive")


@case
def show(send: Callable[[Any], None], *, path: str, world: int, commits: bool = False) -> dict[str, Any] | None:
    """Open, and return digests of what this rank's store has; with ``commits`` commit a step of 100 more."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    try:
        with opened(path, group) as store:
            states = committed_state(store._generations.root.state)[1]
            shown = {
                "keys": {name: _digest(value.view(-1).view(torch.uint8).numpy()) for name, value in store.items()},
                "states": {name: _digest(encode(state).encode()) for name, state in states.items()},
                "step": store.state["step"], "is_clean": store.verify().is_clean,
            }  # fmt: skip
            if commits:
                store.commit(store.state | {"step": shown["step"] + 100})
            return shown
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@case
def end_oddly(send: Callable[[Any], None], *, path: str, world: int, kind: str) -> str:
    """Commit, while rank 0 alone does something else; return the error of each rank, "" for none."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    is_odd = group.rank() == 0
    try:
        with opened(path, group) as store:
            session, _ = begun(store, group, model="gpt", dtype="fp32", update="step")
            session.run_step(0)
            store.commit({"step": 1})
            if kind == "update fails" and is_odd:
                stack = mock.patch.object(session.optimizer._pipeline, "update", _no_space_for)
                with stack:
                    session.run_step(1)
                    store.commit({"step": 2}, wait=False)
                    store.wait_for_commit()
                return ""
            session.run_step(1)
            if kind == "interrupted" and is_odd:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            elif kind == "interrupted":
                time.sleep(1.0)
            if kind == "alone" and is_odd:
                session.run_step(2)
            else:
                store.commit({"step": 2}, wait=kind != "update fails")
                store.wait_for_commit()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _no_space_for(*_: Any, **__: Any) -> None:
    raise CapacityError("no space left for an update")


@case
def stripe(send: Callable[[Any], None], *, paths: list[str], world: int, mode: str) -> Any:
    """Open over several directories, of which some name the rank; put and commit, or read. Return where it lies."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    dram = (64 << 20) * world
    with tiered.Store(*paths, dram=dram, process_group=group, rank_deadline=30, mode=mode) as store:
        if mode != "r":
            store["x"] = torch.full((1 << 20,), group.rank(), dtype=torch.uint8)
            store.commit({"rank": group.rank()})
        assert int(store["x"].max()) == store.state["rank"] == group.rank()
        return [store.generation, *(str(path) for path in store._parts.directories.paths)]  # type: ignore[union-attr]
