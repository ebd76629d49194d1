"""Deaths: what is to be known of objects when they have died."""

from __future__ import annotations

import queue
import weakref
from typing import Generic, TypeVar

__all__ = ["Deaths"]

_T = TypeVar("_T")


class Deaths(Generic[_T]):
    """Facts of objects, handed out once their object has died. Thread-safe.

    An object may die between any two lines, in any thread and inside of a garbage collection. No line of Python runs
    then (as it does for ``weakref.finalize``, which a Ctrl-C ends for good before it has done its work), and no lock is
    taken: the interpreter itself puts the reference into a queue.
    """

    def __init__(self) -> None:
        self._dead: queue.SimpleQueue[weakref.ref[object]] = queue.SimpleQueue()
        # By id; a reference that is dead itself reports nothing.
        self._watches: dict[int, tuple[weakref.ref[object], _T]] = {}

    def __bool__(self) -> bool:
        """Whether some of what was watched has died since."""
        return not self._dead.empty()

    def watch(self, watched: object, facts: _T) -> None:
        """Have ``next`` return ``facts`` once ``watched`` has died. They must not refer to it."""
        watch = weakref.ref(watched, self._dead.put)
        self._watches[id(watch)] = watch, facts

    def next(self) -> _T | None:
        """Return the facts of the next object that has died, None if there is none."""
        try:
            watch = self._dead.get_nowait()
        except queue.Empty:
            return None
        return self._watches.pop(id(watch))[1]
