"""The public face: a mapping of tensors that is the same over every engine, and what it refuses."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import threading
from collections.abc import Callable
from types import MappingProxyType

import numpy as np
import pytest
import torch

from tests.store.rig import WAIT_S, numbers, written
from tiered.errors import CapacityError, UsageError
from tiered.store.store import Store
from tiered.units import MiB

QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTISED, key=str)


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


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
        lambda: store.lease(key),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="str"):
            call()
    with pytest.raises(KeyError, match="expected a str"):  # as in any mapping: it is not there
        store[key]  # type: ignore[index]


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


def odd_tensors() -> list[torch.Tensor]:
    return [
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
        torch.arange(8.0)[1::8],  # of one element, so contiguous with any stride
        torch.empty(0)[::2],
    ]


def test_odd_tensors_come_back_contiguous_detached_and_equal(store: Store) -> None:
    for value in odd_tensors():
        store["a"] = value
        store.working_set.swap_out(["a"])
        found, which = store["a"], f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())}"
        assert type(found) is torch.Tensor, which
        assert found.is_contiguous(), which
        assert not found.requires_grad, which
        assert not found.is_conj(), which
        assert torch.equal(found, value.detach().resolve_conj().resolve_neg()), which


def test_out_may_have_any_stride_where_it_has_one_element(store: Store) -> None:
    store["a"], store["none"] = torch.tensor([5.0]), torch.empty(0)
    room = torch.zeros(8)
    assert torch.equal(store.get("a", out=room[3::8]), torch.tensor([5.0]))
    assert room.tolist() == [5.0 * (place == 3) for place in range(8)]
    assert store.get("none", out=torch.empty(0)[::2]).numel() == 0


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support", "ignore:torch.quantize_per_tensor", "ignore:.* nested tensors"
)
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
        (torch.ones([1] * 256), "256 dimensions"),
        (SubParameter(torch.ones(3)), "SubParameter"),
        (np.ones(3), "ndarray"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested.*unbind"),
        (np.ones(3), "ndarray; torch.as_tensor"),
        ([1.0], "list"),
        (None, "NoneType"),
    ]
    for value, reason in refused:
        with pytest.raises(TypeError, match=rf"put of 'a'.*{reason}"):
            store["a"] = value  # type: ignore[assignment]
    assert "a" not in store


@pytest.mark.parametrize("dtype", sorted(QUANTISED, key=str), ids=str)
def test_bytes_that_are_viewed_as_quantised_are_refused_before_they_are_put(store: Store, dtype: torch.dtype) -> None:
    for nbytes in (16, 8000):
        value = numbers(nbytes).view(dtype)
        assert not value.is_quantized
        with pytest.raises(TypeError, match=rf"put of 'a'.*{dtype}.*view\(torch.uint8\)"):
            store["a"] = value
        with pytest.raises(TypeError, match=rf"put of 'b'.*{dtype}"):
            store.put_many([("good", torch.ones(3)), ("b", value)])
        with pytest.raises(TypeError, match=rf"create\('c'\): {dtype}"):
            store.working_set.create("c", nbytes, dtype=dtype)
    assert list(store) == ["good"]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_is_neither_copied_nor_pickled(store: Store, how: Callable[[object], object]) -> None:
    with pytest.raises(UsageError, match="cannot be copied or pickled; pass worker processes plain tensors"):
        how(store)


def test_what_is_no_mapping_is_no_state_to_commit(two_tiers: Store) -> None:
    for wrong in ("abc", [1], [("a", 1)], 5):
        with pytest.raises(TypeError, match=r"commit: expected state as a mapping.*got (str|list|int)"):
            two_tiers.commit(wrong)  # type: ignore[arg-type]
    two_tiers.commit(MappingProxyType({"step": 1}))
    assert two_tiers.state == {"step": 1}


def test_a_tensor_of_255_dimensions_is_kept_as_any_other(store: Store) -> None:
    store["a"] = torch.ones([2] + [1] * 254)
    with pytest.raises(TypeError, match=r"create\('b'\).*256"):
        store.working_set.create("b", 4, dtype=torch.float32, shape=[1] * 256)
    if store.durable:
        store.commit()
    assert torch.equal(store["a"], torch.ones([2] + [1] * 254))


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


@pytest.mark.parametrize("nbytes", [400, 400_000, 6 * MiB])
def test_a_backward_that_needs_what_a_get_has_overwritten_is_refused(store: Store, nbytes: int) -> None:
    store["a"] = torch.full((nbytes // 4,), 7.0)
    for is_resident in (True, False):
        if not is_resident:
            written(store)
        out = torch.full((nbytes // 4,), 2.0)
        weight = torch.ones(nbytes // 4, requires_grad=True)
        loss = (weight * out).sum()
        store.get("a", out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_tensor_of_inference_mode_is_overwritten_as_any_other(store: Store) -> None:
    store["a"] = torch.full((5000,), 7.0)
    with torch.inference_mode():
        out = torch.empty(5000)
        assert torch.equal(store.get("a", out=out), torch.full((5000,), 7.0))
    assert torch.equal(store.get("a", out=out), torch.full((5000,), 7.0))


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
