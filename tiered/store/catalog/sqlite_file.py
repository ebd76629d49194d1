"""An SQLite file as a catalog needs it: opened with care, checked before use, its errors translated into ours.

Nothing here knows the contents of the tables.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered.bytes import private_file
from tiered.bytes.private_file import create_private_file, fsync_directory
from tiered.errors import CapacityError, CorruptionError, DeadlineError, DeviceError, TieredError, UsageError
from tiered.store.format.root import corrupt
from tiered.units import MiB

__all__ = [
    "BUSY",
    "PAGE_NBYTES",
    "check_header",
    "connect",
    "make_durable",
    "read_through",
    "refuse_trap",
    "says_drive_failed",
    "settle_journal",
    "translated",
]

PAGE_NBYTES = 4096

# The first 24 bytes of every file of ours: page size, rollback journal (1, 1), and what the format fixes.
_MAGIC = b"SQLite format 3\0" + PAGE_NBYTES.to_bytes(2, "big") + bytes((1, 1, 0, 64, 32, 32))

BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DRIVE = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
)


def connect(path: Path | None, mode: str, deadline_s: float) -> sqlite3.Connection:
    """Open an existing file, ``mode`` "ro" or "rw"; text comes as bytes, transactions begin only when told to.

    Without ``path``: an empty database in memory, which ends with the connection.
    """
    connection = sqlite3.connect(
        ":memory:" if path is None else f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=deadline_s,
        isolation_level=None,  # transactions are ours to begin
        check_same_thread=False,  # the lock of SqliteCatalog orders the threads
    )
    connection.text_factory = bytes  # damaged text is data, not an error of decoding
    for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "temp_store=MEMORY", "mmap_size=0"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def make_durable(connection: sqlite3.Connection) -> None:
    """Set up a connection that commits; reads the file, and so plays a journal back first."""
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA cache_size=-16384")  # 16 MiB: a commit of 20,000 rows does not spill
    mode = connection.execute("PRAGMA journal_mode=TRUNCATE").fetchone()
    if mode != (b"truncate",):
        raise sqlite3.DatabaseError(f"journal mode {mode!r}")


def settle_journal(path: Path) -> None:
    """Make the existence and the end of the journal of ``path`` durable. Raises DeviceError, CapacityError.

    Order: after a journal was played back, which deletes it, and before anything is written that builds on what the
    file now says.
    """
    journal = path.with_name(f"{path.name}-journal")
    with translated(str(path), "open"):
        try:
            fd = create_private_file(journal)
        except FileExistsError:
            fd = os.open(journal, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        fsync_directory(path.parent)


def refuse_trap(path: Path) -> None:
    """Raise unless ``path``, and its journal where there is one, are files with one name that only their owner reaches.

    SQLite opens both by name: a second name, or a FIFO in the place of the journal, would be used and waited for.
    """
    for file in (path, path.with_name(f"{path.name}-journal")):
        try:
            status = os.lstat(file)
        except FileNotFoundError as error:
            if file != path:
                continue
            message = f"there is no catalog {path}: the directory holds no store, or not its first part"
            raise UsageError(message) from error
        private_file.refuse_trap(file, status)
    for side in ("-wal", "-shm"):
        if os.path.lexists(f"{path}{side}"):
            raise CorruptionError(
                f"{path}{side} exists, and no store writes such a file: remove it after a look", file=f"{path}{side}"
            )


def check_header(header: bytes, file_nbytes: int, file: str) -> None:
    """Refuse an SQLite header that no store has written, before anything is written by it."""
    words = [int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)]
    # 44: schema format, 52 and 64: no vacuum, 56: UTF-8, 68: application id, 72-91: reserved
    fixed = len(words) == 25 and (words[11], words[13], words[14], words[16], words[17]) == (4, 0, 1, 0, 0)
    if not fixed or header[: len(_MAGIC)] != _MAGIC or any(header[72:92]) or words[7] * PAGE_NBYTES != file_nbytes:
        raise corrupt("its first bytes are not those of a catalog", file)


def read_through(fd: int, file: str) -> None:
    """Read all of ``file``, open as ``fd``. Raises DeviceError where the drive does not give it."""
    offset = 0
    with translated(file, "read"):
        while block := os.pread(fd, MiB, offset):
            offset += len(block)


def says_drive_failed(finding: str) -> bool:
    """Whether SQLite's own check of its pages found one that the drive did not give, not a damaged one."""
    code = re.search(r"error code=(\d+)", finding)
    return code is not None and int(code[1]) & 0xFF in _DRIVE


@contextmanager
def translated(file: str, verb: str) -> Iterator[None]:
    """Turn the errors of SQLite and the file system into errors of ours."""
    try:
        yield
    except UnicodeDecodeError as error:  # sqlite3 quotes damaged text in the message of its own error
        raise CorruptionError(f"catalog {file}: could not {verb} it: {error}", file=file) from error
    except sqlite3.Error as error:
        message = f"catalog {file}: could not {verb} it: {error}"
        translation = _translate(error, message, file)
        if verb == "create" and isinstance(translation, CorruptionError):  # of a new file? it could not be read back
            translation = DeviceError(f"{message}: see the kernel log for this drive")
        raise translation from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        kind = CapacityError if full else DeviceError
        raise kind(f"catalog {file}: could not {verb} it: {error}") from error


def _translate(error: sqlite3.Error, message: str, file: str) -> TieredError:
    extended = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    code = extended & 0xFF
    if extended == sqlite3.SQLITE_READONLY_DBMOVED:
        return DeviceError(
            f"{message}, for it was moved, or removed, while the store was open: move it when it is closed"
        )
    if code == sqlite3.SQLITE_FULL:
        return CapacityError(f"{message}: free some space in the first directory")
    if code in BUSY:
        return DeadlineError(f"{message}: another process holds it")
    if code in _DRIVE:
        return DeviceError(message)
    if code == sqlite3.SQLITE_ERROR and isinstance(error, sqlite3.InterfaceError | sqlite3.ProgrammingError):
        return DeviceError(message)
    return CorruptionError(f"{message}. Restore the directory from a copy", file=file)
