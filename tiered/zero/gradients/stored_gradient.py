"""StoredGradient: the source of a stand-in for a gradient on NVMe."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch

from tiered.bytes.interrupt import uninterrupted_block
from tiered.errors import UsageError
from tiered.tiers.compute_tier import ComputeTier
from tiered.zero.gradients.stand_in import Change

__all__ = ["Compute", "StoredGradient", "with_pending"]


Compute: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A question about a gradient's values."""


class GradientOwner(Protocol):
    """The owner of the bytes of gradients."""

    def asked(self, question: Hashable, compute: Compute) -> None:
        """``question`` was asked: where that is cheap, the next gradients may answer it before they are stored."""

    def read(self, source: StoredGradient) -> AbstractContextManager[torch.Tensor]:
        """Lend the values of ``source`` as ``GradientSource.read`` does."""

    def change(self, source: StoredGradient, change: Change) -> None:
        """Apply ``change`` to the values of ``source`` now, or have it pending there."""


class StoredGradient:
    """One gradient of a unit, from its first way to NVMe to its end; see ``GradientSource``.

    ``pending`` are the changes that the stored bytes lack, in the order in which they were asked for. ``answers`` are
    those to questions that were asked before; they are of the stored bytes.
    """

    __slots__ = ("_owner", "answers", "name", "pending")

    where = "on NVMe"
    advice = (
        "norms, finite checks and scalings in place by numbers, as torch.nn.utils.clip_grad_norm_ and"
        " torch.amp.GradScaler do, or a store with a larger dram=, in which gradients find room"
    )
    is_readable = True

    def __init__(self, name: str, owner: GradientOwner) -> None:
        self.name = name
        self.pending: list[Change] = []
        self.answers: dict[Hashable, torch.Tensor] = {}
        # Lifetime: the parameter's gradient leads here, and the collector does not look into torch's objects.
        self._owner = weakref.ref(owner)

    def answer(self, question: Hashable | None, compute: Compute) -> torch.Tensor:
        """Return ``compute(values)``, reading them unless the answer is known. None: a question of this time alone."""
        if not self.pending and question in self.answers:
            return self.answers[question]
        if question is not None:
            self._owner_there().asked(question, compute)
        with self.read() as values:
            try:
                return compute(values)
            finally:
                del values  # lifetime: the bytes are lent

    def read(self) -> AbstractContextManager[torch.Tensor]:
        """Lend the values, a read of the whole unit's gradients if need be. Blocks."""
        return self._owner_there().read(self)

    def change(self, change: Change) -> None:
        """Apply ``change`` now where the values are in DRAM, else when they are read."""
        self._owner_there().change(self, change)

    def take_pending(self) -> list[Change]:
        """Return the changes that the stored bytes lack; the caller applies them, and may change the bytes further."""
        self.answers = {}
        pending, self.pending = self.pending, []
        return pending

    def gone(self) -> UsageError:
        """Return the error to raise once the owner has forgotten this gradient."""
        return UsageError(
            f"parameter {self.name}: the gradient that this stood for is gone: optimizer.step() has used it, or it was"
            " dropped or replaced; expected parameter.grad as it is now"
        )

    def _owner_there(self) -> GradientOwner:
        owner = self._owner()
        if owner is None:
            raise self.gone()
        return owner


@uninterrupted_block
def with_pending(tier: ComputeTier, stored: torch.Tensor, pending: Sequence[Change]) -> Iterator[torch.Tensor]:
    """Lend ``stored``, or where changes are pending a copy of it with these, within the budget of ``tier``.

    ``stored`` is a dense tensor and stays as it is. Blocks where memory is short.
    """
    if not pending or not stored.numel():
        yield stored
        return
    with tier.scratch(stored.nbytes) as flat:
        copy = flat.view(stored.dtype).as_strided(stored.shape, stored.stride()).copy_(stored)
        del flat, stored  # lifetime: only the caller refers to the copy
        for change in pending:
            change(copy)
        yield copy
        del copy
