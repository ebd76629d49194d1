"""undecided: what autograd saves in a forward of which it is known at its end only whether it can run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from tiered.errors import UsageError
from tiered.zero.activations.saved import Kept, OwnPair, SavedReference, other_pair_in_force

if TYPE_CHECKING:
    from tiered.zero.engine import Engine

__all__ = ["UndecidedPair"]


class UndecidedPair(OwnPair):
    """A pair of hooks inside that of a checkpoint: what is saved is kept as well, until it is decided.

    ``may_keep``: whether there is a choice; ``below``: the pack hook that is in force around the checkpoint.
    """

    def __init__(self, engine: Engine, name: str, below: Callable[..., Any], *, may_keep: bool) -> None:
        found = other_pair_in_force()
        assert found is not None  # the checkpoint's
        self._pack_again, self._unpack_again = found
        self._engine = engine
        self._name = name
        self._below = below
        self._may_keep = may_keep
        self._items: list[_Undecided] = []

    def hooks(self) -> saved_tensors_hooks:
        """Return the block in which the pair is in force. Lifetime: not the pair's own, that would be a cycle."""
        return saved_tensors_hooks(self._pack, _restore)

    def _pack(self, tensor: torch.Tensor) -> _Undecided:
        item = _Undecided(self._name, self._pack_again(tensor), self._unpack_again)
        if self._may_keep:
            unit = self._engine.residency.address_of(tensor)
            item.kept = Kept(tensor) if unit is None else SavedReference(unit, tensor)
            self._items.append(item)
        return item

    def recompute(self) -> None:
        """The forward can run again: nothing is kept."""
        for item in self._items:
            item.kept = None
        self._items.clear()

    def keep(self) -> None:
        """The forward cannot run again: what it saved is as without a checkpoint."""
        for item in self._items:
            item.again = item.unpack_again = None
            kept = item.kept
            if type(kept) is Kept and kept.tensor._version == kept.version:
                item.kept = self._below(kept.tensor)
        self._items.clear()
        self._pack_again = self._unpack_again = _gone  # Lifetime: they hold what the forward was given


class _Undecided:
    """A saved tensor: ``kept``, or else what the checkpoint made of it."""

    __slots__ = ("again", "kept", "name", "unpack_again")

    def __init__(self, name: str, again: Any, unpack_again: Callable[..., Any]) -> None:
        self.name = name
        self.again = again
        self.unpack_again: Callable[..., Any] | None = unpack_again
        self.kept: Any = None

    def restore(self) -> torch.Tensor:
        """Return the tensor. Raises UsageError where the second forward is not like the first."""
        if self.kept is not None:
            kept: torch.Tensor = self.kept.restore()
            return kept
        assert self.unpack_again is not None
        try:
            tensor: torch.Tensor = self.unpack_again(self.again)
            return tensor
        except CheckpointError as error:
            raise UsageError(
                f"recompute of unit {self.name!r}: its second forward saved other tensors than the first; expected one"
                " that goes by its arguments and by what its modules keep only, or"
                f" activations={{{self.name!r}: 'keep'}} ({str(error).splitlines()[0]})"
            ) from error
        except Exception as error:
            error.add_note(
                f"in the recompute of unit {self.name!r}, which activations={{{self.name!r}: 'keep'}} does without"
            )
            raise


def _gone(_: Any) -> Any:
    raise AssertionError("decided already")


def _restore(item: _Undecided) -> torch.Tensor:
    return item.restore()
