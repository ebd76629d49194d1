#!/usr/bin/env python3
"""Random rows of a table larger than memory: gathered, added to, committed, beside memmap, preadv, RocksDB and fio.

Usage: python bench/rows.py DIR [--table 8GiB --row 1024 --dram 384MiB --limit 1GiB --turns 5 --rows 65536]

The table is of fp32, in blocks of 4 KiB, in a store in DIR; the same bytes lie in a plain file beside it, and in a
safetensors file that is read in place. Each way takes its turn with rows of its own, uniform or by Zipf's law (0.99),
the page cache of its file dropped before; the process is in a control group of ``--limit`` bytes, where it may make one
(root, cgroup v1), so that the page cache cannot hold the table. fio reads 4 KiB at random with as many in flight as the
ring has. RocksDB (where `rocksdict` is installed) has the rows in blocks of 4 KiB, uncompressed, read directly, with
its log and checksums and without. Training: batches of 1,024 rows by Zipf's law are gathered, added to and written;
each 100 of them are made durable. Microseconds a row: wall, and CPU time of all threads. The blocks that were read,
over those that hold the rows, come from the device's counters. One JSON line comes last.
"""

import argparse
import functools
import importlib.util
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiered
from tiered.units import MiB, parse_bytes

Index = np.ndarray[Any, np.dtype[np.int64]]
Way = Callable[[Index], object]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--table", type=parse_bytes, default=parse_bytes("8GiB"))
    parser.add_argument("--row", type=int, default=1024, help="numbers of a row")
    parser.add_argument("--dram", default="384MiB")
    parser.add_argument("--limit", type=parse_bytes, default=parse_bytes("1GiB"), help="0: none")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", type=int, default=65_536, help="of a turn")
    return parser.parse_args()


def enter_group(limit: int) -> Path | None:
    """Put this process into a control group of ``limit`` bytes; return it, None where there can be none."""
    group = Path(f"/sys/fs/cgroup/memory/tiered-rows-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
        (group / "tasks").write_text(str(os.getpid()))
    except OSError:
        return None
    return group


def leave_group(group: Path) -> None:
    (group.parent / "tasks").write_text(str(os.getpid()))
    for task in (group / "tasks").read_text().split():  # the other threads
        (group.parent / "tasks").write_text(task)
    group.rmdir()


def make(args: argparse.Namespace, num_rows: int) -> None:
    """Write the table three times: to the store, to a plain file, and to a safetensors file."""
    size = (num_rows, args.row)
    header = json.dumps({"t": {"dtype": "F32", "shape": size, "data_offsets": [0, num_rows * args.row * 4]}}).encode()
    with (
        tiered.Store(args.directory / "run", dram=args.dram, mode="x") as store,
        open(args.directory / "plain", "wb") as plain,
        open(args.directory / "t.safetensors", "wb") as weights,
    ):
        weights.write(len(header).to_bytes(8, "little") + header)
        rows = store.create_rows("t", num_rows, (args.row,), torch.float32)
        step = 16 * MiB // (args.row * 4)
        for first in range(0, num_rows, step):
            index = torch.arange(first, min(num_rows, first + step))
            values = index.float()[:, None] + torch.arange(args.row) / args.row
            rows.put(index, values)
            for file in (plain, weights):
                file.write(memoryview(values.numpy()).cast("B"))  # type: ignore[arg-type]
    for name in ("plain", "t.safetensors"):
        with open(args.directory / name, "rb") as file:
            os.fsync(file.fileno())


def drop(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def by_memmap(args: argparse.Namespace, num_rows: int) -> Way:
    def read(index: Index) -> object:
        table = np.memmap(args.directory / "plain", np.float32, "r", shape=(num_rows, args.row))
        table._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        return table[index]

    return read


def by_threads(args: argparse.Namespace, num_threads: int = 32) -> Way:
    nbytes = args.row * 4

    def read(index: Index) -> object:
        view = memoryview(mmap.mmap(-1, len(index) * nbytes))
        fd = os.open(args.directory / "plain", os.O_RDONLY | os.O_DIRECT)

        def some(first: int) -> None:
            for place in range(first, len(index), num_threads):
                os.preadv(fd, [view[place * nbytes : (place + 1) * nbytes]], int(index[place]) * nbytes)

        threads = [threading.Thread(target=some, args=(first,)) for first in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(fd)
        return np.frombuffer(view, np.float32).reshape(-1, args.row)

    return read


def as_keys(index: Index) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in index.tolist()]


class Rocks:
    """The table in RocksDB."""

    def __init__(self, args: argparse.Namespace, num_rows: int, *, is_safe: bool) -> None:
        import rocksdict  # an option of this bench alone

        self._width, self._make_batch = args.row, rocksdict.WriteBatch
        options, table = rocksdict.Options(raw_mode=True), rocksdict.BlockBasedOptions()
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_use_direct_reads(True)
        table.set_block_size(args.row * 4)
        table.set_block_cache(rocksdict.Cache(256 * MiB))
        options.set_block_based_table_factory(table)
        path = args.directory / "rocks"
        if not path.exists():
            self._make(rocksdict, options, args, num_rows)
        self._db = rocksdict.Rdict(str(path), options)
        reads, self._writes = rocksdict.ReadOptions(), rocksdict.WriteOptions()
        reads.set_verify_checksums(is_safe)
        self._writes.disable_wal = not is_safe
        self._db.set_read_options(reads)
        self.is_safe = is_safe

    @staticmethod
    def _make(rocksdict: Any, options: Any, args: argparse.Namespace, num_rows: int) -> None:
        sorted_file = str(args.directory / "rocks.sst")
        writer = rocksdict.SstFileWriter(options)
        writer.open(sorted_file)
        table = np.memmap(args.directory / "plain", np.float32, "r", shape=(num_rows, args.row))
        for number in range(num_rows):
            writer[number.to_bytes(8, "big")] = table[number].tobytes()
        writer.finish()
        made = rocksdict.Rdict(str(args.directory / "rocks"), options)
        made.ingest_external_file([sorted_file])
        made.close()
        os.unlink(sorted_file)

    def get(self, index: Index) -> Index:
        return np.frombuffer(b"".join(self._db.get(as_keys(index))), np.float32).reshape(-1, self._width)

    def put(self, index: Index, values: Any) -> None:
        batch = self._make_batch(raw_mode=True)
        for key, value in zip(as_keys(index), values, strict=True):
            batch.put(key, value.tobytes())
        self._db.write(batch, self._writes)

    def commit(self) -> None:
        if self.is_safe:
            self._db.flush_wal(True)
        else:
            self._db.flush()

    def close(self) -> None:
        self._db.close()


def make_rocks(args: argparse.Namespace, num_rows: int, *, is_safe: bool) -> Rocks | None:
    """Return the table in RocksDB; None where that is not installed."""
    return Rocks(args, num_rows, is_safe=is_safe) if importlib.util.find_spec("rocksdict") else None


def train(
    batches: list[Index],
    change: Any,
    get: Callable[[Index], Any],
    put: Callable[[Index, Any], object],
    commit: Callable[[], object],
) -> None:
    """Gather each batch, add to it, write it, and make each 100 batches durable."""
    for number, index in enumerate(batches, 1):
        put(index, get(index) + change)
        if number % 100 == 0:
            commit()


def measure_training(
    args: argparse.Namespace, store: tiered.Store, num_rows: int, rng: np.random.Generator
) -> dict[str, tuple[float, float]]:
    """Return the times of 200 batches by each way; each row keeps its first number."""
    rows = store.rows("t")
    change = np.full(args.row, 0.5, np.float32)
    change[0] = 0
    changes = torch.from_numpy(change).expand(1024, -1).clone()
    table = np.memmap(args.directory / "plain", np.float32, "r+", shape=(num_rows, args.row))
    table._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]

    def add(index: Index, _: Any) -> None:
        rows.add(index, changes[: len(index)])

    ways: dict[str, tuple[Any, Any, Any]] = {
        "rows": (lambda index: rows.get(index).numpy(), add, store.commit),
        "memmap": (lambda index: table[index], table.__setitem__, table.flush),
    }
    found = {}
    for name in [*ways, "RocksDB", "RocksDB, neither log nor checksums"]:
        batches = [np.unique(drawn("zipf 0.99", rng, num_rows, 1024)) for _ in range(200)]
        number = sum(map(len, batches))
        if name in ways:
            found[name] = timed(functools.partial(train, batches, change, *ways[name]), number)
            continue
        rocks = make_rocks(args, num_rows, is_safe=name == "RocksDB")
        if rocks is not None:
            found[name] = timed(functools.partial(train, batches, change, rocks.get, rocks.put, rocks.commit), number)
            rocks.close()
    return {f"training, {name} | zipf 0.99 | 1024": each for name, each in found.items()}


def fio(args: argparse.Namespace) -> float:
    """Return microseconds a read of 4 KiB at random, 128 in flight."""
    command = [
        "fio", "--name=rows", f"--filename={args.directory / 'plain'}", "--rw=randread", "--bs=4k", "--direct=1",
        "--ioengine=io_uring", "--iodepth=128", "--runtime=3", "--time_based", "--readonly", "--output-format=json",
    ]  # fmt: skip
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(1e6 / found["jobs"][0]["read"]["iops"])


def drawn(law: str, rng: np.random.Generator, num_rows: int, number: int) -> Index:
    if law == "uniform":
        return rng.integers(0, num_rows, number)
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -0.99
    places = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(number))
    return (places * 0x9E3779B1) % num_rows  # the frequent ones lie anywhere


def timed(call: Callable[[], object], number: int) -> tuple[float, float]:
    """Return wall and CPU time of ``call`` in microseconds, for each of ``number`` rows."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) / number * 1e6, (time.process_time() - cpu) / number * 1e6


def keep(found: list[Any], call: Callable[[], object]) -> None:
    found.append(call())


def blocks_of(starts: Index, nbytes: int) -> int:
    """Return how many blocks of 4 KiB hold the ranges of ``nbytes`` from ``starts`` on."""
    last = (starts + nbytes - 1) // 4096
    most = int((last - starts // 4096).max()) + 1
    each = starts[:, None] // 4096 + np.arange(most)
    return len(np.unique(each[each <= last[:, None]]))


def measure(args: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    files = [args.directory / "t.safetensors"]
    results: dict[str, list[tuple[float, float]]] = {}
    blocks: dict[str, float] = {}
    reads: list[float] = []
    with tiered.Store(args.directory / "run", dram=args.dram, external=files) as store:
        store.adopt("in place", files[0], "t", block_size="4KiB")
        store.commit()  # digests all of it
        ways: dict[str, Way] = {
            "rows": lambda index: store.rows("t").get(index),
            "in place": lambda index: store.rows("in place").get(index),
            "memmap, MADV_RANDOM": by_memmap(args, num_rows),
            "32 threads, preadv": by_threads(args),
        }
        for turn in range(args.turns):
            rocks = make_rocks(args, num_rows, is_safe=True)
            if rocks is not None:
                ways["RocksDB"] = rocks.get
            for law in ("uniform", "zipf 0.99"):
                for number in (96, 4096, args.rows):
                    for name, way in ways.items():
                        index = drawn(law, rng, num_rows, number)
                        drop(args.directory / "plain")
                        before = store.statistics().read_bytes
                        found: list[Any] = []
                        read = functools.partial(way, index)
                        seen = timed(functools.partial(keep, found, read), number)
                        results.setdefault(f"{name} | {law} | {number}", []).append(seen)
                        assert np.array_equal(np.asarray(found[0])[:, 0], index.astype(np.float32)), name
                        if number == args.rows and name in ("rows", "in place"):
                            skip = files[0].stat().st_size - num_rows * args.row * 4 if name == "in place" else 0
                            least = blocks_of(index * args.row * 4 + skip, args.row * 4) * 4096
                            blocks[f"{name} | {law}"] = (store.statistics().read_bytes - before) / least
            if rocks is not None:
                rocks.close()
            if shutil.which("fio"):
                reads.append(fio(args))
            for number in (512, 4096):
                index, values = drawn("uniform", rng, num_rows, number), torch.randn(number, args.row)
                values[:, 0] = torch.from_numpy(index)
                written = store.statistics()
                rows = store.rows("t")

                def write(rows: Any = rows, index: Index = index, values: torch.Tensor = values) -> None:
                    rows.put(index, values)
                    store.commit()

                results.setdefault(f"put and commit | uniform | {number}", []).append(timed(write, number))
                after = store.statistics()
                total = (
                    after.write_bytes + after.catalog_write_bytes - written.write_bytes - written.catalog_write_bytes
                )
                blocks[f"put and commit, {number}"] = total / 4096 / number
            for name, seen in measure_training(args, store, num_rows, rng).items():
                results.setdefault(name, []).append(seen)
            one = [int(each) for each in rng.integers(0, num_rows, 300)]
            width = args.row
            part = timed(lambda: [store.read_part("t", k * width, (k + 1) * width) for k in one], len(one))  # noqa: B023
            results.setdefault("read_part | uniform | 1", []).append(part)
            print(f"turn {turn}", flush=True)
    medians = {
        name: [round(statistics.median(column), 1) for column in zip(*each, strict=True)]
        for name, each in results.items()
    }
    return {"us a row, wall and CPU": medians, "fio": reads and statistics.median(reads), "blocks": blocks}


def main() -> None:
    args = arguments()
    num_rows = args.table // (args.row * 4)
    args.directory.mkdir(parents=True, exist_ok=True)
    group = None
    try:
        if not (args.directory / "t.safetensors").exists():
            make(args, num_rows)
        group = enter_group(args.limit) if args.limit else None
        found = measure(args, num_rows)
    finally:
        if group is not None:
            leave_group(group)
    for name, (wall, cpu) in found["us a row, wall and CPU"].items():
        print(f"{name:45} wall {wall:9.1f} us   CPU {cpu:9.1f} us")
    print("fio, 128 in flight", found["fio"], "us;  blocks read or written over those of the rows", found["blocks"])
    settings = {name: str(value) for name, value in vars(args).items()} | {"limited": group is not None}
    print(json.dumps({"bench": "rows", "python": platform.python_version(), **settings, **found}))


if __name__ == "__main__":
    main()
