"""RowSparseAdam: Adam for the rows of a table that a step touches, with the bits of ``torch.optim.SparseAdam``."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch

from tiered.errors import UsageError
from tiered.store.rows.rows import Rows

__all__ = ["RowSparseAdam"]

_log = logging.getLogger("tiered")


class RowSparseAdam:
    """Adam on rows: those that a step does not name keep their values and their moments.

    The arithmetic is that of ``torch.optim.SparseAdam`` (torch/optim/_functional.py), of one step count for the whole
    table, and gives its bits. With ``state="adam"`` (``create_rows``) a row and its moments are one record: one read
    and one write serve both. For other tables the moments are in two more, of the keys ``KEY/exp_avg`` and
    ``KEY/exp_avg_sq``, where ``KEY`` is the table's first; they are made here where they are not there.

    Step count and settings are part of every commit of the store, which ``resume`` and ``rollback`` load again. Where
    the last commit has them, a step before ``resume`` is refused. ``lr`` may be set between steps, as a schedule does.
    One thread steps. A step that raises may have changed some of its rows: roll back to the last commit.
    """

    def __init__(
        self, rows: Rows, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        """Update ``rows``, of fp32, in their store. ``lr`` and the others may be changed between steps.

        Raises TypeError for rows of another dtype, ValueError for settings out of range, UsageError for a table that
        another one updates already.
        """
        if rows.dtype is not torch.float32:
            raise TypeError(f"RowSparseAdam: expected rows of torch.float32, got {rows.dtype}")
        if not (lr >= 0 and eps > 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"RowSparseAdam: expected lr >= 0, eps > 0 and betas in [0, 1), got {lr}, {eps}, {betas}")
        for key in rows.keys:
            if rows.store.registered(f"rows/{key}") is not None:
                raise UsageError(f"RowSparseAdam: the rows of {key!r} have an optimizer already, which is rows/{key}")
        self.lr, self.betas, self.eps = lr, betas, eps
        self._rows, self._num_steps = rows, 0
        self._tables: list[Rows] = []
        if not rows.has_adam:
            for key in (f"{rows.keys[0]}/exp_avg", f"{rows.keys[0]}/exp_avg_sq"):
                if key not in rows.store:
                    rows.store.create_rows(key, len(rows), rows.row_shape, torch.float32)
                self._tables.append(rows.store.rows(key))
                if (len(self._tables[-1]), self._tables[-1].row_shape) != (len(rows), rows.row_shape):
                    raise UsageError(f"RowSparseAdam: {key!r} holds no moments of {rows!r}; delete the key")
        self._committed = rows.store.registered_state(f"rows/{rows.keys[0]}")  # until it is loaded
        for key in rows.keys:
            rows.store.register(f"rows/{key}", self)

    def step(self, index: torch.Tensor | Iterable[int], grad: torch.Tensor) -> None:
        """Take a step on the rows that ``index`` names, with their gradients ``grad``, (n, *row_shape) of fp32; blocks.

        The gradients of equal indices are summed, as ``coalesce`` does. Errors are those of ``Rows``.
        """
        if self._committed is not None:
            raise UsageError(
                f"RowSparseAdam: the last commit has {self._committed['step']} steps of the rows of"
                f" {self._rows.keys[0]!r}: call store.resume() before the first step; for a table that was made anew,"
                f" store.drop_state('rows/{self._rows.keys[0]}') and commit() before RowSparseAdam"
            )
        numbers = self._rows.numbers(index)
        if not isinstance(grad, torch.Tensor) or grad.layout is not torch.strided:
            got = grad.layout if isinstance(grad, torch.Tensor) else type(grad).__name__
            raise TypeError(f"RowSparseAdam: expected gradients as a dense tensor, a row for each index, got {got}")
        if grad.dtype is not torch.float32 or tuple(grad.shape) != (len(numbers), *self._rows.row_shape):
            raise ValueError(
                f"RowSparseAdam: expected gradients of torch.float32 {[len(numbers), *self._rows.row_shape]}, got"
                f" {grad.dtype} {list(grad.shape)}"
            )
        self._num_steps += 1
        if not grad.numel():
            return
        size = (len(self._rows), *self._rows.row_shape)
        summed = torch.sparse_coo_tensor(
            numbers[None], grad.detach().cpu(), size, dtype=torch.float32, device="cpu", check_invariants=False
        ).coalesce()
        touched = summed.indices()[0]
        if self._rows.has_adam:
            records = self._rows.records()
            found = records.get(touched)
            self._update(found[:, 0], found[:, 1], found[:, 2], summed.values())
            records.put(touched, found)
            return
        tables = [self._rows, *self._tables]
        values = [table.get(touched) for table in tables]
        self._update(values[0], values[1], values[2], summed.values())
        for table, value in zip(tables, values, strict=True):
            table.put(touched, value)

    def _update(self, rows: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor) -> None:
        """Update rows and moments in place; order and rounding of each operation are torch's."""
        beta1, beta2 = self.betas
        exp_avg.add_(grad.sub(exp_avg).mul_(1 - beta1))
        exp_avg_sq.add_(grad.pow(2).sub_(exp_avg_sq).mul_(1 - beta2))
        step_size = self.lr * math.sqrt(1 - beta2**self._num_steps) / (1 - beta1**self._num_steps)
        rows.add_(-step_size * (exp_avg / exp_avg_sq.sqrt().add_(self.eps)))

    def state_dict(self) -> dict[str, Any]:
        """Return step count and settings; the moments are in the store."""
        if self._committed is not None:
            return dict(self._committed)
        return {"step": self._num_steps, "lr": self.lr, "betas": self.betas, "eps": self.eps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned. The first time one warning names the settings that were others."""
        given = {"lr": self.lr, "betas": self.betas, "eps": self.eps}
        dropped = [name for name, value in given.items() if state[name] != value]
        if self._committed is not None and dropped:
            _log.warning(
                "RowSparseAdam goes on with the commit's %s; set it after resume() to change it",
                ", ".join(f"{name}={state[name]} and not {given[name]}" for name in dropped),
            )
        self._committed = None
        self._num_steps, self.lr, self.betas, self.eps = state["step"], state["lr"], state["betas"], state["eps"]

    def __repr__(self) -> str:
        return f"RowSparseAdam({self._rows!r}, lr={self.lr}, step {self._num_steps})"
