"""Gradients on NVMe answer what torch's clipping and loss scaling ask, with the bits of gradients in memory.

Everything else that could be read of them is refused by name.
"""

import copy
import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.overrides import get_testing_overrides

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import simulated_store
from tiered.errors import UsageError
from tiered.store.residency.swap_in_out import SwapInOut
from tiered.store.store import Store
from tiered.units import KiB
from tiered.zero.gradients.stand_in import StandIn
from tiered.zero.parameters.tensor_without_bytes import LAYOUT, METADATA

NUM_UNITS = 8
WIDTH = 128
BUDGET_NBYTES = {torch.float32: 800 * KiB, torch.bfloat16: 500 * KiB}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_STEPS = 2


class Training:
    """A chain of equal layers and a plain one, in memory or through a store in which some gradients are on NVMe."""

    def __init__(self, store: Store | None, dtype: torch.dtype, update: str = "step") -> None:
        torch.manual_seed(1)
        self.store = store
        self.dtype = dtype
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_UNITS)])
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        if store is not None:
            self.model = tiered.shard(self.model, store, unit=nn.Linear, hold=0, param_dtype=dtype)
            self.optimizer: torch.optim.Optimizer = tiered.AdamW(self.model.parameters(), lr=1e-3, update=update)
            return
        for parameter in self.model.parameters():
            master = parameter.detach().clone() if dtype != torch.float32 else parameter
            self.masters[parameter] = master
            parameter.data = parameter.data.to(dtype)
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=1e-3, fused=True)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self, seed: int, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        loss = self.model(x).square().sum()
        (loss * scale).backward()
        return loss.detach().clone()

    def step(self, *_: Any) -> None:
        """Update; in memory the gradients go to the masters, which torch updates."""
        for parameter, master in self.masters.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                if master is not parameter:
                    parameter.copy_(master)
        for parameter in self.parameters if self.masters else ():
            parameter.grad = None
        self.optimizer.zero_grad()

    def stand_ins(self) -> list[StandIn]:
        return [p.grad for p in self.parameters if isinstance(p.grad, StandIn)]

    def write_bytes(self) -> int:
        assert self.store is not None
        return self.store.statistics().write_bytes


@contextmanager
def training(dtype: torch.dtype = torch.float32, budget_nbytes: int = 0) -> Iterator[Training]:
    nbytes = budget_nbytes or BUDGET_NBYTES[dtype]
    with simulated_store(SimulatedDisk(), budget_nbytes=nbytes, durable=False) as store:
        yield Training(store, dtype)


Act = Callable[[list[nn.Parameter]], Any]
ACTS: dict[str, Act] = {
    f"clip_{norm}_foreach_{foreach}": lambda ps, norm=norm, foreach=foreach: nn.utils.clip_grad_norm_(
        ps, 0.01, norm, error_if_nonfinite=True, foreach=foreach
    )
    for norm in (2.0, 1.0, math.inf)
    for foreach in (None, True, False)
}


def clip_with_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    total = nn.utils.get_total_norm([p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.01, total)
    return total


def clip_twice(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [nn.utils.clip_grad_norm_(parameters, bound) for bound in (0.3, 0.1, 0.1)]


def clip_with_accelerate(parameters: list[nn.Parameter]) -> torch.Tensor:
    return Accelerator(cpu=True).clip_grad_norm_(parameters, 0.01)


def clip_by_hand(parameters: list[nn.Parameter]) -> torch.Tensor:
    gradients = [p.grad for p in parameters]
    total = torch.stack([gradient.data.norm(2) for gradient in gradients]).norm(2)
    for gradient in gradients:
        gradient.data.mul_(0.01 / (total + 1e-6))
    return total


def scale_in_many_ways(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    norms = []
    for index, parameter in enumerate(parameters):
        parameter.grad *= 1.7
        parameter.grad /= torch.tensor(0.3)
        parameter.grad.clamp_(-0.5, 0.25)
        parameter.grad.add_(0.125).nan_to_num_()
        if index % 3 == 0:
            parameter.grad.requires_grad_(False).zero_()
        norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
    torch._foreach_mul_([p.grad for p in parameters], [1.0 + index for index in range(len(parameters))])
    return [*norms, *torch._foreach_norm([p.grad for p in parameters], math.inf)]


ACTS |= {
    "total_norm_then_clip": clip_with_norm,
    "twice": clip_twice,
    "accelerate": clip_with_accelerate,
    "by_hand": clip_by_hand,
    "many_ways": scale_in_many_ways,
    "value": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02),
    "value_foreach": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02, foreach=True),
}


def train(t: Training, act: Act) -> list[Any]:
    """Train with two micro-steps a step; return the losses, what ``act`` has returned, and the parameters."""
    seen: list[Any] = []
    for step in range(NUM_STEPS):
        seen += [t.backward(2 * step), t.backward(2 * step + 1)]
        if t.store is not None:
            assert 0 < len(t.stand_ins()) < len(t.parameters), "lists are mixed"
            before = t.write_bytes()
        result = act(t.parameters)
        if t.store is not None:
            assert t.write_bytes() == before
        seen += result if isinstance(result, list) else [] if result is None else [result]
        t.step()
    return seen + [value.clone() for value in t.model.state_dict().values()]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_bits_are_those_in_memory(act: Act, dtype: torch.dtype) -> None:
    expected = train(Training(None, dtype), act)
    with training(dtype) as t:
        found = train(t, act)
    assert len(found) == len(expected)
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)] == []
    assert [a.dtype for a in found] == [b.dtype for b in expected]


@contextmanager
def counted_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count by key how often its bytes were written to the device."""
    writes: Counter[str] = Counter()
    depart = SwapInOut._swap_out

    def counting_depart(self: SwapInOut, entry: Any, extents: Any) -> Any:
        writes[entry.name] += 1
        return depart(self, entry, extents)

    with monkeypatch.context() as patch:
        patch.setattr(SwapInOut, "_swap_out", counting_depart)
        yield writes


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_no_gradient_is_written_again_by_clipping_or_by_the_step(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(dtype) as t:
        for seed in range(2):
            t.backward(seed)
        stored = {f"model/gradient/{g.source.name.split('.')[0]}" for g in t.stand_ins()}
        assert stored
        with counted_writes(monkeypatch) as writes:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.zeros(()))
            scaler.unscale_(t.optimizer)
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)
            assert not writes
            scaler.step(t.optimizer)
            t.parameters[0].segment.unit.engine.updates.finish_all()
        assert writes and not stored & writes.keys()


# -- loss scaling -----------------------------------------------------------------------------------------------------


def scaled_training(t: Training) -> list[Any]:
    """Train with torch's scaler, whose first scale overflows; return scales, losses and parameters."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_factor=2.0, backoff_factor=2.0**-110)
    seen: list[Any] = []
    optimizer: Any = t.optimizer
    if t.masters:
        optimizer = SimpleNamespace(param_groups=[{"params": t.parameters}], step=t.step)
    for step in range(4):
        for micro_step in range(2):
            seen.append(t.backward(2 * step + micro_step, scaler.scale(torch.ones(()))))
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(t.parameters, 0.01))
        if t.store is not None:
            assert t.stand_ins()
        scaler.step(optimizer)
        scaler.update()
        seen.append(torch.tensor(scaler.get_scale()))
        for parameter in t.parameters:
            parameter.grad = None
    return seen + [value.clone() for value in t.model.state_dict().values()]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_torchs_scaler_then_clipping_gives_the_bits_in_memory(dtype: torch.dtype) -> None:
    expected = scaled_training(Training(None, dtype))
    with training(dtype) as t:
        found = scaled_training(t)
    assert len(found) == len(expected)
    different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b) and a == a]
    assert different == []


# -- what else may happen to a gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_backward_adds_to_gradients_that_were_scaled(dtype: torch.dtype) -> None:
    def run(t: Training) -> list[Any]:
        seen = []
        for step in range(2):
            seen.append(t.backward(step))
            seen.append(nn.utils.clip_grad_norm_(t.parameters, 0.5))
            seen.append(t.backward(step + 10))
            seen.append(nn.utils.clip_grad_norm_(t.parameters, 0.5))
            t.step()
        return seen + [value.clone() for value in t.model.state_dict().values()]

    expected = run(Training(None, dtype))
    with training(dtype) as t:
        found = run(t)
    assert all(map(torch.equal, found, expected))


def test_one_that_was_kept_is_the_gradient_that_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with training() as t:
        t.backward(0)
        kept = t.stand_ins()
        names = [gradient.source.name for gradient in kept]
        t.backward(1)  # brings them back, adds, and gives some away again
        now = [t.model.get_parameter(name).grad for name in names]
        assert [g.norm() for g in kept] == [g.norm() for g in now]
        before = [g.norm() for g in now]
        for gradient in kept:
            gradient.mul_(0.5)
        assert [g.norm() for g in now] == [norm * 0.5 for norm in before]
        t.step()
        for gradient in kept:
            with pytest.raises(UsageError, match="gone"):
                gradient.norm()


def test_one_put_in_the_place_of_another_is_refused_and_costs_nothing() -> None:
    with training() as t:
        t.backward(0)
        first, second = (t.model.get_parameter(g.source.name) for g in t.stand_ins()[:2])
        first.grad, kept = second.grad.detach() if first.shape == second.shape else None, first.grad
        other = next(
            p for p in t.parameters if p is not first and p.shape == first.shape and isinstance(p.grad, StandIn)
        )
        first.grad = other.grad
        with pytest.raises(UsageError, match="stand-in of another"):
            t.optimizer.step()
        first.grad = kept
        t.step()


def test_a_change_after_tiereds_own_clipping_is_refused() -> None:
    with training() as t:
        t.backward(0)
        tiered.clip_grad_norm_(t.model, 1.0)
        with pytest.raises(UsageError, match=r"tiered\.clip_grad_norm_"):
            t.stand_ins()[0].mul_(2.0)
        t.step()


def test_tiereds_own_clipping_sees_what_torch_has_scaled() -> None:
    with training() as t:
        t.backward(0)
        stand_in = t.stand_ins()[0]
        parameter = t.model.get_parameter(stand_in.source.name)
        before = tiered.clip_grad_norm_([parameter], math.inf)
        t.optimizer.zero_grad()
        t.backward(0)
        parameter.grad.mul_(0.25)
        assert tiered.clip_grad_norm_([parameter], math.inf) == before * 0.25
        t.optimizer.zero_grad()


def test_gradients_that_are_used_up_refuse_everything() -> None:
    with simulated_store(SimulatedDisk(), budget_nbytes=BUDGET_NBYTES[torch.float32], durable=False) as store:
        t = Training(store, torch.float32, update="backward")
        t.backward(0)
        assert len(t.stand_ins()) == len(t.parameters)
        for act in (lambda: nn.utils.clip_grad_norm_(t.parameters, 1.0), lambda: t.parameters[0].grad.mul_(0.5)):
            with pytest.raises(UsageError, match='update="step"'):
                act()
        assert "used up" in repr(t.parameters[0].grad)
        t.step()


# -- what is refused --------------------------------------------------------------------------------------------------


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "data_ptr": lambda g, _: g.data_ptr(),
    "untyped_storage": lambda g, _: g.untyped_storage(),
    "share_memory_": lambda g, _: g.share_memory_(),
    "__dlpack__": lambda g, _: g.__dlpack__(),
    "numpy.from_dlpack": lambda g, _: numpy.from_dlpack(g),
    "__reduce_ex__": lambda g, _: pickle.dumps(g),
    "torch.save": lambda g, _: torch.save(g, io.BytesIO()),
    "copy": lambda g, _: copy.copy(g),
    "__deepcopy__": lambda g, _: copy.deepcopy(g),
    "numpy": lambda g, _: g.numpy(),
    "asarray": lambda g, _: numpy.asarray(g),
    "item": lambda g, _: g.item(),
    "tolist": lambda g, _: g.tolist(),
    "list": lambda g, _: list(g),
    "float": lambda g, _: float(g),
    "bool": lambda g, _: bool(g),
    "bytes": lambda g, _: bytes(g),
    "__getitem__": lambda g, _: g[0],
    "__setitem__": lambda g, real: real.__setitem__(slice(None), g),
    ".data": lambda g, real: setattr(g, "data", real),
    "set_": lambda g, real: g.set_(real),
    "as_subclass": lambda g, _: g.as_subclass(torch.Tensor),
    "swap_tensors": lambda g, real: torch.utils.swap_tensors(g, real),
    "torch.tensor": lambda g, _: torch.tensor(g),
    "out": lambda g, real: torch.add(real, 1, out=g),
    "copy_from": lambda g, real: real.copy_(g),
    "copy_to": lambda g, real: g.copy_(real),
    "add_to": lambda g, real: real.add_(g),
    "add_tensor": lambda g, real: g.add_(real),
    "square": lambda g, _: g.mul_(g),
    "foreach_argument": lambda g, real: torch._foreach_mul_([real], [g]),
    "max": lambda g, _: g.abs().max(),
    "past_dispatch": lambda g, real: torch.ops.aten.add.Tensor(real, g),
    "vmap": lambda g, _: torch.vmap(lambda x: x + 1)(g),
    "norm_as_out": lambda g, real: torch.linalg.vector_norm(real, out=g),
}


@pytest.fixture
def stand_in() -> Iterator[torch.Tensor]:
    with training() as t:
        t.backward(0)
        yield t.stand_ins()[0]
        t.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_is_refused_by_name(read: Callable[..., Any], stand_in: torch.Tensor) -> None:
    name = stand_in.source.name
    with pytest.raises(UsageError, match=rf"parameter {name}: refused .* on NVMe; expected norms.*dram="):
        read(stand_in, torch.zeros(stand_in.shape))


@pytest.mark.parametrize(
    "read",
    [
        torch._C._to_dlpack,
        lambda g: setattr(real := torch.zeros(g.shape), "data", g) or real.sum(),
        lambda g: setattr(real := torch.zeros(g.shape), "data", g) or real.add_(1.0),
        lambda g: setattr(real := torch.zeros(g.shape), "data", g) or real.data_ptr(),
    ],
    ids=["to_dlpack", "data_read", "data_written", "data_ptr"],
)
def test_what_torch_tells_nobody_of_is_torchs_own_error(read: Callable[..., Any], stand_in: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"Storage|on NVMe"):
        read(stand_in)


ANSWERED = {
    "detach", "detach_", "data", "norm", "linalg_norm", "linalg_vector_norm", "zero_", "add_", "__iadd__", "sub_",
    "__isub__", "mul_", "__imul__", "multiply_", "div_", "divide_", "__idiv__", "__itruediv__", "true_divide_",
    "clamp_", "clip_", "clamp_min_", "clamp_max_", "nan_to_num_", "_foreach_mul_", "_foreach_norm",
    "_grad_fn",
}  # fmt: skip


def name_of(func: Any) -> str:
    own = getattr(func, "__self__", None)
    return str(getattr(own if func.__name__ in ("__get__", "__set__") else func, "__name__", ""))


@pytest.mark.filterwarnings("ignore")  # deprecations of functions that are only walked over
def test_every_function_of_torch_is_metadata_or_answered_or_refused(stand_in: torch.Tensor) -> None:
    """As the first argument, as all of them, and as one tensor of a list."""
    refused = 0
    for func, dummy in get_testing_overrides().items():
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        num = sum(p.default is p.empty and p.kind in kinds for p in signature(dummy).parameters.values())
        for args in ([stand_in] * num, [stand_in] + [1] * (num - 1), [[stand_in, stand_in]] + [1] * (num - 1)):
            try:
                result = func(*args) if num else NotImplemented
            except UsageError:
                refused += 1
                continue
            except Exception:
                continue  # arguments that torch itself refuses
            is_allowed = func in METADATA or func in LAYOUT or name_of(func) in ANSWERED or result is NotImplemented
            assert is_allowed or type(result) in (bool, int), (func, result)
    assert refused > 1000


def test_it_says_what_it_is(stand_in: torch.Tensor) -> None:
    assert repr(stand_in) == f"StandIn({stand_in.source.name!r}, shape=(128, 128), dtype=torch.float32, on NVMe)"
    assert f"{stand_in:>4}" == str(stand_in) == repr(stand_in)
    assert (stand_in.shape, stand_in.stride(), stand_in.dtype) == ((128, 128), (128, 1), torch.float32)
    assert stand_in.device == torch.device("cpu") and stand_in.layout is torch.strided and not stand_in.requires_grad
    assert isinstance(nn.Parameter(stand_in), StandIn)
