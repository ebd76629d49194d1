"""NVMe-tiered tensor storage, and training of PyTorch models larger than memory on top of it."""

import importlib
from typing import TYPE_CHECKING, Any

from tiered.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    DeviceError,
    LeaseError,
    RankLostError,
    StepAbandonedError,
    StoreLostError,
    TieredError,
    UsageError,
)
from tiered.removed import refuse_removed

if TYPE_CHECKING:
    from tiered import hf
    from tiered.interop.saving import save_pretrained
    from tiered.interop.sharded_state_dict import sharded_state_dict
    from tiered.loader.resumable import resumable
    from tiered.store.rows.row_sparse_adam import RowSparseAdam
    from tiered.store.store import Store
    from tiered.zero import (
        SGD,
        AdamW,
        GradScaler,
        Lion,
        accumulate,
        clip_grad_norm_,
        construct,
        shard,
        unsharded,
    )

__all__ = [
    "SGD",
    "AdamW",
    "CapacityError",
    "ClosedError",
    "CorruptionError",
    "DeadlineError",
    "DeviceError",
    "GradScaler",
    "LeaseError",
    "Lion",
    "RankLostError",
    "RowSparseAdam",
    "StepAbandonedError",
    "Store",
    "StoreLostError",
    "TieredError",
    "UsageError",
    "__version__",
    "accumulate",
    "clip_grad_norm_",
    "construct",
    "hf",
    "resumable",
    "save_pretrained",
    "shard",
    "sharded_state_dict",
    "unsharded",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import names that need torch at their first use: the command line must answer without it."""
    if name.startswith("_") or name not in __all__:
        refuse_removed(f"tiered.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {
        "RowSparseAdam": "tiered.store.rows.row_sparse_adam",
        "Store": "tiered.store.store",
        "resumable": "tiered.loader.resumable",
        "save_pretrained": "tiered.interop.saving",
        "sharded_state_dict": "tiered.interop.sharded_state_dict",
    }
    if name == "hf":
        found: Any = importlib.import_module("tiered.hf")
    else:
        found = getattr(importlib.import_module(homes.get(name, "tiered.zero")), name)
    if name == "Store":
        importlib.import_module("tiered.zero")  # which knows how to carry a run over to another number of ranks
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "hf"})
