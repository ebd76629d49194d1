"""Every call of a store's life fails with every errno, once and for ever: errors of ours, nothing acknowledged lost.

Over simulated devices and the catalog's twin; tests/rigs has the same for the system calls of the engines and SQLite.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from tests.devices.faults import Fault, FaultsDevice
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import numbers, simulated_store
from tiered.bytes.device.base import Device
from tiered.bytes.device.files import translate
from tiered.errors import CapacityError, DeviceError, TieredError
from tiered.store.space.space import Space
from tiered.store.store import Store
from tiered.units import KiB, MiB

ERRNOS = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EMFILE,
    errno.ETIMEDOUT,
)  # fmt: skip
FOR_EVER = 1_000
SIZES = {"inline": 100, "paged": 5001, "large": 40 * KiB, "small": 4 * KiB}  # the large one is streamed
NUM_SESSIONS = 3

Call = Literal["read", "write", "flush", "grow", "transact"]


@dataclass(frozen=True, slots=True)
class Case:
    """In each session the ``nth`` call of this kind, and ``count`` in all from there on, fails with ``errno``."""

    call: Call
    nth: int
    count: int
    errno: int

    def __str__(self) -> str:
        often = "once" if self.count == 1 else "for ever"
        return f"{self.call} {self.nth}: {errno.errorcode[self.errno]} {often}"


class Life:
    """Sessions of one store: each opens it, reads all, replaces all, commits and reads again."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk(capacity_nbytes=2 * MiB, can_lose_power=False)
        self.acknowledged = self.sealed = 0
        self.num_calls = Counter[Call]()  # the most of a session
        self.errors: list[TieredError] = []

    def session(self, case: Case | None) -> None:
        """Go through a session; what is raised must be ours, and is noted."""
        devices: list[FaultsDevice] = []

        def wrap(device: Device) -> Device:
            devices.append(FaultsDevice(device))
            if case is not None and case.call != "transact":
                devices[-1].inject(Fault(case.call, nth=case.nth, count=case.count, errno=case.errno))
            return devices[-1]

        if case is not None and case.call == "transact":
            for _ in range(case.count):
                error = OSError(case.errno, os.strerror(case.errno))
                self.disk.fail_next("transact", translate(error, "the catalog failed"))
        num_before = self.disk.num_operations
        try:
            with simulated_store(self.disk, wrap=wrap, deadline_s=10.0) as store:
                self._use(store)
        except TieredError as error:
            self.errors.append(error)
        self.disk._failures.clear()
        for device in devices:
            for call, number in device._num_calls.items():
                self.num_calls[call] = max(self.num_calls[call], number)
        self.num_calls["transact"] = 1 if self.disk.num_operations > num_before else 0

    def _use(self, store: Store) -> None:
        self.look(store)
        generation = store.generation + 1
        store.put_many(contents(generation))
        self.sealed = max(self.sealed, generation)
        store.commit({"generation": generation})
        self.acknowledged = generation
        buffer = store.working_set.reserve(store.working_set.budget_bytes)
        buffer.memory[:] = bytes(buffer.nbytes)
        store.working_set.unreserve(buffer)
        self.look(store)

    def look(self, store: Store) -> None:
        """Whatever can be read is what the generation holds. Raises AssertionError, TieredError."""
        assert self.acknowledged <= store.generation <= self.sealed
        expected = contents(store.generation) if store.generation else {}
        assert set(store) == set(expected)
        for name, value in expected.items():
            assert torch.equal(store[name], value), name


def contents(generation: int) -> dict[str, torch.Tensor]:
    return {name: numbers(nbytes, 10 * generation + i) for i, (name, nbytes) in enumerate(SIZES.items())}


def tried(case: Case) -> list[TieredError]:
    """Live with ``case``, then without it; return the errors."""
    life = Life()
    for _ in range(NUM_SESSIONS):
        life.session(case)
    with simulated_store(life.disk) as store:
        life.look(store)
        assert store.verify().is_clean
        store["after"] = numbers(5001)
        store.commit()
    return life.errors


def cases() -> Iterator[Case]:
    life = Life()
    for _ in range(NUM_SESSIONS):
        life.session(None)
    assert not life.errors and life.acknowledged == NUM_SESSIONS
    for call, number in sorted(life.num_calls.items()):
        for nth in range(number):
            for count in (1, FOR_EVER):
                yield from (Case(call, nth, count, each) for each in ERRNOS)


def check(case: Case) -> None:
    """The failure is told, as what a drive does and nothing else; what came of it is in ``tried``."""
    errors = tried(case)
    assert errors, f"{case}: nobody was told"
    for error in errors:
        assert isinstance(error, DeviceError | CapacityError), f"{case}: {error!r}"


def test_every_call_may_fail_with_every_errno() -> None:
    found = list(cases())
    assert {case.call for case in found} == {"read", "write", "flush", "grow", "transact"}
    for case in found:
        check(case)


def test_the_sweep_sees_a_flush_whose_failure_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "flush", lambda space: None)
    with pytest.raises(AssertionError, match="nobody was told"):
        check(Case("flush", 0, 1, errno.EIO))
