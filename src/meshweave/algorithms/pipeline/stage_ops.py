"""The ops of one stage: its buffers, the calls of its parts, and what happens to its parameters and
gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshweave.algorithms.pipeline.actions import ActionKind
from meshweave.algorithms.pipeline.boundary import Boundary
from meshweave.algorithms.pipeline.problem import PartCost, PipelineProblem
from meshweave.algorithms.pipeline.tensors import BATCH_DTYPE, tensors
from meshweave.describe.layout import Layout
from meshweave.describe.layout.mesh import Mesh
from meshweave.ir.program import Buffer, Tensor
from meshweave.ir.program.call_dims import CallPart
from meshweave.ir.program.expressions import Index
from meshweave.ir.program.ops import AllGather, AllReduce, Call, Op, ReduceScatter, Zero
from meshweave.ir.program.views import FULL, Range, View

MARKER = "marker"
"""The function of calls that compute nothing: they mark where parameters are freed, or nothing is to be
done."""


class StageOps:
    """Writes the ops of one stage.

    Args:
        problem: the pipeline.
        number: the stage's number, from 0.
        mesh: its ranks, under the mesh's name in the program.
        boundaries: those of its edges, by (source, target, "h" for activations or "g" for gradients).
        is_joint: whether both gradients are one call, so that the input gradient is sent when both are done.
        has_signals: whether activations and gradients of them are one byte.
        lane: the lane of its parts.
        parameter_lane: the lane of gathers of parameters and reductions of gradients.
    """

    def __init__(
        self,
        problem: PipelineProblem,
        number: int,
        mesh: Mesh,
        boundaries: Mapping[tuple[int, int, str], Boundary],
        lane: str,
        parameter_lane: str,
        *,
        is_joint: bool,
        has_signals: bool,
    ) -> None:
        self.problem, self.number, self.mesh, self.lane = problem, number, mesh, lane
        self.parameter_lane = parameter_lane
        self.stage = problem.stages[number]
        self.into = [(edge.source, edge.target) for edge in problem.edges_into(number)]
        self.out_of = [(edge.source, edge.target) for edge in problem.edges_out_of(number)]
        self.boundaries = boundaries
        self.rows = problem.rows // self.stage.data_parallelism
        self.is_sharded, self.is_joint = self.stage.is_sharded, is_joint
        self.has_sum = self.is_sharded or (has_signals and bool(self.stage.data_axes))

    # --- buffers ----------------------------------------------------------------------------------------

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Return (): the stage needs no mesh besides its own."""
        return ()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the global tensors of the stage's inputs and outputs: W, DW, X, T and Y, as far as it has them."""
        suffix = str(self.number)
        names = {f"{prefix}{suffix}" for prefix in ("W", "DW", "X", "T", "Y")}
        yield from (tensor for tensor in tensors(self.problem) if tensor.name in names)

    def buffers(self, layouts: Mapping[str, Layout]) -> Iterator[Buffer]:
        """Yield the inputs and outputs of the stage, and scratch for gathered parameters and their gradients.

        `layouts` are those of `tensor_layouts`, by tensor name such as "W0".
        """
        kinds = {"W": "input", "X": "input", "T": "input", "DW": "output", "Y": "output"}
        dtypes = {"W": self.stage.parameter_dtype, "DW": self.stage.own_gradient_dtype}
        for prefix, kind in kinds.items():
            tensor = f"{prefix}{self.number}"
            if tensor in layouts:
                layout = Layout(self.mesh, layouts[tensor].placements)
                dtype = dtypes.get(prefix, BATCH_DTYPE)
                yield Buffer(tensor.lower(), kind, self.mesh.name, dtype, tensor, layout)  # type: ignore[arg-type]
        scratch = {f"w{self.number}_whole": dtypes["W"]} if self.is_sharded else {}
        if self.has_sum:
            scratch[f"dw{self.number}_sum"] = dtypes["DW"]
        for name, dtype in scratch.items():
            yield Buffer(name, "scratch", self.mesh.name, dtype, shape=(self.stage.parameters,))

    def _vector(self, name: str) -> View:
        return View(name, (FULL,), 0)

    @property
    def _parameters(self) -> View:
        """Return the parameters that the parts read."""
        return self._vector(f"w{self.number}_whole" if self.is_sharded else f"w{self.number}")

    @property
    def _total(self) -> View:
        """Return the sum of the gradients of this rank's rows."""
        return self._vector(f"dw{self.number}_sum" if self.has_sum else f"dw{self.number}")

    def _batch(self, name: str, shape: tuple[int, ...], micro_batch: Index) -> View:
        start = micro_batch * self.rows
        rows = Range(start, start + self.rows)
        return View(f"{name}{self.number}", (rows, *(FULL,) * len(shape)), 0)

    # --- the actions ------------------------------------------------------------------------------------

    def begin(self, *, gathers: bool) -> Iterator[Op]:
        """Yield the ops before the first action: gradients are zeroed.

        With `gathers` parameters that lie in shards are gathered, too.
        """
        yield Zero(out=self._total, lane=self.lane, name=f"zero gradients of stage {self.number}")
        if gathers and self.is_sharded:
            yield self._gather(f"gather parameters of stage {self.number}")

    def end(self, *, reduces: bool) -> Iterator[Op]:
        """Yield the ops after the last action: with `reduces`, gradients are summed over the data axes."""
        if reduces and self.stage.data_axes:
            yield from self._reduce(f"reduce gradients of stage {self.number}")

    def action(self, kind: ActionKind, micro_batch: Index, label: str) -> Iterator[Op]:
        """Yield the ops of an action that is no transfer, each with name `label`.

        `micro_batch` is the micro-batch's number, or an expression for it. An action that has nothing to do here,
        such as a gather of parameters that are whole, is one call without work.
        """
        if kind is ActionKind.FORWARD:
            yield self._forward(micro_batch, label)
        elif kind in (ActionKind.INPUT_GRAD, ActionKind.BACKWARD):
            if self.stage.recompute is not None:
                yield self._recompute(micro_batch, label)
            is_whole = kind is ActionKind.BACKWARD
            yield self._input_grad(micro_batch, label, with_weights=is_whole and self.is_joint)
            if is_whole and not self.is_joint:
                yield self._weight_grad(micro_batch, label)
        elif kind is ActionKind.WEIGHT_GRAD:
            yield self._weight_grad(micro_batch, label)
        elif kind is ActionKind.UNSHARD and self.is_sharded:
            yield self._gather(label)
        elif kind is ActionKind.RESHARD and self.is_sharded:
            yield Call(fn=MARKER, outs=(), ins=(self._parameters,), part="free", lane=self.lane, name=label)
        elif kind is ActionKind.REDUCE_GRAD and self.stage.data_axes:
            yield from self._reduce(label)
        else:
            yield Call(fn=MARKER, outs=(), ins=(self._total,), lane=self.lane, name=label)

    def _call(
        self,
        part: CallPart,
        cost: PartCost,
        views: tuple[tuple[View, ...], tuple[View, ...]],
        micro_batch: Index,
        label: str,
        stash_bytes: int = 0,
        freed_bytes: int = 0,
        fn: str = "",
    ) -> Call:
        suffix = "" if part == "forward" else f"_{fn or part}"
        return Call(
            fn=f"stage{self.number}{suffix}",
            outs=views[0],
            ins=views[1],
            flops=cost.flops,
            bytes=cost.bytes,
            stash_bytes=stash_bytes,
            freed_bytes=freed_bytes,
            stash=f"stage{self.number}",
            part=part,
            args=(micro_batch,),
            dtype=self.stage.dtype,
            lane=self.lane,
            name=label,
        )

    def _forward(self, micro_batch: Index, label: str) -> Call:
        ins = tuple(self.boundaries[*ends, "h"].in_view(micro_batch) for ends in self.into)
        outs = tuple(self.boundaries[*ends, "h"].out_view(micro_batch) for ends in self.out_of)
        ins = ins or (self._batch("x", self.problem.input_shape, micro_batch),)
        outs = outs or (self._batch("y", self.problem.output_shape, micro_batch),)
        again = self.stage.recompute
        kept = self.stage.stash.from_forward if again is None else again.kept
        return self._call(
            "forward", self.stage.forward, (outs, (*ins, self._parameters)), micro_batch, label, kept
        )

    def _recompute(self, micro_batch: Index, label: str) -> Call:
        again = self.stage.recompute
        assert again is not None
        made = self.stage.stash.from_forward - again.kept
        return self._call("recompute", again.cost, ((), (self._parameters,)), micro_batch, label, made)

    def _input_grad(self, micro_batch: Index, label: str, *, with_weights: bool) -> Call:
        ins = tuple(self.boundaries[*ends, "g"].in_view(micro_batch) for ends in self.out_of)
        outs = tuple(self.boundaries[*ends, "g"].out_view(micro_batch) for ends in self.into)
        ins = ins or (self._batch("t", self.problem.output_shape, micro_batch),)
        if with_weights:
            views = (*outs, self._total), (*ins, self._parameters, self._total)
            costs = self.stage.input_grad, self.stage.weight_grad
            cost = PartCost(sum(one.flops for one in costs), sum(one.bytes for one in costs))
            return self._call("weight_grad", cost, views, micro_batch, label, fn="backward")
        stash = self.stage.stash
        return self._call(
            "input_grad", self.stage.input_grad, (outs, (*ins, self._parameters)), micro_batch, label,
            stash.from_input_grad, stash.until_input_grad,
        )  # fmt: skip

    def _weight_grad(self, micro_batch: Index, label: str) -> Call:
        views = (self._total,), (self._total,)
        return self._call("weight_grad", self.stage.weight_grad, views, micro_batch, label)

    # --- parameters -------------------------------------------------------------------------------------

    def _over(self, axis: str) -> str:
        return f"{self.mesh.name}.{axis}"

    def _gather(self, label: str) -> Op:
        return AllGather(
            out=self._parameters,
            src=self._vector(f"w{self.number}"),
            over=self._over(self.stage.data_axes[0]),
            dim=0,
            lane=self.parameter_lane,
            name=label,
        )

    def _reduce(self, label: str) -> Iterator[Op]:
        """Yield the reduction of gradients over the data axes, into shards where the parameters are sharded."""
        axes, result = self.stage.data_axes, self._vector(f"dw{self.number}")
        if self.is_sharded:
            yield ReduceScatter(
                out=result,
                src=self._total,
                over=self._over(axes[0]),
                dim=0,
                lane=self.parameter_lane,
                name=label,
            )
            axes = axes[1:]
        for number, axis in enumerate(axes):
            src = self._total if number == 0 and not self.is_sharded else result
            yield AllReduce(out=result, src=src, over=self._over(axis), lane=self.parameter_lane, name=label)
