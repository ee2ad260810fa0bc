"""Mutated files of every kind that the command line reads, given to the verbs that read them.

A `Kind` has good files, the grammar by which they are mutated, and the command lines for a file of it. `sweep`
makes cases from a seed and yields them with what is wrong; each runs in a fork with limits (`forked`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from damage import CLUSTER, CONFIG, EXPERTS_CONFIGS, HOSTS, MODEL, TREE
from file_mutations import NUMBERS, SIGNS, STRINGS, mutated
from forked import CPU_S, Outcome, run_forked
from verb_commands import COMMANDS, odd_options, unmutated

from meshweave.algorithms.contract import Algorithm
from meshweave.algorithms.experts.algorithm import ExpertsAlgorithm
from meshweave.algorithms.table import ALGORITHMS
from meshweave.base.errors import UnsupportedError
from meshweave.calibrate import device
from meshweave.check import runner, verifier
from meshweave.cli import calibrate
from meshweave.cli.app import run_app
from meshweave.describe.catalog import catalog_text, clusters, models
from meshweave.describe.machine.measured_file import SHIPPED
from meshweave.ir.program.text import to_text
from meshweave_lab.lab import Lab
from meshweave_studies.tpu import compiled, products

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

MATRIX = """
name = "pairs"
source = "made up"
[[layers]]
name = "between"
size = 2
p2p_bytes_per_s = 1e9
group_bytes_per_s = 2e9
[[layers]]
name = "within"
size = 2
p2p_bytes_per_s = 1e10
group_bytes_per_s = 3e10
"""
EXPERTS_PLANS = ("--fix tp=2,ep=2,etp=2", "--fix ep=8,tp=1 --precision fp8-block")
"""Options of plans of layers of experts; the second one's products run below 16 bits."""
SCHEDULES = ("1f1b --stages 4 --micro-batches 4", "zb-h1 --stages 2 --micro-batches 3 --with-transfers")


@dataclass(frozen=True)
class Kind:
    """Files of one kind: good ones, their grammar, and the name of a mutated one."""

    grammar: str
    file: str
    seeds: tuple[str, ...]


def _tables_as_json(texts: Sequence[str]) -> tuple[str, ...]:
    import tomllib

    return tuple(json.dumps(tomllib.loads(text)) for text in texts)


def _said(*args: str) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert run_app(list(args)) == 0, args
    return out.getvalue()


def programs(is_whole: bool) -> tuple[str, ...]:
    """Return the texts of small programs of several families, some lowered; of the whole table if asked."""
    small = ("--set", "m=16", "--set", "n=16", "--set", "k=16")
    shown = [
        _said(
            "show", "meshslice", "--m", "16", "--n", "16", "--k", "16", "--slices", "1:2:1", "--block", "1"
        ),
        _said("show", "collective", "--m", "16", "--n", "16", "--k", "16", "--rings", "1"),
        *(_said("show", name, *small) for name in ("summa", "cannon", "cosma")),
        *(_said("show", name) for name in ("1f1b", "t3_ring", "reshard_broadcast", "atp")),
        _said("show", "collective", "--m", "8", "--n", "8", "--k", "8", "--expand"),
        *_counted_programs(),
    ]
    if is_whole:
        shown += (to_text(entry.program(*_first(entry))) for entry in ALGORITHMS.values())
    return (PROGRAM, PROGRAM, *shown)


def _first(entry: Algorithm[Any, Any]) -> tuple[Any, Any]:
    """Return the first example of an algorithm, and its first config."""
    problem = next(entry.examples())
    return problem, next(entry.candidates(problem))


def _counted_programs() -> Iterator[str]:
    """Yield the programs of experts whose counts are known when they run only."""
    for entry in ALGORITHMS.values():
        if isinstance(entry, ExpertsAlgorithm):
            yield to_text(entry.counted_program(*_first(entry)))


def _catalog_seeds(kind: str, small: tuple[str, ...], is_whole: bool) -> tuple[str, ...]:
    """Return small descriptions, each as often as it takes to be half of all, and those of the catalog."""
    names = clusters() if kind == "clusters" else models()
    named = tuple(catalog_text(kind, name) for name in (names if is_whole else names[:: len(names) // 4]))
    return small * max(1, len(named) // len(small)) + named


def kinds(folder: Path, is_whole: bool = False) -> dict[str, Kind]:
    """Return the kinds of files that verbs read; a good file of each is written to `folder`.

    Good files of clusters, models and programs are a few, or the whole catalog and table of algorithms.
    """
    small = (CLUSTER, HOSTS, TREE, RING, FULL_MESH, RING.replace('"ring"', '"switch"'))
    clusters = _catalog_seeds("clusters", small, is_whole)
    models = _catalog_seeds("models", (MODEL,), is_whole)
    configs = (CONFIG, CONFIG | {"model_type": "gpt2", "n_embd": 64, "quantization": {"a": [1]}})
    labs = tuple(path.read_text() for path in sorted((ROOT / "examples" / "labs").glob("torus*.toml")))
    table = {
        "cluster": Kind("toml", "cluster.toml", clusters),
        "cluster_json": Kind("json", "cluster.json", _tables_as_json(clusters)),
        "model": Kind("toml", "model.toml", models),
        "config": Kind("json", "config.json", tuple(map(json.dumps, configs))),
        "experts": Kind("json", "experts.json", tuple(map(json.dumps, EXPERTS_CONFIGS))),
        "lab": Kind("toml", "lab.toml", labs),
        "matrix": Kind("toml", "matrix.toml", (MATRIX,)),
        "kernels": Kind("toml", "kernels.toml", (_catalog("h100-sxm5-80gb.toml"), _catalog("tpu-v5e.toml"))),
        "measured": Kind("csv", "measured.csv", tuple(map(_few_rows, map(_catalog, SHIPPED)))),
        "runs": Kind("csv", "runs.csv", (_few_rows(_published("training_runs.csv"), 4),)),
        "program": Kind("program", "program.txt", programs(is_whole)),
        "schedule": Kind(
            "csv", "schedule.csv", tuple(_said("pipeline", *args.split()) for args in SCHEDULES)
        ),
    }
    for kind in table.values():
        (folder / f"good-{kind.file}").write_text(kind.seeds[0])
    model, cluster = folder / "good-model.toml", folder / "good-cluster.toml"
    sizes = f"plan {model} --cluster {cluster} --batch 4 --sequence 64 --json"
    plans = tuple(
        _said(*sizes.split(), "--products", "--algorithms", names)
        for names in ("all", "collective", "meshslice,summa")
    )
    step = "plan llama-2-7b --cluster dgx-h100:8 --batch 8 --json"
    steps = tuple(
        _said(*step.split(), "--fix", f"{fix},strategy=megatron")
        for fix in ("tp=8", "tp=4,dp=2", "tp=2,pp=4")
    )
    experts = f"plan {folder / 'good-experts.json'} --cluster dgx-h100:8 --batch 8 --sequence 64 --json"
    steps += tuple(_said(*experts.split(), *options.split()) for options in EXPERTS_PLANS)
    table |= {"plan": Kind("json", "plan.json", plans), "step": Kind("json", "step.json", steps)}
    for name in ("plan", "step"):
        (folder / f"good-{table[name].file}").write_text(table[name].seeds[0])
    return table


def _catalog(name: str) -> str:
    return (files("meshweave") / "catalog" / "kernels" / name).read_text("utf-8")


def _published(name: str) -> str:
    return (files("meshweave_studies") / "published" / name).read_text("utf-8")


def _few_rows(text: str, count: int = 40) -> str:
    return "\n".join(text.splitlines()[: count + 1]) + "\n"


def command_line(folder: Path, table: dict[str, Kind], mutated_kind: str, command: str) -> list[str]:
    """Return a command in which {kind} is a good file, and one of `mutated_kind` the mutated one."""
    args = []
    for word in shlex.split(command):
        for kind in table:
            good, spoilt = folder / f"good-{table[kind].file}", folder / table[kind].file
            word = word.replace(f"{{{kind}}}", str(spoilt if kind == mutated_kind else good))
        args.append(word)
    return args


def settings_args(rng: random.Random) -> list[str]:
    """Return a command line whose values of --set, --shape, --from and kin are mutated."""
    names = list(ALGORITHMS)
    name = rng.choice(names)
    known = [field.name for field in dataclasses.fields(next(ALGORITHMS[name].examples()))]
    field = rng.choice(known) if rng.random() < 0.8 else rng.choice(("", "x", *names))
    values = (*NUMBERS, *STRINGS, "2x2", "2x4 S0R", "S0R", "1x1", "4x4 S01R", "300x300 S0S1", *SIGNS)
    value = rng.choice(values)[:100_000].replace("\\ud800", "\udcff")
    setting = f"{field}={value}"
    return rng.choice(
        (
            ["show", name, "--set", setting],
            ["simulate", name, "--set", setting, "--cluster", rng.choice(("tpu-v4-pod", "dgx-h100"))],
            ["tune", "algorithm", name, "--set", setting],
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
    """Make verbs do all but start processes, build labs and compile, in this process and its forks."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise UnsupportedError("no processes in this test")

    runner.measure = refuse  # type: ignore[assignment]
    verifier.verify_on_processes = lambda *args: "no processes in this test"  # type: ignore[assignment]
    Lab.up = refuse  # type: ignore[method-assign]
    calibrate.run_calibration = refuse  # type: ignore[assignment]
    device.calibrate_device = refuse  # type: ignore[assignment]
    products.calibrate_tpu = refuse  # type: ignore[assignment]
    compiled.compile_program = refuse  # type: ignore[assignment]


@dataclass(frozen=True)
class SweepCase:
    """One mutated input: its kind, the command line, and what came of it.

    One that `is_cut` was ended after `_LONGEST_S`, less than it may take: whole studies take minutes.
    """

    kind: str
    args: list[str]
    data: bytes
    outcome: Outcome
    fault: str
    is_cut: bool = False


def _case_action(args: list[str], folder: Path, put: Callable[[], None]) -> Callable[[], Any]:
    def action() -> Any:
        refuse_processes()
        os.chdir(folder / "scratch")
        put()
        return run_app(args)

    return action


def _no_file(rng: random.Random, path: Path) -> None:
    """Put something at a path that is no good file: a device, pipe, folder, loop of links, compressed file."""
    kind = rng.randrange(7)
    if kind == 0:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem")))
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.symlink_to(path)
    elif kind == 4:
        path.write_bytes(gzip.compress(b"x" * 100_000))
    elif kind == 5:
        path.write_bytes(b"\x00" * rng.choice((1, 100, 5_000_000)))
    else:
        path.write_bytes(
            rng.choice((b"", b"\xef\xbb\xbf", b"\n" * 1_000_000, b"{}", b"[]", b"=" * 3_000_000))
        )


def _spoil(rng: random.Random, path: Path, kind: Kind) -> tuple[str, bytes, Callable[[], None]]:
    """Return a good file, the mutated one, and what puts that, or something that is no file, in its place."""
    if rng.random() < 0.06:
        return kind.seeds[0], b"", partial(_no_file, random.Random(rng.random()), path)
    seed = rng.choice(kind.seeds)
    data = mutated(rng, kind.grammar, seed, rng.choice(kind.seeds))
    return seed, data, partial(path.write_bytes, data)  # type: ignore[return-value]


def _clear(path: Path) -> None:
    """Remove what stands at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_LONGEST_S = 60.0
_unmutated_s: dict[tuple[str, str], float] = {}


def _allowed_s(folder: Path, table: dict[str, Kind], command: str, spoilt: str, seed: str) -> float:
    """Return the processor seconds that mutations of a command and file may take: three times theirs, or `CPU_S`.

    Those are not measured beyond a third of `_LONGEST_S`, where a case is ended.
    """
    if (command, seed) not in _unmutated_s:
        args = command_line(folder, table, spoilt, command)
        put = partial((folder / table[spoilt].file).write_text, seed) if spoilt else lambda: None
        outcome = run_forked(_case_action(args, folder, put), _LONGEST_S / 3)  # type: ignore[arg-type]
        _unmutated_s[command, seed] = outcome.cpu_s
    return max(CPU_S, 3 * _unmutated_s[command, seed])


def sweep(folder: Path, seed: int, count: int, only: Sequence[int] = ()) -> Iterator[SweepCase]:
    """Yield `count` cases, all commands in turn, or `only` some; many are of the whole catalog.

    The same seed and count make the same cases.
    """
    table = kinds(folder, is_whole=count >= 1000)
    scratch = folder / "scratch"
    for number in only or range(count):
        rng = random.Random(f"{seed}:{number}")
        verb = list(COMMANDS)[number % len(COMMANDS)]
        command = rng.choice(COMMANDS[verb])
        slots = [kind for kind in table if f"{{{kind}}}" in command]
        spoilt = rng.choice(slots) if slots else ""
        if spoilt == "cluster" and rng.random() < 0.3 and ".toml" not in command:
            spoilt, command = "cluster_json", command.replace("{cluster}", "{cluster_json}")
        args = command_line(folder, table, spoilt, command)
        if not slots or rng.random() < 0.35:
            args = [*args, *odd_options(rng, verb, args)]
        if verb == "show" and rng.random() < 0.2:
            args, spoilt = settings_args(rng), ""
        _clear(scratch)
        scratch.mkdir()
        good, data, put = "", b"", lambda: None
        if spoilt:
            path = folder / table[spoilt].file
            _clear(path)
            good, data, put = _spoil(rng, path, table[spoilt])
        outcome = run_forked(_case_action(args, folder, put))
        allowed_s: float = CPU_S
        if outcome.is_late:
            _clear(scratch)
            scratch.mkdir()
            if spoilt:
                _clear(path)
            allowed_s = _allowed_s(folder, table, unmutated(verb, command), spoilt, good)
            _clear(scratch)
            scratch.mkdir()
            if spoilt:
                _clear(path)
            outcome = run_forked(_case_action(args, folder, put), min(allowed_s, _LONGEST_S))
        statuses = (0, 1, 2) if args[:1] == ["verify"] else (0, 2)
        fault = outcome.fault(statuses)
        if args[:2] == ["lab", "check"] and outcome.status == 2 and outcome.out:
            fault = ""  # a lab that no such machine can build
        is_cut = outcome.is_late and outcome.cpu_s <= allowed_s
        yield SweepCase(spoilt or verb, args, data, outcome, "" if is_cut else fault, is_cut)
