"""Power cuts at every operation of a job that does everything: what was acknowledged is there, nothing is half."""

from __future__ import annotations

import pytest

from tests.store.crashes import POLICIES, Campaign

NUM_STEPS = 3  # `bench/soak.py --campaign simulated` has jobs of five


@pytest.mark.parametrize("seed", [0, 1])  # one device, and two of a store that others share
def test_no_power_cut_at_any_operation_loses_or_mixes_generations(seed: int) -> None:
    campaign = Campaign(seed, num_steps=NUM_STEPS).run()
    assert not campaign.wrong
    assert campaign.num_operations > 5 * NUM_STEPS
    assert campaign.num_states > (campaign.num_operations + 1) * len(POLICIES)
    assert campaign.num_opened > campaign.num_in_recovery > 0 < campaign.num_inside_commit
    assert (campaign.num_before > 0 < campaign.num_discards) == campaign.setting.is_shared
