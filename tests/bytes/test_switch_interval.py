"""Turns of the interpreter's lock: short while a drive is served, and otherwise what the process wants."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tiered.bytes.device.engines import DEVICES, open_device
from tiered.bytes.device.file_device import ShortSwitchInterval
from tiered.errors import TieredError

DEFAULT_S, SHORT_S = 0.005, 0.001


@pytest.fixture(autouse=True)
def default_interval() -> Iterator[None]:
    sys.setswitchinterval(DEFAULT_S)
    yield
    sys.setswitchinterval(DEFAULT_S)


@pytest.mark.parametrize("engine", DEVICES)
def test_an_open_device_has_short_turns(engine: str, tmp_path: Path) -> None:
    with closing(open_device(tmp_path, engine)):
        assert sys.getswitchinterval() == SHORT_S
    assert sys.getswitchinterval() == DEFAULT_S


def test_a_device_that_cannot_be_opened_leaves_turns_alone(tmp_path: Path) -> None:
    with pytest.raises(TieredError):
        open_device(tmp_path / "missing", "threads")
    assert sys.getswitchinterval() == DEFAULT_S


def test_the_last_end_counts_and_only_once() -> None:
    first, second = ShortSwitchInterval(), ShortSwitchInterval()
    first.end()
    first.end()
    assert sys.getswitchinterval() == SHORT_S
    second.end()
    assert sys.getswitchinterval() == DEFAULT_S


@pytest.mark.parametrize("own_s", [0.0001, SHORT_S, 0.02])
def test_an_interval_of_ones_own_is_kept(own_s: float) -> None:
    sys.setswitchinterval(own_s)
    own_s = sys.getswitchinterval()  # whole microseconds, rounded as binary fractions are
    ShortSwitchInterval().end()
    assert sys.getswitchinterval() == own_s
    interval = ShortSwitchInterval()
    assert sys.getswitchinterval() == own_s
    interval.end()
    assert sys.getswitchinterval() == own_s


def test_an_interval_that_was_set_since_is_kept() -> None:
    interval = ShortSwitchInterval()
    sys.setswitchinterval(0.02)
    interval.end()
    assert sys.getswitchinterval() == 0.02


def test_many_threads_come_to_the_default() -> None:
    def come_and_go() -> None:
        for _ in range(200):
            interval = ShortSwitchInterval()
            assert sys.getswitchinterval() == SHORT_S
            interval.end()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == DEFAULT_S


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_has_the_default_and_its_own_count() -> None:
    interval = ShortSwitchInterval()
    child = os.fork()
    if not child:
        found = [sys.getswitchinterval()]
        own = ShortSwitchInterval()
        found.append(sys.getswitchinterval())
        own.end()
        found.append(sys.getswitchinterval())
        os._exit(0 if found == [DEFAULT_S, SHORT_S, DEFAULT_S] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sys.getswitchinterval() == SHORT_S
    interval.end()
