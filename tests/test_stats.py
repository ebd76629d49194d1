"""The summary for loggers: flat, numbers alone, with each figure's unit in its name and in the docstring."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import tiered
from tiered.stats import (
    ComputeDeviceStatistics,
    MovedStatistics,
    RecorderStatistics,
    StoreStatistics,
    WaitStatistics,
    WorkStatistics,
)
from tiered.store.waiting.recorder import Wait

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
    device = ComputeDeviceStatistics("cuda:0", 6, 5, 4, 3, 2, 1)
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


def test_every_figure_is_in_the_docs() -> None:
    """Of every reason to wait, word of work and class of keys, not only those that this run has met."""
    source = "".join(path.read_text() for path in Path(tiered.__file__).parent.rglob("*.py"))
    words = set(re.findall(r'\b(?:worked|note_on)\(\s*(?:stream, )?"([a-z ]+)"', source)) | {"copy in", "copy out"}
    assert words == {"forward", "backward", "update", "update bucket", "seal", "flush", "commit", "copy in", "copy out"}
    units = {f"{word} unit" for word in ("forward", "backward", "open")}
    classes = {*sys.modules["tiered.zero.shard"]._CLASSES.values(), "other"}
    recorder = RecorderStatistics(
        waits=tuple(WaitStatistics("caller", str(reason), 1.0) for reason in Wait),
        work=tuple(WorkStatistics("caller", word, 1, 1.0) for word in words | units),
        moved=tuple(MovedStatistics(name, 1, 1) for name in classes),
        device_busy_seconds=1.0,
        device=ComputeDeviceStatistics("cuda:0", 6, 5, 4, 3, 2, 1),
    )
    with tiered.Store(engine="memory", dram="16MiB") as store:
        counters = replace(store.statistics(), recorder=recorder, lifetime_write_bytes=7)
    page = (Path(__file__).parents[1] / "docs" / "tuning.md").read_text()
    section = page.split("## Figures for a logger")[1].split("\n## ")[0]
    documented: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        names = re.findall(r"`(\w+)`", row)
        ends = [name for name in names if name in {"read_bytes", "write_bytes"}] if "with" in row else [""]
        told = {start + end for start in names if start not in ends for end in ends}
        assert told <= set(counters.summary(prefix="")), row
        documented.update(told)
    assert documented == set(counters.summary(prefix=""))


def test_forward_and_backward_are_what_the_clock_says() -> None:
    """Whatever the caller does between the two, with all units held and so open meanwhile."""
    ticks = itertools.count()
    with tiered.Store(engine="memory", dram="64MiB") as store, mock.patch("time.monotonic", lambda: float(next(ticks))):
        model = tiered.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), store)
        optimizer = tiered.AdamW(model.parameters())
        for step in range(3):
            before, begun = store.statistics().summary(prefix=""), next(ticks)
            loss = model(torch.ones(2, 64)).sum()
            forward_s, idle_s = next(ticks) - begun, 10_000
            for _ in range(idle_s):
                next(ticks)
            begun = next(ticks)
            loss.backward()
            backward_s = next(ticks) - begun
            after = store.statistics().summary(prefix="")
            assert 0 < after["work_forward_s"] - before.get("work_forward_s", 0) <= forward_s, step
            assert 0 < after["work_backward_s"] - before.get("work_backward_s", 0) <= backward_s, step
            optimizer.step()
            optimizer.zero_grad()
