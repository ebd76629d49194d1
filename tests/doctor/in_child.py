"""Findings of a forked child, which may take away from itself what it likes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict

from tests.bytes.moving import exit_code_of_child
from tiered.tools.doctor.checks import Finding, Outcome

__all__ = ["found_in_child"]


def found_in_child(run: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what ``run`` returns in a child."""
    answer = os.memfd_create("findings", os.MFD_CLOEXEC)
    try:
        assert exit_code_of_child(lambda: _answer(answer, run())) == 0
        found = json.loads(os.pread(answer, 1 << 20, 0))
    finally:
        os.close(answer)
    return [Finding(**{**each, "outcome": Outcome(each["outcome"])}) for each in found]


def _answer(descriptor: int, findings: list[Finding]) -> None:
    os.write(descriptor, json.dumps([asdict(finding) for finding in findings]).encode())
