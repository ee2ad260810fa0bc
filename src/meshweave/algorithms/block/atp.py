"""A feed-forward block by ATP (Cheng et al., section 3): row- and column-first sharding on a 2D mesh.

X is sharded over columns by features, W1 over rows by hidden and over columns by features. Their products are
partial over columns, and their sum is sharded over rows by hidden. W2 is sharded the other way round, so Z is
summed over rows. Tokens are cut into chunks: the sum of one runs beside the product of the next (section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshweave.algorithms.contract import Algorithm, Array, Arrays
from meshweave.base.errors import LayoutError
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse


@dataclass(frozen=True)
class BlockProblem:
    """Z = square(X W1) W2 on a (rows, columns) mesh.

        X   (tokens, features)     W1  (features, hidden)     W2  (hidden, out)     Z  (tokens, out)

    Raises LayoutError for sizes under 1.
    """

    tokens: int
    features: int
    hidden: int
    out: int
    mesh_shape: tuple[int, int] = (2, 2)

    def __post_init__(self) -> None:
        if min(self.tokens, self.features, self.hidden, self.out, *self.mesh_shape) < 1:
            raise LayoutError("tokens, widths and mesh sides of a block must be positive")


@dataclass(frozen=True)
class Chunks:
    """The number of chunks into which tokens are cut; the last one may be smaller."""

    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} chunks" if self.count > 1 else "1 chunk"


class BlockAlgorithm(Algorithm[BlockProblem, Chunks]):
    """A strategy for a feed-forward block."""

    problem_type = BlockProblem

    def examples(self) -> Iterator[BlockProblem]:
        """Yield blocks whose sizes the mesh does not divide."""
        yield BlockProblem(7, 6, 9, 5)
        yield BlockProblem(8, 8, 12, 4, (2, 3))

    def reference(self, problem: BlockProblem, inputs: Arrays) -> dict[str, Array]:
        return {"Z": (inputs["X"] @ inputs["W1"]) ** 2 @ inputs["W2"]}

    def functions(self, problem: BlockProblem) -> Mapping[str, Callable[..., Any]]:
        return {"square": lambda y, *_: [y**2]}


class Atp(BlockAlgorithm):
    """All-reduces over columns after the first product and over rows after the second."""

    name = "atp"
    title = "ATP"
    source = "Cheng et al., ATP: Adaptive Tensor Parallelism for Foundation Models, sections 3 and 4"

    def candidates(self, problem: BlockProblem, cluster: Cluster | None = None) -> Iterator[Chunks]:
        """Yield 1, 2 and 4 chunks, as the paper has them."""
        return (Chunks(count) for count in (1, 2, 4) if count <= problem.tokens)

    def placements(self, problem: BlockProblem) -> dict[str, Layout]:
        mesh = Mesh.of("tp", problem.mesh_shape, ("row", "col"))
        return {
            "X": Layout(mesh, (Replicate(), Shard(1))),
            "W1": Layout(mesh, (Shard(1), Shard(0))),
            "W2": Layout(mesh, (Shard(0), Shard(1))),
            "Z": Layout(mesh, (Replicate(), Shard(1))),
        }

    def program(self, problem: BlockProblem, config: Chunks) -> Program:
        if not 1 <= config.count <= problem.tokens:
            raise LayoutError(f"{config.count} chunks of {problem.tokens} tokens")
        return parse(_text(problem, config.count))


def _text(problem: BlockProblem, count: int) -> str:
    tokens, features, hidden, out = problem.tokens, problem.features, problem.hidden, problem.out
    size = -(-tokens // count)
    rows = f"{size} * k:min({tokens}, {size} * k + {size}), :"
    elements = size * -(-hidden // problem.mesh_shape[0])
    return f"""program("ATP block, {Chunks(count)} of tokens")
tp = mesh({problem.mesh_shape}, ("row", "col"))
X = tensor(({tokens}, {features}), "float32")
W1 = tensor(({features}, {hidden}), "float32")
Y = tensor(({tokens}, {hidden}), "float32")
H = tensor(({tokens}, {hidden}), "float32")
W2 = tensor(({hidden}, {out}), "float32")
Z = tensor(({tokens}, {out}), "float32")
computes(Y, product(X, W1))
computes(H[i, j], call("square", Y[i, j]))
computes(Z, product(H, W2))
x = input(X, tp[R, S(1)])
w1 = input(W1, tp[S(1), S(0)])
y = temp(Y, tp[S(1), R])
h = temp(H, tp[S(1), R])
w2 = input(W2, tp[S(0), S(1)])
z = output(Z, tp[R, S(1)])
compute = lane()
row = lane()
col = lane()
with tp:
    for k in range({-(-tokens // size)}):
        matmul(y[{rows}], x[{rows}], w1, lane=compute)
        all_reduce(y[{rows}], y[{rows}], over="tp.col", lane=col)
    for k in range({-(-tokens // size)}):
        call(fn="square", outs=(h[{rows}],), ins=(y[{rows}],),
             flops={elements}, bytes={8 * elements}, lane=compute)
        matmul(z[{rows}], h[{rows}], w2, lane=compute)
        all_reduce(z[{rows}], z[{rows}], over="tp.row", lane=row)
"""
