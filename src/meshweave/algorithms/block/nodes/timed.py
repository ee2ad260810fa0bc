"""Records of nodes of which programs say the work and not the values: what tokens cost, forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from meshweave.algorithms.block.node_writer import NodeWriter
from meshweave.algorithms.block.nodes.kernel import Kernel, PassPart, RankSizes
from meshweave.algorithms.block.nodes.record import AnyNode, NodeRecord
from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import AxisDims, Roles
from meshweave.algorithms.block.writer import COMPUTE, Stored
from meshweave.base.errors import UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.ir.work import Compute, Work

REFUSAL = (
    "layers with experts or latent attention have programs for their time alone, which compute no values; "
    "`meshweave.parallelize` runs such models"
)


class TimedRecord(NodeRecord[AnyNode]):
    """A node whose work follows from a rank's number of tokens; its programs have costs, and no equations."""

    is_timed = True

    @abstractmethod
    def works(
        self, node: AnyNode, problem: BlockProblem, tokens: int, part: PassPart
    ) -> Iterator[tuple[str, Work]]:
        """Yield (lane, work) for each op of `part` ("forward" or "backward"), in order, for a rank's `tokens`.

        The lane is "compute", or "experts" for communication between ranks that share experts.
        """

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        """Raise UnsupportedError, always: such a node has costs, and neither equations nor values."""
        raise UnsupportedError(REFUSAL)

    meanings = gradient_meanings = compute = compute_gradient = _refuse

    def kernels(self, at: NodePlace[AnyNode], roles: Roles, sizes: RankSizes) -> Iterator[Kernel]:
        """Yield the computations, forward and backward, of the rank with the most tokens, but no transfers."""
        tokens = sizes.tokens(roles.residual)
        for part in ("forward", "backward"):
            for _, work in self.works(at.node, at.problem, tokens, part):
                if isinstance(work, Compute):
                    yield Kernel(work, part)

    def write(self, at: NodePlace[AnyNode], writer: NodeWriter) -> None:
        """Write the forward part as ops that compute no values, one for each work that `works` yields."""
        ins = tuple(writer.edge(at, number) for number in range(len(at.node.ins)))
        self._write(at, writer, "forward", ins, (writer.out(at),))

    def write_gradient(self, at: NodePlace[AnyNode], writer: NodeWriter) -> None:
        """Write the backward part as ops that compute no values, one for each work that `works` yields.

        Gradients of parameters are left as partial sums along axes that shard the tokens.
        """
        writer.end_site()
        outs = tuple(writer.contribution(at, edge) for edge in at.node.ins)
        arriving = writer.arriving(at)
        rows = next((stored for stored in outs if stored.has_tokens), arriving)
        self._write(at, writer, "backward", (rows, arriving), outs)
        for edge in at.node.ins:
            writer.sum_contributions(at, edge)
        writer.end_site()

    def _write(
        self,
        at: NodePlace[AnyNode],
        writer: NodeWriter,
        part: PassPart,
        ins: tuple[Stored, ...],
        outs: tuple[Stored, ...],
    ) -> None:
        node, problem = at.node, at.problem
        lanes = [lane for lane, _ in self.works(node, problem, 1, part)]
        names = [at.own(weight.name) for weight in node.parameters]
        parameters = tuple(writer.stored[name] for name in names)
        gradients = tuple(writer.stored[f"D{name}"] for name in names) if part == "backward" else ()
        for number, lane in enumerate(lanes):

            def work_of(tokens: int, *, number: int = number, load: float | None = None) -> Work:
                of = problem if load is None else with_load(problem, load)
                return list(self.works(node, of, tokens, part))[number][1]

            made = gradients if number == len(lanes) - 1 else ()
            writer.writer.timed(lane, work_of, outs, (*ins, *outs) if number else ins, (parameters, made))
        for gradient in gradients:
            own = ("", *(side.dim for side in gradient.sides))
            natural: AxisDims = tuple(dim if dim in own else "partial" for dim in ins[-1].dims)
            is_whole = gradient.sides[0].dim != "expert"
            writer.leave_partial_sums(replace(gradient, dims=natural) if is_whole else gradient, gradient)


def with_load(problem: BlockProblem, load: float) -> BlockProblem:
    """Return the problem with another `load` of its `experts`, which must not be None.

    The load is the copies of tokens on the most loaded rank divided by the mean over ranks.
    """
    assert problem.experts is not None
    return replace(problem, experts=replace(problem.experts, load=load))


def streamed(problem: BlockProblem, elements: int) -> tuple[str, Work]:
    """Return ("compute", work) of an elementwise call whose reads and writes are `elements` elements in all.

    An element has the problem's dtype.
    """
    moved = elements * dtype_bytes(problem.dtype)
    return COMPUTE, Compute(
        "call", max(elements, 1), moved, dtype=problem.dtype, call="elementwise", shape=(elements,)
    )
