"""Every wait of the tier on the device is needed: without any one of them a training run shows a race.

The waits are found in the source by name, so that a new one must be shown to be needed as well.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tiered
from tests.accelerator.training import ROOMY_NBYTES, case_on, smallest_device_memory
from tests.reference import Recipe
from tests.zero.training import start
from tiered.tiers.accelerator import AcceleratorTier
from tiered.zero.activations import swapped

MODULES = ("device_memory", "copies", "accelerator", "update_place")
ROOT = Path(tiered.__file__).parent / "tiers"


def waits() -> Iterator[tuple[str, str, str, int]]:
    """Yield module, class, method and number of each ``wait_event`` of the tier."""
    for module in MODULES:
        for cls in ast.parse((ROOT / f"{module}.py").read_text()).body:
            for method in cls.body if isinstance(cls, ast.ClassDef) else ():
                calls = [node for node in ast.walk(method) if _is_wait(node)]
                yield from ((module, cls.name, method.name, number) for number in range(len(calls)))  # type: ignore[attr-defined,union-attr]


def _is_wait(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call and getattr(node.value.func, "attr", "") == "wait_event"  # type: ignore[attr-defined]


class _Without(ast.NodeTransformer):
    """Leaves wait number ``number`` out."""

    def __init__(self, number: int) -> None:
        self.number = number

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not _is_wait(node):
            return node
        self.number -= 1
        return ast.copy_location(ast.Pass(), node) if self.number == -1 else node


def leave_out(wait: tuple[str, str, str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the method of ``wait`` run without it."""
    module_name, class_name, method_name, number = wait
    module = importlib.import_module(f"tiered.tiers.{module_name}")
    tree = ast.parse((ROOT / f"{module_name}.py").read_text())
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    method = next(node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == method_name)
    made: dict[str, Any] = {}
    changed = ast.fix_missing_locations(ast.Module([_Without(number).visit(method)], []))
    code = ["from __future__ import annotations\n", ast.unparse(changed)]
    exec("".join(code), vars(module), made)  # the source of this package
    monkeypatch.setattr(getattr(module, class_name), method_name, made[method_name])


def run(directory: Path, name: str, update_on: str) -> None:
    """Train a model whose device budget is the smallest one: each buffer is used by unit after unit."""
    recipe = Recipe(num_micro_steps=2, max_norm=0.5)
    options: dict[str, Any] = {"device": "sim", "update_on": update_on, "activations": "swap", "hold": 0}
    budget = smallest_device_memory(name, recipe, directory / "refused", **options)
    with tiered.Store(directory / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        session = start(case_on("sim", name), recipe, store, **options)
        units = next(session.model.parameters()).segment.unit.engine.units  # type: ignore[attr-defined]
        for step in range(4):
            session.case.loss(session.model, session.case.batch(step)).backward()
            if step % 2:
                for unit in units:
                    unit.gradients.store_away()
                tiered.clip_grad_norm_(session.model, 0.5)
                session.optimizer.step()
                session.optimizer.zero_grad()


def run_wrong_guess(directory: Path) -> None:
    """Copy a key ahead of need into a buffer that another key needs then."""
    with tiered.Store(directory, dram=ROOMY_NBYTES, device_memory=0) as store:
        store.put_many([(key, torch.zeros(4096, dtype=torch.uint8)) for key in ("guessed", "needed")])
        tier = AcceleratorTier(store.working_set, torch.device("sim:0"), 4096)
        assert tier.gather_ahead("guessed")
        tier.gather(["needed"], "r").release(())
        tier.forget()


@pytest.fixture(autouse=True)
def small_ones_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of any size are swapped."""
    monkeypatch.setattr(swapped, "SMALLEST_NBYTES", 1)


def races(sim: ModuleType, directory: Path) -> list[str]:
    """Return the races of the first run that has some."""
    found: list[str] = []
    for name, update_on in (("gpt", "cpu"), ("gpt", "device"), ("cnn", "cpu")):
        sim.set_allocation_writes(True)
        sim.set_query_delay(4)  # or the host, which looks now and then, would order everything
        run(directory / f"{name}-{update_on}", name, update_on)
        found += sim.races()
        if found:
            return found
    run_wrong_guess(directory / "wrong-guess")
    return sim.races()


def test_no_other_module_of_the_product_has_a_wait() -> None:
    """Those of a bench and of a trial wait for the whole device."""
    package = Path(tiered.__file__).parent
    having = {str(file.relative_to(package)) for file in package.rglob("*.py") if "wait_event(" in file.read_text()}
    assert having <= {f"tiers/{module}.py" for module in MODULES}
    assert not [file for file in package.rglob("*.py") if "wait_stream(" in file.read_text()]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_with_all_waits_has_no_race(sim: ModuleType, tmp_path: Path) -> None:
    assert not races(sim, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wait", list(waits()), ids=lambda wait: "-".join(map(str, wait)))
def test_a_run_without_it_is_red(
    wait: tuple[str, str, str, int], sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(wait, monkeypatch)
    assert races(sim, tmp_path), f"{wait} is needed by no run here"
