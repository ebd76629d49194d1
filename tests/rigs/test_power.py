"""The power goes while a store works, on real file systems: what was acknowledged is there, and nothing is half."""

from __future__ import annotations

import pytest

from tests.rigs.available import needs
from tests.rigs.children import Nursery
from tests.rigs.drives import RIGS, TornDrives
from tests.rigs.power import Cut, campaign
from tests.rigs.room import Room

NUM_CUTS = 10


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs(rig)) for kind, (rig, _) in RIGS.items()])
def test_no_power_cut_loses_or_mixes_generations(kind: str, nursery: Nursery, a_room: Room) -> None:
    cuts: list[Cut] = []
    for cut in campaign(RIGS[kind][1](a_room), nursery, range(3 * NUM_CUTS)):
        cuts.append(cut)
        if len(cuts) >= NUM_CUTS and sum(cut.is_inside_commit for cut in cuts) >= NUM_CUTS // 5:
            break  # as many as it took on this machine: the clock chooses where they strike
    assert not [cut for cut in cuts if cut.wrong]
    assert len(cuts) >= NUM_CUTS
    assert sum(cut.is_inside_commit for cut in cuts) >= NUM_CUTS // 5
    assert max(cut.found for cut in cuts) >= 5


@needs("torn drives")
@pytest.mark.parametrize("mutant", ["no data flush", "no catalog flush"])
def test_torn_drives_see_a_missing_flush(mutant: str, nursery: Nursery, a_room: Room) -> None:
    assert any(cut.wrong for cut in campaign(TornDrives(a_room), nursery, range(20), mutant=mutant))
