"""What torch takes past ``__torch_function__``: torch.func, TorchScript, constructors in C++, autograd, collectives.

A parameter reached this way is refused, by name where a door can be watched, else by its storage; or it is right.
"""

import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import tiered
from tests.models import CASES
from tests.zero.training import SEED, Session, debug_store
from tiered.errors import UsageError
from tiered.zero.parameters import tensor_without_bytes
from tiered.zero.parameters.tensor_without_bytes import placeholder

CASE = CASES["gpt"]
NAME = "blocks.1.fc.weight"


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


def double(x: Tensor) -> Tensor:
    return x * 2


def ones(parameter: nn.Parameter) -> Tensor:
    return torch.ones(parameter.shape)


def dual(parameter: nn.Parameter) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(parameter, ones(parameter)) * 2).primal.clone()


def gradient_by(parameter: nn.Parameter) -> Any:
    x = ones(parameter).requires_grad_()
    return torch.autograd.grad(x * 2, x, grad_outputs=parameter)


def backward_by(parameter: nn.Parameter) -> Any:
    x = ones(parameter).requires_grad_()
    (x * 2).backward(parameter)
    return x.grad


def in_linear(parameter: nn.Parameter) -> tuple[nn.Module, Tensor]:
    linear = nn.Linear(parameter.shape[1], parameter.shape[0], bias=False, device="meta")
    linear.weight = parameter
    return linear, torch.ones(1, parameter.shape[1])


def functional_call(parameter: nn.Parameter) -> Any:
    linear, x = in_linear(parameter)
    return torch.func.functional_call(linear, {"weight": parameter}, (x,))


def scripted(parameter: nn.Parameter) -> Any:
    linear, x = in_linear(parameter)
    return torch.jit.script(linear)(x)


def traced(parameter: nn.Parameter) -> Any:
    return torch.jit.trace(double, (ones(parameter),), check_trace=False)(parameter)


def exported(parameter: nn.Parameter) -> Any:
    linear, x = in_linear(parameter)
    return torch.export.export(linear, (x,)).module()(x)


TRANSFORMS: dict[str, Callable[[nn.Parameter], Any]] = {
    "vmap": lambda p: torch.func.vmap(torch.sum)(p),
    "vmap_of_the_second": lambda p: torch.func.vmap(torch.mul, in_dims=(None, 0))(torch.ones(p.shape[1]), p),
    "vmap_of_a_dict": lambda p: torch.func.vmap(lambda tree: tree["w"].sum())({"w": p}),
    "vmap_over_a_closure": lambda p: torch.func.vmap(lambda x: p * x)(torch.ones(3)),
    "grad": lambda p: torch.func.grad(square)(p),
    "grad_over_a_closure": lambda p: torch.func.grad(lambda x: (x * p).sum())(ones(p)),
    "vjp": lambda p: torch.func.vjp(double, p)[0],
    "jvp": lambda p: torch.func.jvp(double, (p,), (ones(p),)),
    "jvp_along_it": lambda p: torch.func.jvp(double, (ones(p),), (p,)),
    "jacrev": lambda p: torch.func.jacrev(square)(p),
    "hessian": lambda p: torch.func.hessian(lambda w: (w[0, :2] ** 3).sum())(p),
    "linearize": lambda p: torch.func.linearize(double, p)[0],
    "functionalize": lambda p: torch.func.functionalize(double)(p),
    "functional_call": functional_call,
    "vmap_of_autograd": lambda p: torch._vmap_internals._vmap(torch.sum)(p),
    "jacobian_vectorized": lambda p: torch.autograd.functional.jacobian(square, p, vectorize=True),
    "jacobian_forward": lambda p: torch.autograd.functional.jacobian(
        square, p, vectorize=True, strategy="forward-mode"
    ),
    "hessian_of_autograd": lambda p: torch.autograd.functional.hessian(lambda w: (w[0, :2] ** 3).sum(), p),
    "dual": dual,
    "from_dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "aten": lambda p: torch.ops.aten.mul.Tensor(p, p),
    "alias": lambda p: torch.ops.aten.alias(p).clone(),
    "expression": lambda p: torch._C._nn.gelu(p),
}
"""Refused with the parameter's name."""

PAST_ALL: dict[str, Callable[[nn.Parameter], Any]] = {
    "vjp_along_it": lambda p: torch.func.vjp(double, ones(p))[1](p),
    "tensor": lambda p: torch.tensor(p),
    "constructor": lambda p: torch.Tensor(p) + 0,
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "subclass": lambda p: torch.Tensor._make_subclass(Tensor, p) + 0,
    "nested": lambda p: torch.nested.nested_tensor([p, p]).to_padded_tensor(0.0),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(p)).clone(),
    "grad_outputs": gradient_by,
    "backward": backward_by,
    "scripted": scripted,
    "traced": traced,
    "exported": exported,
}
"""Refused with the name, or by the storage."""

CALLS = TRANSFORMS | PAST_ALL


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Leave aside what torch has to say about its own older doors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def true_values() -> nn.Parameter:
    torch.manual_seed(SEED)
    parameter: nn.Parameter = CASE.build().get_parameter(NAME)
    return parameter


def assert_equal(found: Any, expected: Any) -> None:
    ours, theirs = tree_leaves(found), tree_leaves(expected)
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("call", TRANSFORMS.values(), ids=TRANSFORMS)
def test_between_steps_by_name(call: Callable[[nn.Parameter], Any], between_steps: tuple[Session, Session]) -> None:
    for session in between_steps:
        with pytest.raises(UsageError, match=NAME):
            call(session.model.get_parameter(NAME))
    between_steps[1].run_step(1)


@pytest.mark.parametrize("call", PAST_ALL.values(), ids=PAST_ALL)
def test_between_steps_by_the_storage(
    call: Callable[[nn.Parameter], Any], between_steps: tuple[Session, Session]
) -> None:
    for session in between_steps:
        with pytest.raises((UsageError, RuntimeError)):
            call(session.model.get_parameter(NAME))
    between_steps[1].run_step(1)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_inside_a_forward_it_is_right_or_refused(call: Callable[[nn.Parameter], Any], step_session: Session) -> None:
    """The hook runs when the parameter's own unit is no more needed, and may be gone."""
    model, found = step_session.model, []

    def look(*_: Any) -> None:
        try:
            found.append(call(model.get_parameter(NAME)))
        except (UsageError, RuntimeError, TypeError):  # TypeError: linearize, of any subclass
            return
        finally:
            handle.remove()

    handle = model.blocks[2].register_forward_hook(look)
    step_session.run_step(0)
    if found:
        assert_equal(found[0], call(true_values()))


@pytest.mark.parametrize("call", TRANSFORMS.values(), ids=TRANSFORMS)
def test_inside_unsharded_it_is_right(call: Callable[[nn.Parameter], Any], step_session: Session) -> None:
    refused = {TRANSFORMS["linearize"]: TypeError, TRANSFORMS["grad_over_a_closure"]: UsageError}  # hooks are off
    if call in refused:
        with pytest.raises(refused[call]), tiered.unsharded(step_session.model.blocks[1]):
            call(step_session.model.get_parameter(NAME))
        return
    with tiered.unsharded(step_session.model.blocks[1]):
        assert_equal(call(step_session.model.get_parameter(NAME)), call(true_values()))
    step_session.run_step(0)


def test_collectives_send_no_placeholder(step_session: Session) -> None:
    parameter = step_session.model.get_parameter(NAME)
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    try:
        for send in (
            lambda out: distributed.all_gather([out], parameter),
            lambda out: distributed.reduce_scatter(out, [parameter]),
            lambda out: distributed.scatter(out, [parameter]),
            lambda _: distributed.broadcast(parameter, 0),
            lambda _: distributed.all_reduce(parameter),
        ):
            out = ones(parameter)
            with pytest.raises((UsageError, RuntimeError)):
                send(out)
            assert torch.equal(out, ones(parameter))
    finally:
        distributed.destroy_process_group()


# -- models --------------------------------------------------------------------------------------------------------


def test_forward_mode_through_a_forward(step_session: Session) -> None:
    x, along = torch.randn(2, 3, 24)
    torch.manual_seed(SEED)
    tangents = []
    for model in (CASE.build(), step_session.model):
        with forward_ad.dual_level():
            y = model.blocks[0].ln1(model.blocks[0].fc(forward_ad.make_dual(x, along))[:, :24])
            tangents.append(forward_ad.unpack_dual(y).tangent.clone())
        del y
    assert torch.equal(tangents[0], tangents[1])


def test_between_construct_and_shard(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        with tiered.construct(store):
            linear = nn.Linear(4, 4)
        for call in (TRANSFORMS["vmap"], TRANSFORMS["grad"]):
            with pytest.raises(UsageError, match=r"Linear\.weight"):
                call(linear.weight)
        with pytest.raises(RuntimeError):
            torch.tensor(linear.weight)


# -- what is not ours ----------------------------------------------------------------------------------------------


def test_transforms_of_ordinary_tensors_are_as_ever(step_session: Session) -> None:
    x = torch.arange(12.0).view(3, 4).sin()
    for tensor in (x, nn.Parameter(x)):
        assert torch.equal(torch.func.vmap(torch.sum)(tensor), x.sum(1))
        assert torch.equal(torch.func.vmap(torch.func.grad(square))(tensor), x * 2)
        assert torch.equal(torch.func.functionalize(double)(tensor), x * 2)
        assert torch.equal(torch.func.jvp(double, (tensor,), (x,))[1], x * 2)
        assert torch.equal(torch.func.hessian(square)(tensor[0]), torch.eye(4) * 2)
    compiled = torch.compile(lambda t: torch.func.vmap(torch.sum)(t), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x.sum(1))


def test_importing_changes_nothing() -> None:
    program = (
        "from torch._functorch import eager_transforms, vmap\n"
        "doors = vmap._add_batch_dim, eager_transforms._wrap_for_grad, eager_transforms._wrap_functional_tensor\n"
        "import tiered\n"
        "now = vmap._add_batch_dim, eager_transforms._wrap_for_grad, eager_transforms._wrap_functional_tensor\n"
        "assert all(a is b for a, b in zip(doors, now))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# -- the backstop --------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_placeholder_has_no_values(dtype: torch.dtype) -> None:
    blank = placeholder((3, 5), dtype, torch.device("cpu"))
    assert blank.shape == (3, 5)
    assert blank.dtype == dtype
    for touch in (
        blank.clone, blank.sum, blank.tolist, blank.data_ptr, blank[0, 0].item, blank.zero_,
        lambda: torch.equal(blank, torch.zeros_like(blank)), lambda: torch.zeros(3, 5, dtype=dtype).copy_(blank),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            touch()


def test_a_torch_with_its_flags_elsewhere_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch._C, "_set_throw_on_mutable_data_ptr", lambda tensor: None)
    find = tensor_without_bytes._flag_offset.__wrapped__
    with caplog.at_level("WARNING", logger="tiered"):
        assert find() is None
    assert "reads NaN" in caplog.text
