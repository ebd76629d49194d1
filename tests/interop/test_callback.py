"""tiered.hf.Callback: a plain Trainer over a sharded model commits where it saves, and resumes with the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiered
from tests.interop.small_models import Tokens, build, history, same_state, state_of, training_arguments
from tests.interop.test_trainer import Outcome, Stop, StoppedError, reference
from tests.pairwise import pairwise
from tests.zero.training import ROOMY_NBYTES, debug_store
from tiered.errors import UsageError


def train(
    path: Path, stop: Stop, *, name: str = "gpt2", resume: bool = False, every: int | None = None, **options: Any
) -> Outcome:
    """Train by a plain Trainer in the store of ``path``, to the end or to the stop."""
    with debug_store(path / "store", ROOMY_NBYTES) as store:
        model = tiered.shard(build(name), store)
        decayed = transformers.Trainer.get_decay_parameter_names(None, model)
        groups = [
            {"params": [p for n, p in model.named_parameters() if (n in decayed) is is_decayed], "weight_decay": decay}
            for is_decayed, decay in ((True, 0.1), (False, 0.0))
        ]
        optimizer = tiered.AdamW(groups, lr=1e-2)
        trainer = transformers.Trainer(
            model=model, args=training_arguments(path / "out", **options), train_dataset=Tokens(),
            eval_dataset=Tokens(6, 1), optimizers=(optimizer, None),
            callbacks=[stop, tiered.hf.Callback(store, every=every)],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return history(trainer), state_of(model)


def plain_bits(outcome: Outcome, name: str) -> bool:
    logged, state = reference(name)
    return outcome[0] == logged and same_state(outcome[1], state)


@pairwise(
    name=("gpt2", "bert"),
    stop={"in_the_first_pass": 3, "between_two": 6, "in_the_second": 8},
    every={"where_it_saves": None, "each_step": 1, "each_third": 3},
)
def test_a_plain_trainer_resumes_with_plain_bits(name: str, stop: int, every: int | None, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train(tmp_path, Stop(stop), name=name, every=every)
    folder = tmp_path / "out" / "checkpoint-2"
    assert {"model.safetensors", "tiered.json", "trainer_state.json"} <= {*os.listdir(folder)}
    assert not {"optimizer.pt", "scheduler.pt", "rng_state.pth"} & {*os.listdir(folder)}
    torch.manual_seed(99)
    assert plain_bits(train(tmp_path, Stop(), name=name, every=every, resume=True), name)


def test_the_best_weights_are_loaded_at_the_end_and_the_run_stays_that_of_the_last_step(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    _, state = train(tmp_path, Stop(), max_steps=4, **best, **options)
    files = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "checkpoint-2")
    assert same_state(files.state_dict(), state), "the best step is not another one than the last"
    logged, state = train(tmp_path, Stop(), resume=True, **options)
    assert logged == reference("gpt2", **options)[0] and same_state(state, reference("gpt2", **options)[1])


def test_a_second_trainer_over_the_same_model_goes_on_with_the_run(tmp_path: Path) -> None:
    """As in a notebook, where a cell is run again."""
    with debug_store(tmp_path / "store", ROOMY_NBYTES) as store:
        model = tiered.shard(build("gpt2"), store)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
        for max_steps in (4, 6):
            trainer = transformers.Trainer(
                model=model, args=training_arguments(tmp_path / "out", max_steps=max_steps), train_dataset=Tokens(),
                eval_dataset=Tokens(6, 1), optimizers=(optimizer, None), callbacks=[tiered.hf.Callback(store)],
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=store.generation > 0)
            committed = store.registered_state("transformers.trainer")
            assert committed is not None and committed["trainer"]["global_step"] == max_steps


def test_folders_beyond_the_last_commit_are_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end comes after transformers wrote the folder of step 4, and before the commit."""

    class Dies(tiered.hf.Callback):
        def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if state.global_step == 4:
                raise StoppedError
            super().on_save(args, state, control, **objects)

    with monkeypatch.context() as patch:
        patch.setattr(tiered.hf, "Callback", Dies)
        with pytest.raises(StoppedError):
            train(tmp_path, Stop())
    assert plain_bits(train(tmp_path, Stop(), resume=True), "gpt2")
    assert "checkpoint-4.uncommitted" in os.listdir(tmp_path / "out")


def test_a_run_that_is_not_asked_for_is_refused(tmp_path: Path) -> None:
    train(tmp_path, Stop())
    with pytest.raises(UsageError, match=r"begins at step 0, and .* holds the run at step 9"):
        train(tmp_path, Stop())
    with tiered.Store(tmp_path / "scratch", dram=ROOMY_NBYTES, durable=False) as store:
        with pytest.raises(UsageError, match="durable"):
            tiered.hf.Callback(store)


def test_the_best_weights_are_not_committed_as_the_last_ones(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "eval_steps": 2}
    _, state = train(tmp_path, Stop(), **best)
    with debug_store(tmp_path / "store", ROOMY_NBYTES) as store:
        model = tiered.shard(build("gpt2"), store)
        store.resume()
        assert not same_state(state_of(model), state)
        assert same_state(state_of(model), reference("gpt2", eval_steps=2)[1])
