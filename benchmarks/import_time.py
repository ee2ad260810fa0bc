"""How long `import meshweave` takes, and its parts beyond numpy or torch, each in fresh interpreters, interleaved.

python benchmarks/import_time.py [--save]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from machine import save

STATEMENTS = {
    "nothing": "pass",
    "meshweave": "import meshweave",
    "numpy": "import numpy",
    "numpy + meshweave": "import numpy, meshweave",
    "numpy + pydantic": "import numpy, pydantic",
    "numpy + meshweave's planner": (
        "import numpy; from meshweave import load_cluster, load_model; from meshweave.tune import plan_model"
    ),
    "numpy + meshweave's command line": "import numpy; import meshweave.cli.app",
    "torch": "import torch",
    "torch + meshweave.matmul2d": "import torch; from meshweave.nn.matmul2d import matmul2d",
}
REPETITIONS = 21


def seconds(statement: str) -> float:
    """Wall time of the statement in a fresh interpreter, the interpreter's own start aside."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=kept
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/import_time.json")
    arguments = parser.parse_args()
    for statement in STATEMENTS.values():
        seconds(statement)  # modules are compiled once
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(REPETITIONS):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    rows = {name: statistics.median(found) for name, found in times.items()}
    bases = {"torch": "torch", "numpy": "numpy"}
    base = {name: rows[bases.get(name.split(" ")[0], "nothing")] for name in rows}
    for name, median in rows.items():
        print(f"{name:<34} {1000 * median:7.0f} ms   beyond its base {1000 * (median - base[name]):6.0f} ms")
    if arguments.save:
        print(
            save(
                "import_time",
                {name: {"median_s": rows[name], "beyond_s": rows[name] - base[name]} for name in rows},
            )
        )


if __name__ == "__main__":
    main()
