"""Stores that nobody closes: what is given back once nobody has them, and what is said while somebody still does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tiered
from tests.store.rig import numbers
from tests.store.test_reentry import no_hang
from tiered.bytes.arena import Arena
from tiered.store.lifetime.dropping import finish_dropping
from tiered.store.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:the store .* was not closed:ResourceWarning")


def test_a_store_that_nobody_has_gives_everything_back_without_a_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forget() -> None:
        store = Store(tmp_path / "run", dram="8MiB")
        store["a"] = numbers(100_000)
        store.commit({"step": 1})
        store["b"] = numbers(200_000)

    threads, num_fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.warns(ResourceWarning, match=r"run, opened at .*test_dropped.py:\d+, was not closed"):
        forget()
    finish_dropping()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, num_fds)
    assert "changes to 1 keys" in caplog.text and "since generation 1 are dropped" in caplog.text
    with Store(tmp_path / "run", dram="8MiB") as store:
        assert (list(store), store.state) == (["a"], {"step": 1})
        assert torch.equal(store["a"], numbers(100_000))


def test_no_cycle_keeps_a_store_that_nobody_has(tmp_path: Path) -> None:
    arena = Arena(8 << 20)
    gc.disable()
    try:
        store = Store(tmp_path / "run", dram="8MiB", _arena=arena)
        store["a"] = numbers(100_000)
        with store.lease("a") as view:
            assert view.numel() == 100_000
        del store, view
        with no_hang():
            while arena.leased_nbytes or any(thread.name.startswith("tiered") for thread in threading.enumerate()):
                time.sleep(0.01)
    finally:
        gc.enable()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiered")]


def test_the_last_name_of_a_store_may_go_under_a_lock_that_a_new_thread_takes(tmp_path: Path) -> None:
    """As any lock, in a collection: what the standard library starts threads by waits for such a thread."""
    lock = getattr(threading, "_shutdown_locks_lock", None) or threading.Lock()  # gone from Python 3.13 on
    store = Store(tmp_path / "run", dram="8MiB")
    with no_hang(), lock:
        del store
    finish_dropping()
    Store(tmp_path / "run", dram="8MiB").close()


@pytest.mark.parametrize("engine", ["threads", "aiofiles", "auto"])
def test_a_commit_under_way_is_finished_and_the_directory_can_be_opened_at_once(tmp_path: Path, engine: str) -> None:
    for step in range(5):
        store = Store(tmp_path / "run", dram="16MiB", engine=engine)
        assert store.state == ({"step": step - 1} if step else {})
        store.put_many({f"{i}": numbers(1_000_000, step + i) for i in range(5)})
        store.commit({"step": step}, wait=False)
        del store
    with Store(tmp_path / "run", dram="16MiB") as store:
        assert all(torch.equal(store[f"{i}"], numbers(1_000_000, 4 + i)) for i in range(5))


def test_tensors_of_a_lease_outlive_a_store_that_nobody_has(tmp_path: Path) -> None:
    arena = Arena(8 << 20)
    store = Store(tmp_path / "run", dram="8MiB", _arena=arena)
    store["a"] = numbers(100_000)
    tensor = store.working_set.lease("a", "r").tensor
    del store
    finish_dropping()
    assert torch.equal(tensor, numbers(100_000))
    assert arena.leased_nbytes == 102_400
    del tensor
    assert arena.leased_nbytes == 0


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_training_that_nobody_has_any_more_can_be_begun_again(tmp_path: Path, update: str) -> None:
    def train() -> int:
        store = Store(tmp_path / "run", dram="16MiB")
        model = tiered.shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), store)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-3, update=update)
        step = int(store.resume().get("step", 0))
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        store.commit({"step": step + 2}, wait=False)
        model(torch.ones(2, 16)).sum().backward()
        return step

    assert [train() for _ in range(3)] == [0, 2, 4]
    finish_dropping()


def test_who_still_has_a_store_is_told_where_it_was_opened(tmp_path: Path) -> None:
    store = Store(tmp_path / "run", dram="8MiB")  # opened here
    (tmp_path / "link").symlink_to(tmp_path / "run")
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# opened here"))
    match = rf"open in process {os.getpid()}: .* opened, at {__file__}:{line}, with store.close\(\)"
    with pytest.raises(tiered.UsageError, match=match):
        Store(tmp_path / "link", dram="8MiB")
    store.close()


def test_the_end_of_the_process_says_what_is_dropped(tmp_path: Path) -> None:
    code = (
        "import sys, torch, tiered\n"
        "store = tiered.Store(sys.argv[1], dram='8MiB')\n"
        "store['x'] = torch.ones(10)\n"
        "store.commit()\n"
        "store['y'] = torch.ones(500_000)\n"
    )
    command = [sys.executable, "-c", code, os.fspath(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (0, "", 1)
    assert "changes to 1 keys" in found.stderr and "since generation 1 are dropped" in found.stderr
