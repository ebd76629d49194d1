"""Floor 4: training through the tiers: units, parameters that fault in, gradients, the streaming optimizer."""

from tiered.zero.budget import smallest_budget
from tiered.zero.construct import construct
from tiered.zero.gradients import clip_grad_norm_
from tiered.zero.optimizer import AdamW
from tiered.zero.shard import shard
from tiered.zero.unsharded import accumulate, unsharded

__all__ = ["AdamW", "accumulate", "clip_grad_norm_", "construct", "shard", "smallest_budget", "unsharded"]
