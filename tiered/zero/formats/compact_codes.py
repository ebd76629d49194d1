"""The codes of ``state="compact"``: 8 bits a moment, and 8 bits more for the master of a bf16 parameter.

Moments are kept per block of 128 elements from the start of the parameter's piece. All NaN are kept as the same one:
payload and sign of an operation's NaN differ from one processor and library to the other.

Each code works by torch operations, or on the CPU by the kernels it was made with: the same bits in a fifth of the
time. The kernels are tried once per process. Where they give other bits than torch, or cannot be compiled, the codes
work by torch operations, and one warning says so.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tiered.units import round_up
from tiered.zero.formats.codes import Field, MomentCode
from tiered.zero.formats.compact_kernels import CompactKernels, compile_compact_kernels
from tiered.zero.formats.tile_scratch import Dither, TileRows, TileScratch

__all__ = ["BLOCK_NUMEL", "COMPACT_BITS", "COMPACT_COST", "INSTALL_COMPACT", "PositiveMoment8", "Remainder8",
           "SignedMoment8", "agree", "kept_bytes", "take_root", "tried_compact_kernels"]  # fmt: skip

_log = logging.getLogger("tiered")

BLOCK_NUMEL = 128
"""Elements that share the scale of an 8-bit moment: 0.03 bytes each, and within a row of any usual matrix."""

_HALF = 0x8000  # a unit of the bf16, in units of the fp32
_INFINITY = 0x7F800000  # bits of fp32; above it are NaN
_SMALLEST_SQUARE = 32  # code: 2**-28 of the largest; its root is 1/16384


class Remainder8:
    """8 of the other 16 bits: a master of 24 bits, rounded by the dither. ``hi`` is that master's nearest bf16.

    Masters keep 15 bits of fraction. Smaller changes by an update, weight decay above all, are right on average. NaN
    and infinity stay as they are.
    """

    fields: tuple[Field, ...] = (Field(torch.int8),)

    def __init__(self, kernels: CompactKernels | None) -> None:
        self._kernels = kernels

    def decode(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows) -> torch.Tensor:
        """Return the masters: (hi << 16) + (remainder << 8)."""
        if (kernels := self._kernels) is not None and hi.is_cpu:
            master = rows.master[: hi.numel()]
            kernels.decode_master(hi.data_ptr(), fields[0].data_ptr(), master.data_ptr(), hi.numel())
            return master
        n = hi.numel()
        master, work = rows.master[:n], rows.work.view(torch.int32)[:n]
        master.copy_(hi)
        work.copy_(fields[0])
        master.view(torch.int32).add_(work, alpha=256)
        return master

    def encode(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows, dither: Dither) -> None:
        """Round to 24 bits; half a unit of ``hi`` is added on the way, which the sign bit of the remainder undoes."""
        if (kernels := self._kernels) is not None and hi.is_cpu:
            addresses = (rows.master.data_ptr(), hi.data_ptr(), fields[0].data_ptr())
            kernels.encode_master(*addresses, hi.numel(), *dither.numbers(0, kernels.fill_numbers))
            return
        n = hi.numel()
        bits, work = rows.master.view(torch.int32)[:n], rows.work.view(torch.int32)[:n]
        torch.bitwise_and(bits, 0x7FFFFFFF, out=work)
        if int(work.amax()) > _INFINITY:  # rounding would make infinity of some NaN, and zero of others
            bits.masked_fill_(work.gt_(_INFINITY).bool(), 0x7FC00000)
        dither.add(bits, 0, bits=8, offset=_HALF)
        torch.bitwise_right_shift(bits, 8, out=work)
        fields[0].copy_(work)
        fields[0].bitwise_xor_(-128)
        hi.view(torch.int16).copy_(bits.bitwise_right_shift_(16))

    def attach(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows) -> None:
        """Keep the difference to 24 bits; ``hi`` is off by no more than half a unit."""
        n = hi.numel()
        work = rows.work.view(torch.int32)[:n]
        work.copy_(hi.view(torch.int16))
        work.bitwise_left_shift_(16)
        torch.sub(rows.master.view(torch.int32)[:n], work, out=work)
        fields[0].copy_(work.add_(128).clamp_(-_HALF, _HALF - 1).bitwise_right_shift_(8))

    def clear(self, fields: Sequence[torch.Tensor]) -> None:
        fields[0].zero_()


class SignedMoment8:
    """Code c in [-127, 127] and the block's largest magnitude s: value = s * c * |c| / 127**2.

    The square spaces the codes closely near zero: the smallest is 1/16129 of the largest. A NaN or infinity makes the
    whole block NaN: its codes are zero.
    """

    fields: tuple[Field, ...] = (Field(torch.int8), Field(torch.float32, BLOCK_NUMEL))
    is_raw = False

    def __init__(self, kernels: CompactKernels | None) -> None:
        self._kernels = kernels

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
        code, scale = fields
        if self._kernels is not None and out.is_cpu:
            self._kernels.decode_signed(code.data_ptr(), scale.data_ptr(), out.data_ptr(), code.numel())
            return out[: code.numel()]
        padded, blocks = _padded(code, out)
        torch.abs(padded, out=work[: padded.numel()])
        padded.mul_(work[: padded.numel()])
        blocks.mul_((scale / 16129)[:, None])
        return out[: code.numel()]

    def encode(
        self, values: torch.Tensor, fields: Sequence[torch.Tensor], work: torch.Tensor, dither: Dither, stream: int
    ) -> None:
        """Write codes and scales. In [256, 512) fp32 has 15 bits of fraction: there rounding is a shift of the bits."""
        code, scale = fields
        if (kernels := self._kernels) is not None and values.is_cpu:
            addresses = (values.data_ptr(), code.data_ptr(), scale.data_ptr())
            kernels.encode_signed(*addresses, code.numel(), *dither.numbers(stream, kernels.fill_numbers))
            return
        padded = _whole_blocks(values)
        work = work[: padded.numel()]
        blocks = work.view(-1, BLOCK_NUMEL)
        torch.abs(padded, out=work)
        torch.amax(blocks, 1, out=scale)
        blocks.mul_((16129 / scale.clamp(min=1e-30))[:, None])
        take_root(work).copysign_(padded).add_(384)  # c + 384, unrounded
        bits = work.view(torch.int32)
        dither.add(bits, stream, bits=15, offset=128 << 15)
        is_finite = scale.isfinite()
        if not is_finite.all():
            scale.masked_fill_(scale.isnan(), math.nan)
            bits.view(-1, BLOCK_NUMEL).masked_fill_(is_finite.logical_not_()[:, None], 0)
        code.copy_(bits.bitwise_right_shift_(15)[: code.numel()])


class PositiveMoment8:
    """Code c in [0, 255] and the block's largest value s: value_bits = s_bits - ((255 - c) << 20).

    Eight codes an octave. A value below 2**-28 of the largest is kept as that much, never as zero: a step divides by
    its root, which is then no smaller than the smallest magnitude that ``SignedMoment8`` keeps, in units of the largest
    of each. Where the block's largest is zero, all are. A NaN makes the whole block NaN: its codes are 255.
    """

    fields: tuple[Field, ...] = (Field(torch.uint8), Field(torch.float32, BLOCK_NUMEL))
    is_raw = False

    def __init__(self, kernels: CompactKernels | None) -> None:
        self._kernels = kernels

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
        code, scale = fields
        if self._kernels is not None and out.is_cpu:
            self._kernels.decode_positive(code.data_ptr(), scale.data_ptr(), out.data_ptr(), code.numel())
            return out[: code.numel()]
        padded, blocks = _padded(code, out.view(torch.int32))
        padded.bitwise_left_shift_(20)
        blocks.add_((scale.view(torch.int32) - (255 << 20))[:, None])
        padded.clamp_(min=0)
        return out[: code.numel()]

    def encode(
        self, values: torch.Tensor, fields: Sequence[torch.Tensor], work: torch.Tensor, dither: Dither, stream: int
    ) -> None:
        """Write codes and scales; the largest of a block is exact."""
        code, scale = fields
        if (kernels := self._kernels) is not None and values.is_cpu:
            addresses = (values.data_ptr(), code.data_ptr(), scale.data_ptr())
            kernels.encode_positive(*addresses, code.numel(), *dither.numbers(stream, kernels.fill_numbers))
            return
        padded = _whole_blocks(values)
        bits = work.view(torch.int32)[: padded.numel()]
        blocks = bits.view(-1, BLOCK_NUMEL)
        torch.amax(padded.view(-1, BLOCK_NUMEL), 1, out=scale)
        scale.add_(0.0)  # the positive one of two zeros: either may come out as the largest
        torch.sub(padded.view(torch.int32).view(-1, BLOCK_NUMEL), scale.view(torch.int32)[:, None], out=blocks)
        dither.add(bits, stream, bits=20, offset=255 << 20)
        is_nan = scale.isnan()
        if is_nan.any():
            scale.masked_fill_(is_nan, math.nan)
            blocks.masked_fill_(is_nan[:, None], 255 << 20)
        code.copy_(bits.bitwise_right_shift_(20).clamp_(_SMALLEST_SQUARE, 255)[: code.numel()])


def take_root(values: torch.Tensor) -> torch.Tensor:
    """Make ``values`` (numel,) fp32 their square roots, rounded to nearest as the kernels do; return them.

    On the CPU NumPy takes them, by the processor's own instruction: torch asks MKL, and a fifth of MKL's roots are off
    by one bit on processors of AMD.
    """
    if not values.is_cpu:
        return values.sqrt_()
    roots = values.numpy()
    np.sqrt(roots, out=roots)
    return values


def _padded(code: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy ``code`` to the start of ``out``, with zeros up to whole blocks; return both shapes: flat, (blocks, 128)."""
    padded = out[: round_up(code.numel(), BLOCK_NUMEL)]
    padded[: code.numel()].copy_(code)
    padded[code.numel() :].zero_()
    return padded, padded.view(-1, BLOCK_NUMEL)


def _whole_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with the rest of its last block in the row of scratch, set to zero."""
    numel = round_up(values.numel(), BLOCK_NUMEL)
    padded = values.as_strided((numel,), (1,))
    padded[values.numel() :].zero_()
    return padded


# -- trial of the kernels ----------------------------------------------------------------------------------------------


COMPACT_COST = 'an update with state="compact" takes about five times the CPU time, 10 instead of 2 ns per parameter'
INSTALL_COMPACT = "pip install 'tiered[compact]'"
"""The command that installs numba, which compiles the kernels."""

_TRIAL_NUMEL = 1024 + 512 + 77  # a part of a block among them; so few that torch starts no threads for them


@functools.cache
def tried_compact_kernels() -> CompactKernels | None:
    """Compile the kernels of compact state and try them, once; None, with one warning, where there are none to use.

    Blocks for a second or two. Thread-safe: of two calls at once both may compile. Raises nothing.
    """
    try:
        kernels = compile_compact_kernels()
    except ModuleNotFoundError as error:
        reason = f"its kernels need numba ({_first_line(error)}): {INSTALL_COMPACT}"
    except Exception as error:  # numba's, llvmlite's, the loader's: whatever it is, there are no kernels
        reason = f"numba cannot compile its kernels ({_first_line(error)}): pip install --upgrade numba"
    else:
        wrong = [name for name, made_by in COMPACT_BITS.items() if not agree(made_by, kernels)]
        if not wrong:
            return kernels
        reason = f"its kernels give other bits than torch {torch.__version__} here: {', '.join(wrong)}"
    _log.warning('state="compact" works by torch operations, %s; %s', reason, COMPACT_COST)
    return None


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


def kept_bytes(code: Remainder8 | MomentCode, values: torch.Tensor, scratch: TileScratch) -> list[torch.Tensor]:
    """Return the bytes that ``code`` keeps of ``values``, (numel,) fp32, and those of the values decoded from them."""
    numel, rows, dither = values.numel(), scratch.rows(small=True), scratch.dither
    fields = [torch.empty(field.length(numel), dtype=field.dtype, device="cpu") for field in code.fields]
    if isinstance(code, Remainder8):
        hi = torch.empty(numel, dtype=torch.bfloat16, device="cpu")
        rows.master[:numel].copy_(values)
        code.encode(hi, fields, rows, dither)
        kept = [hi, *fields, code.decode(hi, fields, rows)]
    else:
        row = rows.spare[0]
        row[:numel].copy_(values)
        code.encode(row[:numel], fields, rows.work, dither, 1)
        kept = [*fields, code.decode(fields, row, rows.work)]
    return [each.view(torch.uint8) for each in kept]


def _tried(code: Remainder8 | MomentCode, values: torch.Tensor) -> list[torch.Tensor]:
    numel = (_TRIAL_NUMEL // 1024 + 1) * 1024
    scratch = TileScratch(torch.empty(TileScratch.nbytes(numel) // 4, dtype=torch.float32, device="cpu"), numel)
    scratch.dither.aim("weight", 1, 3072)
    return kept_bytes(code, values, scratch)


COMPACT_BITS: dict[str, Callable[[CompactKernels | None], list[torch.Tensor]]] = {
    "master": lambda kernels: _tried(Remainder8(kernels), _numbers()),
    "signed": lambda kernels: _tried(SignedMoment8(kernels), _numbers()),
    "positive": lambda kernels: _tried(PositiveMoment8(kernels), _numbers().abs_()),
}
