"""The optimizers that users make: look-alikes of torch's whose state lives in a store.

These classes are thin: their common part is in streaming_optimizer.py, their arithmetic in rules.py.
"""

from __future__ import annotations

from typing import Any

import torch

from tiered.store.store import Store
from tiered.zero.formats.rules import AdamWRule, LionRule, SGDRule
from tiered.zero.optimizer.streaming_optimizer import StreamingOptimizer

__all__ = ["SGD", "AdamW", "Lion"]


class AdamW(StreamingOptimizer):
    """AdamW with decoupled weight decay, streaming its state through a store.

    ``params``: parameters or groups as for any torch optimizer, sharded by ``tiered.shard`` or plain; plain ones need
    ``store``. ``update="step"`` updates in ``step()``; ``update="backward"`` updates each unit as soon as its gradient
    is final, and ``step()`` only concludes. ``state`` names the format of the state; here with its bytes per bf16
    parameter, the parameter included:

    - ``state="exact"`` (12): fp32 moments and the bits of an fp32 master; the numbers are those of
      ``torch.optim.AdamW(fused=True)`` on fp32 masters
    - ``state="compact"`` (5.1): the moments in 8 bits with a scale per 128 elements, the master in 24 bits

    compact rounds by a hash of parameter, step and position: right on average, the same bits in every run, under any
    budget and after a resume. fp32 parameters are their own masters; fp64 ones keep exact state in any format.

    ``foreach`` and ``fused`` are torch's and change nothing: the arithmetic is always that of ``fused=True``.
    ``amsgrad``, ``capturable`` and ``differentiable`` can only be False.

    A store that already holds this optimizer's state is adopted: call ``store.resume()``. Not thread-safe. Raises
    ValueError for hyperparameters out of range, TypeError for a switch of torch's that this lacks, UsageError for
    unknown words or a store that holds another optimizer, CapacityError when the device has no room for the state.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        update: str = "step",
        state: str = "exact",
        store: Store | None = None,
    ) -> None:
        _need_false("AdamW", amsgrad=amsgrad, capturable=capturable, differentiable=differentiable)
        if not float(lr) >= 0 or not eps >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"expected lr, eps, weight_decay >= 0 and betas in [0, 1), got lr={lr}, eps={eps},"
                f" weight_decay={weight_decay}, betas={betas}"
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, AdamWRule(), update=update, state=state, store=store)


class SGD(StreamingOptimizer):
    """Stochastic gradient descent with momentum, streaming its state through a store.

    The numbers are those of ``torch.optim.SGD(fused=True)`` on fp32 masters. ``params``, ``update``, ``state``,
    ``store``, torch's switches and errors as for ``tiered.AdamW``; bytes per bf16 parameter are 8.1 and 4.0,
    without momentum 4.1 and 3. Momentum in any group lays a buffer out for all groups. An optimizer that was made
    without momentum cannot be given any later.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        update: str = "step",
        state: str = "exact",
        store: Store | None = None,
    ) -> None:
        _need_false("SGD", differentiable=differentiable)
        if not float(lr) >= 0 or not momentum >= 0 or not weight_decay >= 0:
            raise ValueError(
                f"expected lr, momentum, weight_decay >= 0, got lr={lr}, momentum={momentum},"
                f" weight_decay={weight_decay}"
            )
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov=True with momentum={momentum}, dampening={dampening}; expected a momentum and no dampening"
            )
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        params = list(params)
        groups = [group for group in params if isinstance(group, dict)]
        with_momentum = any(group.get("momentum", momentum) for group in groups) if groups else momentum != 0
        rule = SGDRule(with_momentum=bool(with_momentum))
        super().__init__(params, defaults, rule, update=update, state=state, store=store)


class Lion(StreamingOptimizer):
    """Lion, the sign of an interpolated momentum with decoupled weight decay, streaming its state through a store.

    On fp32 masters. ``params``, ``update``, ``state``, ``store`` and errors as for ``tiered.AdamW``; bytes per bf16
    parameter are 8.1 and 4.0. A usual learning rate is a third to a tenth of AdamW's.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        update: str = "step",
        state: str = "exact",
        store: Store | None = None,
    ) -> None:
        if not float(lr) >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"expected lr, weight_decay >= 0 and betas in [0, 1), got lr={lr}, weight_decay={weight_decay},"
                f" betas={betas}"
            )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, LionRule(), update=update, state=state, store=store)


def _need_false(name: str, **switches: bool) -> None:
    for switch, value in switches.items():
        if value:
            raise TypeError(f"tiered.{name}({switch}={value!r}) is not supported; expected {switch}=False")
