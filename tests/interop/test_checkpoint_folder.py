"""The folder of a checkpoint: whom it belongs to while it is written, and which files are not replaced."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import tiered
from tiered.cli import main
from tiered.errors import UsageError
from tiered.interop.checkpoint_folder import write_checkpoint

VALUES = {"a": torch.arange(5000.0), "b": torch.ones(7)}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with one safetensors file."""
    (tmp_path / "base").mkdir()
    save_file(VALUES, tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


def run_beside(base: Path, name: str = "model.safetensors") -> tiered.Store:
    """Return an open store whose only committed record lies in the file ``name`` of ``base``."""
    store = tiered.Store(base.parent / "run", dram="16MiB", external=[base / name])
    if not store.generation:
        store.adopt("a", base / name, "a")
        store.commit({"step": 1})
    return store


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}


def check_refused_and_unharmed(base: Path, name: str, write: Any) -> None:
    """``write`` is refused by the name of the file, in which the open run goes on, and is opened again."""
    with run_beside(base, name) as store:
        before = content(base)
        with pytest.raises(UsageError, match=rf"{name} is read in place.*process {os.getpid()}.*another folder"):
            write(base)
        assert content(base) == before
        store["own"] = VALUES["b"]
        store.commit({"step": 2})
    with run_beside(base, name) as store:
        assert store.state == {"step": 2} and torch.equal(store["a"], VALUES["a"]) and store.verify().is_clean


@pytest.mark.parametrize("max_shard_size", ["50GB", "16KB"])
def test_no_file_that_a_store_reads_in_place_is_replaced_by_a_save(base: Path, max_shard_size: str) -> None:
    """Shards have other names than the file that is there, which goes for them all the same."""
    model = nn.Linear(100, 100)

    def save(folder: Path) -> None:
        tiered.save_pretrained(model, folder, max_shard_size=max_shard_size)

    check_refused_and_unharmed(base, "model.safetensors", save)
    save(base)  # no store has it open any more


def test_no_file_that_a_store_reads_in_place_is_replaced_through_a_link(base: Path, tmp_path: Path) -> None:
    """As in the cache of a hub: names are links to the files."""
    os.rename(base / "model.safetensors", tmp_path / "blob")
    (base / "model.safetensors").symlink_to(tmp_path / "blob")
    check_refused_and_unharmed(
        base, "model.safetensors", lambda folder: write_checkpoint(folder, VALUES, max_shard_size="50GB")
    )


def test_no_file_that_a_store_reads_in_place_is_replaced_by_adapters(base: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    os.rename(base / "model.safetensors", base / "adapter_model.safetensors")
    check_refused_and_unharmed(base, "adapter_model.safetensors", lambda folder: tiered.save_pretrained(model, folder))


def test_no_file_that_a_store_reads_in_place_is_replaced_by_an_export(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export itself has the file open, and no other store has."""
    run_beside(base).close()
    before = content(base)
    words = [str(base.parent / "run"), str(base), "--external", str(base), "--yes"]
    assert main(["export", *words]) == 2
    assert "is read in place" in capsys.readouterr().err and content(base) == before
    with run_beside(base) as store:
        assert torch.equal(store["a"], VALUES["a"])


def lost(base: Path, how: str) -> None:
    path = base / "model.safetensors"
    if how == "replaced":
        shutil.copy(path, base / "copy")
        os.rename(path, base / "moved")
        os.rename(base / "copy", path)
    elif how == "moved":
        os.rename(path, base / "moved")
    else:
        os.rename(base, base.parent / "elsewhere")


@pytest.mark.parametrize("how", ["replaced", "moved", "folder moved"])
def test_no_commit_is_acknowledged_whose_external_file_has_lost_its_name(base: Path, how: str) -> None:
    with run_beside(base) as store:
        lost(base, how)
        store["own"] = VALUES["b"]
        with pytest.raises(
            UsageError, match=r"'a' lies in an external file that has lost its name.*Move that file back"
        ):
            store.commit({"step": 2})
        if how == "folder moved":
            os.rename(base.parent / "elsewhere", base)
        else:
            os.rename(base / "moved", base / "model.safetensors")
        store.commit({"step": 2})
        lost(base, how)
        del store["a"]  # nothing lies there any more
        store.commit({"step": 3})
    with tiered.Store(base.parent / "run", dram="16MiB") as store:
        assert store.state == {"step": 3} and list(store) == ["own"]


def test_the_bytes_of_an_external_file_that_was_removed_are_where_the_refusal_says(base: Path) -> None:
    with closing(run_beside(base)) as store:
        (base / "model.safetensors").unlink()
        store["own"] = VALUES["b"]
        with pytest.raises(UsageError, match="lost its name") as caught:
            store.commit({"step": 2})
        still = next(word for word in str(caught.value).split() if word.startswith("/proc/")).rstrip(".")
        shutil.copy(still, base / "model.safetensors")
        store.close(commit=False)
    with run_beside(base) as store:
        assert store.state == {"step": 1} and torch.equal(store["a"], VALUES["a"])
