"""Raw rows: the columns of a catalog's rows and pages as SQLite gives them, in an order that comes to an end."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from tiered.errors import CorruptionError

__all__ = ["damaged", "read_pages", "read_rows"]


def read_rows(
    connection: sqlite3.Connection, sql: str, file: str, nbytes_left: int
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the rows that ``sql`` selects of the catalog ``file`` of ``nbytes_left``. Raises CorruptionError."""
    last = 0
    for row in connection.execute(sql):
        key_id, body, digest = row
        # Ascending: so damaged pages that lead back to themselves come to an end.
        if type(body) is not bytes or type(digest) is not bytes or key_id <= last:
            raise damaged(f"no such row can be (key id {key_id} after {last})", file)
        last = key_id
        nbytes_left -= len(body)
        if nbytes_left < 0:
            raise damaged("its rows hold more bytes than the file", file)
        yield row


def read_pages(connection: sqlite3.Connection, sql: str, file: str) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Yield the pages that ``sql`` selects of the catalog ``file``. Raises CorruptionError."""
    last = (0, -1)
    for row in connection.execute(sql):
        if [type(value) for value in row] != [int, int, bytes, bytes] or row[:2] <= last or row[1] < 0:
            raise damaged(f"no such page can be ({row[:2]} after {last})", file)
        last = row[:2]
        yield row


def damaged(what: str, file: str) -> CorruptionError:
    """Return the error for a file that is no catalog as a store writes it."""
    return CorruptionError(f"catalog {file}: {what}. Restore the directory from a copy", file=file)
