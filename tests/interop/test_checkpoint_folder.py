"""The folder of a checkpoint: whom it belongs to while it is written, and which files are not replaced."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import tiered
from tests.rigs.warm_python import WarmPython
from tiered.errors import UsageError
from tiered.interop.checkpoint_folder import write_checkpoint, write_files
from tiered.tools.cli import main
from tiered.zero.deferred_tensors import DeferredTensor

VALUES = {"a": torch.arange(5000.0), "b": torch.ones(7)}

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with one safetensors file."""
    (tmp_path / "base").mkdir()
    save_file(VALUES, tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


def run_beside(base: Path, name: str = "model.safetensors") -> tiered.Store:
    """Return an open store whose only committed record lies in the file ``name`` of ``base``."""
    store = tiered.Store(base.parent / "run", dram="16MiB", external=[base / name])
    if not store.generation:
        store.adopt("a", base / name, "a")
        store.commit({"step": 1})
    return store


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}


def check_refused_and_unharmed(base: Path, name: str, write: Any) -> None:
    """``write`` is refused by the name of the file, in which the open run goes on, and is opened again."""
    with run_beside(base, name) as store:
        before = content(base)
        with pytest.raises(UsageError, match=rf"{name} is read in place.*process {os.getpid()}.*another folder"):
            write(base)
        assert content(base) == before
        store["own"] = VALUES["b"]
        store.commit({"step": 2})
    with run_beside(base, name) as store:
        assert store.state == {"step": 2} and torch.equal(store["a"], VALUES["a"]) and store.verify().is_clean


@pytest.mark.parametrize("max_shard_size", ["50GB", "16KB"])
def test_no_file_that_a_store_reads_in_place_is_replaced_by_a_save(base: Path, max_shard_size: str) -> None:
    """Shards have other names than the file that is there, which goes for them all the same."""
    model = nn.Linear(100, 100)

    def save(folder: Path) -> None:
        tiered.save_pretrained(model, folder, max_shard_size=max_shard_size)

    check_refused_and_unharmed(base, "model.safetensors", save)
    save(base)  # no store has it open any more


def test_no_file_that_a_store_reads_in_place_is_replaced_by_adapters(base: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    os.rename(base / "model.safetensors", base / "adapter_model.safetensors")
    check_refused_and_unharmed(base, "adapter_model.safetensors", lambda folder: tiered.save_pretrained(model, folder))


def test_no_file_that_a_store_reads_in_place_is_replaced_by_an_export(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export itself has the file open, and no other store has."""
    run_beside(base).close()
    before = content(base)
    words = [str(base.parent / "run"), str(base), "--external", str(base), "--yes"]
    assert main(["export", *words]) == 2
    assert "is read in place" in capsys.readouterr().err and content(base) == before
    with run_beside(base) as store:
        assert torch.equal(store["a"], VALUES["a"])


def lost(base: Path, how: str) -> None:
    path = base / "model.safetensors"
    if how == "replaced":
        shutil.copy(path, base / "copy")
        os.rename(path, base / "moved")
        os.rename(base / "copy", path)
    elif how == "moved":
        os.rename(path, base / "moved")
    else:
        os.rename(base, base.parent / "elsewhere")


@pytest.mark.parametrize("how", ["replaced", "moved", "folder moved"])
def test_no_commit_is_acknowledged_whose_external_file_has_lost_its_name(base: Path, how: str) -> None:
    with run_beside(base) as store:
        lost(base, how)
        store["own"] = VALUES["b"]
        with pytest.raises(
            UsageError, match=r"'a' lies in an external file that has lost its name.*Move that file back"
        ):
            store.commit({"step": 2})
        if how == "folder moved":
            os.rename(base.parent / "elsewhere", base)
        else:
            os.rename(base / "moved", base / "model.safetensors")
        store.commit({"step": 2})
        lost(base, how)
        del store["a"]  # nothing lies there any more
        store.commit({"step": 3})
    with tiered.Store(base.parent / "run", dram="16MiB") as store:
        assert store.state == {"step": 3} and list(store) == ["own"]


def test_the_bytes_of_an_external_file_that_was_removed_are_where_the_refusal_says(base: Path) -> None:
    with closing(run_beside(base)) as store:
        (base / "model.safetensors").unlink()
        store["own"] = VALUES["b"]
        with pytest.raises(UsageError, match="lost its name") as caught:
            store.commit({"step": 2})
        still = next(word for word in str(caught.value).split() if word.startswith("/proc/")).rstrip(".")
        shutil.copy(still, base / "model.safetensors")
        store.close(commit=False)
    with run_beside(base) as store:
        assert store.state == {"step": 1} and torch.equal(store["a"], VALUES["a"])


def later(value: torch.Tensor, reached: Event, until: Event) -> torch.Tensor:
    """Return ``value`` deferred: whoever writes it says so, and waits."""

    def read() -> torch.Tensor:
        reached.set()
        assert until.wait(60)
        return value

    return DeferredTensor.of(torch.empty(value.shape, device="meta"), read)


@contextmanager
def half_written(folder: Path, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Have a thread write ``values`` to ``folder``, all but the last: until the block ends, and then that one."""
    reached, until = Event(), Event()
    name = list(values)[-1]
    with ThreadPoolExecutor(1) as threads:
        tensors = {**values, name: later(values[name], reached, until)}
        written = threads.submit(write_checkpoint, folder, tensors, max_shard_size="50GB")
        try:
            assert reached.wait(60)
            yield
        finally:
            until.set()
        written.result()


NEW = {name: value + 1 for name, value in VALUES.items()}


def check_checkpoint(folder: Path, values: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in values)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_has_one_writer_at_a_time(tmp_path: Path, is_new: bool) -> None:
    folder = tmp_path / "out"
    if not is_new:
        write_checkpoint(folder, VALUES, max_shard_size="50GB")
    with half_written(folder, NEW):
        with pytest.raises(UsageError, match=rf"out is being written to .*process {os.getpid()}: wait"):
            write_checkpoint(folder, VALUES, max_shard_size="50GB")
        with pytest.raises(UsageError, match="out is being written to"):
            write_files(folder, lambda temporary: (temporary / "README.md").write_text("x"))
    check_checkpoint(folder, NEW)
    write_checkpoint(folder, VALUES, max_shard_size="50GB")
    check_checkpoint(folder, VALUES)


def test_a_second_process_is_refused_and_a_killed_one_holds_nothing(tmp_path: Path, warm_python: WarmPython) -> None:
    """What the killed one has left is removed by the next writer; nothing of a living one is."""
    code = (
        "import os, sys, torch; from pathlib import Path\n"
        "from tiered.interop.checkpoint_folder import write_checkpoint\n"
        "from tiered.zero.deferred_tensors import DeferredTensor\n"
        "def read(): print(os.getpid(), flush=True); sys.stdin.read(); return torch.ones(3)\n"
        "tensor = DeferredTensor.of(torch.empty(3, device='meta'), read)\n"
        "write_checkpoint(Path(sys.argv[1]), {'a': torch.ones(9), 'z': tensor}, max_shard_size='5GB')\n"
    )
    write_checkpoint(tmp_path / "out", VALUES, max_shard_size="50GB")
    command = [warm_python.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with pytest.raises(UsageError, match=f"process {int(process.stdout.readline())}:"):
            write_checkpoint(tmp_path / "out", NEW, max_shard_size="50GB")
        process.kill()
        assert not process.stdout.read()  # the end comes once the program is gone
    assert len(list((tmp_path / "out").iterdir())) == 2
    write_checkpoint(tmp_path / "out", NEW, max_shard_size="50GB")
    check_checkpoint(tmp_path / "out", NEW)


def test_a_child_that_was_forked_meanwhile_keeps_no_folder(tmp_path: Path) -> None:
    ready, end = os.pipe()
    with half_written(tmp_path / "out", NEW):
        child = os.fork()
        if not child:
            os.close(end)
            os.read(ready, 1)  # until the parent has ended with the folder
            os._exit(0)
    write_checkpoint(tmp_path / "out", VALUES, max_shard_size="50GB")
    os.close(end)
    assert os.waitpid(child, 0)[1] == 0
    os.close(ready)
    check_checkpoint(tmp_path / "out", VALUES)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_checkpoint_is_written_where_there_is_no_fallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """As on NFS, ZFS, FUSE and vfat; glibc's own way out is a byte in each block, which direct I/O refuses."""
    real = os.posix_fallocate

    def lacking(fd: int, offset: int, nbytes: int) -> None:
        if error == errno.EOPNOTSUPP or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(error, os.strerror(error))
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", lacking)
    values = {**VALUES, "large": torch.arange(3_000_001.0), "none": torch.empty(0, 3)}
    write_checkpoint(tmp_path / "out", values, max_shard_size="50GB")
    check_checkpoint(tmp_path / "out", values)
    write_checkpoint(tmp_path / "out", VALUES, max_shard_size="50GB")
    check_checkpoint(tmp_path / "out", VALUES)
