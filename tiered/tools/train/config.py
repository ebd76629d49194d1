"""The configuration of a run: the numbers that decide its bits, and the dials that do not.

The first ride along in every commit and are fixed for the run's life; the second may change whenever it is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from tiered.errors import UsageError
from tiered.tools.train.task import Shape
from tiered.units import MiB, format_bytes
from tiered.zero.formats.state_layout import FORMATS

__all__ = ["DTYPES", "RunConfig", "RunDials", "committed_step"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": tuple(DTYPES), "update": ("backward", "step"), "state": FORMATS,
    "activations": ("auto", "keep", "recompute", "swap"), "update_on": ("auto", "cpu", "device"),
}  # fmt: skip

_MIN_DRAM = 16 * MiB
"""No run is planned in less; stores open from 8 MiB on, and a model may need more."""

_LARGEST = 1 << 53  # of a number in a configuration
_LARGEST_SEED = 1 << 63  # the largest that torch's generators take
_MAY_BE_ZERO = ("seed", "dram", "hold", "device_memory")
_NEXT = "choose another --store, or start anew with --fresh"


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
    world: int = 1  # ranks, each with batches of its own

    def __post_init__(self) -> None:
        _check(batch=self.batch, accumulate=self.accumulate, seed=self.seed, world=self.world)
        for name, value in (("lr", self.lr), ("clip", self.clip)):
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"{name} must be a positive number, got {value}")
        _check(dtype=self.dtype, update=self.update, state=self.state)
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
        """Tokens that one optimizer step learns from, those of all ranks."""
        return self.world * self.rank_tokens_per_step

    @property
    def rank_tokens_per_step(self) -> int:
        """Tokens that one rank has in a step."""
        return self.batch * self.context * self.accumulate

    @classmethod
    def of_given(cls, given: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of a new run: the given values, and defaults for the rest.

        ``given`` has this class's names and ``params`` (int), which stands for layers, width and heads; other names
        are passed over. The default learning rate is 0.1 / width and at most 1e-3: at width 2048, of 3e-5 to 3e-4, the
        rate that falls fastest in six steps without warm-up. clip and accumulate select the update "step".
        """
        chosen = asdict(Shape()) | _asked(given)
        width: int = chosen["width"]
        if "width" in given and "heads" not in given:
            chosen["heads"] = math.gcd(width, Shape().heads)
        if not {"clip", "accumulate"}.isdisjoint(given):
            chosen.setdefault("update", "step")
        chosen.setdefault("lr", min(1e-3, float(f"{0.1 / width:.1e}")))
        config = cls(**chosen)
        config.shape  # noqa: B018  # checks that the sizes go together
        return config

    @classmethod
    def of_committed(cls, committed: Mapping[str, Any], given: Mapping[str, Any]) -> RunConfig:
        """Return the configuration a run was committed with. Raises UsageError with a diff when ``given`` differs."""
        asked, names = _asked(given), [field.name for field in fields(cls)]
        _check_types(cls, "config", committed)
        committed = {"world": 1, **committed}  # an earlier release knew one rank alone
        unknown = sorted(map(str, set(names) ^ set(committed)))
        if unknown:
            raise UsageError(f"the run's configuration is another version's: {', '.join(unknown)} unknown or missing")
        committed["world"] = asked.pop("world", committed["world"])  # another number of ranks goes on with it
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
        return cls(**committed)


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of a configuration, the shape that ``params`` stands for among them. ValueError."""
    _check(**{name: value for name, value in given.items() if isinstance(value, int)})
    asked = {field.name: given[field.name] for field in fields(RunConfig) if field.name in given}
    if "params" not in given:
        return asked
    clashing = [f"--{name}" for name in ("layers", "width", "heads") if name in given]
    if clashing:
        raise ValueError(f"--params chooses layers, width and heads: give it or {' and '.join(clashing)}, not both")
    shape = Shape.of_size(given["params"], context=given.get("context", Shape().context))
    return asked | {name: getattr(shape, name) for name in ("layers", "width", "heads")}


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
        _check(steps=self.steps, commit_every=self.commit_every, dram=self.dram)
        _check(activations=self.activations, update_on=self.update_on)
        if isinstance(self.hold, str) and self.hold != "auto":
            raise ValueError(f"hold must be auto, 0 or a size, got {self.hold!r}")
        if self.dram < _MIN_DRAM:
            raise ValueError(f"dram must be at least {format_bytes(_MIN_DRAM)}, got {format_bytes(self.dram)}")

    @classmethod
    def of_committed(cls, committed: Mapping[str, Any], given: Mapping[str, Any]) -> RunDials:
        """Return the dials that a run had, with those given now in their place; {} for a new run.

        Other names are passed over: they are dials of another release.
        """
        _check_types(cls, "dials", committed)
        both = {**committed, **given}
        chosen = {field.name: both[field.name] for field in fields(cls) if field.name in both}
        return cls(**{**chosen, "data": tuple(chosen.get("data", ()))})


def committed_step(state: Mapping[str, object]) -> int:
    """Return the number of steps that a committed run has done. Raises UsageError for anything but a count."""
    step = state.get("step", 0)
    if type(step) is not int or not 0 <= step < _LARGEST:
        raise UsageError(f"the run's state is not that of a training run: step is {_short(step)}; {_NEXT}")
    return step


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "int | None": (int, type(None)), "float": (float, int), "float | None": (float, int, type(None)),
    "str": (str,), "str | int": (str, int), "tuple[str, ...]": (tuple, list),
}  # fmt: skip


def _check_types(cls: type[RunConfig | RunDials], word: str, committed: object) -> None:
    """Raise UsageError unless ``committed`` is a mapping, with values of the types that a run writes."""
    if not isinstance(committed, Mapping):
        raise UsageError(f"the run's state is not that of a training run: {word} is {_short(committed)}; {_NEXT}")
    for field in [field for field in fields(cls) if field.name in committed]:
        value = committed[field.name]
        is_right = type(value) in _TYPES[str(field.type)]
        if isinstance(value, tuple | list):
            is_right = is_right and all(type(path) is str for path in value)
        if not is_right or (isinstance(value, int) and value >= _end_of(field.name)):
            raise UsageError(f"the run's {field.name} is {_short(value)}, expected {field.type}; {_NEXT}")


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= _LARGEST:  # order: Python refuses to write very long ones
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]} ... {text[-16:]}"


def _check(**values: int | str) -> None:
    """Raise ValueError for a number that nothing can be computed from, and for a word that is none of the choices."""
    for name, value in values.items():
        option, least = name.replace("_", "-"), 0 if name in _MAY_BE_ZERO else 1
        if isinstance(value, str):
            if value not in _CHOICES[name]:
                raise ValueError(f"{option} must be one of {', '.join(_CHOICES[name])}; got {_short(value)}")
        elif value < least:
            raise ValueError(f"{option} must be at least {least}, got {_short(value)}")
        elif value >= _end_of(name):
            raise ValueError(f"{option} must be less than {_end_of(name):,}, got {_short(value)}")


def _end_of(name: str) -> int:
    """Return the number that all values of ``name`` are less than."""
    return _LARGEST_SEED if name == "seed" else _LARGEST
