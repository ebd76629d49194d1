"""The checks of what torch can do: process groups for real, and what is said of a GPU that does not work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bytes.registrars import WatchedRegistrar
from tests.doctor.in_child import found_in_child
from tiered.bytes.pinned_arena import add_registrar
from tiered.tools.doctor import checks
from tiered.tools.doctor.checks import (
    Finding,
    Outcome,
    check_compact_kernels,
    check_compute_device,
    check_process_groups,
    machine_checks,
)
from tiered.tools.doctor.doctor import examine
from tiered.zero.formats.compact_codes import COMPACT_COST, INSTALL_COMPACT


def test_a_process_group_is_made_and_nothing_is_left_of_it() -> None:
    for _ in range(2):
        finding = check_process_groups()
        assert finding.outcome is Outcome.OK and "reduced over gloo" in finding.found
    assert not torch.distributed.is_initialized()


def test_a_network_interface_that_is_not_there() -> None:
    def without_interface() -> list[Finding]:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
        return [check_process_groups()]

    (finding,) = found_in_child(without_interface)
    assert finding.outcome is Outcome.BROKEN
    assert finding.found.startswith("gloo failed: ") and "GLOO_SOCKET_IFNAME=lo" in finding.mend


def test_without_a_gpu_nothing_is_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks, "_NVIDIA", tmp_path / "missing")
    findings = examine([machine_checks()[1]], 120)
    assert [finding.outcome for finding in findings] == 2 * [Outcome.OK]
    assert all(finding.found.startswith("not there: ") for finding in findings)


def test_memory_is_page_locked_by_the_registrar_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(type="sim doctor", index=0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    finding = checks.check_pinned_memory()
    assert finding.outcome is Outcome.BROKEN and "no registrar is known" in finding.found
    registrar = WatchedRegistrar()
    add_registrar("sim doctor", registrar)
    finding = checks.check_pinned_memory()
    assert finding.outcome is Outcome.OK and "page-locked for sim doctor" in finding.found
    assert registrar.num_registered == registrar.num_unregistered == 1


@pytest.mark.parametrize(
    ("cuda", "outcome", "says"), [(None, Outcome.SLOWER, "without CUDA"), ("13.0", Outcome.BROKEN, "does not start")]
)
def test_a_gpu_that_torch_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, outcome: Outcome, says: str
) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr(checks, "_NVIDIA", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    finding = check_compute_device()
    assert finding.outcome is outcome and says in finding.found and finding.mend


def test_numba_that_compiles() -> None:
    finding = check_compact_kernels()
    assert finding.outcome is Outcome.OK and finding.found.endswith("compiles them")


@pytest.mark.parametrize(
    ("source", "says", "mend"),
    [
        (None, "not there", INSTALL_COMPACT),
        ("raise ImportError('Numba needs an older NumPy')", "needs an older NumPy", "pip install --upgrade numba"),
    ],
)
def test_numba_that_is_missing_or_does_not_start(
    source: str | None, says: str, mend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    if source is not None:
        (tmp_path / "numba.py").write_text(source)
        monkeypatch.delitem(sys.modules, "numba")
        monkeypatch.syspath_prepend(tmp_path)
    finding = check_compact_kernels()
    assert finding.outcome is Outcome.SLOWER and says in finding.found
    assert (finding.cost, finding.mend) == (COMPACT_COST, mend)
