"""Predict the saved fidelity runs of the lab again, with the models and the description as they are now.

    python benchmarks/lab_fidelity_again.py          # rewrite the predictions in results/lab_fidelity.json
    python benchmarks/lab_fidelity_again.py --check  # exit with 1 where they differ from those saved

What was measured stays as it is. `lab_tables.py` then writes the tables.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from machine import RESULTS

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.trace import Trace
from meshweave_lab.fidelity.cases import FidelityCase
from meshweave_lab.fidelity.measure import CaseFidelity, FidelityReport, predict


def predicted_again(saved: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    """Return a saved report with the predictions of today."""
    outcomes = []
    for row in saved["cases"]:
        config = Matmul2dConfig(tuple(row["slices"]), packets=row["packets"], overlap=row["overlap"])
        problem = Matmul2dProblem(*row["m_n_k"], tuple(row["mesh_shape"]), row["dataflow"])
        case = FidelityCase(row["number"], row["algorithm"], problem, config, row["ways"], row["flops_per_s"])
        estimated, simulated = predict(case, cluster)
        outcomes.append(
            CaseFidelity(
                case,
                tuple(row["measured_s"]),
                estimated.duration_s,
                simulated.duration_s,
                row["max_abs_error"],
                row["late_s"],
                row["overruns"],
                Trace(case.program.name, "torch", ()),
            )
        )
    report = FidelityReport(tuple(outcomes), ()).to_json()
    return {**saved, **report, "clock_offsets_ns": saved["clock_offsets_ns"]}


def main() -> int:
    """Write or check the predictions."""
    path = RESULTS / "lab_fidelity.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    again = predicted_again(saved, load_cluster(str(RESULTS / "torus-4x4-50mbit.toml")))
    if sys.argv[1:] == ["--check"]:
        return 0 if again == saved else 1
    path.write_text(json.dumps(again, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
