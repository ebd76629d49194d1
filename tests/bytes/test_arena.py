"""The arena keeps its budget whatever the sizes, and its memory outlives every tensor on it."""

import ctypes
import gc
import itertools
import queue
import random
import threading
from pathlib import Path

import pytest
import torch

from tests.bytes.fresh_arena import FreshArena
from tests.bytes.moving import exit_code_of_child
from tiered.bytes.arena import PAGE_NBYTES, AddressRanges, Arena, Buffer
from tiered.errors import ClosedError, UsageError
from tiered.units import KiB, MiB, round_up


def lease(arena: Arena, nbytes: int) -> Buffer:
    buffer = arena.allocate_nowait(nbytes)
    assert buffer is not None
    return buffer


def nothing(reference: object) -> None:
    pass


def test_a_buffer_is_aligned_writeable_and_whole_pages() -> None:
    arena = Arena(1 * MiB)
    buffer = lease(arena, 5000)
    assert buffer.nbytes == len(buffer.memory) == 8192
    assert buffer.address % PAGE_NBYTES == 0
    assert buffer.memory.format == "B" and not buffer.memory.readonly
    assert arena.leased_nbytes == arena.peak_nbytes == 8192
    arena.release(buffer)
    assert arena.leased_nbytes == 0 and arena.peak_nbytes == 8192
    arena.close()


@pytest.mark.parametrize("seed", range(3))
def test_an_allocation_succeeds_if_and_only_if_the_budget_allows_it(seed: int) -> None:
    rng = random.Random(seed)
    arena = Arena(8 * MiB)
    held: list[Buffer] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            arena.release(held.pop(rng.randrange(len(held))))
        nbytes = rng.choice([1, PAGE_NBYTES, 64 * KiB, rng.randrange(1, 4 * MiB)])
        fits = arena.leased_nbytes + round_up(nbytes, PAGE_NBYTES) <= arena.nbytes
        buffer = arena.allocate_nowait(nbytes)
        assert (buffer is not None) == fits
        if buffer is not None:
            held.append(buffer)
        assert arena.leased_nbytes == sum(b.nbytes for b in held)
        assert arena.leased_nbytes + arena._free.warm_nbytes <= arena.nbytes
    spans = sorted((b.address, b.address + b.nbytes) for b in held)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for buffer in held:
        arena.release(buffer)
    arena.close()


def test_a_leased_buffer_keeps_its_bytes_while_others_come_and_go() -> None:
    rng = random.Random(0)
    arena = Arena(4 * MiB)
    held: list[tuple[Buffer, int]] = []
    for step in range(500):
        buffer = arena.allocate_nowait(rng.randrange(1, 1 * MiB))
        if buffer is None:
            buffer, stamp = held.pop(rng.randrange(len(held)))
            assert bytes(buffer.memory) == bytes([stamp]) * buffer.nbytes
            arena.release(buffer)
        else:
            buffer.memory[:] = bytes([step % 256]) * buffer.nbytes
            held.append((buffer, step % 256))
    for buffer, stamp in held:
        assert bytes(buffer.memory) == bytes([stamp]) * buffer.nbytes
        arena.release(buffer)
    arena.close()


def test_memory_touched_stays_within_the_budget_after_fragmentation() -> None:
    arena = Arena(32 * MiB)
    small = [lease(arena, 1 * MiB) for _ in range(32)]
    base = min(buffer.address for buffer in small)
    for buffer in small:
        buffer.memory[:] = bytes(buffer.nbytes)
    for buffer in small[::2]:
        arena.release(buffer)
    large = lease(arena, 16 * MiB)  # fits no hole
    large.memory[:] = bytes(large.nbytes)
    assert arena.leased_nbytes == 32 * MiB
    assert resident_nbytes(base) <= 32 * MiB + 2 * 2 * MiB  # a huge page at each end
    for buffer in [large, *small[1::2]]:
        arena.release(buffer)
    arena.close()


def resident_nbytes(address: int) -> int:
    """Return the resident bytes of the mapping that holds ``address``, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "Rss:":
            return int(line.split()[1]) * KiB
    raise AssertionError("the address is not mapped")


def test_steady_use_gives_nothing_back_to_the_kernel() -> None:
    arena = Arena(4 * MiB)
    sizes = [1 * MiB, 512 * KiB, 2 * MiB, 12 * KiB]
    for _ in range(3):
        for buffer in [lease(arena, nbytes) for nbytes in sizes]:
            arena.release(buffer)
    discarded = arena.discarded_nbytes
    addresses = {b.address for _ in range(20) for b in lease_and_release(arena, sizes)}
    assert arena.discarded_nbytes == discarded
    assert len(addresses) == len(sizes)
    arena.close()


def lease_and_release(arena: Arena, sizes: list[int]) -> list[Buffer]:
    buffers = [lease(arena, nbytes) for nbytes in sizes]
    for buffer in buffers:
        arena.release(buffer)
    return buffers


def test_an_alias_reports_the_death_of_its_last_view() -> None:
    arena, dead = Arena(1 * MiB), queue.SimpleQueue[str]()
    buffer = lease(arena, 4096)
    tensor, watched = buffer.alias(1000, lambda _: dead.put("gone"))
    assert tensor.dtype == torch.uint8 and tensor.shape == (1000,) and tensor.data_ptr() == buffer.address
    view = tensor.view(torch.float32)[10:20].view(2, 5)
    view.fill_(1.0)
    del tensor
    gc.collect()
    assert dead.empty() and buffer.is_aliased and watched() is not None
    assert bytes(buffer.memory[40:44]) == b"\x00\x00\x80\x3f"
    del view
    assert dead.get_nowait() == "gone" and not buffer.is_aliased and watched() is None
    arena.release(buffer)
    arena.close()


def test_two_aliases_of_one_buffer_have_storages_of_their_own() -> None:
    arena, dead = Arena(1 * MiB), queue.SimpleQueue[int]()
    buffer = lease(arena, 4096)
    (first, _), (second, _) = buffer.alias(4096, lambda _: dead.put(1)), buffer.alias(4096, lambda _: dead.put(2))
    del first
    assert dead.get_nowait() == 1 and buffer.is_aliased
    del second
    assert dead.get_nowait() == 2
    arena.release(buffer)
    arena.close()


def test_an_empty_buffer_and_an_empty_alias_work() -> None:
    arena, dead = Arena(1 * MiB), queue.SimpleQueue[str]()
    buffer = lease(arena, 0)
    tensor, _ = buffer.alias(0, lambda _: dead.put("gone"))
    view = tensor.view(torch.bfloat16).view(0, 3)
    assert tensor.shape == (0,) and view.shape == (0, 3)
    del tensor
    assert dead.empty()
    del view
    assert dead.get_nowait() == "gone"
    arena.release(buffer)
    assert not arena._num_leased
    arena.close()


def test_a_buffer_under_a_living_tensor_is_not_taken_back() -> None:
    arena = Arena(1 * MiB)
    buffer = lease(arena, 4096)
    tensor, _ = buffer.alias(4096, nothing)
    assert not arena.release(buffer) and arena.leased_nbytes == 4096
    tensor.fill_(3)
    assert bytes(buffer.memory) == b"\x03" * 4096
    del tensor
    assert arena.release(buffer) and not arena.leased_nbytes
    arena.close()


def test_memory_of_a_released_buffer_cannot_be_used() -> None:
    arena = Arena(1 * MiB)
    buffer = lease(arena, 4096)
    memory = buffer.memory
    arena.release(buffer)
    with pytest.raises(ValueError, match="released"):
        memory[0] = 1
    with pytest.raises(ValueError, match="released"):
        _ = memory[:10]
    arena.close()


def test_close_leaves_the_mapping_to_the_last_release() -> None:
    arena = Arena(1 * MiB)
    buffer = lease(arena, 4096)
    arena.close()
    arena.close()
    with pytest.raises(ClosedError):
        arena.allocate_nowait(1)
    buffer.memory[:] = b"a" * 4096
    address = buffer.address
    assert resident_nbytes(address)
    arena.release(buffer)
    with pytest.raises(AssertionError, match="not mapped"):
        resident_nbytes(address)


def test_a_released_buffer_of_a_fresh_arena_is_poisoned_and_its_address_never_comes_again() -> None:
    arena = FreshArena(2 * MiB)
    seen: set[int] = set()
    for _ in range(50):
        buffer = lease(arena, 1 * MiB)
        buffer.memory[:] = bytes(buffer.nbytes)
        assert buffer.address not in seen
        seen.add(buffer.address)
        stale, _ = buffer.alias(4, nothing)
        address = stale.data_ptr()
        del stale
        arena.release(buffer)
        assert ctypes.string_at(address, 4) == b"\xff" * 4
    first, second = lease(arena, 1 * MiB), lease(arena, 1 * MiB)
    assert arena.allocate_nowait(1) is None  # poisoned bytes do not count, leased ones do
    arena.release(first)
    arena.release(second)
    arena.close()


def test_only_the_newest_poison_of_a_fresh_arena_occupies_memory() -> None:
    arena = FreshArena(64 * MiB)
    base = 0
    for _ in range(6):
        buffer = lease(arena, 64 * MiB)
        base = base or buffer.address
        arena.release(buffer)
    assert resident_nbytes(base) <= 256 * MiB
    arena.close()


def test_threads_share_an_arena() -> None:
    arena = Arena(2 * MiB)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                buffer = arena.allocate_nowait(rng.randrange(1, 512 * KiB))
                if buffer is not None:
                    buffer.memory[:8] = seed.to_bytes(8, "little")
                    assert int.from_bytes(buffer.memory[:8], "little") == seed
                    arena.release(buffer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and arena.leased_nbytes == 0
    arena.close()


def test_a_forked_child_is_refused_and_touches_nothing() -> None:
    arena = Arena(1 * MiB)
    buffer = lease(arena, 4096)

    def check() -> None:
        for use in (lambda: arena.allocate_nowait(1), lambda: arena.release(buffer)):
            with pytest.raises(UsageError, match="fork"):
                use()
        arena.close()
        with pytest.raises(AssertionError, match="not mapped"):  # a copy on write could move pages under running I/O
            resident_nbytes(buffer.address)

    assert exit_code_of_child(check) == 0
    buffer.memory[:] = b"p" * 4096
    arena.release(buffer)
    arena.close()


def test_free_addresses_behave_like_a_set_of_pages() -> None:
    rng = random.Random(1)
    ranges, model = AddressRanges(), dict[int, bool]()  # model: free page -> is it warm
    ranges.insert(0, 64, is_warm=False)
    model.update(dict.fromkeys(range(64), False))
    for _ in range(2000):
        nbytes = rng.randrange(1, 12)
        start = ranges.find_warm(nbytes) if rng.random() < 0.5 else ranges.find_any(nbytes)
        if start is not None:
            assert all(page in model for page in range(start, start + nbytes))
            ranges.take(start, start + nbytes)
            for page in range(start, start + nbytes):
                del model[page]
        elif not any(all(p in model for p in range(first, first + nbytes)) for first in range(64)):
            assert ranges.find_any(nbytes) is None
        taken = [page for page in range(64) if page not in model]
        if taken and rng.random() < 0.8:
            first = last = rng.choice(taken)
            while last + 1 in taken and last - first < 6:
                last += 1
            is_warm = rng.random() < 0.5
            ranges.insert(first, last + 1, is_warm=is_warm)
            model.update(dict.fromkeys(range(first, last + 1), is_warm))
        assert ranges.warm_nbytes == sum(model.values())
        assert ranges.warm_nbytes == sum(end - start for start, end in ranges.largest_warm())


def test_a_budget_is_checked() -> None:
    with pytest.raises(ValueError, match="got -1"):
        Arena(-1)
    arena = Arena(0)
    assert arena.allocate_nowait(1) is None
    arena.close()
