"""The lines of Hugging Face that README prints, run as they are written, and again after a stop."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.interop.small_models import Tokens, build, same_state, state_of
from tests.interop.test_trainer import StoppedError
from tests.test_docs import README, blocks

(LINES,) = [text for text in blocks(README, "python") if "tiered.hf.Trainer(" in text]


class Stop(TrainerCallback):
    """Ends the run in the middle of a step, with gradients pending."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self._step:
            raise StoppedError


def run(lines: str, path: Path, step: int = -1) -> Any:
    """Run ``lines`` in ``path``; return the state of the model at the end. ``stop`` ends the run before a step."""
    names: dict[str, Any] = {"model": build("llama"), "dataset": Tokens(), "stop": Stop(step)}
    with chdir(path):
        try:
            exec(lines, names)
            return state_of(names["model"])
        finally:
            if "trainer" in names:
                names["trainer"].close()


def test_the_lines_run_as_they_are_written_and_go_on_after_a_stop(tmp_path: Path) -> None:
    lines = LINES.replace("save_steps=100", 'save_steps=1, report_to="none", disable_tqdm=True')
    resumed = lines.replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)", 1)
    for name in ("undisturbed", "stopped", "stopped_early"):
        (tmp_path / name).mkdir()
    expected = run(lines, tmp_path / "undisturbed")
    assert {"config.json", "model.safetensors"} <= {p.name for p in (tmp_path / "undisturbed/runs/model").iterdir()}
    stopped = lines.replace("trainer.train()", "trainer.add_callback(stop); trainer.train()", 1)
    for step, name in ((2, "stopped"), (0, "stopped_early")):
        with pytest.raises(StoppedError):
            run(stopped, tmp_path / name, step)
    assert same_state(run(resumed, tmp_path / "stopped"), expected)
    with pytest.raises(ValueError, match="No valid checkpoint"):  # what was not committed is gone, as it is in memory
        run(resumed, tmp_path / "stopped_early")
    assert same_state(run(lines, tmp_path / "stopped_early"), expected)
