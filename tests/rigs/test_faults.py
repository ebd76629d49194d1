"""What a drive does wrong that only a file system of our own can do: to the catalog, the lock, and by its end.

Every call with every error is the campaign `bench/soak.py --campaign errno`.
"""

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
from tests.store.rig import numbers
from tiered.errors import DeviceError, TieredError
from tiered.store.store import Store
from tiered.units import KiB

pytestmark = needs("faulty file system")

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


@pytest.mark.parametrize("file", ["catalog.db", "catalog.db-journal"])
def test_a_catalog_whose_flush_fails_is_of_one_generation_or_the_other(
    file: str, drive: Daemon, engine: str, place: Path
) -> None:
    store = opened(place, engine)
    fault(drive, "fsync", file=file, errno=errno.EIO)
    lose_a_commit(store, DeviceError)
    assert len(drive.call("report")["hits"]) == 1  # not tried again
    store.close()
    with opened(place, engine) as store:
        assert store.state == {"generation": store.generation}
        assert (store["large"] == numbers(300 * KiB, {1: 0, 2: 9}[store.generation])).all()
        assert store.verify().is_clean


def test_a_catalog_that_cannot_be_read_is_not_called_damaged(drive: Daemon, engine: str, place: Path) -> None:
    """SQLite's check of its pages reports a page that was not read among its findings, and raises nothing."""
    for nth in range(12):
        for number in (errno.EIO, errno.ETIMEDOUT):
            fault(drive, "read", file="catalog.db", errno=number, nth=nth, count=1000)
            with suppress(DeviceError):  # nothing that is read so late is needed
                opened(place, engine).close()
            assert drive.call("report")["hits"] or nth > 5
        fault(drive, "read", file="catalog.db", errno=errno.EIO, nth=nth)
        opened(place, engine).close()  # a drive that stumbles once is read again
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
