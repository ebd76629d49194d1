"""Training over ranks has the bits of plain PyTorch: gradients added in fp32 in the order of the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pairwise import pairwise
from tests.ranks.plain import wanted
from tests.ranks.processes import Ranks, StartedRanks
from tests.ranks.training import change, compact_by_one_rank, expected
from tests.rigs.warm_python import WarmPython
from tests.test_docs import ROOT, blocks

MODELS = ("gpt", "tied_head", "frozen_part", "unused_parameter", "odd_sizes", "checkpoint_inside_reentrant")
"""The whole zoo and the product are for a campaign by hand: CONTRIBUTING says the command."""


@pytest.fixture(scope="module")
def ranks(warm_python: WarmPython) -> Iterator[Ranks]:
    with StartedRanks(4, warm_python.executable, limit_s=240.0) as ranks:  # the first case imports what training needs
        yield ranks


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, str]]) -> None:
    """Assert that each rank has what it should; a parameter that is its own master may be named as one or not."""
    for rank, want in enumerate(wanted):
        got = found[rank]["digests"]
        names = {name for name in got | want if not name.startswith("masters") or (name in got and name in want)}
        assert not {name for name in names if got.get(name) != want.get(name)}, rank


@pairwise(
    model=MODELS,
    world=("2", "3", "4"),
    dtype=("fp32", "bf16"),
    update=("step", "backward"),
    budget=("roomy", "smallest"),
    num=("1", "2"),
    stage=("1", "2", "3"),
)
def test_bits(model: str, world: str, dtype: str, update: str, budget: str, num: str, stage: str, ranks: Ranks) -> None:
    options = {"model": model, "world": int(world), "dtype": dtype, "update": update, "num_micro_steps": int(num)}
    found = ranks.run("train", **options, budget=budget, stage=int(stage))
    assert_same(found, expected(**options))


@pytest.mark.parametrize(
    ("model", "world", "dtype", "update", "stage"),
    [("gpt_509", 2, "fp32", "step", 3), ("gpt_509", 3, "bf16", "backward", 2), ("hollow", 2, "bf16", "backward", 3),
     ("hollow", 3, "fp32", "step", 1)],
)  # fmt: skip
def test_bits_of_odd_vocabularies_and_of_units_with_little_in_them(
    model: str, world: int, dtype: str, update: str, stage: int, ranks: Ranks
) -> None:
    options: dict[str, Any] = {"model": model, "world": world, "dtype": dtype, "update": update}
    clips = {"max_norm": 0.4} if update == "step" else {}
    found = ranks.run("train", **options, **clips, stage=stage, clips_by_torch=model == "hollow")
    pieces = [each["pieces"] for each in found[:world]]
    assert_same(found, expected(**options, **clips, pieces=pieces if clips else None))


@pytest.mark.parametrize(("model", "dtype"), [("hollow", "bf16"), ("odd_sizes", "fp32")])
def test_every_door_of_a_model_gives_and_takes_what_is_there(model: str, dtype: str, ranks: Ranks) -> None:
    found = ranks.run("doors", model=model, world=3, dtype=dtype)[:3]
    assert found == [[], [], []]


@pytest.mark.parametrize("num", [1, 2])
def test_bits_with_torchs_own_clipping(num: int, ranks: Ranks) -> None:
    options: dict[str, Any] = {"model": "gpt", "world": 3, "dtype": "fp32", "update": "step", "num_micro_steps": num}
    found = ranks.run("train", **options, max_norm=0.4, clips_by_torch=True)
    pieces = [each["pieces"] for each in found[:3]]
    assert_same(found, expected(**options, max_norm=0.4, pieces=pieces))


def test_a_step_with_an_infinite_gradient_on_one_rank_is_skipped_by_all(ranks: Ranks) -> None:
    found = ranks.run("scale", world=3)[:3]
    assert found[0] == found[1] == found[2]
    scales, values = [each.split()[0] for each in found[0]], [each.split(maxsplit=2)[2] for each in found[0]]
    assert scales == ["4.0", "2.0", "2.0"]
    assert values[0] == values[1] != values[2]


@pairwise(model=("gpt", "odd_sizes"), world=("2", "3"), dtype=("fp32", "bf16"), num=("1", "2"), stage=("1", "3"))
def test_bits_with_clipping(model: str, world: str, dtype: str, num: str, stage: str, ranks: Ranks) -> None:
    options = {"model": model, "world": int(world), "dtype": dtype, "update": "step", "num_micro_steps": int(num)}
    found = ranks.run("train", **options, max_norm=0.4, stage=int(stage))
    pieces = [each["pieces"] for each in found[: int(world)]]
    assert_same(found, expected(**options, max_norm=0.4, pieces=pieces))


@pytest.mark.parametrize(("stage", "num"), [(3, 1), (3, 2), (2, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_collectives_are_counted(stage: int, num: int, update: str, ranks: Ranks) -> None:
    found = ranks.run("count", world=3, stage=stage, update=update, num_micro_steps=num)
    for each in found[:3]:
        units, gathers = each["units"], 2 * num if stage == 3 else 1
        exchanges = num if update == "step" else 1  # under update="backward" all but the last add locally
        assert (each["gather"], each["exchange"]) == (gathers * units, exchanges * units)
        assert each["moved"] == gathers * each["whole"] + exchanges * each["gradients"]
        assert each["shown"] == 0, "no tensor keeps the memory of a unit that was released"
        assert each["stored"] <= each["state"] * 1.1 + (64 << 10) * units


@pairwise(
    model=("gpt", "odd_sizes", "frozen_part", "unused_parameter", "checkpoint_inside_reentrant"),
    kind=("gloo", "sim_collectives"),
    world=("2", "3"),
    dtype=("fp32", "bf16"),
    update=("step", "backward"),
    budget=("roomy", "smallest"),
    num=("1", "2"),
    stage=("1", "2", "3"),
    update_on=("cpu", "device"),
)
def test_bits_on_a_compute_device(
    model: str, kind: str, world: str, dtype: str, update: str, budget: str, num: str, stage: str, update_on: str,
    ranks: Ranks,
) -> None:  # fmt: skip
    options = {"model": model, "world": int(world), "dtype": dtype, "update": update, "num_micro_steps": int(num)}
    how = {"budget": budget, "stage": int(stage), "update_on": update_on, "kind": kind}
    found = ranks.run("train", **options, **how, device="sim")
    assert_same(found, ranks.run("expect_on", **options, device="sim")[0])


@pytest.mark.parametrize("kind", ["gloo", "sim_collectives"])
def test_bits_on_a_compute_device_with_clipping(kind: str, ranks: Ranks) -> None:
    options: dict[str, Any] = {"model": "gpt", "world": 2, "dtype": "fp32", "update": "step", "max_norm": 0.4}
    for clips_by_torch in (False, True):
        found = ranks.run("train", **options, device="sim", kind=kind, clips_by_torch=clips_by_torch)
        pieces = [each["pieces"] for each in found[:2]]
        assert_same(found, ranks.run("expect_on", **options, device="sim", pieces=pieces)[0])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_copies_to_a_compute_device_are_counted(stage: int, update: str, ranks: Ranks) -> None:
    for kind in ("gloo", "sim_collectives"):
        for each in ranks.run("count", world=2, stage=stage, update=update, num_micro_steps=1, kind=kind)[:2]:
            num, whole = (2 if stage == 3 else 1), each["whole"]
            assert (each["gather"], each["exchange"]) == (num * each["units"], each["units"])
            if stage == 3:  # all but the first of a forward, and of a backward
                assert each["ahead"] == num * (each["units"] - 1)
            staged = [num * whole, whole]  # whole units come in by DRAM, and whole gradients leave
            assert each["copied"] == (staged if kind == "gloo" else [nbytes // 2 for nbytes in staged])


@pytest.mark.parametrize("mutant", ["mark", "moved", "use"])
def test_a_missing_wait_for_a_collective_of_a_device_is_a_race(mutant: str, ranks: Ranks) -> None:
    options = {"model": "gpt", "world": 2, "dtype": "fp32", "update": "step"}
    with pytest.raises(AssertionError, match="no event orders it after"):
        ranks.run("train", **options, device="sim", kind="sim_collectives", mutant=mutant)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_with_parts_that_are_frozen_written_and_trained_again(dtype: str, ranks: Ranks) -> None:
    found = ranks.run("unfreeze", world=3, dtype=dtype)
    wanted = expected("odd_sizes", world=3, dtype=dtype, update="step", before_step=change)
    assert_same([{"digests": each} for each in found[:3]], wanted)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_values_are_read_from_a_file_and_frozen_ones_stay_there(dtype: str, ranks: Ranks) -> None:
    found = ranks.run("read_weights", world=3, dtype=dtype)[:3]
    assert [each["differ"] for each in found] == [[], [], []]
    assert any(each["in_place"] for each in found), found


def test_a_mutant_that_adds_in_reversed_order_dies(ranks: Ranks) -> None:
    options = {"model": "gpt", "world": 3, "dtype": "fp32", "update": "step"}
    found = ranks.run("train", **options)
    with pytest.raises(AssertionError):
        assert_same(found, expected(**options, reverses=True))


def test_compact_state_is_that_of_one_rank_given_the_means(ranks: Ranks) -> None:
    found = ranks.run("train", model="odd_sizes", world=3, dtype="bf16", update="step", state="compact")
    wanted = compact_by_one_rank("odd_sizes", world=3, dtype="bf16")
    for rank in range(3):
        assert {name: found[rank]["digests"][name] for name in wanted} == wanted


def test_an_order_that_depends_on_the_data_is_refused_by_name(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="the ranks do different things"):
        ranks.run("train", model="data_dependent_order", world=3, dtype="fp32", update="step")


@pytest.mark.parametrize("kind", ["alias", "slow"])
def test_what_one_rank_does_by_itself_changes_no_bit(kind: str, ranks: Ranks) -> None:
    found = ranks.run("differ", kind=kind, world=3, deadline_s=30.0)
    assert [each["error"] for each in found[:3]] == ["", "", ""]
    plain = ranks.run("differ", kind="", world=3, deadline_s=30.0)
    assert {each["model"] for each in found[:3]} == {each["model"] for each in plain[:3]}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("evaluation", "forward without gradients"),
        ("state_dict", "for open"),
        ("batch more", "ended its script or closed its store|the ranks do different things"),
        ("gradient dropped", "optimizer.step.*the ranks differ"),
        ("zeroed between", "optimizer.step.*a gradient of .*added"),
        ("other rate", "optimizer.step.*hyperparameters"),
        ("clipped alone", "optimizer.step.*clipped by"),
        ("written alone", "tiered.unsharded: the ranks differ.*unit 'root'"),
        ("loaded alone", r"load_state_dict\(\): the ranks differ"),
        ("exception", "the loop of rank 0 has failed"),
    ],
)
def test_a_loop_that_differs_is_a_named_error_on_every_rank(kind: str, text: str, ranks: Ranks) -> None:
    found = ranks.run("differ", kind=kind, world=3)
    assert all(each["error"] for each in found[:3]), found
    assert any(re.search(text, each["error"]) for each in found[:3]), found


def test_the_loop_of_the_page_runs_as_written(ranks: Ranks) -> None:
    text = blocks(ROOT / "docs/ranks.md", "python")[0]
    found = ranks.run("page", text=text)
    assert len(set(found)) == 1, "all ranks have the same model"


# -- parameters beside the sharded ones --------------------------------------------------------------------------------


@pairwise(
    kind=("trained", "frozen"),
    world=("2", "3"),
    dtype=("fp32", "bf16"),
    num=("1", "2"),
    accumulates={"": False, "no_sync": True},
    stage=("1", "3"),
)
def test_bits_of_plain_parameters(
    kind: str, world: str, dtype: str, num: str, accumulates: bool, stage: str, ranks: Ranks
) -> None:
    options: dict[str, Any] = {"kind": kind, "world": int(world), "dtype": dtype}
    options |= {"num_micro_steps": int(num), "accumulates": accumulates}
    assert_same(ranks.run("train_plain", **options, stage=int(stage)), wanted(**options))


@pytest.mark.parametrize("num", [1, 2])
def test_bits_of_plain_parameters_that_torch_updates_beside_updates_in_the_backward(num: int, ranks: Ranks) -> None:
    options: dict[str, Any] = {"kind": "trained", "world": 3, "dtype": "fp32", "update": "backward"}
    options["num_micro_steps"] = num
    assert_same(ranks.run("train_plain", **options), wanted(**options))


@pytest.mark.parametrize(("clips", "dtype"), [("tiered", "fp32"), ("tiered", "bf16"), ("torch", "fp32")])
def test_bits_of_plain_parameters_with_clipping(clips: str, dtype: str, ranks: Ranks) -> None:
    options: dict[str, Any] = {"kind": "trained", "world": 3, "dtype": dtype, "num_micro_steps": 2}
    found = ranks.run("train_plain", **options, clips=clips)[:3]
    known = wanted(**options, pieces=[each["pieces"] for each in found])
    if dtype == "bf16":  # tiered.clip_grad_norm_ scales those in place, rounded to bf16: the next steps are others
        assert {each["digests"]["norm 0"] for each in found} == {known[0]["norm 0"]}
        assert len({str({n: d for n, d in each["digests"].items() if "loss" not in n}) for each in found}) == 1
    else:
        assert_same(found, known)


def test_bits_of_adapters_that_peft_adds(ranks: Ranks) -> None:
    found = ranks.run("train_plain", kind="peft", world=2, dtype="bf16")
    assert_same(found, found[0]["wanted"])


def test_a_mutant_that_exchanges_no_plain_gradients_dies(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="a gradient of plain"):
        ranks.run("train_plain", kind="frozen", world=3, dtype="fp32", mutant=True)


def test_what_a_loop_may_do_with_plain_parameters(ranks: Ranks) -> None:
    found = ranks.run("habits", world=3)[:3]
    assert found[0] == found[1] == found[2]
    assert {name for name, is_right in found[0].items() if not is_right} == set()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("other names", r"beside the sharded ones: the ranks differ.*a new parameter more[23], \(2,\) torch.float32"),
        ("other shapes", r"beside the sharded ones: the ranks differ.*a new parameter more, \([23],\)"),
        ("new ones", "the ranks do different things.*parameters beside the sharded ones"),
        ("dropped", "optimizer.step.*the ranks differ.*a gradient of plain"),
        ("scaled", "optimizer.step.*the ranks differ.*a gradient of plain"),
        ("written", "optimizer.step.*the ranks differ.*its values"),
        ("only added", "under tiered.accumulate only"),
        ("graph", r"backward\(create_graph=True\) of a sharded model"),
    ],
)
def test_plain_parameters_that_differ_are_a_named_error_on_every_rank(kind: str, text: str, ranks: Ranks) -> None:
    found = ranks.run("differ_plain", kind=kind, world=3)[:3]
    assert all(found), found
    assert any(re.search(text, each) for each in found), found


def test_an_optimizer_of_plain_parameters_alone_is_refused_over_ranks(ranks: Ranks) -> None:
    assert all(re.search("plain parameters alone", each) for each in ranks.run("alone", world=2)[:2])
