"""The update thread when the main thread is interrupted, or the system has no thread for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.interrupts import interrupt_at
from tests.store.test_nested_calls import no_hang
from tests.zero.test_pipeline import Rig, assert_same, every_update, expected, rig
from tiered.errors import DeadlineError, DeviceError, UsageError
from tiered.zero.optimizer.bucket_update import UpdatePipeline

TWO_THREADS = True  # how long the layers compute beside I/O is left as users have it

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
