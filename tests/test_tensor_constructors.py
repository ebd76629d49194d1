"""Tensors of tiered's own never take dtype or device from the user's defaults: each constructor names both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parents[1] / "tiered"

CONSTRUCTORS = {function.__name__ for function in _device_constructors()} | {"normal"}
LEGACY = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"}


def complaints(source: str, file: str = "file") -> Iterator[str]:
    """Yield the constructors in ``source`` that leave dtype or device to torch's defaults."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name in CONSTRUCTORS | LEGACY - {"Tensor"}:
                    yield f"{file}:{node.lineno}: from torch import {alias.name}; call it as torch.{alias.name}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called = ast.unparse(node.func)
        if called in {f"torch.{name}" for name in LEGACY}:
            yield f"{file}:{node.lineno}: {called} has torch's default dtype and device"
        if called in {f"torch.{name}" for name in CONSTRUCTORS}:
            missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
            if missing:
                yield f"{file}:{node.lineno}: {called} without {' and '.join(sorted(missing))}"


def test_constructors_name_dtype_and_device() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert not [found for file in files for found in complaints(file.read_text(), str(file.relative_to(PACKAGE)))]


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(0)",
        "torch.empty(0, dtype=torch.uint8)",
        "torch.ones(2, device='cpu')",
        "f(torch.tensor(1.0).item())",
        "torch.full((), 1, **options)",
        "torch.Tensor([1.0])",
        "from torch import arange",
    ],
)
def test_a_constructor_that_leaves_them_out_is_a_complaint(source: str) -> None:
    assert len(list(complaints(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(0, dtype=torch.uint8, device='cpu')",
        "torch.empty_like(a)",
        "a.new_empty(3)",
        "torch.frombuffer(a, dtype=torch.uint8)",
        "np.empty(3)",
        "from torch import Tensor, nn",
    ],
)
def test_what_has_no_default_or_names_both_is_none(source: str) -> None:
    assert not list(complaints(source))
