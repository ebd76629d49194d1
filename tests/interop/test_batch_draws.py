"""A Trainer that resumes in any epoch has the batches of the undisturbed run, whatever draws for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import IterableDataset, Sampler, WeightedRandomSampler

import tiered
from tests.interop.small_models import (
    NUM_ITEMS,
    Masked,
    Tokens,
    build,
    history,
    same_state,
    state_of,
    training_arguments,
)
from tests.interop.test_trainer import Stop, StoppedError
from tests.store.places import quick_directory
from tests.zero.training import debug_store

pytestmark = pytest.mark.usefixtures("ended_workers")


class MaskedByOwn(Tokens):
    """Items that draw from a generator of the data set."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.default_rng(3)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        tokens = row["input_ids"].clone()
        tokens[self.noise.integers(12)] = 0
        return row | {"input_ids": tokens}


class Streamed(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Masked()[index] for index in range(NUM_ITEMS))


class Passes(Sampler[int]):
    """It counts its passes, and draws eagerly from the process's generator."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(((torch.randperm(NUM_ITEMS) + self.passes) % NUM_ITEMS).tolist())

    def __len__(self) -> int:
        return NUM_ITEMS


def weighted(**options: Any) -> Sampler[int]:
    return WeightedRandomSampler(torch.arange(1.0, NUM_ITEMS + 1), NUM_ITEMS, **options)


# the data, the sampler (None: the Trainer's own), and TrainingArguments
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grouped_by_length": (
        lambda: [Tokens()[index] for index in range(NUM_ITEMS)],
        None,
        {"train_sampling_strategy": "group_by_length"},
    ),
    "weighted": (Tokens, weighted, {}),
    "weighted_by_own_generator": (Tokens, lambda: weighted(generator=torch.Generator().manual_seed(4)), {}),
    "counted": (Tokens, Passes, {}),
    "masked": (Masked, weighted, {}),
    "masked_by_own_generator": (MaskedByOwn, None, {}),
    "workers": (Tokens, weighted, {"dataloader_num_workers": 1}),
}


def new_trainer(kind: str, cls: Any, path: Path, **options: Any) -> Any:
    data, sampler, arguments = KINDS[kind]

    class WithSampler(cls):  # type: ignore[misc]
        def _get_train_sampler(self, *arguments: Any) -> Any:
            return sampler() if sampler else super()._get_train_sampler(*arguments)

    chosen = {"eval_strategy": "no", "gradient_accumulation_steps": 2} | arguments
    return WithSampler(
        model=build("bert"), args=training_arguments(path / "out", **chosen), train_dataset=data(), **options
    )


@cache
def undisturbed(kind: str) -> Any:
    with quick_directory() as path:
        trainer = new_trainer(kind, transformers.Trainer, path)
        trainer.args.save_strategy = "no"
        trainer.train()
        return history(trainer), state_of(trainer.model)


STOPS = {"in_the_first_pass": 3, "between_two": 6, "in_the_second": 8}
ROWS = [  # each kind is stopped in the second pass, and earlier: by turns in the first one, and between both
    pytest.param(kind, STOPS[stop], id=f"{kind}-{stop}")
    for number, kind in enumerate(KINDS)
    for stop in ("in_the_second", list(STOPS)[number % 2])
]


@pytest.mark.parametrize(("kind", "stop"), ROWS)
def test_batches_are_those_of_the_undisturbed_run(kind: str, stop: int, tmp_path: Path) -> None:
    for callbacks, resume in (([Stop(stop)], None), ([], True)):
        with debug_store(tmp_path / "store") as store:
            trainer = new_trainer(kind, tiered.hf.Trainer, tmp_path, callbacks=callbacks, tiered={"store": store})
            with contextlib.suppress(StoppedError):
                trainer.train(resume_from_checkpoint=resume)
            found = history(trainer), state_of(trainer.model) if resume else {}
    assert found[0] == undisturbed(kind)[0] and same_state(found[1], undisturbed(kind)[1])


@pytest.mark.parametrize(
    ("data", "num_workers", "expected"),
    [(Masked, 1, "dataloader_num_workers=0"), (Streamed, 0, "a data set with __getitem__")],
    ids=["workers", "stream"],
)
def test_draws_that_cannot_come_back_are_warned_of_once(
    data: Any, num_workers: int, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = training_arguments(
        tmp_path / "out", max_steps=7, save_strategy="no", eval_strategy="no", dataloader_num_workers=num_workers
    )
    with tiered.Store(tmp_path / "store", dram="64MiB", durable=False) as store:
        tiered.hf.Trainer(model=build("bert"), args=arguments, train_dataset=data(), tiered={"store": store}).train()
    (record,) = [record for record in caplog.records if record.name == "tiered" and "random numbers" in record.msg]
    assert record.getMessage().endswith(f"expected {expected}")
