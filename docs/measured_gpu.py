"""Write the tables of the guide's page about GPUs from the saved results.

python docs/measured_gpu.py            # rewrite the tables
python docs/measured_gpu.py --check    # exit with 1 if the committed page is not what would be written
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from meshweave.algorithms.step.framework_memory import LOGIT_BYTES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "gpu.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
KINDS = ("product", "attention", "elementwise", "optimizer")


def load(name: str) -> Any:
    """Return a saved result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def device() -> str:
    """Return the device and versions of the saved steps in one sentence."""
    of = load("steps")["device"]
    return (
        f"{of['name']}, driver {of['driver']}, power limit {of['power_limit']}; torch {of['torch']}, "
        f"CUDA {of['cuda']}, NCCL {of['nccl']}; {of['date']}.\n"
    )


def outcomes() -> str:
    """Return how many tests passed on the device."""
    rows = load("tests")["rows"]
    passed = sum(row["outcome"] == "passed" for row in rows)
    return f"{passed} of {len(rows)} tests marked `gpu` passed, without those of tracked products (Limits).\n"


def steps() -> str:
    """Return the table of steps: measured and predicted seconds, and the kinds of work they are made of."""
    lines = [
        "| run | ms | predicted | error | products | attention | element-wise, loss | optimizer | gaps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in load("steps")["rows"]:
        measured, predicted = row["measured"], row["predicted"]
        kinds = [
            f"{1e3 * measured['kinds_s'][kind]:.0f} ({1e3 * predicted['kinds_s'][kind]:.0f})"
            for kind in KINDS
        ]
        lines.append(
            f"| {row['run']['name']} | {1e3 * measured['step_s']:.0f} | {1e3 * predicted['step_s']:.0f} | "
            f"{100 * row['errors']['step']:+.0f} % | {' | '.join(kinds)} | {1e3 * measured['gap_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def memory() -> str:
    """Return the table of memory: measured peaks and predictions."""
    lines = [
        "| run | peak, GB | predicted | error | reserved | activations of layers | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in load("steps")["rows"]:
        run, of, predicted = row["run"], row["measured"]["memory"], row["predicted"]["memory"]
        logits = run["micro_batch"] * run["seq"] * run["vocab"]
        kept = of["after_forward"] - of["states"] - (2 if run["compiled"] else 4) * logits
        if run["gradients"] == "bfloat16":  # autograd's, which are not there between steps
            kept -= 2 * of["parameters"]
        layers = predicted["activations"] - LOGIT_BYTES["eager"][0] * logits
        exact = f"{kept / 1e9:.2f} | {layers / 1e9:.2f}" if run["recompute"] == "none" else "- | -"
        lines.append(
            f"| {run['name']} | {of['peak'] / 1e9:.1f} | {predicted['total'] / 1e9:.1f} | "
            f"{100 * row['errors']['allocated']:+.1f} % | {of['reserved'] / 1e9:.1f} | {exact} |"
        )
    return "\n".join(lines) + "\n"


def kernels() -> str:
    """Return the table of errors of kernels by class."""
    lines = [
        "| kernels | rows | median error | mean | worst | median with sign |",
        "|---|---|---|---|---|---|",
    ]
    for name, of in load("kernels")["rows"]["scores"].items():
        numbers = " | ".join(f"{100 * of[key]:.0f} %" for key in ("median", "mean", "worst"))
        lines.append(f"| {name} | {of['rows']} | {numbers} | {100 * of['signed_median']:+.0f} % |")
    return "\n".join(lines) + "\n"


def power() -> str:
    """Return the rates of a large product by its numbers and by how long it has run."""
    rows = load("kernels")["rows"]["sustained"]
    lines = ["| numbers | first 100 ms, TFLOP/s | after seconds | power | clock |", "|---|---|---|---|---|"]
    for name in ("random", "ones", "zeros"):
        of = rows[name]
        lines.append(
            f"| {name} | {of['first_100_ms'] / 1e12:.0f} | {of['sustained'] / 1e12:.0f} | {of['watts']:.0f} W | "
            f"{of['clock_mhz']:.0f} MHz |"
        )
    return "\n".join(lines) + "\n"


def tracked() -> str:
    """Return the table of products that count their tiles, beside the same kernel without counters and cuBLAS."""
    if not (RESULTS / "tracked.json").exists():
        return NOT_YET
    rows = list(load("tracked")["rows"].values())
    lines = ["| rows, columns, depth, ranks | us | of untracked | of cuBLAS |", "|---|---|---|---|"]
    for row in rows:
        of = [row["tracked_s"] / row[f"{name}_s"] for name in ("untracked", "cublas")]
        sizes = ", ".join(map(str, row["shape"]))
        lines.append(f"| {sizes} | {1e6 * row['tracked_s']:.0f} | {of[0]:.3f} | {of[1]:.2f} |")
    for name, title, within in (("untracked", "without counters", 1.03), ("cublas", "of cuBLAS", 1.15)):
        num = sum(row["tracked_s"] <= within * row[f"{name}_s"] for row in rows)
        lines.append(f"\n{num} of {len(rows)} take at most {within} times that {title}.")
    return "\n".join(lines) + "\n"


def triggered() -> str:
    """Return the table of products beside the copies that they trigger."""
    if not (RESULTS / "triggered.json").exists():
        return NOT_YET
    lines = [
        "| rows, columns, depth, ranks | copies to | product, us | copies, us | together, of the longer |",
        "|---|---|---|---|---|",
    ]
    for row in (one for both in load("triggered")["rows"].values() for one in both):
        sizes, times = ", ".join(map(str, row["shape"])), [row[f"{name}_s"] for name in ("product", "copies")]
        shown = " | ".join(f"{1e6 * seconds:.0f}" for seconds in times)
        ratio = row["together_s"] / max(times)
        lines.append(f"| {sizes} | {row['copies_to']} | {shown} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def bound_ops() -> str:
    """Return the table of what a bound op costs beyond the call of torch that it makes."""
    if not (RESULTS / "bound_ops.json").exists():
        return NOT_YET
    lines = ["| ops | plain, us | bare calls | in a graph | bare calls in a graph |", "|---|---|---|---|---|"]
    for row in load("bound_ops")["rows"]:
        times = " | ".join(f"{row[f'{name}_us']:.2f}" for name in ("plain", "bare", "graph", "bare_graph"))
        lines.append(f"| {row['ops']} | {times} |")
    return "\n".join(lines) + "\n"


NOT_YET = "Not measured yet: no machine with a CUDA device was at hand since it was written.\n"

TABLES = {
    "device": device,
    "outcomes": outcomes,
    "steps": steps,
    "memory": memory,
    "kernels": kernels,
    "power": power,
    "tracked": tracked,
    "triggered": triggered,
    "bound ops": bound_ops,
}


def page() -> str:
    """Return the page with its tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        block = re.compile(
            rf"(<!-- measured {name}: begin [^\n]*-->\n).*?(<!-- measured {name}: end -->)", re.DOTALL
        )
        assert block.search(text), name
        made = table()
        text = block.sub(lambda match, made=made: match[1] + made + match[2], text)  # type: ignore[misc]
    return text


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
