"""A large state_dict() of a sharded model lies in a file: ordinary tensors, whose pages the kernel may take back."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tiered
from tests.zero.training import debug_store
from tiered.errors import CapacityError
from tiered.zero import state_dict_copies


@pytest.fixture(autouse=True)
def all_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict_copies, "LEAST_IN_FILE_NBYTES", 0)


class Net(nn.Module):
    """Tied, bf16, channels-last and empty parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.narrow = nn.Parameter(torch.randn(3, 5).bfloat16().t())
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.arange(3))


def net() -> Net:
    torch.manual_seed(4)
    return Net()


def is_in_file(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith("(deleted)")
    raise AssertionError("not mapped")


def test_values_are_copies_in_a_file_that_outlive_the_store(drive_path: Path, tmp_path: Path) -> None:
    expected = net().state_dict()
    with debug_store(drive_path / "store", durable=False) as store:
        model = tiered.shard(net(), store)
        found = model.state_dict()
        again = model.state_dict()
        found["narrow"].zero_()  # the caller's own
        assert torch.equal(model.state_dict()["narrow"], expected["narrow"])
    assert list(found) == list(expected)
    del found["narrow"], expected["narrow"]
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].stride() == value.stride(), name
        assert found[name].dtype == value.dtype and type(found[name]) is torch.Tensor
    assert found["last.weight"].data_ptr() == found["first.weight"].data_ptr() != again["first.weight"].data_ptr()
    assert is_in_file(found["conv.weight"]) and not is_in_file(expected["conv.weight"])
    net().load_state_dict(again)
    torch.save(again, tmp_path / "all.pt")
    assert all(map(torch.equal, torch.load(tmp_path / "all.pt").values(), again.values()))
    del again["last.weight"]
    save_file({name: value.contiguous() for name, value in again.items()}, tmp_path / "all.safetensors")
    assert load_file(tmp_path / "all.safetensors").keys() == again.keys()


def test_where_neither_file_nor_memory_has_room_it_says_what_streams(
    drive_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with debug_store(drive_path / "store", durable=False) as store:
        model: Any = tiered.shard(net(), store)
        monkeypatch.setattr(os, "posix_fallocate", full)
        assert not is_in_file(model.state_dict()["conv.weight"])  # memory has room
        monkeypatch.setattr(state_dict_copies, "free_memory", lambda: 10)
        with pytest.raises(CapacityError, match=r"has no room.*one unit at a time.*save_pretrained.*tiered export"):
            model.state_dict()
        monkeypatch.undo()
        assert torch.equal(model.state_dict()["narrow"], net().narrow)


def test_a_store_in_memory_has_its_copies_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with debug_store(tmp_path, durable=False, engine="memory") as store:
        model = tiered.shard(net(), store)
        assert not is_in_file(model.state_dict()["conv.weight"])


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_the_state_of_an_optimizer_lies_in_a_file_too(param_dtype: torch.dtype | None, drive_path: Path) -> None:
    def state(directory: Path) -> dict[int, dict[str, torch.Tensor]]:
        with debug_store(directory, durable=False) as store:
            model = tiered.shard(net(), store, param_dtype=param_dtype)
            optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
            x = torch.ones(2, 8, dtype=model.first.weight.dtype)
            model.last(model.first(x)).square().sum().backward()
            optimizer.step()
            found: dict[int, dict[str, torch.Tensor]] = optimizer.state_dict()["state"]
            optimizer.load_state_dict(optimizer.state_dict())
            return found

    in_file = state(drive_path / "file")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_dict_copies, "LEAST_IN_FILE_NBYTES", 1 << 40)
        in_memory = state(drive_path / "memory")
    assert is_in_file(in_file[0]["exp_avg"]) and not is_in_file(in_memory[0]["exp_avg"])
    assert in_file.keys() == in_memory.keys()
    for index, values in in_memory.items():
        assert all(torch.equal(in_file[index][name], value) for name, value in values.items())
        assert all(in_file[index][name].stride() == value.stride() for name, value in values.items())
