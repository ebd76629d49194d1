"""The choice of where updates compute, beside the bytes in DRAM or on the compute device, and its measurement."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tiered.errors import UsageError
from tiered.tiers.accelerator import AcceleratorTier, DevicePlace
from tiered.zero.engine import Engine
from tiered.zero.formats.codec import Bucket, Source, update_pieces
from tiered.zero.formats.rules import Hyperparameters, Rule
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.layout import whole_pages
from tiered.zero.optimizer.update import UpdatePipeline
from tiered.zero.parameters.unit import Segment

__all__ = ["choose_place", "give_place"]

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
