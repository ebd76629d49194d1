"""RanksConfirmation: one commit over all ranks, and the choice of one generation by all that open.

Each rank's store is one of its own, in directories of its own. A generation is agreed on before anything of it is
sealed, in program order with the collectives of the model. Then each rank makes it durable beside the one before, and
tells so, or that it failed, on the commit group: two phases. All durable: it is everybody's, and what it superseded may
be reused. One failed: it is lost on all. A rank that cannot be asked: it is unknown, and the opening decides, which
takes the newest generation that all have. So no rank's end needs code to run there.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiered.errors import CorruptionError, DeviceError, TieredError, UsageError
from tiered.ranks.agreement import CLASSES, is_raised_by_all, raised_by_all
from tiered.ranks.ranks import Ranks
from tiered.store.catalog.catalog import GenerationName, Member

__all__ = ["RanksConfirmation"]

_OPEN, _COMMIT, _CLOSE = "tiered.Store", "store.commit()", "store.close()"
_HEAD = struct.Struct("<QQ?")  # number, nonce, whether it is durable
_NBYTES = 512  # of a message of the second phase
_LOOK_S = 0.1


class RanksConfirmation:
    """The confirmation of one rank's store; see ``Confirmation``.

    Agreements are asked for by the threads that call the store, in the same order on all ranks. Invariant: *the second
    phases of generations come in the order of their proposals*, in whichever thread: so the commit group serves one
    thread at a time.
    """

    keeps_before = True

    def __init__(self, ranks: Ranks, origins: tuple[bytes, ...] = ()) -> None:
        self.member: Member | None = Member(b"", ranks.rank, ranks.world, origins)
        self._ranks = ranks
        self._condition = threading.Condition()
        self._proposed: deque[GenerationName] = deque()  # agreed on, and not settled

    def __repr__(self) -> str:
        return f"RanksConfirmation({self.member}, {len(self._proposed)} generations under way)"

    # Below: opening

    def join(self, run: bytes, newest: int) -> bytes:
        """Return the run of all ranks' stores, rank 0's draw where all are new; blocks for all ranks.

        A store is created beside others of a run as long as nothing was committed there: the first creation was cut
        short. Raises UsageError, on all ranks.
        """
        told = self._agree(_OPEN, {"run": run.hex(), "newest": newest, "new": os.urandom(16).hex()})
        runs = {each["run"] for each in told if each["run"]}
        newest = max(each["newest"] for each in told)
        if len(runs) > 1 or (newest and not all(each["run"] for each in told)):
            places = "; ".join(
                f"rank {rank} has generation {each['newest']} of run {each['run']}"
                if each["run"]
                else f"rank {rank} has no store"
                for rank, each in enumerate(told)
            )
            raise raised_by_all(
                UsageError(
                    f"the ranks' directories do not belong together: {places}; expected those of one run: restore what"
                    " is missing from a copy, or give all ranks other directories"
                )
            )
        found = bytes.fromhex(runs.pop() if runs else told[0]["new"])
        assert self.member is not None
        self.member = self.member._replace(run=found)
        return found

    def choose(self, kept: Sequence[GenerationName]) -> GenerationName:
        """Return the newest generation that all ranks have; blocks for all of them. CorruptionError, on all ranks."""
        told = [[GenerationName(*each) for each in names] for names in self._agree(_OPEN, kept)]
        common = set(told[0]).intersection(*told[1:])
        if not common:
            numbers = "; ".join(
                f"rank {rank}: {', '.join(f'{name.number} ({name.nonce:016x})' for name in names)}"
                for rank, names in enumerate(told)
            )
            raise raised_by_all(
                CorruptionError(
                    f"the ranks have no generation in common ({numbers}): the directories of some are older copies;"
                    " restore those of all ranks from copies of one time"
                )
            )
        return max(common)

    # Below: commits

    def propose(self, number: int, steps: Mapping[str, int], refusal: str) -> int:
        """Agree on the generation ``number``; rank 0's draw is everybody's nonce. Blocks for all ranks.

        Raises, on all ranks, an error of the class of the first refusal; UsageError where numbers or steps differ. An
        interrupt ends the run on all ranks: the others may have agreed, and wait for this one's store.
        """
        failure = _error_of(refusal) if refusal else None
        nonce = int.from_bytes(os.urandom(8), "little")
        try:
            told = self._agree(_COMMIT, {"number": number, "steps": dict(steps), "nonce": nonce}, failure)
        except BaseException as error:
            if not is_raised_by_all(error) and not isinstance(error, TieredError):
                self._ranks.leave(error, _COMMIT)
            raise
        if any((each["number"], each["steps"]) != (number, dict(steps)) for each in told):
            places = "; ".join(
                f"rank {rank} is at generation {each['number']} with the steps {each['steps']}"
                for rank, each in enumerate(told)
            )
            raise raised_by_all(
                UsageError(f"a commit by ranks that differ: {places}; expected all to commit after the same step")
            )
        name = GenerationName(number, told[0]["nonce"])
        with self._condition:
            self._proposed.append(name)
        return name.nonce

    def confirm(self, generation: GenerationName, note_wait: Callable[[], object]) -> None:
        """Return once all ranks have told that they have ``generation`` durable; blocks.

        Raises DeviceError that names the ranks that have lost it, RankLostError where its outcome is unknown.
        """
        lost = self._settle(generation.number, None, note_wait)
        if lost:
            raise DeviceError(f"generation {generation.number} is lost because {'; '.join(lost)}")

    def failed(self, number: int, error: BaseException) -> None:
        """Tell all ranks that ``number`` is lost here; blocks until all have told of theirs, or cannot."""
        try:
            self._settle(number, f"{type(error).__name__}: {error}", lambda: None)
        except TieredError:  # which the others find out, too; this rank's callers have the error itself
            pass

    def is_to_commit_at_end(self, has_changes: bool, failure: Exception | None) -> bool:
        """Return whether any rank has changes to commit; blocks for all ranks. Raises ``failure``, on all ranks."""
        return any(self._agree(_CLOSE, has_changes, failure))

    def _agree(self, word: str, mine: object, failure: Exception | None = None) -> list[Any]:
        told = self._ranks.agreement.agree(word, json.dumps(mine, separators=(",", ":")), failure=failure)
        return [json.loads(each) for each in told]

    def _settle(self, number: int, error: str | None, note_wait: Callable[[], object]) -> list[str]:
        """Tell all ranks the outcome of ``number``, once it is its turn; return which ranks have lost it, and why."""
        with self._condition:
            while self._proposed[0].number != number:
                self._condition.wait(_LOOK_S)
                note_wait()
            name = self._proposed[0]
        text = (error or "").encode(errors="replace")[: _NBYTES - _HEAD.size]
        message = _HEAD.pack(*name, error is None) + text
        try:
            told = self._ranks.tell_in_commit(message.ljust(_NBYTES, b"\0"), note_wait)
        finally:
            with self._condition:
                self._proposed.popleft()
                self._condition.notify_all()
        heads = [_HEAD.unpack_from(each) for each in told]
        assert {head[:2] for head in heads} == {name}, heads
        texts = [each[_HEAD.size :].rstrip(b"\0").decode(errors="ignore") for each in told]
        return [f"rank {rank}: {texts[rank]}" for rank, head in enumerate(heads) if not head[2]]


def _error_of(refusal: str) -> Exception:
    """Return the error whose class and message are ``refusal``; UsageError in place of a class that is none of ours."""
    kind, _, text = refusal.partition(": ")
    found = CLASSES.get(kind)
    return UsageError(refusal) if found is None else found(text)
