"""UnitCollectives: what several ranks do together on a model's bytes in DRAM: gathers of units, exchanges of gradients.

Each is asked for in program order, equal on all ranks, and waited for. The buffers are scratch keys of the working set,
within the budget; a buffer of a collective that did not end is never used again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from tiered.errors import RankLostError, StepAbandonedError
from tiered.ranks.comm_thread import Ticket
from tiered.ranks.ranks import Ranks
from tiered.store.residency.residency import Lease, Residency
from tiered.tiers.compute_tier import ComputeTier, Gathered, GradientBuffer

__all__ = ["Exchange", "UnitCollectives"]

_lost: list[Lease] = []  # lifetime: other ranks may write into their bytes to the end of the process
_PARAMETERS, _GATHERED, _RECEIVED = "model/parameters/", "model/gathered/", "model/received"


class _GatheredByAll(Gathered):
    """A unit's spans that all ranks have put together, in scratch keys. See ``Gathered``."""

    __slots__ = ("_whole_leases", "_working_set")

    def __init__(self, working_set: Residency, shards: Sequence[Lease], whole: Sequence[Lease], rank: int) -> None:
        """``shards``: of this rank's bytes, where they are leased as long; ``whole``: of the spans."""
        self.leases = tuple(shards)
        self.whole = [lease.tensor for lease in whole]
        self.shard = [
            each.narrow(0, rank * lease.tensor.numel(), lease.tensor.numel())
            for each, lease in zip(self.whole, shards, strict=bool(shards))
        ]
        self._whole_leases, self._working_set = tuple(whole), working_set

    def is_there(self, span: int) -> bool:
        """Return whether ``whole[span]`` is memory of the span still, because a tensor that lies in it lives."""
        return not self._whole_leases[span].release()

    def release(self, unchanged: Collection[int]) -> None:
        """Give everything back; bytes that a tensor still shows stay counted until it dies."""
        super().release(unchanged)
        for lease in self._whole_leases:
            self._working_set.drop_bytes(lease.key, lease)


class Exchange:
    """The exchange of one unit's gradients that is under way: ``received`` has the pieces of all ranks, in order."""

    __slots__ = ("_collectives", "_leases", "_tickets", "received")

    def __init__(
        self, collectives: UnitCollectives, leases: Sequence[Lease], received: torch.Tensor, tickets: list[Ticket]
    ) -> None:
        """``leases``: of what is sent, and of ``received``, (nbytes,) uint8: of each trainable span, world pieces."""
        self._collectives, self._leases, self._tickets = collectives, leases, tickets
        self.received = received

    def wait(self) -> tuple[bytes, ...]:
        """Wait for the bytes of all ranks; return the payload of each."""
        with self._collectives.using(self._leases):
            first, *_ = [ticket.wait() for ticket in self._tickets]
        return first

    def end(self) -> None:
        """Give the received bytes back; no tensor may lie in them."""
        self.received = self.received[:0]
        self._collectives.drop(self._leases[1:])


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
        self._working_set = working_set
        self._nbytes: dict[str, int] = {}  # of each scratch key

    def __repr__(self) -> str:
        return f"UnitCollectives({self.rank} of {self.world})"

    def gather(self, tier: ComputeTier, keys: Sequence[str], mode: str) -> Gathered:
        """Bring the whole spans of whose shards ``keys`` are into DRAM; blocks on a swap in and for the other ranks.

        Raises the errors of ``Residency.lease``, which the other ranks hear of, and those of ``Ticket.wait``.
        """
        whole: list[Lease] = []
        payload, self.payload = self.payload, None
        with self._together(f"gather of {keys[0]}"):
            shards = tier.gather(keys, mode).leases
            try:
                for lease in shards:
                    nbytes = self.world * lease.tensor.numel()
                    whole.append(self._lease(lease.key.replace(_PARAMETERS, _GATHERED, 1), nbytes))
                    whole[-1].tensor.view(self.world, -1)[self.rank].copy_(lease.tensor)
                if mode == "r":
                    for lease in shards:
                        lease.release()
                    shards = ()
            except BaseException:
                self.drop(whole)
                for lease in shards:
                    lease.release()
                raise
        with self.using([*whole, *shards]):
            tickets = []
            for lease in whole:
                gather, name = self.ranks.comm_thread.gather, lease.key.removeprefix(_GATHERED)
                what = f"{name} for {self.use}"
                tickets.append(gather(what, lease.tensor, payload=payload or b"", owner=lease.buffer))
                payload = None
            self.told, *_ = [ticket.wait() for ticket in tickets]
        return _GatheredByAll(self._working_set, shards, whole, self.rank)

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
            each.view(self.world, -1)[self.rank].copy_(shard)
        for ticket in [self.ranks.comm_thread.gather("a moved span", each) for each in whole]:
            ticket.wait()
        return whole

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
        nbytes = max(sum(span.numel() for span in spans), self._nbytes.get(_RECEIVED, 0))
        with self._together(f"exchange of {name}"):
            lease = self._lease(_RECEIVED, nbytes)
        received, tickets, start = lease.tensor, list[Ticket](), 0
        owner = (buffer.lease.buffer, lease.buffer)
        with self.using([buffer.lease, lease]):
            for span in spans:
                part = received[start : start + span.numel()]
                exchange = self.ranks.comm_thread.exchange
                tickets.append(exchange(name, span, received=part, payload=payload, owner=owner))
                start, payload = start + span.numel(), b""
        return Exchange(self, (buffer.lease, lease), received, tickets)

    def drop(self, leases: Sequence[Lease]) -> None:
        """Give leases of scratch keys back, without their bytes."""
        for lease in leases:
            self._working_set.drop_bytes(lease.key, lease)

    def _lease(self, key: str, nbytes: int) -> Lease:
        """Lease scratch ``key`` of at least ``nbytes``, whose bytes are undefined; blocks."""
        if self._nbytes.get(key, -1) != nbytes:
            if key in self._nbytes:
                self._working_set.delete([key])
            self._working_set.create(key, nbytes, scratch=True)
            self._nbytes[key] = nbytes
        return self._working_set.lease_anew(key)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """This rank prepares a collective by itself: where that fails, the others hear of it."""
        try:
            yield
        except BaseException as error:
            self.ranks.abandon(error, what)
            raise

    @contextmanager
    def using(self, leases: Sequence[Lease]) -> Iterator[None]:
        """The leases' bytes are in use by collectives until the block ends: where an error ends it, for good."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RankLostError | StepAbandonedError):
                self.ranks.abandon(error, "a collective")
            _lost.extend(leases)
            raise
