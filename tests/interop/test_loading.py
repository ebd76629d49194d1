"""tiered.hf.from_pretrained gives the model that transformers gives, in a store, read a parameter at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import WeightConverter

import tiered
from tests.interop.checkpoints import MODELS, assert_same_tensors, bert, gpt2, mixtral, tensors_in
from tests.interop.test_saving import Unsteady
from tests.zero.training import debug_store
from tiered.errors import UsageError
from tiered.tools.export import import_files

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own

AUTO = {
    "gpt2": transformers.AutoModelForCausalLM,
    "mixtral": transformers.AutoModelForCausalLM,
    "bert": transformers.AutoModelForMaskedLM,
}


def losses(model: Any, optimizer: Any, num_steps: int = 3, first: int = 0) -> list[torch.Tensor]:
    found = []
    for step in range(first, first + num_steps):
        ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_to_the_losses_of_the_model_in_memory(name: str, tmp_path: Path) -> None:
    MODELS[name]().save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    plain = AUTO[name].from_pretrained(tmp_path / "saved")
    expected = plain.state_dict()
    with debug_store(tmp_path / "store") as store:
        model = tiered.hf.from_pretrained(AUTO[name], tmp_path / "saved", store)
        assert type(model) is type(plain) and not model.training
        assert model.config.to_dict() == plain.config.to_dict()
        assert_same_tensors(model.state_dict(), expected)
        for each, other in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(each, other)
        theirs = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
        assert all(map(torch.equal, losses(model, tiered.AdamW(model.parameters(), lr=1e-2)), theirs))
        store.commit({"step": 3})
    with debug_store(tmp_path / "store") as store:
        model = tiered.hf.from_pretrained(type(plain), tmp_path / "saved", store)
        assert store.resume() == {"step": 3}
        assert_same_tensors(model.state_dict(), plain.state_dict())
        tiered.save_pretrained(model, tmp_path / "again")
    again = AUTO[name].from_pretrained(tmp_path / "again")
    assert_same_tensors(again.state_dict(), plain.state_dict())


def test_masters_begin_with_the_values_of_the_files(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "saved")
    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.hf.from_pretrained(
            transformers.GPT2LMHeadModel, tmp_path / "saved", store, param_dtype=torch.bfloat16
        )
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
        assert model.lm_head.weight.dtype == torch.bfloat16
        masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
    assert all(map(torch.equal, masters, (p.detach() for p in gpt2().parameters())))


def test_a_head_that_the_files_lack_is_drawn_as_by_transformers(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "saved")
    auto = transformers.AutoModelForSequenceClassification
    torch.manual_seed(5)
    plain = auto.from_pretrained(tmp_path / "saved", num_labels=3)
    with debug_store(tmp_path / "store", durable=False) as store:
        torch.manual_seed(5)
        model = tiered.hf.from_pretrained(auto, tmp_path / "saved", store, num_labels=3)
        assert_same_tensors(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("num_tokens", [259, 200])
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_tokens_are_added_as_the_refusal_of_a_resize_says(name: str, num_tokens: int, tmp_path: Path) -> None:
    """Where the head is tied to the embedding, and where it is not; a resume takes the same lines."""
    MODELS[name]().save_pretrained(tmp_path / "saved")
    plain = AUTO[name].from_pretrained(tmp_path / "saved")
    torch.manual_seed(7)
    plain.resize_token_embeddings(num_tokens)
    theirs = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), 4)
    with debug_store(tmp_path / "other", durable=False) as store:
        model = tiered.hf.from_pretrained(AUTO[name], tmp_path / "saved", store)
        with pytest.raises(UsageError, match=r"from_pretrained\(num_tokens=N\), or resize_token_embeddings"):
            model.resize_token_embeddings(num_tokens)
        with pytest.raises(UsageError, match=r"num_tokens=N"), tiered.unsharded(model):
            model.resize_token_embeddings(num_tokens)
        assert_same_tensors(model.state_dict(), AUTO[name].from_pretrained(tmp_path / "saved").state_dict())
    found = []
    for first, last in ((0, 2), (2, 4)):
        with debug_store(tmp_path / "store") as store:
            torch.manual_seed(7)
            model = tiered.hf.from_pretrained(AUTO[name], tmp_path / "saved", store, num_tokens=num_tokens)
            assert model.config.vocab_size == num_tokens and model.get_input_embeddings().num_embeddings == num_tokens
            optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
            assert store.resume().get("step", 0) == first
            found += losses(model, optimizer, last - first, first)
            store.commit({"step": last})
            if last == 4:
                assert_same_tensors(model.state_dict(), plain.state_dict())
    assert all(map(torch.equal, found, theirs))


def adapted(model: Any) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def test_a_base_in_place_is_never_written(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    plain = adapted(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved"))
    theirs = losses(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True))
    for frozen, external in ((True, []), (True, [tmp_path / "saved"]), ("in place", [tmp_path / "saved"])):
        with debug_store(tmp_path / "store", external=external, durable=False) as store:
            base = tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "saved", store, frozen=frozen)
            model = adapted(base)
            optimizer = tiered.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, store=store)
            assert all(map(torch.equal, losses(model, optimizer), theirs))
            base_keys = [record for record in store.records() if record.name.startswith("model/parameters")]
            assert base_keys
            in_place = [e for e in store.working_set.entries.used() if e.row is not None and e.row.ranges]
            assert len(in_place) == (len(base_keys) if external else 0)


def with_adapters(base: Path, folder: Path, **options: Any) -> None:
    """Save the model of ``base`` with adapters of PEFT, which are not at their beginning, to ``folder``."""
    torch.manual_seed(3)
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, **options)
    adapted = peft.get_peft_model(transformers.GPT2LMHeadModel.from_pretrained(base), lora)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(folder)


@pytest.mark.parametrize(
    ("place", "size", "options"),
    [
        ("beside", "50GB", {}),
        ("beside", "200KB", {"modules_to_save": ["wpe"]}),  # an index
        ("alone", "200KB", {}),
        ("below", "50GB", {"modules_to_save": ["wpe"]}),
    ],
)
def test_adapters_in_a_folder_are_loaded_with_their_base(
    place: str, size: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    gpt2().save_pretrained(base, max_shard_size=size)
    adapters = {"beside": base, "alone": tmp_path / "adapters", "below": base / "adapters"}[place]
    with_adapters(base, adapters, **options)
    folder, below = (base, {"adapter_kwargs": {"subfolder": "adapters"}}) if place == "below" else (adapters, {})
    auto = transformers.AutoModelForCausalLM
    plain = auto.from_pretrained(folder, **below).requires_grad_(False)
    trained = [parameter.requires_grad_() for name, parameter in plain.named_parameters() if ".default" in name]
    theirs = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    for generation in (0, 1):
        with debug_store(tmp_path / "run", external=[base]) as store:
            model = tiered.hf.from_pretrained(auto, folder, store, frozen="in place", **below)
            assert not any(p.requires_grad for name, p in model.named_parameters() if "modules_to_save" not in name)
            trained = [parameter.requires_grad_() for name, parameter in model.named_parameters() if ".default" in name]
            ours = tiered.AdamW(trained, lr=1e-2, store=store)
            assert store.resume() == ({"job": "tuned"} if generation else {})
            assert_same_tensors(model.state_dict(), plain.state_dict())
            assert all(map(torch.equal, losses(model, ours, 2), losses(plain, theirs, 2)))
            store.commit({"job": "tuned"})


def test_adapters_whose_base_is_not_here_are_refused_with_the_way(tmp_path: Path) -> None:
    base, folder, auto = tmp_path / "base", tmp_path / "adapters", transformers.AutoModelForCausalLM
    gpt2().save_pretrained(base)
    with_adapters(base, folder)
    plain = auto.from_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/base"}))
    with debug_store(tmp_path / "run", durable=False) as store:
        with pytest.raises(
            UsageError, match=r"base is 'someone/base'.*BASE_FOLDER.*model\.load_adapter\('/.*adapters'"
        ):
            tiered.hf.from_pretrained(auto, folder, store)
        (base / "config.json").rename(folder / "config.json")
        with pytest.raises(UsageError, match=r"no safetensors file there"):  # a base drawn at random, else
            tiered.hf.from_pretrained(auto, folder, store)
        (folder / "config.json").rename(base / "config.json")
        model = tiered.hf.from_pretrained(auto, base, store)
        model.load_adapter(str(folder))
        assert_same_tensors(model.state_dict(), plain.state_dict())


def test_adapters_that_an_index_leaves_out_are_not_left_out(tmp_path: Path) -> None:
    """Of those who take names as they are: ``shard`` lacks them in the model, and an import has them."""
    gpt2().save_pretrained(tmp_path / "base", max_shard_size="200KB")
    with_adapters(tmp_path / "base", tmp_path / "base")
    with debug_store(tmp_path / "run", durable=False) as store:
        with pytest.raises(UsageError, match=r"unexpected base_model.*lora_A.*tiered\.hf\.from_pretrained"):
            tiered.shard(gpt2(), store, weights=tmp_path / "base")
    import_files(tmp_path / "base", tmp_path / "imported")
    with tiered.Store(tmp_path / "imported", dram="64MiB", mode="r") as store:
        assert {*tensors_in(tmp_path / "base")} == {*store}


def test_what_cannot_be_read_in_place_is_refused_by_name(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path / "mixtral")
    gpt2().save_pretrained(tmp_path / "gpt2")
    auto = transformers.AutoModelForCausalLM
    with debug_store(tmp_path / "store", external=[tmp_path / "mixtral", tmp_path / "gpt2"], durable=False) as store:
        with pytest.raises(UsageError, match=r"experts.* is computed from tensors of the files.*expected frozen=True"):
            tiered.hf.from_pretrained(auto, tmp_path / "mixtral", store, frozen="in place")
        with pytest.raises(UsageError, match=r"wte\.weight is computed from tensors of the files, by a cast"):
            tiered.hf.from_pretrained(auto, tmp_path / "gpt2", store, frozen="in place", dtype=torch.bfloat16)
        with pytest.raises(UsageError, match=r"wte\.weight is float32 there, and torch\.bfloat16 was asked for"):
            tiered.hf.from_pretrained(auto, tmp_path / "gpt2", store, frozen="in place", param_dtype=torch.bfloat16)
        assert len(store) == 0
    with debug_store(tmp_path / "other", durable=False) as store:
        with pytest.raises(UsageError, match=r"external"):
            tiered.hf.from_pretrained(auto, tmp_path / "gpt2", store, frozen="in place")


def test_a_conversion_that_needs_values_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    saved = gpt2()
    saved.transformer.wte.weight.data.abs_()
    saved.save_pretrained(tmp_path / "saved")
    unsteady = [WeightConverter("wte.weight", "wte.weight", operations=[Unsteady()])]
    monkeypatch.setattr(modeling_utils, "get_model_conversion_mapping", lambda *_: unsteady)
    with debug_store(tmp_path / "store", durable=False) as store:
        with pytest.raises(UsageError, match=r"Unsteady.*wte\.weight.*tiered\.construct"):
            tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "saved", store)
        assert len(store) == 0
        with tiered.construct(store):
            model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
        found = tiered.shard(model, store).state_dict()
        assert torch.equal(found["transformer.wte.weight"], saved.transformer.wte.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto"}, r"device_map=.*tiered\.shard"),
        ({"frozen": "here"}, r"frozen='here'"),
        ({"unit": "h.7"}, "h.7"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "saved")
    with debug_store(tmp_path / "store", durable=False) as store:
        with pytest.raises((UsageError, ValueError, TypeError), match=message):
            tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "saved", store, **options)
        assert len(store) == 0


def test_a_folder_without_all_its_files_is_refused(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "saved", max_shard_size="200KB")
    (tmp_path / "saved" / "model-00002-of-00003.safetensors").unlink()
    with debug_store(tmp_path / "store", durable=False) as store:
        with pytest.raises(UsageError, match=r"lacks model-00002-of-00003\.safetensors"):
            tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "saved", store)
        with pytest.raises(UsageError, match=r"no safetensors file there"):
            tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "none", store)
        (tmp_path / "saved" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
        with pytest.raises(UsageError, match=r"is no index of safetensors files"):
            tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, tmp_path / "saved", store)


def test_tied_weights_of_an_empty_model_of_accelerate_are_tied_again(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "saved")
    expected = gpt2().state_dict()
    with accelerate.init_empty_weights():
        model = transformers.GPT2LMHeadModel(gpt2().config)
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    assert model.lm_head.weight is not model.transformer.wte.weight
    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.shard(model, store, weights=tmp_path / "saved")
        assert model.lm_head.weight is model.transformer.wte.weight
        assert_same_tensors(model.state_dict(), expected)


def test_a_hint_at_a_missing_name_is_the_likely_one_or_none(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    del tensors["transformer.h.0.mlp.c_fc.weight"]
    tensors["transformer.h.1.mlp.dense.weight"] = tensors.pop("transformer.h.1.mlp.c_fc.weight")
    save_file(tensors, tmp_path / "other.safetensors")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(gpt2().config)
    with debug_store(tmp_path / "store", durable=False) as store:
        with pytest.raises(UsageError) as caught:
            tiered.shard(model, store, weights=tmp_path / "other.safetensors")
    message = str(caught.value)
    assert "missing transformer.h.0.mlp.c_fc.weight;" in message
    assert "missing transformer.h.1.mlp.c_fc.weight (is it transformer.h.1.mlp.dense.weight?)" in message
