"""Comm: the collectives that a unit's buffer and gradients go through. NullComm is that of a single rank."""

from __future__ import annotations

import torch

__all__ = ["NullComm"]


class NullComm:
    """The collectives of one rank: its shard is the whole, so nothing is copied and it waits for no other rank."""

    __slots__ = ()

    rank = 0
    world = 1

    def __repr__(self) -> str:
        return "NullComm()"

    def all_gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole spans whose pieces ``shards`` are, (nbytes,) uint8 each: the shards themselves."""
        return shards

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a ``whole`` span: all of it."""
        return whole
