"""`tiered bench --device`: the measurements of a compute device, in order, and their piece of the report.

The link between DRAM and the device comes before the drives, so that a device that does not work is known at once.
Swapping over all three tiers comes after them, for its bound needs their rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tiered.bytes.device.profile import LinkProfile
from tiered.doctor.description import MachineDescription
from tiered.errors import CapacityError, UsageError
from tiered.measure.copying import COPY_TITLE, LinkRates, measure_copies
from tiered.measure.display import BenchDisplay
from tiered.measure.report import BenchReport, ComputeDeviceReport
from tiered.measure.scratch_folders import ScratchFolders
from tiered.measure.settings import BenchSettings
from tiered.measure.three_tiers import BOUND_TITLE, measure_three_tiers
from tiered.zero.compute_device import named_device

__all__ = ["ComputeDevice", "accelerator_of", "link_profile_of"]


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


class ComputeDevice:
    """Measures one compute device for ``report``, beside all of its directories.

    ``check`` is called between rounds and may raise to end it all.
    """

    def __init__(
        self,
        report: BenchReport,
        device: torch.device,
        display: BenchDisplay,
        check: Callable[[], object],
        folders: ScratchFolders,
        *,
        engine: str = "auto",
    ) -> None:
        self._report = report
        self._device = device
        self._display = display
        self._check = check
        self._engine = engine
        self._folders = folders

    @property
    def _settings(self) -> BenchSettings:
        return self._report.settings

    def measure_link(self, directory: str) -> None:
        """Measure copies both ways, with a store in ``directory`` that writes nothing; blocks. Raises TieredError."""
        settings = self._settings
        self._display.now(f"copies to and from {self._device}", done=0.0)
        with self._current():
            (folder,) = self._folders.make([directory])
            rows, why_pageable = measure_copies(
                folder,
                self._device,
                block_nbytes=settings.copy_nbytes,
                round_nbytes=settings.copies_nbytes,
                memory_nbytes=settings.copy_memory_nbytes,
                rounds=settings.rounds,
                engine=self._engine,
                check=self._check,
            )
        link = LinkRates.of(rows)
        self._report.compute_device = ComputeDeviceReport(
            str(self._device), self._device.type, why_pageable, rows, link
        )
        locked = "page-locked DRAM" if why_pageable is None else f"pageable DRAM: {why_pageable}"
        self._display.line(f"\n{self._device} through {locked}, beside torch's copies of its own tensors\n{COPY_TITLE}")
        self._display.line("\n".join(map(str, rows)))
        self._display.line(str(link))

    def measure_swap(self) -> None:
        """Measure swapping over three tiers, by a store over all directories, once these were measured; blocks."""
        settings, report = self._settings, self._report
        assert report.compute_device is not None
        self._check()
        self._display.now(f"all three tiers at once, {self._device} at the top", done=0.99)
        with self._current():
            row = report.compute_device.swap = measure_three_tiers(
                self._folders.make_profiled(report),
                self._device,
                directory="+".join(one.directory for one in report.directories),
                link=report.compute_device.link,
                drives=report.swapping,
                tensor_nbytes=settings.tier_tensor_nbytes,
                total_nbytes=settings.tensors_nbytes,
                dram_nbytes=settings.tier_dram_nbytes,
                rounds=settings.tensor_rounds,
                engine=self._engine,
                check=self._check,
            )
        self._display.line(f"\nall three tiers at once, as a step does; bound: min(PCIe, NVMe)\n{BOUND_TITLE}\n{row}")

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Have the device be the current one, which torch page-locks its tensors for; remove the folders then."""
        try:
            with torch.accelerator.device_index(self._device.index):
                yield
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"{self._device} has too little free memory for the bench: {error}") from error
        finally:
            self._folders.remove()


def link_profile_of(report: ComputeDeviceReport, machine: MachineDescription, measured_at: str) -> LinkProfile:
    """Return the profile to keep beside those of the drives."""
    return LinkProfile(
        device=report.device_type,
        in_bytes_per_s=report.link.in_gb_per_s * 1e9,
        out_bytes_per_s=report.link.out_gb_per_s * 1e9,
        duplex=report.link.duplex,
        measured_at=measured_at,
        kernel=machine.kernel,
    )
