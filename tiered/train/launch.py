"""From the request of the command line to a job that runs; all that can be refused is refused here.

No store is written to before the plan has been said and agreed to.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tiered
from tiered.console.interruption import Interruption
from tiered.console.page import fold, say
from tiered.console.question import confirm
from tiered.console.report_file import check_writable, write_report
from tiered.errors import UsageError
from tiered.train.config import RunConfig, RunDials, committed_step
from tiered.train.existing_run import ExistingRun, find_run, holds_any_file, holds_store, remove_store
from tiered.train.loop import ResumeHint, TrainingLoop
from tiered.train.plan import Plan
from tiered.train.summary import RunSummary
from tiered.train.task import Corpus, Loader
from tiered.train.timeline import write_timeline
from tiered.units import MiB, spell_bytes, spell_count
from tiered.zero.compute_device import named_device

__all__ = ["Request", "train"]


@dataclass(frozen=True, slots=True)
class Request:
    """The request of the command line; ``given`` has its options, by their names in RunConfig and RunDials.

    ``dry_run``: say what the run would be and take, refuse what it would refuse, and stop.
    """

    directories: tuple[Path, ...]
    given: Mapping[str, object]
    durable: bool = True
    resume: bool = False
    fresh: bool = False
    yes: bool = False
    quiet: bool = False
    dry_run: bool = False
    json_file: Path | None = None
    timeline_file: Path | None = None
    program: str = "tiered"  # how the user calls us, for the commands we suggest

    def __post_init__(self) -> None:
        if self.resume and self.fresh:
            raise UsageError("--resume goes on with the run, --fresh removes it: give one of them")
        if self.resume and not self.durable:
            raise UsageError("--no-durable leaves nothing to resume: give --resume or --no-durable")
        if self.dry_run and (self.json_file or self.timeline_file):
            raise UsageError("--dry-run begins nothing that --json or --timeline could tell of: leave them out")
        check_writable(self.json_file, self.timeline_file)

    @property
    def options(self) -> list[str]:
        """``given``, as the options it came from."""
        return [
            part
            for name, value in self.given.items()
            for one in (value if isinstance(value, tuple) else (value,))
            for part in (f"--{name.replace('_', '-')}", _spelled(name, one))
        ]

    def command(self, *options: str) -> str:
        """Return the command that calls the job on the same store with ``options``."""
        stores = [part for directory in self.directories for part in ("--store", str(directory))]
        return f"{self.program} {shlex.join(['train', *options, *stores])}"


def _spelled(name: str, value: object) -> str:
    """Return the value of an option as people write it."""
    spell = {"dram": spell_bytes, "hold": spell_bytes, "device_memory": spell_bytes, "params": spell_count}.get(name)
    return spell(value) if spell and isinstance(value, int) else str(value)


def train(request: Request) -> int:
    """Run the job and return its exit status: 0, or 130 and 143 when Ctrl-C and SIGTERM stopped it in good order.

    Everything that can be refused is refused before the store is touched. Raises TieredError and ValueError.
    """
    found = _find(request)
    plan = _plan(request, found)
    corpus = Corpus.of_paths(plan.dials.data) if plan.dials.data else Corpus.of_standard_library()
    config = plan.config
    loader = Loader(corpus, batch=config.batch, context=config.context, seed=config.seed)
    _say(request, plan, corpus)
    plan.check_space()
    go_on = request.command("--resume", "--steps", str(2 * max(plan.dials.steps, plan.first_step)))
    if not plan.num_steps:
        say(_where(plan))
        print(f"go on   {go_on}")
        with tiered.Store(*request.directories, dram=16 * MiB, mode="r") as store:
            _write_json(request, RunSummary.of(plan, (), store))
        if request.timeline_file:
            say(f"drawn   {write_timeline(request.timeline_file, (), 0)}")
        return 0
    plan.check_budget()
    for line in plan.warnings():  # order: a refusal is all that a user reads
        print("\n".join(fold(f"warning: {line}", indent=2)), file=sys.stderr)
    if request.dry_run:
        words = {"--fresh": request.fresh, "--resume": request.resume, "--no-durable": not request.durable}
        options = [word for word, is_given in words.items() if is_given]
        print(f"nothing was begun or written; begin: {request.command(*options, *request.options)}")
        return 0
    if request.fresh and holds_store(request.directories):
        _confirm_removal(request)
        remove_store(request.directories)
    hint = ResumeHint(plan, resume=request.command("--resume"), start=request.command("--resume", *request.options))
    with Interruption(
        "stopping as soon as the step in hand is finished and committed (Ctrl-C again: at once)",
        lambda: str(hint),
        signals=(signal.SIGINT, signal.SIGTERM),
    ) as interruption:
        outcome = TrainingLoop(plan, loader, interruption, hint, timeline=request.timeline_file).run(
            quiet=request.quiet
        )
    if outcome:
        for line in outcome.lines(None if interruption.requested else go_on):
            if line.startswith("go on "):
                print(line)  # a command, to be copied as it is
            else:
                say(line)
        _write_json(request, outcome)
    if interruption.requested:
        print(f"stopped by {interruption.cause}; {hint}")
        return interruption.status
    return 0


def _where(plan: Plan) -> str:
    """Return where a run with no steps left to do is."""
    if plan.first_step == plan.dials.steps:
        return f"the run has done its {plan.dials.steps} steps"
    return f"the run is at step {plan.first_step}, past the {plan.dials.steps} steps that it is to have"


def _write_json(request: Request, outcome: RunSummary) -> None:
    if request.json_file:
        write_report(request.json_file, f"{json.dumps(outcome.as_json())}\n")


def _say(request: Request, plan: Plan, corpus: Corpus) -> None:
    if not request.quiet:
        say(*plan.lines(corpus))
        if request.resume and not plan.first_step:
            say("nothing is committed there yet: starting from step 0")


def _find(request: Request) -> ExistingRun | None:
    """Return the committed run to go on with; UsageError when there is one and no option says what to do with it.

    Also raises UsageError when there is none to go on with, not even an interrupted creation, unless ``yes`` says to
    start one then.
    """
    where = ", ".join(map(str, request.directories))
    if request.resume and not request.yes and not holds_any_file(request.directories):
        raise UsageError(f"no run in {where} to go on with: leave --resume out to start one, or add --yes to it")
    if request.fresh or not holds_store(request.directories):
        return None
    if not request.durable:
        raise UsageError(f"{where} holds a store, --no-durable needs a directory without one: choose another --store")
    found = find_run(request.directories)
    if found is None:
        return None
    if "config" not in found.state:
        raise UsageError(f"{where} holds a store that is no training run: choose another --store")
    if not request.resume:
        raise UsageError(
            f"{where} holds a run at step {committed_step(found.state)}: "
            "go on with it with --resume, or remove it and start anew with --fresh"
        )
    return found


def _plan(request: Request, found: ExistingRun | None) -> Plan:
    state = found.state if found else {}
    config = RunConfig.of_committed(state["config"], request.given) if found else RunConfig.of_given(request.given)
    dials = RunDials.of_committed(state.get("dials", {}), request.given)
    return Plan(
        config,
        dials,
        request.directories,
        durable=request.durable,
        first_step=committed_step(state),
        device=named_device(dials.device, dials.device_memory),
    )


def _confirm_removal(request: Request) -> None:
    where = ", ".join(map(str, request.directories))
    confirm(
        f"remove the store in {where} for good?",
        unasked=f"--fresh removes the store in {where} and there is no terminal to ask on: add --yes",
        declined=f"nothing was removed; {where} is as it was",
        yes=request.yes,
    )
