#!/usr/bin/env python3
"""Two ranks on two cards of this machine, by the device's own collectives: the bits of plain PyTorch on one of them.

Usage: bench/gpu_ranks.py [--tiny]

Each line has a case, the seconds that it took, and "wrong" where the bits differ. A machine with one card has none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any

import torch

from tests.accelerator import simulated
from tests.ranks.processes import StartedRanks
from tests.ranks.test_training import assert_same

DEVICE = os.environ.get("TIERED_TEST_DEVICE", "cuda")
_KINDS = {"cuda": "nccl", "xpu": "xccl", "sim": "sim_collectives"}
_WORLD = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one case, to see that the script runs")
    tiny = parser.parse_args().tiny
    if DEVICE == "sim":
        simulated.load()
    elif torch.accelerator.device_count() < _WORLD:
        print(json.dumps({"num_devices": torch.accelerator.device_count(), "note": "ranks want two cards"}))
        return
    cases = itertools.product(("fp32", "bf16"), ("step", "backward"), (3, 1), (_KINDS.get(DEVICE, "gloo"), "gloo"))
    with StartedRanks(_WORLD, sys.executable, limit_s=120.0) as ranks:
        for dtype, update, stage, kind in itertools.islice(cases, 1 if tiny else None):
            options: dict[str, Any] = {"model": "gpt", "world": _WORLD, "dtype": dtype, "update": update}
            begun = time.monotonic()
            found = ranks.run("train", **options, stage=stage, kind=kind, device=DEVICE)
            wanted = ranks.run("expect_on", **options, device=DEVICE)[0]
            line = {**options, "stage": stage, "kind": kind, "seconds": round(time.monotonic() - begun, 1)}
            try:
                assert_same(found, wanted)
                differing = {}
            except AssertionError as error:
                differing = {"wrong": f"bits differ: {error}"[:300]}
            print(json.dumps(line | differing), flush=True)


if __name__ == "__main__":
    main()
