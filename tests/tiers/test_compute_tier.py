"""One unit's spans where computing happens; on one CPU rank the buffer is what the working set leased."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiered
from tiered.ranks.comm import NullComm
from tiered.store.residency.residency import Residency
from tiered.tiers.compute_tier import BufferState, ComputeTier, ParameterPlace, UnitBuffer

SPANS = [("a", torch.float32), ("b", torch.bfloat16)]
PIECES = [
    ParameterPlace(0, 0, (3, 2), (2, 1)),
    ParameterPlace(1, 128, (4,), (1,)),
    ParameterPlace(0, 128, (2, 3), (1, 2)),
]


@pytest.fixture
def working_set(tmp_path: Path) -> Iterator[Residency]:
    """Two keys of 4 KiB, filled with their own bytes."""
    with tiered.Store(tmp_path, dram="8MiB", durable=False) as store:
        for number, (key, _) in enumerate(SPANS):
            store.working_set.create(key, 4096)
            lease = store.working_set.lease(key, "w")
            lease.tensor.copy_(torch.arange(4096).add(number).to(torch.uint8) % 64)
            lease.release()
        yield store.working_set


def buffer_of(working_set: Residency) -> UnitBuffer:
    return UnitBuffer(SPANS, PIECES, tier=ComputeTier(working_set), comm=NullComm())


def test_the_buffer_is_the_leases_own_tensors(working_set: Residency) -> None:
    buffer = buffer_of(working_set)
    assert buffer.state is BufferState.NONE
    buffer.gather("r")
    assert (buffer.state, buffer.mode) == (BufferState.GATHERED, "r")
    leased = [lease.tensor.data_ptr() for lease in buffer.leases]
    assert [tensor.data_ptr() for tensor in buffer.tensors] == leased
    buffer.release()
    assert (buffer.state, buffer.tensors) == (BufferState.NONE, [])
    working_set.lease("a", "rw").release()  # nobody reads it any more


def test_parameters_are_shown_as_views_in_their_own_strides(working_set: Residency) -> None:
    buffer = buffer_of(working_set)
    parameters = [torch.empty(3, 2), torch.empty(4, dtype=torch.bfloat16), torch.empty(2, 3)]
    buffer.gather("rw")
    buffer.show(parameters)
    assert buffer.state is BufferState.SHOWN
    for parameter, piece in zip(parameters, PIECES, strict=True):
        offset = piece.offset * parameter.element_size()
        assert parameter.data_ptr() == buffer.tensors[piece.span].data_ptr() + offset
        assert (tuple(parameter.shape), parameter.stride()) == (piece.shape, piece.strides)
        assert torch.equal(
            parameter.as_strided((parameter.numel(),), (1,)),
            buffer.tensors[piece.span][offset : offset + parameter.nbytes].view(parameter.dtype),
        )
    parameters[0].fill_(7.0)
    assert torch.equal(buffer.tensors[0][:24].view(torch.float32), torch.full((6,), 7.0))
    del parameters, parameter
    buffer.release()


def test_a_span_that_cannot_be_leased_gives_the_others_back(working_set: Residency) -> None:
    writer = working_set.lease("b", "rw")
    buffer = buffer_of(working_set)
    with pytest.raises(tiered.LeaseError):
        buffer.gather("rw")
    assert (buffer.state, buffer.leases) == (BufferState.NONE, ())
    writer.release()
    working_set.lease("a", "rw").release()
    buffer.gather("rw")
    buffer.release()
