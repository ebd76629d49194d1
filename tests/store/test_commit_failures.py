"""A commit that fails loses its generation and nothing else, and the store says so until it is closed."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bytes.faulty import Errors, FaultyThreads
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import (
    WAIT_S,
    Counter,
    GatedDevice,
    GatedStore,
    assert_holds,
    await_true,
    filled,
    numbers,
    simulated_store,
    stored,
)
from tiered.bytes import critical_section
from tiered.bytes.arena import Arena
from tiered.errors import (
    CapacityError,
    ClosedError,
    DeadlineError,
    DeviceError,
)
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.lifetime.directory import CATALOG_NAME, Directories
from tiered.store.lifetime.opening import Parts, empty_root
from tiered.store.store import Store
from tiered.store.waiting.deadline import Deadline
from tiered.units import KiB, MiB

PAGE = 4 * KiB


# Failures


def _fail_write(gated: GatedStore) -> None:
    gated.device.fail = lambda operation: DeviceError("the drive said no") if operation.is_write else None


def _fail_flush(gated: GatedStore) -> None:
    gated.disk.fail_next("flush", DeviceError("the drive said no"))


def _fail_apply(gated: GatedStore) -> None:
    gated.catalog.failure = DeviceError("the drive said no")


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("fail", [_fail_write, _fail_flush, _fail_apply])
def test_after_a_failed_commit_only_close_is_left(fail: Callable[[GatedStore], None], wait: bool) -> None:
    gated = GatedStore()
    store = gated.store
    values = filled(store, seed=1)
    store.commit({"step": 1})
    filled(store, seed=2)
    fail(gated)
    calls: list[Callable[[], object]] = [
        lambda: store["ordinary"],
        lambda: store.__setitem__("a", numbers(3)),
        lambda: store.commit(),
        lambda: store.rollback(),
        lambda: store.working_set.lease("ordinary", "r"),
        lambda: store.verify(),
        lambda: len(store),
    ]
    if wait:
        calls.insert(0, lambda: store.commit({"step": 2}))
    else:
        store.commit({"step": 2}, wait=False)
        store._generations._committer.wait()  # type: ignore[union-attr]
    for call in calls:
        with pytest.raises(DeviceError, match=r"generation 2 was not committed.*said no"):
            call()
    store.close()
    gated.device.fail = lambda operation: None
    gated.open()
    assert gated.store.generation == 1
    assert_holds(gated.store, values)
    assert gated.store.verify().is_clean
    gated.close()


def test_close_reports_a_failure_that_only_another_thread_has_seen(gated: GatedStore) -> None:
    gated.store["a"] = numbers(PAGE)
    _fail_write(gated)
    gated.store.commit(wait=False)
    told: list[str] = []

    def look() -> None:
        with pytest.raises(DeviceError) as caught:
            gated.store.wait_for_commit()
        told.append(str(caught.value))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(WAIT_S)
    assert len(told) == 1
    with pytest.raises(DeviceError, match="generation 1 was not committed"):
        gated.store.close()


def test_close_commits_what_a_write_ahead_of_need_failed_to_bring_to_the_device() -> None:
    gated = GatedStore()
    gated.store.put_many({"a": numbers(8 * KiB), "b": numbers(8 * KiB, 1)})
    _fail_write(gated)
    gated.store.working_set.swap_out(["a"])
    gated.device.fail = lambda operation: None
    gated.store.close()
    gated.open()
    assert_holds(gated.store, {"a": numbers(8 * KiB), "b": numbers(8 * KiB, 1)})
    gated.close()


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("step, fail", [("start", _refuse), ("_bootstrap", lambda thread: None)])
def test_a_commit_that_gets_no_thread_is_made_in_the_callers(
    step: str, fail: Callable[[threading.Thread], None], disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a thread that died of MemoryError before it reported keep the store's lock."""
    with simulated_store(disk) as store:
        values = filled(store)
        with monkeypatch.context() as patch:
            patch.setattr(critical_section, "_START_DEADLINE_S", 0.01)
            patch.setattr(threading.Thread, step, fail)
            assert store.commit({"step": 1}) == 1
            store["ordinary"] = values["ordinary"] = numbers(12 * KiB, 5)
            assert store.commit(wait=False) == 2
            assert store.generation == 2
            threading._limbo.clear()  # type: ignore[attr-defined]  # the library's list keeps a thread that died so
        assert store.commit() == 3
    with simulated_store(disk) as store:
        assert_holds(store, values)


def test_too_little_space_seals_nothing_and_says_what_a_commit_would_free(disk: SimulatedDisk) -> None:
    with simulated_store(disk, budget_nbytes=2 * MiB) as store:
        values = {name: numbers(200 * KiB, seed) for seed, name in enumerate("abc")}
        store.put_many(values)
        store.commit()
        for name in values:
            store[name] = numbers(200 * KiB, 9)
        with pytest.raises(CapacityError, match=r"a commit would free 600.0 KiB"):
            store.commit()
        assert store.generation == 1
        store.rollback()
        assert_holds(store, values)
        store["a"] = values["a"] = numbers(200 * KiB, 9)
        assert store.commit() == 2
        assert_holds(store, values)


@pytest.mark.parametrize("nbytes", [600 * KiB, 1300 * KiB])
def test_a_full_store_names_the_largest_keys_to_delete(disk: SimulatedDisk, nbytes: int) -> None:
    with simulated_store(disk, budget_nbytes=4 * MiB) as store:
        store.put_many({f"{size}": numbers(size * KiB, size) for size in (100, 250, 300, 150)})
        store.commit()
        remedy = r"free 0 B\. Or delete keys, then commit.*largest are '300' \(300.0 KiB\), '250'"
        with pytest.raises(CapacityError, match=remedy):
            store["new"] = value = numbers(nbytes)
            store.commit()
        store.rollback()
        del store["300"], store["250"]
        store.commit()
        store["new"] = value = numbers(500 * KiB)
        store.commit()
        assert torch.equal(store["new"], value)


def test_a_full_store_without_commits_names_the_largest_keys_to_delete(disk: SimulatedDisk) -> None:
    with simulated_store(disk, budget_nbytes=MiB, durable=False) as store:
        store.put_many({f"{size}": numbers(size * KiB, size) for size in (300, 350, 260)})
        with pytest.raises(CapacityError, match=r"Or delete keys; the largest are '350'"):
            store["new"] = numbers(400 * KiB)
        del store["350"]
        store["new"] = value = numbers(400 * KiB)
        assert torch.equal(store["new"], value)


def test_each_block_that_lands_gives_a_commit_more_time() -> None:
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    with simulated_store(disk, budget_nbytes=128 * MiB, wrap=GatedDevice) as store:
        device = store._parts.devices[0]
        assert isinstance(device, GatedDevice)
        store["large"] = numbers(12 * MiB)  # three blocks
        device.hold = lambda operation: operation.is_write
        store.commit(wait=False)
        await_true(lambda: len(device.held) == 3)
        seen = {store.working_set.commit_progress()}
        for num_seen in (2, 3):
            device.device.submit([device.held.pop()])
            seen.add(store.working_set.commit_progress())
            assert len(seen) == num_seen
        device.open()


def test_each_block_that_arrives_gives_whoever_waits_for_it_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def let_one_through(deadline: Deadline, condition: threading.Condition, progress: object, **_: object) -> None:
        seen.append(progress)
        condition.release()
        num_blocks = store.working_set.space.progress.num_blocks
        device.device.submit([device.held.pop()])
        await_true(lambda: store.working_set.space.progress.num_blocks > num_blocks)
        condition.acquire()

    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    with simulated_store(disk, budget_nbytes=128 * MiB, wrap=GatedDevice) as store:
        device = store._parts.devices[0]
        assert isinstance(device, GatedDevice)
        store["large"] = numbers(12 * MiB)
        store.commit()
        stored(store.working_set, "large")
        device.hold = lambda operation: not operation.is_write
        with monkeypatch.context() as patch:
            patch.setattr(Deadline, "wait", let_one_through)
            assert store.working_set.lease("large", "r").release()
        assert len(seen) == len(set(seen)) == 3


def test_waiting_for_a_commit_ends_with_the_deadline_and_the_commit_goes_on(gated: GatedStore) -> None:
    values = filled(gated.store)
    gated.catalog.may_apply.clear()
    gated.store.commit(wait=False)
    assert gated.catalog.reached.wait(WAIT_S)
    gated.store.working_set.deadline_s = 0.05
    with pytest.raises(DeadlineError, match="running commit"):
        gated.store.wait_for_commit()
    gated.store.working_set.deadline_s = WAIT_S  # order: it takes longer than that on a busy machine
    gated.catalog.may_apply.set()
    gated.store.wait_for_commit()
    assert gated.store.generation == 1
    assert_holds(gated.store, values)


# Failures of a real drive


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[[], tuple[Store, FaultyThreads]]]:
    """Opens the one store in ``tmp_path``, its system calls in the test's hands."""
    opened: list[Store] = []

    def open_store() -> tuple[Store, FaultyThreads]:
        directories = Directories.open([tmp_path / "run"])
        path = directories.paths[0] / CATALOG_NAME
        root = empty_root(directories.store_uuid, 1)
        catalog = SqliteCatalog.create(path, root) if directories.created else SqliteCatalog(path)
        device = FaultyThreads(directories.paths[0], num_threads=2)
        parts = Parts(Arena(16 * MiB), [device], catalog, directories)
        store = Store._from_parts(parts, deadline_s=WAIT_S)
        opened.append(store)
        return store, device

    yield open_store
    for store in opened:
        try:
            store.close()
        except DeviceError:
            pass


def test_a_drive_that_refuses_a_write_loses_that_generation_only(drive: Callable[..., Any]) -> None:
    store, device = drive()
    values = {name: numbers(300_000, seed) for seed, name in enumerate("abc")}
    store.put_many(values)
    store.commit({"step": 1})
    store["a"] = numbers(300_000, 9)
    device.fault = lambda call, fd, memory, offset: (_ for _ in ()).throw(OSError(errno.EIO, "no"))
    with pytest.raises(DeviceError, match="generation 2 was not committed"):
        store.commit({"step": 2})
    device.fault = None
    store.close()
    store, _ = drive()
    assert store.state == {"step": 1}
    assert_holds(store, values)
    assert store.verify().is_clean


def test_a_drive_whose_flush_fails_is_not_written_to_again(drive: Callable[..., Any]) -> None:
    store, device = drive()
    values = {name: numbers(300_000, seed) for seed, name in enumerate("abc")}
    store.put_many(values)
    store.commit({"step": 1})
    store["a"] = numbers(300_000, 9)
    device.sync_error = OSError(errno.EIO, "no")
    with pytest.raises(DeviceError, match="generation 2 was not committed"):
        store.commit({"step": 2})
    written = store.statistics().write_bytes
    with pytest.raises(DeviceError, match="generation 2 was not committed"):
        store["b"] = numbers(300_000, 9)
    with pytest.raises(DeviceError, match="generation 2 was not committed"):
        store.commit()
    assert store.statistics().write_bytes == written
    store.close()
    store, _ = drive()
    assert store.generation == 1
    assert_holds(store, values)


def test_a_drive_that_stumbles_on_reads_is_read_again(drive: Callable[..., Any]) -> None:
    store, device = drive()
    store["a"] = numbers(300_000)
    store.working_set.swap_out(["a"])
    store.working_set.unreserve(store.working_set.reserve(16 * MiB))
    device.fault = Errors(errno.EIO, errno.EIO, errno.EIO)
    assert torch.equal(store["a"], numbers(300_000))


def test_a_lease_that_failed_keeps_no_tensor_of_its_callers_alive(gated: GatedStore) -> None:
    # A device that completes inside submit fails in the frames of whoever is in the middle of a lease.
    store = gated.store
    store["a"] = numbers(3 * PAGE, 1)
    store.commit()
    _fail_write(gated)
    for name in "bcdefgh":
        try:
            store.working_set.create(name, 4 * PAGE)
            store.working_set.lease(name, "w").release()
        except DeviceError:
            pass
    assert not store.working_set.users


def test_a_closed_store_refuses_everything_but_close(store: Store) -> None:
    store.close()
    store.close()
    assert "closed" in repr(store)
    calls: list[Callable[[], object]] = [
        store.commit,
        store.rollback,
        store.resume,
        store.verify,
        store.wait_for_commit,
        lambda: store["a"],
        lambda: store.get("a"),
        lambda: store.__setitem__("a", numbers(1)),
        lambda: store.__delitem__("a"),
        lambda: "a" in store,
        lambda: list(store),
        lambda: store.register("a", Counter()),
        lambda: store.__enter__(),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_a_directory_that_is_moved_while_it_is_open_loses_the_open_generation_only(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="8MiB") as store:
        store["a"] = numbers(10_000)
        store.commit({"step": 1})
        (tmp_path / "run").rename(tmp_path / "moved")
        store["a"] = numbers(10_000, 1)
        with pytest.raises(DeviceError, match="was moved, or removed, while the store was open"):
            store.commit({"step": 2})
    with Store(tmp_path / "moved", dram="8MiB") as store:
        assert store.state == {"step": 1} and torch.equal(store["a"], numbers(10_000))


def test_a_paused_reader_of_the_catalog_loses_the_open_generation_only(tmp_path: Path) -> None:
    """As a stopped ``tiered inspect`` is, in the midst of its look."""
    with Store(tmp_path / "s", dram="8MiB") as store:
        store["a"] = numbers(8 * KiB)
        store.commit({"step": 1})
        writer = store._generations._committer._catalog  # type: ignore[union-attr]
        with closing(sqlite3.connect(tmp_path / "s" / CATALOG_NAME, isolation_level=None)) as reader:
            writer._connection.execute("PRAGMA busy_timeout=10")  # type: ignore[union-attr]
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM root").fetchall()
            store["a"] = numbers(8 * KiB, 1)
            with pytest.raises(DeviceError, match=r"generation 2 was not committed: .* another process holds it"):
                store.commit({"step": 2})
    with Store(tmp_path / "s", dram="8MiB") as store:
        assert torch.equal(store["a"], numbers(8 * KiB)) and store.state == {"step": 1} and store.verify().is_clean


def test_a_state_too_large_for_the_catalog_costs_the_call_and_not_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered.store.catalog.sqlite_catalog._MAX_VALUE_NBYTES", 1 * MiB)
    with Store(tmp_path / "s", dram="8MiB") as store:
        store["a"] = numbers(8 * KiB)
        for wait in (True, False):
            with pytest.raises(CapacityError, match=r"is 20000\d\d bytes of JSON, .* nothing was sealed"):
                store.commit({"text": "x" * 2_000_000}, wait=wait)
        assert store.commit({"step": 1}) == 1
    with Store(tmp_path / "s", dram="8MiB") as store:
        assert store.state == {"step": 1}
