"""The start of a thread ends, whatever becomes of the thread: the job runs, or the start fails and it never will."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bytes.moving import WAIT_S
from tiered.bytes import critical_section
from tiered.bytes.critical_section import BoundedThread, ServiceThread
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import CapacityError, DeviceError


@pytest.fixture(autouse=True)
def no_thread_in_limbo() -> Iterator[None]:
    """The library's list keeps a thread that died before it reported."""
    yield
    threading._limbo.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [BoundedThread, ServiceThread])
@pytest.mark.parametrize("step", ["_bootstrap", "_bootstrap_inner", "run"])
def test_a_thread_that_dies_before_its_job_fails_the_start(
    kind: type[BoundedThread], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(critical_section, "_START_DEADLINE_S", 0.01)
    monkeypatch.setattr(kind if step == "run" else threading.Thread, step, lambda thread: None)
    ran: list[int] = []
    with pytest.raises(CapacityError, match=r"cannot start thread mine: it did not begin within 0.01 s; free memory"):
        kind(target=ran.append, args=(1,), name="mine").start()
    assert not ran


def test_a_thread_that_comes_too_late_finds_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critical_section, "_START_DEADLINE_S", 0.01)
    may_begin, ran = threading.Event(), list[int]()
    begin = threading.Thread._bootstrap  # type: ignore[attr-defined]
    monkeypatch.setattr(threading.Thread, "_bootstrap", lambda thread: may_begin.wait(WAIT_S) and begin(thread))
    thread = BoundedThread(target=ran.append, args=(1,), name="late")
    with pytest.raises(CapacityError):
        thread.start()
    may_begin.set()
    assert threading.Event.wait(thread._started, WAIT_S)
    thread.join(WAIT_S)
    assert not ran and not thread.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_refused_start_is_an_error_of_capacity(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(CapacityError, match="cannot start thread mine") as raised:
        BoundedThread(target=print, name="mine").start()
    assert raised.value.__cause__ is error


def test_a_device_whose_threads_die_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(critical_section, "_START_DEADLINE_S", 0.01)
        patch.setattr(threading.Thread, "_bootstrap", lambda thread: None)
        with pytest.raises(DeviceError, match="cannot start thread tiered-io-0"):
            ThreadsDevice(tmp_path)
    ThreadsDevice(tmp_path).close()
