"""README and docs: every snippet of Python runs as written; test_commands.py runs the commands.

README's first loop has tests of its own in test_readme_loop.py, docs/accelerator.md in tests/accelerator.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tiered
from tests.store.places import quick_directory, short_files
from tiered.tools.cli import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PLACES = ("/nvme0", "/nvme1", "/models")  # which pages name, and a test has elsewhere

Names = dict[str, Any]


def small_gpt2() -> Any:
    import transformers

    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def for_a_base_in_place() -> Iterator[Names]:
    import peft
    import transformers

    model = small_gpt2()
    model.to(torch.bfloat16).save_pretrained("models/base")
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    names = {"tiered": tiered, "torch": torch, "peft": peft, "config": model.config, "lora": lora}
    names["GPT2LMHeadModel"] = transformers.GPT2LMHeadModel
    yield names
    names["store"].close()


def for_a_store() -> Iterator[Names]:
    Path("models/base").mkdir(parents=True)
    save_file({"wte.weight": torch.randn(64, 16)}, "models/base/model.safetensors")
    yield {"tiered": tiered, "tensor": torch.randn(8), "rows": torch.randn(1000 + 1, 64), "row": torch.randn(64)}


def for_a_trainer() -> Iterator[Names]:
    ids = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    yield {"model": small_gpt2(), "dataset": [{"input_ids": row, "labels": row} for row in ids]}


def for_a_checkpoint() -> Iterator[Names]:
    small_gpt2().save_pretrained("models/base")
    ids = torch.randint(0, 64, (2, 8))
    yield {"batch": {"input_ids": ids, "labels": ids}}


def for_a_plain_checkpoint() -> Iterator[Names]:
    from transformers import Trainer, TrainingArguments

    (names,) = for_a_trainer()
    plain = copy.deepcopy(names["model"])
    Trainer(plain, TrainingArguments("runs/plain", max_steps=4, save_steps=2), train_dataset=names["dataset"]).train()
    shutil.rmtree("runs/plain/checkpoint-4")
    yield names | {"tiered": tiered, "TrainingArguments": TrainingArguments}
    assert main(["export", "runs/plain-store", "runs/files"]) == 0
    found, expected = load_file("runs/files/model.safetensors"), plain.state_dict()
    assert found and all(torch.equal(found[name], expected[name]) for name in found)


def for_a_recipe() -> Iterator[Names]:
    """What docs/recipes.md takes from the loop of docs/quick_start.md."""

    def new_model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    loader = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
    with tiered.Store("runs/mine", dram="64MiB") as store:
        model = tiered.shard(new_model(), store)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
        names = {"tiered": tiered, "torch": torch, "mse_loss": nn.functional.mse_loss, "Net": new_model}
        names |= {"held_out": loader, "larger_batches": loader[:1]}
        yield names | {"store": store, "model": model, "optimizer": optimizer, "loader": loader}


LEFT_OPEN: dict[str, Callable[[], Iterator[Names]]] = {
    'weights="/models/base"': for_a_base_in_place,
    'store["kv/123"] = tensor': for_a_store,
    'train(resume_from_checkpoint="runs/plain/': for_a_plain_checkpoint,
    "tiered.hf.Trainer(": for_a_trainer,
    "optimizers=(optimizer, None)": for_a_trainer,
    "tiered.hf.from_pretrained(": for_a_checkpoint,
}
"""The names that a snippet leaves open, by something that it says. Others define all of theirs, but for recipes."""

ELSEWHERE = {
    "MyModel()\n    model = tiered.shard(": "test_readme_loop.py",
    'device="cuda"': "accelerator/test_docs.py",
    'init_process_group("gloo")': "ranks/test_training.py",
    "asked.append(number)": "ranks/test_stops.py",
    "torch.tensor(len(asked))": "ranks/test_stops.py",
    "whole = DistributedDataParallel(": "zero/test_one_rank.py",
    "where = tiered.hf.Arguments(": "interop/test_quick_start.py",
}
"""Snippets whose tests are elsewhere, by something that they say."""


def blocks(page: Path, language: str) -> list[str]:
    """Return the page's fenced blocks in ``language``, "" for those that name none."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


SNIPPETS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "python"))
    if not any(words in text for words in ELSEWHERE)
]


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    with quick_directory() as path, short_files(), chdir(path):
        yield path


def moved(text: str) -> str:
    """Return ``text`` with the places that it names below the present directory."""
    for place in PLACES:
        text = text.replace(place, place.removeprefix("/"))
    return text


@pytest.fixture
def quiet_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of a progress bar, or of one that loads files, outlives the test."""
    import tqdm
    import transformers

    transformers.utils.logging.disable_progress_bar()
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.usefixtures("quiet_libraries")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs_as_written(snippet: str) -> None:
    is_recipe = snippet in blocks(ROOT / "docs/recipes.md", "python")
    openers = [opener for words, opener in LEFT_OPEN.items() if words in snippet] + [for_a_recipe] * is_recipe
    for place in PLACES:
        Path(place.removeprefix("/")).mkdir(exist_ok=True)
    for names in openers[0]() if openers else iter([{}]):
        exec(moved(snippet), names)


def test_what_is_tested_elsewhere_is_written_somewhere() -> None:
    everything = "".join(text for page in PAGES for text in blocks(page, "python"))
    assert all(words in everything for words in [*ELSEWHERE, *LEFT_OPEN])
    assert len(SNIPPETS) >= 5
