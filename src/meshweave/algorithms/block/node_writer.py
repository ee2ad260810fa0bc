"""What nodes write their programs with: products with what they move, sums over ranks, and what is written later.

The next group of nodes does not wait for gradients of weights. They are written after the next communication that
this group waits for: their products then run beside the reduction of the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshweave.algorithms.block.place import NodePlace
from meshweave.algorithms.block.roles import TOKENS, AxisDims, Dim, Side, gradient_dims, product
from meshweave.algorithms.block.sides import layout_of, within
from meshweave.algorithms.block.tensors import BlockTensors
from meshweave.algorithms.block.writer import Stored
from meshweave.describe.layout import Tile
from meshweave.describe.model.nodes import LayerNode, Linear
from meshweave.ir.program.expressions import Index

GRADIENTS = "gradients"
"""What the lanes of reductions of gradients are called, after their mesh axis."""


@dataclass
class NodeWriter(BlockTensors):
    """Writes what the records of nodes have in common: products, sums over ranks, gradients of parameters.

    A layer's graph has nodes (ops) and edges (activations); a reader of an edge is a node that takes it as input.
    A node's contribution is its term of the gradient with respect to an edge that it reads. A site is a product
    with its communication, a sum of statistics, or attention. Methods "write" ops into `writer`'s program or
    skeleton.

    Attributes:
        unmoved: buffers of partial sums that are not reduced over ranks yet, by the tensor name of the edge or
            contribution.
    """

    unmoved: dict[str, Stored] = field(default_factory=dict)
    _later: list[Callable[[], None]] = field(default_factory=list)
    _small: list[Callable[[], None]] = field(default_factory=list)
    _reductions: list[tuple[Stored, Stored]] = field(default_factory=list)

    def end_site(self) -> None:
        """Write delayed ops, and let later ops wait for all ops so far; do nothing unless `writer.is_by_sites`."""
        if self.writer.is_by_sites:
            self._write_later()
            self.writer.end_site()

    # --- edges --------------------------------------------------------------------------------------------------

    def edge(self, at: NodePlace[LayerNode], number: int = 0) -> Stored:
        """Return the buffer of a node's input `number`, counted from 0."""
        return self.stored[at.layer.home(at.node.ins[number])]

    def out(self, at: NodePlace[LayerNode]) -> Stored:
        """Return the buffer of a node's output; if a sum is made in place of the output, the sum's buffer."""
        features = at.node.makes
        return self.new(at.layer.home(at.node.out), self.sides(features), self.dims(at, features))

    def arriving(self, at: NodePlace[LayerNode]) -> Stored:
        """Return the buffer of the gradient with respect to a node's output."""
        return self.stored[at.arriving]

    def contribution(self, at: NodePlace[LayerNode], edge: str) -> Stored:
        """Return the buffer for a node's contribution to the gradient with respect to an edge.

        For the edge's first reader, which comes last in the backward pass, it is the buffer of the whole gradient,
        to which the other contributions are added.
        """
        like = self.stored[at.layer.home(edge)]
        name = at.layer.gradient(edge) if at.is_first_reader(edge) else at.contribution_name(edge)
        return self.new(name, like.sides, like.dims)

    def sum_contributions(self, at: NodePlace[LayerNode], edge: str) -> None:
        """Add the contributions of other readers to the gradient of an edge if `at` is its first reader.

        Do nothing for any other reader. The first reader's own contribution comes last in the backward pass, and
        is in the buffer of the gradient already. Contributions in `unmoved` are not added here: they are partial
        sums, which are added before the reduction over ranks.
        """
        if at.is_first_reader(edge):
            out, (*others, _) = self.stored[at.layer.gradient(edge)], at.layer.contributions(edge)
            for name in others:
                if name not in self.unmoved:
                    self.writer.add(out, self.stored[name])

    def rows_and_features(self, stored: Stored) -> tuple[Index, Index]:
        """Return (tokens, features): how many a rank has of a tensor in the current chunk, ints or expressions."""
        *tokens, features = (self.writer.extent(side, stored.dims) for side in stored.sides)
        return (tokens[0] * tokens[1] if len(tokens) > 1 else tokens[0]), features

    def row_sums(self, tensor: str, rows: int, fn: str, ins: tuple[Stored, ...]) -> Stored:
        """Write a call that sums over the features of each token, and the all-reduce over ranks that shard them.

        Args:
            tensor: name of the tensor of sums, (tokens, `rows`).
            rows: number of sums per token.
            fn: name of the function that is called with `ins`.
            ins: the inputs of the function; the layout of the first one says which axes shard the features.

        Returns:
            The buffer of the complete sums.
        """
        sides = *self._token_sides, Side("", rows)
        sums = self.new(tensor, sides, self.roles.statistics, self.problem.statistics_dtype)
        natural: AxisDims = tuple("partial" if dim == "hidden" else dim for dim in ins[0].dims)
        self.writer.call(fn, (sums,), ins, "reduction", (self.writer.elements(ins[0]),))
        self.writer.move(replace(sums, dims=natural), self.roles.statistics, "moved")
        self.end_site()
        return sums

    # --- products -----------------------------------------------------------------------------------------------

    def multiply(self, at: NodePlace[Linear]) -> Stored:
        """Write a forward product with all communication that it needs; return the buffer of its result.

        If the result is a term of a sum that is reduced over ranks as a whole, it is left as partial sums, in
        `unmoved`, and the buffer that is returned does not hold the result yet.
        """
        self.end_site()
        operand, out = self.edge(at), at.layer.home(at.node.out)
        sides, final = self.sides(at.node.result), self.dims(at, at.node.result)
        if self._is_2d(at):
            result = self.new(out, sides, final)
            self.writer.product_2d(self.roles.product_2d, "os", result, operand, self._weight_as_kept(at))
            self.end_site()
            return result
        weight = self.weight(at)
        operand = self.moved_once(
            operand, self.roles.operand(at.node.reads_residual), "all", f"{at.operand} gathered"
        )
        natural = product(operand.dims, weight.dims, (_contracted(at.node.reads_residual),))
        landed, result = self.result_buffers(out, sides, natural, final)
        self.writer.matmul(landed, operand, weight)
        if at.node.out in at.layer.graph.jointly_reduced and not self.writer.is_by_sites:
            self.unmoved[at.out] = landed
            return result
        self.writer.move(landed, final, "moved", into=result)
        self.end_site()
        return result

    def moved_once(self, src: Stored, dims: AxisDims, suffix: str, key: str) -> Stored:
        """Return the buffer of `src` moved to the layout `dims`; the move is written once per `key`.

        A later call with the same `key` returns the buffer of the first call, whatever its other arguments.
        `suffix` ends the names of new buffers.
        """
        if key not in self.stored:
            self.stored[key] = self.writer.move(src, dims, suffix)
        return self.stored[key]

    def multiply_back(self, at: NodePlace[Linear]) -> None:
        """Write the product for the gradient of a linear node's operand, with its communication and additions.

        The product for the weight's gradient is passed to `write_beside`. An operand's gradient that is added to
        others before a common reduction over ranks is left as partial sums, in `unmoved`.
        """
        self.end_site()
        node, edge, arriving = at.node, at.node.ins[0], self.arriving(at)
        first, weight_name = self.edge(at), at.own(at.node.weight)
        if self._is_2d(at):
            out = self.contribution(at, edge)
            self.writer.product_2d(self.roles.product_2d, "ls", out, arriving, self._weight_as_kept(at))
            self.sum_contributions(at, edge)
            arrived = arriving
            self.write_beside(lambda: self._weight_gradient_2d(weight_name, first, arrived))
            self.end_site()
            return
        dims = gradient_dims(self.roles.product(node.reads_residual))
        arriving = self.moved_once(arriving, dims, "all", f"{at.arriving} gathered {dims}")
        if self.roles.keeps_gathered:
            operand = self.stored[f"{at.operand} gathered"]
        else:
            operand = self.moved_once(
                first, self.roles.operand(node.reads_residual), "again", f"{at.operand} again"
            )
        weight = self.weight(at)
        natural = product(arriving.dims, weight.dims, (_contracted(not node.reads_residual),))
        out = self.contribution(at, edge)
        landed, out = self.result_buffers(out.tensor, first.sides, natural, first.dims)
        self.writer.matmul(landed, arriving, weight, transpose_b=True)
        if self._waits(at, edge):
            self.unmoved[at.contribution_name(edge)] = landed
        else:
            for name in at.layer.contributions(edge)[:-1] if at.is_first_reader(edge) else ():
                if name in self.unmoved:
                    self.writer.add(landed, self.unmoved[name])
            self.writer.move(landed, first.dims, "moved", into=out)
            self.sum_contributions(at, edge)
        self.write_beside(lambda: self._weight_gradient(weight_name, operand, arriving))
        self.end_site()

    def _waits(self, at: NodePlace[Linear], edge: str) -> bool:
        """Return whether terms of a contribution wait for those of the first reader, another product."""
        first = at.layer.graph.readers(edge)[0]
        is_joined = not self.roles.is_flat and not self.writer.is_by_sites
        return is_joined and first is not at.node and first.is_product

    def _weight_as_kept(self, at: NodePlace[Linear]) -> Stored:
        return self.stored[at.own(at.node.weight)]

    def _is_2d(self, at: NodePlace[Linear]) -> bool:
        """Return whether a product is included as one of a 2D algorithm, whose parts are those of `Shard`."""
        if not self.roles.is_flat:
            return False
        operand, weight = self.edge(at), self._weight_as_kept(at)
        mesh, result = self.writer.mesh, at.node.result
        for matrix_sides, dims in (
            (self.sides(result), self.dims(at, result)),
            (operand.sides, operand.dims),
            (weight.sides, weight.dims),
        ):
            tiles = [isinstance(p, Tile) for p in layout_of(mesh, matrix_sides, dims).placements]
            is_uneven = any(within(side, mesh, dims, 2) is None for side in matrix_sides)
            if any(tiles) or is_uneven or not set(dims[:-2]) <= {"", *TOKENS}:
                return False
        return True

    # --- gradients of parameters --------------------------------------------------------------------------------

    def write_beside(self, write: Callable[[], None]) -> None:
        """Call `write`, which writes ops that no later node waits for, now or later.

        While a loop over chunks is open, the call is delayed: to the next call of `write_beside` after a
        communication, beside which the ops may run, or to the end of the group of nodes.
        """
        self._later.append(write)
        if self.writer.is_between_loops:
            self._write_later()

    def postpone(self, write: Callable[[], None]) -> None:
        """Keep `write`, which writes small ops that no later node waits for, until `write_postponed` is called."""
        self._small.append(write)

    def write_postponed(self) -> None:
        """Pass what `postpone` has kept to `write_beside`; to be called after the products of a group of nodes."""
        small, self._small = self._small, []
        for write in small:
            self.write_beside(write)

    def _write_later(self) -> None:
        later, self._later = self._later, []
        for write in later:
            self.writer.cut()
            write()
        self.writer.cut()

    def _weight_gradient(self, weight: str, rows: Stored, columns: Stored) -> None:
        """Write the product for the gradient of a weight, summed over chunks, and its reduction over ranks."""
        out = self.stored[f"D{weight}"]
        natural = product(rows.dims, columns.dims, TOKENS)
        landed, _ = self.result_buffers(out.tensor, out.sides, natural, out.dims)
        self.writer.matmul(landed, rows, columns, transpose_a=True, sums_chunks=True)
        self.reduce(landed, out)

    def _weight_gradient_2d(self, weight: str, rows: Stored, columns: Stored) -> None:
        """Write the same as a 2D product on the last two mesh axes, and its reduction over others."""
        out = self.stored[f"D{weight}"]
        natural = (*product(rows.dims[:-2], columns.dims[:-2], TOKENS), *out.dims[-2:])
        landed, _ = self.result_buffers(out.tensor, out.sides, natural, out.dims)
        self.writer.product_2d(self.roles.product_2d, "rs", landed, rows, columns)
        self.reduce(landed, out)

    def sum_tokens(
        self,
        parameter: str,
        arriving: Stored,
        fn: str,
        ins: tuple[Stored, ...],
        work: str,
        shape: tuple[Index, ...],
    ) -> None:
        """Write a call that sums the gradient of a parameter over tokens, and its reduction over ranks.

        The gradient starts from 0 and grows chunk by chunk.

        Args:
            parameter: name of the parameter's tensor.
            arriving: gradient of the node's output; ranks along axes that shard its tokens get partial sums.
            fn: name of the function that is called with `ins`, and then with the sum so far.
            work, shape: how the call is priced: a key of `CALL_DIMS`, and the sizes that it names.
        """
        out = self.stored[f"D{parameter}"]
        self.writer.zero(out)
        self.writer.call(fn, (out,), (*ins, out), work, shape, "weight_grad" if work == "norm" else "")
        own = ("", *(side.dim for side in out.sides))
        natural: AxisDims = tuple(dim if dim in own else "partial" for dim in arriving.dims)
        self.reduce(replace(out, dims=natural), out)

    def leave_partial_sums(self, landed: Stored, out: Stored) -> None:
        """Do nothing; a subclass may record that `landed` has partial sums of a weight's gradient `out`."""

    def reduce(self, landed: Stored, out: Stored) -> None:
        """Write the reduction of a weight's gradient over ranks, from the partial sums `landed` into `out`.

        If the strategy reduces after the whole backward part (`Roles.reduces_last`), it is written there instead.
        """
        self.writer.cut()
        if self.roles.reduces_last:
            self._reductions.append((landed, out))
        else:
            self.writer.move_once(landed, out.dims, GRADIENTS, out)


def _contracted(enters: bool) -> Dim:
    """Return the dim over which a product sums: of one that enters the inner features, those of the residual."""
    return "hidden" if enters else "inner"
