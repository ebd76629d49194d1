#!/usr/bin/env python3
"""How long the ways are: calls of tiered's functions, and the files that they enter, floor by floor.

Usage: python bench/way.py [--width 256 --store DIR --against tree=CHECKOUT]

Counted by sys.setprofile on a chain of six units with one matrix each, on the thread that is named:

- a fault-in: from the call of a unit's module to its forward, with all of the unit on NVMe (calling thread)
- an operation on an open unit: a second ``F.linear`` with the same weight in one forward (calling thread)
- a bucket's update: from one bucket's arithmetic to the next one's (update thread)
- a gradient: from autograd's value, as a tensor's hook gets it, to the hooks after its accumulation (calling thread)
- a resident get: ``store.get`` of a key that is in DRAM (calling thread)
- a commit: of the six units, nothing held, whose updates have ended (calling thread)
- a block: 1 MiB of a tensor of 64 MiB on its way out and in again (the threads of the device and of digests)

Only tiered's public names are called, so that any checkout can be the other side. One JSON line comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import trees
from torch import nn

import tiered
from tiered.errors import CapacityError
from tiered.units import KiB, MiB

NUM_UNITS = 6
ROOT = Path(tiered.__file__).parent
FLOORS = ("zero", "tiers", "store", "bytes")


class Way:
    """The calls of tiered's functions while the way is on, and the files that they enter, on one thread."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.files: dict[str, None] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count in the block, on the thread that runs the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self, *_: object) -> None:
        sys.setprofile(self.note)

    def end(self, *_: object) -> None:
        sys.setprofile(None)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self.enter(frame):
            self.num_calls += 1

    def enter(self, frame: FrameType) -> bool:
        """Add the file of ``frame``; return whether the file is tiered's."""
        path = Path(frame.f_code.co_filename)
        is_ours = path.is_relative_to(ROOT)
        if is_ours:
            self.files[str(path.relative_to(ROOT))] = None
        return is_ours

    def forget(self) -> None:
        """Begin anew: what was counted until now is not of this way."""
        self.num_calls, self.files = 0, {}

    def result(self) -> dict[str, Any]:
        floors = {floor: sum(file.startswith(f"{floor}/") for file in self.files) for floor in FLOORS}
        return {"calls": self.num_calls, **floors, "all": len(self.files), "files": list(self.files)}


class BucketUpdate(Way):
    """The way from one bucket's arithmetic to the next one's: the second of an update, with what stands above."""

    def __init__(self) -> None:
        super().__init__()
        self._num_seen = 0

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Be told what a thread does, for ``threading.setprofile``."""
        if event == "c_call" and getattr(argument, "__name__", "") == "_fused_adamw_":
            self._num_seen += 1
            above: FrameType | None = frame
            while above is not None and self._num_seen == 2:
                self.enter(above)
                above = above.f_back
        if self._num_seen == 2:
            super().note(frame, event, argument)


class Unit(nn.Module):
    """One matrix, (width, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.second_use: Way | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # (8, width)
        rows = F.linear(rows, self.weight)
        if self.second_use is not None:
            with self.second_use.on():
                F.linear(rows, self.weight)
        return rows.relu()


class Chain(nn.Module):
    """Units one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(width) for _ in range(NUM_UNITS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # (8, width)
        for unit in self.units:
            rows = unit(rows)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="of the units' matrices: 4 buckets each by default")
    parser.add_argument("--store", type=Path, default=trees.HERE / "runs", help="where folders for stores are made")
    parser.add_argument("--against", default="", help="tree=CHECKOUT: its table beside this one")
    args = parser.parse_args()
    args.store.mkdir(exist_ok=True)
    other: dict[str, Any] = {}
    if args.against:
        command = [__file__, "--width", str(args.width), "--store", str(args.store)]
        other = trees.run(trees.checkout(args.against), command)["ways"]
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        ways = measure(Path(folder), args.width)
    show(ways, other)
    print(json.dumps({"bench": "way", "ways": ways, **({"against": other} if other else {})}))


def measure(folder: Path, width: int) -> dict[str, Any]:
    """Walk all ways; return each one's counts."""
    ways = {name: Way() for name in ("fault-in", "operation", "gradient", "resident get", "commit")}
    update = BucketUpdate()
    with tiered.Store(folder / "chain", dram=32 * MiB, durable=False) as store:
        store.put_many((f"filler/{n}", torch.zeros(512 * KiB, dtype=torch.uint8)) for n in range(64))
        walk_chain(store, width, ways, update)
    with tiered.Store(folder / "small", dram=32 * MiB) as store:
        walk_commit(store, width, ways["commit"])
        store["key"] = torch.zeros(256 * KiB, dtype=torch.uint8)
        with store.lease("key"), ways["resident get"].on():
            store.get("key")
    ways["block"] = walk_blocks(folder / "large")
    order = ("fault-in", "operation", "bucket", "gradient", "resident get", "commit", "block")
    found: dict[str, Way] = {**ways, "bucket": update}
    return {name: found[name].result() for name in order}


def walk_chain(store: tiered.Store, width: int, ways: dict[str, Way], update: BucketUpdate) -> None:
    """Train the chain with nothing held: an update and a gradient in the second step, the rest in the third."""
    torch.manual_seed(7)
    model, rows = Chain(width), torch.randn(8, width)
    tiered.shard(model, store, hold=0)
    optimizer = tiered.AdamW(model.parameters(), update="step")

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        with tiered.unsharded(model.units[0]):
            pass  # ends all updates

    step()
    weight = model.units[NUM_UNITS // 2].weight
    hooks = [
        weight.register_hook(ways["gradient"].begin),
        weight.register_post_accumulate_grad_hook(ways["gradient"].end),
    ]
    threading.setprofile(update.note)
    step()
    threading.setprofile(None)  # type: ignore[arg-type]  # as the documentation has it
    for hook in hooks:
        hook.remove()
    unit = model.units[NUM_UNITS - 2]

    def begin(*_: object) -> None:
        drive_out(store)
        ways["fault-in"].begin()

    unit.register_forward_pre_hook(begin, prepend=True)
    unit.register_forward_pre_hook(ways["fault-in"].end)
    model.units[1].second_use = ways["operation"]
    before = store.statistics().working_set.swaps
    model(rows)
    after = store.statistics().working_set.swaps
    assert after.demand_bytes > before.demand_bytes, "the unit was not on NVMe"


def drive_out(store: tiered.Store) -> None:
    """Have all that can go swapped out, by leases of all the memory there is."""
    with contextlib.ExitStack() as leases, contextlib.suppress(CapacityError):
        for number in range(64):
            leases.enter_context(store.lease(f"filler/{number}"))


def walk_commit(store: tiered.Store, width: int, way: Way) -> None:
    """Train six units with nothing held, and commit the third step."""
    torch.manual_seed(7)
    model, rows = Chain(width), torch.randn(8, width)
    tiered.shard(model, store, hold=0)
    optimizer = tiered.AdamW(model.parameters())
    for number in range(3):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with tiered.unsharded(model.units[0]):
            pass  # ends all updates
        with way.on() if number == 2 else contextlib.nullcontext():
            store.commit({"step": number})


def walk_blocks(folder: Path) -> Way:
    """Put and commit a tensor of 64 MiB, and get it from a store opened anew; return the way of one of its 128 MiB."""
    way, value = Way(), torch.zeros(64 * MiB, dtype=torch.uint8)
    threading.setprofile(way.note)  # of threads that begin from here on
    try:
        with tiered.Store(folder, dram=128 * MiB) as store:
            way.forget()
            store["large"] = value
            store.commit()
            num_out, files_out = way.num_calls, way.files
        with tiered.Store(folder, dram=128 * MiB) as store:
            way.forget()
            store.get("large")
            way.num_calls = (way.num_calls + num_out) // (2 * value.nbytes // MiB)
            way.files = files_out | way.files
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # as the documentation has it
    return way


def show(ways: dict[str, Any], other: dict[str, Any]) -> None:
    """Print a row for each way: calls and files; those of the other tree in brackets."""
    columns = ("calls", *FLOORS, "all")
    print(f"{'':14}" + "".join(f"{column:>14}" for column in columns))
    for name, way in ways.items():
        cells = [f"{way[column]}" + (f" ({other[name][column]})" if other else "") for column in columns]
        print(f"{name:14}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
