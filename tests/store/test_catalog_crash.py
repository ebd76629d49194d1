import errno
import os
import random
import shutil
import sqlite3
from contextlib import closing

import pytest

from tests.store.catalogs import (
    ROOT,
    SqliteHome,
    content_of,
    failing,
    loaded,
    root_of,
    row_of,
)
from tiered.errors import CapacityError, CorruptionError, DeadlineError, DeviceError


def test_leftovers_of_a_crashed_creation_are_replaced(file, tmp_path):
    file.create().close()
    journal = b"stale journal of another catalog"
    file.path.unlink()
    for name in ("catalog.db.new", "catalog.db.new-journal", "catalog.db-journal", "catalog.db-wal"):
        (tmp_path / name).write_bytes(journal)
    file.create().close()
    assert content_of(file) == (ROOT, [])
    assert sorted(os.listdir(tmp_path)) == ["catalog.db", "catalog.db-journal"]
    assert not (tmp_path / "catalog.db-journal").stat().st_size


@pytest.mark.parametrize("name", ["catalog.db-journal", ""])
def test_a_journal_that_cannot_be_made_durable_is_an_error_at_open(file, tmp_path, monkeypatch, name):
    file.create().close()
    sync = os.fsync
    num_failures = []

    def fail(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / name):
            num_failures.append(1)
            raise OSError(errno.EIO, "scripted")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DeviceError, match="scripted"):
        content_of(file)
    assert len(num_failures) == 1  # a second try would say "ok"


def crash_in_commit(file, home):
    """Leave in ``home`` what a process killed in the middle of a commit leaves: a journal, and half-changed pages."""
    with closing(file.create()) as catalog:
        rows = [row_of(key_id) for key_id in range(1, 300)]
        catalog.apply(root_of(1, state="old"), rows, [])
        connection = catalog._connection
        connection.execute("PRAGMA cache_size=1")  # so that pages reach the file before the commit
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE records SET body = zeroblob(300)")
        for name in ("catalog.db", "catalog.db-journal"):
            shutil.copy2(file.path.parent / name, home.path.parent / name)
        connection.execute("ROLLBACK")
        assert file.path.read_bytes() != home.path.read_bytes()
    return root_of(1, state="old"), rows


@pytest.mark.parametrize("read_only", [False, True])
def test_a_commit_cut_short_never_happened(file, tmp_path, read_only):
    (tmp_path / "copy").mkdir()
    home = SqliteHome(tmp_path / "copy")
    content = crash_in_commit(file, home)
    assert (home.path.parent / "catalog.db-journal").stat().st_size > 512
    assert content_of(home, read_only=read_only) == content
    assert content_of(home, read_only=True) == content


def test_a_damaged_journal_is_found(file, tmp_path):
    (tmp_path / "copy").mkdir()
    home = SqliteHome(tmp_path / "copy")
    content = crash_in_commit(file, home)
    image, journal = (home.path.parent / n for n in ("catalog.db", "catalog.db-journal"))
    saved = image.read_bytes(), journal.read_bytes()
    rng = random.Random(3)
    outcomes = set()
    for _ in range(60):
        damaged = bytearray(saved[1])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        image.write_bytes(saved[0])
        journal.write_bytes(damaged)
        journal.chmod(0o600)  # playing it back may have removed it
        try:
            outcomes.add(content_of(home) == content)
        except CorruptionError:
            outcomes.add("found")
    assert "found" in outcomes and False not in outcomes


@pytest.mark.parametrize("read_only", [False, True])
def test_a_journal_that_gives_the_file_another_size_is_found(quick_path, read_only):
    for name in ("made", "copy"):
        (quick_path / name).mkdir()
    home = SqliteHome(quick_path / "copy")
    content = crash_in_commit(SqliteHome(quick_path / "made"), home)
    left = {path: path.read_bytes() for path in home.path.parent.iterdir()}
    journal = home.path.parent / "catalog.db-journal"
    num_pages = int.from_bytes(left[journal][16:20], "big")  # has no checksum
    for bit in range(32):
        for path, saved in left.items():
            path.unlink(missing_ok=True)  # or one of terabytes would be cut first
            path.write_bytes(saved)
            path.chmod(0o600)
        with open(journal, "r+b") as file:
            os.pwrite(file.fileno(), (num_pages ^ 1 << bit).to_bytes(4, "big"), 16)
        try:  # a larger file is terabytes long then, and empty
            assert content_of(home, read_only=read_only) == content, f"bit {bit}"
        except CorruptionError as error:
            assert error.file == str(home.path)


@pytest.mark.parametrize("word", ["BEGIN", "UPDATE", "COMMIT"])
def test_after_an_io_error_nothing_more_is_committed(file, word):
    with closing(file.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1)], [])
        with failing(catalog, word, sqlite3.SQLITE_IOERR_FSYNC):
            with pytest.raises(DeviceError, match="could not commit"):
                catalog.apply(root_of(2), [row_of(2)], [])
        with pytest.raises(DeviceError, match="unknown"):
            catalog.apply(root_of(2), [row_of(2)], [])
        assert "failed" in repr(catalog)
    assert content_of(file) == (root_of(1), [row_of(1)])


@pytest.mark.parametrize("code, error", [(sqlite3.SQLITE_FULL, CapacityError), (sqlite3.SQLITE_BUSY, DeadlineError)])
def test_a_full_drive_or_a_busy_file_changes_nothing_and_can_be_retried(file, code, error):
    with closing(file.create()) as catalog:
        with failing(catalog, "COMMIT", code), pytest.raises(error):
            catalog.apply(root_of(1), [row_of(1)], [])
        assert loaded(catalog) == (ROOT, [])
        catalog.apply(root_of(1), [row_of(1)], [])
    assert content_of(file) == (root_of(1), [row_of(1)])


def test_a_really_full_file(file):
    with closing(file.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1)], [])
        catalog._connection.execute("PRAGMA max_page_count=5")
        with pytest.raises(CapacityError):
            catalog.apply(root_of(2), [row_of(key_id) for key_id in range(2, 500)], [])
        assert loaded(catalog) == (root_of(1), [row_of(1)])
        catalog.apply(root_of(2), [row_of(2)], [])
    assert content_of(file) == (root_of(2), [row_of(1), row_of(2)])


@pytest.mark.parametrize("letter", ["x", "\u20ac"])
def test_the_largest_state_that_is_let_through_is_written(file, letter):
    with closing(file.create()) as catalog:
        catalog._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 3000)
        sizes = range(2700 // len(letter.encode()), 3000 // len(letter.encode()))
        fits = [num for num in sizes if not _is_refused(catalog, letter * num)]
        assert fits and len(fits) < len(sizes)
        catalog.apply(root_of(1, state=letter * fits[-1]), [], [], keeps_before=True)


def _is_refused(catalog, state):
    try:
        catalog.measure(root_of(1, state=state))
    except CapacityError:
        return True
    return False
