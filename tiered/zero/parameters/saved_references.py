"""Saved tensors that lie in units: autograd holds references into the units instead of their bytes.

A saved tensor that lies in a unit's buffer becomes (unit, offset, shape, strides) and swaps the unit in when it is
asked for. Other tensors go to the pair of hooks that was in force before, or to the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from tiered.errors import UsageError
from tiered.zero.parameters.open_units import OpenUnits
from tiered.zero.parameters.parameter import without_dispatch
from tiered.zero.parameters.unit import ReferenceToken, Unit
from tiered.zero.step import Event, in_graph_task

__all__ = [
    "Kept",
    "Packed",
    "SavedPair",
    "SavedReference",
    "check_unmodified",
    "is_recomputing",
    "our_pair_in_force",
    "pair_in_force",
    "with_repeated_arguments",
]


_Pair = tuple[Callable[..., Any], Callable[..., Any]]


def pair_in_force() -> _Pair | None:
    """Return the pack and unpack hooks that are in force now, if any are."""
    pair: _Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return pair if pair and pair[0] is not None else None


def our_pair_in_force() -> SavedPair | None:
    """Return the pair that is in force now if it is one of ours."""
    pair = pair_in_force()
    own = None if pair is None else getattr(pair[0], "__self__", None)
    return own if isinstance(own, SavedPair) else None


def _is_of_checkpoint(pair: _Pair | None) -> bool:
    """Return whether ``pair`` is that of a non-reentrant checkpoint, in its forward or as it recomputes."""
    return pair is not None and getattr(pair[0], "__module__", "") == checkpoint.__module__


def is_recomputing() -> bool:
    """Return whether a non-reentrant checkpoint recomputes here, and no module of ours has been called in it yet."""
    return in_graph_task() and _is_of_checkpoint(pair_in_force())


def with_repeated_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call in a recomputation, with one object wherever the forward was given one tensor.

    A checkpoint saves each of its arguments, and under hooks each comes back as an object of its own. A module that
    asks ``query is key``, as attention does, would go another way than in the forward.
    """
    objects: dict[Any, torch.Tensor] = {}

    def first(value: Any) -> Any:
        if type(value) is not torch.Tensor or not value.requires_grad:
            return value  # ``Kept`` hands back the very object where no gradient is asked for
        edge = get_gradient_edge(value)
        return objects.setdefault((edge.node, edge.output_nr), value)

    return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}


class Packed(Protocol):
    """The object that autograd holds for a saved tensor."""

    def restore(self) -> torch.Tensor:
        """Return the tensor."""


class SavedReference:
    """The place of a saved tensor that lies in a unit. Keeps the unit's token alive as long as it lives."""

    __slots__ = ("dtype", "layout", "offset", "shape", "span", "strides", "token", "unit", "version")

    def __init__(self, unit: Unit, span: int, tensor: torch.Tensor) -> None:
        self.unit = unit
        self.layout = unit.layout
        self.span = span
        self.token: ReferenceToken = unit.token()
        self.version = unit.version  # order: the token's, which may have seen a write
        with without_dispatch():  # a parameter itself would say that it begins at 0, as in a storage of its own
            self.dtype = tensor.dtype
            self.shape = tensor.shape
            self.strides = tensor.stride()
            self.offset = int(tensor.storage_offset()) * tensor.element_size()  # bytes from the start of the span

    def restore(self) -> torch.Tensor:
        """Return the tensor: a view of the unit's buffer, swapped in if need be."""
        unit = self.unit
        unit.engine.phase.check(Event.BACKWARD, f"backward through unit {unit.name!r}:")
        unit.engine.backward.seen()
        buffers = unit.open()
        unit.look()
        if self.version != unit.version:
            raise UsageError(
                f"backward through unit {unit.name!r}, whose parameters were updated since the forward; expected one"
                ' backward per forward and step: use update="step" for several'
            )
        if self.layout is not unit.layout:  # a frozen parameter of it was unfrozen meanwhile
            self.span, self.offset = unit.layout.moved(self.layout, self.span, self.offset)
            self.layout = unit.layout
        buffer = buffers[self.span]
        unit.buffer.use()
        aligned = buffer[: buffer.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return aligned.as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


class Kept:
    """A saved tensor that stays in ordinary memory, the caller's own.

    torch checks no version behind hooks, so this class does. It holds a detached tensor in the place of one with a
    gradient: the saved tensor may be an output of the very node that saves it, and the two would keep each other alive.
    """

    __slots__ = ("counted", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, counted: object = None) -> None:
        self.counted = counted  # lifetime: a token that "auto" counts the bytes by
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
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
    """One pair of saved-tensor hooks of ours, in force around the outermost call and inside it above every other pair.

    A weight becomes a reference; other tensors are handed on to the pair below (``_outer``). A checkpoint's pair is
    never told of weights: its recomputation would keep every unit of its forward in memory. A checkpoint knows saved
    tensors by their number. Invariant: in a checkpoint's forward and in its recomputation pairs of ours stand above its
    own in the same places. A caller's pair is told of weights if it was entered inside the outermost call; a tensor in
    a unit that it hands back becomes a reference.
    """

    def __init__(
        self, calls: Any, open_units: OpenUnits, pack: Callable[[torch.Tensor], Packed], *, is_outermost: bool
    ) -> None:
        """``calls``: the model's ModuleCalls. ``pack`` takes tensors in no unit, where no other pair takes them."""
        self.calls = calls
        self._open_units = open_units
        self._pack_other = pack
        self._outer: _Pair | None = None
        self._is_outermost = is_outermost
        self._is_in_checkpoint = False
        self._hooks: saved_tensors_hooks | None = None

    @property
    def may_recompute(self) -> bool:
        """Whether a unit under this pair may run again on its own: no checkpoint or pair of the caller's is between."""
        return self._is_outermost and not self._is_in_checkpoint

    def enter(self) -> None:
        """Put the pair in force. Raises UsageError where torch has switched such hooks off."""
        self._outer = pair_in_force()
        self._is_in_checkpoint = _is_of_checkpoint(self._outer)
        hooks = saved_tensors_hooks(self._pack, _unpack)
        try:
            hooks.__enter__()
        except RuntimeError as error:
            raise UsageError(
                f"a forward of a sharded model where saved-tensor hooks are switched off ({error}); expected plain"
                " autograd: torch.func transforms (grad, vmap, jvp) work on unsharded models"
            ) from error
        self._hooks = hooks

    def exit(self) -> None:
        """Take the pair out of force."""
        hooks, self._hooks = self._hooks, None  # Lifetime: they lead back to the pair
        self._outer = None  # Lifetime: a checkpoint's leads to the arguments that it keeps
        if hooks is not None:
            hooks.__exit__()

    def _pack(self, tensor: torch.Tensor) -> Packed:
        place = self._open_units.place_of(tensor)
        outer = self._outer
        if place is None:
            if outer is None:
                return self._pack_other(tensor)
            handed_on = _HandedOn(outer[1], outer[0](tensor))
            if self._is_in_checkpoint and (called := self.calls.innermost_unit()) is not None:
                handed_on.token = called.token()
            return handed_on
        if outer is None or self._is_outermost or self._is_in_checkpoint:
            return SavedReference(*place, tensor)
        return _HandedOnWeight(outer[1], tree_map_only(torch.Tensor, self._as_reference, outer[0](tensor)))

    def _as_reference(self, tensor: torch.Tensor) -> torch.Tensor | SavedReference:
        place = self._open_units.place_of(tensor)
        return tensor if place is None else SavedReference(*place, tensor)


class _HandedOn:
    """The object that the pair below made of a tensor; that pair turns it back.

    ``token`` keeps the unit that is to run again from being updated before.
    """

    __slots__ = ("packed", "token", "unpack")

    def __init__(self, unpack: Callable[..., Any], packed: Any) -> None:
        self.unpack = unpack
        self.packed = packed
        self.token: ReferenceToken | None = None

    def restore(self) -> torch.Tensor:
        """Return the tensor that the pair below makes."""
        tensor: torch.Tensor = self.unpack(self.packed)
        return tensor


class _HandedOnWeight(_HandedOn):
    """The object that the pair below made of a tensor in a unit, with references to its parts that lie there still."""

    __slots__ = ()

    def restore(self) -> torch.Tensor:
        """Return the tensor that the pair below makes, with the unit swapped in."""
        tensor: torch.Tensor = self.unpack(tree_map_only(SavedReference, SavedReference.restore, self.packed))
        return tensor


def _unpack(packed: Packed) -> torch.Tensor:
    return packed.restore()
