"""The command line: read the options, call one job, and report a refusal in one line with exit status 2.

typer only reads the options. Jobs run outside typer, which has answers of its own to Ctrl-C and to a closed output.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from typer.exceptions import TyperException

from tiered import __version__
from tiered.errors import TieredError
from tiered.removed import removed_option
from tiered.tools.console import INTERRUPTED, MAY_HANG, fold, lasting_streams
from tiered.units import parse_bytes, parse_count

__all__ = ["app", "main"]

_P = ParamSpec("_P")

app = typer.Typer(
    add_completion=False,
    help="Train models larger than memory: tensors live in NVMe files and pass through a DRAM budget.",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"tiered {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None: ...


def _path(text: str) -> Path:
    """Return ``text`` as a path: not "" as this directory, which an unset variable of a script would name."""
    if not text:
        raise typer.BadParameter("expected a path, got an empty one")
    return Path(text)


def _parsed(parse: Callable[[str], object], metavar: str, help: str) -> Any:
    """Return an option whose text ``parse`` reads; typer keeps the message of a BadParameter alone."""

    def parser(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return typer.Option(parser=parser, metavar=metavar, help=help)


Data = Annotated[
    list[Path] | None,
    typer.Option(
        parser=_path, metavar="PATH", help="Text file or directory; again for more. Default: Python's own sources."
    ),
]
Store = Annotated[
    list[Path] | None,
    typer.Option(
        parser=_path, metavar="DIR", help="Directory to keep the run in; again to stripe over more. Default: runs/demo."
    ),
]
Dram = Annotated[int | None, _parsed(parse_bytes, "SIZE", "DRAM budget, such as 8GiB. Default: 1GiB.")]
Params = Annotated[
    int | None, _parsed(parse_count, "SIZE", "Model size, such as 0.4B, instead of layers, width and heads.")
]
Layers = Annotated[int | None, typer.Option(help="Default: 8.")]
Width = Annotated[int | None, typer.Option(help="Default: 2048.")]
Heads = Annotated[int | None, typer.Option(help="Default: 16, or fewer to suit the width.")]
Context = Annotated[int | None, typer.Option(help="Tokens a sample is long. Default: 256.")]
Batch = Annotated[int | None, typer.Option(help="Samples in a micro-step, of each rank. Default: 4.")]
Steps = Annotated[int | None, typer.Option(help="Total of the run, resumed parts included. Default: 24.")]
Lr = Annotated[float | None, typer.Option(help="Learning rate. Default: 0.1 / width, at most 1e-3.")]
Clip = Annotated[float | None, typer.Option(help="Largest norm of the gradient; selects --update step.")]
Accumulate = Annotated[int | None, typer.Option(help="Micro-steps in a step; selects --update step. Default: 1.")]
Dtype = Annotated[str | None, typer.Option(metavar="bf16|fp32", help="Default: bf16.")]
Update = Annotated[str | None, typer.Option(metavar="backward|step", help="When state is updated. Default: backward.")]
State = Annotated[
    str | None,
    typer.Option(metavar="exact|compact", help="Optimizer state: 12 or 5 bytes a parameter. Default: exact."),
]
CommitEvery = Annotated[int | None, typer.Option(metavar="N", help="Steps between commits. Default: 1.")]
Durable = Annotated[bool, typer.Option(help="Without: no commits, half the space, nothing to resume.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same losses, whatever the budget. Default: 0.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in the store; options left out are the run's.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Remove the store that is there and start anew.")]
Hold = Annotated[
    str | None,
    _parsed(
        lambda text: text if text == "auto" else parse_bytes(text),
        "auto|0|SIZE",
        "How much of the budget keeps bytes for good. Default: auto.",
    ),
]
Activations = Annotated[
    str | None,
    typer.Option(metavar="auto|keep|recompute|swap", help="What becomes of activations until backward. Default: auto."),
]
Device = Annotated[
    str | None, typer.Option(metavar="auto|cpu|NAME", help="Where the model computes, such as cuda. Default: auto.")
]
DeviceMemory = Annotated[
    int | None, _parsed(parse_bytes, "SIZE", "tiered's share of the device's memory. Default: from what is free.")
]
UpdateOn = Annotated[
    str | None,
    typer.Option(metavar="auto|cpu|device", help="Where the optimizer computes. Default: auto, what is shorter."),
]
Timeline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what every thread did and waited for, for ui.perfetto.dev.")
]
Json = Annotated[Path | None, typer.Option(help="Write the figures of this run to a file.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing before the end.")]
Yes = Annotated[bool, typer.Option("--yes", help="Answer every question with yes.")]
OnlyPlan = Annotated[bool, typer.Option("--dry-run", help="Say what the run would be, take and write, and stop.")]
Run = Annotated[list[Path], typer.Argument(parser=_path, metavar="RUN", help="The run's directory, or all of them.")]
Parameters = Annotated[
    bool, typer.Option("--parameters", help="List each parameter: dtype, shape, steps, and where it lies.")
]
External = Annotated[
    list[Path] | None,
    typer.Option(
        parser=_path,
        metavar="FILE",
        help="A safetensors file, or a folder of them, that some of the run lies in; again for more.",
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Drop this key, which is damaged, for good; again for more. A run cannot go on without a key of model/.",
    ),
]
ReportFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write what was found and freed to a file.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")]

Measured = Annotated[
    list[Path], typer.Argument(parser=_path, metavar="DIR...", help="Directory to measure in; several: each, and all.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Under a minute, with the most telling points only.")]
Engine = Annotated[str, typer.Option(help="auto, uring, threads, aiofiles or mmap.")]
MeasuredDevice = Annotated[
    str | None,
    typer.Option(
        metavar="auto|TYPE",
        help="Also measure copies to this accelerator, such as cuda or cuda:1, and all three tiers at once.",
    ),
]
Sustained = Annotated[float, typer.Option(metavar="SECONDS", help="Also write, then read, so long without a pause.")]


def _command(job: Callable[_P, int]) -> Callable[_P, Callable[[], int]]:
    """Register ``job`` as a command, which returns the call to make."""

    @app.command(job.__name__.rstrip("_"))  # `import` is no name for a function
    @functools.wraps(job)
    def read(*options: _P.args, **named: _P.kwargs) -> Callable[[], int]:
        return functools.partial(job, *options, **named)

    return read


@_command
def train(
    call: typer.Context,
    data: Data = None,
    store: Store = None,
    dram: Dram = None,
    params: Params = None,
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    context: Context = None,
    batch: Batch = None,
    steps: Steps = None,
    lr: Lr = None,
    clip: Clip = None,
    accumulate: Accumulate = None,
    dtype: Dtype = None,
    update: Update = None,
    state: State = None,
    commit_every: CommitEvery = None,
    durable: Durable = True,
    hold: Hold = None,
    activations: Activations = None,
    device: Device = None,
    device_memory: DeviceMemory = None,
    update_on: UpdateOn = None,
    seed: Seed = None,
    resume: Resume = False,
    fresh: Fresh = False,
    json: Json = None,
    timeline: Timeline = None,
    quiet: Quiet = False,
    dry_run: OnlyPlan = False,
    yes: Yes = False,
) -> int:
    """Train a byte-level GPT on text; model and optimizer live in the store."""
    options = call.params | {"data": tuple(str(path.absolute()) for path in data or ()) or None}
    from tiered.tools.train.run import OPTIONS, Request, train  # torch takes a second or two: not for a mistyped option

    return train(
        Request(
            directories=tuple(store or [Path("runs/demo")]),
            given={name: value for name, value in options.items() if name in OPTIONS and value is not None},
            durable=durable,
            resume=resume,
            fresh=fresh,
            yes=yes,
            quiet=quiet,
            dry_run=dry_run,
            json_file=json,
            timeline_file=timeline,
            program=_program(),
            words=tuple(call.obj),
        )
    )


@_command
def inspect(run: Run, parameters: Parameters = False, json: Json = None) -> int:
    """Show what a run's last commit holds: keys, parameters, generation and state; also while it is in use."""
    from tiered.tools.inspect import inspect_run

    return inspect_run(run, parameters=parameters, json_file=json)


@_command
def verify(run: Run, drop: Drop = None, external: External = None, yes: Yes = False) -> int:
    """Read and check every byte of a run; exit status 1 and key, file and offset on damage."""
    from tiered.tools.inspect import check

    return check(run, drop or (), external=external or (), yes=yes)


@_command
def gc(run: Run, dry_run: DryRun = False, yes: Yes = False, json: ReportFile = None) -> int:
    """Remove what crashes left in a run's directories, and give back the space behind a file's last committed byte.

    The space of other deleted keys, in ranges of 64 KiB and more, goes back as holes, where the file system has them.
    """
    from tiered.tools.inspect import clean

    return clean(run, dry_run=dry_run, yes=yes, json_file=json)


@_command
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(parser=_path, metavar="FOLDER", help="Where the safetensors files go.")],
    dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp16|fp32", help="Cast what floats. Default: as trained.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of a file.")] = "50GB",
    external: External = None,
    yes: Yes = False,
) -> int:
    """Write a run's last commit as safetensors files, which transformers, tiered and others load."""
    from tiered.tools.export import export

    return export(run, folder, dtype=dtype, max_shard_size=max_shard_size, external=external or (), yes=yes)


@_command
def import_(
    source: Annotated[
        Path, typer.Argument(parser=_path, metavar="FOLDER", help="A safetensors file, or a folder of them.")
    ],
    run: Annotated[Path, typer.Argument(parser=_path, metavar="RUN", help="A new directory for the store.")],
) -> int:
    """Put the tensors of safetensors files into a new store."""
    from tiered.tools.export import import_files

    return import_files(source, run)


@_command
def doctor(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(parser=_path, metavar="DIR", help="Where stores will be. Default: this directory."),
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Write the report for programs; - for standard output.")
    ] = None,
) -> int:
    """Show what works on this machine and in DIR, what each lack costs and how to mend it; status 1 if broken."""
    from tiered.tools.doctor.doctor import doctor

    return doctor(directories or [Path()], json)


@_command
def bench(
    directories: Measured,
    quick: Quick = False,
    engine: Engine = "auto",
    device: MeasuredDevice = None,
    sustained: Sustained = 0.0,
    json: Json = None,
    yes: Yes = False,
) -> int:
    """Measure what the drives under DIR give for tensor swap, beside fio where it is installed."""
    from tiered.tools.bench.command import BenchRequest, bench

    return bench(
        BenchRequest(
            directories=tuple(directories),
            engine=engine,
            device=device,
            quick=quick,
            sustained_s=sustained,
            yes=yes,
            json_file=json,
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for a refusal, 130 after Ctrl-C.

    The process's own command line, ``arguments`` None, ends the process where a check of the doctor's hangs.
    """
    with lasting_streams():
        status = _run(arguments)
    if arguments is None and any(thread.name == MAY_HANG for thread in threading.enumerate()):
        os._exit(status)  # the interpreter would wait for the check; the streams were flushed above
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        words = sys.argv[1:] if arguments is None else arguments
        job = app(words, prog_name="tiered", standalone_mode=False, obj=words)
        status = int(job()) if callable(job) else int(job or 0)  # --help leaves a status and no job
        sys.stdout.flush()
        return status
    except TyperException as error:
        removed = removed_option(error)
        return _refuse(removed) if removed else _refuse(error.format_message().rstrip("."), "try --help")
    except (TieredError, ValueError) as error:
        return _refuse(str(error), *getattr(error, "__notes__", ()))
    except OSError as error:
        return _refuse(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except (KeyboardInterrupt, EOFError, typer.Abort):
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def _program() -> str:
    """Return how the user calls us: the bare name when that is on the path, else where we lie."""
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return "python -m tiered" if called.name == "__main__.py" else "python -m tiered.tools.cli"
    found = shutil.which(called.name)
    is_found = found is not None and (not called.exists() or os.path.samefile(found, called))
    return called.name if is_found else os.path.relpath(called)


def _refuse(message: str, *hints: str) -> int:
    said = f"tiered: {' '.join(message.split())}"  # hints are not folded: they end with commands to be copied
    print(*[*fold(said), *hints] if sys.stderr.isatty() else ["; ".join([said, *hints])], sep="\n", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
