"""What autograd saves for backward: references into units instead of the units' bytes.

A saved tensor that lies in a unit's buffer becomes (unit, offset, shape, strides) and swaps the unit in when it is
asked for. Tensors that are not ours go to the pair of hooks that was in force before, or stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from tiered.errors import UsageError

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.unit import ReferenceToken, Unit

__all__ = ["SavedPair", "SavedReference", "other_pair_in_force"]


_Pair = tuple[Callable[..., Any], Callable[..., Any]]


def other_pair_in_force() -> _Pair | None:
    """Return the pack and unpack hooks that are in force now, if any are."""
    pair: _Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return pair if pair and pair[0] is not None else None


class SavedReference:
    """A saved tensor that lies in a unit: where, not what. Keeps the unit's token alive as long as it lives."""

    __slots__ = ("dtype", "offset", "shape", "strides", "token", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.version = unit.version
        self.token: ReferenceToken = unit.token()
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


class SavedPair:
    """One pair of saved-tensor hooks, entered once around the outermost call (see design.md, section 6)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outer: _Pair | None = None
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def enter(self) -> None:
        """Put the pair in force. Raises UsageError where torch has switched such hooks off."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._outer = outer if outer and outer[0] is not None else None
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
            return SavedReference(unit, tensor)
        if self._outer is None:
            return tensor
        return _HandedOn(self._outer[1], self._outer[0](tensor))


class _HandedOn:
    """What the outer pair made of a tensor that is not ours, and how to undo it."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Callable[..., Any], packed: Any) -> None:
        self.unpack = unpack
        self.packed = packed


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, SavedReference):
        return packed.restore()
    if isinstance(packed, _HandedOn):
        tensor: torch.Tensor = packed.unpack(packed.packed)
        return tensor
    assert isinstance(packed, torch.Tensor)
    return packed
