"""FreedObjects: facts about objects, to be read once the objects have been freed."""

from __future__ import annotations

import queue
import weakref
from typing import Generic, TypeVar

__all__ = ["FreedObjects"]

_T = TypeVar("_T")


class FreedObjects(Generic[_T]):
    """Facts about objects, handed out once their object has been freed. Thread-safe.

    An object may be freed between any two lines, in any thread and inside a garbage collection. No line of Python runs
    then (``weakref.finalize`` runs some, which a Ctrl-C may end), and no lock is taken: the interpreter itself puts the
    weak reference into a queue.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[weakref.ref[object]] = queue.SimpleQueue()
        # By id; a weak reference that is gone itself reports nothing.
        self._watches: dict[int, tuple[weakref.ref[object], _T]] = {}

    def __bool__(self) -> bool:
        """Whether an object that was watched has been freed since."""
        return not self._queue.empty()

    def watch(self, watched: object, facts: _T) -> None:
        """Have ``next_freed`` return ``facts`` once ``watched`` has been freed. They must not refer to it."""
        watch = weakref.ref(watched, self._queue.put)
        self._watches[id(watch)] = watch, facts

    def next_freed(self) -> _T | None:
        """Return the facts about the next object that was freed, None if there is none."""
        try:
            watch = self._queue.get_nowait()
        except queue.Empty:
            return None
        return self._watches.pop(id(watch))[1]
