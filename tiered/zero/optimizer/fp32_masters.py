"""The fp32 masters between ``shard`` and the optimizer: the values of bf16 parameters before the cast.

A unit's are one key of the store, or those keys in which its parameters were constructed. The optimizer turns them into
its own state and deletes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, Self

import torch

from tiered.bytes.host_tensor import copy_across
from tiered.bytes.interrupt import uninterrupted
from tiered.store.store import Store
from tiered.units import round_up
from tiered.zero.engine import Engine
from tiered.zero.layout import CUT_NUMEL
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.step import Event

__all__ = ["Constructed", "MasterOf", "Masters", "master_key", "masters_nbytes", "offsets_of", "taken_over",
           "write_masters"]  # fmt: skip

MasterOf = Callable[[Segment], torch.Tensor | None]
"""Returns the master of a segment, (numel,) fp32 in memory order, until the next call; None: it is the parameter."""


class Constructed(Protocol):
    """The values of a parameter, fp32, in the key where a constructor made them."""

    key: str

    def lend(self, mode: str) -> AbstractContextManager[torch.Tensor]:
        """Lend the values to ``mode``, in DRAM, of the parameter's shape."""


class Masters:
    """The masters of one model from ``shard`` until an optimizer has taken them over. One thread at a time.

    A unit has no master, a key with those of all its bf16 parameters that were trained at ``shard``, or constructed
    ones, which cost no write. A commit makes keys of constructed ones: they are scratch. A parameter that the caller
    replaced by other than fp32 values is its own master; a commit writes these values to the key.
    """

    def __init__(self, store: Store, units: Iterable[Unit]) -> None:
        self._store = store
        self._units = list(units)
        self._constructed: dict[Unit, Mapping[Segment, Constructed]] = {}
        self._own: set[Segment] = set()

    def __repr__(self) -> str:
        return f"Masters({len(self._units)} units, {len(self._constructed)} of them constructed)"

    def leave(self, unit: Unit, constructed: Mapping[Segment, Constructed]) -> None:
        """Let the masters of ``unit`` be ``constructed``, all of ``offsets_of``; this object deletes them."""
        self._constructed[unit] = constructed

    def units(self) -> list[Unit]:
        """Return the units that have masters."""
        return [unit for unit in self._units if self._has(unit)]

    def takes_space(self, unit: Unit) -> bool:
        """Return whether the masters of ``unit`` are where its optimizer state will be: it takes their space over."""
        return unit not in self._constructed or not self._store.durable

    def _has(self, unit: Unit) -> bool:
        return unit in self._constructed or master_key(unit.name) in self._store

    @contextmanager
    def of(self, unit: Unit) -> Iterator[MasterOf]:
        """Lend the masters of ``unit``; no tensor of them may outlive the block."""
        constructed = self._constructed.get(unit)
        with _Lent(self._store, unit, constructed) as lent:
            yield lambda segment: None if segment in self._own else lent.find(segment)

    def delete(self, unit: Unit) -> None:
        """Delete the masters of ``unit``."""
        constructed = self._constructed.pop(unit, None)
        keys = [master_key(unit.name)] if constructed is None else [each.key for each in constructed.values()]
        self._store.working_set.delete(keys)
        self._own.difference_update(unit.segments)

    @uninterrupted
    def set_master(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The caller has replaced the values of ``segment``: its master becomes ``source``, or those values."""
        unit = segment.unit
        if not self._has(unit) or segment not in offsets_of(unit.segments):
            return
        self._own.add(segment)
        if source is None or source.dtype not in {torch.float32, torch.float64} or source.shape != segment.shape:
            return
        if unit in self._constructed:
            with self._constructed[unit][segment].lend("rw") as value:
                copy_across(value, source)
                del value
        else:
            start = offsets_of(unit.segments)[segment]
            with _leased(self._store, master_key(unit.name), "rw") as values:
                master = values[start : start + segment.numel].as_strided(segment.shape, segment.strides)
                copy_across(master, source)
                del values, master
        self._own.discard(segment)

    def prepare_for(self, word: str) -> None:
        """Get ready for an event of the store; see ``Store.add_guard``. Blocks. Raises CapacityError, DeviceError."""
        if word in {"commit", "close"} and self._store.durable:
            for unit in self._units:
                if unit in self._constructed or (self._own and not self._own.isdisjoint(unit.segments)):
                    self._keep(unit)

    @contextmanager
    def returning(self) -> Iterator[None]:
        """The masters are those of the last commit again, which has them all in their keys."""
        self._own.clear()
        yield

    def _keep(self, unit: Unit) -> None:
        """Make the key of ``unit`` hold all its masters, for a commit."""
        working_set, key = self._store.working_set, master_key(unit.name)
        constructed = self._constructed.get(unit)
        if constructed is not None:
            self._store.reserve_space(masters_nbytes(unit.segments))
            working_set.create(key, masters_nbytes(unit.segments))
        with _leased(self._store, key, "rw" if constructed is None else "w") as values:
            for segment, offset in offsets_of(unit.segments).items():
                there = values[offset : offset + segment.numel]
                if segment in self._own:
                    with _leased(self._store, unit.keys[segment.span], "r", torch.uint8) as span:
                        there.copy_(segment.flat(span))
                        del span
                elif constructed is not None:
                    with constructed[segment].lend("r") as value:
                        there.as_strided(segment.shape, segment.strides).copy_(value)
                        del value
                del there
            del values
        working_set.swap_out([key])
        if constructed is not None:
            del self._constructed[unit]
            working_set.delete([each.key for each in constructed.values()])
        self._own.difference_update(unit.segments)


@contextmanager
def taken_over(engines: Iterable[Engine], title: str) -> Iterator[list[Masters]]:
    """Yield the masters of ``engines`` for the optimizer ``title`` to turn into its state and delete.

    Where an error comes when some are deleted, an optimizer made anew would lack them: the models are abandoned then.
    Raises StepAbandonedError, StoreLostError for a model that is.
    """
    for engine in engines:
        if engine.phase.abandoned:
            engine.phase.check(Event.STEP, title)
    left = [
        (engine, engine.masters, engine.masters.units()) for engine in engines if isinstance(engine.masters, Masters)
    ]
    try:
        yield [masters for _, masters, _ in left]
    except BaseException as error:
        for engine, masters, units in left:
            if masters.units() != units:
                engine.phase.abandon(f"{title} was not made, and has used up fp32 masters: {error}")
        raise


class _Lent:
    """The masters of one unit while they are read, one constructed parameter at a time, as the budget wants it."""

    def __init__(self, store: Store, unit: Unit, constructed: Mapping[Segment, Constructed] | None) -> None:
        self._offsets = offsets_of(unit.segments)
        self._constructed = constructed
        self._open = ExitStack()
        self._tensor: torch.Tensor | None = None  # those of the unit, or of one segment
        self._segment: Segment | None = None
        self._lend = functools.partial(_leased, store, master_key(unit.name), "r")

    def __enter__(self) -> Self:
        if self._constructed is None:
            self._tensor = self._open.enter_context(self._lend())
        return self

    def __exit__(self, *error: object) -> None:
        self._tensor = None  # lifetime: before the lease
        self._open.close()

    def find(self, segment: Segment) -> torch.Tensor | None:
        """Return the master of ``segment``, None where there is none."""
        if self._constructed is None:
            assert self._tensor is not None
            start = self._offsets.get(segment)
            return None if start is None else self._tensor[start : start + segment.numel]
        if segment not in self._constructed:
            return None
        if segment is not self._segment:
            self._tensor, self._segment = None, segment
            self._open.close()
            self._tensor = self._open.enter_context(self._constructed[segment].lend("r"))
        assert self._tensor is not None
        return self._tensor.as_strided((segment.numel,), (1,))


@contextmanager
def _leased(store: Store, key: str, mode: str, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Lease the bytes of ``key``, as ``dtype``; no tensor that lies in them may outlive the block."""
    lease = store.working_set.lease(key, mode)
    try:
        yield lease.tensor.view(dtype)
    finally:
        lease.release()


def write_masters(store: Store, unit: Unit, copy: Callable[[Segment, torch.Tensor], None]) -> None:
    """Make the key of ``unit``'s masters; ``copy(segment, out)`` writes one to ``out``, fp32 of its shape. Blocks."""
    key = master_key(unit.name)
    store.working_set.create(key, masters_nbytes(unit.segments))
    with _leased(store, key, "w") as values:
        for segment, offset in offsets_of(unit.segments).items():
            copy(segment, values[offset : offset + segment.numel].as_strided(segment.shape, segment.strides))
    store.working_set.swap_out([key])


def master_key(unit_name: str) -> str:
    """Return the key of a unit's masters."""
    return f"model/master/{unit_name}"


def masters_nbytes(segments: Iterable[Segment]) -> int:
    """Return the bytes of a unit's master key; 0 where no segment needs one."""
    return max((4 * (offset + segment.numel) for segment, offset in offsets_of(segments).items()), default=0)


def offsets_of(segments: Iterable[Segment]) -> dict[Segment, int]:
    """Return where, in elements, the fp32 master of each bf16 segment trained at ``shard`` lies in its unit's key."""
    offsets: dict[Segment, int] = {}
    offset = 0
    for segment in segments:
        if segment.dtype == torch.bfloat16 and segment.was_trainable:
            offsets[segment] = offset
            offset += round_up(segment.numel, CUT_NUMEL)
    return offsets
