"""A case of the zoo trained over ranks: each rank in a process, compared with plain PyTorch by digests of its bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tiered
from tests.accelerator import simulated
from tests.accelerator.registrar import SimulatedRegistrar
from tests.accelerator.training import case_on, device_memory_named_in
from tests.models import CASES, GPT, Case, Vectors, batch_of_tokens, batch_of_vectors
from tests.ranks import device_group
from tests.ranks.processes import case
from tests.reference import MasterAdamW, Recipe, Trained, means_of, ranks_reference
from tests.zero.training import SEED, Session, budget_named_in, start
from tiered.bytes import pinned_arena
from tiered.bytes.pinned_arena import add_registrar
from tiered.errors import CapacityError
from tiered.ranks.comm import GlooComm
from tiered.zero.gradients.exchange import ShardGradient
from tiered.zero.parameters.gather_slots import DeviceSlots

__all__ = [
    "ZOO", "change", "clip_by_torch", "compact_by_one_rank", "digests_of", "expected", "group_of", "on_device",
    "over_ranks",
    "recipe_of",
]  # fmt: skip


class Hollow(torch.nn.Module):
    """One element, which lies on the first rank, so that the others have padding; parameters and spans of none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.empty = torch.nn.Parameter(torch.empty(0, 37))
        self.wide = torch.nn.Parameter(torch.empty(3, 0, dtype=torch.float64))
        self.fixed = torch.nn.Parameter(torch.empty(0, 2, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + (self.empty.sum() + self.wide.sum() + self.fixed.sum()).to(x.dtype)


ZOO = CASES | {
    "gpt_509": Case(functools.partial(GPT, 2, vocab=509), functools.partial(batch_of_tokens, vocab=509)),
    "hollow": Case(functools.partial(Vectors, Hollow), batch_of_vectors, unit=(Hollow,)),
}

_groups: dict[tuple[int, str], Any] = {}  # of the first ranks, by their number and its kind


def recipe_of(dtype: str, **options: Any) -> Recipe:
    return Recipe(param_dtype=None if dtype == "fp32" else torch.bfloat16, num_steps=3, **options)


def group_of(world: int, kind: str = "gloo") -> Any:
    """Return the group of the first ``world`` ranks; all ranks of the set call this alike."""
    if (world, kind) not in _groups:
        backend = {"nccl": "cpu:gloo,cuda:nccl", "xccl": "cpu:gloo,xpu:xccl"}.get(kind, "gloo")
        _groups[world, kind] = group = dist.new_group(list(range(world)), backend=backend)
        if kind == "sim_collectives":
            device_group.serve(group, "sim", kind)
    return _groups[world, kind]


def over_ranks(zoo: Case, rank: int, world: int) -> Case:
    """Return ``zoo`` with the batches of one rank."""
    return dataclasses.replace(zoo, batch=lambda index: zoo.batch(index * world + rank))


@case
def train(
    send: Callable[[Any], None],
    *,
    model: str,
    world: int,
    dtype: str,
    update: str,
    budget: str = "roomy",
    num_micro_steps: int = 1,
    max_norm: float | None = None,
    state: str = "exact",
    clips_by_torch: bool = False,
    device: str = "cpu",
    kind: str = "gloo",
    mutant: str = "",
    **options: Any,
) -> Any:
    """Train; return digests of everything and this rank's pieces; None on ranks that take no part.

    ``mutant``: a method of DeviceSlots that does nothing.
    """
    group = group_of(world, kind)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    recipe = recipe_of(dtype, num_micro_steps=num_micro_steps, max_norm=max_norm)
    recipe = dataclasses.replace(recipe, adamw=recipe.adamw | {"state": state})
    nbytes = 64 << 20
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_device(device))
        if mutant:
            stack.enter_context(mock.patch.object(DeviceSlots, mutant, lambda *arguments: None))
        options["device"] = device
        if budget == "smallest":
            try:
                _train(model, group, recipe, update, 8 << 20, options)
            except CapacityError as error:
                nbytes = budget_named_in(error)
            if device == "sim":
                with pytest.raises(CapacityError) as refusal:
                    _train(model, group, recipe, update, nbytes, options | {"device_memory": 1})
                options["device_memory"] = device_memory_named_in(refusal.value)
        if clips_by_torch:
            stack.enter_context(mock.patch.object(tiered, "clip_grad_norm_", clip_by_torch))
        trained, pieces = _train(model, group, recipe, update, nbytes, options)
        found = {"digests": digests_of(trained), "pieces": pieces}
        del trained  # lifetime: a simulated device ends here
    return found


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """Enable ``device``, of a card the rank's own; on the simulated one races fail the case."""
    if device != "sim":
        if device != "cpu":
            torch.accelerator.set_device_index(dist.get_rank())
        yield
        return
    simulated.enable()
    simulated.guard_pinned()
    add_registrar("sim", SimulatedRegistrar())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(pinned_arena, "PIECE_NBYTES", 1 << 20))
            # What autograd's thread has waited for is known to the training thread as the backward returns.
            add, take = ShardGradient.add, ShardGradient.take
            told = {
                "add": lambda shard, *sums: (add(shard, *sums), simulated.hand_over(id(shard)))[0],
                "take": lambda shard: (simulated.take_over(id(shard)), take(shard))[1],
            }
            for name, method in told.items():
                stack.enter_context(mock.patch.object(ShardGradient, name, method))
            for name in ("gather", "exchange"):
                stack.enter_context(mock.patch.object(GlooComm, name, _using_pages(getattr(GlooComm, name))))
            yield
        found = simulated.races()
        assert not found, found[:6]
    finally:
        simulated.disable()


def _using_pages(move: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``move``, whose sockets read and write closed pages: no signal opens these for the kernel."""

    def moving(comm: GlooComm, *tensors: Any, **how: Any) -> Any:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.numel():
                simulated.use_pages(tensor.data_ptr(), tensor.data_ptr() + tensor.numel(), write=True)
        return move(comm, *tensors, **how)

    return moving


def clip_by_torch(model: torch.nn.Module, max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _train(
    model: str, group: Any, recipe: Recipe, update: str, nbytes: int, options: dict[str, Any]
) -> tuple[Trained, dict[str, tuple[int, int]]]:
    device, device_memory = options.get("device", "cpu"), options.pop("device_memory", None)
    zoo = over_ranks(ZOO[model] if device == "cpu" else case_on(device, model), group.rank(), group.size())
    with (
        tempfile.TemporaryDirectory(prefix="tiered-") as directory,
        tiered.Store(
            directory, dram=nbytes * group.size(), durable=False, process_group=group, rank_deadline=30,
            device_memory=device_memory,
        ) as store,
    ):  # fmt: skip
        session: Session = start(zoo, recipe, store, update, seed=SEED, **options)
        pieces = pieces_of(session.model)
        return session.run(), pieces


def pieces_of(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Return the first and the last element of each parameter's piece on this rank."""
    segments = [parameter.segment for parameter in model.parameters()]  # type: ignore[union-attr]
    return {each.name: (each.stretch.start, each.stretch.stop) for each in segments}


def expected(
    model: str | Case,
    *,
    world: int,
    dtype: str,
    update: str,
    num_micro_steps: int = 1,
    exchanges_each: bool | None = None,
    max_norm: float | None = None,
    pieces: list[dict[str, tuple[int, int]]] | None = None,
    reverses: bool = False,
    device: str = "cpu",
    before_step: Callable[[int, torch.nn.Module, MasterAdamW], object] | None = None,
) -> list[dict[str, str]]:
    """Return the digests of each rank by plain PyTorch; ``pieces`` are those of each rank, for norms."""
    zoo = model if isinstance(model, Case) else ZOO[model] if device == "cpu" else case_on(device, model)
    recipe = recipe_of(dtype, num_micro_steps=num_micro_steps, max_norm=max_norm)
    exchanges_each = update == "step" if exchanges_each is None else exchanges_each
    bounds = None if pieces is None else {name: [tuple(each[name]) for each in pieces] for name in pieces[0]}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks: how a sum is divided among threads shows in its bits
    try:
        trained = ranks_reference(
            zoo.build, zoo.batch, zoo.loss, recipe,
            world=world, seed=SEED, exchanges_each=exchanges_each, reverses=reverses, bounds=bounds,
            before_step=before_step,
        )  # fmt: skip
    finally:
        torch.set_num_threads(num_threads)
    found = digests_of(trained)
    return [
        {key: value for key, value in found.items() if not key.startswith("loss ")}
        | digests_of(Trained(losses=trained.losses[rank::world]))
        for rank in range(world)
    ]


@case
def expect_on(send: Callable[[Any], None], *, device: str, **options: Any) -> Any:
    """Return ``expected`` on ``device``, whose attention is another than the CPU's."""
    if dist.get_rank():
        return None
    with on_device(device):
        return expected(**options, device=device)


def digests_of(trained: Trained) -> dict[str, str]:
    """Return a digest of the bytes of each tensor in ``trained``, but for buffers, and the numbers of updates."""
    tensors: dict[str, Tensor] = {f"loss {n}": loss for n, loss in enumerate(trained.losses)}
    tensors |= {f"norm {n}": norm for n, norm in enumerate(trained.norms)}
    for word in ("parameters", "exp_avg", "exp_avg_sq"):
        tensors |= {f"{word} {name}": value for name, value in getattr(trained, word).items()}
    tensors |= {f"masters {name}": trained.masters[name] for name in trained.masters if name in trained.parameters}
    found = {}
    for key, value in tensors.items():
        flat = value.detach().cpu().contiguous().view(-1)
        found[key] = xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy()) if flat.numel() else ""
    return found | {f"updates of {name}": str(num) for name, num in trained.num_updates.items()}


# -- compact state -----------------------------------------------------------------------------------------------------


def compact_by_one_rank(model: str, *, world: int, dtype: str) -> dict[str, str]:
    """Return the digests of one rank of tiered that is given the means of the gradients of ``world`` models."""
    zoo, recipe = ZOO[model], recipe_of(dtype)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tiered-") as directory,
            tiered.Store(directory, dram="64MiB", durable=False) as store,
        ):
            torch.manual_seed(SEED)
            sharded = tiered.shard(zoo.build(), store, unit=zoo.unit, param_dtype=recipe.param_dtype)
            optimizer = tiered.AdamW(sharded.parameters(), state="compact", **recipe.adamw)
            torch.manual_seed(SEED)
            plain = [zoo.build().to(recipe.param_dtype) for _ in range(world)]
            torch.manual_seed(SEED + 1)
            states = [torch.get_rng_state()] * world
            for step in range(recipe.num_steps):
                values = sharded.state_dict()
                for rank, each in enumerate(plain):
                    each.load_state_dict(values)
                    torch.set_rng_state(states[rank])
                    zoo.loss(each, zoo.batch(step * world + rank)).backward()
                    states[rank] = torch.get_rng_state()
                for name, mean in means_of(plain).items():
                    sharded.get_parameter(name).grad = mean
                optimizer.step()
            return digests_of(Trained(parameters=sharded.state_dict()))
    finally:
        torch.set_num_threads(num_threads)


# -- counts ------------------------------------------------------------------------------------------------------------


@case
def count(
    send: Callable[[Any], None],
    *,
    world: int,
    stage: int,
    update: str,
    num_micro_steps: int,
    kind: str = "",
) -> Any:
    """Train three steps; return the collectives of the last one by their kinds, and bytes.

    On the simulated device with ``kind``, that of the collectives there.
    """
    group = group_of(world, kind or "gloo")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    recipe = recipe_of("fp32", num_micro_steps=num_micro_steps)
    if kind:
        with on_device("sim"):
            return _count_at_smallest(
                case_on("sim", "gpt"), recipe, group, update, stage, device="sim", update_on="cpu"
            )
    return _count_at_smallest(CASES["gpt"], recipe, group, update, stage)


def _count_at_smallest(model: Case, recipe: Recipe, group: Any, update: str, stage: int, **options: Any) -> Any:
    world, nbytes = group.size(), 8 << 20
    zoo = over_ranks(model, group.rank(), world)
    while True:
        try:
            with (
                tempfile.TemporaryDirectory(prefix="tiered-") as directory,
                tiered.Store(
                    directory, dram=nbytes * world, durable=False, process_group=group, rank_deadline=30
                ) as store,
            ):
                return _count(start(zoo, recipe, store, update, hold=0, stage=stage, **options))
        except CapacityError as error:
            nbytes = budget_named_in(error)


def _count(session: Session) -> Any:
    ranks, model = session.store.ranks, session.model
    assert ranks is not None
    units = list(dict.fromkeys(parameter.segment.unit for parameter in model.parameters()))  # type: ignore[union-attr]
    kinds: Counter[str] = Counter()
    asked = ranks.comm_thread._ask

    def ask(task: Any) -> Any:
        kinds.update([task.text.split()[0], *(["ahead"] if task.ready is not None else [])])
        return asked(task)

    ranks.comm_thread._ask = ask  # type: ignore[method-assign]
    session.run_step(0)
    session.run_step(1)
    kinds.clear()
    before, before_copied = ranks.comm_thread.statistics().moved_bytes, _copied(units[0].tier)
    session.run_step(2)
    moved = ranks.comm_thread.statistics().moved_bytes - before
    copied = [after - each for after, each in zip(_copied(units[0].tier), before_copied, strict=True)]
    slots = units[0].comm.dram_slots
    slots._look()
    stored = session.store.statistics().used_bytes
    return {
        **kinds,
        "moved": moved,
        "units": len(units),
        "whole": sum(unit.nbytes for unit in units),
        "gradients": sum(unit.gradient_nbytes for unit in units),
        "shown": len(slots._shown),
        "stored": stored,
        "copied": copied,
        "state": sum(3 * unit.layout.shard_nbytes for unit in units),  # fp32: the parameter and two moments
    }


def _copied(tier: Any) -> list[int]:
    """Return the bytes that were copied to the compute device and back."""
    return [0, 0] if tier.computes_in_dram else [tier.copies.in_bytes, tier.copies.out_bytes]


# -- loops that differ from rank to rank -------------------------------------------------------------------------------


@case
def differ(send: Callable[[Any], None], *, kind: str, world: int, deadline_s: float = 3.0) -> Any:
    """Do something on rank 0 alone; return the error of each rank, "" for none, and digests of the model."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    begun, found, text = time.monotonic(), "", ""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tiered-") as directory,
            tiered.Store(
                directory, dram=(64 << 20) * world, durable=False, process_group=group, rank_deadline=deadline_s
            ) as store,
        ):
            text = _differ(kind, store, group.rank(), world)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return {"error": found, "model": text, "seconds": time.monotonic() - begun}


def _differ(kind: str, store: tiered.Store, rank: int, world: int) -> str:
    zoo = over_ranks(ZOO["gpt"], rank, world)
    session = start(zoo, recipe_of("fp32"), store)
    model, is_odd = session.model, rank == 0
    session.run_step(0)
    kept: Any = None
    if is_odd and kind == "evaluation":
        with torch.no_grad():
            zoo.loss(model, zoo.batch(0))
    if is_odd and kind == "state_dict":
        model.state_dict()
    if is_odd and kind == "batch more":
        session.run_step(1)
    if kind in ("gradient dropped", "zeroed between", "other rate", "clipped alone"):
        for number in range(2 if kind == "zeroed between" else 1):
            zoo.loss(model, zoo.batch(1 + number)).backward()
            if is_odd and (kind == "gradient dropped" or (kind == "zeroed between" and not number)):
                model.zero_grad()
        if is_odd and kind == "other rate":
            session.optimizer.param_groups[0]["lr"] = 0.5
        if is_odd and kind == "clipped alone":
            tiered.clip_grad_norm_(model, 1e-3)
        session.optimizer.step()
    if kind == "written alone":
        with tiered.unsharded(model), torch.no_grad():
            model.ln.weight.mul_(2.0 if is_odd else 1.0)
    if kind == "loaded alone":
        model.load_state_dict({name: value + is_odd for name, value in model.state_dict().items()})
    if is_odd and kind == "exception":
        raise ValueError("the loop of rank 0 has failed")
    if is_odd and kind == "alias":
        handle = model.blocks[1].fc.register_forward_pre_hook(lambda module, _: aliases.append(module.weight.detach()))
        aliases: list[Tensor] = []
        kept = handle, aliases
    for step in (1, 2):
        if is_odd and kind == "slow":
            time.sleep(0.3)
        session.run_step(step)
    del kept
    return str(sorted(digests_of(Trained(parameters=model.state_dict())).items()))


@case
def scale(send: Callable[[Any], None], *, world: int) -> Any:
    """Train by a GradScaler, with an infinite loss on the last rank in the second of three steps."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    zoo, found = over_ranks(ZOO["gpt"], group.rank(), world), []
    with (
        tempfile.TemporaryDirectory(prefix="tiered-") as directory,
        tiered.Store(directory, dram=(64 << 20) * world, durable=False, process_group=group, rank_deadline=30) as store,
    ):
        session = start(zoo, recipe_of("fp32"), store)
        scaler = tiered.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            loss = zoo.loss(session.model, zoo.batch(step))
            if step == 1 and group.rank() == world - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(session.optimizer)
            if group.rank() == 0:  # by itself
                largest = torch.linalg.vector_norm(session.model.blocks[0].fc.weight.grad, float("inf")).item()
                found.append(f"largest {largest >= 0}")
            norm = torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.4)
            scaler.step(session.optimizer)
            scaler.update()
            session.optimizer.zero_grad()
            values = digests_of(Trained(parameters=session.model.state_dict()))
            found.append(f"{scaler.get_scale()} {norm.isfinite().item()} {sorted(values.items())}")
    return [each for each in found if not each.startswith("largest")]


@case
def read_weights(send: Callable[[Any], None], *, world: int, dtype: str) -> Any:
    """Shard a model on meta whose values are in a file, frozen ones read in place; return what differs."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    zoo = CASES["frozen_part"]
    torch.manual_seed(SEED)
    plain = zoo.build().to(recipe_of(dtype).param_dtype or torch.float32)
    with tempfile.TemporaryDirectory(prefix="tiered-") as directory:
        file = f"{directory}/model.safetensors"
        save_file(plain.state_dict(), file)
        options = {"durable": False, "process_group": group, "rank_deadline": 30, "external": [file]}
        with tiered.Store(f"{directory}/store", dram=(64 << 20) * world, **options) as store:
            with torch.device("meta"):
                model = zoo.build()
            tiered.shard(model.to(plain.emb.weight.dtype), store, unit=zoo.unit, weights=file)
            found = model.state_dict()
            in_place = [each for each in store.records() if "frozen" in each.name and not each.extents]
    return {
        "differ": [name for name, value in plain.state_dict().items() if not torch.equal(found[name], value)],
        "in_place": len(in_place),
    }


@case
def unfreeze(send: Callable[[Any], None], *, world: int, dtype: str) -> Any:
    """Train with parts frozen in the second step, by a relayout; write values in ``unsharded``; return digests."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    zoo = over_ranks(ZOO["odd_sizes"], group.rank(), group.size())
    with (
        tempfile.TemporaryDirectory(prefix="tiered-") as directory,
        tiered.Store(directory, dram=(64 << 20) * world, durable=False, process_group=group, rank_deadline=30) as store,
    ):
        session = start(zoo, recipe_of(dtype), store)
        steps = changes_of(session.model, tiered.unsharded)
        for step in range(3):
            steps[step]()
            session.run_step(step)
        return digests_of(session.collect())


def changes_of(model: torch.nn.Module, unsharded: Callable[[torch.nn.Module], Any]) -> list[Callable[[], object]]:
    """Return what happens before each of three steps: a part is frozen, values are written, the part is trained."""
    part = [parameter for name, parameter in model.named_parameters() if ".1." in name]

    def write() -> None:
        with unsharded(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    return [
        lambda: [parameter.requires_grad_(False) for parameter in part],
        write,
        lambda: [parameter.requires_grad_(True) for parameter in part],
    ]


def change(step: int, model: torch.nn.Module, optimizer: MasterAdamW) -> None:
    """Do to a plain model what ``unfreeze`` does; values that were written become the masters."""
    changes_of(model, contextlib.nullcontext)[step]()
    for parameter, master in optimizer.masters.items():
        if step == 1 and master is not parameter:
            master.data.copy_(parameter)


@case
def page(send: Callable[[Any], None], *, text: str) -> Any:
    """Run the loop of docs/ranks.md, in whose processes the group is there already; return a digest of the model."""
    names: dict[str, Any] = {
        "tiered": tiered, "torch": torch, "data": TensorDataset(torch.randn(32, 8), torch.randn(32, 8)),
        "DataLoader": DataLoader, "DistributedSampler": DistributedSampler, "kept": [],
        "mse_loss": torch.nn.functional.mse_loss,
        "Net": lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tiered-") as directory, contextlib.chdir(directory):
        exec(text.replace('dist.init_process_group("gloo")\n', "") + "    kept.append(model.state_dict())\n", names)
    return str(sorted(digests_of(Trained(parameters=names["kept"][0])).items()))


# -- all doors of a model ----------------------------------------------------------------------------------------------


@case
def doors(send: Callable[[Any], None], *, model: str, world: int, dtype: str) -> Any:
    """Take a model's values and state out and in by every door; return what differs from where it should be."""
    group = group_of(world)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    zoo = over_ranks(ZOO[model], group.rank(), world)
    with tempfile.TemporaryDirectory(prefix="tiered-") as directory:
        file = f"{directory}/model.safetensors"
        options: dict[str, Any] = {"dram": (64 << 20) * world, "process_group": group, "rank_deadline": 30}
        with tiered.Store(f"{directory}/first", durable=False, **options) as store:
            session = start(zoo, recipe_of(dtype, max_norm=0.4), store)
            found = _doors(session)
            trained, state = session.model.state_dict(), session.optimizer.state_dict()
            save_file({name: value.contiguous() for name, value in trained.items()}, file)
        for name, source in {"weights=": {"weights": file}, "external=": {"weights": file}}.items():
            external = {"external": [file]} if name == "external=" else {}
            with tiered.Store(f"{directory}/{name}", durable=False, **options, **external) as store:
                with torch.device("meta"):
                    there = zoo.build()
                for each, value in trained.items():
                    parameter = there.get_parameter(each)
                    parameter.data = parameter.data.to(value.dtype)
                    parameter.requires_grad_(name == "weights=" and parameter.requires_grad)
                there = tiered.shard(there, store, unit=zoo.unit, **source)
                found += [f"{name} {each}" for each in _differing(trained, there.state_dict())]
                if name == "weights=":
                    optimizer: Any = tiered.AdamW(there.parameters(), **recipe_of(dtype).adamw)
                    optimizer.load_state_dict(state)
                    found += [
                        f"{name} state {each}" for each in _differing(_flat(state), _flat(optimizer.state_dict()))
                    ]
    return found


def _doors(session: Session) -> list[str]:
    """Train, write in ``unsharded``, load, and train on; return what differs."""
    model, found = session.model, list[str]()
    session.run_step(0)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with tiered.unsharded(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            found += [f"unsharded {name}"] * (not torch.equal(parameter, values[name]))
            parameter.mul_(2.0)
    doubled = {name: value * 2 for name, value in values.items()}
    found += [f"written {name}" for name in _differing(doubled, model.state_dict())]
    model.load_state_dict(values)
    found += [f"loaded {name}" for name in _differing(values, model.state_dict())]
    state = session.optimizer.state_dict()
    session.optimizer.load_state_dict(state)
    found += [f"state {name}" for name in _differing(_flat(state), _flat(session.optimizer.state_dict()))]
    session.run_step(1)
    return found


def _flat(state: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{n} {name}": torch.as_tensor(v) for n, each in state["state"].items() for name, v in each.items()}


def _differing(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    same = {name for name in expected if name in found and torch.equal(expected[name], found[name])}
    return sorted((expected.keys() | found.keys()) - same)
