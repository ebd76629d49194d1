"""The example of scripts/examples over two ranks of torchrun, tiered and plain: the same losses, to the last bit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.warm_python import WarmPython

_ROOT = Path(__file__).parents[2]
_SCRIPT = "scripts/examples/digits_over_ranks.py"


@pytest.fixture
def python(tmp_path: Path) -> Iterator[WarmPython]:
    """A Python that has imported scikit-learn, too."""
    (tmp_path / "python").mkdir()
    python = WarmPython(tmp_path / "python", modules=("sklearn.datasets",))
    yield python
    python.close()


def test_digits_are_learned_to_the_bits_of_plain_torch(python: WarmPython, tmp_path: Path) -> None:
    plain, tiered = _run(python, "--plain"), _run(python)
    assert tiered == plain
    assert plain["accuracy"] > 0.94


def _run(python: WarmPython, *options: str) -> Any:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", python.executable, _SCRIPT]
    ended = subprocess.run(
        [python.executable, *words, *options],
        cwd=_ROOT, env=python.environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])
