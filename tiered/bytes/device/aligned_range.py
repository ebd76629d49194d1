"""AlignedRange: the aligned bytes of a file that hold unaligned ones, which one copy takes out. Pure arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from tiered.units import round_up

__all__ = ["AlignedRange", "aligned_range"]


class AlignedRange(NamedTuple):
    """An aligned range of a file, to be read into memory, and the place of the wanted bytes in that memory."""

    offset: int  # in the file, aligned
    nbytes: int  # aligned
    skip: int  # bytes of it before the wanted ones
    wanted: int  # bytes

    def copy_out(self, memory: memoryview, destination: memoryview) -> None:
        """Copy the wanted bytes from ``memory``, which the range was read into, to all of ``destination``."""
        destination[:] = memory[self.skip : self.skip + self.wanted]


def aligned_range(offset: int, nbytes: int, alignment: int) -> AlignedRange:
    """Return the smallest aligned range that holds ``nbytes`` at ``offset``; an empty one for no bytes."""
    start = offset - offset % alignment
    end = round_up(offset + nbytes, alignment) if nbytes else start
    return AlignedRange(start, end - start, offset - start, nbytes)
