"""The trial of compact state's kernels, once per process: where they give the bits of torch, they are used.

Where they do not, or cannot be compiled, the codes work by torch operations, and one warning says so.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from tiered.zero.formats.codes import MomentCode
from tiered.zero.formats.compact_codes import PositiveMoment8, Remainder8, SignedMoment8
from tiered.zero.formats.compact_kernels import CompactKernels, compile_compact_kernels, give_back_compiler
from tiered.zero.formats.tile_scratch import TileScratch

__all__ = ["COMPACT_COST", "INSTALL_COMPACT", "Trial", "compact_trial", "tried_compact_kernels"]

COMPACT_COST = 'an update with state="compact" takes about five times the CPU time, 10 instead of 2 ns per parameter'
INSTALL_COMPACT = "pip install 'tiered[compact]'"
"""The command that installs numba, which compiles the kernels."""

_log = logging.getLogger(__name__)

_TRIAL_NUMEL = 1024 + 512 + 77  # a part of a block among them; so few that torch starts no threads for them


class Trial(NamedTuple):
    """The result of a trial: the kernels to use, or the reason why there are none; ``wall_s``: seconds it took."""

    kernels: CompactKernels | None
    reason: str
    wall_s: float


@functools.cache
def compact_trial() -> Trial:
    """Compile the kernels of compact state and try them; blocks for a second or two, once.

    Thread-safe: of two calls at once both may compile. Raises nothing.
    """
    begun_s = time.monotonic()
    kernels: CompactKernels | None = None
    try:
        compiled = compile_compact_kernels()
    except ModuleNotFoundError as error:
        reason = f"its kernels need numba ({_first_line(error)}): {INSTALL_COMPACT}"
    except Exception as error:  # numba's, llvmlite's, the loader's: whatever it is, there are no kernels
        reason = f"numba cannot compile its kernels ({_first_line(error)}): pip install --upgrade numba"
    else:
        wrong = [name for name, made_by in COMPACT_BITS.items() if not agree(made_by, compiled)]
        reason = f"its kernels give other bits than torch {torch.__version__} here: {', '.join(wrong)}" if wrong else ""
        kernels = None if wrong else compiled
    give_back_compiler()
    return Trial(kernels, reason, time.monotonic() - begun_s)


@functools.cache
def tried_compact_kernels() -> CompactKernels | None:
    """Return the kernels that compact state uses in this process; None, with one warning, where there are none."""
    result = compact_trial()
    if result.kernels is None:
        _log.warning('state="compact" works by torch operations, %s; %s', result.reason, COMPACT_COST)
    else:
        _log.debug("the kernels of compact state were compiled and tried in %.1f s", result.wall_s)
    return result.kernels


def agree(made_by: Callable[[CompactKernels | None], list[torch.Tensor]], kernels: CompactKernels) -> bool:
    """Return whether torch and ``kernels`` keep the same numbers as the same bits, and see the same numbers in them."""
    return all(torch.equal(a, b) for a, b in zip(made_by(None), made_by(kernels), strict=True))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).partition("\n")[0]


# -- the tried operations ----------------------------------------------------------------------------------------------


def _numbers() -> torch.Tensor:
    """Return fp32 numbers of all sizes, NaN and infinity among them, and some blocks of likely ones."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (_TRIAL_NUMEL,), dtype=torch.int64, device="cpu", generator=generator)
    likely = torch.randn(_TRIAL_NUMEL, dtype=torch.float32, device="cpu", generator=generator).mul_(1e-3)
    is_likely = torch.arange(_TRIAL_NUMEL, dtype=torch.int64, device="cpu") % 1024 < 512
    return torch.where(is_likely, likely, bits.to(torch.int32).view(torch.float32))


def _scratch() -> TileScratch:
    numel = (_TRIAL_NUMEL // 1024 + 1) * 1024
    return TileScratch(torch.empty(TileScratch.nbytes(numel) // 4, dtype=torch.float32, device="cpu"), numel)


def _fields_of(code: Remainder8 | MomentCode) -> list[torch.Tensor]:
    return [torch.empty(field.length(_TRIAL_NUMEL), dtype=field.dtype, device="cpu") for field in code.fields]


def _compact_master(kernels: CompactKernels | None) -> list[torch.Tensor]:
    """Return the fields and decoded values (as bits) of all these numbers."""
    code, scratch = Remainder8(kernels), _scratch()
    scratch.dither.aim("master", 1, 3072)
    rows = scratch.rows(small=True)
    hi = torch.empty(_TRIAL_NUMEL, dtype=torch.bfloat16, device="cpu")
    fields = _fields_of(code)
    rows.master[:_TRIAL_NUMEL].copy_(_numbers())
    code.encode(hi, fields, rows, scratch.dither)
    decoded = code.decode(hi, fields, rows)
    return [hi.view(torch.int16), *fields, decoded.view(torch.int32)]


def _moment(name: str, code: SignedMoment8 | PositiveMoment8, values: torch.Tensor) -> list[torch.Tensor]:
    scratch = _scratch()
    scratch.dither.aim(name, 1, 3072)
    rows = scratch.rows(small=True)
    fields = _fields_of(code)
    row = rows.spare[0]
    row[:_TRIAL_NUMEL].copy_(values)
    code.encode(row[:_TRIAL_NUMEL], fields, rows.work, scratch.dither, 1)
    decoded = code.decode(fields, row, rows.work)
    return [fields[0], fields[1].view(torch.int32), decoded.view(torch.int32)]


COMPACT_BITS: dict[str, Callable[[CompactKernels | None], list[torch.Tensor]]] = {
    "master": _compact_master,
    "signed": lambda kernels: _moment("signed", SignedMoment8(kernels), _numbers()),
    "positive": lambda kernels: _moment("positive", PositiveMoment8(kernels), _numbers().abs_()),
}
