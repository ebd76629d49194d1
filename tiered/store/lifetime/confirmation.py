"""Confirmation: when a generation that is durable here may take the place of the one before for good.

A store on one rank decides that alone. Over ranks a generation counts once all of them have it, and until then each
keeps the one before; this is the seam where they ask each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from tiered.store.catalog.catalog import GenerationName

__all__ = ["Alone", "Confirmation"]


class Confirmation(Protocol):
    """The agreement of all that commit together. Called without locks; ``confirm`` in the commit's own thread."""

    keeps_before: bool
    """Whether generations need to be confirmed: the catalog then keeps the one before each."""

    def choose(self, kept: Sequence[GenerationName]) -> GenerationName:
        """Return which of the generations that this store has, the newest first, it is to open; blocks.

        All that come after it are given up, for all: it must be the newest that everybody has. Raises DeadlineError,
        CorruptionError where there is none.
        """

    def begin(self, number: int) -> int:
        """Return the nonce of the generation ``number``, which is about to be sealed; blocks."""

    def confirm(self, generation: GenerationName) -> None:
        """Return once everybody has ``generation`` durable; blocks. It is unknown where this raises, not lost."""


class Alone:
    """The confirmation of a store that nobody shares: it is given at once."""

    keeps_before = False

    def choose(self, kept: Sequence[GenerationName]) -> GenerationName:
        """Return the newest."""
        return kept[0]

    def begin(self, number: int) -> int:
        """Return a random nonce."""
        return int.from_bytes(os.urandom(8), "little")

    def confirm(self, generation: GenerationName) -> None:
        """Return."""
