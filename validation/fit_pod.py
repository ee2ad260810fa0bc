"""Fits the two free constants of a reading of MeshSlice's pod on the two rows marked cal, and on nothing else.

    python validation/fit_pod.py                            # of `tpu-v4-pod-fitted`, about three minutes
    python validation/fit_pod.py --reading shared-links     # of `tpu-v4-pod-pooled`, about six minutes

The public constants of MeshSlice's code leave two things open: how its bandwidths are to be read (per direction
or both, which kind of collective) and what its simulator's launch cost is. So two numbers are free: one factor on
all bandwidths and one launch time. The fit takes the pair on a grid whose FLOP utilisations at 256 chips
(MeshSlice, by estimate, at its own best mesh and slice counts) are nearest to the published ones, by squared
difference. It prints no other row, and knows none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import CommConstants
from meshweave.describe.machine.network import TorusNetwork
from meshweave_studies.meshslice.readings import READINGS
from meshweave_studies.meshslice.study import MeshSliceStudy
from meshweave_studies.meshslice.times import Rule, Timer
from meshweave_studies.published import published_rows

GRIDS: dict[str, tuple[list[float], range]] = {
    "fitted-links": ([round(0.8 + 0.02 * step, 2) for step in range(44)], range(0, 305, 5)),
    "shared-links": ([round(0.64 + 0.04 * step, 2) for step in range(9)], range(100, 220, 20)),
}
"""By reading: factors, up to 1.66 (beyond 5 / 3 an all-gather would exceed the links), and launches in us."""


def scaled(cluster: Cluster, factor: float, launch_s: float) -> Cluster:
    """Return `cluster` with all bandwidths times `factor`, and this launch time."""
    assert isinstance(cluster.network, TorusNetwork)
    axes = tuple(
        replace(
            axis,
            launch_s=launch_s,
            constants=tuple(
                (kind, CommConstants(known.bytes_per_s * factor, known.sync_s, launch_s))
                for kind, known in axis.constants
            ),
        )
        for axis in cluster.network.axes
    )
    return replace(cluster, network=replace(cluster.network, axes=axes))


def utilisations(cluster: Cluster, models: Iterable[str], rule: Rule) -> list[float]:
    """Return the FLOP utilisation in percent of the fully connected layers of each model."""
    study = MeshSliceStudy(cluster, Timer("estimate", rule))
    blocks = [study.weak_scaling_block(model) for model in models]
    return [study.percent_of_peak(block, study.block_s(block)) for block in blocks]


def main() -> None:
    """Print the pair of the reading that the command line names, with its two utilisations."""
    name = sys.argv[2] if sys.argv[1:2] == ["--reading"] else "fitted-links"
    (row,) = (row for row in published_rows("meshslice") if row.fitted)
    targets, public = row.values, load_cluster("tpu-v4-pod")
    best: tuple[float, float, int, list[float]] | None = None
    for factor, launch_us in product(*GRIDS[name]):
        pod = scaled(public, factor, launch_us * 1e-6)
        reached = utilisations(pod, list(targets), READINGS[name].rule)
        off = sum((a - b) ** 2 for a, b in zip(reached, targets.values(), strict=True))
        if best is None or off < best[0]:
            best = off, factor, launch_us, reached
    assert best is not None
    _, factor, launch_us, reached = best
    shown = ", ".join(f"{m} {value:.2f} % ({targets[m]})" for m, value in zip(targets, reached, strict=True))
    print(f"factor {factor}, launch {launch_us} us: {shown}")


if __name__ == "__main__":
    main()
