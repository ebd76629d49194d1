"""An adaptor for GPUDirect Storage: bytes between NVMe and compute-device memory that do not pass through DRAM.

Needs ``kvikio`` (the extra ``gds``). Tested without it: which operations go where, errors, flush, close. NOT tested,
for lack of the hardware: ``kvikio`` itself on a GPU; its calls are written from the documentation of 26.10.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor  # order: before any device, whose entry at the end must run first
from typing import NamedTuple, Protocol

import torch

from tiered.bytes.condition import Condition
from tiered.bytes.device.adaptor import Adaptor
from tiered.bytes.device.base import SCRATCH, Device, DeviceStatistics, Operation
from tiered.errors import ClosedError, DeviceError, TieredError, UsageError

__all__ = ["DirectFile", "GdsDevice"]


class DirectFile(Protocol):
    """An open file that moves bytes to and from a tensor, (nbytes,) uint8; ``kvikio.CuFile`` is one. Blocks."""

    def read(self, buf: torch.Tensor, size: int, file_offset: int) -> int: ...
    def write(self, buf: torch.Tensor, size: int, file_offset: int) -> int: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class _Mapping(NamedTuple):
    address: int
    flat: torch.Tensor  # (nbytes,) uint8


class GdsDevice(Adaptor):
    """Carries out the operations whose memory is a view of a tensor; all others are the upstream's.

    The memory of such an operation is what ``view`` returns, or a slice of it: a memoryview with the tensor's address
    and length, by which it is known here. Adaptors above may split and count it like any other; nobody may touch its
    bytes. The tensor's values must be there before ``submit``: nothing here waits for a CUDA stream.
    """

    def __init__(
        self, upstream: Device, *, num_threads: int = 8, open_file: Callable[[str], DirectFile] | None = None
    ) -> None:
        """``open_file`` opens a path for reading and writing, by default with kvikio. UsageError where that is missing.

        The upstream's files must have names (``path``): the scratch file has none and is refused, per operation.
        """
        super().__init__(upstream)
        self._open_file = _kvikio_open() if open_file is None else open_file
        self._lock = Condition()
        self._flush_lock = threading.Lock()
        self._mappings: list[_Mapping] = []
        self._files: dict[int, DirectFile] = {}
        self._dirty: set[int] = set()
        self._flush_error: Exception | None = None
        self._is_closed = False
        self._read_bytes = self._write_bytes = self._num_reads = self._num_writes = self._num_in_flight = 0
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tiered-gds")

    def view(self, tensor: torch.Tensor) -> memoryview:
        """Return the memory by which operations name the bytes of ``tensor``, which is kept alive until ``forget``.

        Never read or write it: with a tensor in compute-device memory the processor would fault. ValueError for a
        tensor that is not contiguous or has no bytes.
        """
        if not tensor.is_contiguous() or not tensor.nbytes:
            raise ValueError(f"expected a contiguous tensor with bytes, got {tuple(tensor.shape)} of {tensor.dtype}")
        flat = tensor.detach().view(-1).view(torch.uint8)
        with self._lock:
            self._mappings.append(_Mapping(flat.data_ptr(), flat))
        return memoryview((ctypes.c_uint8 * flat.numel()).from_address(flat.data_ptr())).cast("B")

    def forget(self, tensor: torch.Tensor) -> None:
        """End the views of ``tensor``; none of its operations may be in flight."""
        with self._lock:
            self._mappings = [mapping for mapping in self._mappings if mapping.address != tensor.data_ptr()]

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start all ``operations``; does not block on them."""
        self._check_process()
        direct: list[tuple[Operation, torch.Tensor]] = []
        others: list[Operation] = []
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{self.name} is closed")
            for operation in operations:
                part = self._part(operation)
                if part is None:
                    others.append(operation)
                else:
                    direct.append((operation, part))
            self._num_in_flight += len(direct)
        try:
            self.upstream.submit(others)
        except BaseException:
            with self._lock:
                self._num_in_flight -= len(direct)
            raise
        for operation, part in direct:
            self._executor.submit(self._serve, operation, part)

    def flush(self) -> None:
        """Make completed writes, growth and new files durable; blocks. After one failure all later ones fail."""
        self._check_process()
        with self._flush_lock:
            if self._flush_error is not None:
                raise DeviceError(f"an earlier flush of {self.name} failed; reopen the store") from self._flush_error
            dirty: set[int] = set()
            try:
                with self._lock:
                    dirty, self._dirty = self._dirty, set()  # order: a write that ends from now on marks it again
                for file in sorted(dirty):
                    self._fdatasync(file)
                self.upstream.flush()
            except BaseException:  # interrupted, the next flush has it to do
                with self._lock:
                    self._dirty |= dirty
                raise

    def _fdatasync(self, file: int) -> None:
        try:
            os.fdatasync(self._files[file].fileno())
        except OSError as error:
            self._flush_error = error
            raise DeviceError(f"flush of {self.path(file)} failed: {error.strerror}; reopen the store") from error

    def statistics(self) -> DeviceStatistics:
        """Return the upstream's counters and those of the operations that went past it."""
        self._check_process()
        upstream = self.upstream.statistics()
        with self._lock:
            return dataclasses.replace(
                upstream,
                read_bytes=upstream.read_bytes + self._read_bytes,
                write_bytes=upstream.write_bytes + self._write_bytes,
                num_reads=upstream.num_reads + self._num_reads,
                num_writes=upstream.num_writes + self._num_writes,
                num_in_flight=upstream.num_in_flight + self._num_in_flight,
            )

    def close(self) -> None:
        """Wait for what is in flight, close the files, forget the views, close the upstream. Idempotent."""
        if self._pid == os.getpid():
            with self._lock:
                self._is_closed = True
                self._lock.wait_for(lambda: not self._num_in_flight)  # order: all that was begun is with the executor
            self._executor.shutdown()
            with self._lock:
                files, self._files, self._mappings = list(self._files.values()), {}, []
            for file in files:
                file.close()
        self.upstream.close()

    def _part(self, operation: Operation) -> torch.Tensor | None:
        """Return the bytes of a tensor that ``operation`` is about, under the lock; None for ordinary memory."""
        try:
            nbytes = len(operation.memory)
            address = ctypes.addressof(ctypes.c_char.from_buffer(operation.memory))
        except (TypeError, ValueError):  # read-only, empty or released memory is none of ours
            return None
        for mapping in self._mappings:
            start = address - mapping.address
            if start >= 0 and start + nbytes <= mapping.flat.numel():
                return mapping.flat[start : start + nbytes]
        return None

    def _serve(self, operation: Operation, part: torch.Tensor) -> None:
        try:
            self._carry_out(operation, part)
        except TieredError as error:
            operation.error = error
        except Exception as error:  # kvikio's own
            operation.error = DeviceError(f"{self._describe(operation)} failed: {error}; see kvikio's and cuFile's log")
            operation.error.__cause__ = error
        with self._lock:
            self._num_in_flight -= 1
            self._lock.notify_all()
            if operation.is_write:
                self._dirty |= {operation.file} & self._files.keys()
                self._write_bytes += 0 if operation.error else part.numel()
                self._num_writes += not operation.error
            else:
                self._read_bytes += 0 if operation.error else part.numel()
                self._num_reads += not operation.error
        operation.on_done(operation)

    def _carry_out(self, operation: Operation, part: torch.Tensor) -> None:
        size = self.upstream.files().get(operation.file, 0)
        if operation.offset < 0 or operation.offset + part.numel() > size:
            raise DeviceError(f"{self._describe(operation)} failed: the file has {size} bytes")
        if operation.file == SCRATCH:
            raise DeviceError(f"{self._describe(operation)} failed: it has no name to open; go through DRAM")
        with self._lock:
            if operation.file not in self._files:
                self._files[operation.file] = self._open_file(self.path(operation.file))
            file = self._files[operation.file]
        transfer = file.write if operation.is_write else file.read
        done = 0
        while done < part.numel():
            moved = transfer(part[done:], part.numel() - done, operation.offset + done)
            if moved <= 0:
                raise DeviceError(f"{self._describe(operation)} failed: it stopped after {done} bytes")
            done += moved

    def _describe(self, operation: Operation) -> str:
        verb = "write" if operation.is_write else "read"
        return f"{verb} of {len(operation.memory)} bytes at offset {operation.offset} of {self.path(operation.file)}"


def _kvikio_open() -> Callable[[str], DirectFile]:
    try:
        kvikio = importlib.import_module("kvikio")
    except ImportError as error:
        raise UsageError(f"GPUDirect Storage takes kvikio: pip install 'tiered[gds]' ({error})") from error
    return functools.partial(kvikio.CuFile, flags="r+")
