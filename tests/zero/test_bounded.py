"""All that tiered keeps in DRAM stays under the budget, down to the smallest one that the formula allows."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.models import CASES, Case
from tests.reference import Recipe
from tests.rigs.available import off
from tests.rigs.cgroup import memory_group
from tests.zero.training import (
    assert_same,
    budget_named_in,
    debug_store,
    reference,
    smallest_budget,
    start,
)
from tiered.bytes.arena import Arena
from tiered.errors import CapacityError
from tiered.units import KiB, MiB, round_up
from tiered.zero.gradients.stand_in import StandIn

PAGE = 4096


class Layers(nn.Module):
    """Linear layers of the given sizes, without biases, each a unit, around a root with one parameter."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shapes[0][0]))
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.scale.dtype) * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


@pytest.fixture(scope="module", autouse=True)
def many_buckets() -> None:
    """Here buckets are as large as they are for users."""


def layers_case(*shapes: tuple[int, int]) -> Case:
    return Case(
        lambda: Layers(*shapes),
        lambda index: (torch.randn(2, shapes[0][0], generator=torch.Generator().manual_seed(index)),),
    )


def formula(shapes: list[tuple[int, int]], param_dtype: torch.dtype | None) -> int:
    """Return ``Layers``'s smallest budget: root + 2 largest units + 3 buckets + one tile of the update.

    Buckets hold an eighth of the largest unit, rounded up to 1,024 elements, but 16 Ki at least where a unit has as
    many; a tile needs three fp32 copies, or six of at most 128 Ki elements and nine of 4,096, which a format that
    rounds works in.
    """
    itemsize, state_itemsize = (2, 10) if param_dtype is not None else (4, 8)
    units = sorted((n * m for n, m in shapes), reverse=True)
    bucket_numel = min(units[0], max(1 << 14, round_up(-(-units[0] // 8), 1024)))

    def with_gradient(numel: int) -> int:
        return 2 * round_up(round_up(numel * itemsize, 64), PAGE)

    buckets = 3 * round_up(bucket_numel * state_itemsize, PAGE)
    rounding = 24 * min(bucket_numel, 1 << 17) + 36 * min(bucket_numel, 4096)
    tile = round_up(max(12 * bucket_numel, rounding), PAGE)
    return with_gradient(shapes[0][0]) + with_gradient(units[0]) + with_gradient(units[1]) + buckets + tile


SHAPES: dict[str, list[tuple[int, int]]] = {
    "equal_units": [(64, 64)] * 6,
    "unequal_units": [(64, 96), (96, 32), (32, 256), (256, 40), (40, 64)],
    "one_large_unit": [(128, 128), (128, 512), (512, 128), (128, 16)],
    "a_hundred_kilobytes_each": [(160, 160)] * 4,
}


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_smallest_budget_is_the_formula_and_trains(
    name: str, param_dtype: torch.dtype | None, update: str, tmp_path: Path
) -> None:
    case, recipe = layers_case(*SHAPES[name]), Recipe(param_dtype=param_dtype)
    expected = formula(SHAPES[name], param_dtype)
    assert smallest_budget(case, recipe, update, tmp_path / "probe") == expected
    with debug_store(tmp_path / "store", expected, durable=False) as store:
        assert_same(start(case, recipe, store, update).run(), reference(case, recipe))


@pytest.mark.parametrize("name", ["gpt", "cnn", "lstm", "odd_sizes", "nested_units", "units_of_one_layer"])
def test_a_page_below_the_smallest_budget_is_refused_with_the_number(name: str, tmp_path: Path) -> None:
    nbytes = smallest_budget(CASES[name], Recipe(), "step", tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes - 1, durable=False) as store:
        with pytest.raises(CapacityError) as refusal:
            start(CASES[name], Recipe(), store)
    assert budget_named_in(refusal.value) == nbytes
    assert str(nbytes - 1) in str(refusal.value)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_views_of_weights_that_are_kept_over_steps_are_told_by_their_unit_at_once(update: str, tmp_path: Path) -> None:
    case, recipe = layers_case(*SHAPES["equal_units"]), Recipe()
    nbytes = smallest_budget(case, recipe, update, tmp_path / "probe")
    kept: list[Tensor] = []
    with debug_store(tmp_path / "store", nbytes) as store:
        session = start(case, recipe, store, update)
        store.commit()
        keep = lambda layer, args: kept.append(layer.weight.detach()[0])  # noqa: E731
        hooks = [layer.register_forward_pre_hook(keep) for layer in session.model.layers]
        with pytest.raises(CapacityError, match=r"'model/parameters/layers\.\d'.*kept alive by tensors made from past"):
            session.run()
        kept.clear()
        for hook in hooks:
            hook.remove()
        store.rollback()
        session.run_step(0)


def test_what_is_held_of_many_small_units_counts_in_whole_pages(tmp_path: Path) -> None:
    case = layers_case(*[(16, 16)] * 48)
    with debug_store(tmp_path, 320 * KiB, durable=False) as store:
        session = start(case, Recipe(num_steps=2), store)
        assert_same(session.run(), reference(case, session.recipe))


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_of_eight_budgets(param_dtype: torch.dtype | None, update: str, tmp_path: Path) -> None:
    """The gradients alone (2 or 4 bytes per parameter of 12) are larger than the budget: under "step" they stream."""
    shapes = [(192, 192)] * 40
    case, recipe = layers_case(*shapes), Recipe(param_dtype=param_dtype, num_steps=3)
    state_nbytes = 12 * sum(n * m for n, m in shapes)
    nbytes = state_nbytes // 8
    arena = Arena(nbytes)
    with tiered.Store(tmp_path, dram=nbytes, durable=False, _arena=arena) as store:
        session = start(case, recipe, store, update)
        for step in range(recipe.num_steps):
            session.run_step(step)
        assert arena.peak_nbytes <= nbytes
        assert_same(session.collect(), reference(case, recipe))
    assert arena.leased_nbytes == 0


@pytest.mark.parametrize("accumulated", [1, 3])
def test_clipping_streams_gradients_that_do_not_fit(accumulated: int, tmp_path: Path) -> None:
    case = layers_case(*[(192, 192)] * 40)
    recipe = Recipe(param_dtype=torch.bfloat16, num_steps=2, max_norm=1e-3, num_micro_steps=accumulated)
    nbytes = smallest_budget(case, recipe, "step", tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes, durable=False) as store:
        assert_same(start(case, recipe, store).run(), reference(case, recipe))


def test_torchs_own_clipping_reads_gradients_on_nvme_at_the_smallest_budget(tmp_path: Path) -> None:
    case, recipe = layers_case(*[(192, 192)] * 40), Recipe(max_norm=0.01)
    nbytes = smallest_budget(case, recipe, "step", tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes, durable=False) as store:
        session = start(case, recipe, store)
        for step in range(recipe.num_steps):
            loss = case.loss(session.model, case.batch(step))
            loss.backward()
            session.trained.losses.append(loss.detach().clone())
            parameters = list(session.model.parameters())
            assert any(isinstance(parameter.grad, StandIn) for parameter in parameters)
            session.trained.norms.append(nn.utils.clip_grad_norm_(parameters, recipe.max_norm))
            session.optimizer.step()
            assert all(parameter.grad is None for parameter in parameters)
        assert_same(session.collect(), reference(case, recipe))


# -- a process of its own ------------------------------------------------------------------------------------------

NUM_UNITS, WIDTH = 11, 4096  # bench/scale.py has larger ones
DRAM = 256 * MiB
LARGEST_GRADIENT = 2 * WIDTH**2
ALLOWANCE = 32 * MiB
PATIENCE_S = 800  # 14 GB go to the drive and from it, which may be a slow one that others use, too


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Train a state of more than eight budgets in a process of its own, inside a memory cgroup of the allowed size.

    A shell stands between: ``ru_maxrss`` starts with what the parent of an exec had in memory.
    """
    directory = tmp_path_factory.mktemp("large")
    arguments = f"{directory}/store {DRAM} {NUM_UNITS} {WIDTH}"
    command = f"{sys.executable} -m tests.zero.large_training {arguments}; exit $?"
    with memory_group() as group:
        shell = f"echo $$ > {group}/cgroup.procs && {command}" if isinstance(group, Path) else command
        process = subprocess.Popen(
            ["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            before = json.loads(process.stdout.readline())
            bound = sum(before.values()) + DRAM + NUM_UNITS * 3 * 2 * WIDTH + 2 * LARGEST_GRADIENT + ALLOWANCE
            if isinstance(group, Path):
                (group / "memory.limit_in_bytes").write_text(str(bound))
            out, _ = process.communicate("go\n", timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.returncode == 0, f"exit status {process.returncode} under a bound of {bound} bytes"
        result = json.loads(out.splitlines()[-1]) | before | {"bound": bound}
        if isinstance(group, Path):
            result["group_peak_bytes"] = int((group / "memory.max_usage_in_bytes").read_text())
            result["group_limit_bytes"] = int((group / "memory.limit_in_bytes").read_text())
        else:
            result["no_group"] = group
        yield result


def test_a_state_of_eight_budgets_stays_in_the_budget(large_run: dict[str, Any]) -> None:
    """Own memory <= after a step of PyTorch + budget + what the reference saves + 2 x the largest gradient + 32 MiB.

    And what plain PyTorch takes for a moment to train one layer, which is nothing where the processor computes in bf16.
    Own memory at its peak is ru_maxrss without the most pages of libraries that the process had.
    """
    assert 12 * large_run["params"] > 8 * DRAM
    assert large_run["arena_peak_bytes"] <= DRAM
    bound = DRAM + large_run["saved_bytes"] + 2 * LARGEST_GRADIENT + ALLOWANCE
    bound += large_run["own_bytes"] + large_run["plain_bytes"]
    assert large_run["saved_bytes"] < 2 * MiB
    assert large_run["peak_rss_bytes"] - large_run["most_library_bytes"] <= bound
    assert len(set(large_run["losses"])) == len(large_run["losses"])
    assert all(0 < loss < 1 for loss in large_run["losses"])


def test_a_state_of_eight_budgets_runs_in_a_cgroup_of_that_size(large_run: dict[str, Any]) -> None:
    if "no_group" in large_run:
        pytest.skip(off("memory cgroup", large_run["no_group"]))
    assert large_run["group_limit_bytes"] <= large_run["bound"] < large_run["group_limit_bytes"] + 4 * KiB
    assert large_run["group_peak_bytes"] <= large_run["group_limit_bytes"]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_smallest_budget_counts_what_is_trained_whatever_the_optimizer_is_given(update: str) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(150_000, 32)
            self.table.weight.requires_grad_(False)
            self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.table(x)).float().square().mean()

    def run(dram: int) -> None:
        with tiered.Store(engine="memory", dram=dram) as store:
            model = tiered.shard(Frozen(), store, param_dtype=torch.bfloat16)
            optimizer = tiered.AdamW(model.parameters(), lr=1e-3, update=update)  # the frozen ones, too
            for _ in range(2):
                model(torch.arange(8)).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(CapacityError) as caught:
        run(8 * MiB)
    smallest = budget_named_in(caught.value)
    run(smallest)
    with pytest.raises(CapacityError, match=f"{smallest}"):
        run(smallest - 4096)
