"""UnitUpdate: the update of one unit from its hand-over to its end: its keys, its leases, its gradients.

update_thread.py decides which thread runs it, and when; update.py does the arithmetic.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tiered.store.residency.working_set import Lease
from tiered.zero.formats.codec import Source

if TYPE_CHECKING:
    import torch

    from tiered.tiers.schedule import SharedSchedule
    from tiered.zero.formats.codec import Bucket
    from tiered.zero.formats.rules import Hyperparameters
    from tiered.zero.gradients.taken_gradients import TakenGradients
    from tiered.zero.optimizer.update import UpdatePipeline
    from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["UnitUpdate", "outcome_of"]


class UnitUpdate:
    """The update of one unit as it was handed over: its gradients, and the hyperparameters of that moment.

    ``buckets`` are those with elements to update, ``hypers`` has their parameters. The holder of the update owns the
    gradients: the main thread until ``submit``, the worker from then on.
    """

    __slots__ = (
        "_leases", "_parameter_keys", "_pipeline", "_place", "_schedule", "_sources", "_tensors", "buckets",
        "gradients", "hypers", "keys", "nbytes", "unit",
    )  # fmt: skip

    def __init__(
        self,
        unit: Unit,
        buckets: Sequence[Bucket[Segment]],
        hypers: Mapping[Segment, Hyperparameters],
        gradients: TakenGradients,
        pipeline: UpdatePipeline,
        schedule: SharedSchedule,
    ) -> None:
        self.unit = unit
        self.buckets = buckets
        self.hypers = hypers
        self.gradients = gradients
        self.nbytes = 2 * gradients.nbytes  # of DRAM that it keeps from others: parameters are laid out alike
        self._parameter_keys = unit.keys_of(hypers)
        self.keys = [*self._parameter_keys.values(), gradients.key, *[bucket.key for bucket in buckets]]
        self._pipeline = pipeline
        self._schedule = schedule
        self._place = unit.gradients.open_gradients.place
        self._leases: dict[int, Lease] = {}  # of the spans with elements to update, by their numbers
        self._tensors: dict[int, torch.Tensor] = {}  # their bytes, where the update computes
        self._sources: dict[Segment, Source] = {}  # views of leased bytes

    def __repr__(self) -> str:
        return f"UnitUpdate({self.unit.name!r}, {len(self.buckets)} buckets)"

    def run(self, use: Callable[[Sequence[str]], None]) -> None:
        """Update the unit; blocks. ``use(keys)`` is told of the buckets as they come up."""
        self._pipeline.run(self.buckets, self, use)

    @property
    def num_together(self) -> int:
        """All buckets, where they are in DRAM for good and the update computes there."""
        return len(self.buckets) if self._schedule.is_settled and self._place.computes_in_dram else 1

    def open(self, keys: Sequence[str]) -> list[Lease]:
        """Lease the buckets ``keys``, the parameters and the gradients; blocks."""
        if not self._sources:
            self._lease_parameters()
            self.gradients.open()
            self._schedule.take_back([*self._parameter_keys.values(), self.gradients.key])
        return self.unit.tier.lease_for_update(keys)

    def _lease_parameters(self) -> None:
        if not self._leases:
            keys = self._parameter_keys
            self._leases = dict(zip(keys, self.unit.tier.lease_for_update(list(keys.values())), strict=True))
        for span, lease in self._leases.items():
            if span not in self._tensors:
                self._tensors[span] = self._place.bring(lease)

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Ask for the buckets ``keys`` through the schedule, which puts all later reads in order."""
        self._schedule.go_on()

    def source(self, segment: Segment) -> Source | None:
        """Return the contribution of ``segment``; None when it has no gradient."""
        source, hyper = self._sources.get(segment), self.hypers.get(segment)
        if source is None and hyper is not None:
            flat, gradient = segment.flat(self._tensors[segment.span]), self.gradients.flat(segment)
            source = Source(flat, gradient, self.gradients.factor(segment), hyper)
            self._sources[segment] = source
        return source

    def done(self, keys: Sequence[str]) -> None:
        """Swap the buckets out, unless all keys stay in DRAM for good."""
        if not self._schedule.is_settled:
            self.unit.working_set.swap_out(keys)

    def _release_parameters(self) -> None:
        self._sources.clear()  # lifetime: before the leases that they are views of
        self._tensors.clear()
        leases, self._leases = self._leases, {}
        self._place.put_back(leases.values())
        if leases and not self._schedule.is_settled:
            self.unit.working_set.swap_out([lease.key for lease in leases.values()])

    def end(self) -> str:
        """Give everything back; return the gradients' key if a caller still sees its bytes, else ""."""
        self._schedule.take_back(self.keys)
        self._release_parameters()
        left = self.gradients.delete()
        self._place.settle(self.keys)  # order: who waits for this update may read, and commit, the bytes in DRAM
        return left


def outcome_of(action: Callable[[], object]) -> BaseException | None:
    """Do ``action``; return the error that it raised, whatever it is, for another thread to hear of."""
    try:
        action()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # lifetime: their locals may be views of leased bytes
        return error
    return None
