#!/usr/bin/env python3
"""DeepSpeed ZeRO-Infinity on NVMe against tiered: the same GPT, the same drive, in alternating pairs.

Usage: python bench/compare.py [--layers 24 --batch 4 --pairs 5 --deepspeed-python VENV/bin/python --store DIR]

DeepSpeed runs under --deepspeed-python, which may be another environment (see `--help` for how to make one); where it
cannot be imported the bench says so and measures nothing. Bytes are /proc/self/io's for both. One JSON line comes last.
"""

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from training import Settings, add_arguments, check, environment, measure, median_s, settings_of

from tiered.units import format_bytes

INSTALL = (
    "python -m venv VENV && VENV/bin/pip install torch==2.13.0 numpy setuptools ninja && VENV/bin/pip install "
    "--no-build-isolation deepspeed==0.19.8; it compiles its I/O at first use, which takes g++ and libaio-dev, and "
    "VENV/bin on PATH for ninja"
)
WORKER = Path(__file__).with_name("deepspeed_step.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=f"DeepSpeed: {INSTALL}")
    add_arguments(parser, hold="0")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--deepspeed-python", default=sys.executable, help="the Python that has deepspeed")
    return parser.parse_args()


def lacks(python: str) -> str:
    """Return why DeepSpeed cannot run under ``python``; "" if it can."""
    try:
        done = subprocess.run([python, "-c", "import deepspeed"], capture_output=True, text=True, timeout=300)
    except OSError as error:
        return f"{python}: {error.strerror}"
    return "" if not done.returncode else (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]


def deepspeed(settings: Settings, folder: Path, python: str) -> dict[str, Any]:
    """Run DeepSpeed in a process of its own, its files in ``folder``, which is removed; return what it prints."""
    command = shlex.join([python, str(WORKER), str(folder), json.dumps(dataclasses.asdict(settings))])
    path = shlex.quote(str(Path(python).absolute().parent))
    compiled = folder.parent.parent / "deepspeed_extensions"
    for lock in compiled.rglob("lock"):  # of a run that was killed while it compiled: the next would wait for ever
        lock.unlink()
    try:
        # A shell stands between: ru_maxrss starts with what the parent of an exec had in memory.
        done = subprocess.run(
            ["sh", "-c", f"export PATH={path}:$PATH; {command}; exit $?"],
            env=os.environ | {"TORCH_EXTENSIONS_DIR": str(compiled)}, capture_output=True, text=True, timeout=7200,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise SystemExit(f"DeepSpeed: exit status {done.returncode}; it needs: {INSTALL}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main() -> None:
    args = arguments()
    ours = settings_of(args)
    print(environment(ours))
    print(f"ours: {ours.words()}")
    reason = lacks(args.deepspeed_python)
    if reason:
        print(f"DeepSpeed is not there ({reason}): nothing is compared. To install it: {INSTALL}")
        print(json.dumps({"bench": "compare", "num_params": ours.shape.num_params, "ratio": None, "reason": reason}))
        return
    print("ceiling: step/bound 1; DeepSpeed keeps 14 bytes per parameter, reads 20 and writes 18 (ours 14 and 12)")
    args.store.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {"tiered": [], "deepspeed": []}
    with tempfile.TemporaryDirectory(dir=args.store, prefix="bench-") as folder:
        for pair in range(args.pairs):
            for kind in ("tiered", "deepspeed") if pair % 2 else ("deepspeed", "tiered"):
                place = Path(folder).absolute() / kind
                found[kind].append(
                    measure(ours, place) if kind == "tiered" else deepspeed(ours, place, args.deepspeed_python)
                )
            check(found["tiered"][-1])
            mine, theirs = median_s(found["tiered"][-1]), median_s(found["deepspeed"][-1])
            print(f"pair {pair}: tiered {mine:.3f} s, DeepSpeed {theirs:.3f} s, ratio {theirs / mine:.2f}", flush=True)
    ratios = [median_s(b) / median_s(a) for a, b in zip(found["tiered"], found["deepspeed"], strict=True)]
    result: dict[str, Any] = {
        "bench": "compare",
        "num_params": ours.shape.num_params,
        "settings": dataclasses.asdict(ours),
        "deepspeed_version": found["deepspeed"][-1]["version"],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "step_over_bound": statistics.median(one["step_over_bound"] for one in found["tiered"]),
    }
    for kind, results in found.items():
        last = results[-1]
        names = ("io_read_bytes_per_param", "io_write_bytes_per_param", "peak_rss_bytes")
        result[kind] = {"seconds": statistics.median(map(median_s, results)), **{name: last[name] for name in names}}
        print(
            f"{kind:9s} {result[kind]['seconds']:.3f} s, read {last[names[0]]:.1f} and written {last[names[1]]:.1f} "
            f"B/param, peak RSS {format_bytes(last[names[2]])}, first losses {last['losses'][0]:.3f}, "
            f"{last['losses'][-1]:.3f}"
        )
    print(
        f"DeepSpeed / tiered: {result['ratio']:.2f} (median of {args.pairs}); tiered's fraction of the ceiling "
        f"{1 / result['step_over_bound']:.3f}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
