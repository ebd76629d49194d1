"""Nothing of a training outlives it: the soak found 50 KiB a cycle that autograd's hooks had kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch
from torch import nn

import tiered


def test_model_optimizer_and_store_go_when_nobody_has_them(tmp_path: Path) -> None:
    def train() -> list[weakref.ref[object]]:
        with tiered.Store(tmp_path / "run", dram="16MiB") as store:
            model = tiered.shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), store)
            optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            store.commit()
            return [weakref.ref(one) for one in (model, optimizer, store)]

    gone = train()
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]
