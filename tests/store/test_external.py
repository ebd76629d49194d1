"""Tensors that lie in the user's own files: read in place, never written, and known by their digests."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.store.rig import GatedDevice, numbers, simulated_store
from tiered.bytes.device.base import Device
from tiered.bytes.device.file_device import FileDevice
from tiered.errors import CorruptionError, DeviceError, LeaseError, UsageError
from tiered.store.format.row import ExternalRange, Spec
from tiered.store.format.safetensors_header import HeaderEntry
from tiered.store.lifetime import external
from tiered.store.mapping import _blocks_of
from tiered.store.store import Store
from tiered.store.transfers.checked_transfer import SLAB_NBYTES
from tiered.store.values.values import adopt
from tiered.tools.cli import main
from tiered.units import KiB, MiB

ENGINES = ["uring", "threads", "aiofiles", "mmap"]


def tensors() -> dict[str, torch.Tensor]:
    return {
        "large": numbers(9 * MiB + 12, 1).view(torch.float32).nan_to_num(),
        "small": numbers(300, 2), "none": torch.empty(0, 3), "pages": numbers(5 * 4096 + 2, 3).view(torch.bfloat16),
        "odd": numbers(70_001, 4), "matrix": numbers(6000, 5).view(torch.int16).reshape(30, 100),
    }  # fmt: skip


def saved(folder: Path) -> Path:
    """Save the tensors and return the file."""
    path = folder / "base.safetensors"
    save_file(tensors(), path)
    os.utime(path, (1.7e9, 1.7e9))  # so that a later write shows in any kernel's time
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return saved(tmp_path)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8)
    )


def opened(tmp_path: Path, base: Path, *, dram: str = "64MiB", **options: object) -> Store:
    return Store(tmp_path / "run", dram=dram, external=[base], **options)  # type: ignore[arg-type]


def adopted(store: Store, base: Path) -> None:
    for name, value in tensors().items():
        if value.numel():
            store.adopt(f"base/{name}", base, name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dram", ["8MiB", "64MiB"])
def test_tensors_are_read_in_place(tmp_path: Path, base: Path, engine: str, dram: str) -> None:
    before = base.read_bytes()
    with opened(tmp_path, base, dram=dram, engine=engine) as store:
        adopted(store, base)
        for name, value in tensors().items():
            if value.numel():
                assert same(store[f"base/{name}"], value), name
                with store.lease(f"base/{name}") if value.nbytes < MiB else store.lease("base/small"):
                    pass
        store["own"] = numbers(5000)
        store.commit({"step": 1})
        written = store.statistics().write_bytes
        assert written == 8 * KiB and store.working_set.space.used_nbytes == 8 * KiB
        assert store.verify().is_clean
    for mode in ("a", "r"):
        with opened(tmp_path, base, dram=dram, engine=engine, mode=mode) as store:
            assert store.state == {"step": 1} and store.external.paths == [str(base)]
            assert all(same(store[f"base/{name}"], value) for name, value in tensors().items() if value.numel())
            report = store.verify()
            assert report.is_clean and report.num_keys == 6
            assert same(store.read_part("base/large", 1_050_000, 1_060_000), tensors()["large"][1_050_000:1_060_000])
    assert base.read_bytes() == before


def test_what_was_not_read_is_read_for_the_first_commit(tmp_path: Path, base: Path) -> None:
    with opened(tmp_path, base) as store:
        adopted(store, base)
        read = store.statistics().read_bytes
        store.commit()
        assert store.external.device is not None
        assert store.statistics().read_bytes - read >= 9 * MiB
        once = store.external.device.statistics().read_bytes
        store["a"] = numbers(2000)
        store.commit()
        assert store.external.device.statistics().read_bytes == once
    with opened(tmp_path, base) as store:
        assert store.verify().is_clean


@pytest.mark.parametrize("has_digests", [False, True])
def test_a_row_of_an_adopted_table_costs_its_blocks(tmp_path: Path, has_digests: bool) -> None:
    table, base = numbers(12 * MiB).view(torch.float32).nan_to_num().view(-1, 1024), tmp_path / "table.safetensors"
    save_file({"table": table}, base)
    with opened(tmp_path, base, dram="16MiB") as store:
        store.adopt("table", base, "table", block_size="4KiB")
        if has_digests:
            store.commit()
        rows = random.Random(1).sample(range(3 * KiB), 64)
        before = store.statistics().read_bytes
        for row in rows:
            assert torch.equal(store.read_part("table", row * 1024, (row + 1) * 1024), table[row])
        assert store.statistics().read_bytes - before <= 64 * 2 * 4 * KiB  # it lies in two pages of the file
        store.commit()
    with opened(tmp_path, base, dram="16MiB") as store:
        assert torch.equal(store["table"], table) and store.verify().num_blocks == 3 * KiB
        before = store.statistics().read_bytes
        store.read_part("table", 1024, 2048)
        assert store.statistics().read_bytes - before <= 8 * KiB
        overwritten(base, store.external.find(base, "table").offset + 5 * 4096)
        assert torch.equal(store.read_part("table", 0, 1024), table[0])
        with pytest.raises(CorruptionError, match="block 5"):
            store.read_part("table", 5 * 1024, 6 * 1024)


READERS: dict[str, Callable[[Store], torch.Tensor]] = {
    "rows": lambda store: store.rows("table").get([3, 700]),
    "read_part": lambda store: torch.stack([store.read_part("table", n * 1024, (n + 1) * 1024) for n in (3, 700)]),
    "get": lambda store: store["table"][[3, 700]],
    "lease": lambda store: leased(store)[[3, 700]],
}


def leased(store: Store) -> torch.Tensor:
    with store.lease("table") as view:
        return view.clone()


@pytest.mark.parametrize("block_size", ["4KiB", "128KiB"])
@pytest.mark.parametrize("reader", READERS)
def test_at_first_touch_a_block_has_its_digest_from_its_first_read_on(
    tmp_path: Path, reader: str, block_size: str
) -> None:
    table, base = numbers(12 * MiB).view(torch.float32).nan_to_num().view(-1, 1024), tmp_path / "table.safetensors"
    save_file({"table": table}, base)
    with opened(tmp_path, base, dram="32MiB") as store:
        store.adopt("table", base, "table", block_size=block_size, verify="first touch")
        read = store.external.device.statistics().read_bytes
        store.commit()
        assert store.external.device.statistics().read_bytes == read
        at = store.external.find(base, "table").offset
    changed = at + 2000 * 4096  # row 2000, which nobody has read
    overwritten(base, changed)
    with opened(tmp_path, base, dram="32MiB") as store:
        assert torch.equal(READERS[reader](store), table[[3, 700]])
        if block_size == "4KiB":  # else the end of the block commits
            store.commit()
    if reader in ("rows", "read_part"):  # the others have touched every block
        overwritten(base, changed)
    overwritten(base, at + 700 * 4096)
    for mode in ("r", "a"):
        with opened(tmp_path, base, dram="32MiB", mode=mode) as store:
            assert torch.equal(store.read_part("table", 1000 * 1024, 1001 * 1024), table[1000])
            with pytest.raises(CorruptionError, match="is damaged"):
                READERS[reader](store)


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_read_that_fails_teaches_nothing(tmp_path: Path, engine: str) -> None:
    table, base = numbers(2 * MiB).view(-1, 4096), tmp_path / "table.safetensors"
    save_file({"table": table}, base)
    content = base.read_bytes()
    with opened(tmp_path, base, engine=engine) as store:
        store["before"] = numbers(3 * MiB)  # whose bytes stay in the arena
        store.commit()
        store.evict(store)
        store.adopt("table", base, "table", block_size="4KiB", verify="first touch")
        os.truncate(base, len(content) // 2)
        for read in (
            lambda: store.rows("table").get([400, 511]),
            lambda: store.read_part("table", 500 * 4096, 501 * 4096),
        ):
            with pytest.raises((CorruptionError, DeviceError)):
                read()
        assert torch.equal(store.rows("table").get([7]), table[[7]])
        base.write_bytes(content)
        assert torch.equal(store.rows("table").get([400, 511]), table[[400, 511]])
        assert torch.equal(store["table"], table)
        store.close(commit=False)


def test_digests_of_first_reads_outlive_a_commit_that_was_refused(tmp_path: Path) -> None:
    table, base = numbers(2 * MiB).view(-1, 4096), tmp_path / "table.safetensors"
    save_file({"table": table}, base)
    with opened(tmp_path, base) as store:
        store.adopt("table", base, "table", block_size="4KiB", verify="first touch")
        store["other"] = numbers(100)
        store.commit()
        store.rows("table").get([9])
        with store.lease("other", mode="rw"), pytest.raises(LeaseError):
            store.commit()
        store.rollback()
        store.commit()
        at = store.external.find(base, "table").offset
    overwritten(base, at + 9 * 4096)
    with opened(tmp_path, base) as store, pytest.raises(CorruptionError, match="row 9"):
        store.rows("table").get([9])


def test_verify_names_what_was_never_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, base = numbers(2 * MiB).view(-1, 4096), tmp_path / "table.safetensors"
    save_file({"table": table}, base)
    with opened(tmp_path, base) as store:
        store.adopt("table", base, "table", block_size="4KiB", verify="first touch")
        store.rows("table").get([0, 5, 5])
        store.commit()
    assert main(["verify", str(tmp_path / "run"), "--external", str(base)]) == 0
    assert "not compared: 510 blocks of 'table'" in capsys.readouterr().out
    with opened(tmp_path, base) as store:
        report = store.verify()
        assert report.unread == {"table": 510} and report.is_clean
        store.commit()
    with opened(tmp_path, base) as store:
        assert store.verify().unread == {}
        store.put("other", numbers(100))
        store.rollback()
        store["table"] = table  # bytes of its own
        store.commit()
        assert store.verify().unread == {} and torch.equal(store["table"], table)
    with pytest.raises(ValueError, match="expected verify='first commit' or 'first touch', got 'never'"):
        with opened(tmp_path, base) as store:
            store.adopt("again", base, "table", verify="never")


def test_blocks_of_large_tables_are_by_their_rows(tmp_path: Path) -> None:
    for shape, expected in {
        (65536, 4096): 4 * KiB, (300 * 1024, 1000): 4 * KiB, (16 * KiB, 17 * KiB): 16 * KiB, (32, 9 * MiB): 4 * MiB,
        (65535, 4096): 4 * MiB, (512 * MiB,): 4 * MiB,
    }.items():  # fmt: skip
        assert _blocks_of(HeaderEntry("uint8", shape, 0, math.prod(shape))) == expected


def test_blocks_of_an_adopted_tensor_are_of_the_sizes_that_a_put_takes(tmp_path: Path, base: Path) -> None:
    with opened(tmp_path, base) as store:
        for size in (0, 2048, 5000, 8 * MiB):
            with pytest.raises(ValueError, match=r"adoption of 'a': expected blocks of a power of two from 4096"):
                store.adopt("a", base, "odd", block_size=size)
        assert "a" not in store


@pytest.mark.parametrize("how", ["get", "lease", "read_part", "commit"])
def test_reads_of_external_files_are_counted_as_the_system_counts_them(tmp_path: Path, how: str) -> None:
    base = tmp_path / "many.safetensors"
    save_file({f"{i}": numbers(MiB + 500, i) for i in range(16)}, base)

    def rchar() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with opened(tmp_path, base, engine="threads") as store:
        for i in range(16):
            store.adopt(f"{i}", base, f"{i}")
        before, counted = rchar(), store.statistics().read_bytes
        for i in range(16):
            if how == "get":
                store[f"{i}"]
            elif how == "lease":
                with store.lease(f"{i}"):
                    pass
            elif how == "read_part":
                store.read_part(f"{i}", 0, MiB)
        if how == "commit":
            store.commit()
        counted = store.statistics().read_bytes - counted
        assert counted >= 16 * MiB and counted == pytest.approx(rchar() - before, rel=0.02)


def test_what_is_adopted_while_a_commit_begins_has_its_digests_in_it(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came behind the last look at what lacks them."""
    with opened(tmp_path, base) as store:
        store.adopt("odd", base, "odd")
        with store.lease("odd"):
            pass
        look, looks = store.external.changed, []

        def changed() -> str | None:
            looks.append(look())
            if len(looks) == 1:
                store.adopt("pages", base, "pages")
            return looks[-1]

        monkeypatch.setattr(store.external, "changed", changed)
        assert store.commit() == 1 and len(looks) > 1
        assert not store.working_set.has_changes
    with opened(tmp_path, base, mode="r") as store:
        assert same(store["pages"], tensors()["pages"]) and same(store["odd"], tensors()["odd"])
        assert store.verify().num_blocks == 2


def test_a_commit_that_cannot_read_what_was_adopted_seals_nothing(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file loses its end behind the first look at it."""
    with opened(tmp_path, base) as store:
        store["own"] = numbers(5000)
        store.adopt("base/large", base, "large")
        look, length = store.external.changed, store.external.find(base, "large").offset + 5 * MiB

        def changed() -> str | None:
            found = look()
            os.truncate(base, length)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(store.external, "changed", changed)
            with pytest.raises(CorruptionError, match=f"the file ends at {length}") as caught:
                store.commit()
        assert (caught.value.key, caught.value.file) == ("base/large", str(base))
        assert store.generation == 0 and torch.equal(store["own"], numbers(5000))
        del store["base/large"]
        assert store.commit() == 1 and list(store) == ["own"]


def test_a_later_write_gives_a_key_bytes_of_its_own(tmp_path: Path, base: Path) -> None:
    with opened(tmp_path, base) as store:
        adopted(store, base)
        store.commit()
        with store.lease("base/odd", "rw") as view:
            view[0] = 7
        store.write_part("base/pages", 3, torch.zeros(5, dtype=torch.bfloat16))
        store["base/small"] = numbers(2000)
        del store["base/matrix"]
        store.rollback()
        assert same(store["base/odd"], tensors()["odd"]) and same(store["base/matrix"], tensors()["matrix"])
        with store.lease("base/odd", "rw") as view:
            view[0] = 7
        store.write_part("base/pages", 3, torch.zeros(5, dtype=torch.bfloat16))
        store["base/small"] = numbers(2000)
        del store["base/matrix"]
        store.commit()
    with opened(tmp_path, base) as store:
        odd, pages = tensors()["odd"], tensors()["pages"]
        odd[0], pages[3:8] = 7, 0
        assert same(store["base/odd"], odd) and same(store["base/pages"], pages)
        assert same(store["base/small"], numbers(2000)) and "base/matrix" not in store
        assert same(store["base/large"], tensors()["large"]) and store.verify().is_clean


def test_a_flipped_bit_is_found_with_its_file_and_offset(tmp_path: Path, base: Path) -> None:
    with opened(tmp_path, base) as store:
        adopted(store, base)
        store.commit()
        entry = store.external.find(base, "large")
    offset = entry.offset + 5 * MiB + 3
    with open(base, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes((byte ^ 4,)))
    with opened(tmp_path, base) as store:
        for read in (lambda: store["base/large"], lambda: store.read_part("base/large", 1_310_720, 1_310_724)):
            with pytest.raises(CorruptionError, match="block 1 does not match") as caught:
                read()
            assert (caught.value.file, caught.value.offset) == (str(base), entry.offset + 4 * MiB)
        (error,) = store.verify().errors
        assert error.key == "base/large"
        assert same(store["base/odd"], tensors()["odd"])


def test_another_file_under_the_name_is_refused_or_found(tmp_path: Path, base: Path) -> None:
    with opened(tmp_path, base) as store:
        adopted(store, base)
    values = tensors()
    kept = base.read_bytes()
    save_file({**values, "odd": values["odd"] + 1}, base)  # a fine-tune: same header, same length
    with opened(tmp_path, base) as store, pytest.raises(CorruptionError, match="block 0"):
        store["base/odd"]
    save_file({**values, "odd": values["odd"][:-1]}, base)
    with pytest.raises(UsageError, match=r"another file than .* expected [\d,]+ bytes, got [\d,]+"):
        opened(tmp_path, base).close()
    save_file({**values, "odd": values["odd"].to(torch.int8)}, base)
    with pytest.raises(UsageError, match="with another header"):
        opened(tmp_path, base).close()
    base.unlink()
    with pytest.raises(UsageError, match=r"base\.safetensors"):
        opened(tmp_path, base).close()
    with pytest.raises(UsageError, match=r"lie in the file 'base.safetensors' .* missing; none was given"):
        Store(tmp_path / "run", dram="16MiB")
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "renamed.safetensors"
    moved.write_bytes(kept)
    for place in (moved, moved.parent):
        with Store(tmp_path / "run", dram="16MiB", external=[place]) as store:
            assert same(store["base/odd"], tensors()["odd"])


def test_a_file_that_changes_while_it_is_open(tmp_path: Path, base: Path) -> None:
    with opened(tmp_path, base) as store:
        adopted(store, base)
        with open(base, "r+b") as file:
            file.seek(-10, os.SEEK_END)
            file.write(bytes(10))
        with pytest.raises(UsageError, match="was changed while the store was open"):
            store.commit()
        store["own"] = numbers(5000)  # nothing was sealed, and the store goes on
        store.clear()
        store["own"] = numbers(5000)
        store.commit()
    save_file(tensors(), base)
    with Store(tmp_path / "run", dram="16MiB") as store:
        assert list(store) == ["own"]


def overwritten(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes(10))


def test_a_file_that_changes_before_a_lease_reads_it_is_in_no_commit(tmp_path: Path, base: Path) -> None:
    """The lease has learnt digests: nothing is left to be read for the commit, which asks all the same."""
    with opened(tmp_path, base) as store:
        store.adopt("odd", base, "odd")
        overwritten(base, store.external.find(base, "odd").offset)
        with store.lease("odd"):
            pass
        with pytest.raises(UsageError, match="was changed while the store was open"):
            store.commit()
        del store["odd"]
        store["own"] = numbers(5000)
        assert store.commit() == 1


@pytest.mark.parametrize("write", ["lease", "part", "small part", "put"])
def test_a_file_that_changes_before_a_write_copies_it_is_in_no_commit(tmp_path: Path, base: Path, write: str) -> None:
    """The key has left the file by the commit, with bytes of it; a put has taken none."""
    name = "small" if write == "small part" else "odd"
    with opened(tmp_path, base) as store:
        store.adopt("a", base, name)
        overwritten(base, store.external.find(base, name).offset + 100)
        if write == "lease":
            with store.lease("a", "rw") as view:
                view[0] = 1
        elif write == "put":
            store["a"] = tensors()[name]
        else:
            store.write_part("a", 0, numbers(1))
        if write != "put":
            with pytest.raises(UsageError, match="was changed while the store was open"):
                store.commit()
            store.rollback()
            store["own"] = numbers(5000)
        assert store.commit() == 1 and list(store) == (["a"] if write == "put" else ["own"])


@pytest.mark.parametrize("by_lease", [True, False])
def test_a_file_that_changes_while_a_commit_reads_it_is_in_no_commit(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, by_lease: bool
) -> None:
    """Changed, and read, by the commit or by a lease beside it, behind the first look at it."""
    with opened(tmp_path, base) as store:
        store.adopt("odd", base, "odd")
        looks: list[str | None] = []
        look = store.external.changed

        def changed() -> str | None:
            looks.append(look())
            if len(looks) == 1:
                overwritten(base, store.external.find(base, "odd").offset)
                if by_lease:
                    store.adopt("small", base, "small")
                    with store.lease("small"), store.lease("odd"):
                        pass
            return looks[-1]

        monkeypatch.setattr(store.external, "changed", changed)
        with pytest.raises(UsageError, match="was changed while the store was open"):
            store.commit()
        assert looks[0] is None and len(looks) == 2
        store.clear()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_loses_its_last_bytes_while_it_is_open_is_damage_of_what_lies_there(
    tmp_path: Path, engine: str
) -> None:
    base = tmp_path / "base.safetensors"
    save_file({"first": numbers(50_000, 1), "last": numbers(20_003, 2)}, base)
    with opened(tmp_path, base, engine=engine) as store:
        store.adopt("last", base, "last")
        store.adopt("first", base, "first")
        store.commit()
        os.truncate(base, base.stat().st_size - 3)
        (error,) = store.verify().errors
        assert error.key == "last" and error.file == str(base)
        assert same(store["first"], numbers(50_000, 1))


def test_a_tensor_of_too_many_dimensions_is_not_adopted(tmp_path: Path) -> None:
    """A commit that has one would be lost, and all else in it."""
    path = tmp_path / "base.safetensors"
    save_file({"x": numbers(4096).reshape([1] * 255 + [4096])}, path)
    with opened(tmp_path, path) as store:
        store["own"] = numbers(5000)
        with pytest.raises(UsageError, match="has 256 dimensions, of which a catalog row holds 255"):
            store.adopt("x", path, "x")
        assert store.commit() == 1 and list(store) == ["own"]


def test_one_path_is_not_taken_for_a_sequence_of_letters(tmp_path: Path, base: Path) -> None:
    for one in (str(base), base):
        with pytest.raises(TypeError, match="expected a sequence of paths, got the one path"):
            Store(tmp_path / "run", dram="16MiB", external=one)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_file_of_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"models is a folder without a \*\.safetensors file"):
        Store(tmp_path / "run", dram="16MiB", external=[tmp_path / "models"])


def test_a_file_that_is_no_file_of_tensors_is_refused_and_closed(tmp_path: Path, base: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"no header" * 1000)
    with opened(tmp_path, base):  # so that what is opened once is open
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(UsageError, match=r"other\.safetensors"):
            Store(tmp_path / "another run", dram="16MiB", external=[base, other])
        assert set(os.listdir("/proc/self/fd")) == before


def test_external_files_on_a_drive_of_larger_sectors_are_refused(base: Path) -> None:
    """An aligned read of them would not fit into the memory of the store's own."""

    def of_small_sectors(device: Device) -> Device:
        device = GatedDevice(device)
        device.alignment = 512
        return device

    with pytest.raises(UsageError, match=r"read in units of 4096 bytes, the store's own in 512; copy the files"):
        simulated_store(wrap=of_small_sectors, external=[base])


def test_the_command_line_knows_external_files(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path, base) as store:
        adopted(store, base)
        store["own"] = numbers(100)

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["tiered", *map(str, words)])
        status = main()
        return status, "".join(capsys.readouterr())

    status, output = run("inspect", tmp_path / "run")
    assert status == 0 and output.count(", in base.safetensors\n") == 5 and "6 keys" in output
    status, output = run("verify", tmp_path / "run", "--external", base)
    assert status == 0 and "of 6 keys, generation 1: none damaged" in output
    status, output = run("verify", tmp_path / "run")
    assert status == 2 and "is missing; none was given" in output


def test_swap_space_may_lie_beside_external_files(tmp_path: Path, base: Path) -> None:
    with opened(tmp_path, base, durable=False) as store:
        adopted(store, base)
        assert same(store["base/large"], tensors()["large"]) and same(store["base/odd"], tensors()["odd"])
        with store.lease("base/odd", "rw") as view:
            view.zero_()
        assert not store["base/odd"].any()


@settings(max_examples=25)
@given(st.integers(0, 1 << 30))
def test_ranges_at_any_place_come_back(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Ranges of any length, at any offset in file and record, with gaps, over several slabs and blocks of any size."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("external")
    content = numbers(5 * MiB, seed % 100)
    save_file({"all": content}, folder / "f.safetensors")
    record = torch.zeros(rng.choice((20_000, 300_001, 5 * MiB + 333)), dtype=torch.uint8)
    ranges, at = [], 0
    with Store(folder / "run", dram="32MiB", external=[folder], engine="threads") as store:
        entry = store.external.find(folder / "f.safetensors", "all")
        assert store.external.number(folder / "f.safetensors") == 0
        while at < record.numel():
            at += rng.choice((0, 0, 1, 100, 4096, 9000))
            nbytes = min(record.numel() - at, rng.choice((1, 512, 4095, 4096, 16_384, 16_385, 50_000, 4 * MiB)))
            if nbytes <= 0:
                break
            start = rng.randrange(content.numel() - nbytes)
            record[at : at + nbytes] = content[start : start + nbytes]
            ranges.append(ExternalRange(at, 0, entry.offset + start, nbytes))
            at += nbytes
        block = rng.choice((4 * KiB, 64 * KiB, 4 * MiB))
        adopt(store.working_set, "a", Spec(torch.uint8, (record.numel(),), block), ranges)
        assert torch.equal(store["a"], record)
        store.commit()
        start = rng.randrange(record.numel())
        stop = min(record.numel(), start + rng.choice((1, 5000, 200_000)))
        assert torch.equal(store.read_part("a", start, stop), record[start:stop])
    with Store(folder / "run", dram="8MiB", external=[folder], engine="threads") as store:
        assert torch.equal(store["a"], record) and store.verify().is_clean


def test_ranges_of_whole_pages_and_slabs_of_zeros_come_back_and_are_checked(tmp_path: Path) -> None:
    """Three slabs: pages as they lie in the file, nothing, and a range that begins in the middle of a block."""
    content, at = numbers(2 * MiB, 1), 3 * SLAB_NBYTES - 1 * MiB
    save_file({"all": content}, tmp_path / "f.safetensors")
    record = torch.zeros(3 * SLAB_NBYTES, dtype=torch.uint8)
    spec = Spec(torch.uint8, (record.numel(),), 64 * KiB)
    with opened(tmp_path, tmp_path / "f.safetensors") as store:
        entry = store.external.find(tmp_path / "f.safetensors", "all")
        number = store.external.number(tmp_path / "f.safetensors")
        skip = -entry.offset % 4096
        ranges = [
            ExternalRange(0, number, entry.offset + skip, 40 * 4096),
            ExternalRange(at + 100, number, entry.offset + 77, 300_000),
        ]
        record[: 40 * 4096] = content[skip : skip + 40 * 4096]
        record[at + 100 :][:300_000] = content[77:300_077]
        adopt(store.working_set, "a", spec, ranges)
        assert torch.equal(store["a"], record)
    with opened(tmp_path, tmp_path / "f.safetensors", dram="8MiB") as store:
        assert torch.equal(store["a"], record) and store.verify().is_clean
        assert not store.read_part("a", SLAB_NBYTES + 5, SLAB_NBYTES + 9000).any()
    overwritten(tmp_path / "f.safetensors", ranges[1].offset + 250_000)  # the first range ends before that
    with opened(tmp_path, tmp_path / "f.safetensors", dram="8MiB") as store:
        (error,) = store.verify().errors
        block = (at + 100 + 250_000) // (64 * KiB) * 64 * KiB
        assert (error.file, error.offset) == (str(tmp_path / "f.safetensors"), ranges[1].offset + block - at - 100)
        with pytest.raises(CorruptionError, match=f"block {block // (64 * KiB)} does not match"):
            store["a"]


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize("name", ["small", "odd", "pages"])
def test_a_part_of_an_adopted_tensor_takes_it_out_of_the_file(
    tmp_path: Path, base: Path, name: str, is_resident: bool
) -> None:
    key = f"base/{name}"
    value, content = tensors()[name].clone(), base.read_bytes()
    with opened(tmp_path, base) as store:
        adopted(store, base)
        store.commit()
        if is_resident:
            with store.lease(key):
                pass
        for start in (7, 20):
            value.view(-1)[start : start + 3] = 0
            store.write_part(key, start, torch.zeros(3, dtype=value.dtype))
        assert same(store[key], value)
        store.rollback()
        assert same(store[key], tensors()[name])
        store.write_part(key, 7, torch.zeros(3, dtype=value.dtype))
        store.write_part(key, 20, torch.zeros(3, dtype=value.dtype))
        store.commit()
        assert store.verify().is_clean
    assert base.read_bytes() == content
    with opened(tmp_path, base) as store:
        assert same(store[key], value) and store.verify().is_clean


def test_a_part_of_an_adopted_tensor_needs_no_memory_besides_the_budget(tmp_path: Path) -> None:
    value = numbers(24 * MiB, 1)
    save_file({"large": value}, tmp_path / "base.safetensors")
    with opened(tmp_path, tmp_path / "base.safetensors", dram="8MiB") as store:
        store.adopt("a", tmp_path / "base.safetensors", "large")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _resident_nbytes("VmHWM")
        store.write_part("a", 5 * MiB - 2, numbers(4, 2))
        assert _resident_nbytes("VmHWM") - before <= 12 * MiB
        value[5 * MiB - 2 :][:4] = numbers(4, 2)
        assert torch.equal(store["a"], value)
        store.commit()
        assert store.verify().is_clean and store.statistics().used_bytes == 24 * MiB


def _resident_nbytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(name))


def test_the_header_is_that_of_the_file_that_is_open(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file takes its place while the store opens: what is known of it is all of one file."""
    other = tmp_path / "other"
    save_file({"first": numbers(9000, 8), "odd": numbers(70_001, 9)}, other)
    opening = external.open_external

    def replaced(paths: list[str], engine: str) -> FileDevice:
        os.replace(other, base)
        return opening(paths, engine)

    monkeypatch.setattr(external, "open_external", replaced)
    with opened(tmp_path, base) as store:
        monkeypatch.undo()
        store.adopt("odd", base, "odd")
        assert same(store["odd"], numbers(70_001, 9))
    with opened(tmp_path, base) as store:
        assert same(store["odd"], numbers(70_001, 9)) and store.verify().is_clean


def base_and_tuned(folder: Path) -> tuple[Path, Path]:
    """Save a model and its fine-tune, in which half of the tensors are the same; return their files."""
    paths = folder / "base" / "model.safetensors", folder / "tuned" / "model.safetensors"
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        save_file({"same": numbers(9000), "other": numbers(9000, 1 + seed)}, path)
    return paths


@pytest.mark.parametrize("is_base_first", [True, False])
def test_of_files_that_look_alike_the_one_with_the_bytes_is_taken(tmp_path: Path, is_base_first: bool) -> None:
    base, tuned = base_and_tuned(tmp_path)
    files = [base.parent, tuned.parent] if is_base_first else [tuned.parent, base.parent]
    with Store(tmp_path / "run", dram="16MiB", external=files) as store:
        store.adopt("same", tuned, "same")
        store.adopt("other", tuned, "other")
    with Store(tmp_path / "run", dram="16MiB", external=files) as store:
        assert same(store["other"], numbers(9000, 2)) and store.verify().is_clean
        store.adopt("of the base", base, "other")
    for order in (files, files[::-1]):
        with Store(tmp_path / "run", dram="16MiB", external=order, mode="r") as store:
            assert store.verify().is_clean and same(store["of the base"], numbers(9000, 1))


def test_a_file_that_took_the_name_of_another_is_known_by_its_bytes(tmp_path: Path) -> None:
    base, tuned = base_and_tuned(tmp_path)
    first, second = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    base.rename(first)
    tuned.rename(second)
    with Store(tmp_path / "run", dram="16MiB", external=[first, second]) as store:
        store.adopt("first", first, "other")
        store.adopt("second", second, "other")
    swapped = tmp_path / "z.safetensors"
    first.rename(swapped)
    second.rename(first)
    swapped.rename(second)
    for files in ([first, second], [second, first]):
        with Store(tmp_path / "run", dram="16MiB", external=files) as store:
            assert same(store["first"], numbers(9000, 1)) and same(store["second"], numbers(9000, 2))


def test_copies_and_damaged_look_alikes_are_taken_by_name_and_order(tmp_path: Path) -> None:
    base, tuned = base_and_tuned(tmp_path)
    with Store(tmp_path / "run", dram="16MiB", external=[base]) as store:
        store.adopt("w", base, "other")
    copy, renamed = tmp_path / "copy.safetensors", tmp_path / "renamed.safetensors"
    for path in (copy, renamed):
        path.write_bytes(base.read_bytes())

    def taken(*files: Path) -> str:
        with Store(tmp_path / "run", dram="16MiB", external=files) as store:
            return store.external.paths[store.external.indices[0]]

    assert taken(renamed, copy) == str(renamed) and taken(renamed, base, copy) == str(base)
    with open(base, "r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(bytes(10))
    with open(base, "r+b") as file:
        file.seek(-18_000 + 5, os.SEEK_END)
        file.write(bytes(10))
    assert taken(renamed, base) == str(renamed)
    assert taken(tuned, base) == str(tuned), "neither is right, and both have the name"


def test_a_file_that_nothing_lies_in_any_more_is_not_asked_for_nor_kept(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, file in enumerate(files):
        save_file({"w": numbers(9000, number)}, file)
        with Store(tmp_path / "run", dram="16MiB", external=files[max(0, number - 1) : number + 1]) as store:
            store.adopt("w", file, "w")
            store.commit()
            assert len(store._generations.root.external) == min(2, number + 1)
    with Store(tmp_path / "run", dram="16MiB", external=files[2:]) as store:
        assert same(store["w"], numbers(9000, 2))
        store["w"] = numbers(3000)
    with Store(tmp_path / "run", dram="16MiB") as store:
        store["w"] = numbers(4000)
        store.commit()
        assert not store._generations.root.external
