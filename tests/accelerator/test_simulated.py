"""The simulated accelerator reports each planted race, none where all waits are there, and computes as the CPU."""

from __future__ import annotations

import copy
import mmap
import subprocess
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from tests.rigs.warm_python import WarmPython

N = 1024
PAGE = mmap.PAGESIZE
ROOT = Path(__file__).parents[2]


def _event(stream: torch.Stream) -> torch.Event:
    event = torch.Event(device="sim")
    event.record(stream)
    return event


def _pinned(values: torch.Tensor) -> torch.Tensor:
    return values.pin_memory()


# ---------------------------------------------------------------------------------------------------------- races


def _round_trip(sim: ModuleType, missing: str) -> list[str]:
    """Copy in, compute, copy out, with one wait left out; return the races."""
    compute, copy_in, copy_out = torch.accelerator.current_stream(), torch.Stream("sim"), torch.Stream("sim")
    host, back = _pinned(torch.arange(float(N))), _pinned(torch.empty(N))
    device = torch.zeros(N, device="sim")
    if missing != "zeros before copy in":
        copy_in.wait_event(_event(compute))
    with copy_in:
        device.copy_(host, non_blocking=True)
        arrived = _event(copy_in)
    if missing == "host write after copy in":
        sim.host_touch(host, write=True)
    if missing != "copy in before compute":
        compute.wait_event(arrived)
    result = device * 2
    if missing != "compute before copy out":
        copy_out.wait_event(_event(compute))
    with copy_out:
        back.copy_(result, non_blocking=True)
        left = _event(copy_out)
    if missing != "copy out before host read":
        left.synchronize()
    sim.host_touch(back, write=False)
    if missing == "copy out before free":
        with copy_out:
            back.copy_(result, non_blocking=True)
        del result
    torch.accelerator.synchronize()
    assert back.equal(torch.arange(float(N)) * 2)
    return sim.races()  # type: ignore[no-any-return]


def test_a_round_trip_with_all_its_waits_has_no_race(sim: ModuleType) -> None:
    assert _round_trip(sim, "") == []


@pytest.mark.parametrize(
    ("missing", "sides"),
    [
        ("zeros before copy in", ("copy (host to device) on stream", "zero_ on stream 0 writes")),
        ("copy in before compute", ("mul", "copy (host to device) on stream")),
        ("compute before copy out", ("copy (device to host) on stream", "on stream 0 writes")),
        ("copy out before host read", ("host_touch on the host reads", "copy (device to host) on stream")),
        ("host write after copy in", ("host_touch on the host writes", "copy (host to device) on stream")),
        ("copy out before free", ("the host frees", "copy (device to host) on stream")),
    ],
)
def test_a_missing_wait_is_reported_with_both_sides(sim: ModuleType, missing: str, sides: tuple[str, str]) -> None:
    races = _round_trip(sim, missing)
    assert races
    assert all(side in races[0] for side in sides), races


def test_record_stream_makes_a_free_legal(sim: ModuleType) -> None:
    side, host = torch.Stream("sim"), _pinned(torch.ones(N))
    device = torch.empty(N, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        device.copy_(host, non_blocking=True)
    device.record_stream(side)
    del device
    assert sim.races() == []


def test_an_allocation_counts_as_a_write_if_wished(sim: ModuleType) -> None:
    host, side = _pinned(torch.ones(N)), torch.Stream("sim")
    for strict in (False, True):
        sim.set_allocation_writes(strict)
        device = torch.empty(N, device="sim")
        with side:
            device.copy_(host, non_blocking=True)
        assert len(sim.races()) == strict
        side.synchronize()


def test_interleaved_views_share_no_byte(sim: ModuleType) -> None:
    table, side = torch.zeros(64, 8, device="sim"), torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    table[:, ::2].fill_(1)
    with side:
        table[:, 1::2].fill_(2)
    assert sim.races() == []
    with side:
        table[:, 2:3].fill_(3)
    assert len(sim.races()) == 1
    torch.accelerator.synchronize()


def test_running_statistics_are_written_though_no_schema_says_so(sim: ModuleType) -> None:
    norm, side = nn.BatchNorm1d(4, device="sim"), torch.Stream("sim")
    x = torch.randn(8, 4, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    norm(x)
    with side:
        norm.running_mean.clone()
    torch.accelerator.synchronize()
    assert any("running" in race or "batch_norm" in race for race in sim.races())


def test_results_of_another_stream_need_a_wait(sim: ModuleType) -> None:
    side = torch.Stream("sim")
    with side:
        result = torch.linalg.svdvals(torch.eye(3, device="sim"))
    result + 1
    assert "svd" in sim.races()[0]
    torch.accelerator.synchronize()


def test_a_query_that_answers_true_orders_the_host(sim: ModuleType) -> None:
    sim.set_query_delay(2)
    host, side = _pinned(torch.ones(N)), torch.Stream("sim")
    with side:
        device = torch.empty(N, device="sim")
        device.copy_(host, non_blocking=True)
        event = _event(side)
    assert [event.query() for _ in range(3)] == [False, False, True]
    sim.host_touch(host, write=True)


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_thread_knows_what_it_has_waited_for_and_what_was_handed_over(is_handed_over: bool, sim: ModuleType) -> None:
    """By the device's streams that it submits to, and by its own accesses, which the guard sees."""
    host, side = _pinned(torch.zeros(2 * PAGE, dtype=torch.uint8)), torch.Stream("sim")
    with side:
        host.copy_(torch.ones(2 * PAGE, dtype=torch.uint8, device="sim"), non_blocking=True)
        event = _event(side)
    sim.races()

    def wait() -> None:
        sim.join()
        event.synchronize()
        if is_handed_over:
            sim.hand_over(id(event))

    worker = threading.Thread(target=wait)
    worker.start()
    worker.join()
    assert sim.races() == []
    sim.take_over(id(event))
    assert host[PAGE] == 1
    host.to("sim", non_blocking=True)
    races = sim.races()
    assert len(races) == (0 if is_handed_over else 2), races
    event.synchronize()


def test_the_guard_notes_an_early_write_of_numpy(sim: ModuleType) -> None:
    host, side = _pinned(torch.zeros(4 * PAGE, dtype=torch.uint8)), torch.Stream("sim")
    view = np.frombuffer(host.numpy(), dtype=np.uint8)  # type: ignore[call-overload]
    with side:
        device = torch.empty(2 * PAGE, dtype=torch.uint8, device="sim")
        device.copy_(host[: 2 * PAGE], non_blocking=True)
    host.numpy()[3 * PAGE] = 1  # not in flight
    assert view[5] == 0  # reading is no race
    assert sim.races() == []
    host.numpy()[5] = 7
    races = sim.races()
    assert len(races) == 1
    assert "writes 1 bytes" in races[0] and "copy (host to device)" in races[0]
    side.synchronize()
    host.numpy()[PAGE + 5] = 7


def test_the_guard_notes_an_early_read(sim: ModuleType) -> None:
    device, side = torch.ones(N, device="sim"), torch.Stream("sim")
    host = _pinned(torch.zeros(N))
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(device, non_blocking=True)
        event = _event(side)
    assert host[3] == 1
    assert "reads 1 bytes" in sim.races()[0]
    event.synchronize()
    assert host.sum() == N


# --------------------------------------------------------------------------------------------------------- memory


def test_memory_is_counted_and_limited(sim: ModuleType) -> None:
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    assert tensor.view(torch.float32).isnan().all().item()
    assert torch.accelerator.memory_allocated() - before == 1 << 20
    sim.set_memory_limit(before + (2 << 20))
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info() == (1 << 20, before + (2 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty((1 << 20) + 1, dtype=torch.uint8, device="sim")
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + (1 << 20)


def test_freed_memory_stays_reserved_until_it_is_needed(sim: ModuleType) -> None:
    reserved, (free, _) = torch.accelerator.memory_reserved(), torch.accelerator.get_memory_info()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    address = tensor.data_ptr()
    del tensor
    assert torch.accelerator.memory_reserved() - reserved == 1 << 20
    assert free - torch.accelerator.get_memory_info()[0] == 1 << 20
    with torch.Stream("sim"):  # whose work may come before the end of the first tensor's
        assert torch.empty(1 << 20, dtype=torch.uint8, device="sim").data_ptr() != address
    assert torch.empty(1 << 20, dtype=torch.uint8, device="sim").data_ptr() == address
    assert torch.accelerator.memory_reserved() - reserved == 2 << 20
    sim.set_memory_limit(torch.accelerator.memory_allocated() + (2 << 20))
    torch.empty(2 << 20, dtype=torch.uint8, device="sim")  # takes the room of the two
    assert torch.accelerator.memory_stats()["num_alloc_retries"] == 1
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()


def test_pinned_memory_is_known_by_range(sim: ModuleType) -> None:
    memory = torch.zeros(8 * PAGE, dtype=torch.uint8)
    address = memory.data_ptr()
    sim.host_register(address, 4 * PAGE)
    sim.host_register(address + 4 * PAGE, PAGE)
    # PyTorch asks for the first byte of the tensor's storage, so each of these needs a storage of its own.
    assert torch.from_numpy(memory.numpy()[4 * PAGE :]).is_pinned()
    assert not torch.from_numpy(memory.numpy()[5 * PAGE :]).is_pinned()
    with pytest.raises(RuntimeError, match="already registered"):
        sim.host_register(address + PAGE, 4 * PAGE)
    with pytest.raises(RuntimeError, match="no registered memory"):
        sim.host_unregister(address + PAGE)
    device = torch.empty(8 * PAGE, dtype=torch.uint8, device="sim")
    with pytest.raises(RuntimeError, match="invalid argument"):
        device[: 2 * PAGE].copy_(memory[3 * PAGE : 5 * PAGE], non_blocking=True)
    sim.host_unregister(address)
    sim.host_unregister(address + 4 * PAGE)
    assert not memory.is_pinned()


# ------------------------------------------------------------------------------------------------ counters and faults


def test_copies_and_blocking_calls_are_counted(sim: ModuleType) -> None:
    pinned, pageable = _pinned(torch.ones(N)), torch.ones(N)
    sim.keep_log()
    device = pinned.to("sim", non_blocking=True)
    assert sim.blocking() == {}
    pageable.to("sim", non_blocking=True)
    worker = threading.Thread(target=torch.accelerator.synchronize, name="worker")
    worker.start()
    worker.join()
    assert device.sum().item() == N
    assert device[device > 0].numel() == N
    assert sim.counts().host_to_device == (1, 4 * N)
    assert sim.counts().pageable_host_to_device == (1, 4 * N)
    assert sim.blocking() == {
        "MainThread": {"blocking copy": 1, "item": 1, "nonzero": 1},
        "worker": {"device synchronize": 1},
    }
    copies = [entry for entry in sim.log() if entry.kind == "copy"]
    assert [(entry.name, entry.nbytes) for entry in copies] == [
        ("copy (host to device)", 4 * N),
        ("copy (pageable host to device)", 4 * N),
    ]
    assert copies[0].address == pinned.data_ptr()


def test_planned_faults_come_at_their_call(sim: ModuleType) -> None:
    device, memory = torch.zeros(N, device="sim"), torch.zeros(2 * PAGE, dtype=torch.uint8)
    sim.fail_copy(2)
    device.copy_(torch.ones(N))
    with pytest.raises(RuntimeError, match="planned to fail"):
        device.cpu()
    device.cpu()
    sim.fail_registration(1)
    with pytest.raises(RuntimeError, match="planned to fail"):
        sim.host_register(memory.data_ptr(), PAGE)
    sim.fail_allocation(2)
    torch.empty(N, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(N, device="sim")
    torch.empty(N, device="sim")


def test_a_hung_event_never_completes(sim: ModuleType) -> None:
    sim.hang_events(True)
    event = _event(torch.accelerator.current_stream())
    assert not event.query()
    with pytest.raises(RuntimeError, match="never completes"):
        event.synchronize()
    sim.reset()
    event.synchronize()


def test_nothing_is_there_until_it_is_enabled(sim: ModuleType) -> None:
    sim.disable()
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) is None
    assert not torch.ones(1).is_pinned()
    sim.enable()
    assert torch.accelerator.current_accelerator(check_available=True) == torch.device("sim")


def test_a_backward_before_the_device_was_loaded_does_no_harm(sim: ModuleType, warm_python: WarmPython) -> None:
    program = (
        "import torch; torch.ones(2, requires_grad=True).sum().backward();"
        "from tests.accelerator import simulated; simulated.enable();"
        "x = torch.ones(2, device='sim', requires_grad=True); (x * 3).sum().backward(); print(x.grad.sum().item())"
    )
    done = subprocess.run([warm_python.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "6.0\n", done.stderr


# -------------------------------------------------------------------------------------------------------- two devices


def test_a_thread_has_a_device_and_a_stream_of_each(sim: ModuleType) -> None:
    assert torch.accelerator.device_count() == torch.sim.device_count() == 2  # type: ignore[attr-defined]
    here, there = (torch.accelerator.current_stream(f"sim:{index}") for index in range(2))
    assert (here.stream_id, there.device_index) == (0, 1) and there.stream_id != 0
    side = torch.Stream("sim:1")
    with torch.accelerator.device_index(1):
        torch.accelerator.set_stream(side)
        assert torch.ones(2, device="sim").device == torch.device("sim:1")
        found: list[object] = []
        thread = threading.Thread(
            target=lambda: found.extend([torch.accelerator.current_device_index(), torch.accelerator.current_stream(1)])
        )
        thread.start()
        thread.join()
        assert found == [0, there]
    assert torch.accelerator.current_device_index() == 0 == torch.ones(2, device="sim").device.index
    assert torch.accelerator.current_stream() == here and torch.accelerator.current_stream(1) == side
    torch.accelerator.set_stream(there)
    torch.sim.set_device("sim:0")  # type: ignore[attr-defined]
    with torch.sim.device(1):  # type: ignore[attr-defined]
        assert torch.sim.current_device() == 1  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no device 2"):
        torch.ones(2, device="sim:2")


def test_each_device_has_memory_of_its_own(sim: ModuleType) -> None:
    allocated = [torch.accelerator.memory_allocated(index) for index in range(2)]
    sim.set_memory_limit(allocated[1] + 512, device=1)
    tensor = torch.empty(512, dtype=torch.uint8, device="sim:1")
    assert [torch.accelerator.memory_allocated(index) for index in range(2)] == [allocated[0], allocated[1] + 512]
    with pytest.raises(torch.OutOfMemoryError, match="device 1"):
        torch.empty_like(tensor)
    torch.empty_like(tensor, device="sim:0")


def test_copies_between_devices_are_ordered_on_both(sim: ModuleType) -> None:
    source, side = torch.arange(float(N), device="sim:0"), torch.Stream("sim:1")
    target = torch.zeros(N, device="sim:1")
    target.copy_(source)
    source.zero_()
    assert (target + 0).cpu().equal(torch.arange(float(N)))
    with pytest.raises(RuntimeError, match="two devices, sim:0 and sim:1"):
        source + target
    assert sim.races() == []
    target.add_(1)
    torch.accelerator.synchronize(0)
    with side:
        target.zero_()
    assert sim.races() != []  # device 0 is idle, device 1 was not waited for
    torch.accelerator.synchronize(1)
    target.zero_()


def test_a_backward_runs_in_a_thread_of_its_device(sim: ModuleType) -> None:
    found: dict[int, set[int]] = {0: set(), 1: set()}
    for index, threads in found.items():
        x = torch.ones(2, device=f"sim:{index}", requires_grad=True)
        x.register_hook(
            lambda gradient, to=threads: to.update([threading.get_ident(), -torch.accelerator.current_device_index()])
        )
        (x * 3).sum().backward()
    assert -1 in found[1] and 0 in found[0] and not found[0] & found[1]


def test_calls_are_counted_by_thread_and_device(sim: ModuleType) -> None:
    def work() -> None:
        event = torch.Event("sim:1")
        event.record(torch.accelerator.current_stream("sim:1"))
        assert event.query()
        del event
        torch.ones(2, device="sim:1")  # torch goes back to the thread's device without a call of it

    sim.keep_log()
    for index in range(2):
        torch.accelerator.set_device_index(index)
        thread = threading.Thread(target=work, name=f"caller {index}")
        thread.start()
        thread.join()
    torch.accelerator.set_device_index(0)
    expected = {"record event": 1, "query event": 1, "destroy event": 1, "allocate": 1, "operator": 1, "set device": 4}
    assert sim.calls()["caller 0", 1] == expected
    assert sim.calls()["caller 0", 0] == {"set device": 2}  # once for each call that sets the device back


# ------------------------------------------------------------------------------------------------------ random numbers


def test_the_device_draws_from_its_own_generator(sim: ModuleType) -> None:
    torch.manual_seed(3)
    host, device = torch.rand(8), torch.rand(8, device="sim").cpu()
    assert host.equal(device)  # both seeded, each its own
    state = torch.sim.get_rng_state()  # type: ignore[attr-defined]
    first = torch.randn(8, device="sim").cpu()
    torch.rand(8)
    torch.sim.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.randn(8, device="sim").cpu().equal(first)
    with torch.random.fork_rng([0], device_type="sim"):
        torch.rand(8, device="sim")
    assert torch.randn(8, device="sim:1").cpu().equal(torch.randn(8, generator=torch.Generator().manual_seed(3)))
    generator = torch.Generator("sim").manual_seed(3)
    assert torch.rand(8, device="sim", generator=generator).cpu().equal(host)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(8, device="sim", generator=torch.Generator())
    cpu = torch.get_rng_state()
    nn.functional.dropout(torch.ones(N, device="sim"), 0.5)
    assert torch.get_rng_state().equal(cpu)


# ----------------------------------------------------------------------------------------------------- operators


def test_embedding_and_cross_entropy_have_the_bits_of_the_cpu(sim: ModuleType) -> None:
    model, x = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)), torch.randint(0, 11, (4, 6))
    ours = copy.deepcopy(model).to("sim")
    for each, tokens in ((model, x), (ours, x.to("sim"))):
        nn.functional.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert all(q.grad.cpu().equal(p.grad) for p, q in zip(model.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_adamw_has_the_bits_of_the_cpu(sim: ModuleType, options: dict[str, bool]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    ours = copy.deepcopy(model).to("sim")
    for each in (model, ours):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, **options)
        for step in range(3):
            for parameter in each.parameters():
                parameter.grad = torch.full_like(parameter, 0.5 + step)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
    for p, q in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())
