"""Fused products in a lab at a ratio near 1; the figures of `meshweave bench fused`, saved.

python benchmarks/fused_lab.py --save
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import describe_environment  # noqa: E402

from meshweave_lab import Lab  # noqa: E402
from meshweave_lab.bench.fused import NOT_RUN, FusedOp, bench_fused, refuse_wrong_results  # noqa: E402

OPS: tuple[FusedOp, ...] = ("reduce-scatter", "all-gather")
RESULTS = HERE / "results" / "fused_lab.json"
LAB = HERE.parent / "examples" / "labs" / "switch-4x1-50mbit.toml"


def main() -> None:
    """Measure in a lab, print a table and save it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lab", type=Path, default=LAB)
    parser.add_argument("--sizes", type=int, nargs=3, default=(1024, 512, 512), help="M N K")
    parser.add_argument("--ratio", type=float, default=1.0, help="product over transfer, in seconds")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name} with machine and versions")
    options = parser.parse_args()
    lab, sizes = Lab.load(options.lab), tuple(options.sizes)
    measured = {op: bench_fused(lab, sizes, options.ratio, op=op, repeat=options.repeat) for op in OPS}
    rows = [{"op": op, **times.to_json()} for op, of in measured.items() for times in of]
    for row in rows:
        print(
            f"{row['algorithm']:24}{row['median_s']:8.4f} s  {row['over_bound']:.3f} of the bound, "
            f"simulated {row['simulated_over_measured']:.3f} of measured, error {row['error']:.1e}"
        )
    for of in measured.values():
        refuse_wrong_results(of)
    if options.save:
        record = {
            "machine": describe_environment(),
            "lab": options.lab.name,
            "sizes": options.sizes,
            "ratio": options.ratio,
            "not_run": NOT_RUN,
            "rivals": rows,
        }
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
