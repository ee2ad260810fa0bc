"""What every verb shares: the version, completion by Tab, Ctrl-C, and error lines of a readable length."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import product

import pytest

from meshweave import __version__
from meshweave.base import errors
from meshweave.cli import options
from meshweave.cli.app import _command, run_app
from sampling import mostly_slow


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["--version"]) == 0
    assert capsys.readouterr().out == f"meshweave {__version__}\n"


def test_completion_is_offered_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--install-completion" in text and "--show-completion" in text and "by Tab" in text
    env = {
        **os.environ,
        "_MESHWEAVE_COMPLETE": "complete_bash",
        "COMP_WORDS": "meshweave re",
        "COMP_CWORD": "1",
    }
    command = [sys.executable, "-c", "from meshweave.cli import main; main([])"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["reshard", "reproduce"], done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["plan", "x" * 3000, "--cluster", "tpu-v4-pod"],
        ["plan", "gpt3", "--cluster", "y" * 3000],
        ["show", "z" * 3000],
        ["show", "meshslice", "--mesh", "9" * 3000],
        ["show", *["word"] * 800],
        ["verify", "p" * 3000],
        ["plan", "gpt3", "--cluster", "tpu-v4-pod", f"--batch={'9' * 3000}x"],
    ],
)
def test_errors_quote_at_most_a_screen_line(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert run_app(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert len(err) < 700 and max(map(len, err.split())) <= errors.MAX_QUOTED + 20


@pytest.mark.parametrize(
    "args",
    [
        ["plan", "gpt3", "--cluster", "tpu-v4-pod", "--fix", ""],
        ["plan", "gpt3", "--cluster="],
        ["simulate", "--shape", "8,8,8", "--mesh", "", "--cluster", "tpu-v4-4x4"],
        ["bench", "fidelity", "--cluster", "", "--cases", "1"],
        ["tune", "layouts", "--a", ""],
        ["tune", "schedule", "--stationary", ""],
    ],
)
def test_an_option_given_an_empty_word_is_not_left_out(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    _command.cache_clear()  # verbs of packages are loaded when they are asked for
    assert run_app(args) == 2
    assert "is given an empty word: give it a value, or leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["plan", "gpt3", "--cluster", "nowhere", "--", "--x", ""],
        ["lab", "run", "nowhere.toml", "python", "script.py", "--name", ""],
        ["show", "--json", ""],
    ],
)
def test_words_that_are_no_value_of_an_option_may_be_empty(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert run_app(args) == 2
    assert "empty word" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    made = {name: str(folder / f"{name}.json") for name in ("STEP", "PRODUCTS")}
    common = ["--cluster", "dgx-h100:4", "--batch", "4", "--sequence", "64", "--json"]
    assert run_app(["plan", "llama-2-7b", *common, "--fix", "dp=4", "--out", made["STEP"]]) == 0
    products = ["--products", "--algorithms", "collective", "--out", made["PRODUCTS"]]
    assert run_app(["plan", "llama-2-7b", *common, *products]) == 0
    program = folder / "program.txt"
    program.write_text('program("p")\ntp = mesh((2,), ("x",))\n')
    schedule = folder / "schedule.csv"
    schedule.write_text("0F0,0B0\n")
    return {**made, "PROGRAM": str(program), "SCHEDULE": str(schedule)}


@pytest.mark.parametrize(
    "command",
    [
        *("simulate STEP --layer ff1x", "simulate STEP --algorithm all", "simulate STEP --mesh 2x2"),
        *("simulate STEP --pass forward", "simulate STEP --set m=4", "simulate STEP --config 1"),
        *("simulate STEP --logical", "simulate STEP --lower rings", "simulate PRODUCTS --place 2"),
        *("simulate PRODUCTS --set m=4", "simulate PRODUCTS --config 1"),
        *(f"simulate 1f1b --cluster dgx-h100 {each}" for each in ("--layer out", "--mesh 2x2", "--place 2")),
        *("simulate PROGRAM --cluster dgx-h100 --set m=4", "show PROGRAM --config 1", "show PROGRAM --m 3"),
        *("show collective --slices 8", "show cannon --block 4"),
        *("show 1f1b --m 3", "show 1f1b --dataflow ls", "show meshslice --set m=64 --m 32"),
        *("verify cannon --ranks 9", "verify cannon --layer ff1", "verify PRODUCTS --set m=3"),
        *(f"simulate {each}" for each in ("STEP --fast", "PRODUCTS --fast", "PRODUCTS --no-limits")),
        *(f"pipeline {each}" for each in ("1f1b --delay 3", "zb-1p --delay 3", "gpipe --stash-rest 0.5")),
        *(f"pipeline 1f1b {each}" for each in ("--activation x", "--chips-per-rank -4")),
        *("pipeline 1f1b --json --with-transfers", "simulate 1f1b --cluster dgx-h100:4 --fast"),
        *(f"pipeline SCHEDULE {each}" for each in ("--stages 9", "--per-rank 2", "--with-transfers")),
        "reshard --from 2x2 --to 1x4 --cluster p3.8xlarge llama-2-7b --ranks 1",
        "plan llama-2-7b --cluster dgx-h100:8 --batch 8 --json --price 2",
        "tune schedule --cluster h100-node:2 --kind greedy --max-states 7",
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], plans: dict[str, str], command: str
) -> None:
    capsys.readouterr()
    words = [plans.get(word, word) for word in command.split()]
    assert run_app(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "changes nothing" in said.err or "are of algorithms" in said.err


@pytest.mark.parametrize(
    "case",
    mostly_slow(product(["catalog models gpt3", "catalog --json", "catalog"], [">/dev/full", ">&-"]), 2),
)
def test_output_that_cannot_be_written_is_one_line(case: tuple[str, str]) -> None:
    args, redirected = case
    code = f"import sys; from meshweave.cli import main; main({args.split()!r})"
    command = ["sh", "-c", f'"$0" -c "$1" {redirected}', sys.executable, code]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    is_full = redirected != ">&-"
    assert done.returncode == (2 if is_full else 0), done.stderr
    assert done.stderr == ("error: stdout: cannot write: No space left on device\n" if is_full else "")


def test_interrupted_before_anything_was_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshweave.cli.plan.load_cluster", interrupt)
    assert run_app(["plan", "gpt3", "--cluster", "tpu-v4-pod", "--out", "nowhere.json"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted; nothing was written"


@pytest.mark.parametrize("delay_s", [0.05, 2.5])
def test_ctrl_c_is_one_line(delay_s: float) -> None:
    """In its own process group, as a terminal sends it: while modules load, and while a verb works."""
    args = ["tune", "layouts", "--cluster", "tpu-v4-pod:64", "--memory", "100MB"]
    code = f"from meshweave.cli import main\nprint('up', flush=True)\nmain({args!r})"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1] == "interrupted; nothing was written" and "Traceback" not in err


def test_ctrl_c_that_meets_a_finalizer_is_not_lost() -> None:
    """Python drops what a finalizer raises, and with it the interrupt of a Ctrl-C that came while it ran."""
    code = (
        "import signal, time\nimport meshweave.cli, meshweave.cli.app as app\n"
        "class Module:\n"
        "    def __del__(self):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        time.sleep(0)\n"
        "def run_app(args):\n"
        "    Module()\n"
        "    time.sleep(60)\n"
        "app.run_app = run_app\nmeshweave.cli.main(['plan'])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted; nothing was written\n")


def test_progress_in_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "PLAIN_LINES_EVERY_S", 0.0)
    with options.progress_bar("checking", plain_lines=True) as progress:
        progress(3, 12)
        progress(3, 12)  # nothing changed
    with options.progress_bar("tuning") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == "checking: 3 of 12\n"
