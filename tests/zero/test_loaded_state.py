"""optimizer.load_state_dict takes what a state_dict is, and refuses all else in one error, with nothing changed."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiered
from tests.zero.training import debug_store
from tiered.errors import UsageError

State = dict[str, Any]

OPTIMIZERS = {
    "adamw": (tiered.AdamW, {"lr": 1e-2}),
    "sgd": (tiered.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "sgd_without_momentum": (tiered.SGD, {"lr": 1e-2}),
    "lion": (tiered.Lion, {"lr": 1e-3}),
}


class Trained:
    """A model of two groups, trained a step: what its optimizer has, and whether that has changed."""

    def __init__(self, store: tiered.Store, kind: str = "adamw", dtype: torch.dtype | None = torch.bfloat16) -> None:
        torch.manual_seed(3)
        with tiered.construct(store):
            model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3, bias=False))
        self.model = tiered.shard(model, store, param_dtype=dtype)
        kind_of, options = OPTIMIZERS[kind]
        groups = [{"params": list(layer.parameters())} for layer in model]
        self.optimizer = kind_of(groups, **options)
        self.step()
        self.good = self.optimizer.state_dict()
        self.parameters = self.model.state_dict()

    def step(self) -> None:
        x = torch.linspace(-1, 1, 10).view(2, 5).to(next(self.model.parameters()).dtype)
        self.model(x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def assert_unchanged(self) -> None:
        assert_equal(self.optimizer.state_dict(), self.good)
        assert_equal(self.model.state_dict(), self.parameters)


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Assert that two nests of dicts, lists and tensors hold the same bits and types."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for name in expected:
            assert_equal(found[name], expected[name], f"{where}[{name!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected, where


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with debug_store(tmp_path_factory.mktemp("loaded"), durable=False) as store:
        yield Trained(store)


def put(*path: Any, value: Any) -> Callable[[State], Any]:
    """Return what replaces the value at ``path``; a function is called with what is there."""

    def change(state: State) -> Any:
        place = state
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value(place[path[-1]]) if callable(value) else value
        return state

    return change


def drop(*path: Any) -> Callable[[State], Any]:
    def change(state: State) -> Any:
        place = state
        for name in path[:-1]:
            place = place[name]
        del place[path[-1]]
        return state

    return change


GROUP, ENTRY = ("param_groups", 0), ("state", 2)

MALFORMED: dict[str, tuple[Callable[[State], Any], str]] = {
    "nothing": (lambda _: None, "dict.*None"),
    "no_state": (drop("state"), "'state'"),
    "one_group_less": (drop("param_groups", 1), "2 groups, got 1"),
    "group_without_params": (drop(*GROUP, "params"), "'params'"),
    "one_parameter_less": (put(*GROUP, "params", value=[0]), "2 parameters, got 1"),
    "parameter_twice": (put(*GROUP, "params", value=[0, 0]), "once"),
    "no_lr": (drop(*GROUP, "lr"), "'lr'"),
    "eps_of_a_thousand_digits": (put(*GROUP, "eps", value=10**1000), "'eps'.*a number >= 0"),
    "lr_below_zero": (put(*GROUP, "lr", value=-1.0), "'lr'.*-1.0"),
    "lr_of_two": (put(*GROUP, "lr", value=torch.ones(2)), r"'lr'.*\(2,\)"),
    "unknown_hyperparameter": (put(*GROUP, value=lambda g: {**g, "weight_dekay": 1}), "weight_dekay.*weight_decay"),
    "amsgrad": (put(*GROUP, value=lambda g: {**g, "amsgrad": True}), "amsgrad"),
    "adam_and_not_adamw": (put(*GROUP, value=lambda g: {**g, "decoupled_weight_decay": False}), "decoupled"),
    "state_of_nobody": (put("state", value=lambda s: {**s, 7: s[0]}), "'state'.*7"),
    "ids_as_text": (put("state", value=lambda s: {str(key): entry for key, entry in s.items()}), "'0'"),
    "step_that_is_text": (put(*ENTRY, "step", value="1"), "'step'.*whole number"),
    "step_of_one_and_a_half": (put(*ENTRY, "step", value=1.5), "'step'.*1.5"),
    "step_of_a_thousand_digits": (put(*ENTRY, "step", value=10**1000), "'step'"),
    "no_exp_avg": (drop(*ENTRY, "exp_avg"), r"1\.weight.*'exp_avg'"),
    "exp_avg_on_meta": (put(*ENTRY, "exp_avg", value=lambda t: t.to("meta")), "dense.*meta"),
    "sparse_exp_avg": (put(*ENTRY, "exp_avg", value=lambda t: t.to_sparse()), "dense"),
    "exp_avg_transposed": (put(*ENTRY, "exp_avg", value=lambda t: t.T), r"\(3, 4\), got \(4, 3\)"),
    "exp_avg_that_broadcasts": (put(*ENTRY, "exp_avg", value=lambda t: t[:1]), r"\(3, 4\), got \(1, 4\)"),
    "exp_avg_sq_below_zero": (put(*ENTRY, "exp_avg_sq", value=lambda t: -t - 1), "below zero"),
    "moments_of_another_optimizer": (put(*ENTRY, value=lambda e: {**e, "momentum_buffer": e["exp_avg"]}), "momentum_b"),
    "master_of_another_shape": (put(*ENTRY, "master", value=lambda t: t[0]), "'master'"),
    "master_of_other_values": (put(*ENTRY, "master", value=lambda t: t + 1), r"1\.weight.*model's state first"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_state_is_refused_and_nothing_is_changed(name: str, trained: Trained) -> None:
    change, match = MALFORMED[name]
    bad = change(copy.deepcopy(trained.good))
    with pytest.raises(UsageError, match=match) as refusal:
        trained.optimizer.load_state_dict(bad)
    assert "nothing was changed" in str(refusal.value) and len(str(refusal.value)) < 800
    trained.assert_unchanged()


def test_a_state_that_is_refused_gives_a_frozen_parameter_none(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
        model[0].requires_grad_(False)
        optimizer = tiered.AdamW(tiered.shard(model, store, param_dtype=torch.bfloat16).parameters())
        state, keys = optimizer.state_dict(), set(store)
        zeros = [torch.zeros(parameter.shape) for parameter in model.parameters()]
        fresh = {i: {"step": 1, "exp_avg": each, "exp_avg_sq": each} for i, each in enumerate(zeros)}
        fresh[3]["master"] = zeros[3] + 77
        with pytest.raises(UsageError, match="nothing was changed"):
            optimizer.load_state_dict({**state, "state": fresh})
        assert optimizer.state_dict()["state"].keys() == {2, 3} and set(store) == keys


JUNK = [
    None, True, 7, 10**400, -0.0, float("nan"), "x", b"x", [], {}, (), object(), 1 + 2j, np.float32(1), np.zeros(3),
    torch.ones((), dtype=torch.bool), torch.ones(3, dtype=torch.int8), torch.ones(2, 2), torch.ones(0).half(),
]  # fmt: skip


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a nest of dicts, lists and tuples."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, item in items:
        yield from places_in(item, (*path, name))


def spoilt(value: Any, path: tuple[Any, ...], rng: random.Random) -> Any:
    """Return ``value`` with junk at ``path``, in place of what is there or beside it, or with nothing there."""
    if not path:
        return {**value, rng.choice(["x", 4]): rng.choice(JUNK)} if isinstance(value, dict) else rng.choice(JUNK)
    copied = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and rng.random() < 0.3:
        del copied[path[0]]
    else:
        copied[path[0]] = rng.choice(JUNK) if rng.random() < 0.2 else spoilt(copied[path[0]], path[1:], rng)
    return tuple(copied) if isinstance(value, tuple) else copied


def test_junk_anywhere_is_taken_whole_or_refused_whole(trained: Trained) -> None:
    for seed in range(250):
        rng, bad = random.Random(seed), trained.good
        for _ in range(rng.randint(1, 2)):
            bad = spoilt(bad, rng.choice(list(places_in(bad))), rng)
        try:
            trained.optimizer.load_state_dict(bad)
        except UsageError as error:
            assert "nothing was changed" in str(error)
            trained.assert_unchanged()
        else:  # some of it is as good: another number, a state that is not there
            trained.step()
            trained.model.load_state_dict(trained.parameters)
            trained.optimizer.load_state_dict(trained.good)
            trained.assert_unchanged()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_state_dict_returns_is_taken(kind: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        trained = Trained(store, kind, dtype)
        trained.step()
        later, parameters = trained.optimizer.state_dict(), trained.model.state_dict()
        trained.model.load_state_dict(trained.parameters)
        trained.optimizer.load_state_dict(trained.good)
        trained.assert_unchanged()
        trained.step()
        if dtype is None:  # the other masters were only in the optimizer's state
            assert_equal(trained.optimizer.state_dict(), later)
            assert_equal(trained.model.state_dict(), parameters)


def test_ids_decide_whose_a_state_is(trained: Trained) -> None:
    """As in torch: the order of a group's ids is that of its parameters, whatever they are called."""
    names = {0: "w", 1: "b", 2: "last"}
    renamed = copy.deepcopy(trained.good)
    for group in renamed["param_groups"]:
        group["params"] = [names[key] for key in group["params"]]
    renamed["state"] = {names[key]: renamed["state"][key] for key in (2, 0, 1)}
    trained.optimizer.load_state_dict(renamed)
    trained.assert_unchanged()


def test_a_group_that_a_scheduler_and_torch_have_added_to_is_taken(trained: Trained) -> None:
    added = {"initial_lr": 0.5, "amsgrad": False, "foreach": None, "fused": True, "capturable": False}
    added |= {"differentiable": False, "decoupled_weight_decay": True, "max_lr": 1.0}
    state = copy.deepcopy(trained.good)
    state["param_groups"][1] |= added
    trained.optimizer.load_state_dict(state)
    assert trained.optimizer.param_groups[1]["initial_lr"] == 0.5
    trained.optimizer.load_state_dict(trained.good)
    trained.assert_unchanged()


def test_hooks_see_the_whole_state_and_may_replace_it(trained: Trained) -> None:
    seen = []

    def repair(_: torch.optim.Optimizer, state: State) -> State:
        return {"state": state["moments"], "param_groups": state["param_groups"]}

    hooks = [
        trained.optimizer.register_load_state_dict_pre_hook(repair),
        trained.optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.state_dict())),
    ]
    trained.optimizer.load_state_dict({"moments": trained.good["state"], "param_groups": trained.good["param_groups"]})
    for hook in hooks:
        hook.remove()
    assert_equal(seen, [trained.good])


def test_the_sign_of_a_zero_is_no_mark(tmp_path: Path) -> None:
    """The sign bit of exp_avg_sq marks a tie of the master: loaded ones must not have it."""
    with debug_store(tmp_path, durable=False) as store:
        trained = Trained(store)
        state = copy.deepcopy(trained.good)
        hi = trained.parameters["1.weight"].float().view(torch.int32)
        bits = hi + torch.where(hi >> 16 & 1 == 0, 1 << 15, 1 << 14).to(torch.int32)  # a tie above each even one
        state["state"][2]["master"] = bits.view(torch.float32)
        state["state"][2]["exp_avg_sq"] = torch.full((3, 4), -0.0)
        assert torch.equal(bits.view(torch.float32).bfloat16(), trained.parameters["1.weight"])
        trained.optimizer.load_state_dict(state)
        found = trained.optimizer.state_dict()["state"][2]
    assert torch.equal(found["master"], state["state"][2]["master"])
    assert torch.equal(found["exp_avg_sq"], torch.zeros(3, 4)) and not found["exp_avg_sq"].signbit().any()


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
def test_a_number_that_is_a_tensor_is_used_as_its_number(name: str, tmp_path: Path) -> None:
    found = []
    for number in (0.25, torch.tensor(0.25)):
        with debug_store(tmp_path, durable=False) as store:
            mine = Trained(store)
            groups = [group | {name: number} for group in mine.good["param_groups"]]
            mine.optimizer.load_state_dict(mine.good | {"param_groups": groups})
            mine.step()
            found.append(mine.model.state_dict())
    assert_equal(found[1], found[0])
