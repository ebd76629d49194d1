"""DeferredSeal: the seal of a commit that waits for a producer, a thread that still makes bytes of keys.

The store asks the producers here when a caller must wait for them. It knows nothing of their bytes. commit.py seals.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Protocol

from tiered.bytes.condition import Condition
from tiered.store.waiting.calling_thread import NestedCalls

__all__ = ["DeferredSeal", "Producer", "Producers"]


class Producer(Protocol):
    """A thread that makes bytes of keys, behind calls that have returned. Called without the store's lock.

    The methods that wait may serve the thread they wait for.
    """

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


# -- deferred seal -----------------------------------------------------------------------------------------------------


_log = logging.getLogger("tiered")


class DeferredSeal:
    """The one seal of a store that may be pending; the lowest part of its working set, under the same lock.

    The invariant: *from the call of commit to its seal only the producer's thread changes what a commit contains*. The
    generation then holds the state of the call, and the bytes that the producer makes of it. Other threads ask
    ``must_await_seal``, under the lock where the answer must hold, and call ``Residency.await_seal`` first. The
    producer reports its own failures.
    """

    condition: Condition  # the one lock of the store

    def __init__(self) -> None:
        self._producer: Producer | None = None  # None: no seal is pending
        self._deferred_generation = 0
        self._thread = 0  # that called commit
        # Lifetime: weakly, for a producer may lead to a store that is garbage.
        self._failed: weakref.ref[Producer] | None = None  # it has a failure, which ``await_seal`` has not raised

    @property
    def must_await_seal(self) -> bool:
        """Whether the caller's thread must not change the contents of a commit now."""
        producer = self._producer
        return producer is not None and not producer.is_this_thread()

    def announce_seal(self, producer: Producer, generation: int) -> None:
        """Under the lock: the seal of ``generation`` is pending from now on; ``hand_over_seal`` must follow."""
        assert self._producer is None
        self._producer, self._deferred_generation, self._thread = producer, generation, threading.get_ident()

    def hand_over_seal(self, seal: Callable[[], object], call_off: Callable[[BaseException], object]) -> bool:
        """Have the producer call ``seal`` at the end of its pending work; return False where it has none.

        ``call_off(error)`` is called where that work fails, or the seal does.
        """
        producer = self._producer
        assert producer is not None
        is_taken = False
        try:
            is_taken = producer.when_done(functools.partial(self._conclude, seal, call_off))
        finally:
            if not is_taken:
                self._end_seal()
        return is_taken

    def _conclude(
        self, seal: Callable[[], object], call_off: Callable[[BaseException], object], failure: BaseException | None
    ) -> None:
        """In the producer's thread, at the end of its pending work: seal, unless that work failed."""
        try:
            if failure is None:
                seal()
        except BaseException as error:
            failure = error
            raise
        finally:
            if failure is not None:
                what = f"generation {self._deferred_generation}, whose commit had returned, was not sealed"
                failure.add_note(f"{what}: the one before is as it was")
                _log.error("%s: %s", what, failure)
                assert self._producer is not None
                self._failed = weakref.ref(self._producer)
            self._end_seal()
            if failure is not None:
                call_off(failure)  # order: this store's own callers go on

    def _end_seal(self) -> None:
        with self.condition:
            self._producer = None
            self.condition.notify_all()
