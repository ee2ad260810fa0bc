"""What a plan was chosen from, for reports to draw: times by mesh shape and slice count, simulated timelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH, Placements
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import DescriptionError, LayoutError, MeshweaveError, UnsupportedError
from meshweave.base.progress import Progress, no_progress
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.layout.shapes import nearest_mesh_shape
from meshweave.describe.machine.cluster import Cluster
from meshweave.simulate import simulate
from meshweave.trace import Trace
from meshweave.tune.meshes import formed_shapes
from meshweave.tune.plan import Candidate, LayerPlan, PassPlan, Plan
from meshweave.tune.product import tune_product
from meshweave.tune.unrolled import REFERENCE_ALGORITHM, UNROLLED, unrolled_entry

MAX_RANKS = 64
"""Meshes of more ranks are simulated at `REDUCED_RANKS`."""
REDUCED_RANKS = 16


MeshCurve = list[tuple[tuple[int, ...], float]]
"""(mesh shape, seconds of one block's products, each at its best slice count)."""
SliceCurve = list[tuple[int, float]]
"""(slice count, estimated seconds), ascending."""


@dataclass(frozen=True)
class ProductTimeline:
    """A simulated product; the title names algorithm, layer, pass, slices and the mesh that it ran on."""

    title: str
    trace: Trace


@dataclass(frozen=True)
class PlanExplanation:
    """A plan with the alternatives that it was chosen from.

    Attributes:
        titles: name of every candidate in tables and pictures, by algorithm.
        sources: where every algorithm is published, by its title.
        mesh_curves: by algorithm, (mesh shape, seconds of all products of one block) for each mesh shape.
        sliced: the candidate that `slice_curves` are for; None where no candidate slices anything.
        slice_curves: by layer and pass of `sliced`, (slice count, seconds of the product) on its mesh.
        own_timelines: all products of the best candidate.
        compared_timelines: the forward product of the largest layer with every candidate that can be
            simulated.
        are_reduced: whether timelines ran on meshes of about `reduced_ranks` ranks instead of the planned
            ones.
    """

    plan: Plan
    cluster: Cluster
    titles: dict[str, str]
    sources: dict[str, str]
    mesh_curves: dict[str, MeshCurve]
    sliced: Candidate | None
    slice_curves: dict[str, dict[str, SliceCurve]]
    own_timelines: list[ProductTimeline]
    compared_timelines: list[ProductTimeline]
    are_reduced: bool
    reduced_ranks: int


def explain(plan: Plan, cluster: Cluster, progress: Progress = no_progress) -> PlanExplanation:
    """Return the alternatives that a plan made for `cluster` was chosen from.

    Every mesh shape is tuned again for the curves and products are simulated for the timelines, which takes
    about as long as planning did. `progress` is called with (shapes and products done, those in all).

    Raises:
        DescriptionError: it is the plan of a step, and not of products.
        UnsupportedError: a product has no price, such as one outside a table of measured products.
    """
    best, others = plan.best, plan.candidates[1:]
    num_shapes = sum(len(mesh_shapes(candidate, cluster)) for candidate in plan.candidates)
    num_products = sum(len(layer.passes) for layer in best.layers)
    total = num_shapes + num_products + len(others)

    def after(base: int) -> Progress:
        return lambda done, _: progress(base + done, total)

    mesh_curves = mesh_curve(plan, cluster, after(0))
    passes = [pass_plan.name for pass_plan in best.layers[0].passes]
    own = timelines(plan, cluster, best, best.layers, passes, after(num_shapes))
    compared = [line for line in own if f": {largest_layer(best).name} forward" in line.title]
    for number, candidate in enumerate(others):
        compared += timelines(plan, cluster, candidate, [largest_layer(candidate)])
        progress(num_shapes + num_products + number + 1, total)
    sliced = _sliced_candidate(plan)
    return PlanExplanation(
        plan=plan,
        cluster=cluster,
        titles={candidate.algorithm: title_of(candidate) for candidate in plan.candidates},
        sources={PRODUCTS_2D[c.entry_name].title: PRODUCTS_2D[c.entry_name].source for c in plan.candidates},
        mesh_curves=mesh_curves,
        sliced=sliced,
        slice_curves={} if sliced is None else slice_curve(plan, sliced, cluster),
        own_timelines=own,
        compared_timelines=compared,
        are_reduced=plan.num_chips > MAX_RANKS,
        reduced_ranks=REDUCED_RANKS,
    )


def _sliced_candidate(plan: Plan) -> Candidate | None:
    """Return MeshSlice where the plan has it, else the best candidate that slices anything."""
    for candidate in plan.candidates:
        if candidate.algorithm == REFERENCE_ALGORITHM:
            return candidate
    for candidate in plan.candidates:
        if any(item.config.slice_count > 1 for layer in candidate.layers for item in layer.passes):
            return candidate
    return None


def title_of(candidate: Candidate) -> str:
    """Return the name of a candidate in tables and pictures: "Wang", "Wang[S=meshslice]" (`tune.unrolled`)."""
    return PRODUCTS_2D[candidate.entry_name].title + candidate.algorithm.removeprefix(candidate.entry_name)


def entry_of(candidate: Candidate) -> Matmul2d:
    """Return the algorithm of a candidate.

    That of `wang[S=meshslice]` and the like, which has the slice counts of MeshSlice, offers for each product
    only configs with the slice count that the plan has.
    """
    if candidate.algorithm not in UNROLLED:
        return PRODUCTS_2D[candidate.entry_name]
    items = [item for layer in candidate.layers for item in layer.passes]
    return unrolled_entry(
        candidate.algorithm, {(i.m, i.n, i.k, i.dataflow): i.config.slice_count for i in items}
    )


def mesh_shapes(candidate: Candidate, cluster: Cluster) -> list[tuple[int, ...]]:
    """Return every mesh shape of the whole cluster that the algorithm of a candidate can use."""
    return formed_shapes(PRODUCTS_2D[candidate.entry_name], cluster)


def mesh_curve(plan: Plan, cluster: Cluster, progress: Progress = no_progress) -> dict[str, MeshCurve]:
    """Return by algorithm a list of (mesh shape, seconds of the products of one block at their best configs).

    It has every mesh shape of the whole cluster that the algorithm can use, but those whose sizes or slices it
    cannot cut. `progress` is called with (mesh shapes looked at, mesh shapes in all).
    """
    shapes = {c.algorithm: mesh_shapes(c, cluster) for c in plan.candidates}
    total, done = sum(map(len, shapes.values())), 0
    out: dict[str, MeshCurve] = {}
    for candidate in plan.candidates:
        entry = entry_of(candidate)
        curve = out[candidate.algorithm] = []
        for shape in shapes[candidate.algorithm]:
            machine = mesh_machine(cluster, shape, AXES[: len(shape)], MESH)
            problems = [_problem(plan, item, shape) for layer in candidate.layers for item in layer.passes]
            done += 1
            progress(done, total)
            try:
                tuned = [tune_product(entry, problem, machine) for problem in problems]
            except (LayoutError, UnsupportedError):  # sizes or slices that this mesh cannot cut
                continue
            curve.append((shape, sum(product.estimate.total_s for product in tuned)))
    return out


def slice_curve(plan: Plan, candidate: Candidate, cluster: Cluster) -> dict[str, dict[str, SliceCurve]]:
    """Return {layer: {pass: [(slice count, least seconds of all configs with it)]}} on the mesh of a candidate.

    Slice counts ascend.
    """
    entry, shape = PRODUCTS_2D[candidate.entry_name], candidate.mesh_shape
    machine = mesh_machine(cluster, shape, AXES[: len(shape)], MESH)
    out: dict[str, dict[str, SliceCurve]] = {}
    for layer in candidate.layers:
        passes = out[layer.name] = {}
        for item in layer.passes:
            problem = _problem(plan, item, shape)
            best: dict[int, float] = {}
            for config in entry.candidates(problem):
                seconds = entry.estimate(problem, config, machine).total_s
                count = config.slice_count
                best[count] = min(seconds, best.get(count, seconds))
            passes[item.name] = sorted(best.items())
    return out


def _problem(plan: Plan, item: PassPlan, shape: tuple[int, ...]) -> Matmul2dProblem:
    return Matmul2dProblem(item.m, item.n, item.k, shape, item.dataflow, plan.dtype)


# --- timelines ------------------------------------------------------------------------------------------


def largest_layer(candidate: Candidate) -> LayerPlan:
    """Return the layer of a candidate with the most FLOPs; the first of equals."""
    return max(candidate.layers, key=lambda layer: layer.in_features * layer.out_features)


def timelines(
    plan: Plan,
    cluster: Cluster,
    candidate: Candidate,
    layers: Sequence[LayerPlan],
    passes: Sequence[str] = ("forward",),
    progress: Progress = no_progress,
) -> list[ProductTimeline]:
    """Return simulated timelines, contention included, of the products of a candidate, layer by layer.

    They run at the planned mesh shape where it has at most `MAX_RANKS` ranks, and otherwise at the nearest
    shape of `REDUCED_RANKS` (or about as many), each rank with a local product of the planned size. A product
    that cannot be reduced so, or not be simulated, is left out.

    Args:
        layers: those of `candidate` to simulate.
        passes: which to simulate, of "forward", "backward_data" and "backward_weight".
        progress: called with (products done, products in all).
    """
    wanted = [(layer, item) for layer in layers for item in layer.passes if item.name in passes]
    out = []
    for number, (layer, item) in enumerate(wanted):
        timeline = _timeline(plan, cluster, candidate, layer, item)
        if timeline is not None:
            out.append(timeline)
        progress(number + 1, len(wanted))
    return out


def _timeline(
    plan: Plan, cluster: Cluster, candidate: Candidate, layer: LayerPlan, item: PassPlan
) -> ProductTimeline | None:
    entry = PRODUCTS_2D[candidate.entry_name]
    problem = _problem(plan, item, candidate.mesh_shape)
    try:
        if problem.num_chips > MAX_RANKS:
            shape = nearest_mesh_shape(problem.mesh_shape, _reduced_meshes(entry))
            problem = same_local_product(problem, shape, entry.operand_placements(problem))
        program = entry.program(problem, item.config)
        trace = simulate(program, Machine.of(resized(cluster, len(program.ranks)), program)).trace()
    except MeshweaveError:
        return None
    config = f", {item.config}" if item.config.slice_count > 1 else ""
    mesh = "x".join(map(str, problem.mesh_shape))
    product = f"{layer.name} {item.name.replace('_', ' ')}{config}"
    return ProductTimeline(f"{title_of(candidate)}: {product}, {mesh} mesh", trace)


def _reduced_meshes(entry: Matmul2d) -> tuple[tuple[int, ...], ...]:
    """Return meshes of `REDUCED_RANKS`, or of the nearest number of ranks that the algorithm has a mesh of."""
    counts = sorted(range(2, MAX_RANKS + 1), key=lambda count: abs(math.log(count / REDUCED_RANKS)))
    return next((shapes for count in counts if (shapes := entry.mesh_shapes(count))), ())


def same_local_product(
    problem: Matmul2dProblem, shape: tuple[int, ...], placements: Placements
) -> Matmul2dProblem:
    """Return the problem on a mesh of `shape` with m, n and k such that a rank's local product keeps its size.

    Each of m, n and k is a dim of two of A, B and C. It grows or shrinks, rounded down, with the mesh axes over
    which both matrices shard it: m = 512 sharded over 4 ranks becomes 256 over 2. A dim that only one of them
    shards over an axis is gathered along that axis, and does not change with it.

    Args:
        shape: the new mesh shape.
        placements: by "a", "b" and "c", the placement of the matrix along each mesh axis.

    Raises:
        LayoutError: the sizes or the shape fit no `Matmul2dProblem`.
    """
    letters = {
        "a": ("k", "m") if problem.dataflow == "rs" else ("m", "k"),
        "b": ("n", "k") if problem.dataflow == "ls" else ("k", "n"),
        "c": ("m", "n"),
    }
    over: dict[str, list[set[int]]] = {letter: [] for letter in "mnk"}
    for operand, dims in letters.items():
        for dim, letter in enumerate(dims):
            placed = placements[operand]
            over[letter].append({i for i, p in enumerate(placed) if getattr(p, "dim", None) == dim})
    sizes = {}
    for letter, sets in over.items():
        size = getattr(problem, letter)
        for i in set.intersection(*sets):
            size = size * shape[i] // problem.mesh_shape[i]
        sizes[letter] = max(size, 1)
    return replace(problem, **sizes, mesh_shape=shape)


def resized(cluster: Cluster, num_ranks: int) -> Cluster:
    """Return the cluster with `num_ranks` chips; unchanged where it does not come in that size."""
    with suppress(DescriptionError):
        return cluster if num_ranks == cluster.num_chips else cluster.with_chips(num_ranks)
    return cluster
