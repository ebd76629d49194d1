"""Torch's state of a thread and of the process, which ``with`` blocks switch: taken here, put in force elsewhere."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tiered.zero.accelerator_state import accelerator_type
from tiered.zero.activations.saved import pair_in_force

__all__ = ["Settings", "ThreadState"]



class ThreadState:
    """The thread-local state of the thread that makes it, for ``run`` in others: gradients, autocast, modes, hooks."""

    def __init__(self) -> None:
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        devices = [device for device in ("cpu", accelerator_type()) if device]
        self._stream = torch.accelerator.current_stream() if accelerator_type() else None
        self._autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        self._is_casting_once = torch.is_autocast_cache_enabled()
        self._function_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._dispatch_modes = _get_current_dispatch_mode_stack()
        self._pair = pair_in_force()
        self._context = contextvars.copy_context()

    def run(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` in this thread, a new one, with the state in force; the state stays in force."""
        return self._context.copy().run(self._run, work)

    def _run(self, work: Callable[[], Any]) -> Any:
        torch.get_num_threads()  # order: OpenMP counts per thread, and a new one has torch's count from this call on
        if self._stream is not None:
            torch.accelerator.set_stream(self._stream)
        for device, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._is_casting_once)
        if any(is_enabled for _, is_enabled, _ in self._autocast):
            torch.autocast_increment_nesting()  # lifetime: a block inside must not drop the casts of the one outside
        with ExitStack() as stack:
            if self._is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
            if self._pair is not None:
                stack.enter_context(saved_tensors_hooks(*self._pair))
            for mode in self._function_modes:
                torch._C._push_on_torch_function_stack(mode)
                stack.callback(torch._C._pop_torch_function_stack)
            for mode in self._dispatch_modes:
                torch._C._push_on_torch_dispatch_stack(mode)
                stack.callback(torch._C._pop_torch_dispatch_stack, None)
            return work()


class Settings:
    """Torch's process-wide switches, those that a block inside a forward may set for its duration."""

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SETTINGS]

    def restore(self) -> None:
        """Set the switches that differ from these."""
        for value, (get, put) in zip(self._values, _SETTINGS, strict=True):
            if get() != value:
                put(value)


def _set_deterministic(mode: int) -> None:
    torch.set_deterministic_debug_mode(mode)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, _set_deterministic),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
)
