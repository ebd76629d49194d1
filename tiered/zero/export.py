"""Export: a ``state_dict()`` of a sharded model that is under way, and its copies of parameters."""

from __future__ import annotations

import torch

__all__ = ["Export"]


class Export:
    """The calls of ``state_dict()`` that are under way, each module's inside its parent's.

    Invariant: outside of them there are no copies.
    """

    __slots__ = ("_copies", "_num_calls")

    def __init__(self) -> None:
        self._copies: dict[object, torch.Tensor] = {}
        self._num_calls = 0

    def __bool__(self) -> bool:
        return self._num_calls > 0

    def enter(self) -> None:
        """A call begins."""
        self._num_calls += 1

    def leave(self) -> None:
        """A call ends; with the outermost one the copies are the caller's alone."""
        self._num_calls -= 1
        if not self:
            self.end()

    def end(self) -> None:
        """Forget all calls, also those that an exception has left in the middle."""
        self._num_calls = 0
        self._copies.clear()

    def copy(self, segment: object, values: torch.Tensor) -> torch.Tensor:
        """Return a copy in DRAM of ``values``; as in torch, the names of a tied one share their memory."""
        if segment not in self._copies:
            self._copies[segment] = values.detach().to("cpu", copy=True)
        return self._copies[segment].detach()
