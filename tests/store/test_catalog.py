import gc
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from tests.bytes.moving import exit_code_of_child
from tests.store.catalogs import (
    NAMES,
    ROOT,
    UUID,
    FailingConnection,
    SqliteHome,
    content_of,
    inline_row,
    loaded,
    root_of,
    row_of,
)
from tests.store.rig import WAIT_S
from tiered.errors import ClosedError, UsageError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.root import encode_root
from tiered.store.format.row import Extent, encode_row


@pytest.fixture
def home(tmp_path):
    return SqliteHome(tmp_path)


def test_rows_come_back_in_order(home):
    rows = [row_of(i + 1, name) for i, name in enumerate(NAMES)]
    rows += [
        row_of(50, nbytes=0),
        row_of(51, nbytes=3 * BLOCK_NBYTES + 1),
        inline_row(60, b""),
        inline_row(61, b"\0\1"),
    ]
    root = root_of(7, state='{"step": "ünïcode"}')
    with closing(home.create()) as catalog:
        catalog.apply(root, rows[::-1], [])
        assert loaded(catalog) == (root, rows)
    assert content_of(home) == (root, rows)


@pytest.mark.parametrize(
    "row",
    [
        replace(row_of(1), digests=b"short"),
        replace(row_of(1), extents=()),
        replace(row_of(1), extents=(Extent(0, -1, 0, 8192),)),
        replace(row_of(1), key_id=0),
        replace(row_of(1), nbytes=-1),
        replace(row_of(1), shape=(-1,)),
        replace(inline_row(1, b"ab"), nbytes=3),
        replace(inline_row(1, b"ab"), extents=(Extent(0, 0, 0, 4096),)),
    ],
)
def test_rows_that_no_store_may_write_are_refused(home, row):
    with closing(home.create()) as catalog:
        with pytest.raises(ValueError):
            catalog.apply(root_of(1), [row], [])
        assert loaded(catalog) == (ROOT, [])


def test_closed_catalog_says_so(home):
    catalog = home.create()
    catalog.close()
    catalog.close()
    with pytest.raises(ClosedError):
        catalog.load()
    with pytest.raises(ClosedError):
        catalog.apply(root_of(1), [], [])
    assert "closed" in repr(catalog)


def test_creating_twice_is_refused(home):
    home.create().close()
    with pytest.raises(UsageError, match="already"):
        home.create()


def test_opening_what_is_not_there_is_refused(home):
    with pytest.raises(UsageError, match="no catalog"):
        home.reopen()


# --- the file ---


def test_sqlite_file_is_as_documented(file):
    with closing(file.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1)], [])
    with closing(sqlite3.connect(file.path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("PRAGMA page_size").fetchone() == (4096,)
        assert connection.execute("PRAGMA encoding").fetchone() == ("UTF-8",)
        body, digest = encode_row(row_of(1), UUID)
        assert connection.execute("SELECT key_id, body, digest FROM records").fetchall() == [(1, body, digest)]
        total = int.from_bytes(digest, "little")
        assert connection.execute("SELECT one, format, body, digest FROM root").fetchall() == [
            (1, 2, *encode_root(root_of(1), 1, total))
        ]


def test_durability_settings_are_those_of_the_crash_argument(file):
    with closing(file.create()) as catalog:
        connection = catalog._connection
        assert connection.execute("PRAGMA journal_mode").fetchone() == (b"truncate",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)
        assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)


# --- other readers, threads and processes ---


def test_a_live_catalog_can_be_read(file):
    with closing(file.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1)], [])
        with closing(file.reopen(read_only=True)) as reader:
            assert loaded(reader) == (root_of(1), [row_of(1)])
            catalog.apply(root_of(2), [row_of(2)], [])
            assert loaded(reader) == (root_of(2), [row_of(1), row_of(2)])
            with pytest.raises(UsageError, match="read-only"):
                reader.apply(root_of(3), [], [])


def test_a_forked_child_cannot_use_it_and_harms_nothing(file):
    with closing(file.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1)], [])

        def refused():
            with pytest.raises(UsageError, match="after a fork"):
                catalog.load()
            with pytest.raises(UsageError, match="after a fork"):
                catalog.apply(root_of(2), [], [])
            catalog.close()

        assert exit_code_of_child(refused) == 0
        catalog.apply(root_of(2), [row_of(2)], [])
        assert loaded(catalog) == (root_of(2), [row_of(1), row_of(2)])


def test_a_child_that_is_forked_within_a_transaction_harms_nothing(file):
    with closing(file.create()) as catalog:
        started, forked = threading.Event(), threading.Event()

        class Slow(FailingConnection):
            def execute(self, sql, *parameters):
                if sql.startswith("COMMIT"):
                    started.set()
                    assert forked.wait(WAIT_S)
                return super().execute(sql, *parameters)

        connection = catalog._connection
        catalog._connection = Slow(connection, "", 0)
        thread = threading.Thread(target=catalog.apply, args=(root_of(1), [row_of(1)], []))
        thread.start()
        assert started.wait(WAIT_S)

        def forget():
            """As the end of the interpreter does; a connection that is closed rolls its transaction back."""
            nonlocal connection
            assert connection.in_transaction
            catalog.close()
            catalog._connection = connection = None
            gc.collect()

        assert exit_code_of_child(forget) == 0
        forked.set()
        thread.join()
        catalog._connection = connection
        assert loaded(catalog) == (root_of(1), [row_of(1)])
