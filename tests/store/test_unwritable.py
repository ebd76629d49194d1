"""Directories without the right to write, as copies for readers are: read by any number, written by nobody."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.bytes.moving import exit_code_of_child
from tests.store.rig import numbers
from tiered.errors import DeviceError
from tiered.store.store import Store
from tiered.units import MiB

NOBODY = 65534


@pytest.fixture
def run(quick_path: Path) -> Iterator[Path]:
    path = quick_path / "run"
    with Store(path, dram="16MiB") as store:
        store["a"] = numbers(5 * MiB)
    (path / "lock").unlink()
    yield path
    path.chmod(0o700)


def check_as_nobody_with_rights(path: Path, check: Callable[[], None]) -> None:
    """Run ``check`` in a child that has no right to write to ``path``, which is its own; as root that takes a user."""

    def lower_and_check() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        torch.set_num_threads(1)  # OpenMP waits for threads that a fork does not have
        check()

    if os.geteuid() == 0:
        for file in (*path.iterdir(), path):
            os.chown(file, NOBODY, NOBODY)
        path.parent.chmod(0o755)
    path.chmod(0o500)
    assert exit_code_of_child(lower_and_check) == 0


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_without_a_lock_file_and_the_right_to_make_one_several_can_read(
    run: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_twice() -> None:
        with Store("run", dram="16MiB", engine=engine, mode="r") as one, Store("run", dram="16MiB", mode="r") as other:
            assert torch.equal(one["a"], numbers(5 * MiB))
            assert other.verify().is_clean

    monkeypatch.chdir(run.parent)
    check_as_nobody_with_rights(run, read_twice)
    assert not (run / "lock").exists()


def test_who_would_write_is_refused_before_anything_is_put(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write() -> None:
        with pytest.raises(DeviceError, match=r"Permission denied: '.*lock'"):
            Store("run", dram="16MiB")

    def write_with_a_lock_file() -> None:
        with pytest.raises(DeviceError, match="cannot be written to: chmod 700 it, or read what it holds"):
            Store("run", dram="16MiB")

    monkeypatch.chdir(run.parent)
    check_as_nobody_with_rights(run, write)
    run.chmod(0o700)
    (run / "lock").touch(0o600)
    check_as_nobody_with_rights(run, write_with_a_lock_file)
