"""Assembly: how the parts of a store are put together, from devices, an arena and a catalog."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.bytes.condition import Condition
from tiered.errors import UsageError
from tiered.store.format.rows import Rows
from tiered.store.generations.generations import Generations
from tiered.store.lifetime.opening import Parts, empty_root
from tiered.store.lifetime.resources import Resources
from tiered.store.lifetime.service import Service
from tiered.store.records.finishers import Finishers
from tiered.store.records.records import Records
from tiered.store.residency.residents import Residents
from tiered.store.residency.working_set import WorkingSet
from tiered.store.space.space import Space
from tiered.store.values.streaming import Streams
from tiered.store.values.values import Values
from tiered.store.waiting.reentry import Reentry

__all__ = ["Assembly", "assemble"]


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts that a store's methods call; all of them share ``condition``, the one lock of the store."""

    condition: Condition
    service: Service
    reentry: Reentry
    working_set: WorkingSet
    streams: Streams
    values: Values
    finishers: Finishers
    generations: Generations
    resources: Resources


def assemble(parts: Parts, *, durable: bool, is_read_only: bool, deadline_s: float) -> Assembly:
    """Load the catalog and put a store together around ``parts``; where that fails they are closed."""
    try:
        return _assemble(parts, durable=durable, is_read_only=is_read_only, deadline_s=deadline_s)
    except BaseException:
        parts.close(parts.arena.close)
        raise


def _assemble(parts: Parts, *, durable: bool, is_read_only: bool, deadline_s: float) -> Assembly:
    root, rows = empty_root(bytes(16), len(parts.devices)), Rows.empty()
    if parts.catalog is not None:
        root, rows = parts.catalog.load()
    if root.num_directories != len(parts.devices):
        raise UsageError(f"the store has {root.num_directories} directories, got {len(parts.devices)}")
    condition, service = Condition(), Service()
    reentry = Reentry(condition)
    space = Space(
        parts.devices,
        root.store_uuid,
        condition,
        deadline_s=deadline_s,
        weights=parts.weights,
        spared_nbytes=parts.spared_nbytes,
    )
    records = Records(space, durable=durable, generation=root.generation, next_key_id=root.next_key_id)
    records.load(rows)
    residents = Residents(parts.arena, condition)
    working_set = WorkingSet(
        residents,
        records,
        space,
        condition,
        deadline_s=deadline_s,
        refuse=service.refuse,
        reentry=reentry,
        is_read_only=is_read_only,
    )
    streams, finishers = Streams(working_set), Finishers()
    generations = Generations(working_set, parts.catalog, root, finishers)
    service.refuse_failed = generations.refuse
    return Assembly(
        condition=condition,
        service=service,
        reentry=reentry,
        working_set=working_set,
        streams=streams,
        values=Values(working_set, streams),
        finishers=finishers,
        generations=generations,
        resources=Resources(parts, space, residents, records, condition=condition, reentry=reentry),
    )
