"""What autograd saves for backward: references into units instead of the units' bytes.

A saved tensor that lies in a unit's buffer becomes (unit, offset, shape, strides) and swaps the unit in when it is
asked for. Tensors that are not ours go to the pair of hooks that was in force before, or to activations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from tiered.errors import UsageError
from tiered.zero.parameters.parameter import without_dispatch

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.parameters.unit import ReferenceToken, Unit

__all__ = [
    "Kept",
    "OwnPair",
    "SavedPair",
    "SavedReference",
    "check_unmodified",
    "is_callers_pair_in_force",
    "other_pair_in_force",
    "own_pair_in_force",
]


_Pair = tuple[Callable[..., Any], Callable[..., Any]]


def other_pair_in_force() -> _Pair | None:
    """Return the pack and unpack hooks that are in force now, if any are."""
    pair: _Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return pair if pair and pair[0] is not None else None


def own_pair_in_force() -> SavedPair | None:
    """Return the pair that is in force now if it is one of ours."""
    return _own(other_pair_in_force())


def is_callers_pair_in_force() -> bool:
    """Return whether the pair that is in force now is the caller's own: neither ours nor a checkpoint's."""
    pair = other_pair_in_force()
    is_own = pair is not None and isinstance(getattr(pair[0], "__self__", None), OwnPair)
    return pair is not None and not is_own and not _is_of_checkpoint(pair)


def _own(pair: _Pair | None) -> SavedPair | None:
    own = None if pair is None else getattr(pair[0], "__self__", None)
    return own if isinstance(own, SavedPair) else None


def _is_of_checkpoint(pair: _Pair) -> bool:
    """Return whether ``pair`` is that of a non-reentrant checkpoint, in its forward or as it recomputes."""
    return getattr(pair[0], "__module__", "") == checkpoint.__module__


class SavedReference:
    """A saved tensor that lies in a unit: where, not what. Keeps the unit's token alive as long as it lives."""

    __slots__ = ("dtype", "offset", "shape", "strides", "token", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.version = unit.version
        self.token: ReferenceToken = unit.token()
        with without_dispatch():  # a parameter itself would say that it begins at 0, as in a storage of its own
            self.dtype = tensor.dtype
            self.shape = tensor.shape
            self.strides = tensor.stride()
            self.offset = tensor.storage_offset() * tensor.element_size()  # bytes from the start of the unit's buffer

    def restore(self) -> torch.Tensor:
        """Return the tensor: a view of the unit's buffer, swapped in if need be."""
        unit = self.unit
        unit.engine.check_usable(f"backward through unit {unit.name!r}")
        if self.version != unit.version:
            raise UsageError(
                f"backward through unit {unit.name!r}, whose parameters were updated since the forward; expected one"
                ' backward per forward and step: use update="step" for several'
            )
        unit.engine.backward.seen()
        buffer = unit.open()
        aligned = buffer[: buffer.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return aligned.as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


class Kept:
    """A saved tensor that stays in ordinary memory, the caller's own.

    torch checks no version behind hooks, so this does. It holds a detached tensor: the saved one may be an output of
    the very node that saves it, and the two would keep each other alive.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def restore(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError, as torch does, when it was modified since."""
        check_unmodified(self.tensor, self.version)
        return self.tensor


def check_unmodified(tensor: torch.Tensor, version: int) -> None:
    """Raise the RuntimeError that torch raises without hooks if ``tensor`` was modified since ``version``."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}."
            " torch.autograd.set_detect_anomaly(True) finds the operation; clone() the tensor before it"
        )


class OwnPair:
    """A pair of hooks of ours: its pack hook is a method."""

    __slots__ = ()


class SavedPair(OwnPair):
    """One pair of saved-tensor hooks, entered around the outermost call (see design.md, section 6), and inside it above
    each pair of the caller's.

    The caller's own pairs are not told of weights when they were in force before the outermost call; those of inside
    are, and what they hand back of a unit becomes a reference. Invariant: a checkpoint that was in force before is told
    of every saved tensor. It knows them by their number, and where it recomputes, pairs of ours may be in force that
    were not in its forward.
    """

    def __init__(self, engine: Engine, *, is_outermost: bool = True) -> None:
        self._engine = engine
        self._outer: _Pair | None = None
        self._is_outermost = is_outermost
        self._is_in_checkpoint = False
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    @property
    def may_recompute(self) -> bool:
        """Whether a unit under this pair may run again on its own: no checkpoint or pair of the caller's is between."""
        return self._is_outermost and not self._is_in_checkpoint

    def enter(self) -> None:
        """Put the pair in force. Raises UsageError where torch has switched such hooks off."""
        self._outer = other_pair_in_force()
        self._is_in_checkpoint = self._outer is not None and _is_of_checkpoint(self._outer)
        try:
            self._hooks.__enter__()
        except RuntimeError as error:
            raise UsageError(
                f"a forward of a sharded model where saved-tensor hooks are switched off ({error}); expected plain"
                " autograd: torch.func transforms (grad, vmap, jvp) work on unsharded models"
            ) from error

    def exit(self) -> None:
        """Take the pair out of force."""
        self._hooks.__exit__()

    def __enter__(self) -> SavedPair:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        unit = self._engine.residency.address_of(tensor)
        outer = self._outer
        if unit is None:
            return self._engine.activations.pack(tensor) if outer is None else _HandedOn(outer[1], outer[0](tensor))
        if outer is not None and not self._is_outermost:
            return _HandedOnWeight(outer[1], tree_map_only(torch.Tensor, self._as_reference, outer[0](tensor)))
        if outer is not None and self._is_in_checkpoint:
            outer[0](tensor)  # it counts; what nobody holds it will not keep as it recomputes
        return SavedReference(unit, tensor)

    def _as_reference(self, tensor: torch.Tensor) -> torch.Tensor | SavedReference:
        unit = self._engine.residency.address_of(tensor)
        return tensor if unit is None else SavedReference(unit, tensor)


class _HandedOn:
    """What the outer pair made of a tensor, and how to undo it."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Callable[..., Any], packed: Any) -> None:
        self.unpack = unpack
        self.packed = packed

    def restore(self) -> torch.Tensor:
        """Return what the outer pair makes of it."""
        tensor: torch.Tensor = self.unpack(self.packed)
        return tensor


class _HandedOnWeight(_HandedOn):
    """What the outer pair made of a tensor in a unit, with references to what of it lies there still."""

    __slots__ = ()

    def restore(self) -> torch.Tensor:
        """Return what the outer pair makes of it, with the unit swapped in."""
        tensor: torch.Tensor = self.unpack(tree_map_only(SavedReference, SavedReference.restore, self.packed))
        return tensor


class _Packed(Protocol):
    def restore(self) -> torch.Tensor: ...


def _unpack(packed: _Packed) -> torch.Tensor:
    return packed.restore()
