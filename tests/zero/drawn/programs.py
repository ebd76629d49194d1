"""Training programs drawn at random: through tiered each gives the bits that it gives by torch alone, or is refused.

Both sides go through the program in lockstep, each with random generators of its own. A refusal ends the program, and
must have changed nothing.
usage: python -m tests.zero.drawn.programs FIRST [END]    says what was wrong with each seed, and for one what it does
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.store.places import quick_directory
from tests.zero.drawn.models import describe
from tests.zero.drawn.plan import draw_plan
from tests.zero.drawn.sides import Plain, Side, Tiered
from tiered.errors import StepAbandonedError, TieredError
from tiered.zero.gradients.stand_in import StandIn

__all__ = ["Program", "batch"]

_BATCH = 25


class Difference(Exception):
    """The two sides are not the same."""


class Refused(Exception):
    """Tiered has said no."""


class Program:
    """The program of ``seed``; ``log`` has what it did, ``refusal`` why it ended early."""

    def __init__(self, seed: int, place: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.plan = draw_plan(rng, seed)
        self.ours, self.plain = Tiered(self.plan, place), Plain(self.plan)
        self.log: list[str] = []
        self.refusal = ""
        self._has_failed = False  # by torch, on both sides
        self._num_batches = 0
        self._committed_random: tuple[Any, ...] = ()
        _seed(seed)
        self._ours_random = self._plain_random = _random_state()

    def run(self) -> str:
        """Run it; return what was wrong."""
        try:
            try:
                self._both("begin", lambda side: side.begin())  # type: ignore[attr-defined]
                self._check()
                for number in range(self.plan.num_steps):
                    for _ in range(self.rng.choice([0, 1, 1, 2])):
                        self._between_steps(number)
                    self._step()
                self._check()
            except Refused:
                if "begin" not in self.log[-1]:
                    self._check_after_refusal()
            finally:
                self._close()
        except Exception as error:
            return f"{type(error).__name__}: {error}, after {', '.join(self.log[-6:])}"
        return ""

    def _close(self) -> None:
        """Close the store, which says so where an error of torch's has left the first step half done."""
        try:
            self.ours.close()
        except StepAbandonedError:
            if not self._has_failed:
                raise

    # -- both sides -----------------------------------------------------------------------------------------------

    def _both(self, name: str, act: Callable[[Any], Any]) -> None:
        """Do the same on both sides. Raises Refused, and Difference for other results, errors or random numbers."""
        self.log.append(name)
        _set_random_state(self._ours_random)
        found, error = _outcome(act, self.ours)
        self._ours_random = _random_state()
        if isinstance(error, TieredError):
            self.refusal = f"{name}: {type(error).__name__}: {error}"
            raise Refused from error
        _set_random_state(self._plain_random)
        expected, expected_error = _outcome(act, self.plain)
        self._plain_random = _random_state()
        if type(error) is not type(expected_error):
            if "modified by an inplace operation" in str(expected_error):
                self._has_failed = True
                raise Refused  # what is computed again finds what it had saved: torch's own checkpoints would, too
            raise Difference(f"{name}: {error!r} instead of {expected_error!r}") from (error or expected_error)
        _compare(name, found, expected)
        _compare(f"random numbers after {name}", self._ours_random, self._plain_random)
        if error is not None and name not in ("thrown", "thrown in backward"):
            self._has_failed = True
            raise Refused from error  # by torch: each side has done what it had done

    def _check(self) -> None:
        self._both("zero_grad", lambda side: side.zero_grad("all"))
        self._both("check", lambda side: [side.parameters(), side.state(), side.buffers()])

    def _check_after_refusal(self) -> None:
        """Compare what can still be looked at: a step that was abandoned half done shows nothing."""
        for name, act in (("parameters", lambda side: side.parameters()), ("state", lambda side: side.state())):
            found, error = _outcome(lambda side, act=act: (side.zero_grad("all"), act(side))[1], self.ours)
            if error is not None and not isinstance(error, TieredError):
                raise error
            if error is None:
                _compare(f"{name} after a refusal", found, act(self.plain))

    # -- a step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        rng, plan = self.rng, self.plan
        in_backward = self.ours.update == "backward"
        self._squeeze(0.2)
        num = rng.choice([1, 1, 1, 2, 3])
        for number in range(num):
            self._micro_step(num, adds_only=in_backward and number < num - 1)
        self._squeeze(0.2)
        is_skipped = False
        if not in_backward:
            is_unscaled = plan.with_scaler and rng.random() < 0.5
            if is_unscaled:
                self._both("unscale", lambda side: side.scaler.unscale_(side.stepped))
            self._gradients()
            if (is_unscaled or not plan.with_scaler) and not self._is_mixed() and rng.random() < 0.4:
                max_norm, norm_type = rng.choice([0.5, 0.01, 1e6]), rng.choice([2.0, 2.0, 1.0, float("inf")])
                self._both(f"clip({max_norm}, {norm_type})", lambda side: side.clip(max_norm, norm_type))
            is_skipped = not plan.with_scaler and rng.random() < 0.1
        if not is_skipped:
            self._both("step", lambda side: side.step())
        how = rng.choice(["all", "model", "zeros"]) if is_skipped else rng.choice(["all", "model"])
        if is_skipped or rng.random() < 0.9:
            self._both(f"zero_grad({how})", lambda side: side.zero_grad(how))
        if plan.scheduler is not None:
            self._both("scheduler.step", lambda side: side.scheduler.step())
        self._both("rates", lambda side: [float(group["lr"]) for group in side.optimizer.param_groups])

    def _is_mixed(self) -> bool:
        """Whether there are fp64 gradients and others, whose norms torch adds up in an order of its own."""
        return len({p.dtype == torch.float64 for p in self.plain.model.parameters() if p.requires_grad}) > 1

    def _loss(self, side: Side, index: int) -> Tensor:
        return side.model(*self.plan.batch(index))

    def _micro_step(self, num: int, *, adds_only: bool) -> None:
        self._num_batches += 1
        index, plan = self._num_batches, self.plan
        kind = self.rng.choice(["usual"] * 8 + ["outside", "two", "input", "penalty", "thrown", "forward", "squeezed"])
        if kind == "thrown":
            self._both("thrown", lambda side: self._thrown(side, index))
        if kind == "thrown" and self.ours.update != "backward":
            self._both("thrown in backward", lambda side: self._thrown_in_backward(side, index))
        if kind == "forward":
            self._both("forward", lambda side: self._loss(side, index).detach().clone())

        def loss(side: Side) -> Tensor:
            x, y = plan.batch(index)
            if kind == "outside":
                return (side.model(x) - y).square().mean()
            if kind == "two":
                return self._loss(side, index) + 0.5 * self._loss(side, index + 500)
            if kind == "penalty":
                terms = [p.float().square().sum() for p in side.model.parameters() if p.is_floating_point()]
                return self._loss(side, index) + 1e-3 * sum(terms)
            return side.model(x.requires_grad_(kind == "input"), y)

        def micro_step(side: Any) -> Tensor:
            with side.accumulating() if adds_only else torch.enable_grad():
                value = loss(side) / num
                if kind == "squeezed" and side is self.ours:
                    side.squeeze()
                (value if side.scaler is None else side.scaler.scale(value)).backward()
            return value.detach().clone()

        self._both(f"micro_step({kind}, {index})", micro_step)

    def _thrown(self, side: Side, index: int) -> None:
        modules = list(side.model.modules())

        def throw(*_: Any) -> None:
            raise KeyError("the loop survives it")

        handle = modules[index % len(modules)].register_forward_pre_hook(throw)
        try:
            self._loss(side, index)
        finally:
            handle.remove()

    def _thrown_in_backward(self, side: Side, index: int) -> None:
        x, y = self.plan.batch(index)
        out = side.model(x)

        def throw(_: Tensor) -> None:
            raise KeyError("the loop survives it")

        out.register_hook(throw)
        (out - y).square().mean().backward()

    def _gradients(self) -> None:
        """Do something to gradients by hand, or by torch's clipping; their values are read where all are in memory."""
        kind, index = (
            self.rng.choice(["", "", "read", "value", "scale", "drop", "put", "add", "clip"]),
            self.rng.randrange(1000),
        )
        gradients = [p.grad for p in self.ours.model.parameters() if p.grad is not None]
        if not kind or not gradients:
            return
        are_in_memory = not any(isinstance(gradient, StandIn) for gradient in gradients)

        def act(side: Side) -> Any:
            parameters = [p for p in side.model.parameters() if p.grad is not None]
            chosen = parameters[index % len(parameters)]
            if kind == "read":
                return [p.grad.clone() if are_in_memory else p.grad.norm() for p in parameters]
            if kind == "clip":
                return [nn.utils.clip_grad_norm_(parameters, 0.05)]
            if kind == "value":
                nn.utils.clip_grad_value_(parameters, 0.01)
            elif kind == "scale":
                for p in parameters:
                    p.grad.mul_(0.5)
            elif kind == "add":
                chosen.grad.add_(0.1)
            else:
                new = torch.empty_strided(chosen.shape, chosen.stride(), dtype=chosen.dtype)  # or torch reads it wrong
                chosen.grad = None if kind == "drop" else new.fill_(0.25)
            return []

        self._both(f"gradients({kind})", act)

    def _squeeze(self, chance: float) -> None:
        if self.rng.random() < chance:
            self.log.append("squeeze")
            self.ours.squeeze()

    # -- between steps --------------------------------------------------------------------------------------------

    def _between_steps(self, number: int) -> None:
        rng, index = self.rng, self.rng.randrange(1000)
        kinds = ["evaluate", "infer", "read", "write", "freeze", "unfreeze", "rate", "decay", "reload", "check", "step"]
        kinds += ["commit", "rollback", "resume", "resume"] if self.plan.durable else []
        kind = rng.choice(kinds)
        names = [name for name, p in self.plain.model.named_parameters() if p.is_floating_point()]
        if kind == "unfreeze":
            names = [n for n in names if n in self._frozen()]
        name = names[index % len(names)] if names else ""
        if kind == "check":
            self._check()
        elif kind in ("commit", "rollback", "resume"):
            self._commit(kind, number)
        elif name and not (kind == "step" and self.plan.with_scaler):
            self._both(f"{kind}({name})", lambda side: getattr(self, f"_{kind}_")(side, name, index))

    def _frozen(self) -> set[str]:
        """Return the parameters that may be unfrozen: the reference has no masters of those frozen from the start."""
        managed = {id(segment.parameter) for segment in self.ours.optimizer._state.steps}
        ours = {name for name, parameter in self.ours.model.named_parameters() if id(parameter) in managed}
        frozen = {name: p.dtype for name, p in self.plain.model.named_parameters() if not p.requires_grad}
        return {name for name, dtype in frozen.items() if name in ours or dtype != torch.bfloat16}

    def _evaluate_(self, side: Side, name: str, index: int) -> Any:
        side.model.eval()
        with torch.no_grad():
            found = self._loss(side, index + 5000).clone()
        side.model.train()
        return found

    def _infer_(self, side: Side, name: str, index: int) -> Any:
        with torch.inference_mode():
            return side.model(self.plan.batch(index + 5000)[0]).clone()

    def _read_(self, side: Any, name: str, index: int) -> Any:
        with side.readable(side.model.get_submodule(name.rpartition(".")[0])):
            return side.model.get_parameter(name).detach().clone()

    def _write_(self, side: Any, name: str, index: int) -> None:
        parameter = side.model.get_parameter(name)
        with side.readable(side.model.get_submodule(name.rpartition(".")[0])), torch.no_grad():
            parameter.mul_(1.5)
            side.wrote(parameter)

    def _freeze_(self, side: Side, name: str, index: int) -> None:
        side.model.get_parameter(name).requires_grad_(False)

    def _unfreeze_(self, side: Side, name: str, index: int) -> None:
        side.model.get_parameter(name).requires_grad_(True)

    def _rate_(self, side: Side, name: str, index: int) -> None:
        for group in side.optimizer.param_groups:
            group["lr"] *= 0.7

    def _decay_(self, side: Side, name: str, index: int) -> None:
        side.optimizer.param_groups[index % len(side.optimizer.param_groups)]["weight_decay"] = 0.02

    def _reload_(self, side: Any, name: str, index: int) -> None:
        side.reload()

    def _step_(self, side: Side, name: str, index: int) -> None:
        side.step()

    def _commit(self, kind: str, number: int) -> None:
        wait, update = self.rng.random() < 0.5, self.rng.choice(["step", "backward"])
        update = self.ours.update if self.plan.with_scaler else update
        if kind == "commit" or self.rng.random() < 0.5:
            self._both("commit", lambda side: side.commit({"step": number}, wait))
            self._committed_random = self._plain_random
        if not self._committed_random or kind == "commit":
            return
        is_trained = {name: p.requires_grad for name, p in self.plain.model.named_parameters()}

        def resume(side: Any) -> Any:
            state = side.rollback() if kind == "rollback" else side.resume(update)
            if side is self.plain:
                _set_random_state(self._committed_random)
            for name, parameter in side.model.named_parameters():
                parameter.requires_grad_(is_trained[name])
            return state

        self._both(f"{kind}({update})", resume)


def _outcome(act: Callable[[Any], Any], side: Side) -> tuple[Any, Exception | None]:
    try:
        return act(side), None
    except Exception as error:
        return None, error


def _compare(what: str, found: Any, expected: Any) -> None:
    """Raise Difference unless both are the same bits; a NaN is a NaN."""
    if isinstance(expected, Tensor):
        is_same = found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan())
        if not is_same or not torch.equal(found.nan_to_num(), expected.nan_to_num()):
            raise Difference(f"{what}: {found} instead of {expected}")
    elif isinstance(expected, dict):
        _compare(f"the names of {what}", sorted(found), sorted(expected))
        for name in expected:
            _compare(f"{what} {name}", found[name], expected[name])
    elif isinstance(expected, list | tuple):
        _compare(f"the number of {what}", len(found), len(expected))
        for mine, theirs in zip(found, expected, strict=True):
            _compare(what, mine, theirs)
    elif found != expected:
        raise Difference(f"{what}: {found} instead of {expected}")


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _random_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state(), (name, keys.tolist(), *rest), random.getstate()


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


def batch(seed: int, place: Path) -> tuple[int, list[str]]:
    """Run the programs of a batch; return their number and what was wrong."""
    outcomes = {program: run(program, place) for program in range(seed * _BATCH, (seed + 1) * _BATCH)}
    return _BATCH, [f"program {program}: {wrong}" for program, (wrong, _) in outcomes.items() if wrong]


def run(seed: int, place: Path) -> tuple[str, Program]:
    """Run one program; return what was wrong, and the program."""
    with tempfile.TemporaryDirectory(dir=place) as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        has_fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it takes plain parameters only
        program = Program(seed, Path(directory))
        try:
            return program.run(), program
        finally:
            torch.backends.mha.set_fastpath_enabled(has_fastpath)


if __name__ == "__main__":
    logging.getLogger("tiered").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    seeds = range(int(sys.argv[1]), int(sys.argv[-1]) + (len(sys.argv) == 2))
    with quick_directory() as shared_memory:
        for number in seeds:
            wrong, done = run(number, shared_memory)
            if len(seeds) == 1:
                print(done.plan, describe(done.plan.make), *done.log, done.refusal, sep="\n")
            if wrong:
                print(f"seed {number}: {wrong}", flush=True)
