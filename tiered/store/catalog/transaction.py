"""Transactions of a catalog: the statements that take its tables from one generation to another.

The caller begins and commits; the layout is on the first screen of catalog.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

from tiered.store.format.root import FORMAT_VERSION, Root, RootHeader, encode_root
from tiered.store.format.row import (
    KIND_AT,
    PAGED,
    Page,
    Row,
    encode_page,
    encode_row,
    page_digest,
    pages_of,
    row_seed,
)

__all__ = ["PAGES_BEFORE", "ROWS_BEFORE", "SCHEMA", "CatalogTransaction", "discard_newest"]

_RECORDS = "(key_id INTEGER PRIMARY KEY, body BLOB NOT NULL, digest BLOB NOT NULL)"
_PAGES = (
    "(key_id INTEGER NOT NULL, page INTEGER NOT NULL, body BLOB NOT NULL, digest BLOB NOT NULL, "
    "PRIMARY KEY (key_id, page)) WITHOUT ROWID"
)
SCHEMA = {
    "root": "CREATE TABLE root (one INTEGER PRIMARY KEY, format INTEGER NOT NULL, body BLOB NOT NULL, "
    "digest BLOB NOT NULL)",
    "records": f"CREATE TABLE records {_RECORDS}",
    "pages": f"CREATE TABLE pages {_PAGES}",
    "records_before": f"CREATE TABLE records_before {_RECORDS}",
    "pages_before": f"CREATE TABLE pages_before {_PAGES}",
}
"""The tables by name."""

ROWS_BEFORE = (
    "SELECT key_id, body, digest FROM records WHERE key_id NOT IN (SELECT key_id FROM records_before) "
    "UNION ALL SELECT key_id, body, digest FROM records_before WHERE length(body) > 0 ORDER BY key_id"
)
"""The rows of the generation before the newest."""

PAGES_BEFORE = (
    "SELECT key_id, page, body, digest FROM pages WHERE (key_id, page) NOT IN (SELECT key_id, page FROM pages_before) "
    "UNION ALL SELECT key_id, page, body, digest FROM pages_before WHERE length(body) > 0 ORDER BY key_id, page"
)
"""Its pages."""


class CatalogTransaction:
    """The change from the generation of ``header`` to the next one, with number and sum kept up to date."""

    def __init__(self, connection: sqlite3.Connection, header: RootHeader, *, keeps_before: bool) -> None:
        self._connection = connection
        self._header = header
        self._keeps = keeps_before
        self._num_rows = header.num_rows
        self._digest_sum = header.digest_sum
        self._seed = row_seed(header.store_uuid)
        if connection.execute("SELECT one FROM root WHERE one = 0").fetchone():  # a deletion of nothing writes pages
            for table in ("records_before", "pages_before"):
                connection.execute(f"DELETE FROM {table}")
            connection.execute("DELETE FROM root WHERE one = 0")
        if keeps_before:
            connection.execute("INSERT INTO root SELECT 0, format, body, digest FROM root WHERE one = 1")

    def upsert(self, rows: Iterable[Row]) -> None:
        """Insert or replace ``rows`` and their pages."""
        self._connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", self._encoded(rows))

    def _encoded(self, rows: Iterable[Row]) -> Iterator[tuple[int, bytes, bytes]]:
        store_uuid, next_key_id = self._header.store_uuid, self._header.next_key_id
        for row in rows:
            body, new = encode_row(row, store_uuid)
            old = None if row.key_id >= next_key_id else self._digest_of(row.key_id)
            if self._keeps:
                self._keep_row(row.key_id)
            if old is not None and not row.is_paged:
                self._drop_pages(row.key_id)
            self._count(old, new)
            if body[KIND_AT] == PAGED:
                pages = enumerate(pages_of(row)) if row.pages is None else row.pages.changed.items()
                for number, page in pages:
                    self._put_page(row.key_id, number, page.packed())
            yield row.key_id, body, new

    def delete(self, key_ids: Iterable[int]) -> None:
        """Drop the rows and pages of ``key_ids``; those that have none are passed over."""
        for key_id in key_ids:
            old = self._digest_of(key_id)
            if old is None:
                continue
            if self._keeps:
                self._keep_row(key_id)
            self._drop_pages(key_id)
            self._count(old, None)
            self._connection.execute("DELETE FROM records WHERE key_id = ?", (key_id,))

    def finish(self, root: Root) -> None:
        """Make ``root`` that of the new generation."""
        body, digest = encode_root(root, self._num_rows, self._digest_sum)
        values = (FORMAT_VERSION, body, digest)
        self._connection.execute("UPDATE root SET format = ?, body = ?, digest = ? WHERE one = 1", values)

    def _count(self, old: bytes | None, new: bytes | None) -> None:
        self._num_rows += (new is not None) - (old is not None)
        self._digest_sum += int.from_bytes(new or b"", "little") - int.from_bytes(old or b"", "little")

    def _digest_of(self, key_id: int) -> bytes | None:
        found = self._connection.execute("SELECT digest FROM records WHERE key_id = ?", (key_id,)).fetchone()
        return None if found is None else found[0]

    def _keep_row(self, key_id: int) -> None:
        """Keep the row as it is for the generation before, unless that has been done."""
        self._connection.execute(
            "INSERT OR IGNORE INTO records_before SELECT key_id, body, digest FROM records WHERE key_id = ?", (key_id,)
        )
        self._connection.execute("INSERT OR IGNORE INTO records_before VALUES (?, x'', x'')", (key_id,))

    def _put_page(self, key_id: int, number: int, page: Page) -> None:
        place = (key_id, number)
        found = self._connection.execute("SELECT digest FROM pages WHERE key_id = ? AND page = ?", place).fetchone()
        if self._keeps:
            self._connection.execute(
                "INSERT OR IGNORE INTO pages_before SELECT * FROM pages WHERE key_id = ? AND page = ?", place
            )
            self._connection.execute("INSERT OR IGNORE INTO pages_before VALUES (?, ?, x'', x'')", place)
        body = encode_page(page)
        digest = page_digest(key_id, number, body, self._seed)
        self._count(None if found is None else found[0], digest)
        self._connection.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?)", (*place, body, digest))

    def _drop_pages(self, key_id: int) -> None:
        for (digest,) in self._connection.execute("SELECT digest FROM pages WHERE key_id = ?", (key_id,)).fetchall():
            self._count(digest, None)
        if self._keeps:
            self._connection.execute(
                "INSERT OR IGNORE INTO pages_before SELECT * FROM pages WHERE key_id = ?", (key_id,)
            )
        self._connection.execute("DELETE FROM pages WHERE key_id = ?", (key_id,))


def discard_newest(connection: sqlite3.Connection) -> None:
    """Return the tables to the generation before the newest, which they keep."""
    for table, columns in (("records", "key_id"), ("pages", "key_id, page")):
        connection.execute(f"DELETE FROM {table} WHERE ({columns}) IN (SELECT {columns} FROM {table}_before)")
        connection.execute(f"INSERT INTO {table} SELECT * FROM {table}_before WHERE length(body) > 0")
        connection.execute(f"DELETE FROM {table}_before")
    connection.execute("DELETE FROM root WHERE one = 1")
    connection.execute("UPDATE root SET one = 1")
