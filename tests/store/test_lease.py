"""Leases of the public face: the arena's own bytes for a block, read-only where they were asked for to be read."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable

import pytest
import torch

from tests.store.rig import stored
from tiered.errors import LeaseError, UsageError
from tiered.store.store import Store
from tiered.units import KiB


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


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


def test_an_end_whose_report_another_thread_has_in_hand_is_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for ends takes a report and puts it back: from Python 3.13 on, others run between."""
    store["a"] = torch.arange(5)
    ended = store.working_set.ended_leases
    with monkeypatch.context() as patch:
        patch.setattr(ended, "take", lambda: iter(()))
        with store.lease("a", "rw") as view:
            view[0] = 7
        lease = store.working_set.lease("a", "r")
        assert lease.release()
        assert store.working_set.lease("a", "r").release()
        del store["a"]
    assert not ended.queue.empty()
    store["a"] = torch.arange(3)  # the reports come late, and end nothing twice
    assert ended.queue.empty()
    assert torch.equal(store["a"], torch.arange(3))


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


def relu_(x: torch.Tensor) -> torch.Tensor:
    return torch.relu_(x)


def step(view: torch.Tensor, **options: object) -> None:
    weight = torch.nn.Parameter(torch.empty(0))
    weight.data = view
    weight.grad = torch.ones(view.shape)
    torch.optim.AdamW([weight], **options).step()  # type: ignore[arg-type]


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda view: view.add_(1),
    "setitem": lambda view: view.__setitem__(0, 1),
    "out=": lambda view: torch.add(torch.ones(2000), 1, out=view),
    "out= tuple": lambda view: torch.max(torch.ones(4, 2000), 0, out=(view, torch.empty(2000, dtype=torch.int64))),
    "copy_": lambda view: view.copy_(torch.ones(2000)),
    "data": lambda view: view.data.zero_(),
    "unbind": lambda view: view.unbind()[1].zero_(),
    "as_strided": lambda view: view.as_strided((3,), (1,)).zero_(),
    "nn.init": lambda view: torch.nn.init.normal_(view),
    "foreach": lambda view: torch._foreach_add_([torch.ones(1), view], 1),
    "index_put_": lambda view: view.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "relu": lambda view: torch.nn.functional.relu(view, inplace=True),
    "dropout": lambda view: torch.nn.functional.dropout(view, 0.5, True, True),
    "embedding": lambda view: torch.nn.functional.embedding(torch.tensor([0]), view.view(-1, 10), max_norm=0.1),
    "running mean": lambda view: torch.nn.functional.batch_norm(
        torch.ones(2, 2000), view, torch.ones(2000), training=True
    ),
    "running variance": lambda view: torch.batch_norm(
        torch.ones(2, 2000), None, None, torch.ones(2000), view, True, 0.1, 1e-5, False
    ),
    "instance norm": lambda view: torch.nn.functional.instance_norm(torch.ones(2, 2000, 3), view, torch.ones(2000)),
    "overload with out": lambda view: torch.ops.aten.add.out(torch.ones(2000), torch.ones(2000), out=view),
    "storage": lambda view: view.untyped_storage().fill_(1),
    "storage setitem": lambda view: view[1:].untyped_storage().__setitem__(0, 1),
    "module_load": lambda view: view.module_load(torch.ones(2000)),
    "dlpack": lambda view: torch.from_dlpack(view),
    "script": lambda view: torch.jit.script(relu_)(view),
    "script of a view": lambda view: torch.jit.script(relu_)(view[500:]),
    "trace": lambda view: torch.jit.trace(relu_, (torch.ones(2000),))(view),  # type: ignore[no-untyped-call]
    "vmap": lambda view: torch.vmap(lambda x: x.abs_())(view),
    "func.grad": lambda view: torch.func.grad(lambda x: x.detach().abs_().sum())(view),
    "torch.Tensor": lambda view: torch.Tensor(view).abs_(),
    "data of torch.Tensor": lambda view: torch.Tensor(view).data.abs_(),
    "new": lambda view: torch.empty(0).new(view).data.abs_(),
    "set data": lambda view: step(view),
    "set data, foreach": lambda view: step(view, foreach=True),
    "set data, fused": lambda view: step(view, fused=True),
    "set_": lambda view: torch.empty(0).set_(view).abs_(),
    "set_ a storage": lambda view: torch.empty(0).set_(view.untyped_storage()).abs_(),  # type: ignore[call-overload]
    "numpy": lambda view: view.numpy(),
    "save": lambda view: torch.save(view, io.BytesIO()),
    "an argument that no name tells of": lambda view: torch.fused_moving_avg_obs_fake_quant(
        torch.ones(4), torch.ones(1), torch.ones(1), view[1:2], view[2:3], torch.ones(1),
        torch.zeros(1, dtype=torch.int32), 0.01, 0, 255, -1,
    ),
    "one of several steps": lambda view: torch.nn.functional.leaky_relu(view, 0.1, inplace=True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", WRITES)
def test_a_view_for_reading_refuses_to_be_written(two_tiers: Store, how: str) -> None:
    value = -torch.arange(2000.0)
    two_tiers["a"] = value
    for _ in range(2):  # in DRAM only, and on the device
        with pytest.raises(UsageError, match="through a lease for reading"), two_tiers.lease("a") as view:
            WRITES[how](view)
        gc.collect()
        with two_tiers.lease("a") as view:
            assert torch.equal(view, value)
        stored(two_tiers.working_set, "a")


def test_a_module_computes_with_the_weights_of_leases_for_reading(two_tiers: Store) -> None:
    layer = torch.nn.Linear(50, 40)
    two_tiers["w"] = layer.weight
    x, other = torch.randn(3, 50, requires_grad=True), torch.nn.Linear(50, 40)
    expected = layer(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    with two_tiers.lease("w") as view:
        other.weight.data, other.bias.data = view, layer.bias.data
        found = other(x)
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found.sum(), x)[0], gradient)
        assert type(view) is torch.Tensor and repr(view) == repr(layer.weight.detach())
        assert type(copy.deepcopy(view)) is torch.Tensor and view.tolist() == layer.weight.tolist()
        two_tiers["copy"] = other.weight
        two_tiers.write_part("copy", 0, other.weight[1, :5])
        with pytest.raises(UsageError, match=r"get\('w'\): out is a view of a lease for reading"):
            two_tiers.get("w", out=other.weight.detach())
        other.weight.data = torch.empty(0)
        del found
    assert torch.equal(two_tiers["copy"].view(-1), torch.cat([layer.weight[1, :5], layer.weight.view(-1)[5:]]))


def test_keys_are_copied_from_a_view_for_reading(store: Store) -> None:
    value = torch.arange(2000.0)
    store["a"] = value
    with store.lease("a") as view:
        store["b"] = view
        store["c"] = view[100:200]
        store["inline"] = view[3]
        store.put_many({f"k{i}": view.view(2, 1000)[i % 2] for i in range(20)})
        store["a"] = view
    with pytest.raises(UsageError, match="put of 'd': the lease of the given view has ended"):
        store["d"] = view
    expected = {"a": value, "b": value, "c": value[100:200], "inline": value[3], "k7": value[1000:]}
    assert all(type(store[name]) is torch.Tensor and torch.equal(store[name], expected[name]) for name in expected)


def test_a_block_says_what_has_become_of_it(store: Store) -> None:
    store["a"] = torch.ones(3)
    block = store.lease("a", mode="rw")
    assert repr(block) == "LeaseBlock('a', 'rw', not entered)"
    with block:
        assert repr(block) == "LeaseBlock('a', 'rw', open)"
    assert repr(block) == "LeaseBlock('a', 'rw', ended)"
