"""Parameters beside the sharded ones, trained over ranks: adapters, by hand and of PEFT, and a gate of one rank."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tiered
from tests.models import Case, Vectors, batch_of_vectors
from tests.ranks.processes import case
from tests.ranks.training import clip_by_torch, digests_of, expected, group_of, over_ranks, recipe_of
from tests.reference import Trained, keep_moments
from tests.zero.training import SEED, Session
from tiered.zero.gradients.exchange import PlainGradients
from tiered.zero.parameters.parameter import TieredParameter

__all__ = ["wanted"]


class Adapted(nn.Module):
    """A Linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(4, base.in_features).bfloat16().float())
        self.up = nn.Parameter((torch.randn(base.out_features, 4) / 8).bfloat16().float())

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x.to(self.down.dtype) @ self.down.T @ self.up.T).to(x.dtype)


def adapt(model: Any, kind: str, dtype: torch.dtype) -> Any:
    """Add to ``model``, by PEFT or by hand: adapters, a gate, and what is never used."""
    if kind == "peft":
        import peft

        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up"], init_lora_weights=False))
    for block in model.blocks[:2]:
        block.up = Adapted(block.up)
    model.gate, model.idle = (nn.Parameter(torch.randn(n).bfloat16().to(dtype)) for n in (3, 2))
    if kind == "trained":
        for each in (model.gate, model.idle, *(p for b in model.blocks[:2] for p in (b.up.down, b.up.up))):
            each.data = each.to(dtype)
    return model


def case_of(kind: str, world: int, dtype: str) -> Case:
    """Return a case, with its plain model: ``kind`` is "trained" or "frozen", what is sharded, or "peft"."""
    its = recipe_of(dtype).param_dtype or torch.float32

    def build() -> nn.Module:
        model = Vectors(num_blocks=2)
        if kind != "trained":
            model = model.to(its).requires_grad_(False)
        torch.manual_seed(SEED + 10)  # rank 0's
        return adapt(model, kind, torch.float32 if kind == "trained" else its)  # type: ignore[no-any-return]

    def loss(model: Any, numbered: tuple[int, tuple[Any, ...]]) -> Tensor:
        index, batch = numbered
        value = model(*batch)
        if index % world == 1 and index < 2 * world and kind != "peft":  # on rank 1 alone, and later on none
            value = value + model.gate.float().square().sum()
        return value  # type: ignore[no-any-return]

    return Case(build, lambda index: (index, batch_of_vectors(index)), loss)


@contextlib.contextmanager
def sharded(kind: str, group: Any, dtype: str, *, stage: int = 3, deadline_s: float = 30) -> Iterator[Any]:
    """Shard a model, add to it, other values on each rank; yield the store and the model."""
    torch.manual_seed(SEED)
    model, its = Vectors(num_blocks=2), recipe_of(dtype).param_dtype
    model.requires_grad_(kind == "trained")
    options = {"dram": (64 << 20) * group.size(), "durable": False, "process_group": group}
    with (
        tempfile.TemporaryDirectory(prefix="tiered-") as directory,
        tiered.Store(directory, rank_deadline=deadline_s, **options) as store,
    ):
        model = tiered.shard(model, store, param_dtype=its, stage=stage)
        torch.manual_seed(SEED + 10 + group.rank())
        yield store, adapt(model, kind, its or torch.float32)


@case
def train_plain(
    send: Callable[[Any], None],
    *,
    kind: str,
    world: int,
    dtype: str,
    update: str = "step",
    stage: int = 3,
    clips: str = "",
    num_micro_steps: int = 1,
    accumulates: bool = False,
    mutant: bool = False,
) -> Any:
    """Train; return digests of everything and this rank's pieces. ``update="backward"``: torch's updates the others."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    recipe = recipe_of(dtype, num_micro_steps=num_micro_steps, max_norm=0.4 if clips else None)
    zoo, others = over_ranks(case_of(kind, world, dtype), group.rank(), world), None
    with contextlib.ExitStack() as stack:
        if clips == "torch":
            stack.enter_context(mock.patch.object(tiered, "clip_grad_norm_", clip_by_torch))
        if mutant:
            stack.enter_context(mock.patch.object(PlainGradients, "exchange", lambda self, _: self._held.clear()))
        store, model = stack.enter_context(sharded(kind, group, dtype, stage=stage))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if update == "backward":
            plain = [parameter for parameter in parameters if not isinstance(parameter, TieredParameter)]
            others = torch.optim.AdamW(plain, fused=True, **recipe.adamw)
            parameters = [parameter for parameter in parameters if isinstance(parameter, TieredParameter)]
        optimizer = tiered.AdamW(parameters, update=update, store=store, **recipe.adamw)
        adds = "backward" if accumulates else update  # Session's word for micro-steps under accumulate
        session = Session(zoo, recipe, adds, store, model, optimizer, None, Trained())
        torch.manual_seed(SEED + 1)
        for step in range(recipe.num_steps):
            session.run_step(step)
            if others is not None:
                others.step()
                others.zero_grad()
        trained = session.collect()
        for name, parameter in model.named_parameters():
            if others is not None and parameter in others.state:
                keep_moments(trained, name, others.state[parameter])
                trained.num_updates[name] = int(others.state[parameter]["step"])
        named = [(name, p.segment.stretch) for name, p in model.named_parameters() if isinstance(p, TieredParameter)]
    pieces = {name: (stretch.start, stretch.stop) for name, stretch in named}
    found = {"digests": digests_of(trained), "pieces": pieces}
    if kind == "peft":  # which takes long to import: once
        found["wanted"] = wanted(kind=kind, world=world, dtype=dtype) if group.rank() == 0 else None
    return found


def wanted(
    *,
    kind: str,
    world: int,
    dtype: str,
    update: str = "step",
    num_micro_steps: int = 1,
    accumulates: bool = False,
    pieces: list[dict[str, tuple[int, int]]] | None = None,
) -> list[dict[str, str]]:
    """Return the digests of each rank by plain PyTorch; with ``pieces``, gradients are clipped."""
    return expected(
        case_of(kind, world, dtype), world=world, dtype=dtype if kind == "trained" else "fp32",
        update="backward" if accumulates else update, num_micro_steps=num_micro_steps,
        max_norm=None if pieces is None else 0.4, pieces=pieces,
    )  # fmt: skip


# -- loops -------------------------------------------------------------------------------------------------------------


def _steps(model: Any, optimizer: Any, zoo: Case, steps: range) -> list[Any]:
    for step in steps:
        zoo.loss(model, zoo.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sorted(digests_of(Trained(parameters=model.state_dict())).items())


@case
def habits(send: Callable[[Any], None], *, world: int) -> Any:
    """Return what differs of what a loop may do with plain parameters; "" where nothing does."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    zoo, found = over_ranks(case_of("frozen", world, "bf16"), group.rank(), world), dict[str, Any]()
    with sharded("frozen", group, "bf16") as (store, model):
        head = nn.Parameter(torch.randn(2))  # outside of the model
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = tiered.AdamW([*adapters, head], lr=1e-2, store=store)
        _steps(model, optimizer, zoo, range(2))
        values, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
        first = _steps(model, optimizer, zoo, range(2, 4))
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
        found["loaded"] = first == _steps(model, optimizer, zoo, range(2, 4))
        with tiered.unsharded(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

        def gradients() -> list[Tensor]:
            return [p.grad.clone() for p in (*adapters, head) if p.grad is not None]

        def is_whole(now: list[Tensor]) -> bool:
            return len(now) == len(whole) and all(map(torch.equal, now, whole))

        def backward(index: int, weight: int = group.rank() + 1) -> list[Tensor]:
            loss = zoo.loss(model, zoo.batch(index))
            (loss + head.square().sum() * weight if weight else loss).backward()
            return gradients()

        whole = backward(2)
        found["outside"] = whole[-1].allclose(head.detach() * (world + 1))
        asked = torch.autograd.grad(head.square().sum(), head)[0]
        found["asked"] = asked.equal(2 * head) and is_whole(gradients())
        with model.no_sync():
            backward(3)
        model.zero_grad()
        head.grad = None
        found["dropped"] = is_whole(backward(2))
        with model.no_sync():
            backward(3)
        model.zero_grad()
        head.grad = None
        on_one = backward(2, weight=int(group.rank() == 1))
        found["dropped and used by one"] = on_one[-1].allclose(head.detach() * 2 / world) and len(on_one) == len(whole)
        optimizer.zero_grad()
        backward(2)
        with model.no_sync():
            backward(3)
        optimizer.zero_grad(set_to_none=False)
        found["zeroed"] = is_whole(backward(2))
        optimizer.step()
        optimizer.zero_grad()
        scaler = tiered.GradScaler("cpu", init_scale=4.0)
        before = _steps(model, optimizer, zoo, range(0))
        loss = zoo.loss(model, zoo.batch(4)) * (float("inf") if group.rank() == world - 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found["scaled"] = scaler.get_scale() == 2.0 and before == _steps(model, optimizer, zoo, range(0))
        found["end"] = str(_steps(model, optimizer, zoo, range(5, 6)))
    return found


@case
def differ_plain(send: Callable[[Any], None], *, kind: str, world: int) -> str:
    """Do something on rank 0 alone, or what no rank may; return the error, "" for none."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    zoo = over_ranks(case_of("frozen", world, "fp32"), group.rank(), world)
    try:
        with sharded("frozen", group, "fp32", deadline_s=3.0) as (store, model):
            _differ(kind, store, model, zoo, is_odd=group.rank() == 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _differ(kind: str, store: tiered.Store, model: Any, zoo: Case, *, is_odd: bool) -> None:
    down, num = model.blocks[0].up.down, 3 if is_odd else 2
    if kind == "other names":
        setattr(model, f"more{num}", nn.Parameter(torch.zeros(2)))
    if kind == "other shapes":
        model.more = nn.Parameter(torch.zeros(num))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = tiered.AdamW(parameters, lr=1e-2, store=store)
    _steps(model, optimizer, zoo, range(1))
    if is_odd and kind == "new ones":
        model.more = nn.Parameter(torch.zeros(2))
    with model.no_sync() if kind == "only added" else contextlib.nullcontext():
        zoo.loss(model, zoo.batch(1)).backward(create_graph=kind == "graph")
    with torch.no_grad():
        if is_odd and kind == "dropped":
            down.grad = None
        if is_odd and kind == "scaled":
            down.grad.mul_(0.5)
        if is_odd and kind == "written":
            down.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    _steps(model, optimizer, zoo, range(2, 3))


@case
def alone(send: Callable[[Any], None], *, world: int) -> str:
    """Make an optimizer of plain parameters alone."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ""
    options = {"dram": (64 << 20) * world, "durable": False, "process_group": group}
    with tempfile.TemporaryDirectory(prefix="tiered-") as directory, tiered.Store(directory, **options) as store:
        try:
            tiered.AdamW(nn.Linear(2, 2).parameters(), store=store)
        except tiered.UsageError as error:
            return str(error)
    return ""


@case
def carry_adapters(send: Callable[[Any], None], *, path: str, world: int, num_steps: int) -> Any:
    """Train PEFT's adapters with commits; return digests of them, of the model and of the optimizer's state."""
    import peft

    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    options = {"dram": (64 << 20) * world, "process_group": group if world > 1 else False, "rank_deadline": 30}
    with tiered.Store(path, **options) as store:
        torch.manual_seed(SEED)
        model = tiered.shard(Vectors(num_blocks=2), store)
        torch.manual_seed(SEED + 10 + group.rank())
        model = adapt(model, "peft", torch.float32)
        optimizer = tiered.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, store=store)
        for step in range(store.resume().get("step", 0), num_steps):
            model(*batch_of_vectors(world * step + group.rank())).backward()
            optimizer.step()
            store.commit({"step": step + 1})
        state = optimizer.state_dict()["state"]
        found = peft.get_peft_model_state_dict(model) | model.state_dict()
        found |= {f"{number}.{name}": value for number, each in state.items() for name, value in each.items()}
        return digests_of(Trained(parameters=found)), store.state["step"]
