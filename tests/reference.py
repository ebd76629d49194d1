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

__all__ = ["Lion", "MasterAdamW", "Recipe", "Trained", "train"]


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

    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; return the norm before clipping, if asked to clip."""
        gradients = {
            parameter: parameter.grad.float() if parameter.dtype == torch.bfloat16 else parameter.grad
            for parameter in self.masters
            if parameter.grad is not None
        }
        norm = None if max_norm is None else _clip(list(gradients.values()), max_norm)
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


def _clip(gradients: list[Tensor], max_norm: float) -> Tensor:
    """Clip ``gradients`` where they are, by torch's own function; return their norm."""
    holders = [torch.empty_like(gradient) for gradient in gradients]
    for holder, gradient in zip(holders, gradients, strict=True):
        holder.grad = gradient
    return nn.utils.clip_grad_norm_(holders, max_norm)


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
