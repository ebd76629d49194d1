"""ExistingRun: the run that directories hold already, and the commands about it: `inspect`, `verify` and `gc`.

To look at a run reads the catalog in one short transaction and no tensor's bytes: it is safe beside a live writer. Only
``remove_store``, ``check`` with keys to drop and ``clean`` change anything, and only files that a store owns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import tiered
from tiered.errors import CorruptionError, UsageError
from tiered.store.catalog.catalog import GenerationName
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.root import Root
from tiered.store.format.row import Row
from tiered.store.format.state_text import encode
from tiered.store.generations.registry import committed_state
from tiered.store.lifetime.directory import (
    CATALOG_NAME,
    Directories,
    member_in,
    owned_files,
    remove_files,
    stores_of_ranks,
)
from tiered.store.lifetime.ledger import LEDGER_NAME, read_ledger
from tiered.store.lifetime.leftovers import Leftovers
from tiered.store.lifetime.lock import LOCK_NAME
from tiered.store.lifetime.rank_sets import RankSet, obsolete_in, remove_set, stores_in
from tiered.tools.console import check_writable, columns, confirm, fold, say, write_report
from tiered.units import MiB, format_bytes
from tiered.zero.layout import committed_layouts, count_in, text_in

__all__ = [
    "ExistingRun",
    "check",
    "clean",
    "find_run",
    "holds_any_file",
    "holds_store",
    "inspect_run",
    "remove_store",
]

_VERSION = 2  # of the report for programs: another one where the meaning of anything in it is another
_LONGEST_NAME = 120  # characters of a key that a line has

_IN_COMMIT = "in the commit itself"  # the key of parameters that were added after tiered.shard
_GROUPS = {  # of the keys of a sharded model, by their first words
    "model/parameters/": "parameters",
    "model/state/": "optimizer state",
    "model/master/": "fp32 masters, until an optimizer takes them",
    "model/": "other keys of the model",
}


def holds_store(directories: Sequence[Path]) -> bool:
    """Return whether any of ``directories`` holds a store that has come to a catalog, or the remains of one."""
    return any(entry.name.startswith((CATALOG_NAME, "data-")) for path in directories for entry in owned_files(path))


def holds_any_file(directories: Sequence[Path]) -> bool:
    """Return whether any of ``directories`` holds a file of a store, even of an interrupted creation."""
    return any(True for path in directories for _ in owned_files(path))


def find_run(directories: Sequence[Path]) -> ExistingRun | None:
    """Return the last commit of the store in ``directories``, None where it has not committed anything.

    Raises UsageError for anything but exactly one store, and while a writer has it open; CorruptionError for a damaged
    catalog.
    """
    if not any((path / CATALOG_NAME).exists() for path in directories):
        return None
    with closing(Directories.open(directories, "r")):
        found = ExistingRun.load(directories)
    return found if found.root.generation else None


def remove_store(directories: Sequence[Path]) -> None:
    """Remove the files of the store in ``directories`` for good; blocks.

    The writer's lock is held meanwhile. Data goes before the catalog and the identities last: the remains after a crash
    are still known as a store, and can be removed again. Raises UsageError for anything but exactly one store. That of
    one rank is removed alone.
    """
    with closing(Directories.open(directories, "a" if member_in(directories) is None else "w")) as locked:
        remove_files(locked.paths)
        for path in locked.paths:  # order: until here nobody else begins a store there
            (path / LOCK_NAME).unlink()


# -- the last commit -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommittedParameter:
    """One parameter of a committed model, by the names that programs get."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    steps: int | None  # of the optimizer; None: it has no state
    key: str  # of the store, or words where it lies in none
    offset: int = 0  # bytes from the start of the key
    bytes: int = 0
    files: tuple[str, ...] = ()  # the user's own that it is read from in place


@dataclass(frozen=True, slots=True)
class ExistingRun:
    """The last commit of a store, taken apart."""

    directories: Sequence[Path]
    root: Root
    rows: Sequence[Row]  # by name
    kept: Sequence[GenerationName]
    state: dict[str, Any]
    registered: dict[str, Any]

    @classmethod
    def load(cls, directories: Sequence[Path]) -> ExistingRun:
        """Return the newest generation of the store in ``directories``. UsageError for anything but one store."""
        homes = [path / CATALOG_NAME for path in directories if (path / CATALOG_NAME).exists()]
        if len(homes) != 1:
            where = ", ".join(map(str, directories))
            found = "none" if not homes else f"{len(homes)} of them"
            raise UsageError(
                f"no run in {where}: expected one {CATALOG_NAME} there, found {found}{_ranks(directories)}"
            )
        with closing(SqliteCatalog(homes[0], read_only=True)) as catalog:
            root, rows, kept = catalog.load_newest()
            by_name = sorted(rows, key=lambda row: row.name)
        return cls(directories, root, by_name, kept, *committed_state(root.state))

    @property
    def is_model(self) -> bool:
        """Whether the commit describes parameters: of a model, or of an optimizer alone."""
        return "tiered.model" in self.registered or "tiered.optimizer" in self.registered

    def files(self, row: Row, start: int = 0, nbytes: int | None = None) -> tuple[str, ...]:
        """Return the names of the user's own files that a record, or ``nbytes`` of it, lie in; () for the store's."""
        end = None if nbytes is None else start + nbytes
        here = [each for each in row.ranges if end is None or (each.start < end and start < each.start + each.nbytes)]
        return tuple(dict.fromkeys(self.root.external[each.file].name for each in here))

    def parameters(self) -> list[CommittedParameter]:
        """Return the parameters in the order of units and modules, by the description in the commit.

        Raises UsageError for a commit without a description, or with one that this version does not write.
        """
        if not self.is_model:
            raise UsageError("no model is committed there: expected a store that tiered.shard has moved a model into")
        try:
            return list(self._parameters())
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            text = repr(error)
            short = text if len(text) <= 100 else f"{text[:80]} ... {text[-16:]}"
            raise UsageError(
                "the description of the model in the commit is none that this version of tiered writes: open it with"
                f" the version that did ({short})"
            ) from error

    def _parameters(self) -> Iterator[CommittedParameter]:
        model, optimizer = self.registered.get("tiered.model"), self.registered.get("tiered.optimizer", {})
        steps = {text_in(name): count_in(number) for name, number in optimizer.get("steps", {}).items()}
        if model is None:  # plain parameters: their bytes are the program's own
            for name, number in steps.items():
                yield CommittedParameter(name, (), "", True, number, "not in the store")
            return
        rows = {row.name: row for row in self.rows}
        for _, layout in committed_layouts(model):
            for spec, place in zip(layout.specs, layout.places, strict=True):
                key = layout.spans[place.span].key
                files = self.files(rows[key], place.offset, spec.nbytes) if key in rows else ()
                yield CommittedParameter(
                    spec.name, spec.shape, _shown_dtype(spec.dtype), spec.trainable, steps.get(spec.name), key,
                    place.offset, spec.nbytes, files,
                )  # fmt: skip
        for name, tensor in model.get("added", {}).items():
            yield CommittedParameter(
                text_in(name), tuple(tensor.shape), _shown_dtype(tensor.dtype), tensor.requires_grad, steps.get(name),
                _IN_COMMIT, 0, tensor.nbytes,
            )  # fmt: skip


def _shown_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_member(directories: Sequence[Path]) -> str:
    """Return the words for a store of one rank of several, "" for another."""
    member = member_in(directories)
    return "" if member is None else f", the store of {member}"


def _ranks(directories: Sequence[Path]) -> str:
    """Return the words for the stores of ranks in ``directories``, to be looked at one by one; "" for none."""
    found = [each for directory in directories for each in stores_of_ranks(directory)]
    return f"; {len(found)} stores of ranks lie there: give the directory of one, such as {found[0]}" if found else ""


# -- inspect -------------------------------------------------------------------------------------------------------


def inspect_run(directories: Sequence[Path], *, parameters: bool, json_file: Path | None) -> int:
    """Print the last commit of the store in ``directories``, with a line for each parameter if asked; return 0.

    Over ranks it is that of each rank. ``json_file`` gets all of it for programs. Raises UsageError where there is no
    store, or no model to list.
    """
    check_writable(json_file)
    runs = [ExistingRun.load(each) for each in stores_in(directories)]
    for run in runs:
        print("\n".join(_lines(run, parameters=parameters)))
    if json_file is not None:
        report = _as_json(runs[0]) if len(runs) == 1 else {"version": _VERSION, "ranks": [*map(_as_json, runs)]}
        write_report(json_file, f"{json.dumps(report)}\n")
    return 0


def _lines(run: ExistingRun, *, parameters: bool) -> Iterator[str]:
    yield from _parameter_lines(run.parameters()) if parameters else _key_lines(run)
    for directory in run.directories:
        yield f"{directory}: {_written(directory, run.root.store_uuid)}"
    nbytes, num = format_bytes(sum(row.nbytes for row in run.rows)), run.root.num_directories
    before = f"; generation {run.kept[1].number} is kept until the next commit" if run.kept[1:] else ""
    for line in (
        f"{_counted(len(run.rows))}, {nbytes}, in {num} {'directory' if num == 1 else 'directories'}",
        f"generation {run.root.generation}{before}{_of_member(run.directories)}",
        f"registered {', '.join(map(_printable, run.registered)) or 'nothing'}",
        f"state {_shown(run.state)}",
    ):
        yield from fold(line, indent=2)


def _key_lines(run: ExistingRun) -> Iterator[str]:
    """Yield a line for each group of a model's keys, and one for each other key."""
    groups: dict[str, list[Row]] = {}
    others = []
    described = _described(run)
    frozen = {each.key for each in described if not each.trained} - {each.key for each in described if each.trained}
    for row in run.rows:
        word = next((word for prefix, word in _GROUPS.items() if run.is_model and row.name.startswith(prefix)), "")
        if word:
            word = "frozen parameters" if word == "parameters" and row.name in frozen else word
            groups.setdefault(f"{word}, in place" if row.ranges else word, []).append(row)
        else:
            files = _listed_files(run, row)
            others.append(
                [row.dtype, "x".join(map(str, row.shape)) or "scalar", f"{row.nbytes:,} B",
                 f"generation {row.generation}", f"{_printable(row.name)}{files and f', {files}'}"]
            )  # fmt: skip
    table = [
        [word, _counted(len(rows)), format_bytes(sum(row.nbytes for row in rows)), _generations(rows),
         _listed_files(run, *rows) or (_optimizer(run) if word == "optimizer state" else "")]
        for word, rows in groups.items()
    ]  # fmt: skip
    beside = [each for each in described if each.key == _IN_COMMIT]
    if beside:
        nbytes = format_bytes(sum(each.bytes for each in beside))
        table.append(["added after tiered.shard", f"{len(beside)} parameters", nbytes, "", _IN_COMMIT])
    for line in columns(table, right=(1, 2)):
        yield from fold(line, indent=2)
    if groups:
        yield "each parameter: tiered inspect --parameters"
    yield from columns(others, right=(1, 2))


def _described(run: ExistingRun) -> list[CommittedParameter]:
    """Return the parameters; [] where the commit describes none, or as another version does."""
    try:
        return run.parameters()
    except UsageError:
        return []


def _generations(rows: Sequence[Row]) -> str:
    least, most = (function(row.generation for row in rows) for function in (min, max))
    return f"generation {most}" if least == most else f"generations {least} to {most}"


def _counted(num_keys: int) -> str:
    return f"{num_keys} {'key' if num_keys == 1 else 'keys'}"


def _listed_files(run: ExistingRun, *rows: Row) -> str:
    """Return the user's own files that ``rows`` are read from, "" for none."""
    files = dict.fromkeys(name for row in rows for name in run.files(row))
    return f"in {', '.join(map(_printable, files))}" if files else ""


def _optimizer(run: ExistingRun) -> str:
    """Return the optimizer whose state is committed, and its format."""
    optimizer = run.registered.get("tiered.optimizer")
    words: list[Any] = [None]
    if isinstance(optimizer, Mapping):
        words = [optimizer.get(name) for name in ("class", "state")]
    return ", ".join(map(_printable, words)) if all(isinstance(word, str) for word in words) else ""


def _parameter_lines(parameters: Sequence[CommittedParameter]) -> Iterator[str]:
    """Yield a line for each parameter, below the key that it lies in, which has one dtype."""
    lines = columns(
        [("shape", "steps", "name"),
         *(("x".join(map(str, each.shape)) or "scalar" if each.dtype else "-",
            "-" if each.steps is None else f"{each.steps:,}", _printable(each.name)) for each in parameters)],
        right=(0, 1), indent=2,
    )  # fmt: skip
    yield next(lines)
    heading = ""
    for each, line in zip(parameters, lines, strict=True):
        if heading != (heading := _heading(each)):
            yield from fold(heading, indent=4)
        yield line
    trained = sum(each.trained for each in parameters)
    yield f"{len(parameters):,} parameters, {trained:,} trained; {format_bytes(sum(each.bytes for each in parameters))}"


def _heading(each: CommittedParameter) -> str:
    dtype = f"{each.dtype}, " if each.dtype else ""
    files = f", in place in {', '.join(map(_printable, each.files))}" if each.files else ""
    return f"{_printable(each.key)}: {dtype}{'trained' if each.trained else 'frozen'}{files}"


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


def _printable(name: str) -> str:
    """Return a key as a terminal may have it: it may be anybody's, and hold any character."""
    shown = name if name.isprintable() and name else ascii(name)
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 3]}..."


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


def _as_json(run: ExistingRun) -> dict[str, object]:
    """Return the commit for programs."""
    return {
        "version": _VERSION,
        "generation": run.root.generation,
        "kept_generations": [each.number for each in run.kept],
        "directories": [str(directory) for directory in run.directories],
        "rank": None if (member := member_in(run.directories)) is None else [member.rank, member.world],
        "keys": [
            {"name": row.name, "dtype": row.dtype, "shape": list(row.shape), "bytes": row.nbytes,
             "generation": row.generation, "files": run.files(row)}
            for row in run.rows
        ],
        "parameters": [asdict(each) for each in _described(run)],
        "registered": list(run.registered),
        "state": _parsed(_shown(run.state)),
    }  # fmt: skip


# -- verify and gc -------------------------------------------------------------------------------------------------


def check(
    directories: Sequence[Path], drop: Sequence[str] = (), *, external: Sequence[Path] = (), yes: bool = False
) -> int:
    """Read and check every byte of the store, print the result, and return 0, or 1 for damage; blocks.

    Over ranks it is that of each rank; keys are dropped in the directory of one.
    It is the newest generation that is read, not what one that is kept beside it has alone. ``external`` are the user's
    own files that some of it lies in. Of the damaged keys those in ``drop`` are dropped, in one commit. Raises
    UsageError, with nothing dropped, when one of them does not exist or is not damaged, or is of a model and that is
    not agreed to; and where there is no store.
    """
    stores = stores_in(directories)
    if len(stores) > 1 and not drop:
        return max([check(each, external=external) for each in stores])
    directories = stores[0] if len(stores) == 1 else directories
    missing = [path for path in directories if not path.is_dir()]
    if missing or not holds_any_file(directories):
        raise UsageError(f"no run in {', '.join(map(str, missing or directories))}{_ranks(directories)}")
    try:
        with tiered.Store(*directories, dram=64 * MiB, mode="r", external=external) as store:
            report = store.verify()
            generation = store.generation
            unknown = [key for key in drop if key not in store]
    except CorruptionError as error:
        say(f"damaged: {error}", indent=9)
        return 1
    for damage in report.errors:
        say(f"damaged: {damage}", indent=9)
    say(
        f"read {format_bytes(report.nbytes)} in {report.num_blocks} blocks of {report.num_keys} keys, "
        f"generation {generation}{_of_member(directories)}: {len(report.errors) or 'none'} damaged"
    )
    for key, num in report.unread.items():
        say(
            f"not compared: {num} blocks of {key!r}, which nobody had read since it was adopted; store.verify() and"
            " store.commit() in a program give them digests",
            indent=2,
        )
    if unknown:
        raise UsageError(f"--drop {unknown[0]!r}: the run has no such key; nothing was dropped")
    left = [error.key for error in report.errors if error.key not in drop]
    if drop:
        if needed := [key for key in drop if key.startswith("model/")]:
            confirm(
                f"the training run cannot go on without {_listed(needed)}: drop it all the same?",
                unasked=f"--drop of {_listed(needed)} ends the training run for good and there is no terminal to ask "
                "on: add --yes",
                declined="nothing was dropped",
                yes=yes,
            )
        with tiered.Store(*directories, dram=64 * MiB, external=external) as store:
            store.drop_damaged(drop)
            say(
                f"dropped {_listed(drop)}: generation {store.generation} is without them; still damaged: "
                f"{_listed(left) or 'nothing'}",
                indent=2,
            )
    elif left:
        say("--drop KEY drops a damaged key for good; the rest of the store is as it was", indent=2)
    return 1 if left else 0


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, dict.fromkeys(keys)))


def clean(directories: Sequence[Path], *, dry_run: bool, yes: bool, json_file: Path | None) -> int:
    """List the leftovers in ``directories`` and remove them once that is agreed to; return 0. Blocks.

    Over ranks they are those of each rank's store, one after the other, and first the sets of stores that were carried
    over to another number of ranks.
    Raises UsageError while the store is open, where there is neither a run nor a leftover, and where there is no
    terminal to ask on; nothing was removed then.
    """
    check_writable(json_file)
    if obsolete := obsolete_in(directories):
        _remove_obsolete(obsolete, dry_run=dry_run, yes=yes)
    if len(stores := stores_in(directories)) > 1 and json_file is None:
        return max([clean(each, dry_run=dry_run, yes=yes, json_file=None) for each in stores])
    if len(stores) == 1:
        directories = stores[0]
    with closing(Leftovers(directories)) as found:
        if not (found.items or found.spared or holds_any_file(directories)):
            where = ", ".join(map(str, directories))
            raise UsageError(f"no run in {where}, and nothing that one has left over{_ranks(directories)}")
        if member := member_in(directories):
            print(f"the store of {member}")
        for item in found.items:
            say(f"{format_bytes(item.nbytes):>10}  {item}", indent=12)
        freed = 0
        if not found.items:
            print("nothing is left over")
        elif dry_run:
            print(f"{format_bytes(found.nbytes)} would be freed; nothing was removed")
        else:
            _confirm_removal(found.nbytes, yes=yes)
            freed = found.remove()
            print(f"freed {format_bytes(freed)} ({freed:,} bytes)")
        for spared in found.spared:
            say(f"left alone: {spared}", indent=12)
        if json_file is not None:
            items = [
                {"path": str(item.path), "what": item.what, "bytes": item.nbytes, "cut_at": item.end}
                for item in found.items
            ]
            report = {"leftovers": items, "left_alone": found.spared, "freed_bytes": freed, "dry_run": dry_run}
            write_report(json_file, f"{json.dumps(report)}\n")
    return 0


def _remove_obsolete(obsolete: Sequence[RankSet], *, dry_run: bool, yes: bool) -> None:
    """Remove the sets once that is agreed to."""
    nbytes = sum(
        entry.stat().st_blocks * 512 for each in obsolete for path in each.paths for entry in owned_files(path)
    )
    for each in obsolete:
        say(f"not needed any more: {each}, in {', '.join(map(str, each.paths))}", indent=12)
    if dry_run:
        print(f"{format_bytes(nbytes)} would be freed; nothing was removed")
        return
    _confirm_removal(nbytes, yes=yes)
    for each in obsolete:
        remove_set(each)
    print(f"freed {format_bytes(nbytes)} ({nbytes:,} bytes)")


def _confirm_removal(nbytes: int, *, yes: bool) -> None:
    confirm(
        f"remove these for good, {format_bytes(nbytes)}?",
        unasked="gc removes what is listed above and there is no terminal to ask on: add --yes, or --dry-run",
        declined="nothing was removed",
        yes=yes,
    )
