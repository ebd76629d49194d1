import random
import sqlite3
from contextlib import closing

import pytest

from tests.store.catalogs import (
    UUID,
    SqliteHome,
    content_of,
    loaded,
    root_of,
    row_of,
)
from tiered.errors import CorruptionError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.row import encode_row


@pytest.fixture
def file(quick_path):
    return SqliteHome(quick_path)


@pytest.fixture(scope="module")
def damaged_base(tmp_path_factory):
    """A catalog that has seen some life, so that it has interior, overflow and free pages."""
    home = SqliteHome(tmp_path_factory.mktemp("base"))
    with closing(home.create()) as catalog:
        rows = [row_of(key_id, nbytes=5000 if key_id % 40 else 700 * BLOCK_NBYTES) for key_id in range(1, 400)]
        catalog.apply(root_of(1, 400), rows, [])
        catalog.apply(root_of(2, 400, state="s" * 9000), [row_of(5, generation=2)], list(range(100, 300)))
        content = loaded(catalog)
    return home.path.read_bytes(), content


def write_catalog(home, image):
    for name in ("catalog.db", "catalog.db-journal"):
        (home.path.parent / name).unlink(missing_ok=True)
    home.path.write_bytes(image)
    home.path.chmod(0o600)


def check_damaged(home, image, content):
    """Damage is found, or did not touch anything that matters: then the catalog still works."""
    write_catalog(home, image)
    try:
        found = content_of(home, read_only=True)
    except CorruptionError as error:
        assert error.file == str(home.path)
    else:
        assert found == content
    try:
        catalog = home.reopen()
    except CorruptionError as error:
        assert error.file == str(home.path)
        return False
    with closing(catalog):
        try:
            assert loaded(catalog) == content
        except CorruptionError:
            return False
        rows = {row.key_id: row for row in content[1]}
        added = [row_of(key_id, generation=3) for key_id in range(100, 200)]
        root = root_of(3, 500)
        catalog.apply(root, added, [1])
        rows |= {row.key_id: row for row in added}
        del rows[1]
    assert content_of(home) == (root, [rows[key_id] for key_id in sorted(rows)])
    return True


def test_undamaged_base_works(file, damaged_base):
    assert check_damaged(file, *damaged_base)


def test_every_byte_of_the_header_flipped(file, damaged_base):
    image, content = damaged_base
    for i in range(100):
        damaged = bytearray(image)
        damaged[i] ^= 1 << i % 8
        check_damaged(file, damaged, content)


def test_pages_zeroed_swapped_or_cut_off(file, damaged_base):
    image, content = damaged_base
    pages = [image[i : i + 4096] for i in range(0, len(image), 4096)]
    rng = random.Random(1)
    for i in rng.sample(range(len(pages)), min(12, len(pages))):
        j = rng.randrange(len(pages))
        swapped = list(pages)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        check_damaged(file, b"".join(swapped), content)
        check_damaged(file, b"".join([*pages[:i], bytes(4096), *pages[i + 1 :]]), content)
        check_damaged(file, b"".join(pages[:i]) + pages[i][:512], content)
    for other in (b"", b"x" * 5000, image + b"y" * 4096):
        assert not check_damaged(file, other, content)


def test_a_row_changed_behind_our_back_is_named(file):
    with closing(file.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1, "weight"), row_of(2)], [])
    with closing(sqlite3.connect(file.path)) as connection, connection:
        body, _ = encode_row(row_of(1, "weight", seed=3), UUID)
        connection.execute("UPDATE records SET body = ? WHERE key_id = 1", (body,))
    with pytest.raises(CorruptionError, match="'weight'") as caught:
        content_of(file)
    assert caught.value.key == "weight" and caught.value.file == str(file.path)


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM records WHERE key_id = 2",
        "DELETE FROM root",
        "INSERT INTO root SELECT 2, format, body, digest FROM root",
        "UPDATE root SET format = -1",
        "UPDATE root SET format = 'x'",
        "UPDATE root SET body = 1.5",
        "UPDATE root SET body = zeroblob(5)",
        "UPDATE records SET body = 'text'",
        "UPDATE records SET body = zeroblob(3)",
        "UPDATE records SET digest = x'00'",
        "UPDATE records SET key_id = -2 WHERE key_id = 2",
        "CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END",
        "CREATE VIEW v AS SELECT * FROM root",
        "CREATE TABLE more (a)",
        "CREATE INDEX i ON records (digest)",
        "ALTER TABLE records ADD COLUMN c",
        "DROP TABLE records",
        "PRAGMA user_version=1",
        "PRAGMA user_version=3",
        "PRAGMA user_version=-1",
        "PRAGMA application_id=5",
    ],
)
def test_tables_that_no_store_writes_are_corruption(file, sql):
    with closing(file.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1), row_of(2)], [])
    with closing(sqlite3.connect(file.path)) as connection, connection:
        connection.execute(sql)
    with pytest.raises(CorruptionError):
        content_of(file)


@pytest.mark.parametrize("side", ["-wal", "-shm"])
def test_a_write_ahead_log_is_refused(file, side):
    file.create().close()
    file.path.with_name(f"catalog.db{side}").write_bytes(b"x" * 100)
    with pytest.raises(CorruptionError, match=side):
        file.reopen()


def test_wal_mode_is_refused_read_only(file):
    file.create().close()
    with closing(sqlite3.connect(file.path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    with pytest.raises(CorruptionError, match="write-ahead log"):
        file.reopen(read_only=True)
