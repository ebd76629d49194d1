"""A store under torch's modes: a default device changes nothing, what has no memory for new tensors is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.store.rig import numbers, written
from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.units import MiB


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


def test_every_call_works_under_a_default_device(store: Store) -> None:
    values = {f"k{i}": numbers(4000, i) for i in range(12)}
    values |= {"inline": numbers(100), "empty": torch.empty(0), "large": numbers(3 * MiB), "streamed": numbers(6 * MiB)}
    out, state = torch.empty(4000, dtype=torch.uint8), {"mean": torch.ones(3), "none": torch.empty(0)}

    def assert_all_here() -> None:
        for found in ({name: store[name] for name in values}, store.get_many(values)):
            assert all(found[name].is_cpu and torch.equal(found[name], value) for name, value in values.items())

    with torch.device("meta"):
        store.put_many(values)
        for name, value in values.items():
            store[name] = value
        assert_all_here()
        written(store)
        assert_all_here()
        written(store)
        store.prefetch(values)
        assert torch.equal(store.get("k3", out=out), values["k3"])
        assert torch.equal(store.get("k4", device="cpu"), values["k4"])
        for name in ("k3", "inline", "empty", "large"):
            with store.lease(name) as view:
                assert torch.equal(view, values[name])
            with store.lease(name, mode="rw") as view:
                view.add_(0)
            with store.lease(name, mode="w") as view:
                view.copy_(values[name])
        with pytest.raises(UsageError, match="has ended"):
            view.sum()
        if store.durable:
            store.commit(state)
            assert all(store.state[name].is_cpu and torch.equal(store.state[name], state[name]) for name in state)
            store["k3"] = values["k4"]
            store.rollback()
        assert store.verify().is_clean
    assert_all_here()


def _calls(store: Store) -> list[Callable[[], object]]:
    """Return every way in which bytes of the keys "inline" and "k0" to "k11" move in or out of a store."""
    names, value, part = [f"k{i}" for i in range(12)], numbers(4000), numbers(10)

    def lease(mode: Any) -> None:
        with store.lease("k0", mode=mode):
            pass

    return [
        lambda: store["k0"],
        lambda: store["inline"],
        lambda: store.get("k0", out=value),
        lambda: store.get_many(names),
        lambda: store.__setitem__("k0", value),
        lambda: store.put_many({"k0": value}),
        *(lambda key=key: store.read_part(key, 0, 10) for key in ("k0", "inline")),  # type: ignore[misc]
        *(lambda key=key: store.write_part(key, 0, part) for key in ("k0", "inline")),  # type: ignore[misc]
        *(lambda mode=mode: lease(mode) for mode in ("r", "rw", "w")),  # type: ignore[misc]
    ]


def _in_fake_mode(call: Callable[[], object]) -> None:
    with FakeTensorMode():
        call()


@pytest.mark.parametrize(
    "run",
    [
        _in_fake_mode,
        lambda call: make_fx(lambda x: (call(), x.sum())[1])(torch.ones(3)),
        lambda call: torch.func.grad(lambda x: (call(), x.sum())[1])(torch.ones(3)),
        lambda call: torch.func.functionalize(lambda x: (call(), x.sum())[1])(torch.ones(3)),
    ],
    ids=["FakeTensorMode", "make_fx", "grad", "functionalize"],
)
def test_a_mode_in_which_new_tensors_have_no_memory_is_refused(
    store: Store, run: Callable[[Callable[[], object]], object]
) -> None:
    values = {"inline": numbers(100)} | {f"k{i}": numbers(4000, i) for i in range(12)}
    store.put_many(values)
    written(store)
    for call in _calls(store):
        with pytest.raises(UsageError, match=r"(get|get_many|read_part|put|lease) of '(k0|inline)' (under|inside) "):
            run(call)
    assert all(torch.equal(store[name], value) for name, value in values.items())
    if store.durable:
        store.commit()


def test_an_argument_of_vmap_cannot_be_put_but_keys_can_be_used(store: Store) -> None:
    store["a"] = torch.arange(5000.0)
    assert torch.equal(torch.vmap(lambda x: x * store["a"])(torch.ones(2, 5000))[1], torch.arange(5000.0))
    with pytest.raises(TypeError, match=r"inside torch\.func"):
        torch.vmap(lambda x: (store.__setitem__("a", x), x)[1])(torch.ones(2, 5000))
