"""The process's random number generators: their states, and how many draws lie between two of them.

torch's CPU generator is a Mersenne twister of 32-bit words. The only way to skip ahead is to draw. The distance from
one state to another is searched for in the drawn words. A device's is a counter, whose distances are differences.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from tiered.zero.accelerator_state import generator_states, set_generator_states

__all__ = ["Draws", "RandomStates", "advance", "count_draws"]

_BLOCK = 624
"""Words of the twister's state; it makes as many at a time."""

_PIECE = 1680 * _BLOCK
"""Words drawn by one call: 4 MiB of int32."""

_MAX_PIECES = 400
"""Pieces to search: 419 M draws, about two seconds."""

_TWISTER_NBYTES = 24 + 8 * _BLOCK
"""Bytes of the twister in torch's state; a normal number that is kept for the next call follows."""

_COUNTER_NBYTES = 16
"""Bytes of the state of a generator that is a seed and a counter, as CUDA's is (Salmon et al., 2011, "Philox")."""


Draws = tuple[int, ...]
"""The draws of torch's generators: the CPU's in words, then each device's in steps of its counter, or in words."""


class RandomStates(NamedTuple):
    """The states of the generators that a forward may draw from: torch's, numpy's and python's.

    ``torch``: those of the CPU's and of each device's generator, uint8 each.
    """

    torch: tuple[torch.Tensor, ...]
    numpy: dict[str, Any]
    python: Any

    @staticmethod
    def now() -> RandomStates:
        """Return the present states."""
        own = torch.get_rng_state(), *generator_states()
        return RandomStates(own, np.random.get_state(legacy=False), random.getstate())

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch[0])
        set_generator_states(list(self.torch[1:]))
        if not _same_numpy(self.numpy, np.random.get_state(legacy=False)):  # setting takes long
            np.random.set_state(self.numpy)
        if self.python != random.getstate():
            random.setstate(self.python)

    def same_as(self, other: RandomStates) -> bool:
        """Return whether both draw the same from now on."""
        return all(map(torch.equal, self.torch, other.torch)) and self.same_but_torch(other)

    def same_but_torch(self, other: RandomStates) -> bool:
        """Return whether both draw the same from now on, torch's generators aside."""
        return bool(self.python == other.python) and _same_numpy(self.numpy, other.numpy)


def advance(states: RandomStates, draws: Draws) -> RandomStates:
    """Return ``states`` with torch's generators so many ``draws`` further on; () is none."""
    if not any(draws):
        return states
    return states._replace(torch=tuple(_advanced(*each) for each in zip(states.torch, draws, strict=True)))


def count_draws(start: RandomStates, end: RandomStates) -> Draws | None:
    """Return after how many draws of torch's generators alone ``start`` becomes ``end``; None where it never does."""
    if not start.same_but_torch(end):
        return None
    counts = [_count(*each) for each in zip(start.torch, end.torch, strict=True)]
    found = tuple(count for count in counts if count is not None)
    return found if len(found) == len(counts) else None


def _advanced(state: torch.Tensor, num_draws: int) -> torch.Tensor:
    if num_draws == 0:
        return state
    if state.numel() == _COUNTER_NBYTES:
        moved = state.clone()
        moved.view(torch.int64)[1] += num_draws
        return moved
    generator = torch.Generator()
    generator.set_state(state)
    words = torch.empty(min(num_draws, _PIECE), dtype=torch.int32, device="cpu")
    for begin in range(0, num_draws, _PIECE):
        words[: min(_PIECE, num_draws - begin)].random_(generator=generator)
    return generator.get_state()


def _count(start: torch.Tensor, end: torch.Tensor) -> int | None:
    if torch.equal(start, end):
        return 0
    if start.numel() == _COUNTER_NBYTES:
        (seed, before), (other_seed, after) = start.view(torch.int64).tolist(), end.view(torch.int64).tolist()
        return after - before if seed == other_seed and after > before else None
    for candidate in _candidates(start, end):
        reached = _advanced(start, candidate)
        if torch.equal(reached[:_TWISTER_NBYTES], end[:_TWISTER_NBYTES]):
            return candidate if torch.equal(reached, end) else None
    return None


def _candidates(start: torch.Tensor, end: torch.Tensor) -> Iterator[int]:
    """Yield numbers of draws after which the generator's next block may be that of ``end``, and its place in it is."""
    position, num_after = _position(start), _position(end)
    if num_after > position:
        yield num_after - position
    num_before, wanted = _BLOCK - position, _first_word(end)
    generator = torch.Generator()
    generator.set_state(_advanced(start, num_before))
    words = torch.empty(_PIECE, dtype=torch.int32, device="cpu")
    for piece in range(_MAX_PIECES):
        words.random_(generator=generator)
        for block in (words[::_BLOCK] == wanted).nonzero().flatten().tolist():
            yield num_before + piece * _PIECE + block * _BLOCK + num_after


def _position(state: torch.Tensor) -> int:
    """Return how many words of its block the generator has drawn, 0 to 624 (the layout of torch's CPU generator)."""
    return _BLOCK + 1 - int(state[8:12].view(torch.int32))


def _first_word(state: torch.Tensor) -> int:
    """Return the first word that the generator drew from its present block, as ``random_`` gives it: 31 bits."""
    word = int(state[24:32].view(torch.int64))
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    word ^= word >> 18
    return word & 0x7FFFFFFF


def _same_numpy(left: dict[str, Any], right: dict[str, Any]) -> bool:
    key, other = left["state"], right["state"]
    return (
        left["bit_generator"] == right["bit_generator"]
        and key.keys() == other.keys()
        and all(np.array_equal(key[name], other[name]) for name in key)
        and (left.get("has_gauss"), left.get("gauss")) == (right.get("has_gauss"), right.get("gauss"))
    )
