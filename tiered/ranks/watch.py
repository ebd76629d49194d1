"""Watch: what a rank knows of the others' ends, and how it ends itself because of them.

A collective may wait for a dead rank to its deadline. So each rank has a thread for each other rank that does nothing
but receive from it: a connection that breaks is a death.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch

from tiered.bytes.critical_section import BoundedThread
from tiered.bytes.exit_and_fork import this_process
from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import CapacityError, DeviceError, RankLostError, StepAbandonedError
from tiered.ranks.group import WATCH_DEADLINE, Group

__all__ = ["EXIT_STATUS", "Watch", "copy_of", "leave", "words_of"]

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command, started again, goes on from the last commit

_TAG = 7
_NBYTES = 512  # of a message: (word, rank, number, text)
_HEAD = struct.Struct("<BIQ")
_PLACE, _GOODBYE, _ABANDONED, _LOST = range(1, 5)
_MOST_SENT = 1024  # messages to one rank whose memory is kept: a stopped rank takes none
_SLICE_S = 0.1
_Error = TypeVar("_Error", bound=Exception)
_log = logging.getLogger("tiered")


@dataclass(frozen=True, slots=True)
class _Message:
    """The content of a message; ``rank`` and ``number`` mean something with some words alone."""

    word: int
    rank: int
    number: int
    text: str

    def packed(self) -> torch.Tensor:
        text = self.text.encode(errors="replace")[: _NBYTES - _HEAD.size]
        return torch.frombuffer(
            bytearray((_HEAD.pack(self.word, self.rank, self.number) + text).ljust(_NBYTES, b"\0")), dtype=torch.uint8
        )

    @classmethod
    def unpacked(cls, buffer: torch.Tensor) -> _Message:
        raw = bytes(buffer.tolist())
        text = raw[_HEAD.size :].rstrip(b"\0").decode(errors="ignore")  # a cut may have struck inside a letter
        word, rank, number = _HEAD.unpack_from(raw)
        return cls(word, rank, number, text)


class Watch:
    """The threads that listen to the other ranks, one for each, and what they have heard.

    The first death, loss or abandonment that is known stays the cause: each ``check`` from then on raises it. A rank
    that has said goodbye is missed only by collectives that it took no part in. Each rank says goodbye once to each
    other, at its own end or in answer, and a thread ends when it has heard the other's: so nothing is under way at a
    good end. All methods are thread-safe.
    """

    def __init__(self, group: Group) -> None:
        """Start to listen; a good end is ``close``. Raises CapacityError where no thread can be started."""
        self._group = group
        self._process = this_process()
        self._lock = threading.Lock()
        self._cause: DeviceError | StepAbandonedError | None = None
        self._lost: DeviceError | None = None  # the first death or loss, which stays
        self._abandoned: tuple[int, StepAbandonedError] | None = None  # the last, and the collective before it
        self._first = 0  # the collective before the first one that the ranks have begun again with
        self._known_at = 0.0
        self._number = 0  # of the last collective that this rank has ended
        self._left: dict[int, int] = {}  # rank -> the number of the last collective that it ended before its goodbye
        self._said: set[int] = set()  # the ranks that have, or are getting, our goodbye
        self._dead: set[int] = set()
        self._places: dict[int, tuple[int, str]] = {}  # rank -> the last number and place that it told
        self._sent = {peer: deque[Any](maxlen=_MOST_SENT) for peer in self._peers}  # lifetime: gloo may read them
        self._threads = [self._thread(self._listen, peer) for peer in self._peers]
        try:
            for thread in self._threads:
                thread.start()
        except CapacityError:
            self.close(group.deadline_s)
            raise
        _watches.add(self)
        _stand_before_sigterm()

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(self._group.world) if rank != self._group.rank]

    @property
    def known_s(self) -> float:
        """Seconds since this rank knows of a cause that ``check`` raises; 0 where it knows of none."""
        return time.monotonic() - self._known_at if self._cause is not None else 0.0

    def check(self, number: int, text: str = "") -> None:
        """Raise what keeps collective ``number``, described by ``text``, from its end. Does not block.

        RankLostError for a rank that has died, was missed by another rank, or has ended before this collective;
        StepAbandonedError where another rank has given up.
        """
        if self._cause is not None:
            cause = copy_of(self._cause)
            cause.args = (f"{cause}; this rank, {self._group.rank}, is at collective {number}{text and ', '}{text}",)
            raise cause from self._cause
        for rank, last in list(self._left.items()):
            if number > last:
                place = self.place_of(rank)
                raise RankLostError(
                    f"rank {rank} has ended its script or closed its store after collective {last}; rank"
                    f" {self._group.rank} asks for collective {number}{text and ', '}{text}: expected the same"
                    f" collectives on all ranks (last known of rank {rank}: {place or 'nothing'})",
                    rank=rank,
                    place=place,
                )

    def check_present(self) -> None:
        """Raise RankLostError where another rank has died, was missed, or has closed its store. Does not block.

        An abandoned step is no such end: its ranks may go on together.
        """
        if self._lost is not None:
            raise copy_of(self._lost) from self._lost
        for rank in list(self._left):
            raise RankLostError(f"rank {rank} has ended its script or closed its store", rank=rank)

    def begin_again(self, number: int) -> None:
        """All ranks go on behind collective ``number``: what was abandoned before is over. A loss stays."""
        with self._lock:
            self._number = self._first = number
            is_later = self._abandoned is not None and self._abandoned[0] >= number
            self._cause = self._lost or (self._abandoned[1] if self._abandoned and is_later else None)

    def note_end_of(self, number: int) -> None:
        """Note that this rank has ended collective ``number``: its goodbye says so."""
        self._number = number

    def tell_place(self, number: int, place: str) -> None:
        """Tell the other ranks where this one is, for their messages. Does not block."""
        self._tell(_Message(_PLACE, self._group.rank, number, place))

    def tell_abandoned(self, reason: str) -> None:
        """Tell the other ranks that this one has given up the step: they raise StepAbandonedError. Does not block."""
        self._tell(_Message(_ABANDONED, self._group.rank, self._number, reason))

    def tell_lost(self, rank: int, reason: str) -> None:
        """Tell the other ranks that this one has lost ``rank``: they raise RankLostError. Does not block."""
        self._tell(_Message(_LOST, rank, self._number, reason))

    def deliver(self, timeout_s: float) -> None:
        """Wait for at most ``timeout_s`` seconds a rank until the last message has left: for a process that ends.

        Its end must not look like the first one to ranks that have not heard of that yet. Nothing can be told after.
        """
        for peer, sent in self._sent.items():
            if sent and peer not in self._dead:
                try:
                    sent[-1][0].wait(timedelta(seconds=timeout_s))  # a limit that runs out closes the connection
                except RuntimeError:
                    pass

    def place_of(self, rank: int) -> str:
        """Return the last that is known of where ``rank`` is; "" where nothing is.

        It has told it, or was in the last collective that this rank has ended.
        """
        number, place = self._places.get(rank, (0, ""))
        return place if number >= self._number else f"it took part in collective {self._number}"

    def missing(self, number: int) -> list[int]:
        """Return the ranks that have not told that they wait in collective ``number``, too."""
        return [peer for peer in self._peers if self._places.get(peer, (0, ""))[0] < number]

    def close(self, deadline_s: float) -> bool:
        """Say goodbye to the living, and wait until all have answered; return whether they have. Idempotent.

        The other ranks' threads answer, whatever their scripts do. An interrupt is raised here.
        """
        if not self._process.is_here:
            return True
        end = time.monotonic() + deadline_s
        speakers = [self._thread(self._say_goodbye, peer) for peer in self._peers if peer not in self._said]
        for thread in speakers:
            thread.start()
        for thread in (*speakers, *self._threads):
            while thread.is_alive() and time.monotonic() < end:
                INTERRUPTS.look()
                thread.join(_SLICE_S)
        _watches.discard(self)
        return not any(thread.is_alive() for thread in (*speakers, *self._threads))

    def _leave_after_a_death(self) -> None:
        if isinstance(self._cause, RankLostError) and self._process.is_here:
            leave(f"SIGTERM after {self._cause}")

    def __repr__(self) -> str:
        return f"Watch(rank {self._group.rank}, {self._cause or 'all is well'}, {len(self._left)} goodbyes)"

    # Below: messages

    def _thread(self, target: Any, peer: int) -> BoundedThread:
        return BoundedThread(target=target, args=(peer,), name=f"tiered watch of rank {peer}")

    def _listen(self, peer: int) -> None:
        buffer = torch.zeros(_NBYTES, dtype=torch.uint8, device="cpu")
        is_open = True
        while is_open:
            try:
                # Without a limit of its own a receive has the one of the connecting, whatever the group's became.
                self._group.watch.recv([buffer], peer, _TAG).wait(WATCH_DEADLINE)
            except RuntimeError:
                self._note_death(peer)
                return
            is_open = self._take(peer, _Message.unpacked(buffer))
        self._say_goodbye(peer)

    def _take(self, peer: int, message: _Message) -> bool:
        """Take a message of ``peer``; return whether others may follow."""
        if message.word == _GOODBYE:
            self._left[peer] = message.number
        elif message.word == _PLACE:
            self._places[peer] = message.number, message.text
        elif message.word == _ABANDONED:
            self._note_abandoned(
                message.number, StepAbandonedError(f"rank {peer} has abandoned the step: {message.text}")
            )
        elif message.rank != self._group.rank:
            self._note(
                RankLostError(
                    f"rank {message.rank} is lost, says rank {peer}: {message.text}",
                    rank=message.rank,
                    place=self.place_of(message.rank),
                )
            )
        else:
            self._note(
                RankLostError(
                    f"rank {peer} has given up waiting for this rank, {message.rank}: {message.text}",
                    rank=peer,
                    place=self.place_of(peer),
                )
            )
        return message.word != _GOODBYE

    def _note_death(self, peer: int) -> None:
        with self._lock:
            self._dead.add(peer)
            if peer in self._said:  # its end after our goodbye is no death
                return
        place = self.place_of(peer)
        self._note(
            RankLostError(
                f"rank {peer} is gone: its connection has ended without a goodbye (last known of it:"
                f" {place or 'nothing'}); expected all {self._group.world} ranks to run on; start them again, and"
                " training goes on from the last commit",
                rank=peer,
                place=place,
            )
        )

    def _note_abandoned(self, number: int, cause: StepAbandonedError) -> None:
        with self._lock:
            if number >= self._first:  # or it is one that the ranks have come back from
                self._abandoned = number, cause
                self._set(cause)

    def _note(self, cause: DeviceError) -> None:
        with self._lock:
            self._lost = self._lost or cause
            self._set(cause)

    def _set(self, cause: DeviceError | StepAbandonedError) -> None:
        if self._cause is None:
            self._known_at = time.monotonic()
            self._cause = cause  # order: known_s looks at it first

    def _tell(self, message: _Message) -> None:
        with self._lock:
            for peer in self._peers:
                if peer not in self._dead and peer not in self._said:
                    packed = message.packed()
                    try:
                        self._sent[peer].append((self._group.watch.send([packed], peer, _TAG), packed))
                    except RuntimeError:  # the listening thread hears the same
                        pass

    def _say_goodbye(self, peer: int) -> None:
        with self._lock:
            if peer in self._said or peer in self._dead:
                return
            self._said.add(peer)
            number = self._number
        packed = _Message(_GOODBYE, self._group.rank, number, "").packed()
        try:
            self._group.watch.send([packed], peer, _TAG).wait()
        except RuntimeError:  # it is dead
            pass


# -- SIGTERM -----------------------------------------------------------------------------------------------------------


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


class _OnSigterm:
    """The action of SIGTERM, before that of the program. Lifetime: it keeps no watch, and stays when they are gone."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for watch in list(_watches):
            watch._leave_after_a_death()
        if callable(self._before):
            self._before(number, frame)
        elif self._before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _stand_before_sigterm() -> None:
    """Have a SIGTERM that follows another rank's death end this process: torchrun kills what it does not end."""
    action = signal.getsignal(signal.SIGTERM)
    is_ours = isinstance(getattr(action, "action", action), _OnSigterm)  # as it is, or while interrupts are held back
    if threading.get_ident() == INTERRUPTS.thread and not is_ours:
        signal.signal(signal.SIGTERM, _OnSigterm(action))


def copy_of(error: _Error) -> _Error:
    """Return a copy of an error that several threads raise: each raise adds its own traceback.

    An error of the caller's that cannot be copied is returned itself.
    """
    try:
        copied = copy.copy(error)
        copied.__traceback__ = None
    except Exception:  # its class decides
        return error
    return copied


def words_of(error: BaseException) -> str:
    """Return the class and the message of ``error``, whatever its class makes of a message."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")  # as KeyboardInterrupt has none
    except Exception:  # its class decides
        return type(error).__name__


def leave(reason: str) -> NoReturn:
    """End the process at once with status 75, after its log is flushed.

    An ordinary exit would wait for collectives that another rank no longer takes part in, up to gloo's own deadline.
    """
    try:
        _log.error("this rank leaves with status %d: %s", EXIT_STATUS, reason)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(EXIT_STATUS)
