"""SharedSchedule: the schedule of one model for all of its threads, and the only mover of the keys it asks for.

The schedule hears of each use under the store's lock. The store asks it under the same lock which key to evict. The
keys that the schedule asks for are read without the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from tiered.store.residency.working_set import WorkingSet
from tiered.tiers.schedule import NextUsePolicy, Rooms, Schedule
from tiered.tiers.trace import Trace

__all__ = ["SharedSchedule"]


class SharedSchedule:
    """``Schedule`` of the uses in ``order``, thread-safe; nothing here blocks on I/O.

    Once settled it has nothing to ask for, and notes no uses: the order of the last step before is kept for later.
    """

    def __init__(
        self,
        working_set: WorkingSet,
        order: Iterable[str],
        nbytes: MutableMapping[str, int],
        *,
        window_bytes: int,
        rooms: Rooms,
        rooms_nbytes: Mapping[str, int] | None = None,
    ) -> None:
        """``nbytes``: bytes of each key that may be read ahead.

        ``rooms_nbytes``: the bytes of all leases beside the keys, where all keys stay in DRAM once they are there.
        """
        self.trace = Trace(tuple(order))
        self.window_bytes = window_bytes
        self._working_set = working_set
        self._lock = working_set.condition
        self._nbytes = nbytes
        self._rooms_nbytes = rooms_nbytes
        self._schedule = Schedule(self.trace, nbytes, window_bytes=window_bytes, rooms=rooms)
        working_set.set_policy(NextUsePolicy(self.trace, self._schedule.is_near))

    @property
    def is_settled(self) -> bool:
        """Whether all keys are in DRAM for good, and none has to be read or to make room any more."""
        return self._schedule.is_settled

    def learn(self, key: str, nbytes: int, *, window_bytes: int) -> None:
        """See ``Schedule.learn``."""
        with self._lock:
            self._schedule.learn(key, nbytes, window_bytes=window_bytes)

    def use(self, *keys: str) -> None:
        """Note that ``keys`` are used now, and begin to read the next ones. The last of ``keys`` may be a room."""
        if self._schedule.is_settled:
            return
        with self._lock:
            wanted = self._schedule.use(*keys)
        if wanted:
            self._read(wanted)

    def hand_over(self, keys: Iterable[str], *, unrecorded: Iterable[str] = ()) -> None:
        """Note that another thread will use ``unrecorded`` and ``keys`` soon, in this order."""
        if self._schedule.is_settled:
            return
        with self._lock:
            wanted = self._schedule.hand_over(keys, unrecorded=unrecorded)
        if wanted:
            self._read(wanted)

    def take_back(self, keys: Iterable[str]) -> None:
        """Note that keys that were handed over were used, or will not be."""
        if not self.trace.has_promises:
            return
        with self._lock:
            self._schedule.take_back(keys)

    def use_promised(self, key: str) -> None:
        """Note that a key that was handed over is being used now, and begin to read the keys after it."""
        if self._schedule.is_settled and not self.trace.has_promises:
            return
        with self._lock:
            wanted = self._schedule.use_promised(key)
        if wanted:
            self._read(wanted)

    @contextmanager
    def hand_overs(self) -> Iterator[None]:
        """Several hand-overs belong together: the next keys are asked for once, when the block ends."""
        with self._lock:
            self._schedule.begin_hand_overs()
        try:
            yield
        finally:
            with self._lock:
                wanted = self._schedule.end_hand_overs()
            self._read(wanted)

    def go_on(self) -> None:
        """Begin to read the next keys, once some of the keys on their way have been used."""
        if self._schedule.is_settled:
            return
        with self._lock:
            wanted = self._schedule.go_on()
        if wanted:
            self._read(wanted)

    def rewind(self) -> None:
        """Say that a new step begins."""
        if self._schedule.is_settled:
            return
        with self._lock:
            wanted = self._schedule.rewind()
        self._read(wanted)

    def end_step(self) -> None:
        """Say that a step is complete."""
        if self._schedule.is_settled:
            return
        with self._lock:
            wanted = self._schedule.end_step()
        self._read(wanted)
        if self._rooms_nbytes is not None:
            self._settle()

    def forget(self) -> None:
        """Say that the step is dropped, and that the keys in DRAM will be elsewhere. Reads nothing."""
        with self._lock:
            self._schedule.unsettle()
            self.trace.rewind()

    def distance(self, key: str) -> int:
        """Return after how many uses ``key`` is expected again."""
        with self._lock:
            return self.trace.distance(key)

    def _read(self, wanted: Mapping[str, int]) -> None:
        if wanted:
            self._schedule.granted(self._working_set.prefetch(wanted, wanted))

    def _settle(self) -> None:
        """Settle once all of the model is in DRAM, and the other leases of a step find room beside it."""
        if self._working_set.shortage({**self._nbytes, **(self._rooms_nbytes or {})}):
            return
        if self._working_set.prefetch(self._nbytes) == sum(self._nbytes.values()):
            with self._lock:
                self._schedule.settle()
