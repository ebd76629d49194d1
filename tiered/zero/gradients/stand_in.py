"""StandIn: ``parameter.grad`` is one while the gradient's bytes are elsewhere, on NVMe or used up.

A stand-in has the gradient's shape, strides and dtype and no memory. Norms, finite checks and changes in place by
numbers are answered with torch's bits in the gradient's dtype; every other read is a UsageError. The source of a
stand-in knows where the values are, and when a change is applied to them.
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_leaves, tree_map_only

from tiered.errors import UsageError
from tiered.zero.parameters.tensor_without_bytes import LAYOUT, METADATA, close, name_of, without_dispatch
from tiered.zero.parameters.unit import Segment

__all__ = ["Change", "Compute", "SharedGradient", "StandIn", "StoredGradient", "UsedGradient"]

_MESSAGE = (
    "the values of a gradient that is on NVMe were touched past torch's dispatch; expected norms, finite checks and"
    " scalings in place, or a store with a larger dram="
)


class Change:
    """An elementwise operation in place, as torch was asked for it: may run on any part of the gradient, in its dtype.

    ``apply(gradient, *others, **kwargs)`` is the operation; tensors among the others are those of that moment, and lie
    where the gradient does.
    """

    __slots__ = ("_apply", "_kwargs", "_others")

    def __init__(self, apply: Callable[..., Any], others: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._apply = apply
        self._others = others
        self._kwargs = kwargs

    def __call__(self, gradient: torch.Tensor) -> None:
        """Do the operation on ``gradient``, or on a part of it."""
        with torch.no_grad():
            self._apply(gradient, *self._others, **self._kwargs)

    def elsewhere(self, bring: Callable[[torch.Tensor], Callable[[], torch.Tensor]]) -> Callable[[torch.Tensor], None]:
        """Return the operation for the gradient's bytes elsewhere; ``bring(tensor)()`` is a tensor's value there."""
        brought = tree_map_only(torch.Tensor, bring, (self._others, self._kwargs))

        def change(gradient: torch.Tensor) -> None:
            others, kwargs = tree_map_only(types.FunctionType, lambda value: value(), brought)
            Change(self._apply, others, kwargs)(gradient)

        return change


Compute: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A question about a gradient's values."""


class UsedGradient:
    """The source of a stand-in whose gradient an update in a backward has used, until the step concludes; no values.

    ``where`` and ``advice`` are for messages: "its gradient is {where}; expected {advice}". Where ``is_readable`` is
    false, ``answer`` and ``change`` are never called. ``pending`` are the changes that the stored bytes lack, in the
    order in which they were asked for. ``answers`` are those to questions that were asked before, of the stored bytes.
    """

    __slots__ = ("_segment", "answers", "name", "pending")

    where = 'used up, by the backward under update="backward"'
    advice = 'tiered.AdamW(..., update="step") for clipping, scaling and looking at gradients'
    is_readable = False

    def __init__(self, segment: Segment) -> None:
        self.name = segment.name
        self.pending: list[Change] = []
        self.answers: dict[Hashable, torch.Tensor] = {}
        # Lifetime: the parameter's gradient leads here, and the collector does not look into torch's objects.
        self._segment = weakref.ref(segment)

    def stand_in(self) -> StandIn:
        """Return a stand-in with the looks of the gradient."""
        segment = self.segment()
        return StandIn.of(self, segment.shape, segment.strides, segment.dtype, segment.unit.tier.device)

    def segment(self) -> Segment:
        """Return the segment whose gradient this is the source of. Raises UsageError where the gradient is gone."""
        segment = self._segment()
        if segment is not None and segment.unit.gradients.sources.get(segment) is self:
            return segment
        raise UsageError(
            f"parameter {self.name}: the gradient that this stood for is gone: optimizer.step() has used it, or it was"
            " dropped or replaced; expected parameter.grad as it is now"
        )

    def take_pending(self) -> list[Change]:
        """Return the changes that the stored bytes lack; the caller applies them, and may change the bytes further."""
        self.answers = {}
        pending, self.pending = self.pending, []
        return pending

    def changes_in_dram(self) -> list[Callable[[torch.Tensor], None]]:
        """Return the pending changes for bytes in DRAM; they block for numbers of the compute device."""
        return [change.elsewhere(lambda number: lambda: number.cpu()) for change in self.pending]

    def answer(self, question: Hashable | None, compute: Compute) -> torch.Tensor:
        """Return ``compute(values)``; the same ``question`` has the same answer until the values change. Blocks."""
        raise AssertionError(self.name)

    def change(self, change: Change) -> None:
        """Have ``change`` applied to the values before the next read of them. Does not block."""
        raise AssertionError(self.name)


class StoredGradient(UsedGradient):
    """The source of a stand-in whose gradient was stored, from the first time to the end of the gradient."""

    __slots__ = ()

    where = "on NVMe"
    advice = (
        "norms, finite checks and scalings in place by numbers, as torch.nn.utils.clip_grad_norm_ and"
        " torch.amp.GradScaler do, or a store with a larger dram=, in which gradients find room"
    )
    is_readable = True

    def answer(self, question: Hashable | None, compute: Compute) -> torch.Tensor:
        """Return ``compute(values)``, reading them unless the answer is known. None: a question of this time alone."""
        if not self.pending and question in self.answers:
            return self.answers[question]
        segment = self.segment()
        if question is not None:
            segment.unit.gradients.model.note_question(question, compute)
        answer: torch.Tensor = segment.unit.gradients.ask(segment, compute)
        return answer

    def change(self, change: Change) -> None:
        """Apply ``change`` now where the values are leased, else when they are read."""
        segment = self.segment()
        segment.unit.gradients.change(segment, self, change)


class SharedGradient(StoredGradient):
    """The source of a stand-in whose gradient is summed over several ranks, in the shard of each.

    A norm is that of the norms of the ranks' pieces. The 2-norm and the largest magnitude were told at the end of the
    backward: each rank knows them by itself. All ranks ask for other norms together.
    """

    __slots__ = ()

    where = "summed over the ranks, a piece on each"
    advice = (
        "norms, finite checks and scalings in place by numbers, as torch.nn.utils.clip_grad_norm_ and"
        " torch.amp.GradScaler do"
    )

    def describe(self) -> str:
        """Return what an update will find: how often gradients were added, and what pending changes do to numbers."""
        segment = self.segment()
        probe = torch.tensor([1.0, -2.0, 3.0], dtype=segment.dtype, device="cpu")
        for change in self.changes_in_dram():
            change(probe)
        factor = segment.unit.gradients.factors.get(segment)
        clipped = "" if factor is None else f", clipped by {factor.item()}"
        return f"added {segment.unit.gradients.shard.num_added} times, scaled {probe.tolist()}{clipped}"

    def answer(self, question: Hashable | None, compute: Compute) -> torch.Tensor:
        """Return ``compute(values)`` of a norm; raises UsageError for another question."""
        segment = self.segment()
        looks = torch.tensor([3.0, -4.0], dtype=segment.dtype, device="cpu")
        like = compute(looks)
        if like.dim() or not 4 <= like.item() <= 7:
            raise UsageError(
                f"parameter {self.name}: a question about its gradient, which is {self.where}; expected its norm of an"
                " order from 1 on, as a number"
            )
        row = {5.0: 0, 4.0: 1}.get(like.item())
        factor = _power_of_two(self.changes_in_dram(), looks.dtype)
        shard = segment.unit.gradients.shard
        norms = shard.norms.get(segment)
        if question is not None and row is not None and factor and norms is not None:
            answer = compute((norms[row] * factor).to(_accumulator(segment.dtype)))
        else:
            answer = compute(shard.ask_all(segment, self, compute))
        return answer.to(segment.unit.tier.device, like.dtype)


def _power_of_two(changes: Sequence[Callable[[torch.Tensor], None]], dtype: torch.dtype) -> float:
    """Return the power of two that ``changes`` multiply with; 0 where they do anything else."""
    before = torch.tensor([1, -1, 3, 0, math.inf, -math.inf, math.nan], dtype=dtype, device="cpu")
    after = before.clone()
    for change in changes:
        change(after)
    factor = abs(after[0].item())
    is_exact = factor and math.isfinite(factor) and math.frexp(factor)[0] == 0.5
    return factor if is_exact and torch.equal((before * after[0]).nan_to_num(7), after.nan_to_num(7)) else 0.0


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class StandIn(torch.Tensor):
    """A gradient without memory; ``source`` says where its values are.

    All stand-ins of one source are one gradient, as tensors that share memory are. ``detach`` and ``.data`` return such
    stand-ins; another is one that was kept while ``parameter.grad`` became an ordinary tensor again.
    """

    source: UsedGradient

    @staticmethod
    def of(
        source: UsedGradient,
        shape: Iterable[int],
        strides: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> StandIn:
        """Return a stand-in of these looks; it takes no memory."""
        if StandIn not in _foreach_supported_types:  # else torch.nn.utils takes other operators than for tensors
            _foreach_supported_types.append(StandIn)
        stand_in = torch.Tensor._make_wrapper_subclass(
            StandIn, tuple(shape), strides=tuple(strides), dtype=dtype, device=device, requires_grad=False
        )
        stand_in.source = source
        with without_dispatch():
            close(stand_in, _MESSAGE)  # for code that asks neither of the two below: DLPack, `.data = stand_in`
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA or func in LAYOUT:
            with without_dispatch():
                return func(*args, **(kwargs or {}))
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types the one that is switched off
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer, or refuse, calls that came past ``__torch_function__``: autograd, collectives, C++ extensions."""
        result = _answer(func, args, kwargs or {})
        if isinstance(result, tuple):  # norms: an operator returns lists
            return list(result)
        return None if isinstance(result, list) else result

    def __repr__(self) -> str:  # type: ignore[override]
        source = self.source
        with without_dispatch():
            return f"StandIn({source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, {source.where})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal("set_(), map_(), as_subclass() or swap_tensors()", self)

    set_ = map_ = map2_ = as_subclass = _refuse  # torch reports none of these
    _use_count = _refuse  # torch.utils.swap_tensors asks for nothing else before it swaps


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
    answer = _ANSWERS.get(func) if args else None
    for stand_in in stand_ins:
        if answer is None or not (stand_in.source.is_readable or func in _ALIASES):
            raise _refusal(name_of(func), stand_in)
    if answer is None:  # another subclass brought us here
        with without_dispatch():
            return func(*args, **kwargs)
    with without_dispatch():
        return answer(func, args, kwargs)


def _refusal(operation: str, stand_in: StandIn) -> UsageError:
    source = stand_in.source
    return UsageError(
        f"parameter {source.name}: refused {operation} on its gradient, which is {source.where}; expected"
        f" {source.advice}"
    )


# -- norms -----------------------------------------------------------------------------------------------------------


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stand_in, others = _only_stand_in(func, args, kwargs), args[1:]
    del args  # lifetime: a question is kept longer than the gradient that it was asked about

    def norm(values: torch.Tensor) -> Any:
        return func(values, *others, **kwargs)

    return stand_in.source.answer((func, repr(others), repr(kwargs)), norm)


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    tensors, *others = args
    _check_only_numbers(func, (others, kwargs))
    norms = []

    def norm(values: torch.Tensor) -> Any:
        return func([values], *others, **kwargs)[0]

    for tensor in tensors:
        if isinstance(tensor, StandIn):
            norms.append(tensor.source.answer((func, repr(others), repr(kwargs)), norm))
        else:
            norms += func([tensor], *others, **kwargs)
    return tuple(norms)


# -- changes in place ------------------------------------------------------------------------------------------------


def _change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    stand_in = _only_stand_in(func, args, kwargs)
    stand_in.source.change(_frozen(func, stand_in, args[1:], kwargs))
    return stand_in


def _changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Change each tensor of the list ``args[0]``; the other arguments are for all, or lists of one for each."""
    tensors, *others = args

    def each(tensor: torch.Tensor, *own: Any, **options: Any) -> None:
        func([tensor], *own, **options)

    changes: list[tuple[torch.Tensor, Change]] = []  # order: a refusal changes nothing
    for index, tensor in enumerate(tensors):
        own = tuple([other[index]] if isinstance(other, list | tuple) else other for other in others)
        changes.append((tensor, _frozen(each, tensor, own, kwargs, func=func)))
    for tensor, change in changes:
        if isinstance(tensor, StandIn):
            tensor.source.change(change)
        else:
            change(tensor)
    return tensors


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply each gradient by ``inv_scale`` and put 1 into ``found_inf`` where one is not finite."""
    tensors, found_inf, inv_scale = args

    def unscale(tensor: torch.Tensor, inv_scale: torch.Tensor) -> None:
        func([tensor], torch.zeros_like(inv_scale), inv_scale)  # a non-finite value was found when the caller asked

    if ordinary := [tensor for tensor in tensors if not isinstance(tensor, StandIn)]:
        func(ordinary, found_inf, inv_scale)  # order: reading the others may have these given back
    for tensor in tensors:
        if isinstance(tensor, StandIn):
            found_inf.masked_fill_(_is_not_finite(tensor), 1.0)  # its device knows: nobody waits for the answer
            tensor.source.change(_frozen(unscale, tensor, (inv_scale,), kwargs, func=func))
    return None


def _is_not_finite(stand_in: StandIn) -> torch.Tensor:
    """Return whether some value is not finite: exactly then the largest magnitude is not. () bool."""
    if not stand_in.numel():
        return torch.zeros((), dtype=torch.bool, device=stand_in.device)
    largest: torch.Tensor = _norm(torch.linalg.vector_norm, (stand_in, math.inf), {})
    return largest.isfinite().logical_not()


def _frozen(
    apply: Callable[..., Any], target: torch.Tensor, others: tuple[Any, ...], kwargs: dict[str, Any], func: Any = None
) -> Change:
    """Return ``apply`` with the other arguments as they are now; raises torch's error where torch refuses them."""
    _check_only_numbers(func or apply, (others, kwargs), target)
    others, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (others, kwargs))
    change = Change(apply, others, kwargs)
    change(torch.empty(0, dtype=target.dtype, device=target.device))
    return change


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn:
    stand_in = _only_stand_in(func, args, kwargs)
    return StandIn.of(stand_in.source, stand_in.shape, stand_in.stride(), stand_in.dtype, stand_in.device)


def _itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn:
    return _only_stand_in(func, args, kwargs)


# -- legal questions -------------------------------------------------------------------------------------------------


def _only_stand_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn:
    """Return the stand-in that is the first argument; raises UsageError for one among the others."""
    for leaf in tree_leaves((args[1:], kwargs)):
        if isinstance(leaf, StandIn):
            raise _refusal(name_of(func), leaf)
    stand_in = args[0]
    if not isinstance(stand_in, StandIn):
        raise _refusal(name_of(func), next(leaf for leaf in tree_leaves(stand_in) if isinstance(leaf, StandIn)))
    return stand_in


def _check_only_numbers(func: Any, others: Any, target: torch.Tensor | None = None) -> None:
    """Raise UsageError for a stand-in among ``others``, and where ``target`` is one for a tensor of many values."""
    for leaf in tree_leaves(others):
        if isinstance(leaf, StandIn):
            raise _refusal(name_of(func), leaf)
        if isinstance(leaf, torch.Tensor) and leaf.dim() and isinstance(target, StandIn):
            raise _refusal(f"{name_of(func)} with a tensor of {leaf.dim()} dimensions", target)


def _named(names: str, *owners: Any) -> set[Any]:
    """Return the operations of these names that ``owners`` have, and torch's operators below them."""
    found = {getattr(owner, name) for name in names.split() for owner in owners if name in dir(owner)}
    for name in names.split():
        packet = getattr(torch.ops.aten, name, None)
        found |= set() if packet is None else {getattr(packet, overload) for overload in packet.overloads()}
    return found


_ALIASES = _named("detach alias", torch.Tensor, torch) | {torch.Tensor.data.__get__}  # type: ignore[attr-defined]
_ANSWERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(_named("linalg_vector_norm"), _norm),
    **dict.fromkeys({torch.Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm}, _norm),
    **dict.fromkeys(_named("_foreach_norm", torch), _norms),
    **dict.fromkeys(
        _named("mul_ multiply_ div_ divide_ true_divide_ add_ sub_ clamp_ clip_ clamp_min_ clamp_max_", torch.Tensor)
        | _named("clamp_ clip_ clamp_min_ clamp_max_ nan_to_num_ zero_", torch.Tensor, torch),
        _change,
    ),
    **dict.fromkeys(
        _named("_foreach_mul_ _foreach_div_ _foreach_clamp_min_ _foreach_clamp_max_ _foreach_zero_", torch), _changes
    ),
    **dict.fromkeys(_named("_amp_foreach_non_finite_check_and_unscale_", torch), _unscale),
    **dict.fromkeys(_ALIASES, _alias),
    **dict.fromkeys({torch.Tensor.detach_, torch.detach_}, _itself),
}
