"""Lanes: a thread per micro-batch. Exactly one runs, and hands on where the next unit is about to be opened.

streams.py decides which random numbers a lane draws, micro_batches.py decides its computation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tiered.bytes.interrupt import INTERRUPTS, uninterrupted
from tiered.store.residency.thread_number import be_thread, this_thread
from tiered.zero.microbatching.thread_state import Settings, ThreadState
from tiered.zero.parameters.calls import NO_TURNS, CallStack
from tiered.zero.step import Running

if TYPE_CHECKING:
    from tiered.zero.microbatching.state_watch import InterruptionWatch
    from tiered.zero.parameters.conductor import Conductor
    from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["Lane", "Lanes", "Streams", "Touches"]


class Streams(Protocol):
    """The random numbers that each lane draws from the process's generators."""

    def enter(self, index: int) -> None:
        """Lane ``index`` is about to run."""

    def leave(self, index: int, *, has_ended: bool) -> None:
        """Lane ``index`` has paused or ended; may raise."""

    def must_go_on(self, index: int) -> bool:
        """Return whether lane ``index`` must run to its end before others do."""


class Touches:
    """The parameters that the forward of one micro-batch touched: its backward gives a gradient to no others."""

    __slots__ = ("with_grad", "without_grad")

    def __init__(self) -> None:
        self.with_grad: set[Segment] = set()
        self.without_grad: set[Segment] = set()


class LaneStopped(BaseException):
    """Leaves the lanes that are no longer wanted: another one failed, or the caller was interrupted."""


def _shut() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Lane:
    """One micro-batch under way in a thread of its own. ``work`` returns its result."""

    def __init__(self, index: int, work: Callable[[], Any], touches: Touches) -> None:
        self.index = index
        self.touches = touches
        self.accumulated: set[Segment] = set()
        self.stack = CallStack()
        self.result: Any = None
        self.error: BaseException | None = None
        self.wanted: Unit | None = None  # about to be opened
        self.waits_for: Segment | None = None  # for its gradient, from the lanes before
        self.num_pauses = 0
        self.has_ended = False
        self.is_stopped = False
        self.thread: threading.Thread | None = None
        self._work: Callable[[], Any] | None = work
        self._go = _shut()  # each opened by one thread, for one other to pass
        self._back = _shut()

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else "not begun" if self.thread is None else "under way"
        return f"Lane({self.index}, {state}, {self.num_pauses} pauses)"

    def is_done_with(self, segment: Segment) -> bool:
        """Return whether no more gradient of ``segment`` can come from this lane's backward.

        Each parameter accumulates once in a graph task. A parameter that was touched without gradients may be touched
        again by a reentrant checkpoint, which has graph tasks of its own.
        """
        if self.has_ended:
            return True
        if segment in self.touches.without_grad:
            return False
        return segment in self.accumulated or segment not in self.touches.with_grad

    def go_on(self, state: ThreadState) -> None:
        """Run until the next pause or the end; blocks. Called by the thread that has made the lane."""
        if self.thread is None:
            name = f"tiered micro-batch {self.index}"
            self.thread = threading.Thread(target=self._run, args=(state, this_thread()), name=name)
            self.thread.start()
        else:
            self._go.release()
        INTERRUPTS.acquire(self._back)

    def pause(self) -> None:
        """Let others run; called in the lane's own thread."""
        self.check()
        self.num_pauses += 1
        self._back.release()
        self._go.acquire()
        self.check()

    def check(self) -> None:
        """Leave the lane if it is no longer wanted."""
        if self.is_stopped:
            raise LaneStopped

    def stop(self) -> None:
        """End the lane, wherever it is, by an exception in it; blocks: no code of ours may run on afterwards."""
        self.is_stopped = True
        if self._go.locked():
            self._go.release()
        if self.thread is not None:
            self.thread.join()

    def _run(self, state: ThreadState, number: int) -> None:
        be_thread(number)  # order: before any lease; no thread may wait for memory of a thread that waits for it
        work, self._work = self._work, None
        assert work is not None
        try:
            self.result = state.run(work)
        except LaneStopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.has_ended = True
            if self._back.locked():  # or the caller was interrupted, and has not waited for the last pause
                self._back.release()


class Lanes:
    """The lanes of one forward or one backward of several micro-batches.

    Invariant: at most one lane runs, and no other call of the model does. A lane pauses where it is about to open a
    unit that is not open, or to add to a gradient that the lanes before it have not added to. So all lanes pass a unit
    before the next is opened, in order, wherever they use the same units. Otherwise only more units are swapped in.
    """

    def __init__(self, engine: Conductor, lanes: Sequence[Lane], streams: Streams, watch: InterruptionWatch) -> None:
        self._engine = engine
        self._lanes = list(lanes)
        self._streams = streams
        self._state = ThreadState()
        self._watch = watch
        self._running: Lane | None = None
        self._alone: Lane | None = None

    def __repr__(self) -> str:
        return f"Lanes({self._lanes!r})"

    @uninterrupted
    def run(self) -> None:
        """Run all lanes to their ends; blocks. Raises the error of the first lane that failed, and a note names it.

        No thread is left. The caller sets the generators and the settings of the process afterwards.
        """
        engine, settings = self._engine, Settings()
        own = engine.calls.stack
        engine.calls.turns = self
        engine.calls.others = [lane.stack for lane in self._lanes]
        try:
            while (lane := self._next()) is not None:
                self._go_on(lane)
        except BaseException:
            self._stop()
            raise
        finally:
            engine.calls.turns = NO_TURNS
            engine.calls.stack = own
            engine.calls.others = []
            settings.restore()
            self._join()
            if not engine.phase.abandoned:
                engine.open_units.park_idle(engine.calls.units())

    @property
    def are_under_way(self) -> bool:
        """Whether a forward other than that of the first lane may have begun before this one."""
        return self._running is not None and self._running is not self._lanes[0]

    def lane_here(self) -> Lane | None:
        """Return the lane whose thread this is."""
        lane = self._running
        return lane if lane is not None and lane.thread is threading.current_thread() else None

    are_taken = True

    def touched(self, segment: Segment, *, with_grad: bool) -> None:
        """The forward of the lane that asks uses ``segment``."""
        lane = self.lane_here()
        if lane is not None:
            (lane.touches.with_grad if with_grad else lane.touches.without_grad).add(segment)

    def about_to_open(self, unit: Unit) -> None:
        """Pause the lane that asks, until it is its turn to open ``unit`` (or another lane has)."""
        lane = self.lane_here()
        if lane is None or self._engine.phase.running is Running.RECOMPUTE:
            return
        lane.check()
        if self._alone is not lane and self._streams.must_go_on(lane.index):
            self._alone = lane
        if self._alone is lane or all(other.has_ended for other in self._lanes if other is not lane):
            return
        lane.wanted = unit
        lane.pause()
        lane.wanted = None

    def about_to_accumulate(self, segment: Segment) -> None:
        """Pause the lane that asks until those before it have added their gradients of ``segment``."""
        lane = self.lane_here()
        if lane is None:
            return
        lane.check()
        lane.waits_for = segment
        while self._must_wait(lane):
            lane.pause()
        lane.waits_for = None

    def accumulated(self, segment: Segment) -> None:
        """A lane has added its gradient of ``segment``."""
        lane = self.lane_here()
        if lane is not None:
            lane.accumulated.add(segment)

    def is_done_with(self, segment: Segment) -> bool:
        """Return whether no lane will add to the gradient of ``segment`` any more."""
        return all(lane.is_done_with(segment) for lane in self._lanes)

    def _must_wait(self, lane: Lane) -> bool:
        segment = lane.waits_for
        return segment is not None and not all(
            other.is_done_with(segment) for other in self._lanes if other.index < lane.index
        )

    def _next(self) -> Lane | None:
        """Return the lane to run next: one whose unit is open, else the one furthest behind; the earlier of equals."""
        if self._alone is not None:
            if not self._alone.has_ended:
                return self._alone
            self._alone = None
        ready = [lane for lane in self._lanes if not lane.has_ended and not self._must_wait(lane)]
        at_hand = [lane for lane in ready if lane.wanted is not None and lane.wanted.is_open]
        if at_hand:
            return at_hand[0]
        return min(ready, key=lambda lane: (lane.num_pauses, lane.index), default=None)

    def _go_on(self, lane: Lane) -> None:
        calls = self._engine.calls
        self._running = lane
        calls.stack = lane.stack
        self._streams.enter(lane.index)
        lane.go_on(self._state)
        self._streams.leave(lane.index, has_ended=lane.has_ended)
        self._running = None
        if lane.error is not None:
            error, lane.error = lane.error, None  # lifetime: its traceback holds the lane
            error.add_note(f"in micro-batch {lane.index}, counted from 0")
            raise error
        if not lane.has_ended and lane.stack.calls:
            self._watch.check(lane.stack.calls)

    def _stop(self) -> None:
        """End all lanes, the running one first: it has leases that the others may need."""
        running = self._running
        for lane in sorted(self._lanes, key=lambda lane: lane is not running):
            self._running = lane
            self._engine.calls.stack = lane.stack
            lane.stop()
        self._running = None

    def _join(self) -> None:
        for lane in self._lanes:
            if lane.thread is not None:
                lane.thread.join()
