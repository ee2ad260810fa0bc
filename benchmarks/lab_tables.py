"""Write `results/README.md` and `docs/pictures/lab-torus-4x4.svg` from the saved JSON files of lab measurements.

The files come from `meshweave calibrate`, `bench matmul`, `bench shapes` and `bench fidelity`; each command stands
beside its table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from machine import RESULTS

from meshweave_lab.bench.results import MeasuredRound, RivalTimes
from meshweave_lab.cli.bench_tables import NOT_COMPARABLE, heading, picture

_LAB = "--lab examples/labs/torus-4x4-50mbit.toml"
_CALIBRATED = "--cluster benchmarks/results/torus-4x4-50mbit.toml"


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def machine_line(data: dict[str, Any]) -> str:
    """Return the date, machine and versions of a measurement."""
    machine = data["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['system']}; {versions}."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rivals(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the rivals that start from the same shards, then one of those that do not."""
    by_time = sorted(results, key=lambda result: result["median_s"])
    same = [result for result in by_time if not RivalTimes.from_json(result).precondition]
    other = [result for result in by_time if RivalTimes.from_json(result).precondition]
    yield from _table(same)
    if other:
        yield ""
        yield f"{NOT_COMPARABLE[0].upper()}{NOT_COMPARABLE[1:]}:"
        yield ""
        yield from _table(other)


def _table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "| | median s | x bound | x theory | x estimate | fastest - slowest s |"
    yield "|---|---|---|---|---|---|"
    for result in results:
        yield (
            f"| {result['name']} | {result['median_s']:.3f} | {result['over_bound']:.2f} | "
            f"{_number(result['over_theory'])} | {_number(result['over_estimate'])} | "
            f"{result['fastest_s']:.3f} - {result['slowest_s']:.3f} |"
        )


def _rounds(name: str, command: str) -> Iterator[str]:
    data = _load(name)
    yield f"`meshweave bench matmul {_LAB} {_CALIBRATED} {command}`"
    yield ""
    yield f"{machine_line(data)} {data['repeat']} runs each."
    for round_ in data["rounds"]:
        p = round_["problem"]
        yield ""
        yield (
            f"**{round_['pass'].replace('_', ' ')}, {p['dataflow']} {p['m']} x {p['n']} x {p['k']}, compute "
            f"{round_['ratio']:g} x communication**, bound {round_['bound_s']:.3f} s"
        )
        yield ""
        yield from _rivals(round_["results"])


def _shapes() -> Iterator[str]:
    data = _load("lab_shapes")
    p = data["product"]
    yield (
        f"`meshweave bench shapes --labs examples/labs/torus-4x4-50mbit.toml,examples/labs/torus-8x2-50mbit.toml "
        f"--m {p['m']} --n {p['n']} --k {p['k']} --ratio 0.3 --slices 8 --algorithms collective`"
    )
    yield ""
    yield f"{machine_line(data)} A is four times as large as B: what moves along the axis of two is what is large."
    for shape in data["shapes"]:
        yield ""
        yield f"**{shape['lab']}**, bound {shape['bound_s']:.3f} s"
        yield ""
        yield from _rivals(shape["results"])
    yield ""
    for name, faster in data["times_faster_than_the_first"].items():
        yield f"- {name}: {faster[1]['measured']:.2f} x faster on 8x2, {faster[1]['theory']:.2f} by theory"


def _fidelity() -> Iterator[str]:
    data = _load("lab_fidelity")
    yield (
        f"`meshweave bench fidelity {_LAB} {_CALIBRATED} --cases {len(data['cases'])} --seed {data['seed']} "
        f"--repeat {data['repeat']}`"
    )
    yield ""
    yield (
        f"{machine_line(data)} Errors are |predicted / measured - 1|, with the models as they are now "
        "(`lab_fidelity_again.py`)."
    )
    yield ""
    yield "| | cases | estimate, mean | worst | simulation, mean | worst |"
    yield "|---|---|---|---|---|---|"
    parts = {"all": data["cases"], "all but SUMMA": [c for c in data["cases"] if c["algorithm"] != "summa"]}
    for case in data["cases"]:
        parts.setdefault(case["algorithm"], []).append(case)
    for name, cases in parts.items():
        cells = [name, str(len(cases))]
        for which in ("estimate_error", "simulation_error"):
            errors = [abs(case[which]) for case in cases]
            cells += [f"{sum(errors) / len(errors):.1%}", f"{max(errors):.1%}"]
        yield f"| {' | '.join(cells)} |"


def lab_picture(name: str) -> str:
    """Return the picture of the saved rounds `name`: bars of time over bound."""
    data = _load(name)
    rounds = [MeasuredRound.from_json(saved) for saved in data["rounds"]]
    layer = data["layer"]
    sizes = f"{layer['m']} x {layer['n']} x {layer['k']}, {layer['dataflow']}"
    return picture(
        rounds, [heading(one) for one in rounds], f"layer Y = X W of {sizes}, on {data['lab']['name']}"
    )


def main() -> None:
    """Write the tables and the picture."""
    lines = [
        "# Results",
        "",
        "Made by `python benchmarks/lab_tables.py` from the JSON files beside it.",
        "",
        "- Bound: max(compute, bytes per axis / link rate).",
        "- Theory: the algorithm's own schedule without latency.",
        "- Estimate: with the constants of `torus-4x4-50mbit.toml`, calibrated there on microbenchmarks.",
        "",
        "Shards of the matrices that move are 4 MB (shapes: 5 MB and 1 MB).",
        "",
        "Wang beside rivals was measured while its ring went one way; by now it goes both, as under fidelity.",
        "",
        "## Rivals on a 4x4 torus, 50 Mbit/s per link and direction",
        "",
        *_rounds(
            "lab_torus_4x4",
            "--m 256 --n 256 --k 65536 --ratio 0.5,1,2 --algorithms "
            "collective,wang,summa,cannon,meshslice,meshslice_tapered",
        ),
        "",
        "`DTensor, inputs replicated` starts from gathered inputs; what gathering them takes is not counted.",
        "",
        "## How many slices",
        "",
        "The same product with fewer rivals in the same processes (their process groups cost all others time).",
        "",
        *_rounds(
            "lab_slices",
            "--m 256 --n 256 --k 65536 --ratio 1 --algorithms collective --slices 12,16,20 --repeat 7",
        ),
        "",
        "## Backward products",
        "",
        "Measured before reduce-scatters posted receives ahead, and with an earlier calibration (S = 16).",
        "",
        *_rounds(
            "lab_backward",
            "--m 256 --n 256 --k 65536 --pass backward_data,backward_weight --ratio 1 "
            "--algorithms collective,wang,meshslice --repeat 3",
        ),
        "",
        "## The shape of the mesh",
        "",
        *_shapes(),
        "",
        "## Prediction against measurement",
        "",
        *_fidelity(),
    ]
    (RESULTS / "README.md").write_text("\n".join(lines) + "\n")
    pictures = RESULTS.parents[1] / "docs" / "pictures"
    (pictures / "lab-torus-4x4.svg").write_text(lab_picture("lab_torus_4x4"))


if __name__ == "__main__":
    main()
