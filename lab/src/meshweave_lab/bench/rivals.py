"""The rivals of a benchmark: algorithms with their configurations, and PyTorch's DTensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import estimate_skeleton
from meshweave.ir.program import Program
from meshweave.ir.program.ops import AllGather, ReduceScatter
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_chains, lower_rings
from meshweave.tune.product import tune_product
from meshweave.tune.unrolled import restricted
from meshweave_lab.bench.yardsticks import matmul_machine

SAME_SHARDS = {"a": ("S0", "S1"), "b": ("S0", "S1"), "c": ("S0", "S1")}
"""The placements of all other rivals. DTensor gathers what it needs."""
REPLICATED_INPUTS = {
    "os": {"a": ("S0", "R"), "b": ("R", "S1"), "c": ("S0", "S1")},
    "ls": {"a": ("S0", "S1"), "b": ("R", "S1"), "c": ("S0", "S1")},
    "rs": {"a": ("S0", "R"), "b": ("S0", "S1"), "c": ("S0", "S1")},
}
"""Placements under which DTensor need not gather, by dataflow: the inputs that move are replicated beforehand,
which takes no time here. This bounds what DTensor could reach from below. Sums are still scattered."""
REPLICATED_NOTE = (
    "DTensor, inputs replicated: starts from gathered inputs; what gathering them takes is not counted"
)


@dataclass(frozen=True)
class Rival:
    """An algorithm with a configuration, or PyTorch's DTensor.

    Attributes:
        algorithm: the key in `PRODUCTS_2D`; "" for DTensor.
        ring_directions: in how many directions a collective's ring sends; 0 for gloo's own collectives. With 2, an
            axis of two ranks, which has one link, still gets a ring of one direction.
        inputs_replicated: whether DTensor starts from the placements `REPLICATED_INPUTS`.
    """

    name: str
    algorithm: str = ""
    config: Matmul2dConfig = field(default_factory=Matmul2dConfig)
    ring_directions: int = 0
    inputs_replicated: bool = False

    @property
    def family(self) -> str:
        """The name that all configurations of a rival share."""
        return self.algorithm if self.ring_directions else self.name

    def payload(self, problem: Matmul2dProblem) -> dict[str, Any]:
        """Return what a rank needs to run the rival. Raises LayoutError for slices that do not fit the problem."""
        if not self.algorithm:
            return {
                "name": self.name,
                "dtensor": REPLICATED_INPUTS[problem.dataflow] if self.inputs_replicated else SAME_SHARDS,
            }
        return {"name": self.name, "program": to_text(self.program(problem))}

    def program(self, problem: Matmul2dProblem) -> Program:
        """Return the algorithm's program, its collectives lowered to rings unless `ring_directions` is 0.

        Raises LayoutError for slices that do not fit the problem.
        """
        program = PRODUCTS_2D[self.algorithm].program(problem, self.config)
        if not self.ring_directions:
            return program
        if self.ring_directions == 2:

            def two_links(op: AllGather | ReduceScatter) -> bool:
                axis = str(op.over).partition(".")[2]
                return bool(axis) and problem.axis_size(axis) > 2

            program = lower_rings(program, 2, two_links)
        return lower_chains(lower_rings(program, 1))

    def estimate_s(self, problem: Matmul2dProblem, machine: Machine) -> float | None:
        """Return the seconds by the algorithm's skeleton on a machine; None for DTensor, which has no skeleton."""
        if not self.algorithm:
            return None
        return estimate_skeleton(PRODUCTS_2D[self.algorithm].skeleton(problem, self.config), machine).total_s


DTENSOR = Rival("DTensor, same shards"), Rival("DTensor, inputs replicated", inputs_replicated=True)
PRECONDITIONS = {DTENSOR[1].name: REPLICATED_NOTE}
"""By name of a rival: what it starts from and the others do not. Its times are no like for like with theirs."""


def widths_text(widths: Sequence[int]) -> str:
    """Return relative widths as text, such as "1:2:4x6:2:1" for six slices of width 4 between thinner ones."""
    runs = [(width, len(list(group))) for width, group in groupby(widths)]
    return ":".join(str(width) if count == 1 else f"{width}x{count}" for width, count in runs)


def meshslice_rival(problem: Matmul2dProblem, widths: Sequence[int]) -> Rival:
    """Return MeshSlice with slices of these relative widths."""
    even = len(set(widths)) == 1
    name = f"meshslice S={len(widths)}" if even else f"meshslice {widths_text(widths)}"
    return Rival(name, "meshslice", Matmul2dConfig(tuple(widths)), num_ring_directions(problem))


def num_ring_directions(problem: Matmul2dProblem) -> int:
    """Return 2 if some axis has more than two ranks, else 1: an axis of two ranks has one link."""
    return 2 if max(problem.mesh_shape) > 2 else 1


def choose_rivals(
    problem: Matmul2dProblem,
    cluster: Cluster,
    names: Sequence[str],
    extra_slices: Sequence[Sequence[int]] = (),
    *,
    with_baselines: bool = True,
) -> list[Rival]:
    """Return the rivals of a round, each once.

    They are each algorithm of `names` at its best configuration by estimate on `cluster`, MeshSlice with each of
    the relative widths in `extra_slices`, and, `with_baselines`, Collective on gloo's own collectives and DTensor
    from the same shards and from replicated inputs. Algorithms that cannot use the mesh, the dataflow or the sizes
    are left out.

    Raises:
        LayoutError: the mesh does not fit the cluster.
    """
    machine = matmul_machine(cluster, problem)
    rivals = []
    for name in names:
        entry = PRODUCTS_2D[name]
        if (
            problem.mesh_shape not in entry.mesh_shapes(problem.num_chips)
            or problem.dataflow not in entry.dataflows
        ):
            continue
        try:
            best = tune_product(_tapered_only(entry), problem, machine).config
        except UnsupportedError:  # it offers nothing for these sizes
            continue
        rivals.append(Rival(_rival_name(name, best), name, best, num_ring_directions(problem)))
    rivals += [meshslice_rival(problem, widths) for widths in extra_slices]
    if with_baselines:
        rivals += [Rival("collective, gloo's own", "collective"), *DTENSOR]
    return list({rival.name: rival for rival in reversed(rivals)}.values())[::-1]


def _rival_name(name: str, config: Matmul2dConfig) -> str:
    if len(set(config.slices)) > 1:
        return f"{name} {widths_text(config.slices)}"
    return f"{name} {config}" if config.slice_count > 1 or config.packets > 1 else name


def _tapered_only(entry: Matmul2d) -> Matmul2d:
    """Return the algorithm without equal slices if it is tapered MeshSlice: these are `meshslice` already."""
    if entry.name != "meshslice_tapered":
        return entry

    def candidates(problem: Matmul2dProblem) -> Iterator[Matmul2dConfig]:
        return (config for config in entry.candidates(problem) if len(set(config.slices)) > 1)

    return restricted(entry, entry.name, candidates)
