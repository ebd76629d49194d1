"""Page-locked DRAM: when it is locked, the borders that no copy crosses, and copies that fail."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tiered.bytes import pinned_arena
from tiered.bytes.arena import PAGE_NBYTES
from tiered.bytes.host_tensor import copy_across
from tiered.bytes.pinned_arena import PinnedArena
from tiered.units import KiB, MiB

SIDE = 72  # a matrix of so many rows and columns is five pages and a bit
NUM_PIECES = 16  # of the smallest pieces that the fixture makes, in a store of 16 MiB

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[tiered.Store]:
    """Open a store that takes a tensor of more than 4 MiB block by block."""
    with tiered.Store(directory, dram="16MiB", device_memory="16MiB", **options) as store:
        yield store


def arena_of(store: tiered.Store) -> PinnedArena:
    arena = store.working_set.arena
    assert isinstance(arena, PinnedArena)
    return arena


def values(nbytes: int, device: str = "sim") -> torch.Tensor:
    return torch.arange(nbytes // 4, dtype=torch.int32).to(device)


def build(device: str) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3))).to(device)


# When


def num_registered(sim: ModuleType) -> int:
    return sum(entry.kind == "register" for entry in sim.log())


def train_on_the_cpu(store: tiered.Store) -> None:
    model = tiered.shard(build("cpu"), store, device="cpu")
    model(torch.ones(1, SIDE)).sum().backward()
    tiered.AdamW(model.parameters()).step()


def test_a_store_that_no_device_uses_calls_nothing_of_the_device(sim: ModuleType, tmp_path: Path) -> None:
    sim.keep_log()
    with opened(tmp_path) as store:
        store["resident"], store["streamed"] = values(8 * KiB, "cpu"), values(6 * MiB, "cpu")
        assert torch.equal(store["streamed"], values(6 * MiB, "cpu")) and len(store["resident"])
        train_on_the_cpu(store)
        store.commit()
        assert not arena_of(store).is_pinned
    assert sim.log() == []


USES: dict[str, Callable[[tiered.Store], object]] = {
    "put": lambda store: store.put_many({"a": values(8 * KiB)}),
    "put of a streamed tensor": lambda store: store.put_many({"a": values(6 * MiB)}),
    "get": lambda store: store.get("resident", device="sim"),
    "get into a tensor": lambda store: store.get("resident", out=torch.zeros_like(values(8 * KiB))),
    "get of a streamed tensor": lambda store: store.get("streamed", device="sim"),
    "shard": lambda store: tiered.shard(build("cpu"), store, device="sim"),
    "shard of a model on the device": lambda store: tiered.shard(build("sim"), store),
}


@pytest.mark.parametrize("use", USES)
def test_the_first_use_by_a_device_locks_all_pages_once(use: str, sim: ModuleType, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store["resident"], store["streamed"] = values(8 * KiB, "cpu"), values(6 * MiB, "cpu")
        sim.keep_log()
        for key in ("resident", "streamed"):
            store.get(key)
        assert num_registered(sim) == 0
        USES[use](store)
        assert num_registered(sim) == NUM_PIECES and arena_of(store).is_pinned
        store["b"] = values(8 * KiB)
        assert num_registered(sim) == NUM_PIECES and sim.counts().device_to_pageable_host.num == 0
        assert torch.equal(store["resident"][:7], values(28, "cpu"))


def test_threads_that_put_at_one_time_lock_the_pages_once(sim: ModuleType, tmp_path: Path) -> None:
    tensors = {str(number): values(64 * KiB) + number for number in range(8)}
    with opened(tmp_path) as store, ThreadPoolExecutor(4) as pool:
        sim.keep_log()
        list(pool.map(store.put, tensors, tensors.values()))
        assert num_registered(sim) == NUM_PIECES
        assert all(torch.equal(store[key].to("sim"), tensor) for key, tensor in tensors.items())


def test_memory_that_is_not_locked_is_one_warning_and_works(
    sim: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tiered"), opened(tmp_path) as store:
        sim.fail_registration(NUM_PIECES // 2)
        for key in "ab":
            store[key] = values(3 * MiB)
            assert torch.equal(store.get(key, device="sim"), values(3 * MiB))
        assert not arena_of(store).is_pinned and arena_of(store).why_pageable is not None
    assert sum("page-locked" in record.message for record in caplog.records) == 1


# Borders


@contextmanager
def pages(monkeypatch: pytest.MonkeyPatch, sim: ModuleType) -> Iterator[Counter[int]]:
    """Lock each page by itself; the block must not copy over two, nor any byte of an arena behind our function's back.

    That asks the arena for the next border before each copy. Lends the number of copies by where they begin.
    """
    monkeypatch.setattr(pinned_arena, "PIECE_NBYTES", PAGE_NBYTES)
    asked, copied, arenas = Counter[int](), Counter[int](), list[range]()
    ask, init = PinnedArena.nbytes_to_border, PinnedArena.__init__

    def noted(arena: PinnedArena, address: int) -> int:
        asked[address] += 1
        return ask(arena, address)

    def made(arena: PinnedArena, *args: Any, **options: Any) -> None:
        init(arena, *args, **options)
        arenas.append(range(arena._start, arena._end))

    monkeypatch.setattr(PinnedArena, "nbytes_to_border", noted)
    monkeypatch.setattr(PinnedArena, "__init__", made)
    sim.keep_log()
    yield copied
    between = ("host to device", "device to host", "device to pageable", "pageable host")
    for entry in sim.log():
        is_between = entry.kind == "copy" and any(word in entry.name for word in between)
        if is_between and any(entry.address in arena for arena in arenas):
            copied[entry.address] += 1
    assert copied - asked == Counter()


def use_every_kind_of_value(store: tiered.Store) -> None:
    """Bring tensors of the device in and out, whole and in parts, resident and streamed."""
    small, large = values(40 * KiB + 4), values(6 * MiB + 4)
    store.put_many({"small": small, "large": large, "inline": values(12)})
    store.write_part("small", 3, values(20 * KiB))
    store.write_part("large", 5000, values(20 * KiB))
    small[3 : 3 + 5 * KiB], large[5000 : 5000 + 5 * KiB] = values(20 * KiB), values(20 * KiB)
    out = torch.zeros_like(small)
    assert torch.equal(store.get("small", out=out), small)
    assert torch.equal(store.get("large", device="sim"), large)
    assert torch.equal(store.get("inline", device="sim"), values(12))


def train(store: tiered.Store, model: nn.Module, update_on: str, **options: Any) -> tuple[nn.Module, Any]:
    options = {"activations": "swap", "hold": 0, "unit": (nn.Linear,), "update_on": update_on} | options
    model = tiered.shard(model, store, device="sim", **options)
    optimizer = tiered.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    dtype = next(model.parameters()).dtype
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(SIDE, SIDE, device="sim", dtype=dtype)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def load_and_change(store: tiered.Store, model: nn.Module, optimizer: Any) -> None:
    """Write parameters, masters and state from tensors on the device; lay a unit out anew; commit."""
    parameter: Any = model[1].weight  # type: ignore[index]
    given = torch.full((SIDE, SIDE), 0.1, device="sim")
    state = {name: value.to("sim") for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    with tiered.unsharded(model[1]), torch.no_grad():  # type: ignore[index]
        parameter.copy_(given)
    parameter.requires_grad_(False)
    model(torch.ones(1, SIDE, device="sim", dtype=parameter.dtype)).sum().backward()
    parameter.requires_grad_(True)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    store.commit()


@pytest.mark.parametrize("update_on", ["cpu", "device"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_copy_reaches_over_two_pieces_nor_goes_past_the_function_that_cuts(
    update_on: str, dtype: torch.dtype | None, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pages(monkeypatch, sim) as copied, ExitStack() as stack:
        store = stack.enter_context(opened(tmp_path / "values"))
        if dtype is None:
            use_every_kind_of_value(store)
        model, optimizer = train(store, build("sim"), update_on, param_dtype=dtype)
        load_and_change(store, model, optimizer)
        given = stack.enter_context(opened(tmp_path / "given", durable=False))
        with torch.device("meta"):
            empty = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
        tiered.shard(empty, given, device="sim", param_dtype=dtype, weights=build("sim").state_dict())
        for is_constructed in (False, True):
            made = stack.enter_context(opened(tmp_path / f"made {is_constructed}"))
            set_masters_before_an_optimizer(made, dtype, is_constructed=is_constructed)
    assert copied.total() > 250


def set_masters_before_an_optimizer(store: tiered.Store, dtype: torch.dtype | None, *, is_constructed: bool) -> None:
    with tiered.construct(store, device="sim") if is_constructed else torch.device("sim"):
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(3)))
    tiered.shard(model, store, device="sim", param_dtype=dtype)
    given = build("sim").state_dict()
    model.load_state_dict(given)
    state = tiered.AdamW(model.parameters()).state_dict()["state"]
    assert dtype is None or torch.equal(state[0]["master"], given["0.weight"].cpu())


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda flat: flat,
    "one element": lambda flat: flat[1023:1024].view(()),
    "no element": lambda flat: flat[:0].view(3, 0),
    "rows": lambda flat: flat[1:9001].view(30, 300),
    "rows longer than a page": lambda flat: flat[:9000].view(3, 3000),
    "columns": lambda flat: flat[5:9005].view(300, 30).t(),
    "permuted": lambda flat: flat[:8736].view(12, 26, 28).permute(1, 2, 0),
    "with gaps": lambda flat: flat.view(100, 100)[3:90, 5:60],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_any_layout_arrives(
    layout: str, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pages(monkeypatch, sim), opened(tmp_path) as store:
        store.working_set.create("a", 40_000)
        lease = store.working_set.lease("a", "w")
        here = LAYOUTS[layout](lease.tensor.view(torch.float32))
        for dtype in (torch.float32, torch.bfloat16):
            there = torch.randn(here.shape).to("sim", dtype)
            for side in (there, there.t().contiguous().t() if there.dim() == 2 else there):
                lease.tensor.zero_()
                copy_across(here, side)
                assert torch.equal(here, there.cpu().float()) and int(lease.tensor.count_nonzero()) <= 4 * here.numel()
                back = torch.zeros_like(side)
                copy_across(back, here)
                assert torch.equal(back.cpu(), there.cpu())
        lease.release()
        del here


# Failures


def write_a_part(store: tiered.Store) -> None:
    store.write_part("streamed", 1001, values(40 * KiB))


def shard_with_masters(store: tiered.Store) -> None:
    tiered.shard(build("sim"), store, device="sim", param_dtype=torch.bfloat16)


FAILING = {use: USES[use] for use in USES if use != "shard"}
FAILING |= {"write of a part": write_a_part, "shard with masters": shard_with_masters}


@pytest.mark.parametrize("use", FAILING)
def test_a_copy_that_fails_is_the_devices_error_and_costs_no_memory(use: str, sim: ModuleType, tmp_path: Path) -> None:
    """Each comes ten times, in a budget of eight; the caller keeps the errors of puts and gets."""
    kept = []
    with opened(tmp_path) as store:
        store["resident"], store["streamed"] = values(8 * KiB, "cpu"), values(6 * MiB, "cpu")
        before = arena_of(store).leased_nbytes
        for at in (1, 2, 5) if "shard" in use else (1, 2) * 5 if "streamed" in use else (1,) * 10:
            sim.fail_copy(at)
            with pytest.raises(RuntimeError, match="planned to fail") as error:
                FAILING[use](store)
            if "shard" in use:
                del error
                gc.collect()
                for key in [key for key in store if key.startswith("model/")]:
                    del store[key]
            else:
                kept.append(error.value)
            assert arena_of(store).leased_nbytes == before
        sim.fail_copy(0)
        FAILING[use](store)
        store["large"] = values(3 * MiB)
        assert torch.equal(store.get("large", device="sim"), values(3 * MiB))
