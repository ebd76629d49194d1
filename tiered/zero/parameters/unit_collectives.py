"""UnitCollectives: what several ranks do together on a model's bytes in DRAM: gathers of units, exchanges of gradients.

Each is asked for in program order, equal on all ranks, and waited for. The buffers are within the DRAM budget; one of a
collective that did not end is never used again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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

__all__ = ["Exchange", "GatheredByAll", "UnitCollectives"]

_PARAMETERS = "model/parameters/"
_NONE = torch.empty(0, dtype=torch.uint8, device="cpu")
_lost: list[object] = []  # lifetime: other ranks may write into their bytes to the end of the process


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


class GatheredByAll(Gathered):
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

    def is_seen(self) -> bool:
        """Drop the own tensors; return whether others show the first span."""
        self.whole = self.shard = []
        return self.is_there(0)

    def lies_in(self, storage: int) -> bool:
        """Return whether a span lies in the storage of that address."""
        return any(buffer.address == storage for buffer in self._buffers)

    def look(self, comm: UnitCollectives) -> None:
        """Have own tensors again, which do not count as seen. For a gather of a lease that lasts."""
        sizes = [comm.world * lease.tensor.numel() for lease in self.leases]
        memories = [buffer.memory for buffer in self._buffers]
        flats = [torch.frombuffer(m, dtype=torch.uint8, count=n) for m, n in zip(memories, sizes, strict=True)]
        self.whole, self.shard = flats, [comm.piece(flat) for flat in flats]

    def release(self, unchanged: Collection[int]) -> None:
        """Give everything back; bytes that a tensor still shows stay counted until it dies."""
        super().release(unchanged)
        for buffer in self._buffers:
            self._slots.give(buffer)


class Exchange:
    """The exchange of one unit's gradients that is under way: ``received`` has the pieces of all ranks, in order."""

    __slots__ = ("_buffer", "_collectives", "_sent", "_tickets", "received")

    def __init__(
        self, collectives: UnitCollectives, sent: Lease, buffer: Buffer, received: torch.Tensor, tickets: list[Ticket]
    ) -> None:
        """``buffer`` has ``received``, (nbytes,) uint8: of each trainable span, world pieces."""
        self._collectives, self._sent, self._buffer, self._tickets = collectives, sent, buffer, tickets
        self.received = received

    def wait(self) -> tuple[bytes, ...]:
        """Wait for the bytes of all ranks; return the payload of each."""
        with self._collectives.using(self._sent, self._buffer):
            first, *_ = [ticket.wait() for ticket in self._tickets]
        return first

    def end(self) -> None:
        """Give the received bytes back; no tensor may lie in them."""
        self.received = _NONE
        self._collectives.slots.give(self._buffer)


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

    def __repr__(self) -> str:
        return f"UnitCollectives({self.rank} of {self.world})"

    def gather(self, tier: ComputeTier, keys: Sequence[str], mode: str) -> Gathered:
        """Bring the whole spans of whose shards ``keys`` are into DRAM; blocks on a swap in and for the other ranks.

        With ``mode`` "w" the bytes are undefined, and no other rank takes part. Raises the errors of
        ``Residency.lease``, which the other ranks hear of, and those of ``Ticket.wait``.
        """
        whole: list[tuple[Buffer, torch.Tensor]] = []
        payload, self.payload = self.payload, None
        with self.ranks.together(f"gather of {keys[0]}"):
            shards = tier.gather(keys, mode).leases
            try:
                for lease in shards:
                    whole.append(self.slots.take(self.world * lease.tensor.numel()))
                    if mode != "w":
                        self.piece(whole[-1][1]).copy_(lease.tensor)
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
        with self.using(*(buffer for buffer, _ in whole), *shards):
            tickets = []
            for key, (buffer, tensor) in zip(keys, whole, strict=True) if mode != "w" else ():
                what = f"{key.removeprefix(_PARAMETERS)} for {self.use}"
                tickets.append(self.ranks.comm_thread.gather(what, tensor, payload=payload or b"", owner=buffer))
                payload = None
            self.told, *_ = [ticket.wait() for ticket in tickets] or [()]
        return GatheredByAll(self.slots, shards, whole, [self.piece(tensor) for _, tensor in whole])

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a whole span, (nbytes,) uint8."""
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
            self.piece(each).copy_(shard)
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
        with self.ranks.together(f"exchange of {name}"):
            place, received = self.slots.take(sum(span.numel() for span in spans))
        tickets, start, owner = list[Ticket](), 0, (buffer.lease.buffer, place)
        with self.using(buffer.lease, place):
            for span in spans:
                part = received[start : start + span.numel()]
                exchange = self.ranks.comm_thread.exchange
                tickets.append(exchange(name, span, received=part, payload=payload, owner=owner))
                start, payload = start + span.numel(), b""
        return Exchange(self, buffer.lease, place, received, tickets)

    @contextmanager
    def using(self, *owners: object) -> Iterator[None]:
        """The owners' bytes are in use by collectives until the block ends: where an error ends it, for good."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankLostError | StepAbandonedError):
                self.ranks.abandon(error, "a collective")
            _lost.extend(owners)
            raise
