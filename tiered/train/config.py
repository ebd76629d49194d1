"""The configuration of a run: the numbers that decide its bits, and the dials that do not.

The first ride along in every commit and are fixed for the run's life; the second may change whenever it is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tiered.errors import UsageError
from tiered.train.task import Shape
from tiered.units import MiB, format_bytes
from tiered.zero.formats.layout import FORMATS

__all__ = ["ACTIVATIONS", "DTYPES", "PLACES", "STATES", "UPDATES", "RunConfig", "RunDials", "committed_step"]

ACTIVATIONS = ("auto", "keep", "recompute", "swap")
PLACES = ("auto", "cpu", "device")

DTYPES = ("bf16", "fp32")
UPDATES = ("backward", "step")
STATES = FORMATS

_MIN_DRAM = 16 * MiB
"""No run is planned in less; stores open from 8 MiB on, and a model may need more."""

_LARGEST = 1 << 53  # of a number in a configuration
_LARGEST_SEED = 1 << 63  # the largest that torch's generators take
_MAY_BE_ZERO = ("seed", "dram", "hold", "device_memory")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The numbers that decide the losses of a run. Raises ValueError for values that do not go together."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int = 4
    lr: float = 5e-5
    clip: float | None = None
    accumulate: int = 1
    dtype: str = "bf16"
    update: str = "backward"
    state: str = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_range(batch=self.batch, accumulate=self.accumulate, seed=self.seed)
        for name, value in (("lr", self.lr), ("clip", self.clip)):
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{name} must be a positive number, got {value}")
        _check_one_of(DTYPES, dtype=self.dtype)
        _check_one_of(UPDATES, update=self.update)
        _check_one_of(STATES, state=self.state)
        if self.clip is not None and self.update != "step":
            raise ValueError(
                "clipping needs every gradient before the first update: leave --update out, or say --update step"
            )

    @property
    def shape(self) -> Shape:
        """The model's shape."""
        return Shape(self.layers, self.width, self.heads, self.context)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step learns from."""
        return self.batch * self.context * self.accumulate

    @classmethod
    def of_given(cls, given: Mapping[str, object]) -> RunConfig:
        """Return the configuration of a new run: the given values, and defaults for the rest.

        ``given`` has this class's names and ``params`` (int), which stands for layers, width and heads; other names
        are passed over. The default learning rate is 0.1 / width and at most 1e-3: at width 2048, of 3e-5 to 3e-4, the
        rate that falls fastest in six steps without warm-up. clip and accumulate select the update "step".
        """
        _check_given(given)
        names = {field.name for field in fields(cls)}
        chosen = {**asdict(Shape()), **{name: value for name, value in given.items() if name in names}}
        chosen |= _shape_of_params(given)
        width = chosen["width"]
        if "heads" not in given and "width" in given and isinstance(width, int):
            chosen["heads"] = math.gcd(width, Shape().heads)
        if not {"clip", "accumulate"}.isdisjoint(given):
            chosen.setdefault("update", "step")
        if isinstance(width, int) and width > 0:
            chosen.setdefault("lr", min(1e-3, float(f"{0.1 / width:.1e}")))
        config = cls(**chosen)
        config.shape  # noqa: B018  # checks that the sizes go together
        return config

    @classmethod
    def of_committed(cls, committed: Mapping[str, object], given: Mapping[str, object]) -> RunConfig:
        """Return the configuration a run was committed with. Raises UsageError with a diff when ``given`` differs."""
        _check_given(given)
        names = [field.name for field in fields(cls)]
        committed = _mapping("config", committed)
        unknown = sorted(map(str, set(names) ^ set(committed)))
        if unknown:
            raise UsageError(f"the run's configuration is another version's: {', '.join(unknown)} unknown or missing")
        _check_types(cls, committed)
        asked = {name: value for name, value in given.items() if name in names} | _shape_of_params(given)
        differing = [
            f"{name} {committed[name]} -> {asked[name]}"
            for name in names
            if name in asked and asked[name] != committed[name]
        ]
        if differing:
            raise UsageError(
                f"the run was started with other values ({'; '.join(differing)}): "
                "leave these options out to go on with it, or start anew with --fresh"
            )
        return cls(**committed)  # type: ignore[arg-type]  # written by asdict() of this class


def _shape_of_params(given: Mapping[str, object]) -> dict[str, object]:
    """Return the shape that ``params`` stands for, {} where it is not given."""
    params = given.get("params")
    if not isinstance(params, int):
        return {}
    clashing = [f"--{name}" for name in ("layers", "width", "heads") if name in given]
    if clashing:
        raise ValueError(f"--params chooses layers, width and heads: give it or {' and '.join(clashing)}, not both")
    context = given.get("context", Shape().context)
    assert isinstance(context, int)
    shape = asdict(Shape.of_size(params, context=context))
    return {name: shape[name] for name in ("layers", "width", "heads")}


@dataclass(frozen=True, slots=True)
class RunDials:
    """The dials that may change while a run lives: they change its time and place.

    They change no loss on one device; another device has its own last bits.
    """

    steps: int = 24
    dram: int = 1 << 30  # bytes
    commit_every: int = 1
    data: tuple[str, ...] = ()  # paths; none: the standard library's source
    hold: str | int = "auto"  # how much of dram keeps bytes for good: "auto", or bytes
    activations: str = "auto"
    device: str = "auto"  # where the model computes
    device_memory: int | None = None  # bytes for tiered there; None: from the free memory
    update_on: str = "auto"  # where the optimizer computes

    def __post_init__(self) -> None:
        _check_range(steps=self.steps, commit_every=self.commit_every, dram=self.dram)
        _check_one_of(ACTIVATIONS, activations=self.activations)
        _check_one_of(PLACES, update_on=self.update_on)
        if isinstance(self.hold, str) and self.hold != "auto":
            raise ValueError(f"hold must be auto, 0 or a size, got {self.hold!r}")
        if self.dram < _MIN_DRAM:
            raise ValueError(f"dram must be at least {format_bytes(_MIN_DRAM)}, got {format_bytes(self.dram)}")

    @classmethod
    def of_committed(cls, committed: Mapping[str, object], given: Mapping[str, object]) -> RunDials:
        """Return the dials that a run had, with those given now in their place; {} for a new run.

        Other names are passed over: they are dials of another release.
        """
        names = {field.name for field in fields(cls)}
        committed = _mapping("dials", committed)
        _check_types(cls, {name: value for name, value in committed.items() if name in names})
        chosen: dict[str, Any] = {name: value for name, value in {**committed, **given}.items() if name in names}
        return cls(**{**chosen, "data": tuple(chosen.get("data", ()))})


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "int | None": (int, type(None)), "float": (float, int), "float | None": (float, int, type(None)),
    "str": (str,), "str | int": (str, int), "tuple[str, ...]": (tuple, list),
}  # fmt: skip


def committed_step(state: Mapping[str, object]) -> int:
    """Return the number of steps that a committed run has done. Raises UsageError for anything but a count."""
    step = state.get("step", 0)
    if type(step) is not int or not 0 <= step < _LARGEST:
        raise UsageError(f"the run's state is not that of a training run: step is {_short(step)}; {_NEXT}")
    return step


_NEXT = "choose another --store, or start anew with --fresh"


def _mapping(name: str, committed: object) -> Mapping[str, object]:
    if not isinstance(committed, Mapping):
        raise UsageError(f"the run's state is not that of a training run: {name} is {_short(committed)}; {_NEXT}")
    return committed


def _check_types(cls: type[RunConfig | RunDials], committed: Mapping[str, object]) -> None:
    """Raise UsageError unless the values are of the types that a run writes."""
    for field in fields(cls):
        value = committed.get(field.name, field.default)
        is_right = type(value) in _TYPES[str(field.type)]
        if field.name in committed and isinstance(value, tuple | list):
            is_right = is_right and all(type(path) is str for path in value)
        if field.name in committed and (not is_right or (isinstance(value, int) and value >= _end_of(field.name))):
            raise UsageError(f"the run's {field.name} is {_short(value)}, expected {field.type}; {_NEXT}")


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= _LARGEST:  # order: Python refuses to write very long ones
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]} ... {text[-16:]}"


def _check_given(given: Mapping[str, object]) -> None:
    """Raise ValueError for a number that nothing can be computed from."""
    _check_range(**{name: value for name, value in given.items() if isinstance(value, int)})


def _check_range(**values: int) -> None:
    for name, value in values.items():
        option, least = name.replace("_", "-"), 0 if name in _MAY_BE_ZERO else 1
        if value < least:
            raise ValueError(f"{option} must be at least {least}, got {_short(value)}")
        if value >= _end_of(name):
            raise ValueError(f"{option} must be less than {_end_of(name):,}, got {_short(value)}")


def _end_of(name: str) -> int:
    """Return the number that all values of ``name`` are less than."""
    return _LARGEST_SEED if name == "seed" else _LARGEST


def _check_one_of(choices: tuple[str, ...], **values: str) -> None:
    for name, value in values.items():
        if value not in choices:
            raise ValueError(f"{name.replace('_', '-')} must be one of {', '.join(choices)}; got {_short(value)}")
