"""What a budget must be, known before anything is written."""

from __future__ import annotations

import pytest
import torch

import tiered
from tiered.errors import CapacityError
from tiered.train.budget import check_budget
from tiered.train.task import GPT, Shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [Shape(1, 64, 4, 32), Shape(2, 192, 4, 700), Shape(3, 256, 2, 16)])
def test_the_smallest_budget_of_a_plan_is_the_one_that_shard_asks_for(shape: Shape, dtype: torch.dtype) -> None:
    said = []
    with tiered.Store(engine="memory", durable=False, dram="64MiB") as store:
        with tiered.construct(store):
            model = GPT(shape)
        for ask in (
            lambda: check_budget(shape, dtype, dram=64 << 20, hold=64 << 20),
            lambda: tiered.shard(model, store, param_dtype=dtype, hold="64MiB"),
        ):
            with pytest.raises(CapacityError, match="leaves too little") as refused:
                ask()
            said.append(str(refused.value))
    assert said[0] == said[1]
