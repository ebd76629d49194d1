"""The streaming update: bucket by bucket, state read ahead | updated in place | written behind.

The pipeline moves keys and calls the kernel. The optimizer decides which parameters it updates, with which
hyperparameters; update_thread.py decides in which thread. UnitUpdate is the update of one unit from its hand-over to
its end: its keys, its leases, its gradients. Where updates compute, beside the bytes in DRAM or on the compute device,
is chosen by measuring both.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tiered.errors import UsageError
from tiered.store.residency.working_set import Lease, WorkingSet
from tiered.tiers.accelerator import AcceleratorTier, DevicePlace
from tiered.tiers.compute_tier import UpdatePlace
from tiered.tiers.device_tier import HostPlace, HostTier
from tiered.zero.engine import Engine
from tiered.zero.formats.codec import Bucket, Piece, Source, update_pieces
from tiered.zero.formats.rules import Hyperparameters, Rule
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.layout import whole_pages
from tiered.zero.parameters.unit import Segment

if TYPE_CHECKING:
    from tiered.tiers.schedule import SharedSchedule
    from tiered.zero.gradients.taken_gradients import TakenGradients
    from tiered.zero.parameters.unit import Unit

__all__ = ["PlainSupply", "UnitUpdate", "UpdatePipeline", "choose_place", "give_place", "outcome_of"]


_READ_AHEAD = 2
"""Buckets on their way in while one is updated: with the one being updated, the 3 buckets of the smallest budget."""


class Supply(Protocol):
    """The supply of an update with parameters and gradients."""

    @property
    def num_together(self) -> int:
        """The most buckets that may be leased at one time."""

    def open(self, keys: Sequence[str]) -> list[Lease]:
        """Lease the buckets ``keys`` for the update, and the bytes that ``source`` gives views of; blocks."""

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Ask for the buckets ``keys``, which come next; a hint."""

    def source(self, segment: Segment) -> Source | None:
        """Return the contribution of ``segment``, None where none is due; valid until the next ``open``."""

    def done(self, keys: Sequence[str]) -> None:
        """The buckets ``keys`` are updated and released: have them on their way to the device."""


class PlainSupply:
    """Parameters and gradients in ordinary memory."""

    num_together = 1

    def __init__(self, working_set: WorkingSet, sources: Mapping[Segment, Source]) -> None:
        self._working_set = working_set
        self._sources = sources

    def open(self, keys: Sequence[str]) -> list[Lease]:
        """Lease the buckets ``keys``; blocks."""
        return self._working_set.lease_for_update(keys)

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Ask for the buckets ``keys``."""
        self._working_set.prefetch(keys)

    def source(self, segment: Segment) -> Source | None:
        """Return the contribution of ``segment``."""
        return self._sources.get(segment)

    def done(self, keys: Sequence[str]) -> None:
        """Swap the buckets out."""
        self._working_set.swap_out(keys)


class UpdatePipeline:
    """Updates the buckets of one unit after another in a bounded piece of DRAM; one thread at a time.

    Holds tile scratch from the working set, counted in its budget, until ``close``.
    """

    def __init__(self, working_set: WorkingSet, tile_numel: int) -> None:
        self.tile_numel = tile_numel
        self.scratch_nbytes = TileScratch.nbytes(tile_numel)
        self._working_set = working_set
        self._buffer = working_set.reserve(self.scratch_nbytes, is_lasting=True)
        memory = torch.frombuffer(self._buffer.memory, dtype=torch.uint8)
        self.scratch = TileScratch(memory, tile_numel)
        self._is_open = True
        self._place: UpdatePlace = HostPlace(HostTier(working_set), working_set)
        self._scratch_there = self.scratch

    def move_to(self, place: DevicePlace) -> None:
        """Run the updates of sharded parameters at ``place`` from now on. Raises CapacityError."""
        memory = place.keep(self.scratch_nbytes)
        with place.computing():
            self._place, self._scratch_there = place, TileScratch(memory, self.tile_numel)

    def run(self, buckets: Sequence[Bucket[Segment]], supply: Supply, use: Callable[[Sequence[str]], None]) -> None:
        """Update in place every piece of ``buckets`` that ``supply`` has a source for; blocks.

        Each bucket has at least one. ``use(keys)`` is told of those that come up, and may raise to end the run
        between buckets. New state is on its way to the device when this returns.
        """
        keys = [bucket.key for bucket in buckets]
        number = supply.num_together
        for first in range(0, len(buckets), number):
            supply.read_ahead(keys[first : first + number + _READ_AHEAD])
            with self._place.computing():
                self._update(buckets[first : first + number], supply, use)
            supply.done(keys[first : first + number])

    def _update(self, buckets: Sequence[Bucket[Segment]], supply: Supply, use: Callable[[Sequence[str]], None]) -> None:
        keys = [bucket.key for bucket in buckets]
        leases = supply.open(keys)
        try:
            parts = self._parts(buckets, leases, supply)
            begun = self._working_set.recorder.begin()
            use(keys)  # order: once they are leased, or keys read ahead would push them out as just used
            update_pieces(parts, self._scratch_there)
            parts.clear()  # lifetime: they are views of bytes that are given back below
            self._working_set.recorder.worked("update bucket", keys[0], begun)  # the first of them
        finally:
            self._place.put_back(leases)

    def _parts(
        self, buckets: Sequence[Bucket[Segment]], leases: Sequence[Lease], supply: Supply
    ) -> list[tuple[Piece[Segment], torch.Tensor, Source]]:
        parts = []
        for bucket, lease in zip(buckets, leases, strict=True):
            state = self._place.bring(lease)
            for piece in bucket.pieces:
                source = supply.source(piece.segment)
                if source is not None:
                    parts.append((piece, state, source))
        return parts

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.scratch.release()
            self._scratch_there.release()
            self._place.close()
            self._working_set.unreserve(self._buffer)


# -- place choice ------------------------------------------------------------------------------------------------------


_log = logging.getLogger("tiered")

_NUM_TRIALS = 3  # of each; the shortest counts


def choose_place(
    engine: Engine, pipeline: UpdatePipeline, rule: Rule, group: dict[str, Any],
    buckets_of: Mapping[Any, Sequence[Bucket[Segment]]], before: str | None,
) -> str:  # fmt: skip
    """Have the updates of ``engine`` compute where ``shard(update_on=)`` says; return "cpu" or "device".

    "auto" keeps the place of ``before``, or takes what a trial of one tile finds shorter, copies included; ``group``
    has the hyperparameters of that. Raises UsageError for a run that was updated on a device and has none now.
    """
    tier, word = engine.tier, engine.layouts.update_on
    if not isinstance(tier, AcceleratorTier):
        if before == "device" and word == "auto":
            raise UsageError(
                "the store's run was updated on a compute device, and this model is on the CPU; expected that device,"
                " or tiered.shard(..., update_on='cpu'): the bits of later steps are then the CPU's"
            )
        return "cpu"
    place = DevicePlace(tier, 0)
    if word == "auto":
        buckets = [bucket for unit in engine.units for bucket in buckets_of[unit]]
        word = before or _shorter(place, pipeline, rule, group, buckets)
    if word == "device":
        tier.memories.append(place.memory)
        engine.open_gradients.place, tier.keeps_gradients = place, True
        give_place(engine, pipeline, buckets_of)
        pipeline.move_to(place)
    _log.info("update_on=%r", word)
    return word


def give_place(engine: Engine, pipeline: UpdatePipeline, buckets_of: Mapping[Any, Sequence[Bucket[Segment]]]) -> None:
    """Give updates on a device what the largest of them takes now, of the memory of the model."""
    tier, place = engine.tier, engine.open_gradients.place
    if isinstance(tier, AcceleratorTier) and isinstance(place, DevicePlace):
        bucket = max((bucket.nbytes for unit in engine.units for bucket in buckets_of[unit]), default=0)
        largest = max((unit.layout.gradient_nbytes for unit in engine.units), default=0)
        nbytes = 2 * largest + 3 * whole_pages(bucket) + pipeline.scratch_nbytes
        tier.memory.give_up(max(0, nbytes - place.memory.budget_bytes))
        place.memory.budget_bytes = max(nbytes, place.memory.budget_bytes)
        place.memory.capacities = sorted({*tier.memory.capacities, whole_pages(bucket), pipeline.scratch_nbytes})


def _shorter(
    place: DevicePlace, pipeline: UpdatePipeline, rule: Rule, group: dict[str, Any], buckets: Iterable[Bucket[Segment]]
) -> str:
    """Return where the update of one piece takes less time, with its copies there and back."""
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    if not pieces:
        return "cpu"
    piece = max(pieces, key=lambda each: each.numel)
    dtype, nbytes = piece.segment.dtype, piece.offset + piece.nbytes
    state = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    values = torch.zeros(2, piece.stop, dtype=dtype, device="cpu", pin_memory=True)
    hyper = Hyperparameters(1, rule.freeze(group), begins=True)

    def on_host() -> None:
        update_pieces([(piece, state, Source(values[0], values[1], None, hyper))], pipeline.scratch)

    memory = torch.zeros(pipeline.scratch_nbytes, dtype=torch.uint8, device=place.device)
    scratch = TileScratch(memory, pipeline.tile_numel)

    def on_device() -> None:
        there, gradients_there = state.to(place.device, non_blocking=True), values.to(place.device, non_blocking=True)
        update_pieces([(piece, there, Source(gradients_there[0], gradients_there[1], None, hyper))], scratch)
        state.copy_(there, non_blocking=True)
        values[0].copy_(gradients_there[0], non_blocking=True)
        torch.accelerator.synchronize(place.device)

    with torch.no_grad():
        return "device" if _seconds(on_device) < _seconds(on_host) else "cpu"


def _seconds(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_NUM_TRIALS):
        begun_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun_s)
    return min(times)


# -- unit update -------------------------------------------------------------------------------------------------------


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
