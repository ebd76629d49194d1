"""What format version 1 has written is read for ever, and becomes version 2 when it is written to; a newer version is
refused with nothing touched."""

from __future__ import annotations

import errno
import json
import os
import random
import sqlite3
import struct
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.store.format_1 import GENERATION, STATE, Counted, contents, unpack
from tests.store.rig import numbers
from tiered.cli import main
from tiered.errors import CorruptionError, DeviceError, UsageError
from tiered.store.catalog import new_file
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.root import FORMAT_VERSION
from tiered.store.format.version_1 import convert
from tiered.store.store import Store


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    return unpack(tmp_path)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether dtype, shape and all bits are the same."""
    is_alike = first.dtype == second.dtype and first.shape == second.shape
    return is_alike and torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def assert_holds_format_1(store: Store) -> None:
    expected = contents()
    assert set(store) >= set(expected)
    assert [name for name, value in expected.items() if not same(store[name], value)] == []
    assert store.verify().is_clean


def test_a_store_of_format_1_is_read_and_changed_by_nobody(directories: list[Path]) -> None:
    before = files(directories)
    with Store(*directories, dram="16MiB", mode="r") as store:
        assert store.generation == GENERATION and len(store) == len(contents())
        assert str(store.state) == str(STATE) and store.registered_state("counted") == {"count": 42}
        assert_holds_format_1(store)
    assert files(directories) == before


def version_of(directories: list[Path]) -> int:
    with closing(sqlite3.connect(directories[0] / "catalog.db")) as connection:
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def test_a_writer_that_commits_nothing_leaves_format_1_as_it_is(directories: list[Path]) -> None:
    with Store(*directories, dram="16MiB") as store:
        assert_holds_format_1(store)
    assert version_of(directories) == 1


@pytest.mark.parametrize("fails_at", ["fsync", "rename"])
def test_a_store_whose_new_catalog_was_cut_short_is_of_format_1(
    directories: list[Path], fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new catalog takes the old one's name when it is whole and durable, and not before."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "scripted")

    with pytest.raises(DeviceError), Store(*directories, dram="16MiB") as store:
        store["more"] = numbers(100_000)
        with monkeypatch.context() as patch:
            patch.setattr(new_file, "os", Passing(os, fails_at, fail))
            store.commit()
    assert version_of(directories) == 1
    assert not (directories[0] / "catalog.db.new").exists(), "it would take the last space of a full drive"
    with Store(*directories, dram="16MiB") as store:
        assert_holds_format_1(store)
        assert "more" not in store
        store["more"] = numbers(100_000)
    assert version_of(directories) == FORMAT_VERSION


class Passing:
    """A module with one function replaced."""

    def __init__(self, module: Any, name: str, function: Callable[..., object]) -> None:
        self._module = module
        setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def test_a_damaged_catalog_of_format_1_is_found(directories: list[Path]) -> None:
    path = directories[0] / "catalog.db"
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT key_id, body FROM records").fetchall()
    for sql, values in (
        ("UPDATE records SET body = ? WHERE key_id = ?", (b"\1" + rows[0][1][1:], rows[0][0])),
        ("DELETE FROM records WHERE key_id = ?", (rows[1][0],)),
        ("UPDATE root SET body = substr(body, 1, 60)", ()),
    ):
        before = path.read_bytes()
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(sql, values)
        for mode in ("r", "a"):
            with pytest.raises(CorruptionError):
                Store(*directories, dram="16MiB", mode=mode)
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda body: (1 << 63).to_bytes(8, "little") + body[8:], "out of range", id="generation"),
        pytest.param(lambda body: body[:26] + b"\2" + body[27:], "inline is 2", id="a kind that came with version 2"),
        pytest.param(lambda body: body[:16] + b"\xff" * 4 + body[20:], "its fields need", id="a name behind its end"),
        pytest.param(lambda body: body[:20], "cannot be decoded", id="half of its fields"),
    ],
)
def test_a_row_of_format_1_that_no_store_writes_is_damage_whatever_its_digest_says(
    directories: list[Path], change: Callable[[bytes], bytes], message: str
) -> None:
    root, root_digest, rows = catalog_of_1(directories)
    key_id, body, _ = rows[0]
    body = change(body)
    found = xxhash.xxh3_64_digest(key_id.to_bytes(8, "little") + body, xxhash.xxh3_64_intdigest(root[:16]))[::-1]
    with pytest.raises(CorruptionError, match=f"key id {key_id}.*{message}") as caught:
        convert((root, root_digest), [(key_id, body, found), *rows[1:]], "catalog.db")
    assert caught.value.file == "catalog.db"


@pytest.mark.parametrize(
    ("start", "new"), [pytest.param(24, bytes(8), id="no next key id"), pytest.param(52, b"\xff", id="a state no text")]
)
def test_a_root_of_format_1_that_no_store_writes_is_damage_whatever_its_digest_says(
    directories: list[Path], start: int, new: bytes
) -> None:
    root, _, rows = catalog_of_1(directories)
    root = root[:start] + new + root[start + len(new) :]
    found = xxhash.xxh3_64_digest((1).to_bytes(4, "little") + root)[::-1]
    with pytest.raises(CorruptionError, match="root row holds what no store writes") as caught:
        convert((root, found), rows, "catalog.db")
    assert caught.value.file == "catalog.db"


def catalog_of_1(directories: list[Path]) -> tuple[bytes, bytes, list[tuple[int, bytes, bytes]]]:
    """Return the body and the digest of the root, and the rows."""
    with closing(sqlite3.connect(directories[0] / "catalog.db")) as connection:
        root, root_digest = connection.execute("SELECT body, digest FROM root").fetchone()
        return root, root_digest, connection.execute("SELECT * FROM records ORDER BY key_id").fetchall()


def test_a_store_of_format_1_can_be_gone_on_with(directories: list[Path]) -> None:
    counted = Counted()
    with Store(*directories, dram="16MiB") as store:
        store.register("counted", counted)
        assert str(store.resume()) == str(STATE) and counted.count == 42
        store["more"] = numbers(100_000)
        assert store.commit({"step": 4}) == GENERATION + 1
    with Store(*reversed(directories), dram="16MiB") as store:
        assert store.generation == GENERATION + 1 and torch.equal(store["more"], numbers(100_000))
        assert_holds_format_1(store)
    assert version_of(directories) == FORMAT_VERSION


def add_large_row(path: Path) -> bytes:
    """Add a record of 1025 blocks of 4 MiB to the catalog of format 1, and return the digests of its blocks."""
    root_of_1, digests = struct.Struct("<16sQQIQQ"), random.Random(1).randbytes(8 * 1025)
    nbytes = (1024 << 22) + 5
    with closing(sqlite3.connect(path)) as connection, connection:
        body = connection.execute("SELECT body FROM root").fetchone()[0]
        store_uuid, generation, key_id, num_directories, num_rows, digest_sum = root_of_1.unpack_from(body)
        place = struct.pack("<HIQQ", 0, 7, 0, 1025 << 22)
        row = struct.pack("<QQIIBBB", 1, nbytes, 5, 1, 5, 1, 0) + b"largeuint8" + struct.pack("<Q", nbytes)
        seed = xxhash.xxh3_64_intdigest(store_uuid)
        digest = xxhash.xxh3_64_intdigest(key_id.to_bytes(8, "little") + row + place + digests, seed)
        total = (digest_sum + digest) % (1 << 64)
        root = root_of_1.pack(store_uuid, generation, key_id + 1, num_directories, num_rows + 1, total)
        root += body[root_of_1.size :]
        values = (key_id, row + place + digests, digest.to_bytes(8, "little"))
        connection.execute("INSERT INTO records VALUES (?, ?, ?)", values)
        root_digest = xxhash.xxh3_64_intdigest((1).to_bytes(4, "little") + root).to_bytes(8, "little")
        connection.execute("UPDATE root SET body = ?, digest = ?", (root, root_digest))
    return digests


@pytest.mark.parametrize("read_only", [False, True])
def test_a_large_record_of_format_1_has_pages_before_and_after_the_file_is_written_anew(
    directories: list[Path], read_only: bool
) -> None:
    path = directories[0] / "catalog.db"
    digests = add_large_row(path)
    with closing(SqliteCatalog(path, read_only=read_only)) as catalog:
        root, rows = catalog.load()
        (row,) = (row for row in rows if row.name == "large")
        assert row.is_paged
        for number, expected in ((0, digests[: 8 * 1024]), (1, digests[8 * 1024 :])):
            assert catalog.page(row, number).digests == expected
        with pytest.raises(CorruptionError, match=r"page 2 of 'large' .* is gone"):
            catalog.page(row, 2)
        if not read_only:
            catalog.apply(replace(root, generation=root.generation + 1), [], [])
            assert catalog.page(row, 1).digests == digests[8 * 1024 :]
    assert version_of(directories) == (1 if read_only else FORMAT_VERSION)


def test_a_catalog_of_format_1_with_two_roots_is_damaged(directories: list[Path]) -> None:
    path = directories[0] / "catalog.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO root SELECT 0, format, body, digest FROM root")
    with closing(SqliteCatalog(path)) as catalog, pytest.raises(CorruptionError, match="expected one root row, got 2"):
        catalog.load()


def newer_catalog(directories: list[Path]) -> None:
    with closing(sqlite3.connect(directories[0] / "catalog.db")) as connection, connection:
        connection.execute("PRAGMA user_version=3")
        connection.execute("UPDATE root SET format = 3")


def newer_identity(directories: list[Path]) -> None:
    path = directories[1] / "identity"
    fields = json.loads(path.read_bytes()) | {"format": 2, "rank": 3}
    del fields["digest"]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
    path.write_bytes(json.dumps({**fields, "digest": digest}).encode() + b"\n")


@pytest.mark.parametrize(("make_newer", "newer", "known"), [(newer_catalog, 3, 2), (newer_identity, 2, 1)])
@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_newer_format_is_refused_with_nothing_touched(
    directories: list[Path], mode: str, make_newer: Callable[[list[Path]], None], newer: int, known: int
) -> None:
    make_newer(directories)
    before = files(directories)
    with pytest.raises(UsageError, match=f"version {newer}; this tiered reads version {known}: open it with"):
        Store(*directories, dram="16MiB", mode=mode)
    assert files(directories) == before


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_command_line_refuses_a_newer_format(
    directories: list[Path], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newer_catalog(directories)
    monkeypatch.setattr(sys, "argv", ["tiered", command, *map(str, directories)])
    assert main() != 0
    assert "format version 3; this tiered reads version 2" in "".join(capsys.readouterr())


def files(directories: list[Path]) -> dict[Path, bytes]:
    """Return the bytes of every file but the locks, which name who opened the store last."""
    found = [path for directory in directories for path in sorted(directory.iterdir()) if path.name != "lock"]
    return {path: path.read_bytes() for path in found}
