"""How fast the simulator is beside SimGrid, on the same exchange and in one interleaved run.

    python benchmarks/simulator_speed.py [--rows R --cols C --part-bytes B --repeats S] [--save]

The exchange: on an R x C torus every rank takes part in a ring all-gather along its row and one along its column
at once, and in the next such pair once both are done, S times. What it takes on a square torus is known exactly,
and both simulators must come within 2 % of it. Both simulate every message of every ring step as a flow of its
own over its links. Of ours two readings are measured: "collectives", where each all-gather is one op that the core
takes in steps, and "messages", where it is lowered before, so that each step is an op with views, edges and a lane
(more than SimGrid is given to do). SimGrid needs g++ and libsimgrid-dev.

Then, ours alone: the 12 products of a GPT-3 block on 256 chips, per algorithm, and MeshSlice on 4096 chips.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import save

from meshweave.cost.machine import Machine
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import TorusNetwork
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.lower import lower_rings

RUNS = 5
BYTES_PER_S = 50e9
LATENCY_S = 1e-6
TOLERANCE = 0.02
STYLE = "rank"
"""Of `ring_all_gather.cpp`: an actor per rank, the fastest."""
TUNED = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=65535"}
"""Makes SimGrid a little faster; see there."""

SOURCE = Path(__file__).parent / "simgrid" / "ring_all_gather.cpp"
BUILD = SOURCE.parent / "build"
HEADER = "#include <simgrid/s4u.hpp>\n"

Row = dict[str, Any]


def num_messages(rows: int, cols: int, repeats: int) -> int:
    return repeats * rows * cols * (rows + cols - 2)


def theory_s(rows: int, cols: int, part_bytes: int, repeats: int) -> float:
    """What the exchange takes; exact on a square torus, whose rings are all equally long."""
    if rows != cols:
        raise SystemExit(f"the exact time is known for square tori, not for {rows} x {cols}")
    return repeats * (rows - 1) * (LATENCY_S + part_bytes / BYTES_PER_S)


# --- SimGrid ------------------------------------------------------------------------------------------


def compiled() -> Path:
    """The rival's program, built where it is older than its source."""
    program = BUILD / SOURCE.stem
    if program.exists() and program.stat().st_mtime >= SOURCE.stat().st_mtime:
        return program
    if shutil.which("g++") is None:
        raise SystemExit("SimGrid's side needs a compiler; install g++")
    check = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(check, input=HEADER, text=True, capture_output=True).returncode:
        raise SystemExit("SimGrid's headers are not installed; install libsimgrid-dev (3.32 was measured)")
    BUILD.mkdir(exist_ok=True)
    command = ["g++", "-O2", "-std=c++17", str(SOURCE), "-lsimgrid", "-o", str(program)]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{SOURCE.name} does not compile with the SimGrid installed: {done.stderr.strip()}")
    return program


def simgrid(rows: int, cols: int, part_bytes: int, repeats: int) -> Row:
    """One run of SimGrid; the wall time is without building the platform."""
    numbers = [str(value) for value in (rows, cols, part_bytes, repeats, BYTES_PER_S, LATENCY_S)]
    done = subprocess.run(
        [str(compiled()), STYLE, *numbers],
        env={**os.environ, **TUNED},
        text=True,
        capture_output=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"SimGrid failed with {done.returncode}: {done.stderr.strip()}")
    found: Row = json.loads(done.stdout)
    if found["messages"] != num_messages(rows, cols, repeats):
        raise SystemExit(
            f"SimGrid sent {found['messages']} messages, not {num_messages(rows, cols, repeats)}"
        )
    return found


# --- ours ---------------------------------------------------------------------------------------------

TEXT = """
program("{repeats} all-gathers along rows and columns")
tp = mesh(({rows}, {cols}), ("row", "col"))
A = tensor(({ranks}, {part}), "int8")
own = input(A, tp[S(0), S(0)])
in_row = scratch(({cols}, {part}), "int8", on=tp, slots=2)
in_col = scratch(({rows}, {part}), "int8", on=tp, slots=2)
row = lane()
col = lane()
with tp:
    all_gather(in_row, own, over="tp.col", dim=0, sizes=1, lane=row)
    all_gather(in_col, own, over="tp.row", dim=0, sizes=1, lane=col)
    for s in range({rest}):
        all_gather(in_row(1 - s % 2), in_col(s % 2)[tp.row:tp.row + 1, :], over="tp.col", dim=0, sizes=1, lane=row)
        all_gather(in_col(1 - s % 2), in_row(s % 2)[tp.col:tp.col + 1, :], over="tp.row", dim=0, sizes=1, lane=col)
"""
"""A rank's part comes out of the all-gather in the other direction before: so it begins once both are done."""


def exchange(rows: int, cols: int, part_bytes: int, repeats: int) -> Program:
    text = TEXT.format(
        rows=rows, cols=cols, ranks=rows * cols, part=part_bytes, repeats=repeats, rest=repeats - 1
    )
    return parse(text)


def cluster(rows: int, cols: int) -> Cluster:
    """One-way links with latency and nothing else that takes time worth mention."""
    chip = Chip("any", (("int8", 1e15),), 1e15, 1 << 40, 1e18)
    axes = tuple(NetworkAxis(name, BYTES_PER_S, LATENCY_S) for name in ("row", "col"))
    return Cluster("torus", chip, TorusNetwork(axes, (rows, cols), rows * cols), "the benchmark")


def ours(rows: int, cols: int, part_bytes: int, repeats: int, *, messages: bool = False) -> Row:
    """One run of our simulator, each all-gather one op or, with `messages`, lowered to ring steps.

    The wall time is of simulating a program that is at hand, its analysis included; `program_s` is what making
    it took.
    """
    from meshweave.simulate.engine import simulate

    begun = time.perf_counter()
    program = exchange(rows, cols, part_bytes, repeats)
    if messages:
        program = lower_rings(program)
    machine = Machine.of(cluster(rows, cols), program)
    made = time.perf_counter()
    simulated_s = simulate(program, machine).duration_s
    done = time.perf_counter()
    return {
        "simulated_s": simulated_s,
        "wall_s": done - made,
        "program_s": made - begun,
        "messages": num_messages(rows, cols, repeats),
    }


# --- both ---------------------------------------------------------------------------------------------


def interleaved(rows: int, cols: int, part_bytes: int, repeats: int) -> Row:
    """Medians of RUNS runs of each, in turn; checked against theory."""
    setting = (rows, cols, part_bytes, repeats)
    sides: dict[str, Callable[[], Row]] = {
        "simgrid": lambda: simgrid(*setting),
        "ours, messages": lambda: ours(*setting, messages=True),
        "ours, collectives": lambda: ours(*setting),
    }
    for side in sides.values():
        side()  # the first run compiles, imports and warms up
    runs: dict[str, list[Row]] = {name: [] for name in sides}
    for _ in range(RUNS):
        for name, side in sides.items():
            runs[name].append(side())
    expected = theory_s(*setting)
    out: Row = {
        "rows": rows,
        "cols": cols,
        "part_bytes": part_bytes,
        "repeats": repeats,
        "theory_s": expected,
    }
    for name, found in runs.items():
        walls = [run["wall_s"] for run in found]
        row = {**found[0], "wall_s": statistics.median(walls), "wall_s_range": [min(walls), max(walls)]}
        row["messages_per_s"] = row["messages"] / row["wall_s"]
        out[name] = row
        if abs(row["simulated_s"] / expected - 1) > TOLERANCE:
            raise SystemExit(f"{name}: simulated {row['simulated_s']:.6g} s, theory says {expected:.6g} s")
    for name in runs:
        out[name]["times_simgrid"] = out["simgrid"]["wall_s"] / out[name]["wall_s"]
    return out


def show(found: Row) -> None:
    print(
        f"{found['rows']} x {found['cols']} torus, {found['repeats']} x 2 ring all-gathers of "
        f"{found['part_bytes']} bytes; theory {found['theory_s'] * 1e3:.4f} ms"
    )
    heads = (
        ("simulated ms", 12),
        ("wall s", 9),
        ("fastest - slowest", 19),
        ("messages/s", 12),
        ("x SimGrid", 9),
    )
    print(" ".join([f"{'':<18}", *(f"{head:>{width}}" for head, width in heads)]))
    for name in ("simgrid", "ours, messages", "ours, collectives"):
        row = found[name]
        low, high = row["wall_s_range"]
        print(
            f"{name:<18} {row['simulated_s'] * 1e3:12.4f} {row['wall_s']:9.4f} {f'{low:.4f} - {high:.4f}':>19} "
            f"{row['messages_per_s']:12.0f} {row['times_simgrid']:9.2f}"
        )


# --- larger ones of ours ------------------------------------------------------------------------------

BLOCK_GOAL_S, BIG_GOAL_S, BIG_GOAL_BYTES = 0.5, 60, 4e9
BIG = (((64, 64), 16), ((128, 32), 32))


def block() -> Row:
    """The 12 products of a GPT-3 block on 256 chips, by algorithm: each at its own best mesh and configurations.
    Seconds of everything: making the programs, handing them over, expanding and simulating them."""
    from meshweave.simulate.engine import simulate
    from meshweave_studies.meshslice.study import MeshSliceStudy
    from meshweave_studies.meshslice.times import Timer

    study = MeshSliceStudy("tpu-v4-pod", Timer("estimate"))
    out: Row = {}
    for name in ("collective", "meshslice", "wang", "summa[S=meshslice]", "summa", "cannon", "tp1d", "fsdp"):
        chosen = study.chosen(study.weak_scaling_block("gpt3"), name)
        if chosen is None:
            continue
        walls = []
        for _ in range(RUNS):
            begun = time.perf_counter()
            runs = []
            for problem, config in chosen.products:
                program = chosen.entry.program(problem, config)
                runs.append(simulate(program, Machine.of(chosen.cluster, program)))
            walls.append(time.perf_counter() - begun)
        out[name] = {
            "mesh": "x".join(map(str, chosen.shape)),
            "wall_s": statistics.median(walls),
            "wall_s_range": [min(walls), max(walls)],
            "simulated_s": sum(run.duration_s for run in runs),
            "events": sum(run.num_events for run in runs),
            "ops": sum(run.num_ops for run in runs),
        }
    return out


def show_block(found: Row) -> None:
    print(f"one GPT-3 block (12 products) on 256 chips; goal {BLOCK_GOAL_S} s")
    for name, row in found.items():
        print(
            f"{name:<20} {row['mesh']:>7} {row['wall_s']:7.3f} s  {row['events'] / 1e6:6.2f} million events, "
            f"{row['ops']:8d} ops, simulated {row['simulated_s'] * 1e3:9.3f} ms"
        )


_BIG = """
import json, resource, time
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.algorithms.matmul2d.common.passes import pass_problem
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.simulate.engine import simulate
shape, count = {shape}, {count}
problem = pass_problem("y", "forward", 2048 * 2048, 12288, 49152, shape, "bfloat16")
begun = time.perf_counter()
program = PRODUCTS_2D["meshslice"].program(problem, Matmul2dConfig((1,) * count, 8))
run = simulate(program, Machine.of(load_cluster("tpu-v4-pod:4096"), program))
print(json.dumps({{
    "mesh": "x".join(map(str, shape)), "slices": count, "wall_s": time.perf_counter() - begun,
    "simulated_s": run.duration_s, "events": run.num_events, "ops": run.num_ops,
    "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}}))
"""


def big(shape: tuple[int, int], count: int) -> Row:
    """A MeshSlice product on 4096 chips, in a process of its own so that its memory can be told."""
    code = _BIG.format(shape=shape, count=count)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    found: Row = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--cols", type=int, default=16)
    parser.add_argument("--part-bytes", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/simulator_speed.json")
    arguments = parser.parse_args()
    rows: Row = {}
    found = interleaved(arguments.rows, arguments.cols, arguments.part_bytes, arguments.repeats)
    show(found)
    rows["rings beside SimGrid"] = found
    rows["GPT-3 block on 256 chips"] = blocks = block()
    show_block(blocks)
    rows["4096 chips"] = [big(shape, count) for shape, count in BIG]
    for row in rows["4096 chips"]:
        print(
            f"MeshSlice S={row['slices']} on {row['mesh']}, GPT-3 ff1 forward: {row['wall_s']:.1f} s, "
            f"{row['peak_bytes'] / 1e9:.2f} GB of memory, {row['events'] / 1e6:.1f} million events "
            f"(goals: {BIG_GOAL_S} s, {BIG_GOAL_BYTES / 1e9:.0f} GB)"
        )
    if arguments.save:
        print(save("simulator_speed", rows))


if __name__ == "__main__":
    main()
