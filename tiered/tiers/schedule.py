"""What to swap in ahead of need, and what to give up first: both from the trace, both in bytes.

The schedule only hints; the working set decides under its budget, and a wrong hint costs time, never a wrong byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Protocol

from tiered.tiers.trace import Trace

__all__ = ["NextUsePolicy", "NoRooms", "Rooms", "Schedule"]


_MOST_KEYS = 64
"""Of a window, however small: so many uses take longer than a read, and all are looked at again at each use."""


class NextUsePolicy:
    """Evict the key whose next use is farthest away (Belady's rule, on the predicted order).

    For the cyclic forward/backward order this keeps what the turn-around needs, where least-recently-used would
    always evict what is needed next.
    """

    def __init__(self, trace: Trace, is_near: Callable[[str], bool] = lambda key: False) -> None:
        """``is_near(key)``: whether it is used so soon that no prefetch is worth to read it twice."""
        self._trace = trace
        self._is_near = is_near

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        """Return which of ``evictable`` (key -> bytes) to drop, None if all are needed before ``incoming``."""
        if incoming is None:
            return self._trace.farthest(evictable)[0]
        victim, farthest = self._trace.farthest(key for key in evictable if not self._is_near(key))
        return None if self._trace.distance(incoming) >= farthest else victim

    def is_worth_waiting(self, victim: str, leaving: Iterable[str]) -> bool:
        """Return whether ``victim`` is near, and one of ``leaving`` used later: else it would soon be read again.

        What is used later still goes at once: to be read again costs less than that somebody waits.
        """
        return self._is_near(victim) and self._trace.farthest(leaving)[1] > self._trace.distance(victim)


class Rooms(Protocol):
    """What will be leased anew, not read: a room is the name of such a lease, and uses of it are in the trace.

    What is read ahead must leave that much of the budget, or it would be evicted again before its use. Once leased, a
    room may be given back to be used again: from then on it is a key of that name.
    """

    def due(self) -> int:
        """Return the bytes that will be leased before anything else is used. Any thread; never blocks."""

    def of(self, name: str) -> int | None:
        """Return the bytes that the use of the room ``name`` will lease; None where it is no room's name."""

    def given_back(self, name: str) -> int | None:
        """Return the bytes of the room ``name`` where it is a key now; None where it is none."""


class NoRooms:
    """Nothing is leased that was not read."""

    def due(self) -> int:
        """Return 0."""
        return 0

    def of(self, name: str) -> int | None:
        """Return None."""
        return None

    def given_back(self, name: str) -> int | None:
        """Return None."""
        return None


class Schedule:
    """Keeps up to ``window_bytes`` of the keys that come next on their way into DRAM. Thread-safe.

    Keys that were learnt on the way, activations, have a window of their own; rooms that were given back come with the
    keys around them. The invariant: *a key is asked for only beside all that will be used or leased before it*, so
    nothing is read that must go again before its use.
    """

    def __init__(
        self,
        trace: Trace,
        prefetch: Callable[[Mapping[str, int]], int],
        nbytes: MutableMapping[str, int],
        *,
        window_bytes: int,
        rooms: Rooms | None = None,
    ) -> None:
        """``prefetch`` takes, for each key in the order of use, how many bytes must be left beside it."""
        self.trace = trace
        self.window_bytes = window_bytes
        self._prefetch = prefetch
        self._nbytes = nbytes  # bytes of each key that may be prefetched
        self._rooms = rooms or NoRooms()
        self._near: set[str] = set()
        self._soon: dict[str, int] = {}
        self._learnt: set[str] = set()
        self._learnt_window_bytes = 0
        self._is_handing_over = False
        self._num_lasting = 0  # uses for which what was asked for last is enough

    def learn(self, key: str, nbytes: int, *, window_bytes: int) -> None:
        """Let ``key``, of ``nbytes``, be read ahead from now on where the trace expects it.

        ``window_bytes`` is how far all such keys are read ahead, where that is more than the window of the others.
        """
        self._nbytes[key] = nbytes
        self._learnt.add(key)
        self._learnt_window_bytes = max(window_bytes, self.window_bytes)

    def use(self, key: str, *, room: str = "") -> None:
        """Note that ``key`` is being used now, and ``room`` soon, and ask for what comes next. Never blocks on I/O."""
        if self.trace.record(key, room) if room else self.trace.record(key):
            self.go_on()

    def hand_over(self, keys: Iterable[str], *, unrecorded: Iterable[str] = ()) -> None:
        """Note that another thread will use ``unrecorded`` and ``keys`` soon, in this order (see ``Trace.promise``)."""
        self.trace.promise(keys, unrecorded=unrecorded)
        self.go_on()

    def take_back(self, keys: Iterable[str]) -> None:
        """Note that keys that were handed over will not be used."""
        for key in keys:
            self.trace.kept(key)

    def use_promised(self, key: str) -> None:
        """Note that a key that was handed over is being used now, and ask for what comes after it."""
        self.trace.kept(key)
        self.go_on()

    def is_near(self, key: str) -> bool:
        """Return whether ``key`` is used within twice the window from now, or was handed over."""
        return key in self._near or self.trace.is_promised(key)

    @contextlib.contextmanager
    def hand_overs(self) -> Iterator[None]:
        """Several hand-overs belong together: what comes next is asked for once, when the block ends."""
        self._is_handing_over = True
        try:
            yield
        finally:
            self._is_handing_over = False
            self.advance()

    def soon(self) -> dict[str, int]:
        """Return what will be asked for at the next use, key or room -> bytes: there should be room for it by then."""
        return self._soon

    def go_on(self) -> None:
        """Ask for what comes next, once some of what is on its way, an eighth, has been used."""
        self._num_lasting -= 1
        if self._num_lasting < 0:
            self.advance()

    def advance(self) -> None:
        """Ask for the next ``window_bytes`` of promised and expected keys, in the order of their use."""
        if self._is_handing_over:
            return
        wanted: dict[str, int] = {}  # key -> bytes to leave beside it
        near: set[str] = set()
        soon: dict[str, int] = {}
        rooms = self._rooms.due()
        left, left_learnt = self.window_bytes, self._learnt_window_bytes
        least_nbytes = self.window_bytes // _MOST_KEYS
        for key in self.trace.upcoming():
            nbytes = self._nbytes.get(key)
            if nbytes is None:
                near.add(key)
                given_back = self._rooms.given_back(key)
                room = self._rooms.of(key) or 0
                if left >= 0:
                    soon[key] = room if given_back is None else given_back
                if given_back is None:
                    rooms += room
                elif left >= 0:
                    wanted[key] = rooms
            elif key in self._learnt:
                left_learnt -= nbytes
                if left_learnt >= 0 and key not in wanted:
                    wanted[key] = rooms
            else:
                if left >= 0:
                    soon[key] = nbytes
                left -= max(nbytes, least_nbytes)
                if left < -self.window_bytes:
                    break
                near.add(key)
                if left >= 0:
                    wanted[key] = rooms
        self._near, self._soon = near, soon
        self._num_lasting = 0
        if wanted and self._prefetch(wanted) >= sum(self._nbytes.get(key, 0) for key in wanted):
            self._num_lasting = len(wanted) // 8
