"""CallMark: what stays where an exception from outside cut a call short in the middle of its changes."""

from __future__ import annotations

import sys
from threading import get_ident
from types import FrameType, TracebackType

from tiered.bytes.interrupt import Interrupts
from tiered.errors import TieredError, UsageError

__all__ = ["CallMark"]

_ACTS = (Interrupts._act.__code__, Interrupts._note.__code__)  # which run the actions of signals
_OWN = sys.stdlib_module_names | {"tiered", "torch"}  # packages whose code the calls of a store run


class CallMark:
    """``with mark:`` from before the first change of a call to after its last. Nests, in any thread.

    A call puts everything right before it raises an error of its own. Any other exception (a time limit that another
    thread sets, a signal's that is not among ``INTERRUPTS``) may come between two lines, and half of a change is done.
    Then the mark stays: the store refuses all but ``close``, and no generation is committed any more.
    """

    __slots__ = ("reason",)

    __enter__ = staticmethod(get_ident)  # no line of Python, before which an exception could come

    def __init__(self) -> None:
        self.reason = ""  # for which it stays

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Have the mark stay where what was raised, or what that came from, was not meant, and raise the latter."""
        stranger = _stranger(error)
        if stranger is not None:
            self.reason = self.reason or repr(stranger)
            if stranger is not error:  # what follows from half of a change tells the caller nothing
                raise stranger

    def refuse(self) -> None:
        """Raise UsageError where the mark stays."""
        if self.reason:
            raise self.refusal() or AssertionError

    def refusal(self) -> UsageError | None:
        """Return what every call must raise where the mark stays."""
        if not self.reason:
            return None
        return UsageError(
            f"a call of the store was cut short by {self.reason}, which came in the middle of its changes. Nothing can "
            "be done with this store but close() it; opened again it holds the last committed generation"
        )


def _stranger(error: BaseException | None) -> BaseException | None:
    """Return ``error``, or that in whose handling it came, if the code that runs does not expect that."""
    before: list[FrameType] = []  # that the error which came in its handling has passed
    while error is not None:
        frames: list[FrameType] = []
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in _ACTS:  # an action of a signal, where a call may be left
                return None
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        if before and frames[:1] and frames[0] not in before:  # the caller handles it, further out
            return None
        if not isinstance(error, TieredError) and not _is_meant(error, frames):
            return error
        cause = error.__cause__
        if cause is not None:  # handled on purpose
            return None if isinstance(cause, TieredError) or _is_known(cause) else cause
        error, before = error.__context__, frames
    return None


def _is_meant(error: BaseException, frames: list[FrameType]) -> bool:
    """Whether code of our calls, such as torch's, has raised it, and no handler or finalizer."""
    if isinstance(error, MemoryError):  # where that comes, calls give back what they have, as for errors of their own
        return True
    is_of_the_system = isinstance(error, RecursionError | OSError) or type(error) is Exception
    where = frames[-1].f_globals.get("__name__", "") if frames else "tiered"
    return _is_known(error) and not is_of_the_system and _is_own(where)


def _is_known(error: BaseException) -> bool:
    return isinstance(error, Exception) and _is_own(type(error).__module__)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] in _OWN
