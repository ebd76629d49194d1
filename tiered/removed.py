"""Names, options and keys of the last release that this release lacks, each with what to use instead.

A name stays in this table for one release, and whoever still uses the name gets an error that says the way on.
"""

from __future__ import annotations

from tiered.errors import UsageError

__all__ = ["REMOVED", "refuse_removed", "removed_option"]

_LARGER_BATCH = (
    "one larger batch moves the same bytes in less time, with activations='swap' where its activations do not fit"
)
_TRAINER = (
    "use tiered.hf.Trainer, or tiered.hf.TrainerMixin before a Trainer of your own, whose create_optimizer returns the"
    " optimizer where a run goes on that has other groups than transformers makes"
)

REMOVED = {
    "tiered.micro_batches": _LARGER_BATCH,
    "tiered train --micro-batches": "a larger --batch moves the same bytes in less time, with --activations swap where"
    " its activations do not fit",
    "tiered.hf.Arguments(micro_batches=)": "a larger per_device_train_batch_size moves the same bytes in less time,"
    " with activations='swap' where its activations do not fit",
    "tiered.cli": "the command is tiered.tools.cli.main",
    "tiered.hf.Callback": _TRAINER,
    "tiered.hf.Factory": _TRAINER,
    "tiered import --deepspeed": "docs/deepspeed.md has a table of the configuration's keys and what each becomes",
    "tiered bench --plot": "--json FILE has every figure, for a plotting program",
}
"""Name, option or key as the caller writes it -> what to use instead."""


def refuse_removed(name: str) -> None:
    """Raise UsageError with what to use instead if ``name`` is in ``REMOVED``; return if not."""
    if (instead := REMOVED.get(name)) is not None:
        raise UsageError(f"{name} was removed after 0.2.0: {instead}")


def removed_option(error: Exception) -> str | None:
    """Return what to use instead of the option that typer's ``error`` does not know; None for any other error."""
    command = getattr(getattr(error, "ctx", None), "info_name", "")
    name = f"tiered {command} {getattr(error, 'option_name', '')}"
    return f"{name} was removed after 0.2.0: {REMOVED[name]}" if name in REMOVED else None
