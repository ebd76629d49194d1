"""Rows of tables: read, written and added to by index, beside the same calls of torch on a tensor in memory."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import await_true, numbers, simulated_store, stored
from tiered.errors import CorruptionError, LeaseError, UsageError
from tiered.store.format.checksum import PAGE_BLOCKS
from tiered.store.format.places import AnyPage, ChangedPage, Moved, Places, extents_of, pages_of_blocks
from tiered.store.format.row import Extent, pack, pieces
from tiered.store.rows import scatter
from tiered.store.rows.gather import Segments
from tiered.store.store import Store
from tiered.units import KiB, MiB

SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((1024,), torch.float32),
    ((25,), torch.float32),
    ((3, 7), torch.bfloat16),
    ((1025,), torch.float32),
    ((5000,), torch.uint8),
    ((), torch.int64),
    ((), torch.bfloat16),
    ((4096,), torch.float8_e4m3fn),
    ((2,), torch.complex64),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def content(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.complex64:
        return torch.complex(torch.randn(shape), torch.randn(shape))
    return (torch.randn(shape) * 10).to(dtype)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("most_pages", [0, 2, 200])  # that stay decoded
def test_rows_are_those_of_a_tensor_in_memory(
    shape: tuple[int, ...], dtype: torch.dtype, num_devices: int, most_pages: int
) -> None:
    torch.manual_seed(0)
    rng, num_rows = random.Random(1), 3000
    disk = SimulatedDisk(capacity_nbytes=256 * MiB, can_lose_power=False)
    expected = torch.zeros((num_rows, *shape), dtype=dtype)
    with simulated_store(disk, budget_nbytes=64 * MiB, num_devices=num_devices) as store:
        store._access._gather.places._most_pages = most_pages
        rows = store.create_rows("t", num_rows, shape, dtype)
        assert (len(rows), rows.row_shape, rows.dtype) == (num_rows, shape, dtype)
        committed = expected.clone()
        for step in range(12):
            number = rng.choice((0, 1, 40, 900))
            index = torch.tensor([rng.randrange(-num_rows, num_rows) for _ in range(number)]).long()
            values = content((len(index), *shape), dtype)
            if step % 3 and dtype is not torch.float8_e4m3fn:
                rows.add(index, values)
                expected.index_add_(0, index % num_rows, values)
            else:
                rows.put(index, values)
                for number, value in zip(index.tolist(), values, strict=True):
                    expected[number] = value
            if step % 4 == 1:
                store.commit()
                committed = expected.clone()
            elif step % 4 == 3:
                store.rollback()
                expected = committed.clone()
            index = torch.randint(-num_rows, num_rows, (500,))
            assert torch.equal(bits(rows.get(index)), bits(expected[index])), step
        assert torch.equal(bits(rows.get(range(num_rows))), bits(expected))
        assert torch.equal(bits(store["t"]), bits(expected)) and store.verify().is_clean
        store.commit()
    with simulated_store(disk, budget_nbytes=64 * MiB, num_devices=num_devices) as store:
        assert torch.equal(bits(store.rows("t").get(range(num_rows))), bits(expected)) and store.verify().is_clean


def test_several_keys_are_one_table() -> None:
    with simulated_store(SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False), budget_nbytes=8 * MiB) as store:
        parts = {f"part {n}": torch.randn(size, 600) for n, size in enumerate((100, 1, 0, 257))}
        for key, value in parts.items():
            store.put(key, value, block_size="4KiB")
        store.commit()
        stored(store.working_set, *parts)
        expected = torch.cat(list(parts.values()))
        rows = store.rows(parts)
        assert len(rows) == 358
        index = torch.randint(-358, 358, (200,))
        assert torch.equal(rows.get(index), expected[index])
        rows.add(index, expected[index])
        expected.index_add_(0, index % 358, expected[index].clone())
        assert torch.equal(rows.get(index), expected[index])
        assert torch.equal(torch.cat([store[key] for key in parts]), expected)
        store["narrow"] = torch.zeros(5, 3)
        with pytest.raises(ValueError, match=r"rows of 'narrow': torch.float32 \[3\]; expected torch.float32 \[600\]"):
            store.rows(["part 0", "narrow"])


def test_only_the_blocks_of_the_rows_are_read(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="64MiB") as store:
        table = torch.randn(4096, 1024)
        store.put("t", table, block_size="4KiB")
        store.commit()
        stored(store.working_set, "t")
        before = store.statistics()
        index = torch.arange(5, 4096, 37)
        assert torch.equal(store.rows("t").get(index), table[index])
        after = store.statistics()
        assert after.read_bytes - before.read_bytes == len(index) * 4096
        assert after.working_set.resident_bytes == before.working_set.resident_bytes
        before = after
        store.rows("t").put(index, table[index])
        assert store.statistics().write_bytes - before.write_bytes == len(index) * 4096
        assert store.statistics().read_bytes == before.read_bytes


@pytest.mark.parametrize("width", [1024, 1000, 3])
@pytest.mark.parametrize("dram", ["64MiB", "8MiB"])  # of 1,024 and of 256 blocks a buffer
def test_rows_in_place(tmp_path: Path, width: int, dram: str) -> None:
    table = torch.randn(3000, width)
    save_file({"other": numbers(77), "t": table}, tmp_path / "base.safetensors")
    with Store(tmp_path / "run", dram=dram, external=[tmp_path / "base.safetensors"]) as store:
        store.adopt("t", tmp_path / "base.safetensors", "t", block_size="4KiB")
        rows = store.rows("t")
        index = torch.randint(-3000, 3000, (400,))
        assert torch.equal(rows.get(index), table[index])  # before any digest is known
        store.commit()
        before = store.statistics().read_bytes
        assert torch.equal(rows.get(index), table[index])
        most = (len(set((index % 3000).tolist())) * max(4096, width * 4) // 4096 + 1) * 3 * 4096
        assert store.statistics().read_bytes - before <= most
        rows.put([5, -1], table[:2])
        expected = table.clone()
        expected[5], expected[-1] = table[0], table[1]
        assert torch.equal(rows.get(range(3000)), expected)
        store.rollback()
        for start in (0, 5, 3000 * width - 4):
            store.write_part("t", start, torch.ones(4))
            store.rows("t").add([0, 2999], table[:2])
            store.rollback()
        store.write_part("t", 3000 * width - 4, torch.ones(4))
        expected = table.clone()
        expected.view(-1)[-4:] = 1
        assert torch.equal(store["t"], expected)


def test_a_large_adopted_table_is_not_copied_for_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "_MOST_COPIED_NBYTES", 1 * MiB)
    table = torch.randn(600, 1024)
    save_file({"t": table}, tmp_path / "base.safetensors")
    with Store(tmp_path / "run", dram="64MiB", external=[tmp_path / "base.safetensors"]) as store:
        store.adopt("t", tmp_path / "base.safetensors", "t", block_size="4KiB")
        rows = store.rows("t")
        with pytest.raises(UsageError, match=r"would copy all 2\.3 MiB .* make a table of the store's own by"):
            rows.put([3], table[:1])
        own = store.create_rows("own", 600, (1024,), torch.float32)  # the remedy
        for first in range(0, 600, 100):
            own.put(range(first, first + 100), rows.get(range(first, first + 100)))
        own.put([3], table[:1])
        table[3] = table[0]
        assert torch.equal(own.get(range(600)), table)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([0, 10], IndexError, "index 10, at place 1, of a table of 10 rows"),
        ([-11], IndexError, "index -11, at place 0, of a table of 10 rows"),
        (torch.zeros(2), TypeError, r"expected an index of whole numbers of one dimension, got torch.float32 \[2\]"),
        (torch.ones(10, dtype=torch.bool), TypeError, r"got torch.bool \[10\]"),
        (torch.zeros(2, 2).long(), TypeError, r"got torch.int64 \[2, 2\]"),
        (torch.tensor(3), TypeError, r"got torch.int64 \[\]"),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), IndexError, "at place 0, of a table of 10 rows"),
        ([2**70], TypeError, "expected an index of whole numbers"),
        ([None, 1], TypeError, "expected an index of whole numbers"),
    ],
)
def test_what_is_no_index_is_refused(index: Any, error: type[Exception], message: str) -> None:
    with simulated_store() as store:
        store["t"] = torch.arange(20.0).view(10, 2)
        rows = store.rows("t")
        for call in (lambda: rows.get(index), lambda: rows.put(index, torch.zeros(2, 2))):
            with pytest.raises(error, match=message):
                call()
        assert torch.equal(store["t"], torch.arange(20.0).view(10, 2))


def test_calls_that_cannot_be_are_refused_and_change_nothing() -> None:
    with simulated_store(budget_nbytes=1 * MiB) as store:
        table = torch.arange(20_000.0).view(10, 2000)
        store.put("t", table, block_size="4KiB")
        store["number"] = torch.tensor(1.0)
        rows = store.rows("t")
        assert rows.get([]).shape == (0, 2000) and rows.get(np.array([1, -1])).shape == (2, 2000)
        assert torch.equal(rows.get(np.arange(10)[::-1]), table.flip(0))
        rows.put([], torch.zeros(0, 2000))
        for values in (torch.zeros(3, 2000), torch.zeros(2, 2001), torch.zeros(2, 2000).double(), torch.zeros(2)):
            with pytest.raises(ValueError, match=r"expected values of torch.float32 \[2, 2000\], got"):
                rows.put([0, 1], values)
        with pytest.raises(KeyError):
            store.rows("nothing")
        with pytest.raises(UsageError, match="it has no dimension"):
            store.rows("number")
        with pytest.raises(ValueError, match="rows of no keys"):
            store.rows([])
        with pytest.raises(ValueError, match="expected state None or"):
            store.create_rows("t", 5, (3,), torch.float32, state="sgd")
        with pytest.raises(ValueError, match="no tensor is"):
            store.create_rows("x", -1, (3,), torch.float32)
        with store.lease("t", "rw"):
            for call in (lambda: rows.get([1]), lambda: rows.put([1], table[:1])):
                with pytest.raises(LeaseError):
                    call()
        assert torch.equal(rows.get(range(10)), table)
        store["t"] = torch.zeros(3, 4)
        with pytest.raises(UsageError, match=r"it was torch.float32 \[10, 2000\] and is torch.float32 \[3, 4\] by now"):
            rows.get([1])
        assert store.rows("t").get([1]).shape == (1, 4)
        rows = store.rows("t")
        del store["t"]
        with pytest.raises(KeyError):
            rows.get([])


def test_a_dtype_that_torch_does_not_add_is_refused_and_the_store_goes_on() -> None:
    with simulated_store(budget_nbytes=1 * MiB) as store:
        rows = store.create_rows("t", 10, (4096,), torch.float8_e4m3fn)
        with pytest.raises(TypeError, match=r"rows of 't': torch adds no torch\.float8_e4m3fn"):
            rows.add([1], torch.zeros(1, 4096).to(torch.float8_e4m3fn))
        rows.put([1], torch.ones(1, 4096).to(torch.float8_e4m3fn))
        assert rows.get([1]).float().all()


def test_rows_go_into_a_tensor_of_the_caller() -> None:
    with simulated_store(budget_nbytes=1 * MiB) as store:
        table = torch.randn(50, 1024)
        store.put("t", table, block_size="4KiB")
        out = torch.empty(3, 1024)
        assert store.rows("t").get([1, 1, -2], out=out) is out and torch.equal(out, table[[1, 1, -2]])
        with pytest.raises(ValueError, match=r"expected out of torch\.float32"):
            store.rows("t").get([1], out=out)


def test_rows_that_were_asked_for_ahead_are_those_of_the_get(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        table = torch.randn(5000, 1024)
        rows = store.create_rows("t", 5000, (1024,), torch.float32)
        rows.put(range(5000), table)
        store.commit()
        index = torch.randint(-5000, 5000, (400,))
        rows.prefetch(index)
        await_true(lambda: rows._ahead is not None and rows._ahead._found is not None)
        before = store.statistics().read_bytes
        assert torch.equal(rows.get(index), table[index])
        assert store.statistics().read_bytes == before
        out = torch.empty(400, 1024)
        rows.prefetch(index)
        assert rows.get(index, out=out) is out and torch.equal(out, table[index])
        rows.prefetch(index)
        rows.put([int(index[0])], torch.ones(1, 1024))  # what was read before it is not the answer
        changed = table.clone()
        changed[index[0]] = 1
        assert torch.equal(rows.get(index), changed[index])
        rows.prefetch(index)
        store.rollback()
        assert torch.equal(rows.get(index), table[index])
        rows.prefetch(index)
        assert torch.equal(rows.get([1]), table[[1]]) and torch.equal(rows.get(index), table[index])
        with pytest.raises(IndexError):
            rows.prefetch([5000])
        rows.prefetch(index)
        del store["t"]
        with pytest.raises(KeyError):
            rows.get(index)


def test_a_flipped_bit_names_row_file_and_offset(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="64MiB") as store:
        rows = store.create_rows("t", 5000, (1024,), torch.float32)
        rows.put([77], torch.ones(1, 1024))
        store.commit()
        row = store.working_set.entries["t"].row
        assert row is not None
        (place,) = pieces(row.pages.page(row, 0).extents, 77 * 4096, 4096)
    with open(tmp_path / "run" / "data-000", "r+b") as file:
        file.seek(place.offset + 9)
        file.write(b"\1\2")
    with Store(tmp_path / "run", dram="64MiB") as store:
        rows = store.rows("t")
        assert not rows.get([*range(77), *range(78, 5000)]).any()
        with pytest.raises(CorruptionError, match=r"row 77 of 't' is damaged: block 77 does not match") as caught:
            rows.get(range(70, 90))
        error = caught.value
        assert (error.key, error.row, error.offset) == ("t", 77, place.offset)
        assert error.file == str(tmp_path / "run" / "data-000")
        with pytest.raises(CorruptionError, match=r"row 77 of 't' is damaged") as caught:
            rows.add([77], torch.ones(1, 1024))
        assert caught.value.row == 77
        rows.put([77], torch.ones(1, 1024))  # whole blocks need nothing of what was there
        assert rows.get([77]).all()


def test_no_row_is_torn_where_threads_read_and_write(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    with Store(tmp_path / "run", dram="16MiB") as store:
        rows, end = store.create_rows("t", 3000, (1500,), torch.float32), threading.Event()

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            while not end.is_set():
                found = rows.get(rng.integers(0, 3000, 200))
                assert bool((found == found[:, :1]).all())

        def write(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for number in range(12):
                index = rng.integers(0, 3000, 300)
                rows.put(index, torch.full((300, 1500), float(number * 2 + seed)))
                if number % 4 == 3:
                    store.commit()

        def guarded(call: Any, seed: int) -> None:
            try:
                call(seed)
            except BaseException as error:
                errors.append(error)

        readers = [threading.Thread(target=guarded, args=(read, seed)) for seed in range(4)]
        writers = [threading.Thread(target=guarded, args=(write, seed)) for seed in range(2)]
        for thread in (*readers, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        end.set()
        for thread in readers:
            thread.join()
        assert not errors, errors
        assert store.verify().is_clean


def test_pages_that_stay_decoded_make_way_for_a_caller_that_waits_for_memory(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="8MiB") as store:
        rows = store.create_rows("t", 16_384, (1024,), torch.float32)  # 16 pages of 24 KiB
        rows.get(range(0, 16_384, 100))
        reserved = sum(buffer.nbytes for buffer in store.working_set._reservations)
        assert 384 * KiB <= reserved <= MiB
        buffer = store.working_set.reserve(8 * MiB)
        assert not rows._access._gather.places._decoded
        store.working_set.unreserve(buffer)
        assert not rows.get(range(0, 16_384, 100)).any()


@pytest.mark.parametrize("seed", range(20))
def test_segments_are_found_in_their_blocks(seed: int) -> None:
    rng = random.Random(seed)
    nbytes, unit = rng.choice((1, 7, 64, 100, 250)), rng.choice((16, 64, 128))
    slots = sorted(rng.sample(range(60), rng.randint(1, 30)))
    segments = Segments(np.array([slot * (nbytes + 1) for slot in slots]), nbytes)
    memory = [(start + i) for start in segments.starts.tolist() for i in range(nbytes)]
    blocks = segments.blocks(unit)
    assert blocks.tolist() == sorted({byte // unit for byte in memory})
    begin = blocks * unit
    expected = [all(byte in set(memory) for byte in range(b, b + unit)) for b in begin.tolist()]
    assert segments.covered(begin, begin + unit).tolist() == expected
    found: list[tuple[int, int, int]] = []
    step = rng.randint(1, 5)
    for first in range(0, len(blocks), step):
        some = blocks[first : first + step]
        at = np.arange(len(some)) * unit
        part = segments.pieces(some, at, unit)
        for k, (place, skip, size) in enumerate(zip(part.at, part.skip, part.nbytes, strict=True)):
            for i in range(size):
                block, inside = divmod(int(place) + i, unit)
                found.append((part.first + k, int(skip) + i, int(some[block]) * unit + inside))
    assert sorted(byte for _, _, byte in found) == sorted(memory)
    assert all(segments.starts[k] + i == byte for k, i, byte in found)


def test_places_of_blocks_that_lie_in_several_extents() -> None:
    extents = [Extent(0, 1, 0, 8192), Extent(1, 1, 4096, 4096), Extent(1, 1, 8192, 4096), Extent(0, 2, 0, 12_288)]
    places = Places.of(pack(extents), 8192)
    assert places.start.tolist() == [0, 8192, 12_288, 16_384, 24_576]
    assert places.nbytes.tolist() == [8192, 4096, 4096, 8192, 4096]
    assert extents_of(places) == [Extent(0, 1, 0, 8192), Extent(1, 1, 4096, 8192), Extent(0, 2, 0, 12_288)]


@pytest.mark.parametrize("seed", range(2))
def test_pages_that_are_written_again_and_for_the_first_time_since_a_commit(tmp_path: Path, seed: int) -> None:
    """Nine pages, some of which each write touches again and some for the first time; a commit packs them once."""
    rng = np.random.default_rng(seed)
    num_rows = 9000
    expected = torch.arange(num_rows).float()[:, None].repeat(1, 1024)
    with Store(tmp_path / "run", dram="24MiB") as store:
        rows = store.create_rows("t", num_rows, (1024,), torch.float32)
        rows.put(torch.arange(num_rows), expected)
        store.commit()
        committed = expected.clone()
        for turn in range(24):
            pages = rng.choice(9, int(rng.integers(1, 8)), replace=False)
            most = 300 if turn % 9 == 0 else 6
            index = np.unique(
                np.concatenate(
                    [rng.integers(p * 1024, min(num_rows, (p + 1) * 1024), rng.integers(1, most)) for p in pages]
                )
            )
            rng.shuffle(index)
            values = torch.full((len(index), 1024), float(turn))
            rows.add(index, values)
            expected.index_add_(0, torch.from_numpy(index), values)
            if turn % 7 == 6 and turn % 2:
                store.rollback()
                expected = committed.clone()
            elif turn % 7 == 6:
                store.commit()
                committed = expected.clone()
            some = rng.integers(0, num_rows, 200)
            assert torch.equal(rows.get(some), expected[some])
        store.commit()
    with Store(tmp_path / "run", dram="24MiB") as store:
        assert store.verify().is_clean and torch.equal(store.rows("t").get(np.arange(num_rows)), expected)


def test_a_page_that_moved_many_times_is_the_one_that_was_packed_each_time() -> None:
    rng = np.random.default_rng(3)
    unit = 4096
    offset = np.arange(PAGE_BLOCKS) * unit
    zeros = np.zeros_like(offset)
    first = Places(offset, zeros, zeros, offset + (1 << 30), zeros + unit)
    (packed,) = pages_of_blocks(first, np.arange(1, PAGE_BLOCKS + 1, dtype=np.uint64), zeros.astype(np.uint64), unit)
    lazy: AnyPage = packed
    for turn in range(200):
        blocks = np.unique(rng.integers(0, PAGE_BLOCKS, int(rng.integers(1, 40))))
        there = np.zeros_like(blocks)
        places = Places(blocks * unit, there, there, rng.integers(0, 1 << 20, len(blocks)) * unit, there + unit)
        digests = rng.integers(0, 1 << 60, len(blocks)).astype(np.uint64)
        moved = Moved(blocks, places, digests, turn)
        lazy = ChangedPage(lazy, 0, moved, len(blocks), unit)
        packed = ChangedPage(packed, 0, moved, len(blocks), unit).packed()
        if turn % 70 == 69:
            assert lazy.packed() == packed
    assert lazy.packed() == packed
