"""The tests see: every seeded bug is found by the check that it names, and no check finds anything without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store import mutants_of_parts, mutants_of_ranks
from tests.store.checks import no_crash_state_is_wrong  # test_power_cut.py has all of it
from tests.store.mutants import KILLERS, MUTANTS, run_check

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
CHECKS = {check.__name__: check for check in KILLERS.values() if check is not no_crash_state_is_wrong}
assert mutants_of_parts.__name__ and mutants_of_ranks.__name__  # their mutants are among these


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_on_the_code_as_it_is(name: str, tmp_path: Path) -> None:
    run_check(CHECKS[name], tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_seen(name: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS[name](patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):  # nothing else: a mutant that only breaks is none
            run_check(KILLERS[name], tmp_path)
