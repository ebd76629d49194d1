"""Formats of state and rules of updating: bytes, bounds, and bits that depend on neither division nor budget."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiered
from tests.models import CASES
from tests.reference import Lion, Recipe, Trained
from tests.zero.training import assert_same, debug_store, reference, smallest_budget, start
from tiered.errors import UsageError
from tiered.zero.formats.codec import Bucket, Source, divide, update_pieces
from tiered.zero.formats.rules import AdamWRule, Hyperparameters, LionRule, Rule, SGDRule
from tiered.zero.formats.state_layout import FORMATS, Layouts
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.parameters.unit import Segment

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False, "maximize": False}
LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1, "maximize": False}
RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "AdamW": (AdamWRule(), ADAMW),
    "SGD": (SGDRule(with_momentum=True), SGD),
    "Lion": (LionRule(), LION),
}
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

every_format = pytest.mark.parametrize("word", FORMATS)
every_rule = pytest.mark.parametrize("rule", RULES)


class Kept:
    """One parameter and its state in memory, in buckets of ``bucket_numel`` and tiles of ``tile_numel`` elements."""

    def __init__(
        self, word: str, rule: str, values: Tensor, *, bucket_numel: int = 1 << 20, tile_numel: int = 1 << 20
    ) -> None:
        self.parameter = values.clone()
        segment = Segment("weight", torch.nn.Parameter(values), values.dtype)
        self.rule, self.values = RULES[rule]
        self.layout = Layouts(word, self.rule).of(values.dtype)
        self.buckets: list[Bucket[Segment]] = divide("state", [segment], bucket_numel, Layouts(word, self.rule))
        self.memory = [torch.zeros(bucket.nbytes, dtype=torch.uint8) for bucket in self.buckets]
        nbytes = TileScratch.nbytes(tile_numel)
        self.scratch = TileScratch(torch.full((nbytes,), 0xFF, dtype=torch.uint8), tile_numel)
        self.step = 0

    def update(self, gradient: Tensor, factor: Tensor | None = None, **changes: Any) -> None:
        """Update everything once."""
        self.step += 1
        hyper = Hyperparameters(self.step, self.values | changes, begins=self.step == 1)
        for bucket, memory in zip(self.buckets, self.memory, strict=True):
            for piece in bucket.pieces:
                update_pieces([(piece, memory, Source(self.parameter, gradient, factor, hyper))], self.scratch)

    def tiles(self) -> list[tuple[Any, slice]]:
        found = []
        for bucket, memory in zip(self.buckets, self.memory, strict=True):
            for piece in bucket.pieces:
                numel = piece.layout.tile_numel(self.scratch)
                for first in range(0, piece.numel, numel):
                    last = min(first + numel, piece.numel)
                    tile = piece.layout.tile(piece.views(memory.clone()), first, last)
                    found.append((tile, slice(piece.start + first, piece.start + last)))
        return found

    def moments(self) -> list[Tensor]:
        """Return the moments as the rule will see them next."""
        parts = [[m.clone() for m in tile.decode_moments(tile.rows(self.scratch))] for tile, _ in self.tiles()]
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    def master(self) -> Tensor:
        """Return the master as the rule will see it next."""
        parts = [
            tile.decode_master(self.parameter[where], tile.rows(self.scratch)).clone() for tile, where in self.tiles()
        ]
        return torch.cat(parts)


def normal(numel: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_exact_bytes_are_the_remainder_and_the_fp32_moments_one_after_the_other() -> None:
    """What a store of the first release holds: this layout may not change."""
    numel = 3000
    kept = Kept("exact", "AdamW", normal(numel, BF16, 0))
    master = torch.nn.Parameter(kept.parameter.float())
    optimizer = torch.optim.AdamW([master], fused=True, **{k: v for k, v in ADAMW.items() if k != "maximize"})
    for step in range(3):
        gradient = normal(numel, BF16, step + 1)
        kept.update(gradient)
        master.grad = gradient.float()
        optimizer.step()
    with torch.no_grad():
        hi = master.bfloat16()
        lo = (master.view(torch.int32) - (hi.view(torch.int16).int() << 16)).short()
    state = optimizer.state[master]
    assert torch.equal(kept.parameter, hi)
    assert kept.buckets[0].nbytes == 6016 + 2 * 12032  # each field on 64 bytes
    memory = kept.memory[0]
    assert torch.equal(memory[:6000].view(torch.int16), lo)
    assert torch.equal(memory[6016 : 6016 + 12000].view(FP32), state["exp_avg"])
    assert torch.equal(memory[18048 : 18048 + 12000].view(FP32), state["exp_avg_sq"])


@pytest.mark.parametrize(
    ("word", "rule", "dtype", "expected"),
    [
        ("exact", "AdamW", BF16, 10), ("exact", "AdamW", FP32, 8), ("exact", "AdamW", FP64, 16),
        ("exact", "Lion", BF16, 6.125), ("exact", "SGD", FP32, 4), ("compact", "AdamW", BF16, 3.0625),
        ("compact", "AdamW", FP32, 2.0625), ("compact", "AdamW", FP64, 16), ("compact", "Lion", BF16, 2.03125),
    ],
)  # fmt: skip
def test_bytes_per_parameter(word: str, rule: str, dtype: torch.dtype, expected: float) -> None:
    assert Kept(word, rule, torch.zeros(1 << 16, dtype=dtype)).buckets[0].nbytes / (1 << 16) == expected


def test_a_compact_step_moves_less_than_13_bytes_per_parameter(tmp_path: Path) -> None:
    """By the device's own counters, with nothing held."""
    numel = 1 << 21
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(numel >> 18)]
    with tiered.Store(tmp_path, dram="12MiB", durable=False) as store:
        model = tiered.shard(torch.nn.Sequential(*layers), store, param_dtype=BF16, hold=0, unit=torch.nn.Linear)
        optimizer = tiered.AdamW(model.parameters(), state="compact")
        moved = []
        for _ in range(3):
            model(torch.ones(1, 512, dtype=BF16)).sum().backward()
            optimizer.step()
            statistics = store.statistics()
            moved.append(statistics.read_bytes + statistics.write_bytes)
    assert (moved[2] - moved[1]) / numel <= 13


# -- numbers -----------------------------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
def test_exact_masters_and_moments_are_lossless(dtype: torch.dtype, rule: str) -> None:
    """Against torch's own optimizers (Lion: the reference's) on the master, ties of the rounding included."""
    numel = 5003
    values = normal(numel, dtype, 0)
    kept = Kept("exact", rule, values)
    master = torch.nn.Parameter(values.to(FP64 if dtype == FP64 else FP32))
    made: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Lion": Lion}
    options = {name: value for name, value in RULES[rule][1].items() if name != "maximize"}
    optimizer = made[rule]([master], **options, **({} if rule == "Lion" else {"fused": True}))
    for step in range(4):
        gradient = normal(numel, dtype, step + 1)
        kept.update(gradient, torch.tensor(0.5))
        master.grad = gradient.to(master.dtype).mul_(torch.tensor(0.5))
        optimizer.step()
    assert torch.equal(kept.master(), master.detach())
    if dtype == BF16:
        assert torch.equal(kept.parameter, kept.master().bfloat16())
    state = optimizer.state[master]
    for found, moment in zip(kept.moments(), kept.rule.moments, strict=True):
        assert torch.equal(found, state[moment.name])


def test_compact_rounds_masters_to_24_bits_and_moments_to_8(way: str) -> None:
    kept, exact = (Kept(word, "AdamW", normal(1 << 16, BF16, 0, 0.02)) for word in ("compact", "exact"))
    for step in range(3):
        gradient = normal(1 << 16, BF16, step + 1, 1e-3)
        kept.update(gradient)
        exact.update(gradient)
    (exp_avg, exp_avg_sq), (exact_avg, exact_sq) = kept.moments(), exact.moments()
    exact_sq = exact_sq.abs()  # without the marks of ties
    scale = exact_avg.abs().view(-1, 128).amax(1, keepdim=True).expand(-1, 128).flatten()
    error = (exp_avg - exact_avg).abs()
    assert (error <= 0.05 * scale).all()
    assert error.mean() <= 0.02 * exact_avg.abs().mean()
    assert (exp_avg_sq / exact_sq).median() == pytest.approx(1, abs=0.05)
    largest = exact_sq.view(-1, 128).amax(1, keepdim=True).expand(-1, 128).flatten()
    assert ((exp_avg_sq - exact_sq).abs() <= 0.4 * exact_sq + 2**-27 * largest).all()
    assert (kept.moments()[1] > 0).all()  # the smallest squares are kept as something to divide by
    assert ((kept.master() - exact.master()).abs() <= 3e-3).all()  # three steps of at most lr
    assert (kept.parameter.float() - kept.master()).abs().div(kept.master().abs()).max() <= 2**-8


def test_rounding_is_right_on_average(way: str) -> None:
    """Constant gradients of a hundredth: running means and masters move by less than a unit a step, yet arrive."""
    kept, exact = (Kept(w, "AdamW", torch.full((4096,), 0.5, dtype=BF16)) for w in ("compact", "exact"))
    torch.manual_seed(0)
    for state in (kept, exact):
        state.update(torch.full((4096,), 0.1, dtype=BF16))
    for _ in range(150):
        for state in (kept, exact):
            state.update(torch.full((4096,), 0.01, dtype=BF16), lr=1e-6, weight_decay=1.0)
    for found, expected in zip([*kept.moments(), kept.master()], [*exact.moments(), exact.master()], strict=True):
        assert abs(found.mean() / expected.mean() - 1) < 0.02
    moved, expected_move = 0.5 - kept.master().double().mean(), 0.5 - exact.master().double().mean()
    assert abs(moved / expected_move - 1) < 0.1


# -- what must not matter ----------------------------------------------------------------------------------------------


@every_rule
@every_format
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_bits_do_not_depend_on_buckets_or_tiles(dtype: torch.dtype, word: str, rule: str) -> None:
    numel = 9 * 1024 + 77
    divisions = [(1 << 20, 1 << 20), (1 << 20, 1024), (2048, 3072), (1024, 1024), (5120, 8192)]
    kept = [
        Kept(word, rule, normal(numel, dtype, 0), bucket_numel=bucket, tile_numel=tile) for bucket, tile in divisions
    ]
    for step in range(3):
        for one in kept:
            one.update(normal(numel, dtype, step + 1), torch.tensor(0.7))
    for other in kept[1:]:
        assert torch.equal(other.parameter, kept[0].parameter)
        assert torch.equal(other.master(), kept[0].master())
        for found, expected in zip(other.moments(), kept[0].moments(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("lr", [0.0, 1e-2], ids=["ties stay", "a step"])
def test_pieces_that_are_updated_together_have_the_bits_of_one_after_the_other(lr: float) -> None:
    """Masters are ties above an even upper half in some pieces: the marks are in the right ones, before and after."""
    numels, layouts = [300, 1, 128, 5000, 129, 7], Layouts("exact", RULES["AdamW"][0])
    found = []
    for tile_numel in (1 << 16, 1024, 128):  # all together; what fits; the largest by tiles
        segments = [
            Segment(f"p{i}", torch.nn.Parameter(normal(numel, BF16, i)), BF16) for i, numel in enumerate(numels)
        ]
        (bucket,) = divide("state", segments, 1 << 20, layouts)
        memory = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        scratch = TileScratch(torch.full((TileScratch.nbytes(1 << 16),), 0xFF, dtype=torch.uint8), 1 << 16)
        values = [segment.parameter.detach().clone() for segment in segments]
        ties = 0
        for piece, value in zip(bucket.pieces, values, strict=True):
            rows, tile = scratch.rows(small=False), piece.layout.tile(piece.views(memory), 0, piece.numel)
            bits = rows.master.view(torch.int32)[: piece.numel]
            bits.copy_(value.float().view(torch.int32)).bitwise_and_(-0x20000)[::3].add_(0x8000)
            ties += 0 if piece.numel == 128 else len(bits[::3])
            if piece.numel == 128:
                bits.bitwise_and_(-0x10000)
            value.copy_(bits.view(torch.float32))
            tile.encode_master(value, rows, scratch)
        scratch = TileScratch(torch.full((TileScratch.nbytes(tile_numel),), 0xFF, dtype=torch.uint8), tile_numel)
        options = RULES["AdamW"][1] | {"lr": lr, "weight_decay": 0.0}
        for step in (1, 2):
            hyper = Hyperparameters(step, options, begins=step == 1)
            update_pieces(
                [
                    (piece, memory, Source(value, normal(piece.numel, BF16, 9 + step), None, hyper))
                    for piece, value in zip(bucket.pieces, values, strict=True)
                ],
                scratch,
            )
        marks = sum(int((piece.views(memory)[2].view(torch.int32) < 0).sum()) for piece in bucket.pieces)
        assert marks == ties or lr
        found.append((memory, *values))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def recipe_of(optimizer: str, state: str, **options: Any) -> Recipe:
    given: dict[str, dict[str, Any]] = {
        "AdamW": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.05},
        "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
        "Lion": {"lr": 1e-3, "weight_decay": 0.05},
    }
    return Recipe(optimizer=optimizer, adamw=given[optimizer] | {"state": state}, **options)


def in_memory(recipe: Recipe) -> Trained:
    adamw = {name: value for name, value in recipe.adamw.items() if name != "state"}
    return reference(CASES["gpt"], replace(recipe, adamw=adamw))


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("param_dtype", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["SGD", "Lion"])
def test_sgd_and_lion_have_the_bits_of_the_reference(
    optimizer: str, param_dtype: torch.dtype | None, update: str, tmp_path: Path
) -> None:
    recipe = recipe_of(optimizer, "exact", param_dtype=param_dtype)
    with debug_store(tmp_path, durable=False) as store:
        assert_same(start(CASES["gpt"], recipe, store, update).run(), in_memory(recipe))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "maximize": True}])
def test_sgd_is_a_drop_in_for_plain_parameters(options: dict[str, Any], tmp_path: Path) -> None:
    """Fused and not foreach: torch's two ways give the same bits here, and ours gives them too."""
    values = normal(3001, FP32, 0)
    theirs, ours = (torch.nn.Parameter(values.clone()) for _ in range(2))
    with debug_store(tmp_path, durable=False) as store:
        optimizers = [
            torch.optim.SGD([theirs], lr=0.1, weight_decay=0.01, fused=True, **options),
            tiered.SGD([ours], lr=0.1, weight_decay=0.01, store=store, **options),
        ]
        for step in range(3):
            for parameter, optimizer in zip((theirs, ours), optimizers, strict=True):
                parameter.grad = normal(3001, FP32, step + 1)
                optimizer.step()
        assert torch.equal(ours, theirs)
        state = optimizers[1].state_dict()["state"][0]
    assert ("momentum_buffer" in state) == ("momentum" in options)


@pytest.mark.parametrize("param_dtype", [None, BF16], ids=["fp32", "bf16"])
def test_bits_do_not_depend_on_budget_or_update(param_dtype: torch.dtype | None, tmp_path: Path) -> None:
    recipe = recipe_of("AdamW", "compact", param_dtype=param_dtype, num_steps=3)
    with debug_store(tmp_path / "roomy", durable=False) as store:
        expected = start(CASES["gpt"], recipe, store).run()
    exact = in_memory(recipe)
    assert all(math.isclose(a, b, rel_tol=2e-2) for a, b in zip(expected.losses, exact.losses, strict=True))
    expected.cast = set(expected.masters)
    for update in ("step", "backward"):
        nbytes = smallest_budget(CASES["gpt"], recipe, update, tmp_path / f"probe-{update}")
        with debug_store(tmp_path / update, nbytes, durable=False) as store:
            session = start(CASES["gpt"], recipe, store, update)
            session.is_squeezed = True
            assert_same(session.run(), expected)


@pytest.mark.parametrize("word", FORMATS)
def test_state_dict_there_and_back_changes_nothing(word: str, tmp_path: Path) -> None:
    recipe = recipe_of("AdamW", word, param_dtype=BF16)
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASES["gpt"], recipe, store)
        session.run_step(0)
        before = session.optimizer.state_dict()
        session.optimizer.load_state_dict(before)
        after = session.optimizer.state_dict()
    for index, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(value, after["state"][index][name]), (index, name)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("AdamW", "exact"), ("AdamW", "compact")),
        (("AdamW", "compact"), ("AdamW", "exact")),
        (("AdamW", "exact"), ("Lion", "exact")),
    ],
)
def test_a_store_that_holds_another_format_or_optimizer_is_refused(
    first: tuple[str, str], second: tuple[str, str], tmp_path: Path
) -> None:
    with debug_store(tmp_path) as store:
        start(CASES["gpt"], recipe_of(*first), store)
        store.commit()
    with debug_store(tmp_path) as store:
        with pytest.raises(UsageError, match="the store holds another optimizer") as refusal:
            start(CASES["gpt"], recipe_of(*second), store)
    assert all(
        repr(word) in str(refusal.value) for a, b in zip(first, second, strict=True) if a != b for word in (a, b)
    )


def test_unknown_formats_and_late_momentum_are_refused(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    with debug_store(tmp_path, durable=False) as store:
        with pytest.raises(UsageError, match="expected one of 'exact', 'compact'"):
            tiered.Lion([parameter], state="tiny", store=store)
        with pytest.raises(ValueError, match="nesterov"):
            tiered.SGD([parameter], nesterov=True, store=store)
        optimizer = tiered.SGD([parameter], store=store)
        optimizer.param_groups[0]["momentum"] = 0.9
        parameter.grad = torch.ones(8)
        with pytest.raises(UsageError, match="without momentum"):
            optimizer.step()


# -- the edges of numbers ----------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number_stays_visible(bad: float, word: str, way: str) -> None:
    """The parameter becomes NaN and stays so; other blocks never hear of it."""
    kept, clean = (Kept(word, "AdamW", normal(1024, BF16, 0)) for _ in range(2))
    gradient = normal(1024, BF16, 1)
    clean.update(gradient)
    poisoned = gradient.clone()
    poisoned[300] = bad
    kept.update(poisoned)
    for _ in range(3):
        kept.update(gradient)
        clean.update(gradient)
        assert kept.parameter[300].isnan()
        others = torch.cat([kept.parameter[:256], kept.parameter[384:]])
        assert torch.equal(others, torch.cat([clean.parameter[:256], clean.parameter[384:]]))


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-12, 1e8, 1e15])
def test_steps_stay_bounded_for_gradients_of_any_size(scale: float) -> None:
    """As in exact, a step of AdamW is a few times lr, whatever the scale; denormals and tiny squares included."""
    kept = Kept("compact", "AdamW", torch.ones(4096, dtype=BF16))
    spread = torch.logspace(-6, 0, 4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(0))]
    for step in range(20):
        before = kept.master()
        kept.update((normal(4096, FP32, step) * spread * scale).bfloat16(), weight_decay=0.0)
        assert (kept.master() - before).abs().max() <= 8e-3  # of exact: 1e-3
        assert kept.master().isfinite().all()
