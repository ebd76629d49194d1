"""The README's training loop through tiered, for comparison with ``tests/reference.py``."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiered
from tests.bytes.fresh_arena import FreshArena
from tests.models import CASES, Case
from tests.reference import Recipe, Trained, keep_moments, train
from tiered.errors import CapacityError
from tiered.store.residency.swap_in_out import SwapInOut
from tiered.zero import layout
from tiered.zero.layout import divide_into_units

__all__ = [
    "ROOMY_NBYTES", "SEED", "Session", "assert_same", "checkpointed", "debug_store", "reference", "smallest_budget",
    "start",
]  # fmt: skip

ROOMY_NBYTES = 32 << 20
SEED = 7


@contextmanager
def debug_store(directory: Path, nbytes: int = ROOMY_NBYTES, **options: Any) -> Iterator[tiered.Store]:
    """Open a store whose arena poisons what is released and never leases an address again."""
    arena = FreshArena(nbytes)
    with tiered.Store(directory, dram=nbytes, _arena=arena, **options) as store:
        yield store
    assert arena.peak_nbytes <= nbytes


@dataclass(slots=True)
class Session:
    """A model in training: what a user's script holds."""

    case: Case
    recipe: Recipe
    update: str
    store: tiered.Store
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    trained: Trained
    is_squeezed: bool = False  # drive everything out of DRAM after each forward and after each step

    def squeeze(self) -> None:
        """Have all that can go swapped out."""
        squeeze(self.store)

    def run_step(self, step: int) -> None:
        """Train one step."""
        num = self.recipe.num_micro_steps
        for micro_step in range(num):
            adds_only = self.update == "backward" and micro_step < num - 1
            with tiered.accumulate(self.model) if adds_only else nullcontext():
                loss = self.case.loss(self.model, self.case.batch(step * num + micro_step))
                if self.is_squeezed:
                    self.squeeze()
                (loss / num).backward()
            self.trained.losses.append(loss.detach().clone())
            del loss
        if self.recipe.max_norm is not None:
            self.trained.norms.append(tiered.clip_grad_norm_(self.model, self.recipe.max_norm).clone())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.recipe.between is not None:
            self.trained.seen += self.recipe.between(self.model, step)
        if self.is_squeezed:
            self.squeeze()

    def run(self) -> Trained:
        """Train all steps and return what the reference returns."""
        for step in range(self.recipe.num_steps):
            self.run_step(step)
        return self.collect()

    def collect(self) -> Trained:
        """Copy parameters, buffers and the optimizer's state out of the store."""
        state = self.model.state_dict()
        self.trained.parameters = {name: state[name] for name, _ in self.model.named_parameters()}
        self.trained.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        for index, values in self.optimizer.state_dict()["state"].items():
            if values["step"]:
                keep_moments(self.trained, order[index], values)
                self.trained.num_updates[order[index]] = int(values["step"])
            if "master" in values:
                self.trained.masters[order[index]] = values["master"]
        return self.trained


def squeeze(store: tiered.Store) -> None:
    """Have all that can go swapped out, by asking for all the memory there is, piece by piece."""
    working_set, buffers = store.working_set, []
    with contextlib.suppress(CapacityError):
        while True:
            buffers.append(working_set.reserve(working_set.budget_bytes // 64))
    for buffer in buffers:
        working_set.unreserve(buffer)


def start(
    case: Case,
    recipe: Recipe,
    store: tiered.Store,
    update: str = "step",
    *,
    hold: Any = "auto",
    activations: Any = "auto",
    seed: int = SEED,
    **options: Any,
) -> Session:
    """Build, shard with ``options``, and get ready to train; the seeds are those of the reference."""
    torch.manual_seed(seed)
    with tiered.construct(store):
        model = case.build()
    options |= {"param_dtype": recipe.param_dtype, "hold": hold, "activations": activations}
    model = tiered.shard(model, store, unit=case.unit, **options)
    optimizer = getattr(tiered, recipe.optimizer)(recipe.groups(model), update=update, **recipe.adamw)
    scheduler = None if recipe.schedule is None else recipe.schedule(optimizer)
    if scheduler is not None:
        store.register("scheduler", scheduler)
    torch.manual_seed(seed + 1)
    return Session(case, recipe, update, store, model, optimizer, scheduler, Trained())


_references: dict[tuple[Any, ...], Trained] = {}


def reference(case: Case, recipe: Recipe, seed: int = SEED) -> Trained:
    """Train in memory, by plain PyTorch: a case of the zoo once, by a recipe that no test has made for itself.

    How a sum is divided among threads shows in its bits.
    """
    key = case, str(recipe), seed, torch.get_num_threads()
    if case not in CASES.values() or "<locals>" in str(recipe):
        return _train(case, recipe, seed)
    if key not in _references:
        _references[key] = _train(case, recipe, seed)
    return replace(_references[key])


def _train(case: Case, recipe: Recipe, seed: int) -> Trained:
    torch.manual_seed(seed)
    model = case.build()
    torch.manual_seed(seed + 1)
    return train(model, case.batch, case.loss, recipe)


def checkpointed(case: Case) -> Case:
    """Return ``case`` with torch's checkpoint around the forward of each unit that lies in no other."""

    def build() -> nn.Module:
        model = case.build()
        modules = divide_into_units(model, case.unit)
        for name, module in modules.items():
            if not any(name.startswith(f"{other}.") for other in modules):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        return model

    return replace(case, build=build)


def reference_of(name: str, param_dtype: torch.dtype | None, **options: Any) -> Trained:
    """Return the reference of a case of the zoo by the recipe of ``options``."""
    return reference(CASES[name], Recipe(param_dtype=param_dtype, **options))


_smallest_budgets: dict[tuple[Any, ...], int] = {}


def smallest_budget(case: Case, recipe: Recipe, update: str, directory: Path, **options: Any) -> int:
    """Return the smallest budget, in bytes, as the refusal of one that is too small names it.

    Asked for once, whatever is trained: what a model, its groups and its optimizer need is all that a refusal knows of.
    """
    built = case.build, case.unit, recipe.param_dtype, recipe.param_groups, recipe.optimizer, str(recipe.adamw)
    key = (*built, update, layout.LEAST_BUCKET_NUMEL, *sorted(options.items()))
    if key not in _smallest_budgets:
        _smallest_budgets[key] = _refused_budget(case, recipe, update, directory, **options)
    return _smallest_budgets[key]


def _refused_budget(case: Case, recipe: Recipe, update: str, directory: Path, **options: Any) -> int:
    for nbytes in (1 << shift for shift in range(13, 24)):  # below one parameter, the model is not even constructed
        with pytest.raises(CapacityError) as refusal:
            with debug_store(directory, nbytes, durable=False, **options) as store:
                start(case, recipe, store, update)
        if "smallest" in str(refusal.value):
            break
    return budget_named_in(refusal.value)


def budget_named_in(error: BaseException) -> int:
    """Return the number of bytes that a refusal names as the smallest working budget."""
    found = re.search(r"smallest working budget is ([\d,_]+) bytes", str(error))
    assert found is not None, f"the message names no smallest working budget: {error}"
    return int(found[1].replace(",", "").replace("_", ""))


def assert_same(trained: Trained, expected: Trained) -> None:
    """Assert that every bit is that of the reference; the message names the first few that differ."""
    for what in ("losses", "norms", "seen"):
        ours, theirs = getattr(trained, what), getattr(expected, what)
        assert len(ours) == len(theirs), f"{what}: {len(ours)} of {len(theirs)}"
        pairs = [(a.cpu(), b.cpu()) for a, b in zip(ours, theirs, strict=True)]
        different = [index for index, pair in enumerate(pairs) if not torch.equal(*pair)]
        assert not different, f"{what} differ at {different}: {ours} instead of {theirs}"
    assert trained.num_updates == expected.num_updates
    for what in ("parameters", "buffers", "exp_avg", "exp_avg_sq", "masters"):
        ours, theirs = getattr(trained, what), getattr(expected, what)
        if what == "masters":  # a parameter that is its own has none
            theirs = {name: master for name, master in theirs.items() if name in expected.cast}
        assert ours.keys() == theirs.keys(), what
        different = [name for name in theirs if not torch.equal(ours[name].cpu(), theirs[name].cpu())]
        assert not different, f"{what} differ: {different}"
        assert all(ours[name].dtype == theirs[name].dtype for name in theirs), what


@contextmanager
def counted_swaps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count by key how often its bytes were read into DRAM, on demand or ahead of need."""
    swaps: Counter[str] = Counter()
    begin_read = SwapInOut._swap_in

    def counting_begin_read(self: SwapInOut, entry: Any, *args: Any) -> Any:
        swaps[entry.name] += 1
        return begin_read(self, entry, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SwapInOut, "_swap_in", counting_begin_read)
        yield swaps
