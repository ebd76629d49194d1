"""The fp32 masters between ``shard`` and the optimizer: the values of bf16 parameters before the cast.

A unit's are one key of the store. The optimizer turns them into its own state and deletes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from tiered.bytes.host_tensor import copy_across
from tiered.store.residency.lease_view import Mode
from tiered.store.store import Store
from tiered.units import round_up
from tiered.zero.engine import Engine
from tiered.zero.layout import CUT_NUMEL
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.step import Event

__all__ = ["Masters", "leased", "master_key", "masters_nbytes", "offsets_of", "taken_over", "write_masters"]

_HIGH = (torch.float32, torch.float64)  # dtypes of values that are a master


class Masters:
    """The masters of one model from ``shard`` until an optimizer has taken them over. One thread at a time.

    A unit has no master, or a key with those of all its bf16 parameters that were trained at ``shard``.
    """

    def __init__(self, store: Store, units: Iterable[Unit]) -> None:
        self._store = store
        self._units = list(units)

    def __repr__(self) -> str:
        return f"Masters({len(self.units())} units)"

    def units(self) -> list[Unit]:
        """Return the units that have masters."""
        return [unit for unit in self._units if master_key(unit.name) in self._store]

    def _leased(self, unit: Unit) -> AbstractContextManager[torch.Tensor]:
        return leased(self._store, master_key(unit.name), "rw", torch.float32)

    def delete(self, unit: Unit) -> None:
        """Delete the masters of ``unit``."""
        self._store.working_set.delete([master_key(unit.name)])

    def set_master(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The caller has replaced the values of ``segment``: its master becomes ``source``, or those values."""
        unit = segment.unit
        start = offsets_of(unit.segments).get(segment)
        if start is None or master_key(unit.name) not in self._store:
            return  # or none of it is in this rank's shard
        key = unit.keys[segment.span]
        if unit.world > 1 and (source is None or source.dtype not in _HIGH or source.shape != segment.shape):
            # Order: no gather. Only the ranks in whose shards values have changed come here.
            with leased(self._store, key, "r") as shard, self._leased(unit) as values:
                values[start : start + len(segment.stretch)].copy_(segment.piece(shard))
                del shard, values
            return
        was_open = unit.is_open
        if source is None or source.dtype not in _HIGH or source.shape != segment.shape:
            source = segment.view(unit.open("r")[segment.span])
            unit.buffer.use()
        with self._leased(unit) as values:
            own, stretch = values[start : start + len(segment.stretch)], segment.stretch
            if len(stretch) == segment.numel:
                copy_across(own.as_strided(segment.shape, segment.strides), source)
            else:
                ordered = torch.empty_strided(segment.shape, segment.strides, dtype=torch.float32, device="cpu")
                copy_across(ordered, source)
                own.copy_(ordered.as_strided((segment.numel,), (1,))[stretch.start : stretch.stop])
            del values, own
        if not was_open:
            del source  # lifetime: before the lease
            unit.park()

    def fill_master(self, segment: Segment, values: Callable[[slice], torch.Tensor] | None) -> None:
        """The same, of what lies in this rank's shard; ``values`` give a slice of the elements in memory order."""
        unit, stretch = segment.unit, segment.stretch
        start = offsets_of(unit.segments).get(segment)
        if start is not None and master_key(unit.name) in self._store:
            assert values is not None
            with self._leased(unit) as masters:
                masters[start : start + len(stretch)].copy_(values(slice(stretch.start, stretch.stop)))
                del masters


@contextmanager
def taken_over(engine: Engine | None, title: str) -> Iterator[Masters | None]:
    """Yield the masters of ``engine``, if any, for the optimizer ``title`` to turn into its state and delete.

    Where an error comes when some are deleted, an optimizer made anew would lack them: the model is abandoned then.
    Raises StepAbandonedError, StoreLostError for a model that is.
    """
    if engine is not None and engine.phase.abandoned:
        engine.phase.check(Event.STEP, title)
    if engine is None or not isinstance(engine.masters, Masters):
        yield None
        return
    masters, units = engine.masters, engine.masters.units()
    try:
        yield masters
    except BaseException as error:
        if masters.units() != units:
            engine.phase.abandon(f"{title} was not made, and has used up fp32 masters: {error}")
        raise


@contextmanager
def leased(store: Store, key: str, mode: Mode, dtype: torch.dtype = torch.uint8) -> Iterator[torch.Tensor]:
    """Lease the bytes of ``key``, as ``dtype``; no tensor that lies in them may outlive the block."""
    lease = store.working_set.lease(key, mode)
    try:
        yield lease.tensor.view(dtype)
    finally:
        lease.release()


def write_masters(store: Store, unit: Unit, copy: Callable[[Segment, torch.Tensor], None]) -> None:
    """Make the key of ``unit``'s masters in this rank's shard; blocks.

    ``copy(segment, out)`` writes the master of ``segment.stretch`` to ``out``, (len(stretch),) fp32 in memory order. It
    is called for empty stretches, too: for the same segments on all ranks.
    """
    key = master_key(unit.name)
    store.working_set.create(key, masters_nbytes(unit.segments))
    with leased(store, key, "w", torch.float32) as values:
        offsets = offsets_of(unit.segments)
        for segment in unit.segments:
            if segment.dtype == torch.bfloat16 and segment.was_trainable:
                offset = offsets.get(segment, 0)
                copy(segment, values[offset : offset + len(segment.stretch)])
        del values
    store.working_set.swap_out([key])


def master_key(unit_name: str) -> str:
    """Return the key of a unit's masters."""
    return f"model/master/{unit_name}"


def masters_nbytes(segments: Iterable[Segment]) -> int:
    """Return the bytes of a unit's master key; 0 where no segment needs one."""
    return max((4 * (offset + len(segment.stretch)) for segment, offset in offsets_of(segments).items()), default=0)


def offsets_of(segments: Iterable[Segment]) -> dict[Segment, int]:
    """Return where, in elements, the fp32 master of each bf16 segment trained at ``shard`` lies in its unit's key.

    A segment that lies in the shards of other ranks alone has none there.
    """
    offsets: dict[Segment, int] = {}
    offset = 0
    for segment in segments:
        if segment.dtype == torch.bfloat16 and segment.was_trainable and segment.stretch:
            offsets[segment] = offset
            offset += round_up(len(segment.stretch), CUT_NUMEL)
    return offsets
