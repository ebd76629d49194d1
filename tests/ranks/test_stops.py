"""Ctrl-C and SIGTERM in the loop of docs/ranks.md: as written, and with the lines that stop all after the same step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import textwrap
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from tests.rigs.warm_python import WarmPython
from tests.test_docs import ROOT, blocks

_COMMIT = '            store.commit({"step": step}, wait=False)\n'
_NUM_STEPS = 12
_LIMIT_S = 120

_BEFORE = """
import json
import os
import signal
import threading
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import tiered
torch.set_num_threads(1)
torch.manual_seed(1)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 8))
coming = json.loads(os.environ["TIERED_TEST_SIGNALS"]).get(os.environ["RANK"], [])
def Net():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
def mse_loss(found, wanted):
    loss = torch.nn.functional.mse_loss(found, wanted)
    print("step", step, loss.item().hex(), flush=True)
    if coming and coming.pop(0):  # from another thread: wherever it strikes this one
        threading.Thread(target=os.kill, args=(os.getpid(), coming.pop(0))).start()
    return loss
"""

_AFTER = """
print("ended", step)
dist.destroy_process_group()
"""

Lines = list[list[str]]


class Loop:
    """The loop of the page on two ranks, in a folder; ``as_written`` or with the lines that stop it."""

    def __init__(self, folder: Path, python: WarmPython) -> None:
        folder.mkdir()
        self._folder, self._python = folder, python
        loop, actions, stop = blocks(ROOT / "docs/ranks.md", "python")
        assert loop.count(_COMMIT) == 1
        self._as_written = loop
        self._stopping = actions + loop.replace(_COMMIT, _COMMIT + textwrap.indent(stop, " " * 8))

    def run(self, signals: dict[int, signal.Signals], *, as_written: bool = False) -> tuple[list[int], list[Lines]]:
        """Have ``signals`` come to ranks in their third step; return the status and the lines of each rank."""
        text = _BEFORE + (self._as_written if as_written else self._stopping) + _AFTER
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        told = {
            "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT),
            "TIERED_TEST_SIGNALS": json.dumps({rank: [0, 0, 1, number] for rank, number in signals.items()}),
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [self._python.executable, "-c", text], cwd=self._folder, text=True, stdout=subprocess.PIPE,
                env=os.environ | told | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        with ThreadPoolExecutor() as threads:
            said = list(threads.map(lambda each: each.communicate(timeout=_LIMIT_S)[0], ranks))
        return [each.returncode for each in ranks], [[line.split() for line in each.splitlines()] for each in said]


def _losses(lines: Lines) -> list[Any]:
    return [words[1:] for words in lines if words[0] == "step"]


def test_ranks_that_are_asked_to_stop_go_on_to_the_bits_of_an_undisturbed_run(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """As written the last commit stays; with the lines of the page no step is lost or made twice, on any rank."""
    _, undisturbed = Loop(tmp_path / "whole", warm_python).run({})
    loop, to_all = Loop(tmp_path / "run", warm_python), {0: signal.SIGINT, 1: signal.SIGINT}
    statuses, struck = loop.run(to_all, as_written=True)
    assert all(statuses), "each rank has failed"
    lives = [loop.run({1: signal.SIGTERM}), loop.run(to_all), loop.run({}), loop.run({})]
    for statuses, found in lives:
        assert statuses == [0, 0], found
        assert found[0][-1] == found[1][-1], "both end after the same step"
    for rank, wanted in enumerate(map(_losses, undisturbed)):
        made = [_losses(found[rank]) for _, found in lives]
        assert all(3 <= len(each) < _NUM_STEPS - 3 for each in made[:3]) and not made[3], made
        again, before = [*chain(*made)], _losses(struck[rank])
        assert before == wanted[: len(before)]
        assert again == wanted[-len(again) :] and 1 <= _NUM_STEPS - len(again) <= len(before), "a commit was kept"
