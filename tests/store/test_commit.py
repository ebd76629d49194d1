"""Generations: what a commit contains, when it is durable, how to go back, and what a failure leaves."""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bytes.faulty import Errors, FaultyDevice
from tests.store.rig import WAIT_S, Counter, GatedStore, numbers, simulated_store
from tiered.bytes.arena import Arena
from tiered.bytes.device.memory import SimulatedDisk
from tiered.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    DeviceError,
    LeaseError,
    UsageError,
)
from tiered.store.catalog import SqliteCatalog
from tiered.store.directory import CATALOG_NAME, Directories
from tiered.store.extents import Extent
from tiered.store.opening import Parts, empty_root
from tiered.store.row import Root, Row
from tiered.store.simulated_catalog import SimulatedCatalog
from tiered.store.store import Store
from tiered.units import KiB, MiB

PAGE = 4 * KiB


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(capacity_nbytes=1 * MiB, can_lose_power=False)


@pytest.fixture
def store(disk: SimulatedDisk) -> Iterator[Store]:
    with simulated_store(disk) as made:
        yield made


@pytest.fixture
def gated() -> Iterator[GatedStore]:
    made = GatedStore()
    yield made
    made.close()


def filled(store: Store, seed: int = 0) -> dict[str, torch.Tensor]:
    """Put an inline, an ordinary and a streamed tensor; return what they are."""
    values = {"inline": numbers(100, seed), "ordinary": numbers(3 * PAGE, seed), "streamed": numbers(10 * PAGE, seed)}
    store.put_many(values)
    return values


def assert_holds(store: Store, values: dict[str, torch.Tensor]) -> None:
    assert set(store) == set(values)
    for name, value in values.items():
        assert torch.equal(store[name], value), name


# What is in a commit


def test_a_commit_survives_and_what_came_after_does_not(disk: SimulatedDisk) -> None:
    store = simulated_store(disk)
    values = filled(store)
    assert store.generation == 0
    assert store.commit({"step": 7}) == 1
    assert (store.generation, store.state) == (1, {"step": 7})
    filled(store, seed=1)
    store["new"] = numbers(PAGE)
    del store["ordinary"]
    with pytest.raises(ZeroDivisionError), store:
        raise ZeroDivisionError
    with simulated_store(disk) as store:
        assert_holds(store, values)
        assert (store.generation, store.state, store.resume()) == (1, {"step": 7}, {"step": 7})


def test_close_and_a_normal_exit_commit_what_changed(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        values = filled(store)
        store.commit({"step": 1})
        values["inline"] = store["inline"] = numbers(90)
    with simulated_store(disk) as store:
        assert_holds(store, values)
        assert (store.generation, store.state) == (2, {"step": 1})
    with simulated_store(disk) as store:
        assert store.generation == 2  # nothing had changed


def test_leaving_by_an_exception_says_what_is_dropped(disk: SimulatedDisk, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), simulated_store(disk) as store:
        filled(store)
        raise ZeroDivisionError
    assert "changes to 3 keys, 52.1 KiB, since generation 0 are dropped" in caplog.text


def test_an_unchanged_store_still_advances_with_its_state_and_writes_nothing(store: Store) -> None:
    filled(store)
    store.commit({"step": 1})
    before = store.statistics()
    assert store.commit({"step": 2}) == 2
    assert store.commit() == 3
    assert store.state == {"step": 2}
    assert store.statistics().write_bytes == before.write_bytes


def test_each_changed_byte_is_written_once_per_commit(store: Store) -> None:
    for i in range(5):
        store["a"] = numbers(3 * PAGE, i)
        with store.lease("a", "rw") as view:
            view.add_(1)
        before = store.statistics().write_bytes
        store.commit()
        assert store.statistics().write_bytes - before == 3 * PAGE


def test_a_state_that_cannot_be_kept_seals_nothing(store: Store) -> None:
    filled(store)
    with pytest.raises(TypeError, match=r"state\['model'\]"):
        store.commit({"model": object()})
    with pytest.raises(TypeError):
        store.commit([1])  # type: ignore[arg-type]
    assert store.generation == 0
    assert store.commit({"ok": (1, float("inf"), b"x")}) == 1
    assert store.state == {"ok": (1, float("inf"), b"x")}


def test_created_and_never_written_keys_are_in_no_commit(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        store.working_set.create("nothing", PAGE)
        store["a"] = numbers(PAGE)
        assert set(store) == {"a"}
    with simulated_store(disk) as store:
        assert set(store) == {"a"}


@pytest.mark.parametrize("mode", ["w", "rw"])
def test_an_open_lease_for_writing_refuses_commit_rollback_put_and_delete(store: Store, mode: str) -> None:
    values = filled(store)
    store.commit()
    lease = store.working_set.lease("ordinary", mode)
    lease.tensor.copy_(values["ordinary"])
    calls: list[Callable[[], object]] = [
        store.commit,
        store.rollback,
        lambda: store.__setitem__("ordinary", numbers(1)),
        lambda: store.__delitem__("ordinary"),
        lambda: store["ordinary"],
    ]
    for call in calls:
        with pytest.raises(LeaseError, match="'ordinary'"):
            call()
    lease.release()
    assert_holds(store, values)
    store.commit()


def test_a_lingering_lease_for_writing_refuses_commit_and_not_rollback(store: Store) -> None:
    values = filled(store)
    store.commit()
    lease = store.working_set.lease("ordinary", "rw")
    alias = lease.tensor[:1]
    lease.release()
    with pytest.raises(LeaseError, match="'ordinary'"):
        store.commit()
    store.rollback()
    alias.fill_(1)
    assert_holds(store, values)
    del alias, lease


def test_leases_for_reading_do_not_block_a_commit(store: Store) -> None:
    values = filled(store)
    lease = store.working_set.lease("ordinary", "r")
    assert store.commit() == 1
    store["ordinary"] = numbers(2 * PAGE, 5)
    store.rollback()
    assert torch.equal(lease.tensor, values["ordinary"])
    lease.release()
    assert_holds(store, values)


# The order of things


def test_the_catalog_is_written_last_and_after_every_flush(gated: GatedStore) -> None:
    filled(gated.store)
    gated.events.clear()
    gated.store.commit()
    assert gated.events[-2:] == ["flush", "apply"]
    assert set(gated.events[:-2]) == {"write"}


def test_superseded_bytes_are_not_overwritten_before_the_catalog_is_durable(gated: GatedStore) -> None:
    store = gated.store
    store["a"] = numbers(4 * PAGE, 1)
    store.commit()
    committed = store.records()[0].extents
    store["a"] = numbers(4 * PAGE, 2)
    gated.catalog.may_apply.clear()
    store.commit(wait=False)
    assert gated.catalog.reached.wait(WAIT_S)
    store["b"] = numbers(4 * PAGE, 3)
    store.working_set.swap_out(["b"])
    taken = [extent for record in store.records() for extent in record.extents]
    assert not set(committed) & set(taken)
    gated.catalog.may_apply.set()
    store.wait_for_commit()
    store["c"] = numbers(4 * PAGE, 4)
    store.working_set.swap_out(["c"])
    assert set(committed) & {extent for record in store.records() for extent in record.extents}


def test_a_commit_in_the_background_contains_the_moment_it_was_asked_for(gated: GatedStore) -> None:
    store = gated.store
    counter = Counter(1)
    store.register("counter", counter)
    values = filled(store, seed=1)
    gated.catalog.may_apply.clear()
    assert store.commit({"step": 1}, wait=False) == 1
    counter.count = 2
    filled(store, seed=2)
    store["later"] = numbers(PAGE)
    del store["inline"]
    assert store.generation == 0
    gated.catalog.may_apply.set()
    store.wait_for_commit()
    assert store.generation == 1
    store.rollback()
    assert_holds(store, values)
    assert counter.count == 1


def test_a_writer_waits_until_its_sealed_bytes_have_landed(gated: GatedStore) -> None:
    store = gated.store
    store["a"] = numbers(PAGE, 1)
    gated.device.hold = lambda operation: operation.is_write
    store.commit(wait=False)
    assert gated.device.has_held.wait(WAIT_S)
    assert torch.equal(store["a"], numbers(PAGE, 1))  # readers do not wait
    done = threading.Event()

    def write() -> None:
        with store.lease("a", "rw") as view:
            view.zero_()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not done.is_set()
    gated.device.open()
    thread.join(WAIT_S)
    assert done.is_set()
    store.rollback()
    assert torch.equal(store["a"], numbers(PAGE, 1))


def test_a_third_set_is_never_written(gated: GatedStore) -> None:
    store = gated.store
    store["a"] = numbers(4 * PAGE, 1)
    store.commit()
    store["a"] = numbers(4 * PAGE, 2)
    gated.catalog.may_apply.clear()
    store.commit(wait=False)
    assert gated.catalog.reached.wait(WAIT_S)
    store["a"] = numbers(4 * PAGE, 3)  # in DRAM: the committed and the sealed set are both in use
    store.working_set.swap_out(["a"])
    assert store.statistics().used_bytes == 8 * PAGE
    assert store.records()[0].residency == "dirty"
    gated.catalog.may_apply.set()
    store.wait_for_commit()
    store.working_set.swap_out(["a"])
    assert store.statistics().used_bytes == 8 * PAGE
    assert store.records()[0].residency == "clean"
    assert torch.equal(store["a"], numbers(4 * PAGE, 3))


def test_memory_is_had_by_waiting_for_the_commit_that_blocks_a_write(gated: GatedStore) -> None:
    store, full = gated.store, gated.budget_nbytes
    store["a"] = numbers(4 * PAGE, 1)
    store.commit()
    store["a"] = numbers(4 * PAGE, 2)
    gated.catalog.may_apply.clear()
    store.commit(wait=False)
    assert gated.catalog.reached.wait(WAIT_S)
    store["a"] = numbers(4 * PAGE, 3)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(store.working_set.reserve(full)))
    thread.start()
    while not store.working_set.room.num_waiting:
        assert thread.is_alive()
    gated.catalog.may_apply.set()
    thread.join(WAIT_S)
    store.working_set.unreserve(got[0])  # type: ignore[arg-type]
    assert torch.equal(store["a"], numbers(4 * PAGE, 3))


def test_a_second_commit_waits_for_the_first(gated: GatedStore) -> None:
    store = gated.store
    gated.catalog.may_apply.clear()
    store.commit(wait=False)
    thread = threading.Thread(target=lambda: store.commit(wait=False))
    thread.start()
    assert gated.catalog.reached.wait(WAIT_S)
    assert not gated.events.count("apply")
    gated.catalog.may_apply.set()
    thread.join(WAIT_S)
    store.wait_for_commit()
    assert store.generation == 2


def test_commits_from_many_threads_each_have_their_generation(store: Store) -> None:
    found: list[int] = []

    def work(name: str) -> None:
        for i in range(10):
            store[name] = numbers(2 * PAGE, i)
            found.append(store.commit())

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(found) == list(range(1, 31))
    assert store.generation == 30


# Going back


def test_rollback_restores_changed_deleted_and_replaced_keys_without_writing(store: Store) -> None:
    values = filled(store)
    store.commit({"step": 1})
    with store.lease("ordinary", "rw") as view:
        view.zero_()
    store["streamed"] = torch.ones(3)
    del store["inline"]
    store["inline"] = numbers(2 * PAGE, 4)
    store["new"] = numbers(PAGE)
    store.working_set.swap_out(store)
    before = store.statistics().write_bytes
    store.rollback()
    assert_holds(store, values)
    assert store.statistics().write_bytes == before
    assert store.statistics().used_bytes == 13 * PAGE
    assert store.commit() == 2
    assert_holds(store, values)


def test_rollback_of_a_store_without_commits_empties_it(store: Store) -> None:
    filled(store)
    store.rollback()
    assert_holds(store, {})
    assert store.statistics().used_bytes == 0


def test_rollback_loads_what_is_registered_and_needs_a_commit_for_that(store: Store) -> None:
    counter = Counter(3)
    store.register("counter", counter)
    filled(store)
    with pytest.raises(UsageError, match="nothing was committed"):
        store.rollback()
    assert len(store) == 3
    store.commit()
    counter.count = 4
    store.rollback()
    assert counter.count == 3


def test_rollback_refuses_what_was_registered_later_and_changes_nothing(store: Store) -> None:
    filled(store)
    store.commit()
    store.register("counter", Counter())
    store["inline"] = numbers(5)
    with pytest.raises(UsageError, match="missing 'counter'"):
        store.rollback()
    assert torch.equal(store["inline"], numbers(5))


def test_resume_loads_and_compares_what_is_registered(disk: SimulatedDisk, caplog: pytest.LogCaptureFixture) -> None:
    with simulated_store(disk) as store:
        assert store.resume() == {}
        store.register("scheduler", Counter(3))
        store.register("loader", Counter(4))
        assert store.resume() == {}
        store.commit({"step": 9})
    with simulated_store(disk) as store:
        assert store.registered_state("scheduler") == {"count": 3}
        assert store.registered_state("sampler") is None
        counter = Counter()
        store.register("scheduler", counter)
        store["a"] = numbers(PAGE)
        with caplog.at_level(logging.WARNING):
            assert store.resume() == {"step": 9}
        assert counter.count == 3
        assert "'loader'" in caplog.text
        assert "a" not in store  # changes before resume are rolled back
        store.register("sampler", Counter())
        with pytest.raises(UsageError, match=r"missing 'sampler'; committed but not registered: 'loader'"):
            store.resume()


def test_registration_refuses_what_cannot_be_kept_and_taken_names(store: Store) -> None:
    class Odd(Counter):
        def state_dict(self) -> dict[str, object]:
            return {"base": {"lrs": [object()]}}

    with pytest.raises(TypeError, match=r"scheduler\.state_dict\(\)\['base'\]"):
        store.register("scheduler", Odd())
    with pytest.raises(TypeError, match="no method"):
        store.register("scheduler", object())  # type: ignore[arg-type]
    store.register("scheduler", Counter())
    with pytest.raises(UsageError, match="taken"):
        store.register("scheduler", Counter())
    assert store.registered("scheduler")
    assert not store.registered("loader")


def test_tensors_and_odd_values_ride_along(disk: SimulatedDisk) -> None:
    class Optimizer(Counter):
        def state_dict(self) -> dict[object, object]:  # type: ignore[override]
            return {0: torch.tensor([1.5, float("nan")]), (1, 2): {"betas": (0.9, float("inf"))}}

        def load_state_dict(self, state: dict[object, object]) -> None:  # type: ignore[override]
            self.state = state

    with simulated_store(disk) as store:
        store.register("optimizer", Optimizer())
        store.commit()
    with simulated_store(disk) as store:
        optimizer = Optimizer()
        store.register("optimizer", optimizer)
        store.resume()
        assert optimizer.state[1, 2] == {"betas": (0.9, float("inf"))}
        assert optimizer.state[0].isnan().tolist() == [False, True]  # type: ignore[attr-defined]


# Guards


def test_guards_are_asked_first_and_without_locks(store: Store) -> None:
    words: list[str] = []

    def guard(word: str) -> None:
        words.append(word)
        len(store)
        if word == "commit":
            store["finished"] = numbers(10)

    store.add_guard(guard)
    store.commit()
    assert "finished" in store
    store.rollback()
    store.resume()
    store.close()
    assert words == ["commit", "rollback", "resume", "close"]


def test_a_guard_can_refuse_a_commit(store: Store) -> None:
    def refuse(word: str) -> None:
        if word == "commit":
            raise UsageError("gradients are pending")

    store.add_guard(refuse)
    with pytest.raises(UsageError, match="pending"):
        store.commit()
    assert store.generation == 0


def test_a_guard_that_raises_at_close_keeps_it_from_committing(disk: SimulatedDisk) -> None:
    store = simulated_store(disk)
    filled(store)

    def refuse(word: str) -> None:
        raise UsageError("the step is half done")

    store.add_guard(refuse)
    with pytest.raises(UsageError, match="half done"):
        store.close()
    store.close()
    with simulated_store(disk) as store:
        assert len(store) == 0


def test_a_guard_may_roll_back_at_close(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        values = filled(store)
        store.commit()
        filled(store, seed=4)
        store.add_guard(lambda word: store.rollback() if word == "close" else None)
    with simulated_store(disk) as store:
        assert_holds(store, values)


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


def test_close_reports_a_failure_that_nobody_has_seen() -> None:
    gated = GatedStore()
    filled(gated.store)
    _fail_flush(gated)
    gated.store.commit(wait=False)
    with pytest.raises(DeviceError, match="generation 1 was not committed"):
        gated.store.close()
    gated.store.close()


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


def test_waiting_for_a_commit_ends_with_the_deadline_and_the_commit_goes_on() -> None:
    gated = GatedStore(deadline_s=0.05)
    values = filled(gated.store)
    gated.catalog.may_apply.clear()
    with pytest.raises(DeadlineError, match="running commit"):
        gated.store.commit()
    gated.catalog.may_apply.set()
    gated.store.wait_for_commit()
    assert gated.store.generation == 1
    assert_holds(gated.store, values)
    gated.close()


def test_a_failed_catalog_load_leaves_nothing_open(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated_store(disk).close()
    content = disk.load("catalog")
    disk.transact("catalog", content._replace(digest=bytes(8)))  # type: ignore[union-attr]
    with pytest.raises(CorruptionError):
        simulated_store(disk)


# Failures of a real drive


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[[], tuple[Store, FaultyDevice]]]:
    """Opens the one store in ``tmp_path``, its system calls in the test's hands."""
    opened: list[Store] = []

    def open_store() -> tuple[Store, FaultyDevice]:
        directories = Directories.open([tmp_path / "run"])
        path = directories.paths[0] / CATALOG_NAME
        root = empty_root(directories.store_uuid, 1)
        catalog = SqliteCatalog.create(path, root) if directories.created else SqliteCatalog(path)
        device = FaultyDevice(directories.paths[0], num_threads=2)
        parts = Parts(Arena(16 * MiB), [device], catalog, directories)
        store = Store.__new__(Store)
        store.device_memory = None
        store._assemble(parts, durable=True, mode="a", deadline_s=WAIT_S)
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
    assert not store.working_set.residents.users


# Damage, on real files


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nbytes": 5000}, "bytes for shape"),
        ({"dtype": "qint8"}, "a dtype that this torch does not know"),
        ({"dtype": "os.system"}, "a dtype that this torch does not know"),
        ({"shape": (1 << 40,), "nbytes": 1 << 40}, "digests for"),
        ({"digests": b"12345678" * 2}, "bytes of digests"),
        ({"extents": (Extent(0, 0, 0, 4096),)}, "extents of 4096 bytes"),
        ({"extents": (Extent(0, 0, 1 << 40, 8192),)}, "ends behind"),
        ({"extents": (Extent(0, 0, 1, 8192),)}, "not aligned"),
        ({"extents": (Extent(3, 0, 0, 8192),)}, "no device"),
        ({"extents": (Extent(0, -1, 0, 8192),)}, "no device"),
        ({"extents": (), "digests": b"", "inline": b"123"}, "inline bytes"),
        ({"generation": 9}, "does not fit"),
        ({"key_id": 77}, "does not fit"),
    ],
)
def test_rows_that_make_no_sense_are_refused_at_open(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], match: str
) -> None:
    with simulated_store(disk) as store:
        store["a"] = numbers(6000)
    load = SimulatedCatalog.load

    def load_changed(catalog: SimulatedCatalog) -> tuple[Root, list[Row]]:
        root, rows = load(catalog)
        return root, [dataclasses.replace(row, **change) for row in rows]

    monkeypatch.setattr(SimulatedCatalog, "load", load_changed)
    with pytest.raises(CorruptionError, match=match) as caught:
        simulated_store(disk)
    assert caught.value.key == "a"


def test_two_rows_on_the_same_extents_are_refused_at_open(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_store(disk) as store:
        store.put_many({"a": numbers(6000), "b": numbers(6000)})
    load = SimulatedCatalog.load

    def load_changed(catalog: SimulatedCatalog) -> tuple[Root, list[Row]]:
        root, rows = load(catalog)
        return root, [dataclasses.replace(row, extents=rows[0].extents) for row in rows]

    monkeypatch.setattr(SimulatedCatalog, "load", load_changed)
    with pytest.raises(CorruptionError, match="overlaps") as caught:
        simulated_store(disk)
    assert caught.value.key == "b"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a store of three tensors of 9 MiB each, of which no two blocks are alike."""
    with Store(tmp_path / "run", dram="64MiB") as store:
        for seed, name in enumerate("abc"):
            store[name] = numbers(9 * MiB, seed)
        store.commit()
    return tmp_path / "run"


def _extents(directory: Path) -> dict[str, tuple[int, int]]:
    with Store(directory, dram="16MiB", mode="r") as store:
        return {record.name: (record.extents[0].offset, record.extents[0].nbytes) for record in store.records()}


@pytest.mark.parametrize("how", ["swap in", "stream", "verify"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_flipped_bit_is_found_wherever_it_is(directory: Path, block: int, how: str) -> None:
    offset = _extents(directory)["b"][0] + block * 4 * MiB
    with open(directory / "data-000", "r+b") as file:
        file.seek(offset + 12_345)
        byte = file.read(1)[0]
        file.seek(offset + 12_345)
        file.write(bytes([byte ^ 0x10]))
    with Store(directory, dram="64MiB" if how == "swap in" else "16MiB") as store:
        if how == "verify":
            report = store.verify()
            assert (report.num_keys, report.num_blocks, report.nbytes) == (3, 9, 27 * MiB)
            (error,) = report.errors
        else:
            with pytest.raises(CorruptionError, match="'b' is damaged: block") as caught:
                store["b"]
            error = caught.value
        assert (error.key, error.file, error.offset) == ("b", str(directory / "data-000"), offset)
        assert torch.equal(store["a"], numbers(9 * MiB, 0))
        assert torch.equal(store["c"], numbers(9 * MiB, 2))


def test_swapped_blocks_and_an_older_write_of_the_same_place_are_found(directory: Path) -> None:
    places = _extents(directory)
    with open(directory / "data-000", "r+b") as file:
        file.seek(places["a"][0])
        first, second = file.read(4 * MiB), file.read(4 * MiB)
        file.seek(places["a"][0])
        file.write(second + first)
        file.seek(places["c"][0])
        file.write(bytes(4 * MiB))
    with Store(directory, dram="16MiB") as store:
        assert [(error.key, error.offset - places[error.key][0]) for error in store.verify().errors] == [
            ("a", 0),
            ("a", 4 * MiB),
            ("c", 0),
        ]


def test_a_file_that_lost_its_end_is_found_at_open_and_while_it_is_open(directory: Path) -> None:
    offset, _ = max(_extents(directory).values())
    name = next(name for name, place in _extents(directory).items() if place[0] == offset)
    data = directory / "data-000"
    with Store(directory, dram="16MiB") as store:
        with open(data, "r+b") as file:
            file.truncate(offset + 4 * MiB)
        with pytest.raises(CorruptionError, match="the file ends at") as caught:
            store[name]
        assert (caught.value.key, caught.value.file) == (name, str(data))
    with pytest.raises(CorruptionError, match="ends behind") as caught:
        Store(directory, dram="16MiB")
    assert (caught.value.key, caught.value.file, caught.value.offset) == (name, str(data), offset)


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
