"""Opening: from paths and an engine's name to the parts of a store. An error here leaves nothing open."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tiered.bytes.arena import Arena
from tiered.bytes.device.base import Device
from tiered.bytes.device.engines import DEVICES, open_device
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.device.memory import MemoryDevice, MemoryDisk
from tiered.bytes.free_memory import free_memory, memory_size
from tiered.bytes.pinned_arena import NoRegistrar, PinnedArena, registrar_for
from tiered.errors import CapacityError, TieredError, UsageError
from tiered.ranks.ranks import Ranks
from tiered.store.catalog.catalog import Alone, Confirmation
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.root import Root
from tiered.store.format.state_text import encode
from tiered.store.lifetime.directory import CATALOG_NAME, Directories, scratch_directories
from tiered.store.lifetime.external import ExternalSources
from tiered.store.lifetime.ledger import Ledgers
from tiered.units import MiB, format_bytes, parse_bytes

__all__ = ["ENGINES", "MIN_DRAM_NBYTES", "Parts", "dram_budget", "empty_root", "new_arena", "open_parts"]

ENGINES = ("auto", *DEVICES, "memory")
MIN_DRAM_NBYTES = 8 * MiB
"""The smallest budget a store opens with: two blocks, so that tensors of any size can pass through."""

CATALOG_NBYTES = 8 * MiB
"""Bytes of each file system that the store's files leave free, for its catalog to commit with."""

_log = logging.getLogger("tiered")

Path = str | os.PathLike[str]
_ALONE = Alone()


@dataclass(slots=True)
class Parts:
    """The parts of a store."""

    arena: Arena
    devices: Sequence[Device]
    catalog: SqliteCatalog | None
    directories: Directories | None = None
    spared_nbytes: int = 0  # of each device, for the catalog
    confirmation: Confirmation = field(default_factory=Alone)  # of generations, at open and in commits
    ledgers: Ledgers = field(default_factory=Ledgers)
    external: ExternalSources = field(default_factory=lambda: ExternalSources((), "auto"))
    ranks: Ranks | None = None

    def check_locks(self) -> None:
        """Raise DeviceError where a file that keeps other writers away has lost its name."""
        if self.directories is not None:
            self.directories.check_locks()

    def close(self, close_arena: Callable[[], None]) -> None:
        """Close everything; blocks. ``close_arena`` is called when nothing is in flight any more.

        Raises DeadlineError when something in flight, or a commit, does not complete: buffers, mapping and locks then
        stay, all else is closed, and this may be called again.
        """
        failure: Exception | None = None
        if self.ranks is not None:  # order: they may still write into the arena's buffers
            self.ranks.end(self.arena)
        ends = [*(device.close for device in self.devices), self.external.close]
        if self.catalog is not None:
            ends.append(self.catalog.close)
        for end in ends:
            try:
                end()
            except TieredError as error:
                failure = failure or error
        # Order: the locks go last, when nothing of this process can write any more.
        if failure is not None:
            raise failure
        self.ledgers.close()  # order: the counters of the devices are final now
        if self.directories is not None:
            self.directories.close()
        close_arena()  # Lifetime: only now does no operation use its buffers


def dram_budget(dram: int | str | None) -> int:
    """Return the DRAM budget in bytes; by default half of free memory, which is logged.

    Raises CapacityError for one that no store works with, or that is more than the memory there is.
    """
    if dram is None:
        budget = free_memory() // 2 // MiB * MiB
        _log.info("dram= not given: the budget is %s, half of free memory", format_bytes(budget))
    else:
        budget = parse_bytes(dram)
    if budget < MIN_DRAM_NBYTES:
        raise CapacityError(
            f"a DRAM budget of {format_bytes(budget)}; the smallest is {format_bytes(MIN_DRAM_NBYTES)}: give a larger"
            " dram="
        )
    if 0 < (most := memory_size()) < budget:
        raise CapacityError(
            f"a DRAM budget of {format_bytes(budget)}; this process can have {format_bytes(most)} of memory in all:"
            f" leave room for activations and the rest, {format_bytes(most // 2)} is a start"
        )
    return budget


def new_arena(nbytes: int, *, serves_accelerator: bool) -> Arena:
    """Return an arena of ``nbytes``, to be page-locked for this process's accelerator if there is one to serve."""
    accelerator = torch.accelerator.current_accelerator(check_available=True) if serves_accelerator else None
    if accelerator is None:
        return Arena(nbytes)
    return PinnedArena(nbytes, registrar_for(accelerator.type) or NoRegistrar(accelerator.type))


def empty_root(store_uuid: bytes, num_directories: int) -> Root:
    """Return the root of a store in which nothing was committed."""
    return Root(store_uuid, generation=0, next_key_id=1, num_directories=num_directories, state=encode({}))


def open_parts(
    paths: Sequence[Path],
    arena: Arena,
    *,
    durable: bool,
    engine: str,
    mode: str,
    external: Sequence[Path] = (),
    confirmation: Confirmation = _ALONE,
) -> Parts:
    """Open or create a store's devices and catalog around ``arena``, which is theirs to close.

    ``confirmation``: of the ranks that share the store; ``paths`` are this rank's own.
    Raises UsageError, CapacityError, DeviceError and others, with everything closed.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(arena.close)
        _check_engine(engine)
        sources = ExternalSources(external, engine)
        stack.callback(sources.close)
        parts = _open_around(arena, paths, durable, engine, mode, confirmation, stack)
        parts = replace(parts, external=sources, confirmation=confirmation)
        stack.pop_all()
        return parts


def _open_around(
    arena: Arena,
    paths: Sequence[Path],
    durable: bool,
    engine: str,
    mode: str,
    confirmation: Confirmation,
    stack: contextlib.ExitStack,
) -> Parts:
    if mode not in ("a", "x", "r"):
        raise ValueError(f'mode must be "a", "x" or "r", got {mode!r}')
    if engine == "memory":
        return _open_memory(max(1, len(paths)), arena, durable)
    if not paths:
        raise UsageError('a store needs a directory, as in tiered.Store("/nvme0/run"), or engine="memory"')
    if not durable:
        if mode == "r":
            raise UsageError('durable=False keeps nothing that mode="r" could read')
        return Parts(arena, _open_devices(scratch_directories(paths), engine, stack), None)
    directories = Directories.open(paths, mode, confirmation)  # type: ignore[arg-type]  # checked above
    stack.callback(directories.close)
    catalog_path = directories.paths[0] / CATALOG_NAME
    if directories.created:
        catalog = SqliteCatalog.create(catalog_path, empty_root(directories.store_uuid, len(directories.paths)))
    else:
        catalog = SqliteCatalog(catalog_path, read_only=mode == "r")
    stack.callback(catalog.close)
    if directories.member is not None and confirmation.member is not None and not directories.created:
        confirmation.join(directories.member.run, catalog.kept()[0].number)
    ledgers = Ledgers() if mode == "r" else Ledgers(directories.paths, directories.store_uuid)
    devices = _open_devices(directories.paths, engine, stack)
    ledgers.watch(devices)
    return Parts(arena, devices, catalog, directories, CATALOG_NBYTES, ledgers=ledgers)


def _open_devices(paths: Sequence[os.PathLike[str]], engine: str, stack: contextlib.ExitStack) -> list[FileDevice]:
    devices: list[FileDevice] = []
    for path in paths:
        devices.append(open_device(path, engine))
        stack.callback(devices[-1].close)
    return devices


def _open_memory(num_devices: int, arena: Arena, durable: bool) -> Parts:
    disk = MemoryDisk()
    devices = [MemoryDevice(disk, index) for index in range(num_devices)]
    catalog = SqliteCatalog.create(None, empty_root(uuid.uuid4().bytes, num_devices)) if durable else None
    _log.warning('engine="memory": the devices are RAM outside the DRAM budget, and gone when the process ends')
    return Parts(arena, devices, catalog)


def _check_engine(engine: str) -> None:
    if engine in ENGINES:
        return
    there_is = f"there is: {', '.join(map(repr, ENGINES))}"
    close = difflib.get_close_matches(str(engine), ENGINES, 1)
    raise UsageError(f"engine={engine!r} is unknown; {there_is}" + (f"; did you mean {close[0]!r}?" if close else ""))
