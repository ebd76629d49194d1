"""Names that the last release had: each answers with what to use instead."""

from __future__ import annotations

import importlib
import operator

import pytest

import tiered
from tiered.errors import UsageError
from tiered.removed import REMOVED
from tiered.tools.cli import main

OPTIONS = {
    "tiered bench --plot": "bench nvme0 --plot bench.png",
    "tiered import --deepspeed": "import --deepspeed ds_config.json",
    "tiered train --micro-batches": "train --micro-batches vertical",
}
ARGUMENT = "tiered.hf.Arguments(micro_batches=)"


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_says_what_to_use_instead(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(OPTIONS[option].split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"tiered: {option} was removed after 0.2.0: {REMOVED[option]}"


@pytest.mark.parametrize("name", sorted(REMOVED.keys() - OPTIONS.keys() - {ARGUMENT}))
def test_a_name_says_what_to_use_instead(name: str) -> None:
    with pytest.raises(UsageError) as found:
        operator.attrgetter(name.removeprefix("tiered."))(tiered)
    assert str(found.value) == f"{name} was removed after 0.2.0: {REMOVED[name]}"
    with pytest.raises(AttributeError):
        tiered.never_was  # noqa: B018


def test_the_door_to_hugging_face_is_a_module_that_can_be_imported() -> None:
    assert importlib.import_module("tiered.hf") is tiered.hf
    with pytest.raises(UsageError, match=r"tiered\.hf\.Callback was removed"):
        from tiered.hf import Callback  # noqa: F401


def test_a_module_that_moved_says_where_it_is() -> None:
    with pytest.raises(
        UsageError, match=r"tiered\.cli was removed after 0\.2\.0: the command is tiered\.tools\.cli\.main"
    ):
        importlib.import_module("tiered.cli")


def test_an_argument_says_what_to_use_instead() -> None:
    with pytest.raises(UsageError) as found:
        tiered.hf.Arguments(store="run", micro_batches=True)
    assert str(found.value) == f"{ARGUMENT} was removed after 0.2.0: {REMOVED[ARGUMENT]}"
