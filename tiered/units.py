"""Bytes and counts as people write them, and the integer arithmetic of alignment.

Nothing here knows about tensors, files or budgets.
"""

import math
import re

__all__ = [
    "GiB",
    "KiB",
    "MiB",
    "TiB",
    "divide_up",
    "format_bytes",
    "format_count",
    "format_short",
    "parse_bytes",
    "parse_count",
    "round_up",
]

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_BYTE_UNITS = {"": 1, "B": 1, "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB}
_BYTE_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "K": KiB, "M": MiB, "G": GiB, "T": TiB}
_COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Return the number of bytes in ``size``: an int, or text such as ``"8GiB"``, ``"1.5 GB"``, ``"512M"``.

    KiB, MiB, GiB, TiB and the bare letters are powers of 1,024; KB, MB, GB, TB powers of 1,000.
    Raises ValueError for anything else, negative sizes included.
    """
    return _parse(size, _BYTE_UNITS, 'a size such as "8GiB"')


def parse_count(count: int | str) -> int:
    """Return the number in ``count``: an int, or text such as ``"0.4B"`` or ``"10M"`` (powers of 1,000)."""
    return _parse(count, _COUNT_UNITS, 'a number such as "0.4B"')


def _parse(value: int | str, scale: dict[str, int], expected: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"expected {expected}, got the negative number {value}")
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in scale:
        raise ValueError(f"expected {expected}, got {_shown(value)}")
    number = float(match[1]) * scale[match[2].upper()]
    if math.isinf(number):
        raise ValueError(f"expected {expected}, got {_shown(value)}, which is too large to count")
    return int(number)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-8:]}"


def format_bytes(nbytes: float) -> str:
    """Return ``nbytes`` for people: ``"1.5 GiB"``, ``"512 B"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_short(nbytes: int) -> str:
    """Return a whole number of KiB, MiB or GiB as "128K" for a column of a table."""
    return format_bytes(nbytes).replace(".0 ", " ").replace(" KiB", "K").replace(" MiB", "M").replace(" GiB", "G")


def format_count(count: float) -> str:
    """Return ``count`` for people: ``"403.6 M"``, ``"1.21 B"``."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= limit:
            return f"{count / limit:.2f} {unit}" if unit in "TB" else f"{count / limit:.1f} {unit}"
    return f"{count:.0f}"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def divide_up(value: int, divisor: int) -> int:
    """Return ``value / divisor`` rounded up."""
    return -(-value // divisor)
