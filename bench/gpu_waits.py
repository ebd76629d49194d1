#!/usr/bin/env python3
"""How often a settled step of a model waits for its device, by every witness that there is; and how busy streams are.

Usage: python bench/gpu_waits.py [--device cuda --store DIR]

A witness is believed only where it sees the wait of a planted `.item()`; one that does not is a line with "why", and
says no count. Wrong are a wait in a step, and a device without one witness that sees.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing is installed

import torch

from bench.gpu_device import part_arguments, said, simulated_device
from bench.gpu_runs import busy_by_stream, settled_step, waits_by_profiler, waits_by_warning, waits_of_simulated
from bench.gpu_sizes import TINY, Sizes
from tiered.units import GiB, MiB
from tiered.zero.compute_device import named_device

__all__ = ["counted"]

STREAMS = Sizes(layers=4, width=2048, context=512, batch=8, micro_steps=1, dram=4 * GiB, device_memory=2 * GiB)
Witness = Callable[[Callable[[], object]], dict[str, int]]


def counted(name: str, witness: Witness, step: Callable[[], object], planted: Callable[[], object]) -> dict[str, Any]:
    """Return what ``witness`` counts in ``step``, or why nothing: it must count something in ``planted``."""
    try:
        if not sum(witness(planted).values()):
            return {"witness": name, "why": "no wait was seen where one was planted"}
        waits = witness(step)
    except RuntimeError as error:
        return {"witness": name, "why": str(error)}
    found: dict[str, Any] = {"witness": name, "num_waits": sum(waits.values()), "waits": waits}
    return found | ({"wrong": f"{name}: a settled step waits: {waits}"} if waits else {})


def main() -> None:
    args = part_arguments(__doc__).parse_args()
    witnesses: dict[str, Witness] = {"torch's profiler": waits_by_profiler}
    if args.device == "sim":
        witnesses = {"the simulated device": waits_of_simulated}
    elif torch.cuda.is_available():
        witnesses["torch's warnings"] = waits_by_warning
    with simulated_device(args.device), tempfile.TemporaryDirectory(dir=args.store, prefix="waits-") as folder:
        device = named_device(args.device)
        value = torch.ones(4, device=device)
        for update_on in ("cpu", "device"):
            place, sizes = Path(folder) / update_on, replace(TINY, dram=64 * MiB, device_memory=32 * MiB)
            with settled_step(device, place, sizes, update_on) as step:
                found = [counted(name, each, step, lambda: value.sum().item()) for name, each in witnesses.items()]
            for each in found:
                said({"update_on": update_on} | each)
            if not any("num_waits" in each for each in found):
                said({"wrong": "no witness sees waits on this machine: nothing is known of them"})
        with settled_step(device, Path(folder) / "streams", TINY if args.tiny else STREAMS, "cpu") as step:
            try:
                said({"streams": busy_by_stream(step, device)})
            except RuntimeError as error:
                said({"streams": None, "why": str(error)})


if __name__ == "__main__":
    main()
