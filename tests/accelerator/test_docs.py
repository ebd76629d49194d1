"""The snippet and the command of docs/accelerator.md, with their sizes and their device made smaller."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.accelerator.test_measure import TINY
from tests.accelerator.training import DEVICE
from tests.test_docs import ROOT, blocks
from tiered.tools.cli import main

PAGE = ROOT / "docs/accelerator.md"


def test_the_snippet_trains(accelerator: Any, tmp_path: Path) -> None:
    (snippet,) = [text for text in blocks(PAGE, "python") if 'device="cuda"' in text]
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


def test_the_command_measures_the_device(
    accelerator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tiered.tools.bench.command.FULL", TINY)
    (line,) = [each for text in blocks(PAGE, "") for each in text.splitlines() if "--device cuda" in each]
    (tmp_path / "run").mkdir()
    words = line.partition("#")[0].replace("/nvme0", str(tmp_path)).replace("cuda", DEVICE).split()
    assert main(words[1:]) == 0
    assert "\n3 tiers " in capsys.readouterr().out
