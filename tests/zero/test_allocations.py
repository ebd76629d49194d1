"""Nothing larger than a unit is ever allocated outside the arena.

The profiler sees torch's allocations in the main thread and in autograd's; those of the update thread are bounded by
the resident size that test_bounded.py measures.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiered
from tiered.units import MiB

WIDTH = 512
UNIT_NBYTES = 4 * WIDTH * WIDTH * 2  # four bf16 matrices


class Net(nn.Module):
    """Six units of 2 MiB of parameters each; what is saved for backward is smaller still."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().square().mean()


@pytest.mark.parametrize("state", ["exact", "compact"])
@pytest.mark.parametrize("update", ["backward", "step"])
def test_nothing_larger_than_a_unit_is_allocated_outside_the_arena(update: str, state: str, tmp_path: Path) -> None:
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16)
    # ``acc_events``: without it torch 2.11 warns at a process's first profile, even at one of a single cycle.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tiered.Store(tmp_path / "store", dram=24 * MiB) as store:
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
            with tiered.construct(store):
                model = Net()
            model = tiered.shard(model, store, param_dtype=torch.bfloat16)
            optimizer = tiered.AdamW(model.parameters(), update=update, state=state)
            for _ in range(2):
                for _ in range(1 if update == "backward" else 2):
                    model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
                store.commit(wait=False)
            model.eval()
            with torch.no_grad():
                model(x)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(sizes) >= WIDTH * WIDTH * 4  # it sees the constructor's own fp32
    assert max(sizes) <= UNIT_NBYTES, f"the largest of {len(sizes)} tensors has {max(sizes)} bytes"
