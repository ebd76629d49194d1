"""The choice of the keys that are evicted. residents.py evicts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

__all__ = ["EvictionPolicy", "LeastRecentlyUsed"]


class EvictionPolicy(Protocol):
    """Chooses the keys to evict; it sees names and sizes, never bytes."""

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        """Return the key to evict among ``evictable`` (name -> bytes, least recently used first).

        ``incoming`` is the key that a prefetch wants room for, and None means that it should not have it. It is None
        for a caller that waits: then there must be an answer. Called under the store's lock: never call the store.
        """

    def is_worth_waiting(self, victim: str, leaving: Iterable[str]) -> bool:
        """Return whether to keep ``victim``, and wait for one of ``leaving``, which can be evicted once it is written.

        As ``victim``, called under the store's lock.
        """


class LeastRecentlyUsed:
    """The default policy: the key not used for longest goes first, also for prefetches, and at once."""

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        return next(iter(evictable), None)

    def is_worth_waiting(self, victim: str, leaving: Iterable[str]) -> bool:
        return False
