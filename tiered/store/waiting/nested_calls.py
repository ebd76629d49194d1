"""NestedCalls: calls of a store from within a call of it, in the same thread."""

from __future__ import annotations

from tiered.bytes.condition import Condition
from tiered.bytes.inside import HERE
from tiered.errors import UsageError

__all__ = ["NestedCalls"]


class NestedCalls:
    """Refuses what a signal handler, ``__del__`` or weakref callback asks of a store that its thread is inside of.

    It would wait for its own thread, for ever. That is told by who holds the store's lock, or is inside of a part that
    has locks of its own; in one of tiered's own threads it is so at any time. Costs less than taking a lock.
    """

    __slots__ = ("_is_held_here",)

    def __init__(self, condition: Condition) -> None:
        self._is_held_here = condition.is_held_here

    def is_inside(self) -> bool:
        """Whether the call that is being made could never end."""
        return self._is_held_here() or HERE.is_inside()

    def refuse(self) -> None:
        """Raise UsageError where the call that is being made could never end."""
        if self._is_held_here() or HERE.is_inside():
            raise UsageError(
                "the store was called from a signal handler or a finalizer (__del__, a weakref callback) that "
                "interrupted a call of it in this very thread, or runs in one of tiered's own; only set a flag there "
                "(threading.Event), and commit or drop keys in the loop that looks at it"
            )
