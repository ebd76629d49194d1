"""Stores that nobody closes: what is given back once they are garbage, and what is said."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch

import tiered
from tests.rigs.warm_python import WarmPython
from tests.store.rig import numbers, simulated_store
from tests.store.test_nested_calls import no_hang
from tests.store.together import Together
from tiered.bytes.arena import Arena
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
    with pytest.warns(ResourceWarning, match="run was not closed: nothing is committed by that; close it"):
        forget()
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
        assert not arena.leased_nbytes
    finally:
        gc.enable()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiered")]


def test_a_store_that_becomes_garbage_where_nobody_may_wait_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under the lock that threads start under, in a collection, or in one of tiered's own threads."""
    store = Store(tmp_path / "run", dram="8MiB")
    resources = store._resources
    monkeypatch.setattr(threading, "_shutdown_locks_lock", threading.Lock(), raising=False)
    lock = threading._shutdown_locks_lock  # type: ignore[attr-defined]
    with no_hang(), lock, pytest.warns(ResourceWarning, match="its directories stay locked"):
        del store
    with pytest.raises(tiered.UsageError, match=rf"open in process {os.getpid()}: .* close it first here"):
        Store(tmp_path / "run", dram="8MiB")
    resources.give_back()
    Store(tmp_path / "run", dram="8MiB").close()


def test_garbage_waits_for_a_commit_that_hangs_no_longer_than_the_deadline() -> None:
    together = Together()
    together.may_confirm.clear()
    store = simulated_store(confirmation=together, deadline_s=0.1)
    store["a"] = numbers(6000)
    store.commit(wait=False)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "tiered-commit"]
    resources = store._resources
    with pytest.warns(ResourceWarning, match="its directories stay locked"):
        del store
    together.may_confirm.set()
    thread.join()
    resources.give_back()


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
    assert torch.equal(tensor, numbers(100_000))
    assert arena.leased_nbytes == 102_400
    del tensor
    assert arena.leased_nbytes == 0


def test_the_end_of_the_process_says_what_is_dropped(tmp_path: Path, warm_python: WarmPython) -> None:
    code = (
        "import sys, torch, tiered\n"
        "store = tiered.Store(sys.argv[1], dram='8MiB')\n"
        "store['x'] = torch.ones(10)\n"
        "store.commit()\n"
        "store['y'] = torch.ones(500_000)\n"
    )
    command = [warm_python.executable, "-c", code, os.fspath(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (0, "", 1)
    assert "changes to 1 keys" in found.stderr and "since generation 1 are dropped" in found.stderr
