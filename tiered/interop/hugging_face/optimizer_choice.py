"""The optimizer of ``tiered`` that TrainingArguments ask for by the names of transformers."""

from __future__ import annotations

from typing import Any

from tiered.errors import UsageError
from tiered.interop.hugging_face.arguments import Arguments
from tiered.zero import SGD, AdamW, Lion
from tiered.zero.optimizer.streaming_optimizer import StreamingOptimizer

__all__ = ["choose_optimizer"]

_KNOWN = ("adamw_torch_fused", "adamw_torch", "sgd", "lion_32bit")
_OF_SGD = ("momentum", "dampening", "nesterov")
_IN_8_BITS = 'tiered keeps moments in 8 bits where it is told Arguments(state="compact") beside optim="adamw_torch"'


def choose_optimizer(training: Any, tiered: Arguments, given: Any) -> tuple[type, dict[str, Any]]:
    """Return the class and the keyword arguments for the optimizer, but for groups and store.

    ``given`` is ``optimizer_cls_and_kwargs`` of the Trainer, with a class of ``tiered``. The bits are those of
    ``optim="adamw_torch_fused"``, transformers' default, also under "adamw_torch". Raises UsageError for a name or a
    class that ``tiered`` has no optimizer for.
    """
    own = {"update": tiered.update, "state": tiered.state}
    if given is not None:
        cls, options = given
        if not (isinstance(cls, type) and issubclass(cls, StreamingOptimizer)):
            raise UsageError(
                f"optimizer_cls_and_kwargs=({getattr(cls, '__name__', cls)}, ...) keeps its state in memory; expected"
                " tiered.AdamW, tiered.SGD or tiered.Lion"
            )
        return cls, own | options
    name, betas = str(getattr(training.optim, "value", training.optim)), (training.adam_beta1, training.adam_beta2)
    options = {"lr": training.learning_rate}
    if name in ("adamw_torch_fused", "adamw_torch"):
        return AdamW, own | options | {"betas": betas, "eps": training.adam_epsilon}
    if name == "lion_32bit":
        return Lion, own | options | {"betas": betas}
    if name == "sgd":
        return SGD, own | options | _sgd_options(training.optim_args)
    raise UsageError(
        f"TrainingArguments(optim={name!r}): tiered has no such optimizer; expected one of"
        f" {', '.join(map(repr, _KNOWN))}{f': {_IN_8_BITS}' if '8bit' in name else ''}"
    )


def _sgd_options(text: str | None) -> dict[str, Any]:
    """Return the options in ``optim_args``, such as "momentum=0.9,nesterov=true"."""
    found: dict[str, Any] = {}
    for item in (text or "").replace(" ", "").split(","):
        name, _, value = item.partition("=")
        if name and name not in (*_OF_SGD, "weight_decay"):
            raise UsageError(f"TrainingArguments(optim_args={text!r}): expected some of {', '.join(_OF_SGD)}")
        if name in _OF_SGD:  # the weight decay is that of the groups
            found[name] = value.lower() in ("true", "1", "yes") if name == "nesterov" else float(value)
    return found
