"""The command line up to the store: arguments, plans, refusals, what is asked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import tiered
from tests.rigs.warm_python import WarmPython
from tiered.errors import CapacityError, UsageError
from tiered.store.lifetime.opening import CATALOG_NBYTES
from tiered.tools import cli
from tiered.tools.cli import main
from tiered.tools.train.config import RunConfig, RunDials
from tiered.tools.train.plan import Plan
from tiered.tools.train.task import Corpus
from tiered.units import format_bytes

TINY = ("--layers", "2", "--width", "64", "--heads", "4", "--context", "32", "--dram", "32MiB")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 30 KB to learn from."""
    file = tmp_path / "text.txt"
    file.write_bytes(b"one word, one meaning; " * 1300)
    return file


def plan(**given: object) -> Plan:
    config = RunConfig.of_given({name: value for name, value in given.items() if name != "steps"})
    dials = RunDials.of_committed({}, given)
    return Plan(config, dials, (Path("runs/demo"),), durable=True, first_step=0)


@pytest.mark.parametrize(("called", "words"), [("tiered", "tiered"), ("bin/tiered", "tiered"), ("own/it", "own/it")])
def test_commands_to_come_back_with_name_us_as_we_were_called(
    called: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bare name where the path finds it, also when there is no such file here."""
    for program in (tmp_path / "bin" / "tiered", tmp_path / "own" / "it"):
        program.parent.mkdir()
        program.touch(mode=0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "argv", [called])
    assert cli._program() == words


def test_commands_to_come_back_with_are_those_of_python_m_where_it_was_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/tiered/__main__.py"])
    assert cli._program() == "python -m tiered"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tiered {tiered.__version__}\n"


def test_python_m_tiered_is_the_command_and_waits_for_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tiered", "--version"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, f"tiered {tiered.__version__}\n")
    assert "| torch\n" not in ended.stderr


class TestRefusals:
    """One line on standard error, exit status 2, nothing made."""

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--steps", "three"], "--steps"),
            (["--steps", "0"], "steps must be at least 1, got 0"),
            (["--dram", "much"], "'--dram': expected a size such as"),
            (["--dram", "1MiB"], "dram must be at least 16.0 MiB, got 1.0 MiB"),
            (["--params", "some"], "'--params': expected a number such as"),
            (["--params", "1M", "--layers", "2"], "--params chooses layers, width and heads: give it or --layers"),
            (["--width", "100", "--heads", "16"], "width 100 is not a multiple of heads 16"),
            (["--dtype", "bf17"], "dtype must be one of bf16, fp32; got 'bf17'"),
            (["--hold", "most"], "'--hold': expected a size such as"),
            (["--activations", "lose"], "activations must be one of auto, keep, recompute, swap"),
            (["--timeline", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
            (["--clip", "1", "--update", "backward"], "clipping needs every gradient"),
            (["--lr", "-1"], "lr must be a positive number"),
            (["--seed", "-1"], "seed must be at least 0"),
            (["--seed", "9223372036854775808"], "seed must be less than 9,223,372,036,854,775,808"),
            (["--params", "1e400"], "'--params': expected a number such as"),
            (["--params", "1e300"], "params must be less than 9,007,199,254,740,992"),
            (["--dram", "1e400GiB"], "'--dram': expected a size such as"),
            (["--hold", "1e999"], "'--hold': expected a size such as"),
            (["--steps", "9" * 401], "steps must be less than 9,007,199,254,740,992, got a number of"),
            (["--context", "9" * 401, "--params", "1M"], "context must be less than"),
            (["--data", "/nowhere/at/all"], "no data at /nowhere/at/all"),
            (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
            (["--json", "/tmp"], "cannot write /tmp: it is a directory"),
            (["--resume", "--fresh"], "give one of them"),
            (["--resume", "--no-durable"], "--no-durable leaves nothing to resume"),
            (["--dry-run", "--json", "/tmp/all.json"], "--dry-run begins nothing"),
            (["--dry-run", "--dram", "32MiB"], "is too small"),
            (["--dry-run", "--resume"], "no run in"),
        ],
    )
    def test_bad_arguments(
        self, arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = tmp_path / "run"
        assert main(["train", "--store", str(store), *arguments]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
        assert not store.exists()

    @pytest.mark.parametrize(
        ("arguments", "way"),
        [
            (["--clip", "1", "--update", "backward"], ["--clip", "1", "--update", "step"]),
            (["--clip", "1", "--update", "backward"], ["--clip", "1"]),
            (["--json", "/tmp/all.json"], []),
            (["--params", "10"], ["--layers", "1", "--width", "64", "--heads", "4"]),
            (["--params", "1M", "--layers", "2"], ["--params", "1M"]),
            (["--resume", "--no-durable"], ["--no-durable"]),
            (["--resume", "--no-durable", "--yes"], ["--resume", "--yes"]),
            (["--resume", "--fresh"], ["--fresh"]),
        ],
    )
    def test_options_that_a_refusal_names_are_taken(self, arguments: list[str], way: list[str], tmp_path: Path) -> None:
        command = ["train", "--dry-run", "--store", str(tmp_path / "run")]
        assert main([*command, *arguments]) == 2
        assert main([*command, *way]) == 0

    @pytest.mark.parametrize(("arguments", "says"), [([], "Missing command"), (["steal"], "No such command 'steal'")])
    def test_what_is_missing_or_unknown_is_one_line(
        self, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"tiered: {says}; try --help\n"
        assert main(["trian"]) == 2
        assert "Did you mean 'train'" in capsys.readouterr().err

    def test_a_model_that_does_not_fit_on_the_device(
        self, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = tmp_path / "run"
        assert main(["train", "--store", str(store), "--data", str(text), "--params", "100T"]) == 2
        captured = capsys.readouterr()
        assert "not enough space for the run" in captured.err
        assert "in all" in captured.out, "the plan comes first"
        assert not store.exists()


class TestConfiguration:
    """Defaults, and what a resumed run takes from its commit."""

    def test_the_default_is_the_model_of_the_peers(self) -> None:
        config = RunConfig.of_given({})
        assert (config.layers, config.width, config.heads, config.context) == (8, 2048, 16, 256)
        assert (config.batch, config.dtype, config.update, config.lr) == (4, "bf16", "backward", 4.9e-5)

    def test_clipping_and_accumulation_select_the_update_step_unless_the_other_is_asked_for(self) -> None:
        assert RunConfig.of_given({"clip": 1.0}).update == RunConfig.of_given({"accumulate": 3}).update == "step"
        assert RunConfig.of_given({"accumulate": 3, "update": "backward"}).update == "backward"

    def test_heads_follow_a_width_they_do_not_divide(self) -> None:
        assert RunConfig.of_given({"width": 200}).heads == 8

    def test_a_resumed_run_is_what_it_was(self) -> None:
        for seed in (7, (1 << 63) - 1):
            config = RunConfig.of_given({"layers": 2, "clip": 0.5, "seed": seed})
            assert RunConfig.of_committed(asdict(config), {}) == config
            assert RunConfig.of_committed(asdict(config), {"seed": seed, "layers": 2}) == config

    def test_another_model_or_optimizer_is_refused_with_a_diff(self) -> None:
        config = RunConfig.of_given({"layers": 2, "lr": 1e-4})
        with pytest.raises(UsageError, match=r"layers 2 -> 3; lr 0.0001 -> 0.001.*--fresh"):
            RunConfig.of_committed(asdict(config), {"layers": 3, "lr": 1e-3})
        with pytest.raises(UsageError, match="width 2048 -> 512"):
            RunConfig.of_committed(asdict(config), {"params": 10_000_000})

    def test_dials_may_change(self) -> None:
        dials = RunDials.of_committed({}, {"steps": 5, "data": ("a", "b")})
        again = RunDials.of_committed(asdict(dials), {"dram": 1 << 28, "hold": 0})
        assert again == RunDials(steps=5, dram=1 << 28, data=("a", "b"), hold=0)
        assert RunDials.of_committed({"steps": 7, "micro_batches": "vertical"}, {}) == RunDials(steps=7)  # gone


class TestPlan:
    """The arithmetic of the bytes that a step moves."""

    def test_bytes_of_the_default(self) -> None:
        default = plan()
        padding = default.padding_nbytes
        assert default.step_write_nbytes == 12 * 404_443_136 + padding and padding < 0.001 * 12 * 404_443_136
        assert default.space_nbytes == 31 * 404_443_136
        assert default.write_nbytes == (24 * 12 + 20) * 404_443_136 + (24 + 2) * padding
        lines = "\n".join(default.lines(Corpus((), name="nothing")))
        assert "404.4 M parameters" in lines
        assert "training in memory would need 6.0 GiB" in lines
        assert "4.5 GiB per step, 4.4 TiB per 1,000 steps and directory" in lines

    def test_a_dry_run_says_the_plan_and_begins_nothing(
        self, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = tmp_path / "run"
        options = ["--no-durable", *TINY, "--data", str(text)]
        assert main(["train", "--dry-run", *options, "--store", str(store)]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        titles = [line.split()[0] for line in lines if not line.startswith(" ")]
        assert titles == ["model", "data", "job", "memory", "device", "space", "writes"]
        begin = last.partition("nothing was begun or written; begin: ")[2]
        assert all(word in begin for word in ("--no-durable", "--layers 2", "--dram 32MiB", f"--store {store}"))
        assert "--dry-run" not in begin
        assert not store.exists()

    def test_smaller_state_is_planned_smaller(self) -> None:
        assert [round(plan(state=state).state_bytes_per_param) for state in ("exact", "compact")] == [12, 5]

    def test_gradients_that_wait_for_the_end_of_a_step_count_in_each_micro_step(self) -> None:
        """At any budget, as an upper bound: bytes that are held for good may take the room that they would have."""
        given: list[dict[str, object]] = [
            {"clip": 1.0}, {"accumulate": 3}, {"accumulate": 3, "update": "backward"}, {"clip": 1.0, "dram": 1 << 32}
        ]  # fmt: skip
        found = [plan(**each) for each in given]
        assert [(each.step_write_nbytes - each.padding_nbytes) / 404_443_136 for each in found] == [14, 18, 18, 14]

    @pytest.mark.parametrize(
        "given",
        [
            ("--params", "100k", "--dram", "32MiB", "--steps", "10"),
            ("--layers", "4", "--width", "256", "--dram", "24MiB", "--clip", "1", "--accumulate", "2"),
            ("--layers", "4", "--width", "256", "--dram", "24MiB", "--update", "backward", "--accumulate", "2"),
        ],
    )
    def test_a_run_writes_no_more_than_its_plan_says(
        self, given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Padding and the catalog count in small models, stored gradients in each micro-step."""
        options = ["--dtype", "fp32", "--context", "16", "--batch", "1", "--steps", "3", *given]
        json_file = tmp_path / "report.json"
        plans: list[Plan] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Plan, "lines", lambda self, corpus: plans.append(self) or ["planned"])
            assert main(["train", "--store", str(tmp_path / "s"), "--yes", "--json", str(json_file), *options]) == 0
        written = json.loads(json_file.read_text())["bytes_written"]
        assert 0.5 * plans[0].write_nbytes < written <= plans[0].write_nbytes

    def test_above_10_tb_the_dials_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tiered.tools.train.plan.multiplies_bf16_slowly", lambda: False)
        assert not plan().warnings()
        (warning,) = plan(steps=3000).warnings()
        assert all(dial in warning for dial in ("--dram", "--commit-every", "--no-durable", "--state"))

    def test_long_steps_in_bf16_are_warned_of_where_the_cpu_is_slow_at_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tiered.tools.train.plan.multiplies_bf16_slowly", lambda: True)
        (warning,) = plan().warnings()
        assert "--dtype fp32" in warning
        assert not plan(dtype="fp32").warnings() and not plan(layers=1, width=64, heads=4, batch=1).warnings()

    def test_space_is_counted_per_file_system_and_less_what_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directories = (tmp_path / "one", tmp_path / "two")
        tiny = RunConfig.of_given({"params": 100_000})
        short = Plan(tiny, RunDials(), directories, durable=True, first_step=0)
        needed = short.space_nbytes + CATALOG_NBYTES
        monkeypatch.setattr("tiered.tools.train.plan._free_nbytes", lambda path: needed - 1)
        with pytest.raises(CapacityError, match=rf"one, .*two: it needs {format_bytes(needed)}"):
            short.check_space()
        Plan(tiny, RunDials(), directories, durable=False, first_step=0).check_space()
        directories[0].mkdir()
        (directories[0] / "data-000").write_bytes(b"x" * 8192)
        short.check_space()


class TestInterruption:
    """Ctrl-C is a request first, the end second."""

    @pytest.mark.parametrize("times", [1, 2])
    def test_ctrl_c_in_a_process_of_its_own(
        self, times: int, tmp_path: Path, text: Path, warm_python: WarmPython
    ) -> None:
        store = str(tmp_path / "run")
        options = [*TINY, "--data", str(text), "--store", store]
        command = [warm_python.executable, "-m", "tiered.tools.cli", "train", *options]
        root = Path(__file__).parents[1]
        with subprocess.Popen(
            [*command, "--steps", "100000"], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            while not process.stdout.readline().startswith("step 2/"):
                assert process.poll() is None, process.stderr.read()
            for _ in range(times):
                process.send_signal(signal.SIGINT)
                while (line := process.stderr.readline()) and not line.startswith(("stopping as soon", "the run is")):
                    pass
            said = process.stdout.read()
            status = process.wait()
        if times == 1:
            assert "stopped by Ctrl-C; the run is resumable from step" in said
        # The first may have ended the run before the second was heard, which then is Python's own to answer.
        assert status == 130 or (times == 2 and not line and status == -signal.SIGINT)
        assert main(["verify", store]) == 0

    def test_a_refusal_is_folded_on_a_terminal_and_a_line_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setattr("tiered.tools.train.plan._free_nbytes", lambda path: 1 << 50)  # the drive may be too small
        command = ["train", "--store", str(tmp_path / "run"), "--params", "1B", "--dram", "16MiB"]
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and len(said) > 80
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        assert main(command) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) > 1 and all(len(line) <= 60 for line in lines)
