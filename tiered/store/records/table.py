"""The table of keys: name -> entry. A key that was not used since the store was opened is only its row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.row import Spec, decode_row
from tiered.store.records.entry import Entry, EntryState
from tiered.store.records.pages import Pages, ReadPage
from tiered.store.space.space import Readers

__all__ = ["Table"]


class Table:
    """Entries by name, in the order of creation. The store's lock guards it.

    A committed row is kept as the catalog's bytes, a quarter of an entry's size, until its entry is asked for. From
    then on the entry exists, always the same. ``peek`` is for callers that only look.
    """

    __slots__ = ("_entries", "_read_page")

    def __init__(self, read_page: ReadPage | None = None) -> None:
        self._entries: dict[str, Entry | bytes] = {}
        self._read_page = read_page

    def fill(self, rows: CommittedRows) -> None:
        """Take over all of ``rows``; the table is empty."""
        assert not self._entries
        self._entries = dict(rows.encoded)

    def get(self, name: str) -> Entry | None:
        """Return the entry of ``name``, if there is one."""
        found = self._entries.get(name)
        if type(found) is bytes:
            self._entries[name] = found = self._entry(found)
        return found  # type: ignore[return-value]  # no bytes any more

    def peek(self, name: str) -> Entry | None:
        """Return the entry of ``name``, perhaps one of the caller's own: only to look at, and only under the lock."""
        found = self._entries.get(name)
        if type(found) is bytes:
            entry = self._entry(found)
            if entry.row is not None and entry.row.is_paged:  # its readers must know of each other
                self._entries[name] = entry
            return entry
        return found  # type: ignore[return-value]

    def version(self, name: str) -> int:
        """Return the version of the bytes of ``name``; 0 where no entry was asked for. Needs no lock."""
        found = self._entries.get(name)
        return found.version if isinstance(found, Entry) else 0

    def __getitem__(self, name: str) -> Entry:
        entry = self.get(name)
        if entry is None:
            raise KeyError(name)
        return entry

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def used(self) -> Iterator[Entry]:
        """Yield the entries that were asked for: all that can be in DRAM."""
        return (entry for entry in self._entries.values() if type(entry) is not bytes)  # type: ignore[misc]

    def _entry(self, encoded: bytes) -> Entry:
        row = decode_row(encoded)
        if row.is_paged:
            row = replace(row, pages=Pages(self._read_page, Readers()))
        entry = Entry(row.name, row.key_id, Spec.of(row), scratch=False)
        entry.row = entry.committed = row
        entry.state = EntryState.STORED
        return entry
