"""Conversions: what transformers does to tensors between a checkpoint and a model, carried out when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.core_model_loading import ConversionOps, WeightConverter

from tiered.errors import TieredError, UsageError

__all__ = ["refusing_by_name"]


@contextmanager
def refusing_by_name(what: str, next_step: str) -> Iterator[None]:
    """Turn an error of a conversion in this block into a UsageError that names the conversion."""
    try:
        yield
    except Exception as error:
        name = _name_of_conversion(error)
        if not name:
            raise
        reason = str(error) if isinstance(error, TieredError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{what}: {name} of transformers cannot be carried out tensor by tensor ({reason}); {next_step}"
        ) from error


def _name_of_conversion(error: BaseException) -> str:
    """Return the conversion in which ``error`` was raised, and the names that it is about; "" for another error."""
    names: dict[str, None] = {}
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, ConversionOps):
            names[type(owner).__name__] = None
        loading = trace.tb_frame.f_locals.get("loading_info")
        for text in getattr(loading, "conversion_errors", {}).values():  # transformers has kept the error's text alone
            names[text.rpartition("Error: ")[2].partition(". ")[0]] = None
        if isinstance(owner, WeightConverter):
            names[f"{' + '.join(owner.source_patterns)} -> {' + '.join(owner.target_patterns)}"] = None
        trace = trace.tb_next
    return " ".join(reversed(names))
