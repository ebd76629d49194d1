#!/usr/bin/env python3
"""One training run in a process of its own, in memory or through the tiers: what the training benches are made of.

Usage: python bench/training.py FOLDER '{"kind": "tiered", "layers": 2, ...}'

The benches call ``measure``; started as a program this trains once and prints one JSON line. The fields of Settings are
the dials. Both kinds train the same GPT from the same seed on the same batch, with fp32 masters and fused AdamW.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests/devices

import psutil
import torch
import trees

import tiered
from tests.devices.throttled import ThrottledDevice
from tiered.bytes.arena import Arena
from tiered.bytes.device.engines import open_device
from tiered.bytes.pinned_arena import add_registrar
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.lifetime.opening import Parts, empty_root
from tiered.store.transfers import checked_transfer
from tiered.store.waiting.recorder import CALLER
from tiered.tools.train.summary import Bound, profiled_bandwidth
from tiered.tools.train.task import GPT, Shape
from tiered.units import MiB, format_bytes, format_count, parse_bytes

ADAMW = {"betas": (0.9, 0.999), "weight_decay": 0.01, "eps": 1e-8}
FUSED_ADAMW = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}
COUNTERS_AGREE = 0.02  # of /proc/self/io
COUNTERS_NOISE_NBYTES = 1 * MiB  # of a tiny run, whatever else the process writes


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one run is."""

    kind: str = "tiered"  # or "memory"
    layers: int = 8
    width: int = 2048
    heads: int = 16
    context: int = 256
    batch: int = 4
    steps: int = 4
    micro_steps: int = 1
    clip: float = 0.0  # 0: none
    dtype: str = "bf16"  # or "fp32"
    update: str = "backward"
    state: str = "exact"
    hold: str = "auto"
    activations: str = "auto"
    dram: str = "1GiB"
    durable: bool = True
    digests: bool = True  # of blocks; without, what this bench alone can do, nothing read is checked
    throttle: str = ""  # bytes per second each way, such as "1GB"
    half_duplex: bool = False  # what is throttled either reads or writes; else neither slows the other
    threads: int = 0  # torch's; 0: its default
    device: str = "cpu"  # where the model computes: "sim" is the simulated device of the tests
    device_memory: str = "0"  # tiered's budget there
    card: str = ""  # the size of a simulated device's memory; "": the machine's
    update_on: str = "auto"
    wait_policy: str = ""  # OMP_WAIT_POLICY of the process, "passive" or "active"; "": as it is here
    tree: str = ""  # the checkout whose tiered and whose bench/training.py run; "": this one

    @property
    def shape(self) -> Shape:
        return Shape(layers=self.layers, width=self.width, heads=self.heads, context=self.context)

    @property
    def param_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    @property
    def formula(self) -> tuple[float, float]:
        """Bytes per parameter that must be read and written with nothing held, gradients in DRAM."""
        p = 2 if self.dtype == "bf16" else 4
        persistent = {"exact": 12, "compact": 5.1 if p == 2 else 6.1}[self.state]
        return p + persistent, persistent

    def words(self) -> str:
        """Return the settings that are not the defaults of a run in memory, for people."""
        parts = [f"batch {self.batch}x{self.context}", self.dtype]
        parts += [f"{self.micro_steps} micro-steps"] if self.micro_steps > 1 else []
        parts += [f"clip {self.clip:g}"] if self.clip else []
        parts += [f"idle OpenMP threads {self.wait_policy}"] if self.wait_policy else []
        parts += [f"tree {self.tree}"] if self.tree else []
        if self.kind == "memory":
            return f"in memory, {', '.join(parts)}"
        parts += [f"update {self.update}", f"state {self.state}", f"hold {self.hold}", f"dram {self.dram}"]
        if self.device != "cpu":
            parts += [f"on {self.device}, device_memory {self.device_memory}, update_on {self.update_on}"]
        parts += [f"whose card has {self.card}"] if self.card else []
        parts += ["commit each step" if self.durable else "not durable"]
        parts += [] if self.digests else ["without digests"]
        duplex = "half" if self.half_duplex else "full"
        parts += [f"throttled to {self.throttle}/s each way, {duplex} duplex"] if self.throttle else []
        return f"tiered, {', '.join(parts)}"


def add_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add an option for each setting, and for where to work; ``defaults`` are the bench's own."""
    for field in dataclasses.fields(Settings):
        if field.name == "kind":
            continue
        default = defaults.get(field.name, field.default)
        option = f"--{field.name.replace('_', '-')}"
        if field.type is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(option, type=type(default), default=default, help=f"default: {default!r}")
    parser.add_argument("--store", type=Path, default=Path("runs"), help="where folders for stores are made")


def settings_of(args: argparse.Namespace, **changes: Any) -> Settings:
    """Return what the options say, with ``changes``."""
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "kind"]
    return dataclasses.replace(Settings(**{name: getattr(args, name) for name in names}), **changes)


def environment(settings: Settings) -> str:
    """Return where this runs and what it trains, in one line."""
    return (
        f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}; "
        f"{format_count(settings.shape.num_params)} parameters, width {settings.width}"
    )


def measure(settings: Settings, folder: Path, *, prefix: str = "") -> dict[str, Any]:
    """Run ``settings`` in a process of its own with its store in ``folder``, which is removed; return what it prints.

    ``prefix`` is a shell command that runs first in that process, such as one that joins a memory cgroup. A shell
    stands between in any case: ``ru_maxrss`` starts with what the parent of an exec had in memory.
    """
    tree = Path(settings.tree) if settings.tree else trees.HERE
    changed = {  # an older tree does not know each setting that is as by default
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.name != "tree" and getattr(settings, field.name) != field.default
    }
    command = shlex.join([sys.executable, str(tree / "bench/training.py"), str(folder), json.dumps(changed)])
    if settings.wait_policy:
        command = f"OMP_WAIT_POLICY={shlex.quote(settings.wait_policy)} {command}"
    try:
        done = subprocess.run(
            ["sh", "-c", f"{prefix or 'true'} && {command}; exit $?"],
            env=trees.environment(tree), capture_output=True, text=True, timeout=7200,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"{settings.words()}: exit status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def median_s(result: dict[str, Any], what: str = "seconds") -> float:
    """Return the median of a run's steps after the first, which warms everything up; or of their "cpu_seconds"."""
    return statistics.median(result[what][1:] or result[what])


# -- in that process -----------------------------------------------------------------------------------------------


def batches_of(settings: Settings) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a batch for each micro-step, the same in each step: two int64 tensors of (batch, context)."""
    generator = torch.Generator().manual_seed(1)
    size = (settings.micro_steps, settings.batch, settings.context + 1)
    return [
        (tokens[:, :-1].contiguous().to(settings.device), tokens[:, 1:].contiguous().to(settings.device))
        for tokens in torch.randint(0, 256, size, generator=generator)
    ]


def time_steps(settings: Settings, step: Callable[[], float], end: Callable[[], None]) -> dict[str, Any]:
    """Run the steps and return seconds, CPU-seconds and losses; the counters run over all but the first."""
    seconds, cpu_seconds, losses = [], [], []
    for _ in range(settings.steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        if len(seconds) == 1:
            end()
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses}


def backward_of(settings: Settings, model: torch.nn.Module, batches: list[tuple[Any, Any]]) -> float:
    """Run forward and backward over all micro-steps and return the mean loss."""
    total = 0.0
    for number, (inputs, targets) in enumerate(batches, start=1):
        only_adds = settings.kind == "tiered" and settings.update == "backward" and number < len(batches)
        with tiered.accumulate(model) if only_adds else nullcontext():
            loss = model(inputs, targets)
            (loss / len(batches) if len(batches) > 1 else loss).backward()
        total += loss.item()
    return total / len(batches)


def in_memory(settings: Settings) -> dict[str, Any]:
    """Train with everything in memory: bf16 parameters with fp32 masters, or fp32 parameters; fused AdamW."""
    torch.manual_seed(0)
    model = GPT(settings.shape).to(settings.device)
    is_fp32 = settings.dtype == "fp32"
    masters = [p if is_fp32 else torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    moments = [(torch.zeros_like(w), torch.zeros_like(w), torch.zeros((), device=w.device)) for w in masters]
    if settings.dtype == "bf16":
        model = model.bfloat16()
    batches = batches_of(settings)

    @torch.no_grad()
    def update(p: torch.Tensor, w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, n: torch.Tensor) -> None:
        gradient = p.grad.float() if w.grad is None else w.grad
        n += 1
        torch._fused_adamw_([w], [gradient], [m], [v], [], [n], lr=1e-4, **FUSED_ADAMW)
        if w is not p:
            p.copy_(w)
        p.grad = w.grad = None

    def step() -> float:
        loss = backward_of(settings, model, batches)
        if settings.clip:
            for p, w in zip(model.parameters(), masters, strict=True):
                w.grad = p.grad.float()
            torch.nn.utils.clip_grad_norm_(masters, settings.clip)
        for p, w, moment in zip(model.parameters(), masters, moments, strict=True):
            update(p, w, *moment)
        return loss

    return time_steps(settings, step, lambda: None)


def open_store(settings: Settings, folder: Path) -> tiered.Store:
    """Open the store of ``settings`` in ``folder``; over a throttled device where it says so."""
    if not settings.throttle:
        return tiered.Store(folder, dram=settings.dram, device_memory=settings.device_memory, durable=settings.durable)
    folder.mkdir(mode=0o700)
    limit = float(parse_bytes(settings.throttle))
    device = ThrottledDevice(
        open_device(folder, "auto"),
        read_bytes_per_s=limit,
        write_bytes_per_s=limit,
        is_half_duplex=settings.half_duplex,
    )
    root = empty_root(uuid.uuid4().bytes, 1)
    catalog = SqliteCatalog.create(folder / "catalog.db", root) if settings.durable else None
    return tiered.Store._from_parts(Parts(Arena(parse_bytes(settings.dram)), [device], catalog))


class Counters:
    """The store's counters and the system's, from ``start`` on."""

    def __init__(self, store: tiered.Store) -> None:
        self._store = store
        self.start()

    def start(self) -> None:
        """Count from here; blocks until nothing is on its way, so that both have seen the same."""
        self._settle()
        self._before, self._io_before = self._store.statistics(), io_bytes()

    def _settle(self) -> None:
        if self._store.durable:
            self._store.wait_for_commit()
        working_set = self._store.working_set
        with working_set.condition:
            while working_set.num_writing or working_set.num_arriving:
                working_set.condition.wait(1)

    def read(self, num_steps: int, num_params: int) -> dict[str, Any]:
        """Return bytes per parameter and step, waits, and how far both counters are apart."""
        self._settle()
        now, before = self._store.statistics(), self._before
        read = now.read_bytes - before.read_bytes
        catalog = now.catalog_write_bytes - before.catalog_write_bytes
        written = now.write_bytes - before.write_bytes + catalog
        io = [after - first for after, first in zip(io_bytes(), self._io_before, strict=True)]
        old = {moved.name: moved for moved in before.recorder.moved}
        moved = num_steps * num_params
        return {
            "read_bytes_per_param": read / moved,
            "write_bytes_per_param": written / moved,
            "io_read_bytes_per_param": io[0] / moved,
            "io_write_bytes_per_param": io[1] / moved,
            "counters_agree": all(map(agree, (read, written), io)),
            "moved_bytes_per_param": {
                now.name: [
                    (now.read_bytes - (old[now.name].read_bytes if now.name in old else 0)) / moved,
                    (now.write_bytes - (old[now.name].write_bytes if now.name in old else 0)) / moved,
                ]
                for now in now.recorder.moved
            }
            | {"catalog": [0.0, catalog / moved]},
            "wait_seconds": {
                reason: (seconds - before.recorder.waits_of(CALLER).get(reason, 0.0)) / num_steps
                for reason, seconds in now.recorder.waits_of(CALLER).items()
            },
            "update_seconds": (now.recorder.seconds_of("update bucket") - before.recorder.seconds_of("update bucket"))
            / num_steps,
            "device_busy_seconds": (now.recorder.device_busy_seconds - before.recorder.device_busy_seconds) / num_steps,
            "peak_dram_bytes": now.peak_bytes,
        }

    def held(self, num_params: int) -> dict[str, Any]:
        """Return the persistent bytes per parameter, of parameters and of state: [all of it, what is held]."""
        space, entries = self._store.working_set.space, self._store.working_set.entries
        found = {}
        for name, prefix in (("parameters", "model/parameters/"), ("state", "model/state/")):
            sizes = [
                (space.round_up(entry.nbytes), entry.held) for entry in entries.used() if entry.name.startswith(prefix)
            ]
            found[name] = [sum(n for n, _ in sizes) / num_params, sum(n for n, held in sizes if held) / num_params]
        return found


def agree(ours: int, system: int) -> bool:
    """Return whether two byte counts are within 2 %, or so small that anything else of the process hides them."""
    return abs(ours - system) <= max(COUNTERS_AGREE * max(ours, system), COUNTERS_NOISE_NBYTES)


def io_bytes() -> tuple[int, int]:
    """Return the bytes that this process has made the system read from and write to devices so far."""
    counters = psutil.Process().io_counters()
    return counters.read_bytes, counters.write_bytes


def through_tiers(settings: Settings, folder: Path) -> dict[str, Any]:
    """Train through a store in ``folder``."""
    if not settings.digests:
        checked_transfer.digest = lambda memory, seed: 0
    torch.manual_seed(0)
    hold = settings.hold if settings.hold == "auto" else parse_bytes(settings.hold)
    with open_store(settings, folder) as store:
        with tiered.construct(store):
            model = GPT(settings.shape)
        param_dtype = settings.param_dtype if settings.dtype == "bf16" else None
        model = tiered.shard(
            model, store, param_dtype=param_dtype, hold=hold, activations=settings.activations,
            device=settings.device, update_on=settings.update_on,
        )  # fmt: skip
        optimizer = tiered.AdamW(model.parameters(), lr=1e-4, update=settings.update, state=settings.state, **ADAMW)
        batches = batches_of(settings)
        counters = Counters(store)

        def step() -> float:
            loss = backward_of(settings, model, batches)
            if settings.clip:
                tiered.clip_grad_norm_(model, settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            if settings.durable:
                store.commit(wait=False)
            return loss

        result = time_steps(settings, step, counters.start)
        result |= counters.read(max(1, settings.steps - 1), settings.shape.num_params)
        result["device"] = on_device(store)
        result["persistent_bytes_per_param"] = counters.held(settings.shape.num_params)
        bound = Bound(
            median_s(result),
            waits=result["wait_seconds"],
            update_s=result["update_seconds"],
            read_bytes=result["read_bytes_per_param"] * settings.shape.num_params,
            write_bytes=result["write_bytes_per_param"] * settings.shape.num_params,
            device_busy_s=result["device_busy_seconds"],
            bandwidth=None if settings.throttle else profiled_bandwidth([folder]),
        )
    return result | {
        "stall": bound.stall, "bound_s": bound.seconds, "step_over_bound": bound.step_over_bound,
        "verdict": bound.verdict,
    }  # fmt: skip


def on_device(store: tiered.Store) -> dict[str, Any]:
    """Return the counters of the store's device and its allocator; {} for the CPU."""
    counters = store.statistics().recorder.device
    if counters is None:
        return {}
    return dataclasses.asdict(counters) | {"allocator_peak_bytes": torch.accelerator.max_memory_allocated()}


@contextmanager
def simulated_device(settings: Settings) -> Iterator[None]:
    """Enable the tests' device, if that is where the model computes; races end the run."""
    if settings.device != "sim":
        yield
        return
    from tests.accelerator import simulated
    from tests.accelerator.registrar import SimulatedRegistrar

    simulated.enable()
    add_registrar("sim", SimulatedRegistrar())
    simulated.set_memory_limit(parse_bytes(settings.card) if settings.card else None)
    try:
        yield
        if found := simulated.races():
            raise SystemExit(f"races: {found}")
    finally:
        simulated.disable()


def main() -> None:
    folder, settings = Path(sys.argv[1]), Settings(**json.loads(sys.argv[2]))
    if settings.threads:
        torch.set_num_threads(settings.threads)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with simulated_device(settings):
        result = in_memory(settings) if settings.kind == "memory" else through_tiers(settings, folder)
    result |= {
        "num_params": settings.shape.num_params,
        "resident_bytes": resident,  # once everything is imported
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))


def describe(result: dict[str, Any]) -> str:
    """Return a run's bytes and memory in one line, for people."""
    parts = [f"peak RSS {format_bytes(result['peak_rss_bytes'])}"]
    if "read_bytes_per_param" in result:
        parts = [
            f"read {result['read_bytes_per_param']:.2f} (/proc/self/io {result['io_read_bytes_per_param']:.2f}), "
            f"written {result['write_bytes_per_param']:.2f} ({result['io_write_bytes_per_param']:.2f}) B/param, "
            f"stall {result['stall']:.1%}, step/bound {result['step_over_bound']:.2f}; {result['verdict']}",
            *parts,
        ]
    return ", ".join(parts)


def check(result: dict[str, Any]) -> None:
    """Raise SystemExit unless the device's counters and the system's say the same."""
    if not result.get("counters_agree", True):
        raise SystemExit(
            f"the device's counters and /proc/self/io differ by more than {COUNTERS_AGREE:.0%}: {describe(result)}"
        )


if __name__ == "__main__":
    main()
