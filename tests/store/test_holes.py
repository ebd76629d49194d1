"""Space comes back: what deleted keys had goes to the file system, at commits and by `tiered gc`."""

from __future__ import annotations

import errno
import logging
import os
import random
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.devices.adaptor import Adaptor
from tests.devices.simulated_disk import Moment, SimulatedDisk
from tests.store.rig import numbers, simulated_store
from tiered.errors import CapacityError, DeviceError
from tiered.store.lifetime.leftovers import Leftovers
from tiered.store.store import Store
from tiered.tools.cli import main
from tiered.units import KiB, MiB


def on_drive(run: Path) -> int:
    """Return the bytes that the file system has given to the data files of ``run``."""
    return sum(file.stat().st_blocks * 512 for file in run.glob("data-*"))


def test_gc_gives_back_what_deleted_keys_had_between_others(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", [7, 23]
    with Store(run, dram="32MiB") as store:
        for number in range(40):
            store[f"k{number}"] = numbers(4 * MiB, number)
        store.commit()
        for number in range(40):
            if number not in kept:
                del store[f"k{number}"]
        store.commit()
    assert main(["gc", str(run), "--yes"]) == 0
    assert on_drive(run) <= len(kept) * 4 * MiB + 64 * KiB
    with closing(Leftovers([run])) as found:
        assert not found.items  # what was given back is not found again
    with Store(run, dram="32MiB") as store:
        for number in range(50, 70):  # the holes are filled before they are written
            store[f"k{number}"] = numbers(4 * MiB, number)
        store.commit()
        assert store.verify().is_clean and len(store) == 22
        for number in (*kept, *range(50, 70)):
            assert torch.equal(store[f"k{number}"], numbers(4 * MiB, number))
    assert on_drive(run) >= 22 * 4 * MiB


def test_a_commit_gives_back_what_deleted_keys_had(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Store(run, dram="32MiB") as store:
        store.working_set.space.least_given_nbytes = 16 * MiB
        for number in range(20):
            store[f"k{number}"] = numbers(4 * MiB, number)
        store.commit()
        for number in range(3):
            del store[f"k{number}"]
        store.commit()
        assert on_drive(run) >= 80 * MiB  # less than the least
        for number in range(3, 19):
            del store[f"k{number}"]
        store.commit()
        assert on_drive(run) <= 80 * MiB - 60 * MiB + 64 * MiB
        before = on_drive(run)
        for number in range(20):
            store[f"new{number}"] = numbers(4 * MiB, number)
        store.commit()
        assert on_drive(run) > before and store.verify().is_clean
        for number in range(20):
            assert torch.equal(store[f"new{number}"], numbers(4 * MiB, number))


def test_gc_finishes_what_a_commit_gave_back_in_part(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Store(run, dram="32MiB") as store:
        store.working_set.space.least_given_nbytes = 16 * MiB
        for number in range(40):
            store[f"k{number}"] = numbers(4 * MiB, number)
        store.commit()
        for number in range(40):
            if number % 10 != 5:
                del store[f"k{number}"]
        store.commit()
    before = on_drive(run)
    with closing(Leftovers([run])) as found:
        assert found.nbytes == before - 16 * MiB == found.remove()
    assert on_drive(run) <= 16 * MiB + 64 * KiB  # ext4 counts its list of a file's parts
    with Store(run, dram="32MiB") as store:
        assert store.verify().is_clean and len(store) == 4


def test_values_that_are_replaced_give_nothing_back() -> None:
    disk = SimulatedDisk(can_lose_power=False)
    with simulated_store(disk) as store:
        for seed in range(5):
            store["a"], store["b"] = numbers(100 * KiB, seed), numbers(60 * KiB, seed)
            store.commit()
        assert disk.free_nbytes(0) == disk._capacity_nbytes - sum(disk.sizes(0).values())


def test_the_space_of_values_that_are_replaced_stays_beside_keys_that_come_and_go(tmp_path: Path) -> None:
    save_file({"x": numbers(2 * MiB)}, tmp_path / "x.safetensors")
    with simulated_store(external=[tmp_path / "x.safetensors"], budget_nbytes=8 * MiB) as store:
        for seed in range(2):
            store["a"] = numbers(800 * KiB, seed)
            store.commit()
        free = store.working_set.space.free_nbytes
        store.adopt("x", tmp_path / "x.safetensors", "x")
        store.commit()
        del store["x"]  # it had no bytes of the store's
        store.commit()
        for number in range(50):
            store["short"] = numbers(40 * KiB, number)
            store.commit()
            del store["short"]
            store.commit()
        assert store.working_set.space.free_nbytes >= free


@pytest.mark.parametrize("tells", [True, False])
def test_the_holes_of_a_file_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    def nobody_knows(fd: int, nbytes: int) -> list[tuple[int, int]]:
        raise OSError(errno.EOPNOTSUPP, "scripted")

    with Store(tmp_path / "run", dram="32MiB") as store:
        space = store.working_set.space
        space.least_given_nbytes = 8 * MiB
        for number in range(20):
            store[f"k{number}"] = numbers(4 * MiB, number)
        store.commit()
        for number in range(0, 20, 2):  # a second set, which stays with the file
            store[f"k{number}"] = numbers(4 * MiB, number)
        store.commit()
        for number in range(1, 20, 2):
            del store[f"k{number}"]
        store.commit()
        free, used = space.free_nbytes, space.used_nbytes
    if not tells:
        monkeypatch.setattr("tiered.bytes.device.files._holes_of", nobody_knows)
    with Store(tmp_path / "run", dram="32MiB") as store:
        space = store.working_set.space
        assert space.used_nbytes == used and (
            abs(space.free_nbytes - free) <= 64 * KiB if tells else not space.free_nbytes
        )
        for number in range(30):
            store[f"new{number}"] = numbers(4 * MiB, number)
        store.commit()
        assert store.verify().is_clean and len(store) == 40


def test_what_was_reserved_stays() -> None:
    disk = SimulatedDisk(capacity_nbytes=4 * MiB, can_lose_power=False)
    with simulated_store(disk, budget_nbytes=8 * MiB) as store:
        store.working_set.space.reserve(2 * MiB, scratch=False)
        store["a"] = numbers(1 * MiB)
        store.commit()
        free = disk.free_nbytes(0)
        del store["a"]
        store.commit()
        assert disk.free_nbytes(0) == free


def test_a_drive_that_others_filled_refuses_a_put_and_fails_no_write() -> None:
    disk = SimulatedDisk(capacity_nbytes=4 * MiB, can_lose_power=False)
    with simulated_store(disk, budget_nbytes=8 * MiB) as store:
        store["a"], store["b"] = numbers(3 * MiB), numbers(100 * KiB, 1)
        store.commit()
        del store["a"]
        store.commit()
        disk._capacity_nbytes -= 3 * MiB  # what another program has written
        with pytest.raises(CapacityError):
            store["c"] = numbers(3 * MiB, 2)
        store["d"] = numbers(200 * KiB, 3)
        store.commit()
        disk._capacity_nbytes += 3 * MiB
        store["c"] = numbers(3 * MiB, 2)
        store.commit()
        assert store.verify().is_clean
        for key, value in {"b": (100 * KiB, 1), "c": (3 * MiB, 2), "d": (200 * KiB, 3)}.items():
            assert torch.equal(store[key], numbers(*value))


def test_a_file_system_without_holes_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Plain(Adaptor):
        def punch(self, file: int, start: int, end: int) -> bool:
            return False

    with caplog.at_level(logging.WARNING, "tiered"), simulated_store(wrap=Plain) as store:
        for turn in range(3):
            for number in range(4):
                store[f"k{number}"] = numbers(64 * KiB, number + turn)
            store.commit()
            free = store.working_set.space.free_nbytes
            for number in range(3):
                del store[f"k{number}"]
            store.commit()
            assert store.working_set.space.free_nbytes > free
    assert [record.message for record in caplog.records] == [
        "what deleted keys had stays with the store's files: the file system of memory:0 has no holes"
    ]


def test_what_a_failed_drive_gave_back_in_part_is_filled_before_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    filled: list[tuple[int, int]] = []

    class Fails(Adaptor):
        def punch(self, file: int, start: int, end: int) -> bool:
            self.upstream.punch(file, start, end)
            raise DeviceError("scripted")

        def fill(self, file: int, start: int, end: int) -> None:
            filled.append((start, end))
            self.upstream.fill(file, start, end)

    with simulated_store(wrap=Fails, budget_nbytes=8 * MiB) as store:
        store["a"], store["b"] = numbers(2 * MiB), numbers(100 * KiB, 1)
        store.commit()
        del store["a"]
        store.commit()
        assert "scripted" in caplog.text
        store["c"] = numbers(3 * MiB, 2)
        store.commit()
        assert filled and store.verify().is_clean and torch.equal(store["c"], numbers(3 * MiB, 2))


@pytest.mark.parametrize("policy", ["drop", "keep", "torn"])
def test_power_cuts_around_holes_lose_nothing(policy: str) -> None:
    moments: list[tuple[Moment, int]] = []
    disk = SimulatedDisk(capacity_nbytes=8 * MiB)
    contents: list[dict[str, int]] = [{}]
    with simulated_store(disk) as store:
        disk.watch = lambda moment: moments.append((moment, len(contents)))
        for turn in range(3):
            content = {f"k{number}": number + 10 * turn for number in range(3)}
            for key, seed in content.items():
                store[key] = numbers(40 * KiB, seed)
            contents.append(content)
            store.commit()
            del store["k0"], store["k1"]
            contents.append({"k2": content["k2"]})
            store.commit()
        disk.watch = None
    rng = random.Random(policy)
    for moment, count in moments:
        with simulated_store(moment.survivor(rng, policy)) as store:  # type: ignore[arg-type]
            found = {key: store[key] for key in store}
            assert any(
                found.keys() == content.keys()
                and all(torch.equal(found[key], numbers(40 * KiB, seed)) for key, seed in content.items())
                for content in contents[max(0, count - 2) : count]
            )


def test_gc_leaves_a_file_whose_file_system_has_no_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store["a"], store["b"] = numbers(4 * MiB), numbers(4 * MiB, 1)
        store.commit()
        del store["a"]
        store.commit()
    monkeypatch.setattr("tiered.store.lifetime.leftovers.punch_hole", lambda fd, start, end: False)
    assert main(["gc", str(tmp_path / "run"), "--yes"]) == 0
    assert "takes no ranges between others back" in capsys.readouterr().out
    with Store(tmp_path / "run", dram="16MiB") as store:
        assert torch.equal(store["b"], numbers(4 * MiB, 1)) and os.listdir(tmp_path / "run")
