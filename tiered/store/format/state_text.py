"""The state that a commit carries, as JSON text: lossless, without pickle; other types are refused.

None, booleans, strings, finite floats, ints, lists and dicts with string keys are themselves in JSON. All else is an
object with one key that begins with "$", a tag: see ``_Encoder`` for each. Decoding builds only these types; it never
imports, calls or looks up anything by a name from the text, but dtypes in a fixed table.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, ClassVar

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
    plain = _Encoder().encode(value, name, 0)
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def decode(text: str) -> Any:
    """Return the value that ``encode`` was given. Raises CorruptionError for any other text."""
    try:
        return _decode(json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, struct.error) as error:
        raise CorruptionError(
            f"the committed state cannot be decoded: {error!r}. It was written by a newer tiered, or is damaged"
        ) from error


class _Encoder:
    """Turns a value into one that json can write."""

    def encode(self, value: object, where: str, depth: int) -> object:
        if depth > _MAX_DEPTH:
            raise TypeError(f"{where[:200]}...: more than {_MAX_DEPTH} levels deep, or a value that contains itself")
        if _is_plain(value, depth):
            return value
        encoder = self._BY_TYPE.get(type(value))
        if encoder is not None:
            return encoder(self, value, where, depth + 1)
        if isinstance(value, np.generic):
            return {"$scalar": self._array(np.asarray(value), where)}
        raise TypeError(
            f"{where}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be kept in a commit; "
            "expected numbers, text, bytes, tensors, or lists, tuples, sets and dicts of them"
        )

    def _int(self, value: int, where: str, depth: int) -> object:
        return {"$int": f"{value:x}"}

    def _float(self, value: float, where: str, depth: int) -> object:
        return {"$float": _DOUBLE.pack(value).hex()}

    def _complex(self, value: complex, where: str, depth: int) -> object:
        return {"$complex": [_DOUBLE.pack(value.real).hex(), _DOUBLE.pack(value.imag).hex()]}

    def _str(self, value: str, where: str, depth: int) -> object:
        return value if _is_text(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}

    def _bytes(self, value: bytes, where: str, depth: int) -> object:
        return {"$bytes": _base64(value)}

    def _bytearray(self, value: bytearray, where: str, depth: int) -> object:
        return {"$bytearray": _base64(value)}

    def _list(self, values: list[object], where: str, depth: int) -> object:
        return [self.encode(item, f"{where}[{i}]", depth) for i, item in enumerate(values)]

    def _tuple(self, value: tuple[object, ...], where: str, depth: int) -> object:
        return {"$tuple": self.encode(list(value), where, depth - 1)}

    def _size(self, value: torch.Size, where: str, depth: int) -> object:
        return {"$size": list(value)}

    def _members(self, values: Iterable[object], where: str, depth: int) -> list[object]:
        """The members of a set, in an order that depends on nothing but them."""
        return sorted((self.encode(item, f"{where}{{{item!r}}}", depth) for item in values), key=json.dumps)

    def _set(self, value: set[object], where: str, depth: int) -> object:
        return {"$set": self._members(value, where, depth)}

    def _frozenset(self, value: frozenset[object], where: str, depth: int) -> object:
        return {"$frozenset": self._members(value, where, depth)}

    def _pairs(self, value: dict[Any, Any], where: str, depth: int) -> list[object]:
        return [
            [self.encode(key, f"{where}, key {key!r}", depth), self.encode(item, f"{where}[{key!r}]", depth)]
            for key, item in value.items()
        ]

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> object:
        for key in value:
            if type(key) is not str or key.startswith("$") or not (key.isascii() or _is_text(key)):
                return {"$dict": self._pairs(value, where, depth)}
        return {key: self.encode(item, f"{where}[{key!r}]", depth) for key, item in value.items()}

    def _ordered(self, value: OrderedDict[Any, Any], where: str, depth: int) -> object:
        attributes = dict(vars(value))
        metadata = attributes.pop("_metadata", None)
        if attributes:
            raise TypeError(f"{where}: an OrderedDict with attributes {sorted(attributes)} cannot be kept in a commit")
        pairs = self._pairs(value, where, depth)
        if metadata is None:
            return {"$ordered": [pairs]}
        return {"$ordered": [pairs, self.encode(metadata, f"{where}._metadata", depth)]}

    def _counter(self, value: Counter[Any], where: str, depth: int) -> object:
        return {"$counter": self._pairs(value, where, depth)}

    def _dtype(self, value: torch.dtype, where: str, depth: int) -> object:
        return {"$dtype": str(value).removeprefix("torch.")}

    def _device(self, value: torch.device, where: str, depth: int) -> object:
        return {"$device": str(value)}

    def _tensor(self, value: torch.Tensor, where: str, depth: int) -> object:
        name = str(value.dtype).removeprefix("torch.")
        if value.layout != torch.strided or value.is_meta or _UNREADABLE.fullmatch(name):
            raise TypeError(f"{where}: a {value.layout} tensor of {value.dtype} on {value.device} cannot be kept")
        cpu = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = ctypes.string_at(address_of(cpu), cpu.nbytes) if cpu.nbytes else b""
        return {"$tensor": [name, list(cpu.shape), _base64(content)]}

    def _array(self, value: np.ndarray[Any, Any], where: str) -> list[object]:
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise TypeError(f"{where}: a numpy array of {value.dtype} cannot be kept in a commit")
        return [value.dtype.str, list(value.shape), _base64(value.tobytes())]

    def _ndarray(self, value: np.ndarray[Any, Any], where: str, depth: int) -> object:
        return {"$ndarray": self._array(value, where)}

    _BY_TYPE: ClassVar[dict[type, Callable[[_Encoder, Any, str, int], object]]] = {
        int: _int,
        float: _float,
        complex: _complex,
        str: _str,
        bytes: _bytes,
        bytearray: _bytearray,
        list: _list,
        tuple: _tuple,
        set: _set,
        frozenset: _frozenset,
        dict: _dict,
        OrderedDict: _ordered,
        Counter: _counter,
        torch.Tensor: _tensor,
        torch.Size: _size,
        torch.dtype: _dtype,
        torch.device: _device,
        np.ndarray: _ndarray,
    }


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether JSON keeps all of ``value`` without a tag. One call looks at a whole tree of lists and dicts.

    The answer is no for text that is not ASCII, too, and for a tree that is too deep: the encoder looks at these.
    """
    waiting = [(value, depth)]
    while waiting:
        item, level = waiting.pop()
        kind = type(item)
        if level > _MAX_DEPTH:
            return False
        if kind is list:
            waiting.extend(zip(item, repeat(level + 1)))
        elif kind is dict:
            for key in item:
                if type(key) is not str or not key.isascii() or key.startswith("$"):
                    return False
            waiting.extend(zip(item.values(), repeat(level + 1)))
        elif not (
            item is None
            or kind is bool
            or (kind is str and item.isascii())
            or (kind is int and -_PLAIN_INT <= item < _PLAIN_INT)
            or (kind is float and math.isfinite(item))
        ):
            return False
    return True


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


def _decode_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    return [(key, item) for key, item in _decode_items(pairs)]


def _decode_ordered(value: Any) -> OrderedDict[Any, Any]:
    pairs, *metadata = value
    ordered = OrderedDict(_decode_pairs(pairs))
    if metadata:
        ordered._metadata = _decode(metadata[0])  # type: ignore[attr-defined]  # where nn.Module.state_dict puts it
    return ordered


def _decode_counter(pairs: Any) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    counter.update(dict(_decode_pairs(pairs)))
    return counter


def _decode_dtype(name: Any) -> torch.dtype:
    return _DTYPES[name]


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


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": _decode_double,
    "$complex": lambda parts: complex(*map(_decode_double, parts)),
    "$str": lambda text: _from_base64(text).decode("utf-8", "surrogatepass"),
    "$bytes": lambda text: _from_base64(text),
    "$bytearray": lambda text: bytearray(_from_base64(text)),
    "$tuple": lambda items: tuple(_decode_items(items)),
    "$size": lambda items: torch.Size(_decode_items(items)),
    "$set": lambda items: set(_decode_items(items)),
    "$frozenset": lambda items: frozenset(_decode_items(items)),
    "$dict": lambda pairs: dict(_decode_pairs(pairs)),
    "$ordered": _decode_ordered,
    "$counter": _decode_counter,
    "$dtype": _decode_dtype,
    "$device": lambda text: torch.device(text),
    "$tensor": _decode_tensor,
    "$ndarray": _decode_array,
    "$scalar": lambda value: _decode_array(value)[()],
}


def _is_text(value: str) -> bool:
    """Whether JSON keeps it: a pair of lone surrogates would come back as one character."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _base64(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode("ascii")


def _from_base64(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} in JSON")
