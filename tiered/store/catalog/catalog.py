"""The durable index of a store: a row per key, and a root row per generation that is kept. The root is the commit.

THE FORMAT (version 2). ``catalog.db`` is an SQLite database: user_version = the format version, UTF-8, pages of 4096
bytes, rollback journal. All integers in the blobs are little-endian, no padding; digests are xxh3-64.

    root     one = 1 (the newest generation) or 0 (the one before, kept until the newest is confirmed), format = the
             version again, body, digest (8 bytes: xxh3-64 of format u32 + body, seed 0)
      body     store uuid 16 bytes, generation u64, nonce u64, next key id u64, directories u32, bytes of the list of
               external files u32, number of rows and pages u64, sum of their digests u64 (mod 2**64); the list: per
               file nbytes u64, digest of its header u64, name bytes u16, name; then the state as UTF-8 text to the end
    records  key_id (0 < key id < next key id, never reused), body, digest (8 bytes: of key id u64 + body,
             seed = xxh3-64 of the store uuid)
      body     generation u64, nbytes u64, name bytes u32, places u32, dtype bytes u8, dimensions u8, kind u8,
               log2 of the block size u8 (12 to 22), then the name (UTF-8, lone surrogates passed), the dtype (ASCII),
               a u64 per dimension, the places, and then by kind
               0 here      places: extents (device u16, file u32, offset u64, length u64), one after another; then
                           a digest u64 per block of the bytes in them
               1 inline    no places; the tensor's own bytes
               2 paged     no places, nothing: see pages. Of records of more than 1024 blocks, and of those that have
                           blocks written for several generations
               3 external  places: (start in the record u64, external file u32, offset u64, length u64), ascending,
                           zeros between them; then digests as for 0, zeros of a block that nobody has read yet
               seed of a block's digest = xxh3-64 of store uuid, key id u64, block u64, generation u64
    pages    key_id, page (0, 1, ...: 1024 blocks each), body, digest (8 bytes: of key id u64 + page u64 + body)
      body     generation u64, extents u32, 1 or 0 u32, then extents and digests as above, and behind 1 a generation
               u64 per block, which its digest has instead of the page's
    records_before, pages_before    what the newest generation has replaced or deleted; an empty body for what it has
             added. Empty unless a root with one = 0 is there.

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
Where a generation needs to be confirmed, the one before stays in the tables beside it, and its extents in the files:
the next open takes either, whole, and ``discard`` goes back in one transaction before anything is written. A
generation that was confirmed once is never the one to be discarded, so the confirmation needs no note of its own.
Every row is read at open; its own digest finds a changed row, number and sum in the root row find a lost, added or
stale one, for each generation that is kept. So does a damaged journal, played back in part: old and new rows together
do not make the root's sum. Another version, in user_version and in the root row, is refused with nothing changed; these
two stay where they are in every version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from tiered.store.format.root import RootHeader, corrupt

__all__ = ["Alone", "Confirmation", "GenerationName", "Member", "generation_names"]


class GenerationName(NamedTuple):
    """The name of a generation: generations of one number, committed after different crashes, differ in the nonce."""

    number: int
    nonce: int


class Member(NamedTuple):
    """One rank's store among those of a ``run`` (16 bytes) of ``world`` ranks, which commit together.

    ``origins`` are the runs, or stores of one rank, that the first commit was carried over from, one from the other,
    the last one first.
    """

    run: bytes
    rank: int
    world: int
    origins: tuple[bytes, ...] = ()

    def is_same_rank(self, other: Member | None) -> bool:
        """Return whether ``other`` is the same rank of as many, of whichever run."""
        return other is not None and (self.rank, self.world) == (other.rank, other.world)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def generation_names(headers: Sequence[RootHeader], file: str) -> tuple[GenerationName, ...]:
    """Return the names of the generations that the catalog ``file`` keeps, the newest first.

    Raises CorruptionError unless they are of one store and each came before the other: their numbers tell them apart.
    """
    for newer, older in pairwise(headers):
        if newer.store_uuid != older.store_uuid or newer.generation <= older.generation:
            raise corrupt(f"generation {older.generation} is not one before generation {newer.generation}", file)
    return tuple(GenerationName(header.generation, header.nonce) for header in headers)


# -- confirmation ------------------------------------------------------------------------------------------------------


class Confirmation(Protocol):
    """The agreement of all that commit together. Called without locks.

    Each generation is proposed before anything of it is sealed; once that has returned, ``confirm`` or ``failed``
    follows, in the commit's own thread or in the one that was to seal.
    """

    keeps_before: bool
    """Whether generations need to be confirmed: the catalog then keeps the one before each, and ``propose`` waits."""

    member: Member | None
    """The store among those of its run; None where nobody shares it. The run is known once ``join`` has returned."""

    def join(self, run: bytes, newest: int) -> bytes:
        """Return the run of all, before a new store is created; blocks.

        ``run``: the one that this store is of, with ``newest`` as its newest generation; b"" where it is to be created.
        Raises UsageError where the stores are of several runs, or where one is new and others have commits.
        """

    def choose(self, kept: Sequence[GenerationName]) -> GenerationName:
        """Return which of the generations that this store has, the newest first, it is to open; blocks.

        All that come after it are given up, for all: it must be the newest that everybody has. Raises DeadlineError,
        CorruptionError where there is none.
        """

    def propose(self, number: int, steps: Mapping[str, int], refusal: str) -> int:
        """Agree on the generation ``number`` before anything of it is sealed, and return its nonce; blocks.

        ``steps``: by the name of each optimizer, how many steps it has made; ``refusal``: why this store cannot seal,
        "" where it can. Raises for all where one refuses, or where numbers or steps differ: then no store has changed,
        and no ``confirm`` or ``failed`` follows.
        """

    def confirm(self, generation: GenerationName, note_wait: Callable[[], object]) -> None:
        """Return once everybody has ``generation`` durable; blocks, and calls ``note_wait`` now and then.

        Raises where some store has lost it; where the others cannot be asked, it is unknown.
        """

    def is_to_commit_at_end(self, has_changes: bool, failure: Exception | None) -> bool:
        """Return whether the stores, which all close, commit once more: where any ``has_changes``. Blocks.

        Raises for all where one has a ``failure``.
        """

    def failed(self, number: int, error: BaseException) -> None:
        """Say that the generation ``number``, which was proposed, is not durable here, and will not be."""


class Alone:
    """The confirmation of a store that nobody shares: it is given at once.

    ``member``: of the only rank, in a directory of ranks. ``chosen``: the generation to open in place of the newest.
    """

    keeps_before = False

    def __init__(self, member: Member | None = None, chosen: GenerationName | None = None) -> None:
        self.member = member
        self._chosen = chosen

    def join(self, run: bytes, newest: int) -> bytes:
        """Return the run of the only rank, a new one where it is b""; b"" for a store that is of no run."""
        return b"" if self.member is None else run or os.urandom(16)

    def choose(self, kept: Sequence[GenerationName]) -> GenerationName:
        """Return the newest, or the chosen one."""
        return self._chosen or kept[0]

    def propose(self, number: int, steps: Mapping[str, int], refusal: str) -> int:
        """Return a random nonce: what refuses says so itself."""
        return int.from_bytes(os.urandom(8), "little")

    def confirm(self, generation: GenerationName, note_wait: Callable[[], object]) -> None:
        """Return."""

    def is_to_commit_at_end(self, has_changes: bool, failure: Exception | None) -> bool:
        """Return whether there is something to commit."""
        return has_changes

    def failed(self, number: int, error: BaseException) -> None:
        """Return: the caller is told of ``error`` by itself."""
