"""Small files that ask for much work, for deep recursion, or are no files: one line that names the limit."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from damage import CLUSTER, CONFIG, MODEL
from forked import Outcome, run_forked
from sweep import PROGRAM, RING

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.table import algorithm
from meshweave.base import limits
from meshweave.base.errors import MAX_LINE, MAX_QUOTED, ProgramError, listed, printable, shortened
from meshweave.base.limits import LIMITS
from meshweave.cli.app import run_app
from meshweave.ir.program import to_text
from meshweave.ir.program.parse import parse

HEAD = """program("x")
tp = mesh((2, 2), ("row", "col"))
A = tensor((8, 8), "float32")
a = input(A, tp[S(0), S(1)])
b = temp(A, tp[S(0), S(1)])
big = scratch((20000, 16), "float32", on=tp)
compute = lane()
"""


def nested(counts: list[Any], op: str = "copy(b, a, lane=compute)", declared: str = "") -> str:
    """Return a program with an op inside loops of these counts."""
    lines = [HEAD + declared + "with tp:"]
    for depth, count in enumerate(counts, 1):
        lines.append(f"{' ' * depth}for i{depth} in range({count}):")
    return "\n".join([*lines, f"{' ' * (len(counts) + 1)}{op}\n"])


def mesh_of(shape: str) -> str:
    return nested([1]).replace("(2, 2)", shape)


def outcome_of(folder: Path, args: list[str], name: str, content: str | bytes) -> Outcome:
    """Return what came of a command line in which FILE stands for a file with this content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    args = [arg.replace("FILE", str(path)) for arg in args]
    return run_forked(lambda: run_app(args))


LOOPS = nested([10] * 18)
MANY_READS = f"""{HEAD}acc = scratch((4, 4), "float32", on=tp)
with tp:
  zero(acc, lane=compute)
  for i in range(150000):
    copy(b, acc, lane=compute)
"""
MANY_WAITS = f"""{HEAD}whole = scratch((8, 8), "float32", on=tp)
t = scratch((8, 8), "float32", on=tp)
with tp:
  for i in range(20000):
    copy(t, whole, lane=compute)
    copy(whole[0:4, :], t[0:4, :], lane=compute)
"""
SIMULATE = ["simulate", "FILE", "--cluster", "tpu-v4-pod"]
PROGRAMS: list[tuple[list[str], str, str]] = [
    *(
        (args, LOOPS, "which is the limit")
        for args in (
            *(["show", "FILE", "--rank", "0"], ["show", "FILE", "--expand"], ["show", "FILE", "--json"]),
            ["show", "FILE", "--check"],
            ["show", "FILE", "--as", "jax"],
        )
    ),
    (SIMULATE, LOOPS, "has more than 200000 ops"),
    ([*SIMULATE, "--lower", "rings"], LOOPS, "has more than 200000 ops"),
    (SIMULATE, nested([10] * 18, "if 0:\n" + " " * 40 + "copy(b, a, lane=compute)"), "no op"),
    (SIMULATE, nested([300_000]), "has more than 200000 ops"),
    (SIMULATE, MANY_READS, "has more than 200000 ops"),
    (SIMULATE, MANY_WAITS, "too many ops wait for each other"),
    (["show", "FILE", "--as", "jax"], nested([300_000]), "has more than 50,000 ops, blocks and turns"),
    (SIMULATE, nested([30_000]), "ops on one rank, over the limit of 20,000"),
    ([*SIMULATE, "--against", "estimate"], nested([10_000]), "more than 15,000 ops, blocks and turns"),
    (
        SIMULATE,
        nested([1000], 'broadcast(b, a, over="tp.row", root=0, packets=65536, lane=compute)'),
        "messages",
    ),
    (SIMULATE, mesh_of("(60000, 1)"), "60,000 ranks, over the limit of 16,384"),
    (["show", "FILE", "--json"], mesh_of("(60000, 1)"), "more than 50,000 ops, blocks and turns"),
    (["show", "FILE"], nested(["+".join(["rank"] * 300)]), "more than 50 nested operations"),
    (["show", "FILE"], nested([" and ".join(["rank"] * 9000)]), "more than 50 nested operations"),
    (["show", "FILE"], nested(["+".join(["rank"] * 20_000)]), "nested too deeply"),
    (["show", "FILE"], nested(["-" * 3000 + "1"]), "nested"),
    (["show", "FILE"], nested(["0x" + "f" * 6000]), "over 2**63 - 1"),
    (["show", "FILE"], nested([1], declared=f's = scratch(({"1, " * 65}), "float32", on=tp)\n'), "65 dims"),
    (["show", "FILE"], nested([1], declared=f'T = tensor(({"1, " * 65}), "float32")\n'), "65 dims"),
    (SIMULATE, nested([1], declared=f's = scratch(({"1, " * 9}), "float32", on=tp)\n'), "9 dims"),
    (["show", "FILE"], nested([1], declared='s = scratch((1,), "int8", on=tp, slots=5000)\n'), "5,000 slots"),
    (
        ["show", "FILE"],
        nested([1], declared="".join(f"m{n} = mesh((65536,), ('a',))\n" for n in range(200))),
        "ranks in its meshes, over the limit of 262,144",
    ),
    (
        ["show", "FILE"],
        PROGRAM.replace("tp[S(0), S(1)]", "tp[T(0, 1, 0), S(1)]").replace("(8, 8)", "(9000000, 2)"),
        "separate ranges of indices, over the limit of 32,768",
    ),
    (["show", "FILE"], PROGRAM.replace("tp", "t" * 100_000), "' declares nothing"),
]


@pytest.mark.parametrize(("args", "text", "message"), PROGRAMS)
def test_a_small_program_that_asks_for_much(tmp_path: Path, args: list[str], text: str, message: str) -> None:
    outcome = outcome_of(tmp_path, args, "program.txt", text)
    assert not outcome.fault((2,)) and message in outcome.err, outcome


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (LOOPS, "not checked"),
        (nested([300_000]), "not checked"),
        (mesh_of("(240, 250)"), "not checked"),
        (nested([1500], "zero(big[i1:i1 + 1, :], lane=compute)"), "valid"),
        (nested([300]).replace("(8, 8)", "(4000, 4000)"), "index labels"),
        (
            nested([900], 'broadcast(b, a, over="tp.row", root=0, lane=l)', 'l = lane(order="ready")\n'),
            "orders tried",
        ),
        (PROGRAM.replace('"small"', '"' + "n" * 100_000 + '"'), "orders tried"),
        (nested(["(" * 190 + "3" + ")" * 190]), "valid"),
    ],
)
def test_show_prints_what_it_does_not_check(tmp_path: Path, text: str, note: str) -> None:
    outcome = outcome_of(tmp_path, ["show", "FILE"], "program.txt", text)
    assert not outcome.fault((0,)) and outcome.err.startswith("# ") and note in outcome.err, outcome


NO_OUTPUT = PROGRAM.replace("b = output(B, ", "b = temp(B, ").replace("computes(B, same(A))\n", "")
PIPELINE = ["pipeline", "1f1b", "--json", "--stages"]
ROWS = "device,dtype,m,n,k,latency_ms"
COLUMNS = f"{ROWS},{','.join(f'c{number}' for number in range(60_000))}\n"


@pytest.mark.parametrize(
    ("args", "text", "message"),
    [
        (["show", "1f1b", "--set", "stages=2"], "", "has no setting 'stages=2'; it has micro_batches=4"),
        (["show", "collective", "--set", "ranks=2"], "", "has no setting 'ranks=2'"),
        (["show", "FILE", "--as", "jax"], NO_OUTPUT, "has no outputs"),
        (["show", "FILE", "--as", "jax"], NO_OUTPUT.replace("input(A", "temp(A"), "never written"),
        (
            ["show", "collective", "--mesh", "1x4096", "--rings", "1"],
            "",
            "more than 4,194,304 numbers in the steps of its rings",
        ),
        (["tune", "algorithm", "meshslice", "--set", "mesh_shape=99999x99999"], "", "limit of 262,144"),
        (["show", "1f1b", "--set", "micro_batches=100000000"], "", "200,000,000 forwards"),
        ([*PIPELINE, "1000", "--micro-batches", "1000"], "", "1,000,000 forwards"),
        ([*PIPELINE, "65536", "--micro-batches", "1"], "", "--stages is 65536; give 1 to 4096"),
        (["pipeline", "zb-2p", "--stages", "200", "--micro-batches", "100"], "", "over the limit of 16,384"),
        (["pipeline", "FILE"], "0F0,0B0\n" * 5000, "5,000 stages, over the limit of 4,096"),
        (["pipeline", "FILE"], "0F0," * 600_000, "cells, over the limit of 524,288"),
        (["reproduce", "kernels", "--cases", "FILE"], COLUMNS, "has no rows"),
        (
            ["reproduce", "kernels", "--cases", "FILE"],
            f"{ROWS}\n" + "x,float32,1,1,1,1\n" * 20_001,
            "20,001 rows",
        ),
        (["reproduce", "published", "--cases", "FILE"], COLUMNS, "no column 'source'"),
    ],
)
def test_a_short_line_that_asks_for_much(tmp_path: Path, args: list[str], text: str, message: str) -> None:
    outcome = outcome_of(tmp_path, args, "file.txt", text)
    assert not outcome.fault((2,)) and message in outcome.err, outcome


def test_even_rings_of_many_ranks_are_shown(tmp_path: Path) -> None:
    args = [
        "show",
        "collective",
        "--mesh",
        "1x2048",
        "--m",
        "2048",
        "--n",
        "2048",
        "--k",
        "2048",
        "--rings",
        "2",
    ]
    assert not outcome_of(tmp_path, args, "x", "").fault((0,))


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


PLAN = ["plan", "--products", "FILE", "--cluster", "tpu-v4-pod:4", "--algorithms", "collective"]
PLAN_ON = ["plan", "--products", "gpt3", "--cluster", "FILE", "--algorithms", "collective"]
RESHARD = ["reshard", "FILE", "--from", "2x2", "--to", "1x4", "--cluster", "p3.8xlarge"]
MANY = MODEL.replace("num_layers = 2", "num_layers = 10_000_000")
WIDE = (files("meshweave") / "catalog/models/llama-2-13b.toml").read_text()
WIDE = WIDE.replace("\nhidden = 5120", "\nhidden = 9_999_999")
DESCRIPTIONS: list[tuple[list[str], str, str | bytes, str]] = [
    (RESHARD, "model.toml", MANY, "90,000,003 tensors, over the limit of 4,096"),
    ([*RESHARD, "--out", "FILE.out"], "model.toml", WIDE, "messages, over the limit of 200,000"),
    (PLAN, "model.toml", MODEL + "x" + ".x" * 20_000 + " = 1\n", "20,001 parts of a dotted key"),
    (PLAN, "model.toml", MODEL + "[" + ".".join(["x"] * 20_000) + "]\n", "20,000 parts of a dotted key"),
    (PLAN, "model.toml", MODEL + f"x = {deep(100)}\n", "more than 64 levels of nested tables"),
    (PLAN, "model.toml", MODEL + f"x = {deep(100_000)}\n", "more than 64 levels of nested tables"),
    (PLAN, "model.toml", "#" * (1 << 20) + "\n" + MODEL, "more than 1,048,576 bytes"),
    (PLAN, "config.json", f'{{"a": {deep(100)}}}', "more than 64 levels of nested tables"),
    (PLAN, "config.json", f'{{"a": {deep(100_000)}}}', "more than 64 levels of nested tables"),
    (PLAN, "config.json", f'{{"a": [{"0, " * 300_000}0]}}', "more than 200,000 values"),
    (PLAN, "config.json", " " * (1 << 22) + json.dumps(CONFIG), "more than 4,194,304 bytes"),
    (PLAN, "config.json", json.dumps(CONFIG).replace("1000", "9" * 5000), "not valid JSON"),
    (PLAN, "config.json", json.dumps(CONFIG).replace("1000", "NaN"), "vocab_size: nan is not valid"),
    (PLAN, "config.json", json.dumps(CONFIG).replace("1000", "1e999"), "vocab_size: inf is not valid"),
    (PLAN, "config.json", json.dumps({"\ud800\n" * 500: 1}), "missing"),
    (PLAN, "model.toml", MODEL.encode() + b"\xff\xfe", "not UTF-8"),
    (PLAN, "model.toml", MODEL + 'note = "\x00"', "not valid TOML"),
    (PLAN, "model.toml", MODEL + "".join(f"k{n} = 1\n" for n in range(50_000)), "problems"),
    (["run", "FILE"], "plan.json", json.dumps({"candidates": [1] * 150_000}), "problems"),
    (
        PLAN_ON,
        "cluster.toml",
        CLUSTER.replace("[2, 2]", "[16777216, 16777216]"),
        "over the limit of 65,536",
    ),
    (PLAN_ON, "cluster.toml", RING.replace("size = 4", "size = 16777216"), "over the limit of 65,536"),
    (
        ["plan", "--products", "gpt3", "--cluster", "FILE:99999999"],
        "cluster.toml",
        RING,
        "over the limit of 65,536",
    ),
]


@pytest.mark.parametrize(("args", "name", "content", "message"), DESCRIPTIONS)
def test_a_description_that_asks_for_much(
    tmp_path: Path, args: list[str], name: str, content: str | bytes, message: str
) -> None:
    outcome = outcome_of(tmp_path, args, name, content)
    assert not outcome.fault((2,)) and message in outcome.err, outcome


def test_what_is_large_and_right_is_read(tmp_path: Path) -> None:
    for args, name, content in (
        (PLAN, "model.toml", "\ufeff" + MANY),
        (PLAN, "model.toml", MODEL + 'note = "' + "a.b." * 500 + '"\n'),
        (
            ["plan", "--products", "gpt3", "--cluster", "tpu-v4-pod:65536", "--algorithms", "collective"],
            "model.toml",
            "",
        ),
        (["show", "FILE", "--no-check"], "program.txt", PROGRAM.replace('"small"', '"\\ud800"')),
        (SIMULATE, "program.txt", PROGRAM.replace('"small"', '"\\ud800"')),
    ):
        outcome = outcome_of(tmp_path, args, name, content)
        assert not outcome.fault((0,)), outcome


def test_no_regular_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for path, message in (
        (str(pipe), "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (str(tmp_path), "is a directory"),
        ("/proc/self/mem", "cannot be read"),
        ("x" * 100_000 + ".toml", "cannot be read"),
        ("a\udcff.toml", "no such file"),
    ):
        for args in (["lab", "check", path], ["verify", path], ["show", path], ["simulate", path]):
            if path == str(tmp_path) and args[0] == "simulate":
                continue  # needs --cluster first
            outcome = run_forked(lambda args=args: run_app(args))  # type: ignore[misc]
            assert not outcome.fault((2,)), outcome
            if args[0] == "lab":
                assert message in outcome.err, outcome


def stdin_of(content: str) -> Callable[[], int]:
    def action() -> int:
        os.dup2(os.open(content, os.O_RDONLY), 0)
        return run_app(["show", "-"])

    return action


def test_stdin_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "program.txt").write_text(PROGRAM)
    (tmp_path / "broken.txt").write_bytes(b"\xff" * 100)
    for source, message in (
        ("/dev/zero", "stdin: has more than 32,000,000 bytes"),
        (str(tmp_path / "broken.txt"), "stdin: is not UTF-8 text (byte 0)"),
    ):
        outcome = run_forked(stdin_of(source))
        assert not outcome.fault((2,)) and message in outcome.err, outcome
    assert not run_forked(stdin_of(str(tmp_path / "program.txt"))).fault((0,))


def test_every_limit_is_stated_and_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "limits.md").read_text(encoding="utf-8")
    assert len(LIMITS) > 30 and all(f"| {limit.most:,} " in page for limit in LIMITS)
    assert len({limit.refusal(limit.most + 1) for limit in LIMITS}) > len(LIMITS) // 2


def test_errors_are_shortened_in_one_place() -> None:
    rng = random.Random(1)
    for _ in range(300):
        parts = (
            rng.choice(("a", "'", " ", "\n", "\n  ", "\x1b", "\ud800", "b" * 300, "c d " * 200))
            for _ in range(20)
        )
        message = "".join(parts)
        said = str(ProgramError(message, op=message, buffer=message))
        lines = said.split("\n")
        assert all(len(line) <= MAX_LINE and line.isprintable() for line in lines), message
        assert all(line.startswith("  ") for line in lines[1:]), message
        assert max(map(len, re.split(r"\s", said))) <= MAX_QUOTED, message
        assert printable(message).isprintable()
    assert shortened("short 'x'") == "short 'x'" and listed("abc") == "a, b, c"
    assert listed(range(1000)).endswith(" and 988 more")


def test_steps_are_counted_as_ranks_take_them() -> None:
    for counts, steps in (([3, 4], 3 + 3 * (1 + 4 + 4)), ([0, 10**12], 0), (["i0 + 1"], 1)):
        loops = nested(counts).replace("i0", "tp.row")
        program = parse(loops)
        per_rank = [1 + 1 + 1 + steps] * 4 if counts != ["i0 + 1"] else [5, 5, 7, 7]
        exact = limits.Limit(sum(per_rank), "steps", "this")
        assert program.has_steps_within(exact)
        assert not program.has_steps_within(limits.Limit(exact.most - 1, "steps", "this"))


def test_a_layer_that_takes_an_age_is_refused(tmp_path: Path) -> None:
    model, slow = tmp_path / "small.toml", CLUSTER.replace("1e12", "8")
    assert slow != CLUSTER
    model.write_text(MODEL)
    outcome = outcome_of(
        tmp_path,
        ["tune", "block", str(model), "--cluster", "FILE", "--batch", "4", "--sequence", "64"],
        "c.toml",
        slow,
    )
    assert not outcome.fault() and "106 days" in outcome.err, outcome


def test_rings_of_parts_that_take_much_to_write_are_refused_soon(tmp_path: Path) -> None:
    """Each of 250 members has its own extents in the dims that 240 others share unevenly."""
    problem = BlockProblem(3, 2, 5, 3, 3, 2, 5, biases=True)
    text = to_text(algorithm("atp").program(problem, BlockConfig()))
    outcome = outcome_of(
        tmp_path, ["show", "FILE", "--rings", "2"], "x.txt", text.replace("(2, 2)", "(250, 240)", 1)
    )
    assert not outcome.fault() and "as rings, the program has more than" in outcome.err, outcome
