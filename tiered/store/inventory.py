"""Inventory: what a store says of itself: its keys and its counters, as they are at one moment. Touches no bytes."""

from __future__ import annotations

from tiered.stats import StoreStatistics
from tiered.store.generations.generations import Generations
from tiered.store.records.entry import Record
from tiered.store.residency.working_set import WorkingSet

__all__ = ["records_of", "statistics_of"]


def records_of(working_set: WorkingSet) -> list[Record]:
    """Return what is known of each key, in the order of creation."""
    records = working_set.records
    with working_set.condition:
        entries = map(records.peek, records.names())
        return [entry.record() for entry in entries if entry is not None]


def statistics_of(working_set: WorkingSet, generations: Generations) -> StoreStatistics:
    """Return the counters of a store, its working set and its devices."""
    space, records = working_set.space, working_set.records
    devices = [device.statistics() for device in space.devices]
    with working_set.condition:
        num_keys, used, free = len(records), space.used_nbytes, space.free_nbytes
    return StoreStatistics(
        generation=generations.root.generation,
        num_keys=num_keys,
        num_commits=generations.num_commits,
        used_bytes=used,
        free_bytes=free,
        quarantined_bytes=space.quarantined_nbytes,
        file_bytes=sum(device.file_bytes for device in devices),
        read_bytes=sum(device.read_bytes for device in devices),
        write_bytes=sum(device.write_bytes for device in devices),
        catalog_write_bytes=generations.catalog_write_bytes,
        num_flushes=sum(device.num_flushes for device in devices),
        working_set=working_set.statistics(),
        recorder=working_set.recorder.statistics(),
    )
