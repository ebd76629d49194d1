"""The learning rate schedules of DeepSpeed, as text of a function of the step: same values, step by step.

``step`` counts the optimizer steps that are done: 0 gives the rate of the first. DeepSpeed's own counter is one behind,
so that its first two steps of a warm-up have the least rate. The formulas are those of its lr_schedules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered.errors import UsageError
from tiered.interop.deepspeed_keys import DROPPED, REFUSED
from tiered.interop.deepspeed_section import ConfigSection

__all__ = ["RateSchedule", "read_schedule"]


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """The lines of the body of ``rate(step)``, and the rate that torch's LambdaLR multiplies: never 0."""

    name: str
    body: tuple[str, ...]
    base: float
    needs_total: bool = False  # the body uses ``total``, the steps of the whole training, which the program counts


def read_schedule(section: ConfigSection, lr: float) -> RateSchedule:
    """Return the schedule of ``section``; ``lr``: the optimizer's own rate. Raises UsageError for other schedules."""
    name = section.word("type", "")
    make = {
        "WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay, "WarmupCosineLR": _warmup_cosine, "OneCycle": _one_cycle,
        "LRRangeTest": _range_test,
    }.get(name)  # fmt: skip
    if make is None:
        raise UsageError(
            f"{section.path}.type: no formula for {name!r}; expected WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle"
            " or LRRangeTest, or a scheduler of torch's that you register with the store"
        )
    params = section.inner("params")
    body, base, needs_total = make(params, lr)
    params.conclude()
    section.conclude()
    if base <= 0:
        raise UsageError(f"{section.path}: {name} has a largest rate of {base}; expected more than 0")
    return RateSchedule(name, tuple(body), base, needs_total)


_Made = tuple[Sequence[str], float, bool]
_Maker = Callable[[ConfigSection, float], _Made]


def _warmed(params: ConfigSection) -> tuple[int, str]:
    """Return the steps of a warm-up and the text of its progress at ``step - 1``, from 0 to 1."""
    steps = max(2, int(params.number("warmup_num_steps", 1000, auto=("warmup_steps", 0))))
    if params.word("warmup_type", "log") == "linear":
        return steps, f"(step - 1) / {steps}"
    return steps, f"math.log(step) / math.log({steps})"


def _span(least: float, most: float, progress: str) -> str:
    return f"{most!r} * ({progress})" if least == 0 else f"{least!r} + {most - least!r} * ({progress})"


def _rise(params: ConfigSection, lr: float, most: float) -> tuple[list[str], float, int]:
    """Return the lines of a warm-up between two rates, the larger of them, and its steps."""
    least = params.number("warmup_min_lr", 0.0, auto=("the least rate", 0.0))
    most = params.number("warmup_max_lr", most, auto=("learning_rate", lr))
    steps, progress = _warmed(params)
    lines = ["if step == 0:", f"    return {least!r}", f"if step <= {steps}:"]
    return [*lines, f"    return {_span(least, most, progress)}"], most, steps


def _warmup(params: ConfigSection, lr: float) -> _Made:
    lines, most, _ = _rise(params, lr, lr)
    return [*lines, f"return {most!r}"], most, False


def _total(params: ConfigSection) -> tuple[str, bool]:
    """Return the text of the steps of the whole training, and whether the program has to count them."""
    if params.is_auto("total_num_steps"):
        params.fill("total_num_steps", "max_steps", "epochs * steps of an epoch")
        return "total", True
    if not params.has("total_num_steps"):
        raise UsageError(f"{params.path}.total_num_steps is missing: DeepSpeed refuses that, too")
    return str(int(params.number("total_num_steps", 0))), False


def _warmup_decay(params: ConfigSection, lr: float) -> _Made:
    lines, most, steps = _rise(params, lr, 0.001)
    total, needs_total = _total(params)
    least = params.fixed_number("warmup_min_lr", 0.0)
    decay = f"max(0.0, ({total} - step + 1) / max(1.0, {total} - {steps}))"
    return [*lines, f"return {_span(least, most, decay)}"], most, needs_total


def _warmup_cosine(params: ConfigSection, lr: float) -> _Made:
    least = params.number("warmup_min_ratio", 0.0)
    floor = params.number("cos_min_ratio", 0.0001)
    steps, progress = _warmed(params)
    total, needs_total = _total(params)
    lines = [
        "if step == 0:",
        "    return 0.0",
        f"if step <= {steps}:",
        f"    return {lr!r} * ({_span(least, 1.0, progress)})",
        f"progress = min(1.0, (step - {steps}) / max(1, {total} - {steps}))",
        "cosine = (1 + math.cos(math.pi * progress)) / 2",
        f"return {lr!r} * max(0.0, {floor!r} + {1.0 - floor!r} * cosine)",
    ]
    return lines, lr, needs_total


def _one_cycle(params: ConfigSection, lr: float) -> _Made:
    least, most = params.number("cycle_min_lr", None), params.number("cycle_max_lr", None)
    first = params.number("cycle_first_step_size", 2000)
    second = params.number("cycle_second_step_size", first)
    decay, every = params.number("decay_lr_rate", 0.0), params.number("decay_step_size", 0)
    for name in ("cycle_first_stair_count", "cycle_second_stair_count"):
        if params.number(name, 0):
            raise UsageError(f"{params.path}.{name}: no formula for stairs; expected 0")
    if params.switch("cycle_momentum", True):
        params.note(REFUSED, "the schedule changes the rate alone: betas stay as they are", "cycle_momentum")
    for name in ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate"):
        if params.has(name):
            params.number(name, 0.0)
            params.note(DROPPED, "of cycle_momentum", name)
    total = first + second
    lines = [
        f"if step <= {total!r}:",
        f"    place = step % {total!r}",
        f"    height = place / {first!r}",
        f"    if place > {first!r}:",
        f"        height = ({total!r} - place) / {second!r}",
        f"    return {_span(least, most, 'height')}",
        f"return {least!r} / (1 + {decay!r} * (step - {total!r}) / {every!r})" if decay and every
        else f"return {least!r}",
    ]  # fmt: skip
    return lines, max(least, most), False


def _range_test(params: ConfigSection, lr: float) -> _Made:
    least = params.number("lr_range_test_min_lr", 1e-3)
    size = params.number("lr_range_test_step_size", 2000)
    growth = params.number("lr_range_test_step_rate", 1.0)
    is_stairs = params.switch("lr_range_test_staircase", False)
    interval = f"step // {size!r}" if is_stairs else f"step / {size!r}"
    return [f"return {least!r} * (1 + {growth!r} * ({interval}))"], least, False
