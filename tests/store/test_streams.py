"""Keys in order, with the next ones on their way; and keys that are dropped from DRAM because nobody needs them now."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedStore, numbers, simulated_store
from tiered.errors import LeaseError, UsageError
from tiered.store.residency.entry import EntryState
from tiered.store.store import Store
from tiered.units import KiB, MiB


def test_a_stream_gives_all_keys_in_order_through_a_small_budget(tmp_path: Path) -> None:
    values = {f"{n}": numbers(MiB, n) for n in range(40)}
    with Store(tmp_path, dram="8MiB") as store:
        store.put_many(values)
        store.commit()
        store.evict(values)
        found = [(key, view.clone()) for key, view in store.stream(values)]
        assert [key for key, _ in found] == list(values)
        assert all(torch.equal(value, values[key]) for key, value in found)
        swaps = store.statistics().working_set.swaps
        assert swaps.num_prefetches >= 30, swaps  # most of them came ahead of need
        for ahead in (0, 3):
            keys = [key for key, _ in store.stream(reversed(values), ahead=ahead)]
            assert keys == list(reversed(values))


def test_a_view_of_a_stream_ends_with_its_turn() -> None:
    with simulated_store() as store:
        store["a"], store["b"] = numbers(5000, 1), numbers(5000, 2)
        stream = store.stream(["a", "b", "missing"])
        _, view = next(stream)
        with pytest.raises(LeaseError):
            store.lease("a", "rw").__enter__()
        next(stream)
        with pytest.raises(UsageError, match="whose lease of 'a' has ended"):
            view.sum()
        with store.lease("a", "rw"):
            pass
        with pytest.raises(KeyError):
            next(stream)
        for _ in store.stream(["a", "b"]):
            break
        with store.lease("a", "rw"):  # the loop was left
            pass
        with pytest.raises(ValueError, match="expected ahead >= 0, got -1"):
            store.stream([], ahead=-1)
        with pytest.raises(TypeError, match="expected an iterable of keys"):
            store.stream("ab")


def test_evicted_keys_are_written_and_take_no_memory() -> None:
    with simulated_store(SimulatedDisk(capacity_nbytes=4 * MiB), budget_nbytes=MiB) as store:
        values = {
            "inline": numbers(100),
            "clean": numbers(40_000, 1),
            "dirty": numbers(50_000, 2),
            "leased": numbers(9000),
        }
        for name in ("inline", "clean"):
            store[name] = values[name]
        store.commit()
        store["dirty"], store["leased"] = values["dirty"], values["leased"]
        with store.lease("inline"), store.lease("leased", "rw"):
            assert store.evict([*values, "unknown", "clean"]) == (40 + 52) * KiB
            states = {name: store.working_set.entries[name].state for name in values}
            assert (states["clean"], states["dirty"]) == (EntryState.STORED, EntryState.STORED)
        assert store.evict(values) == (4 + 12) * KiB
        assert store.statistics().working_set.resident_bytes == store.evict(values) == 0
        assert all(torch.equal(store[name], value) for name, value in values.items())
        store.rollback()  # what was written ahead is no part of a commit
        assert sorted(store) == ["clean", "inline"]


def test_an_eviction_waits_for_the_write_that_is_on_its_way() -> None:
    gated = GatedStore()
    store = gated.store
    store["a"] = numbers(12 * KiB)
    gated.device.hold = lambda operation: operation.is_write
    freed: list[int] = []
    thread = threading.Thread(target=lambda: freed.append(store.evict(["a"])))
    thread.start()
    assert gated.device.has_held.wait(WAIT_S)
    assert not freed
    gated.device.open()
    thread.join(WAIT_S)
    assert freed == [12 * KiB] and torch.equal(store["a"], numbers(12 * KiB))
    gated.close()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("numel", [0, 1, 200, 5000])
def test_a_key_that_was_written_under_a_lease_is_evicted(durable: bool, numel: int) -> None:
    with simulated_store(budget_nbytes=MiB, durable=durable, deadline_s=5.0) as store:
        store["k"] = torch.zeros(numel)
        with store.lease("k", "rw") as view:
            view += 1
        store.evict(["k"])
        assert not store.statistics().working_set.resident_bytes
        assert torch.equal(store["k"], torch.ones(numel))


def test_a_key_that_two_threads_evict_is_evicted() -> None:
    with simulated_store(budget_nbytes=MiB, deadline_s=10.0) as store:
        for number in range(30):
            store["a"] = numbers(12 * KiB, number)
            threads = [threading.Thread(target=store.evict, args=(["a"],)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert not store.statistics().working_set.resident_bytes
            assert torch.equal(store["a"], numbers(12 * KiB, number))
