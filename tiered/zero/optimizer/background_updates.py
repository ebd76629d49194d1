"""The update thread: it owns the update of the units handed to it, while the training thread goes on.

A hand-over carries all that an update needs. The update thread touches no part of the engine. The training thread
touches no part of a unit that it handed over before it has waited for the update. To the store it is a producer.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set
from contextlib import nullcontext

import torch

from tiered.bytes.condition import Condition
from tiered.bytes.critical_section import BoundedThread
from tiered.bytes.exit_and_fork import at_exit
from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import CapacityError, DeviceError
from tiered.store.waiting.calling_thread import NestedCalls, this_thread
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.recorder import Wait
from tiered.zero.engine import Engine
from tiered.zero.gradients.model_gradients import Updates
from tiered.zero.optimizer.bucket_update import UnitUpdate, UpdatePipeline, outcome_of
from tiered.zero.parameters.parameter import without_dispatch
from tiered.zero.parameters.tensor_without_bytes import is_in_mode
from tiered.zero.parameters.unit import Unit

__all__ = ["UpdateThread"]

_log = logging.getLogger("tiered")
_LINGER_S = 0.25  # longer than a forward takes that has nothing to update; the thread holds the store meanwhile


class _CancelledError(Exception):
    """Ends a cancelled update, between two buckets or while it waits for memory."""


class UpdateThread(Updates):
    """Runs unit updates in the order in which they were handed over, but those that are waited for first.

    The invariant: *a unit's update is queued, running, or not pending*; a failure ends all of them and is kept in
    ``failure``. The thread lives as long as updates are queued, and a moment longer: a new thread for each unit of a
    backward would cost more than small updates do. Its last work may be a conclusion, the seal of a commit: *no update
    is handed over before the seal*, and no update that the seal waits for is dropped.

    An update has a share of the DRAM budget of its own. So it waits for no bytes of the training thread, except where a
    tensor of the caller's keeps bytes that it is about to replace: then it asks for memory once that thread waits.
    """

    def __init__(self, engine: Engine, pipeline: UpdatePipeline, *, buckets_bytes: int) -> None:
        """``buckets_bytes``: of the buckets that an update has in DRAM at one time."""
        self.failure: BaseException | None = None
        self._pipeline = pipeline
        self._abandon = engine.phase.abandon
        self._give = engine.reclaimer.give_back  # the training thread's way to give memory back
        self._open_units = engine.open_units
        self._working_set, self._device = engine.working_set, engine.tier.device.index
        self._deadline_s = engine.working_set.deadline_s
        self._buckets_bytes = buckets_bytes
        self.forget()
        at_exit(self, UpdateThread.cancel)

    def forget(self) -> None:
        """Forget everything: also for a forked child, where none of the parent's threads run."""
        self._condition = Condition()
        self.nested_calls = NestedCalls(self._condition)
        self._queue: OrderedDict[Unit, UnitUpdate] = OrderedDict()
        self._running: UnitUpdate | None = None
        self._conclusion: Callable[[BaseException | None], None] | None = None
        self.is_busy = False  # an update or a conclusion is pending; read without the lock
        self._what_failed, self._num_done, self._num_buckets = "", 0, 0
        self._thread: threading.Thread | None = None  # None once it has seen an empty queue
        self._last_thread: threading.Thread | None = None
        self._is_last = self._is_cancelled = False  # is_last: a caller waits for the thread's end
        self._is_asking = self._has_given = False  # for memory that only the training thread can give
        self._is_waited_for = False  # by the training thread

    def __repr__(self) -> str:
        return f"UpdateThread({self._running!r}, {len(self._queue)} queued)"

    @property
    def _is_updating(self) -> bool:
        return bool(self._queue) or self._running is not None  # order: an update runs before it leaves the queue

    def is_this_thread(self) -> bool:
        """Whether the caller is the update thread."""
        return self._last_thread is threading.current_thread()

    def make_room(self, unit: Unit, nbytes: int, limit_bytes: int | None) -> None:
        """Wait until ``nbytes`` more may be pending: the sum is within the limit, if any, or nothing is pending.

        Also wait for the seal of a commit that waits for pending updates: the commit must not contain later ones.
        """
        self.wait_for(unit)
        if limit_bytes is not None and self.is_busy:
            most = max(0, limit_bytes - nbytes)
            self._wait(lambda: sum(update.nbytes for update in self._pending()) <= most, unit.name)
        if self._conclusion is not None:
            self.wait_for_all()
        self.raise_failure()

    def submit(self, update: UnitUpdate, *, is_settled: bool = False) -> None:
        """Hand ``update`` over; does not block. Its unit has none pending. DeviceError where no thread can start.

        With ``is_settled`` all keys are in DRAM for good, and a second thread would only take the interpreter: the
        update runs here, unless one of torch's modes would see its operations.
        """
        if is_settled and not self.is_busy and not is_in_mode():
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext(), without_dispatch():
                self.failure, self._what_failed = self._update(update), "an update failed"
            return self.raise_failure()
        try:
            with self._condition:
                assert update.unit not in self._queue and self._conclusion is None
                if self._thread is None:
                    self._start_thread(update)  # order: nothing is queued that no thread will take
                self._queue[update.unit] = update
                self._note_pending()
                self._is_last = False
                self._condition.notify_all()
        except BaseException:
            with self._condition:
                self._queue.pop(update.unit, None)
                self._note_pending()
            self._drop([update])
            raise

    def _start_thread(self, update: UnitUpdate) -> None:
        """Start the thread, under the lock: the thread must not look for work before it is queued."""
        thread = BoundedThread(target=self._run, name="tiered-update", device=self._device)
        try:
            thread.start()
        except CapacityError as error:
            what = f"no thread for the update of unit {update.unit.name!r}: {error}"
            raise DeviceError(f"{what}; expected room for one more (ulimit -u), then store.rollback()") from error
        self._thread = self._last_thread = thread  # order: an interrupt before leaves a thread that ends by itself

    def wait_for(self, unit: Unit) -> None:
        """Wait for the update of ``unit``, if one is pending; it goes first. Raises the error of one that failed."""
        if self.is_busy:
            with self._condition:
                if unit in self._queue:
                    self._queue.move_to_end(unit, last=False)
            self._wait(lambda: not self.is_pending(unit), unit.name)
        self.raise_failure()

    def wait_beside(self, unit: Unit) -> None:
        """In another thread than the training thread: wait for the update of ``unit``, if one is pending.

        The update goes first. Ends early where one has failed, whose error is the training thread's. DeadlineError.
        """
        with self._condition:
            if unit in self._queue:
                self._queue.move_to_end(unit, last=False)
            deadline = Deadline(f"the update of {unit.name!r}", self._deadline_s)
            while self.is_pending(unit) and self.failure is None:
                deadline.wait(self._condition, (self._num_done, self._num_buckets))

    def wait_for_all(self) -> None:
        """Wait until nothing is pending and the thread has ended. Ends early after a failure."""
        self._wait(lambda: not self._is_updating, "")
        self._wait(lambda: not self.is_busy, "", Wait.COMMIT)
        with self._condition:
            thread = self._thread
            self._is_last = True
            self._condition.notify_all()
            deadline = Deadline("the end of the update thread", self._deadline_s)
            while self._thread is thread is not None and self._is_last:  # or an update was handed over meanwhile
                deadline.wait(self._condition)
        if thread is not None and self._thread is not thread:
            thread.join()  # it has nothing left to do

    def wait_for_one(self) -> bool:
        """For a caller that waits for memory: wait for the end of an update; False where none is pending."""
        if not self._is_updating or self._is_asking:  # order: who is asked for memory must not wait for the asker
            return False
        last = self._num_done
        self._wait(lambda: self._num_done > last or not self._is_updating, "")
        self.raise_failure()
        return True

    def finish(self, key: str) -> None:
        """A caller is about to use ``key`` through the store: wait for all, if a pending update may use the key."""
        if self.is_busy and key.startswith("model/"):
            self._wait(lambda: not self.is_busy, "")

    def finish_all(self) -> None:
        """Wait until nothing is pending, and raise the error of an update that failed."""
        self.wait_for_all()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of an update that has failed since the last call, if any; the step is abandoned."""
        error = self.failure
        if error is not None:  # order: looked at first, or one that comes meanwhile would be lost
            self.failure = None
            self._abandon(": ".join([self._what_failed, str(error), *getattr(error, "__notes__", ())]))
            raise error

    def pending_keys(self) -> Set[str]:
        """Return the keys of the updates that are pending."""
        with self._condition:
            return {key for update in self._pending() for key in update.keys}

    def when_done(self, conclude: Callable[[BaseException | None], None]) -> bool:
        """Have the update thread call ``conclude`` once no update is pending, with the error of one that failed."""
        with self._condition:
            if not self._is_updating:
                return False
            assert self._conclusion is None
            self._conclusion = conclude
            self._note_pending()
            return True

    def cancel(self) -> None:
        """Finish updates that a commit awaits; drop queued ones, end the running one at a bucket, forget a failure."""
        if self._conclusion is not None:
            self.wait_for_all()
        try:
            self._is_cancelled = True
            self._notify()
            while self._queue:
                with self._condition:
                    dropped = [self._queue.popitem()[1]] if self._queue else []
                self._drop(dropped)
            with self._condition:
                self._note_pending()
            self.failure = None
            self._wait(lambda: self._running is None, "")
            self.wait_for_all()
        except BaseException:  # an interrupt: updates go on being dropped, so no step may begin
            self._abandon("what was pending was being dropped, and that was interrupted")
            raise
        self.failure = None
        self._is_cancelled = False

    def _pending(self) -> list[UnitUpdate]:
        return [*self._queue.values(), *([self._running] if self._running is not None else [])]

    def is_pending(self, unit: Unit) -> bool:
        """Return whether an update of ``unit`` is pending. Any thread, without the lock."""
        return unit in self._queue or ((running := self._running) is not None and running.unit is unit)

    def _wait(self, is_over: Callable[[], bool], subject: str, reason: Wait = Wait.UPDATE) -> None:
        self.nested_calls.refuse()
        with self._working_set.mark:
            with self._condition:
                has_ended, thread = is_over(), self._last_thread
            if has_ended:
                return
            assert thread is not None
            begun = self._working_set.recorder.begin()
            deadline = Deadline(f"the update of {subject or 'all units'!r}", self._deadline_s)
            may_give = this_thread() == self._open_units.thread  # open units are the training thread's
            try:
                with self._condition:
                    self._is_waited_for = self._is_waited_for or may_give
                    self._condition.notify_all()
                with self._working_set.waiting_for(thread):
                    while self._wait_once(is_over, deadline, may_give=may_give):
                        pass
            finally:
                if may_give:
                    self._is_waited_for = False
                    self._answer(has_given=False)  # order: no thread is left to give memory back
                self._working_set.recorder.waited(reason, subject, begun)

    def _wait_once(self, is_over: Callable[[], bool], deadline: Deadline, *, may_give: bool) -> bool:
        """Wait for a change; give memory back where the update asks for it. Return whether to wait on."""
        with self._condition:
            if is_over() or self.failure is not None:
                return False
            waiter = None if self._is_asking and may_give else self._condition.waiter()
        if waiter is None:
            self._answer(has_given=self._give())  # order: without the lock, it takes the store's and starts writes
            return True
        INTERRUPTS.acquire(waiter, deadline.patience_s(self._progress()))
        return True

    def _progress(self) -> object:
        """Return a value that changes as long as an update, or the commit behind it, comes closer to its end."""
        with self._working_set.condition:
            return self._num_done, self._num_buckets, self._working_set.commit_progress()

    def _answer(self, *, has_given: bool) -> None:
        with self._condition:
            if self._is_asking:
                self._is_asking, self._has_given = False, has_given
                self._condition.notify_all()

    def ask(self) -> bool:
        """In the update thread, where memory is short: ask a thread that waits for the update to give memory back.

        Returns whether it did. False at once where none waits: a thread that does not wait gives back by itself.
        """
        with self._condition:
            if not self._is_waited_for:
                return False
            self._is_asking, self._has_given = True, False
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._is_asking or self._is_cancelled)
            self._is_asking = False
            if self._is_cancelled:
                raise _CancelledError
            return self._has_given

    def release_gradients(self) -> bool:
        """Give the working set the gradients of the last queued update that still leases them."""
        with self._condition:  # order: the update must not be taken up meanwhile
            return any(update.gradients.store_away() for update in reversed(self._queue.values()))

    def _run(self) -> None:
        with self._condition:
            is_mine = self._thread is threading.current_thread()  # or the thread that started it was interrupted
        with torch.no_grad(), without_dispatch():
            while is_mine and (job := self._next()) is not None:
                self._done(job())

    def _next(self) -> Callable[[], BaseException | None] | None:
        has_lingered = False
        with self._condition:
            while True:
                if self._queue:
                    self._running = next(iter(self._queue.values()))
                    self._queue.popitem(last=False)
                    return functools.partial(self._update, self._running)
                if self._conclusion is not None:
                    return functools.partial(outcome_of, functools.partial(self._conclusion, None))
                if self._is_last or (has_lingered and not self._is_updating):
                    break  # order: under the lock, so that the next hand-over sees that there is no thread
                has_lingered = not self._condition.wait(_LINGER_S)
            self._thread = None
            self._condition.notify_all()
            return None

    def _update(self, update: UnitUpdate) -> BaseException | None:
        begun = self._working_set.recorder.begin()
        failure: BaseException | None = None
        for action in (functools.partial(self._update_buckets, update), update.end):
            error = outcome_of(action)
            if error is not None and not isinstance(error, _CancelledError):
                failure = failure or error
        self._working_set.recorder.worked("update", update.unit.name, begun)
        if failure is not None:
            failure.add_note(f"while unit {update.unit.name!r} was updated")
        return failure

    def _update_buckets(self, update: UnitUpdate) -> None:
        sources = update.begin()
        for buckets in update.rounds():
            if self._is_cancelled:
                raise _CancelledError
            self._pipeline.update(buckets, sources, update.schedule)
            self._num_buckets += len(buckets)  # a sign of progress

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _done(self, error: BaseException | None) -> None:
        """The running update or conclusion has ended, well or not; a conclusion that will not run ends, too."""
        dropped: list[UnitUpdate] = []
        with self._condition:
            conclusion, is_update = self._conclusion, self._running is not None
            self._running = None
            self._num_done += 1
            if error is not None:
                dropped = list(self._queue.values())
                self._queue.clear()
                if is_update and conclusion is not None:
                    conclusion(error)  # order: before the failure is seen, and nothing is pending
                self._what_failed = "an update failed" if is_update else "its commit failed"
                self.failure = error
            if error is not None or not is_update:
                self._conclusion = None
            self._note_pending()
            self._condition.notify_all()
        self._drop(dropped)

    def _note_pending(self) -> None:
        """Under the lock, after each change: leave room for the largest update that is pending, with its buckets."""
        self.is_busy = self._is_updating or self._conclusion is not None
        largest = max((update.nbytes for update in self._pending()), default=0)
        self._working_set.set_aside(largest + self._buckets_bytes if largest else 0, self.is_this_thread)

    def _drop(self, updates: Iterable[UnitUpdate]) -> None:
        """End updates that will not run."""
        for update in updates:
            try:
                update.end()
            except Exception as error:  # order: the others must be ended, and the first failure is the one to raise
                # Lifetime: a log may be kept, and the update must not: it has leases.
                _log.warning("%s was dropped, and its gradients' bytes stay for now: %s", repr(update), str(error))
