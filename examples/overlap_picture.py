"""Where the time of one layer goes, algorithm by algorithm: simulated on 16 chips, drawn as SVG.

    python examples/overlap_picture.py [timeline.svg]

The product is the forward pass of GPT-3's first feed-forward layer with 8 x 2048 tokens on a 4x4 torus. Each
algorithm runs in its own best configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meshweave import Machine, load_cluster
from meshweave.algorithms.matmul2d import ALGORITHMS, MatmulProblem
from meshweave.report.timeline import to_svg, write_text
from meshweave.simulate import simulate
from meshweave.tune import tune_product

RANK = 10
"""Chip (2, 2), which Cannon skews most."""


def main(path: Path) -> None:
    problem = MatmulProblem(m=8 * 2048, n=49152, k=12288, mesh_shape=(4, 4), dataflow="os", dtype="bfloat16")
    cluster = load_cluster("tpu-v4-pod:16")
    pictures = []
    for name in ("cannon", "summa", "collective", "wang", "meshslice"):
        entry = ALGORITHMS[name]
        machine = Machine(cluster, (problem.mesh,))
        config = tune_product(entry, problem, machine).config
        trace = simulate(entry.program(problem, config), machine).trace()
        title = f"{entry.title}, {config}" if config.slice_count > 1 else entry.title
        pictures.append((title, trace))
        print(f"{title:<24} {1e3 * trace.duration_s:6.2f} ms, exposed {1e3 * trace.exposed_s(RANK):5.2f} ms")
    write_text(path, to_svg(pictures, rank=RANK))
    print(f"written: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "timeline.svg"))
