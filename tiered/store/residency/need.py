"""What stands between a caller and its lease: pure decisions about one entry."""

from __future__ import annotations

import enum

from tiered.errors import LeaseError, UsageError
from tiered.store.format.spec import UnknownSpec
from tiered.store.records.entry import Entry, Residency

__all__ = ["Need"]


class Need(enum.Enum):
    """What a lease of an entry lacks."""

    NOTHING = enum.auto()
    BUFFER = enum.auto()  # memory to write to
    SWAP_IN = enum.auto()  # memory, and the bytes
    PATIENCE = enum.auto()  # a transfer or a seal has a hold on the bytes

    @classmethod
    def of(cls, entry: Entry, mode: str) -> Need:
        """Return the need. Raises LeaseError for an open lease in the way, UsageError where nothing can be read."""
        if isinstance(entry.spec, UnknownSpec):  # order: before it is granted, and its bytes are nobody's any more
            raise entry.spec.refusal()
        residence, state = entry.residence, entry.state
        if residence is not None and (residence.open_writers or (mode != "r" and residence.open_readers)):
            open_mode = "writing" if residence.open_writers else "reading"
            raise LeaseError(f"{entry.name!r} is leased for {open_mode}; release that lease before one with {mode!r}")
        if state is Residency.UNDEFINED and mode != "w":
            raise UsageError(f'{entry.name!r} has no bytes yet: it was created and never written; lease it with "w"')
        if state is Residency.ARRIVING:
            return cls.PATIENCE
        if mode == "r":
            return cls.SWAP_IN if state is Residency.STORED else cls.NOTHING
        if not entry.is_settled:
            return cls.PATIENCE
        if state in (Residency.UNDEFINED, Residency.STORED):
            return cls.BUFFER if mode == "w" else cls.SWAP_IN
        assert residence is not None
        # Bytes that only readers still look at are not overwritten: copy on write. Writers that linger are joined.
        return cls.BUFFER if residence.aliases and not residence.writers else cls.NOTHING
