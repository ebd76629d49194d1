"""Share: a part of the DRAM budget that is set aside for one caller's leases. Under the store's lock."""

from __future__ import annotations

from collections.abc import Callable

from tiered.bytes.arena import Buffer
from tiered.store.records.entry import Residence

__all__ = ["Share"]


class Share:
    """What may not be evicted, counted, and what of the budget others leave to the caller that ``is_for`` tells.

    Invariant: what others lease or reserve, held keys apart, is at most the budget less what is held and ``nbytes``. So
    that caller's leases wait for transfers, and never for what others keep. Bytes change between the two without being
    moved. Buffers that may be evicted belong to nobody.
    """

    __slots__ = ("_budget_bytes", "_is_for", "_own", "held_bytes", "nbytes", "pinned_bytes", "used_bytes")

    def __init__(self, budget_bytes: int) -> None:
        self.nbytes = 0
        self.held_bytes = 0  # of keys that stay in DRAM for good
        self.pinned_bytes = 0  # leased or reserved, by whomever
        self.used_bytes = 0  # of these, by the caller that the share is for
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

    def admits(self, nbytes: int) -> bool:
        """Return whether the caller may lease or reserve ``nbytes`` more."""
        if not self.nbytes or self._is_for():
            return True
        others_bytes = self.pinned_bytes - self.used_bytes
        return others_bytes + nbytes <= self._budget_bytes - self.held_bytes - self.nbytes

    def pin(self, residence: Residence, *, is_held: bool) -> None:
        """The first lease of ``residence``; held bytes have their own part of the budget."""
        if is_held:
            return
        residence.pinned_nbytes = residence.buffer.nbytes
        self.pinned_bytes += residence.pinned_nbytes
        if self.is_callers:
            self._take(residence)

    def change(self, residence: Residence) -> None:
        """What somebody has leased is used for the caller of the share from now on."""
        if residence.pinned_nbytes and residence not in self._own:
            self._take(residence)

    def unpin(self, residence: Residence) -> None:
        """The last lease of ``residence`` has ended."""
        self.pinned_bytes -= residence.pinned_nbytes
        if residence in self._own:
            self._own.remove(residence)
            self.used_bytes -= residence.pinned_nbytes
        residence.pinned_nbytes = 0

    def reserve(self, buffer: Buffer) -> None:
        """``buffer`` is reserved."""
        self.pinned_bytes += buffer.nbytes

    def unreserve(self, buffer: Buffer) -> None:
        """``buffer`` is not reserved any more."""
        self.pinned_bytes -= buffer.nbytes

    def _take(self, residence: Residence) -> None:
        self._own.add(residence)
        self.used_bytes += residence.pinned_nbytes


def _nobody() -> bool:
    return False
