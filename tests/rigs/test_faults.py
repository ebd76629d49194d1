"""What a drive does wrong beneath every engine, io_uring's completions included: as faults.md has it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.available import needs
from tests.rigs.job import contents, put_generation, violation
from tests.rigs.room import Daemon, Room, room
from tests.rigs.sweep import cases, short_deadlines, try_case
from tests.store.rig import numbers
from tiered.bytes.device import engines
from tiered.bytes.device.ring import Ring
from tiered.errors import CapacityError, CorruptionError, DeviceError, TieredError, UsageError
from tiered.store.store import Store
from tiered.tools.cli import main
from tiered.units import KiB

pytestmark = needs("faulty file system")

NUM_CASES = 8  # of each engine's thousands: bench/soak.py --campaign errno goes through all
SEED = 5
DATA = "data-000"


@pytest.fixture(scope="module")
def drive() -> Iterator[Daemon]:
    with room() as made:
        yield made.daemon("faulty")


@pytest.fixture(params=["uring", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(drive: Daemon, engine: str) -> Iterator[Path]:
    """A store with one generation."""
    path = drive.mount / "store"
    with Store(path, dram="8MiB", engine=engine) as store:
        put_generation(store, SEED, 1)
        store["large"] = numbers(300 * KiB)
        store.commit({"generation": 1})
    drive.call("script", rules=[])
    yield path
    drive.call("script", rules=[])
    shutil.rmtree(path)


def fault(drive: Daemon, call: str, kind: str = "errno", file: str = DATA, **more: Any) -> None:
    drive.call("script", rules=[{"call": call, "file": file, "kind": kind, **more}])


def opened(place: Path, engine: str) -> Store:
    return Store(place, dram="8MiB", engine=engine)


def assert_intact(place: Path, engine: str) -> None:
    """The store opens at its one generation, and can go on from there."""
    with opened(place, engine) as store:
        assert store.generation == 1 and store.state == {"generation": 1}
        assert set(store) == set(contents(SEED, 1)) | {"large"}
        assert (store["large"] == numbers(300 * KiB)).all()
        assert store.verify().is_clean
        put_generation(store, SEED, 2)
        store.commit({"generation": 2})


def lose_a_commit(store: Store, kind: type[TieredError], words: str | None = None) -> None:
    """Commit in vain, twice; both times the error says ``words``."""
    for _ in range(2):
        with pytest.raises(kind, match=words):
            store["large"] = numbers(300 * KiB, 9)
            store.commit({"generation": 2})
    with pytest.raises(kind):
        len(store)


@pytest.mark.parametrize("nbytes", [4096, 12288])
@pytest.mark.parametrize("call", ["read", "write"])
def test_a_short_transfer_goes_on_where_it_stopped(
    call: str, nbytes: int, drive: Daemon, engine: str, place: Path
) -> None:
    if (engine, call) == ("uring", "write"):
        engine = "aiofiles"  # FUSE itself makes EIO of an asynchronous write that is short
    fault(drive, call, "short", nbytes=nbytes, count=20)
    with opened(place, engine) as store:
        assert (store["large"] == numbers(300 * KiB)).all()
        store["large"] = numbers(300 * KiB, 2)
        store.commit({"generation": 2})
    assert len(drive.call("report")["hits"]) >= 3
    with opened(place, engine) as store:
        assert (store["large"] == numbers(300 * KiB, 2)).all()


def test_a_read_is_tried_three_times_more(drive: Daemon, engine: str, place: Path) -> None:
    with opened(place, engine) as store:
        fault(drive, "read", errno=errno.EIO, count=3)
        assert (store["large"] == numbers(300 * KiB)).all()
        fault(drive, "read", errno=errno.EIO, count=4)
        store.working_set.swap_out(["large"])
        store.working_set.unreserve(store.working_set.reserve(store.working_set.budget_bytes))
        with pytest.raises(DeviceError, match="data-000"):
            store["large"]
        assert (store["large"] == numbers(300 * KiB)).all()


def test_a_bad_sector_is_reported_with_all_others_read_and_its_key_can_be_dropped(
    drive: Daemon, engine: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(place, engine) as store:
        expected = {key: store[key] for key in store}
        record = next(record for record in store.records() if record.name == "large")
    offset = record.extents[0].offset
    fault(drive, "read", errno=errno.EIO, count=1_000_000, at=offset + 200_000)
    with opened(place, engine) as store:
        (error,) = store.verify().errors
        assert (error.key, error.file, error.offset, error.errno) == ("large", f"{place}/{DATA}", offset, errno.EIO)
        with pytest.raises(DeviceError, match="Input/output error"):  # whoever wants its bytes may try again
            store["large"]
        with pytest.raises(UsageError, match="is not damaged"):
            store.drop_damaged([next(key for key in expected if key != "large")])
    assert main(["verify", str(place)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"'large' is damaged: its bytes cannot be read: Input/output error (EIO, errno {errno.EIO})" in said
    assert f"{place}/{DATA}, offset {offset}" in said and "1 damaged" in said
    assert main(["verify", str(place), "--drop", "large"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"dropped 'large': 300.0 KiB in {place}/{DATA} at offset {offset}" in said
    del expected["large"]
    with opened(place, engine) as store:
        assert set(store) == set(expected) and store.verify().is_clean
        assert all((store[key] == value).all() for key, value in expected.items())


@pytest.mark.parametrize(
    "number, kind, words",
    [
        (errno.EIO, DeviceError, "Input/output error"),
        (errno.EROFS, DeviceError, "read-only"),
        (errno.ENOSPC, CapacityError, "No space left on device.*free space there, or add a directory"),
        (errno.EDQUOT, CapacityError, "quota exceeded.*free space there, or add a directory"),
        (errno.EFBIG, CapacityError, "File too large"),
    ],
)
def test_a_write_that_fails_loses_the_open_generation_only(
    number: int, kind: type[TieredError], words: str, drive: Daemon, engine: str, place: Path
) -> None:
    store = opened(place, engine)
    fault(drive, "write", errno=number)
    lose_a_commit(store, kind, words)
    assert len(drive.call("report")["hits"]) == 1  # not tried again
    store.close()
    assert_intact(place, engine)


def test_a_file_system_that_becomes_read_only_loses_the_open_generation_and_can_be_read(
    drive: Daemon, engine: str, place: Path
) -> None:
    store = opened(place, engine)
    calls = ("write", "fsync", "create", "unlink", "rename", "truncate", "fallocate", "mkdir")
    always = {"file": "*", "kind": "errno", "errno": errno.EROFS, "count": 10**6}
    drive.call("script", rules=[{"call": call, **always} for call in calls])
    lose_a_commit(store, DeviceError, "read-only")
    store.close()
    with Store(place, dram="8MiB", engine="auto", mode="r") as reader:
        assert reader.generation == 1 and (reader["large"] == numbers(300 * KiB)).all()
        assert reader.verify().is_clean
    drive.call("script", rules=[])
    assert_intact(place, engine)


@pytest.mark.parametrize("file", [DATA, "catalog.db", "catalog.db-journal"])
def test_after_a_failed_flush_nothing_is_flushed_again(file: str, drive: Daemon, engine: str, place: Path) -> None:
    store = opened(place, engine)
    fault(drive, "fsync", file=file, errno=errno.EIO)
    lose_a_commit(store, DeviceError)
    counts = drive.call("report")["counts"]
    assert counts[f"fsync {DATA}"] == 1
    assert len(drive.call("report")["hits"]) == 1
    store.close()
    assert drive.call("report")["counts"].get(f"write {DATA}") == counts[f"write {DATA}"]
    assert violation_free(place, engine)


def violation_free(place: Path, engine: str) -> bool:
    """Whether the store opens at generation 1 or 2, whichever it is, and is whole."""
    with opened(place, engine) as store:
        assert store.state == {"generation": store.generation}
        assert (store["large"] == numbers(300 * KiB, {1: 0, 2: 9}[store.generation])).all()
        return bool(store.verify().is_clean)


SILENT = [("write", kind) for kind in ("lost", "torn", "misdirect", "flip")]
SILENT += [("read", kind) for kind in ("misdirect", "stale", "flip")]


@pytest.mark.parametrize("call, kind", SILENT)
def test_what_goes_wrong_in_silence_is_found(call: str, kind: str, drive: Daemon, engine: str, place: Path) -> None:
    fault(drive, call, kind, nbytes=512 if kind == "torn" else 4096)
    with opened(place, engine) as store:
        if call == "write":
            store["large"] = numbers(300 * KiB, 2)
            store.commit({"generation": 2})
            store.working_set.unreserve(store.working_set.reserve(store.working_set.budget_bytes))
        with pytest.raises(CorruptionError) as found:
            store["large"]
    assert found.value.key == "large" and found.value.file.endswith(DATA) and found.value.offset >= 0
    if call == "read":
        drive.call("script", rules=[])
        assert_intact(place, engine)


def test_a_drive_that_hangs_is_not_waited_for_longer_than_the_deadline(drive: Daemon, engine: str, place: Path) -> None:
    with short_deadlines(0.3):
        store = opened(place, engine)
    fault(drive, "write", "delay", seconds=1.5, count=8)
    with pytest.raises(DeviceError, match=r"0\.3 s"):
        for seed in range(8):
            store["large"] = numbers(300 * KiB, seed)
            store.commit({"generation": 2})
    while not store._is_released:
        with suppress(DeviceError):  # while the drive has not answered, and then what was lost
            store.close()
    with opened(place, engine) as store:
        assert store.generation in (1, 2)
        assert store.verify().is_clean


def test_a_drive_that_has_an_open_try_again_for_ever_is_given_up(
    drive: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself tries an io_uring read again after EAGAIN: the trial of io_uring hung for as long."""
    kept: list[tuple[Ring, object]] = []
    monkeypatch.setattr(engines, "_abandoned", kept)
    fault(drive, "read", file="scratch-*", errno=errno.EAGAIN, count=100_000_000)
    with short_deadlines(0.3), pytest.raises(DeviceError, match=r"did not complete within 0\.3 s"):
        opened(drive.mount / "tried", "uring")
    drive.call("script", rules=[])
    ((ring, _),) = kept
    while not ring.completions():
        ring.enter(1)
    ring.close()
    opened(drive.mount / "tried", "uring").close()
    shutil.rmtree(drive.mount / "tried")


def test_a_drive_that_is_gone_is_said_to_be(engine: str, a_room: Room) -> None:
    drive = a_room.daemon("faulty")
    store = opened(drive.mount / "store", engine)
    put_generation(store, SEED, 1)
    store.commit({"generation": 1})
    drive.kill()
    put_generation(store, SEED, 2)
    with pytest.raises(DeviceError, match="not connected"):
        store.commit({"generation": 2})
    store.close()
    assert violation([drive.backing / "store"], SEED, 1, 1, engine) == (1, "")


def test_no_error_of_any_call_does_harm(drive: Daemon, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Ring, object]] = []  # of trials that never ended: the kernel has them until the drive answers
    monkeypatch.setattr(engines, "_abandoned", kept)
    found = cases(drive, engine)
    assert len(found) > 4000
    outcomes = [try_case(drive, case) for case in found[:NUM_CASES]]
    drive.call("script", rules=[])
    for ring, _ in kept:
        while not ring.completions():
            ring.enter(1)
        ring.close()
    assert not [(str(outcome.case), outcome.wrong) for outcome in outcomes if outcome.wrong]
    assert sum(outcome.num_hits > 0 for outcome in outcomes) > NUM_CASES // 2


def test_a_catalog_that_cannot_be_read_is_not_called_damaged(drive: Daemon, engine: str, place: Path) -> None:
    """SQLite's check of its pages reports a page that was not read among its findings, and raises nothing."""
    for nth in range(12):
        for number in (errno.EIO, errno.ETIMEDOUT):
            fault(drive, "read", file="catalog.db", errno=number, nth=nth, count=1000)
            with suppress(DeviceError):  # nothing that is read so late is needed
                opened(place, engine).close()
            assert drive.call("report")["hits"] or nth > 5
    drive.call("script", rules=[])
    assert_intact(place, engine)


def test_a_new_catalog_that_cannot_be_read_is_not_called_damaged(drive: Daemon, engine: str) -> None:
    for nth in range(8):
        fault(drive, "read", file="catalog.db.new", errno=errno.EIO, nth=nth)
        with suppress(DeviceError):  # nothing that is read so late is needed
            opened(drive.mount / "new", engine).close()
        drive.call("script", rules=[])
        opened(drive.mount / "new", engine).close()
        shutil.rmtree(drive.mount / "new")


def test_a_catalog_is_read_again_where_the_drive_stumbles(drive: Daemon, engine: str, place: Path) -> None:
    for nth in range(12):
        fault(drive, "read", file="catalog.db", errno=errno.EIO, nth=nth)
        opened(place, engine).close()
    drive.call("script", rules=[])
    assert_intact(place, engine)


@pytest.mark.parametrize("call", ["write", "truncate"])
def test_a_lock_file_that_cannot_be_written_is_no_other_process(
    call: str, drive: Daemon, engine: str, place: Path
) -> None:
    fault(drive, call, file="lock", errno=errno.EAGAIN)
    with pytest.raises(DeviceError, match="Resource temporarily unavailable"):
        opened(place, engine)
    assert_intact(place, engine)
