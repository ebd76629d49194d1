"""Producers: threads that make bytes of keys, behind calls that have returned.

The store asks here when a caller must wait for them. It knows nothing of the bytes that they make.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from tiered.store.waiting.calling_thread import NestedCalls

__all__ = ["Producer", "Producers"]


class Producer(Protocol):
    """One of them. Called without the store's lock; the methods that wait may serve the thread they wait for."""

    nested_calls: NestedCalls  # refuses calls that interrupt its own

    @property
    def is_busy(self) -> bool:
        """Whether something is pending."""

    def is_this_thread(self) -> bool:
        """Whether the caller's is the thread that makes the bytes."""

    def finish(self, key: str) -> None:
        """Wait until the pending bytes of ``key`` are made or have failed; blocks."""

    def finish_all(self) -> None:
        """Wait until nothing is pending; blocks. Raises the error of pending work that failed."""

    def pending_keys(self) -> Collection[str]:
        """Return the keys with pending bytes."""

    def when_done(self, conclude: Callable[[BaseException | None], None]) -> bool:
        """Have ``conclude`` called, once, by the thread that makes the bytes, when nothing is pending any more.

        It gets what that failed of, if it did; it may raise, which is a failure like any other. Until it returns, it is
        pending itself. Nothing new becomes pending meanwhile. Returns False, and calls nothing, where nothing is
        pending.
        """


class Producers:
    """The producers of one store, asked in the order in which they were added."""

    def __init__(self) -> None:
        self._producers: list[Producer] = []

    def add(self, producer: Producer) -> None:
        """Ask ``producer`` from now on."""
        self._producers.append(producer)

    def settled(self, key: str) -> str:
        """Return ``key`` once no producer works with it. Raises TypeError for anything but a str."""
        if not isinstance(key, str):
            raise TypeError(f"expected a str as the key, got {type(key).__name__}")
        for producer in self._producers:
            producer.finish(key)
        return key

    def finish_all(self) -> None:
        """Wait until nothing is pending. Raises the error of pending work that failed."""
        for producer in self._producers:
            producer.finish_all()

    def is_inside(self) -> bool:
        """Whether the calling thread is inside of one, as a signal handler may be."""
        return any(producer.nested_calls.is_inside() for producer in self._producers)

    def refuse_nested_calls(self) -> None:
        """Raise UsageError where the calling thread is inside of one, as a signal handler may be."""
        for producer in self._producers:
            producer.nested_calls.refuse()

    def busy_one(self) -> Producer | None:
        """Return the one for whom something is pending; None where it is none, or more than one."""
        busy = [producer for producer in self._producers if producer.is_busy]
        return busy[0] if len(busy) == 1 else None
