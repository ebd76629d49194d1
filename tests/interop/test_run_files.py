"""`tiered export` and `tiered import`: a committed run to safetensors files, and such files to a store."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import tiered
from tests.interop.checkpoints import MODELS, assert_same_tensors, gpt2, mixtral, tensors_in
from tests.zero.training import debug_store
from tiered.tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


def trained(model: Any, store: tiered.Store, **options: Any) -> dict[str, torch.Tensor]:
    """Train two steps, commit, and return the values."""
    model = tiered.shard(model, store, **options)
    optimizer = tiered.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    store.commit({"step": 2})
    return dict(model.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_a_run_of_transformers_exports_to_what_transformers_loads(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS[name]()
    for parameter in list(model.parameters())[3:7]:
        parameter.requires_grad_(False)  # spans of two kinds in a unit
    with debug_store(tmp_path / "run") as store:
        expected = trained(model, store)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "files"), "--max-shard-size", "60KB"]) == 0
    assert "generation 1" in capsys.readouterr().out
    found = type(model).from_pretrained(tmp_path / "files")
    assert_same_tensors(found.state_dict(), expected)
    model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
    assert found.config.to_diff_dict() == model.config.to_diff_dict()
    if name == "gpt2":
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "cast"), "--dtype", "bf16"]) == 0
        assert_same_tensors(
            type(model).from_pretrained(tmp_path / "cast").state_dict(),
            {key: value.bfloat16() for key, value in expected.items()},
        )
        with debug_store(tmp_path / "again", durable=False) as store, torch.device("meta"):
            again = type(model)(model.config)
            with torch.device("cpu"):
                again = tiered.shard(again, store, weights=tmp_path / "files")
                assert_same_tensors(again.state_dict(), expected)


def test_masters_buffers_and_ties_of_any_module_are_exported(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.norm = nn.BatchNorm1d(6)
            self.last = nn.Linear(6, 6)
            self.last.weight = self.first.weight
            self.register_buffer("scratch", torch.ones(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.first(x)))

    with debug_store(tmp_path / "run") as store:
        model = tiered.shard(Net(), store, param_dtype=torch.bfloat16)
        store.commit()
        expected = dict(model.state_dict())
    del expected["last.weight"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "files"), "--dtype", "fp32"]) == 0
    cast = {name: value.float() if value.is_floating_point() else value for name, value in expected.items()}
    assert_same_tensors(tensors_in(tmp_path / "files"), cast)
    with safe_open(tmp_path / "files" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "last.weight": "first.weight"}


def test_a_base_in_place_is_exported_from_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt2().save_pretrained(tmp_path / "base")
    with debug_store(tmp_path / "run", external=[tmp_path / "base"]) as store:
        tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "base", store, frozen="in place")
        store.commit()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "files")]) == 2
    assert "which is missing" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "files"), "--external", str(tmp_path / "base")]) == 0
    assert_same_tensors(tensors_in(tmp_path / "files"), tensors_in(tmp_path / "base"))


def test_files_are_imported_under_their_names_and_exported_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixtral().save_pretrained(tmp_path / "files", max_shard_size="60KB")
    expected = tensors_in(tmp_path / "files")
    assert main(["import", str(tmp_path / "files"), str(tmp_path / "run")]) == 0
    with tiered.Store(tmp_path / "run", dram="16MiB", mode="r") as store:
        assert_same_tensors({name: store[name] for name in store}, expected)
    assert main(["import", str(tmp_path / "files"), str(tmp_path / "run")]) == 2
    assert "holds a run of generation 1" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again"), "--max-shard-size", "60KB"]) == 0
    assert_same_tensors(tensors_in(tmp_path / "again"), expected)
    assert_same_tensors(mixtral().from_pretrained(tmp_path / "again").state_dict(), mixtral().state_dict())
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "files" / "config.json").read_text()


def test_packed_4_bit_tensors_come_in_lie_in_place_and_go_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As MXFP4 models have them, beside their scales. A tensor of no dimension has no place in the format."""

    def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert tensors["w"].dtype == torch.float4_e2m1fn_x2
        return {name: value.view(torch.uint8) for name, value in tensors.items()}

    packed = torch.arange(64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    expected = {"w": packed.view(2, 4, 8), "scale": torch.tensor([0.5, 2.0]).to(torch.float8_e8m0fnu)}
    save_file(expected, tmp_path / "base")
    assert main(["import", str(tmp_path / "base"), str(tmp_path / "run")]) == 0
    with tiered.Store(tmp_path / "run", dram="16MiB", external=[tmp_path / "base"]) as store:
        assert_same_tensors(as_bytes(dict(store)), as_bytes(expected))
        store.adopt("in place", tmp_path / "base", "w")
        store["strided"] = packed.view(8, 8).t()
        store.commit()
        values = dict(store)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--external", str(tmp_path / "base")]) == 0
    assert_same_tensors(as_bytes(tensors_in(tmp_path / "out")), as_bytes(values))
    with tiered.Store(tmp_path / "run", dram="16MiB", external=[tmp_path / "base"]) as store:
        store["scalar"] = packed[0]
        store.commit()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "two"), "--external", str(tmp_path / "base")]) == 2
    assert "scalar is torch.float4_e2m1fn_x2 [], which safetensors lacks" in capsys.readouterr().err


def test_an_import_that_fails_leaves_nothing_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2().save_pretrained(tmp_path / "files")
    with monkeypatch.context() as patch:
        count = 0

        def fail(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == 5:
                raise OSError(5, "Input/output error", "model.safetensors")

        patch.setattr("tiered.tools.export._put", fail)
        assert main(["import", str(tmp_path / "files"), str(tmp_path / "run")]) == 2
    with tiered.Store(tmp_path / "run", dram="16MiB", mode="r") as store:
        assert store.generation == 0 and len(store) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert main(["import", str(tmp_path / "files"), str(tmp_path / "run")]) == 0


def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    run, files = str(tmp_path / "run"), str(tmp_path / "files")
    assert "no run in" in refused("export", run, files)
    assert "no safetensors file there" in refused("import", files, run)
    with debug_store(tmp_path / "run") as store:
        store["a"] = torch.arange(3)
        store.commit()
        assert "is open in process" in refused("export", run, files)
    assert "expected one of bf16, fp16, fp32" in refused("export", run, files, "--dtype", "int8")
    assert "a size such as" in refused("export", run, files, "--max-shard-size", "much")
    assert main(["export", run, files]) == 0
    capsys.readouterr()
    (tmp_path / "files" / "copy.safetensors").write_bytes((tmp_path / "files" / "model.safetensors").read_bytes())
    assert "a is in " in refused("import", files, str(tmp_path / "again"))
    with debug_store(tmp_path / "odd") as store:
        store["__metadata__"] = torch.arange(3)
        store.commit()
    assert "named __metadata__" in refused("export", str(tmp_path / "odd"), str(tmp_path / "odd-files"))
    (tmp_path / "files" / "copy.safetensors").unlink()
    assert "add --yes" in refused("export", run, files)
    assert main(["export", run, files, "--yes"]) == 0
    assert torch.equal(tensors_in(tmp_path / "files")["a"], torch.arange(3))


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_units_larger_than_the_budget_are_exported(dtype: str | None, tmp_path: Path) -> None:
    """An export reads parts, in a budget of 8 MiB."""
    with tiered.Store(tmp_path / "run", dram="128MiB") as store:
        model = tiered.shard(nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(3)]), store, unit=nn.Linear)
        expected = model.state_dict()
        store.commit({})
    options = ["--dtype", dtype] if dtype else []
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "files"), *options]) == 0
    cast = {name: each.to(torch.bfloat16 if dtype else torch.float32) for name, each in expected.items()}
    assert_same_tensors(tensors_in(tmp_path / "files"), cast)


def test_an_export_that_fails_leaves_no_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no luck")

    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        store["a"] = torch.ones(5)
        store.commit({})
    monkeypatch.setattr("tiered.interop.checkpoint_folder._write", fail)
    for _ in range(2):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "files")]) == 2
        assert not (tmp_path / "files").exists()
    (tmp_path / "files").mkdir()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "files")]) == 2
    assert not list((tmp_path / "files").iterdir())


def test_a_model_of_which_a_key_is_gone_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with debug_store(tmp_path / "run") as store:
        tiered.shard(nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60)), store)
        store.commit()
    with debug_store(tmp_path / "run") as store:
        del store["model/parameters/1"]
        store.commit()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "files")]) == 2
    assert "holds this model without 'model/parameters/1': dropped or deleted" in capsys.readouterr().err
    assert not (tmp_path / "files").exists()
