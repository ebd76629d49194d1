"""What hardly ever happens to a catalog: rows that only a bug or a stranger writes, commits cut by an interruption."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from tests.store.catalogs import ROOT, UUID, SqliteHome, content_of, inline_row, large_row, root_of, row_of
from tiered.errors import CorruptionError, DeviceError
from tiered.store.catalog.sqlite_catalog import read_rows
from tiered.store.catalog.sqlite_file import translated
from tiered.store.format import committed_rows as rows_module
from tiered.store.format import root as root_module
from tiered.store.format import row as row_module
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.root import ExternalFile, RootHeader, decode_root, encode_root
from tiered.store.format.row import Extent, encode_row


class Passing:
    """A connection that a test can stand between."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


# -- the file ------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_opened_is_tried_again_and_then_an_error(
    file: SqliteHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.create().close()
    real, tries = os.open, list[str]()

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(file.path):
            tries.append(str(path))
            raise OSError(errno.EIO, "scripted")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DeviceError, match="scripted"):
        file.reopen()
    assert len(tries) == 4


def test_a_page_that_the_drive_does_not_give_is_no_damage(file: SqliteHome) -> None:
    class Answer:
        def execute(self, sql: str) -> Answer:
            return self

        def fetchone(self) -> tuple[bytes]:
            return (b"unable to get the page. error code=266",)

    with closing(file.create()) as catalog, pytest.raises(DeviceError, match="error code=266"):
        catalog._check_pages(Answer())


def test_rows_that_do_not_fit_into_the_file_are_damage(file: SqliteHome) -> None:
    with closing(file.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1), row_of(2)], [])
        twice = "SELECT key_id, zeroblob(30000), digest FROM records"
        with pytest.raises(CorruptionError, match="more bytes than the file"):
            list(read_rows(catalog._connection, twice, catalog.name, catalog._nbytes()))


def test_a_commit_of_another_store_is_refused(file: SqliteHome) -> None:
    with closing(file.create()) as catalog:
        with pytest.raises(CorruptionError, match="another store"):
            catalog.apply(replace(root_of(1), store_uuid=bytes(16)), [], [])


def test_a_commit_that_cannot_be_taken_back_is_the_last(file: SqliteHome) -> None:
    class Stuck(Passing):
        def execute(self, sql: str, *parameters: Any) -> Any:
            if sql == "COMMIT":
                raise ZeroDivisionError
            return self.connection.execute(sql, *parameters)

        def rollback(self) -> None:
            raise sqlite3.OperationalError("scripted")

    with closing(file.create()) as catalog:
        catalog._connection = Stuck(catalog._connection)
        with pytest.raises(ZeroDivisionError):
            catalog.apply(root_of(1), [row_of(1)], [])
        with pytest.raises(DeviceError, match="could not be taken back"):
            catalog.apply(root_of(1), [row_of(1)], [])
    assert content_of(file) == (ROOT, [])


def test_errors_of_a_new_file_and_of_our_own_use_are_no_damage() -> None:
    with pytest.raises(DeviceError, match="kernel log"), translated("it", "create"):
        raise sqlite3.DatabaseError("malformed")
    with pytest.raises(DeviceError, match="could not load"), translated("it", "load"):
        raise sqlite3.ProgrammingError("recursive use")


# -- rows and roots ------------------------------------------------------------------------------------------------


def header_of(rows: list[tuple[int, bytes, bytes]]) -> RootHeader:
    total = sum(int.from_bytes(digest, "little") for _, _, digest in rows)
    return RootHeader(UUID, 9, 0, 1 << 40, 2, 0, len(rows), total & ((1 << 64) - 1))


def encoded(row: Any) -> tuple[int, bytes, bytes]:
    return (row.key_id, *encode_row(row, UUID))


@pytest.mark.parametrize(
    ("start", "new", "message"),
    [(32, bytes(8), "numbers that no store writes"), (root_module.ROOT_HEADER_NBYTES, b"\xff", "is not text")],
)
def test_a_root_whose_digest_is_right_is_still_looked_at(start: int, new: bytes, message: str) -> None:
    body = bytearray(encode_root(ROOT, 0, 0)[0])
    body[start : start + len(new)] = new
    with pytest.raises(CorruptionError, match=message):
        decode_root(bytes(body), root_module._root_digest(bytes(body)), "it")


def test_a_name_that_is_no_text_is_damage_also_in_a_row_like_those_before() -> None:
    one, other = (encoded(row_of(key_id, "ab")) for key_id in (1, 2))
    body = other[1].replace(b"ab", b"\xff\xff", 1)
    bad = (2, body, row_module._row_digest(2, body, row_module.row_seed(UUID)))
    with pytest.raises(CorruptionError):
        CommittedRows.decode([one, bad], header_of([one, bad]), "it")


def test_rows_of_many_kinds_and_what_rows_say_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_MAX_NUM_KINDS", 2)
    raw = [encoded(inline_row(key_id, b"x" * key_id)) for key_id in range(1, 8)] + [encoded(row_of(9))]
    rows = CommittedRows.decode(raw, header_of(raw), "it")
    assert len(rows) == 8 and repr(rows) == "<CommittedRows 8 rows, 1 extents>"
    assert rows.owner(0) == "key 9"
    with pytest.raises(IndexError):
        rows.owner(1)


def pages_with(row: Any, changes: dict[int, Any]) -> list[tuple[int, int, bytes, bytes]]:
    """Return the pages of ``row``, some of them replaced; their digests are right."""
    seed, pages = row_module.row_seed(UUID), []
    for number, page in enumerate(row_module.pages_of(row)):
        body = row_module.encode_page(page._replace(**changes.get(number, {})))
        pages.append((row.key_id, number, body, row_module.page_digest(row.key_id, number, body, seed)))
    return pages


def decoded(rows: list[Any], pages: list[tuple[int, int, bytes, bytes]]) -> CommittedRows:
    raw = [encoded(row) for row in rows]
    total = sum(int.from_bytes(each[-1], "little") for each in (*raw, *pages))
    header = replace(header_of(raw), num_rows=len(raw) + len(pages), digest_sum=total & ((1 << 64) - 1))
    return CommittedRows.decode(raw, header, "it", raw_pages=pages)


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {"digests": b""}, "page 1 of 'key 2' .* cannot be decoded"),
        (1, {"places": row_module.pack([Extent(0, 1, 0, 4096)])}, "page 1 of 'key 2' .*: extents of 4096 bytes for"),
        (0, {"generation": 10}, "page 0 of 'key 2' .*: written for generation 10, committed is 9"),
        (0, {"written": (10).to_bytes(8, "little") * 1024}, "written for generation 10, committed is 9"),
        (
            2,
            {"places": row_module.pack([Extent(2, 1, 0, 1019 * 4096)])},
            "a page of 'key 2' has an extent that is no range of a file",
        ),
    ],
)
def test_a_page_whose_digest_is_right_is_still_looked_at(number: int, changes: Any, message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        decoded([row_of(1), large_row(2)], pages_with(large_row(2), {number: changes}))


def test_pages_are_those_of_the_rows_and_in_order() -> None:
    rows = [row_of(1), large_row(2), large_row(3)]
    pages = [*pages_with(rows[1], {}), *pages_with(rows[2], {})]
    found = decoded(rows, pages)
    num_extents = [len(page.extents) for row in rows[1:] for page in row_module.pages_of(row)]
    assert [found.owner(index) for index in (0, 1, sum(num_extents[:3]), sum(num_extents[:3]) + 1)] == [
        "key 1", "key 2", "key 2", "key 3",
    ]  # fmt: skip
    with pytest.raises(IndexError):
        found.owner(1 + sum(num_extents))
    for wrong, message in (
        (pages[:3], "pages are missing of 'key 3'"),
        (pages[:5], "pages are missing of 'key 3'"),
        (pages[3:], "page 0 of key id 3, expected 0 of 2"),
        ([pages[0], *pages[2:]], "page 2 of key id 2, expected 1 of 2"),
        ([*pages, (4, 0, b"", b"")], "page 0 of key id 4, expected none"),
        ([(*pages[0][:2], b"", pages[0][3]), *pages[1:]], "page 0 of 'key 2' .* does not match its digest"),
    ):
        with pytest.raises(CorruptionError, match=message):
            decoded(rows, wrong)


def test_a_list_of_files_that_does_not_end_with_its_bytes_is_damage() -> None:
    body = bytearray(encode_root(replace(ROOT, external=(ExternalFile("f", 4096, 1),)), 0, 0)[0])
    body[root_module.ROOT_HEADER_NBYTES + 16] = 2  # the bytes of its name: it goes on into the state
    with pytest.raises(CorruptionError):
        decode_root(bytes(body), root_module._root_digest(bytes(body)), "it")
