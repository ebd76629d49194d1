"""Every wait of the tier on the device is needed, and where it is: without any one of them a short program is red.

The programs are those of tier_program.py; red is a race, an access of the host to bytes in flight, or an error.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import tiered
from tests.accelerator import mutants
from tests.accelerator.mutants import Mutant
from tests.accelerator.tier_program import PROGRAMS, Rig
from tiered.tiers.accelerator import DevicePlace
from tiered.tiers.copies import Copies
from tiered.tiers.device_memory import DeviceBuffer
from tiered.units import MiB

NOT_OF_ORDER = {"Copies._let_leave-left out-0": "the loop around it would ask again and again, without a pause"}
MUTANTS = [mutant for mutant in mutants.found() if str(mutant) not in NOT_OF_ORDER]
OTHERS = {
    "the caller's stream is asked for once": (Copies, "current_stream", cache(Copies.current_stream)),
    "tensors that lie in a buffer are not seen": (DeviceBuffer, "is_aliased", False),
    "updates run on their thread's own stream": (DevicePlace, "computing", lambda self: nullcontext()),
}


def shows(sim: ModuleType, directory: Path) -> str:
    """Return what the first program that is not green shows, "" where all are."""
    seen, name = "", ""
    sim.reset()
    sim.set_allocation_writes()
    try:
        with tiered.Store(directory, dram=8 * MiB, durable=False) as store:
            for program in PROGRAMS:
                name = program.__name__
                sim.set_query_delay(2)  # or the host, which looks now and then, would order everything
                one = Rig(store)
                try:
                    program(one)
                    one.close()
                finally:
                    one.end_copies()
                if seen := "; ".join(sim.races()):
                    break
    except (tiered.TieredError, RuntimeError, AssertionError) as error:
        seen = repr(error)
    seen = seen or "; ".join(sim.races())  # of the store's end
    return seen and f"{name}: {seen}"


def test_what_is_left_out_here_is_there() -> None:
    assert set(NOT_OF_ORDER) <= set(map(str, mutants.found()))


def test_no_other_module_of_the_product_has_a_wait() -> None:
    """Those of a bench and of a trial wait for the whole device; those of ranks have their mutants in tests/ranks."""
    package = Path(tiered.__file__).parent
    having = {str(file.relative_to(package)) for file in package.rglob("*.py") if "wait_event(" in file.read_text()}
    assert having <= {
        *(f"tiers/{module}.py" for module in mutants.MODULES),
        "ranks/comm.py",
        "zero/parameters/gather_slots.py",
    }
    assert not [file for file in package.rglob("*.py") if "wait_stream(" in file.read_text()]


def test_the_programs_are_green(sim: ModuleType, tmp_path: Path) -> None:
    assert shows(sim, tmp_path) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_program_without_it_is_red(
    mutant: Mutant, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    assert shows(sim, tmp_path), f"{mutant} is seen by no program"
    sim.races()  # of buffers that a failed program has left


@pytest.mark.parametrize("what", OTHERS)
def test_a_program_is_red_where(what: str, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, name, other = OTHERS[what]
    monkeypatch.setattr(cls, name, other)
    assert shows(sim, tmp_path)
    sim.races()
