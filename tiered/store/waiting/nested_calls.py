"""NestedCalls: calls of a store within another call of it, in the same thread."""

from __future__ import annotations

from tiered.bytes.condition import Condition
from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.errors import UsageError

__all__ = ["NestedCalls"]


class NestedCalls:
    """Refuses a call that a signal handler, ``__del__`` or weakref callback makes within another call of the store.

    Such a call would wait for its own thread, for ever. It is recognised by its thread, which holds the store's lock or
    is in a critical section; tiered's own threads always are. The check costs less than taking a lock.
    """

    __slots__ = ("_is_held_here",)

    def __init__(self, condition: Condition) -> None:
        self._is_held_here = condition.is_held_here

    def is_inside(self) -> bool:
        """Whether the calling thread is within a call of the store, so that another could never end."""
        return self._is_held_here() or CRITICAL_SECTION.is_inside()

    def refuse(self) -> None:
        """Raise UsageError where the calling thread is within a call of the store."""
        if self._is_held_here() or CRITICAL_SECTION.is_inside():
            raise UsageError(
                "the store was called from a signal handler or a finalizer (__del__, a weakref callback) that "
                "interrupted a call of it in this very thread, or runs in one of tiered's own; only set a flag there "
                "(threading.Event), and commit or drop keys in the loop that looks at it"
            )
