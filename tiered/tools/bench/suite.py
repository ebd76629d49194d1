"""A bench while it measures, and all that it measures in one directory: points, swapping, tensors, the long run.

Blocks that are moved through the same few MiB of memory again and again, as fio moves them, are in the processor's
caches; the bytes of tensors are not. So swapping and raw rounds beside tensors go through memory larger than those.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

import tiered
from tiered.bytes.device.profile import write_profile
from tiered.tools.bench.report import (
    TITLE,
    Bandwidth,
    BenchReport,
    BenchRow,
    Best,
    DirectoryReport,
    SustainedRate,
    best_of,
    duplex_of,
)
from tiered.tools.bench.rounds import OPS, Fio, FioError, Pattern, Round, ScratchFile, forget, run_round
from tiered.tools.bench.settings import NUM_TENSOR_WARM_UPS, BenchSettings
from tiered.tools.console import say
from tiered.tools.doctor.description import BlockDevice, DirectoryDescription, find_block_device
from tiered.units import MiB, divide_up, format_bytes

__all__ = ["Session", "Suite", "measure_pairs", "measure_together", "new_source", "put_tensors", "row_of"]

_SOURCE_NBYTES = 256 * MiB  # of random bytes that puts copy from: more than a processor's cache
_MIN_DRAM_NBYTES = 64 * MiB
_MOST_AHEAD = 256  # keys in one prefetch
_PREFIX = ".tiered-bench-"  # which `tiered gc` knows


class Session:
    """Fills in ``report``, and prints what is finished.

    ``check`` is called between rounds and may raise to end it all. ``engine`` is the one that was asked for, or "auto".
    One thread at a time, but for ``remove_folders`` from a signal handler.
    """

    def __init__(self, report: BenchReport, engine: str, check: Callable[[], object] = lambda: None) -> None:
        self.report = report
        self.settings = report.settings
        self.engine = engine
        self.check = check
        self._folders: list[Path] = []

    def line(self, *rows: object) -> None:
        """Print ``rows``, each folded where it is wider than the page."""
        say(*map(str, rows), indent=2)

    def add(self, *rows: BenchRow) -> None:
        """Add ``rows`` to the report, and print them."""
        self.report.results += rows
        self.line(*rows)

    @contextmanager
    def folders(self, *directories: str) -> Iterator[list[Path]]:
        """Lend a new folder in each of ``directories``, and remove them whatever happens.

        By default it is in each measured directory, with its profile, which deals out the bytes of a store.
        """
        try:
            for directory in directories or [one.directory for one in self.report.directories]:
                self._folders.append(Path(tempfile.mkdtemp(dir=directory, prefix=_PREFIX)))  # order: at once, a signal
            if not directories:
                for folder, one in zip(self._folders, self.report.directories, strict=True):
                    write_profile(folder, self.report.profile_of(one))
            yield list(self._folders)
        finally:
            self.remove_folders()
            self._folders.clear()

    def remove_folders(self) -> None:
        """Remove all folders."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


# -- suite -------------------------------------------------------------------------------------------------------------


class Suite:
    """Measures one directory, and fills in its report."""

    def __init__(self, session: Session, described: DirectoryDescription) -> None:
        self.report = DirectoryReport(described.path)
        self._described = described
        self._session = session
        self._settings = session.settings
        self._fio: Fio | None = None

    def run(self) -> DirectoryReport:
        """Measure everything; blocks for minutes. Raises TieredError and the errors of the session's check."""
        report, line, settings = self.report, self._session.line, self._settings
        with ScratchFile(
            report.directory,
            engine=self._session.engine,
            memory_nbytes=settings.memory_nbytes,
            file_nbytes=settings.file_nbytes,
            depth=max(settings.depths),
        ) as scratch:
            scratch.write_file(self._session.check)
            report.engine, report.engine_reason = scratch.device.engine, scratch.engine_reason
            self._find_fio(scratch)
            line(TITLE)
            rows = []
            for point in settings.points:
                rows.append(self._measure_point(scratch, point))
                self._session.add(rows[-1])
            best = report.best = best_of(rows)
            self._session.add(self._measure_point(scratch, self._pattern("mixed", best)))
            self._measure_swapping(scratch, best)
            self._measure_tensors(scratch, best)
            self._sustain(scratch, best)
        return report

    def _find_fio(self, scratch: ScratchFile) -> None:
        missing = "fio is not installed"
        try:
            self._fio = scratch.find_fio()
        except FioError as error:
            missing = str(error)
        reference = f"beside fio with {self._fio.engine}" if self._fio else f"without a reference: {missing}"
        self.report.fio_engine = self._fio.engine if self._fio else None
        report = self.report
        self._session.line(f"\n{report.directory}: engine {report.engine} ({report.engine_reason}), {reference}")

    def _measure_point(self, scratch: ScratchFile, pattern: Pattern) -> BenchRow:
        """Measure a point; without fio from here on should that fail."""
        settings = self._settings
        try:
            pairs = measure_pairs(
                scratch,
                pattern,
                rounds=settings.rounds,
                fio=self._fio,
                warm_up_s=settings.warm_up_s,
                check=self._session.check,
            )
        except FioError as error:
            self._session.line(f"from here on without fio: {error}")
            self._fio = None
            return self._measure_point(scratch, pattern)
        return row_of(pattern, *pairs, directory=self.report.directory)

    def _measure_swapping(self, scratch: ScratchFile, best: Best) -> None:
        """Run rounds of reads, of writes and of both in turn at the best settings, through all of the memory."""
        reads, writes, mixed = self._in_turn(scratch, [self._pattern(op, best) for op in OPS])
        read, write = (1e9 * statistics.median(one.gb_per_s for one in rounds) for rounds in (reads, writes))
        seconds = sum(one.seconds for one in mixed)
        mixed_read, mixed_write = sum(one.read_nbytes for one in mixed), sum(one.write_nbytes for one in mixed)
        duplex = duplex_of(mixed_read / seconds, mixed_write / seconds, read, write)
        self.report.swap = Bandwidth(read, write, duplex)
        memory = format_bytes(len(scratch.memory))
        self._session.line(f"through {memory} of memory, as tensors go: {self.report.swap}")

    def _in_turn(self, scratch: ScratchFile, patterns: Sequence[Pattern]) -> list[list[Round]]:
        """Return the rounds of each of ``patterns``, which were run in turn through all of the memory."""
        found: list[list[Round]] = [[] for _ in patterns]
        for _ in range(self._settings.rounds):
            for pattern, rounds in zip(patterns, found, strict=True):
                self._session.check()
                rounds.append(scratch.run(pattern, is_spread=True))
        return found

    def _measure_tensors(self, scratch: ScratchFile, best: Best) -> None:
        directory = self.report.directory

        def raw(op: str) -> float:
            self._session.check()
            return scratch.run(self._pattern(op, best), is_spread=True).gb_per_s

        for tensor_nbytes in self._settings.tensor_nbytes:
            with self._session.folders(directory) as folders:
                rows = _measure_tensors(
                    folders, tensor_nbytes, self._settings, directory=directory, engine=scratch.device.engine, raw=raw
                )
            self._session.add(*rows)

    def _sustain(self, scratch: ScratchFile, best: Best) -> None:
        settings, report = self._settings, self.report
        if not settings.sustained_s:
            return
        for op in ("write", "read"):
            samples = self._time_series(scratch, self._pattern(op, best))
            report.sustained += samples
            rates = [sample.gb_per_s for sample in samples] or [0.0]
            heat = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
            self._session.line(
                f"{op} for {settings.sustained_s:.0f} s: {rates[0]:.2f} GB/s at first, {rates[-1]:.2f} at last, "
                f"{min(rates):.2f}-{max(rates):.2f}; temperature "
                f"{f'{heat[0]:.0f} to {heat[-1]:.0f} C' if heat else 'not readable'}"
            )

    def _time_series(self, scratch: ScratchFile, pattern: Pattern) -> list[SustainedRate]:
        """Run ``pattern`` for so long without a pause; return its windows.

        A drive's fast cache ends, and a hot drive slows down, only after seconds or minutes.
        """
        window_s, mount = self._settings.window_s, self._described.mount
        samples: list[SustainedRate] = []
        start = time.perf_counter()
        marks = [(start, _moved(scratch))]

        def note() -> None:
            (last, moved), now, now_moved = marks[-1], time.perf_counter(), _moved(scratch)
            marks.append((now, now_moved))
            drive = find_block_device(mount) if mount else None
            heat = None if drive is None else _hottest(drive)
            rate = (now_moved - moved) / (now - last) / 1e9
            samples.append(SustainedRate(pattern.op, now - start, rate, heat))
            self._session.check()

        long = replace(pattern, seconds=self._settings.sustained_s, max_nbytes=None)
        run_round(scratch.device, scratch.memory, long, watch=note, watch_every_s=window_s)
        if time.perf_counter() - marks[-1][0] > window_s / 2:
            note()
        return samples

    def _pattern(self, op: str, best: Best) -> Pattern:
        depths = {"read": best.read_depth, "write": best.write_depth}
        return self._settings.pattern(op, best.block_bytes, depths.get(op, max(2, *depths.values())))


def measure_pairs(
    scratch: ScratchFile,
    pattern: Pattern,
    *,
    rounds: int,
    fio: Fio | None = None,
    warm_up_s: float = 0.1,
    check: Callable[[], object] = lambda: None,
) -> tuple[list[Round], list[Round]]:
    """Run ``rounds`` rounds after a warm-up, and as many of ``fio`` between them; return both; blocks.

    The drive drifts, and both sides of a pair meet it in the same mood; the first of a pair alternates. ``check`` is
    called before each pair and may raise. Raises FioError, TieredError.
    """
    scratch.run(replace(pattern, seconds=warm_up_s))
    ours: list[Round] = []
    theirs: list[Round] = []
    for turn in range(rounds):
        check()
        for is_fio in (turn % 2 == 1, turn % 2 == 0):
            if not is_fio:
                ours.append(scratch.run(pattern))
            elif fio is not None:
                theirs.append(fio.run(pattern, scratch.path))
    return ours, theirs


def row_of(pattern: Pattern, ours: Sequence[Round], theirs: Sequence[Round], *, directory: str) -> BenchRow:
    """Return the row of ``ours`` and of fio's rounds, if any; latencies are those of the median round."""
    by_rate = [sorted(rounds, key=lambda one: one.gb_per_s) for rounds in (ours, theirs)]
    latency, fio_latency = (rounds[len(rounds) // 2].latency if rounds else None for rounds in by_rate)
    cpu_s, fio_cpu_s = (
        statistics.median(one.cpu_s_per_gb for one in rounds) if rounds else None for rounds in (ours, theirs)
    )
    rates, fio_rates = ([one.gb_per_s for one in rounds] for rounds in (ours, theirs))
    return BenchRow.of(
        pattern.op, pattern.block_nbytes, directory, rates, "fio", fio_rates, depth=pattern.depth, latency=latency,
        cpu_s_per_gb=cpu_s, reference_latency=fio_latency, reference_cpu_s_per_gb=fio_cpu_s,
    )  # fmt: skip


def measure_together(session: Session) -> None:
    """Put, get and lease tensors in a store over all directories of the report, each measured alone before; blocks.

    The raw rate of a row is the sum of the rates of the drives alone, through memory that no cache holds. Raises
    TieredError; cleans up.
    """
    report, settings = session.report, session.settings

    drives = Bandwidth.of_drives(report.drives)

    def raw(op: str) -> float:
        session.check()
        return (drives.read_bytes_per_s if op == "read" else drives.write_bytes_per_s) / 1e9

    num = len(report.directories)
    session.line(f"\na store over all {num}; raw: the sum of each drive alone", TITLE)
    with session.folders() as folders:
        rows = _measure_tensors(
            folders, settings.together_tensor_nbytes, settings, directory=report.joined, engine=session.engine, raw=raw
        )
    session.add(*rows)


def _measure_tensors(
    folders: Sequence[Path],
    tensor_nbytes: int,
    settings: BenchSettings,
    *,
    directory: str,
    engine: str,
    raw: Callable[[str], float],
) -> list[BenchRow]:
    """Measure puts and gets of tensors of ``tensor_nbytes`` in a new store over ``folders`` of ``directory``; blocks.

    Puts end with a commit inside the timing, into extents written before. Gets come from a store that was just opened,
    so that nothing is resident; its memory was touched before, as that of a store in use and that of raw rounds was.
    ``raw`` runs a round of "read" or "write" between, which returns 10^9 bytes a second and may raise.
    """
    keys = [f"tensor/{number}" for number in range(max(1, divide_up(settings.tensors_nbytes, tensor_nbytes)))]
    source = new_source(tensor_nbytes, len(keys))
    target = torch.ones(tensor_nbytes, dtype=torch.uint8, device="cpu")  # touched
    dram = max(settings.dram_nbytes, _MIN_DRAM_NBYTES)
    rates: dict[str, list[tuple[float, float]]] = {op: [] for op in ("put", "get", "lease")}
    with tiered.Store(*folders, dram=dram, engine=engine) as store:
        for turn in range(-NUM_TENSOR_WARM_UPS, settings.tensor_rounds):
            raw_gb_per_s = raw("write") if turn >= 0 else 0.0
            seconds = put_tensors(store, keys, source, tensor_nbytes)
            if turn >= 0:
                rates["put"].append((len(keys) * tensor_nbytes / seconds / 1e9, raw_gb_per_s))
    for op in ("get", "lease") * settings.tensor_rounds:
        raw_gb_per_s = raw("read")
        for file in (file for folder in folders for file in folder.glob("data-*")):
            forget(str(file))  # engines that go through the page cache left it there
        with tiered.Store(*folders, dram=dram, engine=engine, mode="r") as store:
            _touch(store, dram)
            seconds = _get(store, keys, target if op == "get" else None, num_ahead=dram // 2 // tensor_nbytes)
        rates[op].append((len(keys) * tensor_nbytes / seconds / 1e9, raw_gb_per_s))
    return [
        BenchRow.of(op, tensor_nbytes, directory, [our for our, _ in pairs], "raw", [their for _, their in pairs])
        for op, pairs in rates.items()
    ]


def new_source(tensor_nbytes: int, num_tensors: int) -> torch.Tensor:
    """Return random bytes to put ``num_tensors`` from: (nbytes,) uint8 of so many that no cache holds them."""
    nbytes = max(tensor_nbytes, min(_SOURCE_NBYTES, num_tensors * tensor_nbytes))
    source = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    source.view(torch.int64).random_()
    return source


def put_tensors(store: tiered.Store, keys: Sequence[str], source: torch.Tensor, tensor_nbytes: int) -> float:
    """Put a tensor under each key and commit; return the seconds it took."""
    pieces = source[: len(source) // tensor_nbytes * tensor_nbytes].view(-1, tensor_nbytes)
    start = time.perf_counter()
    store.put_many((key, pieces[number % len(pieces)]) for number, key in enumerate(keys))
    store.commit()
    return time.perf_counter() - start


def _touch(store: tiered.Store, nbytes: int) -> None:
    """Have the kernel give the store all the memory of its budget, which it zeroes at about the rate of a copy."""
    buffer = store.working_set.reserve(nbytes)
    ctypes.memset(buffer.address, 0, buffer.nbytes)
    store.working_set.unreserve(buffer)


def _get(store: tiered.Store, keys: Sequence[str], target: torch.Tensor | None, *, num_ahead: int) -> float:
    """Get every key into ``target``, or lease it; ask for about so many ahead. Return the seconds it took."""
    num_ahead = max(2, min(_MOST_AHEAD, num_ahead))
    start = time.perf_counter()
    for number, key in enumerate(keys):
        if number % max(1, num_ahead // 4) == 0:  # often enough that most of it is ahead at any time
            store.prefetch(islice(keys, number, number + num_ahead))
        if target is None:
            with store.lease(key):
                pass
        else:
            store.get(key, out=target)
    return time.perf_counter() - start


def _moved(scratch: ScratchFile) -> int:
    found = scratch.device.statistics()
    return found.read_bytes + found.write_bytes


def _hottest(device: BlockDevice) -> float | None:
    all_of = [device.temperature_c, *(_hottest(part) for part in device.parts)]
    return max((one for one in all_of if one is not None), default=None)
