"""Parameters touched in another process or thread, and models taken apart: our error, and nothing is changed."""

import copy
import multiprocessing.reduction
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import CASES
from tests.reference import Recipe
from tests.zero.training import Session, debug_store, start
from tiered.errors import TieredError, UsageError

CASE = CASES["gpt"]
NAME = "blocks.1.fc.weight"


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


def swap(model: nn.Module) -> Any:
    parameter = model.get_parameter(NAME)
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(parameter.shape)))


def load_by_swapping(model: nn.Module) -> Any:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(CASE.build().state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def gradient_of(model: nn.Module, weights: dict[str, Any]) -> Any:
    return torch.func.grad(lambda weights: torch.func.functional_call(model, weights, CASE.batch(0)))(weights)


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
    "swap_tensors": swap,
    "load_by_swapping": load_by_swapping,
    "trace": lambda model: torch.jit.trace(model.eval(), CASE.batch(0)[:1], check_trace=False),
    "stack_module_state": lambda model: torch.func.stack_module_state([model, model]),
    "grad_of_its_own": lambda model: gradient_of(model, dict(model.named_parameters())),
    "grad_of_others": lambda model: gradient_of(model, model.state_dict()),
    "grad_through_a_block": lambda model: torch.func.grad(lambda x: model.blocks[0](x).sum())(torch.ones(1, 5, 24)),
    "jvp_through_a_block": lambda model: torch.func.jvp(
        lambda x: model.blocks[0].fc(x), (torch.ones(1, 24),), (torch.ones(1, 24),)
    ),
    "functionalize": lambda model: torch.func.functionalize(model.blocks[0].fc)(torch.ones(1, 24)),
    "load_by_assignment": lambda model: model.load_state_dict(CASE.build().state_dict(), assign=True),
}


def _sgd(model: nn.Module) -> None:
    model(*CASE.batch(0)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("act", WHOLE.values(), ids=WHOLE)
def test_what_would_take_the_model_apart(act: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        before = session.model.state_dict()
        with pytest.raises(UsageError):
            act(session.model)
        session.model.train()
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
