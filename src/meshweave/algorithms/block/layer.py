"""Writes the layers of a block for the roles of a strategy: one half after another, forward and then backward.

What is not on the way to the next half, the gradients of weights, is put after the next communication that is: the
products of weight gradients then run beside the reduction of the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from meshweave.algorithms.block.halves import Half, halves_of
from meshweave.algorithms.block.problem import BlockConfig, BlockProblem
from meshweave.algorithms.block.program_writer import ProgramWriter
from meshweave.algorithms.block.roles import TOKENS, Dims, Roles, Side, Sides, dual, product
from meshweave.algorithms.block.skeleton_writer import SkeletonWriter
from meshweave.algorithms.block.writer import BlockWriter, Stored
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import On, Program, Tensor
from meshweave.ir.program.expressions import Index
from meshweave.ir.skeleton import Skeleton

GRADIENTS = "gradients"
WEIGHTS = "weights"


def write_program(problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh, name: str) -> Program:
    """Return the program of a block on a mesh whose axes have these roles."""
    writer = ProgramWriter(problem, config, mesh, _batch_dims(roles))
    LayerWriter(problem, roles, writer).write()
    halves = _halves(problem)
    meanings = [meaning for half in halves for meaning in half.meanings(roles.two_step_norms)]
    if problem.is_training:
        for half in reversed(halves):
            meanings += half.gradient_meanings(roles.two_step_norms)
    needed = {meaning.out for meaning in meanings}
    needed |= {buffer.tensor for buffer in writer.buffers.values() if buffer.tensor is not None}
    return Program(
        name,
        (mesh,),
        tuple(tensor for tensor in _tensors(problem) if tensor.name in needed),
        tuple(writer.buffers.values()),
        writer.lanes,
        (On(mesh.name, tuple(writer.statements)),),
        tuple(meanings),
    )


def write_skeleton(problem: BlockProblem, config: BlockConfig, roles: Roles, mesh: Mesh) -> Skeleton:
    """Return the tasks of rank 0 of that program."""
    writer = SkeletonWriter(problem, config, mesh, _batch_dims(roles))
    LayerWriter(problem, roles, writer).write()
    return writer.skeleton()


def _batch_dims(roles: Roles) -> Dims:
    return tuple("batch" if dim == "batch" else "" for dim in roles.residual)


def _halves(problem: BlockProblem) -> list[Half]:
    return [half for layer in range(problem.layers) for half in halves_of(problem, layer)]


def _tensors(problem: BlockProblem) -> Iterator[Tensor]:
    residual = (problem.batch, problem.sequence, problem.hidden)
    yield Tensor("X", residual, problem.dtype)
    for half in _halves(problem):
        yield from half.tensors()
    if problem.is_training:
        yield Tensor("DZ", residual, problem.dtype)
        for half in reversed(_halves(problem)):
            yield from half.gradient_tensors()


@dataclass
class LayerWriter:
    """Writes all layers of a problem with the ops of a writer.

    Attributes:
        stored: where each tensor lies, by name; what is gathered for a product has the name of its use as well.
    """

    problem: BlockProblem
    roles: Roles
    writer: BlockWriter
    stored: dict[str, Stored] = field(default_factory=dict)
    _later: list[Callable[[], None]] = field(default_factory=list)
    _reductions: list[tuple[Stored, Stored]] = field(default_factory=list)

    def write(self) -> None:
        """Write the forward part, and for training the backward part."""
        halves = _halves(self.problem)
        self._declare(halves)
        for half in halves:
            self._forward(half)
        if self.problem.is_training:
            for half in reversed(halves):
                self._backward(half)
        self.writer.cut()
        for landed, out in self._reductions:
            self.writer.move_once(landed, out.dims, GRADIENTS, out)

    # --- sides --------------------------------------------------------------------------------------------------

    @property
    def _token_sides(self) -> Sides:
        return Side("batch", self.problem.batch), Side("sequence", self.problem.sequence)

    def _residual_sides(self) -> Sides:
        return *self._token_sides, Side("hidden", self.problem.hidden)

    def _inner_sides(self, half: Half, unit: int) -> Sides:
        return *self._token_sides, Side("inner", half.units, unit)

    def _row_sides(self) -> Sides:
        return *self._token_sides, Side("", self.problem.norm_rows)

    # --- operands and results -----------------------------------------------------------------------------------

    def _declare(self, halves: list[Half]) -> None:
        """Declare inputs and outputs, in the order of their use."""
        problem, roles, writer = self.problem, self.roles, self.writer
        residual, dtype = self._residual_sides(), problem.dtype
        hidden = Side("hidden", problem.hidden)
        self.stored["X"] = writer.new("x", "X", residual, roles.residual, dtype, "input")
        weights: list[tuple[str, Sides, Dims]] = []
        for half in halves:
            weights += [
                (half.gain, (Side("", problem.norm_rows), hidden), roles.gain),
                (half.w_in, (hidden, Side("inner", half.units, half.in_unit)), roles.w_in),
                (half.w_out, (Side("inner", half.units, half.out_unit), hidden), roles.w_out),
            ]
        for name, sides, used in weights:
            dims = used if sides[0].dim == "" else roles.stored(used, sides)
            self.stored[name] = writer.new(name.lower(), name, sides, dims, dtype, "input")
        if problem.is_training:
            self.stored["DZ"] = writer.new("dz", "DZ", residual, roles.residual, dtype, "input")
        self.stored["Z"] = writer.new("z", "Z", residual, roles.residual, dtype, "output")
        if problem.is_training:
            self.stored["DX"] = writer.new("dx", "DX", residual, roles.residual, dtype, "output")
            for name, sides, used in weights:
                dims = used if sides[0].dim == "" else roles.gradient(used, sides)
                self.stored[f"D{name}"] = writer.new(
                    f"d{name.lower()}", f"D{name}", sides, dims, dtype, "output"
                )

    def _new(self, tensor: str, sides: Sides, dims: Dims, dtype: str = "") -> Stored:
        """Return the buffer of a tensor: that which is declared for it, or a new one."""
        if tensor not in self.stored:
            self.stored[tensor] = self.writer.new(
                tensor.lower(), tensor, sides, dims, dtype or self.problem.dtype
            )
        return self.stored[tensor]

    def _weight(self, name: str, layer: int, used: Dims) -> Stored:
        """Return a weight where it is multiplied: gathered, if it is kept in parts."""
        kept = self.stored[name]
        if kept.dims == used:
            return kept
        if self.roles.keeps_weights:
            if f"{name}_whole" not in self.stored:
                self.stored[f"{name}_whole"] = self.writer.gather_once(kept, None, used, WEIGHTS)
            return self.stored[f"{name}_whole"]
        site = name.removesuffix(str(layer)).rstrip("_").lower()
        out = self.writer.two_slots(f"{site}_whole", kept, used, layer % 2)
        return self.writer.gather_once(kept, out, used, WEIGHTS)

    def _landing(self, tensor: str, sides: Sides, natural: Dims, final: Dims) -> tuple[Stored, Stored]:
        """Return the buffer that a product writes, and that in which its result is to lie.

        They are one where sums are made in place.
        """
        out = self._new(tensor, sides, final)
        if all(
            before == after or (before == "partial" and not after)
            for before, after in zip(natural, final, strict=True)
        ):
            return replace(out, dims=natural), out
        return self.writer.part_of(out, natural), out

    def _product(
        self, tensor: str, sides: Sides, a: Stored, b: Stored, *, k: str, final: Dims, **how: bool
    ) -> Stored:
        """Write a product along `k` and move its result to where it is to lie."""
        natural = product(a.dims, b.dims, (k,))  # type: ignore[arg-type]
        landed, out = self._landing(tensor, sides, natural, final)
        self.writer.matmul(landed, a, b, **how)
        self.writer.move(landed, final, "moved", into=out)
        return out

    # --- forward ------------------------------------------------------------------------------------------------

    def _forward(self, half: Half) -> None:
        roles, writer, stream = self.roles, self.writer, self.stored[half.stream]
        normal = self._norm(half, stream)
        core_dims = roles.core(half.is_attention)
        w_in = self._weight(half.w_in, half.layer, roles.w_in)
        entry = self.stored[f"{half.normal}_entry"] = writer.move(normal, roles.entry, "all")
        inner = self._product(
            half.inner, self._inner_sides(half, half.in_unit), entry, w_in, k="hidden", final=core_dims
        )
        core = self._core(half, inner)
        w_out = self._weight(half.w_out, half.layer, roles.w_out)
        operand = self.stored[f"{half.core}_exit"] = writer.move(core, roles.exit, "all")
        result = self._product(
            half.result, self._residual_sides(), operand, w_out, k="inner", final=roles.residual
        )
        writer.add(result, stream)

    def _norm(self, half: Half, stream: Stored) -> Stored:
        roles, writer, gain = self.roles, self.writer, self.stored[half.gain]
        normal = self._new(half.normal, self._residual_sides(), roles.residual)
        shape = self._rows_and_features(stream)
        if not roles.two_step_norms:
            writer.call("norm", (normal,), (stream, gain), "norm", shape)
            return normal
        sums = self._row_sums(half.statistics, "statistics", (stream,))
        writer.call("normalize", (normal,), (stream, sums, gain), "norm", shape)
        return normal

    def _row_sums(self, tensor: str, fn: str, ins: tuple[Stored, ...]) -> Stored:
        """Write a call that makes sums over the features of each row, and their sum over ranks."""
        sums = self._new(tensor, self._row_sides(), self.roles.statistics, self.problem.statistics_dtype)
        natural: Dims = tuple("partial" if dim == "hidden" else dim for dim in ins[0].dims)
        self.writer.call(fn, (sums,), ins, "reduction", (self.writer.elements(ins[0]),))
        self.writer.move(replace(sums, dims=natural), self.roles.statistics, "moved")
        return sums

    def _rows_and_features(self, stored: Stored) -> tuple[Index, Index]:
        batch, sequence, features = (self.writer.extent(side, stored.dims) for side in stored.sides)
        return batch * sequence, features

    def _core(self, half: Half, inner: Stored) -> Stored:
        problem = self.problem
        core = self._new(half.core, self._inner_sides(half, half.out_unit), inner.dims)
        if not half.is_attention:
            shape: tuple[Index, ...] = (self.writer.elements(core),)
            self.writer.call("activation", (core,), (inner,), "elementwise", shape)
            return core
        rows = self._inner_sides(half, problem.queries_per_group)
        log_sums = self._new(half.log_sums, rows, inner.dims, problem.statistics_dtype)
        self.writer.call(
            "attention", (core, log_sums), (inner,), "attention", self._attention_shape(log_sums)
        )
        return core

    def _attention_shape(self, log_sums: Stored) -> tuple[Index, ...]:
        batch, sequence, heads = (self.writer.extent(side, log_sums.dims) for side in log_sums.sides)
        return batch, heads, sequence, sequence, self.problem.head_dim

    # --- backward -----------------------------------------------------------------------------------------------

    def _backward(self, half: Half) -> None:
        roles, writer, stored = self.roles, self.writer, self.stored
        core_dims = roles.core(half.is_attention)
        w_out = self._weight(half.w_out, half.layer, roles.w_out)
        arriving = writer.move(stored[f"D{half.result}"], dual(roles.product_out), "all")
        operand = self._operand_again(half.core, "exit", roles.exit)
        of_core = self._product(
            f"D{half.core}",
            stored[half.core].sides,
            arriving,
            w_out,
            k="hidden",
            final=core_dims,
            transpose_b=True,
        )
        self._then(lambda: self._weight_gradient(half.w_out, operand, arriving))
        entry = self._operand_again(half.normal, "entry", roles.entry)
        w_in = self._weight(half.w_in, half.layer, roles.w_in)
        of_inner = writer.move(self._core_gradient(half, of_core), dual(roles.product_in), "all")
        of_normal = self._product(
            f"D{half.normal}", self._residual_sides(), of_inner, w_in, k="inner", final=roles.residual,
            transpose_b=True,
        )  # fmt: skip
        self._then(lambda: self._weight_gradient(half.w_in, entry, of_inner))
        self._norm_gradient(half, of_normal)
        self._write_later()

    def _operand_again(self, tensor: str, use: str, dims: Dims) -> Stored:
        """Return the operand of a forward product for the gradient of its weight: kept, or gathered again."""
        if self.roles.keeps_gathered:
            return self.stored[f"{tensor}_{use}"]
        return self.writer.move(self.stored[tensor], dims, "again")

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
        if half.is_attention:
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
            ins = (of_normal, stream, *statistics, gain)
            sums = self._row_sums(half.norm_gradient_sums, "norm_grad_sums", ins)
            self._then(lambda: self._gain_gradient(half, of_normal, statistics))
            fn, ins = "normalize_grad", (of_normal, stream, *statistics, sums, gain)
        else:
            fn, ins = "norm_grad", (of_normal, stream, gain)
        writer.call(fn, (out,), ins, "norm", shape, "input_grad")
        writer.add(out, stored[f"D{half.result}"])
        if not roles.two_step_norms:
            self._then(lambda: self._gain_gradient(half, of_normal, statistics))

    def _gain_gradient(self, half: Half, of_normal: Stored, statistics: tuple[Stored, ...]) -> None:
        out, stream = self.stored[f"D{half.gain}"], self.stored[half.stream]
        fn = "normalize_weight_grad" if statistics else "norm_weight_grad"
        self.writer.zero(out)
        ins = (of_normal, stream, *statistics, out)
        self.writer.call(fn, (out,), ins, "norm", self._rows_and_features(stream), "weight_grad")
        natural: Dims = tuple("partial" if dim in TOKENS else dim for dim in of_normal.dims)
        self._reduce(replace(out, dims=natural), out)
