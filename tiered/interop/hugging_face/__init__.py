"""Hugging Face: models of transformers in and out of a store. Names are imported at their first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered.interop.hugging_face.loading import from_pretrained

__all__ = ["from_pretrained"]

_HOMES = {"from_pretrained": "tiered.interop.hugging_face.loading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(_HOMES[name]), name)
    return found
