"""The stores and runs of the second release stay readable: each archive opens, verifies and resumes with its bits.

A refusal counts where its message has a remedy, which the test of the refusal carries out. expected.json has what the
release itself read. A resumed run is compared with plain PyTorch on this machine, which starts from the archive's own
tensors: the last bits of a loss are the processor's. Nothing here is below the public interface and the commands, so a
rebuild of the house leaves these tests as they are; programs.py tells where the archives come from.
"""

from __future__ import annotations

import json
import random
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
import transformers
from torch import Tensor, nn
from torch.utils.data import default_collate

import tiered
from tests.archives.programs import (
    HERE,
    LOOP_STEP,
    LOOPS,
    NAMES,
    STORES,
    TRAIN_STEP,
    Counted,
    LoraLoop,
    Net,
    Tokens,
    TrainGPT,
    described,
    exported,
    external_of,
    new_trainer,
    plain_gpt2,
    read_store,
    read_training,
    snapshot,
    train_batch,
    training_arguments,
    training_in_json,
    unpack,
)
from tests.reference import MasterAdamW, Recipe
from tiered.errors import UsageError
from tiered.tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

TRAININGS = tuple(name for name in NAMES if name != "store")
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())


@pytest.fixture(autouse=True)
def no_threads_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar's outlives the bar, and those that load end by themselves some time after."""
    transformers.utils.logging.disable_progress_bar()
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


def of_the_store(name: str) -> dict[str, Any]:
    return {what: EXPECTED[name][what] for what in ("generation", "state", "keys")}


def words(name: str, place: Path) -> list[str]:
    """Return the command line's words for the archive's directories, and for the user's own files."""
    files = [part for path in external_of(name, place) for part in ("--external", str(path))]
    return [*(str(place / directory) for directory in STORES[name]), *files]


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_store_opens_with_its_keys_its_bytes_and_its_state(name: str, tmp_path: Path) -> None:
    directories = unpack(name, tmp_path)
    for mode in ("r", "a"):
        assert read_store(directories, external_of(name, tmp_path), mode) == of_the_store(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_read_and_clean_a_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, expected = tmp_path / "place", EXPECTED[name]
    directories = unpack(name, place)
    runs = [str(directory) for directory in directories]
    of_a_model = ["--parameters"] if name in TRAININGS else []
    assert main(["inspect", *runs, *of_a_model, "--json", str(tmp_path / "report.json")]) == 0
    assert f"generation {expected['generation']}" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["generation"] == expected["generation"]
    assert main(["verify", *words(name, place)]) == 0
    assert "none damaged" in capsys.readouterr().out
    assert main(["gc", *runs, "--yes"]) == 0
    assert main(["export", *words(name, place), str(tmp_path / "exported")]) == 0
    assert exported(tmp_path / "exported") == expected["exported"]
    assert read_store(directories, external_of(name, place), "r") == of_the_store(name)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_resumed_run_has_its_parameters_its_optimizer_and_its_random_numbers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    unpack(name, tmp_path)
    found, expected = training_in_json(read_training(name, tmp_path)), EXPECTED[name]
    for what in ("parameters", "optimizer", "draws"):
        assert found[what] == expected[what], what
    schedulers = [each["scheduler"] or {"mapping": []} for each in (found, expected)]
    assert [pair for pair in schedulers[1]["mapping"] if pair not in schedulers[0]["mapping"]] == []


# -- going on --------------------------------------------------------------------------------------------------------


def test_a_store_is_gone_on_with(tmp_path: Path) -> None:
    directories, expected = unpack("store", tmp_path), EXPECTED["store"]
    counted, rows = Counted(), torch.arange(7000)
    with tiered.Store(*directories, dram="64MiB") as store:
        store.register("counted", counted)
        assert str(store.resume()) == str(store.state) and counted.count == 42
        store["scalar"] = torch.tensor(3.5)
        store.rollback()
        store.write_part("parts", 5000, rows.int())
        del store["flags"]
        store["more"] = rows
        assert store.commit({"step": 4}) == expected["generation"] + 1
    with tiered.Store(*reversed(directories), dram="64MiB") as store:
        assert store.state == {"step": 4} and store.verify().is_clean
        assert torch.equal(store["more"], rows) and torch.equal(store.read_part("parts", 5000, 12_000), rows.int())
        changed = {"flags", "more", "parts"}
        now = {key: described(store[key]) for key in store if key not in changed}
        assert now == {key: value for key, value in expected["keys"].items() if key not in changed}


def plain_optimizer(model: nn.Module, found: dict[str, Any], recipe: Recipe) -> MasterAdamW:
    """Return the plain optimizer of ``model``, with the state that the run had."""
    optimizer = MasterAdamW(model, recipe)
    for name, parameter in model.named_parameters():
        if name not in found["optimizer"]:
            continue
        master, values = optimizer.masters[parameter], dict(found["optimizer"][name])
        if "master" in values:
            master.data.copy_(values.pop("master"))
        step = values.pop("step")
        counted = {} if recipe.optimizer == "SGD" else {"step": torch.tensor(float(step))}
        optimizer.optimizer.state[master] = counted | values
    return optimizer


def assert_same(model: nn.Module, optimizer: MasterAdamW, found: dict[str, Any]) -> None:
    """Assert that parameters, buffers, masters and moments are those of the plain training."""
    plain = model.state_dict()
    assert plain.keys() == found["parameters"].keys()
    assert [name for name in plain if not torch.equal(plain[name], found["parameters"][name])] == []
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, master in optimizer.masters.items():
        expected, values = dict(optimizer.optimizer.state[master]), found["optimizer"][names[parameter]]
        if master is not parameter:
            expected["master"] = master.detach()
        assert [what for what in expected if not torch.equal(torch.as_tensor(values[what]), expected[what])] == []


def go_on(place: Path, name: str, *options: str) -> list[float]:
    """Have `tiered train` make two steps more, with the data where they are now; return the losses."""
    stores = [part for directory in STORES[name] for part in ("--store", str(place / directory))]
    report = place / "report.json"
    steps = ("--steps", str(TRAIN_STEP + 2), "--quiet", "--json", str(report))
    assert main(["train", "--resume", *stores, "--data", str(place / "data"), *steps, *options]) == 0
    losses: list[float] = json.loads(report.read_text())["losses"]
    return losses


def plain_model(found: dict[str, Any]) -> TrainGPT:
    model = TrainGPT().to(torch.bfloat16)
    model.load_state_dict(found["parameters"])
    return model


def test_tiered_train_goes_on_with_the_bits_of_plain_pytorch(tmp_path: Path) -> None:
    for copy in ("before", "run"):
        unpack("train_exact", tmp_path / copy)
    found = read_training("train_exact", tmp_path / "before")
    model = plain_model(found)
    optimizer = plain_optimizer(model, found, Recipe(adamw={"lr": 0.002}))
    expected = []
    for step in range(TRAIN_STEP, TRAIN_STEP + 2):
        losses = [model(*train_batch(2 * step + micro_step)) for micro_step in range(2)]
        for loss in losses:
            (loss / 2).backward()
        optimizer.step(0.5)
        optimizer.zero_grad()
        expected.append(sum(loss.item() for loss in losses) / 2)
    assert go_on(tmp_path / "run", "train_exact") == expected
    assert_same(model, optimizer, read_training("train_exact", tmp_path / "run"))


def test_a_compact_run_goes_on_with_the_same_bits_in_any_budget(tmp_path: Path) -> None:
    ends = []
    for copy, options in {"before": None, "roomy": (), "tight": ("--dram", "16MiB", "--hold", "0")}.items():
        unpack("train_compact", tmp_path / copy)
        losses = None if options is None else go_on(tmp_path / copy, "train_compact", *options)
        ends.append((losses, read_training("train_compact", tmp_path / copy)))
    (_, before), (losses, roomy), (other_losses, tight) = ends
    assert losses == other_losses and training_in_json(roomy) == training_in_json(tight)
    assert training_in_json(roomy)["parameters"] != training_in_json(before)["parameters"]
    with torch.no_grad():
        model = plain_model(before)
        first = [model(*train_batch(2 * TRAIN_STEP + micro_step)).item() for micro_step in range(2)]
    assert losses is not None and losses[0] == sum(first) / 2


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_goes_on_with_the_bits_of_plain_pytorch(name: str, tmp_path: Path) -> None:
    for copy in ("before", "run"):
        unpack(name, tmp_path / copy)
    found, kind = read_training(name, tmp_path / "before"), LOOPS[name]
    if name == "lora":
        base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "before" / "base", dtype=torch.bfloat16)
        model, recipe = LoraLoop.adapted(base).train(), Recipe(adamw={"lr": 1e-2})
    else:
        model, recipe = Net(), Recipe(optimizer="SGD", param_groups=kind.groups, adamw={"lr": 0.05, "momentum": 0.9})
    model.load_state_dict(found["parameters"])
    optimizer = plain_optimizer(model, found, recipe)
    scheduler = kind.scheduler_of(optimizer.optimizer)
    scheduler.load_state_dict(found["scheduler"])
    for group, lr in zip(optimizer.optimizer.param_groups, found["scheduler"]["_last_lr"], strict=True):
        group["lr"] = lr
    torch.set_rng_state(found["random"]["cpu"])
    losses: list[Tensor] = []
    for number, used in enumerate(EXPECTED[name]["used"], 1):
        batch = default_collate([Tokens()[index] for index in used]) if name == "lora" else kind.batches()[used]
        losses.append(kind.loss_of(model, batch))
        (losses[-1] / kind.num_micro_steps).backward()
        if number % kind.num_micro_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    place, external = tmp_path / "run", external_of(name, tmp_path / "run")
    before = [file.read_bytes() for folder in external for file in sorted(folder.iterdir())]
    with tiered.Store(*(place / directory for directory in STORES[name]), dram="16MiB", external=external) as store:
        loop = kind.open(place, store)
        loop.run(LOOP_STEP + 2)
        assert loop.used == EXPECTED[name]["used"]
        assert_same(model, optimizer, snapshot(loop.model, loop.optimizer))
        assert store.verify().is_clean
    assert len(loop.losses) == len(losses) and all(map(torch.equal, loop.losses, losses))
    assert [file.read_bytes() for folder in external for file in sorted(folder.iterdir())] == before


def history(trainer: Any) -> list[dict[str, float]]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [{name: log[name] for name in names} for log in trainer.state.log_history if "loss" in log]


def test_a_trainer_that_was_killed_goes_on_with_the_bits_of_transformers_own(tmp_path: Path) -> None:
    """transformers' own goes on from a checkpoint in its format, with the tensors that the archive has."""
    for copy in ("before", "run"):
        unpack("trainer", tmp_path / copy)
    found = read_training("trainer", tmp_path / "before")
    plain = transformers.Trainer(plain_gpt2(), training_arguments(tmp_path / "plain"), train_dataset=Tokens())
    folder = tmp_path / "plain" / "checkpoint-3"
    plain.model.load_state_dict(found["parameters"])
    plain.model.save_pretrained(folder)
    plain.create_optimizer_and_scheduler(9)
    names = {parameter: name for name, parameter in plain.model.named_parameters()}
    state = plain.optimizer.state_dict()
    for number, group in enumerate(plain.optimizer.param_groups):
        state["param_groups"][number]["lr"] = found["scheduler"]["_last_lr"][number]
        for index, parameter in zip(state["param_groups"][number]["params"], group["params"], strict=True):
            values = found["optimizer"][names[parameter]]
            state["state"][index] = values | {"step": torch.tensor(float(values["step"]))}
    torch.save(state, folder / "optimizer.pt")
    torch.save(found["scheduler"], folder / "scheduler.pt")
    torch.save(found["random"], folder / "rng_state.pth")
    shutil.copy(tmp_path / "before" / "out" / "checkpoint-3" / "trainer_state.json", folder)
    plain.train(resume_from_checkpoint=str(folder))
    with closing(new_trainer(tmp_path / "run", dram="32MiB")) as ours:
        ours.train(resume_from_checkpoint=True)
        assert history(ours) == history(plain) and len(history(ours)) == 9
        state_dicts = ours.model.state_dict(), plain.model.state_dict()
        assert all(torch.equal(state_dicts[0][name], value) for name, value in state_dicts[1].items())
        assert ours.store.state == {"step": 9}


# -- refusals, and their remedies ------------------------------------------------------------------------------------


def test_a_run_whose_data_have_moved_says_so_and_goes_on_with_them_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack("train_exact", tmp_path)
    command = ["train", "--resume", "--store", str(tmp_path / "run"), "--steps", str(TRAIN_STEP + 1), "--quiet"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "the path does not exist; name a text file or a directory of them" in said
    (tmp_path / "other.txt").write_bytes(b"another text " * 100)
    assert main([*command, "--data", str(tmp_path / "other.txt")]) == 2
    assert "name the same data with --data" in capsys.readouterr().err
    assert main([*command, "--data", str(tmp_path / "data")]) == 0
    assert main(["train", "--resume", "--store", str(tmp_path / "run"), "--steps", str(TRAIN_STEP + 2)]) == 0


def test_a_run_over_a_base_in_place_says_that_the_base_is_missing_and_opens_with_it(tmp_path: Path) -> None:
    directories = unpack("lora", tmp_path)
    with pytest.raises(UsageError, match=r"model\.safetensors.*which is missing.*external="):
        tiered.Store(*directories, dram="16MiB", mode="r")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    assert read_store(directories, [tmp_path / "elsewhere"], "r") == of_the_store("lora")
