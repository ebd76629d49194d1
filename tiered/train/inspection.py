"""`tiered inspect`: the last commit of a store, in lines for people or one object for programs.

The catalog is read in one short transaction, and no tensor's bytes: it is safe beside a live writer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiered.console.page import columns, fold
from tiered.console.report_file import check_writable, write_report
from tiered.errors import UsageError
from tiered.store.format.row import Row
from tiered.store.format.state_text import encode
from tiered.store.generations.registry import committed_state
from tiered.store.lifetime.ledger import LEDGER_NAME, read_ledger
from tiered.train.committed_parameters import CommittedParameter, committed_parameters, describes_parameters
from tiered.train.existing_run import load_newest, printable
from tiered.units import format_bytes

__all__ = ["inspect_run", "inspection_lines"]

_VERSION = 1

_GROUPS = {  # of the keys of a sharded model, by their first words
    "model/parameters/": "parameters",
    "model/state/": "optimizer state",
    "model/master/": "fp32 masters, until an optimizer takes them",
    "model/": "other keys of the model",
}


class _Commit:
    """The newest generation of a store, taken apart."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = directories
        self.root, rows, self.kept = load_newest(directories)
        self.rows = sorted(rows, key=lambda row: row.name)
        self.state, self.registered = committed_state(self.root.state)

    def parameters(self) -> list[CommittedParameter]:
        """Return the parameters. Raises UsageError where none are described, or not as they are today."""
        return committed_parameters(self.registered, {row.name: row for row in self.rows}, self.root)

    def files(self, row: Row) -> list[str]:
        """Return the names of the user's own files that a record lies in; none for one in the store's."""
        return list(dict.fromkeys(self.root.external[each.file].name for each in row.ranges))


def inspect_run(directories: Sequence[Path], *, parameters: bool, json_file: Path | None) -> int:
    """Print the last commit of the store in ``directories``, with a line for each parameter if asked; return 0.

    ``json_file`` gets all of it for programs. Raises UsageError where there is no store, or no model to list.
    """
    check_writable(json_file)
    commit = _Commit(directories)
    print("\n".join(_lines(commit, parameters=parameters)))
    if json_file is not None:
        write_report(json_file, f"{json.dumps(_as_json(commit))}\n")
    return 0


def inspection_lines(directories: Sequence[Path], *, parameters: bool = False) -> list[str]:
    """Return the lines that ``inspect_run`` prints; raises as it does."""
    return list(_lines(_Commit(directories), parameters=parameters))


def _lines(commit: _Commit, *, parameters: bool) -> Iterator[str]:
    yield from _parameter_lines(commit.parameters()) if parameters else _key_lines(commit)
    for directory in commit.directories:
        yield f"{directory}: {_written(directory, commit.root.store_uuid)}"
    for line in _end_lines(commit):
        yield from fold(line, indent=2)


# -- keys ----------------------------------------------------------------------------------------------------------


def _key_lines(commit: _Commit) -> Iterator[str]:
    """Yield a line for each group of a model's keys, and one for each other key."""
    groups: dict[str, list[Row]] = {}
    others = []
    frozen = _frozen_keys(commit)
    is_model = "tiered.model" in commit.registered or "tiered.optimizer" in commit.registered
    for row in commit.rows:
        word = next((word for prefix, word in _GROUPS.items() if row.name.startswith(prefix)), "") if is_model else ""
        if not word:
            others.append(row)
            continue
        if word == "parameters" and row.name in frozen:
            word = "frozen parameters"
        groups.setdefault(f"{word}, in place" if row.ranges else word, []).append(row)
    table = [
        [word, f"{len(rows)} {'key' if len(rows) == 1 else 'keys'}", format_bytes(sum(row.nbytes for row in rows)),
         _generations(rows), _told(word, rows, commit)]
        for word, rows in groups.items()
    ]  # fmt: skip
    for line in columns(table, right=(1, 2)):
        yield from fold(line, indent=2)
    if groups:
        yield "each parameter: tiered inspect --parameters"
    table = [
        [printable(row.name), row.dtype, "x".join(map(str, row.shape)) or "scalar", f"{row.nbytes:,} B",
         f"generation {row.generation}{_whereabouts(row, commit)}"]
        for row in others
    ]  # fmt: skip
    yield from columns(table, right=(2, 3))


def _frozen_keys(commit: _Commit) -> set[str]:
    """Return the keys that hold frozen parameters alone; none where the commit's description is another version's."""
    try:
        found = commit.parameters()
    except UsageError:
        return set()
    return {each.key for each in found if not each.is_trained} - {each.key for each in found if each.is_trained}


def _generations(rows: Sequence[Row]) -> str:
    least, most = (function(row.generation for row in rows) for function in (min, max))
    return f"generation {most}" if least == most else f"generations {least} to {most}"


def _told(word: str, rows: Sequence[Row], commit: _Commit) -> str:
    """Return more about a group: the files it is read from, or the optimizer that it is the state of."""
    files = dict.fromkeys(name for row in rows for name in commit.files(row))
    if files:
        return f"in {', '.join(map(printable, files))}"
    optimizer = commit.registered.get("tiered.optimizer")
    if word == "optimizer state" and isinstance(optimizer, Mapping):
        kind, form = optimizer.get("class"), optimizer.get("state")
        return f"{printable(kind)}, {printable(form)}" if isinstance(kind, str) and isinstance(form, str) else ""
    return ""


def _whereabouts(row: Row, commit: _Commit) -> str:
    files = commit.files(row)
    return f", in {', '.join(map(printable, files))}" if files else ""


# -- parameters ----------------------------------------------------------------------------------------------------


def _parameter_lines(parameters: Sequence[CommittedParameter]) -> Iterator[str]:
    """Yield a line for each parameter, below the key that it lies in, which has one dtype."""
    rows = [("name", "shape", "state", "steps")]
    rows += [
        (printable(each.name), "x".join(map(str, each.shape)) or "scalar" if each.dtype else "-",
         format_bytes(each.state_nbytes) if each.state_nbytes else "-",
         "-" if each.steps is None else f"{each.steps:,}")
        for each in parameters
    ]  # fmt: skip
    title, *lines = _grouped(list(columns(rows, right=(1, 2, 3), indent=2)), rows)
    yield from title
    heading = ""
    for each, own in zip(parameters, lines, strict=True):
        if heading != (heading := _heading(each)):
            yield from fold(heading, indent=4)
        yield from own
    trained = sum(each.is_trained for each in parameters)
    state = format_bytes(sum(each.state_nbytes for each in parameters))
    yield (
        f"{len(parameters):,} parameters, {trained:,} trained; {format_bytes(sum(each.nbytes for each in parameters))},"
        f" and {state} of optimizer state"
    )


def _heading(each: CommittedParameter) -> str:
    dtype = f"{each.dtype}, " if each.dtype else ""
    files = f", in place in {', '.join(map(printable, each.files))}" if each.files else ""
    return f"{printable(each.key)}: {dtype}{'trained' if each.is_trained else 'frozen'}{files}"


def _grouped(lines: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield the lines of each row: two where its name has one of its own."""
    left = iter(lines)
    for row in rows:
        line = next(left)
        yield [line, next(left)] if line.strip() == row[0] else [line]


# -- the rest ------------------------------------------------------------------------------------------------------


def _end_lines(commit: _Commit) -> Iterator[str]:
    root, kept = commit.root, commit.kept
    nbytes = format_bytes(sum(row.nbytes for row in commit.rows))
    where = "1 directory" if root.num_directories == 1 else f"{root.num_directories} directories"
    yield f"{len(commit.rows)} {'key' if len(commit.rows) == 1 else 'keys'}, {nbytes}, in {where}"
    before = f"; generation {kept[1].number} is kept until the next commit" if kept[1:] else ""
    yield f"generation {root.generation}{before}"
    yield f"registered {', '.join(map(printable, commit.registered)) or 'nothing'}"
    yield f"state {_shown(commit.state)}"


def _written(directory: Path, store_uuid: bytes) -> str:
    """Return the bytes written to ``directory`` over the store's life, as its ledger has them."""
    try:
        slots = read_ledger(directory / LEDGER_NAME)
    except FileNotFoundError:
        return "has no ledger of the bytes written yet; the next that opens it to write begins one"
    except OSError as error:
        return f"its {LEDGER_NAME} cannot be read ({error.strerror})"
    own = [slot for slot in slots if slot is not None and slot.store_uuid == store_uuid]
    if not own:
        return f"its {LEDGER_NAME} of the bytes written is damaged"
    newest = max(own, key=lambda slot: slot.sequence)
    catalog = f" and {format_bytes(newest.catalog_bytes)} of catalog" if newest.catalog_bytes else ""
    return f"{format_bytes(newest.data_bytes)} of data{catalog} written since {newest.since}"


def _shown(state: dict[str, Any]) -> str:
    try:
        return json.dumps(state, default=repr)
    except (TypeError, ValueError):  # keys and numbers that JSON has not: anybody's program may commit them
        return encode(state)


def _parsed(text: str) -> object:
    """Return the value of JSON text, or the text where a number in it is too long for Python; NaN and Infinity as text.

    JSON has no such numbers, and strict readers refuse a file with them.
    """
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def _as_json(commit: _Commit) -> dict[str, object]:
    """Return the commit for programs; ``version`` changes when the meaning of anything in it does."""
    try:
        described = commit.parameters() if describes_parameters(commit.registered) else []
    except UsageError:  # another version's
        described = []
    return {
        "version": _VERSION,
        "generation": commit.root.generation,
        "kept_generations": [each.number for each in commit.kept],
        "directories": [str(directory) for directory in commit.directories],
        "keys": [
            {"name": row.name, "dtype": row.dtype, "shape": list(row.shape), "bytes": row.nbytes,
             "generation": row.generation, "files": commit.files(row)}
            for row in commit.rows
        ],
        "parameters": [
            {"name": each.name, "shape": list(each.shape), "dtype": each.dtype, "trained": each.is_trained,
             "steps": each.steps, "key": each.key, "offset": each.offset, "bytes": each.nbytes,
             "files": list(each.files), "state_keys": list(each.state_keys), "state_bytes": each.state_nbytes}
            for each in described
        ],
        "registered": list(commit.registered),
        "state": _parsed(_shown(commit.state)),
    }  # fmt: skip
