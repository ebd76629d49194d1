#!/usr/bin/env python3
"""What the machine of scripts/gpu_check is: versions, driver, link, limits, room, and what is not installed.

Usage: python bench/gpu_machine.py [--device cuda --store DIR]

Wrong are a module that the check needs and this Python lacks, a device that torch does not have, and `tiered doctor`
with a status of its own. All other commands may be missing: their line says so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing is installed

import torch

from bench.gpu_device import part_arguments, said_of_each, simulated_device

NEEDED = ("aiofiles", "hypothesis", "numpy", "peft", "psutil", "pytest", "safetensors", "torch", "transformers",
          "typer", "xxhash")  # fmt: skip
LINK = ("name", "driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
        "pcie.link.width.max", "memory.total", "memory.used", "ecc.mode.current", "compute_mode")  # fmt: skip
VARIABLES = ("CUDA", "CUBLAS", "PYTORCH", "TORCH", "NVIDIA", "OMP", "LD_LIBRARY")


def answer(*command: str, timeout_s: float = 10.0) -> tuple[str, str]:
    """Return what ``command`` says and why nothing is known of it; one of them is ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"not known: {error}"
    if done.returncode:
        return done.stdout, f"status {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
    return done.stdout, ""


def modules() -> dict[str, Any]:
    """Return which modules are there; nothing is imported for it, which takes a minute where files are cold."""
    lacks = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    versions = {name: importlib.metadata.version(name) for name in NEEDED if name not in lacks}
    found: dict[str, Any] = {"modules": versions, "python": platform.python_version(), "kernel": platform.release()}
    return found | ({"wrong": f"this Python lacks {', '.join(lacks)}"} if lacks else {})


def device(word: str) -> dict[str, Any]:
    """Return what torch says of the device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found: dict[str, Any] = {
        "torch": torch.__version__, "accelerator": str(accelerator), "cuda": torch.version.cuda,
        "hip": torch.version.hip, "git": torch.version.git_version,
    }  # fmt: skip
    if accelerator is None or word not in ("auto", accelerator.type):
        return found | {"wrong": f"the device is to be {word!r}, and torch's accelerator is {accelerator}"}
    free, total = torch.accelerator.get_memory_info()
    found |= {"devices": torch.accelerator.device_count(), "free_bytes": free, "total_bytes": total}
    if accelerator.type == "cuda":
        properties = torch.cuda.get_device_properties()
        found |= {"name": properties.name, "multiprocessors": properties.multi_processor_count,
                  "capability": f"{properties.major}.{properties.minor}"}  # fmt: skip
        try:
            found["cudnn"] = torch.backends.cudnn.version()
        except RuntimeError as error:
            found["cudnn"] = f"not known: {str(error)[:200]}"
    return found


def link() -> dict[str, Any]:
    """Return what the card's tool says of the link; its whole answer goes to the log."""
    text, why = answer("nvidia-smi", f"--query-gpu={','.join(LINK)}", "--format=csv,noheader")
    if why:
        return {"nvidia-smi": None, "why": why}
    print(answer("nvidia-smi", "-q")[0])
    cards = [dict(zip(LINK, line.split(", "), strict=False)) for line in text.splitlines()]
    return {"nvidia-smi": cards}


def room(folder: Path) -> dict[str, Any]:
    """Return what the machine's own commands cannot say; their answers go to the log."""
    unknown = {}
    for command in (["bash", "-c", "ulimit -a"], ["free", "-m"], ["df", "-h", str(folder), "/dev/shm"], ["lscpu"]):
        text, why = answer(*command)
        print(text)
        unknown |= {" ".join(command): why} if why else {}
    return {"unknown": unknown}


def doctor(folder: Path) -> dict[str, Any]:
    """Return whether `tiered doctor` finds the machine in order; its answer goes to the log."""
    text, why = answer(sys.executable, "-m", "tiered.tools.cli", "doctor", str(folder), timeout_s=20)
    print(text)
    return {"wrong": f"tiered doctor: {why}"} if why else {"says": text.strip().splitlines()[-1]}


def main() -> None:
    args = part_arguments(__doc__).parse_args()
    args.store.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    with simulated_device(args.device):
        said_of_each(
            "of",
            (
                ("modules", modules), ("variables", lambda: environment), ("link", link),
                ("room", lambda: room(args.store)), ("device", lambda: device(args.device)),
                *(() if args.tiny else [("doctor", lambda: doctor(args.store))]),
            ),
        )  # fmt: skip


if __name__ == "__main__":
    main()
