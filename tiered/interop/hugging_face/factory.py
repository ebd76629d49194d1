"""Factory: a plain ``transformers.Trainer`` shards its model, and gets an optimizer of tiered, when it trains."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from tiered.errors import UsageError
from tiered.interop.hugging_face.arguments import Arguments
from tiered.interop.hugging_face.optimizer_choice import choose_optimizer
from tiered.interop.hugging_face.placement import place
from tiered.interop.hugging_face.refusal import refuse
from tiered.store.store import Store
from tiered.zero.optimizer.streaming_optimizer import StreamingOptimizer

__all__ = ["Factory"]


class Factory:
    """Makes the optimizer, for a Trainer that is not subclassed, and shards the model first where it is not.

    ``Trainer(optimizer_cls_and_kwargs=(tiered.hf.Factory, {"args": training_arguments, "tiered": Arguments(store)}))``,
    with an open store, which the caller closes. The groups are those that transformers makes for weight decay; update
    "backward" needs ``tiered.hf.Trainer``. Commits and resumes take ``callbacks=[tiered.hf.Callback(store)]``.
    """

    def __call__(self, model: nn.Module, *, args: Any, tiered: Arguments) -> StreamingOptimizer:
        """Return the optimizer. Raises UsageError for arguments that cannot be followed, as the Trainer does."""
        tiered = Arguments.of(tiered)
        if not isinstance(tiered.store, Store):
            raise UsageError(
                "tiered.hf.Factory with directories, and nobody to close their store; expected"
                " Arguments(store=tiered.Store(...)), or tiered.hf.Trainer"
            )
        if tiered.update == "backward":
            raise UsageError('tiered.hf.Factory with update="backward"; expected update="step", or tiered.hf.Trainer')
        refuse(args, tiered)
        place(model, tiered, tiered.store, args)
        cls, options = choose_optimizer(args, tiered)
        optimizer: StreamingOptimizer = cls(_decay_groups(model, args.weight_decay), store=tiered.store, **options)
        return optimizer


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the param groups that transformers makes: parameters that decay, and those that do not."""
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trained if name not in decayed], "weight_decay": 0.0},
    ]
