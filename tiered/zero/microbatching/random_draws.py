"""The process's random number generators: their states, and how many draws lie between two of them.

torch's CPU generator is a Mersenne twister of 32-bit words. The only way to skip ahead is to draw. The distance from
one state to another is searched for in the drawn words.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["RandomStates", "advance", "count_draws"]

_BLOCK = 624
"""Words of the twister's state; it makes as many at a time."""

_PIECE = 1680 * _BLOCK
"""Words drawn by one call: 4 MiB of int32."""

_MAX_PIECES = 400
"""Pieces to search: 419 M draws, about two seconds."""

_TWISTER_NBYTES = 24 + 8 * _BLOCK
"""Bytes of the twister in torch's state; a normal number that is kept for the next call follows."""


class RandomStates(NamedTuple):
    """The states of the generators that a forward may draw from: torch's on the CPU, numpy's and python's."""

    torch: torch.Tensor  # uint8 (5056,)
    numpy: dict[str, Any]
    python: Any

    @staticmethod
    def now() -> RandomStates:
        """Return the present states."""
        return RandomStates(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        if not _same_numpy(self.numpy, np.random.get_state(legacy=False)):  # setting takes long
            np.random.set_state(self.numpy)
        if self.python != random.getstate():
            random.setstate(self.python)

    def same_as(self, other: RandomStates) -> bool:
        """Return whether both draw the same from now on."""
        return torch.equal(self.torch, other.torch) and self._same_but_torch(other)

    def _same_but_torch(self, other: RandomStates) -> bool:
        return bool(self.python == other.python) and _same_numpy(self.numpy, other.numpy)


def advance(states: RandomStates, num_draws: int) -> RandomStates:
    """Return ``states`` with torch's generator ``num_draws`` words further on."""
    if num_draws == 0:
        return states
    generator = torch.Generator()
    generator.set_state(states.torch)
    words = torch.empty(min(num_draws, _PIECE), dtype=torch.int32, device="cpu")
    for begin in range(0, num_draws, _PIECE):
        words[: min(_PIECE, num_draws - begin)].random_(generator=generator)
    return states._replace(torch=generator.get_state())


def count_draws(start: RandomStates, end: RandomStates) -> int | None:
    """Return after how many draws of torch's generator alone ``start`` becomes ``end``; None where it never does."""
    if not start._same_but_torch(end):
        return None
    if torch.equal(start.torch, end.torch):
        return 0
    for candidate in _candidates(start, end):
        reached = advance(start, candidate).torch
        if torch.equal(reached[:_TWISTER_NBYTES], end.torch[:_TWISTER_NBYTES]):
            return candidate if torch.equal(reached, end.torch) else None
    return None


def _candidates(start: RandomStates, end: RandomStates) -> Iterator[int]:
    """Yield numbers of draws after which the generator's next block may be that of ``end``, and its place in it is."""
    position, num_after = _position(start.torch), _position(end.torch)
    if num_after > position:
        yield num_after - position
    num_before, wanted = _BLOCK - position, _first_word(end.torch)
    generator = torch.Generator()
    generator.set_state(advance(start, num_before).torch)
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
