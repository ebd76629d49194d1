"""The trial of the kernels, once per process and kind: where they give the bits of torch, they are used.

Where they do not, or cannot be compiled, the codes work by torch operations, and one warning says so.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import torch

from tiered.bytes.kernel import give_back_compiler
from tiered.zero.formats.codes import NO_DITHER, MarkedRemainder, MasterCode, MomentCode, Remainder
from tiered.zero.formats.compact_codes import PositiveMoment8, Remainder8, SignedMoment8
from tiered.zero.formats.rules import AdamWRule, Hyperparameters
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.kernels.adamw_kernel import AdamWKernel, compile_adamw_kernel
from tiered.zero.kernels.compact_kernels import CompactKernels, compile_compact_kernels
from tiered.zero.kernels.exact_kernels import ExactKernels, compile_exact_kernels, torch_nan

__all__ = [
    "COMPACT_COST", "EXACT_COST", "Trial", "adamw_trial", "compact_trial", "exact_trial", "tried_adamw_kernel",
    "tried_compact_kernels", "tried_exact_kernels",
]  # fmt: skip

COMPACT_COST = 'an update with state="compact" takes about five times the CPU time, 10 instead of 2 ns per parameter'
EXACT_COST = "an exact update of bf16 parameters takes 3.7 instead of 1.8 ns of CPU time per parameter"

_log = logging.getLogger(__name__)

_TRIAL_NUMEL = 1024 + 512 + 77  # a part of a block among them; so few that torch starts no threads for them

K = TypeVar("K")


class Trial(NamedTuple, Generic[K]):
    """What came of a trial: the kernels to use, or the reason why there are none; ``wall_s``: what it took."""

    kernels: K | None
    reason: str
    wall_s: float


@functools.cache
def compact_trial() -> Trial[CompactKernels]:
    """Compile the kernels of compact state and try them; blocks for a second or two, once.

    Thread-safe: of two calls at once both may compile. Raises nothing.
    """
    return _tried(compile_compact_kernels, COMPACT_BITS)


@functools.cache
def exact_trial() -> Trial[ExactKernels]:
    """Compile the kernels of exact masters and try them; as ``compact_trial``, in less than a second."""
    return _tried(compile_exact_kernels, EXACT_BITS)


@functools.cache
def adamw_trial() -> Trial[AdamWKernel]:
    """Compile the kernel of exact AdamW and try it; as ``compact_trial``, in a second."""
    return _tried(lambda: compile_adamw_kernel(torch_nan()), ADAMW_BITS)


@functools.cache
def tried_compact_kernels() -> CompactKernels | None:
    """Return the kernels that compact state uses in this process; None, with one warning, where there are none."""
    return _said(compact_trial(), "compact state", COMPACT_COST)


@functools.cache
def tried_exact_kernels() -> ExactKernels | None:
    """Return the kernels of exact masters in this process; None, with one warning, where there are none."""
    return _said(exact_trial(), "exact state", EXACT_COST)


@functools.cache
def tried_adamw_kernel() -> AdamWKernel | None:
    """Return the kernel of exact AdamW in this process; None, with one warning, where there is none."""
    return _said(adamw_trial(), "exact AdamW", EXACT_COST)


def _tried(compile_them: Callable[[], K], bits: Mapping[str, Callable[[K | None], list[torch.Tensor]]]) -> Trial[K]:
    begun_s = time.monotonic()
    try:
        kernels: K | None = compile_them()
        reason = ""
    except Exception as error:  # numba's, llvmlite's, the loader's: whatever it is, there are no kernels
        kernels, reason = None, f"they cannot be compiled: {str(error).strip() or repr(error)}".partition("\n")[0]
    if kernels is not None and (wrong := [name for name, made_by in bits.items() if not agree(made_by, kernels)]):
        kernels, reason = None, f"they give other bits than torch {torch.__version__} here: {', '.join(wrong)}"
    give_back_compiler()
    return Trial(kernels, reason, time.monotonic() - begun_s)


def _said(result: Trial[K], whose: str, cost: str) -> K | None:
    if result.kernels is None:
        _log.warning("the kernels of %s are not used, %s: %s", whose, result.reason, cost)
    else:
        _log.debug("the kernels of %s were compiled and tried in %.1f s", whose, result.wall_s)
    return result.kernels


def agree(made_by: Callable[[K | None], list[torch.Tensor]], kernels: K) -> bool:
    """Whether torch and ``kernels`` keep the same numbers as the same bits, and see the same numbers in them."""
    return all(torch.equal(a, b) for a, b in zip(made_by(None), made_by(kernels), strict=True))


# -- what is tried -----------------------------------------------------------------------------------------------------


def _numbers() -> torch.Tensor:
    """Return fp32 numbers of all sizes, NaN and infinity among them, and some blocks of what there is most of."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (_TRIAL_NUMEL,), dtype=torch.int64, device="cpu", generator=generator)
    likely = torch.randn(_TRIAL_NUMEL, dtype=torch.float32, device="cpu", generator=generator).mul_(1e-3)
    is_likely = torch.arange(_TRIAL_NUMEL, dtype=torch.int64, device="cpu") % 1024 < 512
    return torch.where(is_likely, likely, bits.to(torch.int32).view(torch.float32))


def _scratch() -> TileScratch:
    return _scratch_of((_TRIAL_NUMEL // 1024 + 1) * 1024)


def _scratch_of(numel: int) -> TileScratch:
    return TileScratch(torch.empty(TileScratch.nbytes(numel) // 4, dtype=torch.float32, device="cpu"), numel)


def _fields_of(code: MasterCode | MomentCode) -> list[torch.Tensor]:
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


def _exact_master(kernels: ExactKernels | None) -> list[torch.Tensor]:
    """Return all that encoding writes and all that decoding does; a third of the first row is ties, NaN too."""
    code, rows = MarkedRemainder(kernels), _scratch().rows(small=False)
    bits = _numbers().view(torch.int32)
    bits[:1024:3].bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
    rows.master[:_TRIAL_NUMEL].copy_(bits.view(torch.float32))
    hi = torch.empty(_TRIAL_NUMEL, dtype=torch.bfloat16, device="cpu")
    fields = _fields_of(code)
    code.encode(hi, fields, rows, NO_DITHER)
    return [hi.view(torch.int16), *fields, code.decode(hi, fields, rows).view(torch.int32)]


def _exact_adamw(kernel: AdamWKernel | None) -> list[torch.Tensor]:
    """Return parameter and state, as bits, after updates of four rows by hyperparameters of several kinds."""
    generator = torch.Generator().manual_seed(1)

    def numbers(scale: float) -> torch.Tensor:
        """Return likely numbers, others from 2**-60 to 2**8, subnormal ones and zeros: (4096,) fp32."""
        found = torch.randn(4, 1024, dtype=torch.float32, device="cpu", generator=generator) * scale
        exponents = torch.randint(-60, 8, (1024,), dtype=torch.int64, device="cpu", generator=generator)
        found[1] = torch.ldexp(found[1] / scale, exponents.float())
        found[2].view(torch.int32).bitwise_and_(-0x7F800001)
        found[3, ::2] = 0
        return found.reshape(-1)

    rule, code, scratch = AdamWRule(), Remainder(), _scratch_of(4096)
    rows = scratch.rows(small=False)
    master = numbers(1e-2).view(torch.int32)
    master[::3] = (master[::3] & ~0xFFFF) | 0x8000
    hi = torch.empty(4096, dtype=torch.bfloat16, device="cpu")
    moments = [numbers(1e-3), numbers(1e-6).abs_()]
    state = [torch.empty(4096, dtype=torch.int16, device="cpu"), *moments]
    rows.master.copy_(master.view(torch.float32))
    code.encode(hi, [state[0], state[2]], rows, NO_DITHER)
    plain = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "maximize": False}
    other = {"lr": 3e-2, "betas": (0.3, 0.5), "eps": 1e-6, "weight_decay": 0.0, "maximize": True}
    found: list[torch.Tensor] = []
    for step, values, factor in ((1, plain, None), (2, other, 0.37), (1000, plain, 0.11), (1001, other, None)):
        gradient, hyper = numbers(1e-2).bfloat16(), Hyperparameters(step, values)
        scale = None if factor is None else torch.tensor(factor, dtype=torch.float32, device="cpu")
        if kernel is None:
            joined = code.decode(hi, [state[0], state[2]], rows)
            scaled = gradient.float() if scale is None else gradient.float().mul_(scale)
            for i in range(0, 4096, 16):  # of more than 16 at a time torch's operation starts its threads
                parts = [each[i : i + 16] for each in (joined, scaled, *moments)]
                rule.update(parts[0], parts[1], parts[2:], hyper, rows.work)
            code.encode(hi, [state[0], state[2]], rows, NO_DITHER)
        else:
            kernel.update(hi, gradient, state, scale, hyper, rows.work)
        found += [each.clone() for each in (hi.view(torch.int16), state[0], *(m.view(torch.int32) for m in moments))]
    return found


COMPACT_BITS: dict[str, Callable[[CompactKernels | None], list[torch.Tensor]]] = {
    "master": _compact_master,
    "signed": lambda kernels: _moment("signed", SignedMoment8(kernels), _numbers()),
    "positive": lambda kernels: _moment("positive", PositiveMoment8(kernels), _numbers().abs_()),
}
EXACT_BITS: dict[str, Callable[[ExactKernels | None], list[torch.Tensor]]] = {"masters": _exact_master}
ADAMW_BITS: dict[str, Callable[[AdamWKernel | None], list[torch.Tensor]]] = {"AdamW": _exact_adamw}
