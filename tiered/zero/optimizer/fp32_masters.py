"""The fp32 masters between ``shard`` and the optimizer: the values of bf16 parameters before the cast.

A unit's are one key of the store, or those keys in which its parameters were constructed. The optimizer turns them into
its own state and deletes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch

from tiered.bytes.host_tensor import copy_across
from tiered.store.residency.lease_view import Mode
from tiered.store.store import Store
from tiered.units import round_up
from tiered.zero.engine import Engine
from tiered.zero.layout import CUT_NUMEL
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.step import Event

__all__ = ["Constructed", "MasterOf", "Masters", "leased", "master_key", "masters_nbytes", "offsets_of", "taken_over",
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
        self._replaced: set[Segment] = set()  # their values are their masters

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

    def of(self, unit: Unit) -> AbstractContextManager[MasterOf]:
        """Lend the masters of ``unit``; no tensor of them may outlive the block."""
        return _Lent(self._store, unit, self._constructed.get(unit), self._replaced)

    def delete(self, unit: Unit) -> None:
        """Delete the masters of ``unit``."""
        constructed = self._constructed.pop(unit, None)
        keys = [master_key(unit.name)] if constructed is None else [each.key for each in constructed.values()]
        self._store.working_set.delete(keys)
        self._replaced.difference_update(unit.segments)

    def set_master(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The caller has replaced the values of ``segment``: its master becomes ``source``, or those values."""
        unit = segment.unit
        if not self._has(unit) or segment not in offsets_of(unit.segments):
            return
        self._replaced.add(segment)
        if source is None or source.dtype not in {torch.float32, torch.float64} or source.shape != segment.shape:
            return
        if unit in self._constructed:
            with self._constructed[unit][segment].lend("rw") as value:
                copy_across(value, source)
                del value
        else:
            start = offsets_of(unit.segments)[segment]
            with leased(self._store, master_key(unit.name), "rw", torch.float32) as values:
                master = values[start : start + segment.numel].as_strided(segment.shape, segment.strides)
                copy_across(master, source)
                del values, master
        self._replaced.discard(segment)

    def prepare_for(self, word: str) -> None:
        """Get ready for an event of the store; see ``Store.add_guard``. Blocks. Raises CapacityError, DeviceError."""
        if word in {"commit", "close"} and self._store.durable:
            for unit in self._units:
                if unit in self._constructed or (self._replaced and not self._replaced.isdisjoint(unit.segments)):
                    self._keep(unit)

    @contextmanager
    def returning(self) -> Iterator[None]:
        """The masters are those of the last commit again, which has them all in their keys."""
        self._replaced.clear()
        yield

    def _keep(self, unit: Unit) -> None:
        """Make the key of ``unit`` hold all its masters, for a commit."""
        constructed = self._constructed.get(unit)
        if constructed is not None:
            self._store.reserve_space(masters_nbytes(unit.segments))

        def copy(segment: Segment, out: torch.Tensor) -> None:
            if segment in self._replaced:
                with leased(self._store, unit.keys[segment.span], "r") as span:
                    out.copy_(segment.flat(span).as_strided(segment.shape, segment.strides))
                    del span
            elif constructed is not None:
                with constructed[segment].lend("r") as value:
                    out.copy_(value)
                    del value

        write_masters(self._store, unit, copy, is_new=constructed is not None)
        if constructed is not None:
            del self._constructed[unit]
            self._store.working_set.delete([each.key for each in constructed.values()])
        self._replaced.difference_update(unit.segments)


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


class _Lent(AbstractContextManager[MasterOf]):
    """The masters of one unit while they are read, one constructed parameter at a time, as the budget wants it.

    Parameters whose values were ``replaced`` have none here.
    """

    def __init__(
        self, store: Store, unit: Unit, constructed: Mapping[Segment, Constructed] | None, replaced: Collection[Segment]
    ) -> None:
        self._offsets = offsets_of(unit.segments)
        self._constructed = constructed
        self._replaced = replaced
        self._open = ExitStack()
        self._tensor: torch.Tensor | None = None  # those of the unit, or of one segment
        self._segment: Segment | None = None
        self._lend = functools.partial(leased, store, master_key(unit.name), "r", torch.float32)

    def __enter__(self) -> MasterOf:
        if self._constructed is None:
            self._tensor = self._open.enter_context(self._lend())
        return self._find

    def __exit__(self, *error: object) -> None:
        self._tensor = None  # lifetime: before the lease
        self._open.close()

    def _find(self, segment: Segment) -> torch.Tensor | None:
        if segment in self._replaced or segment not in (
            self._offsets if self._constructed is None else self._constructed
        ):
            return None
        if self._constructed is None:
            start = self._offsets[segment]
            assert self._tensor is not None
            return self._tensor[start : start + segment.numel]
        if segment is not self._segment:
            self._tensor, self._segment = None, segment
            self._open.close()
            self._tensor = self._open.enter_context(self._constructed[segment].lend("r"))
        assert self._tensor is not None
        return self._tensor.as_strided((segment.numel,), (1,))


@contextmanager
def leased(store: Store, key: str, mode: Mode, dtype: torch.dtype = torch.uint8) -> Iterator[torch.Tensor]:
    """Lease the bytes of ``key``, as ``dtype``; no tensor that lies in them may outlive the block."""
    lease = store.working_set.lease(key, mode)
    try:
        yield lease.tensor.view(dtype)
    finally:
        lease.release()


def write_masters(
    store: Store, unit: Unit, copy: Callable[[Segment, torch.Tensor], None], *, is_new: bool = True
) -> None:
    """Write the key of ``unit``'s masters; ``copy(segment, out)`` writes one to ``out``, fp32 of its shape. Blocks.

    The key is made where it ``is_new``; else ``out`` has the master that is there.
    """
    key = master_key(unit.name)
    if is_new:
        store.working_set.create(key, masters_nbytes(unit.segments))
    with leased(store, key, "w" if is_new else "rw", torch.float32) as values:
        for segment, offset in offsets_of(unit.segments).items():
            copy(segment, values[offset : offset + segment.numel].as_strided(segment.shape, segment.strides))
        del values
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
