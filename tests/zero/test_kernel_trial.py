"""The trial of the kernels: used where they work and agree, one warning where they do not, and nothing by the way."""

import ast
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.bytes.moving import exit_code_of_child
from tests.rigs.warm_python import WarmPython
from tests.zero.digests import digests_of_training
from tiered.zero.formats import compact_codes, state_layout
from tiered.zero.formats.compact_codes import (
    COMPACT_BITS,
    COMPACT_COST,
    INSTALL_COMPACT,
    agree,
    tried_compact_kernels,
)
from tiered.zero.formats.rules import AdamWRule
from tiered.zero.formats.state_layout import Layouts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def untried() -> Iterator[None]:
    """Have the kernels not been tried in this process."""
    tried_compact_kernels.cache_clear()
    yield
    tried_compact_kernels.cache_clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("untried")
def test_numba_that_cannot_compile_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs an older NumPy')")
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        Layouts("compact", AdamWRule()).of(torch.bfloat16)
    (warning,) = warnings_of(caplog)
    assert "needs an older NumPy" in warning and "--upgrade numba" in warning and warning.endswith(COMPACT_COST)


def test_without_numba_all_trains_to_the_same_bits_and_compact_alone_warns_once(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    program = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "assert 'numba' not in sys.modules\n"
        "sys.modules['numba'] = sys.modules['llvmlite'] = None  # as if they were not installed\n"
        "from tests.zero.digests import digests_of_training\n"
        f"print(digests_of_training({str(tmp_path / 'without')!r}))\n"
    )
    command = [warm_python.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert tried_compact_kernels() is not None
    assert ast.literal_eval(done.stdout) == digests_of_training(tmp_path / "with")
    (warning,) = [line for line in done.stderr.splitlines() if INSTALL_COMPACT in line]
    assert warning.endswith(COMPACT_COST)


@pytest.mark.usefixtures("untried")
def test_kernels_that_give_other_bits_are_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = compact_codes.compile_compact_kernels()._replace(decode_signed=lambda *_: None)
    monkeypatch.setattr(compact_codes, "compile_compact_kernels", lambda: wrong)
    assert tried_compact_kernels() is None
    (warning,) = warnings_of(caplog)
    assert "other bits than torch" in warning and "here: signed;" in warning


def test_what_has_no_use_for_kernels_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact state, and fp64 parameters in any format."""
    monkeypatch.setattr(state_layout, "tried_compact_kernels", lambda: pytest.fail("compiled for nothing"))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        Layouts("exact", AdamWRule()).of(dtype)
    Layouts("compact", AdamWRule()).of(torch.float64)


def test_importing_takes_no_numba_and_compiling_starts_no_thread() -> None:
    lines = (
        "import os, sys, torch, tiered, tiered.zero.formats.compact_codes as compact_codes",
        "assert 'numba' not in sys.modules",
        "before = os.listdir('/proc/self/task')",
        "assert compact_codes.tried_compact_kernels() is not None",
        "assert os.listdir('/proc/self/task') == before",
        "import numba",
        "try: print(numba.threading_layer())",
        "except ValueError: print('none was started')",
    )
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # of scipy, which numba imports where it is there
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout == "none was started\n"


def test_a_forked_child_has_the_kernels_of_its_parent() -> None:
    kernels = tried_compact_kernels()
    assert kernels is not None

    def in_the_child() -> None:
        torch.set_num_threads(1)  # torch's own threads are the parent's
        assert all(agree(each, kernels) for each in COMPACT_BITS.values())

    assert exit_code_of_child(in_the_child) == 0
