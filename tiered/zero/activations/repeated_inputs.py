"""A tensor that a checkpoint is given several times is one tensor again where it recomputes.

torch saves each argument by itself. With saved-tensor hooks in force each comes back as an object of its own, and a
forward that asks ``query is key``, as attention does, goes another way than before. So the function in which torch
keeps the arguments is replaced by one that keeps each of them once. Nothing changes where none is given twice, nothing
before the first ``construct`` or ``shard``, and nothing with a torch that has no such function.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = ["keep_repeated_inputs"]

_NAME = "_checkpoint_without_reentrant_generator"
_lock = threading.Lock()
_is_kept = False


def keep_repeated_inputs() -> None:
    """Have non-reentrant checkpoints keep the identity of their arguments from now on. Idempotent, thread-safe."""
    global _is_kept
    with _lock:
        generator = getattr(torch.utils.checkpoint, _NAME, None)
        if not _is_kept and generator is not None:
            setattr(torch.utils.checkpoint, _NAME, _keeping(generator))
        _is_kept = True


def _keeping(generator: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``generator``, of a function, options and the function's arguments, that is given no tensor twice."""
    kinds = [parameter.kind for parameter in inspect.signature(generator).parameters.values()]
    num_own = kinds.index(inspect.Parameter.VAR_POSITIONAL)

    @functools.wraps(generator)
    def keeping(function: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
        options, args = given[: num_own - 1], given[num_own - 1 :]
        tensors = [id(arg) for arg in args if isinstance(arg, torch.Tensor)]
        if len(set(tensors)) == len(tensors):
            return generator(function, *given, **kwargs)
        positions: dict[int, int] = {}
        places = [positions.setdefault(id(arg), len(positions)) for arg in args]
        once = {id(arg): arg for arg in args}

        def recompute(*unpacked: Any, **kwargs: Any) -> Any:
            return function(*(unpacked[place] for place in places), **kwargs)

        return generator(recompute, *options, *once.values(), **kwargs)

    return keeping
