"""UnitCollectives: what several ranks do together on a model's bytes: gathers of units, exchanges of gradients.

Each is asked for in program order, equal on all ranks, and waited for. The buffers are within the budgets; one of a
collective that did not end is never used again. Bytes move where the model computes, if the ranks' group has
collectives there. Those of another compute device are *staged*: they move in DRAM, and are copied there and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import xxhash

from tiered.errors import DeviceError, RankLostError, StepAbandonedError, UsageError
from tiered.ranks.comm_thread import Ticket
from tiered.ranks.ranks import Ranks
from tiered.store.residency.residency import Lease, Residency
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.compute_tier import ComputeTier, Gathered, GradientBuffer
from tiered.zero.layout import UnitLayout
from tiered.zero.parameters.gather_slots import DeviceSlots, GatherSlots, SlotMemory

__all__ = ["Exchange", "GatheredByAll", "UnitCollectives"]

_PARAMETERS = "model/parameters/"
_NONE = torch.empty(0, dtype=torch.uint8, device="cpu")
_kept: list[object] = []  # lifetime: other ranks may write into their bytes to the end of the process


class GatheredByAll(Gathered):
    """A unit's spans that all ranks have put together. See ``Gathered``."""

    __slots__ = ("_buffers", "_slots")

    def __init__(
        self,
        slots: SlotMemory,
        shards: Sequence[Lease],
        whole: Sequence[tuple[Any, torch.Tensor]],
        pieces: list[torch.Tensor],
    ) -> None:
        """``shards``: of this rank's bytes, where they are leased as long; ``whole``: of the spans."""
        self.leases = tuple(shards)
        self.whole, self.shard = [tensor for _, tensor in whole], pieces
        self._buffers: tuple[Any, ...] = tuple(buffer for buffer, _ in whole)
        self._slots = slots

    def use(self) -> None:
        for buffer in self._buffers:
            self._slots.use(buffer)

    def is_there(self, span: int) -> bool:
        return bool(self._buffers[span].is_aliased)

    def write_back(self) -> None:
        for buffer, piece, lease in zip(self._buffers, self.shard, self.leases, strict=False):  # no leases to read
            self._slots.write(buffer, piece, lease)

    def is_seen(self) -> bool:
        """Drop the own tensors; return whether others show the first span."""
        self.whole = self.shard = []
        return self.is_there(0)

    def lies_in(self, storage: int) -> bool:
        """Return whether a span, in DRAM, lies in the storage of that address."""
        return any(buffer.address == storage for buffer in self._buffers)

    def look(self, comm: UnitCollectives) -> None:
        """Have own tensors again, which do not count as seen. For a gather in DRAM of a lease that lasts."""
        sizes = [comm.world * lease.tensor.numel() for lease in self.leases]
        memories = [buffer.memory for buffer in self._buffers]
        flats = [torch.frombuffer(m, dtype=torch.uint8, count=n) for m, n in zip(memories, sizes, strict=True)]
        self.whole, self.shard = flats, [comm.piece(flat) for flat in flats]

    def release(self, unchanged: Collection[int]) -> None:
        super().release(unchanged)
        for buffer in self._buffers:
            self._slots.give(buffer)


class _Gathering(NamedTuple):
    """A gather under way: the buffers and tensors of the spans, the leases that stay, a ticket for each span."""

    whole: list[tuple[Any, torch.Tensor]]
    shards: list[Lease]
    tickets: list[Ticket]


class Exchange:
    """The exchange of one unit's gradients that is under way: ``received`` has the pieces of all ranks, in order.

    (nbytes,) uint8, where the bytes have moved: of each trainable span, world pieces.
    """

    __slots__ = ("_beginning", "_buffers", "_collectives", "_give_sent", "_slots", "_tickets", "received")

    def __init__(
        self,
        collectives: UnitCollectives,
        received: torch.Tensor,
        tickets: list[Ticket],
        *,
        buffers: Sequence[Any],
        give_sent: Callable[[], object],
    ) -> None:
        """``buffers``: that of ``received``, and those of what is sent, which ``give_sent()`` gives back in the end."""
        self._collectives, self._slots, self._tickets = collectives, collectives.slots, tickets
        self._beginning = collectives.ranks.num_beginnings
        self._buffers, self._give_sent = buffers, give_sent
        self.received = received

    def wait(self) -> tuple[bytes, ...]:
        """Wait for the bytes of all ranks; return the payload of each."""
        with self._collectives.using():
            first, *_ = [ticket.wait() for ticket in self._tickets]
        self._slots.moved(self._tickets[-1].event, *self._buffers)
        self._give_sent()
        self._slots.use(self._buffers[0])
        return first

    def end(self) -> None:
        """Give the received bytes back; no tensor may lie in them."""
        self.received = _NONE
        self._slots.give(self._buffers[0])

    def drop(self) -> None:
        """Forget it, and what was sent; blocks until it is over. Bytes that other ranks may write into are lost."""
        try:
            for ticket in self._tickets:
                ticket.wait()
        except Exception:  # which its first wait has raised, or another call does
            self._collectives.lose(self._beginning, self.end, self._give_sent)
        else:
            self._slots.moved(self._tickets[-1].event, *self._buffers)
            self.end()
            self._give_sent()


class UnitCollectives:
    """The collectives of one model. One thread asks for them.

    ``use`` of the unit that is gathered next, the same on all ranks. ``payload``: what that gather tells all ranks, as
    long on each, or None; ``told`` is then what they have told. ``slots`` are where bytes move.
    """

    slots: SlotMemory

    def __init__(self, ranks: Ranks, working_set: Residency, tier: ComputeTier) -> None:
        self.rank, self.world = ranks.rank, ranks.world
        self.use = ""
        self.payload: bytes | None = None
        self.told: tuple[bytes, ...] = ()
        self.ranks = ranks
        self.slots = self.dram_slots = GatherSlots(working_set)
        self._ahead: dict[str, _Gathering] = {}  # by the first key of a unit
        self._device_slots = DeviceSlots(tier) if isinstance(tier, AcceleratorTier) else None
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
        for key in list(self._ahead):
            self.drop([key])
        over = [end for beginning, end in self._lost if beginning < self.ranks.num_beginnings]
        self._lost[:] = [each for each in self._lost if each[0] == self.ranks.num_beginnings]
        for end in over:
            end()
        self.dram_slots.end()

    def __repr__(self) -> str:
        return f"UnitCollectives({self.rank} of {self.world})"

    @property
    def is_staged(self) -> bool:
        """Whether bytes move in DRAM, and the model computes elsewhere."""
        return self._device_slots is not None and self.slots is self.dram_slots

    def connect(self, device: torch.device) -> None:
        """Have the bytes move on the compute device, if the ranks' group can; all ranks call this together. Blocks."""
        if self._device_slots is not None and self.ranks.move_on(device):
            self.slots = self._device_slots

    def gather(self, tier: ComputeTier, keys: Sequence[str], mode: str) -> Gathered:
        """Bring the whole spans of whose shards ``keys`` are to where the model computes; blocks for the other ranks.

        With ``mode`` "w" the bytes are undefined, and no other rank takes part. Raises the errors of
        ``Residency.lease``, which the other ranks hear of, and those of ``Ticket.wait``.
        """
        if mode != "r":
            self.drop(keys)
        if keys[0] in self._ahead:
            self.tell("the backward of a unit") if self.payload is not None else None
            gathering = self._ahead.pop(keys[0])  # order: an error of the agreement leaves it to ``end``
            self._end(gathering)
        else:
            gathering = self._begin(tier, keys, mode)
            self.told = self._end(gathering)
        slots, whole, shards = self.slots, gathering.whole, gathering.shards
        if self._device_slots is not None and self.is_staged:
            with self.ranks.together(f"gather of {keys[0]}"):
                try:
                    there = self._device_slots.bring([tensor for _, tensor in whole], keys[0])
                except BaseException:
                    for lease in shards:
                        lease.release()
                    raise
                finally:
                    self._give(slots, whole)
            slots, whole = self._device_slots, there
        return GatheredByAll(slots, shards, whole, [self.piece(tensor) for _, tensor in whole])

    def gather_ahead(self, tier: ComputeTier, sizes: Mapping[str, int], wait_for_update: Callable[[], None]) -> None:
        """Ask for the whole spans of the keys of ``sizes``, (nbytes) of a shard each, to be read; blocks for memory.

        ``gather`` is to follow, or ``drop``. The comm thread calls ``wait_for_update()`` before it leases the shards.
        """
        first, *_ = sizes
        whole: list[tuple[Any, torch.Tensor]] = []
        with self.ranks.together(f"gather of {first}"):
            try:
                whole += [self.slots.take(self.world * nbytes) for nbytes in sizes.values()]
            except BaseException:
                self._give(self.slots, whole)
                raise

        def read(key: str, buffer: Any, piece: torch.Tensor) -> object:
            wait_for_update()
            self._fill(buffer, piece, tier.lease(key, "r"), keeps=False)
            return self.slots.mark(buffer)

        with self.using(*self._ends(whole, [])):
            tickets = [
                self.ranks.comm_thread.gather(
                    self._words_of(key), tensor, owner=buffer,
                    ready=functools.partial(read, key, buffer, self.piece(tensor)),
                )
                for key, (buffer, tensor) in zip(sizes, whole, strict=True)
            ]  # fmt: skip
        self._ahead[first] = _Gathering(whole, [], tickets)

    def forget(self) -> None:
        """In a forked child: what is gathered ahead is the parent's."""
        self._ahead.clear()

    def drop(self, keys: Sequence[str]) -> None:
        """Give back what was gathered ahead, if anything was; blocks for the other ranks."""
        gathering = self._ahead.pop(keys[0], None)
        if gathering is not None:
            with suppress(DeviceError, StepAbandonedError, UsageError):  # the next collective raises it again
                self._end(gathering)
                self._give(self.slots, gathering.whole)

    def _begin(self, tier: ComputeTier, keys: Sequence[str], mode: str) -> _Gathering:
        """Read the shards, and ask for the spans."""
        payload, self.payload = self.payload, None
        whole: list[tuple[Any, torch.Tensor]] = []
        shards: list[Lease] = []
        with self.ranks.together(f"gather of {keys[0]}"):
            try:
                for key in keys:
                    lease = tier.lease(key, mode)
                    try:
                        whole.append(self.slots.take(self.world * lease.tensor.numel()))
                    except BaseException:
                        lease.release()
                        raise
                    if mode != "w":
                        self._fill(whole[-1][0], self.piece(whole[-1][1]), lease, keeps=mode != "r")
                    shards += [lease] if mode != "r" else []
            except BaseException:
                self._give(self.slots, whole)
                for lease in shards:
                    lease.release()
                raise
        with self.using(*self._ends(whole, shards)):
            tickets = []
            for key, (buffer, tensor) in zip(keys, whole, strict=True) if mode != "w" else ():
                how = {"payload": payload or b"", "after": self.slots.mark(buffer), "owner": buffer}
                tickets.append(self.ranks.comm_thread.gather(self._words_of(key), tensor, **how))
                payload = None
        return _Gathering(whole, shards, tickets)

    def _fill(self, buffer: Any, piece: torch.Tensor, lease: Lease, *, keeps: bool) -> None:
        """Copy the leased bytes to ``piece``; the lease ends with it, but with ``keeps``, and where that fails."""
        try:
            self.slots.fill(buffer, piece, lease, keeps=keeps)
        except BaseException:
            lease.release()
            raise

    def _ends(self, whole: Sequence[tuple[Any, torch.Tensor]], shards: Sequence[Lease]) -> list[Callable[[], object]]:
        """Return the calls that give back what a gather uses."""
        return [lease.release for lease in shards] + [functools.partial(self.slots.give, buffer) for buffer, _ in whole]

    def _words_of(self, key: str) -> str:
        return f"{key.removeprefix(_PARAMETERS)} for {self.use}"

    def _end(self, gathering: _Gathering) -> tuple[bytes, ...]:
        """Wait for the bytes; return what the ranks have told."""
        with self.using(*self._ends(gathering.whole, gathering.shards)):
            told, *_ = [ticket.wait() for ticket in gathering.tickets] or [()]
        for ticket, (buffer, _) in zip(gathering.tickets, gathering.whole, strict=False):  # none of bytes to be written
            self.slots.moved(ticket.event, buffer)
        return told

    @staticmethod
    def _give(slots: SlotMemory, whole: list[tuple[Any, torch.Tensor]]) -> None:
        """Give the buffers of ``whole`` back, which is empty afterwards: their tensors must have died."""
        buffers = [buffer for buffer, _ in whole]
        whole.clear()
        for buffer in buffers:
            slots.give(buffer)

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

    def all_gather(self, shards: list[torch.Tensor], what: str = "a moved span") -> list[torch.Tensor]:
        """Return the whole tensors whose pieces ``shards``, (nbytes,) uint8 each, are this rank's: ordinary memory."""
        whole = [torch.empty(self.world * shard.numel(), dtype=torch.uint8, device="cpu") for shard in shards]
        for shard, each in zip(shards, whole, strict=True):
            self.piece(each).copy_(shard)
        for ticket in [self.ranks.comm_thread.gather(what, each) for each in whole]:
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
        """Return copies of rank 0's ``tensors``, which look alike on all ranks, in memory of torch's; blocks."""
        looks = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor) for tensor in tensors]
        flats = [each.view(-1).view(torch.uint8) for each in looks if each.numel()]
        if flats:
            first = self.all_gather([torch.cat(flats)])[0].view(self.world, -1)[0]
            for flat, given in zip(flats, torch.split(first, [flat.numel() for flat in flats]), strict=True):
                flat.copy_(given)
        return [look.to(tensor.device) for look, tensor in zip(looks, tensors, strict=True)]

    def exchange(self, name: str, gradients: GradientBuffer, layout: UnitLayout, *, payload: bytes) -> Exchange:
        """Begin to send the pieces of each trainable span of ``gradients`` to the ranks; blocks for memory alone.

        The gradients, laid out as ``layout`` says, are given back once they have arrived. ``payload`` goes to all.
        """
        sent: Sequence[Any] = gradients.buffers
        there = gradients.tensor
        give_sent: Callable[[], object] = gradients.discard
        with self.ranks.together(f"exchange of {name}"):
            try:
                if self.is_staged:
                    buffer, there = self.dram_slots.take(layout.gradient_nbytes)
                    try:
                        gradients.copy_to(there)
                    finally:
                        gradients.discard()
                        sent, give_sent = (buffer,), functools.partial(self.dram_slots.give, buffer)
                place, received = self.slots.take(layout.gradient_nbytes)
            except BaseException:
                give_sent()
                raise
            spans = [there[s.grad_offset : s.grad_offset + s.nbytes] for s in layout.spans if s.trainable]
        buffers, tickets, start = (place, *sent), list[Ticket](), 0
        with self.using(give_sent, functools.partial(self.slots.give, place)):
            after = self.slots.mark(*buffers)
            for span in spans:
                part = received[start : start + span.numel()]
                exchange = self.ranks.comm_thread.exchange
                tickets.append(exchange(name, span, received=part, payload=payload, after=after, owner=buffers))
                start, payload = start + span.numel(), b""
        return Exchange(self, received, tickets, buffers=buffers, give_sent=give_sent)

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
