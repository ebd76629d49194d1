"""AdamW whose state lives in a store: a ``torch.optim.Optimizer`` for sharded parameters and for plain ones.

The numbers are those of ``torch.optim.AdamW(fused=True)`` on fp32 masters (design.md, section 9). How state is laid out
is codec.py's business, how it streams update.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.zero.budget import bucket_numel_for, tile_numel_for
from tiered.zero.codec import Bucket, Fields, Hyperparameters, decode_master, divide, encode_master
from tiered.zero.engine import Engine
from tiered.zero.masters import master_key, master_offsets
from tiered.zero.parameter import TieredParameter, without_dispatch
from tiered.zero.plain import PlainUnit
from tiered.zero.unit import Segment, Unit
from tiered.zero.update import Source, UpdatePipeline

__all__ = ["AdamW"]

_UPDATES = ("step", "backward")
_STATES = ("exact",)


class AdamW(Optimizer):
    """AdamW with decoupled weight decay, streaming its state through a store.

    ``params``: parameters or groups as for any torch optimizer, sharded by ``tiered.shard`` or plain; plain ones need
    ``store``. ``update="step"`` updates in ``step()``; ``update="backward"`` updates each unit as soon as its gradient
    is final, and ``step()`` only concludes. ``state="exact"``: fp32 moments and the bits of an fp32 master (bf16
    parameters: 12 bytes per parameter with the parameter itself).

    A store that already holds this optimizer's state is adopted: call ``store.resume()``. Not thread-safe. Raises
    ValueError for hyperparameters out of range, UsageError for unknown words or a store that holds another optimizer,
    CapacityError when the device has no room for the state.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        update: str = "step",
        state: str = "exact",
        store: Store | None = None,
    ) -> None:
        _one_of("update", update, _UPDATES)
        _one_of("state", state, _STATES)
        if not float(lr) >= 0 or not eps >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"expected lr, eps, weight_decay >= 0 and betas in [0, 1), got lr={lr}, eps={eps},"
                f" weight_decay={weight_decay}, betas={betas}"
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        self.in_backward = update == "backward"
        self.format = state
        self._segments: dict[torch.Tensor, Segment] = {}
        self._known: set[Segment] = set()
        self._buckets: dict[Any, list[Bucket]] = {}
        self._hypers: dict[Segment, dict[str, Any]] = {}
        self._steps: dict[Segment, int] = {}
        self._engines: list[Engine] = []
        self._plain: PlainUnit | None = None
        self._pipeline: UpdatePipeline | None = None
        super().__init__(params, defaults)
        self._store = self._find_store(store)
        self._attach()

    def __repr__(self) -> str:
        return f"{super().__repr__()} over {len(self._segments)} parameters in {self._store!r}"

    # -- the parts ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; only while the optimizer is being made."""
        if getattr(self, "_pipeline", None) is not None:
            raise UsageError("add_param_group after construction; expected all groups when tiered.AdamW is made")
        with without_dispatch():
            super().add_param_group(param_group)

    def _find_store(self, store: Store | None) -> Store:
        stores: list[Store] = [] if store is None else [store]
        for parameter in self._parameters():
            if isinstance(parameter, TieredParameter):
                engine = parameter.segment.unit.engine
                if not isinstance(engine, Engine):
                    raise UsageError(
                        "tiered.AdamW on parameters made by construct; expected tiered.shard(model, ...) first"
                    )
                if engine not in self._engines:
                    self._engines.append(engine)
                    stores.append(engine.store)
        if not stores:
            raise UsageError("tiered.AdamW on plain parameters; expected store= to keep the optimizer state in")
        if any(other is not stores[0] for other in stores):
            raise UsageError("tiered.AdamW over several stores; expected one: make one optimizer per store")
        if len(self._engines) > 1 or any(engine.updater is not None for engine in self._engines):
            raise UsageError(
                "a second tiered.AdamW for one sharded model; expected one optimizer with several param groups"
            )
        return stores[0]

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _attach(self) -> None:
        """Lay the state out, create it or adopt it, and enter the store's list of what is committed."""
        named = {
            id(p): name
            for group in self.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        plain = [p for p in self._parameters() if not isinstance(p, TieredParameter)]
        if plain and self.in_backward:
            raise UsageError(
                'update="backward" on plain parameters; expected sharded ones: call tiered.shard, or update="step"'
            )
        if plain:
            self._plain = PlainUnit([(named.get(id(p), f"plain.{i}"), p) for i, p in enumerate(plain)])
            self._segments |= {segment.parameter: segment for segment in self._plain.segments}
        for parameter in self._parameters():
            if isinstance(parameter, TieredParameter):
                self._segments[parameter] = parameter.segment
        self._known = set(self._segments.values())
        committed = self._store.registered_state("tiered.optimizer") if self._store.durable else None
        units: list[Unit | PlainUnit] = [unit for engine in self._engines for unit in engine.units]
        units += [self._plain] if self._plain is not None else []
        managed = {segment for parameter, segment in self._segments.items() if _requires_grad(parameter)}
        numel = bucket_numel_for(sum(s.numel for s in unit.segments if s in managed) for unit in units)
        if isinstance(committed, dict):
            numel = int(committed.get("bucket_numel", numel))
        self._bucket_numel = numel
        for unit in units:
            segments = [segment for segment in unit.segments if segment in managed]
            self._buckets[unit] = divide(f"model/state/{unit.name}", segments, numel)
            self._steps |= dict.fromkeys(segments, 0)
        self._pipeline = UpdatePipeline(self._store.working_set, tile_numel_for(numel, [list(managed)]))
        try:
            self._create_state(adopt=committed)
        except BaseException:
            self._pipeline.close()
            raise
        self._store.add_guard(self._guard)
        self._store.register("tiered.optimizer", _Registered(self))
        for engine in self._engines:
            engine.updater = self
            engine.write_listeners.append(self._set_master)
            engine.set_state_keys({unit: self._buckets[unit] for unit in engine.units}, in_backward=self.in_backward)

    def _create_state(self, adopt: object) -> None:
        working_set = self._store.working_set
        state_nbytes = sum(bucket.nbytes for buckets in self._buckets.values() for bucket in buckets)
        if adopt is not None:
            _compare(adopt, self._description())
            self._store.reserve_space(state_nbytes)
            return
        self._store.reserve_space(state_nbytes * (2 if self._store.durable else 1), scratch=not self._store.durable)
        for unit, buckets in self._buckets.items():
            key = master_key(unit.name)
            masters = working_set.lease(key, "r") if key in self._store else None
            offsets = master_offsets(unit.segments) if masters is not None else {}
            for bucket in buckets:
                working_set.create(bucket.key, bucket.nbytes)
                lease = working_set.lease(bucket.key, "w")
                try:
                    lease.tensor.zero_()
                    if masters is not None:
                        self._encode(bucket, lease.tensor, masters.tensor.view(torch.float32), offsets)
                finally:
                    lease.release()
                working_set.swap_out([bucket.key])
            if masters is not None:
                masters.release()
                working_set.delete([key])

    def _encode(self, bucket: Bucket, state: torch.Tensor, masters: torch.Tensor, offsets: dict[Segment, int]) -> None:
        for piece in bucket.pieces:
            if piece.segment in offsets:
                start = offsets[piece.segment] + piece.start
                self._encode_piece(piece.fields(state), masters[start : start + piece.numel])

    def _encode_piece(self, fields: Fields, masters: torch.Tensor) -> None:
        """Write the remainders of ``masters`` (fp32) to ``fields``, tile by tile."""
        assert self._pipeline is not None and self._pipeline.scratch is not None
        scratch = self._pipeline.scratch
        for start in range(0, masters.numel(), scratch.numel):
            master = masters[start : start + scratch.numel]
            n = master.numel()
            tile = Fields(*(None if field is None else field[start : start + n] for field in fields))  # type: ignore[arg-type]
            rounded = scratch.gradient.view(torch.bfloat16)[:n]
            encode_master(master, rounded, tile, scratch.work[:n])

    # -- stepping -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do one optimizer step; returns what ``closure`` returned. Blocks.

        Takes ownership of the gradients: ``.grad`` is None afterwards.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self.in_backward:
                self._check_unchanged()
            for engine in self._engines:
                engine.step()
            if self._plain is not None:
                self._step_plain(self._plain)
        self._frozen = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients (or zero them)."""
        for engine in self._engines:
            engine.zero_grad(set_to_none=set_to_none)
        for segment in self._plain.segments if self._plain is not None else ():
            gradient = segment.parameter.grad
            if set_to_none or gradient is None:
                segment.parameter.grad = None
            else:
                gradient.detach_().zero_()

    _frozen: list[dict[str, Any]] | None = None

    def begin(self) -> None:
        """Freeze the hyperparameters of the step that begins now."""
        self._frozen = [_hyperparameters(group) for group in self.param_groups]
        self._hypers = {
            self._segments[parameter]: frozen
            for group, frozen in zip(self.param_groups, self._frozen, strict=True)
            for parameter in group["params"]
        }

    def _check_unchanged(self) -> None:
        if self._frozen is not None and self._frozen != [_hyperparameters(group) for group in self.param_groups]:
            raise UsageError(
                'hyperparameters changed between backward and step() under update="backward", which has used the old'
                ' ones; expected changes after step(), or tiered.AdamW(..., update="step")'
            )

    def manages(self, segment: Segment) -> bool:
        """Return whether this optimizer updates ``segment``."""
        return segment in self._steps

    def update(self, unit: Unit) -> None:
        """Update those parameters of ``unit`` that have a gradient and drop the gradients. Blocks."""
        gradients = unit.gradients
        managed = [s for s in unit.segments if s.has_gradient and s in self._known]
        for segment in managed:
            if segment not in self._steps:
                raise UsageError(
                    f"parameter {segment.name} has a gradient but was frozen when tiered.AdamW was made; expected"
                    " requires_grad=True before, or a new optimizer"
                )
        if managed:
            gradients.busy = True
            try:
                self._update_unit(unit, managed)
            finally:
                gradients.busy = False
            self._store.working_set.swap_out([unit.key])
        gradients.drop()

    def _update_unit(self, unit: Unit, managed: list[Segment]) -> None:
        assert self._pipeline is not None
        lease = self._store.working_set.lease(unit.key, "rw")
        sources: dict[Segment, Source] = {}
        try:
            unit.gradients.open()
            for segment in managed:
                factor = unit.gradients.factors.get(segment)
                parameter = segment.flat(lease.tensor)
                sources[segment] = Source(parameter, unit.gradients.flat(segment), factor, self._next_hyper(segment))
            with without_dispatch():
                self._pipeline.run(self._buckets[unit], sources, unit.engine.schedule.use)
        finally:
            sources.clear()
            parameter = None
            lease.release()

    def _step_plain(self, unit: PlainUnit) -> None:
        assert self._pipeline is not None
        self.begin()
        sources = {
            segment: Source(segment.memory(), segment.gradient(), None, self._next_hyper(segment))
            for segment in unit.segments
            if segment.parameter.grad is not None and segment in self._steps
        }
        self._pipeline.run(self._buckets[unit], sources, lambda _: None)

    def _next_hyper(self, segment: Segment) -> Hyperparameters:
        group = self._hypers[segment]
        self._steps[segment] += 1
        beta1, beta2 = group["betas"]
        return Hyperparameters(
            lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
            maximize=group["maximize"], step=torch.tensor(float(self._steps[segment])),
        )  # fmt: skip

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ``torch.optim.AdamW`` has it, plus ``master`` for bf16 parameters; the caller's memory.

        Streams the buckets. Raises UsageError between backward and step.
        """
        self._check_idle("optimizer.state_dict()")
        result = super().state_dict()
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                segment = self._segments[parameter]
                if self._steps.get(segment):
                    result["state"][index] = self._gather(segment)
                index += 1
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` (this one's or ``torch.optim.AdamW``'s) returned. Streams the buckets."""
        self._check_idle("optimizer.load_state_dict()")
        states = state_dict["state"]
        with without_dispatch():
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                segment = self._segments[parameter]
                if segment in self._steps:
                    self._scatter(segment, states.get(index))
                index += 1

    def _check_idle(self, what: str) -> None:
        for engine in self._engines:
            engine.check_idle(what)

    def _pieces(self, segment: Segment, mode: str) -> Iterator[tuple[int, int, Fields]]:
        """Yield (start, stop, fields) of each stretch of ``segment``'s state, leased in ``mode`` meanwhile."""
        for bucket in self._buckets[segment.unit]:
            for piece in bucket.pieces:
                if piece.segment is segment:
                    lease = self._store.working_set.lease(bucket.key, mode)  # type: ignore[arg-type]
                    try:
                        yield piece.start, piece.stop, piece.fields(lease.tensor)
                    finally:
                        lease.release()

    def _gather(self, segment: Segment) -> dict[str, torch.Tensor]:
        dtype = torch.float64 if segment.dtype == torch.float64 else torch.float32
        names = ["exp_avg", "exp_avg_sq"] + (["master"] if segment.dtype == torch.bfloat16 else [])
        flats = {name: torch.empty(segment.numel, dtype=dtype) for name in names}
        with self._readable(segment) as hi:
            for start, stop, fields in self._pieces(segment, "r"):
                exp_avg_sq = flats["exp_avg_sq"][start:stop].copy_(fields.exp_avg_sq)
                flats["exp_avg"][start:stop].copy_(fields.exp_avg)
                if fields.lo is not None:
                    copied = Fields(fields.lo, fields.exp_avg, exp_avg_sq)
                    work = torch.empty(stop - start, dtype=torch.int32)
                    decode_master(hi[start:stop], copied, flats["master"][start:stop], work)
                fields = None  # type: ignore[assignment]
        shaped = {name: flat.as_strided(segment.shape, segment.strides) for name, flat in flats.items()}
        return {"step": torch.tensor(float(self._steps[segment])), **shaped}

    def _scatter(self, segment: Segment, state: dict[str, Any] | None) -> None:
        self._steps[segment] = int(float(state["step"])) if state else 0
        flats = {
            name: _in_memory_order(segment, state[name])
            for name in ("exp_avg", "exp_avg_sq", "master")
            if state and name in state
        }
        master = flats.get("master")
        with self._readable(segment) as hi:
            if master is None and segment.dtype == torch.bfloat16:
                master = hi.float()
        for start, stop, fields in self._pieces(segment, "rw"):
            for field, name in ((fields.exp_avg, "exp_avg"), (fields.exp_avg_sq, "exp_avg_sq")):
                field.copy_(flats[name][start:stop]) if name in flats else field.zero_()
            if fields.lo is not None and master is not None:
                self._encode_piece(fields, master[start:stop])
            field = fields = None  # type: ignore[assignment]

    @contextlib.contextmanager
    def _readable(self, segment: Segment) -> Iterator[torch.Tensor]:
        """Lease the parameter's values: (numel,) in memory order."""
        if self._plain is not None and segment.unit is self._plain:
            yield segment.memory()
            return
        lease = self._store.working_set.lease(segment.unit.key, "r")
        try:
            yield segment.flat(lease.tensor)
        finally:
            lease.release()

    def _set_master(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The caller has replaced the values of ``segment``: its master becomes ``source``, or those values."""
        if segment.dtype != torch.bfloat16 or segment not in self._steps:
            return
        master = None
        if source is not None and source.dtype in {torch.float32, torch.float64} and source.shape == segment.shape:
            master = _in_memory_order(segment, source.float())
        for start, stop, fields in self._pieces(segment, "rw"):
            fields.exp_avg_sq.view(torch.int32).bitwise_and_(0x7FFFFFFF)
            assert fields.lo is not None
            if master is None:
                fields.lo.zero_()
            else:
                self._encode_piece(fields, master[start:stop])
            fields = None  # type: ignore[assignment]

    # -- what is committed ----------------------------------------------------------------------------------------

    def _guard(self, word: str) -> None:
        if word == "close" and self._pipeline is not None:
            self._pipeline.close()
        if word in {"rollback", "resume"}:
            self._frozen = None

    def _description(self) -> dict[str, Any]:
        names = {parameter: segment.name for parameter, segment in self._segments.items()}
        return {
            "class": "AdamW",
            "state": self.format,
            "bucket_numel": self._bucket_numel,
            "groups": [[names[p] for p in group["params"]] for group in self.param_groups],
            "managed": [segment.name for segment in self._steps],
        }

    def committed_state(self) -> dict[str, Any]:
        """Return what a commit must keep beside the buckets: step counts and hyperparameters."""
        hyper = [{k: v for k, v in group.items() if k not in {"params", "param_names"}} for group in self.param_groups]
        return {**self._description(), "steps": {s.name: n for s, n in self._steps.items()}, "hyperparameters": hyper}

    def load_committed_state(self, state: dict[str, Any]) -> None:
        """Take back what ``committed_state`` returned; raises UsageError with a diff when it is another optimizer's."""
        _compare(state, self._description())
        self._steps = {segment: state["steps"][segment.name] for segment in self._steps}
        for group, hyper in zip(self.param_groups, state["hyperparameters"], strict=True):
            group.update(hyper)


class _Registered:
    """AdamW as the store sees it: small state that rides along with a commit."""

    def __init__(self, optimizer: AdamW) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the step counts and hyperparameters."""
        return self._optimizer.committed_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._optimizer.load_committed_state(state)


def _in_memory_order(segment: Segment, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``'s elements in the order in which ``segment`` keeps them: (numel,)."""
    ordered = torch.empty_strided(segment.shape, segment.strides, dtype=value.dtype)
    ordered.copy_(value)
    return ordered.as_strided((segment.numel,), (1,))


def _requires_grad(parameter: torch.Tensor) -> bool:
    with without_dispatch():
        return parameter.requires_grad


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    names = ("lr", "betas", "eps", "weight_decay", "maximize")
    return {name: float(group[name]) if name == "lr" else group[name] for name in names}


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"tiered.AdamW({name}={value!r}); expected one of {', '.join(map(repr, known))}")


def _compare(committed: Any, mine: dict[str, Any]) -> None:
    """Raise UsageError with the differences between a committed optimizer and this one."""
    differences = [
        f"{name}: the store has {_short(committed.get(name))}, this optimizer {_short(mine[name])}"
        for name in mine
        if committed.get(name) != mine[name]
    ]
    if differences:
        raise UsageError(
            "the store holds another optimizer: "
            + "; ".join(differences)
            + "; expected the same one, or another directory"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
