"""`tiered inspect`: a model's keys by what they are, and each parameter by name, from the commit alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tiered
from tiered.tools.cli import main

LONG = "a_name_that_is_longer_than_any_column_has_room_for_and_still_has_to_be_read_whole"

Made = tuple[Path, nn.Module, dict[str, int]]
Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "AdamW": lambda params: tiered.AdamW(params, lr=1e-3),
    "AdamW compact": lambda params: tiered.AdamW(params, lr=1e-3, state="compact"),
    "SGD": lambda params: tiered.SGD(params, lr=1e-3),
    "SGD momentum": lambda params: tiered.SGD(params, lr=1e-3, momentum=0.9, state="compact"),
    "Lion": lambda params: tiered.Lion(params, lr=1e-3),
}


class Adapted(nn.Module):
    """A frozen base and a trained head; layers with a long name among them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)]).requires_grad_(False)
        self.head = nn.Linear(64, 300)
        self.add_module(LONG, nn.Linear(300, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.base:
            x = layer(x)
        return self.get_submodule(LONG)(self.head(x)).float().square().mean()


def train(run: Path, optimizer: str = "AdamW", weights: Path | None = None) -> Made:
    """Make a run of two steps and return its directory, its model, and the bytes of its keys."""
    torch.manual_seed(0)
    model = Adapted()
    external = []
    if weights:
        save_file({name: p.bfloat16() for name, p in model.state_dict().items()}, weights)
        external = [weights]
        with torch.device("meta"):
            model = Adapted()
    with tiered.Store(run, dram="32MiB", external=external) as store:
        tiered.shard(model, store, param_dtype=torch.bfloat16, weights=weights)
        made = OPTIMIZERS[optimizer](model.parameters())
        store.resume()
        for _ in range(2):
            model(torch.ones(3, 64, dtype=torch.bfloat16)).backward()
            made.step()
            made.zero_grad()
        store.commit({"step": 2})
        return run, model, {record.name: record.nbytes for record in store.records()}


def inspected(run: Path, *options: str) -> dict[str, Any]:
    file = run.parent / "inspected.json"
    assert main(["inspect", str(run), "--json", str(file), *options]) == 0
    return dict(json.loads(file.read_text()))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_each_parameter_is_known_by_name(optimizer: str, tmp_path: Path) -> None:
    run, model, keys = train(tmp_path / "run", optimizer)
    found = inspected(run)["parameters"]
    assert {each["name"]: (tuple(each["shape"]), each["trained"]) for each in found} == {
        name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()
    }
    assert {each["dtype"] for each in found} == {"bfloat16"}
    assert {(each["trained"], each["steps"]) for each in found} == {(True, 2), (False, None)}
    for each in found:
        assert each["offset"] + each["bytes"] <= keys[each["key"]]


def test_parameters_that_stay_in_the_users_files_say_in_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, _ = train(tmp_path / "run", weights=tmp_path / "base.safetensors")
    capsys.readouterr()
    found = inspected(run, "--parameters")["parameters"]
    assert {each["name"] for each in found if each["files"] == ["base.safetensors"]} == {
        f"base.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")
    }
    assert ", in place in base.safetensors\n" in capsys.readouterr().out
    inspected(run)
    shown = " ".join(capsys.readouterr().out.split())
    assert "parameters, in place" in shown and "in base.safetensors" in shown and "optimizer state" in shown


def test_parameters_that_were_added_after_shard_have_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiered.Store(tmp_path, dram="32MiB") as store:
        model = tiered.shard(Adapted(), store)
        model.adapter = nn.Linear(300, 5)
        store.commit({})
    assert main(["inspect", str(tmp_path)]) == 0
    assert re.search(r"added after tiered.shard +2 parameters +5\.9 KiB +in the commit", capsys.readouterr().out)


def test_it_reads_no_tensor_and_runs_beside_a_writer(tmp_path: Path) -> None:
    run, _, _ = train(tmp_path / "run")
    before = inspected(run)
    with tiered.Store(run, dram="32MiB"):
        assert inspected(run, "--parameters") == before
    (run / "data-000").unlink()
    assert inspected(run, "--parameters") == before


def test_each_parameter_has_a_line_with_its_whole_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model, _ = train(tmp_path / "run")
    capsys.readouterr()
    assert main(["inspect", str(run), "--parameters"]) == 0
    names = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert sorted(name for name in names if "." in name) == sorted(name for name, _ in model.named_parameters())


def test_keys_of_other_jobs_are_listed_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        store["model/mine"] = torch.zeros(3, 4)
        store["table"] = torch.zeros(5, dtype=torch.int64)
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[:2]] == [
        ["float32", "3x4", "48", "B", "generation", "1", "model/mine"],
        ["int64", "5", "40", "B", "generation", "1", "table"],
    ]
    assert main(["inspect", str(tmp_path / "run"), "--parameters"]) == 2
    assert "no model is committed there" in capsys.readouterr().err


def test_numbers_that_json_lacks_are_texts_in_the_file(tmp_path: Path) -> None:
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        store.commit({"loss": float("nan"), "best": [float("-inf"), 1.5]})
    assert inspected(tmp_path / "run")["state"] == {"loss": "NaN", "best": ["-Infinity", 1.5]}


class Junk:
    """An object that commits another version's description of a model."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


HUGE = {"name": "a", "shape": [1 << 70], "strides": [1], "dtype": "torch.float32"}


@pytest.mark.parametrize(
    "state",
    [
        {}, {"units": 3, "trained": {}}, {"units": {"u": [HUGE]}, "trained": {"u": []}},
        {"units": {"u": [HUGE | {"shape": [3], "dtype": "torch.nn"}]}, "trained": {"u": []}},
        {"units": {"u": [HUGE | {"shape": [3], "name": 4}]}, "trained": {"u": []}},
    ],
)  # fmt: skip
def test_a_description_of_another_version_is_refused_in_one_line(
    state: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        store.register("tiered.model", Junk(state))
        store["model/parameters/u"] = torch.zeros(3)
    assert main(["inspect", str(tmp_path / "run"), "--parameters"]) == 2
    error = capsys.readouterr().err
    assert "none that this version of tiered writes" in error and error.count("\n") == 1
    assert inspected(tmp_path / "run")["parameters"] == []
    assert "parameters  1 key" in capsys.readouterr().out
