"""Processes of torchrun: ranks that it starts again go on from the last commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SCRIPT = """
import hashlib, json, os, signal, sys
import torch
import torch.distributed as dist
import tiered

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
with tiered.Store(sys.argv[1], dram="64MiB") as store:
    model = tiered.shard(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)), store)
    optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    first = step = store.resume().get("step", 0)
    while step < 8:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if sys.argv[2] == str(rank) and step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        step += 1
        store.commit({"step": step})
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()
if rank == 0:
    print(json.dumps({"digest": digest, "first": first}))
dist.destroy_process_group()
"""


def test_torchrun_starts_all_ranks_again_after_the_loss_of_one(tmp_path: Path) -> None:
    """The variable keeps the addresses of ended processes from those of the next life."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    whole, again = (_run(script, tmp_path / str(killed), killed) for killed in (-1, 1))
    assert (whole["first"], again["first"]) == (0, 5)
    assert whole["digest"] == again["digest"]


def _run(script: Path, store: Path, killed: int) -> Any:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    ended = subprocess.run(
        [sys.executable, *words, str(script), str(store), str(killed)],
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])
