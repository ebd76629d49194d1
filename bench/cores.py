"""Batches of a campaign on every core that this process may use: one process each, seeds in order."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count
from pathlib import Path

__all__ = ["Batch", "on_all_cores"]

Batch = Callable[[int, Path], tuple[int, list[str]]]
"""``batch(seed, place)``: do the cases of a seed, with files in ``place`` only; return their number, what was wrong."""


def on_all_cores(batch: Batch, first: int, place: Path) -> Generator[tuple[int, list[str]], None, None]:
    """Yield what each seed from ``first`` on comes to; batches begun when this is closed are finished, not counted.

    Raises BrokenProcessPool when a process died in its batch: that seed is the first one not yielded, or the next.
    """
    context = multiprocessing.get_context("spawn")  # so that a batch may fork: it is no child of threads
    num_cores = len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(num_cores, mp_context=context, initializer=_begin)
    try:
        pending: deque[Future[tuple[int, list[str]]]] = deque()
        for seed in count(first):
            pending.append(pool.submit(batch, seed, place))
            if len(pending) > num_cores:
                yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    import torch

    torch.set_num_threads(1)
    logging.getLogger("tiered").setLevel(logging.CRITICAL)
