"""Saved activations that go through the store."""

import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import tiered
from tests.models import CASES, Case, Vectors, batch_of_tokens, batch_of_vectors
from tests.reference import Recipe
from tests.zero.saved_tensors import swapped_of, wide_vectors
from tests.zero.training import assert_same, debug_store, reference, start
from tiered.bytes.device.base import IOClass
from tiered.store.residency.swap_in_out import SwapInOut


class Watched(nn.Module):
    """Remembers the storages of what its ``exp`` and ``tanh`` save: their own outputs."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.seen.append(StorageWeakRef(y.untyped_storage()))
        return torch.cat([y, y.exp()]).mean(0, keepdim=True) + x


def alive(model: Any) -> int:
    return sum(not storage.expired() for block in model.blocks for storage in block.seen)


@pytest.mark.parametrize(("word", "expected"), [("keep", 4), ("recompute", 0), ("swap", 0)])
def test_only_keep_leaves_saved_tensors_in_memory(word: str, expected: int, tmp_path: Path, swap_all: None) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = start(Case(lambda: Vectors(Watched), batch_of_vectors), Recipe(), store, activations=word).model
        loss = model(*batch_of_vectors(0))
        assert alive(model) == expected
        del loss
        gc.collect()
        assert alive(model) == 0


def test_swap_stays_in_the_budget_and_goes_to_nvme_beyond_it(tmp_path: Path) -> None:
    """1,024 rows of 24 features save 96 KiB a tensor, some 4 MiB in all: in a budget of 1 MiB, then in 32 MiB."""
    case, recipe = Case(lambda: Vectors(num_blocks=8), wide_vectors), Recipe(num_steps=3)
    expected = reference(case, recipe)
    for nbytes, is_over in ((1 << 20, True), (32 << 20, False)):
        with debug_store(tmp_path / str(nbytes), nbytes, durable=False) as store:
            session = start(case, recipe, store, activations="swap", hold=0)
            loss = session.model(*case.batch(0))
            assert swapped_of(session).nbytes > 2 << 20
            del loss
            swapped_of(session).sweep()
            assert swapped_of(session).nbytes == 0
            torch.manual_seed(8)
            assert_same(session.run(), expected)
            statistics = store.statistics().working_set
            written = statistics.swaps.swap_out_bytes
            assert statistics.peak_bytes <= nbytes
            assert swapped_of(session).num_left == 0
            assert (written > 6 << 20) == is_over, written
            assert is_over or written < 2 << 20, written


def test_from_the_second_step_on_activations_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace knows the order of the backward: most are on their way before they are asked for, none twice."""
    reads: Counter[tuple[str, IOClass]] = Counter()
    begin = SwapInOut._swap_in

    def counting_begin(self: SwapInOut, entry: Any, residence: Any, io_class: IOClass = IOClass.DEMAND) -> Any:
        if "activation" in entry.name:
            reads[entry.name, io_class] += 1
        return begin(self, entry, residence, io_class)

    monkeypatch.setattr(SwapInOut, "_swap_in", counting_begin)
    case = Case(lambda: Vectors(num_blocks=8), wide_vectors)
    with debug_store(tmp_path, 1 << 20, durable=False) as store:
        session = start(case, Recipe(), store, activations="swap", hold=0)
        session.run_step(0)
        assert {io_class for _, io_class in reads} == {IOClass.DEMAND}
        reads.clear()
        session.run_step(1)
    num_ahead = sum(number for (_, io_class), number in reads.items() if io_class is IOClass.PREFETCH)
    assert reads.total() >= 8
    assert num_ahead > reads.total() / 2


def test_what_is_saved_twice_is_stored_once(tmp_path: Path, swap_all: None) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.linear(x))
            return y.sin() + y.cos() + y.view(-1).exp().view_as(y)  # y four times, its exp once

    case = Case(lambda: Vectors(Same, num_blocks=2), batch_of_vectors)
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, Recipe(), store, activations={"blocks.0": "swap", "blocks.1": "keep", "root": "keep"})
        loss = session.model(*batch_of_vectors(0))
        assert swapped_of(session).num_swapped == 3  # the input of the linear layer, y, its exp
        loss.backward()
        session.model.zero_grad()


@pytest.mark.parametrize("word", ["keep", "swap"])
def test_a_saved_tensor_modified_in_place_is_the_error_of_torch(word: str, tmp_path: Path, swap_all: None) -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            self.y = self.linear(x).exp()
            z = self.y * 2
            with torch.no_grad():
                self.y.mul_(3)
            return z

    with debug_store(tmp_path, durable=False) as store:
        model = start(Case(lambda: Vectors(Changed), batch_of_vectors), Recipe(), store, activations=word).model
        loss = model(*batch_of_vectors(0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()


def test_bytes_changed_behind_the_version_counter_are_stored_again(tmp_path: Path, swap_all: None) -> None:
    """What ``.data`` changes counts no version: each operation has the bytes that it saw."""

    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            z = y.sin()
            y.data.clamp_(-0.1, 0.1)
            return z.detach() + y.cos()

    case, recipe = Case(lambda: Vectors(Changed), batch_of_vectors), Recipe()
    with debug_store(tmp_path, durable=False) as store:
        assert_same(start(case, recipe, store, activations="swap").run(), reference(case, recipe))


def test_a_graph_from_before_a_rollback_is_refused(tmp_path: Path, swap_all: None) -> None:
    with debug_store(tmp_path) as store:
        session = start(CASES["gpt"], Recipe(), store, activations="swap")
        store.commit({})
        loss = session.model(*batch_of_tokens(0))
        store.rollback()
        again = session.model(*batch_of_tokens(0))
        with pytest.raises(tiered.UsageError, match="rollback"):
            loss.backward()
        del loss
        session.model.zero_grad()
        again.backward()
        session.optimizer.step()
        session.optimizer.zero_grad()


def test_the_bits_of_a_store_that_outlives_nothing_but_its_graph(tmp_path: Path, swap_all: None) -> None:
    """A graph that is dropped after its store was closed is no error."""
    with debug_store(tmp_path, durable=False) as store:
        loss = start(CASES["gpt"], Recipe(), store, activations="swap").model(*batch_of_tokens(0))
    del loss
    gc.collect()


def test_an_activation_without_room_stays_in_memory_whichever_thread_saves_it(tmp_path: Path) -> None:
    """The optimizer's scratch was reserved by the main thread, which gives it back to nobody."""
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    with debug_store(tmp_path, 1 << 20, durable=False) as store:
        model = tiered.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), store, activations="swap")
        optimizer = tiered.AdamW(model.parameters())

        def step() -> None:
            model(x).exp().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        thread = threading.Thread(target=step)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
