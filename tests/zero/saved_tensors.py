"""What tests look at of a model's saved activations."""

from typing import Any

from torch import Tensor

from tests.models import batch_of_vectors
from tests.zero.training import Session
from tiered.zero.activations.swapped_activations import SwappedActivations

__all__ = ["WORDS", "engine_of", "swapped_of", "wide_vectors"]

WORDS = ("keep", "recompute", "swap", "auto")


def engine_of(session: Session) -> Any:
    return next(session.model.parameters()).segment.unit.engine  # type: ignore[attr-defined]


def swapped_of(session: Session) -> SwappedActivations:
    swapped: SwappedActivations = engine_of(session).activations.swapped
    return swapped


def wide_vectors(index: int) -> tuple[Tensor, Tensor]:
    """Return a batch of which a layer saves 96 KiB, fp32 (1024, 24) twice."""
    return batch_of_vectors(index, num_rows=1024)
