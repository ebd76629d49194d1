"""The ledgers of a store: what they count, what a kill leaves of it, and that no ledger keeps a store from anything."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.rigs.warm_python import WarmPython
from tests.store.rig import numbers
from tiered.errors import DeviceError
from tiered.store.lifetime import ledger
from tiered.store.lifetime.ledger import LEDGER_NAME, Ledger, LedgerFile, read_ledger
from tiered.store.store import Store
from tiered.tools.cli import main
from tiered.units import KiB, MiB, format_bytes

DRAM = "8MiB"
UUID = uuid.UUID(int=7).bytes


@pytest.fixture
def run(quick_path: Path) -> Path:
    return quick_path / "run"


@pytest.fixture
def made(run: Path) -> Iterator[LedgerFile]:
    """A ledger of two durable counts, 100 and 1100 bytes, one in each slot."""
    run.mkdir(mode=0o700)
    with closing(LedgerFile(run, UUID, 0)) as file:
        file.open()
        file.update(100, 0, flushes_from=1)
        file.update(1000, 100, flushes_from=1)
        yield file


def use(*directories: Path, nbytes: int = 200 * KiB, seed: int = 0, mode: str = "a") -> tuple[list[int], int]:
    """Put, commit and close; return what each device and the catalog have written."""
    with Store(*directories, dram=DRAM, mode=mode) as store:
        store.put_many({str(i): numbers(nbytes, seed + i) for i in range(4)})
        store.commit({"seed": seed})
        written = [device.statistics().write_bytes for device in store._parts.devices]
        return written, store.statistics().catalog_write_bytes


def newest(directory: Path) -> Ledger:
    return max((slot for slot in read_ledger(directory / LEDGER_NAME) if slot), key=lambda slot: slot.sequence)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [entry.getMessage() for entry in caplog.records if LEDGER_NAME in entry.getMessage()]
    caplog.clear()
    return found


@pytest.fixture
def flushed_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that Python flushes, from any thread."""
    flushed: list[str] = []
    flush = os.fdatasync

    def noted(fd: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2])
        flush(fd)

    monkeypatch.setattr(os, "fdatasync", noted)
    yield flushed


# --- what is counted ---


def test_every_directory_counts_over_all_openings_what_its_device_has_written(run: Path) -> None:
    directories = [run / "one", run / "two"]
    data, catalog = [0, 0], 0
    for seed in range(3):
        written, catalog_bytes = use(*directories[:: 1 if seed % 2 else -1], nbytes=5 * MiB, seed=seed)
        data = [sum(pair) for pair in zip(data, written, strict=True)]
        catalog += catalog_bytes
    found = [newest(directory) for directory in directories]
    paths = sorted(directories, key=lambda path: newest(path).index)  # in the order of the first opening
    assert [newest(path).data_bytes for path in paths] == data and sum(data) >= 60 * MiB
    assert [newest(path).catalog_bytes for path in paths] == [catalog, 0]
    assert len({one.store_uuid for one in found}) == 1
    with Store(*directories, dram=DRAM) as store:
        assert store.statistics().lifetime_write_bytes == sum(data) + catalog
        store["more"] = numbers(50_000)
        store.commit()
        counters = store.statistics()
        expected = sum(data) + catalog + counters.write_bytes + counters.catalog_write_bytes
        assert counters.write_bytes and counters.lifetime_write_bytes == expected
    assert sum(newest(path).write_bytes for path in paths) == expected


def test_the_file_is_as_documented(made: LedgerFile) -> None:
    content = made.path.read_bytes()
    assert len(content) == 8192 and stat.S_IMODE(made.path.stat().st_mode) == 0o600
    older, later = read_ledger(made.path)
    assert older and later and (older.data_bytes, later.data_bytes, later.catalog_bytes) == (100, 1000, 100)
    assert (older.sequence, later.sequence, later.since_s) == (1, 2, made.ledger.since_s)
    whole = Ledger(bytes(range(16)), 3, 1_800_000_000, 5 << 40, 6 << 20, 7).encode()
    assert whole[:72].hex(" ", 8) == (
        "7469657265644c47 0200000003000000 0001020304050607 08090a0b0c0d0e0f 0700000000000000 0000000000050000 "
        "0000600000000000 00d2496b00000000 " + whole[64:72].hex()
    )
    assert not any(whole[72:]) and len(whole) == 4096


def test_a_store_without_durable_files_has_none(run: Path) -> None:
    with Store(run, dram=DRAM, durable=False) as store:
        store["a"] = numbers(5 * MiB)
        assert store.statistics().lifetime_write_bytes is None and not os.listdir(run)
    with Store(engine="memory", dram=DRAM) as store:
        store["a"] = numbers(5 * MiB)
        store.commit()
        assert store.statistics().lifetime_write_bytes is None


@pytest.mark.parametrize("has_ledger", [True, False])
def test_a_reader_changes_no_byte_and_needs_none(run: Path, has_ledger: bool) -> None:
    use(run)
    if not has_ledger:
        (run / LEDGER_NAME).unlink()
    (run / "lock").unlink()
    files = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run.iterdir()}
    run.chmod(0o500)
    with Store(run, dram=DRAM, mode="r") as store:
        assert torch.equal(store["0"], numbers(200 * KiB))
    run.chmod(0o700)
    (run / "lock").unlink(missing_ok=True)  # root made it all the same
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run.iterdir()} == files


def test_a_store_that_is_refused_is_not_written_to(run: Path) -> None:
    use(run)
    (run / LEDGER_NAME).unlink()
    with open(run / "data-000", "r+b") as file:
        file.truncate(4096)
    with pytest.raises(Exception, match="do not belong together"):
        Store(run, dram=DRAM)
    assert not (run / LEDGER_NAME).exists()


# --- when it is written ---


def test_small_commits_do_not_flush_it_and_close_does(run: Path, flushed_files: list[str]) -> None:
    with Store(run, dram=DRAM) as store:
        for step in range(10):
            store["a"] = numbers(20_000, step)
            store.commit({"step": step})
        assert LEDGER_NAME not in flushed_files
    assert flushed_files.count(LEDGER_NAME) == 1


def test_a_commit_makes_it_durable_once_a_step(
    run: Path, monkeypatch: pytest.MonkeyPatch, flushed_files: list[str]
) -> None:
    monkeypatch.setattr(ledger, "STEP_NBYTES", 4 * MiB)
    with Store(run, dram=DRAM) as store:
        for i in range(20):
            store["a"] = numbers(MiB, i)
            store.commit()
        assert 20 // 4 - 1 <= flushed_files.count(LEDGER_NAME) <= 20 // 3 + 1
    assert newest(run).data_bytes >= 20 * MiB


def test_a_store_that_wrote_nothing_leaves_its_ledger_alone(run: Path, flushed_files: list[str]) -> None:
    use(run)
    before, content = (run / LEDGER_NAME).stat(), (run / LEDGER_NAME).read_bytes()
    flushed_files.clear()
    Store(run, dram=DRAM).close()
    after = (run / LEDGER_NAME).stat()  # whose time of the last read may be another
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino) and not flushed_files
    assert (run / LEDGER_NAME).read_bytes() == content


CHILD = """
import os, signal, sys, torch, tiered
from tiered.store.lifetime import ledger
ledger.STEP_NBYTES = 16 << 20
store = tiered.Store(sys.argv[1], dram="8MiB")
store.put_many({str(i): torch.full((1 << 20,), i, dtype=torch.uint8) for i in range(50)})
if sys.argv[2] == "kill in a commit's wake":
    store.commit()
print(store.statistics().write_bytes, flush=True)
if sys.argv[2] != "end without close":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["kill", "kill in a commit's wake", "end without close"])
def test_a_kill_loses_no_more_than_a_step_and_an_end_nothing(run: Path, how: str, warm_python: WarmPython) -> None:
    done = subprocess.run([warm_python.executable, "-c", CHILD, str(run), how], capture_output=True, text=True)
    assert done.returncode == (0 if how == "end without close" else -signal.SIGKILL), done.stderr
    written = int(done.stdout)
    assert written > 40 * MiB
    lost = written - newest(run).data_bytes
    assert lost <= 0 if how == "end without close" else lost <= 16 * MiB


# --- damage ---


def test_every_flipped_bit_is_seen_and_none_is_believed(made: LedgerFile, caplog: pytest.LogCaptureFixture) -> None:
    good, rng = made.path.read_bytes(), random.Random(0)
    slots = read_ledger(made.path)
    for offset in range(0, len(good), 13):
        flipped = bytearray(good)
        flipped[offset] ^= 1 << rng.randrange(8)
        made.path.write_bytes(flipped)
        with closing(LedgerFile(made.path.parent, UUID, 0)) as file:
            file.open()
            assert file.ledger == slots[0 if offset >= 4096 else 1]
            assert warnings_of(caplog) == [
                f"{made.path} is damaged in one half: its count of bytes written goes on from the other one"
            ]
            if offset % 97 == 0:  # and the next rewrite mends it
                file.update(1, 0, flushes_from=1)
                assert all(read_ledger(made.path))


@pytest.mark.parametrize("torn_at", [0, 1, 40, 64, 71, 72, 512, 4095])
def test_a_torn_rewrite_keeps_the_older_count(made: LedgerFile, torn_at: int) -> None:
    before = made.path.read_bytes()  # its newest count, in the second slot, is durable
    made.update(5000, 100)
    after = made.path.read_bytes()
    made.path.write_bytes(after[:torn_at] + before[torn_at:])
    with closing(LedgerFile(made.path.parent, UUID, 0)) as file:
        file.open()
        assert file.ledger.write_bytes in ((1100,) if torn_at < 72 else (5100,))


def test_until_it_is_durable_no_rewrite_touches_the_durable_count(made: LedgerFile) -> None:
    durable = made.path.read_bytes()[4096:]
    for count in range(2000, 2010):
        made.update(count, 100)
        assert made.path.read_bytes()[4096:] == durable
    made.update(2010, 100, flushes_from=1)
    assert made.path.read_bytes()[4096:] == durable
    made.update(2011, 100)
    assert made.path.read_bytes()[4096:] != durable


def foreign(path: Path) -> bytes:
    return Ledger(uuid.UUID(int=8).bytes, 0, 10, 1 << 40).encode() * 2


def of_another_directory(path: Path) -> bytes:
    return replace(newest(path), index=1, data_bytes=1 << 40).encode() * 2


def cut(path: Path) -> bytes:
    return newest(path).encode()


@pytest.mark.parametrize("content", [foreign, of_another_directory, cut])
def test_one_that_cannot_be_believed_is_begun_anew_with_one_warning(
    run: Path, content: object, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    use(run)
    (run / LEDGER_NAME).write_bytes(content(run))  # type: ignore[operator]
    if content is not of_another_directory:
        assert main(["inspect", str(run)]) == 0
        assert f"{run}: its ledger of the bytes written is damaged" in capsys.readouterr().out
    (data,), catalog = use(run, seed=9)
    (warning,) = warnings_of(caplog)
    assert warning == (
        f"{run / LEDGER_NAME} is damaged, or is another directory's: a new count of bytes written begins, at "
        f"{newest(run).since}"
    )
    assert newest(run).write_bytes == data + catalog and all(read_ledger(run / LEDGER_NAME))
    assert not warnings_of(caplog)


# --- a directory that somebody moves or empties while the store is open ---


def test_one_whose_directory_was_moved_is_written_where_it_is_now(run: Path) -> None:
    """Another store is in the place of this one: its ledger stays as it is, and the count goes where it belongs."""
    other, moved = run.with_name("other"), run.with_name("moved")
    use(other)
    content = (other / LEDGER_NAME).read_bytes()
    store = Store(run, dram=DRAM)
    store["a"] = numbers(50_000)
    store.working_set.swap_out(["a"])
    run.rename(moved)
    other.rename(run)
    with pytest.raises(DeviceError, match="was moved"):
        store.close()
    assert (run / LEDGER_NAME).read_bytes() == content
    assert newest(moved).store_uuid != newest(run).store_uuid and newest(moved).data_bytes >= 50_000


def test_one_that_was_removed_is_not_made_again(run: Path) -> None:
    with Store(run, dram=DRAM) as store:
        for entry in run.iterdir():
            entry.unlink()
        store._parts.ledgers.note_commit(1 << 30)
    assert not os.listdir(run)
    use(run)


# --- a drive that fails ---


@pytest.mark.parametrize("number", [errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "open", "pread"])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_error_is_one_warning_and_no_error_of_the_store(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, number: int, is_new: bool
) -> None:
    if not is_new:
        use(run)
    original = getattr(os, call)

    def fails(place: int | Path, *arguments: object, **options: object) -> object:
        name = str(place) if call == "open" else os.readlink(f"/proc/self/fd/{place}")
        if name == str(run / LEDGER_NAME):
            raise OSError(number, os.strerror(number), name)
        return original(place, *arguments, **options)

    with monkeypatch.context() as failing:
        failing.setattr(os, call, fails)
        failing.setattr(ledger, "STEP_NBYTES", 100 * KiB)
        use(run, seed=1)
    warnings = warnings_of(caplog)
    if call == "pread":
        assert len(warnings) == (0 if is_new else 1)
    else:
        assert [warning for warning in warnings if "cannot be written" in warning] == warnings[-1:]
        assert os.strerror(number) in warnings[-1] and len(warnings) <= 2
    caplog.clear()
    (data,), _ = use(run, seed=2)
    assert newest(run).data_bytes >= data and not warnings_of(caplog)
    with Store(run, dram=DRAM) as store:
        assert torch.equal(store["0"], numbers(200 * KiB, 2)) and store.verify().is_clean


# --- looking ---


def test_inspect_says_what_was_written_and_since_when(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = [run / "one", run / "two"]
    use(*directories, nbytes=5 * MiB)
    options = list(map(str, directories))
    assert main(["inspect", *options]) == 0
    one, two = map(newest, directories)
    catalog = f" and {format_bytes(one.catalog_bytes)} of catalog" if one.catalog_bytes else ""  # none in memory
    assert (
        f"\n{run / 'one'}: {format_bytes(one.data_bytes)} of data{catalog} written since {one.since}\n"
        f"{run / 'two'}: {format_bytes(two.data_bytes)} of data written since {two.since}\n"
    ) in capsys.readouterr().out
    assert two.data_bytes > MiB
    (directories[1] / LEDGER_NAME).unlink()
    with Store(*directories, dram=DRAM, mode="r"):
        assert main(["inspect", *options]) == 0
    assert f"{run / 'two'}: has no ledger of the bytes written yet" in capsys.readouterr().out
