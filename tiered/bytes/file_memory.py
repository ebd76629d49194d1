"""Memory that lies in an unnamed file: the kernel writes its pages there when it needs them for something else."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import torch

from tiered.bytes.device.direct import open_unnamed
from tiered.bytes.device.files import translate
from tiered.bytes.memory_mapping import map_file
from tiered.errors import CapacityError
from tiered.units import format_bytes, round_up

__all__ = ["FileMemory"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PAGE_NBYTES = 4096


class FileMemory:
    """Room for tensors in an unnamed file of ``directory``: page cache, which the kernel takes back.

    The space is allocated at once, so that no later write to a tensor finds the drive full. It is given back with the
    last tensor, or with the process. One thread at a time fills it.
    """

    def __init__(self, directory: str, nbytes: Sequence[int]) -> None:
        """Allocate space for tensors of ``nbytes`` each. Raises CapacityError where the drive is full, OSError."""
        self._directory = directory
        total = sum(round_up(each, _PAGE_NBYTES) for each in nbytes)
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fd = open_unnamed(folder, 0)
        finally:
            os.close(folder)
        self._end = 0
        try:
            os.posix_fallocate(self._fd, 0, max(total, 1))
            self._memory = map_file(self._fd, max(total, 1))
        except OSError as error:
            self.close()
            if error.errno in _FULL:
                raise CapacityError(f"{directory} has no room for {format_bytes(total)} more") from error
            raise

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros, dense in memory; it keeps the file's space."""
        return self._take(shape, strides, dtype)[0]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``, dense on any device, with its shape, strides and dtype.

        The bytes are written to the file, not through the mapping: no page of the copy counts as this process's before
        it is touched. Raises DeviceError.
        """
        copied, start = self._take(tensor.shape, tensor.stride(), tensor.dtype)
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        content = memoryview(flat.cpu().numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers
        try:
            while content:
                num_written = os.pwrite(self._fd, content, start)
                content, start = content[num_written:], start + num_written
        except OSError as error:
            raise translate(error, f"cannot write byte {start} of a copy's file in {self._directory}") from error
        return copied

    def close(self) -> None:
        """Make no more tensors; those that there are stay. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _take(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        numel, start = torch.Size(shape).numel(), self._end
        if not numel:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu"), start
        flat = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)
        self._end += round_up(flat.nbytes, _PAGE_NBYTES)
        return flat.as_strided(shape, strides), start
