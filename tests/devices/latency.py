"""A histogram of latencies in bounded memory, and its percentiles. Pure arithmetic: its owner's lock guards it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Latencies", "LatencyHistogram"]

_SUB_BITS = 4  # 16 cells per octave: a percentile is at most 1/16 above the true one
_NUM_CELLS = (48 << _SUB_BITS) + (1 << _SUB_BITS)  # up to 2**52 ns, seven weeks


@dataclass(frozen=True, slots=True)
class Latencies:
    """``num`` latencies in seconds; the percentiles are exact to 1/16 and never below the true ones, 0.0 for none."""

    num: int
    mean_s: float
    p50_s: float
    p99_s: float
    p999_s: float
    max_s: float


class LatencyHistogram:
    """Counts of latencies in cells that grow with the latency; nothing is allocated after the start."""

    __slots__ = ("_cells", "_max_ns", "_num", "_total_ns")

    def __init__(self) -> None:
        self._cells = [0] * _NUM_CELLS
        self._num = self._total_ns = self._max_ns = 0

    def add(self, latency_s: float) -> None:
        """Count one latency; negative ones count as 0."""
        latency_ns = max(0, int(latency_s * 1e9))
        self._cells[_cell(latency_ns)] += 1
        self._num += 1
        self._total_ns += latency_ns
        self._max_ns = max(self._max_ns, latency_ns)

    def percentile_s(self, percent: float) -> float:
        """Return the latency that ``percent`` of all stay within, in seconds; 0.0 when there are none."""
        wanted, seen = self._num * percent / 100, 0
        for cell, count in enumerate(self._cells):
            seen += count
            if count and seen >= wanted:
                return min(_upper_ns(cell), self._max_ns) / 1e9
        return 0.0

    def summary(self) -> Latencies:
        """Return the percentiles now."""
        return Latencies(
            num=self._num,
            mean_s=self._total_ns / self._num / 1e9 if self._num else 0.0,
            p50_s=self.percentile_s(50),
            p99_s=self.percentile_s(99),
            p999_s=self.percentile_s(99.9),
            max_s=self._max_ns / 1e9,
        )


def _cell(latency_ns: int) -> int:
    """Return the cell of a latency: its highest bit and the four bits behind that."""
    shift = max(0, latency_ns.bit_length() - _SUB_BITS - 1)
    return min((shift << _SUB_BITS) + (latency_ns >> shift), _NUM_CELLS - 1)


def _upper_ns(cell: int) -> int:
    """Return the largest latency of ``cell``."""
    if cell < 2 << _SUB_BITS:
        return cell
    shift = (cell >> _SUB_BITS) - 1
    return ((cell - (shift << _SUB_BITS) + 1) << shift) - 1
