"""The needs of a run, said before it starts: parameters, memory, space, bytes written, each of one rank.

Arithmetic over the sizes of the model and the free space of the file systems; nothing is opened or written.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from tiered.errors import CapacityError
from tiered.store.lifetime.opening import CATALOG_NBYTES, dram_budget
from tiered.tools.train.config import DTYPES, RunConfig, RunDials
from tiered.tools.train.task import GPT, Corpus
from tiered.units import KiB, MiB, divide_up, format_bytes, format_count
from tiered.zero.compute_device import describe_device
from tiered.zero.formats.budget import share_out_as_asked
from tiered.zero.formats.rules import AdamWRule
from tiered.zero.formats.state_layout import Layouts
from tiered.zero.layout import SegmentSpec, divide_into_units, lay_out
from tiered.zero.parameters.unit import dense_strides

__all__ = ["Plan", "SpaceNeed", "check_room", "multiplies_bf16_slowly"]

CONSTRUCT_BYTES_PER_PARAM = 4
"""Scratch space that the constructor's fp32 values pass through, until the process ends."""

IN_MEMORY_BYTES_PER_PARAM = 16
"""bf16 parameters and gradients, fp32 master and two moments; or all four in fp32. Activations come on top."""

_KEYS_PER_UNIT, _KEY_PADDING_NBYTES, _CATALOG_PAGES_NBYTES = 12, 5 * KiB, 128 * KiB
"""The keys of a unit of 4 M elements, a page and a row of the catalog for each, and the catalog's pages of a commit."""

_LONG_STEP_FLOP = 1e11  # a minute of such a loop
_MANY_BYTES = 10 * 10**12
"""Bytes that a run may write before it is worth a warning: one percent of a consumer drive's rated life."""

_CPU = torch.device("cpu")
_PLACES = {"auto": "the CPU or there, whichever is measured to be shorter", "cpu": "the CPU", "device": "it"}


SpaceNeed = tuple[str, int, int, int, str]
"""Space that a rank needs on a file system: (machine, device number, bytes, bytes free there, directories)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The forecast of one run; all byte counts are upper bounds, reached when no state stays in DRAM.

    Where there are several ranks they are of one rank, which has an N-th of every parameter.
    """

    config: RunConfig
    dials: RunDials
    directories: tuple[Path, ...]  # of this rank's store
    durable: bool
    first_step: int  # steps done before this process
    device: torch.device = _CPU  # where the model computes
    local_world: int = 1  # ranks of this machine, which divide the DRAM budget
    committed: tuple[Path, ...] = ()  # where the run lies that is gone on with, of rank 0
    before: int = 0  # ranks that have committed it last, where they were not as many

    @property
    def num_params(self) -> int:
        """The model's parameters."""
        return self.config.shape.num_params

    @property
    def num_own_params(self) -> int:
        """The parameters that one rank keeps, with their state."""
        return divide_up(self.num_params, self.config.world)

    @property
    def places(self) -> tuple[Path, ...]:
        """The directories as they are given: each rank's lie in them."""
        return self.directories if self.config.world == 1 else tuple(each.parent for each in self.directories)

    @property
    def rank_dram(self) -> int:
        """The DRAM budget of one rank, in bytes."""
        return self.dials.dram if self.config.world == 1 else self.dials.dram // self.local_world // MiB * MiB

    @property
    def step_flop(self) -> float:
        """Arithmetic operations of one step of one rank, what is computed a second time not counted.

        Per token 6 for each parameter and 12 x layers x width x context for attention (PaLM, arXiv:2204.02311, B).
        """
        shape = self.config.shape
        return self.config.rank_tokens_per_step * (
            6.0 * self.num_params + 12.0 * shape.layers * shape.width * shape.context
        )

    @property
    def state_bytes_per_param(self) -> float:
        """Persistent bytes, written once per step: the parameter, the rest of its master, two moments."""
        dtype, numel = DTYPES[self.config.dtype], 1 << 20
        layouts = Layouts(self.config.state, AdamWRule(), sizes_only=True)
        return dtype.itemsize + layouts.of(dtype).nbytes(numel) / numel

    @property
    def num_steps(self) -> int:
        """Steps left to do."""
        return max(0, self.dials.steps - self.first_step)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradients that wait for the end of a step; each micro-step may write each of them.

        They are whole on each rank where micro-steps add up before the ranks exchange them.
        """
        adds_up = self.config.update == "backward" and self.config.accumulate > 1
        num = self.num_params if adds_up else self.num_own_params if self.config.update == "step" else 0
        return num * DTYPES[self.config.dtype].itemsize

    @property
    def padding_nbytes(self) -> int:
        """Bytes of one step beside its tensors: the last page of each key, and the catalog's pages in a commit."""
        num_keys = _KEYS_PER_UNIT * (self.config.layers + 1) + (self.num_own_params >> 22)
        return _CATALOG_PAGES_NBYTES + _KEY_PADDING_NBYTES * num_keys

    @property
    def space_nbytes(self) -> int:
        """Bytes on the device: two sets of the bytes that a commit may replace, one where there are no commits.

        Files grow by an eighth at a time.
        """
        state = (2 if self.durable else 1) * self.state_bytes_per_param * 9 / 8
        return int((state + CONSTRUCT_BYTES_PER_PARAM) * self.num_own_params) + self.gradient_nbytes

    @property
    def step_write_nbytes(self) -> int:
        """Bytes one step writes."""
        state_nbytes = int(self.state_bytes_per_param * self.num_own_params)
        return state_nbytes + self.config.accumulate * self.gradient_nbytes + self.padding_nbytes

    @property
    def write_nbytes(self) -> int:
        """Bytes this process writes: the model as it is made, its first state if it starts from nothing, its steps."""
        made = CONSTRUCT_BYTES_PER_PARAM + (0.0 if self.first_step else self.state_bytes_per_param)
        if not self.first_step and DTYPES[self.config.dtype] != torch.float32:
            made += CONSTRUCT_BYTES_PER_PARAM  # the fp32 masters as the constructor made them
        padding_nbytes = (1 if self.first_step else 2) * self.padding_nbytes  # scratch has keys of its own
        return int(made * self.num_own_params) + padding_nbytes + self.num_steps * self.step_write_nbytes

    def check_space(self) -> None:
        """Raise CapacityError unless each file system has room for its share, files already there counted in."""
        check_room(self.space_needs())

    def space_needs(self, machine: str = "") -> list[SpaceNeed]:
        """Return what this rank needs on each file system; ``machine`` is any name of it."""
        groups: dict[int, list[Path]] = defaultdict(list)
        for directory in self.directories:
            groups[_existing(directory).stat().st_dev].append(directory)
        share = divide_up(self.space_nbytes, len(self.directories))
        needs = []
        for number, group in groups.items():
            needed = sum(max(0, share - _allocated_nbytes(directory)) for directory in group)
            needed += CATALOG_NBYTES if self.durable else 0
            needs.append((machine, number, needed, _free_nbytes(group[-1]), ", ".join(map(str, group))))
        return needs

    def check_budget(self) -> None:
        """Raise CapacityError unless the DRAM budget, less the bytes it is to hold, trains the model and is there.

        The message is that of ``tiered.shard``. No parameter gets bytes, and nothing is opened.
        """
        dram_budget(self.dials.dram)
        world = self.config.world
        with torch.device("meta"):
            model = GPT(self.config.shape)
        modules = divide_into_units(model, None)  # none of a GPT's lies inside another
        unit_of = {parameter: name for name, module in modules.items() for parameter in module.parameters()}
        units: dict[str, list[SegmentSpec]] = {"root": [], **{name: [] for name in modules}}
        for name, p in model.named_parameters():
            spec = SegmentSpec(name, tuple(p.shape), dense_strides(p), DTYPES[self.config.dtype], p.requires_grad)
            units[unit_of.get(p, "root")].append(spec)
        layouts = [lay_out(name, specs, world) for name, specs in units.items()]
        try:
            share_out_as_asked(layouts, self.rank_dram, self.dials.hold)
        except CapacityError as error:
            if world == 1:
                raise
            raise CapacityError(f"{error}; all of that for each of the {self.local_world} ranks here") from error

    def lines(self, corpus: Corpus) -> list[str]:
        """Return the plan for people."""
        config, dials = self.config, self.dials
        where = ", ".join(f"{each} ({format_bytes(_free_nbytes(each))} free)" for each in self.places)
        share, on_ranks, of_each, its_own = "", "", "", ""
        if config.world > 1:
            share = f", {format_bytes(self.rank_dram)} for each of the {self.local_world} ranks here"
            on_ranks, of_each, its_own = f" on {config.world} ranks", " for each rank", " of its own"
        each = divide_up(1000 * self.step_write_nbytes, len(self.directories))
        sets = f"{'two sets' if self.durable else 'one set'} of {self.state_bytes_per_param:.3g} bytes per parameter"
        start = f"from step {self.first_step}" if self.first_step else "from the start"
        extras = f", clip {config.clip}" if config.clip else ""
        extras += f", accumulate {config.accumulate}" if config.accumulate > 1 else ""
        files = "file" if corpus.num_files == 1 else "files"
        return [
            f"model   {format_count(self.num_params)} parameters: {config.layers} layers, width {config.width}, "
            f"{config.heads} heads, context {config.context}; {config.dtype}, {config.state} AdamW state",
            f"data    {corpus.name}: {corpus.num_files:,} {files}, {format_bytes(corpus.nbytes)}",
            f"job     {self.num_steps} steps {start}, each of {config.tokens_per_step:,} tokens"
            f"{on_ranks}; lr {config.lr:g}{extras}, update {config.update}, seed {config.seed}",
            f"memory  a DRAM budget of {format_bytes(dials.dram)}{share}; training in memory would need "
            f"{format_bytes(IN_MEMORY_BYTES_PER_PARAM * self.num_params)} and activations",
            *self._device_lines(),
            *(
                [f"ranks   carried over from {self.before} to {config.world}: tiered gc removes the old set"]
                if self.before
                else []
            ),
            f"space   {format_bytes(self.space_nbytes)}{of_each} ({sets}{its_own}) in {where}",
            f"writes  up to {format_bytes(self.write_nbytes)} in all{of_each}, {format_bytes(self.step_write_nbytes)} "
            f"per step, {format_bytes(each)} per 1,000 steps and directory",
        ]

    def _device_lines(self) -> list[str]:
        is_auto = self.dials.device == "auto"
        if self.device.type == "cpu":
            why = "this process has no accelerator" if self.dials.device_memory != 0 else "--device-memory is 0"
            return [f"device  the CPU: {why}"] if is_auto else []
        asked = self.dials.device_memory
        budget = "half of what is free or less" if asked is None else format_bytes(asked)
        return [
            f"device  {describe_device(self.device)}{', the accelerator here' if is_auto else ''}: {budget} of "
            f"its memory for tiered, activations on top; updates on {_PLACES[self.dials.update_on]}"
        ]

    def warnings(self) -> list[str]:
        """Return the warnings that the user should read before going on."""
        found = []
        is_bf16 = self.config.dtype == "bf16" and self.device.type == "cpu"
        if is_bf16 and self.step_flop > _LONG_STEP_FLOP and multiplies_bf16_slowly():
            found.append(
                "this CPU has no AVX-512, and torch multiplies bf16 matrices on it by a loop on one core, some 2 "
                "GFLOP/s: --dtype fp32 is many times faster here"
            )
        if self.write_nbytes > _MANY_BYTES:
            found.append(
                f"this run writes up to {format_bytes(self.write_nbytes)}, which wears the drives; the dials are "
                "--dram (more state stays in memory), --commit-every and --no-durable (held state is written less "
                "often) and --state (smaller state)"
            )
        return found


def check_room(needs: Iterable[SpaceNeed]) -> None:
    """Raise CapacityError unless each file system has room for all that ranks need on it."""
    groups: dict[tuple[str, int], list[SpaceNeed]] = defaultdict(list)
    for each in needs:
        groups[each[0], each[1]].append(each)
    for group in groups.values():
        needed, free = sum(each[2] for each in group), min(each[3] for each in group)
        if needed > free:
            raise CapacityError(
                f"not enough space for the run in {', '.join(each[4] for each in group)}: "
                f"it needs {format_bytes(needed)}, {format_bytes(free)} are free; "
                "choose another --store, a smaller model, or --no-durable (half the space)"
            )


def multiplies_bf16_slowly() -> bool:
    """Return whether torch has nothing but a plain loop for products of bf16 matrices on this CPU."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and not supported


def _existing(directory: Path) -> Path:
    """Return the directory, or the nearest one above that exists."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())


def _free_nbytes(directory: Path) -> int:
    return shutil.disk_usage(_existing(directory)).free


def _allocated_nbytes(directory: Path) -> int:
    if not directory.is_dir():
        return 0
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))
