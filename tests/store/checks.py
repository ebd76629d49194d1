"""Checks that seeded bugs must not survive (mutants.py): each passes on the code as it is, and raises on a mutant.

They are about what one commit, one read or one opener must do; whole lives are the campaign's (crashes.py).
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bytes.faulty import faulty
from tests.devices.simulated_disk import SimulatedDisk
from tests.seccomp import forbid
from tests.store.catalogs import SqliteHome, content_of, root_of, row_of
from tests.store.crashes import Campaign
from tests.store.rig import WAIT_S, GatedStore, assert_holds, filled, numbers, simulated_store, stored
from tests.store.together import Together
from tiered.errors import CorruptionError, DeadlineError, DeviceError, TieredError, UsageError
from tiered.store.catalog.catalog import Confirmation
from tiered.store.lifetime.directory import Directories
from tiered.store.store import Store
from tiered.store.waiting import deadline
from tiered.units import KiB, MiB


def no_crash_state_is_wrong(tmp_path: Path) -> None:
    for seed in range(8):  # the first is enough for most, and two of them stripe
        campaign = Campaign(seed, slice(seed % 3, None, 3)).run(until_wrong=True)
        assert not campaign.wrong, f"seed {seed}: {campaign.wrong[0]}"


def a_flipped_byte_is_found(tmp_path: Path) -> None:
    disk = SimulatedDisk(capacity_nbytes=1 * MiB, can_lose_power=False)
    with simulated_store(disk) as store:
        filled(store)
        store.commit()
        extent = next(record.extents[0] for record in store.records() if record.name == "ordinary")
    disk.image(extent.device, extent.file)[extent.offset + 77] ^= 4
    with simulated_store(disk) as store, pytest.raises(CorruptionError, match="'ordinary'"):
        store["ordinary"]


def superseded_bytes_stay_until_the_commit_is_durable(tmp_path: Path) -> None:
    """While a commit is held up at the catalog, nothing may be written where the generation before it has its bytes."""
    with _gated() as gated:
        before = {f"{number}": numbers(12 * KiB, number) for number in range(4)}
        gated.store.put_many(before)
        gated.store.commit()
        gated.catalog.reached.clear()
        gated.catalog.may_apply.clear()
        gated.store.put_many({name: value + 1 for name, value in before.items()})
        gated.store.commit(wait=False)
        assert gated.catalog.reached.wait(WAIT_S)
        taken = _bytes_of(gated.disk)
        gated.store.put_many({f"later {number}": numbers(12 * KiB, 9 + number) for number in range(4)})
        stored(gated.store.working_set, *gated.store)
        assert _bytes_of(gated.disk) != taken, "nothing was written, and nothing is shown"
        gated.catalog.failure = DeviceError("the power goes")
        gated.catalog.may_apply.set()
        with suppress(DeviceError):
            gated.store.close()
        _assert_generation_1_is_whole(gated, before)


def superseded_bytes_stay_until_the_generation_is_confirmed(tmp_path: Path) -> None:
    """While others are asked to confirm a commit, nothing may be written where the generation before has its bytes."""
    together = Together()
    with _gated(confirmation=together) as gated:
        before = {f"{number}": numbers(12 * KiB, number) for number in range(4)}
        gated.store.put_many(before)
        gated.store.commit()
        together.asked.clear()
        together.may_confirm.clear()
        gated.store.put_many({name: value + 1 for name, value in before.items()})
        gated.store.commit(wait=False)
        assert together.asked.wait(1), "nobody was asked"
        taken = _bytes_of(gated.disk)
        gated.store.put_many({f"later {number}": numbers(12 * KiB, 9 + number) for number in range(4)})
        stored(gated.store.working_set, *(f"later {number}" for number in range(4)))
        assert _bytes_of(gated.disk) != taken, "nothing was written, and nothing is shown"
        together.error = DeviceError("a rank is gone")
        together.may_confirm.set()
        with suppress(DeviceError):
            gated.store.close()
        together.chosen, together.error = 1, None
        _assert_generation_1_is_whole(gated, before)


def _assert_generation_1_is_whole(gated: GatedStore, expected: dict[str, torch.Tensor]) -> None:
    try:
        gated.open()
        assert gated.store.generation == 1
        assert_holds(gated.store, expected)
    except CorruptionError as error:
        raise AssertionError("generation 1 was overwritten, or is gone") from error


def a_generation_given_up_leaves_the_one_before(tmp_path: Path) -> None:
    """In the files, as a new process finds them: rows that were changed, added and deleted."""
    home = SqliteHome(tmp_path)
    before = root_of(1), [row_of(1), row_of(2), row_of(3)]
    with closing(home.create()) as catalog:
        catalog.apply(before[0], before[1], [])
        catalog.apply(root_of(2), [row_of(1, generation=2, seed=5), row_of(4, generation=2)], [3], keeps_before=True)
    try:
        with closing(home.reopen()) as catalog:
            root, rows = catalog.load(1)
            assert (root, list(rows)) == before
            catalog.discard()
        assert content_of(home) == before
    except (CorruptionError, UsageError) as error:
        raise AssertionError("generation 1 is not there") from error


def _bytes_of(disk: SimulatedDisk) -> bytes:
    return b"".join(bytes(disk.image(0, file)) for file in sorted(disk.sizes(0)))


@contextmanager
def _gated(*, deadline_s: float = WAIT_S, confirmation: Confirmation | None = None) -> Iterator[GatedStore]:
    gated = GatedStore(deadline_s=deadline_s, confirmation=confirmation)
    try:
        yield gated
    finally:
        gated.close()


def a_write_that_fails_fails_the_commit(tmp_path: Path) -> None:
    with _gated() as gated:
        filled(gated.store)
        gated.device.fail = lambda operation: DeviceError("scripted") if operation.is_write else None
        with pytest.raises(DeviceError, match="scripted"):
            gated.store.commit()


def a_read_that_fails_says_so(tmp_path: Path) -> None:
    with _gated() as gated:
        filled(gated.store)
        gated.store.close()
        gated.open()
        gated.device.fail = lambda operation: None if operation.is_write else DeviceError("scripted")
        with pytest.raises((DeviceError, CorruptionError)) as caught:
            gated.store["ordinary"]
    assert isinstance(caught.value, DeviceError), "what the drive did not give is called damage"


def a_flush_that_fails_fails_the_commit(tmp_path: Path) -> None:
    with _gated() as gated:
        filled(gated.store)
        gated.disk.fail_next("flush", DeviceError("scripted"))
        with pytest.raises(DeviceError, match="scripted"):
            gated.store.commit()


def a_failed_commit_is_the_end(tmp_path: Path) -> None:
    with _gated() as gated:
        filled(gated.store)
        gated.disk.fail_next("flush", DeviceError("scripted"))
        with suppress(DeviceError):
            gated.store.commit()
        with pytest.raises(DeviceError, match="close"):
            gated.store["ordinary"]


def nobody_writes_again_where_a_write_failed(tmp_path: Path) -> None:
    with _gated() as gated:
        offsets: list[tuple[int, int]] = []

        def fail_the_first(operation: object) -> Exception | None:
            if not operation.is_write:  # type: ignore[attr-defined]
                return None
            offsets.append((operation.offset, len(operation.memory)))  # type: ignore[attr-defined]
            return DeviceError("scripted") if len(offsets) == 1 else None

        gated.device.fail = fail_the_first
        gated.store["first"] = numbers(8 * KiB)
        gated.store.working_set.swap_out(["first"])
        with suppress(DeviceError):
            gated.store["told"] = numbers(8)
        for number in range(6):
            gated.store[f"{number}"] = numbers(8 * KiB, number)
        gated.store.commit()
        (start, nbytes), *others = offsets
        assert len(others) >= 6
        assert not [other for other in others if other[0] < start + nbytes and start < sum(other)]


def a_short_transfer_goes_on(tmp_path: Path) -> None:
    from tests.bytes.moving import move
    from tiered.bytes.arena import Arena

    arena = Arena(1 * MiB)
    buffer = arena.allocate_nowait(64 * KiB)
    assert buffer is not None
    try:
        buffer.memory[:] = b"n" * len(buffer.memory)
        with faulty(tmp_path) as device:
            device.fault = lambda call, fd, memory, offset: call(fd, memory[: 4 * KiB], offset)
            assert move(device, "write", buffer) is None
        assert (tmp_path / "data-000").read_bytes()[: 64 * KiB] == b"n" * 64 * KiB
    finally:
        arena.release(buffer)
        arena.close()


def a_wait_ends_with_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves when somebody looks at it."""
    ticks = itertools.count()

    def clock() -> float:
        tick = next(ticks)
        assert tick < 500, "a wait has no end"
        return tick / 1000

    with _gated(deadline_s=0.05) as gated:
        gated.store["a"] = numbers(8 * KiB)
        gated.device.hold = lambda operation: operation.is_write
        monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=clock))
        with pytest.raises(DeviceError) as caught:
            gated.store.commit()
        monkeypatch.undo()
        gated.device.open()
    assert isinstance(caught.value, DeadlineError) or isinstance(caught.value.__cause__, DeadlineError)


def a_fork_is_refused(tmp_path: Path) -> None:
    with simulated_store() as store:
        filled(store)
        pid = os.fork()
        if pid == 0:
            try:
                len(store)
            except UsageError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child was served"


def every_file_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with Store(tmp_path / "run", dram="8MiB", engine="threads") as store:
            filled(store)
            store.commit()
    except UsageError as error:
        raise AssertionError("the store refuses its own files") from error
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run", *(tmp_path / "run").iterdir())}
    assert modes.pop("run") == 0o700
    assert set(modes.values()) == {0o600}, modes


def a_second_opener_is_refused(tmp_path: Path) -> None:
    with closing(Directories.open([tmp_path])), pytest.raises(UsageError, match="is open in process"):
        Directories.open([tmp_path]).close()


def a_copy_of_the_descriptor_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A child that was forked a moment ago has one, until it comes to close it."""
    directories = Directories.open([tmp_path])
    copies = [os.dup(fd) for lock in directories._locks for fd in lock._fds.values()]
    directories.close()
    try:
        Directories.open([tmp_path]).close()
    except UsageError as error:
        raise AssertionError("the lock is still held") from error
    finally:
        for descriptor in copies:
            os.close(descriptor)


def every_directory_is_flushed_before_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiered.store.catalog.sqlite_catalog import SqliteCatalog

    calls: list[str] = []
    sync, apply = os.fdatasync, SqliteCatalog.apply

    def noted_sync(fd: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    def noted_apply(catalog: SqliteCatalog, *arguments: object, **options: bool) -> None:
        calls.append("catalog")
        apply(catalog, *arguments, **options)  # type: ignore[arg-type]

    directories = tmp_path / "one", tmp_path / "two"
    with Store(*directories, dram="32MiB", engine="threads") as store:
        store["striped"] = torch.zeros(9 * MiB, dtype=torch.uint8)
        store.commit()
        monkeypatch.setattr(os, "fdatasync", noted_sync)
        monkeypatch.setattr(SqliteCatalog, "apply", noted_apply)
        store["striped"] = torch.ones(9 * MiB, dtype=torch.uint8)
        store.commit()
        monkeypatch.undo()
    expected = {str(directory / "data-000") for directory in directories}
    assert set(calls[: calls.index("catalog")]) == expected, calls


def creation_is_durable_name_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is durable before it gets its name, and its name before anything else happens."""
    calls: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.rename

    def noted_sync(fd: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    def noted_rename(source: Path, target: Path) -> None:
        calls.append((str(source), str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    path = tmp_path / "run"
    Store(path, dram="8MiB", engine="threads").close()
    monkeypatch.undo()
    renames = [index for index, call in enumerate(calls) if call[0] != "fsync"]
    assert [calls[index][1] for index in renames] == [str(path / "identity"), str(path / "catalog.db")]
    for index in renames:
        assert calls[index - 1] == ("fsync", calls[index][0])
        assert calls[index + 1 : index + 2] == [("fsync", str(path))]


def a_catalog_that_cannot_be_flushed_fails_the_commit(tmp_path: Path) -> None:
    """The filter is of one thread, which ends with it."""
    outcome: list[object] = []

    def commit() -> None:
        try:
            with closing(SqliteHome(tmp_path).create()) as catalog:
                catalog.load()  # so that only the commit is left to flush
                forbid(["fsync", "fdatasync"], errno.EIO)
                catalog.apply(root_of(1), [row_of(1)], [])
            outcome.append("committed")
        except TieredError as error:
            outcome.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join(WAIT_S)
    assert isinstance(outcome[0], DeviceError), outcome


def opening_settles_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = SqliteHome(tmp_path)
    home.create().close()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    content_of(home)
    monkeypatch.undo()
    assert synced == [f"{home.path}-journal", str(tmp_path)]


def a_lost_row_is_found(tmp_path: Path) -> None:
    import sqlite3

    home = SqliteHome(tmp_path)
    with closing(home.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1), row_of(2)], [])
    with closing(sqlite3.connect(home.path)) as connection, connection:
        connection.execute("DELETE FROM records WHERE key_id = 2")
    with pytest.raises(CorruptionError):
        content_of(home)
