"""UnitUpdate: the update of one unit from its hand-over to its end: its keys, its leases, its gradients.

Which thread runs it, and when, is update_worker.py's business; what is computed update.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tiered.store.residency.working_set import Lease
from tiered.zero.optimizer.update import Source

if TYPE_CHECKING:
    from tiered.zero.formats.codec import Bucket
    from tiered.zero.formats.rules import Hyperparameters
    from tiered.zero.gradients.taken_gradients import TakenGradients
    from tiered.zero.optimizer.update import UpdatePipeline
    from tiered.zero.parameters.shared_schedule import SharedSchedule
    from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["UnitUpdate"]


class UnitUpdate:
    """The update of one unit as it was handed over: its gradients, and the hyperparameters of that moment.

    ``buckets`` are those with something to update. Whoever has it owns the gradients: the main thread until ``submit``,
    the worker from then on.
    """

    __slots__ = ("_lease", "_pipeline", "_schedule", "buckets", "gradients", "hypers", "keys", "nbytes", "unit")

    def __init__(
        self,
        unit: Unit,
        buckets: Sequence[Bucket[Segment]],
        hypers: Mapping[Segment, Hyperparameters],
        gradients: TakenGradients,
        pipeline: UpdatePipeline,
    ) -> None:
        self.unit = unit
        self.buckets = [bucket for bucket in buckets if any(piece.segment in hypers for piece in bucket.pieces)]
        self.hypers = hypers
        self.gradients = gradients
        self.nbytes = unit.nbytes + gradients.nbytes  # of DRAM that it keeps from others
        self.keys = [unit.key, gradients.key, *(bucket.key for bucket in self.buckets)]  # in order of use
        self._pipeline = pipeline
        self._schedule: SharedSchedule = unit.engine.schedule
        self._lease: Lease | None = None

    def __repr__(self) -> str:
        return f"UnitUpdate({self.unit.name!r}, {len(self.buckets)} buckets)"

    def run(self, use: Callable[[str], None]) -> None:
        """Update the unit; blocks. ``use(key)`` is told of each bucket."""
        self._pipeline.run(self.buckets, self, use)

    def open(self, key: str) -> Lease:
        """Lease the bucket ``key``, the parameters and the gradients; blocks."""
        working_set = self.unit.working_set
        while True:
            if self._lease is None:
                self._lease = working_set.lease(self.unit.key, "rw")
            self.gradients.open()
            self._schedule.take_back([self.unit.key, self.gradients.key])
            bucket = working_set.lease(key, "rw")
            if self._lease is not None and self.gradients.lease is not None:
                return bucket
            bucket.release()  # the others were given up while it waited for this one

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Ask for the buckets ``keys`` as the schedule has them, among all that comes next."""
        self._schedule.go_on()

    def source(self, segment: Segment) -> Source | None:
        """Return what ``segment`` contributes; None when it has no gradient."""
        hyper = self.hypers.get(segment)
        if hyper is None:
            return None
        assert self._lease is not None
        flat = segment.flat(self._lease.tensor)
        return Source(flat, self.gradients.flat(segment), self.gradients.factors.get(segment), hyper)

    @property
    def has_leases(self) -> bool:
        """Whether there is something that ``give_up_leases`` would give."""
        return self._lease is not None or self.gradients.lease is not None

    def give_up_leases(self) -> bool:
        """Let go of parameters and gradients while a bucket is waited for; return whether there were any."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release(is_written=True)
            self.unit.working_set.swap_out([self.unit.key])
        return self.gradients.store_away() or lease is not None

    def end(self) -> str:
        """Give everything back; return the gradients' key if a caller still sees its bytes, else ""."""
        self._schedule.take_back(self.keys)
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release(is_written=True)
            self.unit.working_set.swap_out([self.unit.key])
        return self.gradients.delete()
