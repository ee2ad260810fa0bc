"""Writes the layers of a block for the roles of a strategy: one half after another, forward and then backward.

The next half does not wait for gradients of weights. They are put after the next communication that it waits for:
the products of weight gradients then run beside the reduction of the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshweave.algorithms.block.halves import Half, Site
from meshweave.algorithms.block.ring_core import RingCore
from meshweave.algorithms.block.ring_equations import POSITIONS
from meshweave.algorithms.block.roles import TOKENS, AxisDims, Sides, gradient_dims, product
from meshweave.algorithms.block.sides import layout_of, within
from meshweave.algorithms.block.tensors import BlockTensors
from meshweave.algorithms.block.writer import Stored
from meshweave.describe.layout import Tile
from meshweave.ir.program.expressions import Index

GRADIENTS = "gradients"
"""What the lanes of reductions of gradients are called, after their mesh axis."""


@dataclass
class LayerWriter(BlockTensors):
    """Writes all layers of a problem with the ops of a writer."""

    _later: list[Callable[[], None]] = field(default_factory=list)
    _reductions: list[tuple[Stored, Stored]] = field(default_factory=list)
    _rings: dict[int, RingCore] = field(default_factory=dict)

    def write(self) -> None:
        """Write the forward part, and for training the backward part."""
        self._declare()
        self.write_forward()
        if self.problem.training:
            self.write_backward()
        self.writer.cut()
        for landed, out in self._reductions:
            self.writer.move_once(landed, out.dims, GRADIENTS, out)

    def write_forward(self) -> None:
        """Write the forward part, once everything is declared."""
        self._before()
        self._end_site()
        for half in self._halves:
            self._forward(half)
        self._after()
        self._end_site()

    def write_backward(self) -> None:
        """Write the backward part after the forward one."""
        self._before_backward()
        self._end_site()
        for half in reversed(self._halves):
            self._backward(half)
        self._after_backward()
        self._end_site()

    def _end_site(self) -> None:
        """Let nothing that follows run beside what is written, where sites run one by one."""
        if self.writer.is_by_sites:
            self._write_later()
            self.writer.end_site()

    def _before(self) -> None:
        """Write what is before the first layer."""

    def _after(self) -> None:
        """Write what is after the last layer."""

    def _before_backward(self) -> None:
        """Write what is before the backward part of the last layer."""

    def _after_backward(self) -> None:
        """Write what is after the backward part of the first layer."""

    # --- products -----------------------------------------------------------------------------------------------

    def _multiply(self, site: Site) -> Stored:
        """Write a product of the forward part: operand and weight are moved to it, and its result from it."""
        self._end_site()
        operand = self.stored[site.operand]
        tensor, sides, final = self._result(site)
        if self._is_2d(site):
            out = self._new(tensor, sides, final)
            self.writer.product_2d(self.roles.product_2d, "os", out, operand, self.stored[site.weight])
            self._end_site()
            return out
        weight = self._weight(site)
        operand = self.writer.move(operand, self.roles.operand(site.is_first), "all")
        self.stored[f"{site.operand} gathered"] = operand
        natural = product(operand.dims, weight.dims, (site.k,))
        landed, out = self._landing(tensor, sides, natural, final)
        self.writer.matmul(landed, operand, weight)
        self.writer.move(landed, final, "moved", into=out)
        self._end_site()
        return out

    def _multiply_back(self, site: Site, arriving: Stored) -> Stored:
        """Write the products for the gradients of an operand, which is returned, and later of a weight."""
        self._end_site()
        first = self.stored[site.operand]
        tensor, final = f"D{site.operand}", first.dims
        if self._is_2d(site):
            out = self._new(tensor, first.sides, final)
            self.writer.product_2d(self.roles.product_2d, "ls", out, arriving, self.stored[site.weight])
            self._then(lambda: self._weight_gradient_2d(site.weight, first, arriving))
            self._end_site()
            return out
        arriving = self.writer.move(arriving, gradient_dims(self.roles.product(site.is_first)), "all")
        if self.roles.keeps_gathered:
            operand = self.stored[f"{site.operand} gathered"]
        else:
            operand = self.writer.move(first, self.roles.operand(site.is_first), "again")
        weight = self._weight(site)
        natural = product(arriving.dims, weight.dims, (site.other_k,))
        landed, out = self._landing(tensor, first.sides, natural, final)
        self.writer.matmul(landed, arriving, weight, transpose_b=True)
        self.writer.move(landed, final, "moved", into=out)
        self._then(lambda: self._weight_gradient(site.weight, operand, arriving))
        self._end_site()
        return out

    def _result(self, site: Site) -> tuple[str, Sides, AxisDims]:
        """Return what a product of the forward part makes: the tensor, its sides, and how it is to lie."""
        half = site.half
        if site.is_first:
            dims = self.roles.core(half.is_attention)
            return half.inner, self._inner_sides(half, half.in_unit), dims
        return half.result, self._residual_sides(), self.roles.residual

    def _is_2d(self, site: Site) -> bool:
        """Return whether a product is included as one of a 2D algorithm, whose parts are those of `Shard`."""
        if not self.roles.is_flat:
            return False
        _, sides, final = self._result(site)
        operand, weight = self.stored[site.operand], self.stored[site.weight]
        mesh = self.writer.mesh
        for matrix_sides, dims in (
            (sides, final),
            (operand.sides, operand.dims),
            (weight.sides, weight.dims),
        ):
            tiles = [isinstance(p, Tile) for p in layout_of(mesh, matrix_sides, dims).placements]
            is_uneven = any(within(side, mesh, dims, 2) is None for side in matrix_sides)
            if any(tiles) or is_uneven or not set(dims[:-2]) <= {"", *TOKENS}:
                return False
        return True

    # --- forward ------------------------------------------------------------------------------------------------

    def _forward(self, half: Half) -> None:
        stream = self.stored[half.stream]
        self._norm(half, stream)
        self._core(half, self._multiply_and_bias(Site(half, True)))
        self.writer.add(self._multiply_and_bias(Site(half, False)), stream)

    def _multiply_and_bias(self, site: Site) -> Stored:
        """Write a product of the forward part, and the bias on what it gives, once its terms are summed."""
        out = self._multiply(site)
        if self.problem.biases:
            ins = (out, self.stored[site.bias])
            self.writer.call("add_bias", (out,), ins, "elementwise", (self.writer.elements(out),))
        return out

    def _norm(self, half: Half, stream: Stored) -> None:
        roles, writer, gain = self.roles, self.writer, self.stored[half.gain]
        normal = self._new(half.normal, self._residual_sides(), roles.residual)
        shape = self._rows_and_features(stream)
        if not roles.two_step_norms:
            writer.call("norm", (normal,), (stream, gain), "norm", shape)
            return
        sums = self._row_sums(half.statistics, "statistics", (stream,))
        writer.call("normalize", (normal,), (stream, sums, gain), "norm", shape)

    def _row_sums(self, tensor: str, fn: str, ins: tuple[Stored, ...]) -> Stored:
        """Write a call that makes sums over the features of each row, and their sum over ranks."""
        sums = self._new(tensor, self._row_sides(), self.roles.statistics, self.problem.statistics_dtype)
        natural: AxisDims = tuple("partial" if dim == "hidden" else dim for dim in ins[0].dims)
        self.writer.call(fn, (sums,), ins, "reduction", (self.writer.elements(ins[0]),))
        self.writer.move(replace(sums, dims=natural), self.roles.statistics, "moved")
        self._end_site()
        return sums

    def _rows_and_features(self, stored: Stored) -> tuple[Index, Index]:
        *tokens, features = (self.writer.extent(side, stored.dims) for side in stored.sides)
        return (tokens[0] * tokens[1] if len(tokens) > 1 else tokens[0]), features

    def _core(self, half: Half, inner: Stored) -> None:
        problem = self.problem
        core = self._new(half.core, self._inner_sides(half, half.out_unit), inner.dims)
        if not half.is_attention:
            shape: tuple[Index, ...] = (self.writer.elements(core),)
            self.writer.call("activation", (core,), (inner,), "elementwise", shape)
            return
        rows = self._inner_sides(half, problem.queries_per_group)
        log_sums = self._new(half.log_sums, rows, inner.dims, problem.statistics_dtype)
        if (axis := self.roles.ring_axis) is not None:
            ring = RingCore(self.writer, half, axis, inner, core, log_sums, self.stored[POSITIONS])
            self._rings[half.layer] = ring
            ring.forward()
            self.writer.cut()
            self._end_site()
            return
        self.writer.call(
            "attention", (core, log_sums), (inner,), "attention", self._attention_shape(log_sums)
        )

    def _attention_shape(self, log_sums: Stored) -> tuple[Index, ...]:
        tokens, heads = self._rows_and_features(log_sums)
        sequence = self.problem.sequence
        return tokens // sequence, heads, sequence, self.problem.priced_keys(sequence), self.problem.head_dim

    # --- backward -----------------------------------------------------------------------------------------------

    def _backward(self, half: Half) -> None:
        of_result = self.stored[f"D{half.result}"]
        of_core = self._multiply_back(Site(half, False), of_result)
        of_inner = self._core_gradient(half, of_core)
        of_normal = self._multiply_back(Site(half, True), of_inner)
        if self.problem.biases:
            self._then(lambda: self._bias_gradient(Site(half, False), of_result))
            self._then(lambda: self._bias_gradient(Site(half, True), of_inner))
        self._norm_gradient(half, of_normal)
        self._write_later()

    def _then(self, write: Callable[[], None]) -> None:
        """Write what is not waited for: now, if a communication has just ended the loop, else after the next."""
        self._later.append(write)
        if self.writer.is_between_loops:
            self._write_later()

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
        landed, _ = self._landing(out.tensor, out.sides, natural, out.dims)
        self.writer.matmul(landed, rows, columns, transpose_a=True, sums_chunks=True)
        self._reduce(landed, out)

    def _weight_gradient_2d(self, weight: str, rows: Stored, columns: Stored) -> None:
        """Write the same as a 2D product on the last two mesh axes, and its reduction over others."""
        out = self.stored[f"D{weight}"]
        natural = (*product(rows.dims[:-2], columns.dims[:-2], TOKENS), *out.dims[-2:])
        landed, _ = self._landing(out.tensor, out.sides, natural, out.dims)
        self.writer.product_2d(self.roles.product_2d, "rs", landed, rows, columns)
        self._reduce(landed, out)

    def _reduce(self, landed: Stored, out: Stored) -> None:
        """Write the reduction of a gradient of a weight over ranks, here or at the end of the program."""
        self.writer.cut()
        if self.roles.reduces_last:
            self._reductions.append((landed, out))
        else:
            self.writer.move_once(landed, out.dims, GRADIENTS, out)

    def _core_gradient(self, half: Half, of_core: Stored) -> Stored:
        stored = self.stored
        inner = stored[half.inner]
        out = self._new(f"D{half.inner}", inner.sides, inner.dims)
        if half.is_attention and half.layer in self._rings:
            self._rings[half.layer].backward(of_core, out)
            self.writer.cut()
            self._end_site()
        elif half.is_attention:
            log_sums = stored[half.log_sums]
            ins = (of_core, inner, stored[half.core], log_sums)
            shape = self._attention_shape(log_sums)
            self.writer.call("attention_grad", (out,), ins, "attention", shape, "input_grad")
        else:
            shape = (self.writer.elements(of_core),)
            self.writer.call("activation_grad", (out,), (of_core, inner), "elementwise", shape, "input_grad")
        return out

    def _norm_gradient(self, half: Half, of_normal: Stored) -> None:
        roles, writer, stored = self.roles, self.writer, self.stored
        stream, gain = stored[half.stream], stored[half.gain]
        out = self._new(f"D{half.stream}", self._residual_sides(), roles.residual)
        shape = self._rows_and_features(stream)
        statistics: tuple[Stored, ...] = ()
        if roles.two_step_norms:
            statistics = (stored[half.statistics],)
            ins: tuple[Stored, ...] = (of_normal, stream, *statistics, gain)
            sums = self._row_sums(half.norm_gradient_sums, "norm_grad_sums", ins)
            self._then(lambda: self._gain_gradient(half, of_normal, statistics))
            fn, ins = "normalize_grad", (of_normal, stream, *statistics, sums, gain)
        else:
            fn, ins = "norm_grad", (of_normal, stream, gain)
        writer.call(fn, (out,), ins, "norm", shape, "input_grad")
        if half.result:
            writer.add(out, stored[f"D{half.result}"])
        if not roles.two_step_norms:
            self._then(lambda: self._gain_gradient(half, of_normal, statistics))

    def _gain_gradient(self, half: Half, of_normal: Stored, statistics: tuple[Stored, ...]) -> None:
        out, stream = self.stored[f"D{half.gain}"], self.stored[half.stream]
        fn = "normalize_weight_grad" if statistics else "norm_weight_grad"
        self.writer.zero(out)
        ins = (of_normal, stream, *statistics, out)
        self.writer.call(fn, (out,), ins, "norm", self._rows_and_features(stream), "weight_grad")
        natural: AxisDims = tuple("partial" if dim in TOKENS else dim for dim in of_normal.dims)
        self._reduce(replace(out, dims=natural), out)

    def _bias_gradient(self, site: Site, arriving: Stored) -> None:
        """Write the sum over tokens of the gradient that arrives, and its reduction over ranks."""
        out = self.stored[f"D{site.bias}"]
        self.writer.zero(out)
        elements = (self.writer.elements(arriving),)
        self.writer.call("bias_grad", (out,), (arriving, out), "reduction", elements)
        natural: AxisDims = tuple("partial" if dim in TOKENS else dim for dim in arriving.dims)
        self._reduce(replace(out, dims=natural), out)
