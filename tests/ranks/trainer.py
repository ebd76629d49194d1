"""Cases of transformers' Trainer over ranks: tiered.hf.Trainer, and the plain one over DistributedDataParallel.

As a program, by torchrun, it is a script that goes on where it was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

import tiered
from tests.interop.small_models import Masked, Tokens, build, history, training_arguments
from tests.ranks.processes import case
from tests.ranks.training import digests_of
from tests.reference import Trained, _clip
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.state_dict_copies import StateDictCopies

__all__: list[str] = []

OPTIONS: dict[str, Any] = {
    "gradient_accumulation_steps": 4, "max_steps": 5, "max_grad_norm": 0.5, "per_device_eval_batch_size": 1
}  # fmt: skip
"""A pass over the 22 items is a step of four batches and one of two, of which accelerate fills up the last."""


class StoppedError(Exception):
    """The test ends the run on all ranks."""


class Watch(TrainerCallback):
    """Counts exchanges; inside of a step, with gradients pending, it kills rank 1, or stops all ranks."""

    def __init__(self, kills: int, stops: int) -> None:
        self.exchanges: list[int] = []  # that were asked for by the end of each micro-step's backward
        self._kills, self._stops = kills, stops
        self._num_exchanges = 0

    def look_at(self, ranks: Any) -> None:
        """Count what ``ranks`` are asked for from here on."""
        asked = ranks.comm_thread._ask

        def ask(task: Any) -> Any:
            self._num_exchanges += task.text.startswith("exchange")
            return asked(task)

        ranks.comm_thread._ask = ask

    def on_substep_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.exchanges.append(self._num_exchanges)
        if state.global_step == self._kills and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == self._stops:
            raise StoppedError

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.exchanges.append(self._num_exchanges)


class _Losses:
    """Keeps the loss of each micro-step; put it before a Trainer."""

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)  # type: ignore[misc]
        vars(self).setdefault("losses", []).append(loss.item())
        return loss


class Tiered(_Losses, tiered.hf.Trainer):
    """tiered's, with the losses."""


def _mean_in_order(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean of gradients that are added in fp32 in the order of the ranks: ``ranks_reference``'s."""
    gradients = bucket.buffer()
    of_ranks = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, gradients)
    total = torch.zeros_like(gradients)
    for each in of_ranks:
        total = total + each
    mean: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    mean.set_result(total * torch.tensor(1 / len(of_ranks)))
    return mean


class Plain(_Losses, transformers.Trainer):  # type: ignore[misc]
    """transformers' own, over DistributedDataParallel, which clips by the norms of the ranks' pieces of parameters.

    ``adds_in_order``: with the mean of ``ranks_reference``. DistributedDataParallel's depends on who adds which part.
    """

    pieces: dict[str, list[tuple[int, int]]]
    adds_in_order: bool

    def training_step(self, model: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if self.adds_in_order and "losses" not in vars(self):
            model.register_comm_hook(None, lambda _, bucket: _mean_in_order(bucket))
        return super().training_step(model, *arguments, **options)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        named = [(n.removeprefix("module."), p.grad) for n, p in model.named_parameters() if p.grad is not None]
        whole = {name: [(0, gradient.numel())] for name, gradient in named}
        pieces = [(whole | self.pieces)[name] for name, _ in named]
        return _clip([gradient for _, gradient in named], self.args.max_grad_norm, pieces)


def adapted(model: Any) -> Any:
    """Return ``model`` under adapters of PEFT."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Have accelerate know of the ranks, as torchrun tells of them."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with mock.patch.dict(os.environ, names):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def copied() -> Iterator[list[int]]:
    """Lend the number of bytes that ``state_dict()`` copies meanwhile, in a list."""
    nbytes, real = [0], StateDictCopies.copy

    def copy(self: StateDictCopies, segment: Any, values: torch.Tensor) -> torch.Tensor:
        found = real(self, segment, values)
        nbytes[0] += 0 if found.is_meta else found.nbytes
        return found

    with mock.patch.object(StateDictCopies, "copy", copy):
        yield nbytes


def of_both(args: Any) -> dict[str, Any]:
    return {"args": args, "train_dataset": Masked(), "eval_dataset": Tokens(5, 1)}


def run(
    path: str,
    *,
    model: str = "gpt2",
    resume: bool | str = False,
    kills: int = -1,
    stops: int = -1,
    stage: int = 3,
    **options: Any,
) -> dict[str, Any]:
    """Train by tiered.hf.Trainer in a store of ``path``; return what was logged, and digests, {} for a stopped run.

    ``model``: "lora" has adapters in the store, "lora beside" adds them to the sharded model.
    """
    args, watch = training_arguments(Path(path, "out"), **OPTIONS | options), Watch(kills, stops)
    with contextlib.ExitStack() as stack:
        built, store = build("llama" if "lora" in model else model), Path(path, "store")
        if model == "lora beside":
            store = stack.enter_context(tiered.Store(store, dram="128MiB"))
            built = tiered.shard(built.requires_grad_(False), store)
        built = adapted(built) if "lora" in model else built
        tiered_options = {"store": store} | ({} if model == "lora beside" else {"dram": "128MiB", "stage": stage})
        trainer = Tiered(model=built, callbacks=[watch], tiered=tiered_options, **of_both(args))
        stack.callback(trainer.close)
        if trainer.store.ranks is not None:
            watch.look_at(trainer.store.ranks)
        torch.set_num_threads(1)
        with contextlib.suppress(StoppedError):
            trainer.train(resume_from_checkpoint=resume)
            with copied() as nbytes:
                trainer.save_model(str(Path(path, "files")))
            named: Any = [(n, p) for n, p in built.named_parameters() if isinstance(p, TieredParameter)]
            return outcome(trainer) | {
                "exchanges": watch.exchanges,
                "copied": nbytes[0],
                "units": len({p.segment.unit for _, p in named if p.requires_grad}),
                "pieces": {name: (p.segment.stretch.start, p.segment.stretch.stop) for name, p in named},
            }
    return {}


def outcome(trainer: Any) -> dict[str, Any]:
    """Return what both Trainers have, and how many modules accelerate has wrapped."""
    modules = [each for model in (trainer.model_wrapped, trainer.model) for each in model.modules()]
    predicted = torch.from_numpy(trainer.predict(Tokens(3, 2)).predictions)
    parameters = {**trainer.model.state_dict(), "predictions": predicted}
    return {
        "digests": digests_of(Trained(parameters=parameters)),
        "losses": trainer.losses,
        "history": history(trainer),
        "best": trainer.state.best_global_step,
        "wrapped": sum(isinstance(each, DistributedDataParallel) for each in modules),
    }


@case
def train(send: Callable[[Any], None], *, path: str, **options: Any) -> Any:
    """Train over all ranks; return what ``run`` does."""
    with told():
        return run(path, **options)


@case
def train_plain_trainer(
    send: Callable[[Any], None],
    *,
    path: str,
    pieces: dict[str, list[tuple[int, int]]],
    model: str,
    adds_in_order: bool = False,
    **options: Any,
) -> Any:
    """Train over DistributedDataParallel, as one would without tiered."""
    with told():
        built = adapted(build("llama")) if "lora" in model else build(model)
        trainer = Plain(model=built, **of_both(training_arguments(Path(path), **OPTIONS | options)))
        trainer.pieces, trainer.adds_in_order = pieces, adds_in_order
        trainer.train()
        return outcome(trainer)


@case
def refuse(send: Callable[[Any], None], *, kind: str, path: str) -> str:
    """Make and use a Trainer, most of which cannot work over ranks; return the error, "" for none."""
    own = contextlib.nullcontext() if kind.endswith("not told") else told()
    try:
        with own, contextlib.ExitStack() as stack:
            store: Any = Path(path, "store")
            if kind.startswith("alone"):
                store = stack.enter_context(
                    tiered.Store(f"{path}/{dist.get_rank()}", dram="64MiB", process_group=False)
                )
            changes = {"uneven": {"accelerator_config": {"even_batches": False}}, "alone, not told": {"max_steps": 1}}
            args = training_arguments(Path(path, f"out{dist.get_rank()}"), **OPTIONS | changes.get(kind, {}))
            trainer = tiered.hf.Trainer(model=build("gpt2"), tiered={"store": store}, **of_both(args))
            stack.callback(trainer.close)
            trainer.train(resume_from_checkpoint=f"{path}/out/checkpoint-2" if kind == "older folder" else None)
    except (tiered.UsageError, tiered.RankLostError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return ""


def _main() -> None:
    """Be the script: ``path``, where it goes on if it has been there, and the step in which rank 1 is killed."""
    path, kills = sys.argv[1], int(sys.argv[2])
    is_again = any(Path(path, "out").glob("checkpoint-*"))
    found = run(path, resume=is_again, kills=-1 if is_again else kills)
    if dist.get_rank() == 0:
        print(json.dumps(found | {"went on": is_again}))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
