"""torch.distributed.checkpoint and plain state dicts carry a sharded model out and in, on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import tiered
from tests.interop.checkpoints import assert_same_tensors, gpt2
from tests.zero.training import debug_store
from tiered.zero import state_dict_copies

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of one process without a group


def changed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


@pytest.mark.parametrize("in_files", [True, False])
def test_what_a_sharded_model_saves_a_plain_one_loads_and_back(
    in_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict_copies, "LEAST_IN_FILE_NBYTES", 0 if in_files else 1 << 40)
    values = changed(gpt2()).state_dict()
    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.shard(changed(gpt2()), store)
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "ours")
        plain = gpt2()
        state = {"model": plain.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "ours")
        assert_same_tensors(state["model"], values)

        dcp.save({"model": gpt2().state_dict()}, checkpoint_id=tmp_path / "theirs")
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "theirs")
        assert_same_tensors(model.state_dict(), values)  # the dict is a copy: nothing was loaded yet
        model.load_state_dict(state["model"])
        assert_same_tensors(model.state_dict(), gpt2().state_dict())


def test_the_functions_of_torch_for_state_dicts_take_a_sharded_model(tmp_path: Path) -> None:
    values = changed(gpt2()).state_dict()
    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.shard(gpt2(), store)
        set_model_state_dict(model, values)
        assert_same_tensors(get_model_state_dict(model), values)


def test_a_file_of_torch_is_loaded_without_being_read_whole(tmp_path: Path) -> None:
    torch.save(changed(gpt2()).state_dict(), tmp_path / "model.pt")
    with debug_store(tmp_path / "store", durable=False) as store:
        with torch.device("meta"):
            model = gpt2()
        lazy = torch.load(tmp_path / "model.pt", mmap=True, weights_only=True)
        for module, other in zip(model.modules(), gpt2().modules(), strict=True):
            module._buffers.update(other._buffers)
        model = tiered.shard(model, store, weights=lazy)
        assert_same_tensors(model.state_dict(), changed(gpt2()).state_dict())
