"""The shards of N ranks in one process: their layout, updates and relayout, by the product's own parts.

Each rank has a store of its own with its shards of one unit, and a thread for each thing that all ranks do. A gather
puts the shards of all together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.store.rig import simulated_store
from tiered.store.store import Store
from tiered.tiers.compute_tier import ComputeTier, Gathered
from tiered.units import MiB
from tiered.zero.formats.budget import work_sizes
from tiered.zero.formats.codec import Source
from tiered.zero.formats.rules import AdamWRule
from tiered.zero.formats.state_layout import Layouts
from tiered.zero.gradients.relayout import UnitLayouts
from tiered.zero.layout import bucket_numel_for, share_out, tile_numel_for
from tiered.zero.optimizer.bucket_update import UpdatePipeline
from tiered.zero.optimizer.fp32_masters import Masters, write_masters
from tiered.zero.optimizer.optimizer_state import OptimizerState
from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["Outcome", "Ranks", "RigComm", "bytes_of"]

BUDGET_NBYTES = 16 * MiB

_GROUP = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}


class Outcome(NamedTuple):
    """Whole tensors, put together from all ranks, by the parameters' names: (numel,) each, in memory order."""

    values: dict[str, Tensor]
    state: dict[tuple[str, str], Tensor]  # by parameter, and "exp_avg", "exp_avg_sq" or "master"


class Meeting:
    """The threads of all ranks, where their shards are put together: each waits until all have come."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=60)
        self._brought: list[list[Tensor]] = [[] for _ in range(world)]

    def gather(self, rank: int, shards: list[Tensor]) -> list[Tensor]:
        """Return the whole of each, ordinary memory, a copy of its own for each rank."""
        self._brought[rank] = shards
        self._barrier.wait()
        whole = [torch.cat(each) for each in zip(*self._brought, strict=True)]
        self._barrier.wait()  # order: before a rank lets go of its shards
        return whole


class RigComm:
    """The collectives of one rank of a Meeting."""

    def __init__(self, meeting: Meeting, rank: int, world: int) -> None:
        self.meeting, self.rank, self.world = meeting, rank, world

    def all_gather(self, shards: list[Tensor]) -> list[Tensor]:
        return self.meeting.gather(self.rank, shards)

    def gather(self, tier: ComputeTier, keys: Sequence[str], mode: str) -> Gathered:
        gathered = tier.gather(keys, mode)
        gathered.whole = self.all_gather(gathered.shard)
        gathered.shard = [self.shard_of(whole) for whole in gathered.whole]
        return gathered

    def shard_of(self, whole: Tensor) -> Tensor:
        nbytes = whole.numel() // self.world
        return whole[self.rank * nbytes : (self.rank + 1) * nbytes]


class Ranks:
    """One unit over ``world`` ranks, with the optimizer's state of each. ``close`` ends the stores."""

    def __init__(self, parameters: dict[str, nn.Parameter], world: int, *, dtype: torch.dtype, word: str) -> None:
        """``dtype``: of all parameters in the store; ``word``: the format of the state."""
        self.world, self.units, self.states = world, list[Unit](), list[OptimizerState]()
        self.stack, self.pipelines, self.stores = ExitStack(), list[UpdatePipeline](), list[Store]()
        meeting = Meeting(world)
        self.parameters = parameters
        for rank in range(world):
            store = self.stack.enter_context(simulated_store(budget_nbytes=BUDGET_NBYTES, durable=False))
            self.stores.append(store)
            segments = [Segment(name, parameter, dtype) for name, parameter in parameters.items()]
            comm = RigComm(meeting, rank, world)
            unit = Unit("root", segments, store.working_set, ComputeTier(store.working_set), comm)
            self.units.append(unit)
            self._fill(store, unit)
            write_masters(store, unit, self._copy_master)
            self._add_state(store, unit, word)

    def close(self) -> None:
        for pipeline in self.pipelines:
            pipeline.close()
        self.stack.close()

    def _fill(self, store: Store, unit: Unit) -> None:
        for span in unit.layout.spans:
            store.working_set.create(span.key, span.shard_nbytes)
            lease = store.working_set.lease(span.key, "w")
            lease.tensor.zero_()
            for segment in unit.segments:
                if unit.keys[segment.span] == span.key:
                    flat = _in_memory_order(segment, segment.parameter.detach())
                    segment.piece(lease.tensor).copy_(flat[segment.stretch.start : segment.stretch.stop])
            lease.release()

    @staticmethod
    def _copy_master(segment: Segment, out: Tensor) -> None:
        out.copy_(_in_memory_order(segment, segment.parameter.detach())[segment.stretch.start : segment.stretch.stop])

    def _add_state(self, store: Store, unit: Unit, word: str) -> None:
        numel = bucket_numel_for([-(-unit.layout.trainable_numel // self.world)])
        tile_numel = tile_numel_for(numel, [len(segment.stretch) for segment in unit.segments])
        pipeline = UpdatePipeline(store.working_set, unit.tier, tile_numel)
        trained = {segment for segment in unit.segments if segment.trainable}
        layouts = Layouts(word, AdamWRule())
        scratch = pipeline.scratch
        state = OptimizerState(store, [unit], [trained], layouts, bucket_numel=numel, scratch=scratch)
        state.create(Masters(store, [unit]))
        self.pipelines.append(pipeline)
        self.states.append(state)

    # -- steps, one rank after another -------------------------------------------------------------------------------

    def update(self, gradients: dict[str, Tensor]) -> None:
        """Do one step with whole ``gradients`` by name; a parameter without one is not touched."""
        values = AdamWRule().freeze(_GROUP)
        for unit, state, pipeline in zip(self.units, self.states, self.pipelines, strict=True):
            whole = torch.zeros(unit.layout.gradient_nbytes, dtype=torch.uint8)
            for segment in unit.segments:
                if segment.name in gradients:
                    segment.gradient_view(whole).copy_(gradients[segment.name])
            shard = self._shard_of_gradients(unit, whole)
            trained = [segment for segment in unit.segments if segment.name in gradients]
            leases = dict(zip(unit.keys, unit.working_set.lease_for_update(unit.keys), strict=True))
            sources = {
                segment: Source(
                    segment.piece(leases[unit.keys[segment.span]].tensor),
                    segment.gradient_piece(shard),
                    None,
                    state.count(segment, values),
                    segment.stretch.start,
                )
                for segment in trained
            }
            buckets = [each for each in state.buckets[unit] if not each.segments.isdisjoint(sources)]
            for bucket in buckets:
                pipeline.update([bucket], sources)
            del sources
            unit.working_set.end_update(leases.values())

    def _shard_of_gradients(self, unit: Unit, whole: Tensor) -> Tensor:
        """Return what an exchange leaves on the rank: its pieces of the trainable spans, one after the other."""
        rank, pieces = unit.comm.rank, []
        for span in unit.layout.spans:
            if span.trainable:
                start = span.grad_offset + rank * span.shard_nbytes
                pieces.append(whole[start : start + span.shard_nbytes])
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)

    def each(self, action: Callable[[int], object]) -> list[Any]:
        """Have ``action(rank)`` run for each rank, in a thread of its own; return the results."""
        with ThreadPoolExecutor(self.world) as threads:
            return list(threads.map(action, range(self.world)))

    def train(self, names: Sequence[str]) -> None:
        """Lay the unit out anew, with the parameters called ``names`` trained, and give state to those that lack it."""
        self.each(lambda rank: self._train(rank, names))

    def _train(self, rank: int, names: Sequence[str]) -> None:
        store, unit, state = self.stores[rank], self.units[rank], self.states[rank]
        old, layout = unit.layout, unit.layout.with_trainable(names)
        shares = share_out([layout], work_sizes([layout]), BUDGET_NBYTES)
        unit.engine = SimpleNamespace(phase=SimpleNamespace(give_up=lambda reason: None))
        UnitLayouts(store, [unit], shares)._move(unit, layout)
        state.follow(unit, old)
        late = [segment for segment in unit.segments if segment.trainable and segment not in state.steps]
        if late:
            state.add(unit, late)

    def write(self, change: Callable[[str, Tensor], None]) -> None:
        """Have each rank gather the unit for writing, ``change(name, whole values)``, and write its own piece back."""
        self.each(lambda rank: self._write(self.units[rank], change))

    @staticmethod
    def _write(unit: Unit, change: Callable[[str, Tensor], None]) -> None:
        unit.buffer.gather("rw")
        for segment in unit.segments:
            change(segment.name, segment.flat(unit.buffer.tensors[segment.span]))
        unit.buffer.write_back()
        unit.buffer.release()

    # -- what came out -----------------------------------------------------------------------------------------------

    @staticmethod
    def _gathered(unit: Unit) -> list[Tensor]:
        """Return copies of the whole spans."""
        unit.buffer.gather("r")
        copies = [whole.clone() for whole in unit.buffer.tensors]
        unit.buffer.release()
        return copies

    def outcome(self) -> Outcome:
        """Put all ranks' shards of values and state together."""
        first, values = self.units[0], dict[str, Tensor]()
        for store, unit in zip(self.stores, self.units, strict=True):
            assert unit.world == self.world, "every layout is one over all ranks"
            assert sum(len(bytes_of(store, key)) for key in unit.keys) == unit.layout.shard_nbytes
        whole = self.each(lambda rank: self._gathered(self.units[rank]))[0]
        for segment in first.segments:
            values[segment.name] = segment.flat(whole[segment.span]).clone()
        state = self.each(lambda rank: self._state_of(self.units[rank], self.states[rank]))[0]
        return Outcome(values, state)

    @staticmethod
    def _state_of(unit: Unit, its: OptimizerState) -> dict[tuple[str, str], Tensor]:
        """Return the state of each parameter, as all ranks gather it together."""
        found = [(segment, its.gather(segment)) for segment in unit.segments if segment in its.steps]
        return {
            (segment.name, word): value.as_strided((segment.numel,), (1,)).clone()
            for segment, state in found
            for word, value in state.items()
            if word != "step"
        }


def _in_memory_order(segment: Segment, value: Tensor) -> Tensor:
    """Return the values of a parameter in the order of its strides: (numel,)."""
    ordered = torch.empty_strided(segment.shape, segment.strides, dtype=value.dtype)
    ordered.copy_(value)
    return ordered.as_strided((segment.numel,), (1,))


def bytes_of(store: Store, key: str) -> Tensor:
    """Return a copy of the bytes of ``key``: (nbytes,) uint8."""
    lease = store.working_set.lease(key, "r")
    content = lease.tensor.clone()
    lease.release()
    return content
