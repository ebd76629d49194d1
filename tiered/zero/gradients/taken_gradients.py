"""TakenGradients: the gradients of one unit from the hand-over to an update to their end."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tiered.store.residency.residency import Lease, Residency
from tiered.tiers.compute_tier import ComputeTier, GradientBuffer, UpdatePlace
from tiered.zero.gradients.stand_in import Change
from tiered.zero.parameters.unit import Segment

__all__ = ["TakenGradients"]


class TakenGradients:
    """The gradients of one unit that an update has taken over, with their clip factors. One owner at a time.

    They lie in the bytes of ``key``, a scratch key that ``delete`` ends, as their unit's layout says. ``pending`` are
    changes that these bytes lack until they are leased. Or they are ``kept`` on the compute device, where the
    update computes, too. Or they are ``own``: (numel,) each, in memory order, where
    autograd put them; the budget has their bytes already, and ``key`` is only their name.
    """

    __slots__ = ("_factors", "_kept", "_own", "_pending", "_place", "_tensor", "_tier", "_working_set", "key", "lease",
                 "nbytes")  # fmt: skip

    def __init__(
        self,
        working_set: Residency,
        tier: ComputeTier,
        place: UpdatePlace,
        key: str,
        *,
        nbytes: int,
        factors: Mapping[Segment, torch.Tensor],
        lease: Lease | None = None,
        pending: Mapping[Segment, list[Change]] | None = None,
        own: Mapping[Segment, torch.Tensor] | None = None,
        kept: GradientBuffer | None = None,
    ) -> None:
        self._working_set = working_set
        self._tier = tier
        self.key = key
        self.lease = lease
        self.nbytes = nbytes
        self._place = place
        self._tensor: torch.Tensor | None = None  # the leased bytes, where the update computes
        there = {id(factor): place.number(factor) for factor in factors.values()}  # most often one for all
        self._factors = {segment: there[id(factor)] for segment, factor in factors.items()}
        self._pending = {s: [change.elsewhere(place.number) for change in each] for s, each in (pending or {}).items()}
        self._own = own
        self._kept = kept

    def open(self) -> None:
        """Lease the bytes for the update's share; stored bytes are swapped in, pending changes applied. Blocks."""
        if self._own is not None:
            return
        if self._kept is not None:
            self._tensor = self._place.take_over(self._kept)
            return
        if self.lease is None:
            self.lease = self._tier.lease(self.key, "rw" if self._pending else "r")
        if self._tensor is None:
            self._tensor = self._place.bring(self.lease)
            pending, self._pending = self._pending, {}
            for segment, changes in pending.items():
                for change in changes:
                    change(self.flat(segment))
        self._working_set.change_share(self.lease)

    def factor(self, segment: Segment) -> torch.Tensor | None:
        """Return the clip factor of ``segment``, () fp32 in DRAM, None where it was not clipped."""
        factor = self._factors.get(segment)
        return None if factor is None else factor()

    def flat(self, segment: Segment) -> torch.Tensor:
        """Return the (numel,) gradient of ``segment`` in memory order; after ``open``."""
        if self._own is not None:
            return self._own[segment]
        assert self._tensor is not None
        return segment.gradient_flat(self._tensor)

    def store_away(self) -> bool:
        """Give the bytes back to the working set, for now; return whether they were leased."""
        lease, self.lease, self._tensor = self.lease, None, None
        if lease is not None:
            lease.release()
            self._working_set.swap_out([self.key])
        return lease is not None

    def delete(self) -> str:
        """Forget the gradients; return the key when a caller still sees its bytes and it must be deleted later."""
        lease, self.lease, self._tensor = self.lease, None, None
        kept, self._kept = self._kept, None
        if self._own is not None:
            self._own = {}
        elif kept is not None:
            kept.discard()
        elif lease is None or self._place.device.type != "cpu":
            if lease is not None:
                self._place.give_back(lease)
            self._tier.delete(self.key)
        elif not self._working_set.discard(lease):  # order: bytes released first would be written for nothing
            return self.key
        return ""
