"""A sharded model is saved as transformers and PEFT save one in memory: a parameter at a time, all of it or nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers.core_model_loading import Transpose, WeightConverter

import tiered
from tests.interop.checkpoints import MODELS, assert_same_files, assert_same_tensors, gpt2, tensors_in
from tests.zero.training import debug_store
from tiered.errors import CapacityError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own


@pytest.mark.parametrize("size", ["50GB", "40KB"])
@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_the_same_model_in_memory(name: str, size: str, tmp_path: Path) -> None:
    plain = MODELS[name]()
    plain.save_pretrained(tmp_path / "plain", max_shard_size=size)
    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.shard(MODELS[name](), store)
        tiered.save_pretrained(model, tmp_path / "ours", max_shard_size=size)
        model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert_same_files(tmp_path / "ours", tmp_path / "plain")
    assert_same_files(tmp_path / "theirs", tmp_path / "plain")
    again = type(plain).from_pretrained(tmp_path / "ours")
    assert_same_tensors(again.state_dict(), plain.state_dict())


class Shapes(nn.Module):
    """Tensors that are tied, channels-last, without elements, of no dimension, or transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.none = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.wide = nn.Parameter(torch.randn(1100, 1000).bfloat16().t())
        self.register_buffer("counts", torch.arange(7))


def test_any_module_comes_back_from_its_files(tmp_path: Path) -> None:
    torch.manual_seed(2)
    plain = Shapes()
    with debug_store(tmp_path / "store", durable=False) as store:
        tiered.save_pretrained(tiered.shard(Shapes(), store, weights=plain.state_dict()), tmp_path / "saved")
    expected = {name: value for name, value in plain.state_dict().items() if name != "tied.weight"}
    assert_same_tensors(tensors_in(tmp_path / "saved"), expected)
    with debug_store(tmp_path / "again", durable=False) as store:
        with torch.device("meta"):
            model = Shapes()
        model = tiered.shard(model, store, weights=tmp_path / "saved")
        assert_same_tensors(model.state_dict(), plain.state_dict())


def test_a_model_that_is_not_sharded_is_saved_alike(tmp_path: Path) -> None:
    plain = gpt2()
    plain.save_pretrained(tmp_path / "plain")
    tiered.save_pretrained(plain, tmp_path / "ours")
    assert_same_files(tmp_path / "ours", tmp_path / "plain")


def test_dtype_casts_what_floats(tmp_path: Path) -> None:
    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.shard(gpt2(), store)
        tiered.save_pretrained(model, tmp_path / "half", dtype=torch.bfloat16)
        with pytest.raises(TypeError, match=r"dtype='bf16'"):
            tiered.save_pretrained(model, tmp_path / "none", dtype="bf16")  # type: ignore[arg-type]
    expected = gpt2().to(torch.bfloat16)
    found: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "half")
    assert found.dtype == torch.bfloat16
    assert_same_tensors(found.state_dict(), expected.state_dict())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("adapts_before", [True, False])
def test_of_adapters_nothing_else_is_saved_or_read(adapts_before: bool, tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, lora)

    adapted(gpt2()).save_pretrained(tmp_path / "plain")
    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.shard(adapted(gpt2()), store) if adapts_before else adapted(tiered.shard(gpt2(), store))
        before = store.statistics().read_bytes
        tiered.save_pretrained(model, tmp_path / "ours")
        assert store.statistics().read_bytes - before <= (1 << 20 if adapts_before else 0)
        model.save_pretrained(tmp_path / "theirs")
    for name in ("ours", "theirs"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            "README.md", "adapter_config.json", "adapter_model.safetensors",
        ]  # fmt: skip
        assert_same_tensors(tensors_in(tmp_path / name), tensors_in(tmp_path / "plain"))
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "ours")
    assert_same_tensors(again.state_dict(), adapted(gpt2()).state_dict())


SIZES = {"one file": "50GB", "shards": "220KB"}


@pytest.mark.parametrize("before", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("after", SIZES.values(), ids=SIZES)
def test_a_crash_leaves_the_earlier_checkpoint_or_none(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each change of a name, as a process that ends there leaves the folder: what transformers then makes of it."""

    class Ended(BaseException):
        pass

    old, new = gpt2(), gpt2()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1)
    real = {name: getattr(os, name) for name in ("replace", "unlink")}
    left = -1

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if ".tiered-partial" in str(args[0]) and name == "unlink":
                return real[name](*args, **kwargs)
            left -= 1
            if left < 0:
                raise Ended
            return real[name](*args, **kwargs)

        return call

    for most in range(100):
        folder = tmp_path / str(most)
        tiered.save_pretrained(old, folder, max_shard_size=before)
        with monkeypatch.context() as patch:
            patch.setattr("tiered.interop.checkpoint_folder._remove_partial", lambda folder: None)  # it is not there
            patch.setattr(os, "replace", counted("replace"))
            patch.setattr(os, "unlink", counted("unlink"))
            left = most
            try:
                tiered.save_pretrained(new, folder, max_shard_size=after)
                is_complete = True
            except Ended:
                is_complete = False
        ours: Any = None  # what is read here, which goes without an index where the shards are all there
        with debug_store(tmp_path / f"store-{most}", durable=False) as store, contextlib.suppress(UsageError):
            ours = tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, folder, store).state_dict()
        if ours is not None:
            assert_same_tensors(
                ours, (old if torch.equal(ours["lm_head.weight"], old.lm_head.weight) else new).state_dict()
            )
        try:
            found = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
        except OSError:
            assert not is_complete
        else:
            assert_same_tensors(ours, found)
            values = new if is_complete or not torch.equal(found["lm_head.weight"], old.lm_head.weight) else old
            assert_same_tensors(found, values.state_dict())
        tiered.save_pretrained(new, folder, max_shard_size=after)
        assert not list(folder.glob("*tiered-partial*"))
        assert_same_tensors(transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict(), new.state_dict())
        if is_complete:
            return
    raise AssertionError("never complete")


def test_a_full_drive_or_an_error_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiered.save_pretrained(gpt2(), tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.shard(gpt2(), store)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(CapacityError, match=r"model\.safetensors.*No space left"):
                tiered.save_pretrained(model, tmp_path / "saved")
        with pytest.raises(ValueError, match="a size such as"):
            tiered.save_pretrained(model, tmp_path / "saved", max_shard_size="much")
        with pytest.raises(UsageError, match="is a file"):
            tiered.save_pretrained(model, tmp_path / "saved" / "config.json")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before


def test_saving_waits_for_updates_and_refuses_the_middle_of_a_step(tmp_path: Path) -> None:
    ids = torch.arange(16).view(2, 8)
    with debug_store(tmp_path / "store", durable=False) as store:
        model: Any = tiered.shard(gpt2(), store)
        optimizer = tiered.AdamW(model.parameters(), lr=0.1)
        hook = model.lm_head.register_forward_pre_hook(lambda *_: tiered.save_pretrained(model, tmp_path / "middle"))
        with pytest.raises(UsageError, match=r"save_pretrained"):
            model(input_ids=ids)
        hook.remove()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        tiered.save_pretrained(model, tmp_path / "saved")
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
        assert_same_tensors(again.state_dict(), model.state_dict())


class Unsteady(Transpose):
    """A conversion that looks at values."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        assert all(float(tensor.sum()) > 0 for tensors in input_dict.values() for tensor in tensors)
        return input_dict

    @property
    def reverse_op(self) -> Any:
        return Unsteady()


def test_a_conversion_that_needs_values_is_refused_by_its_name(tmp_path: Path) -> None:
    with debug_store(tmp_path / "store", durable=False) as store:
        model: Any = tiered.shard(gpt2(), store)
        model._weight_conversions = [WeightConverter("wte.weight", "wte.weight", operations=[Unsteady()])]
        with pytest.raises(UsageError, match=r"Unsteady.*wte\.weight.*original_format=False"):
            tiered.save_pretrained(model, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
