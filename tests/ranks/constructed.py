"""Cases of models that several ranks construct in their stores, each byte of a parameter on one rank."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForMaskedLM

import tiered
from tests.models import GPT, Case, batch_of_tokens
from tests.ranks.processes import case
from tests.ranks.training import ZOO, digests_of, group_of, pieces_of, recipe_of
from tests.reference import Trained
from tests.zero.training import Session, budget_named_in, start
from tiered.errors import CapacityError

constructing: Any = importlib.import_module("tiered.zero.construct")  # tiered.zero has the function of that name

__all__ = ["NUM_MICRO_STEPS", "build", "looks_of", "parameter_nbytes", "rate_of", "rows_of"]


def _habits() -> nn.Module:
    """Initialised by a parent, tied, deep-copied, parametrized, given other parameters and values, of no element."""
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            "gpt": GPT(2, head="tied"),
            "norm": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            "batch_norm": nn.BatchNorm1d(4),
            "coarse": nn.Linear(5, 7).to(torch.bfloat16),
        }
    )
    model["coarse"].empty = nn.Parameter(torch.empty(0, 3))
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.numel() and parameter.dtype == torch.float32:
            nn.init.orthogonal_(parameter)
    gpt: Any = model["gpt"]
    kept = gpt.blocks[0].proj.weight.data
    with torch.no_grad():
        gpt.blocks[0].fc.weight[3:5] = 0.5
        gpt.pos.weight.mul_(gpt.emb.weight.norm())
    gpt.ln.weight.data = torch.randn(24)
    gpt.blocks[0].fc.weight.data = gpt.blocks[1].fc.weight.data.sin().t()
    gpt.blocks[1].ln1.bias = nn.Parameter(torch.randn(24))
    del gpt.blocks[1].ln2.bias
    kept[2:4] = 1.5
    return model


def _bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(vocab_size=509, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    )


class _Apart(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        if kind == "fails":
            raise ValueError("no such width")
        self.second = nn.Linear(64, 64)
        if kind == "shares":
            self.second.weight.data = self.first.weight.data
        nn.init.constant_(self.first.weight, 2.0 if kind == "constants" else 1.0)
        self.third = nn.Linear(64, 64)
        self.third.weight.data = self.third.weight.data + self.first.weight.sum() * 0


def _batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_of_tokens(index, vocab=509)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(input_ids=batch[0], labels=batch[1]).loss  # type: ignore[no-any-return]


ZOO["bert"] = Case(_bert, _batch, _loss)

BUILDS: dict[str, Callable[[], nn.Module]] = {
    "habits": _habits,
    "bert": _bert,
    "large": lambda: nn.Sequential(*(nn.Linear(320, 320, bias=False) for _ in range(64))),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(11)
    return BUILDS[kind]()


def looks_of(model: nn.Module) -> dict[str, str]:
    """Return digests of all values of ``model``, and what tells parameters of one value apart."""
    looks = {name: f"{p.dtype} {p.stride()} {p.requires_grad}" for name, p in model.named_parameters()}
    return digests_of(Trained(parameters=model.state_dict())) | looks | {"drawn": str(torch.rand(3).tolist())}


def parameter_nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@case
def construct(send: Callable[[Any], None], *, kind: str, world: int, parks: bool) -> Any:
    """Construct and shard; return looks, the bytes that each of the two wrote, and the peak of DRAM.

    ``parks``: no two parameters are shown together. A "large" model is larger than the budget, the smallest of all.
    """
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    nbytes = (8 << 20) if kind == "large" else 64 << 20
    while True:
        try:
            with contextlib.ExitStack() as stack:
                if parks:
                    stack.enter_context(mock.patch.object(constructing, "_SHOWN_PART", 1 << 40))
                return _construct(kind, group, nbytes)
        except CapacityError as error:
            nbytes = budget_named_in(error)


def _construct(kind: str, group: Any, nbytes: int) -> Any:
    options: dict[str, Any] = {"durable": False, "process_group": group, "rank_deadline": 30}
    with (
        tempfile.TemporaryDirectory(prefix="tiered-") as directory,
        tiered.Store(directory, dram=nbytes * group.size(), **options) as store,
    ):
        with tiered.construct(store):
            model = build(kind)
        assert store.ranks is not None
        moved = store.ranks.comm_thread.statistics().moved_bytes
        squeezed = store.statistics().write_bytes
        drawn = torch.get_rng_state()
        tiered.shard(model, store, hold=0)
        written = store.statistics().write_bytes
        torch.set_rng_state(drawn)
        return {"looks": looks_of(model), "constructed": squeezed, "sharded": written - squeezed, "moved": moved,
                "budget": nbytes, "peak": store.statistics().peak_bytes}  # fmt: skip


@case
def construct_apart(send: Callable[[Any], None], *, kind: str, world: int, parks: bool) -> str | None:
    """Construct another model on rank 1; return the error of each rank."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    is_odd = group.rank() == 1
    torch.manual_seed(is_odd and kind == "values")
    options: dict[str, Any] = {"durable": False, "process_group": group, "rank_deadline": 10}
    part = (1 << 40) if parks else 4
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tiered-") as directory,
            tiered.Store(directory, dram=(64 << 20) * world, **options) as store,
            mock.patch.object(constructing, "_SHOWN_PART", part),
        ):
            with tiered.construct(store) if kind != "not constructed" or not is_odd else contextlib.nullcontext():
                model = _Apart(kind if is_odd or kind == "shares" else "")
            if is_odd and kind == "drive":
                with mock.patch.object(type(store.working_set), "swap_out", side_effect=OSError("a drive")):
                    tiered.shard(model, store)
            tiered.shard(model, store)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- accelerate --------------------------------------------------------------------------------------------------------


NUM_ROWS, ROWS, NUM_MICRO_STEPS = 35, 2, 2
"""For three ranks: 18 batches, so six for each, of which the last takes a row from the start; three steps."""


def _rows(num: int, seed: int) -> TensorDataset:
    tokens, labels = torch.randint(509, (2, num, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, labels)


def rows_of(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of the training, of those of all ranks."""
    rows = _rows(NUM_ROWS, 0)
    both = [rows[number % NUM_ROWS] for number in range(index * ROWS, (index + 1) * ROWS)]
    return torch.stack([each[0] for each in both]), torch.stack([each[1] for each in both])


def rate_of(step: int, world: int) -> float:
    """Return the learning rate of a step: accelerate steps a scheduler once for each rank."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    for _ in range(step * world):
        optimizer.step()
        scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


@contextlib.contextmanager
def _accelerated(**options: Any) -> Iterator[tuple[Session, Any]]:
    """A session over all ranks, of which accelerate knows as torchrun tells of them, and its Accelerator."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    rank, world = str(dist.get_rank()), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    with (
        tempfile.TemporaryDirectory(prefix="tiered-") as directory,
        mock.patch.dict(os.environ, told if options.pop("tells", True) else {}),
        tiered.Store(directory, dram=(64 << 20) * world, durable=False, rank_deadline=30) as store,
    ):
        session = start(ZOO["bert"], recipe_of("fp32", num_micro_steps=NUM_MICRO_STEPS), store)
        try:
            yield session, Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICRO_STEPS)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


@case
def accelerate(send: Callable[[Any], None]) -> Any:
    """Train and evaluate BERT by the whole loop of accelerate's examples; return digests and what it has gathered."""
    with _accelerated() as (session, accelerator):
        held, trained = _rows(7, 1), session.trained
        optimizer = session.optimizer
        made = [
            session.model,
            optimizer,
            *(DataLoader(rows, ROWS, generator=torch.Generator()) for rows in (_rows(NUM_ROWS, 0), held)),
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20),
        ]
        model, optimizer, loader, held_loader, scheduler = accelerator.prepare(*made)
        assert model is session.model and optimizer is session.optimizer
        assert not any(isinstance(each, DistributedDataParallel) for each in model.modules())
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = ZOO["bert"].loss(model, batch)
                accelerator.backward(loss)
                trained.losses.append(loss.detach().clone())
                if accelerator.sync_gradients:
                    trained.norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.4).clone())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        gathered: list[torch.Tensor] = []
        for tokens, labels in held_loader:
            with torch.no_grad():
                guesses = model(input_ids=tokens).logits.argmax(-1)
            gathered.append(torch.stack(accelerator.gather_for_metrics((guesses, labels)), 1))
        whole = _bert().eval()
        whole.load_state_dict(accelerator.get_state_dict(model))
        with torch.no_grad():
            expected = whole(input_ids=held.tensors[0]).logits.argmax(-1)
        return {
            "digests": digests_of(session.collect()),
            "pieces": pieces_of(model),
            "held": torch.cat(gathered).tolist() == torch.stack([expected, held.tensors[1]], 1).tolist(),
        }


@case
def accelerate_apart(send: Callable[[Any], None], *, kind: str) -> str:
    """Prepare what would train apart or twice; return the error."""
    with _accelerated(tells=kind != "not told") as (session, accelerator):
        try:
            if kind == "prepared before":
                tiered.shard(accelerator.prepare(_bert()), session.store)
            accelerator.prepare(session.optimizer)
        except tiered.UsageError as error:
            return str(error)
    return ""
