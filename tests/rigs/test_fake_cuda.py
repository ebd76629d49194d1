"""The fake CUDA is run by hand; what the suite has of it is that it says by name why it is off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.fake_cuda.__main__ import main


def test_the_rig_is_off_by_name_where_the_headers_of_cuda_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert main([str(tmp_path / "build")]) == 2
    header = tmp_path / "include/cuda_runtime_api.h"
    assert capsys.readouterr().out == f"rig off: fake CUDA: there is no {header}: CUDA_HOME names another CUDA 13.0\n"
    assert not (tmp_path / "build").exists()
