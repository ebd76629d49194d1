"""Mutants of the device tier: each is one method without one of its waits, or with it in the wrong place.

They are found in the source by name, so that a new place must be shown to be needed as well.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tiered

__all__ = ["MODULES", "Mutant", "found"]

MODULES = ("device_memory", "copies", "accelerator", "compute_tier")
_ROOT = Path(tiered.__file__).parent / "tiers"
_ORDERING = (
    "wait_event", "record_stream", "use", "let_use", "use_on", "let_wait", "begin_filling", "rest", "hand_over",
    "settle", "settle_all", "_wait", "filled",
)  # fmt: skip
_STREAMS_FORGOTTEN = "self._streams.clear()"  # those that have waited for what lay in a buffer before

Change = Callable[[ast.FunctionDef, int], int]
"""Changes a method, in place, at the place of a number; -1: nowhere. Returns how many places there are."""


class Mutant(NamedTuple):
    """One method of the tier, changed in one place."""

    module: str
    cls: str
    method: str
    kind: str
    number: int  # of the place, among those of its kind in the method

    def __str__(self) -> str:
        return f"{self.cls}.{self.method}-{self.kind}-{self.number}"

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the method run as changed."""
        module = importlib.import_module(f"tiered.tiers.{self.module}")
        method = _methods(self.module)[self.cls, self.method]
        _KINDS[self.kind](method, self.number)
        source = "from __future__ import annotations\n" + ast.unparse(ast.fix_missing_locations(method))
        made: dict[str, Any] = {}
        exec(source, vars(module), made)  # the source of this package
        monkeypatch.setattr(getattr(module, self.cls), self.method, made[self.method])


def found() -> Iterator[Mutant]:
    """Yield all mutants of the tier."""
    for module in MODULES:
        for (cls, name), method in _methods(module).items():
            for kind, change in _KINDS.items():
                num = change(method, -1)
                yield from (Mutant(module, cls, name, kind, number) for number in range(num))


def _methods(module: str) -> dict[tuple[str, str], ast.FunctionDef]:
    tree = ast.parse((_ROOT / f"{module}.py").read_text())
    return {
        (cls.name, method.name): method
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
    }


def _called(node: ast.AST) -> str:
    """Return the name of the method that ``node`` calls, or ""."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    return ""


def _blocks(method: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(method):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, field, None), list):
                yield block


def _statements(method: ast.FunctionDef, is_one: Callable[[ast.stmt], bool]) -> list[tuple[list[ast.stmt], int]]:
    return [(block, at) for block in _blocks(method) for at, statement in enumerate(block) if is_one(statement)]


def _is_ordering(node: ast.stmt) -> bool:
    is_call = isinstance(node, ast.Expr) and _called(node.value) in _ORDERING
    return is_call or ast.unparse(node) == _STREAMS_FORGOTTEN


def _left_out(method: ast.FunctionDef, number: int) -> int:
    """Leave an ordering call out."""
    places = _statements(method, _is_ordering)
    if number >= 0:
        block, at = places[number]
        arguments = block[at].value.args  # type: ignore[attr-defined]
        block[at] = ast.Expr(ast.Tuple(arguments, ast.Load()))
    return len(places)


def _on_no_stream(method: ast.FunctionDef, number: int) -> int:
    """Have a block run on the stream that is current."""
    places = _statements(
        method, lambda node: isinstance(node, ast.With) and _called(node.items[0].context_expr) == "on_stream"
    )
    if number >= 0:
        block, at = places[number]
        block[at : at + 1] = block[at].body  # type: ignore[attr-defined]
    return len(places)


def _recorded_early(method: ast.FunctionDef, number: int) -> int:
    """Record an event before the work that it is the end of: before the block of a stream."""
    events = [node for node in ast.walk(method) if _called(node) == "record_event"]
    streams = _statements(method, lambda node: isinstance(node, ast.With) and "on_stream" in ast.unparse(node.items[0]))
    places = [event for event in events if streams and event.lineno > streams[0][0][streams[0][1]].lineno]  # type: ignore[attr-defined]
    if number >= 0:
        block, at = streams[0]
        early = ast.parse(f"early = {ast.unparse(places[number])}").body[0]
        _Replaced(places[number], ast.Name("early", ast.Load())).visit(method)
        block.insert(at, early)
    return len(places)


def _at_once(method: ast.FunctionDef, number: int) -> int:
    """Take an event for one that has come."""
    places = [node for node in ast.walk(method) if _called(node) == "query"]
    if number >= 0:
        _Replaced(places[number], ast.Constant(value=True)).visit(method)
    return len(places)


def _lease_ends_early(method: ast.FunctionDef, number: int) -> int:
    """End the lease of a copy when that is submitted."""
    places = _statements(method, lambda node: isinstance(node, ast.Expr) and _called(node.value) == "_note")
    if number >= 0:
        block, at = places[number]
        copy = block[at].value.args[0]  # type: ignore[attr-defined]
        block[at] = ast.parse(f"({ast.unparse(copy)}).lease.release()").body[0]
    return len(places)


def _half(method: ast.FunctionDef, number: int) -> int:
    """Wait for one kind of copies alone."""
    places = [node for node in ast.walk(method) if isinstance(node, ast.If) and ast.unparse(node.test) == _EITHER]
    if number >= 0:
        node = places[number // 2]
        assert isinstance(node.test, ast.BoolOp)
        node.test = node.test.values[number % 2]
    return 2 * len(places)


def _first_alone(method: ast.FunctionDef, number: int) -> int:
    """Order the first one of several alone."""
    places = [
        node for node in ast.walk(method) if isinstance(node, ast.For) and any(map(_is_ordering, _inner(node.body)))
    ]
    if number >= 0:
        places[number].iter = ast.parse(f"[*{ast.unparse(places[number].iter)}][:1]", mode="eval").body
    return len(places)


def _inner(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return ``body``, or the block of the one condition that it is."""
    return body[0].body if len(body) == 1 and isinstance(body[0], ast.If) else body


def _given_early(method: ast.FunctionDef, number: int) -> int:
    """Give a buffer back before the copy that uses it is submitted."""
    tries = [node for node in ast.walk(method) if isinstance(node, ast.Try) and _gives(node.finalbody[:1])]
    pairs = [
        (block, at)
        for block in _blocks(method)
        for at, statement in enumerate(block)
        if _gives([statement]) and at and "copies.empty(" in ast.unparse(block[at - 1])
    ]
    if 0 <= number < len(tries):
        tries[number].body, tries[number].finalbody = tries[number].finalbody, tries[number].body
    elif number >= 0:
        block, at = pairs[number - len(tries)]
        block[at - 1], block[at] = block[at], block[at - 1]
    return len(tries) + len(pairs)


def _gives(block: list[ast.stmt]) -> bool:
    return any(ast.unparse(node).startswith(("self.memory.give(", "self.release()")) for node in block)


def _source_dropped(method: ast.FunctionDef, number: int) -> int:
    """Have a copy in flight not keep its source alive."""
    places = [node for node in ast.walk(method) if _called(node) == "_Copy" and len(node.args) > 3]  # type: ignore[attr-defined]
    if number >= 0:
        places[number].args[3] = ast.Constant(value=None)  # type: ignore[attr-defined]
    return len(places)


_EITHER = "reads or copy.is_out"


class _Replaced(ast.NodeTransformer):
    """Puts another expression in the place of one."""

    def __init__(self, old: ast.AST, new: ast.expr) -> None:
        self.old, self.new = old, new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().generic_visit(node)


_KINDS: dict[str, Change] = {
    "left out": _left_out,
    "on no stream": _on_no_stream,
    "recorded early": _recorded_early,
    "at once": _at_once,
    "lease ends early": _lease_ends_early,
    "half": _half,
    "first alone": _first_alone,
    "given early": _given_early,
    "source dropped": _source_dropped,
}
