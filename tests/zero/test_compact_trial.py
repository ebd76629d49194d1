"""The trial of the kernels: used where they work and agree, one warning where they do not, and nothing by the way."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tiered.doctor.examination import examine
from tiered.doctor.finding import MACHINE, Check, Finding, Outcome, broken, ok
from tiered.zero import compact_trial
from tiered.zero.compact_trial import COST, trial, tried_kernels
from tiered.zero.layout import Layouts
from tiered.zero.rules import AdamWRule


@pytest.fixture
def untried() -> Iterator[None]:
    """Have the kernels not been tried in this process."""
    trial.cache_clear()
    tried_kernels.cache_clear()
    yield
    trial.cache_clear()
    tried_kernels.cache_clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("untried")
def test_without_numba_one_warning_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    for _ in range(2):
        Layouts("compact", AdamWRule()).of(torch.bfloat16)
    (warning,) = warnings_of(caplog)
    assert "import of numba halted" in warning and warning.endswith(COST)
    assert trial().kernels is None


@pytest.mark.usefixtures("untried")
def test_kernels_that_give_other_bits_are_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = compact_trial.compile_compact_kernels()
    wrong = kernels._replace(decode_signed=lambda *_: None)
    monkeypatch.setattr(compact_trial, "compile_compact_kernels", lambda: wrong)
    assert tried_kernels() is None
    (warning,) = warnings_of(caplog)
    assert "other bits than torch" in warning and "here: signed:" in warning


def test_other_formats_ask_for_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered.zero.layout.tried_kernels", lambda: pytest.fail("compiled for nothing"))
    for word in ("exact", "bf16"):
        Layouts(word, AdamWRule()).of(torch.bfloat16)
    Layouts("compact", AdamWRule()).of(torch.float64)


def test_importing_takes_no_numba_and_compiling_starts_no_thread() -> None:
    lines = (
        "import os, sys, torch, tiered, tiered.zero.compact_trial as compact_trial",
        "assert 'numba' not in sys.modules",
        "before = os.listdir('/proc/self/task')",
        "assert compact_trial.tried_kernels() is not None, compact_trial.trial().reason",
        "assert os.listdir('/proc/self/task') == before",
        "import numba",
        "try: print(numba.threading_layer())",
        "except ValueError: print('none was started')",
    )
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout == "none was started\n"


def test_a_forked_child_has_the_kernels_of_its_parent() -> None:
    kernels = trial().kernels
    assert kernels is not None

    def in_the_child() -> Finding:
        torch.set_num_threads(1)  # torch's own threads are the parent's
        agree = all(compact_trial._agree(name, kernels) for name in compact_trial._CODES)
        return (ok if agree else broken)(MACHINE, "kernels", "tried again")

    (finding,) = examine([[Check(MACHINE, "kernels", in_the_child)]], 60)
    assert finding.outcome is Outcome.OK, finding


def test_other_threads_run_beside_a_kernel() -> None:
    """Nobody takes the interpreter's lock away here: whoever sees the flag set has been given it by a kernel."""
    kernels = trial().kernels
    assert kernels is not None
    memory = torch.empty(1 << 18, dtype=torch.int32)
    started, seen = threading.Event(), threading.Event()
    turns = []

    def work() -> None:
        started.set()
        for turn in range(5000):
            if seen.is_set():
                turns.append(turn)
                return
            kernels.fill_numbers(memory.data_ptr(), memory.numel(), 1, 0, 4095)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=work)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        started.wait()
        seen.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert turns, "every turn went by before another thread could run"
