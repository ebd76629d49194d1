"""Parameters touched at the wrong time raise an error that says what to do; no NaN and no zero is ever seen."""

import copy
import io
import multiprocessing.reduction
import pickle
import threading
from collections.abc import Callable, Iterator
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
from tiered.errors import TieredError, UsageError

CASE = CASES["gpt"]
NAME = "blocks.1.fc.weight"


@pytest.fixture(params=["step", "backward"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    with debug_store(tmp_path, durable=False) as store:
        yield start(CASE, Recipe(), store, request.param)


@pytest.fixture
def step_session(tmp_path: Path) -> Iterator[Session]:
    with debug_store(tmp_path, durable=False) as store:
        yield start(CASE, Recipe(), store)


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
def test_reading_between_steps(touch: Callable[[nn.Parameter], Any], step_session: Session) -> None:
    with pytest.raises(UsageError, match=NAME):
        touch(step_session.model.get_parameter(NAME))
    step_session.run_step(0)
    with pytest.raises(UsageError, match=NAME):
        touch(step_session.model.get_parameter(NAME))


@pytest.mark.parametrize("touch", WRITES.values(), ids=WRITES)
def test_writing_between_steps(touch: Callable[[nn.Parameter], Any], step_session: Session) -> None:
    before = step_session.model.state_dict()
    with pytest.raises(UsageError, match=NAME):
        touch(step_session.model.get_parameter(NAME))
    after = step_session.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("touch", WRITES.values(), ids=WRITES)
def test_writing_inside_a_forward(touch: Callable[[nn.Parameter], Any], step_session: Session) -> None:
    parameter = step_session.model.get_parameter(NAME)
    handle = step_session.model.blocks[2].register_forward_hook(lambda *_: touch(parameter))
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


# -- other processes and threads -----------------------------------------------------------------------------------


class Touching(torch.utils.data.Dataset):
    """A data set whose workers touch the model."""

    def __init__(self, touch: Callable[[], Any]) -> None:
        self.touch = touch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.as_tensor(self.touch())


def forked_loader(dataset: torch.utils.data.Dataset) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(dataset, num_workers=2, multiprocessing_context="fork", timeout=60)


def error_in_a_fork(touch: Callable[[], Any]) -> str:
    """Return the names of our error's class and its bases as a forked worker sees it, "" if there is none."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        try:
            touch()
            theirs.send("")
        except TieredError as error:
            theirs.send(type(error).__name__)

    process = context.Process(target=work)
    process.start()
    assert ours.poll(60), "the forked worker hangs"
    name: str = ours.recv()
    process.join()
    process.close()
    ours.close()
    theirs.close()
    return name


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # what DataLoader does by default
@pytest.mark.parametrize("what", ["parameter", "forward", "store"])
def test_touching_in_a_worker_process(what: str, session: Session) -> None:
    session.run_step(0)
    touch: dict[str, Callable[[], Any]] = {
        "parameter": lambda: session.model.get_parameter(NAME).sum(),
        "forward": lambda: session.model(*CASE.batch(0)).detach(),
        "store": lambda: session.store.get(next(iter(session.store))),
    }
    assert "Error" in error_in_a_fork(touch[what])
    session.run_step(1)  # and here nothing has changed


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # a plain data set must still work
def test_workers_that_touch_nothing_change_nothing(session: Session) -> None:
    for step, batch in enumerate(forked_loader(Touching(lambda: 3))):
        assert batch.item() == 3
        session.run_step(step)


def test_a_model_is_not_sent_to_a_spawned_process(session: Session) -> None:
    with pytest.raises(UsageError, match="state_dict"):
        multiprocessing.reduction.ForkingPickler.dumps(session.model)


def test_touching_in_another_thread(session: Session) -> None:
    caught: list[BaseException] = []

    def touch() -> None:
        try:
            session.model.get_parameter(NAME).sum()
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    assert len(caught) == 1


# -- the whole model -----------------------------------------------------------------------------------------------

WHOLE: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "to_dtype": lambda model: model.to(torch.bfloat16),
    "to_meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "apply": lambda model: model.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None),
    "ordinary_optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step() or _sgd(model),
    "func_grad": lambda model: torch.func.grad(
        lambda weights: torch.func.functional_call(model, weights, CASE.batch(0))
    )(dict(model.named_parameters())),
    "load_by_assignment": lambda model: model.load_state_dict(CASE.build().state_dict(), assign=True),
}


def _sgd(model: nn.Module) -> None:
    model(*CASE.batch(0)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.parametrize("act", WHOLE.values(), ids=WHOLE)
def test_what_would_take_the_model_apart(act: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        before = session.model.state_dict()
        with pytest.raises(UsageError):
            act(session.model)
        session.optimizer.zero_grad()
        after = session.model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        session.run_step(0)


def test_what_changes_nothing_is_allowed(session: Session) -> None:
    model = session.model
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    assert model.float() is model
    assert model.train().eval().train() is model
    assert NAME in repr(model.get_parameter(NAME))
    assert "nan" not in repr(model.get_parameter(NAME))
    assert sum(p.numel() for p in model.parameters()) == 32256
    assert model.requires_grad_(True) is model
    session.run_step(0)


def test_parameters_are_gone_with_the_store(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        session.run_step(0)
    with pytest.raises(UsageError):
        session.model.get_parameter(NAME).sum()
    with pytest.raises(UsageError):
        session.model(*CASE.batch(0))
    with pytest.raises(UsageError):
        session.model.state_dict()
    with pytest.raises(UsageError):
        session.optimizer.step()


# -- the loop in the wrong order -----------------------------------------------------------------------------------


@pytest.fixture
def backward_session(tmp_path: Path) -> Iterator[Session]:
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store, "backward")
        session.run_step(0)
        store.commit({"step": 1})
        yield session


def loss_of(session: Session) -> Tensor:
    return CASE.loss(session.model, CASE.batch(1))


@pytest.mark.parametrize("clip", [tiered.clip_grad_norm_, lambda model, norm: nn.utils.clip_grad_norm_(
    model.parameters(), norm)], ids=["tiered", "torch"])  # fmt: skip
def test_update_backward_refuses_clipping(clip: Callable[[nn.Module, float], Any], backward_session: Session) -> None:
    loss_of(backward_session).backward()
    with pytest.raises(UsageError, match='update="step"'):
        clip(backward_session.model, 1.0)


def test_update_backward_refuses_a_second_backward(backward_session: Session) -> None:
    first, second = loss_of(backward_session), loss_of(backward_session)
    first.backward()
    with pytest.raises(UsageError, match='update="step"'):
        second.backward()


def test_update_backward_refuses_a_changed_rate(backward_session: Session) -> None:
    loss_of(backward_session).backward()
    backward_session.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(UsageError, match='update="step"'):
        backward_session.optimizer.step()


def test_update_backward_refuses_a_changed_decay(backward_session: Session) -> None:
    loss_of(backward_session).backward()
    backward_session.optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(UsageError, match='update="step"'):
        backward_session.optimizer.step()


def test_update_backward_refuses_a_gradient_scaler(backward_session: Session) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(backward_session)).backward()
    with pytest.raises(UsageError, match='update="step"'):
        scaler.step(backward_session.optimizer)
        scaler.update()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_commit_between_backward_and_step_is_refused(update: str, tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store, update)
        session.run_step(0)
        loss_of(session).backward()
        with pytest.raises(UsageError, match="gradient"):
            store.commit({"step": 1})
        session.optimizer.step()
        session.optimizer.zero_grad()
        assert store.commit({"step": 2}) is not None or store.generation >= 1


def test_step_without_gradients_changes_nothing(session: Session) -> None:
    before = session.model.state_dict()
    session.optimizer.step()
    session.optimizer.zero_grad()
    after = session.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not session.optimizer.state_dict()["state"] or all(
        int(state["step"]) == 0 for state in session.optimizer.state_dict()["state"].values()
    )


def test_a_second_step_without_a_backward_changes_nothing(session: Session) -> None:
    session.run_step(0)
    before = session.model.state_dict()
    session.optimizer.step()
    after = session.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_zero_grad_before_step_drops_the_gradients(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        before = session.model.state_dict()
        loss_of(session).backward()
        session.optimizer.zero_grad()
        session.optimizer.step()
        after = session.model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(parameter.grad is None for parameter in session.model.parameters())


def test_unsharded_in_the_middle_of_a_step_is_refused_or_true(session: Session) -> None:
    before = session.model.state_dict()[NAME]
    loss = CASE.loss(session.model, CASE.batch(0))
    try:
        with tiered.unsharded(session.model.blocks[1]):
            assert torch.equal(session.model.get_parameter(NAME), before)
    except UsageError:
        pass
    loss.backward()


def test_writing_in_unsharded_between_forward_and_backward_is_never_silent(session: Session) -> None:
    """Autograd refuses a backward through a weight that was modified since; so must we."""
    loss = CASE.loss(session.model, CASE.batch(0))
    with pytest.raises((UsageError, RuntimeError)):
        with tiered.unsharded(session.model.blocks[1]), torch.no_grad():
            session.model.get_parameter(NAME).mul_(2)
        loss.backward()


def test_a_second_backward_through_one_graph(tmp_path: Path) -> None:
    """``retain_graph`` under update="step" is as in memory."""
    torch.manual_seed(SEED)
    plain = CASE.build()
    torch.manual_seed(SEED + 1)
    loss = CASE.loss(plain, CASE.batch(0))
    loss.backward(retain_graph=True)
    loss.backward()
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        loss = CASE.loss(session.model, CASE.batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        for name, parameter in plain.named_parameters():
            assert torch.equal(session.model.get_parameter(name).grad, parameter.grad), name
        session.optimizer.zero_grad()


def test_autograd_grad_is_refused_or_true(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    plain = CASE.build()
    torch.manual_seed(SEED + 1)
    expected = torch.autograd.grad(CASE.loss(plain, CASE.batch(0)), [plain.get_parameter(NAME)])
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        loss = CASE.loss(session.model, CASE.batch(0))
        try:
            found = torch.autograd.grad(loss, [session.model.get_parameter(NAME)])
        except UsageError:
            return
        assert torch.equal(found[0], expected[0])
