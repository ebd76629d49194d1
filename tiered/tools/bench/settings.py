"""The settings of a bench: blocks, depths, rounds and their length, and the bytes that they will write.

Nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiered.store.lifetime.opening import MIN_DRAM_NBYTES
from tiered.tools.bench.rounds import Pattern
from tiered.units import GiB, KiB, MiB, divide_up, round_up

__all__ = ["FULL", "NUM_TENSOR_WARM_UPS", "NUM_TIER_WARM_UPS", "QUICK", "BenchSettings"]

_SPREAD_NBYTES = 256 * MiB  # more than a processor's cache
_FASTEST_BYTES_PER_S = 8e9  # of a drive, for the bytes that a time series may write
_WRITE_BLOCK_NBYTES = 4 * MiB  # a file is a multiple of these
_TRIAL_NBYTES = 4 * MiB  # opening a device or a commit writes less
_ROW_NBYTES = 2 * KiB  # a tensor of at most 256 MiB costs less in the catalog and its journal

NUM_TENSOR_WARM_UPS = 2
"""A store has two sets of extents: the first write of each is no overwrite."""

NUM_TIER_WARM_UPS = 1
"""The tensors that pass three tiers were put before, which wrote the first set."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The extent of a bench. Defaults: the full one."""

    blocks: tuple[int, ...] = (128 * KiB, 256 * KiB, 512 * KiB, MiB, 2 * MiB, 4 * MiB, 8 * MiB, 16 * MiB)
    depths: tuple[int, ...] = (1, 4, 8, 32)
    rounds: int = 5
    round_s: float = 0.5
    warm_up_s: float = 0.1
    round_nbytes: int = 2 * GiB  # a round ends here, or after round_s, which bounds its cost in the drive's life
    file_nbytes: int = 4 * GiB
    most_in_flight_nbytes: int = 128 * MiB  # as many as a device's queue lets reads have
    tensor_nbytes: tuple[int, ...] = (64 * KiB, MiB, 16 * MiB, 64 * MiB, 256 * MiB)
    tensors_nbytes: int = 2 * GiB  # all of one size together, as many as a raw round moves
    tensor_rounds: int = 5
    dram_nbytes: int = 768 * MiB  # of the store
    copy_nbytes: int = 32 * MiB  # of one copy to or from a compute device
    copies_nbytes: int = 2 * GiB  # that a round copies each way
    copy_memory_nbytes: int = 256 * MiB  # of DRAM that they go through each way: more than a processor's cache
    sustained_s: float = 0.0
    window_s: float = 1.0  # of the time series

    @property
    def points(self) -> tuple[Pattern, ...]:
        """All patterns, reads first, in the order they are measured."""
        return tuple(
            self.pattern(op, block, depth)
            for op in ("read", "write")
            for block in self.blocks
            for depth in self.depths
            if block * depth <= self.most_in_flight_nbytes
        )

    @property
    def memory_nbytes(self) -> int:
        """The memory for blocks where it must exceed the caches, and for those of the largest point."""
        spread = min(_SPREAD_NBYTES, self.file_nbytes)
        return max(spread, *(point.block_nbytes * point.depth for point in self.points))

    @property
    def together_tensor_nbytes(self) -> int:
        """The size of the tensors in a store over all directories: 64 MiB, less where that would be few of them."""
        return max(64 * KiB, min(64 * MiB, self.tensors_nbytes // 8 // (64 * KiB) * (64 * KiB)))

    @property
    def tier_dram_nbytes(self) -> int:
        """The DRAM budget of the store whose tensors pass three tiers: half of those of one direction at most."""
        return max(MIN_DRAM_NBYTES, min(self.dram_nbytes, self.tensors_nbytes // 2))

    @property
    def tier_tensor_nbytes(self) -> int:
        """The size of tensors that pass three tiers: 16 MiB, less where DRAM had room for few of them."""
        return min(16 * MiB, self.tier_dram_nbytes // 16 // (64 * KiB) * (64 * KiB))

    def pattern(self, op: str, block_nbytes: int, depth: int) -> Pattern:
        """Return the pattern of a round of ``op`` on the file."""
        return Pattern(op, block_nbytes, depth, self.file_nbytes, self.round_s, max_nbytes=self.round_nbytes)

    def write_nbytes(self, *, num_directories: int = 1, has_device: bool = False) -> int:
        """Return the most that will be written to each directory, fio's share and warm-ups included.

        ``has_device``: tensors pass three tiers, too, with a compute device. Only a time series has no bound of its
        own: it counts at 8 GB/s.
        """
        num_rounds = (1 + 2 * self.rounds) * len(self.points) // 2  # half of the points write; the first warms up
        num_rounds += self.rounds + 1  # of both directions at once, which write half
        num_rounds += 2 * self.rounds  # through more memory than the caches hold
        num_rounds += len(self.tensor_nbytes) * self.tensor_rounds  # the raw rounds beside
        puts = [*self.tensor_nbytes, *[self.together_tensor_nbytes] * (num_directories > 1)] * (
            self.tensor_rounds + NUM_TENSOR_WARM_UPS
        )
        if has_device:  # the first two are of the tensors of both directions
            puts += [self.tier_tensor_nbytes] * (2 + NUM_TIER_WARM_UPS + self.tensor_rounds)
        total = self.file_nbytes + _WRITE_BLOCK_NBYTES + _TRIAL_NBYTES + num_rounds * self.round_nbytes
        total += sum(divide_up(self.tensors_nbytes, put) * (put + _ROW_NBYTES) + _TRIAL_NBYTES for put in puts)
        return int(total + self.sustained_s * _FASTEST_BYTES_PER_S)

    def fitted(self, free_nbytes: int) -> BenchSettings:
        """Return settings whose files take at most a tenth of ``free_nbytes``, down to 64 MiB.

        Tensors are written in two sets, at least one each; sizes without room for that are left out.
        """
        most = max(64 * MiB, free_nbytes // 10 // (64 * MiB) * (64 * MiB))
        file_nbytes, tensors_nbytes = min(self.file_nbytes, most), min(self.tensors_nbytes, max(most // 2, 1))
        fitting = [
            nbytes
            for nbytes in self.tensor_nbytes
            if 2 * round_up(max(tensors_nbytes, nbytes), nbytes) + file_nbytes <= free_nbytes
        ]
        return replace(self, file_nbytes=file_nbytes, tensors_nbytes=tensors_nbytes, tensor_nbytes=tuple(fitting))


FULL = BenchSettings()

QUICK = BenchSettings(
    blocks=(MiB, 4 * MiB, 8 * MiB),
    depths=(8,),
    round_s=0.16,
    warm_up_s=0.05,
    round_nbytes=384 * MiB,
    file_nbytes=GiB,
    tensor_nbytes=(64 * MiB,),
    tensors_nbytes=512 * MiB,
    tensor_rounds=3,
    dram_nbytes=384 * MiB,
    copies_nbytes=GiB,
    copy_memory_nbytes=128 * MiB,
)
"""Under a minute and 30 GiB written, with the pairs that matter."""
