"""The plan of the house: what may import what, without circles, in files and functions of a length that can be read.

All imports count, those under TYPE_CHECKING and in functions included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = {
    "units": 0,
    "errors": 0,
    "stats": 0,
    "removed": 1,
    "cli": 6,  # where the command once was
    "bytes": 1,
    "ranks": 2,
    "store": 3,
    "tiers": 4,
    "zero": 5,
    "loader": 6,
    "interop": 6,
    "hf": 6,
    "": 6,  # the package's own __init__
    "tools": 7,
    "__main__": 8,
}
"""Imports point down; the rooms of floor 0 never import each other, those of floor 6 only what stands before."""

ORDER = {
    "bytes": ("kernel_file", "free_memory", "interrupt", "exit_and_fork", "condition", "critical_section",
              "private_file", "arena", "pinned_arena", "host_tensor", "device", "file_stream"),
    "store": ("waiting", "format", "transfers", "catalog", "space", "residency", "values", "rows", "lifetime",
              "generations", "assembly", "cache", "mapping", "store"),
    "tiers": ("trace", "schedule", "compute_tier", "device_memory", "device_clock", "copies",
              "accelerator"),
    "ranks": ("group", "comm", "watch", "comm_thread", "agreement", "ranks"),
    "zero": ("layout", "state_dict_copies", "step", "one_rank", "formats", "compute_device", "parameters",
             "torch_func_guard", "gradients", "activations", "engine", "model_state", "optimizer", "construct",
             "deferred_tensors", "weights", "shard", "unsharded", "reshard"),
    "tools": ("console", "doctor", "bench", "inspect", "train", "export", "cli"),
}  # fmt: skip
"""The rooms of each floor, files of the floor itself among them: each imports only what stands before it."""

MOST_LINES = 600  # of a file
MOST_FUNCTION_LINES = 60
FEWEST_LINES = 150  # of a file that one other imports
FREE = {
    "tiered.__main__",
    "tiered.cli",
    "tiered.tools.cli",
    "tiered.hf",
    "tiered.ranks.agreement",
    "tiered.ranks.ranks",
    "tiered.store.rows.row_sparse_adam",
}
MOST_LINES_OF = {"tiered.zero.engine": 250}  # files that are to stay smaller than others

NOT_YET: set[str] = set()
"""Complaints that are known and on their way out; one that is mended must leave this table."""

Tree = Mapping[str, str]
"""The text of each module by its full name."""


EMPTY: Tree = dict.fromkeys(
    (
        "tiered", "tiered.bytes.arena", "tiered.store.store", "tiered.tiers.trace", "tiered.ranks.comm",
        "tiered.zero.shard", "tiered.tools.cli", "tiered.interop.saving", "tiered.errors",
    ),
    "",
)  # fmt: skip


def house() -> Tree:
    tree: dict[str, str] = {}
    for file in sorted((ROOT / "tiered").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        tree[".".join(part for part in parts if part != "__init__")] = file.read_text()
    return tree


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a module, which nobody changes."""
    return ast.parse(text)


def arrows(tree: Tree) -> dict[str, set[str]]:
    """Return which modules of the tree each module imports, wherever in it."""
    found = {module: {_resolved(name, tree) for name in _names(module, text)} for module, text in tree.items()}
    return {module: names - {module} for module, names in found.items()}


def _names(module: str, text: str) -> Iterator[str]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "tiered")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: a relative import; say the full name"
            if node.module is not None and node.module.split(".")[0] == "tiered":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _resolved(name: str, tree: Tree) -> str:
    """Return the module that ``name`` is, or is a name in."""
    while name not in tree and "." in name:
        name = name.rpartition(".")[0]
    return name


def room(module: str) -> str:
    """Return the room of ``tiered.room.anything``: "" for the package itself."""
    return [*module.split("."), ""][1]


def inner_room(module: str) -> str:
    """Return the room within its floor of ``tiered.floor.room.anything``: "" for the floor's own __init__."""
    return [*module.split("."), "", ""][2]


def floor_complaints(tree: Tree) -> set[str]:
    """Return the rooms that stand on no floor, and the imports of other rooms that do not point down."""
    found = {f"tiered.{room(module)} is on no floor of the house" for module in tree if room(module) not in FLOORS}
    if found:
        return found
    places = list(FLOORS)
    for module, names in arrows(tree).items():
        for name in names:
            here, there = room(module), room(name)
            is_down = FLOORS[there] < FLOORS[here]
            is_before = FLOORS[there] == FLOORS[here] == 6 and places.index(there) < places.index(here)
            if there != here and not is_down and not is_before:
                found.add(f"{module} imports {name}, which does not stand below it")
    return found


def order_complaints(tree: Tree) -> set[str]:
    """Return the rooms without a place in the order of their floor, and the imports against that order."""
    found: set[str] = set()
    for module, names in arrows(tree).items():
        floor, here = room(module), inner_room(module)
        order = (*ORDER.get(floor, ()), "")  # the floor's own __init__ may import all of it
        if floor not in ORDER:
            continue
        if here not in order:
            found.add(f"tiered.{floor}.{here} has no place in the order of its floor")
            continue
        for there in {inner_room(name) for name in names if room(name) == floor}:
            if there in order and order.index(there) > order.index(here):
                found.add(f"tiered.{floor}: {here} imports {there}, which stands behind it")
    return found


def circle_complaints(tree: Tree) -> set[str]:
    """Return the modules that import themselves by way of others."""
    graph = arrows(tree)
    return {f"{module} is in a circle of files" for module in tree if module in _reached(module, graph)}


def _reached(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[module])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph.get(name, ())
    return found


def length_complaints(tree: Tree) -> set[str]:
    """Return the files and functions that are too long."""
    found: set[str] = set()
    for module, text in tree.items():
        most = MOST_LINES_OF.get(module, MOST_LINES)
        if len(text.splitlines()) > most:
            found.add(f"{module} has more than {most} lines")
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= MOST_FUNCTION_LINES:
                    found.add(f"{module}: {node.name} has more than {MOST_FUNCTION_LINES} lines")
    return found


def importer_complaints(tree: Tree) -> set[str]:
    """Return the files that belong into the one file that imports them; packages are free."""
    graph = arrows(tree)
    found: set[str] = set()
    for module, text in tree.items():
        num_importers = sum(module in names for names in graph.values())
        is_free = module in FREE or any(other.startswith(f"{module}.") for other in tree)
        if num_importers < 2 and len(text.splitlines()) < FEWEST_LINES and not is_free:
            found.add(f"{module} has one importer, and fewer than {FEWEST_LINES} lines")
    return found


def complaints(tree: Tree) -> set[str]:
    of_imports = floor_complaints(tree) | order_complaints(tree) | circle_complaints(tree)
    return of_imports | length_complaints(tree) | importer_complaints(tree)


def verdict(found: set[str], known: set[str]) -> str:
    """Return what is to be done about complaints that are not known, and known ones that are none any more."""
    new = [f"mend: {complaint}" for complaint in sorted(found - known)]
    return "\n".join(new + [f"mended, so take it out of NOT_YET: {complaint}" for complaint in sorted(known - found)])


def test_the_house_is_as_planned() -> None:
    found = verdict(complaints(house()), NOT_YET)
    assert not found, found


def test_known_complaints_pass_until_they_are_mended() -> None:
    assert verdict({"a"}, {"a"}) == ""
    assert verdict({"a"}, set()) == "mend: a"
    assert verdict(set(), {"a"}) == "mended, so take it out of NOT_YET: a"


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("tiered.bytes.arena", "from tiered.store.store import Store"),
        ("tiered.ranks.comm", "from tiered.tiers import trace"),
        ("tiered.store.store", "def later():\n    import tiered.zero.shard"),
        ("tiered.zero.shard", "from tiered import Store"),
        ("tiered.units", "from tiered.errors import UsageError"),
        ("tiered.interop.saving", "from tiered.tools.cli import main"),
        ("tiered", "def __getattr__(name):\n    from tiered.tools import cli"),
        ("tiered.errors", "if TYPE_CHECKING:\n    from tiered.bytes.arena import Arena"),
    ],
)
def test_imports_that_do_not_point_down_are_found(module: str, text: str) -> None:
    assert floor_complaints({**EMPTY, module: text})


def test_the_highest_floor_is_in_order() -> None:
    imports = "import tiered\nfrom tiered.interop.saving import cast"
    assert not floor_complaints({**EMPTY, "tiered.tools.cli": imports})


def test_a_room_on_no_floor_is_found() -> None:
    assert floor_complaints({"tiered.cellar.barrel": ""}) == {"tiered.cellar is on no floor of the house"}


def test_imports_against_the_order_of_a_floor_are_found() -> None:
    tree = {
        "tiered.store.waiting.deadline": "if TYPE_CHECKING:\n    from tiered.store.space import space",
        "tiered.store.space.space": "from tiered.store.format.row import Extent",
        "tiered.store.format.row": "",
        "tiered.store": "from tiered.store.space.space import Space",
        "tiered.store.cellar": "",
    }
    assert order_complaints(tree) == {
        "tiered.store: waiting imports space, which stands behind it",
        "tiered.store.cellar has no place in the order of its floor",
    }


def test_circles_of_files_are_found_and_what_hangs_on_them_is_not() -> None:
    tree = {
        "tiered.zero.a": "from tiered.zero.b import B",
        "tiered.zero.b": "if TYPE_CHECKING:\n    from tiered.zero import c",
        "tiered.zero.c": "def later():\n    import tiered.zero.a",
        "tiered.zero.above": "from tiered.zero.a import A",
        "tiered.zero.below": "",
    }
    assert circle_complaints(tree) == {f"tiered.zero.{name} is in a circle of files" for name in "abc"}


def test_files_and_functions_that_are_too_long_are_found() -> None:
    def lines(number: int) -> str:
        return "pass\n" * number

    function = "def f():\n" + "    pass\n" * (MOST_FUNCTION_LINES - 1)
    assert not length_complaints({"tiered.a": lines(MOST_LINES), "tiered.b": function})
    assert length_complaints({"tiered.a": lines(MOST_LINES + 1)}) == {"tiered.a has more than 600 lines"}
    assert length_complaints({"tiered.b": function + "    pass\n"}) == {"tiered.b: f has more than 60 lines"}
    assert length_complaints({"tiered.zero.engine": lines(251)}) == {"tiered.zero.engine has more than 250 lines"}


def test_a_file_for_one_other_is_found_unless_it_is_long() -> None:
    tree = {"tiered.zero": "", "tiered.zero.a": "from tiered.zero.b import B", "tiered.zero.b": "", "tiered.hf": ""}
    used = {**tree, "tiered.tools.cli": "import tiered.zero.a", "tiered.hf": "import tiered.zero.a, tiered.zero.b"}
    complaint = "has one importer, and fewer than 150 lines"
    assert importer_complaints(tree) == {f"tiered.zero.a {complaint}", f"tiered.zero.b {complaint}"}
    long = {**tree, "tiered.zero.a": "import tiered.zero.b\n" * FEWEST_LINES}
    assert importer_complaints(long) == {f"tiered.zero.b {complaint}"}
    assert not importer_complaints(used)


def thread_complaints(tree: Tree) -> set[str]:
    """Return the places that make a thread whose start may wait for ever, as Thread.start of the library does."""
    found: set[str] = set()
    for module, text in tree.items():
        if module == "tiered.bytes.critical_section":
            continue
        for node in ast.walk(parsed(text)):
            made = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
            if any(ast.unparse(name) in ("threading.Thread", "threading.Timer") for name in made):
                found.add(f"{module}: a thread that is no BoundedThread of tiered.bytes.critical_section")
            if isinstance(node, ast.Import) and any(alias.name == "_thread" for alias in node.names):
                found.add(f"{module} imports _thread")
            if isinstance(node, ast.ImportFrom) and node.module in ("threading", "_thread"):
                found |= {f"{module} imports {alias.name}" for alias in node.names if alias.name != "get_ident"}
    return found


def test_every_thread_is_started_within_a_deadline() -> None:
    assert not thread_complaints(house())
    for text in ("threading.Thread(target=f)", "class T(threading.Thread): ...", "from threading import Thread"):
        assert thread_complaints({"tiered.store.store": text})
