"""LeaseNeeds: the step that an entry needs before it can be leased, decided without a lock or I/O."""

from __future__ import annotations

import enum
from collections.abc import Callable

from tiered.errors import LeaseError, UsageError
from tiered.store.format.row import UnknownSpec
from tiered.store.records.entry import Entry, EntryState
from tiered.store.waiting.calling_thread import this_thread

__all__ = ["LeaseNeeds", "ReadPastError", "SwapsIn"]

SwapsIn = Callable[[Entry], bool]
"""Whether a caller has bytes that are not in DRAM swapped in; under the lock."""


class ReadPastError(Exception):
    """A brief lease was not granted: its bytes have left DRAM, and the caller reads such past it."""


class LeaseNeeds(enum.Enum):
    """The step that an entry needs before a lease of it can be granted."""

    NOTHING = enum.auto()
    BUFFER = enum.auto()  # memory to write to
    SWAP_IN = enum.auto()  # memory, and the bytes
    WAIT = enum.auto()  # a transfer, a seal or another thread's update uses the bytes

    @classmethod
    def of(cls, entry: Entry, mode: str) -> LeaseNeeds:
        """Return what ``entry`` lacks. Raises LeaseError for a lease in the way, UsageError for bytes never written."""
        if isinstance(entry.spec, UnknownSpec):  # order: before a buffer is granted
            raise entry.spec.refusal()
        residence, state = entry.residence, entry.state
        if residence is not None and (residence.open_writers or (mode != "r" and residence.open_readers)):
            if residence.updater not in (None, this_thread()):
                return cls.WAIT
            open_mode = "writing" if residence.open_writers else "reading"
            raise LeaseError(f"{entry.name!r} is leased for {open_mode}; release that lease before one with {mode!r}")
        if state is EntryState.UNDEFINED and mode != "w":
            raise UsageError(f'{entry.name!r} has no bytes yet: it was created and never written; lease it with "w"')
        if state is EntryState.ARRIVING:
            return cls.WAIT
        if mode == "r":
            return cls.SWAP_IN if state is EntryState.STORED else cls.NOTHING
        if not entry.is_settled:
            return cls.WAIT
        if state in (EntryState.UNDEFINED, EntryState.STORED):
            return cls.BUFFER if mode == "w" else cls.SWAP_IN
        assert residence is not None
        # Bytes that readers still use are not overwritten: copy on write. Writers that linger are joined.
        return cls.BUFFER if residence.aliases and not residence.writers else cls.NOTHING
