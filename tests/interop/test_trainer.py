"""tiered.hf.Trainer: the bits of transformers' own in memory, at any budget, stopped anywhere and resumed."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerCallback

import tiered
from tests.interop.small_models import Tokens, build, history, same_state, state_of, training_arguments
from tests.rigs.warm_python import WarmPython
from tests.store.places import quick_directory
from tests.zero.training import ROOMY_NBYTES, budget_named_in, debug_store
from tiered.errors import CapacityError, UsageError
from tiered.units import KiB
from tiered.zero.gradients.stand_in import StandIn

ROOT = Path(__file__).parents[2]
TOO_SMALL_NBYTES = 32 * KiB
Outcome = tuple[list[dict[str, float]], Mapping[str, torch.Tensor]]


class StoppedError(Exception):
    """The test ends the run."""


class Stop(TrainerCallback):
    """Ends the run before a step, and counts the gradients on NVMe when one is about to be used."""

    def __init__(self, step: int = -1, *, kills: bool = False) -> None:
        self.num_on_nvme = 0
        self._step = step
        self._kills = kills

    def on_substep_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self._step:  # in the middle of a step, with gradients pending
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise StoppedError

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.num_on_nvme += sum(isinstance(parameter.grad, StandIn) for parameter in model.parameters())


def plain_trainer(name: str, output_dir: Path, **options: Any) -> transformers.Trainer:
    arguments = training_arguments(output_dir, **options)
    return transformers.Trainer(model=build(name), args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(6, 1))


@cache
def reference(name: str, **options: Any) -> Outcome:
    """Return what plain training in memory gives."""
    with quick_directory() as path:
        trainer = plain_trainer(name, path, save_strategy="no", **options)
        trainer.train()
        return history(trainer), state_of(trainer.model)


def new_trainer(name: str, output_dir: Path, stop: Stop, *, tiered_options: Any, **options: Any) -> Any:
    return tiered.hf.Trainer(
        model=build(name), args=training_arguments(output_dir, **options), train_dataset=Tokens(),
        eval_dataset=Tokens(6, 1), callbacks=[stop], tiered=tiered_options,
    )  # fmt: skip


def train(name: str, path: Path, nbytes: int, stop: Stop, *, resume: Any = None, **options: Any) -> Outcome:
    """Train in the store of ``path``, to the end or to the stop."""
    with debug_store(path / "store", nbytes) as store:
        trainer = new_trainer(name, path / "out", stop, tiered_options={"store": store}, **options)
        trainer.train(resume_from_checkpoint=resume)
        return history(trainer), state_of(trainer.model)


def smallest_budget(name: str, path: Path) -> int:
    with pytest.raises(CapacityError) as refusal:
        train(name, path, TOO_SMALL_NBYTES, Stop())
    return budget_named_in(refusal.value)


STOPS = {"in_the_first_pass": 3, "between_two": 6, "in_the_second": 8}
ROWS = [  # each model in both budgets, and both budgets with each stop
    pytest.param(name, STOPS[stop], budget == "tight", id=f"{name}-{stop}-{budget}")
    for (name, budget), stop in zip(
        itertools.product(("gpt2", "llama", "bert", "mixtral"), ("tight", "roomy")),
        itertools.cycle(STOPS),
        strict=False,
    )
]


@pytest.mark.parametrize(("name", "stop", "is_tight"), ROWS)
def test_a_run_stopped_and_resumed_has_plain_bits(name: str, stop: int, is_tight: bool, tmp_path: Path) -> None:
    nbytes = smallest_budget(name, tmp_path) if is_tight else ROOMY_NBYTES
    watch = Stop(stop)
    with pytest.raises(StoppedError):
        train(name, tmp_path, nbytes, watch)
    resumed = Stop()
    torch.manual_seed(99)
    logged, state = train(name, tmp_path, nbytes, resumed, resume=True)
    assert logged == reference(name)[0]
    assert same_state(state, reference(name)[1])
    assert any(log["grad_norm"] > 1.0 for log in logged if "grad_norm" in log), "nothing was clipped"
    if is_tight:
        assert watch.num_on_nvme and resumed.num_on_nvme


def test_the_mean_loss_between_two_logs_goes_over_the_stop(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train("bert", tmp_path, ROOMY_NBYTES, Stop(3), logging_steps=4)
    outcome = train("bert", tmp_path, ROOMY_NBYTES, Stop(), resume=True, logging_steps=4)
    assert outcome[0] == reference("bert", logging_steps=4)[0]


def run_and_die(directory: str) -> None:
    """Train, and kill this process in the middle of a step."""
    torch.set_num_threads(1)
    path = Path(directory)
    options = {"store": path / "store", "dram": ROOMY_NBYTES}
    new_trainer("gpt2", path / "out", Stop(4, kills=True), tiered_options=options).train()


def test_a_killed_run_goes_on_with_plain_bits(warm_python: WarmPython, tmp_path: Path) -> None:
    code = f"from tests.interop.test_trainer import run_and_die; run_and_die({str(tmp_path)!r})"
    process = subprocess.run([warm_python.executable, "-c", code], cwd=ROOT, env=os.environ, check=False)
    assert process.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-2", "checkpoint-4"]
    logged, state = train("gpt2", tmp_path, ROOMY_NBYTES, Stop(), resume=True)
    assert logged == reference("gpt2")[0] and same_state(state, reference("gpt2")[1])


def test_a_checkpoint_is_a_pointer_and_a_later_process_evaluates_what_the_store_holds(tmp_path: Path) -> None:
    _, state = train("gpt2", tmp_path, ROOMY_NBYTES, Stop())
    folder = tmp_path / "out" / "checkpoint-9"
    assert sorted(os.listdir(folder)) == ["tiered.json", "trainer_state.json"]
    with debug_store(tmp_path / "store") as store:
        torch.manual_seed(7)
        trainer = new_trainer("gpt2", tmp_path / "out", Stop(), tiered_options={"store": store})
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(tmp_path / "files"))
        with pytest.raises(UsageError, match="resume_from_checkpoint=True"):
            trainer.train()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "files")
    assert same_state(loaded.state_dict(), state)
    plain = plain_trainer("gpt2", tmp_path / "plain")
    plain.model.load_state_dict(state)
    assert plain.evaluate()["eval_loss"] == loss
    with pytest.raises(UsageError, match="resume_from_checkpoint=True"):
        train("gpt2", tmp_path, ROOMY_NBYTES, Stop())


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("checkpoint-4", "keeps the weights of its last commit alone"), ("checkpoint-9", ""), ("elsewhere", "no_folder")],
)
def test_a_folder_is_resumed_where_the_store_has_it(wanted: str, expected: str, tmp_path: Path) -> None:
    train("bert", tmp_path, ROOMY_NBYTES, Stop())
    if expected:
        with pytest.raises(UsageError, match=expected if wanted == "checkpoint-4" else "the run at step 9"):
            train("bert", tmp_path, ROOMY_NBYTES, Stop(), resume=str(tmp_path / "out" / wanted))
    else:
        logged, state = train("bert", tmp_path, ROOMY_NBYTES, Stop(), resume=str(tmp_path / "out" / wanted))
        assert logged == reference("bert")[0] and same_state(state, reference("bert")[1])


def test_a_folder_that_a_kill_left_without_a_commit_is_made_again(tmp_path: Path) -> None:
    """The kill came after transformers wrote the folder of step 6, and before the commit."""
    with pytest.raises(StoppedError):
        train("bert", tmp_path, ROOMY_NBYTES, Stop(4))
    out = tmp_path / "out"
    (out / "checkpoint-6").mkdir()
    (out / "checkpoint-6" / "trainer_state.json").write_text((out / "checkpoint-4" / "trainer_state.json").read_text())
    (out / "checkpoint-4" / "tiered.json").unlink()
    logged, state = train("bert", tmp_path, ROOMY_NBYTES, Stop(), resume=str(out / "checkpoint-6"))
    assert logged == reference("bert")[0] and same_state(state, reference("bert")[1])


def test_a_pointer_without_its_store_is_refused(tmp_path: Path) -> None:
    train("bert", tmp_path, ROOMY_NBYTES, Stop(), max_steps=2)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    for wanted in (True, str(tmp_path / "out" / "checkpoint-2")):
        with pytest.raises(UsageError, match="points to a commit"):
            train("bert", tmp_path, ROOMY_NBYTES, Stop(), resume=wanted)


def test_an_evaluation_before_the_resume_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train("gpt2", tmp_path, ROOMY_NBYTES, Stop(3))
    with debug_store(tmp_path / "store") as store:
        trainer = new_trainer("gpt2", tmp_path / "out", Stop(), tiered_options={"store": store})
        trainer.evaluate()
        trainer.train(resume_from_checkpoint=True)
        assert history(trainer) == reference("gpt2")[0] and same_state(state_of(trainer.model), reference("gpt2")[1])


def test_a_second_trainer_in_the_same_store_evaluates_and_keeps_the_run(tmp_path: Path) -> None:
    with debug_store(tmp_path / "store", ROOMY_NBYTES) as store:
        first = new_trainer("gpt2", tmp_path / "out", Stop(), tiered_options={"store": store}, max_steps=3)
        first.train()
        second = tiered.hf.Trainer(
            model=first.model, args=training_arguments(tmp_path / "out"), eval_dataset=Tokens(6, 1),
            tiered={"store": store},
        )  # fmt: skip
        assert second.evaluate()["eval_loss"] == first.evaluate()["eval_loss"]
        store.commit()
        committed = store.registered_state("transformers.trainer")
        assert committed is not None and committed["trainer"]["global_step"] == 3


def test_a_model_whose_parameters_were_constructed_in_the_store_is_sharded_there(tmp_path: Path) -> None:
    with debug_store(tmp_path / "store", ROOMY_NBYTES) as store:
        with tiered.construct(store):
            model = build("llama")
        trainer = tiered.hf.Trainer(
            model=model, args=training_arguments(tmp_path / "out"), train_dataset=Tokens(),
            eval_dataset=Tokens(6, 1), tiered={"store": store},
        )  # fmt: skip
        trainer.train()
        assert history(trainer) == reference("llama")[0] and same_state(state_of(model), reference("llama")[1])


@pytest.mark.parametrize("save_strategy", ["steps", "no"])
def test_a_commit_when_the_trainer_is_gone_or_has_only_evaluated_keeps_the_run(
    save_strategy: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_steps": 0, "eval_strategy": "no"}
    first = {**options, "save_strategy": save_strategy, "max_steps": 3}
    with debug_store(tmp_path / "store") as store:
        new_trainer("gpt2", tmp_path / "out", Stop(), tiered_options={"store": store}, **first).train()
        gc.collect()
        store.commit()
    outcome = train("gpt2", tmp_path, ROOMY_NBYTES, Stop(), resume=True, **options)
    assert outcome[0] == reference("gpt2", **options)[0] and same_state(outcome[1], reference("gpt2", **options)[1])
    with debug_store(tmp_path / "store") as store:
        new_trainer("gpt2", tmp_path / "out", Stop(), tiered_options={"store": store}).evaluate()
        store.commit()
        committed = store.registered_state("transformers.trainer")
        assert committed is not None and committed["trainer"]["global_step"] == 9


def test_rotation_leaves_the_last_pointer_and_the_store(tmp_path: Path) -> None:
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES) as store:
        new_trainer("bert", tmp_path / "out", Stop(), tiered_options={"store": store}, save_total_limit=1).train()
        assert store.state == {"step": 9}
    assert os.listdir(tmp_path / "out") == ["checkpoint-9"]
