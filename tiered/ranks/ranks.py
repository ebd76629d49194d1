"""Ranks: the ranks that train one model together, as a store and the model in it see them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tiered.bytes.arena import Arena, Buffer
from tiered.errors import DeviceError, RankLostError, StepAbandonedError, UsageError
from tiered.ranks.agreement import Agreement
from tiered.ranks.comm import DeviceComm, GlooComm, tell_on
from tiered.ranks.comm_thread import CommThread
from tiered.ranks.group import Group
from tiered.ranks.watch import Watch, words_of

__all__ = ["Ranks", "phase"]

_DIGEST_NBYTES = 16
_SLICE_S = 0.1
_GRACE_S = 1.0  # in which the watch finds the death behind a failed collective, and last bytes arrive
_POLL_S = 0.01


class Ranks:
    """Several ranks: who this process is, its comm thread, and its agreements. ``end`` ends them.

    ``rank`` and ``world`` are those of the process group, ``local_rank`` and ``local_world`` count the ranks of this
    machine. Where a rank fails in the middle of what all do together, ``abandon`` tells the others.
    """

    def __init__(self, group: Group) -> None:
        """Start the threads of this rank; blocks. Raises CapacityError."""
        self._group = group
        self._device: torch.device | None = None  # with collectives of its own
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
            self._device = device
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

    @property
    def num_beginnings(self) -> int:
        """How often the ranks have begun again: buffers that a collective has left before the last are free of it."""
        return self.comm_thread.num_beginnings

    def leave(self, error: BaseException, what: str) -> None:
        """This rank was interrupted in ``what``, in which others count on it: they raise RankLostError."""
        self._watch.tell_lost(self.rank, f"{words_of(error)} in {what}")
        self.abandon(error, what)

    def rejoin(self, word: str) -> None:
        """All ranks come to ``word`` together, also after an abandoned step, which is over then; blocks for all.

        Raises UsageError where the ranks do different things, RankLostError.
        """
        if not self.comm_thread.has_failed:
            try:
                self.agreement.agree(word)
                return
            except StepAbandonedError:  # of another rank, which this one had not heard of
                pass
        self._watch.check_present()
        self.comm_thread.begin_again(self._renew)
        self.agreement.agree(word)
        if self._device is not None:
            self.move_on(self._device)

    def _renew(self, number: int) -> tuple[GlooComm, int]:
        largest = self._group.renew(number, self._watch.check_present)
        return GlooComm(self._group), largest

    def tell_in_commit(self, message: bytes, note_wait: Callable[[], object]) -> tuple[bytes, ...]:
        """Return the ``message`` of each rank, as long on all, over the commit group; blocks. One thread at a time.

        Abandoned steps do not matter to it. ``note_wait()`` is called now and then. Raises RankLostError; then nothing
        can be told any more.
        """
        begun = time.monotonic()
        try:
            telling = tell_on(self._group.commit, message, self.world)
            while not telling.wait(_SLICE_S):
                note_wait()
                try:
                    self._watch.check_present()
                except RankLostError:
                    if telling.wait(_GRACE_S):  # its last bytes were on their way
                        break
                    raise
                if (waited := time.monotonic() - begun) > self.comm_thread.deadline_s:
                    raise RankLostError(
                        f"not all of the {self.world} ranks came to the end of a commit within {waited:.1f} s; one that"
                        " only needs longer needs a larger rank_deadline",
                        rank=-1,
                    )
        except BaseException as error:
            self._group.disconnect(self._group.commit)  # lifetime: an ordinary exit would wait for it
            if isinstance(error, RuntimeError):  # torch's; those of tiered are none
                raise self._cause_of(error) from error
            raise
        return tuple(telling.messages)

    def _cause_of(self, error: RuntimeError) -> DeviceError:
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            try:
                self._watch.check_present()
            except DeviceError as cause:
                return cause
            time.sleep(_POLL_S)
        return DeviceError(f"the ranks' connections for commits have failed: {error}")

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
        if not self.comm_thread.has_pending:
            self._group.end()

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.world}, {self.comm_thread!r})"


def phase(ranks: Ranks | None, word: str) -> AbstractContextManager[None]:
    """Return a block that ends with an agreement of all ranks, see ``Agreement.phase``; nothing of it on one rank."""
    return nullcontext() if ranks is None else ranks.agreement.phase(word)
