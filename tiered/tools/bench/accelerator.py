"""`tiered bench --device`: copies between DRAM and a compute device, and swapping over all three tiers.

A store's copies go the way that they go in a step: units are gathered through ``AcceleratorTier``, and bytes leave
through its ``Copies``, with a lease for each. The link comes before the drives, so that a device that does not work is
known at once; all three tiers come after them, for their bound needs the rates of the drives.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch

import tiered
from tiered.errors import CapacityError, UsageError
from tiered.store.lifetime.opening import MIN_DRAM_NBYTES
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.device_memory import DeviceBuffer, on_stream
from tiered.tiers.schedule import Rooms, SharedSchedule
from tiered.tools.bench.report import TITLE, Bandwidth, BenchRow, ComputeDeviceReport, duplex_of
from tiered.tools.bench.settings import NUM_TIER_WARM_UPS
from tiered.tools.bench.suite import Session, new_source, put_tensors
from tiered.zero.compute_device import named_device

__all__ = [
    "COPY_OPS", "accelerator_of", "bound_gb_per_s", "link_of", "measure_link", "measure_swap", "measure_three_tiers",
]  # fmt: skip

COPY_OPS = ("copy in", "copy out", "in + out")
"""To the device, from it, and both at once."""

_NUM_BUFFERS = 4  # on the device, each way


def accelerator_of(word: str) -> torch.device:
    """Return the accelerator that ``--device word`` means, with its index. UsageError where there is none."""
    try:
        device = named_device(word)
    except UsageError as error:
        raise UsageError(f"--device: {error}") from error
    if device.type == "cpu":
        there = "this process has none" if word == "auto" else "the CPU computes in DRAM, and nothing is copied"
        raise UsageError(f"--device {word} measures copies to an accelerator, such as 'cuda': {there}")
    return device


def measure_link(session: Session, device: torch.device, directory: str) -> None:
    """Copy blocks each way and both ways at once, beside torch's copies in turn; blocks.

    The store is in a folder of ``directory``, and writes nothing. Raises TieredError and the errors of the session's
    check.
    """
    settings = session.settings
    with _current(device), session.folders(directory) as folders:
        num_blocks = max(1, settings.copy_memory_nbytes // settings.copy_nbytes)
        dram = max(MIN_DRAM_NBYTES, (2 * num_blocks + 1) * settings.copy_nbytes)
        keys = [[f"{way}/{number}" for number in range(num_blocks)] for way in ("in", "out")]
        with tiered.Store(*folders, dram=dram, durable=False, engine=session.engine) as store:
            for key in (key for names in keys for key in names):  # they stay in DRAM: nothing is swapped
                store.working_set.create(key, settings.copy_nbytes, scratch=True)
                store.working_set.hold([key])
                lease = store.working_set.lease(key, "w")
                lease.tensor.fill_(1)  # touched: a page that is not page-locked would be the kernel's one page of zeros
                lease.release()
            with closing(_DevicePath(store, device, settings.copy_nbytes, *keys)) as path:
                why_pageable = store.working_set.arena.why_pageable
                rows = _measure_copies(session, device, path, _TorchPath(device, settings.copy_nbytes, num_blocks))
    ratio = statistics.median(row.ratio for row in rows if row.ratio is not None)
    found = ComputeDeviceReport(str(device), device.type, why_pageable, link_of(*rows), ratio)
    session.report.compute_device = found
    locked = "page-locked DRAM" if why_pageable is None else f"pageable DRAM: {why_pageable}"
    session.line(f"\n{device} through {locked}, beside torch's copies of its own tensors", TITLE)
    session.add(*rows)
    session.line(f"copies: {found.link}")


def measure_swap(session: Session, device: torch.device) -> None:
    """Measure swapping over three tiers, by a store over all directories, once these were measured; blocks."""
    report = session.report
    assert report.compute_device is not None
    with _current(device), session.folders() as folders:
        measure_three_tiers(session, folders, device, report.compute_device, report.drives)


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Have the device be the current one, which torch page-locks its tensors for."""
    try:
        with torch.accelerator.device_index(device.index):
            yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"{device} has too little free memory for the bench: {error}") from error


class _DevicePath:
    """The way of keys of ``store``, all of one size, to ``device`` and back. One thread at a time.

    Copies are submitted, not waited for. Units are gathered into buffers that are given back at once. Bytes leave from
    other buffers, as gradients do, so that no copy waits for one of the other direction. Keys are numbered from 0 on,
    round and round.
    """

    def __init__(
        self, store: tiered.Store, device: torch.device, nbytes: int, in_keys: Sequence[str], out_keys: Sequence[str]
    ) -> None:
        """Take the memory of the device. Raises CapacityError, torch.OutOfMemoryError."""
        self.tier = AcceleratorTier(store.working_set, device, 2 * _NUM_BUFFERS * nbytes)
        self.streams = (self.tier.copies.stream_in, self.tier.copies.stream_out)
        self._in_keys = in_keys
        self._out_keys = out_keys
        self._out: list[DeviceBuffer] = []
        for _ in range(_NUM_BUFFERS):
            buffer = self.tier.memory.take(nbytes)
            if buffer is None:
                raise self.tier.memory.explain(nbytes)
            self._out.append(buffer)

    def copy_in(self, number: int) -> None:
        """Bring a key to the device, as new bytes whatever is there; blocks on a swap in."""
        self.tier.memory.forget()
        self.tier.gather([self._in_keys[number % len(self._in_keys)]], "r").release(())

    def copy_out(self, number: int) -> None:
        """Make the bytes of a buffer those of a key, which are swapped out then; blocks where DRAM is short."""
        lease = self.tier.lease(self._out_keys[number % len(self._out_keys)], "w")
        self.tier.copies.empty(self._out[number % _NUM_BUFFERS], lease)

    def settle(self) -> None:
        """Have the leases of all copies given back."""
        self.tier.copies.settle_all()

    def fill(self) -> None:
        """Give the buffers that are copied out the bytes of keys, in turn."""
        for number, buffer in enumerate(self._out):
            lease = self.tier.lease(self._in_keys[number % len(self._in_keys)], "r")
            self.tier.copies.fill(buffer, lease)
            self.tier.copies.let_go(buffer, lease)
        self.settle()

    def close(self) -> None:
        """Wait for the copies in flight, and give the memory of the device back. Idempotent."""
        while self._out:
            self.tier.memory.give(self._out.pop())
        self.tier.forget()


class _TorchPath:
    """Plain torch: page-locked tensors of its own allocator, copied on two streams, without a lease or a wait."""

    def __init__(self, device: torch.device, nbytes: int, num_blocks: int) -> None:
        self.streams = (torch.Stream(device=device), torch.Stream(device=device))
        self._hosts = torch.empty((2, num_blocks, nbytes), dtype=torch.uint8, device="cpu", pin_memory=True)
        self._devices = torch.empty((2, _NUM_BUFFERS, nbytes), dtype=torch.uint8, device=device)  # in, out
        torch.accelerator.synchronize(device)  # order: the memory was allocated on the caller's stream

    def copy_in(self, number: int) -> None:
        with on_stream(self.streams[0]):
            source = self._hosts[0, number % self._hosts.shape[1]]
            self._devices[0, number % _NUM_BUFFERS].copy_(source, non_blocking=True)

    def copy_out(self, number: int) -> None:
        with on_stream(self.streams[1]):
            target = self._hosts[1, number % self._hosts.shape[1]]
            target.copy_(self._devices[1, number % _NUM_BUFFERS], non_blocking=True)

    def settle(self) -> None:
        """A round has ended, and nothing else is kept."""


def link_of(copied_in: BenchRow, copied_out: BenchRow, both: BenchRow) -> Bandwidth:
    """Return the rates of copies each way alone, and how far both, of as many bytes each way, run beside each other."""
    read, write, half = copied_in.gb_per_s, copied_out.gb_per_s, both.gb_per_s / 2
    return Bandwidth(1e9 * read, 1e9 * write, duplex_of(half, half, read, write))


def _measure_copies(session: Session, device: torch.device, ours: _DevicePath, torchs: _TorchPath) -> list[BenchRow]:
    """Return a row for each of COPY_OPS, of rounds after a warm-up."""
    settings, paths = session.settings, (ours, torchs)
    num_copies = max(1, settings.copies_nbytes // settings.copy_nbytes)
    found: dict[str, tuple[list[float], list[float]]] = {op: ([], []) for op in COPY_OPS}
    for turn in range(-1, settings.rounds):
        for op in COPY_OPS:
            for number in (turn % 2, 1 - turn % 2):  # the first of a pair alternates
                session.check()
                seconds = _copy_seconds(paths[number], device, op, num_copies)
                if turn >= 0:
                    num_ways = 2 if op == "in + out" else 1
                    found[op][number].append(num_ways * num_copies * settings.copy_nbytes / seconds / 1e9)
    return [BenchRow.of(op, settings.copy_nbytes, "", ours, "torch", torchs) for op, (ours, torchs) in found.items()]


def _copy_seconds(path: _DevicePath | _TorchPath, device: torch.device, op: str, num_copies: int) -> float:
    """Run one round, and return the time from an idle device to the events behind its last copies."""
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for number in range(num_copies):
        if op != "copy out":
            path.copy_in(number)
        if op != "copy in":
            path.copy_out(number)
    for stream in path.streams:
        stream.record_event().synchronize()
    seconds = time.perf_counter() - start
    path.settle()
    return seconds


def bound_gb_per_s(
    copied: tuple[int, int], swapped: tuple[int, int], link: Bandwidth, drives: Sequence[Bandwidth]
) -> float:
    """Return min(PCIe, NVMe): the rate that the same bytes would have at the slower of both borders alone.

    PCIe is the bytes ``copied``, in and out, over their least time by ``link``; NVMe is the same bytes over the least
    time of those ``swapped``, read and written, by ``drives`` together.
    """
    return sum(copied) / max(link.seconds(*copied), Bandwidth.of_drives(drives).seconds(*swapped)) / 1e9


def measure_three_tiers(
    session: Session,
    folders: Sequence[Path],
    device: torch.device,
    report: ComputeDeviceReport,
    drives: Sequence[Bandwidth],
) -> None:
    """Have as many tensors pass all tiers each way in a round, in rounds after a warm-up; blocks.

    Each tensor read is one that was swapped out, unless DRAM kept it; the schedule of a training step reads ahead and
    chooses what makes way. A round ends with a commit, beside which the first reads of the next begin. The result is
    added to ``report``, whose link and ``drives`` tell the bound. The caller removes the store in ``folders``. Raises
    TieredError, torch.OutOfMemoryError and the errors of the session's check.
    """
    settings, nbytes, seconds = session.settings, session.settings.tier_tensor_nbytes, list[float]()
    num_tensors = max(1, settings.tensors_nbytes // nbytes)
    inward, outward = ([f"{way}/{number}" for number in range(num_tensors)] for way in ("in", "out"))
    with tiered.Store(*folders, dram=settings.tier_dram_nbytes, engine=session.engine) as store:
        source = new_source(nbytes, num_tensors)
        for keys in (inward, outward):
            put_tensors(store, keys, source, nbytes)
        with closing(_DevicePath(store, device, nbytes, inward, outward)) as path:
            path.fill()
            schedule = _schedule(store, path, nbytes, inward, outward)
            for turn in range(-NUM_TIER_WARM_UPS, settings.tensor_rounds):
                session.check()
                if turn == 0:
                    before = _moved(store, path)
                start = time.perf_counter()
                for number, pair in enumerate(zip(inward, outward, strict=True)):
                    path.copy_in(number)
                    schedule.use(*pair)  # order: until it is leased, its next use is now
                    path.copy_out(number)
                path.settle()
                schedule.end_step()
                store.commit()
                if turn >= 0:
                    seconds.append(time.perf_counter() - start)
            moved = [after - first for after, first in zip(_moved(store, path), before, strict=True)]
    copied_in, copied_out, read, written = moved
    report.swap_bytes = {"in": copied_in, "out": copied_out, "read": read, "written": written}
    bound = bound_gb_per_s((copied_in, copied_out), (read, written), report.link, drives)
    rates = [2 * num_tensors * nbytes / one / 1e9 for one in seconds]
    report.swap = BenchRow.of("3 tiers", nbytes, session.report.joined, rates, "bound", [bound] * len(rates))
    session.line("\nall three tiers at once, as a step does; bound: min(PCIe, NVMe)", TITLE)
    session.add(report.swap)


def _moved(store: tiered.Store, path: _DevicePath) -> tuple[int, int, int, int]:
    """Return the bytes copied in and out, read and written so far."""
    copies, found = path.tier.copies, store.statistics()
    return copies.in_bytes, copies.out_bytes, found.read_bytes, found.write_bytes


def _schedule(
    store: tiered.Store, path: _DevicePath, nbytes: int, inward: Sequence[str], outward: Sequence[str]
) -> SharedSchedule:
    """Return the schedule of keys that are used in order, step by step, which the way to the device goes by."""
    rooms = Rooms()
    rooms.nbytes = dict.fromkeys(outward, nbytes)
    schedule = SharedSchedule(
        store.working_set,
        [key for pair in zip(inward, outward, strict=True) for key in pair],
        dict.fromkeys(inward, nbytes),
        window_bytes=store.working_set.budget_bytes // 2,  # the rest is for bytes on their way out
        rooms=rooms,
    )
    path.tier.attach(schedule.distance, lambda: False)
    store.working_set.add_reclaimer(lambda _: path.tier.settle_one())
    return schedule
