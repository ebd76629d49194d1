"""The trial of the kernels: used where they work and agree, one warning where they do not, and nothing by the way."""

import logging
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered
from tests.zero.training import debug_store
from tiered.bytes.kernel import compile_nothing, give_back_compiler
from tiered.doctor.examination import examine
from tiered.doctor.finding import MACHINE, Check, Finding, Outcome, broken, ok
from tiered.zero.formats import layout
from tiered.zero.formats.codes import MarkedRemainder, Remainder
from tiered.zero.formats.layout import KERNELS_PAY_NUMEL, Layouts
from tiered.zero.formats.rules import AdamWRule, LionRule, Rule
from tiered.zero.kernels import kernel_trial
from tiered.zero.kernels.adamw_kernel import AdamWKernel
from tiered.zero.kernels.exact_kernels import compile_exact_kernels
from tiered.zero.kernels.kernel_trial import (
    ADAMW_BITS,
    COMPACT_BITS,
    COMPACT_COST,
    EXACT_BITS,
    EXACT_COST,
    adamw_trial,
    agree,
    compact_trial,
    exact_trial,
    tried_adamw_kernel,
    tried_compact_kernels,
    tried_exact_kernels,
)


@pytest.fixture
def untried() -> Iterator[None]:
    """Have the kernels not been tried in this process."""
    remembered = (
        adamw_trial, compact_trial, exact_trial, tried_adamw_kernel, tried_compact_kernels, tried_exact_kernels,
    )  # fmt: skip
    for each in remembered:
        each.cache_clear()
    yield
    for each in remembered:
        each.cache_clear()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("word", "cost"), [("compact", COMPACT_COST), ("exact", EXACT_COST)])
def test_without_numba_one_warning_says_so(
    word: str, cost: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    for _ in range(2):
        Layouts(word, AdamWRule(), numel=KERNELS_PAY_NUMEL).of(torch.bfloat16)
    (warning,) = warnings_of(caplog)
    assert "import of numba halted" in warning and warning.endswith(cost)


@pytest.mark.usefixtures("untried")
def test_kernels_that_give_other_bits_are_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = kernel_trial.compile_compact_kernels()._replace(decode_signed=lambda *_: None)
    monkeypatch.setattr(kernel_trial, "compile_compact_kernels", lambda: wrong)
    assert tried_compact_kernels() is None
    (warning,) = warnings_of(caplog)
    assert "other bits than torch" in warning and "here: signed:" in warning


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("wrong", [{"nan": 0x7FC1}, {"join": lambda *_: None}, {"split": lambda *_: None}], ids=list)
def test_exact_kernels_that_give_other_bits_are_not_used(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a NaN alone is another."""
    compiled = compile_exact_kernels()
    monkeypatch.setattr(kernel_trial, "compile_exact_kernels", lambda: compiled)
    assert exact_trial().kernels is compiled
    exact_trial.cache_clear()
    monkeypatch.setattr(kernel_trial, "compile_exact_kernels", lambda: compiled._replace(**wrong))
    assert tried_exact_kernels() is None
    (warning,) = warnings_of(caplog)
    assert "other bits than torch" in warning and "here: masters:" in warning


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("share", [1, 3, 4], ids=["parameter", "second moment", "gradient"])
def test_an_adamw_kernel_that_gives_other_bits_is_not_used(
    share: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that was given the next element's address of one array."""
    real = adamw_trial().kernels
    assert real is not None, adamw_trial().reason

    def call(*arguments: Any) -> int:
        moved = list(arguments)
        moved[share] += 4
        moved[6] -= 1024
        return int(real._call(*moved))

    adamw_trial.cache_clear()
    monkeypatch.setattr(kernel_trial, "compile_adamw_kernel", lambda nan: AdamWKernel(call, nan))
    assert tried_adamw_kernel() is None
    (warning,) = warnings_of(caplog)
    assert "other bits than torch" in warning and "here: AdamW:" in warning


@pytest.mark.usefixtures("untried")
def test_where_torch_has_no_fma_there_is_no_adamw_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products that torch fuses with sums elsewhere it does not there, and the processor perhaps cannot."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert adamw_trial().kernels is None and "without FMA" in adamw_trial().reason


def test_what_has_no_use_for_kernels_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp64 and fp32 masters, the compact kernels for exact state, and models for which they would not pay."""
    for name in ("tried_adamw_kernel", "tried_compact_kernels", "tried_exact_kernels"):
        monkeypatch.setattr(layout, name, lambda *_: pytest.fail("compiled for nothing"))
    Layouts("exact", AdamWRule(), numel=KERNELS_PAY_NUMEL - 1).of(torch.bfloat16)
    Layouts("exact", AdamWRule(), numel=KERNELS_PAY_NUMEL).of(torch.float32)
    Layouts("compact", AdamWRule()).of(torch.float64)


@pytest.mark.parametrize("rule", [AdamWRule(), LionRule()])
def test_state_asks_for_its_own_kernels_where_they_pay(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "tried_compact_kernels", lambda: pytest.fail("compiled for nothing"))
    found = Layouts("exact", rule, numel=KERNELS_PAY_NUMEL).of(torch.bfloat16)
    if isinstance(rule, AdamWRule):
        assert isinstance(found.master, Remainder) and found.kernel is tried_adamw_kernel() is not None
    else:
        assert found.kernel is None and isinstance(found.master, MarkedRemainder)
        assert found.master.kernels is tried_exact_kernels() is not None


@pytest.mark.parametrize("numel", [1, 5], ids=["small", "large"])
def test_only_bf16_parameters_that_are_updated_count(
    numel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of bf16, of which one needs no gradient, and more of fp32."""
    monkeypatch.setattr(layout, "KERNELS_PAY_NUMEL", 5)
    asked = []
    monkeypatch.setattr(layout, "tried_adamw_kernel", lambda: asked.append("AdamW"))
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (numel, 4)]
    parameters[1].requires_grad_(False)
    parameters.append(torch.nn.Parameter(torch.zeros(100)))
    with debug_store(tmp_path, durable=False) as store:
        optimizer = tiered.AdamW(parameters, store=store)
        for parameter in (parameters[0], parameters[2]):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert asked == (["AdamW"] if numel == 5 else [])


def test_importing_takes_no_numba_and_compiling_starts_no_thread() -> None:
    lines = (
        "import os, sys, torch, tiered, tiered.zero.kernels.kernel_trial as kernel_trial",
        "assert 'numba' not in sys.modules",
        "before = os.listdir('/proc/self/task')",
        "assert kernel_trial.tried_compact_kernels() is not None, kernel_trial.compact_trial().reason",
        "assert kernel_trial.tried_exact_kernels() is not None, kernel_trial.exact_trial().reason",
        "assert kernel_trial.tried_adamw_kernel() is not None, kernel_trial.adamw_trial().reason",
        "assert os.listdir('/proc/self/task') == before",
        "import numba",
        "try: print(numba.threading_layer())",
        "except ValueError: print('none was started')",
    )
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout == "none was started\n"


def test_the_compiler_leaves_no_pages_behind_and_comes_back() -> None:
    compile_nothing()
    assert resident_kib("/libllvmlite.") > 16 * 1024
    give_back_compiler()
    assert resident_kib("/libllvmlite.") < 4 * 1024  # what was relocated is this process's own
    compiled = compile_exact_kernels()
    assert agree(EXACT_BITS["masters"], compiled)


@pytest.mark.usefixtures("untried")
def test_a_trial_gives_the_compiler_back() -> None:
    assert adamw_trial().kernels is not None, adamw_trial().reason
    assert resident_kib("/libllvmlite.") < 4 * 1024


def resident_kib(library: str) -> int:
    """Return how much of the mappings of ``library`` this process has in memory."""
    found, is_its = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB") and name == "Rss":
            found += int(value.split()[0]) if is_its else 0
        elif "-" in name.split()[0]:  # "start-end rights offset device inode path"
            is_its = library in line
    return found


def test_a_forked_child_has_the_kernels_of_its_parent() -> None:
    kernels, exact, adamw = compact_trial().kernels, exact_trial().kernels, adamw_trial().kernels
    assert kernels is not None and exact is not None and adamw is not None

    def in_the_child() -> Finding:
        torch.set_num_threads(1)  # torch's own threads are the parent's
        all_agree = all(agree(each, kernels) for each in COMPACT_BITS.values()) and agree(EXACT_BITS["masters"], exact)
        all_agree = all_agree and agree(ADAMW_BITS["AdamW"], adamw)
        return (ok if all_agree else broken)(MACHINE, "kernels", "tried again")

    (finding,) = examine([[Check(MACHINE, "kernels", in_the_child)]], 60)
    assert finding.outcome is Outcome.OK, finding


def test_other_threads_run_beside_a_kernel() -> None:
    """Nobody takes the interpreter's lock away here: whoever sees the flag set has been given it by a kernel."""
    kernels = compact_trial().kernels
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
