"""Stores in memory where that is offered, one thread, as many buckets as large models have, and no thread left over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import tqdm
import transformers

from tests.store.places import quick_directory, short_files
from tiered.zero import layout


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory where that is offered: the subject is bits and names, not the drive."""
    with quick_directory() as path, short_files():
        yield path


@pytest.fixture(autouse=True)
def no_threads_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar's outlives it, and those that load end by themselves some time after."""
    transformers.utils.logging.disable_progress_bar()
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


@pytest.fixture(scope="module", autouse=True)
def small_models() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LEAST_BUCKET_NUMEL", 1)
        yield
    torch.set_num_threads(num_threads)
