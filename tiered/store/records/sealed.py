"""Sealed: a generation on its way to the devices and into the catalog."""

from __future__ import annotations

import threading
from collections import deque

from tiered.store.format.row import Extent, Row
from tiered.store.records.entry import BlockWrites, Entry

__all__ = ["Sealed"]


class Sealed:
    """The fixed contents of a generation; its rows are complete once every pending entry has landed."""

    __slots__ = (
        "freed", "generation", "is_applying", "num_pending", "parts", "phase", "removed", "rows", "state", "targets",
        "thread", "to_write",
    )  # fmt: skip

    def __init__(self, generation: int, state: str) -> None:
        self.generation = generation
        self.state = state  # JSON text
        self.rows: dict[Entry, Row] = {}  # changed entries whose bytes have landed
        self.targets: dict[Entry, tuple[Extent, ...]] = {}  # changed entries whose bytes have not, and where they go
        self.to_write: deque[Entry] = deque()  # the entries of ``targets`` that may need a write to be started
        self.removed: list[Entry] = []
        self.parts: dict[Entry, BlockWrites] = {}  # of the entries of ``rows`` with some blocks written by themselves
        self.freed: dict[Entry, list[Extent]] = {}  # extents of committed rows that had to be looked up
        self.num_pending = 0
        self.is_applying = False  # the catalog is about to have it
        self.phase = 0  # counts the steps of the commit, as a sign of progress
        self.thread: threading.Thread | None = None  # that flushes it, where it has one of its own
