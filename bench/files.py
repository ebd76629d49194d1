#!/usr/bin/env python3
"""Files in and out: a checkpoint into a store and out again, its peak of memory, and its rate beside the drive's own.

Usage: python bench/files.py [--layers 36 --width 1024 --heads 16 --dram 512MiB --turns 2 --store DIR]
           [--parts "drive read,in place"]

A GPT-2 of fp32 (2 GB with the defaults) is loaded by tiered.hf.from_pretrained, copied to a durable store with its
commit, or read in place with the commit that digests it, and saved by tiered.save_pretrained; and by the model's own
save_pretrained, whose weights the bar is about are 1.5 GB (--layers 28). Each runs in a process of its own that has
loaded a tiny model before, beside the drive's own rate for the same bytes, read, written or copied from one file to
another with direct I/O by eight threads, in turns: the slower of reads and writes, and the plain copy, where each byte
is both. Memory is the most anonymous memory of the process (RssAnon) less that before, beyond the budget. One JSON line
comes last.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

import tiered
from tiered.bytes.host_tensor import empty_aligned
from tiered.interop.checkpoint_folder import write_checkpoint
from tiered.units import MiB, format_bytes, parse_bytes
from tiered.zero.deferred_tensors import DeferredTensor

PARTS = ("drive write", "copied", "drive read", "in place", "drive copy", "export", "own save")
OF_DRIVE = {
    "copied": ("drive read", "drive write"),  # the slower one: each byte is read and written
    "in place": ("drive read",),
    "export": ("drive read", "drive write"),
    "own save": ("drive read", "drive write"),
}
MOST_BEYOND_NBYTES = {"copied": 200 * MiB, "in place": 200 * MiB, "export": 200 * MiB, "own save": 300 * MiB}
REQUEST_NBYTES, NUM_THREADS = MiB, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dram", default="512MiB")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--parts", default=",".join(PARTS), help="those to run, with the drive's own that they need")
    parser.add_argument("--store", type=Path, default=None, help="where files are made (default: a folder in runs/)")
    return parser.parse_args()


def config(args: argparse.Namespace) -> Any:
    return transformers.GPT2Config(
        n_layer=args.layers, n_embd=args.width, n_head=args.heads, vocab_size=args.vocabulary, n_positions=256,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def prepare(args: argparse.Namespace, folder: Path) -> int:
    """Write the checkpoint, a tensor at a time, and return its bytes."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config(args))
    tensors = {
        name: DeferredTensor.of(value, lambda value=value: torch.randn(value.shape) / 50)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    write_checkpoint(folder, tensors, max_shard_size="500MB", write_others=config(args).save_pretrained)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class Peak:
    """The most anonymous memory while a block ran, beyond that before it, in bytes; and its seconds."""

    def __enter__(self) -> "Peak":
        self.before = self.most = anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._begun = time.perf_counter()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begun
        self._ended.set()
        self._thread.join()
        self.nbytes = max(self.most, anonymous()) - self.before


def anonymous() -> int:
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def forked(job: Callable[[], Any]) -> Any:
    """Return what ``job`` returns in a process of its own, which has imported all that this one has."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.write(write, json.dumps(job()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit("a part failed")
    return json.loads(text)


def run_part(args: argparse.Namespace, part: str, folder: Path) -> dict[str, float]:
    """Run one part in this process."""
    source = folder / "checkpoint"
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    if part == "drive copy":
        return {"seconds": copy(folder / "drive", folder / "drive copy", nbytes), "nbytes": nbytes}
    if part.startswith("drive"):
        return {"seconds": move(folder / "drive", nbytes, writes=part == "drive write"), "nbytes": nbytes}
    in_place = part == "in place"
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    load = {"frozen": "in place" if in_place else False, "hold": 0}
    with Peak() as loading:
        store = tiered.Store(run, dram=args.dram, external=[source] if in_place else [], device_memory=0)
        model = tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, source, store, **load)
        store.commit()
    unit = max(unit.nbytes for unit in model.transformer.wte.weight.segment.unit.engine.units)
    peak = loading
    if part in ("export", "own save"):
        save = tiered.save_pretrained if part == "export" else type(model).save_pretrained
        with Peak() as peak:
            save(model, folder / "saved")
        peak.nbytes += peak.before - loading.before
    store.close()
    shutil.rmtree(run)
    shutil.rmtree(folder / "saved", ignore_errors=True)
    beyond = peak.nbytes - parse_bytes(args.dram)
    return {"seconds": peak.seconds, "nbytes": nbytes, "beyond_nbytes": beyond, "unit_nbytes": unit}


def move(path: Path, nbytes: int, *, writes: bool) -> float:
    """Write a file of ``nbytes``, or read it, with direct I/O; return the seconds."""
    if not path.exists() and not writes:
        move(path, nbytes, writes=True)
    if writes:
        path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    local = threading.local()

    def request(offset: int) -> None:
        if not hasattr(local, "memory"):
            local.memory = empty_aligned(REQUEST_NBYTES, 4096)[1]
        if writes:
            os.pwrite(fd, local.memory, offset)
        else:
            os.preadv(fd, [local.memory], offset)

    begun = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        if writes:
            os.posix_fallocate(fd, 0, nbytes)
        list(threads.map(request, range(0, nbytes, REQUEST_NBYTES)))
    if writes:
        os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - begun


def copy(path: Path, to: Path, nbytes: int) -> float:
    """Copy the file at ``path`` with direct I/O; return the seconds."""
    to.unlink(missing_ok=True)
    source, target = os.open(path, os.O_RDONLY | os.O_DIRECT), os.open(to, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    local = threading.local()

    def request(offset: int) -> None:
        if not hasattr(local, "memory"):
            local.memory = empty_aligned(REQUEST_NBYTES, 4096)[1]
        os.preadv(source, [local.memory], offset)
        os.pwrite(target, local.memory, offset)

    begun = time.perf_counter()
    with ThreadPoolExecutor(2 * NUM_THREADS) as threads:  # half of them read, half write
        os.posix_fallocate(target, 0, nbytes)
        list(threads.map(request, range(0, nbytes, REQUEST_NBYTES)))
    os.fsync(target)
    seconds = time.perf_counter() - begun
    os.close(source)
    os.close(target)
    to.unlink()
    return seconds


def load_tiny(folder: Path) -> None:
    """Load a tiny model, so that what a process does once, such as imports and tables of names, is done."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # lifetime: no thread outlives it, so that processes may be forked
    prepare(argparse.Namespace(layers=1, width=8, heads=1, vocabulary=8), folder / "tiny")
    with tiered.Store(folder / "first", dram="16MiB", durable=False, device_memory=0) as store:
        tiered.hf.from_pretrained(transformers.GPT2LMHeadModel, folder / "tiny", store)


def main() -> None:
    args = arguments()
    parent = args.store or Path(__file__).parents[1] / "runs"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="files-", dir=parent))
    try:
        load_tiny(folder)
        nbytes = forked(lambda: prepare(args, folder / "checkpoint"))
        print(f"{format_bytes(nbytes)} of weights, budget {args.dram}, {args.turns} turns, {platform.machine()}")
        found: dict[str, list[dict[str, float]]] = {part: [] for part in args.parts.split(",")}
        for _ in range(args.turns):
            for part in args.parts.split(","):
                found[part].append(forked(lambda part=part: run_part(args, part, folder)))
    finally:
        shutil.rmtree(folder)
    report(args, nbytes, found)


def report(args: argparse.Namespace, nbytes: int, found: dict[str, list[dict[str, float]]]) -> None:
    seconds = {part: statistics.median(each["seconds"] for each in runs) for part, runs in found.items()}
    result: dict[str, Any] = {"bench": "files", "nbytes": nbytes, "dram": args.dram}
    for part in args.parts.split(","):
        rate = nbytes / seconds[part]
        line = f"{part:12} {rate / 1e9:5.2f} GB/s"
        result[part] = {"bytes_per_s": rate}
        if part in OF_DRIVE:
            beyond = max(each["beyond_nbytes"] for each in found[part])
            most = found[part][0]["unit_nbytes"] + MOST_BEYOND_NBYTES[part]
            share = max(seconds[each] for each in OF_DRIVE[part]) / seconds[part]
            result[part] |= {"of_drive": share, "beyond_budget_nbytes": beyond, "within": beyond <= most}
            line += f"  {share:4.2f} of {' and '.join(OF_DRIVE[part])}"
            if len(OF_DRIVE[part]) > 1:
                result[part]["of_copy"] = of_copy = seconds["drive copy"] / seconds[part]
                line += f", {of_copy:4.2f} of drive copy"
            line += f"; {beyond / MiB:.0f} MiB beyond the budget (bar {most / MiB:.0f})"
        print(line)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
