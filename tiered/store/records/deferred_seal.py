"""DeferredSeal: the seal of a commit that has returned, where a producer still makes bytes of the generation.

commit.py seals, and producers.py knows the producers. Callers that must wait for the seal wait here.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

from tiered.store.records.producers import Producer
from tiered.store.records.records import Records
from tiered.store.waiting.deadline import Deadline

__all__ = ["DeferredSeal"]

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
