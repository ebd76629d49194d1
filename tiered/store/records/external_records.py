"""External records: entries whose bytes lie in the user's own files. Under the store's lock."""

from __future__ import annotations

from dataclasses import replace

from tiered.store.format.row import ExternalRange, Row
from tiered.store.records.entry import Entry, EntryState
from tiered.store.records.records import Records

__all__ = ["adopted", "learned"]


def adopted(records: Records, entry: Entry, ranges: tuple[ExternalRange, ...]) -> None:
    """Note that the bytes of ``entry``, which is new, are those of ``ranges``; its digests are not known yet."""
    records.touch(entry)
    entry.row = replace(records.row_for(entry, ()), ranges=ranges)
    entry.state = EntryState.STORED


def learned(entry: Entry, row: Row, digests: bytes) -> None:
    """Note the digests of the external ``row``, which was that of ``entry`` when they were computed."""
    if entry.row is row:  # no sealed one: that had all digests before
        entry.row = replace(row, digests=digests)
