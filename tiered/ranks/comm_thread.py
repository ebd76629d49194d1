"""CommThread: the one thread of a rank that takes part in collectives, each after an agreement with the other ranks.

Bare collectives do not notice that ranks do different things: equal sizes mix bytes, other sizes end a process. So
each collective begins with 32 bytes that say what all ranks have asked for so far, and moves bytes when they are equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tiered.bytes.critical_section import BoundedThread
from tiered.bytes.exit_and_fork import at_exit, this_process
from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import ClosedError, DeviceError, RankLostError, StepAbandonedError, UsageError
from tiered.ranks.comm import Comm, Moving, check_bytes
from tiered.ranks.group import FIRST_STEP_FACTOR
from tiered.ranks.watch import Watch, copy_of, leave, words_of
from tiered.units import format_bytes

__all__ = ["ROLLBACK", "CommStatistics", "CommThread", "Ticket"]

_SLICE_S = 0.1
_GRACE_S = 1.0  # in which the watch finds the death behind a failed collective, and the comm thread a known cause
ROLLBACK = "store.rollback()"  # the word of the agreement that ends a step which some rank has abandoned
_PLACE_S, _LINE_S = 5.0, 30.0  # of waiting, after which a rank tells its place, and logs who is missing
_DELIVER_S = 0.2  # at most, a rank, for the message that this one leaves because of another
_DIGEST_NBYTES = 24
_DESCRIPTION_NBYTES = 256
_NUM_WORDS = 64  # that a message of a departure can choose from
_NUM_SHOWN = 3
_M = TypeVar("_M", bound=Moving)
_log = logging.getLogger("tiered")
# Lifetime: gloo may write into these to the end of the process.
_quarantine: list[tuple[Any, tuple[torch.Tensor, ...], Comm]] = []
_unended: set[object] = set()  # lifetime: the interpreter's end must find those that an ordinary exit would wait for


@dataclass(frozen=True, slots=True)
class CommStatistics:
    """The collectives of a rank since its start."""

    num_collectives: int
    moved_bytes: int  # of gathers and exchanges, whole tensors
    wait_ranks_s: float  # that callers waited for tickets
    comm_wait_s: float  # that the comm thread waited for other ranks, ahead of need or not
    quarantined_bytes: int


class _Task:
    """A collective that was asked for; ``begin`` issues it, and None moves no bytes but the agreement's."""

    __slots__ = ("after", "begin", "buffers", "digest", "number", "owner", "payload", "ready", "text", "ticket")

    def __init__(self, text: str, begin: Callable[[], Moving] | None, buffers: tuple[torch.Tensor, ...]) -> None:
        self.text = text
        self.begin = begin
        self.buffers = buffers
        self.payload: bytes | None = None  # told to all ranks after the agreement, as long on each
        self.ready: Callable[[], object] | None = None
        self.after: object = None  # an event of the compute device behind the own bytes
        self.owner: object = None
        self.number = 0
        self.digest = b""  # of all that was asked for up to here
        self.ticket: Ticket | None = None

    def __str__(self) -> str:
        return f"collective {self.number}, {self.text}"


class Ticket:
    """The end of one collective, for the threads that wait for it.

    The buffers are the caller's again when ``frees_buffers`` is true, and not before: after an interrupted ``wait`` the
    collective goes on, and after one that ran out other ranks may write into them until the process ends.
    """

    __slots__ = ("_comm_thread", "_end", "error", "event", "is_over", "is_quarantined", "task", "told")

    def __init__(self, comm_thread: CommThread, task: _Task) -> None:
        self._comm_thread = comm_thread
        self._end = threading.Lock()  # held until the collective is over
        self._end.acquire()
        self.task = task
        self.is_over = False
        self.is_quarantined = False
        self.error: Exception | None = None
        self.told: tuple[bytes, ...] = ()  # the payload of each rank
        self.event: object = None  # behind the bytes on a compute device

    @property
    def frees_buffers(self) -> bool:
        """Whether the buffers may be used for something else."""
        return self.is_over and not self.is_quarantined

    def wait(self) -> tuple[bytes, ...]:
        """Wait for the end of the collective; return the payload of each rank. Thread-safe.

        Blocks; in the main thread, the action of a signal may raise instead. Raises UsageError where the ranks do
        different things, RankLostError for a rank that is gone or late, StepAbandonedError where another has given up,
        and the error of ``ready``: the same for this and every later collective.
        """
        self._comm_thread._process.check("a collective of the parent's")
        begun = time.monotonic()
        try:
            while not self.is_over:
                if INTERRUPTS.acquire(self._end, _SLICE_S):
                    self._end.release()
                else:
                    self._comm_thread._check_on(self)
        finally:
            self._comm_thread._count_wait(time.monotonic() - begun)
        if self.error is not None:
            raise copy_of(self.error) from self.error
        return self.told

    def _finish(self, error: Exception | None) -> None:
        self.error = error
        self.is_over = True  # order: after all that it stands for
        self._end.release()

    def __repr__(self) -> str:
        return f"Ticket({self.task}, {'over' if self.is_over else 'under way'}, {self.error or 'no error'})"


class CommThread:
    """One queue of collectives in program order, and one thread that does them one after the other.

    Each collective has a number and a digest of the whole history up to it, made when it is asked for. No byte of a
    gather or an exchange moves before all ranks have shown the same digest. After the first failure nothing moves any
    more: each ticket raises that failure, until all ranks ``begin_again``. No buffer of a collective that did not end
    is used again before that: else quarantined buffers are kept to the end of the process.

    Callers on all ranks ask in the same order; the lock makes one order of several threads of a rank, no more.
    """

    def __init__(self, comm: Comm, watch: Watch, *, deadline_s: float = 600.0) -> None:
        """Start the thread. ``deadline_s`` bounds each wait for another rank, in seconds.

        The first step, until ``end_first_step``, has three times as long. A good end is ``close``; at the end of the
        interpreter a rank with a collective under way leaves by ``os._exit(75)``. Raises CapacityError.
        """
        self.comm = comm
        self.on_device: Comm | None = None  # for tensors of the compute device
        self.watch = watch
        self._deadline_s = deadline_s
        self._factor = FIRST_STEP_FACTOR
        self._process = this_process()
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._history = b""
        self._num_asked = 0
        self._num_done = 0
        self.num_beginnings = 0  # after failures
        self._words: deque[str] = deque(maxlen=_NUM_WORDS)  # of the last collectives that all agreed on
        self._failure: Exception | None = None
        self._is_closed = False
        self._has_departed = False  # the other ranks know the failure already
        self._quarantined: list[object] = []  # owners
        self._moved_bytes = self._quarantined_bytes = 0
        self._wait_ranks_s = self._comm_wait_s = 0.0
        self.has_pending = False  # a collective that did not end: an ordinary exit would wait for it
        self._has_ended = threading.Event()
        self._thread = BoundedThread(target=self._run, name=f"tiered comm of rank {comm.rank}")
        self._thread.start()
        at_exit(self, CommThread._end_with_interpreter)

    # Below: for all threads

    def gather(
        self,
        unit: str,
        whole: torch.Tensor,
        *,
        payload: bytes = b"",
        ready: Callable[[], object] | None = None,
        after: object = None,
        owner: object = None,
    ) -> Ticket:
        """Ask for the pieces of ``unit`` of all ranks in ``whole``, (nbytes,) uint8; does not block.

        The own piece lies at its place in it when ``ready``, which the comm thread calls after the agreement, has
        returned. ``payload``, as long on all ranks, goes to all before: ``Ticket.wait`` returns that of each rank.
        On a compute device the bytes are there after the event ``after``, None: after all of the current stream; or
        after the event that ``ready`` returns.
        ``whole`` is in use until ``Ticket.frees_buffers``; ``owner`` is what ``close`` returns in its place
        if it never is. Raises ValueError for another tensor, ClosedError, and the failure of an earlier collective.
        """
        check_bytes(self.comm.world, whole)
        comm = self._comm_of(whole)
        task = _Task(f"gather of {unit} ({whole.numel()} bytes)", None, (whole,))
        task.after = comm.fence() if after is None and ready is None else after
        task.begin = lambda: comm.gather(whole, task.after)
        task.payload, task.ready, task.owner = payload or None, ready, owner
        return self._ask(task)

    def exchange(
        self,
        unit: str,
        send: torch.Tensor,
        *,
        received: torch.Tensor,
        payload: bytes = b"",
        after: object = None,
        owner: object = None,
    ) -> Ticket:
        """Ask for piece r of ``send`` to go to rank r, and that of rank r to come in ``received``; does not block.

        Both are (nbytes,) uint8, and in use until ``Ticket.frees_buffers``. ``payload``, ``after`` and errors are as
        with ``gather``.
        """
        check_bytes(self.comm.world, send, received)
        comm = self._comm_of(send)
        fence = comm.fence() if after is None else after
        task = _Task(
            f"exchange of {unit} ({send.numel()} bytes)",
            lambda: comm.exchange(send, received, after=fence),
            (send, received),
        )
        task.payload, task.owner = payload or None, owner
        return self._ask(task)

    def agree(self, word: str, payload: bytes) -> Ticket:
        """Ask for the ``payload`` of each rank for ``word``, as long on all ranks; does not block. Raises as above."""
        task = _Task(f"agreement on {word}", None, ())
        task.payload = payload or None
        return self._ask(task)

    def check(self) -> None:
        """Raise what keeps this rank from its next collective, if anything is known. Does not block."""
        if self._failure is not None:
            raise copy_of(self._failure) from self._failure
        self.watch.check(self._num_asked + 1)

    def abandon(self, reason: str) -> None:
        """Give up: tell the other ranks ``reason``, which they raise in StepAbandonedError, and end all tickets.

        Raises UsageError in a fork.
        """
        self._process.check("the comm thread")
        self.watch.tell_abandoned(reason)
        self._fail(StepAbandonedError(f"this rank, {self.comm.rank}, has abandoned the step: {reason}"))

    def begin_again(self, renew: Callable[[int], tuple[Comm, int]]) -> None:
        """After a failure: go on with the comm of ``renew``, and a fresh history; blocks. All ranks do this together.

        ``renew(number)`` gets the number of this rank's last collective, ends what is under way on the old comm on all
        ranks, and returns the new comm and the largest number of all. Then no buffer is written any more that an
        earlier collective has left. Raises what ``renew`` does, and RankLostError: the failure then stays.
        """
        self._tasks.put(None)
        end = time.monotonic() + 2 * self.deadline_s  # a call of torch's may hold the thread up
        while not self._has_ended.wait(_SLICE_S):
            INTERRUPTS.look()
            if time.monotonic() > end:
                raise RankLostError(f"a collective of rank {self.comm.rank} does not end, {self._since()}", rank=-1)
        comm, largest = renew(self._num_asked)
        number = largest + 1  # order: what an abandonment before this tells has a smaller one
        for each in [each for each in _quarantine if each[2] is self.comm]:
            if each[0] is not None and not each[0].wait_for_any_end(self.deadline_s):
                raise RankLostError(f"{each[0]} is under way, though its connections are closed", rank=-1)
            _quarantine.remove(each)
        with self._lock:
            self.watch.begin_again(number)
            self.comm, self._history, self._failure = comm, b"", None
            self._num_asked = self._num_done = number
            self.num_beginnings += 1
            self._tasks, self._has_ended = queue.SimpleQueue(), threading.Event()
            self.has_pending = self._has_departed = False
            self._quarantined.clear()
            self._quarantined_bytes = 0
            self._thread = BoundedThread(target=self._run, name=f"tiered comm of rank {comm.rank}")
            self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether nothing moves any more."""
        return self._failure is not None

    def end_first_step(self) -> None:
        """Have waits end at the deadline itself from here on."""
        self._factor = 1.0

    @property
    def deadline_s(self) -> float:
        """Seconds that a wait for another rank may last now."""
        return self._factor * self._deadline_s

    def statistics(self) -> CommStatistics:
        """Return the counts so far. Does not block."""
        return CommStatistics(
            self._num_done, self._moved_bytes, self._wait_ranks_s, self._comm_wait_s, self._quarantined_bytes
        )

    def close(self) -> tuple[object, ...]:
        """End the thread after what was asked for, and say goodbye to the other ranks; blocks, idempotent.

        Returns the owners of buffers that other ranks may still write into: their memory must stay mapped
        (``Arena.quarantine``). Goodbyes are not said then, and the process ends by ``os._exit(75)``. An interrupt is
        raised here. After a fork the child's does nothing.
        """
        if not self._process.is_here:
            return ()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._tasks.put(None)
        num_done, end = -1, 0.0
        # Order: not by the thread's own join, after whose interrupt Python 3.11 takes a thread for ended.
        while not self._has_ended.is_set() and (num_done != self._num_done or time.monotonic() < end):
            if num_done != self._num_done:  # the next collective ends in the deadline, unless torch holds it up
                num_done, end = self._num_done, time.monotonic() + 2 * self.deadline_s
            INTERRUPTS.look()
            self._has_ended.wait(_SLICE_S)
        self.has_pending |= not self._has_ended.is_set()
        if not self.has_pending and not self.watch.close(self.deadline_s):
            self.has_pending = True
        if self.has_pending:
            _unended.add(self)
        else:
            self._thread.join()
        return tuple(self._quarantined)

    def __repr__(self) -> str:
        state = self._failure or ("closed" if self._is_closed else "open")
        quarantined = format_bytes(self._quarantined_bytes)
        return f"CommThread(rank {self.comm.rank}, {self._num_done} done, {quarantined} quarantined, {state})"

    # Below: asking

    def _comm_of(self, tensor: torch.Tensor) -> Comm:
        return self.comm if self.on_device is None or tensor.device.type == "cpu" else self.on_device

    def _ask(self, task: _Task) -> Ticket:
        self._process.check("the comm thread")
        with self._lock:
            if self._failure is not None:
                raise copy_of(self._failure) from self._failure
            if self._is_closed:
                raise ClosedError(f"the ranks' comm thread is closed: no {task.text} can be asked for")
            self._num_asked += 1
            size = len(task.payload or b"")
            step = self._history + f"{self._num_asked} {task.text} {size}".encode(errors="backslashreplace")
            self._history = task.digest = hashlib.blake2b(step, digest_size=_DIGEST_NBYTES).digest()
            task.number = self._num_asked
            task.ticket = ticket = Ticket(self, task)
            self._tasks.put(task)
        return ticket

    def _check_on(self, ticket: Ticket) -> None:
        """Raise a cause that the comm thread should have met long ago: it is held up in a call of others."""
        if self.watch.known_s > _GRACE_S:
            self.watch.check(ticket.task.number, ticket.task.text)

    def _count_wait(self, seconds: float) -> None:
        with self._lock:
            self._wait_ranks_s += seconds

    def _end_with_interpreter(self) -> None:
        if not self._process.is_here:
            return
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None and self._failure is None and not self._is_closed:
            self.abandon(words_of(uncaught))
        self.close()
        if self.has_pending:
            self.watch.deliver(_DELIVER_S)
            leave(str(self._failure or "another rank did not answer this one's goodbye"))

    # Below: the thread

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._has_ended.set()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                if self._failure is not None:  # it came when this task had left the queue
                    raise self._failure
                self._do(task)
            except BaseException as error:  # of any kind: a caller waits for the end
                failure = error if isinstance(error, Exception) else DeviceError(f"{task}: {words_of(error)}")
                self._tell_of(failure)
                self._fail(failure, task)
                return
            self._num_done = task.number
            self._words.append(task.text)
            self.watch.note_end_of(task.number)
            assert task.ticket is not None
            # Lifetime: the buffers are the caller's again, as the ticket ends.
            task.begin, task.ready, task.buffers, task.owner = None, None, (), None
            task.ticket._finish(None)

    def _next(self) -> _Task | None:
        """Return the next task; while there is none, tell the other ranks so, once."""
        try:
            return self._tasks.get(timeout=self._after(_PLACE_S))
        except queue.Empty:
            if self._failure is None:
                self.watch.tell_place(self._num_done, f"it has asked for nothing {self._since()}")
        return self._tasks.get()

    def _do(self, task: _Task) -> None:
        """Agree on ``task``, then move its bytes."""
        assert task.ticket is not None
        message = task.digest + task.number.to_bytes(32 - _DIGEST_NBYTES, "little")
        if any(told != message for told in self._told(message, task, "agreement")):
            self._depart(task)
        if task.ready is not None:
            task.after = task.ready()
        if task.payload is not None:
            task.ticket.told = self._told(task.payload, task, "payload")
        if task.begin is not None:
            self._move(task, task.begin)

    def _told(self, message: bytes, task: _Task, stage: str) -> tuple[bytes, ...]:
        return tuple(self._through(lambda: self.comm.tell(message), task, stage).messages)

    def _move(self, task: _Task, begin: Callable[[], Moving]) -> None:
        try:
            moving = self._through(begin, task, "moving bytes")
        except BaseException:
            self._quarantine(task)
            raise
        assert task.ticket is not None
        task.ticket.event = moving.event
        self._moved_bytes += task.buffers[0].numel()

    def _through(self, begin: Callable[[], _M], task: _Task, stage: str) -> _M:
        """Begin a collective, wait for its end, and return it."""
        moving: _M | None = None
        begun = time.monotonic()
        try:
            moving = begin()
            self._wait(moving, task, stage)
        except BaseException as error:
            # Lifetime: a part may be under way where ``begin`` failed, too; and the end of a gloo group waits for it.
            self.has_pending = True
            _quarantine.append((moving, task.buffers, self.comm))
            if isinstance(error, RuntimeError):  # torch's; those of tiered are none
                raise self._cause_of(error, task) from error
            raise
        finally:
            self._comm_wait_s += time.monotonic() - begun
        return moving

    def _wait(self, moving: Moving, task: _Task, stage: str) -> None:
        """Wait for the end of ``moving`` in slices, with a look at the watch in between."""
        begun = time.monotonic()
        has_told = has_logged = False
        while not moving.wait(_SLICE_S):
            waited = time.monotonic() - begun
            if self._failure is not None:
                raise self._failure
            self.watch.check(task.number, task.text)
            if waited > self.deadline_s:
                raise self._late(task, stage, waited)
            if not has_told and waited > self._after(_PLACE_S):
                has_told = True
                self.watch.tell_place(task.number, f"it waits for others in {task} ({stage})")
            if not has_logged and waited > self._after(_LINE_S):
                has_logged = True
                _log.warning("%s", self._line(task, stage, waited))

    # Below: failures

    def _after(self, seconds: float) -> float:
        """Return ``seconds``, or less where the deadline is short."""
        return min(seconds, self._deadline_s * seconds / (2 * _LINE_S))

    def _since(self) -> str:
        return f"since collective {self._num_done}, {self._words[-1]}" if self._words else "so far"

    def _places(self) -> str:
        others = [rank for rank in range(self.comm.world) if rank != self.comm.rank]
        return "; ".join(f"rank {rank}: {self.watch.place_of(rank) or 'no word of it'}" for rank in others)

    def _missing(self, task: _Task) -> tuple[list[int], str]:
        missing = self.watch.missing(task.number)
        return missing, f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing)) or 'that nobody can name'}"

    def _line(self, task: _Task, stage: str, waited: float) -> str:
        _, names = self._missing(task)
        return f"rank {self.comm.rank} has waited {waited:.0f} s for {names} in {task} ({stage}); {self._places()}"

    def _late(self, task: _Task, stage: str, waited: float) -> RankLostError:
        missing, names = self._missing(task)
        rank = missing[0] if missing else -1
        return RankLostError(
            f"{names} did not come to {task} ({stage}) within {waited:.1f} s; {self._places()}; expected all"
            f" {self.comm.world} ranks: one that only needs longer needs a larger rank_deadline",
            rank=rank,
            place=self.watch.place_of(rank),
        )

    def _depart(self, task: _Task) -> None:
        """Raise UsageError with the descriptions of all ranks: all see the same digests, so all come here.

        Where some roll back while others train, it is StepAbandonedError: the step of all is over.
        """
        self._has_departed = True
        size = len(task.payload or b"")
        text = task.text + (f" with {size} bytes told" if size else "")
        mine = text.encode(errors="replace")[:_DESCRIPTION_NBYTES].ljust(_DESCRIPTION_NBYTES, b"\0")
        told = self._told(mine, task, "message of a departure")
        self.watch.note_end_of(task.number)  # order: before a goodbye, which ranks that lack a message may hear first
        texts = [each.rstrip(bytes(1)).decode(errors="ignore") for each in told]
        returning = [rank for rank, each in enumerate(texts) if each.startswith(f"agreement on {ROLLBACK}")]
        if returning:
            raise StepAbandonedError(
                f"rank {returning[0]} has abandoned the step: it called {ROLLBACK}; this rank, {self.comm.rank}, is at"
                f" {task}"
            )
        parts = [f"rank {rank} {each}" for rank, each in enumerate(texts)]
        before = ", ".join(list(self._words)[-_NUM_SHOWN:])
        raise UsageError(
            f"the ranks do different things at collective {task.number}: {'; '.join(parts)}; before it all ranks did:"
            f" {before or 'nothing'}. Expected the same units in the same order on all ranks; no byte was moved"
        )

    def _cause_of(self, error: RuntimeError, task: _Task) -> Exception:
        """Return the error of the watch that explains a failed collective, or else a DeviceError of it."""
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            try:
                self.watch.check(task.number, task.text)
            except (DeviceError, StepAbandonedError) as cause:
                return cause
            time.sleep(0.01)
        return DeviceError(f"{task} failed: {error}; {self._places()}")

    def _tell_of(self, error: Exception) -> None:
        """Tell the other ranks of a failure that they may not know."""
        if isinstance(error, StepAbandonedError) or self._failure is not None:
            return
        if isinstance(error, RankLostError) and error.rank >= 0:
            self.watch.tell_lost(error.rank, str(error))
        elif not self._has_departed:
            self.watch.tell_abandoned(words_of(error))

    def _fail(self, error: Exception, task: _Task | None = None) -> None:
        """End ``task`` and all that were asked for after it."""
        with self._lock:
            self._failure = self._failure or error
            tasks = [task]
            is_closing = False
            with contextlib.suppress(queue.Empty):
                while True:
                    tasks.append(self._tasks.get_nowait())
                    is_closing |= tasks[-1] is None
            if is_closing:
                self._tasks.put(None)
        for each in tasks:
            if each is not None and each.ticket is not None:
                each.ticket._finish(self._failure)

    def _quarantine(self, task: _Task) -> None:
        """Have the buffers of ``task`` never used again."""
        assert task.ticket is not None
        task.ticket.is_quarantined = True
        self._quarantined.append(task.buffers if task.owner is None else task.owner)
        self._quarantined_bytes += sum(buffer.numel() for buffer in task.buffers)
