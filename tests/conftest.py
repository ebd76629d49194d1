"""For every test: two threads of compute; no thread, descriptor, leased arena byte or short turns left behind.

For the whole run: what hypothesis draws does not depend on the clock; the last lines name the rigs that were off.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# Order: before torch is imported, whose OpenMP looks at it only then. By default a thread of OpenMP that has nothing to
# compute goes on spinning, on a core that those of autograd, of the update and of I/O wait for. Processes that tests
# start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Every process of a run would compile what it imports again, where the environment forbids to keep it: tests, with
# their asserts, for 12 s of CPU time. git ignores __pycache__. Workers and programs that tests start inherit it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch
from hypothesis import HealthCheck, settings

from tests.rigs.warm_python import WarmPython
from tiered.bytes.arena import Arena

sys.dont_write_bytecode = False  # in this process, too
torch.set_num_threads(2)

# The same examples in every run, so that a change is judged by itself; and a drive that stalls or a busy machine fails
# no test for the time that an example, or drawing some, takes. Others: pytest --hypothesis-profile explore.
settings.register_profile(
    "suite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("suite"), derandomize=False, print_blob=True)
settings.load_profile("suite")


def _descriptors() -> dict[str, str]:
    """Return the open descriptors and what they are; the one that lists them is gone again by then."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            pass
    return found


def _leaks(threads: set[threading.Thread], descriptors: dict[str, str], arenas: weakref.WeakSet[Arena]) -> list[str]:
    others = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]  # torch's
    found = [f"thread {thread.name}" for thread in others if thread not in threads]
    now = _descriptors()
    found += [f"descriptor {number}: {what}" for number, what in now.items() if descriptors.get(number) != what]
    return found + [f"{arena!r}: {arena.leased_nbytes} bytes leased" for arena in arenas if arena.leased_nbytes]


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that leaves a thread, a descriptor or an arena's bytes behind."""
    arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
    construct = Arena.__init__

    def construct_and_note(arena: Arena, *arguments: object, **options: object) -> None:
        construct(arena, *arguments, **options)  # type: ignore[arg-type]  # whatever the test passes
        arenas.add(arena)

    monkeypatch.setattr(Arena, "__init__", construct_and_note)
    threads, descriptors, turns_s = set(threading.enumerate()), _descriptors(), sys.getswitchinterval()
    yield
    assert sys.getswitchinterval() == turns_s, "turns of the interpreter's lock were left shorter"
    if _leaks(threads, descriptors, arenas):
        gc.collect()  # what only a cycle still holds is no leak
    leaks = _leaks(threads, descriptors, arenas)
    assert not leaks, f"left behind: {'; '.join(leaks)}"


@pytest.fixture(scope="module", autouse=True)
def old_objects() -> None:
    """Keep what the files before have left for the whole run, such as the trees of all sources, out of collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ended_workers() -> Iterator[None]:
    """Wait for the threads that feed the queues of a DataLoader's workers, which torch leaves to end by themselves."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(10)


@pytest.fixture
def drive_path() -> Iterator[Path]:
    """A directory on a drive, where tests of its folder have theirs in memory."""
    with tempfile.TemporaryDirectory(prefix="tiered-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    with tempfile.TemporaryDirectory(prefix="tiered-") as directory:
        python = WarmPython(Path(directory))
        yield python
        python.close()


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C interrupt also where a shell started the run in its background, which it has without.

    And hand files out in the order of their names: by the number of tests, the long files with one test came last, and
    a process without work waited for them.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep what lives as long as the run, torch and thousands of tests, out of every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # order: around pytest's own, whose list of skipped tests comes before
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say which tests were skipped for want of a rig."""
    yield
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    for reason, number in sorted(reasons.items()):
        words = reason.removeprefix("Skipped: ")
        if words.startswith("rig off: "):
            terminalreporter.write_line(f"{words} ({number} test{'s' if number > 1 else ''} skipped)")
