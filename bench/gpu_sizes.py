"""The sizes of the runs of bench/gpu.py, by what a machine has. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tiered.tools.bench.report import Bandwidth
from tiered.tools.train.task import Shape
from tiered.units import MiB, format_bytes, format_count

__all__ = ["INTERIOR", "IN_MEMORY", "LAYERS", "TINY", "Machine", "Sizes", "io_bound", "sizes_for"]

STATE, READ, WRITTEN = 12, 14, 12  # bytes per parameter: all that lasts; a step's traffic with nothing held
DISK = 2 * STATE * 9 / 8 + 4  # two sets, files that grow by an eighth, the constructor's scratch
FIRST = 28  # bytes per parameter that building a model writes
IN_MEMORY = 18  # bf16 parameter, fp32 master, its gradient and two moments
BUDGETS = 4  # bytes per parameter of each budget: together two thirds of what lasts
INTERIOR = 34  # bytes of a block's activations per token and width, 16-bit, scores aside (arXiv:2205.05198)
_SHORTEST_S = 20.0  # however little is left
LAYERS, CONTEXT = 8, 1024
STEPS = 4  # the first warms up


@dataclass(frozen=True)
class Machine:
    """What there is to size a run by: bytes, bytes a second, operations a second."""

    disk_bytes: int
    ram_bytes: int
    device_bytes: int
    drive: Bandwidth
    flop_per_s: float


@dataclass(frozen=True)
class Sizes:
    """One run. ``micro_steps`` of ``batch`` samples each make a step."""

    layers: int
    width: int
    context: int
    batch: int
    micro_steps: int
    dram: int
    device_memory: int
    steps: int = STEPS
    is_compute_bound: bool = True  # as far as the formula goes

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.width, max(1, self.width // 64), self.context)

    @property
    def tokens(self) -> int:
        return self.context * self.batch * self.micro_steps

    def words(self) -> str:
        return (
            f"{format_count(self.shape.num_params)} parameters, {self.layers} layers of width {self.width}, "
            f"{self.tokens:,} tokens a step in {self.micro_steps} micro-steps, DRAM budget {format_bytes(self.dram)}, "
            f"device budget {format_bytes(self.device_memory)}"
        )


def sizes_for(machine: Machine, seconds: float) -> Sizes:
    """Return the largest run of few wide layers whose two builds and steps fit ``seconds``, memory and disk."""
    drive, seconds = machine.drive, max(seconds, _SHORTEST_S)
    per_param_s = READ / drive.read_bytes_per_s + WRITTEN / drive.write_bytes_per_s
    hidden = machine.flop_per_s * per_param_s / 8  # tokens of a step whose arithmetic takes as long as its I/O
    tokens = math.ceil(1.2 * hidden / CONTEXT) * CONTEXT
    build_s = FIRST / drive.write_bytes_per_s
    steps = 2 * STEPS + STEPS  # as long as the arithmetic takes twice, as long as the I/O takes once
    most = min(
        machine.disk_bytes * 0.8 / DISK,
        machine.ram_bytes * 0.5 / BUDGETS,
        seconds / (2 * build_s + 1.3 * steps * per_param_s),
    )
    kept = machine.device_bytes * 0.45  # of a step's activations: one width per layer and token, and the logits
    width_of_tokens = kept / (tokens * 2 * (LAYERS + 2))
    width = 128 * int(min(math.sqrt(most / (12 * LAYERS)), max(width_of_tokens, 1024), 8192) / 128)
    width = max(width, 256)
    if width > width_of_tokens:  # so many tokens have no room there: as many as have
        tokens = max(CONTEXT, int(kept / (width * 2 * (LAYERS + 2)) / CONTEXT) * CONTEXT)
    batch = max(1, min(tokens // CONTEXT, int(machine.device_bytes * 0.2 / (INTERIOR * width * CONTEXT))))
    num_params = Shape(LAYERS, width, width // 64, CONTEXT).num_params
    budget = BUDGETS * num_params
    return Sizes(
        LAYERS, width, CONTEXT, batch, max(1, round(tokens / CONTEXT / batch)), max(budget, 64 * MiB),
        max(budget, 32 * MiB), is_compute_bound=width <= width_of_tokens,
    )  # fmt: skip


def io_bound(sizes: Sizes) -> Sizes:
    """Return the same model with so few tokens that its step waits for the drive."""
    return replace(sizes, batch=1, micro_steps=1)


TINY = Sizes(layers=2, width=128, context=32, batch=2, micro_steps=2, dram=32 * MiB, device_memory=8 * MiB)
