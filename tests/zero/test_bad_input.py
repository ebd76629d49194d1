"""Bad input at the Python level: one clear error that names what is wrong and what to do, and nothing lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.models import CASES, GPT
from tests.reference import Recipe
from tests.zero.training import assert_same, debug_store, reference, start
from tiered.errors import CapacityError, ClosedError, UsageError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tiered.Store]:
    with debug_store(tmp_path / "store", durable=False) as store:
        yield store


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return GPT()


BAD_SHARDS: dict[str, tuple[Callable[[tiered.Store], Any], type[Exception], str]] = {
    "stage": (lambda s: tiered.shard(GPT(), s, stage=4), ValueError, "stage"),
    "device": (lambda s: tiered.shard(GPT(), s, device="tpu"), UsageError, "device"),
    "activations": (lambda s: tiered.shard(GPT(), s, activations="never"), UsageError, "activations"),
    "unit_of_no_module": (lambda s: tiered.shard(GPT(), s, unit=nn.LSTM), UsageError, "LSTM"),
    "unit_of_wrong_type": (lambda s: tiered.shard(GPT(), s, unit=3), TypeError, "unit"),
    "hold_that_is_no_size": (lambda s: tiered.shard(GPT(), s, hold="much"), ValueError, "much"),
    "hold_of_more_than_there_is": (lambda s: tiered.shard(GPT(), s, hold="1GiB"), CapacityError, "hold"),
    "param_dtype_of_integers": (lambda s: tiered.AdamW(tiered.shard(GPT(), s, param_dtype=torch.int32).parameters()),
        Exception, "int32|floating"),
    "param_dtype_as_text": (lambda s: tiered.shard(GPT(), s, param_dtype="bf16"), Exception, "bf16"),
    "half": (lambda s: tiered.AdamW(tiered.shard(GPT().half(), s).parameters()), TypeError, "float16"),
    "no_parameters": (lambda s: tiered.shard(nn.ReLU(), s), UsageError, "parameter"),
    "meta_without_weights": (lambda s: tiered.shard(meta_model(), s), UsageError, "weights="),
    "weights_not_there": (lambda s: tiered.shard(meta_model(), s, weights="/nowhere/x"), UsageError, "/nowhere/x"),
    "weights_lacking": (
        lambda s: tiered.shard(meta_model(), s, weights=GPT(3).state_dict()),
        UsageError, r"blocks\.3\.",
    ),
    "weights_of_other_shape": (
        lambda s: tiered.shard(meta_model(), s, weights=GPT().state_dict() | {"head.weight": torch.zeros(3)}),
        UsageError, r"head\.weight",
    ),
    "model_that_is_no_model": (lambda s: tiered.shard([1, 2], s), Exception, "Module|list"),
    "store_that_is_no_store": (lambda s: tiered.shard(GPT(), "/tmp"), Exception, "[Ss]tore|str"),
    "complex": (lambda s: tiered.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)), s),
        TypeError, r"parameter 1\.weight: torch\.complex64; expected real numbers.*view_as_real"),
    "sharded_parameter_of_another_kind": (
        lambda s: tiered.shard(nn.ParameterList([torch.zeros(3).to_sparse()]), s), TypeError, "sparse",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_bad_arguments_of_shard(name: str, store: tiered.Store) -> None:
    act, kind, match = BAD_SHARDS[name]
    with pytest.raises(kind, match=match) as refusal:
        act(store)
    assert not isinstance(refusal.value, AssertionError | AttributeError | KeyError | IndexError)


@pytest.mark.parametrize("options, kind, match", [
    ({"update": "backwards"}, UsageError, "backward"),
    ({"update": None}, UsageError, "step"),
    ({"state": "small"}, UsageError, "exact"),
    ({"lr": -1.0}, ValueError, "lr"),
    ({"lr": float("nan")}, ValueError, "lr"),
    ({"betas": (0.9, 1.0)}, ValueError, "betas"),
    ({"betas": (-0.1, 0.9)}, ValueError, "betas"),
    ({"eps": -1e-8}, ValueError, "eps"),
    ({"weight_decay": -1.0}, ValueError, "weight_decay"),
    ({"amsgrad": True}, TypeError, "amsgrad=True"),
    ({"capturable": True}, TypeError, "capturable=True"),
    ({"differentiable": True}, TypeError, "differentiable=True"),
], ids=str)  # fmt: skip
def test_bad_arguments_of_adamw(
    options: dict[str, Any], kind: type[Exception], match: str, store: tiered.Store
) -> None:
    model = tiered.shard(GPT(), store)
    with pytest.raises(kind, match=match):
        tiered.AdamW(model.parameters(), **options)
    tiered.AdamW(model.parameters())  # and nothing of the refused one is left


@pytest.mark.parametrize("optimizer", [tiered.AdamW, tiered.SGD, tiered.Lion])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("way")
def test_a_backward_through_plain_parameters_as_they_were_before_a_step_is_refused(
    store: tiered.Store, optimizer: Any, dtype: torch.dtype
) -> None:
    parameters = [nn.Parameter(torch.ones(2000, dtype=dtype)) for _ in range(2)]
    made = optimizer(parameters, lr=0.1, state="compact", store=store)
    loss = parameters[0].square().sum()
    loss.backward(retain_graph=True)
    made.step()
    assert parameters[1]._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_optimizers_on_the_wrong_parameters(store: tiered.Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="store="):
        tiered.AdamW(GPT().parameters())
    with pytest.raises(ValueError, match="empty"):
        tiered.AdamW([], store=store)
    with tiered.construct(store):
        model = GPT()
    with pytest.raises(UsageError, match="shard"):
        tiered.AdamW(model.parameters())
    model = tiered.shard(model, store)
    first = tiered.AdamW(model.parameters())
    with pytest.raises(UsageError, match="second"):
        tiered.AdamW(model.parameters())
    with pytest.raises(UsageError, match="add_param_group"):
        first.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with debug_store(tmp_path / "other", durable=False) as other:
        stranger = tiered.shard(GPT(), other)
        with pytest.raises(UsageError, match=r"several stores|one optimizer"):
            tiered.AdamW([*model.parameters(), *stranger.parameters()])


def test_sharding_twice_is_refused(store: tiered.Store) -> None:
    model = tiered.shard(GPT(), store)
    with pytest.raises(UsageError, match="sharded already"):
        tiered.shard(model, store)
    with pytest.raises(UsageError, match=r"second model|one store per model"):
        tiered.shard(GPT(), store)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_was_constructed_in_another_store_is_refused(
    param_dtype: torch.dtype | None, store: tiered.Store, tmp_path: Path
) -> None:
    with debug_store(tmp_path / "other") as other:
        with tiered.construct(other):
            model = GPT()
        with pytest.raises(UsageError, match="the store that construct was given"):
            tiered.shard(model, store, param_dtype=param_dtype)
        tiered.shard(model, other, param_dtype=param_dtype)
        assert other.commit() == 1


def test_helpers_on_models_that_are_not_sharded(store: tiered.Store) -> None:
    with pytest.raises(UsageError, match="shard"):
        with tiered.unsharded(GPT()):
            pass
    with pytest.raises(UsageError, match="shard"):
        with tiered.accumulate(GPT()):
            pass


def test_a_parameter_made_of_another_that_stays_in_the_model(store: tiered.Store) -> None:
    with tiered.construct(store):
        model = nn.Linear(4, 4)
        model.other = nn.Parameter(model.weight)
    with pytest.raises(UsageError, match="weight and other are two that share memory"):
        tiered.shard(model, store)


def test_a_closed_store(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        pass
    with pytest.raises(ClosedError):
        with tiered.construct(store):
            GPT()
    with pytest.raises(ClosedError):
        tiered.shard(GPT(), store)


def test_a_store_open_for_reading(tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        start(CASES["gpt"], Recipe(), store)
        store.commit({"step": 0})
    with debug_store(tmp_path, mode="r") as store:
        with pytest.raises(UsageError, match="mode="):
            start(CASES["gpt"], Recipe(), store)


@pytest.mark.parametrize("norm", [0.0, float("inf")])
def test_odd_norms_are_as_in_torch(norm: float, tmp_path: Path) -> None:
    case, recipe = CASES["vectors_batch_1"], Recipe(num_steps=1, max_norm=norm)
    with debug_store(tmp_path, durable=False) as store:
        assert_same(start(case, recipe, store).run(), reference(case, recipe))


def test_gradients_that_are_not_numbers_are_as_in_torch(tmp_path: Path) -> None:
    """``error_if_nonfinite`` raises before anything is changed; without it NaN spreads as in torch."""
    case = CASES["vectors_batch_1"]
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, Recipe(), store)
        before = session.model.state_dict()
        (case.loss(session.model, case.batch(0)) * float("nan")).backward()
        with pytest.raises(RuntimeError, match="not clipped"):
            tiered.clip_grad_norm_(session.model, 1.0, error_if_nonfinite=True)
        session.optimizer.zero_grad()
        after = session.model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        (case.loss(session.model, case.batch(0)) * float("nan")).backward()
        assert tiered.clip_grad_norm_(session.model, 1.0).isnan()
        session.optimizer.step()
        assert all(value.isnan().all() for value in session.model.state_dict().values())


def test_weights_under_other_names_are_refused_with_what_to_do(store: tiered.Store) -> None:
    """As a checkpoint is that a loader converts, or one of a model with a tie that this one has lost."""
    weights = {f"base.{name}": tensor for name, tensor in nn.Linear(4, 4).state_dict().items()}
    with pytest.raises(UsageError, match=r"missing weight .*is it base\.weight.*tie what is one, pass a mapping with"):
        tiered.shard(nn.Linear(4, 4), store, weights=weights)
    tiered.shard(nn.Linear(4, 4), store, weights={name.removeprefix("base."): weights[name] for name in weights})


class Complex(nn.Module):
    """A complex product, over a complex parameter or over its real numbers."""

    def __init__(self, is_real: bool) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)
        values = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
        self.weight = nn.Parameter(torch.view_as_real(values) if is_real else values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(self.weight) if not self.weight.is_complex() else self.weight
        return (x * self.frozen @ weight).abs().square().mean()


def test_a_complex_parameter_trains_as_the_refusal_says(store: tiered.Store) -> None:
    def losses(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            loss = model(torch.ones(2, 4, dtype=torch.complex64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    with pytest.raises(TypeError, match="trains as the complex one does"):
        tiered.shard(Complex(is_real=False), store)
    plain, model = Complex(is_real=False), tiered.shard(Complex(is_real=True), store)
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    optimizer = tiered.AdamW(model.parameters(), lr=0.1)
    torch.testing.assert_close(losses(model, optimizer), expected)
    model.get_parameter("frozen").requires_grad_(True)
    with pytest.raises(TypeError, match="view_as_real"):
        losses(model, optimizer)
