"""What micro-batches that take turns refuse, and what a failure of one leaves of the others: nothing."""

import signal
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import tiered
from tests.models import CASES, GPT, Case, batch_of_tokens, batch_of_vectors
from tests.reference import Recipe
from tests.zero.training import debug_store, start


def small() -> GPT:
    return GPT(2)


class Stateful(GPT):
    """Keeps something in each forward."""

    def __init__(self, what: str) -> None:
        super().__init__(2)
        self.what, self.kept = what, None
        self.register_buffer("buffer", torch.zeros(2))
        self.generator = torch.Generator() if what == "generator" else None
        self.list: list[Tensor] = []

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.what == "tensor":
            self.kept = tokens
        elif self.what == "buffer":
            self.buffer += 1
        elif self.what == "list":
            self.list.append(tokens)
        elif self.what == "length":
            self.kept = tokens.shape[1]
        return super().forward(tokens, targets)


@pytest.mark.parametrize(
    ("what", "match"),
    [("tensor", "kept"), ("buffer", "buffer"), ("list", "list"), ("length", "kept"), ("generator", "of its own")],
)
def test_state_between_forwards_is_refused(what: str, match: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = start(Case(partial(Stateful, what), batch_of_tokens), Recipe(), store).model
        with pytest.raises(tiered.UsageError, match=f"micro_batches: .*{match}.*one after another"):
            tiered.micro_batches(model, [batch_of_tokens(0), batch_of_tokens(1)])


class Alternating(nn.Module):
    """Two visits to one block, which counts them, and goes by the count."""

    def __init__(self, num_visits: int) -> None:
        super().__init__()
        self.block, self.between, self.num_visits = Counting(), nn.Linear(32, 32), num_visits

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs.to(self.between.weight.dtype)
        for _ in range(self.num_visits):
            hidden = self.between(self.block(hidden))
        return (hidden - targets).square().mean()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls = nn.Linear(32, 32), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        return self.linear(inputs) if self.num_calls % 2 else -self.linear(inputs)


def test_a_counter_that_others_raise_between_two_visits_is_refused(tmp_path: Path) -> None:
    case = Case(partial(Alternating, 2), partial(batch_of_vectors, width=32), unit=(Counting, nn.Linear))
    with debug_store(tmp_path, durable=False) as store:
        model = start(case, Recipe(), store).model
        with pytest.raises(tiered.UsageError, match="num_calls was set in the forward"):
            tiered.micro_batches(model, [case.batch(0), case.batch(1)])
    with debug_store(tmp_path, durable=False) as store:
        model = start(Case(partial(Alternating, 1), case.batch, unit=case.unit), Recipe(), store).model
        tiered.micro_batches(model, [case.batch(0), case.batch(1)])  # one visit: the order is that without turns
        assert model.block.num_calls == 2


def test_running_statistics_are_refused_in_training(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASES["cnn"], Recipe(), store)
        batches = [session.case.batch(index) for index in range(2)]
        with pytest.raises(tiered.UsageError, match=r"stages\.0\.1 \(BatchNorm\) keeps running statistics"):
            tiered.micro_batches(session.model, batches)


def test_fixed_statistics_are_welcome(tmp_path: Path) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    case = Case(lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).eval(), batch_of_vectors)
    with debug_store(tmp_path, durable=False) as store:
        model = start(case, Recipe(), store).model
        losses = tiered.micro_batches(model, [torch.randn(3, 5)] * 2, loss=loss)
        assert torch.equal(*losses)


class Outer(nn.Module):
    """A unit with others inside, whose forward puts something in its place for a while."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.kept = what, "nothing"
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.dropout = nn.Dropout(0.1 if "backward" in what else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.change, x, use_reentrant=False) if "backward" in self.what else self.change(x)

    def change(self, x: Tensor) -> Tensor:
        if "parameters" in self.what:
            changed = {name: parameter * 0.5 for name, parameter in self.inner.named_parameters()}
            return self.dropout(functional_call(self.inner, changed, (x,))).tanh()
        self.kept = "something"
        try:
            return self.inner(x).tanh() if self.kept == "something" else x
        finally:
            self.kept = "nothing"


@pytest.mark.parametrize("what", ["parameters", "parameters in backward", "attribute"])
def test_what_is_in_its_place_for_a_while_is_not_shown_to_others(what: str, tmp_path: Path) -> None:
    """They would put it back as the module's own: parameters halved once more for each micro-batch, for good.

    With dropout the first forwards run one after the other, and only the backwards take turns.
    """

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    batches = [torch.randn(3, 5) for _ in range(3)]
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(nn.Sequential(Outer(what), Outer(what)), store, unit=(Outer, nn.Linear))
        before = model.state_dict()
        with pytest.raises(tiered.UsageError, match=r"[01]\..*in the forward, which others interrupt.*one after"):
            torch.stack(tiered.micro_batches(model, batches, loss=loss)).mean().backward()
        model.zero_grad()
        after = model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        torch.stack(tiered.micro_batches(model, batches[:1], loss=loss)).mean().backward()


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand(())


def refusals() -> Iterator[tuple[str, Any]]:
    x, y = batch_of_tokens(0)
    yield "no loss", lambda model: tiered.micro_batches(model, [x])
    yield (
        "drew random numbers",
        lambda model: tiered.micro_batches(model, [(x, y)], loss=lambda m, *b: DrawsInBackward.apply(m(*b)))[
            0
        ].backward(),
    )
    yield "create_graph=True", lambda model: tiered.micro_batches(model, [(x, y)])[0].backward(create_graph=True)
    yield (
        "inside a forward",
        lambda model: tiered.micro_batches(model, [(x, y)], loss=lambda m, *b: tiered.micro_batches(m, [b])[0]),
    )


@pytest.mark.parametrize("number", range(4))
def test_what_is_refused(number: int, tmp_path: Path) -> None:
    match, call = list(refusals())[number]
    with debug_store(tmp_path, durable=False) as store:
        model = start(Case(small, batch_of_tokens), Recipe(), store).model
        with pytest.raises(tiered.UsageError, match=match):
            call(model)
        check_usable(model)


def check_usable(model: nn.Module) -> None:
    """Check that nothing is left of a failure: a forward and backward in turns pass."""
    model.zero_grad()
    torch.stack(tiered.micro_batches(model, [batch_of_tokens(0), batch_of_tokens(1)])).mean().backward()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least one"):
        tiered.micro_batches(small(), [])
    with pytest.raises(TypeError, match="micro-batch of type int"):
        tiered.micro_batches(small(), [3])
    with pytest.raises(TypeError, match="expected a Module"):
        tiered.micro_batches(len, [batch_of_tokens(0)])  # type: ignore[arg-type]


# -- failures ------------------------------------------------------------------------------------------------------


class FailsError(Exception):
    pass


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException]) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise ctx.error


@pytest.mark.parametrize("error", [FailsError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["begin", "end", "backward"])
def test_a_micro_batch_that_fails_fails_all(place: str, error: type[BaseException], tmp_path: Path) -> None:
    """As it is, with a note; the others end where they are, and the next call works. (A fixture looks for threads.)"""

    def loss(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        if number == 2 and place == "begin":
            raise error
        value = model(x, y)
        if number == 2 and place == "end":
            raise error
        return Fails.apply(value, error) if number == 2 and place == "backward" else value

    with debug_store(tmp_path, durable=False) as store:
        model = start(Case(small, batch_of_tokens), Recipe(), store).model
        batches = [(number, *batch_of_tokens(number)) for number in range(4)]
        with pytest.raises(error) as caught:
            torch.stack(tiered.micro_batches(model, batches, loss=loss)).mean().backward()
        assert caught.value.__notes__ == ["in micro-batch 2, counted from 0"]
        check_usable(model)


@pytest.mark.parametrize("is_backward", [False, True])
def test_an_interrupt_of_the_waiting_caller_ends_all(is_backward: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module, number: int, x: Tensor, y: Tensor) -> Tensor:
        value = model(x, y)
        if number == 1 and not is_backward:
            signal.raise_signal(signal.SIGINT)
        return Interrupts.apply(value) if number == 1 and is_backward else value

    with debug_store(tmp_path, durable=False) as store:
        model = start(Case(small, batch_of_tokens), Recipe(), store).model
        batches = [(number, *batch_of_tokens(number)) for number in range(3)]
        with pytest.raises(KeyboardInterrupt):
            torch.stack(tiered.micro_batches(model, batches, loss=loss)).mean().backward()
        check_usable(model)


class Interrupts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        return gradient


def test_a_backward_that_fails_abandons_what_it_has_begun_to_update(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(Case(small, batch_of_tokens), Recipe(), store, "backward")
        session.model.blocks[0].register_full_backward_hook(lambda *_: (_ for _ in ()).throw(FailsError))
        with pytest.raises(FailsError):
            torch.stack(tiered.micro_batches(session.model, [batch_of_tokens(0)] * 3)).mean().backward()
        with pytest.raises(tiered.StoreLostError):
            session.model(*batch_of_tokens(0))


def test_dropped_losses_leave_nothing(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = start(Case(small, batch_of_tokens), Recipe(), store).model
        marks = [type("Mark", (), {})() for _ in range(3)]
        alive = [weakref.ref(mark) for mark in marks]
        batches = [(mark, *batch_of_tokens(0)) for mark in marks]
        losses = tiered.micro_batches(model, batches, loss=lambda m, mark, *b: Fails.apply(m(*b), mark))
        del batches
        marks.clear()
        assert all(reference() is not None for reference in alive), "kept by the graphs"
        del losses
        assert not any(reference() is not None for reference in alive)
