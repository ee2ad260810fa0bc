"""Mutated files of every kind that the command line reads, given to the verbs that read them.

A `Kind` has good files, the grammar by which they are mutated, and the command lines for a file of it. `sweep`
makes cases from a seed and yields them with what is wrong; each runs in a fork with limits (`forked`).
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from damage import CLUSTER, CONFIG, HOSTS, MODEL, TREE
from file_mutations import NUMBERS, SIGNS, STRINGS, mutated
from forked import Outcome, run_forked

from meshweave.base.errors import UnsupportedError
from meshweave.check import runner, verifier
from meshweave.cli.app import run_app
from meshweave.describe.catalog import catalog_text

ROOT = Path(__file__).parents[2]

PROGRAM = """program("small")
tp = mesh((2, 2), ("row", "col"))
A = tensor((8, 8), "float32")
B = tensor((8, 8), "float32")
a = input(A, tp[S(0), S(1)])
b = output(B, tp[S(0), S(1)])
whole = scratch((8, 4), "float32", on=tp, slots=2)
compute = lane()
row = lane(order="ready", width=2)
computes(B, same(A))
with tp:
    for s in range(2):
        all_gather(whole(s), a, over="tp.row", dim=0, lane=row, name="gather")
    copy(b, whole(1)[4 * tp.row:4 * tp.row + 4, :], lane=compute)
"""

RING = """name = "ring"
source = "made up"
[chip]
name = "chip"
peak_flops_per_s = { bfloat16 = 1e12, float32 = 5e11 }
memory_bytes = 16e9
memory_bytes_per_s = 1e11
gemm_tile = [128, 128, 64]
[network]
kind = "ring"
size = 4
axis = { name = "link", link_bytes_per_s = 1e10, ways = 2 }
"""
FULL_MESH = RING.replace('kind = "ring"\nsize = 4\naxis', 'kind = "full_mesh"\nnum_packages = 4\nlink')

Verb = Callable[[random.Random, str], list[str]]


@dataclass(frozen=True)
class Kind:
    """Files of one kind: good ones, their grammar, the name of a mutated one, and the verbs that read it."""

    grammar: str
    file: str
    seeds: tuple[str, ...]
    verbs: tuple[Verb, ...]
    statuses: tuple[int, ...] = (0, 2)


def _tables_as_json(texts: Sequence[str]) -> tuple[str, ...]:
    import tomllib

    return tuple(json.dumps(tomllib.loads(text)) for text in texts)


def _said(*args: str) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert run_app(list(args)) == 0, args
    return out.getvalue()


def programs() -> tuple[str, ...]:
    """Return the texts of small programs of several families, and some lowered."""
    small = ("--set", "m=16", "--set", "n=16", "--set", "k=16")
    shown = [
        _said(
            "show", "meshslice", "--m", "16", "--n", "16", "--k", "16", "--slices", "1:2:1", "--block", "1"
        ),
        _said("show", "collective", "--m", "16", "--n", "16", "--k", "16", "--rings", "1"),
        *(_said("show", name, *small) for name in ("summa", "cannon", "cosma")),
        *(_said("show", name) for name in ("1f1b", "t3_ring", "reshard_broadcast", "atp")),
        _said("show", "collective", "--m", "8", "--n", "8", "--k", "8", "--expand"),
    ]
    return (PROGRAM, PROGRAM, *shown)


def kinds(folder: Path) -> dict[str, Kind]:
    """Return the kinds of files; good files that others are read beside are written to `folder`."""
    good = {"model.toml": MODEL, "cluster.toml": CLUSTER, "program.txt": PROGRAM}
    paths = {name: str(folder / f"good-{name}") for name in good}
    for name, text in good.items():
        Path(paths[name]).write_text(text)
    model, cluster, program = paths["model.toml"], paths["cluster.toml"], paths["program.txt"]
    plan_args = ("--batch", "2", "--seq", "64", "--json", "--algorithms")
    plans = tuple(
        _said("plan", model, "--products", "--cluster", cluster, *plan_args, names)
        for names in ("all", "collective", "meshslice,summa")
    )
    clusters = (CLUSTER, CLUSTER, HOSTS, HOSTS, TREE, RING, FULL_MESH, RING.replace('"ring"', '"switch"'))
    clusters = (
        *clusters,
        *(catalog_text("clusters", name) for name in ("tpu-v4-pod", "p3.8xlarge", "h100-node")),
    )
    models = (MODEL, MODEL, *(catalog_text("models", name) for name in ("gpt3", "llama-3-8b")))
    configs = (
        json.dumps(CONFIG),
        json.dumps(CONFIG | {"model_type": "gpt2", "n_embd": 64, "quantization": {"a": [1]}}),
    )
    labs = tuple(path.read_text() for path in sorted((ROOT / "examples" / "labs").glob("*.toml")))
    cluster_verbs = _cluster_verbs(model, program)
    model_verbs = _model_verbs(cluster)
    return {
        "cluster TOML": Kind("toml", "cluster.toml", clusters, cluster_verbs),
        "cluster JSON": Kind("json", "cluster.json", _tables_as_json(clusters), cluster_verbs),
        "model TOML": Kind("toml", "model.toml", models, model_verbs),
        "Hugging Face config": Kind("json", "config.json", configs, model_verbs),
        "plan": Kind("json", "plan.json", plans, _plan_verbs(cluster), (0, 1, 2)),
        "program": Kind("program", "program.txt", programs(), _program_verbs(cluster)),
        "lab": Kind("toml", "lab.toml", labs, (lambda rng, path: ["lab", "check", path],)),
    }


def _cluster_verbs(model: str, program: str) -> tuple[Verb, ...]:
    return (
        lambda rng, path: [
            *(
                "plan",
                model,
                "--products",
                "--cluster",
                path + rng.choice(("", "", ":4", ":64", ":99999999")),
                "--batch",
                "4",
            ),
            *("--seq", "64", "--algorithms", rng.choice(("all", "collective,meshslice", "summa"))),
            *rng.choice(([], ["--json"])),
        ],
        lambda rng, path: [
            "simulate",
            program,
            "--cluster",
            path,
            *rng.choice(([], ["--logical"], ["--json"])),
        ],
        lambda rng, path: [
            *("reshard", "--from", "2x2 S0R", "--to", "1x2 RS1", "--shape", "64,64", "--cluster", path),
            *rng.choice(([], ["--simulate"], ["--row-per-host"])),
        ],
        lambda rng, path: [
            "tune",
            "layouts",
            "--m",
            "64",
            "--n",
            "64",
            "--k",
            "64",
            "--cluster",
            path + ":4",
        ],
        lambda rng, path: ["tune", "algorithm", "meshslice", "--cluster", path],
        lambda rng, path: [
            "tune",
            "schedule",
            "--m",
            "64",
            "--n",
            "64",
            "--k",
            "64",
            "--cluster",
            path,
            "--kind",
            "direct,greedy",
        ],
    )


def _model_verbs(cluster: str) -> tuple[Verb, ...]:
    return (
        lambda rng, path: [
            *(
                "plan",
                path,
                "--products",
                "--cluster",
                rng.choice((cluster, "tpu-v4-pod:16")),
                "--batch",
                "4",
                "--seq",
                "64",
            ),
            *("--algorithms", rng.choice(("all", "collective", "meshslice")), *rng.choice(([], ["--json"]))),
        ],
        lambda rng, path: ["reshard", path, "--from", "2x2", "--to", "1x4", "--cluster", "p3.8xlarge"],
    )


def _plan_verbs(cluster: str) -> tuple[Verb, ...]:
    few = "--layer", "out", "--max-dim", "16", "--json"
    return (
        lambda rng, path: ["verify", path, "--ranks", "2", "--algorithm", "collective", *few],
        lambda rng, path: ["run", path, "--layer", "out", "--max-dim", "64", *rng.choice(([], ["--json"]))],
        lambda rng, path: [
            *("simulate", path, "--cluster", cluster, "--layer", rng.choice(("ff1", "out"))),
            *rng.choice(([], ["--pass", "forward"], ["--algorithm", "all"], ["--mesh", "1x4"], ["--json"])),
            *rng.choice(([], ["--against", "estimate"], ["--lower", "rings"])),
        ],
        lambda rng, path: ["simulate", path],
    )


def _program_verbs(cluster: str) -> tuple[Verb, ...]:
    shown: tuple[list[str], ...] = (
        *([], [], [], ["--no-check"], ["--expand"], ["--rank", "0"], ["--json"], ["--rings", "2"]),
        *(["--rank", "3", "--no-check"], ["--json", "--no-check"], ["--expand", "--rings", "1"]),
    )
    return (
        lambda rng, path: ["show", path, *rng.choice(shown)],
        lambda rng, path: ["show", path, *rng.choice(shown)],
        lambda rng, path: [
            *("simulate", path, "--cluster", rng.choice((cluster, "tpu-v4-pod", "dgx-h100", "p3.8xlarge"))),
            *rng.choice(
                ([], [], ["--json"], ["--against", "estimate"], ["--lower", "rings"], ["--lower", "chains"])
            ),
        ],
    )


def settings_args(rng: random.Random) -> list[str]:
    """Return a command line whose values of --set, --shape, --from and kin are mutated."""
    names = (
        "meshslice",
        "summa",
        "1f1b",
        "cosma",
        "universal",
        "reshard_broadcast",
        "t3_ring",
        "25d",
        "atp",
        "fsdp",
    )
    fields = (
        "m",
        "n",
        "k",
        "mesh_shape",
        "rows",
        "stages",
        "microbatches",
        "a",
        "b",
        "dtype",
        "shape",
        "dataflow",
    )
    values = (*NUMBERS, *STRINGS, "2x2", "2x4 S0R", "S0R", "1x1", "4x4 S01R", "300x300 S0S1", *SIGNS)
    value = rng.choice(values)[:100_000].replace("\\ud800", "\udcff")
    setting = f"{rng.choice(fields)}={value}"
    return rng.choice(
        (
            ["show", rng.choice(names), "--set", setting],
            ["simulate", rng.choice(names), "--set", setting, "--cluster", "tpu-v4-pod"],
            ["tune", "algorithm", rng.choice(names), "--set", setting],
            [
                "show",
                "meshslice",
                rng.choice(("--m", "--mesh", "--slices", "--block", "--dtype", "--rank")),
                value,
            ],
            ["reshard", "--from", value, "--to", "1x2 RS1", "--shape", "64,64", "--cluster", "p3.8xlarge"],
            ["reshard", "--from", "2x2 S0R", "--to", "1x2 RS1", "--shape", value, "--cluster", "p3.8xlarge"],
            ["plan", value, "--cluster", "tpu-v4-pod:4"],
            ["plan", "gpt3", "--cluster", value],
            ["show", value],
            ["verify", value],
            ["lab", "check", value],
            ["catalog", value],
        )
    )


def refuse_processes() -> None:
    """Make `verify` and `run` do all but start processes, in this process and its forks."""

    def refuse(*args: Any) -> Any:
        raise UnsupportedError("no processes in this test")

    runner.measure = refuse  # type: ignore[assignment]
    verifier.verify_on_processes = lambda *args: "no processes in this test"  # type: ignore[assignment]


@dataclass(frozen=True)
class SweepCase:
    """One mutated input: its kind, the command line, and what came of it."""

    kind: str
    args: list[str]
    data: bytes
    outcome: Outcome
    fault: str


def _case_action(args: list[str], path: Path | None, data: bytes) -> Callable[[], Any]:
    def action() -> Any:
        refuse_processes()
        if path is not None:
            path.write_bytes(data)
        return run_app(args)

    return action


def sweep(folder: Path, seed: int, count: int) -> Iterator[SweepCase]:
    """Yield `count` cases, all kinds in turn. The same seed and count make the same cases."""
    table = kinds(folder)
    names = [*table, "settings", "program"]
    for number in range(count):
        rng = random.Random(f"{seed}:{number}")
        name = names[number % len(names)]
        statuses: tuple[int, ...] = (0, 2)
        path: Path | None = None
        data = b""
        if name == "settings":
            args = settings_args(rng)
        else:
            kind = table[name]
            statuses, path = kind.statuses, folder / kind.file
            data = mutated(rng, kind.grammar, rng.choice(kind.seeds), rng.choice(kind.seeds))
            args = rng.choice(kind.verbs)(rng, str(path))
        if args[:2] == ["lab", "check"]:
            statuses = (0, 2)
        outcome = run_forked(_case_action(args, path, data))
        fault = outcome.fault(statuses)
        if args[:2] == ["lab", "check"] and outcome.status == 2 and outcome.out:
            fault = ""  # a lab that no such machine can build
        yield SweepCase(name, args, data, outcome, fault)
