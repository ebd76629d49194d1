"""The runs of bench/gpu.py and gpu_waits.py: through the tiers, in device memory, and one whose calls are counted."""

from __future__ import annotations

import json
import shutil
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import tiered
from bench.gpu_sizes import Sizes
from tests.accelerator import simulated
from tiered.tools.cli import main as tiered_command
from tiered.tools.train.task import GPT

__all__ = [
    "busy_by_stream", "in_device_memory", "settled_step", "train", "waits_by_profiler", "waits_by_warning",
    "waits_of_simulated",
]  # fmt: skip

WAITING = ("DeviceSynchronize", "StreamSynchronize", "EventSynchronize")
RUNTIME = ("cudaLaunchKernel", "cudaMemcpyAsync", "cuLaunchKernel", "hipLaunchKernel", "hipMemcpyAsync")


def train(sizes: Sizes, device: torch.device, folder: Path) -> dict[str, Any]:
    """Run ``tiered train`` as a user does, and return its figures."""
    figures = folder / "figures.json"
    options = {
        "layers": sizes.layers, "width": sizes.width, "heads": sizes.shape.heads, "context": sizes.context,
        "batch": sizes.batch, "accumulate": sizes.micro_steps, "update": "backward", "steps": sizes.steps,
        "dram": str(sizes.dram), "device-memory": str(sizes.device_memory), "hold": 0,
        "activations": "recompute", "device": device, "store": folder / "run", "json": figures,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    try:
        if status := tiered_command(["train", *words, "--yes"]):
            raise SystemExit(f"tiered train ended with status {status}")
        reserved = torch.accelerator.max_memory_reserved()
        allocated = torch.accelerator.max_memory_allocated()
    finally:
        shutil.rmtree(folder / "run", ignore_errors=True)
        torch.accelerator.empty_cache()
    found: dict[str, Any] = json.loads(figures.read_text())
    peaks = {"peak_reserved_bytes": reserved, "peak_allocated_bytes": allocated}
    return found | peaks | {"seconds": statistics.median(found["step_seconds"][1:])}


# -- in device memory ----------------------------------------------------------------------------------------------


class Recomputed(GPT):
    """The same model, each block's activations computed again in backward, as the run through the tiers does."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.ln(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class InDeviceMemory:
    """The same training by plain PyTorch: bf16 parameters, fp32 masters, fused AdamW, all on ``device``."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.model = Recomputed(sizes.shape)
        self.masters = [torch.nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            torch.randint(0, 256, (2, sizes.batch, sizes.context), generator=generator).to(device)
            for _ in range(sizes.micro_steps)
        ]

    def step(self) -> float:
        total = 0.0
        for tokens, targets in self.batches:
            loss = self.model(tokens, targets)
            (loss / len(self.batches)).backward()
            total += loss.item()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
            self.optimizer.step()
            self.optimizer.zero_grad()
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
        return total / len(self.batches)


def in_device_memory(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return the seconds of each step in device memory."""
    try:
        training = InDeviceMemory(sizes, device)
        seconds = []
        for _ in range(sizes.steps):
            begun_s = time.perf_counter()
            training.step()
            torch.accelerator.synchronize(device)
            seconds.append(time.perf_counter() - begun_s)
    finally:
        training = None  # type: ignore[assignment]  # memory
        torch.accelerator.empty_cache()
    return {"step_seconds": seconds, "seconds": statistics.median(seconds[1:])}


# -- calls that wait -----------------------------------------------------------------------------------------------


@contextmanager
def settled_step(device: torch.device, folder: Path, sizes: Sizes, update_on: str) -> Iterator[Callable[[], None]]:
    """Give the step of a model that has trained some steps; losses are not looked at.

    Updated on the CPU, all parameters are copied in and all gradients out; on a device with room, neither is.
    """
    budgets = {"dram": sizes.dram, "device_memory": sizes.device_memory}
    with tiered.Store(folder / "settled", **budgets, durable=False) as store:
        with tiered.construct(store, device=device):
            model = GPT(sizes.shape)
        model = tiered.shard(
            model, store, param_dtype=torch.bfloat16, device=device, activations="keep", update_on=update_on
        )
        optimizer = tiered.AdamW(model.parameters(), lr=1e-4)
        tokens, targets = torch.randint(0, 256, (2, sizes.batch, sizes.context)).to(device)

        def step() -> None:
            model(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(4):
            step()
        yield step


def waits_by_profiler(step: Callable[[], object]) -> dict[str, int]:
    """Count by torch's profiler, in the step alone: the profiler itself waits as it ends.

    Raises RuntimeError where the profiler saw no call of the device's runtime: then no count means anything.
    """
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("the step"):
            step()
    events = profiler.events()
    begun_us, ended_us = next(
        (event.time_range.start, event.time_range.end) for event in events if event.name == "the step"
    )
    inside = [event.name for event in events if begun_us <= event.time_range.start <= ended_us]
    if not any(name.startswith(RUNTIME) for name in inside):
        raise RuntimeError(f"the profiler saw none of {', '.join(RUNTIME)} among {len(inside)} events: is CUPTI there?")
    return dict(Counter(name for name in inside if name.endswith(WAITING)))


def busy_by_stream(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return for how many seconds each stream of the device had work in ``step``, and what the step took in all.

    Raises RuntimeError where the profiler saw no work of the device.
    """
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        begun_s = time.perf_counter()
        step()
        torch.accelerator.synchronize(device)
        took_s = time.perf_counter() - begun_s
    busy: Counter[str] = Counter()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() not in (torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.PrivateUse1):
            kind = "copies" if "Memcpy" in event.name() else "kernels"
            busy[f"stream {event.device_resource_id()}, {kind}"] += event.duration_ns() / 1e9
    if not busy:
        raise RuntimeError("the profiler saw no work of the device: is CUPTI there?")
    return {"seconds": took_s, "busy_s": dict(busy)}


def waits_by_warning(step: Callable[[], object]) -> dict[str, int]:
    """Count what torch itself warns of as waiting for a CUDA device: item, nonzero, blocking copies, ..."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    words = [str(each.message).splitlines()[0] for each in caught]
    return dict(Counter(word for word in words if "called a synchronizing" in word))


def waits_of_simulated(step: Callable[[], object]) -> dict[str, int]:
    """Count what the simulated device saw."""
    simulated.reset()
    step()
    return dict(Counter(kind for kinds in simulated.blocking().values() for kind in kinds))
