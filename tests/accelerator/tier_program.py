"""Short programs that use the device tier as training does, each way of its once: they see what a wait is for.

Every program has a tier and a place of updates of its own, budgets that make buffers change their users, and reads and
writes the bytes in DRAM itself where the guard of pinned memory sees that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tiered
from tests.accelerator import simulated
from tiered.ranks.comm import NullComm
from tiered.tiers import copies
from tiered.tiers.accelerator import AcceleratorTier, DevicePlace
from tiered.tiers.compute_tier import ParameterPlace, UnitBuffer, UpdatePlace
from tiered.tiers.device_memory import on_stream

__all__ = ["PROGRAMS", "Rig"]

NBYTES = 4096


class Rig:
    """A tier with room for two buffers, a place of updates with room for two, and keys in the DRAM of ``store``."""

    def __init__(self, store: tiered.Store) -> None:
        self.working_set = store.working_set
        device = torch.device("sim:0")
        self.tier = AcceleratorTier(self.working_set, device, 2 * NBYTES)
        self.copies = self.tier.copies
        self.place = DevicePlace(self.tier, 2 * NBYTES)
        self.here = torch.accelerator.current_stream()
        self.side = torch.Stream(device="sim")

    def close(self) -> None:
        """Give all memory back, each buffer after its last use."""
        self.place.close()
        self.tier.forget()

    def end_copies(self) -> None:
        """Give the leases of copies back, whatever a mutant has left."""
        torch.accelerator.synchronize()
        while self.copies._in_flight:
            self.copies.sweep()

    def make(self, *keys: str) -> None:
        """Make ``keys`` resident."""
        for key in keys:
            self.working_set.create(key, NBYTES, scratch=True)
            lease = self.working_set.lease(key, "w")
            lease.tensor.fill_(len(key))
            lease.release()

    def write(self, key: str) -> None:
        """The host writes ``key``, once no copy uses it."""
        lease = self.tier.lease(key, "rw")
        lease.tensor.add_(1)
        lease.release()

    def write_alone(self, key: str) -> None:
        """The host writes ``key``, which no copy uses any more."""
        lease = self.working_set.lease(key, "rw")
        lease.tensor.add_(1)
        lease.release()

    def read(self, key: str) -> None:
        """The host reads ``key``, once no copy writes it."""
        lease = self.tier.lease(key, "r")
        int(lease.tensor[0])
        lease.release()


def parameters(r: Rig) -> None:
    """Units follow each other in the same buffers, used on two streams; DRAM changes in between."""
    r.make("a", "b", "c")
    for _ in range(2):
        for keys in (("a", "b"), ("c",), ("b", "a")):
            gathered = r.tier.gather(keys, "r")
            for stream in (r.here, r.side):
                with on_stream(stream):
                    gathered.use()
                    for tensor in gathered.whole:
                        tensor.square()
            gathered.release(())
        for key in "abc":
            r.write(key)


def ahead(r: Rig) -> None:
    """A unit is gathered ahead of need, and used then."""
    r.make("a", "b")
    for key in "abba":
        r.tier.gather_ahead(key)
        gathered = r.tier.gather([key], "r")
        gathered.use()
        gathered.whole[0].square()
        gathered.release(())
    r.tier.memory.forget()
    assert r.tier.gather_ahead("a")
    r.tier.delete("a")
    r.make("a")
    for _ in range(2):
        r.tier.memory.forget()
        r.tier.gather(["a", "b"], "r").release(())
    r.tier.forget()
    r.write_alone("a")
    r.write_alone("b")
    simulated.set_query_delay(8)  # two copies of a key are in flight
    for _ in range(2):
        r.tier.memory.forget()
        r.tier.gather(["a", "b"], "r").release(())
    r.tier.settle("b")
    r.write_alone("b")


def guessed(r: Rig) -> None:
    """A unit is gathered ahead of need into the one buffer that another needs then."""
    r.make("a", "b")
    tier = AcceleratorTier(r.working_set, r.tier.device, NBYTES)
    assert tier.gather_ahead("a")
    tier.gather(["b"], "r").release(())
    tier.forget()


def broken_off(r: Rig) -> None:
    """A copy ahead of need fails between two of its pieces: its lease ends with the first one."""
    r.make("a", "b")
    simulated.fail_copy(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "AHEAD_NBYTES", NBYTES // 2)
        with pytest.raises(RuntimeError, match="planned to fail"):
            r.tier.gather_ahead("a")
    r.write_alone("a")
    for keys in (("b", "a"), ("a", "b")):
        r.tier.gather(keys, "r").release(())


def failing(r: Rig) -> None:
    """The last copy of a unit fails, or finds no room: the first ones' leases end with their copies all the same."""
    r.make("a", "b", "c")
    simulated.fail_copy(2)
    for keys, error in (("ab", RuntimeError), ("abc", tiered.CapacityError)):
        with pytest.raises(error):
            r.tier.gather([*keys], "rw")
        r.write_alone("a")
        r.write_alone("b")


def settled(r: Rig) -> None:
    """A caller waits for DRAM, and for an update of what a copy reads."""
    r.make("a", "b")
    for round_ in range(2):
        r.tier.gather(["a", "b"], "r").release(())
        if round_:
            assert r.tier.settle_one()
            r.write_alone("a")
            r.write("b")
        else:
            for lease in r.tier.lease_for_update(["a", "b"]):
                lease.tensor.add_(1)
                lease.release()
    r.tier.gather(["a", "b"], "r").release(())
    UpdatePlace(r.tier, r.working_set).settle(["a", "b"])
    r.write_alone("b")


def shown(r: Rig) -> None:
    """A unit of two spans is shown, and used on a stream that has waited for nothing."""
    r.make("a", "b")
    unit = UnitBuffer(
        [(key, torch.uint8) for key in "ab"], [ParameterPlace(span, 0, (NBYTES,), (1,)) for span in (0, 1)],
        tier=r.tier, comm=NullComm(),
    )  # fmt: skip
    unit.gather("r")
    with torch.no_grad(), on_stream(r.side):
        shown = [torch.empty(0, dtype=torch.uint8, device="sim") for _ in range(2)]
        unit.show(shown)
        unit.use()
        for tensor in shown:
            tensor.square()
    for tensor in shown:
        tensor.data = torch.empty(0, dtype=torch.uint8, device="sim")
    unit.release()


def outlived(r: Rig) -> None:
    """A tensor of the caller's lies in a buffer that was given back, and is used on the stream that it was made on."""
    made = r.tier.new_gradients("g", NBYTES)
    made.use()
    tensor = made.tensor[:512]
    made.hand_over()
    made.use()
    made.tensor.fill_(3)
    made.release()
    another = r.tier.new_gradients("h", NBYTES)
    another.use()
    another.tensor.zero_()
    assert int(tensor.square()[0]) == 9
    tensor.square()
    del tensor
    r.tier.memory.left_bytes()
    another.release()
    with on_stream(r.side):
        both = [r.tier.new_gradients(key, NBYTES) for key in ("i", "j")]
        for made in both:
            made.use()
            made.tensor.zero_()
    for made in both:
        made.release()


def written(r: Rig) -> None:
    """A unit is changed on the device and written back, for good and only for a look."""
    r.make("a", "b")
    gathered = r.tier.gather(["a"], "rw")
    gathered.use()
    gathered.whole[0].add_(1)
    gathered.write_back()
    assert int(gathered.leases[0].tensor[0]) == 2
    gathered.release(())
    r.read("a")


def gradients(r: Rig) -> None:
    """Gradients are made, leave, come back, are added to on another stream, and leave for good."""
    r.make("g", "h")
    for key in ("g", "h", "g"):
        made = r.tier.new_gradients(key, NBYTES)
        made.use()
        made.tensor.zero_()
        made.store()
        r.read(key)
        back = r.tier.gradients(key, "rw")
        for stream in (r.here, r.side):
            with on_stream(stream):
                back.use()
                back.tensor.square()
        with on_stream(r.side):
            r.side.wait_stream(r.here)
            back.tensor.add_(1)
        back.store()
        both = [r.tier.new_gradients("other", NBYTES) for _ in range(2)]
        for other in both:
            other.use()
            other.tensor.zero_()
        for other in both:
            other.release()
        r.write(key)
    lent = r.tier.gradients("g", "r")
    lent.use()
    lent.tensor.square()
    lent.release()
    last = r.tier.gradients("h", "rw")
    last.use()
    last.tensor.add_(1)
    last.store()
    r.tier.drop_bytes("h")
    r.make("in its place")
    r.tier.gradients("g", "rw").discard()


def scratch(r: Rig) -> None:
    """Scratch memory is lent to one stream after the other."""
    for stream in (r.here, r.side, r.here):
        with r.tier.scratch(NBYTES) as one:
            one.fill_(1)
            with on_stream(stream), r.tier.scratch(NBYTES) as other:
                other.fill_(2)
            assert int(one[0]) == 1


def numbers(r: Rig) -> None:
    """A number that one stream made is used by the host, and by the stream of updates."""
    for _ in range(2):
        with on_stream(r.side):
            on_host, on_device = (wait(torch.ones(512, device="sim") * 2) for wait in (r.tier.on_host, r.place.number))
        assert float(on_host()[0]) == 2
        with r.place.computing():
            on_device().square()
            del on_device


def activations(r: Rig) -> None:
    """Tensors of the caller's leave and come back, while the caller goes on."""
    r.make("x", "y")
    for _ in range(2):
        kept, changing = torch.ones(NBYTES, dtype=torch.uint8, device="sim"), torch.ones(NBYTES // 4, device="sim")
        r.tier.put(changing, "y", 0)
        changing.add_(1)
        r.tier.put(kept, "x", 0)
        del kept, changing
        fresh = torch.ones(NBYTES, dtype=torch.uint8, device="sim")
        fresh.add_(1)
        assert not r.tier.was_changed("x")
        r.read("x")
        for key in "xy":
            r.tier.get(key).square()
        r.tier.delete("y")
        r.make("y")
        r.write("x")
    r.tier.put(kept := torch.ones(NBYTES, dtype=torch.uint8, device="sim"), "x", 0)
    r.here.wait_stream(r.copies.stream_out)
    kept.add_(1)
    assert r.tier.was_changed("x")
    r.tier.put(kept, "x", 0)
    r.tier.delete("x")


def update(r: Rig) -> None:
    """A unit is updated on the device, bucket by bucket, from gradients that another stream made."""
    r.make("p", "s1", "s2", "s3")
    kept = r.place.keep(NBYTES // 2)
    with r.place.computing():
        kept.zero_()
    for _ in range(2):
        made = r.tier.new_gradients("g", NBYTES)
        with on_stream(r.side):
            made.use()
            made.tensor.fill_(1)
        made.hand_over()
        assert made._buffer.used_on() == ()  # or the update would wait for what comes later on that stream, too
        for key in ("p", "s1", "s2", "s3"):
            (lease,) = r.tier.lease_for_update([key])
            values = r.place.bring(lease)
            with r.place.computing():
                kept.zero_()
                values.add_(r.place.take_over(made))
            del values
            r.place.put_back([lease])
        made.release()
        r.place.settle(["p", "s3"])
        for key in ("p", "s3"):
            r.write_alone(key)
        (lease,) = r.tier.lease_for_update(["p"])
        with r.place.computing():
            r.place.bring(lease).square()
        r.place.give_back(lease)
        r.write("p")
        r.read("s3")
    del kept


PROGRAMS: tuple[Callable[[Rig], None], ...] = (
    parameters, ahead, guessed, written, scratch, numbers, broken_off, failing,
    settled, shown, outlived, update, gradients, activations,
)  # fmt: skip
