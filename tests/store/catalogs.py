"""Rows, roots and homes of catalogs, for every test of them."""

import random
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace

from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.checksum import PAGE_BLOCKS, num_blocks
from tiered.store.format.root import Root
from tiered.store.format.row import Extent, Row, pages_of
from tiered.units import KiB

UUID = bytes(range(16))
ROOT = Root(store_uuid=UUID, generation=0, next_key_id=1, num_directories=2, state="{}")

NAMES = ["layer.0.weight", "", "a\0b", "x" * 10_000, "\ud800 alone", "schön/日本", "../../etc/passwd", "🜁"]


def row_of(key_id, name=None, *, nbytes=5000, generation=1, seed=0):
    rng = random.Random(seed + key_id)
    extents = (Extent(0, 0, 8192 * key_id, -(-nbytes // 4096) * 4096),) if nbytes else ()
    return Row(
        key_id=key_id,
        name=f"key {key_id}" if name is None else name,
        dtype="uint8",
        shape=(nbytes,),
        nbytes=nbytes,
        generation=generation,
        extents=extents,
        digests=rng.randbytes(8 * num_blocks(nbytes)),
        inline=None,
    )


def inline_row(key_id, content, generation=1):
    return Row(key_id, f"inline {key_id}", "uint8", (len(content),), len(content), generation, (), b"", content)


def large_row(key_id, *, num_blocks=3 * PAGE_BLOCKS - 5, generation=1, seed=0):
    """Return a row of blocks of 4 KiB that needs three pages."""
    nbytes = num_blocks * 4 * KiB - 7
    row = row_of(key_id, nbytes=nbytes, generation=generation, seed=seed)
    places = (Extent(0, 1, key_id << 30, 4 * KiB), Extent(1, 0, key_id << 30, num_blocks * 4 * KiB))
    return replace(row, block_nbytes=4 * KiB, digests=bytes((key_id + seed,)) * 8 * num_blocks, extents=places)


def paged(row):
    """Return what is in the row's own place of the catalog, where it has pages."""
    return replace(row, extents=(), digests=b"", is_paged=True) if list(pages_of(row)) else row


def root_of(generation, next_key_id=1 << 40, state="{}"):
    return replace(ROOT, generation=generation, next_key_id=next_key_id, state=state)


class SqliteHome:
    """Where a catalog file lives; ``reopen`` is what a new process does."""

    def __init__(self, directory):
        self.path = directory / "catalog.db"

    def create(self, root=ROOT):
        return SqliteCatalog.create(self.path, root)

    def reopen(self, **options):
        return SqliteCatalog(self.path, **options)


def loaded(catalog):
    root, rows = catalog.load()
    return root, list(rows)


def content_of(home, **options):
    with closing(home.reopen(**options)) as catalog:
        return loaded(catalog)


class FailingConnection:
    """A connection on which statements that start with a word fail, as a drive makes them."""

    def __init__(self, connection, word, code):
        self._connection, self._word, self._code = connection, word, code

    def execute(self, sql, *parameters):
        if self._word and sql.startswith(self._word):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = self._code
            raise error
        return self._connection.execute(sql, *parameters)

    def __getattr__(self, name):
        return getattr(self._connection, name)


@contextmanager
def failing(catalog, word, code):
    connection = catalog._connection
    catalog._connection = FailingConnection(connection, word, code)
    yield
    catalog._connection = connection
