"""The counters of a whole store, as they are at one moment. Touches no bytes."""

from __future__ import annotations

from tiered.stats import StoreStatistics
from tiered.store.generations.generations import Generations
from tiered.store.residency.working_set import WorkingSet

__all__ = ["store_statistics"]


def store_statistics(working_set: WorkingSet, generations: Generations, earlier_bytes: int | None) -> StoreStatistics:
    """Return the counters of a store, its working set and its devices.

    ``earlier_bytes`` were written before it was opened; None where that is not known.
    """
    space, records = working_set.space, working_set.records
    devices = [device.statistics() for device in space.devices]
    reading = devices if space.external is None else [*devices, space.external.statistics()]
    write_bytes = sum(device.write_bytes for device in devices)
    catalog_bytes = generations.catalog_write_bytes
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
        read_bytes=sum(device.read_bytes for device in reading),
        write_bytes=write_bytes,
        catalog_write_bytes=catalog_bytes,
        lifetime_write_bytes=None if earlier_bytes is None else earlier_bytes + write_bytes + catalog_bytes,
        num_flushes=sum(device.num_flushes for device in devices),
        working_set=working_set.statistics(),
        recorder=working_set.recorder.statistics(),
    )
