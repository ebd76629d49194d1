"""The choice of the keys to swap in ahead of need, and of those to give up first: both from the trace, in bytes.

The schedule only hints; the working set decides under its budget, and a wrong hint costs time, never a wrong byte.
``Schedule`` has no thread, lock or clock: events go in, reads come out. ``SharedSchedule`` has one lock around it, the
store's, and hands the reads on. Bytes held for good are those that save the most transfers per byte: a parameter byte
saves two reads a step and a write between commits, a byte of optimizer state one read and one write. So parameters come
first. For the cyclic forward/backward order a fixed held set, the same share of every unit, is optimal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from tiered.store.residency.residency import Residency
from tiered.tiers.trace import Trace

__all__ = ["NextUsePolicy", "Rooms", "Schedule", "SharedSchedule", "choose_held"]


_MOST_KEYS = 64
"""Of a window, however small: so many uses take longer than a read, and all are looked at again now and then."""


class NextUsePolicy:
    """Evict the key whose next use is farthest away (Belady's rule, on the predicted order).

    For the cyclic forward/backward order this keeps the keys around the turn from forward to backward, where
    least-recently-used would always evict the key that is needed next.
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

        A key that is used later still goes at once: reading it again costs less than a waiting thread.
        """
        return self._is_near(victim) and self._trace.farthest(leaving)[1] > self._trace.distance(victim)


class Rooms:
    """Bytes that will be leased without a read: a room is the name of such a lease, and its uses are in the trace.

    Reads ahead must leave that much of the budget, or they would be evicted again before their use. Once leased, a
    room may be given back to be used again: from then on it is a key of that name, while ``exists(name)``.
    """

    __slots__ = ("_exists", "filled", "leased", "nbytes", "opening")

    def __init__(self, exists: Callable[[str], bool] = lambda name: False) -> None:
        self.nbytes: Mapping[str, int] = {}  # of each room
        self.filled: set[str] = set()  # those with contents, leased or not
        self.leased: set[str] = set()
        self.opening = ""  # the room that will be leased before anything else is used, if one will
        self._exists = exists

    def __repr__(self) -> str:
        return f"Rooms({len(self.nbytes)}, {len(self.filled)} filled, {len(self.leased)} leased)"

    def due(self) -> int:
        """Return the bytes that will be leased before anything else is used. Any thread."""
        opening = self.opening
        return self.nbytes[opening] if opening and opening not in self.filled else 0

    def of(self, name: str) -> int:
        """Return the bytes that the use of ``name`` will lease; 0 where it is no room's name, or leased already."""
        return 0 if name in self.filled or self._exists(name) else self.nbytes.get(name, 0)

    def is_given_back(self, name: str) -> bool:
        """Return whether ``name`` is a room that is a key now."""
        return name in self.nbytes and name not in self.leased and self._exists(name)


class Schedule:
    """Keeps up to ``window_bytes`` of the keys that come next on their way into DRAM.

    Each event returns the keys to read now: key -> bytes to leave beside it, in the order of use. The caller reports
    the outcome by ``granted``. Keys that were learnt on the way, activations, have a window of their own; rooms
    that were given back come with the keys around them. The invariant: *a key is asked for only beside all that will be
    used or leased before it*, so nothing is read that must go again before its use.
    """

    def __init__(
        self,
        trace: Trace,
        nbytes: MutableMapping[str, int],
        *,
        window_bytes: int,
        rooms: Rooms | None = None,
    ) -> None:
        """``nbytes``: the bytes of each key that may be read ahead."""
        self.trace = trace
        self.window_bytes = window_bytes
        self.is_settled = False
        self._nbytes = nbytes
        self._rooms = rooms or Rooms()
        self._near_until = 0  # position up to which expected keys are near
        self._learnt: set[str] = set()
        self._learnt_window_bytes = 0
        self.is_handing_over = False  # hand-overs come that belong together: nothing is asked for until their end
        self._asked_bytes = 0  # that were asked for last, in so many keys
        self._num_asked = 0
        self._num_lasting = 0  # uses until more keys are asked for

    def settle(self) -> None:
        """Ask for nothing until a key is learnt: all keys are in DRAM for good. Their uses need not be told."""
        self.is_settled = not self._learnt

    def learn(self, key: str, nbytes: int, *, window_bytes: int) -> None:
        """Let ``key``, of ``nbytes``, be read ahead from now on where the trace expects it.

        ``window_bytes`` is how far all such keys are read ahead, where that is more than the window of the others.
        """
        self._nbytes[key] = nbytes
        self._learnt.add(key)
        self._learnt_window_bytes = max(window_bytes, self.window_bytes)
        self.is_settled = False

    def use(self, *keys: str) -> dict[str, int]:
        """Note that ``keys``, the last perhaps a room, are used at one time, now; return the keys to read."""
        return self.go_on() if self.trace.record(*keys) else {}

    def hand_over(self, keys: Iterable[str], unrecorded: Iterable[str] = ()) -> dict[str, int]:
        """Note that another thread will use ``unrecorded`` and ``keys`` soon, in this order (see ``Trace.promise``)."""
        self.trace.promise(keys, unrecorded=unrecorded)
        return self.go_on()

    def take_back(self, keys: Iterable[str]) -> None:
        """Note that keys that were handed over were used, or will not be."""
        for key in keys:
            self.trace.kept(key)

    def use_promised(self, *keys: str) -> dict[str, int]:
        """Note that ``keys``, which were handed over, are used now, and return the keys to read after them."""
        self.take_back(keys)
        return self.go_on()

    def is_near(self, key: str) -> bool:
        """Return whether ``key`` is used within twice the window from now, or was handed over."""
        if key in self._learnt:
            return self.trace.is_promised(key)
        return -1 < self.trace.next_use(key) < self._near_until or self.trace.is_promised(key)

    def end_hand_overs(self) -> dict[str, int]:
        """Return the keys to read after all that was handed over, since ``is_handing_over`` was set."""
        self.is_handing_over = False
        return self.advance()

    def rewind(self) -> dict[str, int]:
        """Say that a new step begins (see ``Trace.rewind``)."""
        self.trace.rewind()
        return self.advance()

    def end_step(self) -> dict[str, int]:
        """Say that a step is complete (see ``Trace.end_step``)."""
        self.trace.end_step()
        return self.advance()

    def granted(self, nbytes: int) -> None:
        """Note that ``nbytes`` of the keys asked for last are there or on their way.

        If all of it is, an eighth may be used before more is asked for.
        """
        self._num_lasting = self._num_asked // 8 if nbytes >= self._asked_bytes else 0

    def go_on(self) -> dict[str, int]:
        """Return the keys to read, once some of those on their way have been used."""
        self._num_lasting -= 1
        return self.advance() if self._num_lasting < 0 else {}

    def advance(self) -> dict[str, int]:
        """Return the next ``window_bytes`` of promised and expected keys, in the order of their use."""
        if self.is_handing_over or self.is_settled:
            return {}
        wanted: dict[str, int] = {}  # key -> bytes to leave beside it
        looked_at: list[str] = []
        rooms, trace, sizes, learnt = self._rooms.due(), self.trace, self._nbytes, self._learnt
        left, left_learnt = self.window_bytes, self._learnt_window_bytes
        least_nbytes = self.window_bytes // _MOST_KEYS
        self._near_until = trace.end
        for key in trace.upcoming():
            nbytes = sizes.get(key)
            if nbytes is None:
                if not self._rooms.is_given_back(key):
                    rooms += self._rooms.of(key)
                elif left >= 0:
                    wanted[key] = rooms
            elif key in learnt:
                left_learnt -= nbytes
                if left_learnt >= 0 and key not in wanted:
                    wanted[key] = rooms
            else:
                left -= max(nbytes, least_nbytes)
                if left < -self.window_bytes:
                    self._near_until = self._end_of(looked_at)
                    break
                if left >= 0:
                    wanted[key] = rooms
            looked_at.append(key)
        self._num_lasting = 0
        self._num_asked = len(wanted)
        self._asked_bytes = sum([sizes.get(key, 0) for key in wanted])
        return wanted

    def _end_of(self, keys: Sequence[str]) -> int:
        """Return the position behind the last of ``keys``, which were upcoming, that is expected and not promised."""
        expected = (key for key in reversed(keys) if not self.trace.is_promised(key))
        return self.trace.next_use(next(expected, "")) + 1


class SharedSchedule:
    """``Schedule`` of one model, for all of its threads, and the only mover of the keys that it asks for.

    It hears of each use under the store's lock, and the store asks it under that lock which key to evict. Keys are read
    without the lock; nothing here blocks on I/O.

    Once settled it has nothing to ask for, and notes no uses: the order of the last step before is kept for later.
    """

    def __init__(
        self,
        working_set: Residency,
        order: Iterable[str],
        nbytes: MutableMapping[str, int],
        *,
        window_bytes: int,
        rooms: Rooms,
        rooms_nbytes: Mapping[str, int] | None = None,
    ) -> None:
        """``order``: the expected uses of a step; ``nbytes``: bytes of each key that may be read ahead.

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
        if not self._schedule.is_settled:
            self._tell(self._schedule.use, *keys)

    def hand_over(self, keys: Iterable[str], *, unrecorded: Iterable[str] = ()) -> None:
        """Note that another thread will use ``unrecorded`` and ``keys`` soon, in this order."""
        if not self._schedule.is_settled:
            self._tell(self._schedule.hand_over, keys, unrecorded)

    def take_back(self, keys: Iterable[str]) -> None:
        """Note that keys that were handed over were used, or will not be."""
        if self.trace.has_promises:
            with self._lock:
                self._schedule.take_back(keys)

    def use_promised(self, keys: Sequence[str]) -> None:
        """Note that ``keys``, which were handed over, are used now, and begin to read the keys after them."""
        if not self._schedule.is_settled or self.trace.has_promises:
            self._tell(self._schedule.use_promised, *keys)

    @contextmanager
    def hand_overs(self) -> Iterator[None]:
        """Several hand-overs belong together: the next keys are asked for once, when the block ends."""
        with self._lock:
            self._schedule.is_handing_over = True
        try:
            yield
        finally:
            self._tell(self._schedule.end_hand_overs)

    def go_on(self) -> None:
        """Begin to read the next keys, once some of the keys on their way have been used."""
        if not self._schedule.is_settled:
            self._tell(self._schedule.go_on)

    def rewind(self) -> None:
        """Say that a new step begins."""
        if not self._schedule.is_settled:
            self._tell(self._schedule.rewind)

    def end_step(self) -> None:
        """Say that a step is complete."""
        if not self._schedule.is_settled:
            self._tell(self._schedule.end_step)
            if self._rooms_nbytes is not None:
                self._settle(self._rooms_nbytes)

    def forget(self) -> None:
        """Say that the step is dropped, and that the keys in DRAM will be elsewhere. Reads nothing."""
        with self._lock:
            self._schedule.is_settled = False
            self.trace.rewind()

    def distance(self, key: str) -> int:
        """Return after how many uses ``key`` is expected again."""
        with self._lock:
            return self.trace.distance(key)

    def _tell(self, event: Callable[..., dict[str, int]], *arguments: Any) -> None:
        """Tell the schedule of ``event``, and begin to read the keys that it asks for."""
        with self._lock:
            wanted = event(*arguments)
        if wanted:
            self._schedule.granted(self._working_set.prefetch(wanted, wanted))

    def _settle(self, rooms_nbytes: Mapping[str, int]) -> None:
        """Settle once all of the model is in DRAM, and the other leases of a step find room beside it."""
        if self._working_set.shortage({**self._nbytes, **rooms_nbytes}):
            return
        if self._working_set.prefetch(self._nbytes) == sum(self._nbytes.values()):
            with self._lock:
                self._schedule.settle()


def choose_held(parameters: Mapping[str, int], state: Mapping[str, int], budget_bytes: int) -> list[str]:
    """Return the keys to hold within ``budget_bytes``: parameter keys first, then state keys, evenly spaced.

    ``parameters`` and ``state`` map keys, in order of use, to bytes.
    """
    held = _spread(parameters, budget_bytes)
    left = budget_bytes - sum(parameters[key] for key in held)
    return held + (_spread(state, left) if len(held) == len(parameters) else [])


def _spread(sizes: Mapping[str, int], budget_bytes: int) -> list[str]:
    """Return as many keys as fit, spread evenly over the order so that every stretch saves the same share."""
    total = sum(sizes.values())
    if total <= budget_bytes:
        return list(sizes)
    chosen: list[str] = []
    left, share = budget_bytes, 0.0
    for key, nbytes in sizes.items():
        share += nbytes * budget_bytes / total
        if share >= nbytes and nbytes <= left:
            chosen.append(key)
            share -= nbytes
            left -= nbytes
    return chosen
