"""Refusals: which calls a store does not serve. Every public call asks here once, before anything else.

CallMark is one reason: it stays where an exception from outside cut a call short in the middle of its changes.
"""

from __future__ import annotations

import opcode
import sys
import traceback
from enum import Enum, auto
from threading import get_ident
from types import FrameType, TracebackType

from tiered.bytes.condition import Condition
from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.bytes.exit_and_fork import after_fork, this_process
from tiered.bytes.interrupt import INTERRUPTS, Interrupts
from tiered.errors import CapacityError, ClosedError, DeviceError, TieredError, UsageError
from tiered.store.waiting.calling_thread import NestedCalls, this_thread

__all__ = ["CallMark", "Refusals", "Service", "is_of_an_action"]

_ACTS = (Interrupts._act.__code__, Interrupts._note.__code__)  # which run the actions of signals
_RAISE = opcode.opmap["RAISE_VARARGS"]
_OWN = sys.stdlib_module_names | {"tiered", "torch"}  # packages whose code the calls of a store run


class CallMark:
    """``with mark:`` from before the first change of a call to after its last. Nests, in any thread.

    A call puts everything right before it raises an error of its own. Any other exception (a time limit that another
    thread sets, a signal's that waits for nothing, MemoryError) may come between two lines, and half of a
    change is done. Then the mark stays: the store refuses all but ``close``, and no generation is committed any more.
    """

    __slots__ = ("reason",)

    __enter__ = staticmethod(get_ident)  # no line of Python, before which an exception could come

    def __init__(self) -> None:
        self.reason = ""  # for which it stays

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have the mark stay where what was raised, or what that came from, was not meant, and raise the latter."""
        if error is None:
            return
        stranger = _stranger(error)
        if stranger is not None:
            self.reason = repr(stranger)  # the outermost block knows it best
            if stranger is not error:  # what follows from half of a change tells the caller nothing
                context = stranger.__context__
                try:
                    raise stranger
                finally:
                    stranger.__context__ = context  # order: or an outer block would take it for the later one

    def refuse(self) -> None:
        """Raise UsageError where the mark stays."""
        refusal = self.refusal()
        if refusal is not None:
            raise refusal

    def refusal(self) -> UsageError | None:
        """Return what every call must raise where the mark stays."""
        if not self.reason:
            return None
        return UsageError(
            f"a call of the store was cut short by {self.reason}, which came in the middle of its changes. Nothing can "
            "be done with this store but close() it; opened again it holds the last committed generation"
        )


def is_of_an_action(error: BaseException) -> bool:
    """Whether the action of a signal raised ``error``: its frames say so, which an error that is kept may have lost."""
    return any(frame.f_code in _ACTS for frame, _ in traceback.walk_tb(error.__traceback__))


def _stranger(error: BaseException | None) -> BaseException | None:
    """Return the first of ``error`` and those in whose handling it came that the code which runs does not expect.

    A type that is neither Python's nor torch's never follows from half of a change. One that came while a failed lookup
    was handled (``except KeyError``) is what was raised from outside, and the lookup's error is not.
    """
    before: list[FrameType] = []  # that the error which came in its handling has passed
    found: BaseException | None = None
    while error is not None:
        frames: list[FrameType] = []
        trace, is_raised = error.__traceback__, True
        while trace is not None:
            if trace.tb_frame.f_code in _ACTS:  # an action of a signal, where a call may be left
                return found
            frames.append(trace.tb_frame)
            is_raised = trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE
            trace = trace.tb_next
        if before and (not frames or frames[0] not in before):  # the caller handles it, further out
            return found
        is_later = found is None or _is_known(found) or not _is_known(error)
        if is_later and not isinstance(error, TieredError) and not _is_meant(error, frames, is_raised=is_raised):
            found = error
        cause = error.__cause__
        if cause is not None:  # handled on purpose
            return found if isinstance(cause, TieredError) or _is_known(cause) else cause
        error, before = error.__context__, frames
    return found


def _is_meant(error: BaseException, frames: list[FrameType], *, is_raised: bool) -> bool:
    """Whether a line of our calls' code raises it, or a function of torch that such a line calls: RuntimeError alone.

    An exception that another thread raises seems to come from any line that calls a function, or begins one.
    """
    if type(error) is Exception or isinstance(error, MemoryError | RecursionError | OSError):
        return False
    where = frames[-1].f_globals.get("__name__", "") if frames else "tiered"
    return _is_known(error) and _is_own(where) and (is_raised or isinstance(error, RuntimeError))


def _is_known(error: BaseException) -> bool:
    return isinstance(error, Exception) and _is_own(type(error).__module__)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in _OWN


# -- refusals ----------------------------------------------------------------------------------------------------------


class Service(Enum):
    """The service that a store gives to calls.

    SERVES -> FAILED [Refusals.fail, in the commit's thread], CLOSED [Store.close], LATE [the end of the process];
    FAILED -> CLOSED, LATE; LATE -> CLOSED; any -> FORKED [after a fork, in the child].
    """

    SERVES = auto()
    FAILED = auto()  # a commit failed; only close() is left
    CLOSED = auto()
    LATE = auto()  # the process ended first: the devices are closed, and nothing can be committed any more
    FORKED = auto()  # this is a child of the store's process


class Refusals:
    """The one refusal of calls that cannot be served. It refers to no store, and to nothing of the store's user."""

    __slots__ = (
        "__weakref__", "_failure", "_is_held_here", "_process", "is_read_only", "mark", "nested_calls", "service",
        "told",
    )  # fmt: skip

    def __init__(self, condition: Condition, mark: CallMark, *, is_read_only: bool = False) -> None:
        """``condition`` is the store's one lock; ``mark`` stays where a call was cut short within its changes."""
        self.service = Service.SERVES
        self.mark = mark
        self.nested_calls = NestedCalls(condition)
        self.told: set[int] = set()  # threads, by number, that know of the failure
        self._failure: tuple[Exception, str] | None = None
        self._is_held_here = condition.is_held_here
        self.is_read_only = is_read_only
        self._process = this_process()
        after_fork(self, Refusals._note_fork)

    def check(self, *, writing: bool = False) -> None:
        """Raise where a call, one that writes if ``writing``, cannot be served. Not for callers under the lock.

        Actions of signals that the program has set since the last call wait for the end of this one.
        """
        if get_ident() == INTERRUPTS.thread:
            INTERRUPTS.stand_before_actions()
        if self._is_held_here() or CRITICAL_SECTION.is_inside():
            self.nested_calls.refuse()
        if self.service is not Service.SERVES or self.mark.reason:
            self.refuse()
        if writing and self.is_read_only:
            raise UsageError('the store was opened with mode="r": nothing can be written; open it with mode="a"')

    def refuse(self) -> None:
        """Raise where the store serves no calls any more; also under the lock, after each wait."""
        if self.service is Service.SERVES and not self.mark.reason:
            return
        if self.service is Service.FORKED:
            self._process.check("the store", "pass worker processes plain tensors, or open a store of their own there")
        if self.service is Service.CLOSED:
            raise ClosedError("the store is closed")
        if self.service is Service.LATE:
            raise self.too_late()
        self.told.add(this_thread())
        self.mark.refuse()
        raise self._failed()

    def fail(self, error: Exception, generation: str) -> None:
        """Serve no more calls: ``generation`` says which one is lost by ``error``, and how far it came."""
        self._failure = error, generation
        if self.service is Service.SERVES:
            self.service = Service.FAILED

    @property
    def has_failed(self) -> bool:
        """Whether a commit has failed."""
        return self._failure is not None

    def _failed(self) -> TieredError:
        assert self._failure is not None
        error, generation = self._failure
        refusal = (CapacityError if isinstance(error, CapacityError) else DeviceError)(
            f"{generation}: {error}. Nothing can be done with this store but close() it; opened again it holds the last"
            " committed generation, with its digests checked"
        )
        refusal.__cause__ = error
        return refusal

    @staticmethod
    def too_late() -> ClosedError:
        """Return the error of a call that comes when the process is ending."""
        return ClosedError(
            "the process is ending, and the threads that move a store's bytes have ended before any atexit function; "
            "close the store before: with tiered.Store(...) as store, or try and finally around the program, where "
            "threads that use it are joined"
        )

    def _note_fork(self) -> None:
        self.service = Service.FORKED
