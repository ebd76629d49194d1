"""Fixtures of the rigs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.rigs.children import Nursery
from tests.rigs.room import Daemon, Room, room
from tests.rigs.warm_python import WarmPython


@pytest.fixture
def a_room() -> Iterator[Room]:
    with room() as made:
        yield made


@pytest.fixture
def faulty(a_room: Room) -> Daemon:
    return a_room.daemon("faulty")


@pytest.fixture(scope="module")
def nursery(warm_python: WarmPython) -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python.executable)  # of which it is forked
        made = Nursery()
    yield made
    made.close()
