"""KeyTable: all keys, and which generation each key's bytes belong to.

Bookkeeping only: every method runs under the store's lock, none does I/O, none touches DRAM. The rule that it keeps:
*writes never touch committed bytes*. An entry has a committed set of extents, a sealed one while a commit runs, and
``landing`` for the open generation; at most two of the three. A key that was not used since the store was opened is
only its row.
"""

from __future__ import annotations

import heapq
import logging
import operator
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from tiered.store.format.checksum import DIGEST_NBYTES
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.row import Extent, ExternalRange, Row, Spec, decode_row, has_unread, unread_digests
from tiered.store.residency.entry import Alias, BlockWrites, Entry, EntryState, Record, Stored
from tiered.store.residency.paged_rows import BlockChange, PagedRows, Pages, ReadPages, Replaced, num_pages
from tiered.store.space.space import Readers
from tiered.units import format_bytes

__all__ = ["Extents", "KeyTable", "Sealed", "new_row"]


class Sealed:
    """The fixed contents of a generation; its rows are complete once every pending entry has landed."""

    __slots__ = (
        "freed", "generation", "is_applying", "nonce", "num_pending", "parts", "phase", "removed", "rows", "state",
        "targets", "thread", "to_write",
    )  # fmt: skip

    def __init__(self, generation: int, state: str) -> None:
        self.generation = generation
        self.nonce = 0  # that all who share the store have agreed on
        self.state = state  # JSON text
        self.rows: dict[Entry, Row] = {}  # changed entries whose bytes have landed
        self.targets: dict[Entry, tuple[Extent, ...]] = {}  # changed entries whose bytes have not, and where they go
        self.to_write: deque[Entry] = deque()  # the entries of ``targets`` that may need a write to be started
        self.removed: list[Entry] = []
        self.parts: dict[Entry, BlockWrites] = {}  # of the entries of ``rows`` with some blocks written by themselves
        self.freed: dict[Entry, list[Extent]] = {}  # extents of committed rows that had to be looked up
        self.num_pending = 0
        self.is_applying = False  # the catalog is about to have it
        self.phase = 0  # counts the steps of the commit, as a sign of progress
        self.thread: threading.Thread | None = None  # that flushes it, where it has one of its own


# -- the table of keys -------------------------------------------------------------------------------------------------


class Entries:
    """Entries by name, in the order of creation. The store's lock guards it.

    A committed row is kept as the catalog's bytes, a quarter of an entry's size, until its entry is asked for. From
    then on the entry exists, always the same. ``peek`` is for callers that only look.
    """

    __slots__ = ("_entries", "_read_pages")

    def __init__(self, read_pages: ReadPages | None = None) -> None:
        self._entries: dict[str, Entry | bytes] = {}
        self._read_pages = read_pages

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
            row = entry.row
            if row is not None and (row.is_paged or has_unread(row)):  # its readers must know of each other
                self._entries[name] = entry
            return entry
        return found  # type: ignore[return-value]

    def version(self, name: str) -> int:
        """Return the version of the bytes of ``name``; 0 where no entry was asked for. Needs no lock."""
        found = self._entries.get(name)
        return found.version if isinstance(found, Entry) else 0

    def has_bytes(self, name: str) -> bool:
        """Return whether there is a key of ``name`` that is not UNDEFINED. Needs no lock."""
        found = self._entries.get(name)
        return found is not None and not (isinstance(found, Entry) and found.state is EntryState.UNDEFINED)

    def __getitem__(self, name: str) -> Entry:
        entry = self.get(name)
        assert entry is not None, name
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
            row = replace(row, pages=Pages(self._read_pages, Readers()))
        entry = Entry(row.name, row.key_id, Spec.of(row), scratch=False)
        entry.row = entry.committed = row
        entry.state = EntryState.STORED
        return entry


# -- key table ---------------------------------------------------------------------------------------------------------


Extents = tuple[Extent, ...]

_log = logging.getLogger("tiered")


class KeyTable(PagedRows):
    """All entries, and their changes since the last seal."""

    durable: bool
    generation: int  # the last sealed one
    next_key_id: int

    def __init__(self) -> None:
        super().__init__()
        self.entries = Entries(self.read_pages)
        self.sealed: Sealed | None = None  # the running commit
        self.changed: dict[Entry, None] = {}  # since the last seal; an ordered set
        self.removed: dict[Entry, None] = {}  # deleted since the last seal, and not new since then
        self.copied: dict[Entry, Row] = {}  # adopted since then, and bytes of their own by now: the row before
        self._hidden: set[Entry] = set()  # undefined ones, and scratch keys of a durable store

    @property
    def open_generation(self) -> int:
        """The generation that changes made now will be part of."""
        return self.generation + 1

    def load(self, rows: CommittedRows) -> None:
        """Fill the empty table with committed rows. Raises CorruptionError for extents that cannot be theirs."""
        self.space.claim_all(rows)
        self.entries.fill(rows)

    # Below: the mapping

    @property
    def num_keys(self) -> int:
        """How many keys the mapping shows."""
        return len(self.entries) - len(self._hidden)

    def names(self) -> list[str]:
        """Return the names that the mapping shows: durable ones (all, in a store without commits) that have bytes."""
        hidden = {entry.name for entry in self._hidden}
        return [name for name in self.entries if name not in hidden]

    def records(self) -> list[Record]:
        """Return a record of each key that the mapping shows, in the order of creation."""
        entries = map(self.peek, self.names())
        return [entry.record() for entry in entries if entry is not None]

    def largest(self, number: int) -> list[tuple[str, int]]:
        """Return names and bytes of the committed keys, or of all without commits, that take most of the files."""
        entries = filter(None, map(self.peek, self.entries))
        rows = ((entry.name, entry.committed if self.durable else entry.row) for entry in entries)
        found = [(name, row.stored_nbytes) for name, row in rows if row is not None and row.has_extents]
        return heapq.nlargest(number, found, key=operator.itemgetter(1))

    def taken_nbytes(self, prefix: str) -> tuple[int, int]:
        """Return what the keys that begin with ``prefix`` take of the files, and what they will after a commit.

        Bytes that have no place yet count as if they had. Tensors in rows of the catalog count as they are.
        """
        sealed = self.sealed
        gone = [*self.removed, *(() if sealed is None else sealed.removed)]
        found = filter(None, (self.entries.peek(name) for name in self.entries if name.startswith(prefix)))
        now = after = 0
        for entry in (*found, *(entry for entry in gone if entry.name.startswith(prefix))):
            before, newest = self._taken_by(entry)
            now, after = now + before + newest, after + newest
        return now, after

    def _taken_by(self, entry: Entry) -> tuple[int, int]:
        """Return what ``entry`` takes of the files until the next commit, and what it takes then."""
        sealed_row = None if self.sealed is None else self.sealed.rows.get(entry)
        rows = {id(row): row for row in (entry.committed, sealed_row) if row is not None and row is not entry.row}
        before = sum(len(row.inline) if row.inline is not None else row.stored_nbytes for row in rows.values())
        if entry.state is EntryState.UNDEFINED or (entry.row is not None and entry.row.ranges):
            return before, 0
        return before, entry.nbytes if entry.is_inline else self.space.round_up(entry.nbytes)

    def shown(self, name: str) -> Entry | None:
        """Return the entry that the mapping shows under ``name``."""
        entry = self.entries.get(name)
        return None if entry is None or entry in self._hidden else entry

    def is_shown(self, name: str) -> bool:
        """Whether the mapping shows ``name``."""
        if not self._hidden:
            return name in self.entries
        return self.peek(name) is not None

    def peek(self, name: str) -> Entry | None:
        """Return what ``shown`` would, only to look at: an unused key costs no more memory afterwards."""
        entry = self.entries.peek(name)
        return None if entry is None or entry in self._hidden else entry

    def add(self, name: str, spec: Spec, *, scratch: bool, key_id: int | None = None) -> Entry:
        """Add an UNDEFINED entry; ``name`` is free, ``key_id`` new or None."""
        assert name not in self.entries, name
        entry = Entry(name, self.new_key_ids(1) if key_id is None else key_id, spec, scratch=scratch)
        self.entries[name] = entry
        self._hidden.add(entry)
        return entry

    def new_key_ids(self, number: int) -> int:
        """Return the first of ``number`` key ids that no key has had."""
        key_id = self.next_key_id
        self.next_key_id += number
        return key_id

    def _take_out(self, entry: Entry) -> None:
        """Take a settled entry out of the table; its buffer, if any, is the caller's to drop."""
        assert entry.is_settled, entry
        del self.entries[entry.name]
        self._hidden.discard(entry)
        self.changed.pop(entry, None)
        self.copied.pop(entry, None)
        self._free_landing(entry)
        self.free_blocks(entry)
        if entry.committed is not None or (self.sealed is not None and entry in self.sealed.rows):
            self.removed[entry] = None
        entry.row = None
        entry.state = EntryState.UNDEFINED

    def _empty(self, entry: Entry) -> None:
        """Make a settled scratch entry UNDEFINED again; its buffer, if any, is the caller's to drop."""
        assert entry.scratch and entry.is_settled, entry
        self._hidden.add(entry)
        self._free_landing(entry)
        self.free_blocks(entry)
        entry.row = None
        entry.outdate()
        entry.state = EntryState.UNDEFINED

    # Below: where bytes go

    def touch(self, entry: Entry, alias: Alias | None = None) -> None:
        """Note that the newest bytes are about to be in DRAM only, or in a row the caller will set.

        ``alias`` is the lease for writing that is being granted, if one is: it may turn out to change nothing.
        """
        pages = None if entry.row is None else entry.row.pages
        is_read = isinstance(pages, Pages) and pages.readers.are_there
        if is_read:  # a stream reads the bytes of many blocks: they stay, and are not written over
            self._free_landing(entry)
        if alias is not None and entry.state is EntryState.CLEAN and entry.parts is None and not is_read:
            alias.before = Stored(entry.row, entry in self.changed, entry.version)
        if entry.parts is not None:
            self.free_blocks(entry)
        if entry.row is not None and entry.row.ranges and entry in self.changed:
            self.copied[entry] = entry.row
        entry.row = None
        entry.outdate()
        if not entry.scratch:
            self.changed[entry] = None
        if not (entry.scratch and self.durable):
            self._hidden.discard(entry)

    def untouch(self, entry: Entry, before: Stored) -> None:
        """Note that the bytes are those that the device had ``before``, and nothing was written since."""
        entry.row, entry.version = before.row, before.version
        if not before.was_changed:
            self.changed.pop(entry, None)

    def may_write(self, entry: Entry) -> bool:
        """Whether a write now would respect the two sets; else it waits for the running commit."""
        if entry.is_pending or entry.scratch or entry.landing or entry.parts or self.sealed is None:
            return True
        has_sealed = entry in self.sealed.rows and self.sealed.rows[entry].has_extents
        has_committed = entry.committed is not None and entry.committed.has_extents
        return not (has_sealed and has_committed)

    def take_target(self, entry: Entry) -> Extents | None:
        """Return the extents that the entry's bytes are to be written to; None when the files must grow first."""
        if entry.is_pending:
            assert self.sealed is not None
            return self.sealed.targets[entry]
        if entry.landing is not None and self.space.is_streaming(entry.landing):
            self._free_landing(entry)  # a stream still reads the older bytes: they stay until it ends
        if entry.landing is None:
            entry.landing = self.space.take_nowait(entry.nbytes, scratch=entry.scratch)
        return entry.landing

    def row_for(self, entry: Entry, extents: Extents) -> Row:
        """Return the row, yet without digests, for bytes about to be written to ``extents``."""
        # Order: pending bytes are the sealed generation's, all others the open one's.
        generation, spec = self.generation if entry.is_pending else self.open_generation, entry.spec
        return new_row(entry.key_id, entry.name, spec, generation, extents)

    def inline_row(self, entry: Entry, content: bytes) -> Row:
        """Return the row of an inline entry."""
        return replace(self.row_for(entry, ()), inline=content)

    def landed(self, entry: Entry, row: Row) -> None:
        """Note that the entry's newest bytes are in ``row``, whose extents are its target."""
        entry.row = row = self.kept_row(row)
        if entry.is_pending:
            assert self.sealed is not None
            self.sealed.rows[entry] = row
            del self.sealed.targets[entry]
            self.sealed.num_pending -= 1
            entry.is_pending = False

    def streamed(self, entry: Entry, row: Row) -> None:
        """Note that bytes were written to fresh extents past the target; they are the open generation's."""
        self.touch(entry)
        self._free_landing(entry)
        entry.landing = row.extents
        entry.row = self.kept_row(row)
        entry.state = EntryState.STORED

    def parts_written(self, entry: Entry, row: Row, change: BlockChange) -> None:
        """Note that blocks of ``entry`` were written by themselves; see ``PagedRows._note_blocks``."""
        is_sealed = not entry.scratch and entry not in self.changed
        self._note_blocks(entry, row, change, is_sealed=is_sealed, generation=self.open_generation)
        entry.outdate()
        if not entry.scratch:
            self.changed[entry] = None

    def adopt_ranges(self, entry: Entry, ranges: tuple[ExternalRange, ...], *, at_first_touch: bool) -> None:
        """Note that the bytes of ``entry``, which is new, are those of ``ranges``; their digests are not known yet.

        ``at_first_touch``: nor does a commit need them.
        """
        self.touch(entry)
        entry.row = row = replace(self.row_for(entry, ()), ranges=ranges)
        if at_first_touch:
            entry.row = replace(row, digests=unread_digests(bytes(row.num_blocks * DIGEST_NBYTES)))
        entry.state = EntryState.STORED

    def take_learned(self) -> None:
        """Have the next commit keep the digests of blocks that were read for the first time."""
        for name in list(self.space.progress.learned):  # until they are sealed: a rollback leaves them to the next one
            entry = self.entries.get(name)
            if entry is not None and not entry.scratch and entry.row is not None and has_unread(entry.row):
                self.changed[entry] = None

    @staticmethod
    def learn_digests(entry: Entry, row: Row, digests: bytes) -> None:
        """Note the digests of the external ``row``, which was that of ``entry`` when they were computed."""
        if entry.row is row:  # no sealed one: that had all digests before
            entry.row = replace(row, digests=digests)

    def lost_target(self, entry: Entry, extents: Extents) -> None:
        """Note that a write to ``extents`` failed: nothing is written there again."""
        self.space.quarantine(extents)
        if entry.landing == extents:
            entry.landing = None

    def _free_landing(self, entry: Entry) -> None:
        if entry.landing is None:
            return
        landing, entry.landing = entry.landing, None
        if entry.row is not None and isinstance(entry.row.pages, Pages):
            self.space.give_back_when_read(landing, entry.row.pages.readers)
        else:
            self.space.give_back(landing)

    # Below: generations

    def commit_progress(self) -> object:
        """Return a value that changes as long as the running commit comes closer to its end."""
        if self.sealed is None:
            return None
        num_blocks = self.space.progress.num_blocks if self.sealed.num_pending else 0
        return self.sealed.generation, self.sealed.phase, self.sealed.num_pending, num_blocks

    @property
    def has_changes(self) -> bool:
        """Whether a commit now would contain other tensors than the last sealed generation."""
        return bool(self.changed or self.removed)

    def unsealed(self) -> list[Entry]:
        """Return the entries that a seal or a rollback concerns: changed ones, and those with a removed one's name."""
        renewed = [self.entries.get(removed.name) for removed in self.removed]
        return [*self.changed, *[entry for entry in renewed if entry is not None and entry not in self.changed]]

    def report_dropped(self) -> bool:
        """Close: log the changes that are in no commit; return whether there are any."""
        dropped = [*self.changed, *self.removed]
        if dropped and self.durable:
            _log.warning(
                "closed without a commit: changes to %d keys, %s, since generation %d are dropped",
                len({entry.name for entry in dropped}),  # a key that was put again is in both
                format_bytes(sum(entry.nbytes for entry in dropped)),
                self.generation,
            )
        return bool(dropped) and self.durable

    def superseded(self) -> dict[Entry, int]:
        """Return the bytes that the next commit would free, by entry."""
        writes = {entry: entry.parts for entry in (*self.changed, *self.removed)}
        if self.sealed is not None:
            sealed = (*self.sealed.rows, *self.sealed.targets, *self.sealed.removed)
            writes |= {entry: self.sealed.parts.get(entry) for entry in sealed}
        return {entry: _freed_nbytes(entry.committed, parts) for entry, parts in writes.items()}

    def seal(self, state: str) -> Sealed:
        """Fix the contents of the open generation and open the next; every dirty entry has its target."""
        assert self.sealed is None
        sealed = Sealed(self.open_generation, state)
        for entry in self.changed:
            self.space.progress.learned.pop(entry.name, None)  # order: digests of later reads are the next one's
            if entry.row is not None:
                sealed.rows[entry] = entry.row
                if entry.parts is not None:
                    sealed.parts[entry], entry.parts = entry.parts, None
            else:
                assert entry.landing is not None, entry
                sealed.targets[entry] = entry.landing
                entry.is_pending = True
            entry.landing = None
        sealed.to_write.extend(sealed.targets)
        sealed.num_pending = len(sealed.targets)
        sealed.removed = list(self.removed)
        self.changed.clear()
        self.removed.clear()
        self.copied.clear()
        self.generation = sealed.generation
        self.sealed = sealed
        return sealed

    def committed(self) -> None:
        """Note that the sealed generation is durable: free the extents that it supersedes."""
        sealed = self.sealed
        assert sealed is not None and not sealed.num_pending
        for entry, row in sealed.rows.items():
            old, entry.committed = entry.committed, row
            self.space.count_keys(added=row.nbytes if old is None and row.has_extents else 0)
            if isinstance(row.pages, Pages):
                row.pages.written()
            self._give_back_superseded(old, row, sealed.parts.get(entry), sealed.freed.get(entry, ()))
        for entry in sealed.removed:
            assert entry.committed is not None, f"{entry} was never committed, and yet its removal is"
            self._give_back_superseded(entry.committed, None, None, sealed.freed.get(entry, ()))
            self.space.count_keys(deleted=entry.committed.nbytes if entry.committed.has_extents else 0)
            entry.committed = None
        self.sealed = None

    def begin_to_apply(self) -> list[Replaced]:
        """Return the rows with pages that the running commit replaces, before the catalog forgets these pages.

        From here on nobody begins to read the committed rows that it replaces: see ``is_replaced``.
        """
        sealed = self.sealed
        assert sealed is not None
        sealed.is_applying = True
        found = []
        for entry in (*sealed.rows, *sealed.removed):
            old, parts = entry.committed, sealed.parts.get(entry)
            if old is not None and isinstance(old.pages, Pages):
                is_whole = parts is None or parts.owns_all
                row = sealed.rows.get(entry)
                changed = () if is_whole or row is None or row.pages is None else tuple(row.pages.changed)
                if is_whole or old.pages.readers.are_there:
                    numbers = range(num_pages(old)) if is_whole else changed
                    found.append(Replaced(entry, old, old.pages, numbers, is_whole))
        return found

    def is_replaced(self, entry: Entry) -> bool:
        """Whether a commit is about to replace the committed row of ``entry`` in the catalog."""
        sealed = self.sealed
        return sealed is not None and sealed.is_applying and (entry in sealed.rows or entry in sealed.removed)

    def _roll_back_rows(self) -> list[Entry]:
        """Return to the last sealed generation; no commit runs and all changed entries are settled.

        Returns the entries whose DRAM the caller must drop: their bytes there are void.
        """
        assert self.sealed is None
        dropped = list(self.changed)
        for entry in dropped:
            self._free_landing(entry)
            self.free_blocks(entry)
            self._restore(entry)
        for entry in [entry for entry in self._hidden if entry.state is EntryState.UNDEFINED and not entry.scratch]:
            self._hidden.discard(entry)
            del self.entries[entry.name]
        for entry in self.removed:
            in_the_way = self.entries.get(entry.name)
            if in_the_way is not None:  # a scratch key that took the name of a durable one
                self._take_out(in_the_way)
                dropped.append(in_the_way)
            self.entries[entry.name] = entry
            self._restore(entry)
        self.changed.clear()
        self.removed.clear()
        self.copied.clear()
        return dropped

    def _restore(self, entry: Entry) -> None:
        entry.row = entry.committed
        entry.outdate()
        entry.state = EntryState.STORED
        if entry.committed is None:
            entry.state = EntryState.UNDEFINED
            del self.entries[entry.name]


def new_row(key_id: int, key: str, spec: Spec, generation: int, extents: Extents, digests: bytes = b"") -> Row:
    """Return the row of a tensor that is written to ``extents``."""
    return Row(
        key_id=key_id, name=key, dtype=spec.dtype_name, shape=spec.shape, nbytes=spec.nbytes, generation=generation,
        extents=extents, digests=digests, inline=None, block_nbytes=spec.block_nbytes,
    )  # fmt: skip


def _freed_nbytes(committed: Row | None, parts: BlockWrites | None) -> int:
    """Return how many bytes of ``committed`` a row in its place frees: all, or those of some blocks."""
    if parts is not None and not parts.owns_all:
        return sum(extent.nbytes for extent in parts.superseded)
    return 0 if committed is None else committed.stored_nbytes
