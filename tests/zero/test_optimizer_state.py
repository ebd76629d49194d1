"""The state of an optimizer as users see it: torch's own there and back, begun anew, and never read as empty."""

import collections
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.reference import Lion
from tests.zero.training import debug_store
from tiered.errors import UsageError

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (tiered.AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.07}),
    "sgd": (tiered.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.07}),
    "lion": (tiered.Lion, Lion, {"lr": 1e-3}),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(next(model.parameters()).dtype)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# -- torch's own there and back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "default"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_training_goes_on_with_the_same_bits_there_and_back(kind: str, choice: dict[str, bool], tmp_path: Path) -> None:
    tiered_kind, torch_kind, options = KINDS[kind]
    expected, first, last = layers(), layers(), layers()
    fused = torch_kind(expected.parameters(), **options, fused=True)
    train(expected, fused, range(6))
    begun = torch_kind(first.parameters(), **options, fused=True)
    train(first, begun, range(2))
    given = begun.state_dict()
    if choice:  # as an optimizer of torch that is not fused has it
        given["param_groups"] = [group | {"fused": None} for group in given["param_groups"]]
    with debug_store(tmp_path) as store:
        model = tiered.shard(layers(), store)
        optimizer = tiered_kind(model.parameters(), **options)
        model.load_state_dict(first.state_dict())
        optimizer.load_state_dict(given)
        train(model, optimizer, range(2, 4))
        parameters, state = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    target = torch_kind(last.parameters(), **options, **choice)
    last.load_state_dict(parameters)
    target.load_state_dict(state)
    assert set(target.param_groups[0]) == set(fused.param_groups[0])
    train(last, target, range(4, 6))
    assert_same(last.state_dict(), expected.state_dict())


# -- begun anew --------------------------------------------------------------------------------------------------------


def half_of(optimizer: Any) -> list[Any]:
    """Return every second parameter."""
    return [p for group in optimizer.param_groups for p in group["params"]][::2]


@pytest.mark.parametrize("update", ["step", "backward", "plain"])
@pytest.mark.parametrize("half", [True, False], ids=["half", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_gives_the_bits_of_torchs_own(kind: str, half: bool, update: str, tmp_path: Path) -> None:
    tiered_kind, torch_kind, options = KINDS[kind]

    def run(model: nn.Module, optimizer: Any, reset: Callable[[Any], object]) -> list[float]:
        losses = train(model, optimizer, range(2))
        reset(optimizer)  # the update of the second step is pending
        return losses + train(model, optimizer, range(2, 5))

    def reset_torch(optimizer: Any) -> None:
        for parameter in half_of(optimizer) if half else list(optimizer.state):
            optimizer.state.pop(parameter)

    expected = layers()
    fused = {} if kind == "lion" else {"fused": True}
    groups = [{"params": [p]} for p in expected.parameters()]  # torch's fused SGD fails for a group with half its state
    losses = run(expected, torch_kind(groups, **options, **fused), reset_torch)
    with debug_store(tmp_path) as store:
        model = layers() if update == "plain" else tiered.shard(layers(), store)
        how: dict[str, Any] = {"store": store} if update == "plain" else {"update": update}
        optimizer = tiered_kind(model.parameters(), **options, **how)
        assert run(model, optimizer, lambda o: o.reset_state(half_of(o) if half else None)) == losses
        store.commit({})
    if update == "plain":
        return
    with debug_store(tmp_path) as store:  # a resume has the state after the reset
        model = tiered.shard(layers(), store)
        optimizer = tiered_kind(model.parameters(), **options)
        store.resume()
        assert_same(model.state_dict(), expected.state_dict())
        counts = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        assert counts == ({3, 5} if half else {3})


@pytest.mark.parametrize("state", ["exact", "compact"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_keeps_masters_and_makes_a_fresh_state(kind: str, state: str, tmp_path: Path) -> None:
    tiered_kind, _, options = KINDS[kind]
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(layers(), store, param_dtype=torch.bfloat16)
        optimizer = tiered_kind(model.parameters(), state=state, **options)
        train(model, optimizer, range(5))
        before = optimizer.state_dict()["state"]
        assert len(optimizer.state) == len(before) == 6 and half_of(optimizer)[0] in optimizer.state
        optimizer.reset_state()
        for number, after in optimizer.state_dict()["state"].items():
            assert int(after["step"]) == 0
            assert torch.equal(after["master"], before[number]["master"])
            assert not any(value.any() for name, value in after.items() if name != "master")


def test_marks_of_ties_outlive_a_reset(tmp_path: Path) -> None:
    bits = torch.full((16, 16), 0x3F808000, dtype=torch.int32)  # masters that are ties above an even upper half
    with debug_store(tmp_path, durable=False) as store:
        model = nn.Linear(16, 16, bias=False)
        model.weight.data = bits.view(torch.float32)
        optimizer = tiered.AdamW(tiered.shard(model, store, param_dtype=torch.bfloat16).parameters())
        optimizer.reset_state(model.weight)
        assert torch.equal(optimizer.state_dict()["state"][0]["master"].view(torch.int32), bits)


def zero_in_place(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "clear": lambda o: o.state.clear(),
    "assign": lambda o: setattr(o, "state", collections.defaultdict(dict)),
    "delete": lambda o: o.state.__delitem__(half_of(o)[0]),
    "pop": lambda o: o.state.pop(half_of(o)[0], None),
    "zero": zero_in_place,
    "get": lambda o: o.state.get(half_of(o)[0]),
    "read": lambda o: o.state[half_of(o)[0]],
    "setdefault": lambda o: o.state.setdefault(half_of(o)[0], {}),
}


@pytest.mark.parametrize("way", REFUSED)
def test_every_other_way_is_refused_with_the_way_on(way: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(layers(), store)
        optimizer = tiered.AdamW(model.parameters())
        assert not optimizer.state and len(optimizer.state) == 0
        train(model, optimizer, range(1))
        with pytest.raises(UsageError, match="reset_state"):
            REFUSED[way](optimizer)
        with pytest.raises(UsageError, match="item 0 of parameters is none"):
            optimizer.reset_state([torch.zeros(3)])
        model(torch.zeros(1, 16)).sum().backward()
        with pytest.raises(UsageError, match="reset_state"):
            optimizer.reset_state()


# -- moments and masters begin -----------------------------------------------------------------------------------------

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.25}
MOMENTA = (0.0, 0.0, 0.9, 0.9, 0.0, 0.9)
"""Of the second group, by step; the first group's is 0.9 from the beginning."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.param_groups[1]["momentum"] = MOMENTA[number]
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(number))
    model(x.to(next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(layer.parameters())} for layer in model]


def two_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def momenta(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    state = optimizer.state_dict()["state"]
    found = {index: each.get("momentum_buffer") for index, each in state.items()}
    return {index: buffer for index, buffer in found.items() if buffer is not None}


@pytest.mark.parametrize("way", ["resume", "rollback", "state_dict"])
def test_momentum_that_is_switched_on_later_begins_as_torchs_does(way: str, tmp_path: Path) -> None:
    """Its first buffer is the gradient, which is not dampened; what has begun is part of a commit and a state dict."""
    plain = two_layers()
    theirs = torch.optim.SGD(groups(plain), fused=True, **SGD)
    with debug_store(tmp_path) as store:
        model = tiered.shard(two_layers(), store)
        ours = tiered.SGD(groups(model), **SGD)
        for number in range(6):
            if way == "state_dict":
                ours.load_state_dict(ours.state_dict())
            elif way == "rollback":
                store.commit({"step": number})
                step(model, ours, number)
                store.rollback()
            elif number in (1, 3):
                store.commit({"step": number})
                store.close()
                store = tiered.Store(tmp_path, dram="32MiB")
                model = tiered.shard(two_layers(), store)
                ours = tiered.SGD(groups(model), **SGD)
                assert store.resume() == {"step": number}
            step(model, ours, number)
            step(plain, theirs, number)
            assert_same(momenta(ours), momenta(theirs))
        assert_same(model.state_dict(), plain.state_dict())
        store.commit()
        store.close()


def test_what_is_no_number_stays_none_when_its_moments_begin_anew() -> None:
    """The sign of a moment that is NaN is the processor's, and no mark of a tie beside the bf16 of a NaN."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(300))
            self.scale.data[0] = 1.00390625  # a tie of bf16, whose gradient is zero

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).sum()

    def x(step: int) -> Tensor:
        found = torch.randn(300, generator=torch.Generator().manual_seed(step))
        found[0] = 0
        if step == 1:
            found[-100:] = torch.tensor(float("inf")) * 0  # the processor's own NaN, whose sign is set
        return found.bfloat16()

    torch.manual_seed(0)
    with tiered.Store(engine="memory", dram="64MiB") as store:
        model = tiered.shard(Scale(), store, param_dtype=torch.bfloat16)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        for step in range(3):
            if step == 2:
                optimizer.reset_state()
            model(x(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.state_dict()["scale"].isnan().tolist() == [False] * 200 + [True] * 100
