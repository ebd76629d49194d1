"""Store: the public face. A mapping of tensors with leases, commit, rollback, and everything that rides along.

It has the order of events; residency.py, values.py, streaming.py and commit.py carry them out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn

import torch

from tiered.bytes.arena import Arena
from tiered.bytes.condition import Condition
from tiered.bytes.exit_and_fork import at_exit
from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import CapacityError, UsageError
from tiered.ranks.comm_thread import ROLLBACK
from tiered.ranks.ranks import Ranks, phase
from tiered.stats import StoreStatistics
from tiered.store.assembly import assemble, warn_of_nested_close
from tiered.store.cache import Cache
from tiered.store.catalog.catalog import Alone
from tiered.store.format.row import Spec
from tiered.store.generations.generations import drop_damaged
from tiered.store.generations.registry import Stateful, committed_state
from tiered.store.lifetime.confirmation import RanksConfirmation
from tiered.store.lifetime.opening import MIN_DRAM_NBYTES, Parts, dram_budget, new_arena, open_parts
from tiered.store.lifetime.rank_sets import RankSet, StorePlace, find_place, numbered, searched_for
from tiered.store.mapping import TensorMapping
from tiered.store.residency.entry import Record
from tiered.store.residency.memory_wait import Callbacks
from tiered.store.rows.rows import NUM_WITH_ADAM, PartAccess, Rows
from tiered.store.values.streaming import VerifyReport
from tiered.store.waiting.deferred_seal import Producer
from tiered.store.waiting.refusals import Service
from tiered.units import MiB, format_bytes, parse_bytes

__all__ = ["Store"]


_DEADLINE_S = 60.0
_RANK_DEADLINE_S = 600.0
_CARRY = "tiered.Store with another number of ranks"


class Store(TensorMapping):
    """Tensors on NVMe by name, with commits. All methods are thread-safe; a forked child must not use it.

    A ``__del__`` or weakref callback may run within a call that its own thread makes, or in one of tiered's threads:
    its calls of the store then raise UsageError. Set a flag there, commit in the loop. The action of a signal waits for
    the end of a call, or for its waits. Where another exception from outside (a time limit that another thread sets)
    cuts a call short in the middle of its changes, all but close() raises UsageError from then on.

    ``with Store(...) as store:`` closes it: a normal exit commits complete work, an exception does not. Training
    steps are complete where their state is: once a state was committed, those that no commit covers are dropped.

    A store that was not closed and is garbage warns (ResourceWarning) and gives everything back, without a commit.
    """

    device_memory: int | None  # the compute device's budget in bytes
    ranks: Ranks | None = None  # of the process group, this process among them; None for one
    process_group: object = None  # False: this process alone, whatever ranks there are
    carried_over: Callable[..., AbstractContextManager[str]] | None = (
        None  # ``zero.reshard.carry_over``, set there: it knows models
    )
    _origin: RankSet | None = None  # the run of another number of ranks that this store is to go on with
    rank_deadline: float = _RANK_DEADLINE_S  # seconds that a wait for another rank may last

    def __init__(
        self,
        *directories: str | os.PathLike[str],
        dram: int | str | None = None,
        device_memory: int | str | None = None,
        process_group: Any = None,
        rank_deadline: float = _RANK_DEADLINE_S,
        durable: bool = True,
        engine: str = "auto",
        mode: str = "a",
        external: Sequence[str | os.PathLike[str]] = (),
        _arena: Arena | None = None,
    ) -> None:
        """Open or create the store in ``directories``, striped over them; blocks.

        While stores are open, the actions of SIGINT, SIGALRM, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 wait for the end of
        calls, and ``signal.getsignal`` shows ours: interrupt.py says how.
        ``dram`` bounds all that it keeps in DRAM, in bytes or as "8GiB" (default: half of free memory).
        ``device_memory`` bounds its bytes on the accelerator, such as "20GiB" (default: ``tiered.shard`` decides from
        free memory); 0: it serves none. ``dram`` is page-locked, 0.1 s a GiB, by the first model or tensor on one.
        ``process_group``: the ranks that train one model together, each with a store of its own. None: the default
        group where ``torch.distributed`` is initialised, and then all ranks open their stores together; False: this
        process alone; or a group, or a DeviceMesh of one dimension. ``{rank}`` and ``{local_rank}`` in a directory
        stand for this rank's numbers; in it each has its own, such as ``rank-0003-of-0008``. ``dram`` is divided by the
        ranks of the machine, and the least share is each rank's. All ranks commit, roll back, resume and close
        together.
        ``rank_deadline``: seconds that a wait for another rank may last before ``RankLostError``, in the first step
        three times as long.
        ``durable=False`` makes swap space that vanishes with the process. ``engine`` moves the bytes: "auto", "uring",
        "threads", "aiofiles", "mmap" or "memory". ``mode`` "a" opens or creates, "x" creates, "r" only reads.
        ``external``: safetensors files, or folders of them, in which tensors may lie and are read in place (``adopt``,
        and the ``weights`` of ``tiered.shard`` that no step changes); to be given at each open. Raises UsageError,
        CapacityError, CorruptionError, DeviceError; nothing stays open then.
        """
        self.process_group = process_group
        self.rank_deadline = _checked_seconds(rank_deadline)
        self.device_memory = None if device_memory is None else parse_bytes(device_memory)
        try:
            INTERRUPTS.begin(self)
            self.ranks = Ranks.of(process_group, deadline_s=self.rank_deadline)
            with phase(self.ranks, "tiered.Store"):
                options = {"durable": durable, "engine": engine, "mode": mode, "external": external}
                self._open(directories, _arena or self._new_arena(dram), options)
            if self._origin is not None:
                self._carry_over(self._origin, external, engine)
            INTERRUPTS.look()  # order: here the store can be closed, which the caller has not yet
        except BaseException:
            if hasattr(self, "_generations"):
                self._close(commit=False)
            elif self.ranks is not None:
                self.ranks.comm_thread.close()
            INTERRUPTS.end(self)
            raise

    def _open(self, directories: Sequence[str | os.PathLike[str]], arena: Arena, options: dict[str, Any]) -> None:
        place = StorePlace(_of_this_rank(directories, self.ranks), Alone())
        try:
            if options["durable"] and options["engine"] != "memory" and directories:
                world = 1 if self.ranks is None else self.ranks.world
                place = find_place(place.paths, [*searched_for(directories, world)], self.ranks, options["mode"])
            elif self.ranks is not None:
                place = place._replace(confirmation=RanksConfirmation(self.ranks))
        except BaseException:
            arena.close()
            raise
        parts = open_parts(place.paths, arena, confirmation=place.confirmation, **options)
        self._assemble(parts, options["mode"], _DEADLINE_S)
        parts.ranks = self.ranks  # order: where it fails, the other ranks are still to be told
        self._origin = place.origin

    def _carry_over(self, origin: RankSet, external: Sequence[str | os.PathLike[str]], engine: str) -> None:
        """Make the run of another number of ranks the first generation of these; blocks for all ranks."""
        if Store.carried_over is None:
            raise UsageError(f"a run of {origin}, and tiered.zero, which carries it over, is not imported; import it")
        with ExitStack() as stack:
            with phase(self.ranks, _CARRY):
                text = stack.enter_context(Store.carried_over(self, origin, external=external, engine=engine))
            self._generations.take_over(text)  # order: before the old stores are unlocked

    def _new_arena(self, dram: int | str | None) -> Arena:
        ranks = self.ranks
        budget = (
            dram_budget(dram) if ranks is None else ranks.least("dram=", lambda: _share_of(dram_budget(dram), ranks))
        )
        return new_arena(budget, serves_accelerator=self.device_memory != 0)

    @classmethod
    def _from_parts(cls, parts: Parts, *, mode: str = "a", deadline_s: float = _DEADLINE_S) -> Store:
        """Return a store of given parts; it closes them."""
        store = cls.__new__(cls)
        store.device_memory = None
        INTERRUPTS.begin(store)
        store._assemble(parts, mode, deadline_s)
        return store

    def _assemble(self, parts: Parts, mode: str, deadline_s: float) -> None:
        self.durable = parts.catalog is not None
        self._is_released = False  # everything was given back
        self._closing = Condition()
        self._callbacks = Callbacks()  # lifetime: the working set refers to them weakly
        self.working_set, self._streams, self._values, self._generations, self._resources = assemble(
            parts, self._callbacks, is_read_only=mode == "r", deadline_s=deadline_s
        )
        self._parts, self.external, self._producers = parts, parts.external, self._generations.producers
        self._condition, self._refusals = self.working_set.condition, self.working_set.refusals
        self._access, self._caches = PartAccess(self.working_set), list[str]()
        self._resources.first = self._access.give_back
        self._resources.watch(self)
        # Order: before the devices' ends, which were added earlier: a commit that was sealed is finished then.
        at_exit(self, Store._finish_at_exit)

    __eq__ = object.__eq__  # identity, not the contents as of a Mapping
    __hash__ = object.__hash__

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copy and pickle."""
        raise UsageError(
            f"{self!r} cannot be copied or pickled; pass worker processes plain tensors, or open a store of their own"
            " there"
        )

    # Below: tables and caches

    def rows(self, keys: str | Iterable[str], *, state: str | None = None) -> Rows:
        """Return the rows of the tensor of a key, (number of rows, ...), or of several keys as one table, in order.

        ``state`` is that of ``create_rows``. Nothing is read. KeyError; ValueError for keys whose rows differ,
        UsageError for a tensor without dimensions.
        """
        return Rows(self, self._access, self._producers.settled, [keys] if isinstance(keys, str) else list(keys), state)

    def create_rows(
        self, key: str, num_rows: int, row_shape: Iterable[int], dtype: torch.dtype, *, state: str | None = None
    ) -> Rows:
        """Make ``key``, which is new, a table of zeros, (num_rows, *row_shape), in blocks of 4 KiB; blocks.

        Returns its rows. For a table that is there already, such as a committed one, there is ``rows``.
        With ``state="adam"`` each row of fp32 has its moments beside it, for ``RowSparseAdam``: the tensor of the key
        is (num_rows, 3, *row_shape). It is written to the device at once, and nothing of it is in DRAM; a commit makes
        it durable. Raises ValueError, CapacityError, UsageError for a key that is there.
        """
        if isinstance(row_shape, int):
            raise TypeError(f"create_rows({key!r}): expected row_shape as a tuple such as (256,), got {row_shape}")
        if state not in (None, "adam"):
            raise ValueError(f'create_rows({key!r}): expected state None or "adam", got {state!r}')
        if state is not None and dtype is not torch.float32:
            raise ValueError(f"create_rows({key!r}): state={state!r} is for rows of torch.float32, got {dtype}")
        if key in self:
            raise UsageError(
                f"create_rows({key!r}): the key is there; store.rows({key!r}) has the rows of a table, and del"
                f" store[{key!r}] drops it"
            )
        shape = (num_rows, *row_shape) if state is None else (num_rows, NUM_WITH_ADAM, *row_shape)
        spec = Spec(dtype, shape, self.working_set.space.alignment)
        self._values.put_zeros(self._producers.settled(key), spec)
        return self.rows(key, state=state)

    def cache(self, prefix: str, *, capacity: int | str, policy: str = "lru") -> Cache:
        """Return the keys that begin with ``prefix`` as a mapping of at most ``capacity`` bytes of the drives.

        When it is full, the least recently used tensors go. Where all are used in turn, over and over, that is the
        worst choice: use keys without a cache then. Raises ValueError, UsageError for a prefix that begins with, or
        begins, another cache's. A put may commit the whole store, with the last state: see ``Cache``.
        """
        nbytes = parse_bytes(capacity)
        if nbytes <= 0 or not prefix:
            raise ValueError(f"cache {prefix!r}: expected a prefix, and a capacity above 0, got {capacity!r}")
        if policy != "lru":
            raise ValueError(f'cache {prefix!r}: expected policy="lru", which is all there is, got {policy!r}')
        for other in self._caches:
            if other.startswith(prefix) or prefix.startswith(other):
                raise UsageError(
                    f"cache {prefix!r}: its keys would be those of the cache {other!r}, too; use the Cache that the"
                    " first call returned, or another prefix"
                )
        found = Cache(self, prefix, nbytes)
        self._caches.append(prefix)
        return found

    # Below: generations

    @property
    def has_registered(self) -> bool:
        """Whether anything is registered: a model, an optimizer or the user's own."""
        return bool(self._generations.registry)

    @property
    def is_read_only(self) -> bool:
        return self._refusals.is_read_only

    @property
    def generation(self) -> int:
        """The number of the last committed generation; 0 when there is none."""
        return self._generations.root.generation

    @property
    def uuid(self) -> str:
        """The identity that the store was created with, in 32 hex digits; all its directories have it."""
        return self._generations.root.store_uuid.hex()

    @property
    def run(self) -> str:
        """The identity of all stores that commit together, in 32 hex digits; on one rank it is ``uuid``."""
        member = self._parts.confirmation.member
        return self.uuid if member is None or not member.run else member.run.hex()

    @property
    def origin(self) -> str:
        """The ``run`` of another number of ranks that this one was carried over from; "" for none."""
        member = self._parts.confirmation.member if self._parts.directories is None else self._parts.directories.member
        return "" if member is None else b"".join(member.origins[:1]).hex()

    @property
    def state(self) -> dict[str, Any]:
        """The state that was committed with ``generation``; a copy."""
        return committed_state(self._generations.root.state)[0]

    def commit(self, state: Mapping[str, Any] | None = None, *, wait: bool = True) -> int:
        """Make everything durable as it is now, with ``state`` riding along; return the generation.

        It contains all keys, the ``state_dict()`` of all registered objects, and ``state`` (None: the last one again),
        as they are at the call. With ``wait=False`` it becomes durable in the background; the next call raises a
        failure there. Updates of an ``optimizer.step()`` that still run are part of it, and it is sealed behind them. A
        change of its contents before that (the next updates, a put, ``unsharded``, another commit, ``rollback``,
        ``close``) waits, a forward does not. Where an update or that seal fails, the step is abandoned.

        Raises LeaseError while a key is leased for writing, CapacityError and TypeError with nothing sealed;
        DeviceError when the generation is lost: then only close() is left.
        """
        generation = self._generations.commit(state, wait=wait)
        if wait:
            self.wait_for_commit()
        return generation

    def wait_for_commit(self) -> None:
        """Wait until the last commit is durable. Raises DeviceError when it is lost, DeadlineError."""
        self._refusals.check()
        self._generations.wait()

    def rollback(self) -> None:
        """Return to the last committed generation, every registered object included; rewrites nothing. Blocks shortly.

        Keys created since are gone, "r" leases keep the bytes they have. Raises UsageError when something is registered
        and nothing was ever committed, LeaseError while a key is leased for writing. All ranks call it together; steps
        that were abandoned on any of them are over then.
        """
        with self._together(ROLLBACK):
            self._generations.roll_back()

    def register(self, name: str, item: Stateful) -> None:
        """Make ``item.state_dict()`` part of every commit under ``name``; ``resume`` and ``rollback`` load it again.

        A state committed under a name that is not registered now stays in every commit, until ``drop_state``.
        Raises TypeError when the state has something that cannot be kept, naming where; UsageError for a taken name.
        """
        self._refusals.check()
        self._generations.registry.add(name, item)

    def registered(self, name: str) -> Any:
        """Return the object that is registered under ``name``; None where there is none."""
        return self._generations.registry.get(name)

    def registered_state(self, name: str) -> Any | None:
        """Return the state that the last commit has for ``name``; None where it has none."""
        return committed_state(self._generations.root.state)[1].get(name)

    def drop_state(self, name: str) -> None:
        """Leave the state that was committed under ``name`` out of the next commit; ``rollback`` brings it back.

        Raises KeyError where there is none, UsageError where something is registered under the name.
        """
        self._generations.drop_state(name)

    def resume(self) -> dict[str, Any]:
        """Load the last committed generation into all that is registered; return its state, {} if there is none.

        Changes since then are rolled back first. Raises UsageError with the differences when something is registered
        that the commit does not have. All ranks call it together; each has the state that it has committed itself.
        """
        with self._together("store.resume()"):
            return self._generations.resume()

    @contextmanager
    def _together(self, word: str) -> Iterator[None]:
        """All ranks are here together, also after an abandoned step; an error on one is an error on all.

        In a close each rank returns by itself.
        """
        if self.ranks is None or not self.durable or self._closing.is_held_here():
            yield
            return
        self._refusals.check()
        self.ranks.rejoin(word)
        with self.ranks.agreement.phase(word):
            yield

    def add_guard(
        self, guard: Callable[[str], None], *, returning: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        """Have ``guard(word)`` called, without locks, at the start of "commit", "rollback", "resume" and "close".

        It may finish deferred work, roll back, or raise to refuse. One that raises at "close" keeps close from
        committing. A rollback or resume may still be refused after it: ``returning()`` is entered once the bytes are
        those of the last commit, and left, without an error, once all that is registered has its state again.
        """
        self._generations.guards.append(guard)
        if returning is not None:
            self._generations.returning.append(returning)

    def withhold_changes(self, reason: str) -> None:
        """For a guard at "close": have the changes since the last commit dropped, and the log say so and why."""
        self._generations.withheld_for = reason

    def add_producer(self, producer: Producer) -> None:
        """Have ``producer`` asked, without locks, before a caller's own use of a key, and at each commit."""
        self._producers.add(producer)

    def reserve_space(self, nbytes: int, *, scratch: bool = False) -> None:
        """Make sure now that ``nbytes`` more than earlier calls reserved can be written. Raises CapacityError."""
        self.working_set.check(writing=True)
        with self.working_set.mark:
            self.working_set.space.reserve(nbytes, scratch=scratch or not self.durable)

    # Below: looking

    def verify(self) -> VerifyReport:
        """Read every block on the devices and check it; blocks. Damage is in the report. Raises DeviceError."""
        self._refusals.check()
        return self._streams.verify()

    def drop_damaged(self, keys: Iterable[str]) -> None:
        """Drop the committed ``keys``, all of them damaged; blocks, durable afterwards.

        The commit changes nothing else. Raises UsageError, with nothing dropped, for a key that is unknown or sound,
        and where anything is registered or has changed since the last commit; DeviceError when that commit fails.
        """
        drop_damaged(self.working_set, self._streams, self._generations, keys)

    def records(self) -> list[Record]:
        """Return a record of each key, in the order of creation. Touches no bytes."""
        self._refusals.check()
        with self._condition:
            return self.working_set.records()

    def statistics(self) -> StoreStatistics:
        """Return the counters of the store, its working set and its devices."""
        self._refusals.nested_calls.refuse()
        space, generations, earlier_bytes = self.working_set.space, self._generations, self._parts.ledgers.earlier_bytes
        devices = [device.statistics() for device in space.devices]
        reading = devices if space.external is None else [*devices, space.external.statistics()]
        write_bytes = sum(device.write_bytes for device in devices)
        catalog_bytes = generations.catalog_write_bytes
        with self._condition:
            num_keys, used, free = self.working_set.num_keys, space.used_nbytes, space.free_nbytes
        return StoreStatistics(
            generation=generations.root.generation,
            num_keys=num_keys,
            num_commits=generations.num_commits,
            used_bytes=used,
            free_bytes=free,
            quarantined_bytes=space.quarantined_nbytes,
            file_bytes=sum(device.file_bytes for device in devices),
            read_bytes=sum(device.read_bytes for device in reading),
            write_bytes=write_bytes,
            catalog_write_bytes=catalog_bytes,
            lifetime_write_bytes=None if earlier_bytes is None else earlier_bytes + write_bytes + catalog_bytes,
            num_flushes=sum(device.num_flushes for device in devices),
            working_set=self.working_set.statistics(),
            recorder=self.working_set.recorder.statistics(),
        )

    def __repr__(self) -> str:
        state = f"open, {self.working_set.num_keys} keys, generation {self.generation}"
        state = "closed" if self._refusals.service in (Service.CLOSED, Service.LATE) else state
        return f"<Store {', '.join(device.name for device in self._parts.devices)}: {state}, {self._parts.arena!r}>"

    # Below: the end

    def close(self, *, commit: bool = True) -> None:
        """Commit the tensors that changed, if any did, then give everything back; blocks. Idempotent.

        ``commit=False`` drops what changed since the last commit; the log says how much.
        Optimizer steps that came after the last ``commit(state)`` are not committed under its state: all changes since
        then are dropped, and the log says so. Where no commit had a state, they are committed.
        Call it before the process ends: an ``atexit`` function is too late, and gets ClosedError if anything changed.
        From a finalizer or a signal handler inside of another call it only warns (ResourceWarning): nothing is closed.
        Bytes under living tensors of leases follow when these die. Raises, once everything is given back, what kept the
        commit from happening: LeaseError, CapacityError, DeviceError.
        """
        self._close(commit=commit)

    def __enter__(self) -> Store:
        self._refusals.refuse()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self.ranks is not None and self._refusals.service is not Service.FORKED:
            self.ranks.abandon(error, "with tiered.Store")
        try:
            self._close(commit=error is None)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and closing the store failed: {failure}")

    def _close(self, *, commit: bool) -> None:
        refusals = self._refusals
        if refusals.service is Service.FORKED:
            return  # nothing of it is the child's to close
        if refusals.nested_calls.is_inside() or self._producers.is_inside() or self._closing.is_held_here():
            return warn_of_nested_close(repr(self))
        INTERRUPTS.stand_before_actions()
        with self._closing:
            if self._is_released:
                return
            failure: Exception | None = None
            if refusals.service is Service.LATE:
                failure = refusals.too_late() if self._generations.report_dropped() and commit else None
            elif refusals.service is not Service.CLOSED:
                failure = self._generations.finish(commit=commit)
            refusals.service = Service.CLOSED
            self._resources.give_back()
            self._is_released = True
            INTERRUPTS.end(self)
        if failure is not None:
            raise failure

    def _finish_at_exit(self) -> None:
        if self._refusals.service in (Service.SERVES, Service.FAILED):
            try:
                self._generations.finish_at_exit()
            finally:
                self._refusals.service = Service.LATE


def _of_this_rank(
    directories: Sequence[str | os.PathLike[str]], ranks: Ranks | None
) -> Sequence[str | os.PathLike[str]]:
    """Return ``directories`` with the numbers of this rank in the places of ``{rank}`` and ``{local_rank}``."""
    rank, local_rank = (0, 0) if ranks is None else (ranks.rank, ranks.local_rank)
    return [numbered(directory, rank, local_rank) for directory in directories]


def _share_of(budget: int, ranks: Ranks) -> int:
    """Return the part of ``budget``, bytes of the machine's DRAM, of one rank. Raises CapacityError."""
    share = budget // ranks.local_world // MiB * MiB
    if share < MIN_DRAM_NBYTES:
        raise CapacityError(
            f"a DRAM budget of {format_bytes(budget)} for {ranks.local_world} ranks of this machine; the smallest is"
            f" {format_bytes(MIN_DRAM_NBYTES)} for each: give a larger dram="
        )
    return share


def _checked_seconds(rank_deadline: float) -> float:
    if isinstance(rank_deadline, bool) or not isinstance(rank_deadline, int | float):
        raise TypeError(f"rank_deadline={rank_deadline!r}: expected seconds, such as 600")
    if not 0 < rank_deadline < float("inf"):
        raise ValueError(f"rank_deadline={rank_deadline!r}: expected a number of seconds above 0")
    return float(rank_deadline)
