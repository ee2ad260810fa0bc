"""Phase 2 of the MeshSlice autotuner: mesh shape and slice counts, by exhaustive search over estimates
(section 3.2.2). Every algorithm is tuned to its own best, so that the comparison is fair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshweave.algorithms.matmul import ALGORITHMS, Algorithm, Config, MatmulProblem
from meshweave.algorithms.matmul.passes import PASSES, TABLE, pass_problem
from meshweave.algorithms.matmul.problem import AXES, MESH
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.cluster import Cluster
from meshweave.describe.model import FcLayer, Transformer
from meshweave.describe.workload import Workload
from meshweave.errors import UnsupportedError
from meshweave.estimate import Estimate, estimate
from meshweave.ir.lifetimes import peak_bytes
from meshweave.tune.dataflow import choose_stationary
from meshweave.tune.plan import Candidate, LayerPlan, PassPlan, Plan

Progress = Callable[[int, int], None]
"""Called with (done, total) after each mesh shape of each algorithm."""


@dataclass(frozen=True)
class Tuned:
    """A product at its best slice count."""

    problem: MatmulProblem
    config: Config
    estimate: Estimate


def tune_product(entry: Algorithm, problem: MatmulProblem, machine: Machine) -> Tuned:
    """The fastest configuration of one product; the first (fewest slices) wins a tie."""
    tried = [Tuned(problem, c, estimate(entry.skeleton(problem, c), machine)) for c in entry.configs(problem)]
    return min(tried, key=lambda tuned: tuned.estimate.total_s)


def plan_model(
    model: Transformer,
    cluster: Cluster,
    workload: Workload,
    algorithms: Sequence[str] = tuple(ALGORITHMS),
    progress: Progress = lambda done, total: None,
) -> Plan:
    """Tunes every algorithm for the fully connected layers of one block, forward and both backward products.

    Raises UnsupportedError where no mesh shape of the cluster works.
    """
    shapes = {name: _mesh_shapes(ALGORITHMS[name], cluster) for name in algorithms}
    total, done = sum(map(len, shapes.values())), 0
    candidates = []
    for name in algorithms:
        entry = ALGORITHMS[name]
        tried: list[tuple[float, tuple[int, ...], list[tuple[FcLayer, str, list[Tuned]]]]] = []
        for shape in shapes[name]:
            machine = mesh_machine(cluster, shape, AXES[: len(shape)], MESH)
            layers = [
                (layer, *_tune_layer(entry, layer, workload, shape, machine)) for layer in model.fc_layers()
            ]
            seconds = sum(tuned.estimate.total_s for _, _, products in layers for tuned in products)
            tried.append((seconds, shape, layers))
            done += 1
            progress(done, total)
        if not tried:
            raise UnsupportedError(
                f"{cluster.num_chips} chips of {cluster.name} have no mesh shape for {name}"
            )
        tried.sort(key=lambda item: item[0])
        candidates.append(_candidate(entry, tried, cluster, workload))
    candidates.sort(key=lambda candidate: candidate.block_s)
    return Plan(
        model=model.name,
        cluster=cluster.name,
        num_chips=cluster.num_chips,
        batch=workload.batch,
        sequence=workload.sequence,
        dtype=workload.dtype,
        candidates=tuple(candidates),
        note="Estimated times of the fully connected layers of one block; attention, element-wise "
        "layers and memory contention are left out.",
    )


def _mesh_shapes(entry: Algorithm, cluster: Cluster) -> list[tuple[int, ...]]:
    """The mesh shapes that both the algorithm and the cluster can form; flat ones only if there are no others."""
    wanted = entry.meshes(cluster.num_chips)
    formed = {shape for dims in {len(s) for s in wanted} for shape in cluster.network.mesh_shapes(dims)}
    both = [shape for shape in wanted if shape in formed]
    return [shape for shape in both if min(shape) > 1] or both


def _tune_layer(
    entry: Algorithm, layer: FcLayer, workload: Workload, shape: tuple[int, ...], machine: Machine
) -> tuple[str, list[Tuned]]:
    stationary, _ = choose_stationary(workload.tokens, layer.in_features, layer.out_features)
    problems = [
        pass_problem(
            stationary, name, workload.tokens, layer.in_features, layer.out_features, shape, workload.dtype
        )
        for name in PASSES
    ]
    return stationary, [tune_product(entry, problem, machine) for problem in problems]


def _candidate(
    entry: Algorithm,
    tried: list[tuple[float, tuple[int, ...], list[tuple[FcLayer, str, list[Tuned]]]]],
    cluster: Cluster,
    workload: Workload,
) -> Candidate:
    seconds, shape, layers = tried[0]
    flops = sum(tuned.problem.flops for _, _, products in layers for tuned in products)
    traffic: dict[str, int] = {}
    for _, _, products in layers:
        for tuned in products:
            for axis, moved in entry.traffic(tuned.problem, tuned.config, 0).items():
                traffic[axis] = traffic.get(axis, 0) + moved
    runner_up = ""
    if len(tried) > 1:
        other_s, other, _ = tried[1]
        runner_up = f"{other[0]}x{other[1]} is {100 * (other_s / seconds - 1):.1f} % slower"
    return Candidate(
        algorithm=entry.name,
        mesh_shape=shape,
        block_s=seconds,
        utilisation=flops / cluster.num_chips / cluster.chip.peak(workload.dtype) / seconds,
        traffic_bytes=traffic,
        layers=tuple(_layer_plan(entry, layer, products, workload) for layer, _, products in layers),
        runner_up=runner_up,
    )


def _layer_plan(entry: Algorithm, layer: FcLayer, products: list[Tuned], workload: Workload) -> LayerPlan:
    stationary, reason = choose_stationary(workload.tokens, layer.in_features, layer.out_features)
    passes = []
    for name, tuned in zip(PASSES, products, strict=True):
        cost = tuned.estimate
        passes.append(
            PassPlan(
                name=name,
                m=tuned.problem.m,
                n=tuned.problem.n,
                k=tuned.problem.k,
                dataflow=TABLE[stationary][name].dataflow,
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
                peak_bytes=peak_bytes(entry.program(tuned.problem, tuned.config), 0),
            )
        )
    return LayerPlan(
        name=layer.name,
        tokens=workload.tokens,
        in_features=layer.in_features,
        out_features=layer.out_features,
        stationary=stationary,
        reason=reason,
        passes=tuple(passes),
    )
