"""What a plan was chosen from: times over all mesh shapes and slice counts, and simulated timelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshweave.algorithms.matmul2d import ALGORITHMS, Algorithm, MatmulProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH, Placements
from meshweave.base.errors import DescriptionError, LayoutError, MeshweaveError, UnsupportedError
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.layout.shapes import nearest_mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import estimate
from meshweave.ir.program import Program
from meshweave.simulate import simulate
from meshweave.trace import Trace
from meshweave.tune import Plan
from meshweave.tune.plan import Candidate, LayerPlan, PassPlan
from meshweave.tune.product import tune_product
from meshweave.tune.search import Progress
from meshweave.tune.unrolled import FOLLOWERS, follower

MAX_RANKS = 64
"""Meshes of more ranks are simulated at `REDUCED_RANKS`."""
REDUCED_RANKS = 16


@dataclass(frozen=True)
class Timeline:
    """A simulated product; the title names algorithm, layer, pass, slices and the mesh that it ran on."""

    title: str
    trace: Trace


def title_of(candidate: Candidate) -> str:
    """What a table or picture calls a candidate: "Wang", or "Wang[S=meshslice]" for a follower."""
    return ALGORITHMS[candidate.entry].title + candidate.algorithm.removeprefix(candidate.entry)


def entry_of(candidate: Candidate) -> Algorithm:
    """The table's entry of a candidate; one that follows another's slice counts offers those of the plan."""
    if candidate.algorithm not in FOLLOWERS:
        return ALGORITHMS[candidate.entry]
    items = [item for layer in candidate.layers for item in layer.passes]
    return follower(candidate.algorithm, {(i.m, i.n, i.k, i.dataflow): i.config.slice_count for i in items})


def mesh_shapes(candidate: Candidate, cluster: Cluster) -> list[tuple[int, ...]]:
    """Every mesh shape of the whole cluster that an algorithm can use, flat ones included."""
    network, out = cluster.network, []
    for shape in ALGORITHMS[candidate.entry].meshes(cluster.num_chips):
        try:
            formed = network.mesh_shapes(len(shape))
        except LayoutError:
            continue
        if shape in formed:
            out.append(shape)
    return out


def mesh_curve(
    plan: Plan, cluster: Cluster, progress: Progress = lambda done, total: None
) -> dict[str, list[tuple[tuple[int, ...], float]]]:
    """By algorithm: (mesh shape, seconds of one block's products, each at its best slice count)."""
    shapes = {c.algorithm: mesh_shapes(c, cluster) for c in plan.candidates}
    total, done = sum(map(len, shapes.values())), 0
    out: dict[str, list[tuple[tuple[int, ...], float]]] = {}
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
            curve.append((shape, sum(one.estimate.total_s for one in tuned)))
    return out


def slice_curve(
    plan: Plan, candidate: Candidate, cluster: Cluster
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By layer and pass: (slice count, estimated seconds) on the mesh of a candidate, ascending."""
    entry, shape = ALGORITHMS[candidate.entry], candidate.mesh_shape
    machine = mesh_machine(cluster, shape, AXES[: len(shape)], MESH)
    out: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for layer in candidate.layers:
        passes = out[layer.name] = {}
        for item in layer.passes:
            problem = _problem(plan, item, shape)
            best: dict[int, float] = {}
            for config in entry.configs(problem):
                seconds = estimate(entry.skeleton(problem, config), machine).total_s
                count = config.slice_count
                best[count] = min(seconds, best.get(count, seconds))
            passes[item.name] = sorted(best.items())
    return out


def _problem(plan: Plan, item: PassPlan, shape: tuple[int, ...]) -> MatmulProblem:
    return MatmulProblem(item.m, item.n, item.k, shape, item.dataflow, plan.dtype)


# --- timelines ------------------------------------------------------------------------------------------


def largest_layer(candidate: Candidate) -> LayerPlan:
    """The layer with the most FLOPs; the first of equals."""
    return max(candidate.layers, key=lambda layer: layer.in_features * layer.out_features)


def timelines(
    plan: Plan,
    cluster: Cluster,
    candidate: Candidate,
    layers: Sequence[LayerPlan],
    passes: Sequence[str] = ("forward",),
    progress: Progress = lambda done, total: None,
) -> list[Timeline]:
    """Simulated timelines, contention included, of the products of a candidate.

    They run at the planned mesh shape where it has at most `MAX_RANKS` ranks, and otherwise at the nearest
    shape of `REDUCED_RANKS` (or about as many), each rank with a local product of the planned size. A product
    that cannot be reduced so is left out.
    """
    wanted = [(layer, item) for layer in layers for item in layer.passes if item.name in passes]
    out = []
    for number, (layer, item) in enumerate(wanted):
        found = _timeline(plan, cluster, candidate, layer, item)
        if found is not None:
            out.append(found)
        progress(number + 1, len(wanted))
    return out


def _timeline(
    plan: Plan, cluster: Cluster, candidate: Candidate, layer: LayerPlan, item: PassPlan
) -> Timeline | None:
    entry = ALGORITHMS[candidate.entry]
    problem = _problem(plan, item, candidate.mesh_shape)
    try:
        if problem.num_chips > MAX_RANKS:
            shape = nearest_mesh(problem.mesh_shape, _reduced_meshes(entry))
            problem = same_local_product(problem, shape, entry.placements(problem))
        program = entry.program(problem, item.config)
        trace = simulate(program, _machine(cluster, program)).trace()
    except MeshweaveError:
        return None
    config = f", {item.config}" if item.config.slice_count > 1 else ""
    mesh = "x".join(map(str, problem.mesh_shape))
    what = f"{layer.name} {item.name.replace('_', ' ')}{config}"
    return Timeline(f"{title_of(candidate)}: {what}, {mesh} mesh", trace)


def _reduced_meshes(entry: Algorithm) -> tuple[tuple[int, ...], ...]:
    """Meshes of `REDUCED_RANKS`, or of the number of ranks nearest to it that an algorithm has a mesh of."""
    counts = sorted(range(2, MAX_RANKS + 1), key=lambda count: abs(math.log(count / REDUCED_RANKS)))
    return next((shapes for count in counts if (shapes := entry.meshes(count))), ())


def same_local_product(
    problem: MatmulProblem, shape: tuple[int, ...], placements: Placements
) -> MatmulProblem:
    """The problem on a mesh of another shape in which each rank multiplies matrices of the size it did.

    A dim shrinks with the mesh axes over which it is sharded in both matrices that have it. One that the
    matrices shard over different axes, or that one of them does not shard, is gathered, and keeps its size.
    Raises LayoutError as MatmulProblem does.
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


def _machine(cluster: Cluster, program: Program) -> Machine:
    """On a machine of as many chips as the program has ranks, where the cluster comes in that size."""
    if len(program.ranks) == cluster.num_chips:
        return Machine.of(cluster, program)
    try:
        return Machine.of(cluster.with_chips(len(program.ranks)), program)
    except DescriptionError:
        return Machine.of(cluster, program)
