"""What goes wrong behind a commit without wait, and how a process ends before its seal: nothing is half."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
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
from tests.zero.test_pipeline import expected, interrupt, rig
from tests.zero.training import assert_same
from tiered.bytes import exit_and_fork
from tiered.errors import CapacityError, DeviceError, StepAbandonedError
from tiered.units import MiB
from tiered.zero.optimizer.bucket_update import UnitUpdate


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


def test_an_interrupted_step_behind_the_seal_leaves_the_generation() -> None:
    disk = new_disk()
    with rig("step", disk) as r:
        may_apply = commit_twice(r)
        losses = r.session.trained.losses[:2]
        with pytest.raises(KeyboardInterrupt):
            with r.when_main_waits(interrupt):
                r.session.run_step(2)
        may_apply.set()
    with rig("step", disk, seed=1) as r:
        assert r.store.resume() == {"step": 2}
        r.session.trained.losses[:0] = losses
        assert_same(r.session.collect(), expected(2))


def test_close_tells_of_a_seal_that_fails_behind_an_interrupted_step() -> None:
    disk = SimulatedDisk(capacity_nbytes=MiB, can_lose_power=False)
    with rig("step", disk) as r:
        may_apply = commit_twice(r, fits=False)
        with pytest.raises(KeyboardInterrupt):
            with r.when_main_waits(interrupt):
                r.session.run_step(2)
        may_apply.set()
        with pytest.raises(CapacityError, match="free"):
            r.store.close()
    with rig("step", disk, seed=1) as r:
        assert r.store.resume() == {"step": 1}


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


def test_leaving_by_an_exception_keeps_what_was_committed(second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        with pytest.raises(ZeroDivisionError):
            with r.when_main_waits(r.device.open), r.store:
                raise ZeroDivisionError
    assert_equal(contents(disk), second_generation)


def test_a_fork_finishes_the_seal(second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        with r.when_main_waits(r.device.open):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
        os.waitpid(pid, 0)
        assert sealed(r.store) == 2
        r.store.wait_for_commit()
        assert_equal(contents(disk), second_generation)


def test_the_end_of_the_process_finishes_the_seal(second_generation: Contents) -> None:
    disk = new_disk()
    with pending(disk=disk) as r:
        with r.when_main_waits(r.device.open):
            exit_and_fork._at_exit.run()  # what the interpreter does first at its end
        assert_equal(contents(disk), second_generation)
