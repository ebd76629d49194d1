"""What a drawn program is made of: a model, an optimizer, and the settings of tiered."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zero.drawn.models import Make, draw_model

__all__ = ["Plan", "draw_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a program is made of, but for the order of what its loop does."""

    seed: int
    make: Make
    width: int
    num_rows: int
    num_times: int
    num_steps: int
    param_dtype: torch.dtype | None
    optimizer: str
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]  # of each, the hyperparameters of its own
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    with_scaler: bool
    construct: bool
    durable: bool
    engine: str
    update: str
    unit: str
    hold: str | int
    activations: Any
    budget: float  # of the smallest
    stage: int

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, fp32 (rows, times, width)."""
        shape = 2, self.num_rows, self.num_times, self.width
        both = torch.randn(shape, generator=torch.Generator().manual_seed(index + 1000 * self.seed))
        return both[0], both[1]

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the groups: each parameter in one, a few frozen ones too."""
        rng = random.Random(self.seed)
        groups: list[dict[str, Any]] = [{"params": [], **copy.deepcopy(options)} for options in self.groups]
        for parameter in model.parameters():
            if parameter.requires_grad or rng.random() < 0.3:
                rng.choice(groups)["params"].append(parameter)
        return [group for group in groups if group["params"]]

    def scaler_options(self) -> dict[str, Any]:
        return {"init_scale": 1000.0 / 3, "growth_factor": 1.7, "growth_interval": 2}


def _hyperparameters(rng: random.Random, optimizer: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {"lr": rng.choice([0.1, 1e-2, 3e-3, 0.0]), "weight_decay": rng.choice([0.0, 0.05, 0.3])}
    if optimizer == "SGD":
        drawn["momentum"] = rng.choice([0.0, 0.5, 0.9])
        drawn["nesterov"] = drawn["momentum"] > 0 and rng.random() < 0.3
        drawn["dampening"] = 0.0 if drawn["nesterov"] else rng.choice([0.0, 0.1])
    else:
        drawn["betas"] = rng.choice([(0.9, 0.99), (0.8, 0.9), (0.0, 0.5)])
    if optimizer != "Lion":
        drawn["maximize"] = rng.random() < 0.1
    return drawn


_STATES = ("others", "batch", "sometimes", "buffered", "spectral_norm")
"""Kinds of blocks that go by numbers of numpy and Python or write buffers: a second forward changes their bits."""


def draw_plan(rng: random.Random, seed: int) -> Plan:
    """Draw everything; small models, often the smallest budget."""
    make, width = draw_model(rng)
    optimizer = rng.choice(["AdamW", "AdamW", "SGD", "Lion"])
    update, durable = rng.choice(["step", "backward", "auto"]), rng.random() < 0.6
    words = ["keep", "recompute", "swap", "auto"]
    if any(repr(state) in repr(make) for state in _STATES):
        words[1] = words[3] = "keep"
    schedules = torch.optim.lr_scheduler
    return Plan(
        seed=seed,
        make=make,
        width=width,
        num_rows=rng.choice([1, 2, 3]),
        num_times=rng.choice([1, 2, 5]),
        num_steps=rng.randint(2, 7),
        param_dtype=rng.choice([None, None, torch.bfloat16, torch.bfloat16, torch.float64]),
        optimizer=optimizer,
        defaults=_hyperparameters(rng, optimizer),
        groups=[_hyperparameters(rng, optimizer) if rng.random() < 0.5 else {} for _ in range(rng.randint(1, 3))],
        scheduler=rng.choice(
            [
                None,
                lambda o: schedules.CosineAnnealingLR(o, T_max=5),
                lambda o: schedules.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
                lambda o: schedules.SequentialLR(
                    o, [schedules.ConstantLR(o, 0.5, 2), schedules.ExponentialLR(o, 0.9)], [2]
                ),
            ]
        ),
        with_scaler=update != "backward" and rng.random() < 0.2,
        construct=rng.random() < 0.6,
        durable=durable,
        engine=rng.choice(["threads", "uring", "mmap", "aiofiles"] + ["memory"] * (not durable)),
        update=update,
        unit=rng.choice(["default", "leaves", "some", "blocks"]),
        hold=rng.choice(["auto", 0]),
        activations=rng.choice([*words, lambda name, _: random.Random(f"{seed}/{name}").choice(words)]),
        budget=rng.choice([1.0, 1.0, 1.1, 2.0, math.inf]),
        stage=rng.choice([1, 2, 3]),
    )
