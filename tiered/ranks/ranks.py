"""Ranks: the ranks that train one model together, as a store and the model in it see them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tiered.bytes.arena import Arena, Buffer
from tiered.errors import RankLostError, StepAbandonedError, UsageError
from tiered.ranks.agreement import Agreement
from tiered.ranks.comm import DeviceComm, GlooComm
from tiered.ranks.comm_thread import CommThread
from tiered.ranks.group import Group
from tiered.ranks.watch import Watch, words_of

__all__ = ["Ranks", "phase"]

_DIGEST_NBYTES = 16


class Ranks:
    """Several ranks: who this process is, its comm thread, and its agreements. ``end`` ends them.

    ``rank`` and ``world`` are those of the process group, ``local_rank`` and ``local_world`` count the ranks of this
    machine. Where a rank fails in the middle of what all do together, ``abandon`` tells the others.
    """

    def __init__(self, group: Group) -> None:
        """Start the threads of this rank; blocks. Raises CapacityError."""
        self._group = group
        self.rank, self.world = group.rank, group.world
        self.local_rank, self.local_world = group.local_rank, group.local_world
        self._watch = Watch(group)
        try:
            self.comm_thread = CommThread(GlooComm(group), self._watch, deadline_s=group.deadline_s)
        except BaseException:
            self._watch.close(group.deadline_s)
            raise
        self.agreement = Agreement(self.comm_thread)

    @classmethod
    def of(cls, process_group: object, *, deadline_s: float) -> Ranks | None:
        """Return the ranks of ``process_group`` (see ``Group.of``); None where there is one. Blocks for all of them."""
        group = Group.of(process_group, deadline_s=deadline_s)
        return cls(group) if isinstance(group, Group) else None

    def move_on(self, device: torch.device) -> bool:
        """Have tensors of ``device`` move by its own collectives; return False where the ranks' group has none.

        All ranks call this together; it blocks for them.
        """
        num_known = -self.least("groups of torch", lambda: -self._group.num_known())
        data = self._group.on_device(device, num_known)
        if data is not None:
            self.comm_thread.on_device = DeviceComm(self._group, data, device)
        return data is not None

    def abandon(self, error: BaseException, what: str) -> None:
        """This rank has failed in ``what``: the others raise StepAbandonedError, and nothing moves any more."""
        self.comm_thread.abandon(f"{what}: {words_of(error)}")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """This rank does its part of ``what`` by itself: where that fails, the others hear of it."""
        try:
            yield
        except (RankLostError, StepAbandonedError):
            raise  # which they know
        except BaseException as error:
            self.abandon(error, what)
            raise

    def least(self, word: str, number: Callable[[], int]) -> int:
        """Return the least of the ranks' numbers; blocks. An error of ``number`` on one rank is raised on all."""
        try:
            mine = number()
        except Exception as failure:
            self.agreement.agree(word, failure=failure)
            raise  # which the agreement has done
        return min(map(int, self.agreement.agree(word, str(mine))))

    def check_equal(self, word: str, lines: Sequence[str], advice: str) -> None:
        """Raise UsageError, on all ranks, unless ``lines`` are the same on all; blocks for all of them.

        The message has the first line that differs, as this rank has it, and ``advice`` says what is expected.
        """
        digests = [hashlib.blake2b(line.encode(), digest_size=_DIGEST_NBYTES).digest() for line in lines]
        whole = hashlib.blake2b(b"".join(digests), digest_size=_DIGEST_NBYTES).digest()
        told = self.comm_thread.agree(word, len(lines).to_bytes(8, "little") + whole).wait()
        if len(set(told)) == 1:
            return
        least = min(int.from_bytes(each[:8], "little") for each in told)
        every = self.comm_thread.agree(f"{word}: what differs", b"".join(digests[:least]) or b"-").wait()
        places = range(0, least * _DIGEST_NBYTES, _DIGEST_NBYTES)
        differing = (n for n, at in enumerate(places) if len({each[at : at + _DIGEST_NBYTES] for each in every}) > 1)
        first = next(differing, least)
        others = [rank for rank, each in enumerate(told) if each != told[self.rank]]
        mine = lines[first] if first < len(lines) else "nothing more"
        raise UsageError(
            f"{word}: the ranks differ; this one, {self.rank}, has {mine}, and rank"
            f"{'s' * (len(others) > 1)} {', '.join(map(str, others))} something else: expected {advice}"
        )

    def end(self, arena: Arena) -> None:
        """End the threads and say goodbye; blocks, idempotent.

        Buffers of ``arena`` that other ranks may still write into, the owners of whose collectives they are, stay
        mapped.
        """
        for owner in self.comm_thread.close():
            for buffer in owner if isinstance(owner, tuple) else (owner,):
                if isinstance(buffer, Buffer):
                    arena.quarantine(buffer)

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.world}, {self.comm_thread!r})"


def phase(ranks: Ranks | None, word: str) -> AbstractContextManager[None]:
    """Return a block that ends with an agreement of all ranks, see ``Agreement.phase``; nothing of it on one rank."""
    return nullcontext() if ranks is None else ranks.agreement.phase(word)
