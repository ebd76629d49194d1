"""README's training loop as printed has plain PyTorch's bits, also after a stop; README's run says what runs say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import chdir
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.reference import MasterAdamW, Recipe
from tests.rigs.warm_python import WarmPython
from tests.store.places import quick_directory, short_files
from tests.test_docs import blocks
from tests.train.test_loop import TINY
from tiered.tools.cli import main

pytestmark = pytest.mark.usefixtures("ended_workers")

ROOT = Path(__file__).parents[1]
NUM_EPOCHS = 3
README = (ROOT / "README.md").read_text()
LOOP = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
RUN = next(text for text in blocks(ROOT / "README.md", "") if text.startswith("$ tiered train "))

Results = dict[str, Tensor]


class StoppedError(Exception):
    """The test ends the process's life."""


class MyModel(nn.Module):
    """What README leaves open: it computes its loss, with dropout, and notes it."""

    losses: list[Tensor]
    stop: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.stop()
        loss = (self.body(x.bfloat16()).float() - y).square().mean()
        self.losses.append(loss.detach().clone())
        return loss


def new_loader(*, shuffle: bool, num_workers: int) -> DataLoader[Any]:
    numbers = torch.arange(20.0).view(5, 4)  # five items: three batches
    return DataLoader(TensorDataset(numbers, numbers[:, :1]), batch_size=2, shuffle=shuffle, num_workers=num_workers)


def run(losses: list[Tensor], stop: Callable[[], None], *, seed: int, **options: Any) -> Results:
    """Run README's loop in the present directory; return parameters and moments at its end."""
    torch.manual_seed(seed)
    results: Results = {}
    model_type = type("MyModel", (MyModel,), {"losses": losses, "stop": staticmethod(stop)})

    def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        results.update({name: value.clone() for name, value in model.state_dict().items()})
        results.update(moments_of(optimizer))

    names = {"MyModel": model_type, "loader": new_loader(**options), "collect": collect}
    exec(LOOP + "    collect(model, optimizer)\n", names)
    return results


def moments_of(optimizer: torch.optim.Optimizer) -> Results:
    states = optimizer.state_dict()["state"]
    return {f"{n}.{key}": states[n][key].clone() for n in states for key in ("exp_avg", "exp_avg_sq")}


def plain(losses: list[Tensor], **options: Any) -> Results:
    """Return the same of a loop of plain PyTorch in memory."""
    torch.manual_seed(0)
    model = type("MyModel", (MyModel,), {"losses": losses, "stop": lambda self: None})()
    optimizer = MasterAdamW(model, Recipe(param_dtype=torch.bfloat16, adamw={"lr": 1e-4}))
    loader = new_loader(**options)
    for _ in range(NUM_EPOCHS):
        for x, y in loader:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict()) | moments_of(optimizer.optimizer)


def same(left: Results, right: Results) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    with quick_directory() as path, short_files(), chdir(path):
        yield path


def stop_at(step: int, losses: list[Tensor]) -> Callable[[], None]:
    def stop() -> None:
        if len(losses) == step:
            raise StoppedError

    return stop


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in_order", "shuffled"])
def test_the_loop_has_plain_bits_and_keeps_them_stopped_after_each_step(shuffle: bool, num_workers: int) -> None:
    """With workers, whose start takes the time, after some: at the end of an epoch, in one, and before the last."""
    options = {"shuffle": shuffle, "num_workers": num_workers}
    expected: list[Tensor] = []
    final = plain(expected, **options)
    losses: list[Tensor] = []
    for step in (3, 5, 8) if num_workers else range(1, len(expected)):
        with pytest.raises(StoppedError):
            run(losses, stop_at(step, losses), seed=0 if not losses else 99, **options)
        assert len(losses) == step
    assert same(run(losses, lambda: None, seed=99, **options), final)
    assert len(losses) == len(expected) == 9 and all(map(torch.equal, losses, expected))


def test_the_run_that_readme_prints_says_what_runs_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines have the names of today's, in their order; its plan has today's figures of the same model."""

    def lines_of(text: str) -> list[tuple[str, str]]:
        """Return the name that each line begins with and what it says: one step for all, lines that go on joined."""
        joined = re.sub(r"\n +", " ", text).splitlines()
        split = [tuple(line.split(maxsplit=1)) for line in joined if line != "..."]
        return [next(same) for _, same in groupby(split, key=lambda line: line[0])]

    command, _, printed = RUN.partition("\n")
    Path("text.txt").write_bytes(b"one word, one meaning; " * 1300)
    assert main(["train", "--data", "text.txt", "--store", "runs/tiny", "--steps", "12", *TINY]) == 0
    readme, tiny = lines_of(printed), lines_of(capsys.readouterr().out)
    assert [name for name, _ in readme] == [name for name, _ in tiny]
    assert main([*command.split()[2:], "--dry-run"]) == 0
    plan = {line for line in lines_of(capsys.readouterr().out) if line[0] in ("model", "job", "memory", "writes")}
    assert len(plan) == 4 and plan <= set(readme)


def run_and_die(step: int) -> None:
    """Run the loop, and kill this process in the forward after ``step`` steps."""
    losses: list[Tensor] = []

    def die() -> None:
        if len(losses) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    run(losses, die, seed=0, shuffle=True, num_workers=2)


def test_the_loop_has_the_same_bits_after_a_kill(directory: Path, warm_python: WarmPython) -> None:
    """Of a step that was sealed and not yet durable nothing is left; it is made again."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": 2}
    expected: list[Tensor] = []
    final = plain(expected, **options)
    code = f"import os; from tests.test_readme_loop import run_and_die; os.chdir({str(directory)!r}); run_and_die(4)"
    process = subprocess.run([warm_python.executable, "-c", code], cwd=ROOT, env=os.environ, check=False)
    assert process.returncode == -signal.SIGKILL
    losses: list[Tensor] = []
    assert same(run(losses, lambda: None, seed=99, **options), final)
    assert 5 <= len(losses) <= 9 and all(map(torch.equal, losses, expected[-len(losses) :]))
