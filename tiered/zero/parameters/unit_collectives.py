"""UnitCollectives: what several ranks do together on a model's bytes in DRAM: gathers of units, exchanges of gradients.

Each is asked for in program order, equal on all ranks, and waited for. The buffers are within the DRAM budget; one of a
collective that did not end is never used again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from tiered.bytes.arena import Buffer
from tiered.errors import RankLostError, StepAbandonedError
from tiered.ranks.comm_thread import Ticket
from tiered.ranks.ranks import Ranks
from tiered.store.residency.residency import Lease, Residency
from tiered.tiers.compute_tier import ComputeTier, Gathered, GradientBuffer

__all__ = ["Exchange", "UnitCollectives"]

_PARAMETERS = "model/parameters/"
_NONE = torch.empty(0, dtype=torch.uint8, device="cpu")
_kept: list[object] = []  # lifetime: other ranks may write into their bytes to the end of the process


class GatherSlots:
    """Reserved buffers of the DRAM budget in which whole units lie, kept from one gather to the next.

    So a gather finds its memory whatever is read ahead. A buffer whose bytes a tensor still shows is not used before
    that has died, and another is reserved meanwhile. Free buffers beyond ``kept_nbytes`` are given back.
    """

    def __init__(self, working_set: Residency) -> None:
        self.kept_nbytes = 0
        self._working_set = working_set
        self._used_nbytes = 0
        self._free: list[Buffer] = []
        self._shown: list[Buffer] = []  # by tensors of the caller's

    @property
    def free_nbytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(buffer.nbytes for buffer in self._free)

    def take(self, nbytes: int) -> tuple[Buffer, torch.Tensor]:
        """Return a buffer and a tensor over it, (nbytes,) uint8 of undefined bytes; blocks. CapacityError."""
        self._look()
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if fitting:
            buffer = min(fitting, key=lambda each: each.nbytes)
            self._free.remove(buffer)
        else:
            self._shrink(nbytes)
            buffer = self._working_set.reserve(nbytes, is_lasting=True)
        self._used_nbytes += buffer.nbytes
        return buffer, buffer.alias(nbytes, bool)[0]

    def give(self, buffer: Buffer) -> None:
        """Take ``buffer`` back, whose tensor the caller has dropped."""
        self._shown.append(buffer)
        self._look()

    def end(self) -> None:
        """Give all free buffers back to the budget."""
        self.kept_nbytes = 0
        self._look()

    def _look(self) -> None:
        """Sort the buffers that were given back: those that are shown wait."""
        free = [buffer for buffer in self._shown if not buffer.is_aliased]
        self._shown = [buffer for buffer in self._shown if buffer not in free]
        self._free += free
        self._used_nbytes -= sum(buffer.nbytes for buffer in free)
        self._shrink(0)

    def _shrink(self, nbytes: int) -> None:
        """Give free buffers back until ``nbytes`` more are no more than are kept."""
        while self._free and self._used_nbytes + self.free_nbytes + nbytes > self.kept_nbytes:
            self._working_set.unreserve(self._free.pop())


class _GatheredByAll(Gathered):
    """A unit's spans that all ranks have put together. See ``Gathered``."""

    __slots__ = ("_buffers", "_slots")

    def __init__(
        self,
        slots: GatherSlots,
        shards: Sequence[Lease],
        whole: Sequence[tuple[Buffer, torch.Tensor]],
        pieces: list[torch.Tensor],
    ) -> None:
        """``shards``: of this rank's bytes, where they are leased as long; ``whole``: of the spans."""
        self.leases = tuple(shards)
        self.whole, self.shard = [tensor for _, tensor in whole], pieces
        self._buffers, self._slots = tuple(buffer for buffer, _ in whole), slots

    def is_there(self, span: int) -> bool:
        """Return whether ``whole[span]`` is memory of the span still, because a tensor that lies in it lives."""
        return self._buffers[span].is_aliased

    def release(self, unchanged: Collection[int]) -> None:
        """Give everything back; bytes that a tensor still shows stay counted until it dies."""
        super().release(unchanged)
        for buffer in self._buffers:
            self._slots.give(buffer)


class Exchange:
    """The exchange of one unit's gradients that is under way: ``received`` has the pieces of all ranks, in order."""

    __slots__ = ("_beginning", "_buffer", "_collectives", "_tickets", "received")

    def __init__(
        self, collectives: UnitCollectives, buffer: Buffer, received: torch.Tensor, tickets: list[Ticket]
    ) -> None:
        """``buffer`` has ``received``, (nbytes,) uint8: of each trainable span, world pieces."""
        self._collectives, self._buffer, self._tickets = collectives, buffer, tickets
        self._beginning = collectives.ranks.num_beginnings
        self.received = received

    def wait(self) -> tuple[bytes, ...]:
        """Wait for the bytes of all ranks; return the payload of each."""
        with self._collectives.using():
            first, *_ = [ticket.wait() for ticket in self._tickets]
        return first

    def end(self) -> None:
        """Give the received bytes back; no tensor may lie in them."""
        self.received = _NONE
        self._collectives.slots.give(self._buffer)

    def drop(self, end_sent: Callable[[], object]) -> None:
        """Forget it; blocks until it is over. ``end_sent()`` gives back what was sent, at once or with lost buffers."""
        try:
            for ticket in self._tickets:
                ticket.wait()
        except Exception:  # which its first wait has raised, or another call does
            self._collectives.lose(self._beginning, self.end, end_sent)
        else:
            self.end()
            end_sent()


class UnitCollectives:
    """The collectives of one model. One thread asks for them.

    ``use`` of the unit that is gathered next, the same on all ranks. ``payload``: what that gather tells all ranks, as
    long on each, or None; ``told`` is then what they have told.
    """

    def __init__(self, ranks: Ranks, working_set: Residency) -> None:
        self.rank, self.world = ranks.rank, ranks.world
        self.use = ""
        self.payload: bytes | None = None
        self.told: tuple[bytes, ...] = ()
        self.ranks = ranks
        self.slots = GatherSlots(working_set)
        self._lost: list[tuple[int, Callable[[], object]]] = []  # that give back what other ranks may write into yet

    def lose(self, beginning: int, *ends: Callable[[], object]) -> None:
        """Call ``ends`` once no other rank can write into what they give back: in ``end`` after a new beginning.

        ``beginning``: how often the ranks had begun again when the collective was asked for.
        """
        if not any(each is self._lost for each in _kept):
            _kept.append(self._lost)
        self._lost += [(beginning, each) for each in ends]

    def end(self) -> None:
        """The step is forgotten: give all that is free back to the budget, and lost buffers that are free again."""
        over = [end for beginning, end in self._lost if beginning < self.ranks.num_beginnings]
        self._lost[:] = [each for each in self._lost if each[0] == self.ranks.num_beginnings]
        for end in over:
            end()
        self.slots.end()

    def __repr__(self) -> str:
        return f"UnitCollectives({self.rank} of {self.world})"

    def gather(self, tier: ComputeTier, keys: Sequence[str], mode: str) -> Gathered:
        """Bring the whole spans of whose shards ``keys`` are into DRAM; blocks on a swap in and for the other ranks.

        Raises the errors of ``Residency.lease``, which the other ranks hear of, and those of ``Ticket.wait``.
        """
        whole: list[tuple[Buffer, torch.Tensor]] = []
        payload, self.payload = self.payload, None
        with self._together(f"gather of {keys[0]}"):
            shards = tier.gather(keys, mode).leases
            try:
                for lease in shards:
                    whole.append(self.slots.take(self.world * lease.tensor.numel()))
                    self._piece(whole[-1][1]).copy_(lease.tensor)
            except BaseException:
                buffers = [buffer for buffer, _ in whole]
                whole.clear()  # lifetime: their tensors
                for buffer in buffers:
                    self.slots.give(buffer)
                for lease in shards:
                    lease.release()
                raise
            if mode == "r":
                for lease in shards:
                    lease.release()
                shards = ()
        ends = [lease.release for lease in shards] + [functools.partial(self.slots.give, buffer) for buffer, _ in whole]
        with self.using(*ends):
            tickets = []
            for key, (buffer, tensor) in zip(keys, whole, strict=True):
                what = f"{key.removeprefix(_PARAMETERS)} for {self.use}"
                tickets.append(self.ranks.comm_thread.gather(what, tensor, payload=payload or b"", owner=buffer))
                payload = None
            self.told, *_ = [ticket.wait() for ticket in tickets]
        return _GatheredByAll(self.slots, shards, whole, [self._piece(tensor) for _, tensor in whole])

    def _piece(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(self.world, -1)[self.rank]

    def tell(self, word: str) -> None:
        """Tell all ranks the ``payload`` without a gather; blocks for all of them."""
        payload, self.payload = self.payload, None
        self.told = self.ranks.comm_thread.agree(word, payload or b"").wait()

    def numbers(self, word: str, mine: torch.Tensor) -> torch.Tensor:
        """Return ``mine``, of any shape, of all ranks: (world, *shape) of its dtype; blocks for all of them."""
        payload = bytes(mine.detach().to(torch.float64).contiguous().view(-1).view(torch.uint8).tolist())
        told = b"".join(self.ranks.comm_thread.agree(word, payload).wait())
        every = torch.frombuffer(bytearray(told), dtype=torch.float64)
        return every.view(self.world, *mine.shape).to(mine.dtype)

    def all_gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole tensors whose pieces ``shards``, (nbytes,) uint8 each, are this rank's: ordinary memory."""
        whole = [torch.empty(self.world * shard.numel(), dtype=torch.uint8, device="cpu") for shard in shards]
        for shard, each in zip(shards, whole, strict=True):
            self._piece(each).copy_(shard)
        for ticket in [self.ranks.comm_thread.gather("a moved span", each) for each in whole]:
            ticket.wait()
        return whole

    def check_values(self, what: str, values: Mapping[str, Any]) -> None:
        """Raise UsageError, on all ranks, unless all give the same ``values``; blocks for all of them."""
        lines = []
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
                flat: Any = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                lines.append(f"{name}, {tuple(value.shape)}, with the digest {xxhash.xxh3_64_hexdigest(flat)}")
        self.ranks.check_equal(what, lines, "the same values on all ranks")

    def of_first(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of rank 0's ``tensors``, in ordinary memory, of the same looks on all ranks; blocks."""
        looks = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor) for tensor in tensors]
        flats = [each.view(-1).view(torch.uint8) for each in looks if each.numel()]
        if flats:
            first = self.all_gather([torch.cat(flats)])[0].view(self.world, -1)[0]
            for flat, given in zip(flats, torch.split(first, [flat.numel() for flat in flats]), strict=True):
                flat.copy_(given)
        return looks

    def exchange(self, name: str, buffer: GradientBuffer, spans: Sequence[torch.Tensor], *, payload: bytes) -> Exchange:
        """Begin to send piece r of each of ``spans``, (nbytes,) uint8, to rank r; blocks for DRAM alone.

        The spans lie in ``buffer``, which is in use until ``Exchange.wait`` has returned. ``payload`` goes to all.
        """
        assert buffer.lease is not None
        with self._together(f"exchange of {name}"):
            try:
                place, received = self.slots.take(sum(span.numel() for span in spans))
            except BaseException:
                buffer.discard()
                raise
        tickets, start, owner = list[Ticket](), 0, (buffer.lease.buffer, place)
        with self.using(buffer.discard, lambda: self.slots.give(place)):
            for span in spans:
                part = received[start : start + span.numel()]
                exchange = self.ranks.comm_thread.exchange
                tickets.append(exchange(name, span, received=part, payload=payload, owner=owner))
                start, payload = start + span.numel(), b""
        return Exchange(self, place, received, tickets)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """This rank prepares a collective by itself: where that fails, the others hear of it."""
        try:
            yield
        except BaseException as error:
            self.ranks.abandon(error, what)
            raise

    @contextmanager
    def using(self, *ends: Callable[[], object]) -> Iterator[None]:
        """The bytes that ``ends`` give back are in use by collectives: where an error ends the block, they are lost."""
        beginning = self.ranks.num_beginnings
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankLostError | StepAbandonedError):
                self.ranks.abandon(error, "a collective")
            self.lose(beginning, *ends)
            raise
