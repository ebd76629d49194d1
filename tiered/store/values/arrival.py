"""Arrival: a get that copies each block as soon as it is checked, while the blocks behind it are on their way.

Only for tensors that are resident afterwards; what goes past the working set is in streaming.py.
"""

from __future__ import annotations

import ctypes
import time

import torch

from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.spec import Spec
from tiered.store.records.entry import Alias, Entry, Residency
from tiered.store.residency.working_set import WorkingSet
from tiered.store.transfers.transfer import Transfer
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.recorder import Wait

__all__ = ["Arrival", "is_worthwhile"]

_LEAST_NBYTES = 2 * BLOCK_NBYTES  # with less there is nothing to overlap


def is_worthwhile(entry: Entry) -> bool:
    """Whether ``entry`` is a large tensor that has yet to arrive. Under the lock."""
    return entry.nbytes >= _LEAST_NBYTES and entry.state in (Residency.ARRIVING, Residency.STORED)


class Arrival:
    """A tensor that is being read into DRAM, followed block by block. ``close`` it in any case.

    Until then its buffer stays where it is, with its bytes, whatever becomes of the key or the store.
    """

    def __init__(self, working_set: WorkingSet, alias: Alias, transfer: Transfer, spec: Spec, *, is_own: bool) -> None:
        """``is_own``: the read was started for this arrival, so that what it fails of is this caller's to know."""
        self.spec = spec
        self._working_set = working_set
        self._alias = alias
        self._transfer = transfer
        self._is_own = is_own

    @classmethod
    def begin(cls, working_set: WorkingSet, key: str) -> Arrival | None:
        """Start the swap in of ``key``, or join it; None for what a lease has to see to. Does not block.

        That is a small tensor, one that need not be read, and one that there is no room for.
        """
        working_set.check(writing=False)
        residents, swap_in = working_set.residents, working_set.swap_in
        with working_set.condition:
            residents.drain()
            working_set.room.raise_failure()
            entry = working_set.records.entries.get(key)
            if entry is None or not is_worthwhile(entry):
                return None
            if entry.state is Residency.ARRIVING:
                transfer = swap_in.arriving[entry]
                is_own = swap_in.take_over(entry) is not None
            else:
                buffer = residents.take_nowait(working_set.space.round_up(entry.nbytes))
                if buffer is None:
                    return None
                begun = swap_in.begin(entry, residents.admit(entry, buffer))
                assert begun is not None, f"{entry} has no blocks"
                transfer, is_own = begun, True
            transfer.num_followers += 1
            alias = residents.open(entry, is_writer=False, is_brief=True)
            arrival = cls(working_set, alias, transfer, entry.spec, is_own=is_own)
        if is_own:
            transfer.start()
        return arrival

    def copy_to(self, flat: torch.Tensor) -> bool:
        """Copy all bytes to ``flat``, (nbytes,) uint8 in DRAM, each once it has been checked; blocks.

        Returns False where a read failed that was only ahead of need: a lease tries again. Then, as whenever this
        raises, ``flat`` may have some of the bytes. Raises CorruptionError, DeviceError, DeadlineError.
        """
        transfer, buffer = self._transfer, self._alias.residence.buffer
        num_copied = 0
        while self._wait(num_copied):
            for block in transfer.checked[num_copied:]:
                start = block * BLOCK_NBYTES
                # By this thread alone, as in host_tensor.py.
                nbytes = min(BLOCK_NBYTES, flat.numel() - start)
                ctypes.memmove(flat.data_ptr() + start, buffer.address + start, nbytes)
                num_copied += 1
        if transfer.error is not None and self._is_own:
            raise transfer.error
        return transfer.error is None

    def _wait(self, num_copied: int) -> bool:
        """Wait for another checked block; False at the end of the read, when all of its checked blocks are copied."""
        working_set, transfer = self._working_set, self._transfer
        deadline = Deadline(f"get of {transfer.row.name!r}", working_set.deadline_s)
        with working_set.condition:
            while len(transfer.checked) == num_copied and not transfer.is_done:
                begun_s = time.monotonic()
                try:
                    deadline.wait(working_set.condition)
                finally:
                    working_set.recorder.waited(Wait.READ, transfer.row.name, begun_s)
        return len(transfer.checked) > num_copied

    def close(self) -> None:
        """End the lease. Works after the store was closed as well."""
        with self._working_set.condition:
            self._transfer.num_followers -= 1
        self._working_set.residents.report_end(self._alias)
        with self._working_set.condition:
            self._working_set.residents.drain()
