"""`tiered train`: from the request of the command line to the loop that trains, and to the report of what it did.

Under torchrun every rank runs it; what one of them refuses is refused on all.
All that can be refused is refused before a store is written to, and none is before the plan has been said and agreed
to. The loop is the one that any user would write around a model, with a stopwatch and an ear for Ctrl-C.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

import tiered
from tiered.errors import CapacityError, TieredError, UsageError
from tiered.tools.console import Interruption, check_writable, confirm, fold, say, write_report
from tiered.tools.inspect import find_run, holds_any_file, holds_store, remove_store
from tiered.tools.train.config import DTYPES, RunConfig, RunDials, committed_step
from tiered.tools.train.launch import Launch, StepNews
from tiered.tools.train.plan import Plan, check_room
from tiered.tools.train.summary import CAPACITY, RunSummary, StepRecord, Stopwatch, matrix_flop_per_s, write_timeline
from tiered.tools.train.task import GPT, Corpus, Loader
from tiered.units import MiB
from tiered.zero.compute_device import named_device

__all__ = ["OPTIONS", "Request", "TrainingLoop", "train"]

OPTIONS = {"params", *(each.name for each in (*fields(RunConfig), *fields(RunDials)))}
"""The options of the command line that make a configuration and its dials."""


# -- request -------------------------------------------------------------------------------------------------------


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
    words: tuple[str, ...] = ("train",)  # of the command line, as the user wrote them

    def __post_init__(self) -> None:
        if self.resume and self.fresh:
            raise UsageError("--resume goes on with the run, --fresh removes it: give one of them")
        if self.resume and not self.durable:
            raise UsageError("--no-durable leaves nothing to resume: give --resume or --no-durable")
        if self.dry_run and (self.json_file or self.timeline_file):
            raise UsageError("--dry-run begins nothing that --json or --timeline could tell of: leave them out")
        check_writable(self.json_file, self.timeline_file)

    @property
    def where(self) -> str:
        """The directories, for people."""
        return ", ".join(map(str, self.directories))

    def as_written(self, *, without: Sequence[str]) -> str:
        """Return the command as the user wrote it, but for some of its words."""
        return f"{self.program} {shlex.join(word for word in self.words if word not in without)}"

    def command(self, *options: str) -> str:
        """Return the command that calls the job on the same store with ``options``."""
        stores = [part for directory in self.directories for part in ("--store", str(directory))]
        return f"{self.program} {shlex.join(['train', *options, *stores])}"

    def write_json(self, outcome: RunSummary) -> None:
        """Write ``outcome`` to the file that was asked for, if one was."""
        if self.json_file:
            write_report(self.json_file, f"{json.dumps(outcome.as_json())}\n")


def train(request: Request) -> int:
    """Run the job and return its exit status: 0, or 130 and 143 when Ctrl-C and SIGTERM stopped it in good order.

    Everything that can be refused is refused before the store is touched. Raises TieredError and ValueError.
    """
    launch = Launch.begin()
    if not launch.is_first:
        request = replace(request, json_file=None, timeline_file=None)
    with launch.alone():
        return _train(replace(request, program=launch.program or request.program), launch)


def _train(request: Request, launch: Launch) -> int:
    request = _after_restart(request, launch)
    plan = _agreed_plan(request, launch)
    corpus, loader = _agreed_data(plan, launch)
    if not request.quiet:
        say(*plan.lines(corpus))
        if request.resume and not plan.first_step:
            say("nothing is committed there yet: starting from step 0")
    check_room(each for needs in launch.together("space", lambda: plan.space_needs(launch.machine)) for each in needs)
    go_on = request.command("--resume", "--steps", str(2 * max(plan.dials.steps, plan.first_step)))
    if not plan.num_steps:
        _say_done(request, plan, go_on)
        return 0
    launch.together("budget", plan.check_budget)
    for line in plan.warnings() if launch.is_first else ():  # order: a refusal is all that a user reads
        print("\n".join(fold(f"warning: {line}", indent=2)), file=sys.stderr)
    if request.dry_run:
        print(f"nothing was begun or written; begin: {request.as_written(without=('--dry-run',))}")
        return 0
    if request.fresh and (status := _make_room(request, plan, launch)):
        return status
    loop = TrainingLoop(plan, loader, request, launch)
    with Interruption(
        "stopping as soon as the step in hand is finished and committed (Ctrl-C again: at once)" * launch.is_first,
        loop.hint if launch.is_first else str,
        signals=(signal.SIGINT, signal.SIGTERM),
    ) as interruption:
        outcome = loop.run(interruption)
    if outcome:
        for line in outcome.lines(None if interruption.requested else go_on):
            if line.startswith("go on "):
                print(line)  # a command, to be copied as it is
            else:
                say(line)
        request.write_json(outcome)
    if interruption.requested:
        print(f"stopped by {interruption.cause}; {loop.hint()}")
        return interruption.status
    return 0


def _after_restart(request: Request, launch: Launch) -> Request:
    """Return the request of a process that torchrun has started again: it goes on with what its last life committed.

    That is a run of the configuration that the command makes, on any rank; nothing is asked then, and nothing removed,
    nor where none of them has committed anything.
    """
    if not launch.num_restarts or request.resume or not request.durable:
        return request

    def committed() -> str:
        own = launch.directories(request.directories)
        found = find_run(own) if holds_store(own) else None
        if found is None:
            return "nothing"
        config = asdict(RunConfig.of_given({**request.given, "world": launch.world}))
        had = found.state.get("config")
        return "its own" if isinstance(had, dict) and {"world": 1, **had} == config else "another"

    told = launch.together("restart", committed)
    if "its own" in told:
        return replace(request, resume=True, fresh=False, yes=True)
    return request if "another" in told else replace(request, fresh=False)


def _agreed_plan(request: Request, launch: Launch) -> Plan:
    """Return the plan of this rank, which is that of all of them. Raises on all what is wrong on one."""
    plans: list[Plan] = []

    def look() -> tuple[dict[str, object], int]:
        plans.append(plan := _plan(request, launch))
        return {**asdict(plan.config), **asdict(plan.dials), "data": ()}, plan.first_step

    told = launch.together("plan", look)
    launch.check_equal([each[0] for each in told], "the same command on all ranks")
    return replace(plans[0], first_step=min(each[1] for each in told))  # which is the newest that all have


def _agreed_data(plan: Plan, launch: Launch) -> tuple[Corpus, Loader]:
    """Return the text and this rank's loader of it. UsageError where the ranks have other text."""
    config, found = plan.config, []

    def read() -> dict[str, object]:
        corpus = Corpus.of_paths(plan.dials.data) if plan.dials.data else Corpus.of_standard_library()
        loader = Loader(corpus, batch=config.batch, context=config.context, seed=config.seed, rank=launch.rank)
        found.append((corpus, loader))
        return {"data": f"{corpus.nbytes:,} bytes ({corpus.fingerprint})"}

    launch.check_equal(launch.together("data", read), "the same files on all ranks")
    return found[0]


def _make_room(request: Request, plan: Plan, launch: Launch) -> int:
    """Remove the store that is there, of all ranks, once that is agreed to; return 0, or the exit status for a no."""
    holds = launch.together("fresh", lambda: holds_store(plan.directories))
    if not any(holds):
        return 0
    status = launch.asked(
        lambda: confirm(
            f"remove the store in {request.where} for good?",
            unasked=f"--fresh removes the store in {request.where} and there is no terminal to ask on: add --yes",
            declined=f"nothing was removed; {request.where} is as it was",
            yes=request.yes,
        )
    )
    if not status:
        launch.together("removal", lambda: remove_store(plan.directories) if holds[launch.rank] else None)
    return status


def _say_done(request: Request, plan: Plan, go_on: str) -> None:
    """Say where a run with no steps left to do is, and write the reports of it."""
    if plan.first_step == plan.dials.steps:
        say(f"the run has done its {plan.dials.steps} steps")
    else:
        say(f"the run is at step {plan.first_step}, past the {plan.dials.steps} steps that it is to have")
    print(f"go on   {go_on}")
    with tiered.Store(*plan.committed, dram=16 * MiB, mode="r", process_group=False) as store:
        request.write_json(RunSummary(plan, (), store))
    if request.timeline_file:
        say(f"drawn   {write_timeline(request.timeline_file, (), 0)}")


def _plan(request: Request, launch: Launch) -> Plan:
    """Return the plan of a new run, or of the committed one to go on with, as this rank finds it.

    Raises UsageError where there is a run and no option says what to do with it; also where there is none to go on
    with, not even an interrupted creation, unless ``yes`` says to start one then.
    """
    where, found, own = request.where, None, launch.directories(request.directories)
    origin = launch.origin(request.directories)
    committed = own if origin is None else origin.stores[0]
    if request.fresh and origin is not None:
        raise UsageError(f"{where} holds a run of {origin}, which --fresh does not remove: choose another --store")
    if request.resume and not request.yes and not holds_any_file(committed):
        raise UsageError(f"no run in {where} to go on with: leave --resume out to start one, or add --yes to it")
    if not request.fresh and holds_store(committed):
        if not request.durable:
            raise UsageError(
                f"{where} holds a store, --no-durable needs a directory without one: choose another --store"
            )
        found = find_run(committed)
    state = found.state if found else {}
    if found and "config" not in state:
        raise UsageError(f"{where} holds a store that is no training run: choose another --store")
    if found and not request.resume:
        raise UsageError(
            f"{where} holds a run at step {committed_step(state)}: "
            "go on with it with --resume, or remove it and start anew with --fresh"
        )
    given = {**request.given, "world": launch.world}
    config = RunConfig.of_committed(state["config"], given) if found else RunConfig.of_given(given)
    dials = RunDials.of_committed(state.get("dials", {}), given)
    launch.take_device(dials.device, dials.device_memory)
    return Plan(
        config, dials, own, durable=request.durable, first_step=committed_step(state),
        device=named_device(dials.device, dials.device_memory), local_world=launch.local_world,
        committed=committed, before=0 if origin is None else origin.world,
    )  # fmt: skip


# -- loop ----------------------------------------------------------------------------------------------------------


class _StoppedError(Exception):
    """Leaves the store's block before the first step, so that no half-built model is committed on the way out."""


class TrainingLoop:
    """One process's part of a run, used by the main thread; after ``run`` the store is closed in any case.

    A step is either committed whole or does not count: the run is always resumable from its last commit.
    """

    def __init__(self, plan: Plan, loader: Loader, request: Request, launch: Launch) -> None:
        self._launch = launch
        self._plan, self._config, self._loader, self._request = plan, plan.config, loader, request
        self._is_built = False
        self._durable_step = plan.first_step or -1  # the last one known to be committed, -1 before the first
        self._sealed_step = self._durable_step  # of the last commit that was begun, which may be on its way still
        self._step_of: dict[int, int] = {}  # by generation sealed in this process

    def hint(self) -> str:
        """Return the advice for a user whose run stops now."""
        step, sealed, request = self._durable_step, self._sealed_step, self._request
        if not self._plan.durable:
            return "nothing is kept of a run with --no-durable"
        later = f", or from step {sealed} if its commit came through" if sealed > step else ""
        if step < 0:
            nothing = "" if later else "nothing was committed yet, "
            start = f"{request.as_written(without=('--resume', '--fresh'))} --resume"
            return f"{nothing}the run is resumable from step 0{later}: {start}"
        return f"the run is resumable from step {step}{later}: {request.command('--resume')}"

    def run(self, interruption: Interruption) -> RunSummary | None:
        """Train to the plan's last step or to Ctrl-C; return the summary, None when no step was begun.

        Once the model stands, an error names the command to go on with. Before, a new store that lacks room is removed.
        """
        plan, dials, is_new = self._plan, self._plan.dials, not holds_any_file(self._plan.directories)
        if plan.device.index is not None:  # for good: what the run leaves is freed as the process ends
            torch.accelerator.set_device_index(plan.device.index)
        device_memory = 0 if plan.device.type == "cpu" else dials.device_memory  # None: from what is free there
        made = {path for each in plan.directories for path in (each, *each.parents) if not path.exists()}
        try:
            self._launch.join(plan.device)  # order: from here on the ranks wait for each other
            with tiered.Store(
                *self._request.directories, dram=dials.dram, device_memory=device_memory, durable=plan.durable
            ) as store:
                return self._train(store, interruption)
        except _StoppedError:
            return None
        except TieredError as error:
            if self._is_built:
                error.add_note(self.hint())
            elif is_new and isinstance(error, CapacityError):
                with suppress(OSError, TieredError):
                    if find_run(plan.directories) is None:  # nobody else has committed there since
                        remove_store(plan.directories)
                    for path in sorted(made, reverse=True):  # inner ones first; none that is not empty
                        path.rmdir()
            raise

    def _train(self, store: tiered.Store, interruption: Interruption) -> RunSummary:
        plan, timeline_file = self._plan, self._request.timeline_file
        self._say(f"{'going on with' if plan.first_step else 'building'} the model")
        model, optimizer, step = self._build(store)
        self._is_built = True
        peak = 0.0 if plan.device.type == "cpu" else matrix_flop_per_s(plan.device, DTYPES[self._config.dtype])
        news = self._news = StepNews(store.ranks, interruption)
        news.tell(0.0)
        news.hear()
        if news.is_last:
            raise _StoppedError
        records: list[StepRecord] = []
        if timeline_file is not None:
            store.working_set.recorder.start(CAPACITY)
        stopwatch = Stopwatch(store)
        while step < plan.dials.steps and not news.is_last:
            loss = self._step(model, optimizer, step)
            step += 1
            if step % plan.dials.commit_every == 0:
                self._commit(store, step)
            records.append(stopwatch.lap(step, loss, self._config.tokens_per_step))
            self._say(f"step {step}/{plan.dials.steps}  {records[-1].seconds:.2f} s  {records[-1]}")
        self._commit(store, step)  # also between two commits
        if plan.durable:
            store.wait_for_commit()
            self._commit(store, step)  # which notes that the step is durable
        drawn = write_timeline(timeline_file, *store.working_set.recorder.stop()) if timeline_file is not None else ""
        summary = RunSummary(plan, records, store, peak_flop_per_s=peak, timeline=drawn)
        if store.ranks is not None:
            summary.compare(store.ranks)
        return summary

    def _say(self, text: str) -> None:
        if not self._request.quiet:
            say(text)

    def _build(self, store: tiered.Store) -> tuple[torch.nn.Module, torch.optim.Optimizer, int]:
        """Return the model, its optimizer and the number of steps done, all as the last commit left them."""
        config, dials, device = self._config, self._plan.dials, self._plan.device
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        with tiered.construct(store, device=device):
            built = GPT(config.shape)
        model = tiered.shard(
            built, store, param_dtype=DTYPES[config.dtype], device=device, activations=dials.activations,
            hold=dials.hold, update_on=dials.update_on,
        )  # fmt: skip
        optimizer = tiered.AdamW(model.parameters(), lr=config.lr, update=config.update, state=config.state)
        if not self._plan.durable:
            return model, optimizer, 0
        store.register("loader", self._loader)
        return model, optimizer, store.resume().get("step", 0)

    def _step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Make one optimizer step and return the mean loss of its micro-steps, over all ranks.

        Raises UsageError for a loss that teaches nothing, infinite or NaN, before anything has learnt from it.
        """
        config, device, total = self._config, self._plan.device, 0.0
        for micro_step in range(config.accumulate):
            only_adds = config.update == "backward" and micro_step < config.accumulate - 1
            with tiered.accumulate(model) if only_adds else nullcontext():
                batch: Sequence[torch.Tensor] = next(self._loader)  # tokens and targets, each int64 (batch, context)
                if device.type != "cpu":
                    batch = [each.pin_memory().to(device, non_blocking=True) for each in batch]
                loss = model(*batch)
                value = float(loss.item())
                if not math.isfinite(value):
                    raise UsageError(f"the loss of step {step + 1} is {value}: start again with a lower --lr")
                total += value
                if micro_step == config.accumulate - 1:
                    self._news.tell(total / config.accumulate)  # order: it goes beside the backward
                (loss if config.accumulate == 1 else loss / config.accumulate).backward()
        if config.clip:
            tiered.clip_grad_norm_(model, config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return self._news.hear()

    def _commit(self, store: tiered.Store, step: int) -> None:
        """Seal ``step`` if it is not, and note which step is durable by now."""
        if not self._plan.durable:
            return
        if self._sealed_step != step:
            state = {"step": step, "config": asdict(self._config), "dials": asdict(self._plan.dials)}
            self._sealed_step = step  # order: from here on a second Ctrl-C may find it there
            self._step_of[store.commit(state, wait=False)] = step
        self._durable_step = self._step_of.get(store.generation, self._durable_step)
