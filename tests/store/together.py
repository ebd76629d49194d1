"""The confirmation of a store that others share, in the hands of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from tests.store.rig import WAIT_S
from tiered.errors import UsageError
from tiered.store.catalog.catalog import GenerationName

__all__ = ["Together"]

_LOOK_S = 0.001


class Together:
    """Each generation is confirmed once ``may_confirm`` is set, or once ``is_awaited()``, and not where ``error`` is.

    ``chosen`` is the number of the generation to open, None the newest. ``confirmed`` is the number of the last one
    that all have, as a crash must find it: the chosen one first, then those that ``confirm`` has returned for.
    ``refusal`` is why another store refuses to seal, "" where it does not; ``log`` has what was asked. Where the store
    itself refuses, all raise the same if it ``is_strict``, else it raises its own error.
    """

    keeps_before = True
    member = None

    def __init__(self, chosen: int | None = None, *, is_awaited: Callable[[], bool] = lambda: False) -> None:
        self.chosen = chosen
        self.is_awaited = is_awaited
        self.may_confirm = threading.Event()
        self.may_confirm.set()
        self.asked = threading.Event()
        self.error: Exception | None = None
        self.confirmed = 0
        self.refusal = ""
        self.is_strict = False
        self.log: list[tuple[str, int]] = []

    def choose(self, kept: Sequence[GenerationName]) -> GenerationName:
        name = next((name for name in kept if self.chosen in (None, name.number)), GenerationName(99, 0))
        self.confirmed = name.number
        return name

    def join(self, run: bytes, newest: int) -> bytes:
        return run

    def is_to_commit_at_end(self, has_changes: bool, failure: Exception | None) -> bool:
        return has_changes

    def propose(self, number: int, steps: Mapping[str, int], refusal: str) -> int:
        self.log.append(("propose", number))
        if self.refusal or (refusal and self.is_strict):
            raise UsageError(f"generation {number} is refused by a store: {refusal or self.refusal}")
        return 1000 + number

    def failed(self, number: int, error: BaseException) -> None:
        self.log.append(("failed", number))

    def confirm(self, generation: GenerationName, note_wait: Callable[[], object]) -> None:
        self.log.append(("confirm", generation.number))
        assert generation.nonce == 1000 + generation.number
        self.asked.set()
        for _ in range(int(WAIT_S / _LOOK_S)):
            if self.may_confirm.wait(_LOOK_S) or self.is_awaited():
                break
        else:
            raise AssertionError("nobody let it confirm")
        if self.error is not None:
            raise self.error
        self.confirmed = generation.number
