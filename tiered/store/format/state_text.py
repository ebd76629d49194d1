"""The state that a commit carries, as JSON text: lossless, without pickle; other types are refused.

None, booleans, strings, finite floats, ints, lists and dicts with string keys are themselves in JSON. All else is an
object with one key that begins with "$", a tag: see ``_ENCODERS`` and ``_DECODERS``. Decoding builds only these types;
it never imports, calls or looks up anything by a name from the text, but dtypes in a fixed table.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from tiered.bytes.host_tensor import address_of
from tiered.errors import CorruptionError

__all__ = ["decode", "encode"]

_MAX_DEPTH = 50  # deeper is taken for a value that contains itself; decoding takes up to 8 frames for a level
_PLAIN_INT = 1 << 63  # larger ones are tagged: JSON readers, and int() on long digits, have limits
_DOUBLE = struct.Struct(">d")
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
_UNREADABLE = re.compile(r"q(u?)int.*|u?int[1-7]")  # quantised, and those without a way to copy their bytes

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def encode(value: object, *, name: str = "state") -> str:
    """Return ``value`` as JSON text from which ``decode`` makes an equal value of the same types.

    None, bool, int, float, complex, str, bytes, bytearray; list, tuple, set, frozenset, dict, OrderedDict (with the
    ``_metadata`` of a module's state_dict), Counter; torch tensors (strided ones; they come back on the CPU, without
    requires_grad), torch.Size, dtype and device; numpy arrays and scalars of numbers and booleans. Exact types only.
    Raises TypeError for anything else; the message says where in the value, which it calls ``name``.
    """
    try:
        (plain,) = _encode_all([value], lambda index: name, 0)
    except _RefusedValue as refused:
        raise TypeError(f"{''.join(reversed(refused.places))[:1000]}: {refused.reason}") from None
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def decode(text: str) -> Any:
    """Return the value that ``encode`` was given. Raises CorruptionError for any other text."""
    try:
        return _decode(json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, struct.error) as error:
        raise CorruptionError(
            f"the committed state cannot be decoded: {error!r}. It was written by a newer tiered, or is damaged"
        ) from error


# -- encoding ----------------------------------------------------------------------------------------------------------


class _RefusedValue(Exception):
    """A value that cannot be encoded has a ``reason`` and ``places`` that lead there, the innermost first."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.places: list[str] = []


def _encode_all(values: Iterable[Any], place: Callable[[int], str], depth: int) -> list[object]:
    """Return ``values`` as json can write them; ``place(index)`` says where one of them is. A call per container."""
    encoded: list[object] = []
    for item in values:
        kind = type(item)
        if (
            item is None
            or kind is bool
            or (kind is str and item.isascii())
            or (kind is int and -_PLAIN_INT <= item < _PLAIN_INT)
            or (kind is float and math.isfinite(item))
        ):
            encoded.append(item)
            continue
        try:
            if depth > _MAX_DEPTH:
                raise _RefusedValue(f"more than {_MAX_DEPTH} levels deep, or a value that contains itself")
            if kind is list:
                encoded.append(_encode_all(item, "[{}]".format, depth + 1))
            elif (
                kind is dict
                and {*map(type, item)} <= {str}
                and "\0$" not in (names := "\0".join(("", *item)))
                and (names.isascii() or _is_text(names))
            ):
                found = _encode_all(item.values(), functools.partial(_at_key, item), depth + 1)
                encoded.append(dict(zip(item, found, strict=True)))
            else:
                encoded.append(_encode(kind, item, depth + 1))
        except _RefusedValue as refused:
            refused.places.append(place(len(encoded)))
            raise
    return encoded


def _at_key(keys: dict[Any, Any], index: int) -> str:
    return f"[{[*keys][index]!r}]"


def _encode(kind: type, value: Any, depth: int) -> object:
    if kind is str and _is_text(value):
        return value
    if kind is tuple:
        return {"$tuple": _encode_all(value, lambda index: f"[{index}]", depth)}
    if kind in (dict, Counter):
        return {"$dict" if kind is dict else "$counter": _encode_pairs(value, depth)}
    if kind in (set, frozenset):
        members = list(value)
        found = _encode_all(members, lambda index: f"{{{members[index]!r}}}", depth)
        return {f"${kind.__name__}": sorted(found, key=json.dumps)}  # in an order that depends on nothing but them
    if kind is OrderedDict:
        return {"$ordered": _encode_ordered(value, depth)}
    if isinstance(value, np.generic):
        return {"$scalar": _encode_array(np.asarray(value))}
    tag, encoder = _ENCODERS.get(kind, ("", None))
    if encoder is None:
        raise _RefusedValue(
            f"a value of type {kind.__module__}.{kind.__qualname__} cannot be kept in a commit; expected numbers,"
            " text, bytes, tensors, or lists, tuples, sets and dicts of them"
        )
    return {tag: encoder(value)}


def _encode_pairs(value: dict[Any, Any], depth: int) -> list[object]:
    keys = list(value)
    names = _encode_all(keys, lambda index: f", key {keys[index]!r}", depth)
    items = _encode_all(value.values(), functools.partial(_at_key, value), depth)
    return [list(pair) for pair in zip(names, items, strict=True)]


def _encode_ordered(value: OrderedDict[Any, Any], depth: int) -> list[object]:
    """Return the pairs, and the ``_metadata`` where there is one."""
    attributes = dict(vars(value))
    metadata = attributes.pop("_metadata", None)
    if attributes:
        raise _RefusedValue(f"an OrderedDict with attributes {sorted(attributes)} cannot be kept in a commit")
    pairs = _encode_pairs(value, depth)
    return [pairs] if metadata is None else [pairs, *_encode_all([metadata], lambda index: "._metadata", depth)]


def _encode_tensor(value: torch.Tensor) -> list[object]:
    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_meta or _UNREADABLE.fullmatch(name):
        raise _RefusedValue(f"a {value.layout} tensor of {value.dtype} on {value.device} cannot be kept")
    cpu = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = ctypes.string_at(address_of(cpu), cpu.nbytes) if cpu.nbytes else b""
    return [name, list(cpu.shape), _base64(content)]


def _encode_array(value: np.ndarray[Any, Any]) -> list[object]:
    if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
        raise _RefusedValue(f"a numpy array of {value.dtype} cannot be kept in a commit")
    return [value.dtype.str, list(value.shape), _base64(value.tobytes())]


def _hex(value: float) -> str:
    return _DOUBLE.pack(value).hex()


def _is_text(value: str) -> bool:
    """Whether JSON keeps it: a pair of lone surrogates would come back as one character."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _base64(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode("ascii")


_ENCODERS: dict[type, tuple[str, Callable[[Any], object]]] = {
    int: ("$int", lambda value: f"{value:x}"),
    float: ("$float", _hex),
    complex: ("$complex", lambda value: [_hex(value.real), _hex(value.imag)]),
    str: ("$str", lambda value: _base64(value.encode("utf-8", "surrogatepass"))),
    bytes: ("$bytes", _base64),
    bytearray: ("$bytearray", _base64),
    torch.Size: ("$size", list),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
    torch.Tensor: ("$tensor", _encode_tensor),
    np.ndarray: ("$ndarray", _encode_array),
}
"""Types that hold no other values: the tag, and the function that writes it."""


# -- decoding ----------------------------------------------------------------------------------------------------------


def _decode(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_decode(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    tag = next(iter(plain), "")
    if not tag.startswith("$"):
        return {key: _decode(item) for key, item in plain.items()}
    if len(plain) != 1 or tag not in _DECODERS:
        raise ValueError(f"unknown tag {tag!r}")
    return _DECODERS[tag](plain[tag])


def _decode_items(items: Any) -> list[Any]:
    if not isinstance(items, list):
        raise ValueError(f"expected a list, got {type(items).__name__}")
    return [_decode(item) for item in items]


def _decode_pairs(pairs: Any) -> dict[Any, Any]:
    return dict(_decode_items(pairs))


def _decode_ordered(value: Any) -> OrderedDict[Any, Any]:
    pairs, *metadata = value
    ordered = OrderedDict(_decode_pairs(pairs))
    if metadata:
        ordered._metadata = _decode(metadata[0])  # type: ignore[attr-defined]  # where nn.Module.state_dict puts it
    return ordered


def _decode_tensor(value: Any) -> torch.Tensor:
    name, shape, text = value
    dtype, content = _DTYPES[name], _from_base64(text)
    if _UNREADABLE.fullmatch(name) or _numel(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes for a tensor of {name} and shape {shape}")
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


def _decode_array(value: Any) -> np.ndarray[Any, Any]:
    name, shape, text = value
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"a numpy array of {name!r}")
    dtype, content = np.dtype(name), _from_base64(text)
    if _numel(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes for an array of {name} and shape {shape}")
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _decode_double(text: Any) -> float:
    (value,) = _DOUBLE.unpack(bytes.fromhex(text))
    return float(value)


def _numel(shape: Any) -> int:
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a shape of {shape}")
    return math.prod(shape)


def _from_base64(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": _decode_double,
    "$complex": lambda parts: complex(*map(_decode_double, parts)),
    "$str": lambda text: _from_base64(text).decode("utf-8", "surrogatepass"),
    "$bytes": _from_base64,
    "$bytearray": lambda text: bytearray(_from_base64(text)),
    "$tuple": lambda items: tuple(_decode_items(items)),
    "$size": lambda items: torch.Size(_decode_items(items)),
    "$set": lambda items: set(_decode_items(items)),
    "$frozenset": lambda items: frozenset(_decode_items(items)),
    "$dict": _decode_pairs,
    "$ordered": _decode_ordered,
    "$counter": lambda pairs: Counter(_decode_pairs(pairs)),
    "$dtype": lambda name: _DTYPES[name],
    "$device": torch.device,
    "$tensor": _decode_tensor,
    "$ndarray": _decode_array,
    "$scalar": lambda value: _decode_array(value)[()],
}


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} in JSON")
