"""tiered.hf.Trainer over ranks: the bits of transformers' own over DistributedDataParallel, killed and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.ranks.processes import Ranks, StartedRanks
from tests.ranks.training import digests_of
from tests.reference import Trained
from tests.rigs.warm_python import WarmPython

_MODULES = ("accelerate", "peft", "transformers.trainer", "tests.interop.small_models")
_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with tempfile.TemporaryDirectory(prefix="tiered-") as directory:
        python = WarmPython(Path(directory), modules=_MODULES)
        yield python
        python.close()


@pytest.fixture(scope="module")
def ranks(python: WarmPython) -> Iterator[Ranks]:
    with StartedRanks(2, python.executable, limit_s=240.0, cases=("trainer",)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run of ``model`` in one go gives, and the folder of its files."""

    @cache
    def run(model: str) -> tuple[list[Any], Path]:
        path = tmp_path_factory.mktemp("undisturbed")
        return ranks.run("train", path=str(path), model=model), path

    return run


def of_run(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("digests", "losses", "history")}


def test_bits_of_the_trainer_over_distributed_data_parallel(undisturbed: Any, ranks: Ranks, tmp_path: Path) -> None:
    """At two ranks that one's mean of gradients is ours: a / 2 + b / 2, in which only the sum is rounded."""
    found, path = undisturbed("gpt2")
    assert sorted(each.name for each in (path / "store").iterdir()) == ["rank-0000-of-0002", "rank-0001-of-0002"]
    assert_as_plain("gpt2", found, ranks, tmp_path)
    assert all(log["grad_norm"] > 0.5 for log in found[0]["history"] if "grad_norm" in log), "nothing was clipped"
    for each in found:  # the first step of a pass has four batches, the second two
        units, counts = each["units"], [0, *each["exchanges"]]
        assert [b - a for a, b in pairwise(counts)] == ([0, 0, 0, units, 0, units] * 3)[: len(counts) - 1]
    assert [each["copied"] > 0 for each in found] == [True, False], "the model was copied on the rank that writes it"
    written = load_file(path / "files" / "model.safetensors")
    assert digests_of(Trained(parameters=written)).items() <= found[0]["digests"].items()


def assert_as_plain(model: str, found: list[Any], ranks: Ranks, path: Path, **options: Any) -> None:
    """Assert that nothing is wrapped, and that all else is as over DistributedDataParallel."""
    pieces = {name: [each["pieces"][name] for each in found] for name in found[0]["pieces"]}
    plain = ranks.run("train_plain_trainer", path=str(path), model=model, pieces=pieces, **options)
    assert [each["wrapped"] for each in (*found, *plain)] == [0] * len(found) + [1] * len(plain)
    assert [of_run(each) for each in found] == [of_run(each) for each in plain]
    assert found[0]["losses"] != found[1]["losses"], "each rank has batches of its own"


def test_bits_at_three_ranks_are_those_of_the_mean_in_their_order(python: WarmPython, tmp_path: Path) -> None:
    """At three, DistributedDataParallel's own mean has other last bits."""
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no"}
    with StartedRanks(3, python.executable, limit_s=240.0, cases=("trainer",)) as ranks:
        found = ranks.run("train", path=str(tmp_path / "run"), **options)
        assert_as_plain("gpt2", found, ranks, tmp_path / "plain", adds_in_order=True, **options)


@pytest.mark.parametrize("model", ["lora", "lora beside"])
def test_bits_of_adapters_in_a_run_that_stops_and_goes_on(
    model: str, undisturbed: Any, ranks: Ranks, tmp_path: Path
) -> None:
    whole, path = undisturbed(model)
    assert_as_plain(model, whole, ranks, tmp_path / "plain")
    assert (path / "files" / "adapter_model.safetensors").exists()
    options: dict[str, Any] = {"path": str(tmp_path / "run"), "model": model, "stage": 2}  # which changes no bit
    assert ranks.run("train", **options, stops=3) == [{}, {}]
    shutil.rmtree(tmp_path / "run" / "out" / "checkpoint-2")  # one rank makes it again, and both resume from it
    assert_goes_on(whole, ranks.run("train", **options, resume=True))


def assert_goes_on(whole: list[Any], rest: list[Any]) -> None:
    """Assert that ``rest``, from some step on, ends as ``whole`` does, on each rank."""
    for before, after in zip(whole, rest, strict=True):
        assert 0 < len(after["losses"]) < len(before["losses"])
        assert after["losses"] == before["losses"][-len(after["losses"]) :]
        assert (after["digests"], after["history"]) == (before["digests"], before["history"])


def test_a_killed_run_that_torchrun_starts_again_has_the_bits_of_an_undisturbed_one(
    python: WarmPython, undisturbed: Any, tmp_path: Path
) -> None:
    """The variable keeps the addresses of ended processes from those of the next life."""
    words = ["-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2", "--max-restarts", "1"]
    ended = subprocess.run(
        [python.executable, *words, python.executable, "-m", "tests.ranks.trainer", str(tmp_path), "3"], cwd=_ROOT,
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["went on"]
    assert_goes_on(undisturbed("gpt2")[0][:1], [found])


def test_one_process_goes_on_with_a_run_of_two_ranks(python: WarmPython, ranks: Ranks, tmp_path: Path) -> None:
    """The folder of the old ranks' commit stands for that of the switch, which has the same step."""
    assert ranks.run("train", path=str(tmp_path), stops=3) == [{}, {}]
    folder = str(tmp_path / "out" / "checkpoint-2")
    text = (
        f"from tests.ranks.trainer import run; print(run({str(tmp_path)!r}, resume={folder!r})['history'][-1]['step'])"
    )
    ended = subprocess.run([python.executable, "-c", text], cwd=_ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == "5", ended.stderr


def test_the_best_weights_are_written_by_one_rank_and_loaded_by_all(ranks: Ranks, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "eval_steps": 2}
    found = ranks.run("train", path=str(tmp_path), **best)
    (step,) = {each["best"] for each in found}
    assert 0 < step < 5
    written = load_file(tmp_path / "out" / f"checkpoint-{step}" / "model.safetensors")
    for each in found:
        assert digests_of(Trained(parameters=written)).items() <= each["digests"].items()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("alone", r"rank [01] of 2 to accelerate, and rank 0 of 1 to .*opened once the process group is there"),
        ("not told", r"rank 0 of 1 to accelerate, and rank [01] of 2 to .*torchrun"),
        ("uneven", "even_batches=False.*dataloader_drop_last=True"),
        ("older folder", "keeps the weights of its last commit alone"),
    ],
)
def test_what_cannot_work_over_ranks_is_refused_by_name_on_all(
    kind: str, text: str, undisturbed: Any, ranks: Ranks, tmp_path: Path
) -> None:
    path = undisturbed("gpt2")[1] if kind == "older folder" else tmp_path
    for each in ranks.run("refuse", kind=kind, path=str(path)):
        assert re.search(f"UsageError: .*{text}", each), each


def test_a_process_that_accelerate_knows_as_the_only_one_trains_in_a_store_of_its_own(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run("refuse", kind="alone, not told", path=str(tmp_path)) == ["", ""]
