"""The main job, whole and small: train, stop, go on, look, check."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered
from tiered.errors import CapacityError
from tiered.tools.cli import main
from tiered.tools.train.run import TrainingLoop
from tiered.tools.train.task import Loader
from tiered.units import parse_bytes

TINY = ("--layers", "2", "--width", "64", "--heads", "4", "--context", "32", "--dram", "32MiB")
JSON_KEYS = {
    "params", "steps", "losses", "step_seconds", "read_bytes_per_param", "write_bytes_per_param", "peak_rss_bytes",
    "dram_budget_bytes", "peak_dram_bytes", "state_bytes", "bytes_written", "generation", "stall_seconds",
    "wait_seconds", "moved_bytes_per_param", "bound_seconds", "step_over_bound", "verdict", "versions",
}  # fmt: skip

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Call ``tiered train`` on the tiny model with the store ``run`` and its figures in ``run.json``."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"one word, one meaning; " * 1300)

    def call(*options: str, store: str = "run", sizes: tuple[str, ...] = TINY) -> int:
        places = ("--store", str(tmp_path / store), "--json", str(tmp_path / f"{store}.json"))
        data = () if "--resume" in options else ("--data", str(text))
        return main(["train", *places, *data, *sizes, *options])

    return call


def figures(tmp_path: Path, store: str = "run") -> dict[str, Any]:
    found = json.loads((tmp_path / f"{store}.json").read_text())
    assert isinstance(found, dict)
    return found


def content(directory: Path) -> dict[str, bytes]:
    """Return what the files in ``directory`` hold; the lock's says only who had it last."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "lock"}


@pytest.mark.parametrize("options", [(), ("--no-durable",), ("--store", "other/deep")])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_run_that_is_refused_for_space_leaves_nothing_behind(
    options: tuple[str, ...], is_there: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where less is free than the plan counted on: data files of the model under construction stayed."""

    def refuse(*_: object, **__: object) -> None:
        raise CapacityError("no space")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiered.Store, "reserve_space", refuse)
    if is_there:
        (tmp_path / "run").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert run("--steps", "2", *options) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_refused_for_space_later_stays(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--steps", "2") == 0
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_build", lambda *_: (_ for _ in ()).throw(CapacityError("no space")))
        assert run("--resume", "--steps", "4") == 2
    assert run("--resume", "--steps", "4") == 0 and figures(tmp_path)["steps"] == [3, 4]


def interrupt_at_batch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Press Ctrl-C just as the batch ``number`` is drawn."""
    draw = Loader.__next__

    def draw_and_interrupt(loader: Loader) -> Any:
        if loader.position == number:
            signal.raise_signal(signal.SIGINT)
        return draw(loader)

    monkeypatch.setattr(Loader, "__next__", draw_and_interrupt)


def test_a_run_says_what_it_will_do_and_what_it_did(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "8") == 0
    out, err = capsys.readouterr()
    assert not err
    for word in (
        "model", "data", "job", "memory", "device", "space", "writes", "loss", "time", "moved", "waited", "bound",
        "wrote", "run", "go on",
    ):  # fmt: skip
        assert re.search(rf"^{word}( |$)", out, re.MULTILINE), word  # a long path has a line to itself
    assert "bound" in out[out.index("\nverdict ") :]
    assert "text.txt: 1 file, 29.2 KiB" in " ".join(out.split())
    assert "step 8/8" in out
    found = figures(tmp_path)
    assert set(found) == JSON_KEYS
    assert found["steps"] == list(range(1, 9))
    assert found["losses"][-1] < found["losses"][0] - 0.5
    assert found["generation"] == 8
    assert found["dram_budget_bytes"] == 32 << 20
    assert found["state_bytes"] >= 12 * found["params"]
    assert found["write_bytes_per_param"] >= 12
    moved = found["moved_bytes_per_param"]
    assert {"parameters", "optimizer state", "catalog"} <= set(moved)
    assert moved["optimizer state"]["write"] == pytest.approx(10, rel=0.35), "pages round small units up"
    assert sum(one["write"] for one in moved.values()) == pytest.approx(found["write_bytes_per_param"], rel=0.3)
    assert moved["catalog"]["write"] > 0
    assert found["step_over_bound"] >= 1
    assert set(found["wait_seconds"]) <= {"demand read", "update", "write-back", "commit"}


def test_a_timeline_shows_what_the_threads_did(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "timeline.json"
    assert run("--steps", "3", "--timeline", str(file), "--hold", "0") == 0
    assert f"drawn {file}: all " in " ".join(capsys.readouterr().out.split())
    events = json.loads(file.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"training thread", "tiered-update", "tiered-commit", "swap out"} <= tracks
    words = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"forward", "backward", "update", "update bucket", "commit", "flush", "swap out"} <= words
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names >= {"forward unit blocks.1", "backward unit blocks.0"}


def test_what_is_held_and_kept_changes_no_loss(run: Run, tmp_path: Path) -> None:
    assert run("--steps", "2", "--quiet", "--hold", "0", "--activations", "keep", store="none") == 0
    for number, options in enumerate((("--hold", "8MiB"), ("--activations", "recompute"), ("--activations", "swap"))):
        assert run("--steps", "2", "--quiet", *options, store=f"other{number}") == 0
        assert figures(tmp_path, "none")["losses"] == figures(tmp_path, f"other{number}")["losses"]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--dtype", "fp32"),
        ("--update", "step"),
        ("--clip", "0.5"),
        ("--accumulate", "2"),
        ("--accumulate", "2", "--update", "backward"),
    ],
)
def test_the_budget_changes_no_loss(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    sizes = ("--layers", "4", "--width", "192", "--heads", "4", "--context", "32", "--steps", "2", "--quiet")
    assert run("--dram", "16MiB", *options, store="small", sizes=sizes) == 0
    assert run("--dram", "512MiB", "--no-durable", *options, store="large", sizes=sizes) == 0
    small, large = figures(tmp_path, "small"), figures(tmp_path, "large")
    assert small["losses"] == large["losses"]
    assert small["state_bytes"] > small["dram_budget_bytes"]
    assert small["read_bytes_per_param"] > 1, "it has passed through the tiers"
    assert large["read_bytes_per_param"] == 0, "it has not"


def test_an_existing_run_is_not_touched_without_being_told(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "2", "--quiet") == 0
    before = content(tmp_path / "run")
    capsys.readouterr()
    assert run("--steps", "2") == 2
    error = capsys.readouterr().err
    assert "holds a run at step 2: go on with it with --resume" in error
    assert error.count("\n") == 1
    assert run("--steps", "2", "--no-durable") == 2
    assert run("--steps", "2", "--fresh") == 2, "there is no terminal to ask on"
    assert run("--resume", "--lr", "0.5") == 2
    error = capsys.readouterr().err
    assert "there is no terminal to ask on: add --yes" in error
    assert "lr 0.001 -> 0.5" in error
    assert content(tmp_path / "run") == before


@pytest.mark.parametrize("state", [{}, {"config": 3}], ids=["a store", "another's state"])
def test_a_store_that_is_no_run_is_left_alone_or_begun_anew(
    state: dict[str, Any], run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        store["a"] = torch.ones(3)
        store.commit(state)
    before = content(tmp_path / "run")
    for options in ((), ("--no-durable",)):
        assert run("--resume" if state and not options else "--quiet", "--steps", "1", *options, sizes=TINY) == 2
        assert "choose another --store" in capsys.readouterr().err
        assert content(tmp_path / "run") == before
    assert run("--steps", "1", "--quiet", "--no-durable", store="other") == 0
    assert run("--steps", "1", "--quiet", "--fresh", "--yes") == 0


@pytest.mark.parametrize(("state", "written"), [("exact", 16), ("compact", 11)])
def test_a_resumed_run_has_the_losses_of_the_undisturbed_one(
    state: str, written: int, run: Run, tmp_path: Path
) -> None:
    assert run("--steps", "5", "--quiet", "--state", state, store="whole") == 0
    assert run("--steps", "2", "--quiet", "--state", state) == 0
    losses = figures(tmp_path)["losses"]
    assert run("--resume", "--steps", "5", "--quiet", "--dram", "16MiB", sizes=()) == 0
    assert losses + figures(tmp_path)["losses"] == figures(tmp_path, "whole")["losses"]
    assert figures(tmp_path)["steps"] == [3, 4, 5]
    assert figures(tmp_path, "whole")["write_bytes_per_param"] < written


def test_a_finished_run_has_nothing_left_to_do(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--steps", "2", "--quiet") == 0
    before = content(tmp_path / "run")
    timeline = tmp_path / "timeline.json"
    assert run("--resume", "--timeline", str(timeline), sizes=()) == 0
    out = capsys.readouterr().out
    assert "the run has done its 2 steps" in out
    assert f"drawn {timeline}: all 0 events of the run" in " ".join(out.split())
    assert json.loads(timeline.read_text())["otherData"]["covers"] == "all 0 events of the run"
    assert (figures(tmp_path)["losses"], figures(tmp_path)["generation"]) == ([], 2)
    assert content(tmp_path / "run") == before


def test_a_run_beyond_the_steps_asked_for_says_where_it_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--steps", "3", "--quiet") == 0
    capsys.readouterr()
    assert run("--resume", "--steps", "2", "--quiet", sizes=()) == 0
    out = capsys.readouterr().out
    assert "the run is at step 3, past the 2 steps" in out
    assert "--resume --steps 6" in out


def test_a_process_that_torchrun_starts_again_goes_on_with_its_run_and_with_no_other(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "4", "--quiet", store="whole") == 0
    assert run("--steps", "2", "--quiet") == 0
    losses = figures(tmp_path)["losses"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run("--steps", "4", "--quiet", "--fresh") == 0, "nothing is asked, and nothing removed"
    assert losses + figures(tmp_path)["losses"] == figures(tmp_path, "whole")["losses"]
    assert run("--steps", "4", "--quiet", "--seed", "1") == 2
    assert "holds a run at step 4: go on with it with --resume" in capsys.readouterr().err
    assert run("--steps", "1", "--quiet", "--seed", "1", "--fresh") == 2, "that one is removed, if it is agreed to"
    assert "there is no terminal to ask on" in capsys.readouterr().err
    tiered.Store(tmp_path / "new", dram="16MiB").close()
    assert run("--steps", "1", "--quiet", "--fresh", store="new") == 0, "its last life had committed nothing"


def test_fresh_removes_the_run_and_nothing_else(run: Run, tmp_path: Path) -> None:
    assert run("--steps", "3", "--quiet") == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    losses = figures(tmp_path)["losses"]
    (tmp_path / "run" / "notes.txt").rename(tmp_path / "notes.txt")
    assert run("--steps", "3", "--quiet", "--fresh", "--yes") == 0
    assert figures(tmp_path)["losses"] == losses
    assert figures(tmp_path)["generation"] == 3


def test_resume_without_a_commit_starts_from_step_0(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiered.Store(tmp_path / "run", dram="16MiB").close()
    assert run("--resume", "--data", str(tmp_path / "text.txt"), "--steps", "2") == 0
    assert "nothing is committed there yet: starting from step 0" in capsys.readouterr().out
    assert figures(tmp_path)["steps"] == [1, 2]


def test_ctrl_c_in_a_step_commits_it_and_says_how_to_go_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "4", "--quiet", store="whole") == 0
    with monkeypatch.context() as patch:
        interrupt_at_batch(patch, 1)
        assert run("--steps", "4", "--commit-every", "4") == 130
    assert "the run is resumable from step 2" in capsys.readouterr().out
    losses = figures(tmp_path)["losses"]
    assert run("--resume", sizes=()) == 0
    assert losses + figures(tmp_path)["losses"] == figures(tmp_path, "whole")["losses"]


def test_a_second_ctrl_c_tells_of_the_commit_that_is_on_its_way(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end(status: int) -> None:
        raise KeyboardInterrupt  # out of the loop, where the process would have ended

    def interrupt_at_the_end(loop: TrainingLoop, store: tiered.Store, step: int) -> None:
        commit(loop, store, step)
        if step == 5:
            monkeypatch.setattr(tiered.Store, "wait_for_commit", lambda _: signal.raise_signal(signal.SIGINT))

    commit = TrainingLoop._commit
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr(TrainingLoop, "_commit", interrupt_at_the_end)
    interrupt_at_batch(monkeypatch, 4)
    assert run("--steps", "9", "--quiet", "--commit-every", "4") == 130
    said = capfd.readouterr().err
    assert "the run is resumable from step 4, or from step 5 if its commit came through: " in said


def test_ctrl_c_while_the_model_is_made_leaves_a_run_that_starts_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shard_and_interrupt(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return shard(*arguments, **options)

    shard = tiered.shard
    with monkeypatch.context() as patch:
        patch.setattr(tiered, "shard", shard_and_interrupt)
        assert run("--steps", "2") == 130
    out = capsys.readouterr().out
    assert "nothing was committed yet, the run is resumable from step 0" in out
    assert "--dram 32MiB" in out, "as people write it"
    assert run("--resume", "--data", str(tmp_path / "text.txt"), "--steps", "2", "--quiet") == 0
    assert figures(tmp_path)["steps"] == [1, 2]


def test_without_durability_nothing_is_left(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--steps", "2", "--no-durable") == 0
    assert "gone with this process" in capsys.readouterr().out
    assert not list((tmp_path / "run").iterdir())


def test_two_directories_hold_one_run(run: Run, tmp_path: Path) -> None:
    other = ("--store", str(tmp_path / "other"))
    assert run("--steps", "2", "--quiet", *other) == 0
    assert run("--resume", "--steps", "3", "--quiet", *other, sizes=()) == 0
    assert figures(tmp_path)["steps"] == [3]
    assert main(["verify", str(tmp_path / "other"), str(tmp_path / "run")]) == 0


def test_a_loss_that_is_no_number_stops_the_run_before_it_is_learnt_from(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "9", "--quiet", "--lr", "1e30") == 2
    error = capsys.readouterr().err
    assert "start again with a lower --lr" in error
    assert "the run is resumable from step" in error


@pytest.mark.parametrize("wrong", ["a foreign folder", "a file", "other data", "a dropped key"])
def test_what_is_wrong_before_the_model_stands_names_no_command_that_fails_again(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    text, options, sizes = tmp_path / "text.txt", ("--steps", "9"), TINY
    if wrong == "a foreign folder":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "identity").write_text("mine")
    elif wrong == "a file":
        (tmp_path / "run").write_text("mine")
    else:
        assert run("--steps", "1", "--quiet") == 0
        options, sizes = ("--resume", "--steps", "9"), ()
    if wrong == "other data":
        text.write_bytes(text.read_bytes()[:-1])
    elif wrong == "a dropped key":
        with tiered.Store(tmp_path / "run", dram="16MiB") as store:
            del store["model/parameters/blocks.1"]
            store._generations.commit_as_is()
    assert run(*options, sizes=sizes) == 2
    error = capsys.readouterr().err
    assert error.startswith("tiered: ")
    assert "resumable" not in error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dram", "16MiB", "--params", "20M"), "smallest"),
        ((*TINY, "--hold", "31.9MiB"), "hold=31.9 MiB leaves too little to work with"),
    ],
)
def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(
    options: tuple[str, ...], says: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "1", *options, sizes=()) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_second_process_on_a_run_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--steps", "1", "--quiet") == 0
    with tiered.Store(tmp_path / "run", dram="16MiB"):
        assert run("--resume", "--steps", "2", sizes=()) == 2
        assert main(["verify", str(tmp_path / "run")]) == 2
        assert "is open in process" in capsys.readouterr().err
        assert main(["inspect", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "generation 1" in out and '"step": 1' in out
    assert "\nregistered tiered.model, tiered.random, tiered.optimizer, loader\n" in out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_neither_the_first_life_of_a_run_nor_a_resumed_one_writes_more_than_its_plan_says(
    dtype: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ("--params", "4M", "--dtype", dtype, "--dram", "100MiB", "--steps", "1", "--yes")
    for options in (first, ("--resume", "--steps", "2")):
        assert run(*options, sizes=()) == 0
        said = re.search(r"writes +up to ([\d.]+ \w+) in all", capsys.readouterr().out)
        assert said is not None
        assert figures(tmp_path)["bytes_written"] <= parse_bytes(said[1])
