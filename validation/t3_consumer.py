"""What T3's section 7 proposes and does not evaluate, on the machine of its table 1.

Consumer side (7.2): the input of a product is gathered by rows beside the product, whose tiles start as their rows
arrive. Sequential is the all-gather and then the product; ideal overlap the longer of the two.

Following operations (7.6): bias, dropout and residual after an all-reduce run on all rows on every rank. Done
near memory on the reduced part of a rank, before it is gathered, they touch 1/P of them. That is a bound by bytes,
and no simulation.

python validation/t3_consumer.py           # results/t3-consumer.json and .md, a minute or two
python validation/t3_consumer.py --page    # the page alone, from the saved numbers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshweave.algorithms.fused import AllGatherAtConsumer, NoChoice, SequentialAllGather, Tiles
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.describe.layout import Layout, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.gpu import load_gpu
from meshweave.ir.program import Program
from meshweave_studies.gpu import Arbiter, GpuRun, lower, run
from meshweave_studies.t3.groups import geomean_gain
from meshweave_studies.t3.models import DTYPE, MODELS, STUDIED, sub_layers
from meshweave_studies.t3.readings import LINK_BYTES_PER_S
from meshweave_studies.t3.study import GPU, LINK_PS, T3_MCA, GpuJob, simulate_job

OUT = Path(__file__).parent / "results" / "t3-consumer.json"
CONSUMERS = {"FC-1 forward": 4, "IP forward": 3}
"""Products of gathered rows, and their columns in hidden sizes over the degree."""
PASSES = {"read": 2 + 2 + 1, "written": 2}
"""Bytes an element: the sum, the residual and the mask of dropout are read, the result is written."""


def problem(model: str, degree: int, columns: int) -> UniversalProblem:
    """Return the product of gathered tokens and columns of a weight on a ring."""
    mesh = Mesh.of("tp", (degree,), ("x",))
    a, b, c = (Layout(mesh, (placement,)) for placement in (Shard(0), Shard(1), Shard(1)))
    tokens, hidden = MODELS[model].tokens, MODELS[model].hidden
    return UniversalProblem(tokens, columns * hidden, hidden, a, b, c, DTYPE)


def simulated(program: Program, arbiter: Arbiter | None = None) -> GpuRun:
    """Return the run of a program on table 1's machine, one GPU standing for all."""
    gpu = load_gpu(GPU)
    return run(lower(program, gpu), gpu, link_bytes_per_s=LINK_BYTES_PER_S, link_ps=LINK_PS, arbiter=arbiter)


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Return what each consumer gains (%), and what following operations near memory gain at most (%)."""
    consumers: dict[str, dict[str, float]] = {}
    for model in STUDIED:
        for degree in MODELS[model].degrees:
            for name, columns in CONSUMERS.items():
                of = problem(model, degree, columns)
                whole = simulated(SequentialAllGather().program(of, NoChoice()))
                tracked = AllGatherAtConsumer().program(of, Tiles())
                kinds = (None, Arbiter("communication-aware", drains=True))
                plain, aware = (simulated(tracked, arbiter).duration_ps for arbiter in kinds)
                product, gather = whole.kernel_ps("product"), whole.kernel_ps("all_gather")
                consumers[f"{model} TP {degree}, {name}"] = {
                    "gather_share": 100 * gather / whole.duration_ps,
                    "ideal": 100 * (whole.duration_ps / max(product, gather) - 1),
                    "tracked": 100 * (whole.duration_ps / plain - 1),
                    "tracked_aware": 100 * (whole.duration_ps / aware - 1),
                }
    following = {}
    for layer in sub_layers(*STUDIED, names=("OP", "FC-2")):
        mca_s = simulate_job(GpuJob(layer.product, T3_MCA)).duration_ps / 1e12
        elements = MODELS[layer.model].tokens * MODELS[layer.model].hidden
        whole_s = elements * sum(PASSES.values()) / load_gpu(GPU).memory.bytes_per_s
        saved_s = whole_s * (1 - 1 / layer.degree)
        following[str(layer)] = {"share": 100 * whole_s / mca_s, "at_most": 100 * saved_s / mca_s}
    return {"consumers": consumers, "following": following}


def page(saved: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the page of the saved numbers."""
    consumers, following = saved["consumers"], saved["following"]
    names = ("ideal", "tracked", "tracked_aware")
    means = {name: geomean_gain(row[name] for row in consumers.values()) for name in names}
    least, most = (choose(row["at_most"] for row in following.values()) for choose in (min, max))
    return "\n".join(
        (
            "# T3: what its section 7 proposes",
            "",
            "Written by `validation/t3_consumer.py`. The paper has no numbers for these; ours stand alone.",
            "",
            "## Products that start as their operand is gathered (section 7.2)",
            "",
            f"Over the all-gather and then the product, geometric means: {means['tracked']:.1f} % faster, "
            f"{means['tracked_aware']:.1f} % with the arbitration, of {means['ideal']:.1f} % by ideal overlap.",
            "",
            "| product | all-gather, % of sequential | ideal, % faster | tracked | with MCA |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {name} | {row['gather_share']:.1f} | {' | '.join(f'{row[one]:.1f}' for one in names)} |"
                for name, row in consumers.items()
            ),
            "",
            "## Operations that follow, near memory (section 7.6)",
            "",
            f"Bias, dropout and residual after OP and FC-2: near memory on a rank's own part they save "
            f"{least:.1f} to {most:.1f} % of the sub-layer under T3-MCA at most. A bound by bytes at the memory's "
            "rate, as if what is left cost no more than its share, and no simulation.",
            "",
            "| sub-layer | on all rows, % of T3-MCA | saved at most, % |",
            "|---|---:|---:|",
            *(f"| {name} | {row['share']:.1f} | {row['at_most']:.1f} |" for name, row in following.items()),
            "",
        )
    )


def main() -> int:
    """Compute and write the numbers and the page, or with --page the page alone."""
    if sys.argv[1:] != ["--page"]:
        OUT.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    OUT.with_suffix(".md").write_text(page(json.loads(OUT.read_text("utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
