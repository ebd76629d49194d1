"""The state that rides along with a commit: random states as bytes, few calls, and what the last release wrote."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import torch
import xxhash
from torch import nn

import tiered
from tiered.store.format.state_text import decode, encode
from tiered.zero.model_state import RandomState

MAX_NUM_CALLS = 350  # of functions of tiered, on the thread that commits a model of six units


def draw() -> tuple[float, ...]:
    """Draw from numpy's and Python's generators, of each kind that leaves a number for the next draw, too."""
    return random.random(), random.gauss(0, 1), np.random.standard_normal(), np.random.rand()


def test_random_states_come_back_and_are_bytes() -> None:
    draw()
    text = encode(RandomState().state_dict())
    expected = draw(), torch.rand(3)
    RandomState().load_state_dict(decode(text))
    found = draw(), torch.rand(3)
    assert found[0] == expected[0] and torch.equal(found[1], expected[1])
    assert len(text) < 16_000  # 10 KB of generators, as base64


def test_random_states_that_the_last_release_committed_are_read() -> None:
    """tiered 0.2.0 wrote each word as an integer; the digest is that of its own text for these seeds."""
    random.seed(7)
    np.random.seed(7)
    random.gauss(0, 1)
    np.random.standard_normal()
    name, words, *rest = np.random.get_state(legacy=True)
    text = encode({"numpy": (name, words.tolist(), *rest), "python": random.getstate()})
    assert xxhash.xxh3_64_hexdigest(text.encode()) == "49d892dbec538d0b"
    expected = draw()
    RandomState().load_state_dict(RandomState().state_dict() | decode(text))
    assert draw() == expected


def test_a_commit_makes_few_calls_on_the_thread_that_trains(tmp_path: Path) -> None:
    package, names = str(Path(tiered.__file__).parent), list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            names.append(frame.f_code.co_qualname)

    with tiered.Store(tmp_path / "run", dram="32MiB") as store:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
        tiered.shard(model, store, unit=nn.Linear, hold=0)
        optimizer = tiered.AdamW(model.parameters())
        for step in range(2):
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            store.commit({"step": step})
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        torch.equal(store["model/parameters/0"], store["model/parameters/5"])  # the end of the updates
        sys.setprofile(note)
        store.commit({"step": 2}, wait=False)
        sys.setprofile(None)
    assert 0 < len(names) <= MAX_NUM_CALLS, names
