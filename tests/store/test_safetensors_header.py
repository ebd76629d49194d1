"""Headers of safetensors files: as the format's own library writes them, and whatever else a file may begin with."""

from __future__ import annotations

import copy
import errno
import io
import json
import math
import os
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import _TYPES, save, save_file

from tiered.bytes.device.engines import open_external
from tiered.errors import DeviceError, UsageError
from tiered.store.format.safetensors_header import _DTYPES, SafetensorsHeader, parse_header, read_header
from tiered.units import KiB

TENSORS = {
    "model.embed.weight": torch.arange(7 * 3, dtype=torch.float32).view(7, 3).bfloat16(),
    "a scalar": torch.tensor(3.5, dtype=torch.float64),
    "nothing": torch.empty(0, 4),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "ünicode \n\N{GREEK SMALL LETTER ALPHA}": torch.tensor([True, False]),
    "halves": torch.ones(2, 1, 3, dtype=torch.float16),
}


def packed(header: object, data: bytes = b"", *, text: bytes | None = None) -> bytes:
    """Return a file with ``header`` as its JSON, or ``text`` in its place."""
    text = json.dumps(header).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + data


def parsed(content: bytes) -> SafetensorsHeader:
    return parse_header(content, len(content), "/models/file")


def assert_is_read(path: Path, tensors: dict[str, torch.Tensor], header: SafetensorsHeader) -> None:
    content = path.read_bytes()
    assert header.path == str(path) and header.nbytes == 8 + int.from_bytes(content[:8], "little")
    assert header.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = header.entry(name)
        assert (f"torch.{entry.dtype}", entry.shape) == (str(tensor.dtype), tuple(tensor.shape))
        data = content[entry.offset : entry.offset + entry.nbytes]
        assert data == bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    assert_is_read(path, TENSORS, read_header(path))
    assert [entry.offset for entry in read_header(path).entries.values()] == sorted(
        entry.offset for entry in read_header(path).entries.values()
    )


def test_a_descriptor_for_direct_io_will_do(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"layer.{number}.weight": torch.full((3,), number) for number in range(2000)}
    save_file(tensors, path)
    with closing(open_external([path])) as device:
        header = read_header(device.path(0), device.descriptor(0))
        assert header.nbytes > 64 * KiB
        assert_is_read(path, tensors, header)


def test_dtypes_are_those_of_torch_and_of_the_library() -> None:
    for name, (torch_name, itemsize) in _DTYPES.items():
        dtype = getattr(torch, torch_name)
        assert dtype.itemsize == itemsize and _TYPES.get(name, dtype) == dtype
    assert set(_TYPES) <= set(_DTYPES)
    for torch_name, _ in _DTYPES.values():
        tensor = torch.zeros(16, dtype=torch.uint8).view(getattr(torch, torch_name))
        assert parsed(save({"x": tensor})).entry("x").dtype == torch_name


def test_an_unknown_dtype_is_kept_and_refused_when_it_is_used() -> None:
    header = parsed(
        packed(
            {
                "packed": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]},
                "weight": {"dtype": "F32", "shape": [1], "data_offsets": [6, 10]},
            },
            bytes(10),
        )
    )
    assert header.entry("weight").nbytes == 4
    assert header.entries["packed"].dtype == "F6_E2M3" and not header.entries["packed"].is_known
    with pytest.raises(UsageError, match=r"/models/file: 'packed' has the dtype 'F6_E2M3', which torch lacks: convert"):
        header.entry("packed")
    with pytest.raises(UsageError, match=r"/models/file has no tensor 'weigth'; did you mean 'weight'\?"):
        header.entry("weigth")
    with pytest.raises(UsageError, match=r"has no tensor 'zzz'; it has 2 tensors"):
        header.entry("zzz")


@pytest.mark.parametrize("shape", [(4, 8), (3,), (2, 0, 5), (0,)])
def test_halves_of_bytes_are_read_as_the_library_reads_them(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {"packed": torch.arange(math.prod(shape)).to(torch.uint8).view(shape).view(torch.float4_e2m1fn_x2)}
    save_file(tensors, tmp_path / "file")
    assert_is_read(tmp_path / "file", tensors, read_header(tmp_path / "file"))


def test_halves_of_bytes_that_torch_has_no_shape_for_are_refused() -> None:
    header = parsed(packed({"x": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, bytes(3)))
    with pytest.raises(UsageError, match=r"'x' has the dtype 'F4 of an odd last dimension', which torch lacks"):
        header.entry("x")


GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [5], "data_offsets": [24, 29]},
}
DATA = bytes(29)


def with_b(**fields: object) -> bytes:
    header: dict[str, dict[str, Any]] = copy.deepcopy(GOOD)  # type: ignore[arg-type]
    header["b"] |= fields
    return packed({name: {key: v for key, v in entry.items() if v is not ...} for name, entry in header.items()}, DATA)


BROKEN: dict[str, tuple[bytes, str]] = {
    "too short": (b"1234567", "has 7 bytes, too few for the length of a header"),
    "header larger than 100 MB": ((10**8 + 1).to_bytes(8, "little"), "its header would have 100000001 bytes"),
    "header larger than the file": ((100).to_bytes(8, "little") + b"{}", "100 bytes, and the file has 10"),
    "no header": (packed({}, text=b""), "begins with b'', and not with b'{'"),
    "a space first": (packed({}, text=b" {}"), "begins with b' ', and not"),
    "a list": (packed([]), "begins with b'\\['"),
    "no JSON": (packed({}, text=b'{"a": }'), "is no JSON: Expecting value"),
    "two objects": (packed({}, text=b"{}{}"), "is no JSON: Extra data"),
    "no UTF-8": (packed({}, text=b'{"\xff": 1}'), "is no JSON: 'utf-8' codec"),
    "nested deeply": (packed({}, text=b'{"a":' + b"[" * 10**6), "nested too deeply|is no JSON"),
    "no number": (with_b(shape=[float("nan")]), "is no JSON: NaN is no number"),
    "a number of 5000 digits": (packed({}, text=b'{"a":' + b"9" * 5000 + b"}"), "is no JSON: Exceeds the limit"),
    "a name twice": (packed({}, text=b'{"a": 1, "a": 1}'), "names 'a' twice"),
    "a name that is no text": (packed({}, text=b'{"\\ud800": 1}'), r"the name '\\ud800' is no text"),
    "no object": (packed({"a": 1}), "'a' must have one dtype, shape and data_offsets"),
    "a shape twice": (packed({}, text=b'{"a":{"dtype":"U8","shape":[],"shape":[]}}'), "names 'shape' twice"),
    "no dtype": (with_b(dtype=...), "'b' must have one dtype"),
    "a dtype of no text": (with_b(dtype=5), "'b' must have one dtype"),
    "no shape": (with_b(shape=...), "'b' must have a shape of counts"),
    "a shape of less than nothing": (with_b(shape=[-5]), "'b' must have a shape of counts"),
    "a shape of fractions": (with_b(shape=[5.0]), "'b' must have a shape of counts"),
    "a shape of truths": (with_b(shape=[True]), "'b' must have a shape of counts"),
    "no offsets": (with_b(data_offsets=...), "data_offsets from a start to an end"),
    "three offsets": (with_b(data_offsets=[24, 29, 29]), "data_offsets from a start to an end"),
    "offsets backwards": (with_b(data_offsets=[29, 24]), "data_offsets from a start to an end"),
    "a size that does not fit": (with_b(shape=[6]), "'b' has 5 bytes, which are not those of U8 and its shape"),
    "a size that no file has": (with_b(shape=[2**62] * 1000), "'b' has 5 bytes, which are not those of U8"),
    "a shape without end": (with_b(shape=[1] * 1001), "'b' must have a shape of counts"),
    "a gap": (with_b(data_offsets=[25, 30]), "'b' begins at byte .* and comes after a gap, which ends at"),
    "an overlap": (with_b(data_offsets=[23, 28]), "'b' begins at byte .* and overlaps the tensor before it"),
    "too few bytes": (packed(GOOD, DATA[1:]), "its tensors end at byte .*, and it has"),
    "too many bytes": (packed(GOOD, DATA + b"x"), "its tensors end at byte .*, and it has"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named_with_the_file(tmp_path: Path, rule: str) -> None:
    content, message = BROKEN[rule]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"^{path} is no sound safetensors file: .*({message})") as caught:
        read_header(path)
    assert len(str(caught.value)) < 1000
    is_let_pass = is_read(deserialize, content, SafetensorError)
    assert is_let_pass == (rule == "a space first")  # which the format forbids and its library allows


def pickled() -> bytes:
    torch.save({"weight": torch.ones(2)}, file := io.BytesIO())
    return file.getvalue()


def zipped() -> bytes:
    np.savez(file := io.BytesIO(), weight=np.ones(2))
    return file.getvalue()


KINDS: dict[str, tuple[bytes, str]] = {
    "a pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32,
        "Git LFS: run `git lfs pull`",
    ),
    "torch.save": (pickled(), "zip archive, .*torch.load"),
    "numpy.savez": (zipped(), "zip archive, .*torch.from_numpy"),
    "a pickle": (pickle.dumps({"weight": [1.0] * 99}), "pickle, .*torch.load"),
    "a page": (b"<!DOCTYPE html>\n<html>", "web page: download"),
    "GGUF": (b"GGUF\x03\x00\x00\x00\x10", "a GGUF file"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_named_with_the_way_on(tmp_path: Path, kind: str) -> None:
    content, message = KINDS[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"^{path} is no safetensors file but .*{message}"):
        read_header(path)


def test_a_hostile_name_does_not_flood_a_message() -> None:
    with pytest.raises(UsageError) as caught:
        parsed(packed({"\x1b[2J" * 10**5: 1}))
    assert len(str(caught.value)) < 400 and "\x1b" not in str(caught.value)


def test_a_header_that_the_file_is_cut_off_in_is_refused() -> None:
    content = packed(GOOD, DATA)
    with pytest.raises(UsageError, match="within its header"):
        parse_header(content[:20], len(content), "/models/file")


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"absent is missing: get it again"):
        read_header(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"is a directory: name the files in it"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match=r"fifo is no regular file"):
        read_header(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match=r"empty is no sound safetensors file: it has 0 bytes"):
        read_header(tmp_path / "empty")

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DeviceError, match=r"cannot read the header of .*empty: .*; see the kernel log"):
        read_header(tmp_path / "empty")


def is_read(read: Callable[[bytes], object], content: bytes, error: type[Exception]) -> bool:
    try:
        read(content)
    except error:
        return False
    return True


def assert_nothing_is_let_pass(content: bytes) -> None:
    """Read a file, if only for a UsageError; what is read the library reads too, but for dtypes that it lacks."""
    if is_read(parsed, content, UsageError) and all(entry.is_known for entry in parsed(content).entries.values()):
        assert is_read(deserialize, content, SafetensorError)


SOUND = save(TENSORS)
HEADER_NBYTES = 8 + int.from_bytes(SOUND[:8], "little")


@settings(max_examples=100)
@given(st.data())
def test_no_bytes_are_more_than_a_usage_error(data: st.DataObject) -> None:
    content = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, HEADER_NBYTES - 1))
        content[place : place + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"0", b"9", b'"', b"[", b"]", b"{", b"}", b",", b"-", b"e1"])
        )
    assert_nothing_is_let_pass(bytes(content))
