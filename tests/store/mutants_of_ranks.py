"""Seeded bugs in the commit over ranks; importing this adds them to mutants.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.store import meeting
from tests.store.mutants import Patch, mutant
from tests.store.simulated_catalog import SimulatedCatalog
from tiered.store import assembly
from tiered.store.catalog.catalog import GenerationName
from tiered.store.lifetime.confirmation import RanksConfirmation
from tiered.store.lifetime.opening import Parts

__all__: list[str] = []


@mutant(meeting.no_crash_of_a_rank_is_wrong)
def a_rank_does_not_wait_for_the_others(patch: Patch) -> None:
    patch.setattr(RanksConfirmation, "confirm", lambda confirmation, generation, note_wait: None)


@mutant(meeting.no_crash_of_a_rank_is_wrong)
def the_generation_before_is_reused_before_all_have_the_next(patch: Patch) -> None:
    apply = SimulatedCatalog.apply

    def apply_alone(catalog: Any, *arguments: Any, keeps_before: bool) -> None:
        apply(catalog, *arguments)

    patch.setattr(SimulatedCatalog, "apply", apply_alone)


@mutant(meeting.the_nonce_is_compared)
def generations_of_one_number_are_taken_for_one(patch: Patch) -> None:
    def choose(confirmation: RanksConfirmation, kept: Sequence[GenerationName]) -> GenerationName:
        told = confirmation._agree("tiered.Store", kept)
        number = max(set.intersection(*({each[0] for each in names} for names in told)))
        return next(name for name in kept if name.number == number)

    patch.setattr(RanksConfirmation, "choose", choose)


@mutant(meeting.no_space_names_the_rank)
def a_failure_is_not_told(patch: Patch) -> None:
    patch.setattr(RanksConfirmation, "failed", lambda confirmation, number, error: None)


@mutant(meeting.a_confirmed_generation_is_opened)
def a_generation_is_discarded_before_the_choice(patch: Patch) -> None:
    load = assembly._load

    def discard_and_load(parts: Parts) -> Any:
        assert parts.catalog is not None
        if len(parts.catalog.kept()) > 1:
            parts.catalog.discard()
        return load(parts)

    patch.setattr(assembly, "_load", discard_and_load)
