"""TieredParameter: a parameter that faults in like a page, and refuses to be touched at the wrong time.

An ``nn.Parameter`` keeps its identity and changes its class. Its values live in the store; each operation that touches
them leases the owning unit first. Metadata (shape, dtype, grad, hooks) passes through untouched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from tiered.bytes.interrupt import outside
from tiered.errors import UsageError
from tiered.zero.parameters.tensor_without_bytes import LAYOUT, METADATA, name_of, without_dispatch
from tiered.zero.parameters.unit import ordinary_tensors

__all__ = [
    "TieredParameter",
    "is_in_place",
    "is_write",
    "name_of",
    "without_dispatch",
]

_SET_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_AS_STRIDED = {  # to the position of its storage_offset
    torch.Tensor.as_strided: 3, torch.as_strided: 3, torch.as_strided_copy: 3,
    torch.Tensor.as_strided_scatter: 4, torch.as_strided_scatter: 4,
}  # fmt: skip
_GET_GRAD: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_TO_PRUNE = (
    "to update_and_allocate() of PEFT's AdaLora or AdaMSS; expected adapters that were added after tiered.shard, by"
    " peft.get_peft_model(tiered.shard(base, store), config), whose gradients stay until optimizer.zero_grad()"
)
_REQUIRES_GRAD = {_SET_REQUIRES_GRAD, torch.Tensor.requires_grad_}
_FORBIDDEN: dict[Any, str] = {
    torch.Tensor.__reduce_ex__: "pickling of a sharded parameter; save model.state_dict(), or commit the store",
    torch.Tensor.share_memory_: "share_memory_() of a sharded parameter; its bytes belong to the store",
}
_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}


class TieredParameter(nn.Parameter):
    """A parameter whose values live in a store; made by ``construct`` and ``shard``, never directly.

    ``segment`` says where the values are. Shape, dtype, ``requires_grad`` and ``grad`` are the true ones at any time.
    Inside a forward or backward of the model, and inside ``tiered.unsharded``, it behaves as any parameter; elsewhere
    touching the values raises UsageError.
    """

    segment: Any  # its Segment

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with without_dispatch():
                result = func(*args, **kwargs)
            if func in _REQUIRES_GRAD:
                args[0].segment.unit.owner.require_gradient(args[0])
            elif func == _GET_GRAD and sys._getframe(1).f_globals.get("__name__", "").startswith("peft.tuners.ada"):
                raise UsageError(f"parameter {args[0].segment.name}: refused .grad {_TO_PRUNE}")
            return result
        parameters = _find(args)
        if kwargs:
            parameters += _find(kwargs.values())
        if not parameters:  # another subclass brought us here
            with without_dispatch():
                return func(*args, **kwargs)
        first = parameters[0]
        if func in LAYOUT:
            return func(first.segment.layout(), *args[1:], **kwargs)
        if func is torch.Tensor.__repr__:
            return _describe(first)
        if func in _FORBIDDEN:
            raise UsageError(f"parameter {first.segment.name}: refused {_FORBIDDEN[func]}")
        if func in _MAYBE_NO_OPS and _is_no_op(func, args, kwargs):
            return first
        if func in _BACKWARDS and _is_about_places(args, kwargs):
            return _run_from_edges(func, args, kwargs)
        if func is torch.Tensor.view_as and args[0] is args[-1] and (refusal := _refusal_of_values(first)):
            return _ViewWithoutValues.of(first, refusal)
        owner: Any = first.segment.unit.owner
        access = owner.access if len(parameters) == 1 else _access_all
        with access([each.segment for each in parameters], func, args, kwargs), without_dispatch():
            if func == _GET_DATA:  # shares the version counter, so that a write through it is noticed
                return args[0].detach()
            if func == _SET_DATA:  # the bytes stay the store's own
                return owner.assign(first.segment, args[1])
            if func in _AS_STRIDED:
                args, kwargs = _in_buffer(_AS_STRIDED[func], args, kwargs)
            result = func(*args, **kwargs)
            return owner.detached(first.segment, result) if func is _DETACH else result

    def __repr__(self) -> str:  # type: ignore[override]
        return _describe(self)

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.segment.unit.owner.copy(self.segment)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(f"parameter {self.segment.name}: refused {_FORBIDDEN[torch.Tensor.__reduce_ex__]}")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            f"parameter {self.segment.name}: refused set_(), map_(), as_subclass() or swap_tensors(), which torch does"
            " not report; expected copy_() inside `with tiered.unsharded(module):`, or detach() for an ordinary tensor;"
            " a module whose constructor needs them is built outside `with tiered.construct(store):`"
        )

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, but for a constructor's ``parameter.set_(tensor)``, and itself, which parametrizations set."""
        if len(args) != 1 or not isinstance(args[0], torch.Tensor) or kwargs:
            self._refuse()
        if args[0] is not self:
            self.segment.unit.owner.set(self.segment, args[0])
        return self

    map_ = map2_ = as_subclass = _refuse
    _use_count = _refuse  # torch.utils.swap_tensors asks for nothing else before it swaps


_BACKWARDS = {torch.autograd.backward, torch.autograd.grad}
_DETACH = torch.Tensor.detach
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MAYBE_NO_OPS = {_SET_DATA, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to, *_CASTS}


class _ViewWithoutValues(torch.Tensor):
    """A ``parameter.view_as(parameter)`` whose values may not be read: it has a place in the graph, and an error.

    torch makes such a view of each parameter that it hooks together with others, only to ask for its ``grad_fn``.
    """

    refusal: str

    @classmethod
    def of(cls, parameter: TieredParameter, refusal: str) -> _ViewWithoutValues:
        """Return the view of ``parameter`` that raises UsageError(``refusal``) where values are asked for."""
        with without_dispatch():
            view = torch.Tensor.as_subclass(parameter, cls)
        view.refusal = refusal
        return view

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with without_dispatch():
                return func(*args, **(kwargs or {}))
        raise UsageError(next(leaf.refusal for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)))


def _refusal_of_values(parameter: TieredParameter) -> str:
    """Return why the values of ``parameter`` may not be read now; "" where they may."""
    owner = parameter.segment.unit.owner
    try:
        with owner.access([parameter.segment], torch.Tensor.view_as, (parameter, parameter), {}):
            return ""
    except UsageError as error:
        return str(error)


@contextmanager
def _access_all(segments: Sequence[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Show the parameters of ``segments``, of one model or of several, for the operation ``func``."""
    by_owner: dict[Any, list[Any]] = {}
    for segment in segments:
        by_owner.setdefault(segment.unit.owner, []).append(segment)
    with ExitStack() as stack:
        for owner, its_segments in by_owner.items():
            stack.enter_context(owner.access(its_segments, func, args, kwargs))
        yield


def is_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` would write to a TieredParameter among its arguments."""
    if func == _SET_DATA or ("out" in kwargs and _find((kwargs["out"],))):
        return True
    if not is_in_place(func):
        return False
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    return bool(_find((target,)))


@functools.lru_cache(maxsize=1024)
def is_in_place(func: Any) -> bool:
    """Return whether ``func`` writes to its first argument, as its name says."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
    return in_place and name not in {"__index__", "__int__", "__invert__"}


def _find(values: Iterable[Any]) -> list[TieredParameter]:
    """Return the tiered parameters in ``values``, looking into lists, tuples and dicts."""
    found: list[TieredParameter] = []
    for value in values:
        if issubclass(type(value), TieredParameter):  # isinstance asks torch's metaclass, in Python
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _find(value)
        elif isinstance(value, dict):
            found += _find(value.values())
    return found


def _in_buffer(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an as_strided with a ``storage_offset`` from the start of the unit's buffer.

    The caller counts from the start of the parameter, where its own storage would begin. ``place`` is the position of
    the offset among the arguments; an offset that is left out is the tensor's own already.
    """
    target = args[0] if args else kwargs.get("input")
    if not isinstance(target, TieredParameter):
        return args, kwargs
    start = target.storage_offset()
    if len(args) > place and args[place] is not None:
        return (*args[:place], args[place] + start, *args[place + 1 :]), kwargs
    if kwargs.get("storage_offset") is not None:
        return args, kwargs | {"storage_offset": kwargs["storage_offset"] + start}
    return args, kwargs


def _is_about_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether parameters say where a backward ends, and no more: torch needs no values of them for that."""
    inputs = [*args[1:2], kwargs.get("inputs")]
    num_others = len(_find((args[:1], args[2:], [v for k, v in kwargs.items() if k != "inputs"])))
    with without_dispatch():
        is_refused = any(not parameter.requires_grad for parameter in _find(inputs))
    return not num_others and not is_refused and not kwargs.get("materialize_grads")


def _run_from_edges(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward that was given parameters with their places in the graph instead.

    Otherwise the parameters would be in use, and their units leased, as long as the backward runs; and its
    recomputations need dispatch.
    """

    def edges(values: Any) -> Any:
        with without_dispatch(), ordinary_tensors():
            return tuple(get_gradient_edge(v) if isinstance(v, TieredParameter) else v for v in values)

    if len(args) > 1:
        return outside(func, args[0], edges(args[1]), *args[2:], **kwargs)
    return outside(func, *args, **kwargs | {"inputs": edges(kwargs["inputs"])})


def _is_no_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` would hand back its first argument itself, as in ``model.to(...)`` without a change."""
    target = args[0] if args else None
    if not isinstance(target, TieredParameter):
        return False
    if func == _SET_DATA:
        return args[1] is target
    if func in _CASTS:
        return target.dtype == _CASTS[func]
    if func is torch.Tensor.cpu:
        return target.device.type == "cpu"
    if func is torch.Tensor.cuda:
        device = (*args[1:], *kwargs.values(), None)[0]
        return target.device.type == "cuda" and _is_here(torch.device("cuda") if device is None else device, target)
    if func is not torch.Tensor.to or any(isinstance(arg, torch.Tensor) for arg in args[1:]) or kwargs.get("copy"):
        return False
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    return _is_here(device, target) and dtype in (None, target.dtype) and memory_format is None


def _is_here(device: torch.device | int | str | None, target: torch.Tensor) -> bool:
    """Return whether ``target`` lies on ``device``: without an index that of the current one, as torch reads it."""
    there = target.device if device is None else torch.device(device)
    if str(there) == target.device.type != "cpu":
        there = torch.device(there.type, torch.accelerator.current_device_index())
    return there == target.device


def _describe(parameter: TieredParameter) -> str:
    with without_dispatch():
        return (
            f"TieredParameter({parameter.segment.name!r}, shape={tuple(parameter.shape)}, dtype={parameter.dtype},"
            f" requires_grad={parameter.requires_grad}, {parameter.segment.unit.describe()})"
        )
