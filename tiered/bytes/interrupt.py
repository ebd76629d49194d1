"""Interrupts: the action of a signal, such as Ctrl-C's, waits for the end of the call of tiered that it strikes.

Between any two lines of Python such an action may run and raise. No code that changes several facts can undo all of
what it has done at each of them; so none runs there. While a store is open, an action of ours stands before that of
the program and looks for frames of ours on the stack. Where there is one, the program's action runs as the outermost
of them returns, or where the call waits. A call that no signal strikes pays nothing.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps, which makes enums of numbers and costs ten times
import opcode
import sys
import threading
import weakref
from collections.abc import Callable
from signal import SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from threading import get_ident
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

__all__ = ["INTERRUPTS", "Acquirable", "Interrupts", "outside"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NUMBERS = tuple(map(int, (SIGINT, SIGALRM, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2)))  # what programs have actions for
_ROOMS = ("tiered.bytes.", "tiered.store.", "tiered.tiers.", "tiered.ranks.", "tiered.zero.")  # whose frames are ours
_ENTRIES = {"__enter__", "enter_context"}  # whose caller must know that a block has begun
_YIELD = opcode.opmap["YIELD_VALUE"]
_RETURNS = {_YIELD, *(opcode.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in opcode.opmap)}


class Acquirable(Protocol):
    """A lock, or another object that threads wait for in the same way."""

    def acquire(self, *, timeout: float = -1) -> bool: ...


def outside(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call code of the program's from within a call of ours: there, actions of signals run at once, and may raise."""
    INTERRUPTS.look()
    return _run(function, *args, **kwargs)


def _run(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run code of the program's: the mark on the stack from which on frames of ours do not count."""
    return function(*args, **kwargs)


class _Deferred:
    """The action of ours for one signal, before ``action`` of the program's."""

    __slots__ = ("action", "number")

    def __init__(self, number: int, action: Callable[[int, FrameType | None], Any]) -> None:
        self.number = number
        self.action = action

    def __call__(self, number: int, frame: FrameType | None) -> None:
        INTERRUPTS._note(self, frame)


class Interrupts:
    """The actions that wait for the end of a call of ours. There is one object, INTERRUPTS.

    ``signal.getsignal`` shows an action of ours while an object that has begun this lives, for each signal whose action
    was a function of Python, KeyboardInterrupt's or the program's own. One that the program sets later has ours before
    it from the main thread's next call of a store on. In other threads, in which Python runs no action, nothing waits.
    """

    __slots__ = ("_noted", "_users", "_watch", "thread")

    def __init__(self) -> None:
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._noted: dict[_Deferred, None] = {}  # in the order in which the signals came
        self._watch: _Watch | None = None
        self.thread = threading.main_thread().ident

    def begin(self, user: object) -> None:
        """Have actions wait for the end of calls of ours as long as ``user`` lives, or until its ``end``."""
        self._users.add(user)
        self.stand_before_actions()

    def end(self, user: object) -> None:
        """Give the actions back to the interpreter once no user is left."""
        self._users.discard(user)
        if self._users or get_ident() != self.thread:
            return
        for number in _NUMBERS:
            ours = action = _signal.getsignal(number)
            while isinstance(action, _Deferred):
                action = action.action
            if action is not ours:
                _signal.signal(number, action)  # order: one that comes from here on runs at once

    def stand_before_actions(self) -> None:
        """Put ours before an action that the program has set since: at the start of each call, and before a wait."""
        if get_ident() != self.thread or not self._users:
            return
        for number in _NUMBERS:
            action = _signal.getsignal(number)
            if action is not None and action.__class__ not in (int, _Deferred):
                _signal.signal(number, _Deferred(number, action))

    def look(self) -> None:
        """Run the actions that wait, which may raise: for calls that take long, where they can be left."""
        if self._noted and get_ident() == self.thread:
            self._act(_program_of(sys._getframe()))

    def acquire(self, lock: Acquirable, timeout_s: float | None = None) -> bool:
        """Acquire ``lock`` as itself does; in the main thread, the action of a signal may raise instead."""
        self.stand_before_actions()
        self.look()  # order: a signal that comes from here on acts at once
        return lock.acquire(timeout=-1 if timeout_s is None else timeout_s)

    def _note(self, deferred: _Deferred, frame: FrameType | None) -> None:
        """Run the action of a signal that struck ``frame``, now or at the end of the call of ours."""
        self._noted[deferred] = None
        call = _call_of_ours(frame)
        if call is None or (frame is not None and frame.f_code is Interrupts.acquire.__code__):
            self._act(_program_of(frame))
        elif self._watch is None or self._watch.call is not call:
            self._watch = _Watch(call)

    def _act(self, frame: FrameType | None) -> None:
        """Run what was noted, each once, all of it even where one raises; ``frame`` is the program's."""
        deferred = next(iter(self._noted))
        del self._noted[deferred]
        try:
            _run(deferred.action, deferred.number, frame)
        finally:
            if self._noted:
                self._act(frame)

    def _returned(self, frame: FrameType | None) -> None:
        """Act at the end of a call of ours, which the program's ``frame`` made."""
        self._watch = None
        if self._noted:
            self._act(frame)


INTERRUPTS = Interrupts()


def _call_of_ours(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame of ours in which ``frame`` runs; None where it is the program's own code."""
    found, is_ours = None, True
    while frame is not None and frame.f_code is not _run.__code__:
        module = str(frame.f_globals.get("__name__"))
        # Those of contextlib between a block and its user must end, too; but for "inner", which runs what it decorates.
        is_ours = module.startswith(_ROOMS) or (is_ours and module == "contextlib" and frame.f_code.co_name != "inner")
        found = frame if is_ours else found
        frame = frame.f_back
    return found


def _program_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the program in which ``frame`` runs, itself or the caller of ours."""
    call = _call_of_ours(frame)
    return frame if call is None else call.f_back


def _pass_over(frame: FrameType, event: str, argument: Any) -> None:
    """Trace nothing in new frames."""


class _Watch:
    """Is told by the interpreter, as a debugger is, when ``call`` returns, and runs the actions then.

    A call that returns a value raises instead. Where it has begun a block or yielded, its caller must know of that:
    there the actions run in the caller, at its next instruction. A debugger or the measurement of coverage keeps the
    place that it has; then a profiler's is taken for the rest of the call.
    """

    __slots__ = ("_error", "_is_in_caller", "_profile", "_traces", "call")

    def __init__(self, call: FrameType) -> None:
        self.call = call
        self._error: BaseException | None = None  # the last one in the call
        self._is_in_caller = False
        self._traces = sys.gettrace() in (None, _pass_over)
        self._profile = sys.getprofile()
        if self._traces:
            call.f_trace, call.f_trace_lines = self, False
            sys.settrace(_pass_over)
        else:
            sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Be told of an event: when tracing in the call and its caller, else in all frames."""
        if frame is self.call:
            if event == "exception":
                self._error = argument[1]
            if event != "return":
                return
            instruction = frame.f_code.co_code[frame.f_lasti]
            if instruction in _RETURNS:
                self._error = None
                if (instruction == _YIELD or frame.f_code.co_name in _ENTRIES) and frame.f_back is not None:
                    self._go_on_in(frame.f_back)
                    return
        elif not self._is_in_caller:
            return
        self._end()
        try:
            INTERRUPTS._returned(self.call.f_back)
        except BaseException as raised:
            if raised.__context__ is None and raised is not self._error:
                raised.__context__ = self._error
            raise

    def _go_on_in(self, caller: FrameType) -> None:
        self._is_in_caller = True
        if self._traces:
            caller.f_trace, caller.f_trace_opcodes = self, True
            sys.settrace(_pass_over)  # order: the interpreter looks for frames that are traced by instruction here

    def _end(self) -> None:
        for frame in (self.call, self.call.f_back):
            if frame is not None and frame.f_trace is self:
                frame.f_trace, frame.f_trace_opcodes = None, False
        if not self._traces:
            sys.setprofile(self._profile if callable(self._profile) else None)
        elif sys.gettrace() is _pass_over:
            sys.settrace(None)
