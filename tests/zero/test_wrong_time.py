"""Parameters touched at the wrong time raise an error that says what to do; no NaN and no zero is ever seen."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.models import CASES
from tests.reference import Recipe
from tests.zero.training import SEED, Session, debug_store, start
from tiered.errors import UsageError

CASE = CASES["gpt"]
NAME = "blocks.1.fc.weight"


def assign(parameter: nn.Parameter) -> None:
    parameter.data = torch.zeros_like(parameter.data)


def set_item(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter[0] = 1.0


def copy_in(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.copy_(torch.ones(parameter.shape))


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "matmul": lambda p: torch.ones(1, p.shape[0]) @ p,
    "sum": lambda p: p.sum(),
    "function": lambda p: torch.linalg.vector_norm(p),
    "functional": lambda p: torch.nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "in_a_list": lambda p: torch.stack([p, p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "keyword": lambda p: torch.add(input=p, other=1),
    "operator": lambda p: torch.ops.aten.add(p, 1),
    "index": lambda p: p[0, 0],
    "iteration": lambda p: next(iter(p)),
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: numpy.asarray(p.data),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data.sum(),
    "clone": lambda p: p.clone(),
    "view": lambda p: p.view(-1).sum(),
    "transposed": lambda p: p.T + 0,
    "double": lambda p: p.double(),
    "equal": lambda p: torch.equal(p, p),
    "compare": lambda p: (p == 0).any(),
    "isnan": lambda p: torch.isnan(p).any(),
    "bool": lambda p: bool(p[:1, :1]),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "wrapped_again": lambda p: nn.Parameter(p.data).sum(),
    "copied_from": lambda p: torch.zeros(p.shape).copy_(p.detach()),
    "torch_save": lambda p: torch.save(p, io.BytesIO()),
    "pickle": lambda p: pickle.dumps(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "dlpack": lambda p: torch.utils.dlpack.to_dlpack(p.detach()),
    "share_memory": lambda p: p.share_memory_(),
    "as_subclass": lambda p: p.as_subclass(Tensor).sum(),
    "map": lambda p: p.detach().map_(p, lambda a, b: b),
}
WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "add_": lambda p: torch.no_grad()(lambda: p.add_(1))(),
    "data_add_": lambda p: p.data.add_(1),
    "data": assign,
    "item": set_item,
    "copy_": copy_in,
    "fill": lambda p: torch.no_grad()(lambda: p.data.fill_(3))(),
    "init": lambda p: nn.init.zeros_(p),
    "out": lambda p: torch.no_grad()(lambda: torch.add(torch.ones(p.shape), 1, out=p))(),
    "foreach": lambda p: torch.no_grad()(lambda: torch._foreach_mul_([p], 2.0))(),
    "map_": lambda p: torch.no_grad()(lambda: p.map_(torch.ones(p.shape), lambda a, b: b))(),
    "set_": lambda p: torch.no_grad()(lambda: p.set_(torch.zeros(3)))(),
}


@pytest.mark.parametrize("touch", READS.values(), ids=READS)
def test_reading_between_steps(touch: Callable[[nn.Parameter], Any], between_steps: tuple[Session, Session]) -> None:
    for session in between_steps:
        with pytest.raises(UsageError, match=NAME):
            touch(session.model.get_parameter(NAME))


@pytest.mark.parametrize("touch", WRITES.values(), ids=WRITES)
def test_writing_between_steps(touch: Callable[[nn.Parameter], Any], between_steps: tuple[Session, Session]) -> None:
    session = between_steps[0]
    before = session.model.state_dict()
    with pytest.raises(UsageError, match=NAME):
        touch(session.model.get_parameter(NAME))
    after = session.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_resize_is_told_where_it_belongs(step_session: Session) -> None:
    parameter = step_session.model.get_parameter(NAME)
    with pytest.raises(UsageError, match=r": \.data writes a sharded .* a new shape or dtype before tiered\.shard"):
        parameter.data = torch.zeros(2 * len(parameter), *parameter.shape[1:])
    with tiered.construct(step_session.store):
        linear = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r": \.data after `with tiered\.construct.*inside of that block"):
        linear.weight.data = torch.zeros(4, 2)


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_touching_after_a_state_dict_that_failed_in_the_middle(call: str, step_session: Session) -> None:
    model = step_session.model
    before = model.state_dict()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = getattr(model.blocks[1], f"register_{call}_pre_hook")(fail)
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(before) if call == "load_state_dict" else model.state_dict()
    handle.remove()
    for touch in (WRITES["fill"], READS["sum"]):
        with pytest.raises(UsageError, match=NAME):
            touch(model.get_parameter(NAME))
    model.load_state_dict(before)
    step_session.run_step(0)
    with pytest.raises(UsageError, match=NAME):
        WRITES["fill"](model.get_parameter(NAME))


def test_committing_after_a_load_that_failed_in_the_middle(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with debug_store(tmp_path) as store:
        session = start(CASES["gpt"], Recipe(), store)
        state = session.model.state_dict()
        handle = session.model.blocks[1].register_load_state_dict_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            session.model.load_state_dict(state)
        handle.remove()
        session.optimizer.load_state_dict(session.optimizer.state_dict())
        assert store.commit() == 1


@pytest.mark.parametrize("touch", WRITES.values(), ids=WRITES)
def test_writing_inside_a_forward(touch: Callable[[nn.Parameter], Any], step_session: Session) -> None:
    parameter = step_session.model.get_parameter(NAME)

    def write(*_: Any) -> None:  # a hook that returns something would replace the output
        touch(parameter)

    handle = step_session.model.blocks[2].register_forward_hook(write)
    with pytest.raises(UsageError, match=NAME):
        step_session.model(*CASE.batch(0)).backward()
    handle.remove()


def test_reading_after_backward(session: Session) -> None:
    CASE.loss(session.model, CASE.batch(0)).backward()
    for touch in (READS["sum"], READS["detach"], READS["data"], READS["numpy"]):
        with pytest.raises(UsageError, match=NAME):
            touch(session.model.get_parameter(NAME))
    session.optimizer.step()
    session.optimizer.zero_grad()
    session.run_step(1)


def test_calling_a_child_between_steps_is_a_forward(session: Session) -> None:
    """A unit called by itself is a module call like any other."""
    torch.manual_seed(SEED)
    plain = CASE.build().eval()
    session.model.eval()
    x = torch.randn(2, 5, 24)
    with torch.no_grad():
        assert torch.equal(session.model.blocks[1](x), plain.blocks[1](x))


def values_seen_by(hook: str, session: Session) -> list[Tensor | str]:
    """Train a step with a hook of that kind that looks at a parameter; return what it saw, or the error's name."""
    seen: list[Tensor | str] = []
    model, parameter = session.model, session.model.get_parameter(NAME)

    def look(*_: Any) -> None:
        try:
            seen.append(parameter.detach().clone())
        except UsageError as error:
            assert NAME in str(error)
            seen.append(type(error).__name__)

    register: dict[str, Callable[[], object]] = {
        "forward_pre": lambda: model.blocks[0].register_forward_pre_hook(look),
        "forward": lambda: model.blocks[2].register_forward_hook(look),
        "forward_of_root": lambda: model.register_forward_hook(look),
        "full_backward": lambda: model.blocks[3].register_full_backward_hook(look),
        "full_backward_of_first": lambda: model.blocks[0].register_full_backward_hook(look),
        "tensor": lambda: model.get_parameter("blocks.3.fc.weight").register_hook(look),
        "own_gradient": lambda: parameter.register_hook(look),
        "accumulated": lambda: parameter.register_post_accumulate_grad_hook(look),
        "accumulated_first": lambda: model.get_parameter("emb.weight").register_post_accumulate_grad_hook(look),
        "step_pre": lambda: session.optimizer.register_step_pre_hook(look),
        "step_post": lambda: session.optimizer.register_step_post_hook(look),
        "state_dict_pre": lambda: model.register_state_dict_pre_hook(look),
    }
    register[hook]()
    session.run_step(0)
    model.state_dict()
    assert seen, f"the hook {hook} was not called"
    return seen


HOOKS = (
    "forward_pre", "forward", "forward_of_root", "full_backward", "full_backward_of_first", "tensor", "own_gradient",
    "accumulated", "accumulated_first", "step_pre", "step_post", "state_dict_pre",
)  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_see_the_true_values_or_our_error(hook: str, session: Session) -> None:
    torch.manual_seed(SEED)
    plain = CASE.build()
    true_values = [plain.get_parameter(NAME).detach().clone()]
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True, **Recipe().adamw)
    torch.manual_seed(SEED + 1)
    CASE.loss(plain, CASE.batch(0)).backward()
    optimizer.step()
    true_values.append(plain.get_parameter(NAME).detach())
    torch.manual_seed(SEED + 1)
    for seen in values_seen_by(hook, session):
        if isinstance(seen, str):
            assert seen == "UsageError"
        else:
            assert any(torch.equal(seen, values) for values in true_values)


@pytest.mark.parametrize("hook", ["step_pre", "step_post"])
def test_hooks_of_the_step_raise(hook: str, session: Session) -> None:
    assert values_seen_by(hook, session) == ["UsageError"]


class ActNorm(nn.Module):
    """Sets itself up by its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.is_set_up = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set_up:
            self.shift.data.copy_(-x.detach().mean(0))
            self.is_set_up = True
        return x + self.shift


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_layer_that_writes_its_parameters_is_told_what_to_do(is_durable: bool, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    go_on = r"store\.rollback\(\) to go on" if is_durable else "start again in a new store"
    for number, layer in enumerate((ActNorm(), nn.Embedding(4, 8, max_norm=0.1))):
        with debug_store(tmp_path / str(number), durable=is_durable) as store:
            model = tiered.shard(nn.Sequential(layer), store)
            store.commit() if is_durable else None
            with pytest.raises(UsageError, match=rf"max_norm=.*torch\.no_grad\(\): model\(batch\).*{go_on}"):
                model(x if number == 0 else torch.arange(4))
            if is_durable:
                store.rollback()
                assert model.state_dict()


def test_a_layer_is_set_up_by_its_first_batch_between_steps(tmp_path: Path) -> None:
    x, plain = torch.randn(4, 8), nn.Sequential(ActNorm())
    expected = plain(x)
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(nn.Sequential(ActNorm()), store)
        with tiered.unsharded(model), torch.no_grad():
            model(x)
        assert torch.equal(model(x), expected)
        assert torch.equal(model.state_dict()["0.shift"], plain[0].shift)


class Signs(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            with torch.no_grad():
                parameter.sub_(parameter.grad.sign(), alpha=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    r"torch\.optim\.AdamW": lambda parameters: torch.optim.AdamW(parameters),
    r"torch\.optim\.Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    r"torch\.optim\.SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    r"test_wrong_time\.Signs": lambda parameters: Signs(parameters, {}),
}


@pytest.mark.parametrize("title", OPTIMIZERS)
def test_an_optimizer_that_is_not_tiereds_is_told_which_are(title: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(CASE.build(), store)
        optimizer = OPTIMIZERS[title](model.parameters())
        before = model.state_dict()
        model(*CASE.batch(0)).backward()
        with pytest.raises(UsageError, match=rf"{title}, which keeps .* expected tiered\.AdamW\(model"):
            optimizer.step()
        model.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        ours = tiered.AdamW(model.parameters())
        model(*CASE.batch(0)).backward()
        ours.step()
