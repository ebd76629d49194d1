"""TakenGradients: the gradients of one unit from the hand-over to an update to their end."""

from __future__ import annotations

import torch

from tiered.store.residency.working_set import Lease, WorkingSet
from tiered.zero.gradients.stand_in import Change
from tiered.zero.parameters.unit import Segment

__all__ = ["TakenGradients"]


class TakenGradients:
    """The gradients of one unit that an update has taken over, with their clip factors. One owner at a time.

    They lie in the bytes of ``key``, a scratch key that ``delete`` ends, as their unit's layout says. ``pending`` are
    changes that these bytes lack until they are leased.
    """

    __slots__ = ("_working_set", "factors", "key", "lease", "nbytes", "pending")

    def __init__(
        self,
        working_set: WorkingSet,
        key: str,
        lease: Lease | None,
        *,
        nbytes: int,
        factors: dict[Segment, torch.Tensor],
        pending: dict[Segment, list[Change]],
    ) -> None:
        self._working_set = working_set
        self.key = key
        self.lease = lease
        self.nbytes = nbytes
        self.factors = factors
        self.pending = pending

    def open(self) -> Lease:
        """Return the lease of the bytes; stored bytes are swapped in, and pending changes applied. Blocks."""
        if self.lease is not None:
            return self.lease
        self.lease = self._working_set.lease(self.key, "rw" if self.pending else "r")
        pending, self.pending = self.pending, {}
        for segment, changes in pending.items():
            for change in changes:
                change(self.flat(segment))
        return self.lease

    def flat(self, segment: Segment) -> torch.Tensor:
        """Return the (numel,) gradient of ``segment`` in memory order; the bytes must be leased."""
        assert self.lease is not None
        return segment.gradient_flat(self.lease.tensor)

    def store_away(self) -> bool:
        """Give the bytes back to the working set, for now; return whether they were leased."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
            self._working_set.swap_out([self.key])
        return lease is not None

    def delete(self) -> str:
        """Forget the gradients; return the key when a caller still sees its bytes and it must be deleted later."""
        lease, self.lease = self.lease, None
        if lease is None:
            self._working_set.delete([self.key])
        elif not self._working_set.discard(lease):  # order: bytes released first would be written for nothing
            return self.key
        return ""
