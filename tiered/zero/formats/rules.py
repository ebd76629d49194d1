"""Update rules: the moments that an optimizer remembers of each parameter, and its arithmetic.

A rule works on plain fp32 (or fp64) tensors, a tile at a time. state_layout.py keeps parameters and moments between
steps, bucket_update.py moves them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tiered.errors import UsageError

__all__ = ["AdamWRule", "Hyperparameters", "LionRule", "Moment", "Rule", "SGDRule"]


class Moment(NamedTuple):
    """One value that a rule remembers per element, under the name that torch's state_dict has for it."""

    name: str
    is_positive: bool  # never below zero


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The frozen hyperparameters of one parameter in one step; ``step`` is its count after this update, from 1.

    ``begins``: no update before this one has made moments.
    """

    step: int
    values: Mapping[str, Any]
    begins: bool = False


class Rule(ABC):
    """The arithmetic of an optimizer."""

    name: str
    """The optimizer's name, as torch spells it."""

    moments: tuple[Moment, ...]
    """The values remembered per element; all are zero before the first update."""

    hyperparameters: tuple[str, ...]
    """The names of those that a step uses."""

    needs_work = False
    """Whether ``update`` uses its ``work``."""

    def freeze(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters of ``group`` that a step uses, as plain values.

        Raises UsageError for values that the rule was not made for.
        """
        values = {name: group[name] for name in self.hyperparameters}
        return {name: float(v) if name == "lr" or isinstance(v, torch.Tensor) else v for name, v in values.items()}

    def makes_moments(self, values: Mapping[str, Any]) -> bool:
        """Return whether an update with these frozen ``values`` makes or changes moments."""
        return True

    @abstractmethod
    def update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        moments: list[Sequence[torch.Tensor]],
        hyper: Hyperparameters,
        work: torch.Tensor | None = None,
    ) -> None:
        """Update each of ``parameters`` and its ``moments`` in place: (numel,) each, all of one dtype, fp32 or fp64.

        ``work``: scratch of the same dtype, with the elements of the largest, for a rule that needs it. ``gradients``
        may be overwritten where the rule says so.
        """


class AdamWRule(Rule):
    """AdamW as ``torch.optim.AdamW(fused=True)`` computes it."""

    name = "AdamW"
    moments = (Moment("exp_avg", False), Moment("exp_avg_sq", True))
    hyperparameters = ("lr", "betas", "eps", "weight_decay", "maximize")

    def update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        moments: list[Sequence[torch.Tensor]],
        hyper: Hyperparameters,
        work: torch.Tensor | None = None,
    ) -> None:
        """Do one fused AdamW update of all; ``gradients`` are kept."""
        values = hyper.values
        beta1, beta2 = values["betas"]
        torch._fused_adamw_(
            parameters, gradients, [each[0] for each in moments], [each[1] for each in moments], [],
            [_step_tensor(hyper.step, parameters[0].device)] * len(parameters),
            lr=values["lr"], beta1=beta1, beta2=beta2, weight_decay=values["weight_decay"], eps=values["eps"],
            amsgrad=False, maximize=values["maximize"],
        )  # fmt: skip


class SGDRule(Rule):
    """SGD as ``torch.optim.SGD(fused=True)`` computes it; it remembers a momentum buffer if made ``with_momentum``.

    ``weight_decay`` is added to the gradient, as torch does: it is not decoupled.
    """

    name = "SGD"
    hyperparameters = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

    def __init__(self, *, with_momentum: bool) -> None:
        self.moments = (Moment("momentum_buffer", False),) if with_momentum else ()

    def freeze(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters of ``group`` that a step uses; refuses momentum where none was laid out."""
        if group["momentum"] and not self.moments:
            raise UsageError(
                f"tiered.SGD was made without momentum and a group has momentum={group['momentum']} now; expected a"
                " momentum other than 0 when the optimizer is made, or none in every group"
            )
        return super().freeze(group)

    def makes_moments(self, values: Mapping[str, Any]) -> bool:
        """Updates with momentum do; the first of them makes the gradient the buffer, without dampening."""
        return bool(values["momentum"])

    def update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        moments: list[Sequence[torch.Tensor]],
        hyper: Hyperparameters,
        work: torch.Tensor | None = None,
    ) -> None:
        """Do one fused SGD update of all; ``gradients`` may be overwritten with the decayed ones."""
        values = hyper.values
        torch._fused_sgd_(
            parameters, gradients, [each[0] for each in moments] if values["momentum"] else [],
            weight_decay=values["weight_decay"], momentum=values["momentum"], lr=values["lr"],
            dampening=values["dampening"], nesterov=values["nesterov"], maximize=values["maximize"],
            is_first_step=hyper.begins,
        )  # fmt: skip


class LionRule(Rule):
    """Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms"): the sign of an interpolated momentum.

    With decay decoupled: p -= lr * decay * p; p -= lr * sign(beta1 * m + (1 - beta1) * g); m = beta2 * m +
    (1 - beta2) * g.
    """

    name = "Lion"
    moments = (Moment("exp_avg", False),)
    hyperparameters = ("lr", "betas", "weight_decay", "maximize")
    needs_work = True

    def update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        moments: list[Sequence[torch.Tensor]],
        hyper: Hyperparameters,
        work: torch.Tensor | None = None,
    ) -> None:
        """Do one Lion update of each; ``gradients`` are kept."""
        assert work is not None
        values = hyper.values
        beta1, beta2 = values["betas"]
        sign = -1 if values["maximize"] else 1
        for parameter, gradient, (exp_avg,) in zip(parameters, gradients, moments, strict=True):
            update = work[: parameter.numel()]
            torch.mul(exp_avg, beta1, out=update)
            update.add_(gradient, alpha=sign * (1 - beta1)).sign_()
            parameter.mul_(1 - values["lr"] * values["weight_decay"]).add_(update, alpha=-values["lr"])
            exp_avg.mul_(beta2).add_(gradient, alpha=sign * (1 - beta2))


@functools.lru_cache(maxsize=4)  # of a step, every piece needs the same; torch only reads it
def _step_tensor(step: int, device: torch.device) -> torch.Tensor:
    return torch.full((), float(step), dtype=torch.float32, device=device)
