"""README's snippet of an accelerator, with its sizes and its device made smaller."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiered
from tests.accelerator.training import DEVICE
from tests.test_docs import README, blocks


def test_the_snippet_trains(accelerator: Any, tmp_path: Path) -> None:
    (snippet,) = [text for text in blocks(README, "python") if 'device="cuda"' in text]
    for written, here in (("cuda", DEVICE), ("/nvme0/", ""), ("32GiB", "16MiB"), ("20GiB", "16MiB")):
        assert written in snippet
        snippet = snippet.replace(written, here)
    names: dict[str, Any] = {"tiered": tiered, "torch": torch, "MyModel": lambda: nn.Sequential(nn.Linear(64, 64))}
    with chdir(tmp_path):
        exec(snippet, names)
        with names["store"]:
            optimizer = tiered.AdamW(names["model"].parameters())
            loss = names["model"](torch.randn(4, 64, device=DEVICE, dtype=torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            assert loss.device.type == DEVICE and loss.isfinite()
