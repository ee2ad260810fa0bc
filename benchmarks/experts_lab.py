"""Layers of experts in a lab of hosts with one slow NIC each: dispatch by itself, and whole layers, interleaved.

    python benchmarks/experts_lab.py dispatch [--repeat N] [--save NAME]
    python benchmarks/experts_lab.py layer [--repeat N] [--save NAME]

`dispatch` stands beside the bound of NICs: of the busiest host, the bytes of one copy of each token for each other
host that needs it, over the rate of its NIC. Goal of `experts_hierarchical`: 1.05 of that. `layer` stands beside
max(products, transfers) + last chunk: FLOPs of the busiest rank over its rate, bytes that the entry sends over the
busiest NIC over its rate, and of a slice the shorter one. Goal of `experts_fused`: 1.10 of that. Its rivals are
all-to-all in turn (`experts_direct`) and torch's `all_to_all_single` around products by expert.

A time is from a common start to the end of the last rank, and what counts is the median. Each stands beside its
estimate and its simulation on the description of the lab. Goal: within 8 %. Products are paced, so run
this on a machine that is idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from experts_rank import RIVAL, candidate, problem_of
from machine import save

from meshweave.algorithms.experts import ExpertsProblem
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.simulate.engine import simulate
from meshweave_lab import Lab

LAB = Path(__file__).parent.parent / "examples" / "labs" / "hosts-4x4.toml"
TARGET = "experts_rank:measure"
DISPATCHES = ("experts_hierarchical", "experts_direct", "experts_pairwise", "experts_put")
LAYERS = (RIVAL, "experts_direct", "experts_pairwise", "experts_hierarchical", "experts_fused")
ROUTINGS = ({"kind": "balanced"}, {"kind": "power", "exponent": 0.5})


def nic_bytes(problem: ExpertsProblem, *, by_host: bool) -> tuple[int, int]:
    """Return the bytes over the busiest NIC in its busier direction, of a dispatch, and of that and its combine.

    Args:
        by_host: whether a token is sent once to a host, or once for each of its experts.
    """
    counts, hosts = problem.counts()["m" if by_host else "n0"], problem.hosts
    needed = counts.reshape(hosts, -1, hosts, problem.local_ranks).sum(axis=(1, 3))
    away = needed * (1 - np.eye(hosts, dtype=int))
    sent, received = away.sum(axis=0), away.sum(axis=1)
    row = problem.hidden * 4
    return int(max(sent.max(), received.max())) * row, int((sent + received).max()) * row


def bound_s(problem: ExpertsProblem, cluster: Cluster, slices: int, *, by_host: bool) -> float:
    """Return the seconds that the module's docstring defines."""
    rate = HostTopology.of(cluster).nic_bytes_per_s
    one, both = nic_bytes(problem, by_host=by_host)
    if problem.part == "dispatch":
        return one / rate
    rows = problem.counts()["n0"].reshape(problem.num_ranks, -1).sum(axis=1)
    flops = int(rows.max()) * 6 * problem.hidden * problem.inner
    products_s, transfers_s = flops / cluster.chip.effective_flops_per_s, both / rate
    return max(products_s, transfers_s) + min(products_s, transfers_s) / slices


def settings_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the problems, and the entries that solve each."""
    names = DISPATCHES if options.what == "dispatch" else LAYERS
    base = {"part": options.what, "tokens": options.tokens, "hidden": options.hidden, "inner": options.inner}
    return [{**base, "routing": routing, "entries": list(names)} for routing in ROUTINGS]


def rows_of(options: argparse.Namespace, settings: list[dict[str, Any]], ranks: list[Any]) -> list[Any]:
    """Return a row for each entry of each setting, printed."""
    cluster, rows = Lab.load(options.lab).cluster(), []
    for number, setting in enumerate(settings):
        problem = problem_of(setting)
        for which, name in enumerate(setting["entries"]):
            parts = [rank["rows"][number] for rank in ranks]
            if not all(part["right"][which] for part in parts):
                sys.exit(f"{problem}: {name}: wrong values")
            runs = [max(run) for run in zip(*(part["times_s"][which] for part in parts), strict=True)]
            row = {
                "problem": str(problem),
                "entry": name,
                "runs_s": runs,
                "median_s": statistics.median(runs),
            }
            slices = 1
            if name != RIVAL:
                entry, config = candidate(name, problem)
                slices = getattr(config, "count", 1)
                program = entry.program(problem, config)
                machine = Machine.of(cluster, program)
                row["config"] = str(config)
                row["estimated_s"] = entry.estimate(
                    problem, config, entry.machine(problem, config, cluster)
                ).total_s
                row["simulated_s"] = simulate(program, machine).duration_s
                row["simulation_error"] = row["simulated_s"] / row["median_s"] - 1
            by_host = options.what == "dispatch" or name == "experts_hierarchical"
            row["bound_s"] = bound_s(problem, cluster, slices, by_host=by_host)
            row["over_bound"] = row["median_s"] / row["bound_s"]
            rows.append(row)
            simulated = (
                f"{row.get('simulated_s', float('nan')):7.3f} ({row.get('simulation_error', 0.0):+.1%})"
            )
            print(
                f"{setting['routing']['kind']:9} {name:22} bound {row['bound_s']:7.3f} s  simulated {simulated}  "
                f"measured {row['median_s']:7.3f}  x bound {row['over_bound']:.3f}"
            )
    return rows


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("dispatch", "layer"))
    parser.add_argument("--lab", type=Path, default=LAB)
    parser.add_argument("--tokens", type=int, default=96, help="of a rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=1500.0)
    parser.add_argument("--save", help="the name of a file in benchmarks/results, without .json")
    options = parser.parse_args()
    settings = settings_of(options)
    payload = {"settings": settings, "repeat": options.repeat, "deadline_s": 120.0}
    with Lab.load(options.lab).up() as running:
        env = {"PYTHONPATH": str(Path(__file__).parent)}
        ranks = running.launch(TARGET, payload, timeout_s=options.timeout, env=env)
    rows = rows_of(options, settings, ranks)
    print(f"ranks began up to {max(rank['late_s'] for rank in ranks) * 1e3:.1f} ms late")
    if options.save:
        print(f"saved {save(options.save, {'what': options.what, 'rows': rows})}")


if __name__ == "__main__":
    main()
