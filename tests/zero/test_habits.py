"""Habits of PyTorch users around a sharded model: closures, hooks, gradients set by hand, weights of their own.

Each gives the bits of plain PyTorch in memory.
"""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import tiered
from tests.models import CASES, GPT, Case
from tests.reference import Recipe, train
from tests.zero.training import (
    SEED,
    assert_same,
    debug_store,
    reference_of,
    start,
)
from tiered.errors import UsageError

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
UPDATES = ("step", "backward")

every_dtype = pytest.mark.parametrize("param_dtype", DTYPES.values(), ids=DTYPES)
every_update = pytest.mark.parametrize("update", UPDATES)


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, steps: range, seed: int) -> list[Tensor]:
    """Train some steps by the plain loop and return the losses."""
    torch.manual_seed(seed)
    losses = []
    for step in steps:
        loss = model(*case.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@every_dtype
def test_bits_of_a_model_built_on_meta_with_weights(param_dtype: torch.dtype | None, tmp_path: Path) -> None:
    case = CASES["gpt"]
    torch.manual_seed(SEED)
    weights = case.build().state_dict()
    with torch.device("meta"):
        model = case.build()
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(model, store, param_dtype=param_dtype, weights=weights)
        optimizer = tiered.AdamW(model.parameters(), **Recipe().adamw)
        losses = losses_of(model, optimizer, case, range(4), SEED + 1)
    assert all(map(torch.equal, losses, reference_of("gpt", param_dtype).losses))


class Buffered(nn.Module):
    """Buffers of both kinds, one with two names, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.turned, self.single = nn.Parameter(torch.rand(5, 4).t()), nn.Parameter(torch.rand(1))
        self.register_buffer("frequencies", torch.rand(4), persistent=False)
        self.first.register_buffer("same", self.frequencies)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.frequencies).to(self.first.weight.dtype)
        x = self.second(self.first(x).sin()) @ self.turned @ self.turned.t() * self.single
        return self.norm(x.float()).square().mean()


@every_dtype
def test_a_model_on_meta_goes_on_with_what_the_store_has_committed(
    param_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    case = Case(Buffered, lambda step: (torch.randn(3, 4, generator=torch.Generator().manual_seed(step)),))

    def run(directory: Path, *steps: range) -> list[Tensor]:
        losses = []
        for life, part in enumerate(steps):
            torch.manual_seed(SEED)
            with debug_store(directory) as store, torch.device("meta") if life else torch.device("cpu"):
                model = Buffered()
                with torch.device("cpu"):
                    model = tiered.shard(model, store, param_dtype=param_dtype)
                    optimizer = tiered.AdamW(model.parameters(), lr=0.1)
                    store.resume()
                    losses += losses_of(model, optimizer, case, part, SEED)
                    store.commit()
                    assert model.second.weight is model.first.weight
                    assert model.first.same is model.frequencies
                    found = [*losses, *model.state_dict().values(), model.frequencies]
        return found

    assert all(map(torch.equal, run(tmp_path / "two", range(2), range(2, 5)), run(tmp_path / "one", range(5))))


def test_a_buffer_on_meta_that_nothing_gives_says_what_does(tmp_path: Path) -> None:
    weights = Buffered().state_dict()
    with torch.device("meta"):
        model = Buffered()
    with debug_store(tmp_path, durable=False) as store:
        with pytest.raises(UsageError, match=r"buffer frequencies is on the meta device.*tiered\.construct"):
            tiered.shard(model, store, weights=weights)
        with tiered.construct(store):
            model = Buffered()
        found = tiered.shard(model, store, weights=weights).state_dict()
        assert all(torch.equal(found[name], value) for name, value in weights.items())


@every_dtype
def test_bits_of_an_ordinary_model_that_is_sharded_later(param_dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Built without ``construct``, in memory."""
    case = CASES["tied_head"]
    with debug_store(tmp_path, durable=False) as store:
        torch.manual_seed(SEED)
        model = tiered.shard(case.build(), store, param_dtype=param_dtype)
        optimizer = tiered.AdamW(model.parameters(), **Recipe().adamw)
        losses = losses_of(model, optimizer, case, range(4), SEED + 1)
    assert all(map(torch.equal, losses, reference_of("tied_head", param_dtype).losses))


@pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")
def test_construct_follows_parametrizations(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(SEED)
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(8, 8)),
            parametrizations.spectral_norm(nn.Linear(8, 8)),
            parametrizations.orthogonal(nn.Linear(8, 8)),
            nn.utils.weight_norm(nn.Linear(8, 8)),
            nn.utils.spectral_norm(nn.Linear(8, 8)),
        )

    plain, batches = build(), [torch.randn(2, 8) for _ in range(3)]
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with debug_store(tmp_path, durable=False) as store:
        with tiered.construct(store):
            model = build()
        model = tiered.shard(model, store)
        ours = tiered.AdamW(model.parameters())
        for batch in batches:
            for each, optimizer in ((plain, theirs), (model, ours)):
                each(batch).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        expected, found = plain.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("seed", range(3))
def test_construct_draws_the_weights_of_the_ordinary_constructor(seed: int, tmp_path: Path) -> None:
    """Also where a parent initialises its children, where modules are tied, and in torch's own transformer."""

    def build() -> nn.Module:
        torch.manual_seed(seed)
        model = nn.ModuleDict(
            {
                "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False),
                "attention": nn.MultiheadAttention(16, 4),
                "gpt": GPT(2, head="tied"),
            }
        )
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.orthogonal_(parameter)
        with torch.no_grad():
            model["gpt"].blocks[0].fc.weight[3:5] = 0.5
            model["gpt"].pos.weight.mul_(0.1)
        model["gpt"].pos.weight.data.normal_(0, 0.3)
        model["gpt"].ln.weight.data = torch.randn(24)
        model["gpt"].blocks[1].fc.weight.data = model["gpt"].blocks[1].fc.weight.data * 2
        model["gpt"].blocks[0].fc.weight.data = model["gpt"].blocks[1].fc.weight.data.sin().t()
        model["gpt"].blocks[1].ln1.bias = nn.Parameter(torch.randn(24))
        del model["gpt"].blocks[1].ln2.bias
        return model.double() if seed == 1 else model

    plain = build()
    expected, strides = plain.state_dict(), [parameter.stride() for parameter in plain.parameters()]
    drawn = torch.rand(3)
    with debug_store(tmp_path, durable=False) as store:
        with tiered.construct(store):
            model = build()
        assert torch.equal(torch.rand(3), drawn)
        model = tiered.shard(model, store)
        found = model.state_dict()
        assert [parameter.stride() for parameter in model.parameters()] == strides
    assert list(found) == list(expected)
    assert [found[name].dtype for name in expected] == [expected[name].dtype for name in expected]
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@every_update
def test_closures_and_hooks_of_optimizers(update: str, tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    calls = []
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, recipe, store, update)
        session.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        session.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        for step in range(recipe.num_steps):

            def closure(step: int = step) -> Tensor:
                session.optimizer.zero_grad()
                loss = session.model(*case.batch(step))
                loss.backward()
                return loss

            session.trained.losses.append(session.optimizer.step(closure).detach().clone())
        session.optimizer.zero_grad()
        assert_same(session.collect(), reference_of("gpt", None))
    assert calls == ["pre", "post"] * recipe.num_steps


def test_unsharded_reads_and_writes(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASES["gpt"], Recipe(num_steps=2), store)
        with tiered.unsharded(session.model.blocks[1]):
            before = session.model.blocks[1].fc.weight.clone()
            with torch.no_grad():
                session.model.blocks[1].fc.weight.mul_(2)
            session.model.blocks[1].ln1.weight.data = torch.full((24,), 0.5)
        assert torch.equal(session.model.state_dict()["blocks.1.fc.weight"], before * 2)
        ours = session.run()
    torch.manual_seed(SEED)
    model = CASES["gpt"].build()
    with torch.no_grad():
        model.blocks[1].fc.weight.mul_(2)
        model.blocks[1].ln1.weight.fill_(0.5)
    torch.manual_seed(SEED + 1)
    assert_same(ours, train(model, CASES["gpt"].batch, CASES["gpt"].loss, Recipe(num_steps=2)))


def test_unsharded_and_accumulate_take_a_model_with_modules_that_were_added(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(nn.Sequential(nn.Linear(4, 4)), store).append(nn.Linear(4, 4))
        with tiered.unsharded(model), tiered.accumulate(model):
            assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_parameters_keep_identity_and_metadata(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    plain = CASES["odd_sizes"].build()
    with debug_store(tmp_path, durable=False) as store:
        with tiered.construct(store):
            model = CASES["odd_sizes"].build()
        before = dict(model.named_parameters())
        assert tiered.shard(model, store) is model
        assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
        for name, parameter in plain.named_parameters():
            ours = model.get_parameter(name)
            assert ours is before[name]
            assert isinstance(ours, nn.Parameter)
            for what in ("shape", "dtype", "device", "requires_grad", "ndim", "is_leaf", "layout", "grad"):
                assert getattr(ours, what) == getattr(parameter, what), what
            assert (ours.numel(), ours.stride()) == (parameter.numel(), parameter.stride())
        assert list(model.state_dict()) == list(plain.state_dict())
        assert len(set(model.parameters())) == len(list(plain.parameters()))


def test_a_state_dict_has_the_ties_of_the_model_and_nothing_of_the_one_before(tmp_path: Path) -> None:
    """What saves a model asks which names share memory, and writes those once."""

    def ties(state: dict[str, Tensor]) -> set[frozenset[str]]:
        names: dict[int, set[str]] = {}
        for name, tensor in state.items():
            names.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
        return {frozenset(group) for group in names.values() if len(group) > 1}

    torch.manual_seed(SEED)
    plain = Buffered()
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(copy.deepcopy(plain), store)
        first = model.state_dict()
        assert ties(first) == ties(plain.state_dict()) == {frozenset({"first.weight", "second.weight"})}
        first["first.weight"].zero_()
        second = model.state_dict()
    assert all(torch.equal(second[name], tensor) for name, tensor in plain.state_dict().items())


class Plus(nn.Module):
    """A parametrization: what adapters of stacked experts add to a weight."""

    def __init__(self, added: Tensor) -> None:
        super().__init__()
        self.added = added

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.added


class Parametrized(nn.Module):
    """Its forward parametrizes a weight for the time of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.added = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.linear, "weight", Plus(self.added.square()))
        y = self.linear(x)
        parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)
        return y.sin().mean()


def test_a_forward_may_parametrize_a_weight_for_a_while(tmp_path: Path) -> None:
    case = Case(Parametrized, lambda step: (torch.ones(3, 4) * step,))
    torch.manual_seed(SEED)
    plain = Parametrized()
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(copy.deepcopy(plain), store)
        optimizers = torch.optim.AdamW(plain.parameters(), fused=True), tiered.AdamW(model.parameters())
        expected, losses = (
            losses_of(*pair, case, range(3), 0) for pair in zip((plain, model), optimizers, strict=True)
        )
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
