"""Where the time of one layer goes, algorithm by algorithm: simulated on 16 chips, drawn as SVG.

    python examples/overlap_picture.py [timeline.svg]

The product is the forward pass of GPT-3's first feed-forward layer with 8 x 2048 tokens on a 4x4 torus. Each
algorithm runs in its own best configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import meshweave as mw

RANK = 10
"""Chip (2, 2), which Cannon skews most."""


def main(path: Path) -> None:
    problem = mw.algorithms.Matmul2dProblem(
        m=8 * 2048, n=49152, k=12288, mesh_shape=(4, 4), dataflow="os", dtype="bfloat16"
    )
    cluster = mw.load_cluster("tpu-v4-pod:16")
    pictures = []
    for name in ("cannon", "summa", "collective", "wang", "meshslice"):
        best = mw.rank(problem, cluster, algorithms=[name])[0]
        program = best.program
        trace = mw.simulate(program, mw.Machine.of(cluster, program)).trace()
        title = (
            f"{best.algorithm.title}, {best.config}" if best.config.slice_count > 1 else best.algorithm.title
        )
        pictures.append((title, trace))
        print(f"{title:<24} {1e3 * trace.duration_s:6.2f} ms, exposed {1e3 * trace.exposed_s(RANK):5.2f} ms")
    path.write_text(mw.simulation.timeline_svg(pictures, rank=RANK))
    print(f"written: {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "timeline.svg"))
