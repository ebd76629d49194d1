"""The answers that accelerate wants of an optimizer which its ``prepare()`` is to leave as it is.

accelerate wraps optimizers in one of its own, which copies their whole state to a device and back, and lets no step and
no ``zero_grad`` through while it accumulates gradients. Here the state stays, and that rule is kept.
"""

from __future__ import annotations

import sys
from typing import Any

from tiered.errors import UsageError

__all__ = ["AccelerateGate"]


class AccelerateGate:
    """An optimizer that counts as prepared by accelerate; accelerate is never imported here."""

    step_was_skipped = False  # accelerate asks after each step
    _gradient_state: Any = None  # accelerate's, once its prepare() has seen this optimizer

    @property
    def optimizer(self) -> Any:
        """The optimizer within, which accelerate looks for to find its scheduler: this one."""
        return self

    @property
    def _is_accelerate_prepared(self) -> bool:
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Take note: accelerate's prepare() sets this. Raises UsageError for fp16, whose scaler steps for it."""
        state: Any = sys.modules["accelerate.state"]
        if state.AcceleratorState().mixed_precision == "fp16":
            raise UsageError(
                'Accelerator(mixed_precision="fp16") steps optimizers through a scaler of its own; expected "no", and'
                " tiered.shard(param_dtype=torch.bfloat16), or tiered.GradScaler in a loop of your own"
            )
        self._gradient_state = state.GradientState()

    @property
    def is_held_back(self) -> bool:
        """Whether accelerate accumulates gradients now: ``step`` and ``zero_grad`` do nothing then."""
        return self._gradient_state is not None and not self._gradient_state.sync_gradients
