"""What a budget must be, known before anything is written."""

from __future__ import annotations

import pytest
import torch

import tiered
from tiered.errors import CapacityError
from tiered.tools.train.config import RunConfig, RunDials
from tiered.tools.train.plan import Plan
from tiered.tools.train.task import GPT, Shape


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("shape", [Shape(1, 64, 4, 32), Shape(2, 192, 4, 700), Shape(3, 256, 2, 16)])
def test_the_smallest_budget_of_a_plan_is_the_one_that_shard_asks_for(
    shape: Shape, word: str, dtype: torch.dtype
) -> None:
    config = RunConfig(shape.layers, shape.width, shape.heads, shape.context, dtype=word)
    plan = Plan(config, RunDials(dram=64 << 20, hold=64 << 20), (), durable=False, first_step=0)
    said = []
    with tiered.Store(engine="memory", durable=False, dram="64MiB") as store:
        with tiered.construct(store):
            model = GPT(shape)
        for ask in (
            plan.check_budget,
            lambda: tiered.shard(model, store, param_dtype=dtype, hold="64MiB"),
        ):
            with pytest.raises(CapacityError, match="leaves too little") as refused:
                ask()
            said.append(str(refused.value))
    assert said[0] == said[1]
