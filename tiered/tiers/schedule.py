"""What to swap in ahead of need, and what to give up first: both from the trace, both in bytes.

The schedule only hints; the working set decides under its budget, and a wrong hint costs time, never a wrong byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

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
        farthest, victim = -1, None
        for key in evictable:
            distance = self._trace.distance(key)
            if distance > farthest:
                farthest, victim = distance, key
        if incoming is not None and self._trace.distance(incoming) >= farthest:
            return None
        return victim


class Schedule:
    """Keeps up to ``window_bytes`` of the keys that come next on their way into DRAM."""

    def __init__(
        self, trace: Trace, prefetch: Callable[[Iterable[str]], int], nbytes: Mapping[str, int], *, window_bytes: int
    ) -> None:
        self.trace = trace
        self.window_bytes = window_bytes
        self._prefetch = prefetch
        self._nbytes = nbytes  # bytes of each key that may be prefetched

    def use(self, key: str) -> None:
        """Note that ``key`` is being used now and ask for what comes after it. Never blocks on I/O."""
        if self.trace.record(key):
            self.advance()

    def advance(self) -> None:
        """Ask for the next ``window_bytes`` of keys."""
        wanted: dict[str, None] = {}
        left = self.window_bytes
        for key in self.trace.upcoming():
            nbytes = self._nbytes.get(key)
            if nbytes is None or key in wanted:
                continue
            left -= nbytes
            if left < 0:
                break
            wanted[key] = None
        if wanted:
            self._prefetch(wanted)
