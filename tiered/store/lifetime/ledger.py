"""The ledger of a directory: a file that counts the bytes written to it over the store's whole life.

It is accounting and no part of a commit: a store opens without it, or with a damaged one, and begins a new count.
The file is two slots of a page; the valid one with the greater sequence counts. A rewrite is one write in place, to the
slot that is not known to be durable, so a kill or a power cut leaves the other one. A rename would cost a new file and
a flush of the directory for the same. A slot's fields lie in its first 512 bytes, which drives write whole; the slots
have a page each, because drives with sectors of 4096 bytes write the neighbours, too. Counts that have grown are
written after each quarter of a step on any device and after each commit: a page into the kernel's cache. Counts are
made durable at close, and behind a commit that comes most of a step after the last time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.exit_and_fork import after_fork, at_exit, this_process
from tiered.bytes.private_file import create_private_file, fsync_directory, refuse_trap
from tiered.store.format.checksum import digest
from tiered.units import MiB

__all__ = ["LEDGER_NAME", "Ledger", "LedgerFile", "Ledgers", "read_ledger"]


# One slot, little-endian, then zeros to its end:
#   magic 8 bytes, format u32, directory index u32, store uuid 16 bytes, sequence u64, data bytes u64,
#   catalog bytes u64, beginning of the count u64 (unix seconds), digest u64 (xxh3-64 of all before it, seed 0)
_FIELDS = struct.Struct("<8sII16sQQQQ")
_DIGEST = struct.Struct("<Q")
_MAGIC, _FORMAT = b"tieredLG", 2
_SLOT_NBYTES = 4096
_FILE_NBYTES = 2 * _SLOT_NBYTES

LEDGER_NAME = "ledger"

STEP_NBYTES = 256 * MiB
"""A kill loses no more of a count, which is written for each quarter of that."""

_MOST = 1 << 62  # of any count; no drive lives so long
_LATEST_S = 253_402_300_799  # the last second of the year 9999

_log = logging.getLogger("tiered")


@dataclass(frozen=True, slots=True)
class Ledger:
    """The bytes written to directory ``index`` of store ``store_uuid`` (16 bytes) since ``since_s`` (unix seconds)."""

    store_uuid: bytes
    index: int
    since_s: int
    data_bytes: int = 0  # to the data files, as the device counts them
    catalog_bytes: int = 0  # by commits to the catalog, as the system counts them; in the first directory alone
    sequence: int = 0

    @property
    def write_bytes(self) -> int:
        """Both together."""
        return self.data_bytes + self.catalog_bytes

    @property
    def since(self) -> str:
        """The beginning of the count, for people."""
        return f"{datetime.fromtimestamp(self.since_s, UTC):%Y-%m-%d %H:%M UTC}"

    def encode(self) -> bytes:
        """Return the content of a slot."""
        fields = _FIELDS.pack(
            _MAGIC, _FORMAT, self.index, self.store_uuid, self.sequence, self.data_bytes, self.catalog_bytes,
            self.since_s,
        )  # fmt: skip
        return (fields + _DIGEST.pack(digest(fields, 0))).ljust(_SLOT_NBYTES, b"\0")

    @classmethod
    def decode(cls, slot: bytes) -> Ledger | None:
        """Return what ``slot`` says; None where it is not exactly what ``encode`` returns."""
        _, _, index, store_uuid, sequence, data_bytes, catalog_bytes, since_s = _FIELDS.unpack_from(slot)
        ledger = cls(store_uuid, index, since_s, data_bytes, catalog_bytes, sequence)
        is_possible = since_s <= _LATEST_S and max(sequence, data_bytes, catalog_bytes) <= _MOST
        return ledger if is_possible and ledger.encode() == slot else None


def read_ledger(path: Path) -> tuple[Ledger | None, Ledger | None]:
    """Return both slots of the file ``path``, None for a damaged one.

    Raises FileNotFoundError where there is no file, or one whose creation was cut short; UsageError for a link, a FIFO
    or a loose file; OSError.
    """
    refuse_trap(path, os.lstat(path))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        content = os.pread(fd, _FILE_NBYTES + 1, 0)
    finally:
        os.close(fd)
    if not content:
        raise FileNotFoundError(errno.ENOENT, "it is empty", os.fspath(path))
    if len(content) != _FILE_NBYTES:
        return None, None
    return Ledger.decode(content[:_SLOT_NBYTES]), Ledger.decode(content[_SLOT_NBYTES:])


class LedgerFile:
    """The ledger of one directory of an open store, which one thread at a time rewrites.

    ``ledger`` is the newest count, ``opened`` the one that the store was opened with. The file stays open until
    ``close``, and is never made anew: its path may lead to another store's by then, or to no store. No error of the
    file system comes out; the first one is logged.
    """

    def __init__(self, directory: Path, store_uuid: bytes, index: int) -> None:
        self.path = directory / LEDGER_NAME
        self.ledger = Ledger(store_uuid, index, int(time.time()))
        self.opened = self.ledger  # as it was when the store was opened
        self._durable_bytes = 0  # of the count, as far as a power cut leaves it
        self._slot = 0  # the one to write next: never the durable one
        self._fd: int | None = None  # None: there is no file to write to
        self._has_warned = False

    def open(self) -> None:
        """Go on with the count of the file; where it has none that can be believed, begin a new count and a new file.

        Raises UsageError for a link, a FIFO or a loose file in its place.
        """
        slots: tuple[Ledger | None, Ledger | None] = None, None
        problem = "is damaged, or is another directory's"
        try:
            slots = read_ledger(self.path)
        except FileNotFoundError:
            problem = ""
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        own = [slot for slot in slots if slot is not None and self._is_own(slot)]
        if not own:
            if problem:
                _log.warning("%s %s: a new count of bytes written begins, at %s", self.path, problem, self.ledger.since)
            self._begin()
            return
        newest = max(own, key=lambda slot: slot.sequence)
        self.ledger = self.opened = newest
        self._slot = 1 - slots.index(newest)
        self._durable_bytes = newest.write_bytes  # after a kill the kernel makes it so within its half minute
        with self._warning_once():
            self._fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if len(own) < len(slots):
            _log.warning("%s is damaged in one half: its count of bytes written goes on from the other one", self.path)

    def update(self, data_bytes: int, catalog_bytes: int, *, flushes_from: int = _MOST) -> None:
        """Write the count with what this process has written; blocks.

        It survives a kill then, and a power cut where it is ``flushes_from`` bytes or more ahead of the durable one.
        """
        data_bytes += self.opened.data_bytes
        catalog_bytes += self.opened.catalog_bytes
        has_grown = (data_bytes, catalog_bytes) != (self.ledger.data_bytes, self.ledger.catalog_bytes)
        if has_grown:
            self.ledger = replace(
                self.ledger, data_bytes=data_bytes, catalog_bytes=catalog_bytes, sequence=self.ledger.sequence + 1
            )
        is_durable = self.ledger.write_bytes - self._durable_bytes >= flushes_from
        if self._fd is None or not (has_grown or is_durable):
            return
        with self._warning_once():
            _write_whole(self._fd, self.ledger.encode(), self._slot * _SLOT_NBYTES)
            if is_durable:
                os.fdatasync(self._fd)
                self._durable_bytes = self.ledger.write_bytes
                self._slot = 1 - self._slot  # order: only now may the other one be written over

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _begin(self) -> None:
        """Make a new file with the same count in both slots."""
        with self._warning_once():
            self.path.unlink(missing_ok=True)  # of no use; and nothing else reads it
            self._fd = create_private_file(self.path)
            try:
                _write_whole(self._fd, self.ledger.encode() * 2, 0)
                fsync_directory(self.path.parent)
            except BaseException:
                self.close()
                with contextlib.suppress(OSError):
                    self.path.unlink()  # else it would look damaged
                raise

    @contextlib.contextmanager
    def _warning_once(self) -> Iterator[None]:
        """Log the first error of the file system, and go on without the file."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                _log.warning("%s cannot be written (%s): its count of bytes written may fall behind", self.path, error)
            self._has_warned = True

    def _is_own(self, slot: Ledger) -> bool:
        return (slot.store_uuid, slot.index) == (self.ledger.store_uuid, self.ledger.index)


def _write_whole(fd: int, content: bytes, offset: int) -> None:
    if os.pwrite(fd, content, offset) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- the ledgers of an open store --------------------------------------------------------------------------------------


class Ledgers:
    """The ledgers of one store; of none where it has none to keep: without durable files, or opened to read.

    Threads of devices and of commits write them, one at a time. Nothing here raises for a ledger's sake.
    """

    def __init__(self, directories: Sequence[Path] = (), store_uuid: bytes = b"") -> None:
        self._process = this_process()
        self._files = [LedgerFile(path, store_uuid, index) for index, path in enumerate(directories)]
        self._devices: Sequence[FileDevice] = ()
        self._catalog_bytes = 0
        self._lock = threading.Lock()
        # Order: after the devices' own end, added later: their counts are final then.
        at_exit(self, Ledgers.close)
        after_fork(self, Ledgers._close_files)

    def watch(self, devices: Sequence[FileDevice]) -> None:
        """Have ``start`` count what ``devices``, in the order of the directories, have written since their opening."""
        self._devices = devices

    def start(self) -> None:
        """Read all ledgers, begin those that are missing, and keep them from now on; blocks.

        Order: when nothing can refuse the store any more, as what is refused is not written to. Raises UsageError for
        a trap in the place of a ledger.
        """
        for file in self._files:
            file.open()
        for device in self._devices if self._files else ():
            device.watch_writes(STEP_NBYTES // 4, self._update)

    def note_commit(self, catalog_bytes: int) -> None:
        """Write the counts, with the bytes that this process has written to the catalog; may block for a flush."""
        self._catalog_bytes = catalog_bytes
        self._update(flushes_from=STEP_NBYTES * 3 // 4)

    @property
    def earlier_bytes(self) -> int | None:
        """The bytes written to all directories before the store was opened; None where no ledger is kept."""
        return sum(file.opened.write_bytes for file in self._files) if self._files else None

    def close(self) -> None:
        """Make the counts durable, close the files; blocks. Idempotent; does nothing in a child."""
        if self._process.is_here:
            self._update(flushes_from=1)
            self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def __repr__(self) -> str:
        return f"<Ledgers {[str(file.path) for file in self._files]}>"

    def _update(self, *, flushes_from: int = _MOST) -> None:
        with CRITICAL_SECTION.lock:
            # Only close waits for its turn: the count of any other comes with the next one.
            if not self._lock.acquire(blocking=flushes_from == 1):
                return
            try:
                for index, (file, device) in enumerate(zip(self._files, self._devices, strict=False)):
                    catalog_bytes = 0 if index else self._catalog_bytes
                    file.update(device.statistics().write_bytes, catalog_bytes, flushes_from=flushes_from)
            except Exception:  # a bug of ours; the next update does without it
                _log.exception("the bytes written were not counted")
            finally:
                self._lock.release()
