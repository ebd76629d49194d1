"""Launch: how this process was started, alone or by torchrun as one of several ranks, which agree before a store opens.

torchrun says so in variables. Until the store is open, and its ranks speak for themselves, the processes tell each
other the outcome of each phase through torch's TCPStore: a refusal on one of them is one on all, and rank 0 alone asks
and prints.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tiered.errors import RankLostError, TieredError, UsageError
from tiered.ranks.agreement import CLASSES
from tiered.ranks.comm_thread import Ticket
from tiered.ranks.group import machine_of
from tiered.ranks.ranks import Ranks
from tiered.store.catalog.catalog import Member
from tiered.store.lifetime.directory import rank_directories, stores_of_ranks
from tiered.store.lifetime.rank_sets import RankSet, current_set, numbered, searched_for
from tiered.tools.console import INTERRUPTED, Interruption

__all__ = ["Launch", "StepNews"]

_DEADLINE_S = 600.0  # of a wait for another process
_READ_S = 10.0  # at most, that the process with the store stays for those that still read
_POLL_S = 0.01
_REFUSED = 2  # the exit status of a refusal
_torch: Any = dist  # for names that its stubs do not have


class Launch:
    """The launch of this process: as ``rank`` of ``world``; ``begin`` makes it.

    ``local_rank`` and ``local_world`` count those that run under the same boot of a machine, as the store's ranks do;
    ``device_index`` is torchrun's LOCAL_RANK, and ``num_restarts`` counts the lives before this one.
    """

    def __init__(
        self, rank: int = 0, world: int = 1, *, device_index: int = 0, num_restarts: int = 0, store: Any = None
    ) -> None:
        """``store`` is a torch.distributed.Store that all processes reach; None for one."""
        self.rank, self.world = rank, world
        self.device_index, self.num_restarts = device_index, num_restarts
        self.local_rank, self.local_world = 0, 1
        self.machine = ""  # the boot id; two containers of one kernel have the same
        self._store, self._num_told, self._has_group = store, 0, False
        self._has_store = False  # in this process, whose end is its end

    @classmethod
    def begin(cls, variables: Mapping[str, str] | None = None) -> Launch:
        """Return the launch that ``variables`` (None: of this process) tell of; blocks for the process with the store.

        Raises UsageError for variables that do not go together, RankLostError where that process is not there.
        """
        given = os.environ if variables is None else variables
        num_restarts = _number(given, "TORCHELASTIC_RESTART_COUNT", 0)
        world = _number(given, "WORLD_SIZE", 1)
        if world <= 1:
            return cls(num_restarts=num_restarts)
        rank = _number(given, "RANK")
        if rank >= world or not given.get("MASTER_ADDR"):
            raise UsageError(
                f"WORLD_SIZE is {world}, RANK {rank} and MASTER_ADDR {given.get('MASTER_ADDR')!r}; expected what"
                f" torchrun sets: torchrun --nproc-per-node {world} -m tiered train, or no WORLD_SIZE for one process"
            )
        # Order: a store of the life before, which torchrun may keep, has the addresses of ended processes.
        has_store = rank == 0 and given.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = given["MASTER_ADDR"], _number(given, "MASTER_PORT")
        try:
            store = _torch.TCPStore(
                address, port, world, has_store, timedelta(seconds=_DEADLINE_S / 2), wait_for_workers=False
            )
        except RuntimeError as error:
            raise RankLostError(
                f"rank {rank} of {world} cannot reach {address}:{port}, MASTER_ADDR and MASTER_PORT of torchrun:"
                f" {error}; expected rank 0, or torchrun itself, to listen there; start all ranks again",
                rank=0,
            ) from error
        own = _torch.PrefixStore(f"tiered train/{num_restarts}", store)
        launch = cls(rank, world, device_index=_number(given, "LOCAL_RANK", rank), num_restarts=num_restarts, store=own)
        launch._has_store = has_store
        launch.machine = machine_of(rank)
        here = [each for each, boot in enumerate(launch._tell("machine", launch.machine)) if boot == launch.machine]
        launch.local_rank, launch.local_world = here.index(rank), len(here)
        return launch

    @property
    def is_first(self) -> bool:
        """Whether this process asks and prints."""
        return self.rank == 0

    @property
    def program(self) -> str:
        """The words that start ``tiered`` on as many ranks; "" for one process."""
        if self.world == 1:
            return ""
        nodes = f"--nnodes {self.world // self.local_world} " if self.world > self.local_world else ""
        return f"torchrun {nodes}--nproc-per-node {self.local_world} -m tiered"

    def directories(self, given: Sequence[Path]) -> tuple[Path, ...]:
        """Return where this rank's store lies, or is to lie, in the directories of a run."""
        paths = [Path(numbered(path, self.rank, self.local_rank)) for path in given]
        if self.world == 1 and not any(map(stores_of_ranks, paths)):
            return tuple(paths)
        return rank_directories(paths, Member(b"", self.rank, self.world))

    def origin(self, given: Sequence[Path]) -> RankSet | None:
        """Return the stores of the run in ``given`` where another number of ranks has committed it last; else None."""
        current = current_set([*searched_for(given, self.world)], self.world)
        return None if current is None or current.world == self.world else current

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have nothing of the block that another process than rank 0 prints come out; end the process group."""
        if self.is_first:
            yield
        else:
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
                yield
        if self._has_group:  # order: not after an error, which other ranks may not have heard of yet
            dist.destroy_process_group()

    def together(self, word: str, part: Callable[[], Any]) -> list[Any]:
        """Return what ``part()`` returns on each rank, as JSON has it, in the order of the ranks; blocks for all.

        An error on one is raised on all: an equal one as it is, another with the ranks that it is of.
        """
        if self.world == 1:
            return [part()]
        failure: Exception | None = None
        try:
            told = {"done": part()}
        except (TieredError, ValueError, OSError) as error:
            failure = error
            told = {"failed": [type(error).__name__, str(error)]}
        except BaseException as error:
            self._put(self._next(word), {"failed": ["TieredError", f"{type(error).__name__} in {word}"]})
            raise
        every = self._tell(word, told)
        failed = {rank: each["failed"] for rank, each in enumerate(every) if "failed" in each}
        if not failed:
            return [each["done"] for each in every]
        name, text = next(iter(failed.values()))
        if failure is not None and len(failed) == self.world and all(each == [name, text] for each in failed.values()):
            raise failure
        said = "; ".join(f"rank {rank}: {each[1]}" for rank, each in failed.items())
        raise CLASSES.get(name, TieredError)(said) from failure

    def check_equal(self, told: Sequence[Mapping[str, object]], advice: str) -> None:
        """Raise UsageError, on all ranks alike, where not all have told the same; ``advice`` says what is expected."""
        for rank, each in enumerate(told):
            if differing := [name for name, value in told[0].items() if each[name] != value]:
                said = "; ".join(f"{name} {told[0][name]} and {each[name]}" for name in differing)
                raise UsageError(f"ranks 0 and {rank} differ: {said}; expected {advice}")

    def asked(self, question: Callable[[], None]) -> int:
        """Have rank 0 ask by ``question()``, which raises for a no; blocks for the answer, without a deadline.

        Return 0 for a yes on all ranks; for a no it is raised on rank 0, and the others return the exit status.
        """
        if self.world == 1:
            question()
            return 0
        if not self.is_first:
            return int(self._tell("answer", None, deadline_s=math.inf)[0])
        try:
            question()
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt | EOFError)
            self._tell("answer", INTERRUPTED if is_interrupt else _REFUSED)
            raise
        self._tell("answer", 0)
        return 0

    def take_device(self, word: str, device_memory: int | None) -> None:
        """Have an accelerator that ``word`` names without a number be the one of this rank. UsageError."""
        is_cpu = word == "cpu" or device_memory == 0 or not torch.accelerator.is_available()
        if self.world == 1 or is_cpu:
            return
        num_devices = torch.accelerator.device_count()
        if ":" in word and self.local_world > 1:
            raise UsageError(
                f"device {word} for {self.local_world} ranks of this machine; expected one for each: --device"
                f" {word.partition(':')[0]} gives each that of its LOCAL_RANK"
            )
        if self.device_index >= num_devices:
            raise UsageError(
                f"{num_devices} accelerators here, and LOCAL_RANK is {self.device_index}; expected one for each rank: a"
                " smaller --nproc-per-node of torchrun, or --device cpu"
            )
        torch.accelerator.set_device_index(self.device_index)

    def join(self, device: torch.device) -> None:
        """Make torch's default group of all ranks, for ``device``, where there is none; blocks for all of them."""
        if self.world == 1 or dist.is_initialized():
            return
        kind = "gloo" if device.type == "cpu" else dist.Backend.default_device_backend_map.get(device.type, "gloo")
        dist.init_process_group(
            kind if kind == "gloo" else f"cpu:gloo,{device.type}:{kind}",
            store=_torch.PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=_DEADLINE_S),
        )
        self._has_group = True

    def __repr__(self) -> str:
        return f"Launch(rank {self.rank} of {self.world}, {self.num_restarts} restarts)"

    # Below: the store

    def _next(self, word: str) -> str:
        self._num_told += 1
        return f"{self._num_told} {word}"

    def _put(self, name: str, told: Any) -> None:
        self._reach(partial(self._store.set, f"{name}/{self.rank}", json.dumps(told)))

    def _tell(self, word: str, told: Any, *, deadline_s: float = _DEADLINE_S) -> list[Any]:
        """Return what each rank tells for ``word``; blocks for all of them."""
        name = self._next(word)
        self._put(name, told)
        keys, end = [f"{name}/{rank}" for rank in range(self.world)], time.monotonic() + deadline_s
        for rank, key in enumerate(keys):
            while not self._reach(partial(self._store.check, [key])):
                if time.monotonic() > end:
                    raise RankLostError(
                        f"rank {rank} did not come to {word!r} within {deadline_s:g} s; expected all {self.world} ranks"
                        " to run the same command: start them again",
                        rank=rank,
                    )
                time.sleep(_POLL_S)
        every = [json.loads(self._reach(partial(self._store.get, key))) for key in keys]
        num_read = self._reach(partial(self._store.add, f"{name}/read", 1))
        end = time.monotonic() + _READ_S
        while self._has_store and num_read < self.world and time.monotonic() < end:
            time.sleep(_POLL_S)
            num_read = self._store.add(f"{name}/read", 0)
        return every

    def _reach(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} of {self.world} cannot reach the others any more: {error}; expected the process with"
                " their store, rank 0 or torchrun, to run on; start all ranks again",
                rank=-1,
            ) from error


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable ``name`` as a count. UsageError."""
    text = variables.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UsageError(
            f"{name} is {text!r}; expected a number, as torchrun sets it, or no WORLD_SIZE for one process"
        )
    return int(text)


class StepNews:
    """The news of one step that all ranks hear: the mean of their losses, and a signal that asks one of them to stop.

    So all of them stop after the same step. ``ranks`` is None for one process. Used by the training thread alone.
    """

    _FORMAT = struct.Struct("<dH")

    def __init__(self, ranks: Ranks | None, interruption: Interruption) -> None:
        self._ranks, self._interruption = ranks, interruption
        self._ticket: Ticket | None = None
        self._loss, self._is_last = 0.0, False

    @property
    def is_last(self) -> bool:
        """Whether the run is to stop here."""
        return self._interruption.requested if self._ranks is None else self._is_last

    def tell(self, loss: float) -> None:
        """Tell the other ranks the ``loss`` of this one's step. Does not block; each tell is followed by a hear."""
        self._loss = loss
        if self._ranks is not None:
            status = self._interruption.status if self._interruption.requested else 0
            self._ticket = self._ranks.comm_thread.agree("the loss", self._FORMAT.pack(loss, status))

    def hear(self) -> float:
        """Return the mean of all ranks' losses; blocks for them. Raises RankLostError, StepAbandonedError."""
        if self._ticket is None:
            return self._loss
        told = [self._FORMAT.unpack(each) for each in self._ticket.wait()]
        if status := max(status for _, status in told):
            self._is_last = True
            self._interruption.take(status)
        return math.fsum(loss for loss, _ in told) / len(told)
