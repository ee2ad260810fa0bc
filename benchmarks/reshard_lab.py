"""Cross-mesh resharding in a lab of hosts with one slow NIC each: strategies and orders, interleaved.

    python benchmarks/reshard_lab.py one_to_many [--repeat N] [--save NAME]     one sender to A hosts x B devices
    python benchmarks/reshard_lab.py cases [--only 3,4,9] [--repeat N] [--save NAME]    the nine cases of Table 2

    python benchmarks/reshard_lab.py llama [--width 256]      a Llama's 291 tensors, 4 x 4 trainer to 2 x 2 server

The first two are AlpaComm's microbenchmarks (MLSys '23, section 5.1), scaled down. A time is from a common start
to the end of the last rank; what counts is the median. Each stands beside the bound (bytes over the rate of a NIC,
of the busiest one), its closed form, and the simulation of the same program on the lab's description.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from machine import save
from reshard_rank import problem_of

from meshweave.algorithms.reshard import STRATEGIES, plan_reshard, reshard_program
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.report.bars import Bar, Group, bar_chart
from meshweave.simulate.engine import simulate
from meshweave_lab import Lab
from meshweave_studies.alpacomm.cases import CASES

TARGET = "reshard_rank:measure"
LAB = Path(__file__).parent.parent / "examples" / "labs" / "hosts-5x4.toml"
Setting = dict[str, Any]
VARIANTS = (
    ("broadcast", "best"),
    ("broadcast", "balance"),
    ("broadcast", "naive"),
    ("global_all_gather", "balance"),
    ("send_recv", "balance"),
)


def cases(options: argparse.Namespace) -> list[Setting]:
    rows, columns, depth = options.shape
    return [
        {
            "name": f"case {number}",
            "case": number,
            "shape": [3 * rows, columns, depth // 3] if number == 6 else options.shape,
            "variants": [variant for variant in VARIANTS if variant[0] in options.strategies],
        }
        for number in options.only
    ]


def one_to_many(options: argparse.Namespace) -> list[Setting]:
    receivers = [(1, ranks) for ranks in range(1, 5)] + [(hosts, 2) for hosts in range(2, 5)]
    return [
        {
            "name": f"1 -> {hosts} x {ranks}",
            "receivers": (hosts, ranks),
            "shape": options.shape,
            "variants": [(strategy, "best") for strategy in STRATEGIES if strategy in options.strategies],
        }
        for hosts, ranks in receivers
    ]


def llama(options: argparse.Namespace) -> list[Setting]:
    variants = [
        (strategy, "best") for strategy in ("broadcast", "send_recv") if strategy in options.strategies
    ]
    return [{"name": f"width {options.width}", "width": options.width, "variants": variants}]


def picture(rows: list[dict[str, Any]]) -> str:
    groups: dict[str, list[Bar]] = {}
    for row in rows:
        name = f"{row['strategy']}, {row['order']}"
        runs = [run / row["bound_s"] for run in row["runs_s"]]
        marks = row["predicted_s"] / row["bound_s"], row["simulated_s"] / row["bound_s"]
        bar = Bar(name, row["over_bound"], min(runs), max(runs), f"{row['over_bound']:.2f}", marks, name)
        groups.setdefault(row["setting"], []).append(bar)
    return bar_chart(
        "Resharding in a lab of hosts with one NIC each",
        [Group(title, tuple(bars)) for title, bars in groups.items()],
        "time over the bound of the busiest NIC",
        mark_names=("closed form", "simulated"),
        line_at=1.0,
        line_name="bound",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("one_to_many", "cases", "llama"))
    parser.add_argument("--lab", type=Path, default=LAB)
    parser.add_argument("--only", type=lambda text: [int(n) for n in text.split(",")], default=list(CASES))
    parser.add_argument(
        "--shape", type=lambda text: [int(n) for n in text.split(",")], default=[256, 256, 126]
    )
    parser.add_argument("--width", type=int, default=256, help="of the Llama")
    parser.add_argument("--strategies", default="broadcast,send_recv,local_all_gather,global_all_gather")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=1500.0)
    parser.add_argument("--save", help="the name of a file in benchmarks/results, without .json")
    parser.add_argument("--svg", type=Path, help="a picture: time over the bound, with what was expected")
    options = parser.parse_args()
    lab = Lab.load(options.lab)
    settings = {"cases": cases, "one_to_many": one_to_many, "llama": llama}[options.what](options)
    payload = {
        "lab": str(options.lab.resolve()),
        "settings": settings,
        "repeat": options.repeat,
        "deadline_s": 120.0,
    }
    with lab.up() as running:
        env = {"PYTHONPATH": str(Path(__file__).parent)}
        ranks = running.launch(TARGET, payload, timeout_s=options.timeout, env=env)
    rows = []
    cluster = lab.cluster()
    network = HostTopology.of(cluster)
    for number, setting in enumerate(settings):
        for which, (strategy, order) in enumerate(setting["variants"]):
            parts = [rank["rows"][number] for rank in ranks]
            if not all(part["right"][which] for part in parts):
                sys.exit(f"{setting['name']}: {strategy}, {order}: wrong values arrived")
            runs = [max(run) for run in zip(*(part["times_s"][which] for part in parts), strict=True)]
            plan = plan_reshard(problem_of(setting), network, strategy=strategy, order=order)
            program = reshard_program(plan)
            simulated_s = simulate(program, Machine.of(cluster, program)).duration_s
            median_s = statistics.median(runs)
            rows.append(
                {
                    "setting": setting["name"],
                    "strategy": strategy,
                    "order": order,
                    "tasks": len(plan.tasks),
                    "bound_s": plan.bound_s,
                    "predicted_s": plan.predicted_s,
                    "simulated_s": simulated_s,
                    "median_s": median_s,
                    "over_bound": median_s / plan.bound_s,
                    "over_predicted": median_s / plan.predicted_s,
                    "runs_s": runs,
                }
            )
            row = rows[-1]
            print(
                f"{row['setting']:12} {strategy:18} {order:8} bound {plan.bound_s:6.3f} s  "
                f"predicted {plan.predicted_s:6.3f}  simulated {simulated_s:6.3f}  measured {median_s:6.3f} "
                f"({min(runs):.3f} to {max(runs):.3f})  x bound {row['over_bound']:.3f}  "
                f"x predicted {row['over_predicted']:.3f}"
            )
    print(f"ranks began up to {max(rank['late_s'] for rank in ranks) * 1e3:.1f} ms late")
    if options.svg:
        options.svg.write_text(picture(rows))
    if options.save:
        print(f"saved {save(options.save, {'what': options.what, 'shape': options.shape, 'rows': rows})}")


if __name__ == "__main__":
    main()
