"""NVMe-tiered tensor storage, and training of PyTorch models larger than memory on top of it."""

from tiered.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    DeviceError,
    LeaseError,
    StepAbandonedError,
    StoreLostError,
    TieredError,
    UsageError,
)
from tiered.store.store import Store
from tiered.zero import (
    SGD,
    AdamW,
    GradScaler,
    Lion,
    accumulate,
    clip_grad_norm_,
    construct,
    micro_batches,
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
    "StepAbandonedError",
    "Store",
    "StoreLostError",
    "TieredError",
    "UsageError",
    "__version__",
    "accumulate",
    "clip_grad_norm_",
    "construct",
    "micro_batches",
    "shard",
    "unsharded",
]

__version__ = "0.1.0"
