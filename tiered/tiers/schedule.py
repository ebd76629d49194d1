"""What to swap in ahead of need, and what to give up first: both from the trace, both in bytes.

The schedule only hints; the working set decides under its budget, and a wrong hint costs time, never a wrong byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping

from tiered.tiers.trace import Trace

__all__ = ["NextUsePolicy", "Schedule"]


class NextUsePolicy:
    """Evict the key whose next use is farthest away (Belady's rule, on the predicted order).

    For the cyclic forward/backward order this keeps what the turn-around needs, where least-recently-used would
    always evict what is needed next.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        """Return which of ``evictable`` (key -> bytes) to drop, None if all are needed before ``incoming``."""
        victim, farthest = self._trace.farthest(evictable)
        if incoming is not None and self._trace.distance(incoming) >= farthest:
            return None
        return victim


_NUM_PROMISED = 3
"""Promised keys that are asked for with the expected ones: what the smallest budget has room for."""


class Schedule:
    """Keeps up to ``window_bytes`` of the keys that come next on their way into DRAM. Thread-safe.

    Keys that were learnt on the way, activations, have a window of their own.
    """

    def __init__(
        self,
        trace: Trace,
        prefetch: Callable[[Iterable[str]], int],
        nbytes: MutableMapping[str, int],
        *,
        window_bytes: int,
    ) -> None:
        self.trace = trace
        self.window_bytes = window_bytes
        self._prefetch = prefetch
        self._nbytes = nbytes  # bytes of each key that may be prefetched
        self._learnt: set[str] = set()
        self._learnt_window_bytes = 0

    def learn(self, key: str, nbytes: int, *, window_bytes: int) -> None:
        """Let ``key``, of ``nbytes``, be read ahead from now on where the trace expects it.

        ``window_bytes`` is how far all such keys are read ahead, where that is more than the window of the others.
        """
        self._nbytes[key] = nbytes
        self._learnt.add(key)
        self._learnt_window_bytes = max(window_bytes, self.window_bytes)

    def use(self, key: str) -> None:
        """Note that ``key`` is being used now and ask for what comes after it. Never blocks on I/O."""
        if self.trace.record(key):
            self.advance()

    def hand_over(self, keys: Iterable[str], *, unrecorded: Iterable[str] = ()) -> None:
        """Note that another thread will use ``unrecorded`` and ``keys`` soon, in this order (see ``Trace.promise``)."""
        self.trace.promise(keys, unrecorded=unrecorded)
        self.advance()

    def use_promised(self, key: str) -> None:
        """Note that a key that was handed over is being used now, and ask for what comes after it."""
        self.trace.kept(key)
        self.advance()

    def advance(self) -> None:
        """Ask for the next promised keys, and for the next ``window_bytes`` of expected ones."""
        wanted = dict.fromkeys(self.trace.promised(_NUM_PROMISED))
        left, left_learnt = self.window_bytes, self._learnt_window_bytes
        for key in self.trace.upcoming():
            nbytes = self._nbytes.get(key)
            if nbytes is None or key in wanted:
                continue
            if key in self._learnt:
                left_learnt -= nbytes
                if left_learnt >= 0:
                    wanted[key] = None
                continue
            left -= nbytes
            if left < 0:
                break
            wanted[key] = None
        if wanted:
            self._prefetch(wanted)
