"""tiered.hf is imported at its first use alone, and says what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import sys, tiered
assert "transformers" not in sys.modules and "hf" in dir(tiered)
sys.modules["transformers"] = None
try:
    tiered.hf
except ModuleNotFoundError as error:
    print(error)
"""


def test_tiered_hf_is_imported_when_it_is_used_and_says_what_it_needs() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "tiered.hf needs transformers and accelerate: pip install 'tiered[hf]'\n", found.stderr
