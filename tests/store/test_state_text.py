import json
import math
import random
import struct
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.errors import CorruptionError, UsageError
from tiered.store.format.state_text import _DECODERS, decode, encode
from tiered.store.generations.registry import Registry, committed_state

TORCH_DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]


def same(a, b):
    """Equal in type and in every bit, nan and -0.0 included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items())) and same(
            vars(a) if has_vars(a) else None, vars(b) if has_vars(b) else None
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return sorted(map(encode, a)) == sorted(map(encode, b))
    return a == b


def has_vars(value):
    return isinstance(value, OrderedDict)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def tensor_of(dtype, *shape, seed=0):
    content = random.Random(seed).randbytes(math.prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        content = bytes(b & 1 for b in content)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=6)
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text | st.binary(max_size=6),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
leaves = (
    hashable
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=5).map(bytearray)
    | st.builds(tensor_of, st.sampled_from(TORCH_DTYPES), st.integers(1, 3), st.integers(1, 3))
    | st.sampled_from(TORCH_DTYPES)
    | st.sampled_from([torch.Size([2, 3]), torch.device("cuda", 1), torch.device("cpu")])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(any_text | st.sampled_from(["$tuple", "$", "$x"]), inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@settings(max_examples=200)
@given(values)
def test_every_value_comes_back(value):
    text = encode(value)
    assert text.isascii()
    assert same(decode(text), value)
    assert encode(decode(text)) == text


@pytest.mark.parametrize(
    "bits_of_nan", ["7ff8000000000000", "fff8000000000001", "7ff0000000000000", "fff0000000000000"]
)
def test_what_is_no_finite_float_keeps_its_bits(bits_of_nan):
    (value,) = struct.unpack(">d", bytes.fromhex(bits_of_nan))
    assert struct.pack(">d", decode(encode({"x": value}))["x"]).hex() == bits_of_nan


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**6000, -(7**9000)],
    ids=lambda value: f"{value:.0e}" if abs(value) < 1e99 else "huge",
)
def test_ints_of_any_size(value):
    assert decode(encode([value])) == [value]


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape(dtype):
    for shape in ((), (0,), (3, 0, 2), (5,), (2, 3, 4)):
        tensor = tensor_of(dtype, *shape) if math.prod(shape) else torch.empty(shape, dtype=dtype)
        found = decode(encode(tensor))
        assert same(found, tensor) and not found.requires_grad


def test_tensor_views_are_kept_by_value():
    base = torch.arange(24.0).reshape(4, 6)
    for view in (base.t(), base[1:, ::2], base.expand(2, 4, 6), torch.tensor([1 + 2j]).conj(), base.requires_grad_()):
        assert torch.equal(decode(encode(view)), view.detach().resolve_conj())
    found = decode(encode([torch.zeros(3)]))[0]
    found += 1  # writable, and nobody else's
    assert torch.equal(found, torch.ones(3))


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "|b1", "<u4", "|i1", "<c16", "<f2"])
def test_numpy_arrays_and_scalars(dtype):
    for array in (np.arange(6).reshape(2, 3).astype(dtype), np.zeros((0, 2), dtype), np.array(3).astype(dtype)):
        assert same(decode(encode({"a": array}))["a"], array)
    scalar = np.dtype(dtype).type(3)
    assert same(decode(encode(scalar)), scalar)


def test_random_states():
    random.seed(1), np.random.seed(1)
    generator = np.random.default_rng(1)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), generator.bit_generator.state
    found = decode(encode(states))
    assert same(found, states)
    expected = random.random(), np.random.rand(), torch.rand(1), generator.random()
    random.setstate(found[0]), np.random.set_state(found[1]), torch.set_rng_state(found[2])
    generator.bit_generator.state = found[3]
    assert (random.random(), np.random.rand(), torch.rand(1), generator.random()) == expected


def schedulers():
    scheduler = torch.optim.lr_scheduler
    yield lambda o: scheduler.StepLR(o, 3)
    yield lambda o: scheduler.MultiStepLR(o, [2, 3])
    yield lambda o: scheduler.CosineAnnealingWarmRestarts(o, 4)
    yield lambda o: scheduler.OneCycleLR(o, 0.1, total_steps=20)
    yield lambda o: scheduler.CyclicLR(o, 0.1, 0.2, cycle_momentum=False)
    yield lambda o: scheduler.LambdaLR(o, lambda step: 0.9**step)
    yield lambda o: scheduler.SequentialLR(o, [scheduler.LinearLR(o), scheduler.ExponentialLR(o, 0.5)], [2])


@pytest.mark.parametrize("make", [*schedulers()])
def test_schedulers_and_optimizers_continue(make):
    def build():
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.9))
        return parameter, optimizer, make(optimizer)

    def steps(parameter, optimizer, scheduler):
        for _ in range(4):
            parameter.grad = parameter.detach() * 2
            optimizer.step()
            scheduler.step()
        return optimizer.param_groups[0]["lr"], parameter.detach().clone()

    one, two = build(), build()
    steps(*one)
    state = decode(encode([one[0].detach(), one[1].state_dict(), one[2].state_dict()], name="test"))
    assert same(state[1:], [one[1].state_dict(), one[2].state_dict()])
    with torch.no_grad():
        two[0].copy_(state[0])
    two[1].load_state_dict(state[1])
    two[2].load_state_dict(state[2])
    (lr_a, a), (lr_b, b) = steps(*one), steps(*two)
    assert lr_a == lr_b and torch.equal(a, b)


def test_module_state_dict_keeps_its_metadata():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    found = decode(encode(state))
    assert same(found, state) and found._metadata == state._metadata
    module.load_state_dict(found)


class Text(str):
    pass


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        int,
        Text("x"),
        Pair(1, 2),
        defaultdict(int),
        range(3),
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(2).to_sparse(),
        torch.empty(2, device="meta"),
        np.array([object()]),
        np.array(["x"]),
        np.datetime64("2024-01-01"),
        torch.Generator(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_refused_with_its_place(value):
    with pytest.raises(TypeError) as caught:
        encode({"base": [1, ({"deep": value},)]}, name="scheduler.state_dict()")
    assert str(caught.value).startswith("scheduler.state_dict()['base'][1][0]['deep']: ")


def test_refused_keys_members_and_attributes_say_where():
    for value, place in (
        ({object: 1}, "state, key <class 'object'>"),
        ({1, len}, "state{<built-in function len>}"),
        ({"a": {3: len}}, "state['a'][3]"),
    ):
        with pytest.raises(TypeError) as caught:
            encode(value)
        assert str(caught.value).startswith(place)
    ordered = OrderedDict()
    ordered.more = 1
    with pytest.raises(TypeError, match="attributes"):
        encode(ordered)


def test_a_value_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match="contains itself"):
        encode(value)


def test_deep_values_come_back():
    for wrap in (lambda v: [v], lambda v: {1: v}, lambda v: OrderedDict(a=v), lambda v: (v,)):
        value = 1
        for _ in range(49):
            value = wrap(value)
        assert same(decode(encode(value)), value)


def test_the_text_is_fixed():
    assert encode({"step": 7, "lr": 0.1, "betas": (0.9, 1)}) == '{"step":7,"lr":0.1,"betas":{"$tuple":[0.9,1]}}'
    assert encode({1: None, "a": {2, 1}}) == '{"$dict":[[1,null],["a",{"$set":[1,2]}]]}'
    assert encode(float("inf")) == '{"$float":"7ff0000000000000"}'
    assert encode(torch.tensor([1, 2], dtype=torch.int16)) == '{"$tensor":["int16",[2],"AQACAA=="]}'
    assert encode(np.array([1], "<u4")) == '{"$ndarray":["<u4",[1],"AQAAAA=="]}'
    assert encode([b"a", 2**64, 1j]) == (
        '[{"$bytes":"YQ=="},{"$int":"10000000000000000"},{"$complex":["0000000000000000","3ff0000000000000"]}]'
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "NaN",
        "[" * 100_000,
        "9" * 5000,
        '{"$unknown":1}',
        '{"$tuple":[],"x":1}',
        '{"$dict":[[[],1]]}',
        '{"$float":"00"}',
        '{"$int":"x"}',
        '{"$bytes":"?"}',
        '{"$dtype":"nn"}',
        '{"$device":"nowhere"}',
        '{"$tensor":["float32",[1000000000000],""]}',
        '{"$tensor":["float32",[-1],"AAAAAA=="]}',
        '{"$tensor":["qint8",[1],"AA=="]}',
        '{"$tensor":["os",[1],"AA=="]}',
        '{"$ndarray":["O",[1],"AAAAAAAAAAA="]}',
        '{"$ndarray":["<f4",[1000000000000],"AA=="]}',
        '{"$ordered":[]}',
    ],
)
def test_text_that_encode_never_wrote_is_corruption(text):
    with pytest.raises(CorruptionError, match="cannot be decoded"):
        decode(text)


@pytest.mark.parametrize("text", ["[]", "null", '{"state":[]}', '{"registered":3}', '{"$tuple":[]}', "[" * 100_000])
def test_a_state_that_is_none_is_corruption(text):
    with pytest.raises(CorruptionError):
        committed_state(text)


def test_a_state_that_its_object_cannot_load_is_named():
    class Picky:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            state["absent"]

    registry = Registry("{}")
    registry.add("loader", Picky())
    with pytest.raises(UsageError, match=r"a Picky cannot load .* for 'loader': KeyError\('absent'\)"):
        registry.load({"loader": {}})


plain = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.sampled_from(["float32", "AAAA", "int8"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*_DECODERS, "a"]), inner, max_size=2),
    max_leaves=10,
)


@settings(max_examples=200)
@given(plain)
def test_any_json_decodes_or_is_corruption(value):
    try:
        decode(json.dumps(value))
    except CorruptionError:
        pass
