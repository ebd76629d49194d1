"""The public face: a mapping of tensors that is the same over every engine, and everything it refuses."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bytes.moving import exit_code_of_child
from tests.store.rig import WAIT_S, GatedDevice, numbers, simulated_store
from tiered.bytes.arena import Arena
from tiered.errors import CapacityError, ClosedError, LeaseError, UsageError
from tiered.store.store import Store
from tiered.units import KiB, MiB

QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTISED, key=str)

Opened = Callable[..., Store]


@pytest.fixture(params=["durable", "durable=False", "memory", "two directories", "16 MiB, debug arena"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Every kind of store, with one contract."""
    kind = request.param
    if kind == "memory":
        made = Store(engine="memory", dram="16MiB")
    elif kind == "two directories":
        made = Store(tmp_path / "one", tmp_path / "two", dram="16MiB")
    elif kind == "durable=False":
        made = Store(tmp_path / "swap", dram="16MiB", durable=False)
    else:
        arena = Arena(16 * MiB, reuse=False) if "debug" in kind else None
        made = Store(tmp_path / "run", dram="16MiB", _arena=arena)
    yield made
    made.close()


def written(store: Store) -> None:
    """Bring everything to the devices and out of DRAM."""
    store.working_set.swap_out(store)
    store.working_set.unreserve(store.working_set.reserve(16 * MiB))


# A mapping


def test_a_store_is_a_mapping_with_identity(store: Store) -> None:
    store["a"], store["b"] = torch.ones(3), torch.zeros(2, 2)
    assert (len(store), list(store), "a" in store, "c" in store, 5 in store) == (2, ["a", "b"], True, False, False)
    assert [value.shape for value in store.values()] == [(3,), (2, 2)]
    assert torch.equal(store.pop("a"), torch.ones(3))
    assert "a" not in store
    store.update({"c": torch.ones(1)}, d=torch.ones(2))
    assert torch.equal(store.setdefault("e", torch.ones(4)), torch.ones(4))  # type: ignore[arg-type]
    assert store == store and store != {"b": 1} and hash(store) == hash(store)
    for name in store:  # over a snapshot
        del store[name]
    assert len(store) == 0
    store.put_many([("f", torch.ones(1)), ("g", torch.ones(2000))])
    store.clear()
    assert len(store) == 0
    with pytest.raises(KeyError):
        store["a"]
    with pytest.raises(KeyError):
        del store["a"]
    assert store.get("a") is None
    assert store.get("a", 5) == 5


@pytest.mark.parametrize("key", [5, b"a", None, ("a",)])
def test_keys_are_text(store: Store, key: object) -> None:
    for call in (
        lambda: store.__setitem__(key, torch.ones(1)),  # type: ignore[index]
        lambda: store[key],  # type: ignore[index]
        lambda: store.lease(key),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="str"):
            call()


@pytest.mark.parametrize("key", ["", "../x", "/etc/passwd", "n\0l", "ü", "\ud800", "k" * 10_000, "a b\n"])
def test_any_text_is_a_key_and_no_path(tmp_path: Path, key: str) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store[key] = numbers(5000)
    with Store(tmp_path / "run", dram="16MiB", mode="r") as store:
        assert list(store) == [key]
        assert torch.equal(store[key], numbers(5000))
    assert sorted(os.listdir(tmp_path)) == ["run"]
    names = set(os.listdir(tmp_path / "run"))
    assert names == {"catalog.db", "catalog.db-journal", "data-000", "identity", "lock"}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("numel", [3, 3000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, numel: int, two_tiers: Store) -> None:
    value = torch.empty(numel, dtype=dtype)
    bits = torch.frombuffer(bytearray(os.urandom(value.nbytes)), dtype=torch.uint8)
    value = bits & 1 if dtype is torch.bool else bits
    expected = value.view(dtype)
    two_tiers["a"] = expected
    two_tiers.working_set.swap_out(["a"])
    found = two_tiers["a"]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), value)


@pytest.fixture(scope="module")
def two_tiers_of_the_module() -> Iterator[Store]:
    with Store(engine="memory", dram="8MiB") as made:
        yield made


@pytest.fixture
def two_tiers(two_tiers_of_the_module: Store) -> Store:
    return two_tiers_of_the_module


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.5),
        torch.empty(0, 7),
        torch.empty(3, 0, 2, dtype=torch.int64),
        torch.arange(24).reshape(4, 6).t(),
        torch.arange(9000).reshape(90, 100)[::2, 1::3],
        torch.randn(64, 64, 3).permute(2, 0, 1),
        torch.randn(5).expand(400, 5),
        torch.randn(500, dtype=torch.complex64).conj(),
        torch.randn(500, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.randn(40, 40)),
        torch.randn(300, requires_grad=True) * 2,
        torch.zeros(4, 4, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())}",
)
def test_odd_tensors_come_back_contiguous_detached_and_equal(store: Store, value: torch.Tensor) -> None:
    store["a"] = value
    store.working_set.swap_out(["a"])
    found = store["a"]
    assert type(found) is torch.Tensor
    assert found.is_contiguous()
    assert not found.requires_grad
    assert not found.is_conj()
    assert torch.equal(found, value.detach().resolve_conj().resolve_neg())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:torch.quantize_per_tensor")
def test_what_is_no_plain_tensor_is_refused_with_a_reason(store: Store) -> None:
    class Subclass(torch.Tensor):
        pass

    class SubParameter(torch.nn.Parameter):
        pass

    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    refused: list[tuple[object, str]] = [
        (torch.ones(3).to_sparse(), "layout"),
        (torch.ones(3, 3).to_sparse_csr(), "layout"),
        (torch.ones(3, device="meta"), "meta"),
        (quantised, "quantised"),
        (torch.ones(3).as_subclass(Subclass), "Subclass"),
        (SubParameter(torch.ones(3)), "SubParameter"),
        (np.ones(3), "ndarray"),
        ([1.0], "list"),
        (None, "NoneType"),
    ]
    for value, reason in refused:
        with pytest.raises(TypeError, match=rf"put of 'a'.*{reason}"):
            store["a"] = value  # type: ignore[assignment]
    assert "a" not in store


def test_get_returns_the_callers_own_copy(store: Store) -> None:
    for nbytes in (100, 100_000, 6 * MiB):
        value = numbers(nbytes)
        store["a"] = value
        kept = value.clone()
        value.zero_()
        store["a"].zero_()
        assert torch.equal(store["a"], kept)


def test_a_put_replaces_dtype_and_shape(store: Store) -> None:
    for value in (torch.ones(3), torch.zeros(2, 5000), torch.ones((), dtype=torch.bool), torch.rand(3 * MiB // 2)):
        store["a"] = value
        assert torch.equal(store["a"], value)
    assert len(store) == 1


@pytest.mark.parametrize("nbytes", [100, 10_000, 6 * MiB])
def test_get_into_a_tensor_of_the_callers(store: Store, nbytes: int) -> None:
    store["a"] = numbers(nbytes)
    out = torch.empty(nbytes, dtype=torch.uint8)
    assert store.get("a", out=out) is out
    assert torch.equal(out, numbers(nbytes))
    assert torch.equal(store.get("a", device="cpu"), out)
    bad: list[tuple[torch.Tensor, type[Exception]]] = [
        (torch.empty(nbytes + 1, dtype=torch.uint8), ValueError),
        (torch.empty(nbytes, dtype=torch.int8), ValueError),
        (torch.empty(2 * nbytes, dtype=torch.uint8)[::2], ValueError),
        (torch.empty(nbytes, dtype=torch.uint8, device="meta"), TypeError),
    ]
    for wrong, error in bad:
        with pytest.raises(error, match="out"):
            store.get("a", out=wrong)
    store["a"] = torch.ones(5)
    with pytest.raises(UsageError, match="requires grad"):
        store.get("a", out=torch.empty(5, requires_grad=True))
    with pytest.raises(ValueError, match="give one of them"):
        store.get("a", out=torch.empty(5), device="meta")


def test_many_at_once(store: Store) -> None:
    values = {f"k{i}": numbers(300_000, i) for i in range(60)}  # more than the budget
    store.put_many(values)
    written(store)
    found = store.get_many(reversed(list(values)))
    assert list(found) == list(reversed(list(values)))
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert store.working_set.statistics().swaps.num_prefetches > 0
    with pytest.raises(KeyError, match="nothing"):
        store.get_many(["k1", "nothing"])


def test_tensors_larger_than_the_budget_pass_through_it(store: Store) -> None:
    value = numbers(3 * 16 * MiB + 4097)
    store["large"] = value
    assert torch.equal(store["large"], value)
    statistics = store.working_set.statistics()
    assert statistics.peak_bytes <= 16 * MiB
    assert statistics.arena_bytes == 0
    with pytest.raises(CapacityError, match="no room"), store.lease("large"):
        pass
    store["large"] = value[: 20 * MiB]
    assert torch.equal(store["large"], value[: 20 * MiB])
    del store["large"]
    assert store.statistics().used_bytes == 0


def test_the_last_of_concurrent_puts_wins_and_readers_see_whole_tensors(store: Store) -> None:
    nbytes = 200_000
    failures: list[str] = []
    store["a"] = torch.zeros(nbytes, dtype=torch.uint8)

    def put(start: int) -> None:
        for i in range(30):
            store["a"] = torch.full((nbytes,), start + i, dtype=torch.uint8)

    def read() -> None:
        for _ in range(60):
            found = store["a"].unique().numel()
            if found != 1:
                failures.append(f"{found} values in one tensor")

    threads = [threading.Thread(target=put, args=(start,)) for start in (1, 100)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures
    assert int(store["a"][0]) in (30, 129)


def test_async_calls_do_not_block_the_loop(store: Store) -> None:
    async def main() -> list[torch.Tensor]:
        await asyncio.gather(*(store.aput(f"k{i}", numbers(50_000, i)) for i in range(8)))
        return await asyncio.gather(*(store.aget(f"k{i}") for i in range(8)))

    found = asyncio.run(main())
    assert all(torch.equal(value, numbers(50_000, i)) for i, value in enumerate(found))


# Leases


def test_a_lease_is_the_arenas_own_bytes(store: Store) -> None:
    store["a"] = torch.zeros(1000, 10)
    with store.lease("a", mode="rw") as view:
        assert type(view) is torch.Tensor
        view[3] = 7
        view.add_(1)
    with store.lease("a", mode="w") as view:
        view.fill_(2)
    with store.lease("a") as view:
        assert isinstance(view, torch.Tensor)
        assert view.shape == (1000, 10)
        assert float(view.sum()) == 20_000
    assert torch.equal(store["a"], torch.full((1000, 10), 2.0))


def test_what_was_written_stays_when_the_block_raises(store: Store) -> None:
    store["a"] = torch.zeros(2000)
    with pytest.raises(ZeroDivisionError), store.lease("a", mode="rw") as view:
        view.fill_(1)
        raise ZeroDivisionError
    assert torch.equal(store["a"], torch.ones(2000))


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_view_is_of_no_use_after_its_block(store: Store, mode: str) -> None:
    store["a"] = torch.zeros(2000)
    with store.lease("a", mode) as view:  # type: ignore[arg-type]
        pass
    calls: list[Callable[[], object]] = [
        lambda: view + 1,
        lambda: view.sum(),
        lambda: view.add_(1),
        lambda: view.shape,
        lambda: torch.nn.functional.relu(view),
        lambda: view[0],
    ]
    for call in calls:
        with pytest.raises(UsageError, match="lease of 'a' has ended"):
            call()
    assert "EndedView" in repr(view)


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_lease_that_ends_with_tensors_alive_says_so(store: Store, mode: str) -> None:
    store["a"] = torch.zeros(2000)
    before = store.working_set.statistics().arena_bytes
    with pytest.raises(LeaseError, match="the lease of 'a' ended while"), store.lease("a", mode) as view:  # type: ignore[arg-type]
        alias = view[5:]
    assert float(alias.sum()) == 0
    del alias
    assert store.working_set.statistics().arena_bytes <= max(before, 8 * KiB)
    with store.lease("a", "rw") as view:
        view.fill_(1)


def test_an_exception_is_not_hidden_by_tensors_that_are_alive(store: Store) -> None:
    store["a"] = torch.zeros(2000)
    with pytest.raises(ZeroDivisionError), store.lease("a") as view:
        alias = view[5:]
        raise ZeroDivisionError
    del alias
    with store.lease("a", "rw"):
        pass


def test_a_lease_block_is_entered_once(store: Store) -> None:
    store["a"] = torch.zeros(2000)
    block = store.lease("a")
    with block:
        pass
    with pytest.raises(LeaseError, match="entered before"), block:
        pass
    with pytest.raises(ValueError, match="mode"):
        store.lease("a", mode="x")  # type: ignore[arg-type]
    with pytest.raises(KeyError), store.lease("b"):
        pass


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda view: view.add_(1),
    "+=": lambda view: view.__iadd__(1),
    "setitem": lambda view: view.__setitem__(0, 1),
    "slice setitem": lambda view: view[2:4].__setitem__(slice(None), 1),
    "view of a view": lambda view: view.view(-1)[3:].t().zero_() if view.dim() < 2 else view.view(-1)[3:].zero_(),
    "out=": lambda view: torch.add(torch.ones(2000), 1, out=view),
    "out= tuple": lambda view: torch.max(torch.ones(4, 2000), 0, out=(view, torch.empty(2000, dtype=torch.int64))),
    "copy_": lambda view: view.copy_(torch.ones(2000)),
    "data": lambda view: view.data.zero_(),
    "set data": lambda view: setattr(view, "data", torch.ones(2000)),
    "detach": lambda view: view.detach().zero_(),
    "chunk": lambda view: view.chunk(2)[1].zero_(),
    "unbind": lambda view: view.unbind()[1].zero_(),
    "as_strided": lambda view: view.as_strided((3,), (1,)).zero_(),
    "nn.init": lambda view: torch.nn.init.normal_(view),
    "foreach": lambda view: torch._foreach_add_([torch.ones(1), view], 1),
    "relu_": lambda view: torch.relu_(view),
    "index_put_": lambda view: view.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "resize_": lambda view: view.resize_(5),
    "requires_grad": lambda view: view.requires_grad_(),
    "dlpack": lambda view: torch.from_dlpack(view),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_view_for_reading_refuses_to_be_written(two_tiers: Store, how: str) -> None:
    two_tiers["a"] = torch.zeros(2000)
    with two_tiers.lease("a") as view:
        with pytest.raises(UsageError, match="through a lease for reading"):
            WRITES[how](view)
    gc.collect()  # the exception's frames referred to views
    assert torch.equal(two_tiers["a"], torch.zeros(2000))


def test_a_view_for_reading_can_be_used_like_any_tensor(two_tiers: Store) -> None:
    value = torch.randn(40, 50)
    two_tiers["a"] = value
    with two_tiers.lease("a") as view:
        x = torch.randn(3, 50, requires_grad=True)
        y = torch.nn.functional.linear(x, view)
        y.sum().backward()
        assert type(y) is torch.Tensor and y.requires_grad
        assert type(view + 1) is torch.Tensor
        assert torch.equal(torch.zeros(40, 50).add_(view), value)
        assert torch.equal(torch.stack([view, view])[1], value)
        assert torch.equal(view.clone().zero_(), torch.zeros(40, 50))
        assert view[3, 4].item() == value[3, 4].item()
        assert view.tolist() == value.tolist()
        array = view.numpy()
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        assert np.array_equal(np.asarray(view), value.numpy())
        assert "ReadOnlyView" in repr(view) or "tensor" in repr(view)
        del array, y, x


# Opening, closing, and the process


def test_a_store_needs_directories_a_known_engine_and_a_budget(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a directory"):
        Store(dram="16MiB")
    for engine in ("uring", "aiofiles", "mmap"):
        with pytest.raises(UsageError, match=r"not part of this version.*'auto', 'threads', 'memory'"):
            Store(tmp_path / "run", dram="16MiB", engine=engine)
    with pytest.raises(UsageError, match="did you mean 'threads'"):
        Store(tmp_path / "run", dram="16MiB", engine="thread")
    with pytest.raises(ValueError, match="mode"):
        Store(tmp_path / "run", dram="16MiB", mode="w")
    with pytest.raises(CapacityError, match=r"smallest is 8\.0 MiB"):
        Store(tmp_path / "run", dram="4MiB")
    with pytest.raises(ValueError, match="size"):
        Store(tmp_path / "run", dram="lots")
    assert not (tmp_path / "run").exists()


def test_modes_open_create_and_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Store(tmp_path / "run", dram="16MiB", mode="r")
    with Store(tmp_path / "run", dram="16MiB", mode="x") as store:
        store["a"] = numbers(10_000)
        store.commit({"step": 1})
    with pytest.raises(UsageError):
        Store(tmp_path / "run", dram="16MiB", mode="x")
    with Store(tmp_path / "run", dram="16MiB", mode="r") as store, Store(tmp_path / "run", dram="16MiB", mode="r"):
        assert torch.equal(store["a"], numbers(10_000))
        assert store.resume() == {"step": 1}
        assert store.verify().is_clean
        calls: list[Callable[[], object]] = [
            lambda: store.__setitem__("b", torch.ones(1)),
            lambda: store.__delitem__("a"),
            lambda: store.working_set.lease("a", "rw"),
            lambda: store.working_set.create("b", 1),
            store.commit,
            store.rollback,
            lambda: store.reserve_space(1),
        ]
        for call in calls:
            with pytest.raises(UsageError, match='mode="r"'):
                call()


def test_the_order_of_directories_does_not_matter(tmp_path: Path) -> None:
    value = numbers(30 * MiB)
    with Store(tmp_path / "one", tmp_path / "two", dram="16MiB") as store:
        store["a"] = value
        assert {extent.device for extent in store.records()[0].extents} == {0, 1}
    with Store(tmp_path / "two", tmp_path / "one", dram="16MiB") as store:
        assert torch.equal(store["a"], value)
    with pytest.raises(UsageError):
        Store(tmp_path / "one", dram="16MiB")


def test_a_second_writer_is_refused_and_a_store_without_commits_too(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB"):
        with pytest.raises(UsageError, match=str(os.getpid())):
            Store(tmp_path / "run", dram="16MiB")
    with pytest.raises(UsageError, match="holds a store"):
        Store(tmp_path / "run", dram="16MiB", durable=False)


def test_a_store_without_commits_leaves_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "swap", dram="16MiB", durable=False) as store:
        store.put_many({f"k{i}": numbers(1 * MiB, i) for i in range(40)})
        assert os.listdir(tmp_path / "swap") == []
        assert store.statistics().used_bytes >= 20 * MiB
    assert os.listdir(tmp_path / "swap") == []


def test_the_default_budget_is_half_of_what_is_free_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), Store(engine="memory") as store:
        assert store.working_set.budget_bytes >= 8 * MiB
    assert "half of what is free" in caplog.text


def test_space_can_be_reserved_before_it_is_needed(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store.reserve_space(70 * MiB)
        store.reserve_space(60 * MiB)
        before = store.statistics()
        assert before.free_bytes >= 130 * MiB
        store["a"] = numbers(100 * MiB)
        assert store.statistics().file_bytes == before.file_bytes
        with pytest.raises(CapacityError):
            store.reserve_space(1 << 60)
        store.reserve_space(1)
        assert store.statistics().file_bytes == before.file_bytes


def test_records_and_statistics_say_what_there_is(store: Store) -> None:
    store["a"] = torch.ones(3000, 2)
    (record,) = store.records()
    assert (record.name, record.dtype, record.shape, record.nbytes) == ("a", torch.float32, (3000, 2), 24_000)
    assert (record.residency, record.generation, record.extents) == ("dirty", -1, ())
    statistics = store.statistics()
    assert (statistics.num_keys, statistics.generation, statistics.peak_bytes) == (1, 0, 24 * KiB)
    assert statistics.stall_seconds >= 0
    assert "1 keys, generation 0, 24.0 KiB of 16.0 MiB in DRAM" in repr(store)


def test_verify_reads_what_is_on_the_devices(store: Store) -> None:
    store.put_many({f"k{i}": numbers(300_000, i) for i in range(20)})
    store["large"] = numbers(9 * MiB)
    store["inline"] = numbers(10)
    written(store)
    report = store.verify()
    assert (report.num_keys, report.num_blocks, report.nbytes) == (22, 23, 20 * 300_000 + 9 * MiB)
    assert report.is_clean


def test_fork_leaves_the_store_to_the_parent(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        store["a"] = numbers(100_000)
        lease = store.working_set.lease("a", "r")

        def in_child() -> None:
            for call in (lambda: store["a"], lambda: store.commit(), lambda: len(store), lambda: list(store)):
                with pytest.raises(UsageError, match="fork"):
                    call()
            lease.release()
            store.close()

        assert exit_code_of_child(in_child) == 0
        lease.release()
        assert torch.equal(store["a"], numbers(100_000))
        store.commit()


def test_the_end_of_the_process_lets_a_sealed_generation_become_durable(tmp_path: Path) -> None:
    script = f"""
import torch
from tiered.store.store import Store
store = Store({str(tmp_path / "run")!r}, dram="64MiB")
for i in range(20):
    store[f"k{{i}}"] = torch.full((500_000,), i, dtype=torch.float32)
lease = store.working_set.lease("k3", "r")
store.commit({{"step": 1}}, wait=False)
store["k3"] = torch.zeros(5000)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=WAIT_S * 2,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    with Store(tmp_path / "run", dram="64MiB") as store:
        assert (store.generation, store.state) == (1, {"step": 1})
        assert all(torch.equal(store[f"k{i}"], torch.full((500_000,), float(i))) for i in range(20))


def test_views_outlive_the_store(store: Store) -> None:
    store["a"] = numbers(100_000)
    lease = store.working_set.lease("a", "r")
    tensor = lease.tensor
    store.close()
    assert torch.equal(tensor, numbers(100_000))
    del tensor
    assert lease.release()
    with pytest.raises(ClosedError):
        store["a"]


def test_a_hung_drive_does_not_lose_the_buffers_under_its_operations() -> None:
    gates: list[GatedDevice] = []

    def gate(device: object) -> GatedDevice:
        gates.append(GatedDevice(device))  # type: ignore[arg-type]
        return gates[0]

    store = simulated_store(budget_nbytes=64 * KiB, deadline_s=0.05, wrap=gate)  # type: ignore[arg-type]
    gates[0].hold = lambda operation: True
    with pytest.raises(Exception, match="did not happen within"):
        store["large"] = numbers(40 * KiB)
    assert store.working_set.statistics().arena_bytes == 40 * KiB
    assert store.statistics().used_bytes == 40 * KiB
    gates[0].open()
    assert store.working_set.statistics().arena_bytes == 0
    assert store.statistics().used_bytes == 0
    store.close()
