"""Actions that objects need when the process ends or forks, and the process that an object belongs to.

The interpreter's own lists of such actions only grow. Each list here is one entry there, and forgets objects that die.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from tiered.errors import UsageError

__all__ = ["Process", "after_fork", "at_exit", "before_fork", "this_process"]

_T = TypeVar("_T")
_log = logging.getLogger("tiered")


class _Actions:
    """Actions on objects, in the order in which they were added."""

    def __init__(self, *, newest_first: bool) -> None:
        self._num_watches = itertools.count()
        self._newest_first = newest_first
        self._numbers = itertools.count()
        self._actions: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}

    def add(self, item: _T, action: Callable[[_T], object]) -> None:
        number = next(self._numbers)
        forget = functools.partial(self._actions.pop, number)  # no line of Python: an interrupt there would be lost
        self._actions[number] = (weakref.ref(item, forget), action)

    def watch(self, register: Callable[[Callable[[], None]], object]) -> None:
        """Have the interpreter call ``run``, once."""
        if next(self._num_watches) == 0:  # atomic; and no lock, which a fork would leave held in the child for ever
            register(self.run)

    def run(self) -> None:
        for number in sorted(self._actions, reverse=self._newest_first):
            reference, action = self._actions.get(number, (None, None))
            item = None if reference is None else reference()
            if item is None or action is None:
                continue
            try:
                action(item)
            except Exception:  # the other actions must run, too
                _log.exception("%r could not be ended", item)


_at_exit = _Actions(newest_first=True)
_after_fork = _Actions(newest_first=False)
_before_fork = _Actions(newest_first=False)


def at_exit(item: _T, action: Callable[[_T], object]) -> None:
    """Have ``action(item)`` called when the interpreter ends and ``item`` lives, the last added first.

    The actions run before threads are joined, which those of ``atexit`` do not: end threads of tiered's own here.
    """
    _at_exit.add(item, action)
    _at_exit.watch(getattr(threading, "_register_atexit", atexit.register))


def after_fork(item: _T, action: Callable[[_T], object]) -> None:
    """Have ``action(item)`` called in every child that is forked while ``item`` lives, the first added first."""
    _after_fork.add(item, action)


def before_fork(item: _T, action: Callable[[_T], object]) -> None:
    """Have ``action(item)`` called before each fork while ``item`` lives, the first added first."""
    _before_fork.add(item, action)
    _before_fork.watch(lambda run: os.register_at_fork(before=run))


class Process:
    """A process, kept by the objects that it has made: a child that was forked from it must leave them alone."""

    __slots__ = ("is_here", "pid")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_here = True  # False in a forked child

    def check(self, subject: str, next_step: str = "open a store of its own in this process") -> None:
        """Raise UsageError in a forked child, for a call of ``subject``."""
        if not self.is_here:
            raise UsageError(
                f"{subject} belongs to process {self.pid} and cannot be used in its fork {os.getpid()}; {next_step}"
            )


_process = Process()


def this_process() -> Process:
    """Return the process that runs, the same object each time."""
    return _process


def _begin_in_child() -> None:
    global _process
    _process.is_here = False  # order: before any action looks at it
    _process = Process()
    _after_fork.run()


os.register_at_fork(after_in_child=_begin_in_child)
