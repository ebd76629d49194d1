"""DeferredTensor: a tensor whose values are read when they are wanted, and the torch operations on it until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tiered.errors import UsageError
from tiered.zero.parameters.parameter import is_in_place

__all__ = ["DeferredTensor"]

_ITSELF: set[Any] = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_MOVES: set[Any] = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}


class DeferredTensor(torch.Tensor):
    """A meta tensor with a recipe for its values. An operation on some gives another, whose recipe is the operation.

    ``values()`` follows the recipe, and keeps nothing. ``place`` is (file, name) where the values are a tensor of that
    safetensors file as it is, else None. Copies between devices are left out: values are in DRAM.
    """

    place: tuple[str, str] | None
    _read: Callable[[], torch.Tensor]
    _read_into: Callable[[torch.Tensor], Callable[[], None]] | None

    @classmethod
    def of(
        cls,
        looks: torch.Tensor,
        read: Callable[[], torch.Tensor],
        *,
        read_into: Callable[[torch.Tensor], Callable[[], None]] | None = None,
        place: tuple[str, str] | None = None,
    ) -> DeferredTensor:
        """Return one that looks like ``looks``, on meta. ``read_into`` starts to fill one.

        It takes a contiguous tensor in DRAM of these looks, and returns the call that waits for the values.
        """
        with torch._C.DisableTorchFunctionSubclass():
            deferred = torch.Tensor._make_subclass(cls, looks.detach().to("meta"))
        deferred._read, deferred._read_into, deferred.place = read, read_into, place
        return deferred

    def begin_copy(self, target: torch.Tensor) -> Callable[[], None] | None:
        """Start to copy the values to ``target``, which is of this shape; return the call that waits, if any."""
        is_same = target.dtype == self.dtype and target.is_contiguous() and target.is_cpu
        if self._read_into is not None and is_same and target.numel():
            return self._read_into(target)
        values = self.values()
        with torch.no_grad():
            target.copy_(values)
        return None

    def values(self) -> torch.Tensor:
        """Return the values, an ordinary tensor in DRAM of these looks; blocks where they are read."""
        return self._read()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and not isinstance(args[0], cls):
            source: DeferredTensor = args[1]
            wait = source.begin_copy(args[0])
            if wait is not None:
                wait()
            return args[0]
        if _changes_nothing(func, args, kwargs):
            same: DeferredTensor = args[0]
            return cls.of(same, same._read, read_into=same._read_into, place=same.place)
        if func in _ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_in_place(func) or "out" in kwargs:
            raise UsageError(f"{getattr(func, '__name__', func)} would write to a tensor that was not read yet")
        with torch._C.DisableTorchFunctionSubclass():
            looks = _moved(args, kwargs) if func in _MOVES else func(*args, **kwargs)
        return _deferred(looks, lambda: _run(func, args, kwargs))


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` gives the values of its first argument as they are."""
    if not args or not isinstance(args[0], DeferredTensor):
        return False
    if func is torch.Tensor.__getitem__:
        return args[1] is Ellipsis
    if func in _MOVES:
        return _dtype_of(args, kwargs) == args[0].dtype
    return func is torch.Tensor.detach or (func is torch.Tensor.contiguous and args[0].is_contiguous())


def _deferred(looks: Any, compute: Callable[[], Any]) -> Any:
    """Return what an operation gives, with the tensors in it deferred."""
    if isinstance(looks, torch.Tensor):
        return DeferredTensor.of(looks, compute) if looks.is_meta else looks
    if isinstance(looks, list | tuple) and any(isinstance(each, torch.Tensor) for each in looks):
        return type(looks)([_deferred(each, lambda n=n: compute()[n]) for n, each in enumerate(looks)])  # type: ignore[misc]
    return looks


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an operation on values."""
    args, kwargs = tree_map(lambda each: each.values() if isinstance(each, DeferredTensor) else each, (args, kwargs))
    if func in _MOVES:
        return args[0].to(_dtype_of(args, kwargs))
    with torch.no_grad():
        return func(*args, **kwargs)


def _moved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return torch.empty_like(args[0], dtype=_dtype_of(args, kwargs), device="meta", requires_grad=False)


def _dtype_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """Return the dtype that ``args[0].to(...)`` gives."""
    first: torch.Tensor = args[0]
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        return args[1].dtype
    _, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
    return dtype or first.dtype
