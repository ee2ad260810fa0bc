"""Readings of the MeshSlice paper: named choices for what it leaves open, each scored in a table of its own.

Four readings are of the simulated pod, three of the real 4x4 mesh; "public" is one of each and the default. A
reading says how its times are made (`Timer`), with which constants of the catalog, and what was fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave_studies.meshslice.times import Rule
from meshweave_studies.published import NamedReading, by_name


@dataclass(frozen=True)
class MeasuredRun:
    """How the blocks ran on the measured mesh.

    Attributes:
        cluster: catalog name of the machine.
        batch: sequences of a block.
        slice_count: MeshSlice's S in every product; None where each product takes the best of at least two, since
            one would be Collective.
    """

    cluster: str = "tpu-v4-4x4"
    batch: int = 8
    slice_count: int | None = None


@dataclass(frozen=True)
class PaperReading(NamedReading):
    """A choice for what the paper leaves open.

    Attributes:
        pod: catalog name of the simulated pod, if the reading is of one.
        rule: how times add up on the pod.
        mesh: how the blocks ran on the real 4x4 mesh, if the reading is of it.
        mechanism: what it stands for on a real torus.
        simulator: what the event simulator does with it.
        fit: which numbers were fitted, and on what; empty if none were.
    """

    mechanism: str
    simulator: str
    pod: str = ""
    rule: Rule = "apart"
    mesh: MeasuredRun | None = None
    fit: str = ""

    def covers(self, row: str) -> bool:
        """Return whether the reading says anything about a row of the paper."""
        return bool(self.pod) if row not in MEASURED_ROWS else self.mesh is not None


MEASURED_ROWS = frozenset(
    {
        *("real_collective", "real_wang", "real_meshslice", "real_overlap"),
        *("real_overlap_gain", "real_overhead", "real_slicing", "communication_error"),
    }
)
"""The rows of the real 4x4 mesh (table 3, figure 15); all others are of the pod, or of neither."""

PUBLIC = "public"
READINGS: dict[str, PaperReading] = by_name(
    PaperReading(
        PUBLIC,
        "public constants; a product pays prologue and epilogue; each axis has its own links. 4x4: batch 8 of "
        "the weak scaling, best S above 1, products at the peak",
        "links are wired per axis, and products are separated by a barrier or depend on each other",
        "runs it as it stands: every product alone, every link a resource of its own",
        "tpu-v4-pod",
        mesh=MeasuredRun(),
    ),
    PaperReading(
        "fitted-links",
        "as public, with all bandwidths times 1.66 and launches of 205 us",
        "faster links than the public constants say, and slower launches",
        "runs it as it stands, with other constants",
        "tpu-v4-pod-fitted",
        fit="two numbers, on the two utilisations (validation/fit_pod.py)",
    ),
    PaperReading(
        "one-part",
        "prologue and epilogue as one part (section 4.2): a product pays the longer of the two",
        "the epilogue of one product (a scatter along one axis) runs beside the prologue of the next (a "
        "gather along the other axis), as it can for weights, which no product before makes",
        "overlaps two independent products of one program by at least this; rows are of single products, from "
        "whose duration the shorter end is taken",
        "tpu-v4-pod",
        "together",
    ),
    PaperReading(
        "shared-links",
        "both axes share one pool of bandwidth, (a + b) / 2, as the simulation branch of the public code "
        "charges; bandwidths times 0.84, launches of 180 us",
        "collectives that spread over the links of both axes, or a port per chip that is the bottleneck of "
        "all its links; rings along one axis of a torus cannot do it",
        "has no such torus: links belong to an axis there. A switch with one port per chip shares it so",
        "tpu-v4-pod-pooled",
        "pooled",
        fit="two numbers, on the two utilisations (validation/fit_pod.py --reading shared-links)",
    ),
    PaperReading(
        "fixed-batch",
        "4x4: batch 32, S = 8, products at 188 TFLOP/s",
        "products that reach 69 % of the peak, and the batch of the strong scaling (section 5.1.3)",
        "runs every product with this rate; without overlap its parts are added",
        mesh=MeasuredRun("tpu-v4-4x4-fitted", 32, 8),
        fit="batch, S, axis order and rate, scanned against six utilisations of table 3",
    ),
    PaperReading(
        "public-defaults",
        "4x4: batch 16 and S = 8, the defaults of the public benchmark, products at 249 TFLOP/s, the "
        "effective rate of the public code",
        "a benchmark that was run as it comes",
        "runs every product with this rate; without overlap its parts are added",
        mesh=MeasuredRun("tpu-v4-4x4-effective", 16, 8),
    ),
)
"""By name, the default first."""
