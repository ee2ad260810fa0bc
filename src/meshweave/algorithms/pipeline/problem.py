"""What a pipeline computes: a model cut into stages, each on a mesh of its own, and tensors between them.

A stage is three functions of a micro-batch, which a program calls: the forward, the gradient of its inputs
and the gradient of its parameters. What they compute does not matter to a schedule; what they cost, and what
they keep from one to the next, does.

The first dim of every tensor but parameters is rows, one for each sample. A micro-batch has `rows` of them. With M
micro-batches, for stage i and for an edge from stage s to stage t:

    W{i}, DW{i}            parameters (elements) and their gradients
    H{s}_{t}, G{s}_{t}     activations (M x rows, ...) and their gradients
    X{i}                   what a stage without a predecessor reads (M x rows, ...)
    Y{i}, T{i}             what a stage without a successor makes, and the targets that its gradients start from

Along the `data_axes` of a stage's mesh its ranks share the rows of a micro-batch. Along the other axes they
compute the same function of the same rows, whose cost is given per rank: how they divide that work is up to the
function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from meshweave.base.errors import LayoutError
from meshweave.base.units import DTYPES, dtype_bytes
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.layouts import Placement
from meshweave.describe.layout.mesh import Mesh


@dataclass(frozen=True)
class PartCost:
    """What one part of a stage (forward, a gradient) costs a rank per micro-batch: FLOPs, and bytes moved."""

    flops: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Stash:
    """The bytes that a rank keeps of one micro-batch between the parts of a stage.

    Attributes:
        until_input_grad: what the forward keeps and the input gradient frees.
        until_weight_grad: what the forward keeps and only the weight gradient frees.
        from_input_grad: what the input gradient keeps for the weight gradient.
    """

    until_input_grad: int = 0
    until_weight_grad: int = 0
    from_input_grad: int = 0

    @property
    def from_forward(self) -> int:
        """Return the bytes that the forward keeps of one micro-batch on a rank, without recomputation."""
        return self.until_input_grad + self.until_weight_grad


@dataclass(frozen=True)
class Recompute:
    """A second forward, right before the input gradient, that recomputes what the first one did not keep.

    Attributes:
        cost: the cost of the second forward for one micro-batch and rank.
        kept: the bytes of one micro-batch that the first forward keeps, at most `Stash.from_forward`.
    """

    cost: PartCost
    kept: int = 0


@dataclass(frozen=True)
class Stage:
    """A stage on the ranks of a mesh.

    Attributes:
        mesh: its ranks. Stages of one pipeline rank have one mesh.
        forward, input_grad, weight_grad: costs for one micro-batch and one rank.
        parameters: elements of the parameters of a rank, gathered.
        stash: what is kept between the parts.
        recompute: how the stash is made again; None where the forward keeps all of it.
        data_axes: mesh axes along which ranks share the rows of a micro-batch.
        is_sharded: whether the parameters lie in shards over the first data axis (FSDP).
        dtype: in which it computes, which says at what rate.
        parameter_dtype: of the parameters and, unless `gradient_dtype` says otherwise, of their gradients.
        gradient_dtype: of the gradients of the parameters.
    """

    mesh: Mesh
    forward: PartCost = PartCost()
    input_grad: PartCost = PartCost()
    weight_grad: PartCost = PartCost()
    parameters: int = 1
    stash: Stash = Stash()
    recompute: Recompute | None = None
    data_axes: tuple[str, ...] = ()
    is_sharded: bool = False
    dtype: str = "float32"
    parameter_dtype: str = "float32"
    gradient_dtype: str = ""

    @property
    def own_gradient_dtype(self) -> str:
        """Return the dtype of the parameters' gradients: `gradient_dtype`, or else `parameter_dtype`."""
        return self.gradient_dtype or self.parameter_dtype

    @property
    def row_placements(self) -> tuple[Placement, ...]:
        """Return for each mesh axis how it places rows: `Shard(0)` on data axes, `Replicate()` on others."""
        return tuple(Shard(0) if axis in self.data_axes else Replicate() for axis in self.mesh.axes)

    def parameter_layout(self) -> Layout:
        """Return the layout of parameters between steps: sharded over the first data axis if `is_sharded`."""
        first = self.data_axes[0] if self.is_sharded and self.data_axes else ""
        return Layout(self.mesh, tuple(Shard(0) if axis == first else Replicate() for axis in self.mesh.axes))

    @property
    def data_parallelism(self) -> int:
        """Return the number of ranks over which the rows of a micro-batch are sharded."""
        size = 1
        for axis in self.data_axes:
            size *= self.mesh.size(axis)
        return size


@dataclass(frozen=True)
class Edge:
    """A tensor that one stage makes and a later one reads: between neighbours, or a skip connection.

    Attributes:
        source, target: the two stages.
        shape: the dims after the rows, of one micro-batch.
        source_placements, target_placements: how it lies on the mesh of the source when it is sent, and on
            the mesh of the target when it has arrived; () for rows over the data axes. Data axes split the
            rows. Where another axis splits a dim, the source sends a part of what it computed, and the target
            gathers the parts before it computes.
        dtype: of the tensor and of its gradient.
    """

    source: int
    target: int
    shape: tuple[int, ...] = (1,)
    source_placements: tuple[Placement, ...] = ()
    target_placements: tuple[Placement, ...] = ()
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Return "SOURCE_TARGET", such as "0_1": the end of the names of the edge's tensors."""
        return f"{self.source}_{self.target}"


@dataclass(frozen=True)
class PipelineProblem:
    """Stages, edges between them, and micro-batches.

    Attributes:
        stages: the stages, in the order of the model.
        edges: the tensors between them.
        micro_batches: micro-batches of a step; any number, fewer than there are stages included.
        rows: rows of a micro-batch, over all data-parallel ranks.
        input_shape, output_shape: the dims after the rows of X and of Y and T.

    Raises:
        LayoutError: stages, edges or sizes do not fit together.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    micro_batches: int
    rows: int = 1
    input_shape: tuple[int, ...] = (1,)
    output_shape: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if not self.stages:
            raise LayoutError("a pipeline has at least one stage")
        if self.micro_batches < 1 or self.rows < 1:
            raise LayoutError(
                f"a pipeline has at least one micro-batch and one row of each, not {self.micro_batches} of "
                f"{self.rows}"
            )
        _check_meshes(self.stages)
        for number, stage in enumerate(self.stages):
            _check_stage(number, stage, self.rows)
        if len({edge.name for edge in self.edges}) < len(self.edges):
            raise LayoutError("two edges join the same stages; make them one tensor")
        for edge in self.edges:
            _check_edge(edge, self)

    @classmethod
    def chain(
        cls,
        stages: Iterable[Stage],
        micro_batches: int,
        rows: int = 1,
        shape: tuple[int, ...] = (1,),
        skips: Iterable[tuple[int, int]] = (),
        dtype: str = "float32",
    ) -> PipelineProblem:
        """Return a problem of stages one after the other, with skip connections; every edge has the same shape.

        Args:
            stages: the stages, in the order of the model.
            micro_batches: micro-batches of a step.
            rows: rows of a micro-batch, over all data-parallel ranks.
            shape: the dims of every edge's tensor after the rows.
            skips: (source stage, target stage) of each edge that is not to the next stage.
            dtype: the dtype of every edge's tensor.
        """
        listed = tuple(stages)
        pairs = [*((number, number + 1) for number in range(len(listed) - 1)), *skips]
        edges = tuple(Edge(source, target, shape, dtype=dtype) for source, target in pairs)
        return cls(listed, edges, micro_batches, rows)

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """Return the meshes of the pipeline ranks, in the order of their first stages."""
        return tuple(dict.fromkeys(stage.mesh for stage in self.stages))

    @property
    def num_ranks(self) -> int:
        """Return the number of pipeline ranks: stages on one mesh are of one pipeline rank."""
        return len(self.meshes)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Return for each stage the pipeline rank that holds it."""
        return tuple(self.meshes.index(stage.mesh) for stage in self.stages)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.stage_ranks) if holder == rank)

    @cached_property
    def _edges_by_stage(self) -> tuple[tuple[tuple[Edge, ...], ...], tuple[tuple[Edge, ...], ...]]:
        numbers = range(self.num_stages)
        into = tuple(tuple(edge for edge in self.edges if edge.target == number) for number in numbers)
        out_of = tuple(tuple(edge for edge in self.edges if edge.source == number) for number in numbers)
        return into, out_of

    def edges_into(self, stage: int) -> tuple[Edge, ...]:
        """Return the edges whose tensors stage number `stage` reads, in the order of `edges`."""
        return self._edges_by_stage[0][stage]

    def edges_out_of(self, stage: int) -> tuple[Edge, ...]:
        """Return the edges whose tensors stage number `stage` writes, in the order of `edges`."""
        return self._edges_by_stage[1][stage]

    def is_local(self, edge: Edge) -> bool:
        """Return whether both stages of an edge are on one pipeline rank, so that nothing is sent."""
        return self.stage_ranks[edge.source] == self.stage_ranks[edge.target]

    def layout_at(self, edge: Edge, stage: int) -> Layout:
        """Return the layout of one micro-batch of an edge's tensor, (rows, *edge.shape), on a stage's mesh.

        The placements are those of the edge. By default rows are sharded over the data axes and replicated over
        others.

        Args:
            stage: `edge.source` or `edge.target`; not checked.
        """
        of = self.stages[stage]
        placements = edge.source_placements if stage == edge.source else edge.target_placements
        return Layout(of.mesh, placements or of.row_placements)

    def edge_bytes(self, edge: Edge) -> int:
        """Return the bytes of an edge's global tensor for one micro-batch; replicas count once."""
        size = self.rows * dtype_bytes(edge.dtype)
        for extent in edge.shape:
            size *= extent
        return size


def _check_meshes(stages: Iterable[Stage]) -> None:
    """Raise LayoutError unless the meshes of stages are equal or share no rank."""
    owners: dict[int, Mesh] = {}
    for number, stage in enumerate(stages):
        for rank in stage.mesh.ranks:
            if owners.setdefault(rank, stage.mesh) != stage.mesh:
                raise LayoutError(
                    f"stage {number}: mesh {stage.mesh.name} shares rank {rank} with another mesh; "
                    f"stages of one pipeline rank have one mesh, others none of its ranks"
                )


def _check_stage(number: int, stage: Stage, rows: int) -> None:
    unknown = [axis for axis in stage.data_axes if axis not in stage.mesh.axes]
    if unknown:
        raise LayoutError(f"stage {number}: mesh {stage.mesh.name} has no axis '{unknown[0]}'")
    parts = stage.data_parallelism
    if rows % parts:
        raise LayoutError(f"stage {number}: {parts} data-parallel parts do not divide {rows} rows")
    for dtype in (stage.dtype, stage.parameter_dtype, stage.own_gradient_dtype):
        if dtype not in DTYPES:
            raise LayoutError(f"stage {number}: there is no dtype '{dtype}'")
    if stage.parameters < 1:
        raise LayoutError(f"stage {number}: has {stage.parameters} parameters, and needs at least one")
    if stage.is_sharded and (not stage.data_axes or stage.parameters % stage.mesh.size(stage.data_axes[0])):
        raise LayoutError(
            f"stage {number}: {stage.parameters} parameters cannot be sharded evenly over a data axis"
        )
    if stage.recompute is not None and not 0 <= stage.recompute.kept <= stage.stash.from_forward:
        raise LayoutError(
            f"stage {number}: its forward keeps {stage.recompute.kept} bytes of a stash of "
            f"{stage.stash.from_forward}"
        )


def _check_edge(edge: Edge, problem: PipelineProblem) -> None:
    if not 0 <= edge.source < edge.target < problem.num_stages:
        raise LayoutError(
            f"edge {edge.source} -> {edge.target}: an edge leads to a later stage, and there are "
            f"{problem.num_stages}"
        )
    if edge.dtype not in DTYPES:
        raise LayoutError(f"edge {edge.source} -> {edge.target}: there is no dtype '{edge.dtype}'")
    source, target = (problem.stages[number] for number in (edge.source, edge.target))
    if source.mesh == target.mesh and source.row_placements != target.row_placements:
        raise LayoutError(
            f"edge {edge.source} -> {edge.target}: both stages are on mesh {source.mesh.name}, with rows over "
            f"data axes {source.data_axes} and {target.data_axes}; give both the same"
        )
    for number in (edge.source, edge.target):
        stage, layout = problem.stages[number], problem.layout_at(edge, number)
        parts: dict[Placement, int] = {}
        for axis, size, placement in zip(stage.mesh.axes, stage.mesh.shape, layout.placements, strict=True):
            parts[placement] = parts.get(placement, 1) * size
            _check_placement(
                edge, f"at stage {number}, axis {axis}", parts[placement], placement, axis in stage.data_axes
            )


def _check_placement(edge: Edge, where: str, parts: int, placement: Placement, splits_rows: bool) -> None:
    label = f"edge {edge.source} -> {edge.target} {where}"
    if splits_rows and placement != Shard(0):
        raise LayoutError(f"{label}: a data axis splits the rows, S(0), not {placement}")
    if splits_rows or placement == Replicate():
        return
    if not isinstance(placement, Shard) or not 1 <= placement.dim <= len(edge.shape):
        raise LayoutError(
            f"{label}: an axis that is no data axis has R or S(d), d from 1 to {len(edge.shape)}, "
            f"not {placement}"
        )
    if edge.shape[placement.dim - 1] % parts:
        raise LayoutError(f"{label}: {parts} ranks do not divide dim {placement.dim} of {edge.shape}")
