"""optimizer.state never reads as empty: reset_state resets as torch does, all else is refused with the way on."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.reference import Lion
from tests.zero.training import debug_store
from tiered.errors import UsageError

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (tiered.AdamW, torch.optim.AdamW, {"lr": 1e-2}),
    "sgd": (tiered.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    "lion": (tiered.Lion, Lion, {"lr": 1e-3}),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))


def train(model: nn.Module, optimizer: Any, reset: Callable[[Any], Any], steps: int = 5) -> list[float]:
    """Train with a reset after the second step; its update is pending then."""
    losses = []
    for step in range(steps):
        if step == 2:
            reset(optimizer)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(next(model.parameters()).dtype)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def half_of(optimizer: Any) -> list[Any]:
    """Return every second parameter."""
    return [p for group in optimizer.param_groups for p in group["params"]][::2]


@pytest.mark.parametrize("update", ["step", "backward", "plain"])
@pytest.mark.parametrize("half", [True, False], ids=["half", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_gives_the_bits_of_torchs_own(kind: str, half: bool, update: str, tmp_path: Path) -> None:
    tiered_kind, torch_kind, options = KINDS[kind]

    def reset_torch(optimizer: Any) -> None:
        for parameter in half_of(optimizer) if half else list(optimizer.state):
            optimizer.state.pop(parameter)

    expected = layers()
    fused = {} if kind == "lion" else {"fused": True}
    groups = [{"params": [p]} for p in expected.parameters()]  # torch's fused SGD fails for a group with half its state
    losses = train(expected, torch_kind(groups, **options, **fused), reset_torch)
    with debug_store(tmp_path) as store:
        model = layers() if update == "plain" else tiered.shard(layers(), store)
        how: dict[str, Any] = {"store": store} if update == "plain" else {"update": update}
        optimizer = tiered_kind(model.parameters(), **options, **how)
        found = train(model, optimizer, lambda o: o.reset_state(half_of(o) if half else None))
        assert found == losses
        store.commit({})
    with debug_store(tmp_path) as store:  # a resume has the state after the reset
        if update == "plain":
            return
        model = tiered.shard(layers(), store)
        optimizer = tiered_kind(model.parameters(), **options)
        store.resume()
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected.state_dict()[name])
        counts = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        assert counts == ({3, 5} if half else {3})


@pytest.mark.parametrize("state", ["exact", "compact"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_keeps_masters_and_makes_a_fresh_state(kind: str, state: str, tmp_path: Path) -> None:
    tiered_kind, _, options = KINDS[kind]
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(layers(), store, param_dtype=torch.bfloat16)
        optimizer = tiered_kind(model.parameters(), state=state, **options)
        train(model, optimizer, lambda _: None)
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
    "popitem": lambda o: o.state.popitem(),
    "zero": zero_in_place,
    "items": lambda o: list(o.state.items()),
    "get": lambda o: o.state.get(half_of(o)[0]),
    "read": lambda o: o.state[half_of(o)[0]],
    "update": lambda o: o.state.update({half_of(o)[0]: {}}),
    "setdefault": lambda o: o.state.setdefault(half_of(o)[0], {}),
}


@pytest.mark.parametrize("way", REFUSED)
def test_every_other_way_is_refused_with_the_way_on(way: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(layers(), store)
        optimizer = tiered.AdamW(model.parameters())
        assert not optimizer.state and len(optimizer.state) == 0
        train(model, optimizer, lambda _: None, 1)
        with pytest.raises(UsageError, match="reset_state"):
            REFUSED[way](optimizer)
        with pytest.raises(UsageError, match="item 0 of parameters is none"):
            optimizer.reset_state([torch.zeros(3)])
        model(torch.zeros(1, 16)).sum().backward()
        with pytest.raises(UsageError, match="reset_state"):
            optimizer.reset_state()


def test_a_state_dict_hook_sees_the_whole_state(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(layers(), store)
        optimizer = tiered.AdamW(model.parameters())
        train(model, optimizer, lambda _: None, 1)
        seen: list[int] = []
        optimizer.register_state_dict_post_hook(lambda _, state: seen.append(len(state["state"])))
        optimizer.state_dict()
        assert seen == [6]
