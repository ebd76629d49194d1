"""The build of the rig: torch from its wheel, and beside its libraries the runtime and stubs of the others.

torch looks for every library of CUDA beside its own first, so nothing has to be set but PYTHONPATH. A library that
the rig does not imitate is a stub with the functions that torch's libraries want; each says so when it is called.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["ROOT", "BuildError", "build", "environment", "refusal"]

ROOT = Path(__file__).parents[3]
SOURCES = Path(__file__).parent / "csrc"
TORCH = "2.11.0"  # whose wheel on the index is a build for CUDA 13.0
RUNTIME = ("runtime.cpp", "memory.cpp", "streams.cpp", "driver.cpp")
OPERATORS = ("operators.cpp", "kernels.cpp")

STUBS = {  # what a function begins with: the library that has it; the longer of two beginnings first
    "cublasLt": "libcublasLt.so.13",
    "cublas": "libcublas.so.13",
    "cudnn": "libcudnn.so.9",
    "cufft": "libcufft.so.12",
    "cuFile": "libcufile.so.0",
    "cupti": "libcupti.so.13",
    "curand": "libcurand.so.10",
    "cusolver": "libcusolver.so.12",
    "cusparseLt": "libcusparseLt.so.0",
    "cusparse": "libcusparse.so.12",
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
}

ANSWERS = {"cudnnGetVersion": "91900", "cudaThreadExchangeStreamCaptureMode": "0"} | dict.fromkeys(
    (
        "__cudaInitModule", "__cudaRegisterFatBinary", "__cudaRegisterFatBinaryEnd", "__cudaRegisterFunction",
        "__cudaRegisterVar", "__cudaUnregisterFatBinary",
    ),
    "0",
)  # fmt: skip
"""What stubs return that may be called: torch announces its kernels, of which none is launched."""


class BuildError(Exception):
    """A command of the build failed: pip without a network, or the compiler."""


def _headers() -> Path:
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda-13.0")) / "include"


def refusal() -> str | None:
    """Return why the rig cannot be built here, None when nothing is known to be in the way."""
    if not (_headers() / "cuda_runtime_api.h").is_file():
        return f"there is no {_headers() / 'cuda_runtime_api.h'}: CUDA_HOME names another CUDA 13.0"
    for command in ("g++", "nm"):
        if shutil.which(command) is None:
            return f"there is no {command}"
    return None


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a Python that has the rig of ``directory`` for torch, and this checkout."""
    return os.environ | {
        "PYTHONPATH": f"{directory / 'site'}:{ROOT}",
        "OMP_NUM_THREADS": "1",  # a sum that is divided among threads has other bits
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or each process warns that an operator was replaced
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what torch asks for, where it is to be deterministic
        "TIERED_TEST_DEVICE": "cuda",
    }


def build(directory: Path) -> None:
    """Make in ``directory`` what is missing or older than its sources: 1.1 GB, from a download of half of that.

    Raises BuildError.
    """
    site = directory / "site"
    site.mkdir(parents=True, exist_ok=True)
    if not (site / f"torch-{TORCH}.dist-info/RECORD").is_file():  # the wheel's last file
        _unpack_torch(site)
    told = _digest()
    stamp = directory / "digest"
    if not stamp.is_file() or stamp.read_text() != told:
        libraries = site / "torch/lib"
        _build_runtime(libraries)
        _build_stubs(libraries)
        _build_operators(site / "torch")
        _have_torch_load_it(site)
        stamp.write_text(told)


def _digest() -> str:
    files = [Path(__file__), *sorted(SOURCES.iterdir()), *sorted((ROOT / "tests/accelerator/csrc").iterdir())]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _unpack_torch(site: Path) -> None:
    with tempfile.TemporaryDirectory(dir=site.parent) as wheels:
        download = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels)
        _call(*download, f"torch=={TORCH}")
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)


def _call(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(map(str, command))[:300]} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def _symbols(file: Path, kind: str) -> Iterator[tuple[str, str]]:
    """Yield name and version ("" for none) of the dynamic symbols of ``file``; ``kind`` is an option of nm."""
    for line in _call("nm", "-D", kind, file).splitlines():
        name, _, version = line.split()[-1].partition("@")
        yield name, version.lstrip("@")


def _wanted(libraries: Path) -> set[tuple[str, str]]:
    files = [*libraries.glob("lib*torch*.so"), libraries / "libc10_cuda.so"]
    return {symbol for file in files for symbol in _symbols(file, "--undefined-only")}


def _stub(name: str) -> str:
    """Return a function that reports its call; of ``fake_missing``, which it reports to, the declaration."""
    if name == "fake_missing":
        return f'extern "C" int {name}(const char*);\n'
    answer = ANSWERS.get(name, f'fake_missing("{name}")')
    return f'extern "C" int {name}() {{ return {answer}; }}\n'


def _link(library: Path, sources: Sequence[Path], missing: Sequence[str], version: str, *options: str | Path) -> None:
    """Link ``library`` from ``sources``, and from a function that says so for each of ``missing``."""
    with tempfile.TemporaryDirectory() as there:
        stubs, script = Path(there, "stubs.cpp"), Path(there, "versions")
        stubs.write_text("".join(map(_stub, ["fake_missing", *missing])))
        script.write_text(f"{version} {{ global: *; }};\n")
        script_option = [f"-Wl,--version-script={script}"] if version else []
        flags = ("-shared", "-fPIC", "-O1", "-std=c++17", f"-Wl,-soname,{library.name}", f"-I{_headers()}")
        _call("g++", *flags, *script_option, *sources, stubs, "-o", library, *options)


def _build_runtime(libraries: Path) -> None:
    sources = [SOURCES / name for name in RUNTIME]
    text = "".join(source.read_text() for source in sources)
    wanted = sorted(name for name, version in _wanted(libraries) if version == "libcudart.so.13")
    missing = [name for name in wanted if not re.search(rf"^API [\w* ]*\b{name}\(", text, re.MULTILINE)]
    runtime = libraries / "libcudart.so.13"
    _link(runtime, sources, missing, runtime.name, "-ldl", "-pthread")
    driver = libraries / "libcuda.so.1"
    driver.unlink(missing_ok=True)
    driver.symlink_to(runtime.name)


def _build_stubs(libraries: Path) -> None:
    wanted = _wanted(libraries)
    for beginning, name in STUBS.items():
        others = [other for other in STUBS if other.startswith(beginning) and other != beginning]
        mine = [s for s in wanted if s[0].startswith(beginning) and not s[0].startswith(tuple(others))]
        (version,) = {version for _, version in mine if version} or {""}
        runtime = (f"-L{libraries}", "-l:libcudart.so.13", "-Wl,-rpath,$ORIGIN")
        _link(libraries / name, [], sorted({symbol for symbol, _ in mine}), version, *runtime)


def _build_operators(torch: Path) -> None:
    headers = [f"-I{path}" for path in (torch / "include", torch / "include/torch/csrc/api/include", _headers())]
    libraries = ("-lc10", "-ltorch_cpu", "-ltorch_cuda", "-lc10_cuda", "-l:libcudart.so.13")
    flags = ("-shared", "-fPIC", "-O1", "-std=c++20", "-w", *headers)
    made = torch / "lib/libfake_operators.so"
    _call("g++", *flags, *(SOURCES / name for name in OPERATORS), "-o", made, f"-L{torch / 'lib'}", *libraries)


def _have_torch_load_it(site: Path) -> None:
    """Name ``install`` among the devices that torch loads when it is imported, in whatever process."""
    described = site / "fake_cuda-0.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: fake_cuda\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[torch.backends]\nfake_cuda = tests.rigs.fake_cuda.device:install\n")
