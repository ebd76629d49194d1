"""Updates run behind the backward and behind the next forward: overlapped, with the same bits, and never left alone."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.interrupts import interrupt_at
from tests.models import CASES
from tests.reference import Recipe, Trained
from tests.store.rig import GatedDevice, simulated_store
from tests.store.test_nested_calls import no_hang
from tests.zero.training import Session, assert_same, debug_store, reference, smallest_budget, start
from tiered.bytes.device.base import Device, Operation
from tiered.errors import CapacityError, DeadlineError, DeviceError, StepAbandonedError, UsageError
from tiered.units import MiB
from tiered.zero.optimizer.background_updates import UpdateThread
from tiered.zero.optimizer.bucket_update import UpdatePipeline

TWO_THREADS = True  # how long the layers compute beside I/O is left as users have it

CASE = CASES["gpt"]
ROOMY_NBYTES = 8 * MiB
UPDATES = ("step", "backward")

every_update = pytest.mark.parametrize("update", UPDATES)


class Rig:
    """A session over a device that a test can hold up and fail, and the worker of its engine."""

    def __init__(self, disk: SimulatedDisk, update: str, *, seed: int = 7, recipe: Recipe | None = None) -> None:
        self.device: GatedDevice

        def wrap(device: Device) -> Device:
            self.device = GatedDevice(device)
            return self.device

        self.store = simulated_store(disk, budget_nbytes=ROOMY_NBYTES, wrap=wrap)
        self.session = start(CASE, recipe or Recipe(), self.store, update, hold=0, seed=seed)
        parameter = next(self.session.model.parameters())
        self.worker: UpdateThread = parameter.segment.unit.engine.updates  # type: ignore[attr-defined]

    def reads_of(self, unit: str) -> Callable[[Operation], bool]:
        """Return whether an operation reads state of ``unit``; all of it is driven out of DRAM now."""
        self.worker.wait_for_all()
        self.session.squeeze()
        records = [record for record in self.store.records() if record.name.startswith(f"model/state/{unit}/")]
        assert not any(self.store.working_set.is_resident(record.name) for record in records)
        starts = {(extent.file, extent.offset) for record in records for extent in record.extents}
        assert starts
        return lambda operation: not operation.is_write and (operation.file, operation.offset) in starts

    def close(self) -> None:
        self.device.fail = lambda operation: None
        self.device.open()
        self.store.close()

    @contextmanager
    def when_main_waits(self, action: Callable[[], None]) -> Iterator[None]:
        """Call ``action`` in a thread of its own once the main thread waits for an update."""
        is_over = threading.Event()

        def run() -> None:
            with self.worker._condition:
                self.worker._condition.wait_for(lambda: self.worker._is_waited_for or is_over.is_set(), 30)
            if not is_over.is_set():
                action()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            with self.worker._condition:
                self.worker._condition.notify_all()
            thread.join()


@contextmanager
def rig(update: str, disk: SimulatedDisk | None = None, seed: int = 7) -> Iterator[Rig]:
    made = Rig(disk or SimulatedDisk(capacity_nbytes=128 * MiB, can_lose_power=False), update, seed=seed)
    try:
        yield made
    finally:
        made.close()


def interrupt() -> None:
    """Send SIGINT once the main thread sleeps: one that comes while it falls asleep would not wake it."""
    state = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "S":
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGINT)


def expected(num_steps: int) -> Trained:
    return reference(CASE, Recipe(num_steps=num_steps))


# -- overlap -------------------------------------------------------------------------------------------------------


def test_the_backward_goes_on_while_an_update_waits_for_its_state() -> None:
    with rig("backward") as r:
        r.session.run_step(0)
        r.device.hold = r.reads_of("blocks.3")
        loss = CASE.loss(r.session.model, CASE.batch(1))
        loss.backward()
        assert r.device.has_held.is_set()
        assert r.worker.is_busy
        r.session.trained.losses.append(loss.detach().clone())
        r.session.optimizer.step()  # nor does the step wait
        assert r.worker.is_busy
        r.device.open()
        assert_same(r.session.collect(), expected(2))


def test_the_next_forward_goes_on_while_the_update_of_a_later_unit_waits() -> None:
    with rig("step") as r:
        r.session.run_step(0)
        r.device.hold = r.reads_of("blocks.3")
        r.session.run_step(1)
        seen: list[bool] = []

        def open_gate(*_: object) -> None:
            seen.append(r.worker.is_busy)
            r.device.open()

        handle = r.session.model.blocks[1].register_forward_hook(open_gate)
        r.session.run_step(2)
        handle.remove()
        assert seen == [True]
        assert_same(r.session.collect(), expected(3))


@every_update
def test_what_is_pending_keeps_the_hyperparameters_of_its_step(update: str) -> None:
    with rig(update) as r:
        r.device.hold = r.reads_of("blocks.3")
        r.session.run_step(0)
        for group in r.session.optimizer.param_groups:
            group.update(lr=100.0, betas=(0.1, 0.1), eps=1.0, weight_decay=0.5)
        assert r.worker.is_busy
        r.device.open()
        assert_same(r.session.collect(), expected(1))


@every_update
def test_gradients_are_gone_for_the_caller_while_updates_are_pending(update: str) -> None:
    with rig(update) as r:
        r.device.hold = r.reads_of("blocks.3")
        CASE.loss(r.session.model, CASE.batch(0)).backward()
        r.session.optimizer.step()
        assert r.worker.is_busy
        assert all(parameter.grad is None for parameter in r.session.model.parameters())
        r.session.optimizer.zero_grad()
        assert r.worker.is_busy
        r.device.open()


def test_auto_is_step(tmp_path: Path) -> None:
    recipe = Recipe(max_norm=0.5, num_micro_steps=2, num_steps=2)
    with debug_store(tmp_path, durable=False) as store:
        assert_same(start(CASE, recipe, store, "auto").run(), reference(CASE, recipe))


# -- who looks waits -----------------------------------------------------------------------------------------------

LOOKS: dict[str, Callable[[Session], object]] = {
    "state_dict": lambda session: session.model.state_dict(),
    "state_dict_of_a_unit": lambda session: session.model.blocks[3].state_dict(),
    "state_dict_of_the_optimizer": lambda session: session.optimizer.state_dict(),
    "commit": lambda session: session.store.commit({"step": 1}),
    "load_state_dict": lambda session: session.optimizer.load_state_dict(session.optimizer.state_dict()),
    "get": lambda session: session.store["model/state/blocks.3/1"],
    "lease": lambda session: session.store.lease("model/parameters/blocks.3").__enter__().sum(),
    "unsharded": lambda session: tiered.unsharded(session.model.blocks[0]).__enter__(),
    "forward": lambda session: CASE.loss(session.model, CASE.batch(0)).item(),
}


@every_update
@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_waits(look: str, update: str) -> None:
    with rig(update) as r:
        r.device.hold = r.reads_of("blocks.3")
        r.session.run_step(0)
        with r.when_main_waits(r.device.open):
            found = LOOKS[look](r.session)
        assert not r.device.held
        del found
        if look in {"unsharded", "lease"}:  # which is still open
            return
        r.session.trained.parameters.clear()
        assert_same(r.session.collect(), expected(1))


@every_update
def test_close_finishes_what_is_pending(update: str) -> None:
    disk = SimulatedDisk(capacity_nbytes=128 * MiB, can_lose_power=False)
    with rig(update, disk) as r:
        r.session.run_step(0)
        r.store.commit()  # without a state, which the next step would not be in
        losses = r.session.trained.losses
        r.device.hold = r.reads_of("blocks.3")
        r.session.run_step(1)
        with r.when_main_waits(r.device.open):
            r.store.close()
    with rig(update, disk, seed=1) as r:
        r.store.resume()
        r.session.trained.losses[:0] = losses
        assert_same(r.session.collect(), expected(2))


@every_update
def test_rollback_drops_what_is_pending(update: str) -> None:
    with rig(update) as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        r.device.hold = r.reads_of("blocks.3")
        r.session.run_step(77)
        del r.session.trained.losses[1:]
        with r.when_main_waits(r.device.open):
            r.store.rollback()  # which waits for what runs, if that is held up already
        r.device.open()
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))


@every_update
def test_a_fork_finishes_what_is_pending_and_the_child_refuses(update: str) -> None:
    with rig(update) as r:
        r.device.hold = r.reads_of("blocks.3")
        r.session.run_step(0)
        with r.when_main_waits(r.device.open):
            pid = os.fork()
            if pid == 0:
                try:
                    r.session.model.state_dict()
                except UsageError:
                    os._exit(7)
                finally:
                    os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert not r.worker.is_busy
        assert_same(r.session.collect(), expected(1))


# -- what goes wrong -----------------------------------------------------------------------------------------------


@every_update
@pytest.mark.parametrize("unit", ["root", "blocks.1", "blocks.3"])
def test_an_update_that_cannot_read_its_state_abandons_the_step(unit: str, update: str) -> None:
    with rig(update) as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        is_hit = r.reads_of(unit)
        r.device.fail = lambda operation: DeviceError("injected") if is_hit(operation) else None
        with pytest.raises(DeviceError, match="injected"):
            r.session.run_step(77)
            r.session.run_step(78)
        with pytest.raises(StepAbandonedError, match="rollback"):
            r.session.run_step(78)
        with pytest.raises(StepAbandonedError, match="rollback"):
            r.store.commit({"step": 2})
        r.device.fail = lambda operation: None
        r.store.rollback()
        assert r.store.resume() == {"step": 1}
        del r.session.trained.losses[1:]
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))


@every_update
def test_an_update_that_cannot_write_is_reported_and_undone(update: str) -> None:
    with rig(update) as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        failures = [DeviceError("injected")]
        r.device.fail = lambda operation: failures.pop() if operation.is_write and failures else None
        with pytest.raises(DeviceError, match="injected"):
            r.session.run_step(77)
            r.store.commit({"step": 2})
        r.store.rollback()
        assert r.store.resume() == {"step": 1}
        del r.session.trained.losses[1:]
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))


@every_update
def test_a_failed_update_is_not_committed_by_close(update: str) -> None:
    disk = SimulatedDisk(capacity_nbytes=128 * MiB, can_lose_power=False)
    made = Rig(disk, update)
    made.session.run_step(0)
    made.store.commit({"step": 1})
    losses = made.session.trained.losses[:1]
    is_hit = made.reads_of("blocks.3")
    made.device.fail = lambda operation: DeviceError("injected") if is_hit(operation) else None
    with pytest.raises(DeviceError, match="injected"):
        made.session.run_step(77)  # raises under "backward", where there is more to do
        made.store.close()
    made.store.close()
    with rig(update, disk, seed=1) as r:
        assert r.store.resume() == {"step": 1}
        r.session.trained.losses[:0] = losses
        assert_same(r.session.collect(), expected(1))


def test_a_caller_that_takes_all_the_memory_gets_what_there_is_and_the_update_goes_on(tmp_path: Path) -> None:
    nbytes = smallest_budget(CASE, Recipe(), "step", tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes, durable=False) as store:
        session = start(CASE, Recipe(), store)
        session.run_step(0)
        working_set, buffers = store.working_set, []
        with pytest.raises(CapacityError):
            while True:
                buffers.append(working_set.reserve(4096))
        for buffer in buffers:
            working_set.unreserve(buffer)
        for step in range(1, Recipe().num_steps):
            session.run_step(step)
        assert_same(session.collect(), reference(CASE, Recipe()))


# -- the schedule --------------------------------------------------------------------------------------------------


@every_update
def test_an_evaluation_between_steps_costs_the_next_step_no_demand_reads(update: str) -> None:
    """Counted on a device whose reads arrive at once: what was asked for ahead is no demand read."""

    def num_demands(r: Rig) -> int:
        return r.store.statistics().working_set.swaps.num_demands

    counts = []
    with rig(update) as r:
        for step in range(6):
            if step == 4:
                with torch.no_grad():
                    for index in range(3):
                        CASE.loss(r.session.model, CASE.batch(index))
            before = num_demands(r)
            r.session.run_step(step)
            r.worker.wait_for_all()
            counts.append(num_demands(r) - before)
    assert counts[4] <= max(counts[2], counts[3])
    assert counts[5] <= max(counts[2], counts[3])


@every_update
def test_each_key_is_read_as_often_as_the_formula_says(update: str) -> None:
    """R = 2 parameters + state at most: nothing that is read is read again because two threads are at work."""
    with rig(update) as r:
        for step in range(3):
            r.session.run_step(step)
        r.worker.wait_for_all()
        parameters, state = (
            sum(extent.nbytes for record in r.store.records() if word in record.name for extent in record.extents)
            for word in ("/parameters/", "/state/")
        )
        before = r.store.statistics()
        r.session.run_step(3)
        r.worker.wait_for_all()
        after = r.store.statistics()
        assert after.read_bytes - before.read_bytes <= 2 * parameters + state
        assert after.write_bytes - before.write_bytes <= parameters + state


# -- interrupts, threads and deadlines --------------------------------------------------------------------------------


Act = Callable[[Rig], object]


def _step(r: Rig) -> None:
    r.session.run_step(1)


def _wait(r: Rig) -> None:
    r.session.run_step(1)
    r.worker.wait_for_all()


def _roll_back(r: Rig) -> None:
    r.session.run_step(1)
    r.store.rollback()


@pytest.mark.parametrize("act", [_step, _wait, _roll_back])
def test_an_interrupt_anywhere_leaves_a_worker_that_goes_on_after_a_rollback(act: Act) -> None:
    with rig("step") as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        with interrupt_at() as places:
            act(r)
        for number in range(1, places.number, places.number // 8):
            del r.session.trained.losses[1:]
            r.store.rollback()
            try:
                with interrupt_at(number):
                    act(r)
            except KeyboardInterrupt:
                pass
            r.store.rollback()
            assert not r.worker.is_busy and r.worker._condition.acquire(timeout=30), number
            r.worker._condition.release()
        del r.session.trained.losses[1:]
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))


@every_update
def test_a_thread_that_cannot_be_started_ends_the_step_and_no_more(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "tiered-update":
            raise RuntimeError("can't start new thread")
        start(thread)

    with rig(update) as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        with monkeypatch.context() as patch, pytest.raises(DeviceError, match="can't start new thread"):
            patch.setattr(threading.Thread, "start", refuse)
            r.session.run_step(1)
        r.store.rollback()
        del r.session.trained.losses[1:]
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))


def test_a_signal_handler_that_comes_while_its_thread_has_the_workers_lock_is_refused() -> None:
    with no_hang(), rig("step") as r:
        r.session.run_step(0)
        r.device.hold = r.reads_of("root")
        r.session.run_step(1)
        assert r.worker.is_busy
        doors: list[Act] = [
            lambda r: r.store.commit(),
            lambda r: r.store.commit(wait=False),
            lambda r: r.store.rollback(),
            lambda r: r.store["model/parameters/root"],
        ]
        for door in doors:
            with r.worker._condition, pytest.raises(UsageError, match="set a flag there"):
                door(r)
        with r.worker._condition, pytest.warns(ResourceWarning, match="nothing was closed"):
            r.store.close()
        r.device.open()
        r.store.commit({"step": 2})
        assert_same(r.session.collect(), expected(2))


@pytest.mark.parametrize("wait", ["a forward", "all"])
def test_an_update_that_makes_no_progress_ends_the_wait_at_the_deadline(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bucket whose arithmetic does not end, as on a machine that swaps; nothing hangs, and a rollback goes on."""
    is_over, update = threading.Event(), UpdatePipeline.update

    def stuck(self: UpdatePipeline, *args: Any) -> None:
        is_over.wait(60)
        update(self, *args)

    with rig("step") as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        monkeypatch.setattr(r.worker, "_deadline_s", 0.5)
        with monkeypatch.context() as patch:
            patch.setattr(UpdatePipeline, "update", stuck)
            r.session.run_step(1)
            with pytest.raises(DeadlineError, match=r"the update of '.*' did not happen within 0\.5 s"):
                r.worker.wait_for_all() if wait == "all" else r.session.run_step(2)
            is_over.set()
        del r.session.trained.losses[1:]
        r.store.rollback()
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))
