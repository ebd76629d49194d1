"""StepBatches: the batches of one optimizer step, which run unit by unit where the model allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiered.errors import UsageError

__all__ = ["StepBatches"]

_log = logging.getLogger("tiered")


class StepBatches:
    """The batches of a step, then their losses until each was asked for.

    ``choice``: True, False, or "auto", where the first refusal of a model has all later windows run one batch after
    another, with one line in the log.
    """

    def __init__(self, choice: bool | str) -> None:
        self._choice = choice
        self._batches: Sequence[Any] = ()
        self._losses: list[torch.Tensor] = []

    def begin(self, batches: Sequence[Any]) -> None:
        """Take the batches of the next step."""
        self._batches, self._losses = (batches if len(batches) > 1 and self._choice is not False else ()), []

    @property
    def is_open(self) -> bool:
        """Whether the next loss comes from here."""
        return bool(self._batches or self._losses)

    def next_loss(self, run: Callable[[list[Any]], list[torch.Tensor]], undo: Callable[[], None]) -> Any:
        """Return the loss of the next batch; the first call has ``run`` do the forwards and backwards of all.

        None where the model was refused and ``choice`` is "auto": ``undo`` has taken back what there was of the step.
        """
        if self._batches:
            batches, self._batches = list(self._batches), ()
            try:
                self._losses = run(batches)
            except UsageError as error:
                if self._choice is True:
                    raise
                self._choice = False
                undo()
                _log.info("batches of one step run one after another from now on: %s", error)
                return None
        return self._losses.pop(0)
