"""Cases of torch.distributed.checkpoint over ranks: tiered's state saved and loaded, and that of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import tiered
from tests.ranks.commits import begun, opened
from tests.ranks.processes import case
from tests.ranks.training import ZOO, digests_of, group_of, over_ranks

__all__ = ["places"]


def places(model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict that a checkpoint of both is of."""
    return {"model": model, "optimizer": optimizer}


def _moved_nbytes(store: tiered.Store) -> int:
    return 0 if store.ranks is None else store.ranks.comm_thread.statistics().moved_bytes


def _collected(session: Any) -> dict[str, str]:
    trained = session.collect()
    trained.losses, trained.norms = [], []
    return digests_of(trained)


@case
def checkpoint(
    send: Callable[[Any], None], *, path: str, folder: str, world: int, loads: bool, model: str, dtype: str,
    state: str = "exact", master_weights: bool = False,
) -> Any:  # fmt: skip
    """Train two steps and save to ``folder``; or train one, load, say what was loaded, and train steps 2 and 3."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    by = {"process_group": group} if world > 1 else {"no_dist": True}
    with opened(path, group) as store:
        session, _ = begun(store, group, model=model, dtype=dtype, update="step", state=state)
        for step in range(1 if loads else 2):
            session.run_step(step)
        before = _moved_nbytes(store)
        options: dict[str, Any] = {"mode": "rw" if loads else "r", "master_weights": master_weights}
        with tiered.sharded_state_dict(session.model, session.optimizer, **options) as state_dicts:
            (dcp.load if loads else dcp.save)(places(*state_dicts), checkpoint_id=folder, **by)
        found: dict[str, Any] = {"moved": _moved_nbytes(store) - before, "there": _collected(session)}
        for step in (2, 3):
            session.run_step(step)
        return found | {"after": _collected(session)}


@case
def fsdp2(send: Callable[[Any], None], *, folder: str, world: int, loads: bool, model: str, num_steps: int = 2) -> Any:
    """Train ``model`` by FSDP2 and save; or load what tiered has saved. Returns the values of both state dicts."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    zoo = over_ranks(ZOO[model], group.rank(), world)
    torch.manual_seed(3)
    net = zoo.build()
    fully_shard(net, mesh=dist.DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    for step in range(num_steps):
        zoo.loss(net, zoo.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state_dict = places(*get_state_dict(net, optimizer))
    (dcp.load if loads else dcp.save)(state_dict, checkpoint_id=folder, process_group=group)
    found = {f"parameters {name}": value.full_tensor() for name, value in state_dict["model"].items()}
    for name, kinds in state_dict["optimizer"]["state"].items():
        found |= {f"{kind} {name}": kinds[kind].full_tensor() for kind in ("exp_avg", "exp_avg_sq")}
    return {key: value.flatten().tolist() for key, value in found.items()}


@case
def refused(send: Callable[[Any], None], *, path: str, folder: str, world: int) -> Any:
    """Fail to load in all ways over ranks, and train on; returns what was said, and digests before and after."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    said: list[str] = []
    with opened(path, group, rank_deadline=10) as store:
        session, _ = begun(store, group, model="odd_sizes", dtype="fp32", update="step")
        session.run_step(0)
        before = _collected(session)

        def attempt(mode: Any, action: Callable[[dict[str, Any]], object]) -> None:
            try:
                with tiered.sharded_state_dict(session.model, session.optimizer, mode=mode) as state_dicts:
                    action(places(*state_dicts))
            except (Exception, dcp.api.CheckpointException) as error:
                said.append(f"{type(error).__name__}: {error}")

        def fail_on_one(state_dict: dict[str, Any]) -> None:
            if group.rank() == 1:
                raise ZeroDivisionError("of rank 1")

        attempt("rw", lambda state_dict: dcp.load(state_dict, checkpoint_id=folder, process_group=group))
        attempt("rw", fail_on_one)
        attempt("rw" if group.rank() else "r", lambda state_dict: None)
        found = {"same": _collected(session) == before, "said": said}
        session.run_step(1)
        return found | {"after": _collected(session)}
