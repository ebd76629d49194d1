"""Producers: threads that make bytes of keys, behind calls that have returned; and the seal that waits for them.

The store asks here when a caller must wait for them. It knows nothing of the bytes that they make. commit.py seals.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from tiered.store.records.records import Records
from tiered.store.waiting.calling_thread import NestedCalls
from tiered.store.waiting.deadline import Deadline

__all__ = ["DeferredSeal", "Producer", "Producers"]


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


# -- deferred seal -----------------------------------------------------------------------------------------------------


_log = logging.getLogger("tiered")


class DeferredSeal:
    """The one seal of a store that may be pending.

    The invariant: *from the call of commit to its seal only the producer's thread changes what a commit contains*. The
    generation then holds the state of the call, and the bytes that the producer makes of it. Other threads ask
    ``is_closed``, under the store's lock where the answer must hold, and call ``settle`` first. The producer reports
    its own failures.
    """

    def __init__(
        self,
        records: Records,
        condition: threading.Condition,
        progress: Callable[[], object],
        *,
        deadline_s: float,
    ) -> None:
        """``progress`` returns a value that changes as long as a producer comes closer to its end."""
        self._records = records
        self._condition = condition
        self._progress = progress
        self._deadline_s = deadline_s
        self._producer: Producer | None = None  # None: no seal is pending
        self._generation = 0
        self._thread = 0  # that called commit
        self._failed: Producer | None = None  # it has a failure, which settle has not raised

    def __repr__(self) -> str:
        return "DeferredSeal(none)" if self._producer is None else f"DeferredSeal(generation {self._generation})"

    @property
    def is_closed(self) -> bool:
        """Whether the caller's thread must not change the contents of a commit now."""
        producer = self._producer
        return producer is not None and not producer.is_this_thread()

    def announce(self, producer: Producer, generation: int) -> None:
        """Under the lock: the seal of ``generation`` is pending from now on; ``hand_over`` must follow."""
        assert self._producer is None
        self._producer, self._generation, self._thread = producer, generation, threading.get_ident()

    def hand_over(self, seal: Callable[[], object]) -> bool:
        """Have the producer call ``seal`` at the end of its pending work; return False where it has none."""
        producer = self._producer
        assert producer is not None
        is_taken = False
        try:
            is_taken = producer.when_done(functools.partial(self._conclude, seal))
        finally:
            if not is_taken:
                self._end()
        return is_taken

    def settle_for(self, *keys: str, is_new: bool = False) -> None:
        """Settle before a change of ``keys`` unless no commit contains them; ``is_new``: from now on they will."""
        if self._producer is None and self._failed is None:
            return
        with self._condition:
            entries = [self._records.entries.get(key) for key in keys]
        if is_new or any(entry is not None and not entry.scratch for entry in entries):
            self.settle()

    def settle(self) -> None:
        """Wait until no seal is pending, before a change of the contents of commits; not under the lock.

        The producer's thread does not wait. The thread that committed serves it meanwhile, and gets its error. Other
        threads cannot serve it with memory: they wait, with a deadline, and go on whether or not it failed. Raises the
        error of the producer or of the seal; DeadlineError.
        """
        producer = self._producer or self._failed
        if producer is None or producer.is_this_thread():
            return
        if self._thread == threading.get_ident():
            self._failed = None  # it is raised here, or was by the producer
            producer.finish_all()
            self._end()  # of a seal that an interrupt kept from being handed over
            return
        deadline = Deadline(f"seal of generation {self._generation}", self._deadline_s)
        with self._condition:
            while self._producer is not None:
                deadline.wait(self._condition, self._progress(), at_most_s=self._deadline_s / 8)

    def _conclude(self, seal: Callable[[], object], failure: BaseException | None) -> None:
        """In the producer's thread, at the end of its pending work: seal, unless that work failed."""
        try:
            if failure is None:
                seal()
        except BaseException as error:
            failure = error
            raise
        finally:
            if failure is not None:
                what = f"generation {self._generation}, whose commit had returned, was not sealed"
                failure.add_note(f"{what}: the one before is as it was")
                _log.error("%s: %s", what, failure)
                self._failed = self._producer
            self._end()

    def _end(self) -> None:
        with self._condition:
            self._producer = None
            self._condition.notify_all()
