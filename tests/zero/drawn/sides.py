"""One drawn program on two sides, which do the same: plain torch in memory, and tiered."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tiered
from tests.bytes.fresh_arena import FreshArena
from tests.reference import OPTIMIZERS
from tests.zero.drawn.plan import Plan
from tests.zero.training import squeeze
from tiered.errors import CapacityError

__all__ = ["Plain", "Side", "Tiered"]

_LARGEST_NBYTES = 64 << 20


class Side:
    """What a loop uses: a model, an optimizer, and perhaps a scheduler and a scaler."""

    model: nn.Module
    optimizer: Any  # has the param groups that the loop and the scheduler change
    stepped: Any  # the one that a scaler is given
    scheduler: Any = None
    scaler: Any = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def step(self) -> None:
        """Step, as the loop would."""
        if self.scaler is None:
            self.stepped.step()
        else:
            self.scaler.step(self.stepped)
            self.scaler.update()

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}


class _Masters:
    """Plain torch's optimizer over fp32 masters, with the model's own parameters in its groups for a scaler."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.masters: dict[Tensor, Tensor] = {}
        for parameter in model.parameters():
            original = parameter.detach()
            if plan.param_dtype is not None and parameter.is_floating_point():
                parameter.data = original.to(plan.param_dtype)
            is_cast = parameter.dtype == torch.bfloat16 and parameter.requires_grad
            self.masters[parameter] = nn.Parameter(original.float().clone()) if is_cast else parameter
        groups = [g | {"params": [self.masters[p] for p in g["params"]]} for g in plan.param_groups(model)]
        self.inner = OPTIMIZERS[plan.optimizer](groups, **plan.defaults)
        self.owners = {master: parameter for parameter, master in self.masters.items()}
        self.num_updates: Counter[Tensor] = Counter()
        self.is_clipped = False  # the masters have the gradients already

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group | {"params": [self.owners[m] for m in group["params"]]} for group in self.inner.param_groups]

    def take_gradients(self) -> None:
        if not self.is_clipped:
            for parameter, master in self.masters.items():
                if master is not parameter:
                    master.grad = None if parameter.grad is None else parameter.grad.float()
        self.is_clipped = True

    def step(self) -> None:
        """Update one parameter after the other: torch's fused SGD cannot begin the momentum of some in a step."""
        self.take_gradients()
        gradients = {m: m.grad for group in self.inner.param_groups for m in group["params"] if m.grad is not None}
        for master in gradients:
            master.grad = None
        for master, gradient in gradients.items():
            master.grad = gradient
            self.inner.step()
            master.grad = None
            with torch.no_grad():
                self.owners[master].copy_(master)
        self.num_updates.update(gradients.keys())
        self.drop()

    def drop(self) -> None:
        self.is_clipped = False
        for parameter, master in self.masters.items():
            parameter.grad = master.grad = None


class Plain(Side):
    """PyTorch alone; a commit is a copy of everything."""

    stepped: _Masters

    def begin(self) -> None:
        """Build everything."""
        self.model = self.plan.make()
        self.stepped = _Masters(self.plan, self.model)
        self.optimizer = self.stepped.inner
        self.scheduler = None if self.plan.scheduler is None else self.plan.scheduler(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", **self.plan.scaler_options()) if self.plan.with_scaler else None

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        self.stepped.take_gradients()
        return nn.utils.clip_grad_norm_(list(self.stepped.masters.values()), max_norm, norm_type).clone()

    def zero_grad(self, how: str) -> None:
        gradients = {p: p.grad for p in self.model.parameters()}
        self.stepped.drop()
        for parameter, gradient in gradients.items():
            if how == "zeros" and gradient is not None:
                parameter.grad = gradient.detach().zero_()

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def readable(self, _: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def wrote(self, parameter: Tensor) -> None:
        """What is written is the master too."""
        self.stepped.masters[parameter].data.copy_(parameter.data)

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def state(self) -> dict[int, dict[str, Tensor]]:
        """Return what a state dict of tiered's has: moments, step counts and, of bf16 parameters, masters."""
        found = {}
        for index, master in enumerate(m for group in self.optimizer.param_groups for m in group["params"]):
            own = {n: v.clone() for n, v in self.optimizer.state.get(master, {}).items() if isinstance(v, Tensor)}
            own["step"] = torch.tensor(float(self.stepped.num_updates[master]))
            if self.stepped.owners[master] is not master:
                own["master"] = master.detach().clone()
            if self.stepped.num_updates[master] or "master" in own:
                found[index] = own
        return found

    def reload(self) -> None:
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def commit(self, state: dict[str, Any], wait: bool) -> None:
        others = [each for each in (self.optimizer, self.scheduler, self.scaler) if each is not None]
        self.committed = (
            copy.deepcopy(
                (
                    state,
                    [tensor.detach() for tensor in self._tensors()],
                    [each.state_dict() for each in others],
                    list(self.stepped.num_updates.values()),
                )
            ),
            list(self.stepped.num_updates),
        )

    def rollback(self) -> dict[str, Any]:
        (state, tensors, others, counts), masters = self.committed
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), tensors, strict=True):
                tensor.copy_(value)
        mine = [each for each in (self.optimizer, self.scheduler, self.scaler) if each is not None]
        for each, value in zip(mine, others, strict=True):
            each.load_state_dict(copy.deepcopy(value))
        self.stepped.num_updates = Counter(dict(zip(masters, counts, strict=True)))
        self.stepped.drop()
        return state

    def resume(self, update: str) -> dict[str, Any]:
        """A new process."""
        self.model.train()
        return self.rollback()

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (master for parameter, master in self.stepped.masters.items() if master is not parameter)


class Tiered(Side):
    """The same through a store in ``place``, whose arena poisons what it gets back."""

    store: tiered.Store | None = None

    def __init__(self, plan: Plan, place: Path) -> None:
        super().__init__(plan)
        self.update, self.nbytes, self.num = plan.update, 1 << 14, 0
        self._place = place

    def begin(self) -> None:
        """Build everything with the plan's share of the smallest budget, which refusals name."""
        random_state = torch.get_rng_state()
        while True:
            try:
                return self._build()
            except CapacityError as error:
                self.close()
                self.num += 1
                torch.set_rng_state(random_state)
                named = re.search(r"smallest working budget is ([\d,_]+) bytes", str(error))
                self.nbytes *= 2
                if named is not None:
                    smallest = int(named[1])
                    self.nbytes = int(min(smallest * self.plan.budget, max(smallest, _LARGEST_NBYTES)))

    def _build(self) -> None:
        plan = self.plan
        arena = FreshArena(self.nbytes)
        directory = self._place / str(self.num)
        self.store = store = tiered.Store(
            directory, dram=self.nbytes, _arena=arena, durable=plan.durable, engine=plan.engine
        )
        with tiered.construct(store) if plan.construct else contextlib.nullcontext():
            model = plan.make()
        self.model = tiered.shard(
            model, store, unit=self._unit(), stage=plan.stage, param_dtype=plan.param_dtype, hold=plan.hold,
            activations=plan.activations,
        )  # fmt: skip
        kind = getattr(tiered, plan.optimizer)
        self.optimizer = self.stepped = kind(plan.param_groups(model), update=self.update, **plan.defaults)
        self.scheduler = None if plan.scheduler is None else plan.scheduler(self.optimizer)
        self.scaler = tiered.GradScaler(**plan.scaler_options()) if plan.with_scaler else None
        if plan.durable:
            for name in ("scheduler", "scaler"):
                if getattr(self, name) is not None:
                    store.register(name, getattr(self, name))

    def _unit(self) -> Callable[[str, nn.Module], bool] | None:
        rules: dict[str, Any] = {
            "default": None,
            "leaves": lambda _, module: any(True for _ in module.parameters(recurse=False)),
            "some": lambda name, _: random.Random(f"{self.plan.seed}/{name}").random() < 0.4,
            "blocks": lambda name, _: name.count(".") == 2 or name in ("first", "last"),
        }
        return rules[self.plan.unit]

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        return tiered.clip_grad_norm_(self.model, max_norm, norm_type).clone()

    def zero_grad(self, how: str) -> None:
        if how == "model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=how != "zeros")

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        return tiered.accumulate(self.model)

    def readable(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return tiered.unsharded(module)

    def wrote(self, parameter: Tensor) -> None:
        """Tiered sees it."""

    def parameters(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {name: state[name] for name, _ in self.model.named_parameters()}

    def state(self) -> dict[int, dict[str, Tensor]]:
        found = self.optimizer.state_dict()["state"]
        fresh = {"step", "master"}  # of a parameter never updated; torch has no moments then
        return {i: {n: t for n, t in own.items() if own["step"] or n in fresh} for i, own in found.items()}

    def reload(self) -> None:
        weights, state = self.model.state_dict(), self.optimizer.state_dict()
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)

    def commit(self, state: dict[str, Any], wait: bool) -> None:
        assert self.store is not None
        self.store.commit(state, wait=wait)

    def rollback(self) -> dict[str, Any]:
        assert self.store is not None
        self.store.rollback()
        return self.store.resume()

    def resume(self, update: str) -> dict[str, Any]:
        self.close()
        self.update = update
        self._build()
        assert self.store is not None
        return self.store.resume()

    def squeeze(self) -> None:
        """Have all that can go swapped out."""
        assert self.store is not None
        squeeze(self.store)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None
