"""New catalog files: built under another name and renamed when they are durable."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from tiered.bytes.private_file import create_private_file, fsync_directory
from tiered.store.catalog.sqlite_file import PAGE_NBYTES, connect, translated
from tiered.store.catalog.transaction import SCHEMA
from tiered.store.format.root import FORMAT_VERSION

__all__ = ["fill", "make_file"]


def make_file(path: Path, root: tuple[bytes, bytes]) -> None:
    """Make a catalog without rows, durable under ``path`` when this returns. A half-made one is replaced.

    ``root``: body and digest of the root row. Raises CapacityError, DeviceError, with nothing left behind.
    """
    new = path.with_name(path.name + ".new")
    with translated(str(path), "create"):
        # A journal of another file under this name would be played back into the new one.
        beside = (path.with_name(path.name + side) for side in ("-journal", "-wal", "-shm"))
        for leftover in (new, *beside):
            leftover.unlink(missing_ok=True)
        new.with_name(new.name + "-journal").unlink(missing_ok=True)
        fd = create_private_file(new)
        try:
            try:
                with contextlib.closing(connect(new, "rw", 0.0)) as connection:
                    connection.execute("PRAGMA journal_mode=OFF")  # no other process sees the file before it is whole
                    fill(connection, root)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()  # a full drive has no room for it
            raise
        fsync_directory(path.parent)


def fill(connection: sqlite3.Connection, root: tuple[bytes, bytes]) -> None:
    """Make the tables of a catalog without rows in an empty database."""
    connection.execute(f"PRAGMA page_size={PAGE_NBYTES}")
    connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
    connection.execute("BEGIN")
    for sql in SCHEMA.values():
        connection.execute(sql)
    connection.execute("INSERT INTO root VALUES (1, ?, ?, ?)", (FORMAT_VERSION, *root))
    connection.execute("COMMIT")
