"""One word, one meaning; and the few things that no file of the package may contain."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tiered").rglob("*.py"))

INSTEAD = {  # the word not to say in a name of ours: the word to say
    "backend": "device",
    "cached": "resident or held",
    "chunk": "extent, bucket or tile",
    "epoch": "generation",
    "fetch": "swap in",
    "handler": "a noun for what it is",
    "helper": "a noun for what it is",
    "impl": "a noun for what it is",
    "iteration": "step",
    "manager": "store, or a noun for what it is",
    "misc": "a noun for what it is",
    "offload": "swap out",
    "pool": "arena",
    "preload": "prefetch",
    "region": "extent",
    "save": "commit",
    "spill": "swap out",
    "staging": "buffer",
    "swapper": "store",
    "sync": "commit or flush",
    "upload": "copy in",
    "util": "a noun for what it is",
    "utils": "a noun for what it is",
}

INSTEAD |= {  # names that needed a legend: the word that needs none
    "bed": "scratch file",
    "card": "description",
    "deaths": "end",
    "dropping": "finalizer",
    "endings": "exit and fork",
    "estate": "resources",
    "finisher": "producer",
    "finishers": "producers",
    "foresight": "schedule or counts",
    "inventory": "leftovers",
    "outlet": "lasting stream",
    "reentry": "nested call",
    "simulated": "memory",
}

IN_ZERO_ALONE = {  # words that mean something there, and were the names of other things elsewhere: what to say there
    "lane": "queue or direction",
    "lanes": "queues or directions",
}

WHOLE_NAMES = {  # of classes and files: ordinary words that say too little alone
    "found": "existing run",
    "inside": "critical section",
    "job": "a noun for what it does",
    "need": "lease needs",
    "origin": "resources",
    "report": "the report of what",
    "sample": "the rate of what",
    "settings": "the settings of what",
    "source": "the source of what",
    "together": "all directories",
    "turns": "switch interval",
}

FILES_SO_CALLED = {"report", "settings"}  # in a room that says of what

EXCEPTIONS = {  # words of torch's and transformers' users, or of a method that is overridden
    ("checkpoint_shards.py", "chunk"),
    ("resumable.py", "epoch"),
    ("saving.py", "save"),
    ("trainer.py", "epoch"),
    ("trainer.py", "save"),
}

TIRING = re.compile(r"(?:^|[.:;] )(What|Who|Whose|Whoever|Whatever|Nobody|Somebody) |\bof (which|whom)\b|\blest\b")
"""Sentences of docstrings and comments that begin so, or hang on such a word: say subject, verb, noun."""

FORBIDDEN = {
    r"\bpickle\b(?! of|, as)": "no pickle",
    r"\btorch\.(load|save)\b(?!\(FILE| and | writes)": "torch.load and torch.save pickle",
    r"\bdef __del__\b": "lifetimes end in close() or weakref.finalize",
    r"\bdaemon\s*=\s*True\b": "threads end in close()",
}


@cache
def parsed(file: Path) -> ast.Module:
    """Return the tree of ``file``, which nobody changes."""
    return ast.parse(file.read_text())


def place(file: Path, line: int = 1) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that ``tree`` gives to things, with their lines: not those it only uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words(name: str) -> list[str]:
    """Return the words of ``swap_in``, ``SwapIn`` or ``SWAP_IN``, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def prose(source: str) -> Iterator[tuple[str, int]]:
    """Yield the docstrings and the comments of ``source``, with the lines that they begin in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split()), node.lineno
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# "), token.start[0]


def code(source: str) -> str:
    """Return ``source`` without comments and docstrings, where saying "no pickle" is allowed."""
    return ast.unparse(_without_docstrings(ast.parse(source)))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(None)
    return tree


def test_words_are_found_in_every_spelling() -> None:
    assert [words(name) for name in ("swap_in", "SwapIn", "SWAP_IN", "_ODirect")] == [
        ["swap", "in"],
        ["swap", "in"],
        ["swap", "in"],
        ["o", "direct"],
    ]


def test_names_use_the_words_of_the_house() -> None:
    found = [
        f"{place(file, line)}: {name} says {word!r}; say {INSTEAD[word]}"
        for file in FILES
        for name, line in names(parsed(file))
        for word in words(name)
        if word in INSTEAD and (file.name, word) not in EXCEPTIONS
    ]
    found += [
        f"{place(file)}: the file says {word!r}; say {INSTEAD[word]}"
        for file in FILES
        for word in words(file.stem)
        if word in INSTEAD
    ]
    assert not found


def test_names_need_no_legend() -> None:
    found = []
    for file in [file for file in FILES if "zero" not in file.parts]:
        tree = parsed(file)
        classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        found += [
            f"{place(file)}: class {name}: say {WHOLE_NAMES[name.lower()]}"
            for name in classes
            if name.lower() in WHOLE_NAMES
        ]
        if file.stem in WHOLE_NAMES and file.stem not in FILES_SO_CALLED:
            found.append(f"{place(file)}: say {WHOLE_NAMES[file.stem]}")
        found += [
            f"{place(file, line)}: {name} says {word!r}; say {IN_ZERO_ALONE[word]}"
            for name, line in [*names(tree), (file.stem, 1)]
            for word in words(name)
            if word in IN_ZERO_ALONE
        ]
    assert not found


def test_sentences_have_a_subject() -> None:
    found = [
        f"{place(file, line)}: ...{text[max(0, match.start() - 20) : match.end() + 40]}..."
        for file in FILES
        for text, line in prose(file.read_text())
        if (match := TIRING.search(text))
    ]
    assert not found


@pytest.mark.parametrize(
    "text", ["# Who waits", '"""Read. What is there stays."""', "# keys, of which one", "# lest it"]
)
def test_tiring_sentences_are_seen(text: str) -> None:
    assert [text for text, _ in prose(text) if TIRING.search(text)]


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_nothing_forbidden_is_used() -> None:
    texts = {file: code(file.read_text()) for file in FILES}
    assert not [
        f"{place(file)}: {reason}"
        for file, text in texts.items()
        for pattern, reason in FORBIDDEN.items()
        if re.search(pattern, text)
    ]


@pytest.mark.parametrize("text", ["import pickle", "torch.load(f)", "class A:\n def __del__(self): pass"])
def test_forbidden_things_are_seen(text: str) -> None:
    assert any(re.search(pattern, code(text)) for pattern in FORBIDDEN)


def test_module_docstrings_are_short_and_exports_sorted() -> None:
    found = []
    for file in FILES:
        tree = parsed(file)
        docstring = ast.get_docstring(tree) or ""
        if not docstring:
            found.append(f"{place(file)} does not say what lives in it")
        if len(docstring.splitlines()) > 10 and file.name != "catalog.py":  # format and crash argument, on one screen
            found.append(f"{place(file)} has a docstring of more than ten lines")
        exports = [node.value for node in tree.body if isinstance(node, ast.Assign) and _assigns(node, "__all__")]
        if not exports and file.name != "__init__.py":
            found.append(f"{place(file)} has no __all__")
        for listed in map(ast.literal_eval, exports):
            if listed != sorted(set(listed), key=_isort_order):
                found.append(f"{place(file)} has an __all__ that is not sorted")
    assert not found


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _isort_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as the linter sorts exports."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)
