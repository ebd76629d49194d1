"""The twin of ``SqliteCatalog`` over a MemoryDisk: of ``engine="memory"``, and of tests that cut the power.

It shares the rows' codec and all checks with the real one; a commit is one transaction of the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiered.bytes.device.memory import MemoryDisk
from tiered.errors import ClosedError, CorruptionError, DeviceError, UsageError
from tiered.store.catalog.catalog import Catalog, Root, Row
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.row import decode_root, encode_root, encode_row

__all__ = ["MemoryCatalog"]

_NAME = "catalog"


class _Content(NamedTuple):
    """The contents of the disk; never changed in place."""

    body: bytes
    digest: bytes
    rows: dict[int, tuple[bytes, bytes]]  # key id -> body, digest


class MemoryCatalog(Catalog):
    """A catalog on a MemoryDisk, which loses power together with the devices on it. Not thread-safe."""

    name = "memory catalog"

    def __init__(self, disk: MemoryDisk) -> None:
        """Open the catalog on the disk; UsageError where there is none."""
        self._disk = disk
        self._is_closed = False
        self._failed = False
        if not isinstance(disk.load(_NAME), _Content):
            raise UsageError("the memory disk holds no catalog: create one")

    @classmethod
    def create(cls, disk: MemoryDisk, root: Root) -> MemoryCatalog:
        """Put the catalog of an empty store on the disk, and open it."""
        if disk.load(_NAME) is not None:
            raise UsageError("the memory disk holds a catalog already: open it")
        disk.transact(_NAME, _Content(*encode_root(root, 0, 0), {}))
        return cls(disk)

    def load(self) -> tuple[Root, CommittedRows]:
        content = self._content()
        root, header = decode_root(content.body, content.digest, self.name)
        raw = ((key_id, *content.rows[key_id]) for key_id in sorted(content.rows))
        return root, CommittedRows.decode(raw, header, self.name)

    def apply(self, root: Root, upserts: Sequence[Row], deleted: Sequence[int]) -> None:
        if self._failed:
            raise DeviceError("memory catalog: an earlier commit failed and its outcome is unknown")
        rows = dict(self._content().rows)
        for row in upserts:
            rows[row.key_id] = encode_row(row, root.store_uuid)
        for key_id in deleted:
            rows.pop(key_id, None)
        digest_sum = sum(int.from_bytes(digest, "little") for _, digest in rows.values())
        try:
            self._disk.transact(_NAME, _Content(*encode_root(root, len(rows), digest_sum), rows))
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
