"""Parts of a tensor read and written, blocks of any size, and the pages of records that have many blocks."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from tests.devices.simulated_disk import Policy, SimulatedDisk
from tests.store.rig import numbers, simulated_store, stored
from tiered.errors import CapacityError, CorruptionError, LeaseError
from tiered.store.format.row import Extent, Row
from tiered.store.lifetime.directory import CATALOG_NAME
from tiered.store.residency.entry import EntryState
from tiered.store.space.extents import ExtentAllocator
from tiered.store.store import Store
from tiered.units import KiB, MiB

BLOCKS = ["4KiB", "16KiB", "1MiB", "4MiB"]
LARGE = 5 * MiB + 4 * KiB + 33  # of more than 1,024 blocks of 4 KiB


@pytest.fixture(params=["resident", "streamed"])
def budget_nbytes(request: pytest.FixtureRequest) -> int:
    return 24 * MiB if request.param == "resident" else 8 * MiB


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("num_devices", [1, 3])
def test_tensors_of_any_block_size_come_back(block: str, num_devices: int, budget_nbytes: int) -> None:
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    values = {str(nbytes): numbers(nbytes, nbytes) for nbytes in (0, 100, 4096, 4097, 70_000, MiB, LARGE)}
    with simulated_store(disk, budget_nbytes=budget_nbytes, num_devices=num_devices) as store:
        for name, value in values.items():
            store.put(name, value, block_size=block)
        assert all(torch.equal(store[name], value) for name, value in values.items())
        store.commit()
        assert store.verify().is_clean
    with simulated_store(disk, budget_nbytes=budget_nbytes, num_devices=num_devices) as store:
        assert all(torch.equal(store[name], value) for name, value in values.items())
        with store.lease("70000") as view:
            assert torch.equal(view, values["70000"])
        report = store.verify()
        assert report.is_clean and report.nbytes == sum(n for n in map(int, values) if n > KiB)
        store[str(LARGE)] = values[str(LARGE)].flip(0)
        store.commit()
        assert torch.equal(store[str(LARGE)], values[str(LARGE)].flip(0))
    with simulated_store(disk, budget_nbytes=budget_nbytes, num_devices=num_devices) as store:
        assert torch.equal(store[str(LARGE)], values[str(LARGE)].flip(0)) and store.verify().is_clean
        store.clear()
        store.commit()
        assert not store.working_set.space.used_nbytes


@pytest.mark.parametrize("block", [0, 2048, 5000, 8 * MiB, "3KiB"])
def test_a_block_size_that_the_format_does_not_have_is_refused(block: int | str) -> None:
    with simulated_store() as store, pytest.raises(ValueError, match="power of two"):
        store.put("a", numbers(9000), block_size=block)


def test_a_key_keeps_its_block_size() -> None:
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=8 * MiB) as store:
        store.put("a", numbers(60_000), block_size="4KiB")
        store.put("b", numbers(60_000), block_size="64KiB")
        before = {str(i): numbers(60_000, i) for i in range(25)}  # so many that the next ones go out in batches
        values = before | {"a": numbers(60_000, 26), "b": numbers(60_000, 27)}
        store.put_many(values)
        assert store.working_set.entries["b"].state is EntryState.STORED
        assert [store.working_set.entries[name].spec.block_nbytes for name in "ab"] == [4 * KiB, 64 * KiB]
        row = store.working_set.entries["b"].row
        assert row is not None and row.block_nbytes == 64 * KiB
        store.commit()
        assert all(torch.equal(store[name], value) for name, value in values.items()) and store.verify().is_clean
        store["a"] = numbers(60_001)
        assert store.working_set.entries["a"].spec.block_nbytes == 4 * MiB


class Written:
    """A tensor in a store and in memory, parts of which are read and written at random."""

    def __init__(self, store: Store, nbytes: int, block: str, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.value = numbers(nbytes, seed).view(torch.int16) if nbytes % 2 == 0 else numbers(nbytes, seed)
        store.put("a", self.value, block_size=block)
        self.sealed = self.value.clone()

    def part(self) -> tuple[int, int]:
        numel = self.value.numel()
        start = self.rng.randrange(numel + 1)
        return start, min(numel, start + self.rng.choice((0, 1, 100, 3000, 20_000, numel)))

    def write(self) -> None:
        start, stop = self.part()
        part = numbers((stop - start) * self.value.itemsize, self.rng.getrandbits(20)).view(self.value.dtype)
        self.store.write_part("a", start, part)
        self.value[start:stop] = part

    def read(self) -> None:
        start, stop = self.part()
        assert torch.equal(self.store.read_part("a", start, stop), self.value[start:stop])

    def whole(self) -> None:
        assert torch.equal(self.store["a"], self.value)

    def lease(self) -> None:
        with self.store.lease("a", "rw") as view:
            view += 1
        self.value = self.value + 1

    def put(self) -> None:
        self.value = self.value.roll(1)
        self.store["a"] = self.value

    def commit(self) -> None:
        self.store.commit(wait=self.rng.random() < 0.5)
        self.sealed = self.value.clone()

    def roll_back(self) -> None:
        self.store.rollback()
        self.value = self.sealed.clone()


@pytest.mark.parametrize("block", ["4KiB", "32KiB"])
@pytest.mark.parametrize("nbytes", [600, 50_000, 300_001, LARGE])
@pytest.mark.parametrize("seed", range(3))
def test_parts_agree_with_a_tensor_in_memory(nbytes: int, block: str, seed: int, budget_nbytes: int) -> None:
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    store = simulated_store(disk, budget_nbytes=budget_nbytes, num_devices=1 + seed % 2)
    written = Written(store, nbytes, block, seed)
    written.commit()
    actions = [written.write] * 8 + [written.read] * 5 + [written.whole, written.commit, written.commit]
    actions += [written.roll_back, written.put] + [written.lease] * (nbytes < 4 * MiB or budget_nbytes > 8 * MiB)
    for _ in range(40):
        written.rng.choice(actions)()
    written.whole()
    store.commit()
    assert store.verify().is_clean
    used = store.working_set.space.used_nbytes
    store.close()
    with simulated_store(disk, budget_nbytes=budget_nbytes, num_devices=1 + seed % 2) as store:
        assert torch.equal(store["a"], written.value) and store.verify().is_clean
        assert store.working_set.space.used_nbytes == used == -(-nbytes // 4096) * 4096 * (nbytes > KiB)
        written.store = store
        for _ in range(10):
            written.rng.choice([written.write, written.read])()
        del store["a"]
        store.commit()
        assert not store.working_set.space.used_nbytes


@pytest.mark.parametrize("policy", ["drop", "keep", "subset", "torn"])
def test_parts_that_no_commit_has_leave_the_tensor_as_it_was_committed(policy: Policy) -> None:
    disk = SimulatedDisk(capacity_nbytes=4 * MiB)
    value, later = numbers(200_000, 1), numbers(200_000, 1)
    with simulated_store(disk, budget_nbytes=1 * MiB) as store:
        store.put("a", value, block_size="4KiB")
        store.commit()
        store.write_part("a", 5000, numbers(30_000, 2))
        later[5000:35_000] = numbers(30_000, 2)
        store.commit()
        store.write_part("a", 8000, numbers(60_000, 3))
        store.write_part("a", 100, numbers(4000, 4))
        moment = disk.moment()
        store.write_part("a", 8192, numbers(8192, 6))
        store.commit()
        last = store["a"]
    cut = moment.survivor(random.Random(5), policy)
    with simulated_store(cut, budget_nbytes=1 * MiB) as store:
        assert store.generation == 2 and store.verify().is_clean and torch.equal(store["a"], later)
    with simulated_store(disk, budget_nbytes=1 * MiB) as store:
        assert store.verify().is_clean and torch.equal(store["a"], last)


def test_without_commits_parts_take_no_more_space() -> None:
    store = simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=8 * MiB, durable=False)
    written = Written(store, LARGE, "4KiB", 7)
    used = store.working_set.space.used_nbytes
    for _ in range(30):
        written.write()
    written.whole()
    assert store.working_set.space.used_nbytes <= used + 32 * MiB  # nothing but what was in DRAM alone before
    del store["a"]
    assert not store.working_set.space.used_nbytes
    store.close()


def test_a_commit_of_one_block_of_a_large_tensor_is_small(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store.put("table", numbers(64 * MiB).view(16384, 4096), block_size="4KiB")
        store.commit()
        before = store.statistics()
        store.write_part("table", 12_345 * 4096 + 5, numbers(100, 1))
        store.commit()
        after = store.statistics()
        assert after.write_bytes - before.write_bytes == 4 * KiB
        assert after.catalog_write_bytes - before.catalog_write_bytes <= 128 * KiB
    with Store(tmp_path / "run", dram="16MiB") as store:
        assert torch.equal(store.read_part("table", 12_345 * 4096, 12_346 * 4096)[5:105], numbers(100, 1))


def test_a_reader_sees_the_tensor_that_was_there_when_it_began() -> None:
    """Parts written and committed meanwhile go elsewhere, and its own blocks are reused only when it ends."""
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=8 * MiB) as store:
        value = numbers(LARGE, 1)
        store.put("a", value, block_size="4KiB")
        store.commit()
        row = store._values._row_past("a")  # as get does
        assert row is not None and row.pages is not None
        for number in range(1, 4):
            for _ in range(2):
                store.write_part("a", 4 * MiB - 6000, numbers(300_000, number))
            store.commit()
            store["b"] = numbers(LARGE, number)
            store.commit()
        assert torch.equal(read(store, row), value)
        value[4 * MiB - 6000 :][:300_000] = numbers(300_000, 3)
        assert torch.equal(store["a"], value)
        row = store._values._row_past("a")
        assert row is not None
        store["a"] = numbers(LARGE, 9)
        store.commit()
        store["b"] = numbers(LARGE, 10)
        store.commit()
        assert torch.equal(read(store, row), value) and torch.equal(store["a"], numbers(LARGE, 9))


def read(store: Store, row: Row) -> torch.Tensor:
    """Return the bytes of ``row``, on which a stream was begun."""
    found = torch.empty(row.nbytes, dtype=torch.uint8)
    try:
        store._streams.get(row, found)
    except CorruptionError as error:
        raise AssertionError("its blocks, or its pages, are others by now") from error
    return found


def put_others(store: Store, nbytes: int) -> None:
    """Put and commit four tensors, which take what is free."""
    for number in range(4):
        store[f"other {number}"] = numbers(nbytes, 50 + number)
        store.commit()


def replace_all(store: Store) -> None:
    store["a"] = numbers(48 * KiB, 3)
    store.commit()
    put_others(store, 48 * KiB)


def write_parts(store: Store) -> None:
    for number in range(3):
        store.write_part("a", 5000, numbers(20_000, 2 + number))
        store.commit()
        put_others(store, 24 * KiB)


def roll_parts_back(store: Store) -> None:
    store.rollback()
    store.write_part("a", 20_000, numbers(12_000, 3))
    store.commit()
    put_others(store, 16 * KiB)


def roll_parts_back_and_replace_all(store: Store) -> None:
    store.rollback()
    store.write_part("a", 20_000, numbers(12_000, 3))
    replace_all(store)


def change_all_pages(store: Store) -> None:
    store.write_part("a", 0, numbers(5000, 2))
    store.write_part("a", 4 * MiB + 100, numbers(5000, 3))
    store.commit()
    store["a"] = numbers(LARGE, 4)
    store.commit()


@pytest.mark.parametrize(
    ("nbytes", "has_part", "change"),
    [
        (48 * KiB, True, replace_all),  # the row below the parts has no pages, and is given up as a whole
        (48 * KiB, False, write_parts),  # the row has no pages when the reader begins
        (48 * KiB, True, roll_parts_back),
        (48 * KiB, True, roll_parts_back_and_replace_all),
        (LARGE, False, change_all_pages),
    ],
)
def test_a_reader_keeps_its_blocks_whatever_is_done_to_the_key(
    nbytes: int, has_part: bool, change: Callable[[Store], None]
) -> None:
    budget_nbytes = 64 * KiB if nbytes < MiB else 8 * MiB
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=budget_nbytes) as store:
        value = numbers(nbytes, 1)
        store.put("a", value, block_size="4KiB")
        store.commit()
        if has_part:
            store.write_part("a", 5000, numbers(100, 2))
            value[5000:5100] = numbers(100, 2)
        row = store._values._row_past("a")
        assert row is not None and (row.pages is not None) is (has_part or nbytes == LARGE)
        change(store)
        assert torch.equal(read(store, row), value)
        del store["a"]
        store.commit()
        assert store.working_set.space.used_nbytes == sum(record.nbytes for record in store.records())


def test_a_reader_of_a_tensor_that_is_leased_for_writing_keeps_its_blocks() -> None:
    """Which no commit has: else the new bytes would go over them."""
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=24 * MiB) as store:
        value = numbers(LARGE, 1)
        store.put("a", value, block_size="4KiB")
        stored(store.working_set, "a")
        row = store.working_set.entries["a"].row
        assert row is not None and row.pages is not None
        with store._condition:  # as verify does
            store.working_set.space.begin_stream(row)
        with store.lease("a", "rw") as view:
            view.copy_(numbers(LARGE, 2))
        stored(store.working_set, "a")
        assert store.working_set.space.used_nbytes == 2 * -(-LARGE // 4096) * 4096
        assert torch.equal(read(store, row), value)
        assert store.working_set.space.used_nbytes == -(-LARGE // 4096) * 4096
        assert torch.equal(store["a"], numbers(LARGE, 2))


def test_a_reader_that_begins_with_the_committed_tensor_reads_no_later_page() -> None:
    """Parts were written before it began, and after that to the same page; then all of the tensor is replaced."""
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=8 * MiB) as store:
        value = numbers(LARGE, 1)
        store.put("a", value, block_size="4KiB")
        store.commit()
        store.write_part("a", 0, numbers(5000, 2))
        store.write_part("a", 4 * MiB + 100, numbers(5000, 3))
        committed = store.working_set.entries["a"].committed  # as verify does
        assert committed is not None
        with store._condition:
            store.working_set.space.begin_stream(committed)
        store.write_part("a", 4 * MiB + 200, numbers(5000, 4))
        store["a"] = numbers(LARGE, 5)
        store.commit()
        store["b"] = numbers(LARGE, 6)
        store.commit()
        assert torch.equal(read(store, committed), value)
        assert store.working_set.space.used_nbytes == 2 * -(-LARGE // 4096) * 4096
        assert torch.equal(store["a"], numbers(LARGE, 5)) and store.verify().is_clean


@pytest.mark.parametrize(("nbytes", "part"), [(400, 1), (40 * 4096, 1024)], ids=["inline", "blocks"])
def test_parts_of_one_tensor_are_written_by_many_threads(nbytes: int, part: int) -> None:
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=8 * MiB) as store:
        store.put("a", torch.zeros(nbytes, dtype=torch.uint8), block_size="4KiB")
        store.commit()

        def write(number: int) -> None:
            for start in range(number * part, nbytes, 4 * part):
                store.write_part("a", start, torch.full((part,), number + 1, dtype=torch.uint8))
                if number == 3 and start % (16 * part) < 4 * part:
                    store.commit(wait=False)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = torch.tensor([1, 2, 3, 4], dtype=torch.uint8).repeat_interleave(part).repeat(nbytes // (4 * part))
        assert torch.equal(store["a"], expected)


def test_refusals() -> None:
    with simulated_store(budget_nbytes=8 * MiB) as store:
        store.put("a", torch.arange(5000.0), block_size="4KiB")
        for start, stop in ((-1, 3), (0, 5001), (3, 2)):
            with pytest.raises(ValueError, match="of 'a', which has 5000"):
                store.read_part("a", start, stop)
        with pytest.raises(ValueError, match="which has 5000"):
            store.write_part("a", 4999, torch.ones(2))
        with pytest.raises(ValueError, match=r"expected torch\.float32, got"):
            store.write_part("a", 0, torch.ones(2, dtype=torch.float64))
        with pytest.raises(TypeError):
            store.write_part("a", 0, [1.0])  # type: ignore[arg-type]
        for call in (lambda: store.read_part("b", 0, 0), lambda: store.write_part("b", 0, torch.ones(1))):
            with pytest.raises(KeyError):
                call()
        with store.lease("a", "rw"), pytest.raises(LeaseError):
            store.write_part("a", 0, torch.ones(1))
        with store.lease("a", "r") as view:
            with pytest.raises(LeaseError, match="'a' is leased for reading"):  # the bytes are in DRAM alone
                store.write_part("a", 0, torch.ones(3))
            store.commit()
            store.write_part("a", 0, torch.ones(3))
            assert torch.equal(view, torch.arange(5000.0))
        assert torch.equal(store.read_part("a", 0, 3), torch.ones(3))


def test_a_part_that_finds_no_space_changes_nothing() -> None:
    disk = SimulatedDisk(capacity_nbytes=96 * KiB)
    with simulated_store(disk, budget_nbytes=64 * KiB) as store:
        value = numbers(60_000)
        store.put("a", value, block_size="4KiB")
        store.commit()
        with pytest.raises(CapacityError):
            store.write_part("a", 0, numbers(50_000, 1))
        assert torch.equal(store["a"], value)
        store.write_part("a", 0, numbers(5000, 1))
        store.rollback()
        assert torch.equal(store["a"], value) and store.verify().is_clean


def test_a_lack_of_space_says_what_a_commit_of_parts_would_free() -> None:
    with simulated_store(SimulatedDisk(capacity_nbytes=1 * MiB), budget_nbytes=8 * MiB) as store:
        store.put("a", numbers(600 * KiB, 1), block_size="4KiB")
        store.commit()
        store.write_part("a", 0, numbers(10))
        with pytest.raises(CapacityError, match=r"a commit would free 4\.0 KiB"):
            store.write_part("a", 0, numbers(500 * KiB, 2))
        before = store.working_set.space.used_nbytes
        store.commit()
        assert before - store.working_set.space.used_nbytes == 4 * KiB


def test_blocks_that_lie_side_by_side_are_kept_and_freed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Extent] = []
    free = ExtentAllocator.free

    def noting(allocator: ExtentAllocator, extents: Iterable[Extent]) -> None:
        each = list(extents)
        freed.extend(each)
        free(allocator, each)

    monkeypatch.setattr(ExtentAllocator, "free", noting)
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=8 * MiB) as store:
        store.put("a", numbers(LARGE, 1), block_size="4KiB")
        store.commit()
        store.write_part("a", 0, numbers(LARGE, 2))
        parts = store.working_set.entries["a"].parts
        assert parts is not None and len(parts.superseded) <= 2
        store.commit()
        assert len(freed) <= 2
        freed.clear()
        for block in (*range(0, 60, 2), *range(1, 60, 2)):
            store.write_part("a", block * 4096, numbers(4096, block))
        store.commit()
        assert len(freed) <= 2
        assert torch.equal(store.read_part("a", 0, 4096), numbers(4096, 0)) and store.verify().is_clean


@pytest.mark.parametrize("at", [0, 1, 2])
def test_only_the_edges_of_a_part_need_the_blocks_that_were_there(at: int) -> None:
    disk = SimulatedDisk(can_lose_power=False)
    with simulated_store(disk, budget_nbytes=64 * KiB) as store:
        store.put("a", numbers(5 * 4096, 1), block_size="4KiB")
        store.commit()
        stored(store.working_set, "a")
        row = store.working_set.entries["a"].row
        assert row is not None
        place = row.extents[0].offset + (at + 1) * 4096
        disk.image(0, 0)[place] ^= 1
        if at == 1:
            store.write_part("a", 4096 + 5, numbers(2 * 4096, 2))
        else:
            with pytest.raises(CorruptionError, match=f"block {at + 1}"):
                store.write_part("a", 4096 + 5, numbers(2 * 4096, 2))


def test_damage_is_found_block_by_block(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="64MiB") as store:
        store.put("a", numbers(LARGE), block_size="4KiB")
        store.commit()
        store.write_part("a", 8192, numbers(4096, 1))
        store.commit()
        entry = store.working_set.shown("a")
        assert entry is not None and entry.row is not None and entry.row.pages is not None
        place = entry.row.pages.page(entry.row, 0).extents[1]
    with open(tmp_path / "run" / "data-000", "r+b") as file:
        file.seek(place.offset + 7)
        file.write(b"\0\1\2")
    with Store(tmp_path / "run", dram="16MiB") as store:
        assert torch.equal(store.read_part("a", 0, 8192), numbers(LARGE)[:8192])
        with pytest.raises(CorruptionError, match="block 2 does not match") as caught:
            store.read_part("a", 8191, 8193)
        assert caught.value.offset == place.offset
        (error,) = store.verify().errors
        assert error.offset == place.offset
        with pytest.raises(CorruptionError):
            store.write_part("a", 8193, numbers(10))
        store.write_part("a", 8192, numbers(4096, 1))  # whole blocks need nothing of what was there
        assert store.verify().errors and torch.equal(store.read_part("a", 8192, 12_288), numbers(4096, 1))
        store.commit()
        assert store.verify().is_clean


def test_damage_to_a_page_of_the_catalog_is_found_when_the_page_is_read(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store.put("a", numbers(LARGE), block_size="4KiB")
    with Store(tmp_path / "run", dram="16MiB") as store:
        with contextlib.closing(sqlite3.connect(tmp_path / "run" / CATALOG_NAME)) as connection, connection:
            connection.execute("UPDATE pages SET body = zeroblob(length(body)) WHERE page = 1")
        assert torch.equal(store.read_part("a", 0, 5000), numbers(LARGE)[:5000])
        with pytest.raises(CorruptionError, match=r"page 1 of 'a' .* does not match its digest") as caught:
            store.read_part("a", LARGE - 5000, LARGE)
        assert caught.value.key == "a" and caught.value.file == str(tmp_path / "run" / CATALOG_NAME)
