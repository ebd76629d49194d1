"""A frozen parameter is written when it enters the store and never again; one that is unfrozen moves once."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import tiered
from tests.reference import MasterAdamW, Recipe
from tests.zero.training import SEED, debug_store
from tiered.errors import CapacityError, UsageError

WIDTH = 24
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.05}
NBYTES_PER_TRAINED = 16


class Block(nn.Module):
    """Two layers and a norm, on a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Blocks(nn.Module):
    """Blocks between a first and a last layer; ``frozen`` names what is frozen at first."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


Event = Callable[[nn.Module], None]


def batch(index: int) -> torch.Tensor:
    """Return fp32 (4, WIDTH)."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))


def unfreeze(*prefixes: str) -> Event:
    def event(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes):
                parameter.requires_grad_(True)

    return event


def freeze(*prefixes: str) -> Event:
    def event(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes):
                parameter.requires_grad_(False)

    return event


def plain(
    model: nn.Module, num_steps: int, events: dict[int, Event], num_micro_steps: int = 1
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Train in memory, ``events`` before their steps; return losses, parameters, and moments by parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    losses = []
    for step in range(num_steps):
        events.get(step, lambda model: None)(model)
        for micro_step in range(num_micro_steps):
            loss = model(batch(step * num_micro_steps + micro_step))
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict()), moments(model, optimizer)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of each parameter that was updated."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = {order[index]: values for index, values in optimizer.state_dict()["state"].items()}
    return {name: values for name, values in state.items() if values["step"]}


def assert_equal(found: Any, expected: Any) -> None:
    """Assert that losses, parameters and moments are the same bits."""
    losses, parameters, state = found
    assert all(map(torch.equal, losses, expected[0])), f"{losses} instead of {expected[0]}"
    assert [name for name, value in expected[1].items() if not torch.equal(parameters[name], value)] == []
    assert state.keys() == expected[2].keys()
    for name, values in expected[2].items():
        for key, value in values.items():
            assert torch.equal(state[name][key], value), f"{key} of {name}"


def written_bytes(store: tiered.Store) -> int:
    statistics = store.statistics()
    return statistics.write_bytes + statistics.catalog_write_bytes


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    store: tiered.Store,
    first: int,
    last: int,
    events: dict[int, Event] | None = None,
    num_micro_steps: int = 1,
) -> Iterator[tuple[torch.Tensor, int]]:
    """Train steps [first, last), a commit each where the store has commits; yield each loss and the bytes written."""
    for step in range(first, last):
        before = written_bytes(store)
        (events or {}).get(step, lambda model: None)(model)
        for micro_step in range(num_micro_steps):
            number = step * num_micro_steps + micro_step
            with tiered.accumulate(model) if micro_step < num_micro_steps - 1 else torch.enable_grad():
                loss = model(batch(number))
                loss.backward()
            if micro_step < num_micro_steps - 1:
                yield loss.detach().clone(), 0
        optimizer.step()
        optimizer.zero_grad()
        if store.durable:
            store.commit({"step": step + 1})
        yield loss.detach().clone(), written_bytes(store) - before


HALF = ("first", "blocks.0", "blocks.1")

CASES: dict[str, tuple[tuple[str, ...], dict[int, Event]]] = {
    "half": (HALF, {}),
    "single parameters": (("blocks.0.a.weight", "blocks.2.norm", "head.bias"), {}),
    "unfrozen later": (HALF, {2: unfreeze("blocks.1.a")}),
    "all of a unit unfrozen": (HALF, {2: unfreeze("blocks.0", "first")}),
    "unfrozen one after the other": (HALF, {1: unfreeze("blocks.1"), 2: unfreeze("blocks.0"), 4: unfreeze("first")}),
    "frozen later": ((), {2: freeze("blocks.1", "blocks.2.a")}),
    "frozen and unfrozen": (HALF, {1: freeze("blocks.2"), 2: unfreeze("blocks.1.b"), 3: unfreeze("blocks.2.a")}),
}


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_bits_of_what_is_frozen_and_unfrozen(name: str, durable: bool, update: str, tmp_path: Path) -> None:
    frozen, events = CASES[name]
    torch.manual_seed(SEED)
    expected = plain(Blocks(frozen), 6, events)
    torch.manual_seed(SEED)
    with debug_store(tmp_path, durable=durable) as store:
        model = tiered.shard(Blocks(frozen), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), update=update, **ADAMW)
        losses = [loss for loss, _ in steps(model, optimizer, store, 0, 6, events)]
        assert_equal((losses, model.state_dict(), moments(model, optimizer)), expected)


MOMENTS = ["in a forward", "between micro-steps", "between backward and step"]


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_unfreezing_inside_a_step_is_refused_and_after_it_done(moment: str, update: str, tmp_path: Path) -> None:
    events = {1: unfreeze("blocks.1.a")}
    torch.manual_seed(SEED)
    expected = plain(Blocks(HALF), 3, events, num_micro_steps=2)
    torch.manual_seed(SEED)
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(HALF), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), update=update, **ADAMW)

        def refused(now: str) -> None:
            if now == moment:
                with pytest.raises(UsageError, match=r"blocks\.1\.a\.weight: unfrozen inside a step.* before the next"):
                    events[1](model)
                assert not any(parameter.requires_grad for parameter in model.blocks[1].parameters())

        hook = model.blocks[2].register_forward_hook(lambda *_: refused("in a forward"))
        losses = []
        for index in range(2):
            with tiered.accumulate(model) if index == 0 else torch.enable_grad():
                loss = model(batch(index))
                losses.append(loss.detach().clone())
                loss.backward()
                refused("between micro-steps" if index == 0 else "between backward and step")
        hook.remove()
        optimizer.step()
        events[1](model)  # before zero_grad(), which drops nothing then
        optimizer.zero_grad()
        losses += [loss for loss, _ in steps(model, optimizer, store, 1, 3, num_micro_steps=2)]
        assert_equal((losses, model.state_dict(), moments(model, optimizer)), expected)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("is_used", [True, False])
def test_bits_of_an_unfreezing_after_a_forward(is_used: bool, update: str, tmp_path: Path) -> None:
    """The forward may be an evaluation without ``no_grad``; its graph has no gradient for the parameter."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        first = model(batch(0))
        unfreeze("blocks.1.a")(model)
        losses = [first, first if is_used else model(batch(1))]
        for index in range(2, 4):
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(model(batch(index)))
        return [loss.detach() for loss in losses]

    torch.manual_seed(SEED)
    plain_model = Blocks(HALF)
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    expected = train(plain_model, plain_optimizer), plain_model.state_dict(), moments(plain_model, plain_optimizer)
    torch.manual_seed(SEED)
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(HALF), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), update=update, **ADAMW)
        assert_equal((train(model, optimizer), model.state_dict(), moments(model, optimizer)), expected)


def test_a_parameter_unfrozen_between_forward_and_backward_waits_for_the_step(tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(HALF), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        loss = model(batch(0))
        unfreeze("first")(model)
        loss.backward()
        with pytest.raises(UsageError, match=r"unfrozen inside a step.* after optimizer.step\(\), before the next"):
            model(batch(1))  # the gradients of the head, which is of the same unit, wait
        with torch.no_grad():
            model(batch(1))
        optimizer.step()
        optimizer.zero_grad()
        list(steps(model, optimizer, store, 1, 2))
        assert all(segment.trainable for segment in segments(model.first))  # type: ignore[arg-type]


def test_after_a_forward_and_a_backward_that_failed_parameters_are_unfrozen(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Blocks(HALF), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        hook = model.blocks[2].register_forward_hook(fail)  # type: ignore[union-attr,index]
        with pytest.raises(KeyboardInterrupt):
            model(batch(0))
        hook.remove()
        unfreeze("blocks.0")(model)
        handle = model.get_parameter("blocks.3.a.weight").register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(batch(0)).backward()
        handle.remove()
        optimizer.zero_grad()
        unfreeze("blocks.1")(model)
        list(steps(model, optimizer, store, 0, 2))
        assert all(s.trainable for block in model.blocks[:2] for s in segments(block))  # type: ignore[union-attr,index]


def test_bits_of_bf16_parameters_that_are_unfrozen(tmp_path: Path) -> None:
    def losses_of(model: nn.Module, step: Callable[[], object], unfrozen: Callable[[], object]) -> list[torch.Tensor]:
        losses = []
        for index in range(5):
            if index == 2:
                unfrozen()
            loss = model(batch(index))
            loss.backward()
            losses.append(loss.detach().clone())
            step()
            model.zero_grad()
        return losses

    torch.manual_seed(SEED)
    model = Blocks()
    master = MasterAdamW(model, Recipe(param_dtype=torch.bfloat16, adamw=ADAMW))
    for name, parameter in model.named_parameters():
        if name.startswith(HALF):  # the master of one that was frozen when it was cast is its value
            parameter.requires_grad_(False)
            master.masters[parameter].data.copy_(parameter)
    late = [p for name, p in model.named_parameters() if name.startswith("blocks.1")]
    expected = losses_of(model, master.step, lambda: [p.requires_grad_(True) for p in late])
    torch.manual_seed(SEED)
    with debug_store(tmp_path) as store:
        sharded = tiered.shard(Blocks(HALF), store, unit=(Block,), param_dtype=torch.bfloat16)
        optimizer = tiered.AdamW(sharded.parameters(), **ADAMW)
        found = losses_of(sharded, optimizer.step, lambda: unfreeze("blocks.1")(sharded))
        assert all(map(torch.equal, found, expected))
        state = sharded.state_dict()
        assert [name for name, value in model.state_dict().items() if not torch.equal(state[name], value)] == []


@pytest.mark.parametrize("name", ["half", "unfrozen later", "frozen and unfrozen"])
@pytest.mark.parametrize("stop", range(1, 6))
def test_a_run_that_stops_and_resumes(stop: int, name: str, tmp_path: Path) -> None:
    """What was unfrozen by then is so before the model is sharded again; what was frozen, too."""
    frozen, events = CASES[name]
    torch.manual_seed(SEED)
    expected = plain(Blocks(frozen), 6, events)
    torch.manual_seed(SEED)
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(frozen), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        losses = [loss for loss, _ in steps(model, optimizer, store, 0, stop, events)]
    with debug_store(tmp_path) as store:
        model = Blocks(frozen)
        for step in range(stop):
            events.get(step, lambda model: None)(model)
        model = tiered.shard(model, store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        assert store.resume() == {"step": stop}
        losses += [loss for loss, _ in steps(model, optimizer, store, stop, 6, events)]
        assert_equal((losses, model.state_dict(), moments(model, optimizer)), expected)


def head_only(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an optimizer of the head; all else is in no group, and only the last block requires gradients."""
    return make([p for name, p in model.named_parameters() if name.startswith("head")], **ADAMW)


def grow(model: nn.Module, optimizer: torch.optim.Optimizer, *prefixes: str) -> None:
    """Unfreeze, and give to ``optimizer``, in a group of other hyperparameters."""
    unfreeze(*prefixes)(model)
    added = [p for name, p in model.named_parameters() if name.startswith(prefixes)]
    optimizer.add_param_group({"params": added, "lr": 3e-3, "weight_decay": 0.0})


GROWN = {1: ("blocks.3",), 3: ("blocks.2.a", "first"), 5: ("blocks.2.b",)}
"""The parameters that are added before these steps; the first of them never were frozen."""


def growing(model: nn.Module, optimizer: Any, first: int, last: int, commit: Callable[[int], object]) -> list[Any]:
    losses = []
    for step in range(first, last):
        if step in GROWN:
            grow(model, optimizer, *GROWN[step])
        loss = model(batch(step))
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        commit(step + 1)
    return losses


def in_memory(num_steps: int) -> tuple[Any, ...]:
    torch.manual_seed(SEED)
    model = Blocks((*HALF, "blocks.2"))
    optimizer = head_only(model, lambda *args, **options: torch.optim.AdamW(*args, fused=True, **options))
    losses = []
    for step in range(num_steps):  # gradients of parameters in no group would gather until they are in one
        losses += growing(model, optimizer, step, step + 1, lambda _: model.zero_grad())
    return losses, dict(model.state_dict()), moments(model, optimizer)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("durable", [True, False])
def test_a_group_that_is_added_is_trained_from_the_next_step_on(durable: bool, update: str, tmp_path: Path) -> None:
    expected = in_memory(7)
    torch.manual_seed(SEED)
    with debug_store(tmp_path, durable=durable) as store:
        model = tiered.shard(Blocks((*HALF, "blocks.2")), store, unit=(Block,))
        optimizer = head_only(model, lambda *args, **options: tiered.AdamW(*args, update=update, **options))
        found = growing(model, optimizer, 0, 7, lambda step: store.commit({"step": step}) if durable else None)
        assert_equal((found, model.state_dict(), moments(model, optimizer)), expected)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3, 3e-3, 3e-3]


@pytest.mark.parametrize("adds", ["at construction", "before the resume"])
def test_a_run_with_added_groups_is_rolled_back_and_resumed(adds: str, tmp_path: Path) -> None:
    expected = in_memory(7)
    torch.manual_seed(SEED)
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks((*HALF, "blocks.2")), store, unit=(Block,))
        optimizer = head_only(model, tiered.AdamW)
        losses = growing(model, optimizer, 0, 3, lambda step: store.commit({"step": step}))
        growing(model, optimizer, 3, 4, lambda _: None)
        store.rollback()
        assert len(optimizer.param_groups) == 2
        losses += growing(model, optimizer, 3, 4, lambda step: store.commit({"step": step}))
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks((*HALF, "blocks.2")), store, unit=(Block,))
        late = [step for step in GROWN if step < store.state["step"]]
        if adds == "before the resume":
            optimizer = head_only(model, tiered.AdamW)
            with pytest.raises(UsageError, match=r"optimizer\.add_param_group before store\.resume\(\)"):
                store.resume()
            for step in late:
                grow(model, optimizer, *GROWN[step])
        else:
            groups = [{"params": [p for n, p in model.named_parameters() if n.startswith("head")]}]
            for step in late:
                unfreeze(*GROWN[step])(model)
                groups.append({"params": [p for n, p in model.named_parameters() if n.startswith(GROWN[step])]})
            optimizer = tiered.AdamW(groups, **ADAMW)
        assert store.resume() == {"step": 4}
        losses += growing(model, optimizer, 4, 7, lambda step: store.commit({"step": step}))
        assert_equal((losses, model.state_dict(), moments(model, optimizer)), expected)


def test_a_group_that_cannot_be_added_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Blocks(), store, unit=(Block,))
        optimizer = tiered.SGD(model.head.parameters(), lr=0.1, update="backward")  # type: ignore[union-attr]
        weight = model.get_parameter("first.weight")
        for group, kind, match in (
            ({"params": [weight, nn.Parameter(torch.ones(3))]}, UsageError, "add_param_group of parameters beside"),
            ({"params": weight, "momentum": 0.9}, UsageError, "without momentum"),
            ({"params": weight, "note": object()}, TypeError, "note"),
            ({"params": model.get_parameter("head.bias")}, ValueError, "more than one parameter group"),
        ):
            with pytest.raises(kind, match=match):
                optimizer.add_param_group(group)
        model(batch(0)).backward()
        with pytest.raises(UsageError, match=r"while a step updates; expected after optimizer\.step\(\)"):
            optimizer.add_param_group({"params": weight})
        optimizer.step()
        assert len(optimizer.param_groups) == 1 and weight not in set(optimizer.parameters_with_state())
        optimizer.add_param_group({"params": weight})
        before = model.state_dict()["first.weight"]
        model(batch(0)).backward()
        optimizer.step()
        assert not torch.equal(before, model.state_dict()["first.weight"])


@pytest.mark.parametrize("freezes_again", [True, False])
def test_a_rollback_over_an_unfreezing(freezes_again: bool, tmp_path: Path) -> None:
    events = {2: unfreeze("blocks.1")}
    torch.manual_seed(SEED)
    expected = plain(Blocks(HALF), 5, events)
    torch.manual_seed(SEED)
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(HALF), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        losses = [loss for loss, _ in steps(model, optimizer, store, 0, 2)]
        unfreeze("blocks.1")(model)
        model(batch(9)).backward()
        optimizer.step()
        store.rollback()
        if freezes_again:
            freeze("blocks.1")(model)
        losses += [loss for loss, _ in steps(model, optimizer, store, 2, 5, events)]
        assert_equal((losses, model.state_dict(), moments(model, optimizer)), expected)


def test_what_was_frozen_before_a_resume_is_not_written_after_it(tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        list(steps(model, optimizer, store, 0, 2))
    with debug_store(tmp_path) as store:
        model = Blocks(("blocks.1", "blocks.2.a"))
        model = tiered.shard(model, store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        store.resume()
        list(steps(model, optimizer, store, 2, 3))
        before = keys_written(store)
        assert {"model/parameters/blocks.1", "model/parameters/.frozen/blocks.2"} < before.keys()
        list(steps(model, optimizer, store, 3, 5))
        written = {key for key, number in keys_written(store).items() if before[key] != number}
        assert not {"model/parameters/blocks.1", "model/parameters/.frozen/blocks.2"} & written
        assert {"model/parameters/blocks.2", "model/parameters/blocks.0", "model/parameters/root"} < written


@pytest.mark.parametrize("number", [1, 2])
def test_a_relayout_that_fails_in_the_middle_abandons_the_step_and_a_rollback_goes_on(
    number: int, tmp_path: Path
) -> None:
    events = {2: unfreeze("blocks.1.a")}
    torch.manual_seed(SEED)
    expected = plain(Blocks(HALF), 4, events)
    torch.manual_seed(SEED)
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(HALF), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        losses = [loss for loss, _ in steps(model, optimizer, store, 0, 2)]
        working_set = store.working_set
        create, made = working_set.create, []

        def refuse(key: str, *args: Any, scratch: bool = False, **kwargs: Any) -> None:
            made.extend([key] if not scratch else [])
            if len(made) == number:
                raise CapacityError
            create(key, *args, scratch=scratch, **kwargs)

        unfreeze("blocks.1.a")(model)
        working_set.create = refuse  # type: ignore[method-assign]
        with pytest.raises(CapacityError):
            model(batch(2))
        working_set.create = create  # type: ignore[method-assign]
        with pytest.raises(tiered.StepAbandonedError, match=r"blocks\.1"):
            model(batch(2))
        store.rollback()
        assert not [record.name for record in store.records() if record.name.startswith("model/relayout/")]
        losses += [loss for loss, _ in steps(model, optimizer, store, 2, 4, events)]
        assert_equal((losses, model.state_dict(), moments(model, optimizer)), expected)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_bytes_written_in_a_step(update: str, tmp_path: Path) -> None:
    frozen = ("first", "blocks.0", "blocks.1", "blocks.2.a.weight", "blocks.3")
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(frozen), store, unit=(Block,), hold=0)
        optimizer = tiered.AdamW(model.parameters(), update=update, **ADAMW)
        list(steps(model, optimizer, store, 0, 1))
        written = keys_written(store)
        list(steps(model, optimizer, store, 1, 3))
        changed = {key for key, number in keys_written(store).items() if written[key] != number}
        trained = {segment.unit.trainable_keys[0] for segment in segments(model) if segment.trainable}
        assert {key for key in changed if key.startswith("model/parameters/")} == trained
        num_frozen = sum(segment.nbytes for segment in segments(model) if not segment.trainable)
        assert num_frozen > 0
        unfreeze("blocks.0")(model)
        list(steps(model, optimizer, store, 3, 4))
        before = keys_written(store)
        assert before["model/parameters/blocks.1"] == written["model/parameters/blocks.1"]
        list(steps(model, optimizer, store, 4, 6))
        changed = {key for key, number in keys_written(store).items() if before[key] != number}
        trained = {segment.unit.trainable_keys[0] for segment in segments(model) if segment.trainable}
        assert {key for key in changed if key.startswith("model/parameters/")} == trained
        assert "model/parameters/blocks.0" in trained


def segments(model: nn.Module) -> list[Any]:
    return [parameter.segment for parameter in model.parameters()]


def keys_written(store: tiered.Store) -> dict[str, int]:
    """Return, by key, the generation in which its bytes were last written."""
    return {record.name: record.generation for record in store.records()}


def gpt2() -> nn.Module:
    """Return a tiny GPT-2 with LoRA adapters: the base is frozen."""
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=2, vocab_size=128, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    model: nn.Module = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    return model


def tokens(index: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers for it
def test_lora_over_a_frozen_base_writes_the_adapters_only(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    model = gpt2()
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    expected = []
    for index in range(4):
        loss = model(**tokens(index)).loss
        loss.backward()
        expected.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    with debug_store(tmp_path) as store:
        sharded = gpt2()
        sharded.load_state_dict(start)
        num_trained = sum(p.numel() for p in sharded.parameters() if p.requires_grad)
        num_units = sum(1 for _ in sharded.base_model.model.transformer.h) + 1
        sharded = tiered.shard(sharded, store, unit=(type(sharded.base_model.model.transformer.h[0]),))
        ours = tiered.AdamW(sharded.parameters(), **ADAMW)
        store.commit({"step": 0})
        losses = []
        for index in range(4):
            before = written_bytes(store)
            loss = sharded(**tokens(index)).loss
            loss.backward()
            losses.append(loss.detach().clone())
            del loss
            ours.step()
            ours.zero_grad()
            store.commit({"step": index + 1})
            aside = 2 * 4096 * num_units + (64 << 10)  # pages that keys are padded to, and the catalog's
            assert written_bytes(store) - before <= NBYTES_PER_TRAINED * num_trained + aside
        assert_equal(
            (losses, sharded.state_dict(), moments(sharded, ours)),
            (expected, model.state_dict(), moments(model, optimizer)),
        )


def test_blocks_that_may_write_write_a_frozen_span_only_where_it_changed(tmp_path: Path) -> None:
    frozen = ("first", "blocks.0", "blocks.1")
    with debug_store(tmp_path) as store:
        model = tiered.shard(Blocks(frozen), store, unit=(Block,), hold=0)
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        list(steps(model, optimizer, store, 0, 2))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        before = keys_written(store)

        def frozen_keys_written() -> set[str]:
            store.commit()
            keys = ("model/parameters/.frozen/root", "model/parameters/blocks.0", "model/parameters/blocks.1")
            return {key for key in keys if before[key] != keys_written(store)[key]}

        with tiered.unsharded(model), torch.no_grad():
            assert model(batch(0)).isfinite()
        assert not frozen_keys_written()
        assert keys_written(store) == before  # nor anything else
        model.load_state_dict(state)
        assert not frozen_keys_written()
        with tiered.unsharded(model), torch.no_grad():
            model.blocks[0].a.weight.numpy()[0, 0] = 7.0  # past torch's sight
            model.blocks[1].a.weight[0, 0] += 0.0
        assert frozen_keys_written() == {"model/parameters/blocks.0"}
        before = keys_written(store)
        state["blocks.1.a.weight"][1, 1] = 9.0
        model.load_state_dict(state)
        assert frozen_keys_written() == {"model/parameters/blocks.0", "model/parameters/blocks.1"}
    with debug_store(tmp_path) as store:  # the bytes of the device are those that the digests say
        assert store.verify().is_clean
        model = tiered.shard(Blocks(frozen), store, unit=(Block,), hold=0)
        tiered.AdamW(model.parameters(), **ADAMW)
        store.resume()
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items() if name.startswith(frozen))


@pytest.mark.parametrize("is_lingering", [False, True])
def test_a_lease_that_changed_nothing_leaves_the_key_clean_unless_a_tensor_lingers(
    is_lingering: bool, tmp_path: Path
) -> None:
    with debug_store(tmp_path) as store:
        store["base"] = torch.arange(5000)
        store.commit()
        lease = store.working_set.lease("base", "rw")
        kept = lease.tensor if is_lingering else None
        lease.release(is_unchanged=True)
        before = written_bytes(store)
        if kept is not None:
            kept[0] = 17  # still possible, and so it must be written
            del kept, lease
        store.commit()
        assert (written_bytes(store) - before > 5000 * 8) is is_lingering
        assert int(store["base"][0]) == (17 if is_lingering else 0)
    with debug_store(tmp_path) as store:
        assert int(store["base"][0]) == (17 if is_lingering else 0)


def test_two_parameters_over_one_storage_of_which_one_is_frozen_are_refused(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(8, 8))
            self.b = nn.Parameter(self.a.detach(), requires_grad=False)

    with debug_store(tmp_path) as store:
        with pytest.raises(UsageError, match="share memory"):
            tiered.shard(Shared(), store)


def test_an_unfreezing_that_the_budget_is_too_small_for_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    with debug_store(tmp_path / "probe", 1 << 14, durable=False) as store, pytest.raises(CapacityError) as refusal:
        tiered.shard(Blocks(("first", "blocks")), store, unit=(Block,))
    nbytes = int(str(refusal.value).split("smallest working budget is ")[1].split(" ")[0])
    with debug_store(tmp_path / "store", nbytes, durable=False) as store:
        model = tiered.shard(Blocks(("first", "blocks")), store, unit=(Block,))
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        unfreeze("blocks")(model)
        with pytest.raises(CapacityError, match="smallest working budget"):
            model(batch(0))
        freeze("blocks")(model)
        list(steps(model, optimizer, store, 0, 2))
