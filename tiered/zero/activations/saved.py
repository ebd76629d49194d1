"""What autograd saves for backward: references into units instead of the units' bytes.

A saved tensor that lies in a unit's buffer becomes (unit, offset, shape, strides) and swaps the unit in when it is
asked for. Tensors that are not ours go to the pair of hooks that was in force before, or to activations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tiered.errors import UsageError
from tiered.zero.parameters.parameter import without_dispatch

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.parameters.unit import ReferenceToken, Unit

__all__ = ["Kept", "SavedPair", "SavedReference", "check_unmodified", "other_pair_in_force"]


_Pair = tuple[Callable[..., Any], Callable[..., Any]]


def other_pair_in_force() -> _Pair | None:
    """Return the pack and unpack hooks that are in force now, if any are."""
    pair: _Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return pair if pair and pair[0] is not None else None


def _is_of_checkpoint(pair: _Pair | None) -> bool:
    """Return whether ``pair`` is that of a non-reentrant checkpoint, in its forward or as it recomputes."""
    return pair is not None and getattr(pair[0], "__module__", "") == checkpoint.__module__


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


class SavedPair:
    """One pair of saved-tensor hooks, entered once around the outermost call (see design.md, section 6).

    Invariant: a checkpoint that was in force before is told of every saved tensor, those of units included. It knows
    them by their number, and where it recomputes, this pair may be one that was not there in its forward, or not above.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outer: _Pair | None = None
        self.is_in_checkpoint = False
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def enter(self) -> None:
        """Put the pair in force. Raises UsageError where torch has switched such hooks off."""
        self._outer = other_pair_in_force()
        self.is_in_checkpoint = _is_of_checkpoint(self._outer)
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

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self._engine.residency.address_of(tensor)
        if unit is not None:
            if self._outer is not None and self.is_in_checkpoint:
                self._outer[0](tensor)  # it counts; what nobody holds it will not keep as it recomputes
            return SavedReference(unit, tensor)
        if self._outer is None:
            return self._engine.activations.pack(tensor)
        return _HandedOn(self._outer[1], self._outer[0](tensor))


class _HandedOn:
    """What the outer pair made of a tensor that is not ours, and how to undo it."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Callable[..., Any], packed: Any) -> None:
        self.unpack = unpack
        self.packed = packed

    def restore(self) -> torch.Tensor:
        """Return what the outer pair makes of it."""
        tensor: torch.Tensor = self.unpack(self.packed)
        return tensor


class _Packed(Protocol):
    def restore(self) -> torch.Tensor: ...


def _unpack(packed: _Packed) -> torch.Tensor:
    return packed.restore()
