#!/usr/bin/env python3
"""How long the way is: the files of tiered that one fault-in of a unit enters, and one bucket's update.

Usage: python bench/way.py [--width 256 --store DIR]

By sys.setprofile, on a chain of units whose one parameter has several buckets of state. The fault-in is all that runs
on the calling thread between the call of a unit's module and its forward, with everything of it on NVMe. The bucket's
update is all that the update thread is inside of or enters between one bucket's arithmetic and the next one's. One JSON
line comes last.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import tiered
from tiered.errors import CapacityError
from tiered.units import MiB

NUM_UNITS = 6
ROOT = Path(__file__).resolve().parents[1]
CLOSE = ("zero", "tiers")  # the rooms that are counted
FAR = ("store", "bytes")  # those that are listed


class Chain(nn.Module):
    """Units one after the other, one matrix each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(NUM_UNITS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # (8, width)
        for unit in self.units:
            rows = unit(rows).relu()
        return rows


def file_of(frame: FrameType) -> str:
    """Return the file of tiered that ``frame`` runs, as in "zero/engine.py"; "" for others."""
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT / "tiered")) if path.is_relative_to(ROOT / "tiered") else ""


class FaultIn:
    """The files that are entered while it is on, on the thread that turns it on."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (file := file_of(frame)) and file not in self.files:
            self.files.append(file)


class BucketUpdate:
    """The files from one bucket's arithmetic to the next one's, on the thread that does it: the second of an update."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._num_seen = 0

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Be told what a thread does, for ``threading.setprofile``."""
        if event == "c_call" and getattr(argument, "__name__", "") == "_fused_adamw_":
            self._num_seen += 1
            above: FrameType | None = frame
            while above is not None and self._num_seen == 2:
                self._add(above)
                above = above.f_back
        if event == "call" and self._num_seen == 2:
            self._add(frame)

    def _add(self, frame: FrameType) -> None:
        if (file := file_of(frame)) and file not in self.files:
            self.files.append(file)


def drive_out(store: tiered.Store) -> None:
    """Have all that can go swapped out, by asking for all the memory there is."""
    working_set, buffers = store.working_set, []
    with contextlib.suppress(CapacityError):
        while True:
            buffers.append(working_set.reserve(working_set.budget_bytes // 64))
    for buffer in buffers:
        working_set.unreserve(buffer)


def measure(store: tiered.Store, width: int) -> tuple[list[str], list[str]]:
    """Train three steps; return the files of a fault-in in the last, and of an update in the second."""
    torch.manual_seed(7)
    model, rows = Chain(width), torch.randn(8, width)
    tiered.shard(model, store, hold=0)
    optimizer = tiered.AdamW(model.parameters(), update="step")
    engine: Any = next(model.parameters()).segment.unit.engine  # type: ignore[attr-defined]

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        engine.updates.finish_all()

    fault_in, update = FaultIn(), BucketUpdate()
    step()
    threading.setprofile(update.note)
    step()
    threading.setprofile(None)  # type: ignore[arg-type]  # as the documentation has it
    unit = model.units[NUM_UNITS - 2]

    def begin(*_: object) -> None:
        drive_out(store)
        fault_in.begin()

    unit.register_forward_pre_hook(begin, prepend=True)
    unit.register_forward_pre_hook(lambda *_: fault_in.end())
    before = store.statistics().working_set.swaps
    model(rows)
    after = store.statistics().working_set.swaps
    assert after.demand_bytes > before.demand_bytes, "the unit was not on NVMe"
    return fault_in.files, update.files


def show(title: str, files: list[str]) -> dict[str, Any]:
    """Print ``files`` by room, and return their numbers and names."""
    close, far = ([file for file in files if file.split("/")[0] in rooms] for rooms in (CLOSE, FAR))
    print(f"{title}: {len(close)} files of {' and '.join(CLOSE)}, {len(far)} of {' and '.join(FAR)}")
    for file in [*close, *far]:
        print(f"  {file}")
    return {"num": len(close), "files": close, "below": far}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="of the units' matrices: 4 buckets each by default")
    parser.add_argument("--store", type=Path, default=ROOT / "runs", help="where the folder for the store is made")
    args = parser.parse_args()
    args.store.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        with tiered.Store(Path(folder) / "store", dram=32 * MiB, durable=False) as store:
            fault_in, update = measure(store, args.width)
    result = {"fault_in": show("a fault-in", fault_in), "bucket": show("a bucket's update", update)}
    print(json.dumps({"bench": "way", **result}))


if __name__ == "__main__":
    main()
