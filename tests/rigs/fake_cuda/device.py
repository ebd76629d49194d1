"""The fake CUDA from Python: ``install`` as torch is imported, and what the rig's checks ask the runtime."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

__all__ = [
    "break_devices", "complaints", "contexts", "fail_registration", "install", "registered_nbytes", "set_device_nbytes",
]  # fmt: skip


def install() -> None:
    """Have CUDA's operators run the CPU's kernels; torch calls this at the end of its own import."""
    import torch

    operators = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libfake_operators.so"))
    assert operators.fake_replace_operators() > 1000
    torch.backends.cudnn.enabled = False
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):  # attention by its formula
        getattr(torch.backends.cuda, enable)(False)


@cache
def _runtime() -> ctypes.CDLL:
    import torch

    runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libcudart.so.13"))
    runtime.fake_complaints.restype = ctypes.c_char_p
    runtime.fake_registered_nbytes.restype = ctypes.c_long
    return runtime


def complaints() -> list[str]:
    """Return what was asked of the runtime that no program of ours should ask, and forget it."""
    text: bytes = _runtime().fake_complaints()
    return text.decode().splitlines()


def contexts() -> list[int]:
    """Return the devices that have a context."""
    return [device for device in range(8) if _runtime().fake_has_context(device)]


def registered_nbytes() -> int:
    """Return the bytes of the host that are registered now."""
    return int(_runtime().fake_registered_nbytes())


def set_device_nbytes(nbytes: int) -> None:
    """Give each device so much memory."""
    _runtime().fake_set_device_nbytes(ctypes.c_long(nbytes))


def break_devices(is_broken: bool) -> None:
    """Have every call fail as after an illegal access, or no longer."""
    _runtime().fake_set_broken(int(is_broken))


def fail_registration(after: int) -> None:
    """Have one registration fail, after ``after`` more that succeed."""
    _runtime().fake_fail_registration(ctypes.c_long(after))
