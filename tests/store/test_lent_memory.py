"""Memory of the caller's is never lent to a device: a call that raises leaves it alone, whatever is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, await_true, numbers, simulated_store, stored, written
from tiered.bytes.device.base import Operation
from tiered.bytes.host_tensor import empty_aligned
from tiered.errors import DeadlineError, DeviceError
from tiered.store.store import Store
from tiered.units import KiB, MiB

LARGE, ORDINARY, SMALL = 9 * MiB, 1 * MiB, 8 * KiB  # streamed, resident and in batches, of a budget of 16 MiB


def aligned(nbytes: int, seed: int) -> torch.Tensor:
    """Return a tensor that a device could read into, or write from, as it is."""
    return empty_aligned(nbytes, 4096)[0].copy_(numbers(nbytes, seed))


def test_no_operation_moves_the_callers_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[memoryview] = []  # kept, so that no later tensor has the same addresses
    init = Operation.__init__

    def noted(operation: Operation, *, memory: memoryview, **options: Any) -> None:
        lent.append(memory)
        init(operation, memory=memory, **options)

    monkeypatch.setattr(Operation, "__init__", noted)
    save_file({"base": numbers(LARGE)}, tmp_path / "base.safetensors")
    values = {f"{nbytes}": aligned(nbytes, nbytes) for nbytes in (LARGE, ORDINARY)}
    many = {f"many {i}": aligned(SMALL, i) for i in range(400)} | {"many": aligned(LARGE, 1)}
    callers = [*values.values(), *many.values()]
    with Store(tmp_path / "store", dram="16MiB", external=[tmp_path / "base.safetensors"]) as store:
        store.adopt("base", tmp_path / "base.safetensors", "base")
        for key, value in values.items():
            store[key] = value
            asyncio.run(store.aput(f"a{key}", value))
            store.write_part(key, 4096, value[4096:8192])
        store.put_many(many)
        store.commit()
        written(store)
        for key in ("base", *values):
            callers.append(store.get(key, out=aligned(store.records()[0].nbytes if key == "base" else int(key), 0)))
            callers += [store[key], asyncio.run(store.aget(key)), store.read_part(key, 0, MiB)]
        written(store)
        callers += store.get_many(many).values()
        assert store.verify().is_clean
    places = sorted((torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), len(memory)) for memory in lent)
    assert len(places) > 40
    for tensor in callers:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert not [place for place, nbytes in places if place < end and begin < place + nbytes]


@pytest.fixture
def gated() -> Iterator[tuple[Store, GatedDevice]]:
    gates: list[GatedDevice] = []

    def wrap(device: Any) -> GatedDevice:
        gates.append(GatedDevice(device))
        return gates[-1]

    disk = SimulatedDisk(capacity_nbytes=256 * MiB, can_lose_power=False)
    store = simulated_store(disk, budget_nbytes=72 * MiB, wrap=wrap)
    yield store, gates[0]
    gates[0].open()
    store.close(commit=False)


def of_many(store: Store, key: str, out: torch.Tensor) -> None:
    out.copy_(store.get_many([key])[key])


READS: dict[str, Callable[[Store, str, torch.Tensor], object]] = {
    "get": lambda store, key, out: store.get(key, out=out),
    "get_many": of_many,
    "read_part": lambda store, key, out: out.copy_(store.read_part(key, 0, out.numel())),
}


@pytest.mark.parametrize("ends_by", [DeviceError, DeadlineError])
@pytest.mark.parametrize("nbytes", [6 * MiB, 20 * MiB], ids=["resident", "streamed"])
@pytest.mark.parametrize("how", READS)
def test_a_read_that_raises_writes_no_more(
    gated: tuple[Store, GatedDevice], ends_by: type[Exception], nbytes: int, how: str
) -> None:
    store, gate = gated
    store["a"] = value = numbers(nbytes)
    store.commit()
    stored(store.working_set, "a")
    out = aligned(nbytes, 1)
    gate.hold = lambda operation: not operation.is_write
    store.working_set.deadline_s = 0.5
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(READS[how], store, "a", out)
        await_true(lambda: len(gate.held) > 1)
        if ends_by is DeviceError:
            failed = gate.held.pop(0)
            failed.error = ends_by("of the first block")
            failed.on_done(failed)
        with pytest.raises((ends_by, DeadlineError)):
            found.result(WAIT_S)
    assert gate.held
    out.zero_()  # the caller's again
    store.working_set.deadline_s = WAIT_S
    gate.open()
    await_true(lambda: store.working_set.statistics().arena_bytes == store.working_set.statistics().resident_bytes)
    assert not out.any()
    READS[how](store, "a", out)
    assert torch.equal(out, value)


def test_a_put_that_raises_writes_the_bytes_of_its_call(gated: tuple[Store, GatedDevice]) -> None:
    """The caller's next numbers are not under way with the old ones' digests, nor do they reach the old tensor."""
    store, gate = gated
    store["a"] = before = numbers(20 * MiB)
    store.commit()
    value = aligned(20 * MiB, 1)
    content = value.numpy().tobytes()
    gate.hold = lambda operation: operation.is_write
    store.working_set.deadline_s = 0.05
    with pytest.raises(DeadlineError):
        store["a"] = value
    value.zero_()
    assert gate.held and all(operation.memory.tobytes() in content for operation in gate.held)
    store.working_set.deadline_s = WAIT_S
    gate.open()
    assert torch.equal(store["a"], before)
