"""CallMark: what stays where an exception from outside cut a call short in the middle of its changes."""

from __future__ import annotations

import opcode
import sys
from threading import get_ident
from types import FrameType, TracebackType

from tiered.bytes.interrupt import Interrupts
from tiered.errors import TieredError, UsageError

__all__ = ["CallMark"]

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


def _stranger(error: BaseException | None) -> BaseException | None:
    """Return the first of ``error`` and those in whose handling it came that the code which runs does not expect."""
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
        if not isinstance(error, TieredError) and not _is_meant(error, frames, is_raised=is_raised):
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
