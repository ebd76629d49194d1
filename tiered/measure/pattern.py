"""The pattern of a round: which blocks of a file are read or written, how many at a time and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from tiered.bytes.device.base import SCRATCH, IOClass
from tiered.units import format_bytes

__all__ = ["DEMAND_OPS", "OPS", "Direction", "Pattern"]

OPS = ("read", "write", "mixed")
DEMAND_OPS = ("demand", "demand beside writes")


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a pattern: ``depth`` blocks in flight, in order over its part of the file, again and again."""

    is_write: bool
    depth: int
    first_block: int
    num_blocks: int
    io_class: IOClass

    @classmethod
    def bulk(cls, is_write: bool, depth: int, first_block: int, num_blocks: int) -> Direction:
        """Return a direction of the bulk of a step: write-back, or reads ahead of need."""
        return cls(is_write, depth, first_block, num_blocks, IOClass.WRITE if is_write else IOClass.PREFETCH)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The blocks that a round moves: sequential, wrapping at the end of the file.

    A round ends after ``seconds``, or after ``max_nbytes`` where they are given, whichever comes first.
    "mixed" reads the first half of the file and writes the second, each with half of the depth: the blocks of a step
    that are swapped in are not those just swapped out. It ends when either direction has moved its half.
    "demand" is one demand read after another over the first half; "demand beside writes" has ``depth`` writes in flight
    over the second half as well.
    """

    op: str
    block_nbytes: int
    depth: int
    file_nbytes: int
    seconds: float
    max_nbytes: int | None = None
    file: int = SCRATCH

    def __post_init__(self) -> None:
        if self.op not in (*OPS, *DEMAND_OPS):
            raise ValueError(f"op must be one of {', '.join((*OPS, *DEMAND_OPS))}; got {self.op!r}")
        if self.block_nbytes < 1 or self.depth < 1 or not self.seconds > 0:
            raise ValueError(f"block, depth and seconds must be positive: {self!r}")
        if self.op == "mixed" and self.depth < 2:
            raise ValueError(f"mixed needs a depth of 2 or more, a read and a write; got {self.depth}")
        if self.file_nbytes < self.block_nbytes * (1 if self.op in ("read", "write") else 2):
            raise ValueError(f"a file of {format_bytes(self.file_nbytes)} is too small: {self!r}")

    @property
    def max_blocks(self) -> int | None:
        """The most blocks that one direction moves."""
        return self.max_nbytes and max(1, self.max_nbytes // self.block_nbytes // len(self.directions))

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The pattern by direction; fio is given the same."""
        num_blocks = self.file_nbytes // self.block_nbytes
        half = num_blocks // 2
        if self.op == "mixed":
            return (
                Direction.bulk(False, self.depth - self.depth // 2, 0, half),
                Direction.bulk(True, self.depth // 2, half, half),
            )
        if self.op in ("read", "write"):
            return (Direction.bulk(self.op == "write", self.depth, 0, num_blocks),)
        demand = Direction(False, 1, 0, half, IOClass.DEMAND)
        return (demand,) if self.op == "demand" else (demand, Direction.bulk(True, self.depth, half, half))

    @property
    def num_slots(self) -> int:
        """Blocks in flight in all."""
        return sum(direction.depth for direction in self.directions)
