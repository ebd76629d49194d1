"""Assembly: how the parts of a store are put together, from devices, an arena and a catalog."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.bytes.condition import Condition
from tiered.errors import CorruptionError, UsageError
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.root import Root
from tiered.store.generations.generations import Generations
from tiered.store.lifetime.opening import Parts, empty_root
from tiered.store.lifetime.resources import Resources
from tiered.store.lifetime.service import Service
from tiered.store.records.producers import Producers
from tiered.store.records.records import Records
from tiered.store.residency.residents import Residents
from tiered.store.residency.working_set import WorkingSet
from tiered.store.space.space import Space
from tiered.store.values.streaming import StreamedValues
from tiered.store.values.values import Values
from tiered.store.waiting.calling_thread import NestedCalls

__all__ = ["Assembly", "assemble"]


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts that a store's methods call; all of them share ``condition``, the one lock of the store."""

    condition: Condition
    service: Service
    nested_calls: NestedCalls
    working_set: WorkingSet
    streams: StreamedValues
    values: Values
    producers: Producers
    generations: Generations
    resources: Resources


def assemble(parts: Parts, *, durable: bool, is_read_only: bool, deadline_s: float) -> Assembly:
    """Load the catalog and put a store together around ``parts``; where that fails they are closed."""
    try:
        return _assemble(parts, durable=durable, is_read_only=is_read_only, deadline_s=deadline_s)
    except BaseException:
        parts.close(parts.arena.close)
        raise


def _load(parts: Parts) -> tuple[Root, CommittedRows, bool]:
    """Return the generation that all have, and whether one came after it, which is to be given up."""
    catalog = parts.catalog
    if catalog is None:
        return empty_root(bytes(16), len(parts.devices)), CommittedRows.empty(), False
    kept = catalog.kept()
    chosen = parts.confirmation.choose(kept)
    if chosen not in kept:
        message = f"catalog {catalog.name}: it has the generations {kept}, and not {chosen}"
        raise CorruptionError(message, file=catalog.name)
    return *catalog.load(chosen.number), chosen != kept[0]


def _assemble(parts: Parts, *, durable: bool, is_read_only: bool, deadline_s: float) -> Assembly:
    root, rows, is_before = _load(parts)
    if root.num_directories != len(parts.devices):
        raise UsageError(f"the store has {root.num_directories} directories, got {len(parts.devices)}")
    parts.external.match(root, rows)
    condition, service = Condition(), Service()
    nested_calls = NestedCalls(condition)
    space = Space(
        parts.devices,
        root.store_uuid,
        condition,
        deadline_s=deadline_s,
        weights=parts.weights,
        spared_nbytes=parts.spared_nbytes,
        external=parts.external.device,
        external_indices=parts.external.indices,
    )
    records = Records(
        space,
        durable=durable,
        generation=root.generation,
        next_key_id=root.next_key_id,
        read_page=None if parts.catalog is None else parts.catalog.page,
    )
    records.load(rows)
    residents = Residents(parts.arena, condition)
    working_set = WorkingSet(
        residents,
        records,
        space,
        condition,
        deadline_s=deadline_s,
        refuse=service.refuse,
        nested_calls=nested_calls,
        is_read_only=is_read_only,
    )
    streams, producers = StreamedValues(working_set), Producers()
    generations = Generations(working_set, parts.catalog, root, producers, parts.confirmation, parts.external)
    service.refuse_failed = generations.refuse
    generations.watch_commits(parts.ledgers.note_commit, parts.check_locks)
    resources = Resources(
        parts, space, residents, records, nested_calls, working_set.mark, condition=condition, deadline_s=deadline_s
    )
    # Order: last, for a store that is refused is not written to, and no generation is given up for one that cannot be
    # opened: its catalog or files are damaged, or an external file is missing.
    if parts.catalog is not None and is_before and not is_read_only:
        parts.catalog.discard()  # durable before anything else is written
    parts.ledgers.start()
    return Assembly(
        condition=condition,
        service=service,
        nested_calls=nested_calls,
        working_set=working_set,
        streams=streams,
        values=Values(working_set, streams),
        producers=producers,
        generations=generations,
        resources=resources,
    )
