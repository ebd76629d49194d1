"""Memory that a ring has pinned, so that operations on it need not do so each time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from tiered.bytes.device.pinning import address_of, pin
from tiered.bytes.device.ring import Ring
from tiered.errors import DeadlineError, UsageError
from tiered.units import GiB

__all__ = ["Registration"]

_log = logging.getLogger("tiered")


class Registration:
    """The memory of one ring, registered once: asked for by any thread, carried out by the ring's."""

    def __init__(self, name: str) -> None:
        """``name`` is what messages call the device."""
        self.is_due = False  # somebody waits for ``carry_out``
        self._name = name
        self._pieces: list[tuple[int, int]] = []  # (address, end), each at most 1 GiB, and an index of the ring's
        self._wanted: list[tuple[int, int]] = []
        self._done = threading.Event()
        self._lock = threading.Lock()  # one asks at a time
        self._memories: Sequence[memoryview] = ()

    def ask(self, memories: Sequence[memoryview], wake: Callable[[], None], deadline_s: float) -> bool:
        """Have ``memories`` registered and wait for it; whether they are. Raises UsageError (twice), DeadlineError."""
        wanted: list[tuple[int, int]] = []
        for memory in memories:
            start = address_of(pin(memory))
            end = start + len(memory)
            wanted += [(piece, min(piece + GiB, end)) for piece in range(start, end, GiB)]
        with self._lock:
            if self._memories:
                raise UsageError(f"{self._name} has registered memory already")
            self._memories = memories  # lifetime: mapped until the ring has gone
            self._wanted = wanted
            self._done.clear()
            self.is_due = True
            wake()
            if not self._done.wait(deadline_s):
                raise DeadlineError(f"{self._name}: memory was not registered within {deadline_s:g} s; check the drive")
            if not self._pieces:
                self._memories = ()
            return bool(self._pieces)

    def carry_out(self, ring: Ring) -> None:
        """Register what was asked for; where RLIMIT_MEMLOCK does not allow it, one warning says so."""
        self.is_due = False
        try:
            ring.register_buffers([(start, end - start) for start, end in self._wanted])
            self._pieces = self._wanted
        except OSError as error:
            _log.warning(
                "%s: I/O buffers are not registered (%s): a little more CPU time; ulimit -l", self._name, error
            )
        self._done.set()

    def index_of(self, address: int, nbytes: int) -> int | None:
        """Return the ring's index of the registered piece that holds all of these bytes; None: there is none."""
        for index, (start, end) in enumerate(self._pieces):
            if start <= address and address + nbytes <= end:
                return index
        return None

    def forget(self) -> None:
        """Let the memory go: the ring has gone."""
        self._memories = ()
