"""Which bytes are held in DRAM for good: those that save the most transfers per byte held.

Pure arithmetic over sizes. Holding a parameter byte saves two reads a step and a write between commits, a byte of
optimizer state one read and one write: so parameters come first. For the cyclic
forward/backward order a fixed held set, the same share of every unit, is optimal.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["choose_held"]


def choose_held(parameters: Mapping[str, int], state: Mapping[str, int], budget_bytes: int) -> list[str]:
    """Return the keys to hold within ``budget_bytes``: parameter keys first, then state keys, evenly spaced.

    ``parameters`` and ``state`` map keys, in order of use, to bytes.
    """
    held = _spread(parameters, budget_bytes)
    left = budget_bytes - sum(parameters[key] for key in held)
    return held + (_spread(state, left) if len(held) == len(parameters) else [])


def _spread(sizes: Mapping[str, int], budget_bytes: int) -> list[str]:
    """Return as many keys as fit, spread evenly over the order so that every stretch saves the same share."""
    total = sum(sizes.values())
    if total <= budget_bytes:
        return list(sizes)
    chosen: list[str] = []
    left, share = budget_bytes, 0.0
    for key, nbytes in sizes.items():
        share += nbytes * budget_bytes / total
        if share >= nbytes and nbytes <= left:
            chosen.append(key)
            share -= nbytes
            left -= nbytes
    return chosen
