#!/usr/bin/env python3
"""What DeepSpeed's asynchronous I/O does when a drive fails, and what tiered does: the same faults, one by one.

Usage: python bench/deepspeed_faults.py --deepspeed-python VENV/bin/python     (root; see bench/compare.py for VENV)

A FUSE file system makes one write or read of 8 MiB fail with EIO or ENOSPC, fall short, or lie; each engine writes a
file (or a key) there and reads it back. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the rigs

NUMEL = 8 << 20  # bytes
FAULTS: dict[str, dict[str, Any]] = {
    "EIO on a write": {"call": "write", "kind": "errno", "errno": errno.EIO},
    "ENOSPC on a write": {"call": "write", "kind": "errno", "errno": errno.ENOSPC},
    "short write": {"call": "write", "kind": "short", "nbytes": 4096},
    "lost write": {"call": "write", "kind": "lost"},
    "EIO on a read": {"call": "read", "kind": "errno", "errno": errno.EIO, "count": 1_000_000},
    "short read": {"call": "read", "kind": "short", "nbytes": 4096},
    "flipped bit on a read": {"call": "read", "kind": "flip"},
}

DEEPSPEED = """
import json, sys, torch
from deepspeed.ops.op_builder import AsyncIOBuilder
path, what, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 1)
buffer = handle.new_cpu_locked_tensor(numel, torch.empty(0, dtype=torch.uint8))
expected = (torch.arange(numel) * 31 % 251).to(torch.uint8)
said = "success"
try:
    buffer.copy_(expected) if what == "write" else buffer.zero_()
    result = handle.sync_pwrite(buffer, path) if what == "write" else handle.sync_pread(buffer, path)
    said = f"returned {result}" if result != 1 else "success"
except BaseException as error:
    said = f"{type(error).__name__}: {error}"
right = what == "write" or torch.equal(buffer, expected)
print(json.dumps({"said": said, "right": right}))
"""

TIERED = """
import json, sys, torch, tiered
path, what, numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
expected = (torch.arange(numel) * 31 % 251).to(torch.uint8)
said, right = "success", True
try:
    with tiered.Store(path, dram="32MiB") as store:
        if what == "write":
            store["key"] = expected
            store.commit()
        else:
            right = torch.equal(store["key"], expected)
except tiered.TieredError as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps({"said": said, "right": right}))
"""


def child(python: str, source: str, *arguments: object) -> dict[str, Any]:
    """Run ``source``; return its last line, or how it died."""
    command = [python, "-c", source, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"said": "hung for 120 s", "right": False}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"said": f"the process ended with {done.returncode}: {last}", "right": False}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def outcome(drive: Any, python: str, source: str, target: str, data: str, fault: dict[str, Any]) -> dict[str, Any]:
    """Return what a fault came to: what was said at once, and what is read afterwards from a drive that is well."""
    drive.call("script", rules=[])
    what = fault["call"]
    if what == "read":
        child(python, source, drive.mount / target, "write", NUMEL)
    drive.call("script", rules=[{"file": data, **fault}])
    first = child(python, source, drive.mount / target, what, NUMEL)
    hits = drive.call("report")["hits"]
    drive.call("script", rules=[])
    if what == "read":
        return {**first, "later": "", "num_hits": len(hits)}
    second = child(python, source, drive.mount / target, "read", NUMEL)
    later = "right bytes" if second["said"] == "success" and second["right"] else "wrong bytes"
    return {**first, "later": later if second["said"] == "success" else second["said"], "num_hits": len(hits)}


def verdict(found: dict[str, Any]) -> str:
    """Return a cell of the table."""
    if found["said"] != "success":
        return f"error: {found['said'].splitlines()[0][:70]}"
    if not found["right"] or found["later"] == "wrong bytes":
        return "success, WRONG BYTES"
    return "success, right bytes" if found["later"] in ("", "right bytes") else f"success; later {found['later'][:60]}"


def main() -> int:
    """Run all faults on both."""
    from tests.rigs.room import room

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed-python", required=True)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with room() as made:
        drive = made.daemon("faulty")
        for name, fault in FAULTS.items():
            results[name] = {
                "deepspeed": outcome(
                    drive, arguments.deepspeed_python, DEEPSPEED, f"{len(results)}.swp", f"{len(results)}.swp", fault
                ),
                "tiered": outcome(drive, sys.executable, TIERED, f"store-{len(results)}", "data-000", fault),
            }
            print(f"{name:22} DeepSpeed: {verdict(results[name]['deepspeed'])}", flush=True)
            print(f"{'':22} tiered:    {verdict(results[name]['tiered'])}", flush=True)
    print(json.dumps({"bench": "deepspeed_faults", "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
