"""Floor 5: training through the tiers: units, parameters that fault in, gradients, the streaming optimizer."""

from tiered.store.store import Store
from tiered.zero.construct import construct
from tiered.zero.gradients.clipping import GradScaler, clip_grad_norm_
from tiered.zero.optimizer.streaming_optimizer import SGD, AdamW, Lion
from tiered.zero.reshard import carry_over
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

Store.carried_over = staticmethod(carry_over)  # a store is below, and knows no model
