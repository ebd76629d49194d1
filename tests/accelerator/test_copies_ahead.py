"""Copies ahead of need: one that is needed now is not behind them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import tiered
from tests.accelerator.training import ROOMY_NBYTES, case_on
from tests.reference import Recipe
from tests.zero.training import start
from tiered.tiers import copies
from tiered.tiers.accelerator import AcceleratorTier

NBYTES = 4096  # of a key
PIECE_NBYTES = NBYTES // 4


def test_a_copy_that_is_needed_waits_for_no_copy_ahead(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "AHEAD_NBYTES", PIECE_NBYTES)
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=0) as store:
        values = {key: torch.full((NBYTES,), value, dtype=torch.uint8) for key, value in (("later", 1), ("now", 2))}
        store.put_many(values.items())
        tier = AcceleratorTier(store.working_set, torch.device("sim:0"), 2 * NBYTES)
        sim.keep_log()
        assert tier.gather_ahead("later")
        needed = tier.gather(["now"], "r")
        needed.use()
        log = sim.log()
        entries = [entry for entry in log if entry.kind == "copy"]
        ahead, now = {entry.stream for entry in entries[:4]}, {entry.stream for entry in entries[4:]}
        assert [entry.nbytes for entry in entries] == [PIECE_NBYTES] * 4 + [NBYTES]
        assert len(ahead) == len(now) == 1 and ahead != now
        made = {entry.address for entry in log if entry.kind == "record" and entry.stream in ahead}
        assert made and not [entry for entry in log if entry.kind == "wait" and entry.address in made]
        kept = tier.gather(["later"], "r")
        kept.use()
        for gathered, key in ((needed, "now"), (kept, "later")):
            assert torch.equal(gathered.whole[0].cpu(), values[key])
            gathered.release(())
        tier.forget()


def test_a_copy_that_fails_between_two_pieces_has_ended(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "AHEAD_NBYTES", PIECE_NBYTES)
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        store.put_many([(key, torch.zeros(NBYTES, dtype=torch.uint8)) for key in ("later", "now")])
        tier = AcceleratorTier(store.working_set, torch.device("sim:0"), NBYTES)
        sim.set_query_delay(3)
        sim.guard_pinned()
        sim.fail_copy(3)
        with pytest.raises(RuntimeError, match="copy"):
            tier.gather_ahead("later")
        store["later"] = torch.ones(NBYTES, dtype=torch.uint8)  # its lease has ended, and so has the copy
        gathered = tier.gather(["now"], "r")
        gathered.use()
        gathered.release(())
        tier.forget()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_buckets_come_to_an_update_on_a_stream_of_their_own(sim: ModuleType, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES, durable=False) as store:
        session = start(case_on("sim", "gpt"), Recipe(), store, device="sim", update_on="device", hold=0)
        session.run_step(0)
        sim.keep_log()
        session.run_step(1)
        session.optimizer.state_dict()  # the updates have ended
        copying = next(session.model.parameters()).segment.unit.tier.copies  # type: ignore[attr-defined]
        others = copying.stream_in, copying.stream_ahead, copying.stream_out, copying.current_stream()
        found = {entry.stream for entry in sim.log() if entry.kind == "copy"}
        assert len(found - {stream.stream_id for stream in others}) == 1
