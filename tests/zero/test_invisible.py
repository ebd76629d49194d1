"""Training through the tiers gives the bits of plain PyTorch in memory (design.md, promise 1 and section 9).

Every run has an arena that poisons what is released and never leases an address twice.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.models import CASES, GPT, Block, Case, batch_of_tokens
from tests.reference import MasterAdamW, Recipe, train
from tests.zero.training import (
    SEED,
    assert_same,
    counted_swaps,
    debug_store,
    reference,
    reference_of,
    smallest_budget,
    start,
)

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
UPDATES = ("step", "backward")

every_dtype = pytest.mark.parametrize("param_dtype", DTYPES.values(), ids=DTYPES)
every_update = pytest.mark.parametrize("update", UPDATES)


@every_update
@every_dtype
@pytest.mark.parametrize("name", CASES)
def test_bits_with_the_smallest_budget(
    name: str, param_dtype: torch.dtype | None, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is driven out after each forward and step; counters prove that each unit was swapped in again."""
    case, recipe, expected = CASES[name], Recipe(param_dtype=param_dtype), reference_of(name, param_dtype)
    nbytes = smallest_budget(case, recipe, update, tmp_path / "probe")
    with counted_swaps(monkeypatch) as swaps, debug_store(tmp_path / "store", nbytes, durable=False) as store:
        session = start(case, recipe, store, update)
        session.is_squeezed = True
        session.squeeze()
        assert_same(session.run(), expected)
        units = {parameter.segment.unit for parameter in session.model.parameters()}  # type: ignore[attr-defined]
    for unit in units:
        num_updates = max(expected.num_updates.get(segment.name, 0) for segment in unit.segments)
        assert swaps[unit.key] >= 2 * num_updates, f"{unit.name}: {num_updates} updates, {swaps[unit.key]} swaps in"


@every_update
@every_dtype
@pytest.mark.parametrize("name", ["gpt", "cnn", "lstm", "data_dependent_order", "mixed_dtypes"])
def test_bits_with_a_roomy_budget(name: str, param_dtype: torch.dtype | None, update: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASES[name], Recipe(param_dtype=param_dtype), store, update)
        assert_same(session.run(), reference_of(name, param_dtype))


# -- features of the loop ------------------------------------------------------------------------------------------


def by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Groups that cut through every unit: no decay and other betas for vectors, another rate for the biases."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for n, p in named if p.ndim < 2 and "bias" not in n], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": [p for n, p in named if p.ndim < 2 and "bias" in n], "weight_decay": 0.0, "lr": 3e-3},
    ]


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


def generate(model: nn.Module, step: int) -> list[Tensor]:
    """Evaluate without gradients and generate a few tokens, greedily, between two steps."""
    model.eval()
    with torch.no_grad():
        loss = model(*batch_of_tokens(1000 + step))
        tokens = batch_of_tokens(2000 + step)[0][:, :4]
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    with torch.inference_mode():
        logits = model(tokens)
    model.train()
    return [loss, tokens, logits.clone()]


FEATURES: dict[str, tuple[str, Recipe]] = {
    "clipping": ("gpt", Recipe(max_norm=0.5)),
    "clipping_that_changes_nothing": ("gpt", Recipe(max_norm=1e6)),
    "accumulation": ("gpt", Recipe(num_micro_steps=3)),
    "schedule": ("gpt", Recipe(schedule=cosine)),
    "groups": ("gpt", Recipe(param_groups=by_decay)),
    "generation": ("gpt", Recipe(between=generate)),
    "accumulation_with_recompute": ("checkpoint_around", Recipe(num_micro_steps=3)),
    "accumulation_with_nested_backward": ("checkpoint_inside_reentrant", Recipe(num_micro_steps=3)),
    "accumulation_with_unused": ("unused_parameter", Recipe(num_micro_steps=3)),
    "accumulation_in_changing_order": ("data_dependent_order", Recipe(num_micro_steps=3)),
    "clipping_with_unused": ("unused_parameter", Recipe(max_norm=0.5)),
    "clipping_with_ties": ("tied_head", Recipe(max_norm=0.5)),
    "all_with_a_frozen_part": (
        "frozen_part",
        Recipe(max_norm=0.5, num_micro_steps=3, schedule=cosine, param_groups=by_decay, between=generate),
    ),
    "all_but_clipping_with_a_frozen_part": (
        "frozen_part",
        Recipe(num_micro_steps=3, schedule=cosine, param_groups=by_decay, between=generate),
    ),
}


@every_update
@every_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_bits_with(feature: str, param_dtype: torch.dtype | None, update: str, tmp_path: Path) -> None:
    """Each with the smallest budget."""
    name, recipe = FEATURES[feature]
    recipe = replace(recipe, param_dtype=param_dtype)
    if update == "backward" and recipe.max_norm is not None:
        with debug_store(tmp_path, durable=False) as store, pytest.raises(tiered.UsageError, match='update="step"'):
            start(CASES[name], recipe, store, update).run()
        return
    nbytes = smallest_budget(CASES[name], recipe, update, tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes, durable=False) as store:
        assert_same(start(CASES[name], recipe, store, update).run(), reference(CASES[name], recipe))


def test_torch_clips_as_tiered_does(tmp_path: Path) -> None:
    """``.grad`` is a view of the unit's own bytes: what torch does to fp32 gradients is exact."""
    case = CASES["gpt"]
    recipe = Recipe(num_steps=1)
    expected = reference(case, replace(recipe, max_norm=0.5))
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, recipe, store)
        session.case.loss(session.model, case.batch(0)).backward()
        norm = nn.utils.clip_grad_norm_(session.model.parameters(), 0.5)
        session.optimizer.step()
        assert torch.equal(norm, expected.norms[0])
        collected = session.collect()
    assert all(torch.equal(collected.parameters[name], value) for name, value in expected.parameters.items())


# -- the tie of section 9 ------------------------------------------------------------------------------------------

TIE_BITS = 0x8000


def wide() -> nn.Module:
    """Return 10 M parameters in five units."""
    blocks = nn.ModuleList(nn.Linear(1448, 1448) for _ in range(5))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x.to(block.weight.dtype)))
            return x.float().square().mean()

    return Wide()


def wide_batch(index: int) -> tuple[Tensor]:
    return (torch.randn(2, 1448, generator=torch.Generator().manual_seed(index)),)


@every_update
def test_bits_when_masters_lie_on_ties(update: str, tmp_path: Path) -> None:
    """1 master in 131,072 has a remainder of +0x8000 below an even high half, which 16 signed bits cannot hold."""
    case, recipe = Case(wide, wide_batch), Recipe(param_dtype=torch.bfloat16, num_steps=20)
    num_ties = 0

    def count_ties(step: int, optimizer: MasterAdamW) -> None:
        nonlocal num_ties
        for master in optimizer.masters.values():
            num_ties += int(((master.detach().view(torch.int32) & 0x1FFFF) == TIE_BITS).sum())

    torch.manual_seed(SEED)
    model = case.build()
    torch.manual_seed(SEED + 1)
    expected = train(model, case.batch, case.loss, recipe, after_step=count_ties)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    assert num_params > 10_000_000
    assert num_ties > 20 * num_params / 131_072 / 2, "the tie that this test is about did not occur"
    with debug_store(tmp_path, 64 << 20, durable=False) as store:
        assert_same(start(case, recipe, store, update).run(), expected)


# -- what checkpointing is for -------------------------------------------------------------------------------------


class SavedBytes:
    """Counts the bytes that autograd saves, those in parameters left out, as a caller's own hooks see them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.nbytes = 0
        self._storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def __enter__(self) -> "SavedBytes":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(*exc)

    def _pack(self, tensor: Tensor) -> Tensor:
        assert type(tensor) in (Tensor, nn.Parameter), type(tensor)
        if tensor.untyped_storage().data_ptr() not in self._storages:
            self.nbytes += tensor.nbytes
        return tensor


def forwards_and_saved_bytes(model: nn.Module, saved: SavedBytes) -> list[tuple[int, int]]:
    """Return after each of two forwards and backwards how often blocks ran in all, and the bytes that were saved."""
    counts = []
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for index in range(2):
        with saved:
            loss = model(*batch_of_tokens(index))
        counts.append((sum(block.num_forwards for block in blocks), saved.nbytes))
        loss.backward()
        counts.append((sum(block.num_forwards for block in blocks), saved.nbytes))
        model.zero_grad()
    return counts


@pytest.mark.parametrize("name", [name for name in CASES if "checkpoint" in name] + ["gpt"])
def test_checkpointing_recomputes_and_saves_as_in_memory(name: str, tmp_path: Path) -> None:
    model = CASES[name].build()
    expected = forwards_and_saved_bytes(model, SavedBytes(list(model.parameters())))
    nbytes = smallest_budget(CASES[name], Recipe(), "step", tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes, durable=False) as store:
        model = start(CASES[name], Recipe(), store).model
        assert forwards_and_saved_bytes(model, SavedBytes([])) == expected


# -- other habits --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", range(3))
def test_construct_draws_the_weights_of_the_ordinary_constructor(seed: int, tmp_path: Path) -> None:
    """Also where a parent initialises its children, where modules are tied, and in torch's own transformer."""

    def build() -> nn.Module:
        torch.manual_seed(seed)
        model = nn.ModuleDict({
            "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False),
            "attention": nn.MultiheadAttention(16, 4),
            "gpt": GPT(2, head="tied"),
        })
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


def test_optimizer_state_interchanges_with_torch(tmp_path: Path) -> None:
    """Three steps in memory go on in the tiers with torch's own state, and from there in memory again."""
    case, adamw = CASES["gpt"], Recipe().adamw
    torch.manual_seed(SEED)
    plain = case.build()
    theirs = torch.optim.AdamW(plain.parameters(), fused=True, **adamw)
    losses_of(plain, theirs, case, range(3), 0)
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, Recipe(), store)
        session.model.load_state_dict(plain.state_dict())
        session.optimizer.load_state_dict(theirs.state_dict())
        ours = losses_of(session.model, session.optimizer, case, range(3, 6), 1)
        weights, state = session.model.state_dict(), session.optimizer.state_dict()
    assert all(map(torch.equal, ours, losses_of(plain, theirs, case, range(3, 6), 1)))
    other = case.build()
    other.load_state_dict(weights)
    theirs_again = torch.optim.AdamW(other.parameters(), fused=True, **adamw)
    theirs_again.load_state_dict(state)
    expected = losses_of(plain, theirs, case, range(6, 9), 2)
    assert all(map(torch.equal, losses_of(other, theirs_again, case, range(6, 9), 2), expected))


def scale(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def replace_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 3


def replace_data(parameter: nn.Parameter) -> None:
    parameter.grad.data = torch.ones(parameter.shape)


def forget(parameter: nn.Parameter) -> None:
    parameter.grad = None


BY_HAND = {"in_place": scale, "replaced": replace_gradient, "data_replaced": replace_data, "none": forget}


@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize("change", BY_HAND.values(), ids=BY_HAND)
def test_gradients_changed_by_hand(
    change: Callable[[nn.Parameter], None], max_norm: float | None, tmp_path: Path
) -> None:
    """``.grad`` is an ordinary attribute between backward and step, also of a parameter that has had no gradient."""
    case, recipe = CASES["unused_parameter"], Recipe(num_steps=2)

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[nn.Module, float], Any]) -> Any:
        torch.manual_seed(SEED + 1)
        losses = []
        for step in range(2):
            loss = model(*case.batch(step))
            loss.backward()
            change(model.get_parameter("blocks.1.up.weight"))
            model.get_parameter("spare").grad = torch.full((7,), 0.25)
            if max_norm is not None:
                losses.append(clip(model, max_norm).clone())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    torch.manual_seed(SEED)
    plain = case.build()
    expected = losses(
        plain,
        torch.optim.AdamW(plain.parameters(), fused=True, **recipe.adamw),
        lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm),
    )
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, recipe, store)
        found = losses(session.model, session.optimizer, tiered.clip_grad_norm_)
    assert all(map(torch.equal, found[0], expected[0]))
    assert [name for name, value in expected[1].items() if not torch.equal(found[1][name], value)] == []


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


make_gpt: Callable[[], nn.Module] = partial(GPT, 3)


@pytest.mark.parametrize("hold", [0, 1 << 14, "auto"])
def test_bits_whatever_is_held(hold: Any, tmp_path: Path) -> None:
    case, recipe = Case(make_gpt, batch_of_tokens), Recipe(num_steps=2)
    with debug_store(tmp_path, 2 << 20, durable=False) as store:
        assert_same(start(case, recipe, store, hold=hold).run(), reference(case, recipe))
