"""Training programs drawn at random have the bits of plain PyTorch; the campaign "programs" has the other seeds."""

from pathlib import Path

import pytest

from tests.zero.drawn.programs import run
from tests.zero.drawn.sides import Plain


@pytest.mark.parametrize("seed", range(1, 8))
def test_a_drawn_program_has_the_bits_of_torch_or_is_refused(seed: int, quick_path: Path) -> None:
    wrong, program = run(seed, quick_path)
    assert not wrong, f"{wrong}; {program.plan}"
    assert len(program.log) > 1 or program.refusal


def test_a_side_that_does_not_step_is_seen(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "step", lambda side: side.stepped.drop())
    outcomes = [run(seed, quick_path)[0] for seed in (1, 2)]
    assert any("Difference" in wrong for wrong in outcomes), outcomes
