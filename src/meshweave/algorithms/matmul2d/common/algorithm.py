"""What all 2D products share: layouts, the dense reference, gradients, and skeletons that give their time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from meshweave.algorithms.contract import Algorithm, Array, Arrays, Gradient
from meshweave.algorithms.matmul2d.common.passes import Stationary
from meshweave.algorithms.matmul2d.common.problem import (
    DATAFLOWS,
    Dataflow,
    Matmul2dConfig,
    Matmul2dProblem,
    Placements,
    two_d_meshes,
    two_d_placements,
)
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import Estimate, estimate_skeleton
from meshweave.ir.skeleton import Skeleton, skeleton_of

_GRADIENTS: dict[Dataflow, dict[str, tuple[Dataflow, str, str]]] = {
    "os": {"A": ("ls", "C", "B"), "B": ("rs", "A", "C")},
    "ls": {"A": ("os", "C", "B"), "B": ("rs", "C", "A")},
    "rs": {"A": ("ls", "B", "C"), "B": ("os", "A", "C")},
}
"""By dataflow and input: the dataflow of the gradient's product, and the forward tensors that are its A and B.

C stands for the gradient of the result (MeshSlice, Table 1). No operand is transposed in memory."""


class Matmul2d(Algorithm[Matmul2dProblem, Matmul2dConfig]):
    """A distributed product C (M, N) of two matrices on a 2D or 3D mesh.

    A skeleton is a short description of a program for estimates: the tasks of the rank with the largest shards,
    the lane of each, and what it waits for. It gives the time of a config, so that a tuner needs no programs. One
    matrix is stationary and two are moving (`Matmul2dProblem`).

    Attributes:
        dataflows: the dataflows ("os", "ls", "rs") for which the algorithm has programs. A plan needs those of its
            layers, forward and backward, which are in general all three.
        own_stationary: for an algorithm that fixes it, the stationary matrix of the linear layers Y = X W of a
            block in turn, repeated: ("y", "x") means Y in the first, X in the second, Y in the third. () if the
            tuner chooses by sizes.
    """

    problem_type = Matmul2dProblem
    dataflows: ClassVar[tuple[Dataflow, ...]] = DATAFLOWS
    own_stationary: ClassVar[tuple[Stationary, ...]] = ()

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the skeleton of a config's program: the tasks of the rank with the largest shards.

        This default writes the program and reads them off. Algorithms override it with a faster computation.
        """
        return skeleton_of(self.program(problem, config))

    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield the configs that a tuner may try, the one with the fewest slices first; `cluster` is ignored.

        This default yields one config, for an algorithm with nothing to choose.
        """
        yield Matmul2dConfig()

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        """Return the mesh shapes of `num_chips` chips that the algorithm can use.

        They are (rows, columns) or (rows, columns, depth). This default returns all shapes (rows, columns).
        """
        return two_d_meshes(num_chips)

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        """Return the placements of operands "a", "b" and "c" as stored: for each, one placement per mesh axis."""
        return two_d_placements(problem)

    def config_lower_bound(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton | None:
        """Return a skeleton of a few tasks that takes no longer than the config's own; None if none is known.

        Algorithms with many steps override this, so that a tuner can drop a config before it prices all steps.
        """
        return None

    def lower_bounds(self, problem: Matmul2dProblem) -> Iterator[Skeleton] | None:
        """Return skeletons of which the fastest takes no longer than any candidate; None if none are known."""
        return None

    def placements(self, problem: Matmul2dProblem) -> dict[str, Layout]:
        """Return the layouts of "A", "B" and "C" on the problem's mesh."""
        return {
            operand.upper(): Layout(problem.mesh, placements)
            for operand, placements in self.operand_placements(problem).items()
        }

    def reference(self, problem: Matmul2dProblem, inputs: Arrays) -> dict[str, Array]:
        """Return {"C": array (m, n)}, computed in one process from whole arrays "A" and "B".

        They are stored as the dataflow says: A is (k, m) for "rs", B is (n, k) for "ls".
        """
        a, b = inputs["A"], inputs["B"]
        left = a.T if problem.dataflow == "rs" else a
        right = b.T if problem.dataflow == "ls" else b
        return {"C": left @ right}

    def estimate(self, problem: Matmul2dProblem, config: Matmul2dConfig, machine: Machine) -> Estimate:
        """Return the predicted time of a config: that of its skeleton on `machine`, without contention."""
        return estimate_skeleton(self.skeleton(problem, config), machine)

    def refusal(self, problem: Matmul2dProblem) -> str | None:
        """Return why the algorithm cannot solve a problem: its dataflow or mesh shape; None if it can."""
        if problem.dataflow not in self.dataflows:
            return f"it has no dataflow {problem.dataflow}, only {', '.join(self.dataflows)}"
        if problem.mesh_shape not in self.mesh_shapes(problem.num_chips):
            return f"it has no {'x'.join(map(str, problem.mesh_shape))} mesh"
        return None

    def gradients(self, problem: Matmul2dProblem) -> tuple[Gradient[Matmul2dProblem], ...]:
        """Return the problems of the gradients with respect to A and B, each a product in another dataflow.

        A gradient is left out if the algorithm refuses its product, as for a dataflow that it lacks, or if its
        product needs other placements than the operands have. On a 2D mesh an algorithm with all dataflows has
        both gradients.
        """
        sizes = {
            "A": problem.stored_shape("a"),
            "B": problem.stored_shape("b"),
            "C": problem.stored_shape("c"),
        }
        gradients = []
        for wrt, (dataflow, a, b) in _GRADIENTS[problem.dataflow].items():
            m, n = sizes[wrt]
            k = sizes[a][0 if dataflow == "rs" else 1]
            backward = replace(problem, m=m, n=n, k=k, dataflow=dataflow)
            if self.refusal(backward) is not None:
                continue
            actual, needed = self.placements(problem), self.placements(backward)
            if (actual[a], actual[b], actual[wrt]) == (needed["A"], needed["B"], needed["C"]):
                gradients.append(Gradient(wrt, backward, {"A": a, "B": b}, "C"))
        return tuple(gradients)

    def examples(self) -> Iterator[Matmul2dProblem]:
        """Yield a float32 product of sizes that the mesh divides, then one int64 product per dataflow, uneven.

        All are on the squarest mesh that the algorithm has for 4 chips, or else for 8, 6, 9, 2 or 1 chips.
        """
        shapes = next(shapes for chips in (4, 8, 6, 9, 2, 1) if (shapes := self.mesh_shapes(chips)))
        shape = max(shapes, key=min)
        yield Matmul2dProblem(32, 32, 32, shape, self.dataflows[0])
        for dataflow in self.dataflows:
            yield Matmul2dProblem(33, 14, 21, shape, dataflow, "int64")
