"""Entry: all facts about one key, and the cost of its bytes in DRAM. key_table.py says which generation they belong to.

Nothing here takes a lock or does I/O: the store's lock guards every field.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiered.bytes.arena import Buffer, Watched
from tiered.errors import LeaseError, UsageError
from tiered.store.format.row import INLINE_NBYTES, Extent, Row, Spec
from tiered.store.waiting.calling_thread import this_thread

__all__ = [
    "Alias",
    "BlockWrites",
    "Entry",
    "EntryState",
    "Granted",
    "LeaseNeeds",
    "Record",
    "Residence",
    "Stored",
    "new_version",
    "tensor_over",
]


class EntryState(enum.Enum):
    """Where a key's newest bytes are.

    UNDEFINED -> DIRTY [Residency._grant, a put], STORED [an inline or streamed put, KeyTable.adopt_ranges]
    STORED -> ARRIVING, or CLEAN where inline [SwapInOut._swap_in]; -> DIRTY [Residency._grant for "w", a put]
    ARRIVING -> CLEAN, or STORED where the read failed [SwapInOut._arrived]
    CLEAN -> STORED [Eviction._evict]; -> DIRTY [Residency._grant for writing, a put]
    DIRTY -> DEPARTING [SwapInOut._swap_out]; -> CLEAN [Eviction._make_clean; where inline SwapInOut.land_inline]
    DEPARTING -> CLEAN, or DIRTY where the write failed [SwapInOut._written]
    any but ARRIVING and DEPARTING -> STORED, UNDEFINED [Residency.roll_back]
    any but ARRIVING and DEPARTING -> UNDEFINED [a delete, Residency.drop_bytes]
    """

    UNDEFINED = "undefined"  # nowhere: created, not yet written; no DRAM, no extents
    STORED = "stored"  # on the device, or inline in the row; no DRAM
    ARRIVING = "arriving"  # on the device; a buffer belongs to the read in flight
    CLEAN = "clean"  # in DRAM and on the device: may be evicted
    DIRTY = "dirty"  # in DRAM only, perhaps leased for writing at this moment
    DEPARTING = "departing"  # in DRAM; a write in flight has a hold on buffer and extents


@dataclass(frozen=True, slots=True)
class Record:
    """The facts about a key that ``Store.records`` returns."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    generation: int  # that its newest landed bytes were written for; -1: none landed yet
    residency: str
    held: bool
    extents: tuple[Extent, ...]  # of the newest landed bytes; () for inline tensors


class Residence:
    """An entry's bytes in DRAM and their users. ``entry`` is None once they were replaced under living tensors."""

    __slots__ = (
        "aliases", "buffer", "claims", "entry", "is_leaving", "is_own", "name", "open_readers", "open_writers",
        "pinned_nbytes", "updater", "writers",
    )  # fmt: skip

    def __init__(self, buffer: Buffer, entry: Entry | None) -> None:
        self.buffer = buffer
        self.entry = entry
        self.name = "a copy" if entry is None else entry.name
        self.aliases = 0  # leases that have not ended
        self.writers = 0  # those of the leases that may write
        self.open_readers = 0  # leases that were not released
        self.open_writers = 0
        self.updater: int | None = None  # the thread of an update that is the open writer: others wait for its end
        self.pinned_nbytes = 0  # the bytes that its leases count in the budget
        self.is_own = False  # they count in the bytes that are set aside for a thread
        self.claims = 0  # callers that wait for these bytes, or copy them
        self.is_leaving = False  # swap_out was asked for: first candidate for eviction once clean

    @property
    def is_idle(self) -> bool:
        return not self.aliases and not self.claims

    @property
    def is_lingering(self) -> bool:
        """Whether every lease was released, and tensors made from one are alive."""
        return bool(self.aliases) and not self.open_readers and not self.open_writers


class Alias:
    """The end of a lease as the finalizer of its bytes reports it; refers to no tensor."""

    __slots__ = ("before", "has_ended", "is_released", "is_writer", "memory", "residence", "thread")

    def __init__(self, residence: Residence, *, is_writer: bool, thread: int) -> None:
        self.residence = residence
        self.is_writer = is_writer
        self.thread = thread
        self.is_released = False
        self.has_ended = False
        self.memory: Watched | None = None  # lives as long as the lease's last tensor
        self.before: Stored | None = None  # where the device has the bytes that were leased for writing

    @property
    def is_dead(self) -> bool:
        """Whether the last tensor has died, reported or not: another thread may have the report in hand."""
        return self.memory is not None and self.memory() is None


class Stored(NamedTuple):
    """The facts about an entry that end as it is leased for writing, for an entry that the device has."""

    row: Row | None
    was_changed: bool  # since the last commit was sealed
    version: int


class LeaseNeeds(enum.Enum):
    """The step that an entry needs before a lease of it can be granted."""

    NOTHING = enum.auto()
    BUFFER = enum.auto()  # memory to write to
    SWAP_IN = enum.auto()  # memory, and the bytes
    WAIT = enum.auto()  # a transfer, a seal or another thread's update uses the bytes


class BlockWrites:
    """Blocks of a record that were written by themselves since the last seal, each to an extent of its own."""

    __slots__ = ("_are_fresh", "owns_all", "superseded")

    def __init__(self, num_blocks: int, *, owns_all: bool) -> None:
        self.owns_all = owns_all  # all other blocks are of the open generation, too, and none is another's
        self.superseded: list[Extent] = []  # where the last sealed version has these blocks; a commit gives them back
        self._are_fresh = np.zeros(0 if owns_all else num_blocks, np.bool_)  # of all blocks: a rollback gives them back

    def are_fresh(self, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of ``blocks`` a rollback gives back."""
        return np.ones(len(blocks), np.bool_) if self.owns_all else self._are_fresh[blocks]

    def add(self, blocks: NDArray[np.int64]) -> None:
        """Note that ``blocks`` are fresh."""
        if not self.owns_all:
            self._are_fresh[blocks] = True

    def fresh(self) -> NDArray[np.int64]:
        """Return the blocks that are fresh, but for a record that owns all."""
        return np.flatnonzero(self._are_fresh)


def tensor_over(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return the tensor of ``spec`` on the storage of ``flat``, a (nbytes,) uint8 tensor: itself, if it is that.

    It is no view in autograd's sense: nothing but the storage itself keeps the bytes alive.
    """
    if spec.dtype == torch.uint8 and len(spec.shape) == 1:
        return flat
    tensor = torch.empty(0, dtype=spec.dtype, device="cpu")
    tensor.set_(flat.untyped_storage(), 0, spec.shape)  # type: ignore[call-overload]  # a storage is a source too
    return tensor


Granted = tuple[Alias, Spec, Residence | None]
"""A lease, the spec of its tensor, and the claimed residence that it must copy from, if any."""


class Entry:
    """One key. Name, id and spec never change: a put of another spec makes another entry.

    The invariant: unless UNDEFINED, the newest bytes are in ``row`` or in ``residence``, or in both.
    """

    __slots__ = (
        "committed", "held", "is_pending", "key_id", "landing", "name", "nbytes", "parts", "residence",
        "row", "scratch", "spec", "state", "version",
    )  # fmt: skip

    def __init__(self, name: str, key_id: int, spec: Spec, *, scratch: bool) -> None:
        self.name = name
        self.key_id = key_id
        self.spec = spec
        self.nbytes = spec.nbytes
        self.scratch = scratch
        self.state = EntryState.UNDEFINED
        self.held = False
        self.is_pending = False  # sealed, and its sealed bytes have not landed
        self.residence: Residence | None = None
        self.row: Row | None = None  # the newest bytes on the device; None while only DRAM has them
        self.committed: Row | None = None  # of the last committed generation
        self.landing: tuple[Extent, ...] | None = None  # the set that writes of the open generation go to
        self.parts: BlockWrites | None = None  # blocks that were written by themselves in the open generation
        self.outdate()

    def outdate(self) -> None:
        """The bytes are others from now on: ``version`` is a number that no bytes of any key have had."""
        self.version = new_version()

    @property
    def is_inline(self) -> bool:
        return self.nbytes <= INLINE_NBYTES

    @property
    def is_settled(self) -> bool:
        """Whether nothing in flight or sealed has a hold on its bytes."""
        return not self.is_pending and self.state not in (EntryState.ARRIVING, EntryState.DEPARTING)

    def needs(self, mode: str) -> LeaseNeeds:
        """Return what a lease lacks. Raises LeaseError for a lease in the way, UsageError for bytes never written."""
        residence, state = self.residence, self.state
        if residence is not None and (residence.open_writers or (mode != "r" and residence.open_readers)):
            if residence.updater not in (None, this_thread()):
                return LeaseNeeds.WAIT
            open_mode = "writing" if residence.open_writers else "reading"
            raise LeaseError(f"{self.name!r} is leased for {open_mode}; release that lease before one with {mode!r}")
        if state is EntryState.UNDEFINED and mode != "w":
            raise UsageError(f'{self.name!r} has no bytes yet: it was created and never written; lease it with "w"')
        if state is EntryState.ARRIVING:
            return LeaseNeeds.WAIT
        if mode == "r":
            return LeaseNeeds.SWAP_IN if state is EntryState.STORED else LeaseNeeds.NOTHING
        if not self.is_settled:
            return LeaseNeeds.WAIT
        if state in (EntryState.UNDEFINED, EntryState.STORED):
            return LeaseNeeds.BUFFER if mode == "w" else LeaseNeeds.SWAP_IN
        assert residence is not None
        # Bytes that readers still use are not overwritten: copy on write. Writers that linger are joined.
        return LeaseNeeds.BUFFER if residence.aliases and not residence.writers else LeaseNeeds.NOTHING

    def record(self) -> Record:
        """Return the facts that the public face shows of this key."""
        return Record(
            name=self.name,
            dtype=self.spec.dtype,
            shape=self.spec.shape,
            nbytes=self.nbytes,
            generation=-1 if self.row is None else self.row.generation,
            residency=self.state.value,
            held=self.held,
            extents=() if self.row is None else self.row.extents,
        )

    def __repr__(self) -> str:
        return f"Entry({self.name!r}, {self.spec.dtype_name}{list(self.spec.shape)}, {self.state.value})"


_versions = itertools.count(1)


def new_version() -> int:
    """Return a number above all that bytes have had; the next one is above it by one where none changed meanwhile."""
    return next(_versions)
