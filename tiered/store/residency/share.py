"""Share: a part of the DRAM budget that is set aside for one caller's leases. Under the store's lock."""

from __future__ import annotations

from collections.abc import Callable

from tiered.bytes.arena import Buffer
from tiered.store.records.entry import Residence

__all__ = ["Share"]


class Share:
    """``nbytes`` of the budget that other callers leave to the one for which ``is_for()`` holds, and their use.

    The invariant: *the leases and reservations of others, without held keys, are at most the budget less the held bytes
    and* ``nbytes``. So that caller's leases wait for transfers, and never for bytes that others keep. Bytes change
    between the two without being moved. Buffers that may be evicted count for no caller.
    """

    __slots__ = ("_budget_bytes", "_is_for", "_own", "held_bytes", "nbytes", "pinned_bytes", "used_bytes")

    def __init__(self, budget_bytes: int) -> None:
        self.nbytes = 0
        self.held_bytes = 0  # of keys that stay in DRAM for good
        self.pinned_bytes = 0  # leased or reserved, by all callers
        self.used_bytes = 0  # leased by the caller that the share is for
        self._budget_bytes = budget_bytes
        self._is_for: Callable[[], bool] = _nobody
        self._own: set[Residence] = set()

    def __repr__(self) -> str:
        return f"Share({self.used_bytes} of {self.nbytes} B used, {self.pinned_bytes} B pinned in all)"

    def set_aside(self, nbytes: int, is_for: Callable[[], bool]) -> None:
        """Set ``nbytes`` aside from now on; 0: nothing."""
        self.nbytes, self._is_for = nbytes, is_for

    @property
    def is_callers(self) -> bool:
        """Whether the share is for the calling thread."""
        return self.nbytes > 0 and self._is_for()

    @property
    def left_bytes(self) -> int:
        """The bytes of the budget that are neither held nor pinned for others than the share's caller."""
        return self._budget_bytes - self.held_bytes - (self.pinned_bytes - self.used_bytes)

    def admits(self, nbytes: int) -> bool:
        """Return whether the caller may lease or reserve ``nbytes`` more."""
        if not self.nbytes or self._is_for():
            return True
        return nbytes + self.nbytes <= self.left_bytes

    def pin(self, residence: Residence) -> None:
        """Count the first lease of ``residence``, which is not held: held bytes have their own part of the budget."""
        residence.pinned_nbytes = residence.buffer.nbytes
        self.pinned_bytes += residence.pinned_nbytes
        if self.is_callers:
            self._take(residence)

    def change(self, residence: Residence) -> None:
        """Count the leased bytes of ``residence`` as the share's from now on."""
        if residence.pinned_nbytes and residence not in self._own:
            self._take(residence)

    def hold(self, nbytes: int, residence: Residence | None) -> None:
        """``nbytes`` more are held, fewer if negative; where they are leased as ``residence``, the count moves."""
        self.held_bytes += nbytes
        if residence is not None and residence.aliases:
            self.unpin(residence) if nbytes > 0 else self.pin(residence)

    def give_back(self, residence: Residence) -> None:
        """Its caller is done with ``residence``, which living tensors of others keep."""
        if residence in self._own:
            self._own.remove(residence)
            self.used_bytes -= residence.pinned_nbytes

    def unpin(self, residence: Residence) -> None:
        """Count the end of the last lease of ``residence``."""
        self.give_back(residence)
        self.pinned_bytes -= residence.pinned_nbytes
        residence.pinned_nbytes = 0

    def reserve(self, buffer: Buffer) -> None:
        """Count ``buffer`` as reserved."""
        self.pinned_bytes += buffer.nbytes

    def unreserve(self, buffer: Buffer) -> None:
        """Count ``buffer`` as reserved no more."""
        self.pinned_bytes -= buffer.nbytes

    def _take(self, residence: Residence) -> None:
        self._own.add(residence)
        self.used_bytes += residence.pinned_nbytes


def _nobody() -> bool:
    return False
