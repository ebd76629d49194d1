"""The long run: bandwidth by the second, with the drive's temperature and wear beside it where they can be read.

A drive's fast cache ends, and a hot drive slows down, only after seconds or minutes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tiered.bytes.device.mount import Mount
from tiered.doctor.drive import BlockDevice, find_block_device
from tiered.measure.pattern import Pattern
from tiered.measure.rounds import run_round
from tiered.measure.scratch_file import ScratchFile

__all__ = ["Smart", "SustainedRate", "read_smart", "sustain"]

_SMARTCTL_S = 10.0  # it may hang with the drive


@dataclass(frozen=True, slots=True)
class SustainedRate:
    """One window of a long run."""

    op: str
    at_s: float  # the window's end, from the start of its op
    gb_per_s: float
    temperature_c: float | None  # None: not readable


@dataclass(frozen=True, slots=True)
class Smart:
    """The answers of smartctl for one disk: wear and distress. None: not readable."""

    disk: str
    temperature_c: float | None
    percentage_used: int | None
    available_spare: int | None  # percent
    written_nbytes: int | None
    media_errors: int | None
    warning_temperature_minutes: int | None


def sustain(
    scratch: ScratchFile,
    pattern: Pattern,
    *,
    seconds: float,
    window_s: float,
    mount: Mount | None,
    check: Callable[[], object],
) -> list[SustainedRate]:
    """Run ``pattern`` on the scratch file for ``seconds`` without a pause; return its windows.

    ``check()`` is called after each window, and may raise to end it.
    """
    samples: list[SustainedRate] = []
    start = last = time.perf_counter()
    moved = _moved(scratch)

    def note() -> None:
        nonlocal last, moved
        now, now_moved = time.perf_counter(), _moved(scratch)
        rate = (now_moved - moved) / (now - last) / 1e9
        samples.append(SustainedRate(pattern.op, now - start, rate, _temperature(mount)))
        last, moved = now, now_moved

    def watch() -> bool:
        note()
        check()
        return True

    run_round(
        scratch.device,
        scratch.memory,
        replace(pattern, seconds=seconds, max_nbytes=None),
        watch=watch,
        watch_every_s=window_s,
    )
    if time.perf_counter() - last > window_s / 2:
        note()
    return samples


def read_smart(disks: tuple[str, ...]) -> list[Smart]:
    """Return smartctl's answers for ``disks``; nothing where it is not installed or may not look."""
    program = shutil.which("smartctl")
    found = (_smart(program, disk) for disk in disks) if program else ()
    return [smart for smart in found if smart is not None]


def _smart(program: str, disk: str) -> Smart | None:
    try:
        output = subprocess.run(
            [program, "--json", "--all", f"/dev/{disk}"], capture_output=True, text=True, timeout=_SMARTCTL_S
        ).stdout
        log = json.loads(output)["nvme_smart_health_information_log"]
        written = log.get("data_units_written")
        return Smart(
            disk=disk,
            temperature_c=log.get("temperature"),
            percentage_used=log.get("percentage_used"),
            available_spare=log.get("available_spare"),
            written_nbytes=None if written is None else written * 512_000,  # units of a thousand sectors
            media_errors=log.get("media_errors"),
            warning_temperature_minutes=log.get("warning_temp_time"),
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _moved(scratch: ScratchFile) -> int:
    statistics = scratch.device.statistics()
    return statistics.read_bytes + statistics.write_bytes


def _temperature(mount: Mount | None) -> float | None:
    found = find_block_device(mount) if mount else None
    return None if found is None else _hottest(found)


def _hottest(device: BlockDevice) -> float | None:
    all_of = [device.temperature_c, *(_hottest(part) for part in device.parts)]
    return max((one for one in all_of if one is not None), default=None)
