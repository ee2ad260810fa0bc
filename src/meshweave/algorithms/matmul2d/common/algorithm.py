"""What all 2D products share: layouts, the dense reference, gradients, and skeletons that give their time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from meshweave.algorithms.contract import Algorithm, Array, Arrays, Gradient
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
from meshweave.estimate import Estimate, estimate
from meshweave.ir.skeleton import Skeleton, skeleton_of

_GRADIENTS: dict[Dataflow, dict[str, tuple[Dataflow, str, str]]] = {
    "os": {"A": ("ls", "C", "B"), "B": ("rs", "A", "C")},
    "ls": {"A": ("os", "C", "B"), "B": ("rs", "C", "A")},
    "rs": {"A": ("ls", "B", "C"), "B": ("os", "A", "C")},
}
"""By dataflow and input: the dataflow of the gradient's product, and the forward tensors that are its A and B. C
stands for the gradient of the result (MeshSlice, Table 1). No operand is transposed in memory."""


class Matmul2d(Algorithm[Matmul2dProblem, Matmul2dConfig]):
    """A product on a 2D or 3D mesh. A skeleton gives its time, so a tuner prices it without writing programs.

    Attributes:
        dataflows: the dataflows that it has.
    """

    problem_type = Matmul2dProblem
    dataflows: ClassVar[tuple[Dataflow, ...]] = DATAFLOWS

    def skeleton(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton:
        """Return the program's shape in time on the rank where everything is largest.

        Here it is read off the program. One that is written directly is faster, and makes planning fast.
        """
        return skeleton_of(self.program(problem, config))

    @abstractmethod
    def candidates(
        self, problem: Matmul2dProblem, cluster: Cluster | None = None
    ) -> Iterator[Matmul2dConfig]:
        """Yield what a tuner may try, the one with fewest slices first."""

    def mesh_shapes(self, num_chips: int) -> tuple[tuple[int, ...], ...]:
        """Return the mesh shapes of that many chips that the algorithm can use."""
        return two_d_meshes(num_chips)

    def operand_placements(self, problem: Matmul2dProblem) -> Placements:
        """Return the placements of operands "a", "b", "c", one per mesh axis."""
        return two_d_placements(problem)

    def floor(self, problem: Matmul2dProblem, config: Matmul2dConfig) -> Skeleton | None:
        """Return a skeleton of a few tasks that takes no longer than `skeleton`, for algorithms of many turns."""
        return None

    def least(self, problem: Matmul2dProblem) -> Iterator[Skeleton] | None:
        """Return skeletons of which one takes no longer than any candidate's, or None where none are known."""
        return None

    def placements(self, problem: Matmul2dProblem) -> dict[str, Layout]:
        return {
            operand.upper(): Layout(problem.mesh, placements)
            for operand, placements in self.operand_placements(problem).items()
        }

    def reference(self, problem: Matmul2dProblem, inputs: Arrays) -> dict[str, Array]:
        a, b = inputs["A"], inputs["B"]
        left = a.T if problem.dataflow == "rs" else a
        right = b.T if problem.dataflow == "ls" else b
        return {"C": left @ right}

    def estimate(self, problem: Matmul2dProblem, config: Matmul2dConfig, machine: Machine) -> Estimate:
        return estimate(self.skeleton(problem, config), machine)

    def refusal(self, problem: Matmul2dProblem) -> str | None:
        if problem.dataflow not in self.dataflows:
            return f"it has no dataflow {problem.dataflow}, only {', '.join(self.dataflows)}"
        if problem.mesh_shape not in self.mesh_shapes(problem.num_chips):
            return f"it has no {'x'.join(map(str, problem.mesh_shape))} mesh"
        return None

    def gradients(self, problem: Matmul2dProblem) -> tuple[Gradient[Matmul2dProblem], ...]:
        """Return both gradients where operands lie as the other dataflows want them, as on a 2D mesh they do."""
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
            lie, want = self.placements(problem), self.placements(backward)
            if (lie[a], lie[b], lie[wrt]) == (want["A"], want["B"], want["C"]):
                gradients.append(Gradient(wrt, backward, {"A": a, "B": b}, "C"))
        return tuple(gradients)

    def examples(self) -> Iterator[Matmul2dProblem]:
        """Yield an even product on the squarest mesh of few chips, then uneven ones in every dataflow."""
        shapes = next(shapes for chips in (4, 8, 6, 9, 2, 1) if (shapes := self.mesh_shapes(chips)))
        shape = max(shapes, key=min)
        yield Matmul2dProblem(32, 32, 32, shape, self.dataflows[0])
        for dataflow in self.dataflows:
            yield Matmul2dProblem(33, 14, 21, shape, dataflow, "int64")
