"""The order of a commit's system calls, SQLite's own among them; and a kill in the middle of the last of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.rigs.available import needs
from tests.rigs.drives import Shutdown
from tests.rigs.room import Room
from tests.rigs.system_calls import Call, kill_at, trace
from tiered.store.catalog import sqlite_catalog as catalog
from tiered.store.store import Store

NUM_COMMITS = 5
JOB = """
import json, sys
import torch
import tiered

num_commits, *directories = sys.argv[1:]
with tiered.Store(*directories, dram="32MiB", engine="threads") as store:
    for step in range(int(num_commits)):
        store["large"] = torch.full((9 << 20,), step + store.generation, dtype=torch.uint8)
        store["small"] = torch.full((9000,), step, dtype=torch.uint8)
        store.commit({"step": step})
        print(json.dumps([list(extent) for record in store.records() for extent in record.extents]))
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Call], list[list[list[int]]]]:
    """Two directories, the calls of a job in them, and the extents of each generation."""
    home = tmp_path_factory.mktemp("traced").resolve()
    directories = [home / "a", home / "b"]
    output, calls = trace(JOB, [str(NUM_COMMITS), *map(str, directories)], home / "log")
    return directories, calls, [json.loads(line) for line in output.splitlines()]


def commits(calls: list[Call], database: str) -> list[list[Call]]:
    """Return the calls from the end of one commit to the end of the next: the flush of the truncated journal."""
    journal, found, begin = f"{database}-journal", list[list[Call]](), 0
    for index in range(1, len(calls)):
        if calls[index - 1 : index + 1] == [Call("truncate", journal), Call("sync", journal)]:
            found.append(calls[begin : index + 1])
            begin = index + 1
    return found


def first(calls: list[Call], name: str, file: str) -> int:
    return next(index for index, call in enumerate(calls) if (call.name, call.file) == (name, file))


def last(calls: list[Call], name: str, file: str) -> int:
    return max(index for index, call in enumerate(calls) if (call.name, call.file) == (name, file))


@needs("system calls")
def test_data_of_every_directory_then_the_journal_then_the_catalog(
    traced: tuple[list[Path], list[Call], list[list[list[int]]]],
) -> None:
    directories, calls, _ = traced
    database = str(directories[0] / "catalog.db")
    found = commits(calls, database)
    assert len(found) == NUM_COMMITS
    for commit in found:
        begin = max(last(commit, "sync", str(path / "data-000")) for path in directories)
        for path in directories:
            assert last(commit, "write", str(path / "data-000")) < last(commit, "sync", str(path / "data-000"))
        journal = f"{database}-journal"
        assert begin < first(commit, "write", journal)
        written = last(commit, "write", journal)
        assert written < first(commit[written:], "sync", journal) + written < first(commit, "write", database)
        assert last(commit, "write", database) < last(commit, "sync", database) < last(commit, "truncate", journal)


@needs("system calls")
def test_no_write_touches_what_the_last_durable_commit_names(
    traced: tuple[list[Path], list[Call], list[list[list[int]]]],
) -> None:
    directories, calls, extents = traced
    files = [str(path / "data-000") for path in directories]
    num_reused = 0
    for number, commit in enumerate(commits(calls, str(directories[0] / "catalog.db"))):
        writes = [call for call in commit if call.name == "write" and call.file in files]
        assert writes
        assert not any(_touches(call, files, extents[number - 1]) for call in writes if number)
        num_reused += sum(_touches(call, files, extents[number - 2]) for call in writes if number > 1)
    assert num_reused, "nothing was ever written to a superseded extent"


def _touches(call: Call, files: list[str], extents: list[list[int]]) -> bool:
    return any(
        call.file == files[device] and call.start < offset + nbytes and offset < call.end
        for device, _, offset, nbytes in extents
    )


@needs("system calls")
def test_every_new_name_is_durable_before_the_first_commit_builds_on_it(
    traced: tuple[list[Path], list[Call], list[list[list[int]]]],
) -> None:
    directories, calls, _ = traced
    journal = str(directories[0] / "catalog.db-journal")
    building = first(calls, "write", journal)
    new = [path / name for path in directories for name in ("identity.new", "data-000")]
    for path in (*new, directories[0] / "catalog.db.new", directories[0] / "catalog.db-journal"):
        created = first(calls, "create", str(path))
        assert created < first(calls[created:], "sync", str(path.parent)) + created < building, path
    settled = first(calls, "sync", journal)
    assert settled < min(first(calls, "write", str(path / "data-000")) for path in directories)


@needs("system calls")
@needs("ext4 shutdown")
@pytest.mark.parametrize("is_settled", [True, False])
def test_a_kill_before_the_truncated_journal_is_flushed_and_then_a_power_cut(
    a_room: Room, monkeypatch: pytest.MonkeyPatch, is_settled: bool
) -> None:
    """What the killed process left is the new generation only for the page cache, until the next opening settles it."""
    rig = Shutdown(a_room, "ext4")
    path = rig.mounts[0] / "run"
    with Store(path, dram="16MiB", engine="threads") as store:
        for step in (1, 2):
            store["large"] = torch.full((3 << 20,), step, dtype=torch.uint8)
            store.commit({"step": step})
    kill_at(JOB, ["1", str(path)], file=path / "catalog.db-journal", call="fdatasync", number=3)
    if not is_settled:
        monkeypatch.setattr(catalog, "settle_journal", lambda path: None)
    with pytest.raises(InterruptedError), Store(path, dram="16MiB", engine="threads") as store:
        assert store.generation == 3  # the killed commit, never acknowledged
        for name in ("large", "b", "c"):
            store[name] = torch.full((3 << 20,), 9, dtype=torch.uint8)
        store.working_set.swap_out(["large", "b", "c"])
        store.working_set.unreserve(store.working_set.reserve(12 << 20))
        rig.cut()
        raise InterruptedError
    rig.restore()
    with Store(path, dram="16MiB", engine="threads") as store:
        assert store.generation == (3 if is_settled else 2)  # 2: the journal has come back
        assert store.verify().is_clean == is_settled  # and what it stands on was overwritten
