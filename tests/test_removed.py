"""Names that the last release had: each answers with what to use instead."""

from __future__ import annotations

import pytest

from tiered.cli import main
from tiered.removed import REMOVED


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("tiered import --deepspeed", "import --deepspeed ds_config.json"),
        ("tiered bench --plot", "bench nvme0 --plot bench.png"),
    ],
)
def test_an_option_of_the_command_line_says_what_to_use_instead(
    option: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"tiered: {option} was removed after 0.2.0: {REMOVED[option]}; try --help"
