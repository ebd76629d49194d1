"""`tiered import --deepspeed`: a Python program with the calls that a DeepSpeed configuration stands for.

All that is printed is the program: the keys that no call takes are comments at its end.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiered.interop.deepspeed_config import DeepSpeedConfig, read_deepspeed_config
from tiered.interop.deepspeed_keys import DROPPED, FILLED, REFUSED, UNKNOWN, KeyNote

__all__ = ["import_deepspeed", "program_lines"]

_WIDTH = 80
_INTRODUCTION = {
    FILLED: "read with a value that is not in it",
    DROPPED: "dropped, and no number of the training depends on it",
    REFUSED: "refused: the training is another one without it",
    UNKNOWN: "unknown",
}


def import_deepspeed(file: Path) -> int:
    """Print the program that ``file`` stands for and return 0; blocks. Raises UsageError where there is none."""
    print("\n".join(program_lines(read_deepspeed_config(file), file.name)))
    return 0


def program_lines(config: DeepSpeedConfig, name: str) -> list[str]:
    """Return the lines of the program, a module with one function ``train``; ``name`` is the configuration's."""
    shown = name if name.isprintable() and "\\" not in name and '"' not in name else "a DeepSpeed configuration"
    lines = [f'"""The training that {shown} describes, by tiered."""', ""]
    body = config.schedule.body if config.schedule else ()
    lines += ["import math", ""] if any("math." in line for line in body) else []
    lines += ["import torch", "", "import tiered", ""]
    lines += _constants(config)
    if config.schedule:
        lines += ["", "", *_rate(config)]
    lines += ["", "", *_train(config)]
    notes = list(_notes(config.notes, shown))
    return [*lines, "", "", *notes] if notes else lines


def _constants(config: DeepSpeedConfig) -> Iterator[str]:
    if config.directories == ("runs/deepspeed",):
        yield from _comment("A store needs files, too: for what does not fit DRAM, and for commits.")
    yield f"DIRECTORIES = ({', '.join(map(json.dumps, config.directories))},)"
    if config.dram_nbytes is None:
        yield from _comment("None: half of the memory that is free.")
        yield "DRAM = None"
        return
    yield from _comment(
        f"Bytes, as many as DeepSpeed keeps there: {config.dram_terms}. tiered needs only the root unit, the two"
        ' largest units and three buckets of state: a smaller size such as "8GiB" is refused with the least that works.'
    )
    yield f"DRAM = {config.dram_nbytes:_}"


def _rate(config: DeepSpeedConfig) -> Iterator[str]:
    schedule = config.schedule
    assert schedule is not None
    yield f"def rate(step{', total' if schedule.needs_total else ''}):"
    yield f'    """Return the learning rate after ``step`` steps: {schedule.name}."""'
    yield from (f"    {line}" for line in schedule.body)


def _train(config: DeepSpeedConfig) -> Iterator[str]:
    yield "def train("
    yield "    build_model, loader, epochs=1, *, directories=DIRECTORIES, dram=DRAM"
    yield "):"
    yield '    """Train ``build_model()``, which returns its loss; return the steps.'
    yield ""
    size = f" of {config.micro_batch} samples" if config.micro_batch else ""
    yield f"    ``loader``: a DataLoader of micro-batches{size},"
    yield "    each the arguments of forward."
    yield "    Interrupted, it goes on from the last step that was committed."
    yield '    """'
    yield "    with tiered.Store(*directories, dram=dram) as store:"
    yield "        with tiered.construct(store):"
    yield "            model = build_model()"
    dtype = "torch.bfloat16" if config.dtype == "bf16" else "torch.float32"
    yield "        model = tiered.shard("
    yield f"            model, store, stage={config.stage}, param_dtype={dtype},"
    yield f'            activations="{config.activations}",'
    yield "        )"
    yield f"        optimizer = tiered.{config.optimizer}("
    yield "            model.parameters(),"
    yield from (f"            {name}={value!r}," for name, value in config.hyperparameters.items())
    yield f'            update="{config.update}",'
    yield "        )"
    yield "        loader = tiered.resumable(loader)"
    yield '        store.register("loader", loader)'
    if config.schedule:
        total = ""
        if config.schedule.needs_total:
            yield f"        total = epochs * (len(loader) // {config.window})"
            total = ", total"
        yield "        scheduler = torch.optim.lr_scheduler.LambdaLR("
        yield f"            optimizer, lambda step: rate(step{total}) / {config.schedule.base!r}"
        yield "        )"
        yield '        store.register("scheduler", scheduler)'
    if config.loss_scale:
        yield "        device = next(model.parameters()).device.type"
        yield "        scaler = tiered.GradScaler("
        yield f"            init_scale={config.loss_scale.init_scale!r},"
        yield f"            growth_interval={config.loss_scale.growth_interval},"
        yield "        )"
        yield '        store.register("scaler", scaler)'
    yield '        step = store.resume().get("step", 0)'
    yield "        for _ in range(loader.epoch, epochs):"
    yield from (f"            {line}" for line in _steps(config))
    yield "    return step"


def _steps(config: DeepSpeedConfig) -> Iterator[str]:
    yield f"for window in zip(*[iter(loader)] * {config.window}):"
    if config.loss_scale:
        yield "    with torch.autocast(device, torch.float16):"
        yield "        losses = tiered.micro_batches(model, window)"
        yield "    scaler.scale(torch.stack(losses).mean()).backward()"
        if config.clip:
            yield "    scaler.unscale_(optimizer)"
    else:
        yield "    losses = tiered.micro_batches(model, window)"
        yield "    torch.stack(losses).mean().backward()"
    if config.clip:
        yield f"    tiered.clip_grad_norm_(model, {config.clip!r})"
    if config.loss_scale:
        yield "    scale = scaler.get_scale()"
        yield "    scaler.step(optimizer)"
        yield "    scaler.update()"
    else:
        yield "    optimizer.step()"
    yield "    optimizer.zero_grad()"
    if config.schedule and config.loss_scale:
        yield "    if scaler.get_scale() >= scale:  # not after overflows"
        yield "        scheduler.step()"
    elif config.schedule:
        yield "    scheduler.step()"
    yield "    step += 1"
    yield '    store.commit({"step": step}, wait=False)'


def _notes(notes: Sequence[KeyNote], name: str) -> Iterator[str]:
    """Yield comments on the keys that no call takes, those of one reason together."""
    for outcome, words in _INTRODUCTION.items():
        reasons: dict[str, list[str]] = {}
        for note in notes:
            if note.outcome == outcome and note.key not in reasons.get(note.reason, ()):
                reasons.setdefault(note.reason, []).append(note.key)
        if reasons:
            yield from _comment(f"Of {name}, {words}:")
        for reason, keys in reasons.items():
            yield from _comment(f"{', '.join(map(_printable, keys))}: {reason}", indent="    ", first="  - ")


def _printable(key: str) -> str:
    return key if key.isprintable() else ascii(key)


def _comment(text: str, *, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"# {first}", subsequent_indent=f"# {indent}", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
