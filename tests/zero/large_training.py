"""A process of its own that trains a model with far more state than its budget holds; prints one line of JSON.

usage: python -m tests.zero.large_training DIRECTORY DRAM_BYTES NUM_UNITS WIDTH

It takes a step in plain PyTorch, prints its resident bytes and what one layer takes there, and waits for a line on
standard input before it goes on.

The kernel knows the most bytes that a process had, but counts the pages of its libraries with them. These come and go
with the page cache, and a build of torch for CUDA has ten times as many: they are told apart.
"""

import json
import re
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import tiered
from tiered.bytes.arena import Arena

NUM_STEPS = 2
# A private mapping's path, and how many of its kB are in memory and how many of these the process has changed.
_MAPPINGS = re.compile(
    r"^[0-9a-f]+-[0-9a-f]+ ...p \S+ \S+ \S+ +(/.*)\n(?:.*\n)*?Rss: +(\d+) kB\n(?:.*\n)*?Anonymous: +(\d+) kB$", re.M
)


class Tower(nn.Module):
    """Square layers one after the other: many parameters and, with one row of input, little else."""

    def __init__(self, num_units: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_units))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def resident_nbytes() -> int:
    """Return the bytes of memory that this process has now."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))


def library_nbytes(directory: str) -> int:
    """Return the bytes of libraries' pages that this process has and has not changed; no file of ``directory`` counts.

    A private mapping of a file is a library's: the arena's memory has no file, or a shared one.
    """
    mappings = _MAPPINGS.findall(Path("/proc/self/smaps").read_text())
    return sum(int(rss) - int(changed) << 10 for path, rss, changed in mappings if not path.startswith(directory))


def train_plainly() -> None:
    """Take one step with torch's own optimizer, which imports torch's compiler, as ``tiered.shard`` does."""
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def plain_nbytes(width: int) -> int:
    """Return the bytes that plain PyTorch takes for a moment to train one layer, beside weight and gradient.

    Where the processor has no bf16 instructions, that is a copy of the gradient in fp32.
    """
    layer = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
    layer(torch.ones(1, width, dtype=torch.bfloat16)).float().square().mean().backward()
    return max(0, peak_nbytes() - resident_nbytes())


def peak_nbytes() -> int:
    """Return the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Saved:
    """Counts the bytes of saved tensors that are not parameters: what the reference keeps in memory, too."""

    def __init__(self) -> None:
        self.nbytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.nbytes += tensor.nbytes
        return tensor


def main(directory: str, dram_bytes: int, num_units: int, width: int) -> None:
    """Train and report."""
    train_plainly()
    library_bytes = library_nbytes(directory)
    own_bytes = resident_nbytes() - library_bytes
    before = {"own_bytes": own_bytes, "library_bytes": library_bytes, "plain_bytes": plain_nbytes(width)}
    print(json.dumps(before), flush=True)
    sys.stdin.readline()
    arena, saved = Arena(dram_bytes), Saved()
    with tiered.Store(directory, dram=dram_bytes, durable=False, _arena=arena) as store:
        torch.manual_seed(0)
        with tiered.construct(store):
            model = Tower(num_units, width)
        model = tiered.shard(model, store, param_dtype=torch.bfloat16)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-3, update="backward")
        losses = []
        for step in range(NUM_STEPS):
            x = torch.randn(1, width, generator=torch.Generator().manual_seed(step)).bfloat16()
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            library_bytes = max(library_bytes, library_nbytes(directory))
    report = {
        "losses": losses,
        "params": num_units * width**2,
        "saved_bytes": saved.nbytes // NUM_STEPS,
        "arena_peak_bytes": arena.peak_nbytes,
        "peak_rss_bytes": peak_nbytes(),
        "most_library_bytes": max(library_bytes, library_nbytes(directory)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
