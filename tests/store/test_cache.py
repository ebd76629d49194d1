"""Caches: a capacity that is never exceeded, the least recently used tensors that go, an order that outlives a kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import Counter, numbers, simulated_store
from tiered.errors import CapacityError, UsageError
from tiered.store.store import Store
from tiered.units import KiB, MiB


@pytest.mark.parametrize("seed", range(6))
def test_what_is_there_is_what_was_put_and_never_above_the_capacity(seed: int) -> None:
    rng = random.Random(seed)
    with simulated_store(SimulatedDisk(capacity_nbytes=4 * MiB, can_lose_power=False), budget_nbytes=MiB) as store:
        cache = store.cache("cache/", capacity=400 * KiB)
        put: dict[str, torch.Tensor] = {}
        store["other"] = numbers(60_000)
        for step in range(300):
            name = str(rng.randrange(60))
            draw = rng.random()
            if draw < 0.6:
                put[name] = numbers(rng.choice((10, 1000, 5000, 12_000, 30_000)), step)
                cache[name] = put[name]
                assert name in cache
            elif draw < 0.9 and name in cache:
                assert torch.equal(cache[name], put[name])
            elif draw < 0.92 and name in cache:
                del cache[name]
            elif draw < 0.94:
                store.commit()
            elif draw < 0.95 and store.generation:
                store.rollback()
                put = {each: cache[each] for each in cache}
            elif draw < 0.97 and name in cache:
                del store["cache/" + name]  # another way
            assert cache.nbytes <= 400 * KiB
        assert all(torch.equal(cache[each], put[each]) for each in cache) and len(cache) > 10
        assert "other" in store and store.verify().is_clean
        cache.clear()
        store.commit()
        assert cache.nbytes <= 4 * KiB  # the order


def test_the_least_recently_used_go() -> None:
    with simulated_store(SimulatedDisk(capacity_nbytes=4 * MiB), budget_nbytes=MiB) as store:
        cache = store.cache("c", capacity=32 * 8 * KiB)
        for number in range(28):
            cache[str(number)] = numbers(8 * KiB, number)
        for number in range(10):
            assert torch.equal(cache[str(number)], numbers(8 * KiB, number))
        for number in range(28, 36):
            cache[str(number)] = numbers(8 * KiB, number)
        assert {str(number) for number in range(10)} <= set(cache)
        assert "10" not in cache and "35" in cache


def test_hits_are_those_of_a_textbook_cache() -> None:
    weights = [1 / (rank + 1) ** 0.99 for rank in range(2000)]
    trace = random.Random(0).choices(range(2000), weights, k=6000)
    hits, textbook_hits, textbook = 0, 0, OrderedDict[int, None]()
    with simulated_store(SimulatedDisk(capacity_nbytes=8 * MiB, can_lose_power=False), budget_nbytes=4 * MiB) as store:
        cache = store.cache("c/", capacity=400 * 4 * KiB)
        for name in trace:
            if name in textbook:
                textbook_hits += 1
            textbook[name] = None
            textbook.move_to_end(name)
            if len(textbook) > 400:
                textbook.popitem(last=False)
            if str(name) in cache:
                hits += 1
                cache[str(name)]
            else:
                cache[str(name)] = numbers(4 * KiB, name)
        assert cache.nbytes <= cache.capacity
    assert abs(hits - textbook_hits) <= 0.01 * len(trace), (hits, textbook_hits)


SCRIPT = """
import sys, torch, tiered
with tiered.Store(sys.argv[1], dram="16MiB") as store:
    cache = store.cache("c/", capacity="1MiB")
    for number in range(100):
        cache[str(number)] = torch.full((8192,), number, dtype=torch.uint8)
        cache.get("3")
    store.commit()
    print("ready", flush=True)
    for number in range(100, 10000):
        cache[str(number)] = torch.full((8192,), number % 256, dtype=torch.uint8)
"""


def test_a_kill_leaves_the_capacity_and_the_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    threading.Event().wait(0.5)
    os.kill(process.pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()
    with Store(tmp_path / "run", dram="16MiB") as store:
        cache = store.cache("c/", capacity="1MiB")
        assert cache.nbytes <= MiB and len(cache) >= 40
        for name, value in cache.items():
            assert torch.equal(value, torch.full((8192,), int(name) % 256, dtype=torch.uint8))
        names = list(cache._order)
        for number in range(20):
            cache[f"new {number}"] = numbers(8192, number)
            assert cache.nbytes <= MiB
        left = [name for name in names if name in cache]
        assert left == names[len(names) - len(left) :]  # the first of the order have gone


def test_a_hundred_times_the_capacity_passes_through(tmp_path: Path) -> None:
    peak, end = 0, threading.Event()
    with Store(tmp_path / "run", dram="16MiB") as store:
        cache = store.cache("c/", capacity="2MiB")

        def watch() -> None:
            nonlocal peak
            while not end.wait(0.01):
                peak = max(peak, store.statistics().used_bytes)

        thread = threading.Thread(target=watch)
        thread.start()
        for number in range(5000):
            cache[str(number)] = numbers(40_000, number % 7)
            if number % 500 == 20:
                store.commit()
        end.set()
        thread.join()
        assert 1 * MiB < peak <= 2 * MiB and cache.nbytes <= 2 * MiB
        assert torch.equal(cache["4999"], numbers(40_000, 4999 % 7))


def test_what_a_cache_cannot_hold_is_refused() -> None:
    with simulated_store(budget_nbytes=MiB) as store:
        cache = store.cache("c/", capacity="100KiB")
        with pytest.raises(CapacityError, match=r"cache 'c/': 'x' takes 200\.0 KiB, the capacity is 100\.0 KiB"):
            cache["x"] = numbers(200 * KiB)
        for prefix in ("c/", "c", "c/deeper"):
            with pytest.raises(UsageError, match="its keys would be those of the cache 'c/', too"):
                store.cache(prefix, capacity=1)
        for options in ({"capacity": 0}, {"capacity": 5, "policy": "fifo"}):
            with pytest.raises(ValueError, match=r'capacity above 0|policy="lru"'):
                store.cache("d/", **options)  # type: ignore[arg-type]
        with pytest.raises(KeyError, match="where the order of use is kept"):
            cache["$order"]
        assert cache.get("nothing") is None and len(cache) == 0 and "$order" not in cache


def test_a_cache_does_not_commit_what_is_registered() -> None:
    with simulated_store(SimulatedDisk(capacity_nbytes=4 * MiB), budget_nbytes=MiB) as store:
        store.register("counter", Counter())
        cache = store.cache("c/", capacity="100KiB")
        for number in range(8):
            cache[str(number)] = numbers(10_000, number)
        store.commit()
        with pytest.raises(CapacityError, match=r"call store\.commit\(\), then put again"):
            for number in range(8, 30):
                cache[str(number)] = numbers(10_000, number)
        generation = store.generation
        store.commit()  # the remedy
        assert store.generation == generation + 1
        cache[str(number)] = numbers(10_000, number)
        assert torch.equal(cache[str(number)], numbers(10_000, number)) and cache.nbytes <= 100 * KiB


def test_keys_that_came_another_way_are_counted_at_the_next_put() -> None:
    with simulated_store(SimulatedDisk(capacity_nbytes=4 * MiB), budget_nbytes=MiB) as store:
        cache = store.cache("c/", capacity="200KiB")
        for number in range(5):
            cache[str(number)] = numbers(10_000, number)
        for number in range(60):
            store[f"c/other {number}"] = numbers(10_000, number)
        assert cache.nbytes > 200 * KiB  # they are no puts of the cache
        cache["5"] = numbers(10_000, 5)
        assert cache.nbytes <= 200 * KiB and torch.equal(cache["5"], numbers(10_000, 5))


def test_names_take_their_part_of_the_capacity_and_the_first_ones_make_way() -> None:
    with simulated_store(SimulatedDisk(capacity_nbytes=8 * MiB), budget_nbytes=MiB) as store:
        cache = store.cache("c/", capacity="300KiB")
        for number in range(240):
            cache[f"{number}" + "x" * 3000] = numbers(10, number)
            if number % 50 == 49:
                store.commit()
                assert cache.nbytes <= 300 * KiB
        assert 20 < len(cache) < 60


def test_an_order_that_a_rollback_took_back_is_put_again(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        cache = store.cache("c/", capacity="1MiB")
        for name in "abc":
            cache[name] = numbers(5000)
        store.commit()
        cache["a"]
        cache._put_order("commit")  # of a commit that is refused then
        store.rollback()
        store.commit()
    with Store(tmp_path / "run", dram="16MiB") as store:
        assert list(store.cache("c/", capacity="1MiB")._order) == ["b", "c", "a"]
