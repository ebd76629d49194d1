"""The twin of ``SqliteCatalog`` over a MemoryDisk: of ``engine="memory"``, and of tests that cut the power.

It shares the rows' codec and all checks with the real one; a commit is one transaction of the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiered.bytes.device.memory import MemoryDisk
from tiered.errors import ClosedError, CorruptionError, DeviceError, UsageError
from tiered.store.catalog.catalog import Catalog, GenerationName, generation_names
from tiered.store.format.checksum import PAGE_BLOCKS
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.root import Root, corrupt, decode_root, encode_root
from tiered.store.format.row import Page, Row, decode_page, encode_page, encode_row, page_digest, pages_of, row_seed

__all__ = ["MemoryCatalog"]

_NAME = "catalog"


class _Generation(NamedTuple):
    """The rows of a generation; never changed in place."""

    body: bytes
    digest: bytes
    rows: dict[int, tuple[bytes, bytes]]  # key id -> body, digest
    pages: dict[tuple[int, int], tuple[bytes, bytes]]  # key id, page -> body, digest


class _Content(NamedTuple):
    """The contents of the disk: the generations that are kept, the newest first."""

    kept: tuple[_Generation, ...]


class MemoryCatalog(Catalog):
    """A catalog on a MemoryDisk, which loses power together with the devices on it. Not thread-safe."""

    name = "memory catalog"

    def __init__(self, disk: MemoryDisk) -> None:
        """Open the catalog on the disk; UsageError where there is none."""
        self._disk = disk
        self._is_closed = False
        self._failed = False
        self._loaded = 0  # which of the generations that are kept
        if not isinstance(disk.load(_NAME), _Content):
            raise UsageError("the memory disk holds no catalog: create one")

    @classmethod
    def create(cls, disk: MemoryDisk, root: Root) -> MemoryCatalog:
        """Put the catalog of an empty store on the disk, and open it."""
        if disk.load(_NAME) is not None:
            raise UsageError("the memory disk holds a catalog already: open it")
        disk.transact(_NAME, _Content((_Generation(*encode_root(root, 0, 0), {}, {}),)))
        return cls(disk)

    def kept(self) -> tuple[GenerationName, ...]:
        headers = [decode_root(each.body, each.digest, self.name)[1] for each in self._content().kept]
        return generation_names(headers, self.name)

    def load(self, generation: int | None = None) -> tuple[Root, CommittedRows]:
        for index, each in enumerate(self._content().kept):
            root, header = decode_root(each.body, each.digest, self.name)
            if generation in (None, root.generation):
                self._loaded = index
                raw = ((key_id, *each.rows[key_id]) for key_id in sorted(each.rows))
                raw_pages = ((*place, *each.pages[place]) for place in sorted(each.pages))
                rows = CommittedRows.decode(raw, header, self.name, raw_pages=raw_pages, external=root.external)
                return root, rows
        raise UsageError(f"the memory catalog does not hold generation {generation}")

    def page(self, row: Row, number: int) -> Page:
        loaded = self._content().kept[self._loaded]
        body, digest = loaded.pages.get((row.key_id, number), (b"", b""))
        seed = row_seed(decode_root(loaded.body, loaded.digest, self.name)[0].store_uuid)
        if page_digest(row.key_id, number, body, seed) != digest:
            raise corrupt(f"page {number} of {row.name!r} does not match its digest", self.name, row.name)
        return decode_page(body, min(PAGE_BLOCKS, row.num_blocks - number * PAGE_BLOCKS))

    def apply(self, root: Root, upserts: Sequence[Row], deleted: Sequence[int], *, keeps_before: bool = False) -> None:
        newest = self._content().kept[0]
        rows, pages = dict(newest.rows), dict(newest.pages)
        seed = row_seed(root.store_uuid)
        whole = {row.key_id for row in upserts if not row.is_paged} | set(deleted)
        for place in [place for place in pages if place[0] in whole]:
            del pages[place]
        for row in upserts:
            rows[row.key_id] = encode_row(row, root.store_uuid)
            for number, page in enumerate(pages_of(row)) if row.pages is None else row.pages.changed.items():
                body = encode_page(page)
                pages[row.key_id, number] = (body, page_digest(row.key_id, number, body, seed))
        for key_id in deleted:
            rows.pop(key_id, None)
            for place in [place for place in pages if place[0] == key_id]:
                del pages[place]
        digest_sum = sum(int.from_bytes(digest, "little") for _, digest in (*rows.values(), *pages.values()))
        made = _Generation(*encode_root(root, len(rows) + len(pages), digest_sum), rows, pages)
        self._transact(_Content((made, newest) if keeps_before else (made,)))

    def discard(self) -> None:
        kept = self._content().kept
        if len(kept) < 2:
            raise UsageError("the memory catalog holds one generation: there is none before it to return to")
        self._transact(_Content(kept[1:]))

    def _transact(self, content: _Content) -> None:
        if self._failed:
            raise DeviceError("memory catalog: an earlier commit failed and its outcome is unknown")
        self._loaded = 0
        try:
            self._disk.transact(_NAME, content)
        except DeviceError:
            self._failed = True
            raise

    def close(self) -> None:
        self._is_closed = True

    def __repr__(self) -> str:
        return f"<MemoryCatalog {'closed' if self._is_closed else 'open'}>"

    def _content(self) -> _Content:
        if self._is_closed:
            raise ClosedError("the memory catalog is closed")
        content = self._disk.load(_NAME)
        if not isinstance(content, _Content):
            raise CorruptionError("the memory disk has lost its catalog", file=self.name)
        return content
