"""The update of buckets, one after the other: state read ahead | updated in place | written behind.

A UnitUpdate is data: what is due for one unit, with the gradients that it owns. The pipeline updates the buckets that
it is given; the optimizer or the update thread loops over them. Where updates compute, beside the bytes in DRAM or on
the compute device, is chosen by measuring both.
"""

from __future__ import annotations

import logging
import timeit
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tiered.errors import UsageError
from tiered.ranks.ranks import Ranks
from tiered.store.residency.residency import Lease, Residency
from tiered.store.transfers.checked_transfer import without_frames
from tiered.store.waiting.refusals import is_of_an_action
from tiered.tiers.accelerator import AcceleratorTier, DevicePlace
from tiered.tiers.compute_tier import ComputeTier, UpdatePlace
from tiered.zero.engine import Engine
from tiered.zero.formats.codec import Bucket, Piece, Source, update_pieces
from tiered.zero.formats.rules import Hyperparameters, Rule
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.layout import whole_pages
from tiered.zero.parameters.unit import Segment

if TYPE_CHECKING:
    from tiered.tiers.schedule import SharedSchedule
    from tiered.zero.gradients.model_gradients import TakenGradients
    from tiered.zero.parameters.unit import Unit

__all__ = ["UnitUpdate", "UpdatePipeline", "choose_place", "give_place", "outcome_of"]


class UpdatePipeline:
    """Updates buckets in a bounded piece of DRAM; one thread at a time.

    Holds tile scratch from the working set, counted in its budget, until ``close``.
    """

    def __init__(self, working_set: Residency, tier: ComputeTier, tile_numel: int) -> None:
        """``tier``: of the sharded model, or that of the host."""
        self.tile_numel = tile_numel
        self.scratch_nbytes = TileScratch.nbytes(tile_numel)
        self._working_set = working_set
        self._tier = tier
        self._buffer = working_set.reserve(self.scratch_nbytes, is_lasting=True)
        memory = torch.frombuffer(self._buffer.memory, dtype=torch.uint8)
        self.scratch = TileScratch(memory, tile_numel)
        self._is_open = True
        self._place = UpdatePlace(tier, working_set)
        self._scratch_there = self.scratch

    def move_to(self, place: DevicePlace) -> None:
        """Run the updates of sharded parameters at ``place`` from now on. Raises CapacityError."""
        memory = place.keep(self.scratch_nbytes)
        with place.computing():
            self._place, self._scratch_there = place, TileScratch(memory, self.tile_numel)

    def update(
        self,
        buckets: Sequence[Bucket[Segment]],
        sources: Mapping[Segment, Source],
        schedule: SharedSchedule | None = None,
    ) -> None:
        """Update in place every piece of ``buckets`` that ``sources`` has; blocks. All are in DRAM at one time.

        ``schedule`` expects the buckets, if any does. New state is on its way to the device when this returns, unless
        all keys stay in DRAM for good.
        """
        keys = [bucket.key for bucket in buckets]
        if schedule is not None and not schedule.is_settled and not all(map(self._working_set.is_resident, keys)):
            schedule.go_on()  # order: the keys after these are on their way while the lease waits
        with self._place.computing():
            leases = self._tier.lease_for_update(keys)
            try:
                begun = self._working_set.recorder.begin()
                if schedule is not None:  # order: once they are leased, or keys read ahead would push them out as used
                    schedule.use_promised(keys)
                brought = zip(buckets, map(self._place.bring, leases), strict=True)
                update_pieces(  # lifetime: only the call refers to the parts, views of bytes that are given back below
                    [
                        (piece, state, sources[piece.segment])
                        for bucket, state in brought
                        for piece in bucket.pieces
                        if piece.segment in sources
                    ],
                    self._scratch_there,
                )
                self._working_set.recorder.worked("update bucket", keys[0], begun)  # the first of them
            finally:
                self._place.put_back(leases)
        if schedule is None or not schedule.is_settled:
            self._working_set.swap_out(keys)

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

    "auto" keeps the place of ``before``, or takes what a trial of one tile finds shorter on all ranks, copies included;
    ``group`` has the hyperparameters of that. Raises UsageError for a run that was updated on a device and has none
    now.
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
        word = before or _shorter(place, pipeline, rule, group, buckets, engine.store.ranks)
    if word == "device":
        tier.memories.append(place.memory)
        engine.gradients.place, tier.keeps_gradients = place, True
        give_place(engine, pipeline, buckets_of)
        pipeline.move_to(place)
    _log.info("update_on=%r", word)
    return word


def give_place(engine: Engine, pipeline: UpdatePipeline, buckets_of: Mapping[Any, Sequence[Bucket[Segment]]]) -> None:
    """Give updates on a device what the largest of them takes now, of the memory of the model."""
    tier, place = engine.tier, engine.gradients.place
    if isinstance(tier, AcceleratorTier) and isinstance(place, DevicePlace):
        bucket = max((bucket.nbytes for unit in engine.units for bucket in buckets_of[unit]), default=0)
        largest = max((unit.layout.shard_gradient_nbytes for unit in engine.units), default=0)
        nbytes = 2 * largest + 3 * whole_pages(bucket) + pipeline.scratch_nbytes
        tier.memory.give_up(max(0, nbytes - place.memory.budget_bytes))
        place.memory.budget_bytes = max(nbytes, place.memory.budget_bytes)
        place.memory.capacities = sorted({*tier.memory.capacities, whole_pages(bucket), pipeline.scratch_nbytes})


def _shorter(
    place: DevicePlace, pipeline: UpdatePipeline, rule: Rule, group: dict[str, Any],
    buckets: Iterable[Bucket[Segment]], ranks: Ranks | None,
) -> str:  # fmt: skip
    """Return where the update of one piece takes less time, with its copies there and back, on each of the ranks."""
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    is_there = bool(pieces) and _is_shorter_there(place, pipeline, rule, group, pieces)
    if ranks is not None:
        is_there = bool(ranks.least("update_on", lambda: int(is_there or not pieces)))
    return "device" if is_there else "cpu"


def _is_shorter_there(
    place: DevicePlace, pipeline: UpdatePipeline, rule: Rule, group: dict[str, Any], pieces: Sequence[Piece[Segment]]
) -> bool:
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
        there_s, here_s = (min(timeit.repeat(work, number=1, repeat=_NUM_TRIALS)) for work in (on_device, on_host))
    return there_s < here_s


# -- unit update -------------------------------------------------------------------------------------------------------


class UnitUpdate:
    """The update of one unit as it was handed over: its gradients, and the hyperparameters of that moment.

    ``buckets`` are those with elements to update, ``hypers`` has their parameters. The holder of the update owns the
    gradients: the main thread until ``submit``, the worker from then on.
    """

    __slots__ = ("_leases", "_place", "buckets", "gradients", "hypers", "keys", "nbytes", "schedule", "unit")

    def __init__(
        self,
        unit: Unit,
        buckets: Sequence[Bucket[Segment]],
        hypers: Mapping[Segment, Hyperparameters],
        gradients: TakenGradients,
        schedule: SharedSchedule,
    ) -> None:
        self.unit = unit
        self.buckets = buckets
        self.hypers = hypers
        self.gradients = gradients
        self.schedule = schedule
        self.nbytes = 2 * gradients.nbytes  # of DRAM that it keeps from others: parameters are laid out alike
        self.keys = [*unit.keys_of(hypers).values(), gradients.key, *[bucket.key for bucket in buckets]]
        self._place = unit.gradients.model.place
        self._leases: list[Lease] = []  # of the spans with elements to update

    def __repr__(self) -> str:
        return f"UnitUpdate({self.unit.name!r}, {len(self.buckets)} buckets)"

    def rounds(self) -> Sequence[Sequence[Bucket[Segment]]]:
        """Return the buckets in rounds: all at once where they are in DRAM for good and the update computes there.

        Over ranks there may be none: no element of the parameters lies in this rank's shard.
        """
        is_one = self.buckets and self.schedule.is_settled and self._place.computes_in_dram
        return [self.buckets] if is_one else [[bucket] for bucket in self.buckets]

    def begin(self) -> dict[Segment, Source]:
        """Lease the parameters and the gradients, until ``end``; return views of them. Blocks."""
        keys = self.unit.keys_of(self.hypers)
        self.schedule.go_on()
        with self._place.computing():
            self._leases = self.unit.tier.lease_for_update(list(keys.values()))
            spans = dict(zip(keys, map(self._place.bring, self._leases), strict=True))
            self.gradients.open()
            self.schedule.take_back([*keys.values(), self.gradients.key])
            return {
                s: Source(
                    s.piece(spans[s.span]), self.gradients.piece(s), self.gradients.factor(s), hyper, s.stretch.start
                )
                for s, hyper in self.hypers.items()
            }

    def end(self) -> None:
        """Give everything back; nothing may see the views that ``begin`` returned."""
        self.schedule.take_back(self.keys)
        leases, self._leases = self._leases, []
        try:
            self._place.put_back(leases)
            if leases and not self.schedule.is_settled:
                self.unit.working_set.swap_out([lease.key for lease in leases])
        finally:
            self.gradients.delete()
        self._place.settle(self.keys)  # order: who waits for this update may read, and commit, the bytes in DRAM


def outcome_of(action: Callable[[], object]) -> BaseException | None:
    """Do ``action``; return the error that it raised, whatever it is, for another thread to hear of."""
    try:
        action()
    except BaseException as error:
        _log.debug("%s", traceback.format_exc())
        if is_of_an_action(error):  # order: the mark of the call that this thread is in must see that as well
            traceback.clear_frames(error.__traceback__)
            return error
        return without_frames(error)  # lifetime: their locals may be views of leased bytes
    return None
