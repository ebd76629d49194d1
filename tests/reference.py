"""Plain PyTorch training in memory, with the numerics that tiered promises; imports nothing of tiered.

fp32 parameters are trained by ``torch.optim.AdamW(fused=True)``. A bf16 parameter has an fp32 master, which starts from
the value before the cast: its gradient is ``p.grad.float()`` after bf16 accumulation, clipped in fp32, and
``p.copy_(master)`` follows the update. A parameter without a gradient is left alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MasterAdamW", "Recipe", "Trained", "train"]


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


class MasterAdamW:
    """Fused AdamW over the fp32 masters of a model, which is cast to ``param_dtype`` here (buffers never are)."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.masters: dict[nn.Parameter, nn.Parameter] = {}  # in model.parameters() order; fp32 ones are their own
        for parameter in model.parameters():
            original = parameter.detach()
            if recipe.param_dtype is not None and parameter.is_floating_point():
                parameter.data = original.to(recipe.param_dtype)
            if not parameter.requires_grad:
                continue
            is_master = parameter.dtype != torch.bfloat16
            self.masters[parameter] = parameter if is_master else nn.Parameter(original.float().clone())
        groups = [
            group | {"params": [self.masters[p] for p in group["params"] if p in self.masters]}
            for group in recipe.groups(model)
        ]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **recipe.adamw)

    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Update every parameter that has a gradient; return the norm before clipping, if asked to clip."""
        for parameter, master in self.masters.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        norm = None if max_norm is None else nn.utils.clip_grad_norm_(self.masters.values(), max_norm)
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
        if master is not parameter:
            trained.cast.add(name)
        if master in optimizer.optimizer.state:
            state = optimizer.optimizer.state[master]
            trained.exp_avg[name] = state["exp_avg"].clone()
            trained.exp_avg_sq[name] = state["exp_avg_sq"].clone()
            trained.num_updates[name] = int(state["step"])
