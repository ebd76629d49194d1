"""The options of tiered.hf.Trainer, each with the bits that plain training has, and those that are refused by name."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import TrainerCallback

import tiered
from tests.interop.small_models import Tokens, build, history, same_state, state_of, training_arguments
from tests.interop.test_trainer import Outcome, Stop, StoppedError, reference
from tests.zero.test_frozen import keys_written
from tests.zero.training import ROOMY_NBYTES, debug_store
from tiered.errors import UsageError
from tiered.interop.hugging_face import trainer as trainer_module

# peft and the older words of TrainingArguments
pytestmark = [pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")]


class AdamWOverMasters(torch.optim.Optimizer):
    """Fused AdamW in memory; a bf16 parameter has an fp32 master, which starts from the value before the cast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in model.parameters():
            self.masters[parameter] = parameter.detach().clone() if dtype != torch.float32 else parameter
            parameter.data = parameter.data.to(dtype)
        self.adamw = torch.optim.AdamW(self.masters.values(), lr=1e-2, fused=True)
        super().__init__(model.parameters(), {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the masters by the gradients of the parameters, and the parameters by them."""
        self.adamw.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for parameter, master in self.masters.items():
            master.grad = parameter.grad if parameter.grad is None else parameter.grad.to(master.dtype)
        self.adamw.step()
        for parameter, master in self.masters.items():
            if parameter is not master:
                parameter.copy_(master)


BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,
    "eval_steps": 2,
}


def train(
    build_model: Callable[[], Any], path: Path, *, tiered_options: Any = None, callbacks: Any = (), resume: Any = None,
    look: Callable[[Any], Any] = lambda trainer: None, **options: Any,
) -> Outcome:  # fmt: skip
    """Train by tiered.hf.Trainer in a store of ``path``; ``look`` sees the trainer at the end."""
    with debug_store(path / "store", durable=(tiered_options or {}).pop("durable", True)) as store:
        trainer = tiered.hf.Trainer(
            model=build_model(), args=training_arguments(path / "out", **options), train_dataset=Tokens(),
            eval_dataset=Tokens(6, 1), callbacks=list(callbacks), tiered={"store": store, **(tiered_options or {})},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        look(trainer)
        outcome = history(trainer), state_of(trainer.model)
        del trainer
        gc.collect()  # it may go before its store does
        return outcome


def train_in_memory(build_model: Callable[[], Any], path: Path, *, callbacks: Any = (), **options: Any) -> Outcome:
    trainer = transformers.Trainer(
        model=build_model(), args=training_arguments(path / "plain", **options), train_dataset=Tokens(),
        eval_dataset=Tokens(6, 1), callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return history(trainer), state_of(trainer.model)


def same(left: Outcome, right: Outcome) -> bool:
    return left[0] == right[0] and same_state(left[1], right[1])


def without_norms(outcome: Outcome) -> Outcome:
    return [{k: v for k, v in log.items() if k != "grad_norm"} for log in outcome[0]], outcome[1]


def test_updates_in_backward_know_the_last_batch_of_a_step(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.0}
    expected = train_in_memory(lambda: build("llama"), tmp_path, **options)
    found = train(lambda: build("llama"), tmp_path, tiered_options={"update": "backward"}, **options)
    assert not any("grad_norm" in log for log in found[0])
    assert same(found, without_norms(expected))


def test_bf16_means_parameters_in_bf16_with_fp32_masters(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.0, "weight_decay": 0.0}
    model = build("gpt2")
    optimizer = AdamWOverMasters(model, torch.bfloat16)
    optimizer.adamw.param_groups[0]["weight_decay"] = 0.0
    trainer = transformers.Trainer(
        model=model, args=training_arguments(tmp_path / "plain", **options, save_strategy="no"),
        train_dataset=Tokens(), eval_dataset=Tokens(6, 1), optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train()
    found = train(lambda: build("gpt2"), tmp_path, bf16=True, **options)
    assert same(without_norms(found), without_norms((history(trainer), state_of(model))))
    norms = [log["grad_norm"] for log in found[0] if "grad_norm" in log]
    assert any(torch.tensor(norm).bfloat16().item() != norm for norm in norms), "norms were rounded to bf16"


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_gradient_checkpointing(kind: str, tmp_path: Path) -> None:
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": kind == "reentrant"},
    }
    expected = train_in_memory(lambda: build("gpt2"), tmp_path, **options)
    assert same(train(lambda: build("gpt2"), tmp_path, **options), expected)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_the_best_weights_are_loaded_at_the_end_and_the_run_stays_that_of_the_last_step(
    name: str, tmp_path: Path
) -> None:
    options = BEST

    def look(trainer: Any) -> None:
        assert trainer.state.best_global_step < 9
        assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric

    _, best = train(lambda: build(name), tmp_path, look=look, **options)
    if name == "gpt2":  # transformers reads Mixtral's files by other names than it writes
        assert same_state(best, train_in_memory(lambda: build(name), tmp_path, **options)[1])
    assert "model.safetensors" in os.listdir(tmp_path / "out" / "checkpoint-2")
    plain = train_in_memory(lambda: build(name), tmp_path, eval_steps=2, save_strategy="no")
    found = train(lambda: build(name), tmp_path, resume=True, eval_steps=2)
    assert same_state(found[1], plain[1])


def lora() -> Any:
    torch.manual_seed(4)
    return get_peft_model(build("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


class WrittenKeys(TrainerCallback):
    """Notes the keys that each commit wrote."""

    def __init__(self) -> None:
        self.written: list[set[str]] = []
        self._before: dict[str, int] = {}

    def on_save(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        now = keys_written(optimizer._store)
        self.written.append({key for key, number in now.items() if self._before.get(key) != number})
        self._before = now


def test_adapters_alone_are_written_and_kept(tmp_path: Path) -> None:
    expected = train_in_memory(lora, tmp_path, save_strategy="no")
    keys = WrittenKeys()
    with pytest.raises(StoppedError):
        train(lora, tmp_path, callbacks=[Stop(7), keys])
    frozen = {key for key in keys.written[0] if ".frozen" in key}
    assert frozen and not frozen & set().union(*keys.written[1:])
    found = train(lora, tmp_path, resume=True, look=lambda trainer: trainer.save_model(str(tmp_path / "adapters")))
    assert same(found, expected)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*os.listdir(tmp_path / "adapters")}
    assert "model.safetensors" not in os.listdir(tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(build("llama"), str(tmp_path / "adapters"))
    assert same_state(loaded.state_dict(), expected[1])


def test_without_commits_only_files_are_kept(tmp_path: Path) -> None:
    ours = {"durable": False}
    with pytest.raises(UsageError, match="save_only_model=True"):
        train(lambda: build("bert"), tmp_path, tiered_options=dict(ours))
    found = train(lambda: build("bert"), tmp_path, tiered_options=dict(ours), save_only_model=True)
    assert same(found, reference("bert"))
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out" / "checkpoint-9")
    assert same_state(loaded.state_dict(), found[1])


@pytest.mark.parametrize(
    ("options", "ours", "expected"),
    [
        ({"torch_compile": True}, {}, "torch_compile=False"),
        ({"bf16_full_eval": True}, {}, "expected bf16=True"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"optim": "adafactor"}, {}, "adamw_torch_fused"),
        ({"optim": "adamw_8bit"}, {}, 'state="compact"'),
        ({}, {"update": "backward"}, "max_grad_norm=0"),
        ({}, {"store": "checkpoint-3/store"}, "save_total_limit"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(options: Any, ours: Any, expected: str, tmp_path: Path) -> None:
    arguments = training_arguments(tmp_path / "out", **options)
    with pytest.raises(UsageError, match=expected):
        tiered.hf.Trainer(
            model=build("bert"), args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(6, 1),
            tiered=tiered.hf.Arguments(**{"store": tmp_path / "store", "dram": ROOMY_NBYTES, **ours}),
        )  # fmt: skip


def test_objects_of_a_model_in_memory_are_refused(tmp_path: Path) -> None:
    model, arguments = build("bert"), training_arguments(tmp_path, eval_strategy="no")
    ours = {"store": tmp_path / "store", "dram": ROOMY_NBYTES}
    adamw = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match=r"TrainingArguments\(optim=, lr_scheduler_type=\)"):
        tiered.hf.Trainer(model=model, args=arguments, tiered=ours, optimizers=(adamw, None))
    with pytest.raises(UsageError, match="expected model="):
        tiered.hf.Trainer(model_init=lambda: build("bert"), args=arguments, tiered=ours)
    with pytest.raises(UsageError, match="Adafactor"):
        chosen = (transformers.Adafactor, {})
        tiered.hf.Trainer(model=model, args=arguments, tiered=ours, optimizer_cls_and_kwargs=chosen)
    assert not any((tmp_path / "store").glob("*")), "a store was made"


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="did you mean 'dram'"):
        tiered.hf.Arguments.of({"store": "x", "drams": 1})
    for make in (tiered.hf.Arguments, lambda **given: tiered.hf.Arguments.of(given)):
        with pytest.raises(UsageError, match=r"Arguments\(micro_batches=\) was removed .* per_device_train_batch_size"):
            make(store="x", micro_batches=True)
    for wrong in ({"update": "later"}, {"param_dtype": "int4"}, {"store": ()}):
        with pytest.raises(ValueError, match="expected"):
            tiered.hf.Arguments(**{"store": "x", **wrong})


def test_a_store_that_was_opened_takes_no_options_of_one(tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES) as store:
        with pytest.raises(UsageError, match=r"expected dram at tiered\.Store"):
            tiered.hf.Arguments(store=store, dram="1GiB")
        assert tiered.hf.Arguments(store=store).store is store
    with tiered.hf.Arguments(store=tmp_path / "other", dram="8MiB", rank_deadline=5).open() as store:
        assert store.rank_deadline == 5.0


class Masking:
    """A collator that draws the tokens to hide from the process's generator, as for a masked language model."""

    def __call__(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens = torch.stack([item["input_ids"] for item in items])
        is_hidden = torch.rand(tokens.shape) < 0.4
        return {"input_ids": tokens.masked_fill(is_hidden, 0), "labels": tokens.masked_fill(~is_hidden, -100)}


@pytest.mark.parametrize(("stop", "release"), [(3, "now"), (8, "now"), (8, "0.2.0")])
def test_batches_that_a_collator_draws_are_those_of_the_undisturbed_run(
    stop: int, release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is made ahead of the commit; transformers' own resume draws others. 0.2.0 committed less of a pass."""
    if release == "0.2.0":
        facts_of = trainer_module._run_of

        def facts_as_before(trainer: Any) -> Any:
            run = facts_of(trainer)
            batches = run.facts.pop("batches", None) or {"made": []}
            run.facts["made"] = [each["process"] for each in batches["made"]]
            return run

        monkeypatch.setattr(trainer_module, "_run_of", facts_as_before)

    def trainer_of(cls: Any, **options: Any) -> Any:
        return cls(
            model=build("bert"), args=training_arguments(tmp_path / "out"), train_dataset=Tokens(),
            eval_dataset=Tokens(6, 1), data_collator=Masking(), **options,
        )  # fmt: skip

    plain = trainer_of(transformers.Trainer)
    plain.args.save_strategy = "no"
    plain.train()
    for callbacks, resume in (([Stop(stop)], None), ([], True)):
        with debug_store(tmp_path / "store") as store:
            ours = trainer_of(tiered.hf.Trainer, tiered={"store": store}, callbacks=callbacks)
            with contextlib.suppress(StoppedError):
                ours.train(resume_from_checkpoint=resume)
            state = state_of(ours.model) if resume else {}
    assert history(ours) == history(plain) and same_state(state, state_of(plain.model))


class OneGroup(transformers.Trainer):
    """Has an optimizer of its own, of one group, as a run of 0.2.0 with a Callback had."""

    optimizer_class: Any = functools.partial(torch.optim.AdamW, fused=True)

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = self.optimizer_class(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        return self.optimizer


class OneGroupOfOurs(tiered.hf.TrainerMixin, OneGroup):
    optimizer_class = tiered.AdamW


def test_a_trainer_with_an_optimizer_of_its_own_is_resumed(tmp_path: Path) -> None:
    options = {"train_dataset": Tokens(), "eval_dataset": Tokens(6, 1)}
    plain = OneGroup(build("gpt2"), training_arguments(tmp_path / "plain", save_strategy="no"), **options)
    plain.train()
    for callbacks, resume in (([Stop(4)], None), ([], True)):
        with debug_store(tmp_path / "store") as store:
            arguments = training_arguments(tmp_path / "out")
            ours = OneGroupOfOurs(build("gpt2"), arguments, tiered={"store": store}, callbacks=callbacks, **options)
            with contextlib.suppress(StoppedError):
                ours.train(resume_from_checkpoint=resume)
            state = state_of(ours.model) if resume else {}
    assert history(ours) == history(plain) and same_state(state, state_of(plain.model))


def test_adapters_over_a_base_that_is_read_in_its_files_are_trained_and_resumed(tmp_path: Path) -> None:
    """The model comes to the Trainer sharded, and the adapters were added since."""
    build("llama").save_pretrained(tmp_path / "base")

    def adapted(store: Any) -> Any:
        cls, base = transformers.LlamaForCausalLM, tmp_path / "base"
        model = cls.from_pretrained(base) if store is None else tiered.hf.from_pretrained(cls, base, store, **options)
        torch.manual_seed(4)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))

    options = {"frozen": "in place"}
    expected = train_in_memory(lambda: adapted(None), tmp_path, save_strategy="no")
    for callbacks, resume in (([Stop(7)], None), ([], True)):
        with debug_store(tmp_path / "store", external=[tmp_path / "base"]) as store:
            trainer = tiered.hf.Trainer(
                model=adapted(store), args=training_arguments(tmp_path / "out"), train_dataset=Tokens(),
                eval_dataset=Tokens(6, 1), callbacks=callbacks, tiered={"store": store},
            )  # fmt: skip
            with contextlib.suppress(StoppedError):
                trainer.train(resume_from_checkpoint=resume)
            found = history(trainer), state_of(trainer.model) if resume else {}
    assert same(found, expected)


@pytest.mark.parametrize(
    ("ours", "options", "expected"),
    [
        ({}, {"bf16": True}, r"sharded as torch\.float32; expected param_dtype"),
        ({"hold": 0}, {}, r"Arguments\(hold=\) for a model that is sharded"),
        ({"store": "other"}, {}, "with that open store"),
    ],
)
def test_a_sharded_model_that_does_not_fit_the_arguments_is_refused(
    ours: Any, options: Any, expected: str, tmp_path: Path
) -> None:
    with debug_store(tmp_path / "store", durable=False) as store:
        model = tiered.shard(build("bert"), store)
        arguments = training_arguments(tmp_path, save_strategy="no", **options)
        other = {"store": tmp_path / "other", "dram": ROOMY_NBYTES}
        ours = other if "store" in ours else {"store": store, **ours}
        with pytest.raises(UsageError, match=expected):
            tiered.hf.Trainer(model=model, args=arguments, eval_dataset=Tokens(), tiered=ours)
