"""Refusals: which calls a store does not serve. Every public call asks here once, before anything else."""

from __future__ import annotations

from enum import Enum, auto

from tiered.bytes.condition import Condition
from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.bytes.exit_and_fork import after_fork, this_process
from tiered.errors import CapacityError, ClosedError, DeviceError, TieredError, UsageError
from tiered.store.waiting.calling_thread import NestedCalls, this_thread
from tiered.store.waiting.mark import CallMark

__all__ = ["Refusals", "Service"]


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
        "__weakref__", "_failure", "_is_held_here", "_is_read_only", "_process", "mark", "nested_calls", "service",
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
        self._is_read_only = is_read_only
        self._process = this_process()
        after_fork(self, Refusals._note_fork)

    def check(self, *, writing: bool = False) -> None:
        """Raise where a call, one that writes if ``writing``, cannot be served. Not for callers under the lock."""
        if self._is_held_here() or CRITICAL_SECTION.is_inside():
            self.nested_calls.refuse()
        if self.service is not Service.SERVES or self.mark.reason:
            self.refuse()
        if writing and self._is_read_only:
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
