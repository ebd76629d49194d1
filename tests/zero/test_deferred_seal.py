"""A commit without wait returns before the updates are done: it contains what the call found, and these.

Whatever goes wrong behind the commit, or ends the process before the seal: nothing is half.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.models import CASES
from tests.reference import Recipe
from tests.store.rig import WAIT_S
from tests.zero.pending import (
    Contents,
    Pending,
    assert_equal,
    commit_twice,
    contents,
    is_pending,
    new_disk,
    pending,
    sealed,
)
from tests.zero.test_pipeline import Rig, every_update, expected, interrupt, rig
from tests.zero.test_resume import cosine
from tests.zero.training import assert_same, debug_store, reference, smallest_budget, start
from tiered.bytes import exit_and_fork
from tiered.errors import CapacityError, DeviceError, LeaseError, StepAbandonedError
from tiered.units import MiB
from tiered.zero.formats.codec import update_pieces
from tiered.zero.optimizer import bucket_update
from tiered.zero.optimizer.bucket_update import UnitUpdate

CASE = CASES["gpt"]


# -- what is committed ---------------------------------------------------------------------------------------------


def test_the_next_forward_begins_before_the_updates_are_done_and_the_seal_follows_them() -> None:
    disk = new_disk()
    with rig("step", disk) as r:
        for step in range(3):
            r.device.hold = r.reads_of("blocks.3")
            seen: list[int] = []

            def open_gate(*_: object, seen: list[int] = seen, r: Rig = r) -> None:
                seen.append(sealed(r.store))
                r.device.open()

            r.session.run_step(step)
            assert r.store.commit({"step": step + 1}, wait=False) == step + 1
            handle = r.session.model.blocks[1].register_forward_hook(open_gate)
            with torch.no_grad(), torch.random.fork_rng():
                CASE.loss(r.session.model, CASE.batch(step))
            handle.remove()
            assert seen == [step]
        losses = r.session.trained.losses
    with rig("step", disk, seed=1) as r:
        assert r.store.resume() == {"step": 3}
        r.session.trained.losses[:0] = losses
        assert_same(r.session.collect(), expected(3))


@every_update
def test_a_commit_does_not_wait_for_the_one_before_it(update: str) -> None:
    disk = new_disk()
    with rig(update, disk) as r:
        may_apply = commit_twice(r)
        with torch.no_grad(), torch.random.fork_rng():
            CASE.loss(r.session.model, CASE.batch(0))  # needs every update, and no seal
        assert is_pending(r.store)
        assert (r.store.generation, sealed(r.store)) == (0, 1)
        with r.when_main_waits(may_apply.set):
            r.session.run_step(2)  # its updates wait for the seal
        assert sealed(r.store) == 2
        r.store.wait_for_commit()
        assert r.store.state == {"step": 2}
        assert_same(r.session.collect(), expected(3))


def committed_after_each_step(recipe: Recipe, update: str, *, wait: bool) -> list[tuple[Contents, int]]:
    """Return what each generation contains, and the bytes that it took to write it."""
    disk = new_disk()
    made = Rig(disk, update, recipe=recipe)
    store, found = made.store, []
    try:
        store.commit({"step": 0})
        written_bytes = store.statistics().write_bytes
        for step in range(recipe.num_steps):
            is_hit = made.reads_of("root")
            made.device.hold = is_hit if not wait else made.device.hold
            made.session.run_step(step)
            store.commit({"step": step + 1}, wait=wait)
            if not wait:
                assert is_pending(store)
                made.device.open()
                with torch.random.fork_rng():  # which the commit is not to see
                    CASE.loss(made.session.model, CASE.batch(step)).backward()
                made.session.optimizer.zero_grad()
                store.wait_for_commit()
            before, written_bytes = written_bytes, store.statistics().write_bytes
            found.append((contents(disk), written_bytes - before))
    finally:
        made.close()
    return found


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(num_steps=2, max_norm=0.5, num_micro_steps=2, schedule=cosine),
        Recipe(num_steps=2, param_dtype=torch.bfloat16),
    ],
    ids=["clipped", "bf16"],
)
def test_each_generation_is_bit_for_bit_that_of_a_commit_that_waits(recipe: Recipe) -> None:
    deferred, waited = (committed_after_each_step(recipe, "step", wait=wait) for wait in (False, True))
    for (ours, our_nbytes), (theirs, their_nbytes) in zip(deferred, waited, strict=True):
        assert_equal(ours, theirs)
        assert our_nbytes == their_nbytes


@every_update
def test_the_smallest_budget_is_enough(update: str, tmp_path: Path) -> None:
    nbytes = smallest_budget(CASE, Recipe(), update, tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes) as store:
        session = start(CASE, Recipe(), store, update)
        for step in range(Recipe().num_steps):
            session.run_step(step)
            store.commit({"step": step + 1}, wait=False)
        assert_same(session.collect(), reference(CASE, Recipe()))


def test_what_is_registered_is_as_it_was_at_the_call() -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        r.counter.count = 77
        r.session.optimizer.param_groups[0]["lr"] = 0.5
        torch.rand(3)
        r.device.open()
        r.store.wait_for_commit()
        r.store.resume()
        assert r.counter.count == 1
        assert r.session.optimizer.param_groups[0]["lr"] == 1e-2
        r.session.run_step(2)
        assert_same(r.session.collect(), expected(3))


# -- who would change it waits -------------------------------------------------------------------------------------


def write_a_parameter(r: Pending) -> None:
    block = r.session.model.blocks[0]
    with tiered.unsharded(block), torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()


def load(r: Pending) -> None:
    state = {name: torch.zeros_like(value) for name, value in r.session.model.state_dict().items()}
    r.session.model.load_state_dict(state)


def lease(r: Pending) -> None:
    with r.store.lease("user", mode="rw") as view:
        view.fill_(7)


def lease_below(r: Pending) -> None:
    lease = r.store.working_set.lease("user", "rw")
    lease.tensor.fill_(7)
    lease.release()


def create(r: Pending) -> None:
    r.store.working_set.create("new", 4096)
    r.store.working_set.lease("new", "w").release()


def step(r: Pending) -> None:
    r.session.run_step(2)


CHANGES: dict[str, Callable[[Pending], object]] = {
    "put": lambda r: r.store.update({"user": torch.ones(5)}),
    "put_many": lambda r: r.store.put_many({"user": torch.ones(5), **{f"new/{i}": torch.ones(1) for i in range(3)}}),
    "delete": lambda r: r.store.pop("user"),
    "clear": lambda r: r.store.working_set.delete(["user"]),
    "lease": lease,
    "lease_below": lease_below,
    "create": create,
    "step": step,
    "unsharded": write_a_parameter,
    "load_state_dict": load,
    "optimizer.load_state_dict": lambda r: r.session.optimizer.load_state_dict(
        r.session.optimizer.state_dict() | {"state": {}}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_who_would_change_what_is_committed_waits(change: str, second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        with r.when_main_waits(r.device.open):
            CHANGES[change](r)
        assert sealed(r.store) == 2
        assert not is_pending(r.store)
        r.store.wait_for_commit()
        assert_equal(contents(disk), second_generation)


def test_another_thread_that_would_change_it_waits(second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        is_about_to = threading.Event()

        def put() -> None:
            is_about_to.set()
            r.store["user"] = torch.ones(5)

        thread = threading.Thread(target=put)
        thread.start()
        assert is_about_to.wait(WAIT_S)
        assert is_pending(r.store)
        r.device.open()
        thread.join()
        r.store.wait_for_commit()
        assert_equal(contents(disk), second_generation)
        assert torch.equal(r.store["user"], torch.ones(5))


ENDS: dict[str, Callable[[Pending], object]] = {
    "commit": lambda r: r.store.commit({"step": 3}, wait=False),
    "commit_that_waits": lambda r: r.store.commit({"step": 3}),
    "wait_for_commit": lambda r: r.store.wait_for_commit(),
    "state_dict": lambda r: r.session.model.state_dict(),
    "rollback": lambda r: r.store.rollback(),
    "resume": lambda r: r.store.resume(),
    "close": lambda r: r.store.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_who_needs_the_generation_waits_and_it_is_not_lost(end: str, second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        with r.when_main_waits(r.device.open):
            ENDS[end](r)
        assert not is_pending(r.store)
        if end != "close":
            assert sealed(r.store) == (3 if "commit" in end and end != "wait_for_commit" else 2)
            r.store.wait_for_commit()
        generation, text, tensors = contents(disk)
        assert generation == sealed(r.store)
        assert_equal((2, second_generation[1], tensors), second_generation)
        assert generation == 3 or text == second_generation[1]
        if end in {"rollback", "resume"}:
            r.session.run_step(2)
            assert_same(r.session.collect(), expected(3))


def test_a_forward_and_a_read_of_another_key_do_not_wait(second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        assert torch.equal(r.store["user"], torch.zeros(5000))
        with r.store.lease("user") as view:
            assert not view.any()
        assert is_pending(r.store)
        with pytest.raises(LeaseError, match="user"):
            with r.when_main_waits(r.device.open), r.store.lease("user", mode="rw"):
                r.store.commit(wait=False)
        assert sealed(r.store) == 2


@every_update
def test_a_writer_at_the_call_is_refused_and_nothing_is_pending(update: str) -> None:
    with rig(update) as r:
        r.store["user"] = torch.zeros(5)
        r.session.run_step(0)
        r.device.hold = r.reads_of("root")
        r.session.run_step(1)
        with r.store.lease("user", mode="rw"), pytest.raises(LeaseError, match="user"):
            r.store.commit({"step": 2}, wait=False)
        assert r.worker.is_busy
        assert not is_pending(r.store)
        r.device.open()
        assert r.store.commit({"step": 2}, wait=False) == 1


@every_update
def test_tensors_that_somebody_lists_while_they_are_updated_keep_no_commit_from_its_seal(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those do who count living tensors between steps."""
    seen: list[torch.Tensor] = []
    with rig(update) as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})

        def look(parts: Any, scratch: Any) -> None:
            if not seen and r.worker._running.unit.name == "blocks.1":  # type: ignore[union-attr]
                seen.extend(found for found in gc.get_objects() if type(found) is torch.Tensor)
            update_pieces(parts, scratch)

        with monkeypatch.context() as patch:
            patch.setattr(bucket_update, "update_pieces", look)
            r.session.run_step(1)
            r.store.commit({"step": 2}, wait=False)
            r.store.wait_for_commit()
        assert seen and r.store.generation == 2
        r.session.run_step(2)
        r.store.commit({"step": 3}, wait=False)
        seen.clear()
        assert_same(r.session.collect(), expected(3))


# -- what goes wrong --------------------------------------------------------------------------------------------------


def assert_goes_on_from_the_first_generation(r: Pending) -> None:
    with pytest.raises(StepAbandonedError, match="rollback"):
        r.store.commit({"step": 3})
    r.store.rollback()
    assert r.store.resume() == {"step": 1}
    del r.session.trained.losses[1:]
    r.session.run_step(1)
    assert_same(r.session.collect(), expected(2))


SURFACES: dict[str, Callable[[Pending], object]] = {
    "forward": lambda r: r.session.run_step(2),
    "put": lambda r: r.store.update({"other": torch.ones(5)}),
    "commit": lambda r: r.store.commit({"step": 3}, wait=False),
    "wait_for_commit": lambda r: r.store.wait_for_commit(),
    "rollback": lambda r: r.store.rollback(),
}


@pytest.mark.parametrize("surface", SURFACES)
def test_an_update_that_fails_is_raised_by_the_next_call_and_nothing_is_sealed(surface: str) -> None:
    with pending() as r:
        r.fail_what_is_held(DeviceError("injected"))
        with pytest.raises(DeviceError, match="injected") as failure:
            SURFACES[surface](r)
        assert any("generation 2" in note for note in failure.value.__notes__)
        assert sealed(r.store) == 1
        assert_goes_on_from_the_first_generation(r)


@pytest.mark.parametrize("surface", ["forward", "put", "rollback"])
def test_a_seal_that_fails_is_raised_by_the_next_call(surface: str) -> None:
    with pending(fits=False) as r:
        r.device.open()
        r.worker._wait(lambda: not r.worker.is_busy, "")
        with pytest.raises(CapacityError, match="free") as failure:
            SURFACES[surface](r)
        assert any("generation 2" in note for note in failure.value.__notes__)
        assert sealed(r.store) == 1
        with pytest.raises(StepAbandonedError, match=r"its commit failed: .*free"):
            r.session.run_step(2)
        assert_goes_on_from_the_first_generation(r)


@pytest.mark.parametrize("is_told_by", ["forward", "rollback"])
def test_what_is_dropped_and_cannot_be_ended_ends_neither_the_worker_nor_the_others(
    is_told_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = UnitUpdate.end

    def fail(update: UnitUpdate) -> str:
        if update.unit.name == "blocks.1":
            raise DeviceError("another")
        return end(update)

    with pending(wait=True) as r:
        r.device.hold = r.reads_of("blocks.0")
        r.session.run_step(2)
        r.store.commit({"step": 3}, wait=False)
        with monkeypatch.context() as patch:
            patch.setattr(UnitUpdate, "end", fail)
            r.fail_what_is_held(DeviceError("injected"))
            assert r.worker._last_thread is not None
            r.worker._last_thread.join()
        assert r.worker._thread is None
        with pytest.raises(DeviceError, match="injected"):
            SURFACES[is_told_by](r)
        r.store.rollback()
        del r.session.trained.losses[2:]
        r.session.run_step(2)
        assert_same(r.session.collect(), expected(3))


def test_an_interrupted_rollback_lets_no_step_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    with pending(wait=True) as r:
        r.session.run_step(2)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(r.worker, "wait_for_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                r.store.rollback()
        with pytest.raises(StepAbandonedError, match="rollback"):
            r.session.run_step(3)
        r.store.rollback()
        del r.session.trained.losses[2:]
        r.session.run_step(2)
        assert_same(r.session.collect(), expected(3))


def test_close_reports_what_failed_and_the_generation_before_is_there() -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        first = contents(disk)
        r.fail_what_is_held(DeviceError("injected"))
        with pytest.raises(DeviceError, match="injected"):
            r.store.close()
        r.store.close()
    assert first[0] == 1
    assert_equal(contents(disk), first)


@pytest.mark.parametrize("fits", [True, False], ids=["sealed", "not sealed"])
def test_a_step_that_is_interrupted_behind_the_seal_changes_nothing_of_it(fits: bool) -> None:
    disk = SimulatedDisk(capacity_nbytes=(4 if fits else 1) * MiB, can_lose_power=False)
    with rig("step", disk) as r:
        may_apply = commit_twice(r, fits=fits)
        losses = r.session.trained.losses[:2]
        with pytest.raises(KeyboardInterrupt):
            with r.when_main_waits(interrupt):
                r.session.run_step(2)
        may_apply.set()
        with contextlib.nullcontext() if fits else pytest.raises(CapacityError, match="free"):
            r.store.close()
    with rig("step", disk, seed=1) as r:
        assert r.store.resume() == {"step": 2 if fits else 1}
        if fits:
            r.session.trained.losses[:0] = losses
            assert_same(r.session.collect(), expected(2))


def test_a_kill_before_the_seal_leaves_the_generation_before_and_its_bits() -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        survivor = disk.moment().survivor(random.Random(0), "keep")
        losses = r.session.trained.losses[:1]
        r.device.open()
    with Pending.reopened(survivor) as r:
        assert r.store.resume() == {"step": 1}
        r.session.trained.losses[:0] = losses
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))


def test_an_interrupt_of_the_wait_loses_nothing(second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        with pytest.raises(KeyboardInterrupt):
            with r.when_main_waits(interrupt):
                r.store["user"] = torch.ones(5)
        assert is_pending(r.store)
        r.device.open()
        r.store.wait_for_commit()
        assert_equal(contents(disk), second_generation)


def leave_by_an_exception(r: Pending) -> None:
    with pytest.raises(ZeroDivisionError), r.store:
        raise ZeroDivisionError


def fork(r: Pending) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert sealed(r.store) == 2
    r.store.wait_for_commit()


def end_the_process(r: Pending) -> None:
    exit_and_fork._at_exit.run()  # what the interpreter does first at its end


@pytest.mark.parametrize("end", [leave_by_an_exception, fork, end_the_process])
def test_whatever_ends_the_run_finishes_the_seal(end: Callable[[Pending], None], second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        with r.when_main_waits(r.device.open):
            end(r)
        assert_equal(contents(disk), second_generation)
