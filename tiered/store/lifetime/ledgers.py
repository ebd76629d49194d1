"""Ledgers: the counts of bytes written to the directories of an open store, and the thread that writes them down.

The thread wakes after each quarter of a step on any device and after each commit, and writes every count that has
grown. So neither a commit, nor a device's thread, nor a caller waits for a ledger, but close, which makes them durable.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

from tiered.bytes.critical_section import ServiceThread
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.exit_and_fork import after_fork, at_exit
from tiered.errors import CapacityError
from tiered.store.lifetime import ledger
from tiered.store.lifetime.ledger import LedgerFile

__all__ = ["Ledgers"]

_WAKE_UPS_PER_STEP = 4  # so that the thread may wait for a drive, or for its turn, and a kill still loses one at most
_DEADLINE_S = 60.0

_log = logging.getLogger("tiered")


class Ledgers:
    """The ledgers of one store; of none where it has none to keep: without durable files, or opened to read.

    Only the thread writes; where none can be started, only ``close`` does. Nothing here raises for a ledger's sake.
    """

    def __init__(self, directories: Sequence[Path] = (), store_uuid: bytes = b"") -> None:
        self._pid = os.getpid()
        self._files = [LedgerFile(path, store_uuid, index) for index, path in enumerate(directories)]
        self._devices: Sequence[FileDevice] = ()
        self._catalog_bytes = 0
        self._wake_ups = queue.SimpleQueue[None]()  # whose put never blocks, and may interrupt itself
        self._is_started = self._is_ending = False
        self._thread: threading.Thread | None = None
        # Order: after the devices' own end, added later: their counts are final then.
        at_exit(self, Ledgers.close)
        after_fork(self, Ledgers._close_in_child)

    def watch(self, devices: Sequence[FileDevice]) -> None:
        """Have ``start`` count what ``devices``, in the order of the directories, have written since their opening."""
        self._devices = devices

    def start(self) -> None:
        """Read all ledgers, begin those that are missing, and keep them from now on; blocks.

        Order: when nothing can refuse the store any more, as what is refused is not written to. Raises UsageError for
        a trap in the place of a ledger.
        """
        if not self._files:
            return
        for file in self._files:
            file.open()
        self._is_started = True
        thread = ServiceThread(target=self._run, name="tiered-ledger")
        try:
            thread.start()
        except CapacityError:
            return
        self._thread = thread
        for device in self._devices:
            device.watch_writes(ledger.STEP_NBYTES // _WAKE_UPS_PER_STEP, self._wake)

    def note_commit(self, catalog_bytes: int) -> None:
        """Have the counts written soon, with the bytes that this process has written to the catalog; never blocks."""
        self._catalog_bytes = catalog_bytes
        self._wake()

    @property
    def earlier_bytes(self) -> int | None:
        """The bytes written to all directories before the store was opened; None where no ledger is kept."""
        return sum(file.opened.write_bytes for file in self._files) if self._files else None

    def close(self) -> None:
        """Make the counts durable, end the thread, close the files; blocks. Idempotent; does nothing in a child."""
        if self._pid != os.getpid() or (self._is_started and not self._end()):
            return
        for file in self._files:
            file.close()

    def _end(self) -> bool:
        """Write the last counts; return whether nothing is written any more."""
        is_first, self._is_ending = not self._is_ending, True
        if self._thread is None:
            if is_first:
                self._update(is_last=True)
            return True
        self._wake()  # order: after the flag
        self._thread.join(_DEADLINE_S)
        if self._thread.is_alive():
            names = ", ".join(str(file.path) for file in self._files)
            _log.warning("%s: a write has not ended in %g s, and is not waited for any longer", names, _DEADLINE_S)
        return not self._thread.is_alive()

    def _close_in_child(self) -> None:
        for file in self._files:
            file.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_ending else "open"
        return f"<Ledgers {[str(file.path) for file in self._files]}, {state}>"

    def _wake(self) -> None:
        if self._thread is not None:
            self._wake_ups.put(None)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake_ups.get()
            while not self._wake_ups.empty():  # all that have come by now are served by one update
                self._wake_ups.get()
            is_last = self._is_ending
            self._update(is_last=is_last)

    def _update(self, *, is_last: bool) -> None:
        for index, (file, device) in enumerate(zip(self._files, self._devices, strict=False)):
            try:
                catalog_bytes = 0 if index else self._catalog_bytes
                file.update(device.statistics().write_bytes, catalog_bytes, is_last=is_last)
            except Exception:  # a bug of ours; the other ledgers, and the next update, do without it
                _log.exception("%s was not written", file.path)
