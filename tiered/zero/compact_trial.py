"""The trial of compact state's kernels, once per process: where they give the bits of torch, they are used.

Where they do not, or cannot be compiled, compact_codes.py works by torch operations, and one warning says so.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import NamedTuple

import torch

from tiered.zero.compact_codes import PositiveMoment8, Remainder8, SignedMoment8
from tiered.zero.compact_kernels import CompactKernels, compile_compact_kernels
from tiered.zero.tile_scratch import TileScratch

__all__ = ["COST", "Trial", "trial", "tried_kernels"]

COST = 'an update with state="compact" takes about five times the CPU time, 10 instead of 2 ns per parameter'

_log = logging.getLogger(__name__)

_TRIAL_NUMEL = 1024 + 512 + 77  # a part of a block among them; so few that torch starts no threads for them


class Trial(NamedTuple):
    """What came of the trial: the kernels to use, or the reason why there are none; ``wall_s``: what it took."""

    kernels: CompactKernels | None
    reason: str
    wall_s: float


@functools.cache
def trial() -> Trial:
    """Compile the kernels and try them; blocks for a second or two, and returns the same from then on.

    Thread-safe: of two calls at once both may compile. Raises nothing.
    """
    begun_s = time.monotonic()
    try:
        kernels: CompactKernels | None = compile_compact_kernels()
        reason = ""
    except Exception as error:  # numba's, llvmlite's, the loader's: whatever it is, there are no kernels
        kernels, reason = None, f"numba cannot compile them: {str(error).strip() or repr(error)}".partition("\n")[0]
    if kernels is not None and (wrong := [name for name in _CODES if not _agree(name, kernels)]):
        kernels, reason = None, f"they give other bits than torch {torch.__version__} here: {', '.join(wrong)}"
    return Trial(kernels, reason, time.monotonic() - begun_s)


@functools.cache
def tried_kernels() -> CompactKernels | None:
    """Return the kernels that compact state uses in this process; None, with one warning, where there are none."""
    result = trial()
    if result.kernels is None:
        _log.warning("the kernels of compact state are not used, %s: %s", result.reason, COST)
    else:
        _log.debug("the kernels of compact state were compiled and tried in %.1f s", result.wall_s)
    return result.kernels


_CODES = ("master", "signed", "positive")


def _agree(name: str, kernels: CompactKernels) -> bool:
    """Whether torch and ``kernels`` keep the same numbers as the same bits, and see the same numbers in them."""
    return all(torch.equal(a, b) for a, b in zip(_bits(name, None), _bits(name, kernels), strict=True))


def _bits(name: str, kernels: CompactKernels | None) -> list[torch.Tensor]:
    """Return the fields and decoded values (as bits) of numbers of all sizes, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (_TRIAL_NUMEL,), generator=generator).to(torch.int32)
    likely = torch.randn(_TRIAL_NUMEL, generator=generator).mul_(1e-3)  # and some blocks of what there is most of
    values = torch.where(torch.arange(_TRIAL_NUMEL) % 1024 < 512, likely, bits.view(torch.float32))
    numel = (_TRIAL_NUMEL // 1024 + 1) * 1024
    scratch = TileScratch(torch.empty(TileScratch.nbytes(numel) // 4), numel)
    scratch.dither.aim(name, 1, 3072)
    rows = scratch.rows(small=True)
    if name == "master":
        code = Remainder8(kernels)
        hi = torch.empty(_TRIAL_NUMEL, dtype=torch.bfloat16)
        fields = [torch.empty(field.length(_TRIAL_NUMEL), dtype=field.dtype) for field in code.fields]
        rows.master[:_TRIAL_NUMEL].copy_(values)
        code.encode(hi, fields, rows, scratch.dither)
        decoded = code.decode(hi, fields, rows)
        return [hi.view(torch.int16), *fields, decoded.view(torch.int32)]
    moment = SignedMoment8(kernels) if name == "signed" else PositiveMoment8(kernels)
    fields = [torch.empty(field.length(_TRIAL_NUMEL), dtype=field.dtype) for field in moment.fields]
    row = rows.spare[0]
    row[:_TRIAL_NUMEL].copy_(values if name == "signed" else values.abs_())
    moment.encode(row[:_TRIAL_NUMEL], fields, rows.work, scratch.dither, 1)
    decoded = moment.decode(fields, row, rows.work)
    return [fields[0], fields[1].view(torch.int32), decoded.view(torch.int32)]
