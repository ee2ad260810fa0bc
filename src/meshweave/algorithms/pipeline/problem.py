"""What a pipeline computes: two stages of one squared product each, trained on a squared error, and its gradients.

With a batch X and targets T, H = (X W0)^2 and Y = (H W1)^2, element by element; the loss is |Y - T|^2 / 2. Outputs
are Y and the gradients of X, W0 and W1. A stage is a `call`, so what stands in it does not matter to a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshweave.algorithms.contract import Algorithm, Array, Arrays
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Replicate
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster


@dataclass(frozen=True)
class PipelineProblem:
    """A batch of `rows` through two stages: rows x features -> rows x hidden -> rows x out. Stage i is rank i.

    Raises LayoutError for sizes under 1.
    """

    rows: int
    features: int
    hidden: int
    out: int

    def __post_init__(self) -> None:
        if min(self.rows, self.features, self.hidden, self.out) < 1:
            raise LayoutError("rows and widths of a pipeline must be positive")

    @property
    def declarations(self) -> str:
        """Return the text that declares meshes, tensors, meanings, inputs and outputs, for every schedule."""
        return f"""s0 = mesh((1,), ("x",))
s1 = mesh((1,), ("x",), first=1)
X = tensor(({self.rows}, {self.features}), "float32")
W0 = tensor(({self.features}, {self.hidden}), "float32")
W1 = tensor(({self.hidden}, {self.out}), "float32")
Y = tensor(({self.rows}, {self.out}), "float32")
T = tensor(({self.rows}, {self.out}), "float32")
DX = tensor(({self.rows}, {self.features}), "float32")
DW0 = tensor(({self.features}, {self.hidden}), "float32")
DW1 = tensor(({self.hidden}, {self.out}), "float32")
H = tensor(({self.rows}, {self.hidden}), "float32")
GY = tensor(({self.rows}, {self.out}), "float32")
GH = tensor(({self.rows}, {self.hidden}), "float32")
computes(H[r, :], call("stage", X[r, :], W0))
computes(Y[r, :], call("stage", H[r, :], W1))
computes(GY[r, :], call("loss_grad", Y[r, :], T[r, :]))
computes(GH[r, :], call("stage_input_grad", GY[r, :], W1, stash=(H[r, :], W1)))
computes(DX[r, :], call("stage_input_grad", GH[r, :], W0, stash=(X[r, :], W0)))
computes(DW1, call("stage_weight_grad", GY[r, :], DW1, stash=(H[r, :], W1), reduce="sum"))
computes(DW0, call("stage_weight_grad", GH[r, :], DW0, stash=(X[r, :], W0), reduce="sum"))
x = input(X, s0[R])
w0 = input(W0, s0[R])
w1 = input(W1, s1[R])
t = input(T, s1[R])
y = output(Y, s1[R])
dx = output(DX, s0[R])
dw0 = output(DW0, s0[R])
dw1 = output(DW1, s1[R])
"""


@dataclass(frozen=True)
class MicroBatches:
    """The number of equal parts into which the batch is cut."""

    count: int

    def __str__(self) -> str:
        return f"{self.count} micro-batch{'es' if self.count > 1 else ''}"


class PipelineAlgorithm(Algorithm[PipelineProblem, MicroBatches]):
    """A schedule of forwards and backwards over the stages."""

    problem_type = PipelineProblem

    def examples(self) -> Iterator[PipelineProblem]:
        """Yield a batch of eight rows and one of six."""
        yield PipelineProblem(8, 3, 5, 2)
        yield PipelineProblem(6, 2, 4, 3)

    def candidates(self, problem: PipelineProblem, cluster: Cluster | None = None) -> Iterator[MicroBatches]:
        """Yield the counts that divide the batch, from one row each down to the whole batch at once."""
        return (MicroBatches(n) for n in range(problem.rows, 0, -1) if problem.rows % n == 0)

    def placements(self, problem: PipelineProblem) -> dict[str, Layout]:
        stages = [Layout(Mesh(f"s{rank}", (1,), ("x",), (rank,)), (Replicate(),)) for rank in range(2)]
        tensors = (("X", "W0", "DX", "DW0"), ("W1", "T", "Y", "DW1"))
        return {name: stage for stage, names in zip(stages, tensors, strict=True) for name in names}

    def reference(self, problem: PipelineProblem, inputs: Arrays) -> dict[str, Array]:
        x, w0, w1, t = (inputs[name] for name in ("X", "W0", "W1", "T"))
        h = (x @ w0) ** 2
        y = (h @ w1) ** 2
        inner = 2 * (y - t) * (h @ w1)
        outer = 2 * (inner @ w1.T) * (x @ w0)
        return {"Y": y, "DW1": h.T @ inner, "DX": outer @ w0.T, "DW0": x.T @ outer}

    def random_inputs(self, problem: PipelineProblem, seed: int = 0) -> dict[str, Array]:
        """Return values in -1, 0, 1: squares of squares of larger ones are not exact in float32."""
        draw = np.random.default_rng(seed)
        shapes = {
            "X": (problem.rows, problem.features),
            "W0": (problem.features, problem.hidden),
            "W1": (problem.hidden, problem.out),
            "T": (problem.rows, problem.out),
        }
        return {name: draw.integers(-1, 2, shape).astype("float32") for name, shape in shapes.items()}

    def functions(self, problem: PipelineProblem) -> Mapping[str, Callable[..., Any]]:
        return {
            "stage": _stage,
            "stage_input_grad": _stage_input_grad,
            "stage_weight_grad": _stage_weight_grad,
            "loss_grad": lambda y, t, *_: [y - t],
        }


def _stage(stash: dict[str, Array], x: Array, w: Array, *_: int) -> list[Array]:
    stash.update(x=x + 0, product=x @ w)
    return [stash["product"] ** 2]


def _stage_input_grad(stash: dict[str, Array], grad: Array, w: Array, *_: int) -> list[Array]:
    return [2 * grad * stash["product"] @ w.T]


def _stage_weight_grad(stash: dict[str, Array], grad: Array, total: Array, *_: int) -> list[Array]:
    return [total + stash["x"].T @ (2 * grad * stash["product"])]
