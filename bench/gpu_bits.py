#!/usr/bin/env python3
"""The bits of a GPT of 200 M parameters through three tiers, against plain PyTorch on the same device.

Usage: python bench/gpu_bits.py [--device cuda --store DIR --busy --kill --rows 2 --minutes 1 --tiny]

The models of the tests are so small that no asynchronous copy is ever late. A unit here has 30 to 60 MB, whose copy
takes milliseconds: a read of what has not arrived has wrong bits. Each run has the smallest device budget and swaps its
activations. --busy: another stream computes and copies all the time, and the caller's own stream is late. --kill: the
training is killed in a step by SIGKILL, and its resumption must end with the bits of plain PyTorch. Each run is a JSON
line, whose "wrong" says which bits differ. The model gets smaller where memory or time is short.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests, and where nothing is installed

import psutil
import torch

import tiered
from bench.device_bits import difference, quick_directory, swap_all_activations
from bench.gpu_device import part_arguments, said, simulated_device
from tests.accelerator.training import device_memory_named_in
from tests.models import Case
from tests.reference import Recipe, Trained
from tests.zero.training import Session, assert_same, reference, start
from tiered.errors import CapacityError
from tiered.tools.train.task import GPT, VOCAB, Shape
from tiered.units import MiB
from tiered.zero.compute_device import named_device

BATCH = 4
DRAM, DISK, DEVICE, HOST = 24, 40, 60, 100  # bytes per parameter: a store's, its files', the reference's, all of them
LARGE = Shape(layers=12, width=1152, heads=18, context=512)  # 191 M parameters, a block 64 MB in fp32, 32 in bf16
SMALL = Shape(layers=2, width=64, heads=2, context=16)


_LATE_CYCLES = 20_000_000  # of the device's clock, some 10 ms: what a micro-step's kernels begin behind


class Row(NamedTuple):
    """One run: what must not show in its bits."""

    update: str
    update_on: str
    dtype: str
    max_norm: float | None = None

    def __str__(self) -> str:
        return f"{self.update}, {self.update_on}, {self.dtype}" + (", clipped" if self.max_norm else "")


ROWS = (
    Row("step", "cpu", "fp32"), Row("backward", "device", "bf16"), Row("step", "device", "fp32"),
    Row("backward", "cpu", "bf16"), Row("step", "device", "bf16", max_norm=0.5),
)  # fmt: skip

# -- the training --------------------------------------------------------------------------------------------------


class Training:
    """The model of one shape on one device, by plain PyTorch and through the tiers."""

    def __init__(self, device: torch.device, shape: Shape, row: Row, *, num_steps: int = 3, late: bool = False) -> None:
        self.shape, self.row = shape, row
        self.recipe = Recipe(
            param_dtype=torch.bfloat16 if row.dtype == "bf16" else None, num_steps=num_steps, max_norm=row.max_norm,
            updates_on="cpu" if row.update_on == "cpu" and device.type != "sim" else "",
            adamw={"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.05},
        )  # fmt: skip
        self.options = {"device": device, "update_on": row.update_on, "activations": "swap", "hold": 0}

        def build() -> torch.nn.Module:
            with device:
                return GPT(shape)

        def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            if late and device.type == "cuda":
                torch.cuda._sleep(_LATE_CYCLES)
            tokens = torch.randint(0, VOCAB, (2, BATCH, shape.context), generator=generator).to(device)
            return tokens[0], tokens[1]

        self.case = Case(build, batch)

    def plain(self) -> Trained:
        """Return what plain PyTorch leaves, in host memory."""
        trained = reference(self.case, self.recipe)
        for name in ("parameters", "buffers", "masters", "exp_avg", "exp_avg_sq"):
            setattr(trained, name, {key: value.cpu() for key, value in getattr(trained, name).items()})
        torch.accelerator.empty_cache()
        return trained

    def store(self, place: Path, device_memory: int, *, durable: bool = False) -> tiered.Store:
        dram = 64 * MiB + DRAM * self.shape.num_params
        return tiered.Store(place, dram=dram, device_memory=device_memory, durable=durable)

    def start(self, store: tiered.Store) -> Session:
        return start(self.case, self.recipe, store, self.row.update, **self.options)

    def smallest_device_memory(self, place: Path) -> int:
        """Return the smallest device budget, as the refusal of a smaller one names it."""
        try:
            with self.store(place, 1) as store:
                self.start(store)
        except CapacityError as error:
            return device_memory_named_in(error)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        raise AssertionError("a device budget of one byte was not refused")


def shape_for(device: torch.device, folder: Path, *, minutes: float, tiny: bool) -> Shape:
    """Return the largest shape of LARGE's width that memory, the folder and the time have room for."""
    free, _ = torch.accelerator.get_memory_info(device)
    ram, disk = psutil.virtual_memory().available, shutil.disk_usage(folder).free
    most = 0.7 * min(free / DEVICE, ram / HOST, disk / DISK)
    return SMALL if tiny else with_layers(int(LARGE.layers * min(1.0, most / LARGE.num_params, minutes / 0.8)))


def with_layers(layers: int) -> Shape:
    return Shape(max(2, layers), LARGE.width, LARGE.heads, LARGE.context)


def compare(device: torch.device, rows: Sequence[Row], shape: Shape, folder: Path, *, end_s: float, late: bool) -> None:
    """Make all runs and say a line of each; those that time gets short for have fewer layers.

    Of all rows, the first one's reference is made twice.
    """
    for index, row in enumerate(rows):
        begun_s = time.monotonic()
        found: dict[str, Any] = {**row._asdict(), "num_params": shape.num_params}
        try:
            found |= run(Training(device, shape, row, late=late), folder, repeats=not index and rows == ROWS)
        except Exception as error:  # whatever it is, the other runs go on
            found["wrong"] = f"{row}: {' '.join(f'{type(error).__name__}: {error}'.split())[:1000]}"
        took_s = time.monotonic() - begun_s
        said(found | {"seconds": round(took_s, 2)})
        left = (end_s - time.monotonic()) / (took_s * max(1, len(rows) - index - 1))
        if left < 1 and shape.width == LARGE.width:
            shape = with_layers(int(shape.layers * max(0.0, left)))


def run(training: Training, folder: Path, *, repeats: bool) -> dict[str, Any]:
    """Return the figures of one run; ``repeats``: plain PyTorch must have the same bits twice, or no other run has."""
    expected = training.plain()
    if not all(loss.isfinite() for loss in expected.losses):
        return {"wrong": "the reference's losses are not finite: nothing is compared by them"}
    if repeats:
        again = training.plain()
        again.masters = {name: master for name, master in again.masters.items() if name in again.cast}
        try:
            assert_same(again, expected)
        except AssertionError as error:
            return {"wrong": f"plain PyTorch does not repeat its own bits here: {str(error)[:500]}"}
    with tempfile.TemporaryDirectory(dir=folder, prefix="bits-") as place:
        budget = training.smallest_device_memory(Path(place) / "refused")
        begun_s = time.monotonic()
        with training.store(Path(place) / "store", budget) as store:
            session = training.start(store)
            unit_nbytes = max(unit.nbytes for unit in next(session.model.parameters()).segment.unit.engine.units)
            wrong = difference(session, expected)
    figures = {"device_budget_bytes": budget, "largest_unit_bytes": unit_nbytes, "losses": [
        float(loss) for loss in expected.losses], "tiered_s": round(time.monotonic() - begun_s, 2)}  # fmt: skip
    return figures | ({"wrong": f"{training.row}: {wrong[:1000]}"} if wrong else {})


# -- a device that is busy -----------------------------------------------------------------------------------------


@contextmanager
def busy_stream(device: torch.device, *, tiny: bool) -> Iterator[Callable[[], int]]:
    """Have another stream multiply and copy until the end, so that copies and kernels of others are late.

    Yields the number of rounds so far, which must not be 0 at the end.
    """
    stream, event, end = torch.Stream(device=device), torch.Event(device=device), threading.Event()
    matrix = torch.ones(64 if tiny else 4096, 64 if tiny else 4096, device=device)
    here = torch.ones(1 * MiB if tiny else 64 * MiB, dtype=torch.uint8, pin_memory=True)
    there, product = here.to(device), torch.empty_like(matrix)
    torch.accelerator.synchronize(device)
    rounds = 0

    def work() -> None:
        nonlocal rounds
        while not end.is_set():
            with stream:
                torch.mm(matrix, matrix, out=product)
                there.copy_(here, non_blocking=True)
                here.copy_(there, non_blocking=True)
            event.record(stream)
            while not event.query() and not end.is_set():
                time.sleep(0.0005)
            rounds += 1
            time.sleep(0.0005)  # on a device that is quick, the other threads run, too

    thread = threading.Thread(target=work, name="busy")
    thread.start()
    try:
        yield lambda: rounds
    finally:
        end.set()
        thread.join()
        torch.accelerator.synchronize(device)


# -- a training that is killed -------------------------------------------------------------------------------------


def train_on(training: Training, place: Path, budget: int, *, is_victim: bool) -> None:
    """Train from the last commit to the end, and compare; a victim is killed within its third step, by itself."""
    with training.store(place, budget, durable=True) as store:
        session = training.start(store)
        first = int(store.resume().get("step", 0))
        said({"resumed_at": first})
        took_s = 0.0
        for step in range(first, training.recipe.num_steps):
            begun_s = time.monotonic()
            if is_victim and step == 2:
                threading.Timer(0.3 * took_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            session.run_step(step)
            took_s = time.monotonic() - begun_s
            store.commit({"step": step + 1})
            said({"committed": step + 1})
        trained = session.collect()
        expected = training.plain()
        expected.losses = expected.losses[first:]
        try:
            assert_same(trained, expected)
        except AssertionError as error:
            said({"wrong": f"after a kill: {' '.join(str(error).split())[:1000]}"})


def kill_and_resume(args: argparse.Namespace, training: Training, folder: Path) -> dict[str, Any]:
    """Have a training killed in its third step, and let another process end it."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="kill-") as place:
        budget = training.smallest_device_memory(Path(place) / "refused")
        command = [
            sys.executable, __file__, "--device", args.device, "--store", str(Path(place) / "store"),
            "--child", str(budget), *(["--tiny"] if args.tiny else ["--layers", str(training.shape.layers)]),
        ]  # fmt: skip
        victim, _ = figures_of([*command, "--kill"])
        status, found = figures_of(command)
    found |= {"num_params": training.shape.num_params, "device_budget_bytes": budget}
    if victim != -signal.SIGKILL:
        found["wrong"] = f"the training ended with status {victim} before it was killed"
    elif status or "resumed_at" not in found:
        found["wrong"] = f"the resumed training ended with status {status}"
    elif not 2 <= found["resumed_at"] < training.recipe.num_steps:
        found["wrong"] = f"resumed at step {found['resumed_at']} after a kill in the third step"
    return found


def figures_of(command: list[str]) -> tuple[int, dict[str, Any]]:
    """Run ``command``; return its status and the figures of all its lines together."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, {key: value for line in lines for key, value in line.items()}


# ------------------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = part_arguments(__doc__)
    parser.add_argument("--busy", action="store_true", help="another stream is busy, the caller's is late")
    parser.add_argument("--kill", action="store_true", help="kill a training and resume it, nothing else")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="only so many of the runs")
    parser.add_argument("--minutes", type=float, default=1.0, help="about as long as all may take, default: 1")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)  # the device budget of a training to be killed
    parser.add_argument("--layers", type=int, help="of the large shape, default: as many as fit, 12 at most")
    return parser.parse_args()


def be_deterministic() -> None:
    """Have torch use kernels whose bits repeat."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    swap_all_activations()
    logging.getLogger("tiered").setLevel(logging.ERROR)


def main() -> None:
    args = arguments()
    end_s = time.monotonic() + 60 * args.minutes - (time.time() - psutil.Process().create_time())  # imports take time
    be_deterministic()
    with simulated_device(args.device):
        device = named_device(args.device)
        killed, num_steps = Row("backward", "device", "bf16"), 8 if args.tiny else 4  # a tiny step is soon over
        if args.child is not None:
            shape = SMALL if args.tiny else with_layers(args.layers)
            train_on(Training(device, shape, killed, num_steps=num_steps), args.store, args.child, is_victim=args.kill)
            return
        args.store.mkdir(parents=True, exist_ok=True)
        quick = quick_directory()
        shape = with_layers(args.layers) if args.layers else shape_for(
            device, args.store, minutes=args.minutes / (2 if args.kill else 1), tiny=args.tiny
        )  # fmt: skip
        if args.kill:
            said(kill_and_resume(args, Training(device, shape, killed, num_steps=num_steps), args.store))
            return
        has_room = quick and shutil.disk_usage(quick).free > 2 * DISK * shape.num_params
        folder = Path(quick) if quick and has_room else args.store
        with busy_stream(device, tiny=args.tiny) if args.busy else nullcontext(partial(int, 1)) as rounds:
            compare(device, ROWS[: args.rows], shape, folder, end_s=end_s, late=args.busy)
            if args.busy:
                wrong = {} if rounds() else {"wrong": "the busy stream did nothing: no run was beside one"}
                said({"rounds_of_the_busy_stream": rounds()} | wrong)


if __name__ == "__main__":
    main()
