"""Hostile changes to the files of a store: at random, by SQL, or with every digest made right again."""

from __future__ import annotations

import base64
import json
import os
import random
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tests.store.flips import JOURNAL_NAME
from tiered.bytes.device.profile import PROFILE_NAME
from tiered.store.catalog.transaction import ROWS_BEFORE
from tiered.store.format import root as roots
from tiered.store.format import row as rows
from tiered.store.lifetime.directory import CATALOG_NAME
from tiered.store.lifetime.ledger import LEDGER_NAME

__all__ = ["KINDS", "Kind"]

_NUMBERS = (
    0, 1, 2, 255, 1 << 12, (1 << 16) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62) + 1, (1 << 63) - 1, 1 << 63
)  # fmt: skip

_TABLES = ("records", "root", "pages", "records_before", "pages_before")

Mutation = Callable[[Path, random.Random], None]


def _spoil_bytes(path: Path, rng: random.Random) -> None:
    """Overwrite, cut, extend, or swap pages."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 6)):
        at, word = rng.randrange(len(content) + 1), rng.choice(_NUMBERS).to_bytes(8, rng.choice(("big", "little")))
        action = rng.randrange(6)
        if action == 0:
            content[at : at + rng.randrange(64)] = rng.randbytes(rng.randrange(64))
        elif action == 1:
            content[at : at + 8] = word
        elif action == 2:
            del content[at:]
        elif action == 3:
            content += rng.randbytes(rng.randrange(9000))
        elif action == 4:
            first, second = (rng.randrange(len(content) // 4096 + 1) * 4096 for _ in "ab")
            content[first : first + 4096] = content[second : second + 4096]
        else:  # where SQLite's own pages say how long they are
            page = rng.randrange(len(content) // 4096 + 1) * 4096 + rng.choice((0, 100))
            content[page + rng.randrange(12) : page + 12] = word[: rng.randrange(1, 9)]
    path.write_bytes(content)


def _replace_file(path: Path, rng: random.Random) -> None:
    """Put something else in the file's place."""
    foreign = [
        b"", b"\0" * 9000, rng.randbytes(rng.randrange(20_000)), b"SQLite format 3\0" + rng.randbytes(8192),
        b"[" * 50_000, b"{}\n", b"null", b"1" * 5000, json.dumps({"format": 1}).encode(), b'"\xff\xfe"',
    ]  # fmt: skip
    path.write_bytes(rng.choice(foreign))


def _run_sql(path: Path, rng: random.Random) -> None:
    """Change the tables as anybody with SQLite could, leaving the digests."""
    number, table = rng.choice(_NUMBERS) % (1 << 63), rng.choice(_TABLES)
    column = rng.choice(("body", "digest"))
    value = rng.choice((f"zeroblob({rng.randrange(100_000)})", str(number), "'text'", "1.5", "randomblob(300)", "body"))
    statement = rng.choice(
        [
            f"UPDATE {table} SET {column} = {value}",
            f"UPDATE records SET {column} = {value} WHERE key_id % {rng.randrange(1, 9)} = 0",
            f"UPDATE root SET format = {number}", f"PRAGMA user_version = {number % (1 << 31)}",
            f"UPDATE records SET key_id = key_id + {rng.randrange(1, 100)}",
            "UPDATE records SET key_id = -key_id", f"DELETE FROM {table}", f"DROP TABLE {table}",
            f"INSERT INTO records SELECT key_id + 1000, body, digest FROM records LIMIT {rng.randrange(1, 9)}",
            "INSERT OR IGNORE INTO records_before SELECT * FROM records", "UPDATE root SET one = 1 - one",
            "UPDATE records_before SET key_id = key_id + 1000", f"DELETE FROM root WHERE one = {number % 2}",
            "INSERT INTO pages_before SELECT key_id, 0, body, digest FROM records",
            f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN DELETE FROM records; END",
            "CREATE VIEW v AS SELECT * FROM root", f"CREATE INDEX i ON {table} ({column})",
            f"ALTER TABLE {table} ADD COLUMN more", f"ALTER TABLE {table} RENAME TO other",
            "CREATE TABLE huge AS SELECT zeroblob(3000000) AS b", "PRAGMA auto_vacuum = 1; VACUUM",
            "PRAGMA encoding = 'UTF-16'; VACUUM", "PRAGMA journal_mode = WAL", "PRAGMA application_id = 7",
            "DROP TABLE records; CREATE VIEW records AS WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 "
            "FROM c) SELECT i AS key_id, zeroblob(1000000) AS body, x'00' AS digest FROM c",
        ]
    )  # fmt: skip
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statement)


def _forge(path: Path, rng: random.Random) -> None:
    """Change rows, the root or the state of a generation, and make every digest and sum of it right again."""
    with closing(sqlite3.connect(path)) as connection, connection:
        one, root = rng.choice(connection.execute("SELECT one, body FROM root ORDER BY one").fetchall())
        kept = connection.execute("SELECT key_id, body, digest FROM records" if one else ROWS_BEFORE).fetchall()
        found = {key_id: body for key_id, body, _ in kept}
        header, state = list(roots._ROOT.unpack_from(root)), root[roots.ROOT_HEADER_NBYTES :]
        pages: list[tuple[int, int, bytes]] = []
        what = rng.randrange(5)
        if what < 2:
            for key_id in rng.sample(sorted(found), rng.randrange(1, 4)):
                found[key_id] = _forged_row(found[key_id], found[rng.choice(sorted(found))], rng)
        elif what == 2:
            field = rng.randrange(1, 7)
            header[field] = rng.choice(_NUMBERS) % (1 << (32 if field in (4, 5) else 64))
        elif what == 3:
            state = _forged_state(state, rng)
        else:
            key_id = rng.choice(sorted(found))
            found[key_id], pages = _made_up_pages(key_id, rng)
            with open(os.open(path.parent / "data-007", os.O_RDWR | os.O_CREAT, 0o600), "wb") as data:
                data.truncate(8 << 20)
            header[6] += len(pages)
        seed = rows.row_seed(header[0])
        digests = {key_id: rows._row_digest(key_id, body, seed) for key_id, body in found.items()}
        sealed = [(*page, rows.page_digest(*page, seed)) for page in pages]
        total = sum(int.from_bytes(digest, "little") for digest in (*digests.values(), *(page[3] for page in sealed)))
        header[7] = total % (1 << 64)
        body = roots._ROOT.pack(*header) + state
        connection.execute("UPDATE root SET body = ?, digest = ? WHERE one = ?", (body, roots._root_digest(body), one))
        changed = [(key_id, found[key_id], digests[key_id]) for key_id, _, digest in kept if digests[key_id] != digest]
        table = "records" if one else "records_before"
        connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", changed)
        table = "pages" if one else "pages_before"
        connection.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?, ?)", sealed)


def _made_up_pages(key_id: int, rng: random.Random) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """Return the body of a row of 1500 blocks of 4096 bytes, and (key id, page, body) of its pages, mostly right."""
    num_blocks = [1024, 476]
    nbytes = sum(num_blocks) * 4096
    row = rows._ROW.pack(1, nbytes, 5, 0, 5, 1, rows.PAGED, 12) + b"pagesuint8" + nbytes.to_bytes(8, "little")
    flaws, pages = [rng.randrange(16) for _ in num_blocks], []
    for page, (number, flaw) in enumerate(zip(num_blocks, flaws, strict=True)):
        extent = [0, 7, page << 22, number * 4096]
        if flaw < 4:
            extent[flaw] = rng.choice(_NUMBERS) % (1 << (16, 32, 64, 64)[flaw])
        extents = struct.pack("<HIQQ", *extent) * (rng.choice((0, 2, 5000)) if flaw == 4 else 1)
        many = (1 << 32) - 1 if flaw == 5 else len(extents) // 22
        written = rng.choice((1, 1 << 31)) if flaw == 6 else 0
        content = rng.randbytes(8 * number - (rng.choice((1, 8, 8 * number)) if flaw == 7 else 0))
        generation = 1 << 40 if flaw == 8 else 1
        body = struct.pack("<QII", generation, many, written) + extents + content + bytes(8 * number * (written == 1))
        pages.append((key_id, page + (flaw == 9), body))
    return row, pages


def _forged_row(body: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return the body of a row with some of its fields made up."""
    fields, rest = list(rows._ROW.unpack_from(body)), bytearray(body[rows.ROW_HEADER_NBYTES :])
    for _ in range(rng.randrange(1, 3)):
        action = rng.randrange(6)
        if action == 0:
            field = rng.randrange(8)
            fields[field] = rng.choice(_NUMBERS) % (1 << (64, 64, 32, 32, 8, 8, 8, 8)[field])
        elif action == 1:  # a dimension, an extent or a digest, most likely
            at = rng.randrange(len(rest) + 1)
            rest[at : at + 8] = rng.choice(_NUMBERS).to_bytes(8, "little")
        elif action == 2:
            rest[rng.randrange(len(rest) + 1) :] = rng.randbytes(rng.randrange(50))
        elif action == 3:  # more dimensions or extents, and room for them
            fields[5], fields[3] = rng.choice(((255, fields[3]), (fields[5], rng.choice((2, 5000)))))
            rest += bytes(rng.randrange(120_000))
        elif action == 4:
            return other
        else:
            name = rng.choice(("../x", "n\0", "x" * 50_000, "", "\ud800", "kept")).encode("utf-8", "surrogatepass")
            rest[: fields[2]] = name
            fields[2] = len(name)
    return rows._ROW.pack(*fields) + bytes(rest)


def _forged_state(text: bytes, rng: random.Random) -> bytes:
    """Return the text of a state with something else in it."""
    action = rng.randrange(4)
    if action == 0:
        return rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"", b"null", b"\xff\xfe", b"3", b"1e999", b"[]", b'"x"'))
    if action == 1:
        spoilt = bytearray(text)
        for _ in range(rng.randrange(1, 9)):
            spoilt[rng.randrange(len(spoilt))] = rng.choice(b'{}[]",:$0e\xff ')
        return bytes(spoilt)
    state = json.loads(text)
    places = ("state", "registered") if action == 2 else ("registered",)
    if isinstance(state.get("registered"), dict) and rng.random() < 0.5:
        state["registered"]["counter"] = _made_up(rng, 0)
    else:
        state[rng.choice(places)] = _made_up(rng, 0)
    return json.dumps(state).encode()


def _made_up(rng: random.Random, depth: int) -> Any:
    """Return a value such as the state's text has, right or wrong."""
    if depth < 4 and rng.random() < 0.3:
        items = [_made_up(rng, depth + 1) for _ in range(rng.randrange(4))]
        return items if rng.random() < 0.5 else {str(number): item for number, item in enumerate(items)}
    shape = [rng.choice((0, 1, 3, -1, 1 << 20, 1 << 40, 1 << 62, 1.5, "3", None)) for _ in range(rng.randrange(4))]
    content = base64.b64encode(rng.randbytes(rng.choice((0, 1, 12, 96)))).decode()
    dtype = rng.choice(("float32", "int64", "qint8", "bool", "complex128", "os", "", 7))
    values: dict[str, Any] = {
        "$tensor": [dtype, shape, content],
        "$ndarray": [rng.choice(("<f4", "|b1", "<i8", "|O8", "<f99", "<U4")), shape, content],
        "$scalar": ["<f8", shape, content], "$int": rng.choice(("f" * 100_000, "-1", "0x", "", 3)),
        "$float": rng.choice(("7ff0000000000000", "zz", "", None)), "$complex": ["0" * 16] * rng.randrange(4),
        "$str": rng.choice((content, "=", 3)), "$bytes": content, "$size": shape,
        "$tuple": rng.choice((shape, "abc", 3)),
        "$dict": rng.choice(([[{}, 1]], [[1]], 3, [[[1], 2]])), "$set": [[1], {}], "$frozenset": [content],
        "$ordered": rng.choice(([], [[]], [[["a", 1]], {}], 5)), "$counter": [["a", "b"], ["c", 1 << 70]],
        "$dtype": dtype, "$device": rng.choice(("cuda:99999999999", "cpu", "x", 3)), "$unknown": 1, "$": [],
    }  # fmt: skip
    tag = rng.choice(sorted(values))
    inner = _made_up(rng, depth + 1) if depth < 4 else None
    return rng.choice(({tag: values[tag]}, {tag: values[tag], "more": 1}, {tag: inner}, 1 << 70))


def _forge_identity(path: Path, rng: random.Random) -> None:
    """Change an identity and make its digest right again."""
    fields = json.loads(path.read_bytes())
    del fields["digest"]
    name = rng.choice(sorted(fields))
    made_up: list[Any] = [*_NUMBERS, -1, 1.5, "x", None, [], {}, True, "00" * 16, "00" * 15, "zz" * 16, float("nan")]
    fields[name] = rng.choice(made_up)
    if rng.random() < 0.2:
        del fields[name]
    digest = xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
    path.write_bytes(json.dumps({**fields, "digest": digest}).encode() + b"\n")


def _forge_ledger(path: Path, rng: random.Random) -> None:
    """Put made-up numbers in a field, and the right digest."""
    content = bytearray(path.read_bytes())
    for slot in (0, 4096):
        at = slot + rng.choice((8, 24, 32, 40, 48, 56))
        content[at : at + 8] = rng.choice((0, 1, 2**31, 2**62, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
        content[slot + 64 : slot + 72] = xxhash.xxh3_64_intdigest(content[slot : slot + 64]).to_bytes(8, "little")
    path.write_bytes(content)


def _forge_profile(path: Path, rng: random.Random) -> None:
    fields = json.loads(path.read_bytes())
    made_up: list[Any] = [*_NUMBERS, -1, 1e400, float("nan"), "x" * 60_000, "uring", None, [], {}, True, "2026-99-99"]
    fields[rng.choice(sorted(fields))] = rng.choice(made_up)
    path.write_bytes(json.dumps(fields).encode())


@dataclass(frozen=True, slots=True)
class Kind:
    """``mutate`` of the file ``name``; ``is_forged``: digests are right again, so that what is read may be made up."""

    name: str
    mutate: Mutation
    weight: int = 1
    is_forged: bool = False


KINDS = {
    "catalog, forged": Kind(CATALOG_NAME, _forge, 8, is_forged=True),
    "catalog, by SQL": Kind(CATALOG_NAME, _run_sql, 3),
    "catalog, its bytes": Kind(CATALOG_NAME, _spoil_bytes, 4),
    "catalog, replaced": Kind(CATALOG_NAME, _replace_file),
    "journal, its bytes": Kind(JOURNAL_NAME, _spoil_bytes, 2),
    "journal, replaced": Kind(JOURNAL_NAME, _replace_file),
    "identity, forged": Kind("identity", _forge_identity, 2, is_forged=True),
    "identity, replaced": Kind("identity", _replace_file),
    "ledger, forged": Kind(LEDGER_NAME, _forge_ledger, is_forged=True),
    "ledger, replaced": Kind(LEDGER_NAME, _replace_file),
    "lock, replaced": Kind("lock", _replace_file),
    "profile, forged": Kind(PROFILE_NAME, _forge_profile),
    "profile, replaced": Kind(PROFILE_NAME, _replace_file),
}
