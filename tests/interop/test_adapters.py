"""Adapters of PEFT that copy a part of the base, or look at gradients: as in memory, or refused with the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import tiered
from tests.interop.checkpoints import assert_same_tensors, gpt2
from tests.zero.training import debug_store
from tiered.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own

LORA: dict[str, Any] = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
COPIES: dict[str, Callable[[], peft.PeftConfig]] = {
    "a head": lambda: peft.LoraConfig(**LORA, task_type="SEQ_CLS"),
    "an embedding": lambda: peft.LoraConfig(**LORA, modules_to_save=["wpe"]),
    "a unit": lambda: peft.LoraConfig(**LORA, modules_to_save=["h.1.mlp"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["ln_1"]),
    "norms of weights": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "parts of weights": lambda: peft.LoraConfig(**LORA, init_lora_weights="pissa"),
    "a prompt": lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4),
}


def classifier() -> Any:
    config = gpt2().config
    config.num_labels, config.pad_token_id = 2, 0
    torch.manual_seed(2)
    return transformers.GPT2ForSequenceClassification(config)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        ids = torch.randint(1, 256, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=torch.tensor([0, 1, 1, 0])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def is_mlp(name: str, module: nn.Module) -> bool:
    return name == "transformer.h.1.mlp"


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize(("kind", "adapts_before"), [("a head", True), *((kind, False) for kind in COPIES)])
def test_additions_to_a_sharded_base_are_trained_and_resumed(kind: str, adapts_before: bool, tmp_path: Path) -> None:
    """Also what it copies from the base, or keeps outside of it."""

    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, COPIES[kind]())

    plain = adapted(classifier())
    expected = train(plain, torch.optim.AdamW(trained(plain), lr=1e-2, fused=True), range(4))
    found: list[float] = []
    for until in (2, 4):
        with debug_store(tmp_path) as store:
            if adapts_before:
                model = tiered.shard(adapted(classifier()), store)
            else:
                model = adapted(tiered.shard(classifier().requires_grad_(False), store, unit=is_mlp))
            optimizer = tiered.AdamW(trained(model), lr=1e-2, store=store)
            step = store.resume().get("step", 0)
            found += train(model, optimizer, range(step, until))
            store.commit({"step": until})
            if until == 4:
                assert_same_tensors(model.state_dict(), plain.state_dict())
    assert found == expected


class Head(nn.Module):
    """A head whose forward goes through a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x)


def test_a_copy_for_peft_has_nothing_of_the_sharded_module(tmp_path: Path) -> None:
    """Neither a hook nor a method that would run with the values of the original one."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Head())
    calls: list[str] = []
    plain[1].register_forward_hook(lambda *_: calls.append("theirs"))
    config = {"target_modules": ["0"], "modules_to_save": ["1"]}
    expected = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(**config)).base_model.model[1]
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(plain, store, unit=Head, activations="recompute")
        with pytest.raises(UsageError, match="refused deepcopy"):
            copy.deepcopy(model[1])
        made = peft.get_peft_model(model, peft.LoraConfig(**config)).base_model.model[1].modules_to_save["default"]
        of_torch = expected.modules_to_save["default"]
        assert vars(made).keys() == vars(of_torch).keys()
        assert not any(type(each) is not nn.Parameter for each in made.parameters())
        with torch.no_grad():
            made.layer.weight.fill_(2)
        calls.clear()
        made(torch.ones(4)).sum().backward()
        assert calls == ["theirs"] and made.layer.weight.grad is not None
        assert model[1].original_module.layer.weight.grad is None


@pytest.mark.parametrize("when", ["after step", "before step"])
def test_adalora_prunes_adapters_that_were_added_to_a_sharded_base(when: str, tmp_path: Path) -> None:
    def adapted(model: Any) -> Any:
        torch.manual_seed(3)
        ranks = {"init_r": 6, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 6}
        return peft.get_peft_model(
            model, peft.AdaLoraConfig(**ranks, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        )

    def losses(model: Any, optimizer: Any) -> list[float]:
        found, ids = [], torch.arange(32).view(2, 16)
        for step in range(7):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            if when == "before step":
                model.base_model.update_and_allocate(step)
            optimizer.step()
            if when == "after step":
                model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = adapted(gpt2())
    expected = losses(plain, torch.optim.AdamW(trained(plain), lr=1e-2, fused=True))
    with debug_store(tmp_path / "sharded", durable=False) as store:
        model = tiered.shard(adapted(gpt2()), store)
        with pytest.raises(UsageError, match=r"AdaLora.* after .* peft\.get_peft_model\(tiered\.shard\("):
            losses(model, tiered.AdamW(trained(model), lr=1e-2))
        with pytest.raises(UsageError, match=r"AdaMSS"):  # it would prune nothing, in silence; its import takes 5 s
            exec("p.grad is not None", {"__name__": "peft.tuners.adamss.layer", "p": trained(model)[0]})
    with debug_store(tmp_path / "added") as store:
        model = adapted(tiered.shard(gpt2(), store))
        assert losses(model, tiered.AdamW(trained(model), lr=1e-2, store=store)) == expected
        assert_same_tensors(model.state_dict(), plain.state_dict())
