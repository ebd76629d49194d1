"""Plain PyTorch training in memory, with the numerics that tiered promises; imports nothing of tiered.

fp32 parameters are trained by ``torch.optim.AdamW(fused=True)``. A bf16 parameter has an fp32 master, which starts from
the value before the cast: its gradient is ``p.grad.float()`` after bf16 accumulation, clipped in fp32, and
``p.copy_(master)`` follows the update. A parameter without a gradient is left alone. Other optimizers than AdamW are
trained the same way; torch has no Lion, so it is here.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Lion", "MasterAdamW", "Recipe", "Trained", "means_of", "ranks_reference", "train"]


Bounds = dict[nn.Parameter, list[tuple[int, int]]]
"""Of each parameter, the first and last element of its pieces in the order of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained; the same for the reference and for tiered.

    ``param_groups`` maps the model to torch's list of groups, ``schedule`` an optimizer to its scheduler, and
    ``between`` looks at the model after each step and returns the tensors that it saw.
    """

    param_dtype: torch.dtype | None = None
    num_steps: int = 4
    num_micro_steps: int = 1
    max_norm: float | None = None
    param_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    between: Callable[[nn.Module, int], list[Tensor]] | None = None
    optimizer: str = "AdamW"
    updates_on: str = ""  # the device of masters and moments; "": the parameter's own
    adamw: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.05})

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the parameter groups of ``model``: one of all its parameters where none are given."""
        if self.param_groups is not None:
            return self.param_groups(model)
        return [{"params": list(model.parameters())}]


@dataclass(slots=True)
class Trained:
    """What a training left: every tensor a copy, the state by parameter name."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    exp_avg: dict[str, Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, Tensor] = field(default_factory=dict)
    num_updates: dict[str, int] = field(default_factory=dict)
    cast: set[str] = field(default_factory=set)  # the parameters whose master is another tensor


class Lion(torch.optim.Optimizer):
    """Lion as its paper gives it (algorithm 2), with decoupled decay."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0} | options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg = state["exp_avg"]
                direction = exp_avg.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, fused=True),
    "Lion": Lion,
}


class MasterAdamW:
    """The recipe's optimizer (AdamW: fused) over the fp32 masters of a model, cast to ``param_dtype`` here."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.masters: dict[nn.Parameter, nn.Parameter] = {}  # in model.parameters() order; fp32 ones are their own
        for parameter in model.parameters():
            original = parameter.detach()
            if recipe.param_dtype is not None and parameter.is_floating_point():
                parameter.data = original.to(recipe.param_dtype)
            if not parameter.requires_grad:
                continue
            is_cast = parameter.dtype == torch.bfloat16
            there = recipe.updates_on or parameter.device
            is_master = not is_cast and torch.device(there) == parameter.device
            master = original.float() if is_cast else original
            self.masters[parameter] = parameter if is_master else nn.Parameter(master.to(there, copy=True))
        groups = [
            group | {"params": [self.masters[p] for p in group["params"] if p in self.masters]}
            for group in recipe.groups(model)
        ]
        self.optimizer = OPTIMIZERS[recipe.optimizer](groups, **recipe.adamw)
        self.num_updates: Counter[nn.Parameter] = Counter()  # by master: not every optimizer counts

    def step(self, max_norm: float | None = None, bounds: Bounds | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; return the norm before clipping, if asked to clip.

        With ``bounds`` each parameter's norm is that of the norms of its pieces; one without pieces is whole.
        """
        gradients = {
            parameter: parameter.grad.float() if parameter.dtype == torch.bfloat16 else parameter.grad
            for parameter in self.masters
            if parameter.grad is not None
        }
        pieces = None if bounds is None else [bounds.get(p, [(0, p.numel())]) for p in gradients]
        norm = None if max_norm is None else _clip(list(gradients.values()), max_norm, pieces)
        for parameter, master in self.masters.items():
            gradient = gradients.get(parameter)
            master.grad = None if gradient is None else gradient.to(master.device)
        self.num_updates.update(master for master in self.masters.values() if master.grad is not None)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                if master is not parameter and master.grad is not None:
                    parameter.copy_(master)
        return norm

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.masters:
            parameter.grad = None


def _clip(gradients: list[Tensor], max_norm: float, pieces: list[list[tuple[int, int]]] | None) -> Tensor:
    """Clip ``gradients`` where they are, by torch's own function; return their norm.

    ``pieces`` has, for each gradient, the bounds of its parts in the order of memory, if norms are those of parts.
    """
    holders = [torch.empty_like(gradient) for gradient in gradients]
    for holder, gradient in zip(holders, gradients, strict=True):
        holder.grad = gradient
    if pieces is None:
        return nn.utils.clip_grad_norm_(holders, max_norm)
    norms = []
    for gradient, bounds in zip(gradients, pieces, strict=True):
        flat = gradient.as_strided((gradient.numel(),), (1,))
        parts = [torch.linalg.vector_norm(flat[start:stop]) for start, stop in bounds]
        norms.append(torch.linalg.vector_norm(torch.stack(parts)) if len(parts) > 1 else parts[0])
    norm = torch.linalg.vector_norm(torch.stack(norms))
    nn.utils.clip_grads_with_norm_(holders, max_norm, norm)
    return norm


def train(
    model: nn.Module,
    batch: Callable[[int], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    recipe: Recipe,
    *,
    after_step: Callable[[int, MasterAdamW], object] | None = None,
) -> Trained:
    """Train ``model``, built by its ordinary constructor, on ``batch(0), batch(1), ...``, one per micro-step."""
    optimizer = MasterAdamW(model, recipe)
    scheduler = None if recipe.schedule is None else recipe.schedule(optimizer.optimizer)
    trained = Trained()
    for step in range(recipe.num_steps):
        for micro_step in range(recipe.num_micro_steps):
            value = loss(model, batch(step * recipe.num_micro_steps + micro_step))
            (value / recipe.num_micro_steps).backward()
            trained.losses.append(value.detach().clone())
        norm = optimizer.step(recipe.max_norm)
        optimizer.zero_grad()
        if norm is not None:
            trained.norms.append(norm.clone())
        if scheduler is not None:
            scheduler.step()
        if recipe.between is not None:
            trained.seen += recipe.between(model, step)
        if after_step is not None:
            after_step(step, optimizer)
    _collect(model, optimizer, trained)
    return trained


def ranks_reference(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    recipe: Recipe,
    *,
    world: int,
    seed: int,
    exchanges_each: bool = True,
    reverses: bool = False,
    bounds: dict[str, list[tuple[int, int]]] | None = None,
    before_step: Callable[[int, nn.Module, MasterAdamW], object] | None = None,
) -> Trained:
    """Train over ``world`` ranks, one after the other in this process: a model for each, batch i * world + rank.

    The gradients of all ranks are added in fp32 in the order of the ranks (``reverses``: against it), multiplied with
    fp32(1 / world) and rounded to their dtype, after each micro-step (``exchanges_each``) or the last. A parameter that
    no rank has used has none. ``losses`` are those of rank 0, 1, ... of each micro-step. ``bounds``, by name, are those
    of the pieces of a parameter whose norms make its norm. ``before_step`` may change each rank's model alike.
    """
    models, states = [], []
    for _ in range(world):
        torch.manual_seed(seed)
        models.append(build())
        torch.manual_seed(seed + 1)
        states.append(_generators())
    optimizers, trained = [MasterAdamW(model, recipe) for model in models], Trained()
    sums: dict[str, Tensor] = {}
    for index in range(recipe.num_steps * recipe.num_micro_steps):
        is_last = (index + 1) % recipe.num_micro_steps == 0
        if before_step is not None and index % recipe.num_micro_steps == 0:
            for model, optimizer in zip(models, optimizers, strict=True):
                before_step(index // recipe.num_micro_steps, model, optimizer)
        for rank, model in enumerate(models):
            _set_generators(states[rank])
            value = loss(model, batch(index * world + rank))
            (value / recipe.num_micro_steps).backward()
            trained.losses.append(value.detach().clone())
            states[rank] = _generators()
        if exchanges_each or is_last:
            for name, mean in means_of(models, reverses=reverses).items():
                sums[name] = sums[name] + mean if name in sums else mean
        if is_last:
            for model, optimizer in zip(models, optimizers, strict=True):
                for name, parameter in model.named_parameters():
                    # The fused kernels of torch take gradients in the order of the parameters' memory.
                    parameter.grad = torch.empty_like(parameter).copy_(sums[name]) if name in sums else None
                pieces = None if bounds is None else {model.get_parameter(name): each for name, each in bounds.items()}
                norm = optimizer.step(recipe.max_norm, pieces)
                optimizer.zero_grad()
            trained.norms += [] if norm is None else [norm.clone()]
            sums = {}
    _collect(models[0], optimizers[0], trained)
    return trained


def _generators() -> list[Tensor]:
    """Return the states of the generators, the CPU's first, then that of the accelerator, if there is one."""
    module = torch.get_device_module()
    return [torch.get_rng_state(), *([module.get_rng_state()] if torch.accelerator.is_available() else [])]


def _set_generators(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module().set_rng_state(state)


def means_of(models: list[nn.Module], *, reverses: bool = False) -> dict[str, Tensor]:
    """Return the mean gradients of all ``models`` by name, whose own are gone then."""
    means = {}
    for name, first in models[0].named_parameters():
        given = [model.get_parameter(name).grad for model in models]
        if any(gradient is not None for gradient in given):
            dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
            total = torch.zeros(first.shape, dtype=dtype, device=first.device)
            for gradient in reversed(given) if reverses else given:
                total = total if gradient is None else total + gradient.to(dtype)
            means[name] = (total * torch.tensor(1 / len(models), dtype=dtype)).to(first.dtype)
        for model in models:
            model.get_parameter(name).grad = None
    return means


def _collect(model: nn.Module, optimizer: MasterAdamW, trained: Trained) -> None:
    trained.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        trained.parameters[name] = parameter.detach().clone()
        if parameter not in optimizer.masters:
            continue
        master = optimizer.masters[parameter]
        trained.masters[name] = master.detach().clone()
        if parameter.dtype == torch.bfloat16:
            trained.cast.add(name)
        if optimizer.num_updates[master]:
            state = optimizer.optimizer.state[master]
            keep_moments(trained, name, state)
            trained.num_updates[name] = optimizer.num_updates[master]


def keep_moments(trained: Trained, name: str, state: dict[str, Any]) -> None:
    """Keep copies of the moments in one parameter's ``state``; a momentum buffer is an ``exp_avg``."""
    for kept, moments in ((trained.exp_avg, ("exp_avg", "momentum_buffer")), (trained.exp_avg_sq, ("exp_avg_sq",))):
        for moment in moments:
            if state.get(moment) is not None:
                kept[name] = state[moment].clone()
