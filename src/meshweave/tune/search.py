"""Phase 2 of the MeshSlice autotuner: the mesh shape and slice counts of least estimated time (section 3.2.2),
by branch and bound. Every algorithm is tuned to its own best, so that the comparison is fair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.passes import PASSES, Stationary, pass_problem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import UnsupportedError
from meshweave.base.progress import Progress, no_progress
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.left_out import unmeasured_kernels
from meshweave.describe.model import FcLayer, Transformer
from meshweave.describe.model.workload import Workload
from meshweave.tune.meshes import BlockOnMesh, MeshSearchSpace, Shape, best_meshes
from meshweave.tune.plan import Candidate, LayerPlan, PassPlan, Plan
from meshweave.tune.plan_description import describe
from meshweave.tune.product import SearchCounts, finish_search
from meshweave.tune.product import TunedProduct as TunedProduct
from meshweave.tune.product import tune_product as tune_product
from meshweave.tune.unrolled import (
    REFERENCE_ALGORITHM,
    UNROLLED,
    ProductSizes,
    planned_names,
    sizes_of,
    unrolled_entry,
)

# --- phase 1: which matrix stays put ----------------------------------------------------------------------

# Phase 1 of the MeshSlice autotuner: which matrix stays put (section 3.2.1).
#
# The largest of X (tokens x in), W (in x out) and Y (tokens x out) should not move. An algorithm with a
# layout of its own (1D tensor parallelism, FSDP) comes first: its authors choose by layer and not by size.


@dataclass(frozen=True)
class LayerDataflow:
    """The matrix that stays put in a layer, whether its matrices are stored transposed, and why, in words."""

    stationary: Stationary
    transposed: bool
    reason: str


def layer_dataflows(entry: Matmul2d, layers: Sequence[FcLayer], tokens: int) -> list[LayerDataflow]:
    """Return the dataflow of each layer of a block: the algorithm's own, or the one chosen by size (phase 1).

    `tokens` is the number of rows of X: the tokens of the batch.
    """
    own = entry.own_stationary
    if own:
        reason = f"the layout of {entry.title}, whatever the sizes"
        return [LayerDataflow(own[number % len(own)], False, reason) for number in range(len(layers))]
    chosen = [choose_stationary(tokens, layer.in_features, layer.out_features) for layer in layers]
    flipped = choose_transposed([which for which, _ in chosen])
    return [LayerDataflow(which, flip, why) for (which, why), flip in zip(chosen, flipped, strict=True)]


def block_products(
    layers: Sequence[FcLayer],
    dataflows: Sequence[LayerDataflow],
    tokens: int,
    mesh_shape: tuple[int, ...],
    dtype: str,
) -> list[Matmul2dProblem]:
    """Return the products of a block on a mesh, layer by layer: forward, backward data, backward weight of each.

    `dataflows` has one entry for each layer; `tokens` are those of the batch, the rows of the activations;
    `mesh_shape` is (rows, columns), or (rows, columns, depth) of a 3D mesh.

    Raises:
        LayoutError: a size, the mesh or the dtype fits no `Matmul2dProblem`.
    """
    return [
        pass_problem(
            flow.stationary,
            name,
            tokens,
            layer.in_features,
            layer.out_features,
            mesh_shape,
            dtype,
            transposed=flow.transposed,
        )
        for layer, flow in zip(layers, dataflows, strict=True)
        for name in PASSES
    ]


def choose_transposed(stationary: Sequence[Stationary]) -> list[bool]:
    """Return, for layers that follow each other, whether to store the matrices of each transposed.

    The choice is such that no activation has to be transposed between layers (section 3.2.1). Only a W-stationary
    layer changes how activations are stored: untransposed it reads X stored (features, tokens) and writes Y
    stored (tokens, features), transposed the reverse. The first layer reads X stored (tokens, features).

    Args:
        stationary: the stationary matrix of each layer, "x", "w" or "y".
    """
    out, flipped = [], False
    for which in stationary:
        out.append(flipped if which != "w" else not flipped)
        flipped = not flipped if which == "w" else flipped
    return out


def choose_stationary(tokens: int, in_features: int, out_features: int) -> tuple[Stationary, str]:
    """Return the matrix ("x", "w" or "y") that no product of a layer moves, and why, in a few words.

    It is the largest of X (tokens, in_features), W (in_features, out_features) and Y (tokens, out_features).
    Ties between X and Y go to X when in = out, as in the paper's public code.
    """
    if out_features > in_features and tokens >= in_features:
        return "y", f"Y ({tokens} x {out_features}) is the largest matrix"
    if in_features >= out_features and tokens >= out_features:
        return "x", f"X ({tokens} x {in_features}) is the largest matrix"
    return "w", f"W ({in_features} x {out_features}) is the largest matrix"


# --- search -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModelSearch:
    """The products of a block, and the meshes to lay them on."""

    layers: tuple[FcLayer, ...]
    workload: Workload
    space: MeshSearchSpace
    counts: SearchCounts

    def shapes(self, entry: Matmul2d) -> list[Shape]:
        """Return the mesh shapes of an algorithm; none where it lacks a dataflow that a layer needs."""
        shapes = self.space.shapes(entry)
        return [] if shapes and self._lacks(entry, shapes[0]) else shapes

    def missing_text(self, entries: Mapping[str, Matmul2d]) -> str:
        """Return in words why algorithms without mesh shapes have none: no such mesh, or no such dataflow."""
        cluster, no_mesh, reasons = self.space.cluster, [], []
        for name, entry in entries.items():
            if shapes := self.space.shapes(entry):
                lacking = " and ".join(self._lacks(entry, shapes[0]))
                reasons.append(f"the layers need the dataflows {lacking}, which {name} lacks")
            else:
                no_mesh.append(name)
        if no_mesh:
            start = f"{cluster.num_chips} chips of {cluster.name} have no mesh shape for"
            reasons.insert(0, f"{start} {', '.join(no_mesh)}")
        return "; ".join(reasons)

    def _lacks(self, entry: Matmul2d, shape: Shape) -> list[str]:
        """Return the dataflows that the layers need and an algorithm has no programs for."""
        needed = {problem.dataflow for problem in self.problems(entry, shape)}
        return sorted(needed.difference(entry.dataflows))

    def dataflows(self, entry: Matmul2d) -> list[LayerDataflow]:
        """Return the dataflow of each layer as an algorithm runs it."""
        return layer_dataflows(entry, self.layers, self.workload.tokens)

    def problems(self, entry: Matmul2d, shape: Shape) -> list[Matmul2dProblem]:
        """Return the products of a block as an algorithm runs them on a mesh of `shape`, layer by layer."""
        workload = self.workload
        return block_products(self.layers, self.dataflows(entry), workload.tokens, shape, workload.dtype)


def plan_model(
    model: Transformer,
    cluster: Cluster,
    workload: Workload,
    algorithms: Sequence[str] | None = None,
    progress: Progress = no_progress,
    counts: SearchCounts | None = None,
) -> Plan:
    """Return a plan of all algorithms, tuned for the fully connected layers of one block, forward and backward.

    Args:
        algorithms: names of 2D products; None takes all. `wang[S=meshslice]` and `summa[S=meshslice]` run at
            the slice counts that MeshSlice takes for the same product; one is added where its base and
            MeshSlice are named. An algorithm that has no mesh shape on this cluster or lacks a dataflow of
            these layers is left out; the plan's `note` says so.
        progress: called with (done, total) after each mesh shape of each algorithm.
        counts: to which the numbers of configs and skeletons that the search looks at are added.

    Raises:
        UnsupportedError: a name is unknown, or no algorithm has a mesh shape and the dataflows.
    """
    names = planned_names(tuple(PRODUCTS_2D) if algorithms is None else algorithms)
    space = MeshSearchSpace(cluster)
    search = _ModelSearch(model.fc_layers(), workload, space, counts or SearchCounts())
    shapes = {name: search.shapes(PRODUCTS_2D[UNROLLED.get(name, name)]) for name in names}
    missing = {name: PRODUCTS_2D[UNROLLED.get(name, name)] for name in names if not shapes[name]}
    missing_text = search.missing_text(missing)
    if len(missing) == len(names):
        raise UnsupportedError(missing_text)
    if REFERENCE_ALGORITHM not in names and any(name in UNROLLED for name in names):
        shapes[REFERENCE_ALGORITHM] = search.shapes(PRODUCTS_2D[REFERENCE_ALGORITHM])
    return Plan(
        model=model.name,
        cluster=cluster.name,
        num_chips=cluster.num_chips,
        batch=workload.batch,
        sequence=workload.sequence,
        dtype=workload.dtype,
        candidates=tuple(_candidates(search, names, shapes, progress)),
        note=_note(missing_text),
        not_priced=(*_left_out(model), *model.not_priced_at(workload.sequence)),
        description=describe(model, cluster),
        unmeasured=unmeasured_kernels(cluster.chip, workload.dtype),
    )


def _left_out(model: Transformer) -> Iterator[str]:
    """Yield which products of a model are in no plan of products, a few words each."""
    if model.is_routed:
        yield "products of experts left out: `meshweave plan` without --products prices them"
    if len(model.layers) > 1:
        count, graph = model.layers[0]
        which = "with experts" if graph.num_experts > 1 else "without experts"
        yield f"the block is that of the first {count} of {model.num_layers} layers, {which}"


def _note(missing: str) -> str:
    note = (
        "Estimated times of the fully connected layers of one block; attention, element-wise "
        "layers and memory contention are left out."
    )
    return note + (f" Left out: {missing}." if missing else "")


def _candidates(
    search: _ModelSearch, names: Sequence[str], shapes: dict[str, list[Shape]], progress: Progress
) -> list[Candidate]:
    """Return each algorithm at its best, the fastest first."""
    total, done = sum(map(len, shapes.values())), 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    candidates = []
    slice_counts: dict[ProductSizes, int] = {}
    for name in sorted(shapes, key=lambda name: name in UNROLLED):
        if not shapes[name]:
            continue
        entry = unrolled_entry(name, slice_counts) if name in UNROLLED else PRODUCTS_2D[name]
        problems = partial(search.problems, entry)
        meshes = best_meshes(entry, search.space, shapes[name], problems, search.counts, advance)
        tuned = _tune_products(search, meshes[0][1])
        if name == REFERENCE_ALGORITHM:
            slice_counts = {sizes_of(product.problem): product.config.slice_count for product in tuned}
        if name in names:
            candidates.append(_candidate(entry, meshes, tuned, search, UNROLLED.get(name, name)))
    return sorted(candidates, key=lambda candidate: candidate.block_s)


def _tune_products(search: _ModelSearch, mesh: BlockOnMesh) -> list[TunedProduct]:
    """Return the products on a mesh at their best configs, with runners-up."""
    machine = search.space.machine(mesh.shape)
    tuned: dict[Matmul2dProblem, TunedProduct] = {}
    for config_search in mesh.searches:
        if config_search.problem not in tuned:
            tuned[config_search.problem] = finish_search(config_search, machine)
    return [tuned[problem] for problem in mesh.problems]


def _candidate(
    entry: Matmul2d,
    meshes: list[tuple[int, BlockOnMesh]],
    tuned: list[TunedProduct],
    search: _ModelSearch,
    base: str,
) -> Candidate:
    cluster, workload = search.space.cluster, search.workload
    seconds = sum(item.estimate.total_s for item in tuned)
    peaks: dict[Matmul2dProblem, int] = {}
    traffic: dict[str, int] = {}
    for item in tuned:
        if item.problem not in peaks:
            peaks[item.problem] = entry.peak_bytes(item.problem, item.config)
        for axis, moved in entry.traffic(item.problem, item.config, 0).items():
            traffic[axis] = traffic.get(axis, 0) + moved
    runner_up = ""
    if len(meshes) > 1:
        (best_ps, _), (other_ps, other) = meshes
        runner_up = f"{'x'.join(map(str, other.shape))} is {100 * (other_ps / best_ps - 1):.1f} % slower"
    size = len(PASSES)
    return Candidate(
        algorithm=entry.name,
        base=base if base != entry.name else "",
        mesh_shape=meshes[0][1].shape,
        block_s=seconds,
        utilisation=sum(item.problem.flops for item in tuned)
        / cluster.num_chips
        / cluster.chip.peak(workload.dtype)
        / seconds,
        traffic_bytes=traffic,
        layers=tuple(
            _layer_plan(layer, tuned[size * i : size * (i + 1)], peaks, workload, flow)
            for i, (layer, flow) in enumerate(zip(search.layers, search.dataflows(entry), strict=True))
        ),
        runner_up=runner_up,
    )


def _layer_plan(
    layer: FcLayer,
    products: list[TunedProduct],
    peaks: dict[Matmul2dProblem, int],
    workload: Workload,
    flow: LayerDataflow,
) -> LayerPlan:
    passes = []
    for name, tuned in zip(PASSES, products, strict=True):
        cost = tuned.estimate
        passes.append(
            PassPlan(
                name=name,
                m=tuned.problem.m,
                n=tuned.problem.n,
                k=tuned.problem.k,
                dataflow=tuned.problem.dataflow,
                slices=tuned.config.slices,
                block=tuned.config.block,
                packets=tuned.config.packets,
                overlap=tuned.config.overlap,
                total_s=cost.total_s,
                compute_s=cost.compute_s,
                launch_s=cost.launch_s,
                sync_s=cost.sync_s,
                transfer_s=cost.transfer_s,
                exposed_s=cost.exposed_s,
                peak_bytes=peaks[tuned.problem],
                runner_up=tuned.margin_text,
            )
        )
    return LayerPlan(
        name=layer.name,
        tokens=workload.tokens,
        in_features=layer.in_features,
        out_features=layer.out_features,
        stationary=flow.stationary,
        transposed=flow.transposed,
        reason=flow.reason,
        passes=tuple(passes),
    )
