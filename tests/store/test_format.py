"""A store of another version of the format on disk is refused with nothing touched."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from tests.store.rig import numbers
from tiered.errors import UsageError
from tiered.store.store import Store

OLDER = "version 1; this tiered reads version 2: open it once with tiered 0.2.0 and commit, which writes version 2"
NEWER = "version 3; this tiered reads version 2: open it with the version of tiered that wrote it"


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    with Store(*made, dram="16MiB") as store:
        store["x"] = numbers(100_000)
    return made


def set_catalog_version(directories: list[Path], version: int) -> None:
    """Name ``version`` in both places that hold the version of a catalog; both are in place in every version."""
    with closing(sqlite3.connect(directories[0] / "catalog.db")) as connection, connection:
        connection.execute(f"PRAGMA user_version={version}")
        connection.execute("UPDATE root SET format = ?", (version,))


def older_catalog(directories: list[Path]) -> None:
    """Make the catalog one of version 1, which has two tables."""
    set_catalog_version(directories, 1)
    with closing(sqlite3.connect(directories[0] / "catalog.db")) as connection, connection:
        for table in ("pages", "records_before", "pages_before"):
            connection.execute(f"DROP TABLE {table}")


def newer_catalog(directories: list[Path]) -> None:
    set_catalog_version(directories, 3)


def newer_identity(directories: list[Path]) -> None:
    path = directories[1] / "identity"
    fields = json.loads(path.read_bytes()) | {"format": 3, "rank": 3}
    del fields["digest"]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
    path.write_bytes(json.dumps({**fields, "digest": digest}).encode() + b"\n")


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (older_catalog, OLDER),
        (newer_catalog, NEWER),
        (newer_identity, "version 3; this tiered reads versions 1 to 2: open it with"),
    ],
)
@pytest.mark.parametrize("mode", ["r", "a"])
def test_another_format_is_refused_with_nothing_touched(
    directories: list[Path], mode: str, make_other: Callable[[list[Path]], None], message: str
) -> None:
    make_other(directories)
    before = files(directories)
    with pytest.raises(UsageError, match=message):
        Store(*directories, dram="16MiB", mode=mode)
    assert files(directories) == before


def files(directories: list[Path]) -> dict[Path, bytes]:
    """Return the bytes of every file but the locks, which name who opened the store last."""
    found = [path for directory in directories for path in sorted(directory.iterdir()) if path.name != "lock"]
    return {path: path.read_bytes() for path in found}
