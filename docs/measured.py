"""Write the tables of measurements in README.md and docs/guide/measured.md from the saved results.

python docs/measured.py            # rewrite the tables
python docs/measured.py --check    # exit with 1 if a committed table is not what would be written
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide" / "measured.md"
IN_README = 4
"""Rows of the README: the first ones, where results are missing with those after them."""
RESULTS = "benchmarks/results"
PUBLISHED = "validation/results/published.md"
BLOCK = re.compile(r"(<!-- measured: begin [^\n]*-->\n).*?(<!-- measured: end -->)", re.DOTALL)


def load(name: str) -> Any:
    """Return a saved result."""
    return json.loads((ROOT / RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def published_runs() -> str:
    """Return how far steps of published runs are off whose families of models no constant was fitted on."""
    page = (ROOT / PUBLISHED).read_text(encoding="utf-8")
    line = page.partition("## Families that judge\n")[2].strip().partition("\n")[0]
    rows, sources, median, within = re.findall(
        r"(\d+) of \d+ rows scored, (\d+) sources: median of their medians ([\d.]+)%.*?; (\d+)% of rows", line
    )[0]
    return f"median error {median} % over {sources} sources; {within} % of {rows} runs within 20 %"


def steps_beside_simulation() -> str:
    """Return how far estimates of steps are off their simulation with contention."""
    errors = [abs(row["error"]) for row in load("step_estimates")["rows"]]
    mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
    return f"mean difference {mean:.1f} %, worst {worst:.1f} %"


def bytes_beside_dtensor() -> str:
    """Return how many pairs of placements move less, as much and more than DTensor, by mesh."""
    parts = []
    for row in load("universal_bytes")["rows"]:
        pairs = row["pairs"]
        less = sum(pair["ours_bytes"] < pair["dtensor_bytes"] for pair in pairs)
        more = sum(pair["ours_bytes"] > pair["dtensor_bytes"] for pair in pairs)
        mesh = "x".join(map(str, row["mesh_shape"]))
        parts.append(f"{mesh}: {less} less, {len(pairs) - less - more} equal, {more} more")
    return "; ".join(parts)


def pair_of(row: Any) -> tuple[str, str]:
    """Return the placements of A and B of a row, as a key."""
    return ",".join(row["a"]), ",".join(row["b"])


def speed_beside_dtensor() -> str:
    """Return times faster than DTensor in the lab; pairs that were measured again count as they were then."""
    ratios = {pair_of(row): row["times_faster"] for row in load("universal_lab")["rows"]}
    again = {pair_of(row): row["times_faster"] for row in load("universal_lab_again")["rows"]}
    first = list(ratios.values())
    least = min({**ratios, **again}.values())
    after = f"{len(again)} pairs measured again after a fix"
    return f"{geometric_mean(first):.2f} x, geometric mean (least {least:.2f}, {after})"


def default_beside_dtensor() -> str | None:
    """Return times faster than DTensor of the default transport on one host, if it has been saved."""
    if not (ROOT / RESULTS / "default_transport_1024.json").exists():
        return None
    ratios = [row["times_faster"] for row in load("default_transport_1024")["rows"]]
    mean, least, below = geometric_mean(ratios), min(ratios), sum(ratio < 0.95 for ratio in ratios)
    return f"{mean:.2f} x, geometric mean (least {least:.2f}, below 0.95 for {below} of {len(ratios)} pairs)"


def speed_beside_scalapack() -> str:
    """Return times faster than ScaLAPACK over all sizes, grids and block sizes."""
    ratios = [row["times_faster"] for row in load("universal_scalapack")["rows"]]
    return f"{geometric_mean(ratios):.2f} x, geometric mean ({min(ratios):.2f} to {max(ratios):.2f})"


def meshslice_in_the_lab() -> str:
    """Return time over bound of MeshSlice and of DTensor on the same shards, by pace."""
    ours, theirs = [], []
    for item in load("lab_torus_4x4")["rounds"]:
        by_name = {result["name"]: result["median_s"] / item["bound_s"] for result in item["results"]}
        ours.append(min(time for name, time in by_name.items() if name.startswith("meshslice")))
        theirs.append(by_name["DTensor, same shards"])
    return f"{min(ours):.2f} to {max(ours):.2f} x the bound; DTensor {min(theirs):.2f} to {max(theirs):.2f} x"


def reshard_in_the_lab() -> str:
    """Return time over the bound of the NIC of the broadcast and of the rival's all-gather."""
    rows = load("reshard_cases")["rows"]["rows"]
    chosen = [row for row in rows if (row["strategy"], row["order"]) == ("broadcast", "best")]
    ours = [row["median_s"] / row["bound_s"] for row in chosen]
    theirs = [row["median_s"] / row["bound_s"] for row in rows if row["strategy"] == "global_all_gather"]
    return (
        f"{min(ours):.2f} to {max(ours):.2f} x the bound; all-gather {min(theirs):.2f} to {max(theirs):.2f} x"
    )


BLOCK_LABS = ("block_lab_two_groups", "block_lab_bridged_pairs", "block_lab_torus")


def blocks_in_the_lab() -> str | None:
    """Return how far simulated times of blocks are off, and how many pairs have another order, in all labs."""
    if not all((ROOT / RESULTS / f"{name}.json").exists() for name in BLOCK_LABS):
        return None
    labs = [load(name)["rows"] for name in BLOCK_LABS]
    ours = [row for lab in labs for row in lab["rows"] if "simulated_s" in row]
    errors = [abs(row["simulated_s"] / row["median_s"] - 1) for row in ours]
    pairs = sum(lab["verdicts"]["pairs_apart"] for lab in labs)
    missed = sum(len(lab["verdicts"]["simulated_s"]["pairs_missed"]) for lab in labs)
    mean = sum(errors) / len(errors)
    return (
        f"mean error {100 * mean:.1f} %, worst {100 * max(errors):.1f} %; {pairs - missed} of {pairs} pairs "
        "in the measured order"
    )


TRAIN_LABS = ("train_lab_two_groups", "train_lab_torus", "train_lab_bridged")


def models_in_the_lab() -> str:
    """Return what a planned strategy wins in a user's model in three labs, and how far predictions are off."""
    over_megatron, over_torch, errors = [], [], []
    for name in TRAIN_LABS:
        rows = load(name)["rows"]["rows"]
        planned, torch_s = rows[0]["median_s"], rows[-1]["median_s"]
        megatron = min(row["median_s"] for row in rows if row["name"].startswith("megatron"))
        over_megatron.append(megatron / planned)
        over_torch.append(torch_s / planned)
        errors += [abs(row["predicted_s"] / row["median_s"] - 1) for row in rows if "predicted_s" in row]
    first, second = (f"{min(all_of):.2f} to {max(all_of):.2f} x" for all_of in (over_megatron, over_torch))
    return (
        f"planned strategy {first} the best Megatron 1D, {second} torch's sequence parallelism; prediction "
        f"off by {100 * statistics.mean(errors):.1f} % in the mean, worst {100 * max(errors):.0f} %"
    )


def fused_in_the_lab() -> str:
    """Return time over the bound of fused products and of their rivals, and how far off their simulations are."""
    rows = {row["algorithm"]: row for row in load("fused_lab")["rivals"]}
    names = {
        "reduce-scatter": {
            "t3_direct": "direct",
            "t3_ring": "ring",
            "looped_reduce_scatter": "looped",
            "t3_sequential": "in turn",
        },
        "all-gather": {
            "t3_all_gather": "by tiles",
            "looped_all_gather": "looped",
            "sequential_all_gather": "in turn",
        },
    }
    texts = [
        f"{op}: " + ", ".join(f"{title} {rows[name]['over_bound']:.2f} x" for name, title in of.items())
        for op, of in names.items()
    ]
    off = max(abs(row["simulated_over_measured"] - 1) for row in rows.values())
    return f"{'; '.join(texts)} the bound; simulations off by {100 * off:.1f} % at most"


def simulator_speed() -> str:
    """Return the simulator's speed beside SimGrid's on the same messages."""
    rows = load("simulator_speed")["rows"]["rings beside SimGrid"]
    collectives, messages = (rows[f"ours, {what}"]["times_simgrid"] for what in ("collectives", "messages"))
    return f"{collectives:.1f} x SimGrid; as single messages {messages:.1f} x"


def planner_speed() -> str:
    """Return the seconds of a search over all algorithms."""
    rows = load("planner_speed")["rows"]
    small, large = (rows[f"{chips} chips, all algorithms"]["wall_s"] for chips in (256, 65536))
    return f"{small:.1f} s on 256 chips, {large:.1f} s on 65,536"


def steps_on_a_gpu() -> str:
    """Return how far predictions of steps of plain PyTorch on one GPU are off, without constants of software."""
    errors = [row["errors"] for row in load("gpu/steps")["rows"]]
    times = sorted(error["step"] for error in errors)
    bytes_of = sorted(abs(error["allocated"]) for error in errors)
    return (
        f"time {100 * statistics.median(times):+.0f} % at the median "
        f"({100 * times[0]:+.0f} to {100 * times[-1]:+.0f} %); "
        f"memory off by {100 * statistics.median(bytes_of):.1f} %, worst {100 * bytes_of[-1]:.0f} %"
    )


def table(of: Path) -> str:
    """Return the table of a page in Markdown."""
    rows = [
        ("published training runs, predicted; nothing fitted on these models", published_runs(), PUBLISHED),
        (
            f"{len(load('step_estimates')['rows'])} training steps, estimated beside simulated",
            steps_beside_simulation(),
            "step_estimates",
        ),
        ("speed over DTensor, one host, defaults", default_beside_dtensor(), "default_transport_1024"),
        ("speed over DTensor, 256 pairs, 2x2 lab", speed_beside_dtensor(), "universal_lab"),
        (
            "speed over ScaLAPACK in its own layouts, one host",
            speed_beside_scalapack(),
            "universal_scalapack",
        ),
        (
            "bytes received, 256 pairs of placements, beside DTensor",
            bytes_beside_dtensor(),
            "universal_bytes",
        ),
        ("MeshSlice on a 4x4 lab, three paces of compute", meshslice_in_the_lab(), "lab_torus_4x4"),
        ("tensors between meshes, AlpaComm's nine cases, lab", reshard_in_the_lab(), "reshard_cases"),
        ("blocks in three labs, simulated beside measured", blocks_in_the_lab(), "block_lab_two_groups"),
        ("a model of torch in three labs, `mw.parallelize`", models_in_the_lab(), "train_lab_two_groups"),
        ("fused products, lab, ratio 1", fused_in_the_lab(), "fused_lab"),
        (
            f"{len(load('gpu/steps')['rows'])} steps of plain PyTorch on one H100, predicted beside measured",
            steps_on_a_gpu(),
            "gpu/steps",
        ),
        ("simulator, ring all-gathers on a 16x16 torus", simulator_speed(), "simulator_speed"),
        ("planner of products, GPT-3, all algorithms", planner_speed(), "planner_speed"),
    ]
    lines = []
    for what, text, data in rows:
        path = data if data == PUBLISHED else f"{RESULTS}/{data}.json"
        link = Path(os.path.relpath(ROOT / path, of.parent)).as_posix()
        lines += [f"| {what} | {text} | [{Path(path).stem}]({link}) |"] if text else []
    shown = lines[:IN_README] if of == README else lines
    return "\n".join(("| what | result | data |", "|---|---|---|", *shown)) + "\n"


def page(of: Path = README) -> str:
    """Return a page with the table as it should be."""
    text = of.read_text(encoding="utf-8")
    return BLOCK.sub(lambda match: match[1] + table(of) + match[2], text)


def main() -> int:
    """Write the tables, or compare them. Returns the exit status."""
    if sys.argv[1:] == ["--check"]:
        return int(any(of.read_text(encoding="utf-8") != page(of) for of in (README, GUIDE)))
    for of in (README, GUIDE):
        of.write_text(page(of), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
