"""The durable index of a store: one row per key, and one root row that is the commit.

THE FORMAT (version 1, fixed). ``catalog.db`` is an SQLite database: user_version = the format version, UTF-8, pages of
4096 bytes, rollback journal. All integers in the blobs are little-endian, no padding; digests are xxh3-64.

    root     one = 1, format = the version again, body, digest (8 bytes: xxh3-64 of format u32 + body, seed 0)
      body     store uuid 16 bytes, generation u64, next key id u64, directories u32, number of rows u64,
               sum of the row digests u64 (mod 2**64), then the state as UTF-8 text to the end
    records  key_id (0 < key id < next key id, never reused), body, digest (8 bytes: of key id u64 + body,
             seed = xxh3-64 of the store uuid)
      body     generation u64, nbytes u64, name bytes u32, extents u32, dtype bytes u8, dimensions u8, inline u8, then
               the name (UTF-8, lone surrogates passed), the dtype (ASCII), a u64 per dimension, per extent
               (device u16, file u32, offset u64, length u64), and then
               inline 0: a digest u64 per block of 4 MiB of the bytes in its extents, one after another
                         (seed = xxh3-64 of store uuid, key id u64, block u64, generation u64)
               inline 1: the tensor's own bytes; no extents

THE CRASH ARGUMENT. Data reaches fresh extents and is flushed before ``apply``; a file and its directory are durable
before a row may name it. ``apply`` is one SQLite transaction: the old pages are in the journal, durable, before the
first page of the database changes, and the commit is the durable truncation of the journal. Cut before it, the next
open plays the journal back: the old rows, with their extents untouched. Cut after it: the new rows. TRUNCATE and
FULL, because a deleted journal can come back after a power cut and undo an acknowledged commit, and because one
flipped bit in a WAL silently drops the last transactions. ``load`` first makes the journal's name and end durable:
SQLite commits even where the directory cannot be flushed, and a process killed between the truncation and its flush
leaves one that a power cut takes back, when the next process has reused what the older generation stood on.
``create`` builds the file under another name and renames it when it is durable: where ``catalog.db`` is, creation has
finished.
Every row is read at open; its own digest finds a changed row, number and sum in the root row find a lost, added or
stale one. So does a damaged journal, played back in part: old and new rows together do not make the root's sum.
A newer format, in user_version and in the root row, is refused with nothing changed; these two stay where they are
in every version.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tiered.bytes.private_file import create_private_file, fsync_directory
from tiered.errors import CapacityError, ClosedError, CorruptionError, DeadlineError, DeviceError, UsageError
from tiered.store.catalog.sqlite_file import (
    BUSY,
    PAGE_NBYTES,
    check_header,
    connect,
    make_durable,
    read_through,
    refuse_trap,
    says_drive_failed,
    settle_journal,
    translated,
)
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.row import (
    FORMAT_VERSION,
    ROOT_HEADER_NBYTES,
    Root,
    RootHeader,
    Row,
    decode_root,
    decode_root_header,
    encode_root,
    encode_row,
    refuse_newer,
)
from tiered.store.waiting.fork_wait import make_forks_wait

__all__ = ["FORMAT_VERSION", "Catalog", "Root", "Row", "SqliteCatalog"]

T = TypeVar("T")


class Catalog(ABC):
    """The durable rows of one store. Thread-safe; every method blocks until its I/O is done."""

    name: str  # the file, or another name for messages

    @abstractmethod
    def load(self) -> tuple[Root, CommittedRows]:
        """Return the last committed generation, rows in the order of their key ids.

        Raises CorruptionError for anything that no commit has written, UsageError for a newer format.
        """

    @abstractmethod
    def apply(self, root: Root, upserts: Sequence[Row], deleted: Sequence[int]) -> None:
        """Replace the root, insert or replace ``upserts``, drop the key ids ``deleted``: all or nothing, durable.

        A key id in ``deleted`` that has no row is passed over. After CapacityError or DeadlineError nothing has
        changed and the call may be repeated. After any other DeviceError the outcome is unknown: every later call
        raises, and the next open decides.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the file. Idempotent."""


_SCHEMA = {
    "root": "CREATE TABLE root (one INTEGER PRIMARY KEY, format INTEGER NOT NULL, body BLOB NOT NULL, "
    "digest BLOB NOT NULL)",
    "records": "CREATE TABLE records (key_id INTEGER PRIMARY KEY, body BLOB NOT NULL, digest BLOB NOT NULL)",
}
_NUM_READ_RETRIES = 3
_MAX_VALUE_NBYTES = 1_000_000_000  # SQLite's own limit on one value; the state text ends there


class SqliteCatalog(Catalog):
    """The catalog in an SQLite file; the module docstring has the format and the crash argument.

    The connection and its transactions belong to one lock, which a fork waits for: a child never inherits an open
    transaction. In a child every method raises UsageError.
    """

    def __init__(self, path: Path, *, read_only: bool = False, deadline_s: float = 60.0) -> None:
        """Open ``path``, playing a crashed commit's journal back if there is one.

        ``read_only`` is safe beside a live writer: ``load`` is then one short read transaction. ``deadline_s`` bounds
        the wait for another process's transaction.
        """
        self.name = str(path)
        self._read_only = read_only
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._failed: str | None = None
        self._is_settled = read_only
        # Held as long as the connection: closing any descriptor of the file drops SQLite's locks on it.
        self._fd: int | None = None
        self._connection: sqlite3.Connection | None = None
        refuse_trap(path)
        try:
            self._read(self._open)
        except BaseException:
            self.close()
            raise
        make_forks_wait(self, self._lock)  # a child that ended with a transaction open would play its journal back

    @classmethod
    def create(cls, path: Path, root: Root) -> SqliteCatalog:
        """Make the catalog of an empty store, durable when this returns, and open it.

        A half-made one from a crashed creation is replaced. Raises UsageError where ``path`` exists.
        """
        if os.path.lexists(path):
            raise UsageError(f"catalog {path} exists already: open the store instead of creating it")
        new = path.with_name(path.name + ".new")
        with translated(str(path), "create"):
            # A journal of another file under this name would be played back into the new one.
            for leftover in (new, *(path.with_name(path.name + side) for side in ("-journal", "-wal", "-shm"))):
                leftover.unlink(missing_ok=True)
            new.with_name(new.name + "-journal").unlink(missing_ok=True)
            fd = create_private_file(new)
            try:
                _build(new, root)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(new, path)
            fsync_directory(path.parent)
        return cls(path)

    def load(self) -> tuple[Root, CommittedRows]:
        loaded = self._read(self._load)
        self._settle()
        return loaded

    def _settle(self) -> None:
        """Once, when it is ours to write: make durable the state that later writes build on."""
        if not self._is_settled:
            settle_journal(Path(self.name))
            self._is_settled = True

    def _load(self) -> tuple[Root, CommittedRows]:
        with self._using("load") as connection:
            nbytes = os.stat(self.name).st_size
            # One value is never larger than the file, whatever its cell announces.
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(max(nbytes, 1 << 16), _MAX_VALUE_NBYTES))
            try:
                connection.execute("BEGIN")
                self._check_schema(connection)
                if not self._read_only:
                    self._check_pages(connection)
                root, header = self._read_root(connection)
                return root, CommittedRows.decode(self._read_rows(connection, nbytes), header, self.name)
            finally:
                if connection.in_transaction:
                    connection.rollback()
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_NBYTES)

    def apply(self, root: Root, upserts: Sequence[Row], deleted: Sequence[int]) -> None:
        if self._read_only:
            raise UsageError(f"catalog {self.name} is open read-only")
        if len(root.state) >= _MAX_VALUE_NBYTES // 2:
            raise CapacityError(
                f"the state that rides along with the commit is {len(root.state)} characters of JSON, "
                f"at most {_MAX_VALUE_NBYTES // 2} fit: put its tensors into the store under keys of their own"
            )
        self._settle()
        with self._using("commit to") as connection:
            if self._failed is not None:
                raise DeviceError(f"catalog {self.name}: {self._failed}; open the store again to see which it was")
            try:
                connection.execute("BEGIN IMMEDIATE")
                header = self._read_header(connection, root)
                num_rows, digest_sum = header.num_rows, header.digest_sum

                def encoded() -> Iterator[tuple[int, bytes, bytes]]:
                    nonlocal num_rows, digest_sum
                    for row in upserts:
                        body, new = encode_row(row, root.store_uuid)
                        is_new = row.key_id >= header.next_key_id
                        old = None if is_new else self._digest_of(connection, row.key_id)
                        num_rows += old is None
                        digest_sum += int.from_bytes(new, "little") - int.from_bytes(old or b"", "little")
                        yield row.key_id, body, new

                connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", encoded())
                for key_id in deleted:
                    old = self._digest_of(connection, key_id)
                    num_rows -= old is not None
                    digest_sum -= int.from_bytes(old or b"", "little")
                connection.executemany("DELETE FROM records WHERE key_id = ?", ((key_id,) for key_id in deleted))
                body = encode_root(root, num_rows, digest_sum)
                connection.execute("UPDATE root SET body = ?, digest = ?", body)
                connection.execute("COMMIT")
            except BaseException as error:
                self._abandon(connection, error)
                raise

    def close(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                return
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __repr__(self) -> str:
        state = "closed" if self._connection is None else "failed" if self._failed else "open"
        return f"<SqliteCatalog {self.name!r} {state}>"

    @contextmanager
    def _using(self, verb: str) -> Iterator[sqlite3.Connection]:
        if self._pid != os.getpid():
            raise UsageError(f"catalog {self.name} was opened by process {self._pid}: open it again after a fork")
        with self._lock:
            if self._connection is None:
                raise ClosedError(f"catalog {self.name} is closed")
            with translated(self.name, verb):
                yield self._connection

    def _read(self, read: Callable[[], T]) -> T:
        """Return the result of ``read``, which is tried again where the drive may not have given a page.

        SQLite calls a file damaged that the drive answers with EIO; damage is what the drive gives and is not ours.
        """
        for _ in range(_NUM_READ_RETRIES):
            try:
                return read()
            except (CorruptionError, DeviceError) as error:
                if isinstance(error, DeadlineError) or not isinstance(error.__cause__, sqlite3.Error | OSError):
                    raise
                if self._fd is not None:
                    read_through(self._fd, self.name)
        return read()

    def _open(self) -> None:
        if self._connection is not None:  # half open, from a try before
            self._connection.close()
        with translated(self.name, "open"):
            if self._fd is None:
                self._fd = os.open(self.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._connection = self._connect()
            if not self._read_only:
                check_header(os.pread(self._fd, 100, 0), os.fstat(self._fd).st_size, self.name)

    def _connect(self) -> sqlite3.Connection:
        """Connect. ``_connection`` keeps a connection that then failed, for ``close``."""
        path = Path(self.name)
        self._connection = connection = connect(path, "ro" if self._read_only else "rw", self._deadline_s)
        if not self._read_only:
            make_durable(connection)
            return connection
        try:
            mode = connection.execute("PRAGMA journal_mode").fetchone()
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            # A commit was cut short: only a writer may play its journal back, which changes nothing committed.
            connection.close()
            self._connection = connection = connect(path, "rw", self._deadline_s)
            mode = connection.execute("PRAGMA journal_mode").fetchone()
            connection.execute("PRAGMA query_only=ON")
        if mode == (b"wal",):
            raise self._corrupt("it has a write-ahead log")
        return connection

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Before any table is touched: a foreign trigger or view never runs."""
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT_VERSION:
            row = connection.execute("SELECT format FROM root LIMIT 1").fetchone()
            refuse_newer(version, row[0] if row and isinstance(row[0], int) else 0, self.name)
        schema = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema LIMIT 3").fetchall()
        expected = {(b"table", n.encode(), n.encode(), sql.encode()) for n, sql in _SCHEMA.items()}
        if len(schema) != len(expected) or set(schema) != expected:
            raise self._corrupt("its tables are not those of a catalog")

    def _check_pages(self, connection: sqlite3.Connection) -> None:
        """Every page is in one place only: else a later commit could write over a row."""
        answer = connection.execute("PRAGMA quick_check(1)").fetchone()
        if answer != (b"ok",):
            what = answer[0].decode(errors="replace")
            if says_drive_failed(what):
                message = f"catalog {self.name}: could not read it ({what}): see the kernel log for this drive"
                raise DeviceError(message) from sqlite3.DatabaseError(what)
            raise self._corrupt(f"its pages are damaged ({what})")

    def _read_root(self, connection: sqlite3.Connection) -> tuple[Root, RootHeader]:
        roots = connection.execute("SELECT one, format, body, digest FROM root LIMIT 2").fetchall()
        if len(roots) != 1 or [type(value) for value in roots[0]] != [int, int, bytes, bytes] or roots[0][0] != 1:
            raise self._corrupt(f"expected one root row, got {len(roots)}")
        refuse_newer(FORMAT_VERSION, roots[0][1], self.name)
        return decode_root(roots[0][2], roots[0][3], self.name)

    def _read_rows(self, connection: sqlite3.Connection, nbytes: int) -> Iterator[tuple[int, bytes, bytes]]:
        last = 0
        for row in connection.execute("SELECT key_id, body, digest FROM records"):
            key_id, body, digest = row
            # Ascending: so damaged pages that lead back to themselves come to an end.
            if type(body) is not bytes or type(digest) is not bytes or key_id <= last:
                raise self._corrupt(f"no such row can be (key id {key_id} after {last})")
            last = key_id
            nbytes -= len(body)
            if nbytes < 0:
                raise self._corrupt("its rows hold more bytes than the file")
            yield row

    def _read_header(self, connection: sqlite3.Connection, root: Root) -> RootHeader:
        row = connection.execute("SELECT substr(body, 1, ?) FROM root", (ROOT_HEADER_NBYTES,)).fetchone()
        header = decode_root_header(row[0] if row else b"", self.name)
        if header.store_uuid != root.store_uuid:
            raise self._corrupt("it belongs to another store")
        return header

    def _digest_of(self, connection: sqlite3.Connection, key_id: int) -> bytes | None:
        row = connection.execute("SELECT digest FROM records WHERE key_id = ?", (key_id,)).fetchone()
        return None if row is None else row[0]

    def _abandon(self, connection: sqlite3.Connection, error: BaseException) -> None:
        """Take the transaction back; a failure on the drive leaves the outcome unknown, and nothing may follow."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
        try:
            if connection.in_transaction:
                connection.rollback()
            elif not isinstance(error, Exception):
                self._failed = "a commit was interrupted and its outcome is unknown"
        except sqlite3.Error as second:
            self._failed = f"a failed commit could not be taken back ({second})"
        if isinstance(error, sqlite3.Error) and code not in (sqlite3.SQLITE_FULL, *BUSY):
            self._failed = f"an earlier commit failed ({error}) and its outcome is unknown"

    def _corrupt(self, what: str) -> CorruptionError:
        return CorruptionError(f"catalog {self.name}: {what}. Restore the directory from a copy", file=self.name)


def _build(path: Path, root: Root) -> None:
    """Fill the empty file at ``path``; not durable yet."""
    body, digest = encode_root(root, 0, 0)
    connection = connect(path, "rw", 0.0)
    try:
        connection.execute("PRAGMA journal_mode=OFF")  # no other process sees the file before it is whole
        connection.execute(f"PRAGMA page_size={PAGE_NBYTES}")
        connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
        for sql in _SCHEMA.values():
            connection.execute(sql)
        connection.execute("INSERT INTO root VALUES (1, ?, ?, ?)", (FORMAT_VERSION, body, digest))
    finally:
        connection.close()
