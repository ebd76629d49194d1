"""Two generations side by side: the newest, and the one before until it is confirmed. Either comes back, whole."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.catalogs import (
    UUID,
    SqliteHome,
    inline_row,
    large_row,
    loaded,
    paged,
    root_of,
    row_of,
)
from tests.store.rig import numbers, simulated_store
from tests.store.simulated_catalog import SimulatedCatalog, changed_catalog
from tests.store.together import Together
from tiered.errors import CorruptionError, DeadlineError, DeviceError, UsageError
from tiered.store.catalog.catalog import GenerationName
from tiered.store.format.checksum import PAGE_BLOCKS
from tiered.store.format.root import decode_root, encode_root
from tiered.store.format.row import Extent, Page, Row, page_digest, pages_of, row_seed
from tiered.store.lifetime.leftovers import Leftovers
from tiered.store.store import Store
from tiered.units import MiB


@pytest.fixture
def home(tmp_path: Path) -> SqliteHome:
    return SqliteHome(tmp_path)


class Changed:
    """Pages of which some are to be written."""

    def __init__(self, changed: dict[int, Page]) -> None:
        self.changed = changed

    def page(self, row: Row, number: int) -> Page:
        return self.changed[number]

    def begin(self) -> None:
        pass

    def end(self) -> list[Extent]:
        return []


# -- the catalog ---------------------------------------------------------------------------------------------------


def test_the_generation_before_is_kept_until_the_next_commit(home: Any) -> None:
    rows = [row_of(1), row_of(2), row_of(3), inline_row(4, b"x")]
    newer = [row_of(2, generation=2, seed=5), row_of(9, generation=2)]
    first, second = replace(root_of(1), nonce=11), replace(root_of(2, state="s" * 9000), nonce=22)
    with closing(home.create()) as catalog:
        catalog.apply(first, rows, [])
        assert catalog.kept() == (GenerationName(1, 11),)
        catalog.apply(second, newer, [3], keeps_before=True)
    for _ in range(2):
        with closing(home.reopen()) as catalog:
            assert catalog.kept() == (GenerationName(2, 22), GenerationName(1, 11))
            assert loaded(catalog) == (second, [rows[0], newer[0], rows[3], newer[1]])
            root, before = catalog.load(1)
            assert (root, list(before)) == (first, rows)
            with pytest.raises(UsageError, match="does not hold generation 3"):
                catalog.load(3)
    with closing(home.reopen()) as catalog:
        catalog.apply(root_of(3), [], [])
        assert catalog.kept() == (GenerationName(3, 0),)
        with pytest.raises(UsageError, match="none before it"):
            catalog.discard()


def test_only_changed_pages_are_written(home: Any) -> None:
    row = large_row(1)
    first, second, third = pages_of(row)
    newer = second._replace(digests=bytes(8 * PAGE_BLOCKS), written=b"\1\0\0\0\0\0\0\0" * PAGE_BLOCKS)
    part = replace(paged(row), generation=2, pages=Changed({1: newer}))
    with closing(home.create()) as catalog:
        catalog.apply(root_of(1), [row], [])
        catalog.apply(root_of(2), [part], [], keeps_before=True)
        catalog.load()
        assert [*catalog.pages(paged(row), range(3))] == [first, newer, third]
    with closing(home.reopen()) as catalog:
        assert loaded(catalog) == (root_of(2), [replace(part, pages=None)])
        assert list(catalog.load(1)[1]) == [paged(row)]
        catalog.discard()
        assert [*catalog.pages(paged(row), range(3))] == [first, second, third]
        catalog.apply(root_of(2), [], [1])
        assert loaded(catalog) == (root_of(2), [])


_CHANGES = st.lists(
    st.tuples(st.sets(st.integers(1, 8)), st.sets(st.integers(1, 8)), st.booleans(), st.booleans()), max_size=7
)


@settings(max_examples=15)
@given(_CHANGES)
def test_a_catalog_agrees_with_dicts(tmp_path_factory: pytest.TempPathFactory, changes: Any) -> None:
    home = SqliteHome(tmp_path_factory.mktemp("catalog"))
    kept: list[tuple[Any, dict[int, Row]]] = [(root_of(0, 1), {})]
    home.create(kept[0][0]).close()
    for number, (changed, deleted, keeps, discards) in enumerate(changes, 1):
        with closing(home.reopen()) as catalog:
            rows = {i: (large_row if i < 3 else row_of)(i, generation=number, seed=number) for i in changed}
            root = replace(root_of(number), nonce=number)
            catalog.apply(root, list(rows.values()), sorted(deleted), keeps_before=keeps)
            held = {i: paged(row) for i, row in ({**kept[0][1], **rows}).items() if i not in deleted}
            kept = [(root, held), kept[0]] if keeps else [(root, held)]
            if keeps and discards:
                catalog.discard()
                kept = kept[1:]
        with closing(home.reopen()) as catalog:
            assert [name.number for name in catalog.kept()] == [root.generation for root, _ in kept]
            for root, held in kept:
                found, found_rows = catalog.load(root.generation)
                assert (found, {row.key_id: row for row in found_rows}) == (root, held)


@pytest.mark.parametrize("forged", [{"generation": 2}, {"generation": 3}, {"store_uuid": bytes(16)}])
def test_two_generations_that_do_not_follow_each_other_are_refused(tmp_path: Path, forged: dict[str, Any]) -> None:
    """With digests that are right: a number would name two generations, and free bytes of the one that is open."""
    home = SqliteHome(tmp_path)
    with closing(home.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1)], [])
        catalog.apply(root_of(2), [row_of(2)], [], keeps_before=True)
        assert [name.number for name in catalog.kept()] == [2, 1]
    with closing(sqlite3.connect(home.path)) as connection, connection:
        body, expected = connection.execute("SELECT body, digest FROM root WHERE one = 0").fetchone()
        root, header = decode_root(body, expected, "")
        values = encode_root(replace(root, **forged), header.num_rows, header.digest_sum)
        connection.execute("UPDATE root SET body = ?, digest = ? WHERE one = 0", values)
    with closing(home.reopen()) as catalog, pytest.raises(CorruptionError, match="is not one before generation 2"):
        catalog.kept()


def test_damage_to_what_is_kept_is_found(tmp_path: Any) -> None:
    home = SqliteHome(tmp_path)
    with closing(home.create()) as catalog:
        catalog.apply(root_of(1), [row_of(1), large_row(2), row_of(3)], [])
        catalog.apply(root_of(2), [row_of(1, seed=1), large_row(2, seed=1), row_of(4)], [3], keeps_before=True)
    image = home.path.read_bytes()
    for sql in (
        "DELETE FROM records_before WHERE key_id = 4",  # what the newest has added
        "DELETE FROM records_before WHERE key_id = 3",
        "UPDATE records_before SET body = zeroblob(80) WHERE key_id = 1",
        "DELETE FROM pages_before WHERE page = 1",
        "UPDATE pages_before SET body = zeroblob(80) WHERE page = 2",
        "UPDATE root SET digest = zeroblob(8) WHERE one = 0",
    ):
        home.path.write_bytes(image)
        with closing(sqlite3.connect(home.path)) as connection, connection:
            connection.execute(sql)
        found = ""
        with closing(home.reopen()) as catalog:
            try:
                catalog.load(1)
            except CorruptionError as error:  # which goes here, and with it the statement that it left unfinished
                found = error.file
        assert found == str(home.path), sql


def test_damage_to_a_page_is_found_when_it_is_read(tmp_path: Path) -> None:
    home, row = SqliteHome(tmp_path), large_row(1)
    with closing(home.create()) as catalog:
        catalog.apply(root_of(1), [row], [])
        catalog.load()
        short = page_digest(1, 1, b"short", row_seed(UUID))
        for sql, values, message in (
            ("UPDATE pages SET body = x'00' WHERE page = 1", (), "page 1 of 'key 1' .* does not match its digest"),
            ("UPDATE pages SET body = ?, digest = ? WHERE page = 1", (b"short", short), "cannot be decoded"),
            ("DELETE FROM pages WHERE page = 1", (), "is gone"),
        ):
            with closing(sqlite3.connect(home.path)) as connection, connection:
                connection.execute(sql, values)
            with pytest.raises(CorruptionError, match=message) as caught:
                catalog.pages(paged(row), [1])
            assert (caught.value.file, caught.value.key) == (str(home.path), "key 1")
            assert catalog.pages(paged(row), [0])[0] == next(pages_of(row))
        with closing(sqlite3.connect(home.path)) as connection, connection:
            connection.execute("UPDATE pages SET page = -1 WHERE page = 2")
        with pytest.raises(CorruptionError, match="no such page can be"):
            catalog.load()


# -- the store -----------------------------------------------------------------------------------------------------


def committed_twice(disk: SimulatedDisk, together: Together) -> None:
    """Leave a store with generation 2 unconfirmed, beside generation 1."""
    store = simulated_store(disk, confirmation=together)
    store.put_many({name: numbers(6000, ord(name)) for name in "abc"})
    store.commit({"step": 1})
    store["a"] = numbers(6000, 1)
    store["d"] = numbers(6000, 2)
    del store["b"]
    together.error = DeviceError("a rank is gone")
    with pytest.raises(DeviceError, match=r"2 is durable here, but not confirmed by all .* a rank is gone"):
        store.commit({"step": 2})
    store.close()
    together.error = None


@pytest.mark.parametrize("chosen", [None, 1, 2])
def test_a_generation_that_was_not_confirmed_is_there_or_was_never(chosen: int | None) -> None:
    disk, together = SimulatedDisk(), Together()
    committed_twice(disk, together)
    disk = disk.power_cut(random.Random(1), "drop")
    together.chosen = chosen
    for _ in range(2):
        with simulated_store(disk, confirmation=together) as store:
            assert store.generation == (chosen or 2) and store.state == {"step": chosen or 2}
            assert list(store) == (["a", "b", "c"] if chosen == 1 else ["a", "c", "d"])
            assert torch.equal(store["a"], numbers(6000, ord("a") if chosen == 1 else 1))
            assert store.verify().is_clean
            assert store._parts.catalog is not None
            assert len(store._parts.catalog.kept()) == (1 if chosen == 1 else 2)
    together.chosen = None
    with simulated_store(disk, confirmation=together) as store:
        store["e"] = numbers(9000)
        assert store.commit() == (chosen or 2) + 1
        assert store.verify().is_clean


def test_a_reader_of_the_generation_before_has_its_pages() -> None:
    """A reader discards nothing, and reads what it has chosen."""
    disk, together = SimulatedDisk(), Together()
    with simulated_store(disk, confirmation=together) as store:
        store.put("a", numbers(20_000, 1), block_size="4KiB")
        store.commit()
        store.write_part("a", 3000, numbers(5000, 2))
        store.commit()
        store.write_part("a", 100, numbers(9000, 3))
        value = numbers(20_000, 1)
        value[3000:8000] = numbers(5000, 2)
        together.error = DeviceError("a rank is gone")
        with pytest.raises(DeviceError):
            store.commit()
    for chosen in (2, 3):
        with closing(SimulatedCatalog(disk)) as catalog:
            root, rows = catalog.load(chosen)
            (row,) = rows
            (page,) = catalog.pages(row, [0])
        assert root.generation == chosen and page.written and max(page.written[::8]) == chosen
    together.error, together.chosen = None, 2
    with simulated_store(disk, confirmation=together) as store:
        assert torch.equal(store["a"], value)


def test_gc_leaves_what_a_kept_generation_stands_on(tmp_path: Path) -> None:
    """Its bytes may lie behind all of the newest generation's."""
    with Store(tmp_path, dram="16MiB") as store:
        store["first"] = numbers(40_000, 1)
        store["last"] = numbers(50_000, 2)
        store.commit()
        rows = {record.name: record.extents[0] for record in store.records()}
        catalog = store._parts.catalog
        assert catalog is not None
        gone = max(rows, key=lambda name: rows[name].offset)
        root, committed = catalog.load()
        key_id = next(row.key_id for row in committed if row.name == gone)
        catalog.apply(replace(root, generation=root.generation + 1), [], [key_id], keeps_before=True)
    os.truncate(tmp_path / "data-000", 1 * MiB)
    with closing(Leftovers([tmp_path])) as found:
        ends = [item.end for item in found.items if item.path.name == "data-000"]
    assert ends == [rows[gone].offset + rows[gone].nbytes]


def test_a_generation_that_the_store_does_not_have_is_refused() -> None:
    disk, together = SimulatedDisk(), Together()
    committed_twice(disk, together)
    together.chosen = 3
    with pytest.raises(CorruptionError, match="not GenerationName") as caught:
        simulated_store(disk, confirmation=together)
    assert caught.value.file == ":memory:"


def test_a_store_on_other_devices_than_it_has_is_refused() -> None:
    disk = SimulatedDisk()
    simulated_store(disk).close()
    with pytest.raises(UsageError, match="the store has 1 directories, got 2"):
        simulated_store(disk, num_devices=2)


def test_the_newest_generation_is_not_given_up_for_a_damaged_one() -> None:
    disk, together = SimulatedDisk(), Together()
    committed_twice(disk, together)
    with changed_catalog(disk) as connection:
        connection.execute("UPDATE records_before SET body = x''")
    together.chosen = 1
    with pytest.raises(CorruptionError, match="expected 3 rows, got 1"):
        simulated_store(disk, confirmation=together)
    with simulated_store(disk) as store:
        assert store.generation == 2 and store.verify().is_clean


@pytest.mark.parametrize("lacks", ["an extent", "an external file", "a directory"])
def test_the_newest_generation_is_not_given_up_for_one_that_cannot_be_opened(lacks: str, tmp_path: Path) -> None:
    """The generation before has a key more, whose bytes are gone; the newest is whole, and stays."""
    disk, together = SimulatedDisk(), Together()
    base = tmp_path / "base.safetensors"
    save_file({"w": numbers(9000, 5)}, base)
    with simulated_store(disk, confirmation=together, external=[base]) as store:
        store["a"], store["z"] = numbers(6000, 1), numbers(6000, 2)
        if lacks == "an external file":
            store.adopt("z", base, "w")
        store.commit({"step": 1})
        del store["z"]
        together.error = DeviceError("a rank is gone")
        with pytest.raises(DeviceError):
            store.commit({"step": 2})
    if lacks == "an extent":
        with closing(SimulatedCatalog(disk)) as catalog:
            (extent,) = next(row.extents for row in catalog.load(2)[1])
        del disk._files[0, 0][extent.offset + extent.nbytes :]
    num_devices = 2 if lacks == "a directory" else 1
    for _ in range(2):
        with pytest.raises((CorruptionError, UsageError), match=r"belong together|is missing|got 2"):
            simulated_store(disk, confirmation=Together(1), num_devices=num_devices)
        with closing(SimulatedCatalog(disk)) as catalog:
            assert [name.number for name in catalog.kept()] == [2, 1]
    with simulated_store(disk, confirmation=Together(2)) as store:
        assert store.state == {"step": 2} and list(store) == ["a"] and store.verify().is_clean


def test_until_it_is_confirmed_no_key_takes_a_third_set_and_nothing_is_reused() -> None:
    disk, together = SimulatedDisk(), Together()
    with simulated_store(disk, confirmation=together) as store:
        store["a"] = numbers(6000, 1)
        store.commit()
        store["a"] = numbers(6000, 2)
        together.may_confirm.clear()
        together.asked.clear()
        store.commit(wait=False)
        assert together.asked.wait(30)
        used = store.working_set.space.used_nbytes
        store.working_set.deadline_s = 0.3
        store["a"] = numbers(6000, 3)  # in DRAM
        with pytest.raises(DeadlineError):
            store.wait_for_commit()
        with pytest.raises(DeadlineError):
            store.rollback()
        assert store.generation == 1 and store.working_set.space.used_nbytes == used
        store.working_set.deadline_s = 30.0
        together.may_confirm.set()
        store.wait_for_commit()
        assert store.generation == 2
        store.commit()
        assert torch.equal(store["a"], numbers(6000, 3))
