"""The GPT in training, sharded, between steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models import CASES
from tests.reference import Recipe
from tests.store.places import quick_directory, short_files
from tests.zero.pending import Contents, contents, new_disk, pending
from tests.zero.training import Session, debug_store, start
from tiered.zero import layout as unit_layout
from tiered.zero.activations import swapped_activations
from tiered.zero.formats import state_layout
from tiered.zero.formats.compact_codes import tried_compact_kernels


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A directory for tests of many cases whose subject is bits, not the drive: in memory where that is offered."""
    with quick_directory() as path, short_files():
        yield path


@pytest.fixture
def tmp_path(quick_path: Path) -> Path:
    """The same: a durable store takes a third of the time there, and tests of stores are on drives."""
    return quick_path


@pytest.fixture(scope="module", autouse=True)
def many_buckets() -> Iterator[None]:
    """Give the units of small models as many buckets of state as large ones have, and as tight a smallest budget."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_layout, "LEAST_BUCKET_NUMEL", 1)
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with one thread, save in modules that say ``TWO_THREADS``: small models take longer with a second one."""
    num_threads = torch.get_num_threads()
    if not getattr(request.module, "TWO_THREADS", False):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=["step", "backward"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    with debug_store(tmp_path, durable=False) as store:
        yield start(CASES["gpt"], Recipe(), store, request.param)


@pytest.fixture
def step_session(tmp_path: Path) -> Iterator[Session]:
    with debug_store(tmp_path, durable=False) as store:
        yield start(CASES["gpt"], Recipe(), store)


@pytest.fixture(scope="module")
def between_steps() -> Iterator[tuple[Session, Session]]:
    """Two sessions for tests of a module that leave them as they are: before the first step, and after one."""
    with quick_directory() as path, short_files():
        with debug_store(path / "new", durable=False) as new, debug_store(path / "trained", durable=False) as store:
            trained = start(CASES["gpt"], Recipe(), store)
            trained.run_step(0)
            yield start(CASES["gpt"], Recipe(), new), trained


@pytest.fixture
def swap_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small tensors of small models go through the store as large ones do."""
    monkeypatch.setattr(swapped_activations, "SMALLEST_NBYTES", 1)


@pytest.fixture(scope="module")
def second_generation() -> Contents:
    """What the generation that ``pending`` commits contains, by a commit that waits."""
    disk = new_disk()
    with pending(disk=disk, wait=True):
        return contents(disk)


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have compact state work by its kernels, which must be there, or by torch operations."""
    assert tried_compact_kernels() is not None
    if request.param == "torch":
        monkeypatch.setattr(state_layout, "tried_compact_kernels", lambda: None)
    return str(request.param)
