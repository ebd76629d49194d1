"""Memory that is mapped again and again; that it is refused, and gone, when it should be."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bytes.moving import exit_code_of_child
from tiered.measure import huge_pages as huge_pages_module
from tiered.measure.bed import Bed
from tiered.measure.huge_pages import HUGE_PAGE_NBYTES, LentPages, RepeatedMemory
from tiered.measure.pattern import LARGE_NBYTES, Pattern
from tiered.units import MiB

PERIOD = 2 * HUGE_PAGE_NBYTES


@pytest.fixture
def lent() -> Iterator[None]:
    with ExitStack() as undo:
        pages = LentPages(PERIOD // HUGE_PAGE_NBYTES)
        undo.callback(pages.restore)
        if not pages.lend():
            pytest.skip("no huge pages to be had: that needs root, and memory in one piece")
        yield


def mapped_nbytes() -> int:
    names = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*tiered-repeated", Path("/proc/self/maps").read_text(), re.M)
    return sum(int(end, 16) - int(start, 16) for start, end in names)


@pytest.mark.usefixtures("lent")
def test_a_byte_is_there_once_in_each_period() -> None:
    nbytes = 2 * PERIOD + MiB  # not whole periods, not even whole pages
    repeated = RepeatedMemory(PERIOD, nbytes)
    memory = repeated.memory
    assert len(memory) == nbytes and not any(memory[PERIOD : PERIOD + 100])
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_NBYTES == 0
    memory[:MiB] = content = os.urandom(MiB)
    assert memory[PERIOD : PERIOD + MiB] == memory[2 * PERIOD :] == content
    memory[2 * PERIOD + 5] ^= 1
    assert memory[5] != content[5]
    assert mapped_nbytes() == 2 * PERIOD + HUGE_PAGE_NBYTES
    repeated.close()
    repeated.close()
    assert mapped_nbytes() == len(repeated.memory) == 0


@pytest.mark.usefixtures("lent")
def test_pages_that_somebody_is_about_to_let_go_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the pool is common to all processes, the kernel's refusal is made here."""
    refused: list[int] = []
    map_ = huge_pages_module._map

    def refuse_twice(address: int | None, nbytes: int, flags: int, fd: int) -> int:
        if fd >= 0 and len(refused) < 2:
            refused.append(nbytes)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return map_(address, nbytes, flags, fd)

    monkeypatch.setattr(huge_pages_module, "_map", refuse_twice)
    monkeypatch.setattr(huge_pages_module, "_PAUSES_S", (0.0, 0.0, *huge_pages_module._PAUSES_S))
    repeated = RepeatedMemory(PERIOD, PERIOD)
    assert refused == [PERIOD] * 2 and mapped_nbytes() == PERIOD
    repeated.close()


@pytest.mark.usefixtures("lent")
def test_a_child_has_none_of_it() -> None:
    repeated = RepeatedMemory(PERIOD, PERIOD)

    def check() -> None:
        assert mapped_nbytes() == 0

    assert mapped_nbytes() == PERIOD
    assert exit_code_of_child(check) == 0
    repeated.close()


def test_pages_that_are_not_there_are_an_error_and_leave_nothing() -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        RepeatedMemory(1 << 50, 1 << 50)
    assert len(os.listdir("/proc/self/fd")) == num_fds and mapped_nbytes() == 0
    with pytest.raises(ValueError, match="period must be a multiple"):
        RepeatedMemory(HUGE_PAGE_NBYTES // 2, PERIOD)


def test_large_operations_go_through_as_much_memory_as_is_in_flight(tmp_path: Path) -> None:
    pattern = Pattern("read", MiB, 4, 8 * MiB, seconds=5.0, max_nbytes=16 * MiB)
    with Bed([tmp_path], engine="uring", memory_nbytes=8 * MiB, file_nbytes=8 * MiB, depth=4, periods=[PERIOD]) as bed:
        bed.write_file()
        if not bed.is_repeated(pattern):
            pytest.skip("no huge pages to be had: that needs root, and memory in one piece")
        assert mapped_nbytes() == 2 * LARGE_NBYTES
        bed.register_memory()
        before = bytes(bed.memory)
        assert bed.can_run_large(pattern)
        assert bed.run_large(pattern).read_nbytes == 16 * MiB
        assert bytes(bed.memory) == before  # it went through memory of its own
    assert mapped_nbytes() == 0


def test_without_pages_large_operations_use_the_memory_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LentPages, "lend", lambda self: False)
    pattern = Pattern("write", MiB, 2, 8 * MiB, seconds=5.0, max_nbytes=8 * MiB)
    with Bed([tmp_path], engine="uring", memory_nbytes=8 * MiB, file_nbytes=8 * MiB, depth=4, periods=[2 * MiB]) as bed:
        bed.write_file()
        assert not bed.is_repeated(pattern) and bed.can_run_large(pattern)
        assert bed.run_large(pattern).write_nbytes == 8 * MiB
