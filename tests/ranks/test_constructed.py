"""Models constructed by several ranks: the values of the ordinary constructor, each byte written once."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.constructed import NUM_MICRO_STEPS, build, looks_of, parameter_nbytes, rate_of, rows_of
from tests.ranks.processes import Ranks, StartedRanks
from tests.ranks.test_training import assert_same
from tests.ranks.training import ZOO
from tests.ranks.training import expected as trained
from tests.reference import MasterAdamW
from tests.rigs.warm_python import WarmPython


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory(prefix="tiered-") as directory:
        python = WarmPython(Path(directory), modules=("transformers.models.bert.modeling_bert", "accelerate"))
        with StartedRanks(3, python.executable, limit_s=240.0) as ranks:
            yield ranks
        python.close()


def expected(kind: str) -> dict[str, str]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks
    try:
        return looks_of(build(kind))
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("kind", "world", "parks"), [("habits", 3, True), ("habits", 2, False), ("bert", 2, True), ("bert", 3, False)]
)
def test_values_are_those_of_the_ordinary_constructor(kind: str, world: int, parks: bool, ranks: Ranks) -> None:
    wanted = expected(kind)
    for found in ranks.run("construct", kind=kind, world=world, parks=parks)[:world]:
        assert found["looks"] == wanted
        assert bool(found["moved"]) == parks


@pytest.mark.parametrize(("world", "dtype", "update"), [(2, "bf16", "backward"), (3, "fp32", "step")])
def test_bits_of_bert(world: int, dtype: str, update: str, ranks: Ranks) -> None:
    options: dict[str, Any] = {"model": "bert", "world": world, "dtype": dtype, "update": update}
    clips = {"max_norm": 0.4} if update == "step" else {}
    found = ranks.run("train", **options, **clips)
    pieces = [each["pieces"] for each in found[:world]]
    assert_same(found, trained(**options, **clips, pieces=pieces if clips else None))


def test_accelerates_own_loop_has_the_bits_of_the_mean_over_ranks(ranks: Ranks) -> None:
    """With its loaders, whose last batch is filled up, its scheduler, and what an evaluation gathers."""

    def set_rate(step: int, _: Any, optimizer: MasterAdamW) -> None:
        optimizer.optimizer.param_groups[0]["lr"] = rate_of(step, 3)

    found = ranks.run("accelerate")
    assert [each["held"] for each in found] == [True, True, True]
    wanted = trained(
        replace(ZOO["bert"], batch=rows_of), world=3, dtype="fp32", update="step", exchanges_each=False,
        num_micro_steps=NUM_MICRO_STEPS, max_norm=0.4, pieces=[each["pieces"] for each in found], before_step=set_rate,
    )  # fmt: skip
    assert_same(found, wanted)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("not told", r"the only one to accelerate, and rank [012] of 3 to .*Accelerator\(cpu=True\)"),
        ("prepared before", r"in DistributedDataParallel, into a store of 3 ranks.*before accelerator.prepare\(\)"),
    ],
)
def test_what_accelerate_would_train_apart_or_twice_is_refused_by_name(kind: str, text: str, ranks: Ranks) -> None:
    for each in ranks.run("accelerate_apart", kind=kind):
        assert re.search(text, each), each


def test_each_byte_is_written_once(ranks: Ranks) -> None:
    found = ranks.run("construct", kind="large", world=2, parks=False)[:2]
    model = build("large")
    whole, wanted = parameter_nbytes(model), looks_of(model)
    for each in found:
        assert each["looks"] == wanted
        assert each["peak"] <= each["budget"] < whole
        assert each["constructed"] <= 1.05 * whole / 2
        assert each["constructed"] + each["sharded"] <= 2.05 * whole / 2


@pytest.mark.parametrize(
    ("kind", "parks", "text"),
    [
        ("values", True, "UsageError.*drawn other random numbers up to Linear.weight.*torch.manual_seed"),
        ("values", False, "UsageError.*the ranks differ.*parameter first.bias.*torch.manual_seed"),
        ("constants", True, "UsageError.*the ranks differ.*parameter first.weight.*torch.manual_seed"),
        ("shares", True, "UsageError.*data of Linear.weight, to share its memory"),
        ("fails", True, "no such width"),
        ("drive", False, "a drive"),
        ("not constructed", False, "UsageError.*the ranks differ.*parameter first.weight.*digest"),
    ],
)
def test_ranks_that_construct_apart_are_told_by_name(kind: str, parks: bool, text: str, ranks: Ranks) -> None:
    found = ranks.run("construct_apart", kind=kind, world=2, parks=parks)[:2]
    assert all(re.search(text, each) for each in found), found
