"""A simulated accelerator: device type ``sim``, two devices that run the CPU's kernels, and whose order is proven.

``load()`` compiles and registers it once a process; it answers to nothing until ``enable()``. Streams run at once:
time is not simulated, order is. An access that no event orders after an earlier conflicting one is a race, whatever the
timing was: ``races()`` names both sides.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.accelerator.device_module import device_module

__all__ = [
    "NUM_DEVICES",
    "Counts",
    "LogEntry",
    "Traffic",
    "blocking",
    "calls",
    "counts",
    "disable",
    "enable",
    "fail_allocation",
    "fail_copy",
    "fail_registration",
    "guard_pinned",
    "hand_over",
    "hang_events",
    "host_register",
    "host_touch",
    "host_unregister",
    "is_enabled",
    "join",
    "keep_log",
    "load",
    "log",
    "races",
    "refusal",
    "reset",
    "set_allocation_writes",
    "set_memory_limit",
    "set_poison",
    "set_query_delay",
    "take_over",
    "use_pages",
]

NUM_DEVICES = 2

_NAME = "tiered_simulated_accelerator"
_SOURCES = sorted((Path(__file__).parent / "csrc").glob("*.cpp"))
_HEADERS = sorted((Path(__file__).parent / "csrc").glob("*.h"))
_FLAGS = ["-O1", "-Wno-stringop-overflow"]

_lock = threading.RLock()
_library: Any = None
_refusal: str | None = None


class Traffic(NamedTuple):
    """Copies of one direction."""

    num: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Copies since the last reset; those from and to memory that is not pinned stand apart."""

    host_to_device: Traffic
    device_to_host: Traffic
    device_to_device: Traffic
    pageable_host_to_device: Traffic
    device_to_pageable_host: Traffic


class LogEntry(NamedTuple):
    """One call: kinds are operator, copy, record, wait, block, allocate, host, register and unregister."""

    sequence: int
    stream: int  # -1: the host
    kind: str
    name: str
    nbytes: int
    address: int  # an event's for record and wait; a copy's host side
    thread: str


# ---------------------------------------------------------------------------------------------------------- compiling


def _digest() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for source in (*_SOURCES, *_HEADERS):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _one_process_at_a_time(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(folder: Path) -> None:
    from torch.utils import cpp_extension

    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix="building-"))
    path, jobs = os.environ["PATH"], os.environ.get("MAX_JOBS")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"  # pip's ninja
    os.environ["MAX_JOBS"] = jobs or "2"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cpp_extension.load(
                _NAME, [str(s) for s in _SOURCES], extra_cflags=_FLAGS, build_directory=str(building),
                is_python_module=False, is_standalone=False,
            )  # fmt: skip
        os.rename(building, folder)
    finally:
        os.environ["PATH"] = path
        if jobs is None:
            del os.environ["MAX_JOBS"]
        shutil.rmtree(building, ignore_errors=True)


def _build() -> Path:
    """Return the compiled library's path; the first process that needs it compiles it, others wait."""
    base = Path(os.environ.get("TIERED_ACCELERATOR_BUILD") or Path.home() / ".cache" / "tiered-tests")
    base.mkdir(parents=True, exist_ok=True)
    folder = base / _digest()
    library = folder / f"{_NAME}.so"
    with _one_process_at_a_time(base / "lock"):
        if not library.exists():
            _compile(folder)
    return library


def refusal() -> str | None:
    """Return why the device cannot be had here, None when it can; compiles it if need be."""
    load()
    return _refusal


def load() -> types.ModuleType | None:
    """Compile and load the device, once a process; return None where that fails (``refusal()`` says why)."""
    global _library, _refusal
    with _lock:
        if _library is not None or _refusal is not None:
            return _library  # type: ignore[no-any-return]
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            _refusal = "no C++ compiler (g++)"
            return None
        try:
            library = _import(_build())
        except (ImportError, OSError, RuntimeError) as error:
            _refusal = f"the simulated accelerator does not compile: {error}"
            return None
        library.set_name_of_thread(_name_of_thread)
        _library = library
        return library  # type: ignore[no-any-return]


def _name_of_thread() -> str:
    """Return the Python thread's name, without making one up for a thread that Python did not start."""
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return thread.name if thread is not None else str(threading.get_native_id())


# ----------------------------------------------------------------------------------------------------- the device


_registered = False


def _register() -> None:
    global _registered
    if _registered:
        return
    torch.utils.rename_privateuse1_backend("sim")
    _library.register_device()
    generators = [_library.default_generator(index) for index in range(NUM_DEVICES)]
    torch._register_device_module("sim", device_module(generators, is_enabled))  # type: ignore[attr-defined]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _registered = True


def _loaded() -> Any:
    if load() is None:
        raise RuntimeError(_refusal)
    return _library


_watched: list[Callable[[], None]] = []  # the call that ends the watch over hand-overs, while enabled


def enable() -> None:
    """Make ``sim`` the accelerator that is available, with every setting at its default.

    The calling thread is the one that trains. What tiered's threads hand over to each other is watched until disable().
    """
    from tests.accelerator import hand_overs  # it needs tiered, which this module does not

    library = _loaded()
    with _lock:
        _register()
        library.set_enabled(True)
        torch.empty(0, device="sim")  # initializes it for torch
        torch.accelerator.set_device_index(0)
        library.join_as_main()
        library.start_threads_of_autograd()
        library.install_handler()
        if not _watched:
            _watched.append(hand_overs.watch(sys.modules[__name__]))
    reset()


def disable() -> None:
    """Make the accelerator unavailable again; tensors of it may still be freed."""
    if _library is None or not is_enabled():
        return
    reset()
    while _watched:
        _watched.pop()()
    _library.set_guard(False)
    _library.set_enabled(False)
    _library.remove_handler()


def is_enabled() -> bool:
    """Return whether ``sim`` is available."""
    return _library is not None and _library.is_enabled()  # type: ignore[no-any-return]


def reset() -> None:
    """Set settings back, but for the guard; counters to 0; forget races and the log; end copies and hung events."""
    library = _loaded()
    library.reset_order()
    library.reset_ledger()
    library.empty_cache()
    for device in range(NUM_DEVICES):
        library.set_memory_limit(0, device)
    library.set_poison(True)
    library.set_allocation_writes(False)


# ----------------------------------------------------------------------------------------------------- what is seen


def races() -> list[str]:
    """Return the races since the last call, each with both its sides, and forget them."""
    return list(_loaded().races())


def host_touch(what: torch.Tensor | tuple[int, int], write: bool) -> None:
    """The host uses these bytes now: a tensor's, or ``(address, nbytes)``."""
    if isinstance(what, torch.Tensor):
        address, itemsize, sizes, strides = what.data_ptr(), what.element_size(), [*what.shape], [*what.stride()]
    else:
        address, itemsize, sizes, strides = what[0], 1, [what[1]], [1]
    _loaded().host_touch(address, itemsize, sizes, strides, write)


def counts() -> Counts:
    """Return the copies since the last reset."""
    return Counts(*(Traffic(*each) for each in _loaded().traffic()))


def blocking() -> dict[str, dict[str, int]]:
    """Return the calls that blocked the host since the last reset, by thread and kind.

    Kinds: event synchronize, stream synchronize, device synchronize, blocking copy, item, and the operators whose
    result's size depends on the data (nonzero, masked_select, index, ...).
    """
    found: dict[str, dict[str, int]] = {}
    for (thread, kind), num in _loaded().blocking().items():
        found.setdefault(thread, {})[kind] = num
    return found


def join() -> None:
    """Have the calling thread be a party of its own, until it ends: it knows what it has waited for, and took over.

    Threads that never joined know what any thread knows. The one that enabled the device has joined.
    """
    _loaded().join()


def hand_over(place: int, nbytes: int = 1) -> None:
    """Hand over what the calling thread knows, at ``place``: the address of ``nbytes``, or the id of an object."""
    _loaded().hand_over(place, nbytes)


def take_over(place: int, nbytes: int = 1) -> None:
    """Have the calling thread know what was handed over at ``place``, with any of ``nbytes`` there."""
    _loaded().take_over(place, nbytes)


def use_pages(lo: int, hi: int, write: bool) -> None:
    """The calling thread has a drive read or ``write`` these bytes of page-locked memory."""
    _loaded().use_pages(lo, hi, write)


def keep_log(on: bool = True) -> None:
    """Start an empty log, or end it (its entries stay readable)."""
    _loaded().set_logging(on)


def log() -> list[LogEntry]:
    """Return the log since ``keep_log()``, in the order of submission."""
    return [LogEntry(*entry) for entry in _loaded().logged()]


def calls() -> dict[tuple[str, int], dict[str, int]]:
    """Return how often each thread called each device since ``keep_log()``: (thread, device) to kind to number.

    Kinds: operator, copy, item, allocate, memory info, register, unregister, new stream, query stream, synchronize
    stream, synchronize device, record event, wait for event, query event, synchronize event, destroy event; set device:
    the thread's current device became this one, also where a call on another device sets it back.
    """
    return dict(_loaded().calls())


# ----------------------------------------------------------------------------------------------- settings and faults


def host_register(address: int, nbytes: int) -> None:
    """Pin this range of host memory. Raises RuntimeError where a part of it is already pinned."""
    _loaded().host_register(address, nbytes)


def host_unregister(address: int) -> None:
    """Unpin the range that starts here. Raises RuntimeError for an unknown address; with a copy in flight: a race."""
    _loaded().host_unregister(address)


def set_memory_limit(nbytes: int | None, device: int = 0) -> None:
    """Allocations past this on ``device`` raise torch.OutOfMemoryError; None: the machine's memory."""
    _loaded().set_memory_limit(nbytes or 0, device)


def set_poison(on: bool) -> None:
    """Fill fresh device memory with bytes of 0xFF (NaN in every floating dtype)."""
    _loaded().set_poison(on)


def set_allocation_writes(on: bool = True) -> None:
    """Take an allocation for a write on its stream, since the memory may be what work of that stream still uses.

    Another stream that uses the tensor must then wait for the one that it was allocated on.
    """
    _loaded().set_allocation_writes(on)


def guard_pinned(on: bool = True) -> None:
    """Close the pages of pinned memory while a copy is in flight: an access by the host is noted as a race."""
    library = _loaded()
    library.install_handler()
    library.set_guard(on)


def set_query_delay(num_queries: int) -> None:
    """Events recorded from now on answer False to so many queries first."""
    _loaded().set_query_delay(num_queries)


def hang_events(on: bool = True) -> None:
    """Events recorded from now on never complete, nor what comes after them; reset() lets them."""
    _loaded().set_hang_events(on)


def fail_copy(at: int) -> None:
    """Raise RuntimeError for the ``at``-th copy between host and device from now; 0: none."""
    _loaded().plan_failed_copy(at)


def fail_allocation(at: int) -> None:
    """Raise torch.OutOfMemoryError for the ``at``-th allocation from now; 0: none."""
    _loaded().plan_failed_allocation(at)


def fail_registration(at: int) -> None:
    """Raise RuntimeError for the ``at``-th host_register from now; 0: none."""
    _loaded().plan_failed_registration(at)
