"""micro_batches: several micro-batches through a model unit by unit, so that its parameters cross once for all of them.

Here is the public call: a micro-batch, its loss, and the one node of the graph behind which the backwards take turns.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.zero.microbatching.lanes import Lane, Lanes, Touches
from tiered.zero.microbatching.state_watch import InterruptionWatch, StateWatch
from tiered.zero.microbatching.streams import BackwardStreams, DrawCounts, ForwardStreams
from tiered.zero.parameters.conductor import Conductor
from tiered.zero.parameters.functorch import check_no_transform
from tiered.zero.parameters.outputs import tensors
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Unit
from tiered.zero.step import Event, in_graph_task

__all__ = ["micro_batches"]

_draw_counts: weakref.WeakKeyDictionary[nn.Module, DrawCounts] = weakref.WeakKeyDictionary()


def micro_batches(
    model: nn.Module, batches: Iterable[Any], *, loss: Callable[..., Any] | None = None
) -> list[torch.Tensor]:
    """Run the forward of each micro-batch, all of them unit by unit, and return their losses, in order.

    Each of ``batches`` is a tuple or list (the model's arguments), a mapping (its keyword arguments) or one tensor. The
    model returns a scalar loss, or an output with one: under "loss" in a mapping, as ``.loss``, or first in a tuple or
    list; ``loss(model, *args, **kwargs)``, if given, is called in the model's place. The rest of the output is lost.

    Then ``torch.stack(losses).mean().backward()``, or any function of the losses, meets the units in the same manner:
    parameters are swapped in once per pass, whatever the number of micro-batches. All bits are those of
    ``for batch in batches: (model(*batch) / len(batches)).backward()``: losses, gradients, and the random numbers drawn
    (with dropout, the first call reads parameters twice in its forward: how much a micro-batch draws is not known yet).
    One backward is one backward for ``update="backward"``. The activations of all micro-batches are alive at once; no
    hook or context of the caller's may depend on which thread it runs in. Without gradients the losses have no graph.

    A model without sharded parameters is run one micro-batch after another. Blocks. Raises the error of a forward, and
    a note names the micro-batch; ValueError for no micro-batch; UsageError for an output without a loss, for a model
    that keeps state between forwards (batch norm in training, buffers, caches), for backwards that draw random numbers,
    and for ``create_graph=True``. The graph is freed by a backward whatever its ``retain_graph``.
    """
    calls = [functools.partial(loss or _call, model, *args, **kwargs) for args, kwargs in map(_arguments, batches)]
    if not calls:
        raise ValueError("tiered.micro_batches(model, []); expected at least one micro-batch")
    engine = _engine_of(model)
    if engine is None:
        micros = [_Micro(index, _loss_in(call(), index), Touches()) for index, call in enumerate(calls)]
    else:
        micros = _forward(engine, model, calls)
    if not any(micro.requires_grad for micro in micros):
        return [micro.take() for micro in micros]
    with torch.enable_grad():
        # The anchor makes the losses require gradients.
        anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        return list(_Joined.apply(_Micros(engine, model, micros), anchor))  # type: ignore[no-untyped-call]


class _Micro:
    """One micro-batch between its forward and its backward: its loss with the graph, and the touched parameters."""

    __slots__ = ("_loss", "index", "requires_grad", "touches")

    def __init__(self, index: int, loss: torch.Tensor, touches: Touches) -> None:
        self.index = index
        self.touches = touches
        self.requires_grad = loss.requires_grad
        self._loss: torch.Tensor | None = loss

    def value(self) -> torch.Tensor:
        """Return the loss, without the graph, in memory of its own."""
        assert self._loss is not None
        return self._loss.detach().clone()

    def take(self) -> torch.Tensor:
        """Return the loss and forget it. Raises UsageError the second time."""
        loss, self._loss = self._loss, None
        if loss is None:
            raise UsageError(
                f"a second backward through micro-batch {self.index}, counted from 0; expected one: its graph is freed"
                " by the first, whatever retain_graph says"
            )
        return loss


class _Micros:
    """The micro-batches of one call."""

    def __init__(self, engine: Conductor | None, model: nn.Module, micros: list[_Micro]) -> None:
        self.micros = micros
        self._engine = engine
        self._model = model

    def backward(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Run the backward of each micro-batch whose loss has a gradient. Called in the graph task of the caller's."""
        engine = self._engine
        due = [
            (micro, gradient) for micro, gradient in zip(self.micros, gradients, strict=True) if gradient is not None
        ]
        works = [functools.partial(_backward, micro.take(), gradient) for micro, gradient in due]
        if engine is None:
            for work in works:
                work()
            return
        engine.backward.seen()
        lanes = [Lane(index, works.pop(0), micro.touches) for index, (micro, _) in enumerate(due)]
        modules = list(self._model.modules())
        buffers = [module._buffers for module in modules]
        try:
            Lanes(engine, lanes, BackwardStreams(len(lanes)), InterruptionWatch(self._model)).run()
        finally:  # recomputes that took turns inside one module did not put back its own, but each other's
            for module, own in zip(modules, buffers, strict=True):
                module.__dict__["_buffers"] = own


def _backward(loss: torch.Tensor, gradient: torch.Tensor) -> None:
    """Run the backward of ``loss`` in this thread: autograd's own for a compute device waits for the lanes."""
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(loss, gradient)


class _Joined(torch.autograd.Function):
    """The one node from the losses with their graphs to the caller's losses, so that one backward has all of them."""

    @staticmethod
    def forward(ctx: Any, micros: _Micros, anchor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the values of the losses."""
        ctx.micros = micros
        ctx.set_materialize_grads(False)
        values = tuple(micro.value() for micro in micros.micros)
        constant = [value for value, micro in zip(values, micros.micros, strict=True) if not micro.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        """Run the backwards of the micro-batches."""
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True over the losses of tiered.micro_batches; expected a first derivative: call the model"
                " itself for higher ones"
            )
        ctx.micros.backward(gradients)
        return None, None


class _Turns:
    """The turns of micro-batches' forwards: each turn sets the random numbers and watches the modules."""

    def __init__(self, streams: ForwardStreams, watch: StateWatch) -> None:
        self._streams = streams
        self._watch = watch
        self._begun: set[int] = set()

    def enter(self, index: int) -> None:
        """Lane ``index`` is about to run."""
        self._watch.enter(index, has_begun=index in self._begun)
        self._begun.add(index)
        self._streams.enter(index)

    def leave(self, index: int, *, has_ended: bool) -> None:
        """Lane ``index`` has paused or ended."""
        self._streams.leave(index, has_ended=has_ended)
        self._watch.leave(index)
        if has_ended:
            self._begun.discard(index)

    def must_go_on(self, index: int) -> bool:
        """Return whether lane ``index`` must run to its end before others do."""
        return self._streams.must_go_on(index)


def _forward(engine: Conductor, model: nn.Module, calls: Sequence[functools.partial[Any]]) -> list[_Micro]:
    """Run all forwards in turns, and run those again that began with the wrong random numbers."""
    _check(engine)
    watch = StateWatch(model, len(calls))
    streams = ForwardStreams(
        _draw_counts.setdefault(model, DrawCounts()),
        [_kind(model, call) for call in calls],
        draws_nothing=not _may_draw(model),
    )
    turns = _Turns(streams, watch)

    def lane(index: int) -> Lane:
        return Lane(index, lambda: _loss_in(calls[index](), index), Touches())

    lanes = [lane(index) for index in range(len(calls))]
    interruptions = InterruptionWatch(model)
    Lanes(engine, lanes, turns, interruptions).run()
    while again := streams.to_repeat():
        lanes[again[0] :] = [lane(index) for index in again]
        Lanes(engine, lanes[again[0] :], turns, interruptions).run()
    streams.finish()
    watch.finish()
    return [_Micro(lane.index, lane.result, lane.touches) for lane in lanes]


def _check(engine: Conductor) -> None:
    """Raise UsageError or StepAbandonedError where no forward of several micro-batches can begin."""
    check_no_transform("tiered.micro_batches")
    engine.settle_calls()
    if engine.calls.turns.are_taken or engine.calls or in_graph_task():
        raise UsageError("tiered.micro_batches inside a forward or backward of the model; expected outside")
    engine.phase.check(Event.FORWARD, "tiered.micro_batches")


def _engine_of(model: nn.Module) -> Conductor | None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"tiered.micro_batches({type(model).__name__}, ...); expected a Module")
    units = [p.segment.unit for p in model.parameters() if isinstance(p, TieredParameter)]
    if not units:
        return None
    if not all(isinstance(unit, Unit) for unit in units) or len({unit.engine for unit in units}) > 1:
        raise UsageError(
            "tiered.micro_batches of a model not sharded, or sharded in parts; expected tiered.shard(model, store)"
        )
    engine: Conductor = units[0].engine
    return engine


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that a micro-batch stands for."""
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, list | tuple):
        return tuple(batch), {}
    raise TypeError(f"micro-batch of type {type(batch).__name__}; expected a tuple, list, mapping or tensor")


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _kind(model: nn.Module, call: functools.partial[Any]) -> Hashable:
    """Return the kind of a micro-batch: forwards of one kind draw equally many random numbers, as far as is visible."""
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors([call.args[1:], call.keywords]))
    return shapes, model.training, torch.is_grad_enabled()


def _may_draw(model: nn.Module) -> bool:
    """Return whether a forward is likely to draw random numbers: some dropout or layer drop is switched on."""
    for module in model.modules():
        if not module.training:
            continue
        is_dropout = "drop" in type(module).__name__.lower() and getattr(module, "p", 1) > 0
        if is_dropout or any(
            "drop" in name.lower() and isinstance(value, float) and value > 0 for name, value in vars(module).items()
        ):
            return True
    return False


def _loss_in(output: Any, index: int) -> torch.Tensor:
    """Return the loss in the output of a model or a loss function."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        found = output.loss
    elif isinstance(output, list | tuple) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.is_floating_point():
        what = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise UsageError(
            f"tiered.micro_batches: micro-batch {index} gave no loss but {what} in {type(output).__name__}; expected a"
            " floating tensor of one element: returned alone, first, under 'loss' or as .loss; or pass"
            " loss=lambda model, *batch: ..."
        )
    return found
