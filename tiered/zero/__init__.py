"""Floor 5: training through the tiers: units, parameters that fault in, gradients, the streaming optimizer."""

from tiered.zero.construct import construct
from tiered.zero.gradients.clipping import GradScaler, clip_grad_norm_
from tiered.zero.optimizer.streaming_optimizer import SGD, AdamW, Lion
from tiered.zero.shard import shard
from tiered.zero.unsharded import accumulate, unsharded

__all__ = [
    "SGD",
    "AdamW",
    "GradScaler",
    "Lion",
    "accumulate",
    "clip_grad_norm_",
    "construct",
    "shard",
    "unsharded",
]
