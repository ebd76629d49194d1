"""SqliteCatalog: the catalog in an SQLite file, or in memory. The format and the crash argument are in catalog.py.

New files are built under another name and renamed when they are durable.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tiered.bytes.exit_and_fork import this_process
from tiered.bytes.private_file import create_private_file, fsync_directory
from tiered.errors import CapacityError, ClosedError, CorruptionError, DeadlineError, DeviceError, UsageError
from tiered.store.catalog.catalog import GenerationName, generation_names
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
from tiered.store.catalog.transaction import PAGES_BEFORE, ROWS_BEFORE, SCHEMA, CatalogTransaction, discard_newest
from tiered.store.format.checksum import PAGE_BLOCKS
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.root import (
    FORMAT_VERSION,
    ROOT_HEADER_NBYTES,
    Root,
    RootHeader,
    corrupt,
    decode_root,
    decode_root_header,
    encode_root,
    refuse_other_version,
)
from tiered.store.format.row import Page, Row, decode_page, page_digest, row_seed

__all__ = ["SqliteCatalog", "fill", "make_file", "read_pages", "read_rows"]


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


def read_rows(
    connection: sqlite3.Connection, sql: str, file: str, nbytes_left: int
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the rows that ``sql`` selects of the catalog ``file`` of ``nbytes_left``. Raises CorruptionError."""
    last = 0
    for row in connection.execute(sql):
        key_id, body, digest = row
        # Ascending: so damaged pages that lead back to themselves come to an end.
        if type(body) is not bytes or type(digest) is not bytes or key_id <= last:
            raise corrupt(f"no such row can be (key id {key_id} after {last})", file)
        last = key_id
        nbytes_left -= len(body)
        if nbytes_left < 0:
            raise corrupt("its rows hold more bytes than the file", file)
        yield row


def read_pages(connection: sqlite3.Connection, sql: str, file: str) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Yield the pages that ``sql`` selects of the catalog ``file``. Raises CorruptionError."""
    last = (0, -1)
    for row in connection.execute(sql):
        if [type(value) for value in row] != [int, int, bytes, bytes] or row[:2] <= last or row[1] < 0:
            raise corrupt(f"no such page can be ({row[:2]} after {last})", file)
        last = row[:2]
        yield row


# -- sqlite catalog ----------------------------------------------------------------------------------------------------


T = TypeVar("T")

_NEWEST, _BEFORE = 1, 0  # in the column ``one`` of the root
_ROWS, _PAGES = "SELECT key_id, body, digest FROM records", "SELECT key_id, page, body, digest FROM pages"
_NUM_READ_RETRIES = 3
_MAX_VALUE_NBYTES = 1_000_000_000  # SQLite's own limit on one value, and on one row; the state text ends there
_MAX_RECORD_NBYTES = 64  # of the root row beside its body


class SqliteCatalog:
    """The catalog in an SQLite file, or in memory.

    The connection and its transactions belong to one lock. In a forked child every method raises UsageError, and none
    closes the connection: within a transaction that would play the parent's journal back. Nor does the child's end: the
    frames of the thread that is within the transaction go with the child, and keep the connection until then.
    """

    def __init__(self, path: Path | None, *, read_only: bool = False, deadline_s: float = 60.0) -> None:
        """Open ``path``, playing a crashed commit's journal back if there is one. None: in memory, without tables yet.

        ``read_only`` is safe beside a live writer: ``load`` is then one short read transaction. ``deadline_s`` bounds
        the wait for another process's transaction, and that of ``close`` for another thread's.
        """
        self.name = ":memory:" if path is None else str(path)
        self._path = path
        self._read_only = read_only
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process = this_process()
        self._failed: str | None = None
        self._store_uuid = b""
        self._newest: GenerationName | None = None  # as this process has loaded or committed it last
        self._is_before = False  # the generation that was loaded is the one before the newest
        self._is_settled = read_only
        # Held as long as the connection: closing any descriptor of the file drops SQLite's locks on it.
        self._fd: int | None = None
        self._connection: sqlite3.Connection | None = None
        if path is not None:
            refuse_trap(path)
        try:
            self._retried(self._open)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path | None, root: Root) -> SqliteCatalog:
        """Make the catalog of an empty store, durable when this returns, and open it. None: in memory.

        A half-made one from a crashed creation is replaced. Raises UsageError where ``path`` exists.
        """
        if path is None:
            catalog = cls(None)
            with catalog._using("create") as connection:
                fill(connection, encode_root(root, 0, 0))
            return catalog
        if os.path.lexists(path):
            raise UsageError(f"catalog {path} exists already: open the store instead of creating it")
        make_file(path, encode_root(root, 0, 0))
        return cls(path)

    def kept(self) -> tuple[GenerationName, ...]:
        """Return the names of the one or two generations that can be loaded, the newest first. CorruptionError."""
        return self._look("load", self._names)

    def load(self, generation: int | None = None) -> tuple[Root, CommittedRows]:
        """Return a generation that is kept, by default the newest; rows in the order of their key ids.

        Raises CorruptionError for anything that no commit has written, UsageError for another format version.
        """
        loaded = self._look("load", lambda connection: self._load(connection, generation))
        with self._using("load") as connection:
            connection.execute("PRAGMA shrink_memory")  # SQLite's cache of a table that is read once
        self._settle()
        return loaded

    def load_newest(self) -> tuple[Root, CommittedRows, tuple[GenerationName, ...]]:
        """Return the newest generation and what ``kept`` does, both of one moment: for a look beside a live writer."""
        return self._look("load", lambda connection: (*self._load(connection, None), self._names(connection)))

    def pages(self, row: Row, numbers: Sequence[int]) -> list[Page]:
        """Return pages of ``row`` in the generation that was loaded or committed last. Raises CorruptionError."""
        return self._look("read", lambda connection: [self._load_page(connection, row, number) for number in numbers])

    def _settle(self) -> None:
        """Once, when it is ours to write: make durable the state that later writes build on."""
        if not self._is_settled and self._path is not None:
            settle_journal(self._path)
            self._is_settled = True

    def _names(self, connection: sqlite3.Connection) -> tuple[GenerationName, ...]:
        return generation_names([self._read_root(connection, one)[1] for one in self._ones(connection)], self.name)

    def _load(self, connection: sqlite3.Connection, generation: int | None) -> tuple[Root, CommittedRows]:
        if not self._read_only:
            self._check_pages(connection)
        for one in self._ones(connection):
            root, header = self._read_root(connection, one)
            self._store_uuid = root.store_uuid
            if one == _NEWEST:
                self._newest = GenerationName(header.generation, header.nonce)
            if generation in (None, root.generation):
                self._is_before = one == _BEFORE
                raw = read_rows(connection, _ROWS if one == _NEWEST else ROWS_BEFORE, self.name, self._nbytes())
                raw_pages = read_pages(connection, _PAGES if one == _NEWEST else PAGES_BEFORE, self.name)
                return root, CommittedRows.decode(raw, header, self.name, raw_pages=raw_pages, external=root.external)
        raise UsageError(f"catalog {self.name} does not hold generation {generation} any more, or not yet")

    def _load_page(self, connection: sqlite3.Connection, row: Row, number: int) -> Page:
        found = None
        for table in ("pages_before", "pages") if self._is_before else ("pages",):
            if found is None:
                sql = f"SELECT body, digest FROM {table} WHERE key_id = ? AND page = ?"
                found = connection.execute(sql, (row.key_id, number)).fetchone()
        where = f"page {number} of {row.name!r} (key id {row.key_id})"
        if found is None or page_digest(row.key_id, number, found[0], row_seed(self._store_uuid)) != found[1]:
            raise corrupt(f"{where} {'is gone' if found is None else 'does not match its digest'}", self.name, row.name)
        try:
            return decode_page(found[0], min(PAGE_BLOCKS, row.num_blocks - number * PAGE_BLOCKS))
        except (ValueError, struct.error) as error:
            raise corrupt(f"{where} cannot be decoded: {error}", self.name, row.name) from error

    def measure(self, root: Root) -> None:
        """Raise CapacityError where ``root`` is larger than ``apply`` could write; writes nothing."""
        num_others = len(encode_root(replace(root, state=""), 0, 0)[0]) + _MAX_RECORD_NBYTES
        nbytes = len(root.state) if root.state.isascii() else len(root.state.encode("utf-8", "surrogatepass"))
        with self._using("measure") as connection:
            # SQLite has a limit of its own, and a connection one that may be lower.
            most = min(connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH), _MAX_VALUE_NBYTES) - num_others
        if nbytes > most:
            raise CapacityError(
                f"the state that rides along with the commit is {nbytes} bytes of JSON, at most {most} fit into "
                f"catalog {self.name}; nothing was sealed: put its tensors into the store under keys of their own"
            )

    def apply(self, root: Root, upserts: Sequence[Row], deleted: Sequence[int], *, keeps_before: bool = False) -> None:
        """Replace the root, insert or replace ``upserts``, drop the key ids ``deleted``: all or nothing, durable.

        With ``keeps_before`` the generation that was the newest stays beside it, until the next call. A key id in
        ``deleted`` that has no row is passed over. After CapacityError or DeadlineError nothing has changed and the
        call may be repeated. After any other DeviceError the outcome is unknown: every later call raises, and the next
        open decides.
        """

        def write(connection: sqlite3.Connection, newest: RootHeader) -> None:
            if newest.store_uuid != root.store_uuid:
                raise corrupt("it belongs to another store", self.name)
            transaction = CatalogTransaction(connection, newest, keeps_before=keeps_before)
            transaction.upsert(upserts)
            transaction.delete(deleted)
            transaction.finish(root)

        self._transact("commit to", write)

    def discard(self) -> None:
        """Return to the generation before the newest, durably; UsageError where it was not kept. Fails as ``apply``."""

        def write(connection: sqlite3.Connection, newest: RootHeader) -> None:
            if self._ones(connection) != [_NEWEST, _BEFORE]:
                raise UsageError(f"catalog {self.name} holds one generation: there is none before it to return to")
            discard_newest(connection)

        self._transact("return in", write)

    def _transact(self, verb: str, write: Callable[[sqlite3.Connection, RootHeader], None]) -> None:
        if self._read_only:
            raise UsageError(f"catalog {self.name} is open read-only")
        self._settle()
        with self._using(verb) as connection:
            if self._failed is not None:
                raise DeviceError(f"catalog {self.name}: {self._failed}; open the store again to see which it was")
            try:
                connection.execute("BEGIN IMMEDIATE")
                before = self._newest_header(connection)
                self._refuse_other_newest(GenerationName(before.generation, before.nonce))
                write(connection, before)
                after = self._newest_header(connection)
                connection.execute("COMMIT")
                self._newest = GenerationName(after.generation, after.nonce)
            except BaseException as error:
                self._abandon(connection, error)
                raise
            self._is_before = False

    def close(self) -> None:
        """Release the file. Idempotent. Raises DeadlineError where a call of another thread does not end: as it was."""
        if not self._process.is_here:
            return  # order: before the lock, which a thread may have held at the fork
        if not self._lock.acquire(timeout=self._deadline_s):
            raise DeadlineError(
                f"closing catalog {self.name}: a call of another thread has not ended within {self._deadline_s:g} s; "
                "the catalog stays open until the drive answers; check it, then close again or end the process"
            )
        try:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        finally:
            self._lock.release()

    def __repr__(self) -> str:
        state = "closed" if self._connection is None else "failed" if self._failed else "open"
        return f"<SqliteCatalog {self.name!r} {state}>"

    @contextmanager
    def _using(self, verb: str) -> Iterator[sqlite3.Connection]:
        self._process.check(f"catalog {self.name}", "open it again after a fork")
        with self._lock:
            if self._connection is None:
                raise ClosedError(f"catalog {self.name} is closed")
            with translated(self.name, verb):
                yield self._connection

    def _nbytes(self) -> int:
        """Return what bounds all values together: the bytes of the file; in memory nothing does."""
        return sys.maxsize if self._fd is None else os.fstat(self._fd).st_size

    def _look(self, verb: str, read: Callable[[sqlite3.Connection], T]) -> T:
        """Return what ``read`` finds in a read transaction, once the tables are known to be a catalog's."""

        def look() -> T:
            with self._using(verb) as connection:
                # One value is never larger than the file, whatever its cell announces.
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(max(self._nbytes(), 1 << 16), _MAX_VALUE_NBYTES))
                try:
                    connection.execute("BEGIN")
                    self._check_schema(connection)
                    return read(connection)
                finally:
                    if connection.in_transaction:
                        connection.rollback()
                    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_NBYTES)

        return self._retried(look)

    def _retried(self, read: Callable[[], T]) -> T:
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
            if self._path is None:
                self._connection = connect(None, "rw", 0.0)
                return
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._connection = connect(self._path, "ro" if self._read_only else "rw", self._deadline_s)
            if self._read_only:
                self._begin_to_read(self._path, self._connection)
            else:
                make_durable(self._connection)
                check_header(os.pread(self._fd, 100, 0), os.fstat(self._fd).st_size, self.name)

    def _begin_to_read(self, path: Path, connection: sqlite3.Connection) -> None:
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
            raise corrupt("it has a write-ahead log", self.name)

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Before any table is touched: a foreign trigger or view never runs."""
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version != FORMAT_VERSION:
            row = connection.execute("SELECT format FROM root LIMIT 1").fetchone()
            refuse_other_version(version, row[0] if row and isinstance(row[0], int) else 0, self.name)
        schema = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema LIMIT 6").fetchall()
        expected = {(b"table", n.encode(), n.encode(), sql.encode()) for n, sql in SCHEMA.items()}
        if len(schema) != len(expected) or set(schema) != expected:
            raise corrupt("its tables are not those of a catalog", self.name)

    def _check_pages(self, connection: sqlite3.Connection) -> None:
        """Every page is in one place only: else a later commit could write over a row."""
        answer = connection.execute("PRAGMA quick_check(1)").fetchone()
        if answer != (b"ok",):
            what = answer[0].decode(errors="replace")
            if says_drive_failed(what):
                message = f"catalog {self.name}: could not read it ({what}): see the kernel log for this drive"
                raise DeviceError(message) from sqlite3.DatabaseError(what)
            raise corrupt(f"its pages are damaged ({what})", self.name)

    def _ones(self, connection: sqlite3.Connection) -> list[int]:
        """Return the numbers of the root rows, the newest generation's first."""
        ones = [row[0] for row in connection.execute("SELECT one FROM root ORDER BY one DESC LIMIT 3")]
        if ones not in ([_NEWEST], [_NEWEST, _BEFORE]):
            raise corrupt(f"expected one root row, or two, got {ones}", self.name)
        return ones

    def _read_root(self, connection: sqlite3.Connection, one: int) -> tuple[Root, RootHeader]:
        root = connection.execute("SELECT format, body, digest FROM root WHERE one = ?", (one,)).fetchone()
        if [type(value) for value in root] != [int, bytes, bytes]:
            raise corrupt("a root row of other types", self.name)
        refuse_other_version(FORMAT_VERSION, root[0], self.name)
        return decode_root(root[1], root[2], self.name)

    def _newest_header(self, connection: sqlite3.Connection) -> RootHeader:
        row = connection.execute("SELECT substr(body, 1, ?) FROM root WHERE one = 1", (ROOT_HEADER_NBYTES,)).fetchone()
        return decode_root_header(row[0] if row else b"", self.name)

    def _refuse_other_newest(self, found: GenerationName) -> None:
        """Raise DeviceError where another process has committed since: its extents would be written over."""
        if self._newest is not None and found != self._newest:
            raise DeviceError(
                f"catalog {self.name} holds generation {found.number} of another process, and not generation"
                f" {self._newest.number} as this process left it: two processes write here; end one, and open the store"
                " again"
            )

    def _abandon(self, connection: sqlite3.Connection, error: BaseException) -> None:
        """Take the transaction back; a failure on the drive leaves the outcome unknown, and nothing may follow."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
        try:
            if connection.in_transaction:
                connection.rollback()
        except sqlite3.Error as second:
            self._failed = f"a failed commit could not be taken back ({second})"
        if isinstance(error, sqlite3.Error) and code not in (sqlite3.SQLITE_FULL, *BUSY):
            self._failed = f"an earlier commit failed ({error}) and its outcome is unknown"
