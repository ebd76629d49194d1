"""Options that an optimizer is given anew at a resume: the commit's are used, one warning says so and how to go on."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.zero.training import debug_store

Make = Callable[[nn.Module], Any]


def adamw(**options: Any) -> Make:
    return lambda model: tiered.AdamW(model.parameters(), **options)


def run(path: Path, make: Make, *, change: Callable[[Any], None] = lambda _: None, step_lr: bool = False) -> Any:
    """Resume, ``change`` the optimizer, make one step and commit; return the options of the first group."""
    with debug_store(path) as store:
        model = tiered.shard(nn.Linear(4, 4), store)
        optimizer = make(model)
        if step_lr:
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
            store.register("scheduler", scheduler)
        store.resume()
        change(optimizer)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step() if step_lr else None
        store.commit({})
        return dict(optimizer.param_groups[0])


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "resumed run" in r.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        (adamw(lr=torch.tensor(1e-3)), adamw(lr=torch.tensor(5e-2)), "lr"),
        (adamw(weight_decay=0.0), adamw(weight_decay=0.1), "weight_decay"),
        (adamw(betas=(0.9, 0.99)), adamw(betas=(0.8, 0.9)), "betas"),
        (
            lambda m: tiered.SGD(m.parameters(), momentum=0.9),
            lambda m: tiered.SGD(m.parameters(), momentum=0.5),
            "momentum",
        ),
        (
            lambda m: tiered.Lion([{"params": list(m.parameters()), "lr_scale": 1.0}]),
            lambda m: tiered.Lion([{"params": list(m.parameters()), "lr_scale": 2.0}]),
            "lr_scale",
        ),
    ],
    ids=["tensor_lr", "decay", "betas", "momentum", "option_of_a_group"],
)
def test_a_new_option_is_named_once_and_the_named_way_changes_it(
    first: Make, second: Make, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = run(tmp_path, first)
    assert not warned(caplog)
    assert run(tmp_path, second)[name] == old[name]
    (message,) = warned(caplog)
    assert f"{name} of group 0" in message
    (remedy,) = re.findall(r"optimizer\.param_groups\[0\]\['\w+'\] = .*(?=, and a scheduler)", message)
    from torch import tensor

    changed = run(tmp_path, second, change=lambda optimizer: exec(remedy, {"optimizer": optimizer, "tensor": tensor}))
    assert len(warned(caplog)) == 1 and changed[name] != old[name]
    assert run(tmp_path, second)[name] == changed[name]  # the change is in the commit
    assert not warned(caplog)


def test_a_script_that_is_as_it_was_hears_nothing_of_its_schedule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def by_hand(optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    for _ in range(3):
        run(tmp_path / "by_hand", adamw(lr=1e-3), change=by_hand)
        run(tmp_path / "one_cycle", adamw(lr=1e-3, betas=(0.9, 0.99)), step_lr=True)
    assert not warned(caplog)
