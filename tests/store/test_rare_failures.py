"""What hardly ever fails: the creation of a catalog, a directory without permissions, threads that do not start."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiered.errors import CapacityError, CorruptionError, DeviceError, UsageError
from tiered.store.catalog.sqlite_file import make_durable, translated
from tiered.store.lifetime.directory import owned_files
from tiered.store.space.space import in_parallel
from tiered.store.store import Store


def test_a_catalog_that_cannot_be_made_leaves_no_file(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refuse(old: Path, new: Path, **options: int) -> None:
        if "catalog" in os.fspath(new):
            raise OSError(errno.ENOSPC, "scripted")
        rename(old, new, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(CapacityError, match=r"catalog .*: could not create it: .*scripted"):
            Store(quick_path / "run", dram="8MiB")
    assert not [name for name in os.listdir(quick_path / "run") if name.startswith("catalog")]
    Store(quick_path / "run", dram="8MiB").close()


def test_a_catalog_with_another_journal_is_refused() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        with pytest.raises(sqlite3.DatabaseError, match="journal mode"):
            make_durable(connection)


def test_damaged_text_in_the_message_of_an_error_is_damage() -> None:
    with pytest.raises(CorruptionError, match="catalog here: could not read it"), translated("here", "read"):
        b"\xff".decode()


def test_an_unknown_mode_and_a_place_without_permission_are_refused(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match='mode must be "a", "x" or "r", got \'z\''):
        Store(quick_path / "run", dram="8MiB", mode="z")
    Store(quick_path / "run", dram="8MiB").close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # which root always may
    with pytest.raises(DeviceError, match=r"run cannot be written to: chmod 700 it, or read what it holds with mode"):
        Store(quick_path / "run", dram="8MiB")
    with Store(quick_path / "run", dram="8MiB", mode="r") as store:
        assert not len(store)
    assert not list(owned_files(quick_path / "nowhere"))


def test_a_file_is_adopted_by_any_of_its_names_and_only_if_it_was_given(quick_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"a": torch.arange(4.0)}, quick_path / f"{name}.safetensors")
    os.symlink(quick_path / "a.safetensors", quick_path / "link")
    with Store(quick_path / "run", dram="8MiB", external=[quick_path / "a.safetensors"]) as store:
        store.adopt("a", quick_path / "link", "a")
        with pytest.raises(UsageError, match=r"b\.safetensors is not among the files that the store was opened with"):
            store.adopt("b", quick_path / "b.safetensors", "a")
        assert torch.equal(store["a"], torch.arange(4.0))


def test_calls_are_made_here_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not in_parallel([lambda number=number: made.append(number) for number in range(3)])  # type: ignore[misc]
    assert made == [0, 1, 2]
