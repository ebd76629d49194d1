"""Fixtures of the rigs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.children import Nursery
from tests.rigs.room import Daemon, Room, room


@pytest.fixture
def a_room() -> Iterator[Room]:
    with room() as made:
        yield made


@pytest.fixture
def faulty(a_room: Room) -> Daemon:
    return a_room.daemon("faulty")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
