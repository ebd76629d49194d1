"""The door of torch's backwards: each one that fails is reported to the models on compute devices.

Autograd calls a hook as a backward ends, and none as one fails. So the function through which every backward goes is
replaced, in the torch module that calls it, by one that reports the error and raises it again. Nothing changes for
backwards that end well, and nothing before the first ``shard`` of a model on a compute device.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["report_failures_to"]


class _Listener(Protocol):
    def failed(self, error: BaseException) -> None:
        """A backward has raised ``error``."""


_lock = threading.Lock()
_listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()
_is_replaced = False


def report_failures_to(listener: _Listener) -> None:
    """Have ``listener`` hear of each backward that fails from now on, as long as it lives. Thread-safe."""
    global _is_replaced
    with _lock:
        _listeners.add(listener)
        if not _is_replaced:
            _is_replaced = True
            torch.autograd._engine_run_backward = _reporting(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]


def _reporting(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_backward)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        except Exception as error:
            with _lock:
                listeners = list(_listeners)
            for listener in listeners:
                listener.failed(error)
            raise

    return reporting
