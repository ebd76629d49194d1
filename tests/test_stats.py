"""The summary for loggers: flat, numbers alone, with each figure's unit in its name and in the docstring."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import torch
from torch import nn

import tiered
from tiered.stats import ComputeDeviceStatistics, StoreStatistics

UNIT = re.compile(r"(_bytes|_s)$|^num_|^generation$")


def trained(store: tiered.Store) -> None:
    model = tiered.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), store, param_dtype=torch.bfloat16)
    optimizer = tiered.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_summary_is_flat_with_units_and_told_of_in_its_docstring() -> None:
    with tiered.Store(engine="memory", dram="16MiB") as store:
        store["mine"] = torch.zeros(1 << 20)
        trained(store)
        store.commit({"step": 2})
        counters = store.statistics()
    device = ComputeDeviceStatistics("cuda:0", 5, 4, 3, 2, 1)
    counters = replace(counters, recorder=replace(counters.recorder, device=device), lifetime_write_bytes=7)
    found = counters.summary(prefix="")
    assert {type(value) for value in found.values()} == {int, float} and json.loads(json.dumps(found)) == found
    assert not [name for name in found if not UNIT.search(name) or not re.fullmatch(r"[a-z_]+", name)]
    told = StoreStatistics.summary.__doc__ or ""
    by_kind = re.compile(r"^(wait|work)_|_(read|write)_bytes$")
    missing = [name for name in found if not by_kind.search(name) and not re.search(rf"\b{name}\b", told)]
    assert not missing
    assert not set(re.findall(r"\b(?:num_\w+|\w+_bytes)\b", told)) - set(found)
    assert counters.summary() == {f"tiered/{name}": value for name, value in found.items()}


def test_the_difference_of_two_summaries_is_what_happened_between() -> None:
    with tiered.Store(engine="memory", dram="16MiB") as store:
        before = store.statistics().summary()
        store["a"] = torch.zeros(3 << 20, dtype=torch.uint8)
        store.commit({"step": 1})
        after = store.statistics().summary()
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["tiered/num_commits"] == change["tiered/generation"] == change["tiered/num_keys"] == 1
    assert change["tiered/write_bytes"] == change["tiered/other_write_bytes"] == 3 << 20
    assert change["tiered/read_bytes"] == 0
    assert after["tiered/dram_budget_bytes"] == 16 << 20
