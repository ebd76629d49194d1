"""The GPT in training, sharded, between steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import CASES
from tests.reference import Recipe
from tests.zero.pending import Contents, contents, new_disk, pending
from tests.zero.training import Session, debug_store, start
from tiered.zero import layout, swapped
from tiered.zero.compact_trial import trial


@pytest.fixture(params=["step", "backward"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    with debug_store(tmp_path, durable=False) as store:
        yield start(CASES["gpt"], Recipe(), store, request.param)


@pytest.fixture
def step_session(tmp_path: Path) -> Iterator[Session]:
    with debug_store(tmp_path, durable=False) as store:
        yield start(CASES["gpt"], Recipe(), store)


@pytest.fixture
def swap_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small tensors of small models go through the store as large ones do."""
    monkeypatch.setattr(swapped, "SMALLEST_NBYTES", 1)


@pytest.fixture(scope="module")
def second_generation() -> Contents:
    """What the generation that ``pending`` commits contains, by a commit that waits."""
    disk = new_disk()
    with pending(disk=disk, wait=True):
        return contents(disk)


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have compact state work by its kernels, which must be there, or by torch operations."""
    kernels = trial().kernels
    assert kernels is not None, trial().reason
    monkeypatch.setattr(layout, "tried_kernels", lambda: kernels if request.param == "kernels" else None)
    return str(request.param)
