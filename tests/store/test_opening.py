"""How a store is opened, looked at and closed, and what becomes of it in a fork and at the end of the process."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.bytes.moving import exit_code_of_child
from tests.rigs.warm_python import WarmPython
from tests.store.rig import WAIT_S, GatedDevice, numbers, simulated_store
from tiered.bytes.device.files import DataFiles
from tiered.errors import CapacityError, ClosedError, DeadlineError, UsageError
from tiered.store.lifetime import opening
from tiered.store.store import Store
from tiered.units import KiB, MiB


def without_triton(stderr: str) -> str:
    """Return ``stderr`` without what torch's builds for CUDA say of another library as a process ends."""
    return re.sub(r"nanobind: leaked.*?refleaks\.html\s*", "", stderr, flags=re.DOTALL)


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


def test_a_store_needs_directories_a_known_engine_and_a_budget(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a directory"):
        Store(dram="16MiB")
    Store(dram="16MiB", engine="memory", durable=False).close()
    with pytest.raises(ValueError, match="size"):
        Store(tmp_path / "run", dram="16MiB", device_memory="some")
    with pytest.raises(UsageError, match="did you mean 'threads'"):
        Store(tmp_path / "run", dram="16MiB", engine="thread")
    with pytest.raises(ValueError, match="mode"):
        Store(tmp_path / "run", dram="16MiB", mode="w")
    with pytest.raises(CapacityError, match=r"smallest is 8\.0 MiB"):
        Store(tmp_path / "run", dram="4MiB")
    with pytest.raises(ValueError, match="size"):
        Store(tmp_path / "run", dram="lots")
    assert not (tmp_path / "run").exists()


def test_modes_open_create_and_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Store(tmp_path / "run", dram="16MiB", mode="r")
    with Store(tmp_path / "run", dram="16MiB", mode="x") as store:
        store["a"] = numbers(10_000)
        store.commit({"step": 1})
    with pytest.raises(UsageError):
        Store(tmp_path / "run", dram="16MiB", mode="x")
    with Store(tmp_path / "run", dram="16MiB", mode="r") as store, Store(tmp_path / "run", dram="16MiB", mode="r"):
        assert torch.equal(store["a"], numbers(10_000))
        assert store.resume() == {"step": 1}
        assert store.verify().is_clean
        calls: list[Callable[[], object]] = [
            lambda: store.__setitem__("b", torch.ones(1)),
            lambda: store.__delitem__("a"),
            lambda: store.working_set.lease("a", "rw"),
            lambda: store.working_set.create("b", 1),
            store.commit,
            store.rollback,
            lambda: store.reserve_space(1),
        ]
        for call in calls:
            with pytest.raises(UsageError, match='mode="r"'):
                call()


def test_a_store_without_commits_leaves_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "swap", dram="16MiB", durable=False) as store:
        store.put_many({f"k{i}": numbers(1 * MiB, i) for i in range(40)})
        assert os.listdir(tmp_path / "swap") == []
        assert store.statistics().used_bytes >= 20 * MiB
    assert os.listdir(tmp_path / "swap") == []


def test_the_default_budget_is_half_of_what_is_free_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), Store(engine="memory") as store:
        assert store.working_set.budget_bytes >= 8 * MiB
    assert "half of free memory" in caplog.text


def test_space_can_be_reserved_before_it_is_needed(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store.reserve_space(70 * MiB)
        store.reserve_space(60 * MiB)
        before = store.statistics()
        assert before.free_bytes >= 130 * MiB
        store["a"] = numbers(100 * MiB)
        assert store.statistics().file_bytes == before.file_bytes
        with pytest.raises(CapacityError):
            store.reserve_space(1 << 60)
        store.reserve_space(1)
        assert store.statistics().file_bytes == before.file_bytes


def test_space_that_became_free_is_reserved_before_files_grow(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store["old"] = numbers(100 * MiB)
        store.commit()
        store.reserve_space(10 * MiB)
        del store["old"]
        store.commit()
        before = store.statistics()
        assert before.free_bytes >= 100 * MiB
        store.reserve_space(90 * MiB)
        assert store.statistics().file_bytes == before.file_bytes
        store["new"] = numbers(100 * MiB)
        assert store.statistics().file_bytes == before.file_bytes


def test_records_and_statistics_say_what_there_is(store: Store) -> None:
    store["a"] = torch.ones(3000, 2)
    (record,) = store.records()
    assert (record.name, record.dtype, record.shape, record.nbytes) == ("a", torch.float32, (3000, 2), 24_000)
    assert (record.residency, record.generation, record.extents) == ("dirty", -1, ())
    statistics = store.statistics()
    assert (statistics.num_keys, statistics.generation, statistics.peak_bytes) == (1, 0, 24 * KiB)
    assert statistics.stall_seconds >= 0
    assert re.search(r"open, 1 keys, generation 0, \w*Arena\(open, 24\.0 KiB of 16\.0 MiB", repr(store))


def test_fork_leaves_the_store_to_the_parent(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store["a"] = numbers(100_000)
        lease = store.working_set.lease("a", "r")

        def in_child() -> None:
            calls: list[Callable[[], object]] = [
                lambda: store["a"], lambda: store.commit(), lambda: len(store), lambda: list(store), store.records
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(UsageError, match="fork"):
                    call()
            lease.release()
            store.close()

        assert exit_code_of_child(in_child) == 0
        lease.release()
        assert torch.equal(store["a"], numbers(100_000))
        store.commit()


def test_the_end_of_the_process_lets_a_sealed_generation_become_durable(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    script = f"""
import torch
from safetensors.torch import save_file
from tiered.store.store import Store
store = Store({str(tmp_path / "run")!r}, dram="64MiB")
for i in range(20):
    store[f"k{{i}}"] = torch.full((500_000,), i, dtype=torch.float32)
lease = store.working_set.lease("k3", "r")
store.commit({{"step": 1}}, wait=False)
store["k3"] = torch.zeros(5000)
"""
    done = subprocess.run(
        [warm_python.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=WAIT_S * 2,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, without_triton(done.stderr).count("\n")) == (0, 1)
    assert "changes to 1 keys" in done.stderr and "since generation 1 are dropped" in done.stderr
    with Store(tmp_path / "run", dram="64MiB") as store:
        assert (store.generation, store.state) == (1, {"step": 1})
        assert all(torch.equal(store[f"k{i}"], torch.full((500_000,), float(i))) for i in range(20))


def test_views_outlive_the_store(store: Store) -> None:
    store["a"] = numbers(100_000)
    lease = store.working_set.lease("a", "r")
    tensor = lease.tensor
    store.close()
    assert torch.equal(tensor, numbers(100_000))
    del tensor
    assert lease.release()
    with pytest.raises(ClosedError):
        store["a"]


def test_a_hung_drive_does_not_lose_the_buffers_under_its_operations() -> None:
    gates: list[GatedDevice] = []

    def gate(device: object) -> GatedDevice:
        gates.append(GatedDevice(device))  # type: ignore[arg-type]
        return gates[0]

    store = simulated_store(budget_nbytes=64 * KiB, wrap=gate)  # type: ignore[arg-type]
    gates[0].hold = lambda operation: True
    store.working_set.deadline_s = 0.05
    with pytest.raises(Exception, match="did not happen within"):
        store["large"] = numbers(40 * KiB)
    assert store.working_set.statistics().arena_bytes == 40 * KiB
    assert store.statistics().used_bytes == 40 * KiB
    gates[0].open()
    assert store.working_set.statistics().arena_bytes == 0
    assert store.statistics().used_bytes == 0
    store.close()


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_opening_and_closing_many_times_leaves_nothing(quick_path: Path, engine: str) -> None:
    def open_once(value: int) -> None:
        with Store(quick_path / "run", dram="8MiB", engine=engine) as store:
            store["a"] = torch.full((5000,), value % 100, dtype=torch.uint8)

    for value in range(10):
        open_once(value)
    num_fds = len(os.listdir("/proc/self/fd"))
    logging.disable(logging.WARNING)  # of a directory in RAM, which pytest keeps
    tracemalloc.start()
    try:
        for value in range(10):
            open_once(value)
        growth = []
        while len(growth) < 4 and min(growth, default=KiB**2) >= 10 * KiB:  # a leak grows every time, a cache once
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for value in range(30):
                open_once(value)
            gc.collect()
            growth.append(tracemalloc.get_traced_memory()[0] - before)
        assert min(growth) < 10 * KiB, growth
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    assert len(os.listdir("/proc/self/fd")) == num_fds
    with Store(quick_path / "run", dram="8MiB", engine=engine) as store:
        assert store.generation == 20 + 30 * len(growth)


def test_the_files_leave_the_catalog_room_to_commit_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system of 40 MiB what fits is committed, what does not is refused, and a deletion is committed too."""
    capacity = 40 * MiB
    monkeypatch.setattr(
        DataFiles, "free_bytes", lambda self: capacity - sum(max(0, nbytes) for nbytes in self.sizes().values())
    )
    with Store(tmp_path, dram="8MiB") as store:
        with pytest.raises(CapacityError, match="more are needed on the devices"):
            for number in range(20):
                store[f"key {number}"] = torch.zeros(2 * MiB, dtype=torch.uint8)
                store.commit()
        assert number == 16  # 32 MiB are there, 8 are the catalog's
        assert sum(path.stat().st_size for path in tmp_path.glob("data-*")) <= capacity - opening.CATALOG_NBYTES
        store.rollback()  # what found no room is dirty, and a commit frees nothing before it is durable
        del store["key 0"]
        store.commit()
        store["another"] = torch.ones(2 * MiB, dtype=torch.uint8)
        store.commit()


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_store_that_atexit_closes_says_that_it_is_too_late(
    engine: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    code = (
        "import atexit, sys, torch, tiered\n"
        "def end():\n"
        "    try: store['x']\n"
        "    except tiered.ClosedError as error: print(error)\n"
        "    store.close()\n"
        "atexit.register(end)\n"
        f"store = tiered.Store(sys.argv[1], dram='8MiB', engine={engine!r})\n"
        "store['x'] = torch.ones(10)\n"
        "store.commit()\n"
        "store['y'] = torch.ones(500_000)\n"
    )
    command = [warm_python.executable, "-c", code, os.fspath(tmp_path / "store")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "the process is ending" in found.stdout
    assert "changes to 1 keys" in found.stderr and "since generation 1 are dropped" in found.stderr
    assert "ClosedError: the process is ending" in found.stderr and "with tiered.Store" in found.stderr
    with Store(tmp_path / "store", dram="8MiB") as store:
        assert list(store) == ["x"]


def test_a_catalog_that_hangs_in_a_commit_keeps_close_no_longer_than_the_deadline(tmp_path: Path) -> None:
    """The directories stay locked until the drive answers; then close ends, and the commit counts."""
    store = Store(tmp_path, dram="8MiB")
    store["a"] = numbers(5000)
    catalog: Any = store._parts.catalog
    connection, hangs, answers = catalog._connection, threading.Event(), threading.Event()

    class Hanging:
        def execute(self, sql: str, *parameters: object) -> object:
            if sql == "COMMIT":
                hangs.set()
                assert answers.wait(WAIT_S)
            return connection.execute(sql, *parameters)

        def __getattr__(self, name: str) -> object:
            return getattr(connection, name)

    catalog._connection = Hanging()
    catalog._deadline_s = store.working_set.deadline_s = 0.1
    store.commit(wait=False)
    assert hangs.wait(WAIT_S)
    for _ in range(2):
        with pytest.raises(DeadlineError, match="a call of another thread has not ended"):
            store.close()
        with pytest.raises(UsageError, match="close it first here"):
            Store(tmp_path, dram="8MiB")
    answers.set()
    catalog._deadline_s = WAIT_S
    store.close()
    with Store(tmp_path, dram="8MiB") as store:
        assert store.generation == 1 and torch.equal(store["a"], numbers(5000))


def test_each_part_of_an_open_store_says_its_state(quick_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, quick_path / "a.safetensors")
    with Store(quick_path / "run", dram="8MiB", external=[quick_path / "a.safetensors"]) as store:
        store["b"] = torch.zeros(2)
        found, seen = [store], {id(store)}
        for part in found:  # which grows
            for other in gc.get_referents(part, getattr(part, "__dict__", {})):
                is_ours = isinstance(other, tuple | list | dict) or type(other).__module__.startswith("tiered.store")
                if is_ours and id(other) not in seen:
                    seen.add(id(other))
                    found.append(other)
        told = {type(part).__name__: repr(part) for part in found if not isinstance(part, tuple | list | dict)}
    assert {"SqliteCatalog", "Directories", "ExternalSources", "ExtentAllocator", "Ledgers"} <= told.keys()
