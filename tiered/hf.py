"""tiered.hf: models and the Trainer of Hugging Face over a store. It needs the extra ``hf``.

Names are imported at their first use: a model is loaded without accelerate.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from tiered.removed import refuse_removed

if importlib.util.find_spec("transformers") is None:
    raise ModuleNotFoundError("tiered.hf needs transformers and accelerate: pip install 'tiered[hf]'")

if TYPE_CHECKING:
    from tiered.interop.hugging_face.arguments import Arguments
    from tiered.interop.hugging_face.model_files import from_pretrained
    from tiered.interop.hugging_face.trainer import Trainer, TrainerMixin

__all__ = ["Arguments", "Trainer", "TrainerMixin", "from_pretrained"]

_HOMES = {
    "Arguments": "tiered.interop.hugging_face.arguments",
    "Trainer": "tiered.interop.hugging_face.trainer",
    "TrainerMixin": "tiered.interop.hugging_face.trainer",
    "from_pretrained": "tiered.interop.hugging_face.model_files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        refuse_removed(f"tiered.hf.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(_HOMES[name]), name)
    return found
