"""Damage is found wherever it is: rows that make no sense, flipped bits, swapped blocks, lost ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import numbers, simulated_store
from tests.store.simulated_catalog import changed_catalog
from tiered.errors import CorruptionError, UsageError
from tiered.store.format.root import decode_root, encode_root
from tiered.store.format.row import Extent, Row, decode_row, encode_row
from tiered.store.store import Store
from tiered.units import KiB, MiB

PAGE = 4 * KiB


def rewrite_rows(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch, change: Callable[[Row, list[Row]], Row]) -> None:
    """Put ``change(row, rows)`` in the place of each row of the catalog, with digests and sums as they should be."""
    with changed_catalog(disk) as connection:
        root, _ = decode_root(*connection.execute("SELECT body, digest FROM root").fetchone(), "catalog")
        raw = connection.execute("SELECT key_id, body FROM records ORDER BY key_id").fetchall()
        rows = [decode_row(key_id.to_bytes(8, "little") + body) for key_id, body in raw]
        with monkeypatch.context() as patch:
            patch.setattr(
                "tiered.store.format.row.row_problem", lambda row: None
            )  # which keeps a store from writing such rows
            changed = [change(row, rows) for row in rows]
            encoded = {row.key_id: encode_row(row, root.store_uuid) for row in changed}
        total = sum(int.from_bytes(digest, "little") for _, digest in encoded.values())
        connection.execute("UPDATE root SET body = ?, digest = ?", encode_root(root, len(rows), total))
        connection.execute("DELETE FROM records")
        connection.executemany("INSERT INTO records VALUES (?, ?, ?)", [(i, *row) for i, row in encoded.items()])


@pytest.mark.parametrize("dtype", ["float3_e1m1fn", "qint8", "os.system"])
@pytest.mark.parametrize("nbytes", [300, 40 * KiB])
def test_a_store_with_a_dtype_of_a_newer_torch_is_refused_as_it_is(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch, nbytes: int, dtype: str
) -> None:
    with simulated_store(disk) as store:
        store.put_many({key: numbers(nbytes, ord(key)) for key in "ab"})
    rewrite_rows(disk, monkeypatch, lambda row, _: dataclasses.replace(row, dtype=dtype) if row.name == "a" else row)
    with pytest.raises(UsageError, match=rf"'a' has .* '{dtype}', this is torch .*; open the store with") as caught:
        simulated_store(disk)
    assert "restore" not in str(caught.value)
    rewrite_rows(disk, monkeypatch, lambda row, _: dataclasses.replace(row, dtype="uint8"))
    with simulated_store(disk) as store:
        assert all(torch.equal(store[key], numbers(nbytes, ord(key))) for key in "ab")


@pytest.mark.parametrize(
    ("change", "match", "key"),
    [
        ({"nbytes": 5000}, "bytes for shape", "a"),
        ({"shape": (1 << 40,), "nbytes": 1 << 40}, "pages are missing", "a"),
        ({"digests": b"12345678" * 2}, "cannot be decoded", ""),
        ({"extents": ()}, "extents of 0 bytes", "a"),
        ({"extents": (Extent(0, 0, 0, 4096),)}, "extents of 4096 bytes", "a"),
        ({"extents": (Extent(0, 0, 0, 0), Extent(0, 0, 0, 8192))}, "no range", "a"),
        ({"extents": (Extent(0, 0, (1 << 64) - 4096, 8192),)}, "no range", "a"),
        ({"extents": (Extent(0, 0, 1 << 40, 8192),)}, "ends behind", "a"),
        ({"extents": (Extent(0, 0, 1 << 40, 1 << 62),)}, "ends behind", "a"),
        ({"extents": (Extent(0, 9, 0, 8192),)}, "ends behind", "a"),
        ({"extents": (Extent(0, 0, 1, 8192),)}, "not aligned", "a"),
        ({"extents": (Extent(3, 0, 0, 8192),)}, "outside the store's 1 directories", "a"),
        ({"extents": (), "digests": b"", "inline": b"123"}, "cannot be decoded", ""),
        ({"generation": 9}, "written for generation 9, committed is 1", "a"),
        ({"key_id": 77}, "the next key id is", "a"),
    ],
)
@pytest.mark.parametrize("num_others", [0, 3])
def test_rows_that_make_no_sense_are_refused_at_open(
    disk: SimulatedDisk,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    match: str,
    key: str,
    num_others: int,
) -> None:
    with simulated_store(disk) as store:
        store.put_many({f"another {i}": numbers(6000) for i in range(num_others)})  # which look like it
        store["a"] = numbers(6000)
    rewrite_rows(disk, monkeypatch, lambda row, _: dataclasses.replace(row, **change) if row.name == "a" else row)
    with pytest.raises(CorruptionError, match=match) as caught:
        simulated_store(disk)
    assert caught.value.key == key


@pytest.mark.parametrize("first", [0, 4096])
def test_two_rows_on_the_same_extents_are_refused_at_open(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    with simulated_store(disk) as store:
        store.put_many({"a": numbers(6000), "b": numbers(6000)})
    places = (Extent(0, 0, 0, 8192), Extent(0, 0, first, 8192))
    rewrite_rows(disk, monkeypatch, lambda row, rows: dataclasses.replace(row, extents=(places[rows.index(row)],)))
    with pytest.raises(CorruptionError, match="overlaps") as caught:
        simulated_store(disk)
    assert caught.value.key == "b"


@pytest.fixture
def directory(quick_path: Path) -> Path:
    """A directory with a store of three tensors of 9 MiB each, of which no two blocks are alike."""
    with Store(quick_path / "run", dram="64MiB") as store:
        for seed, name in enumerate("abc"):
            store[name] = numbers(9 * MiB, seed)
        store.commit()
    return quick_path / "run"


def _extents(directory: Path) -> dict[str, tuple[int, int]]:
    with Store(directory, dram="16MiB", mode="r") as store:
        return {record.name: (record.extents[0].offset, record.extents[0].nbytes) for record in store.records()}


@pytest.mark.parametrize("how", ["swap in", "stream", "verify"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_flipped_bit_is_found_wherever_it_is(directory: Path, block: int, how: str) -> None:
    offset = _extents(directory)["b"][0] + block * 4 * MiB
    with open(directory / "data-000", "r+b") as file:
        file.seek(offset + 12_345)
        byte = file.read(1)[0]
        file.seek(offset + 12_345)
        file.write(bytes([byte ^ 0x10]))
    with Store(directory, dram="64MiB" if how == "swap in" else "16MiB") as store:
        if how == "verify":
            report = store.verify()
            assert (report.num_keys, report.num_blocks, report.nbytes) == (3, 9, 27 * MiB)
            (error,) = report.errors
        else:
            with pytest.raises(CorruptionError, match="'b' is damaged: block") as caught:
                store["b"]
            error = caught.value
        assert (error.key, error.file, error.offset) == ("b", str(directory / "data-000"), offset)
        assert torch.equal(store["a"], numbers(9 * MiB, 0))
        assert torch.equal(store["c"], numbers(9 * MiB, 2))


def test_swapped_blocks_and_an_older_write_of_the_same_place_are_found(directory: Path) -> None:
    places = _extents(directory)
    with open(directory / "data-000", "r+b") as file:
        file.seek(places["a"][0])
        first, second = file.read(4 * MiB), file.read(4 * MiB)
        file.seek(places["a"][0])
        file.write(second + first)
        file.seek(places["c"][0])
        file.write(bytes(4 * MiB))
    with Store(directory, dram="16MiB") as store:
        assert [(error.key, error.offset - places[error.key][0]) for error in store.verify().errors] == [
            ("a", 0),
            ("a", 4 * MiB),
            ("c", 0),
        ]


def test_a_file_that_lost_its_end_is_found_at_open_and_while_it_is_open(directory: Path) -> None:
    offset, _ = max(_extents(directory).values())
    name = next(name for name, place in _extents(directory).items() if place[0] == offset)
    data = directory / "data-000"
    with Store(directory, dram="16MiB") as store:
        with open(data, "r+b") as file:
            file.truncate(offset + 4 * MiB)
        with pytest.raises(CorruptionError, match="the file ends at") as caught:
            store[name]
        assert (caught.value.key, caught.value.file) == (name, str(data))
    with pytest.raises(CorruptionError, match="ends behind") as caught:
        Store(directory, dram="16MiB")
    assert (caught.value.key, caught.value.file, caught.value.offset) == (name, str(data), offset)
