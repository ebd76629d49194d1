"""A run inside of a mode of torch's that asks each tensor for its address, as torch's own CUDA sanitizer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import tiered
from tests.accelerator.training import DEVICE, ROOMY_NBYTES, case_on, reference_on
from tests.reference import Recipe
from tests.zero.training import assert_same, start
from tiered.zero.activations import swapped_activations


class Addresses(TorchDispatchMode):
    """Asks for the address of each tensor of the device that an operation takes or returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _ask((args, kwargs))
        result = func(*args, **(kwargs or {}))
        _ask(result)
        return result


def _ask(values: Any) -> None:
    tree_map_only(torch.Tensor, lambda tensor: tensor.data_ptr() if tensor.device.type == DEVICE else 0, values)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("update", "update_on", "activations"),
    [("step", "cpu", "swap"), ("backward", "device", "recompute")],
)
def test_a_mode_that_asks_for_addresses_changes_nothing(
    update: str, update_on: str, activations: str, accelerator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapped_activations, "SMALLEST_NBYTES", 1)
    recipe = Recipe(param_dtype=torch.bfloat16, num_steps=2, max_norm=None if update == "backward" else 0.5)
    expected = reference_on(DEVICE, "gpt", recipe, update_on)
    options: dict[str, Any] = {"device": DEVICE, "update_on": update_on, "activations": activations, "hold": 0}
    with Addresses(), tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = start(case_on(DEVICE, "gpt"), recipe, store, update, **options)
        trained = session.run()
        with tiered.unsharded(session.model), torch.no_grad():
            next(session.model.parameters()).mul_(1.0)
        session.model.load_state_dict(session.model.state_dict())
        store.commit({"step": 2})
    assert_same(trained, expected)
