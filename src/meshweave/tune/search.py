"""Phase 2 of the MeshSlice autotuner: mesh shape and slice counts, by exhaustive search over estimates
(section 3.2.2). Every algorithm is tuned to its own best, so that the comparison is fair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshweave.algorithms.matmul2d import ALGORITHMS, Matmul2d, MatmulProblem
from meshweave.algorithms.matmul2d.common.passes import PASSES, PassName, Stationary, pass_problem
from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.model import FcLayer, Transformer
from meshweave.describe.model.workload import Workload
from meshweave.tune.dataflow import choose_stationary, choose_transposed
from meshweave.tune.meshes import Ground, OnMesh, Shape, best_meshes
from meshweave.tune.plan import Candidate, LayerPlan, PassPlan, Plan
from meshweave.tune.product import Tally, Tuned, tune_choices, tune_product
from meshweave.tune.unrolled import FOLLOWERS, LEADER, Product, follower, planned_names, product_of

__all__ = ["Progress", "Tuned", "plan_model", "tune_product"]

Progress = Callable[[int, int], None]
"""Called with (done, total) after each mesh shape of each algorithm."""


@dataclass(frozen=True)
class _Job:
    """What to plan: the products of a block, and the ground to lay them on."""

    layers: tuple[FcLayer, ...]
    workload: Workload
    ground: Ground
    tally: Tally

    def products(self) -> Iterator[tuple[FcLayer, PassName]]:
        for layer in self.layers:
            for name in PASSES:
                yield layer, name

    def problems(self, shape: Shape) -> list[MatmulProblem]:
        tokens, dtype = self.workload.tokens, self.workload.dtype
        return [
            pass_problem(
                which, name, tokens, layer.in_features, layer.out_features, shape, dtype, transposed=flipped
            )
            for layer, which, flipped in zip(self.layers, self.stationary(), self.transposed(), strict=True)
            for name in PASSES
        ]

    def stationary(self) -> list[Stationary]:
        """Which matrix stays put in each layer."""
        tokens = self.workload.tokens
        return [choose_stationary(tokens, it.in_features, it.out_features)[0] for it in self.layers]

    def transposed(self) -> list[bool]:
        """Which layers take the transposed version."""
        return choose_transposed(self.stationary())


def plan_model(
    model: Transformer,
    cluster: Cluster,
    workload: Workload,
    algorithms: Sequence[str] = tuple(ALGORITHMS),
    progress: Progress = lambda done, total: None,
    tally: Tally | None = None,
) -> Plan:
    """Tunes every algorithm for the fully connected layers of one block, forward and both backward products.

    `algorithms` names entries of the table; `wang[S=meshslice]` and `summa[S=meshslice]` run at the slice
    counts that MeshSlice takes for the same product, and are added where both are asked for. An algorithm
    without a mesh shape on this cluster is left out, and `note` says so. `tally` counts what the search looks at.

    Raises UnsupportedError for an unknown name, and where no algorithm has a mesh shape.
    """
    names = planned_names(algorithms)
    job = _Job(model.fc_layers(), workload, Ground(cluster), tally if tally is not None else Tally())
    entries = {name: ALGORITHMS[FOLLOWERS.get(name, name)] for name in names}
    shapes = {name: job.ground.shapes(entry) for name, entry in entries.items()}
    missing = [name for name in names if not shapes[name]]
    if len(missing) == len(names):
        raise UnsupportedError(
            f"{cluster.num_chips} chips of {cluster.name} have no mesh shape for {', '.join(names)}"
        )
    leader_unseen = LEADER not in names and any(name in FOLLOWERS for name in names)
    if leader_unseen:
        shapes[LEADER] = job.ground.shapes(ALGORITHMS[LEADER])
    total, done = sum(map(len, shapes.values())), 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    candidates = []
    counts: dict[Product, int] = {}
    for name in sorted(shapes, key=lambda name: name in FOLLOWERS):
        if not shapes[name]:
            continue
        entry = follower(name, counts) if name in FOLLOWERS else ALGORITHMS[name]
        found = best_meshes(entry, job.ground, shapes[name], job.problems, job.tally, advance)
        tuned = _tune(job, found[0][1])
        if name == LEADER:
            counts = {product_of(item.problem): item.config.slice_count for item in tuned}
        if name in names:
            candidates.append(_candidate(entry, found, tuned, job, FOLLOWERS.get(name, name)))
    candidates.sort(key=lambda candidate: candidate.block_s)
    note = (
        "Estimated times of the fully connected layers of one block; attention, element-wise "
        "layers and memory contention are left out."
    )
    if missing:
        note += f" No mesh shape of {cluster.num_chips} chips for {', '.join(missing)}."
    return Plan(
        model=model.name,
        cluster=cluster.name,
        num_chips=cluster.num_chips,
        batch=workload.batch,
        sequence=workload.sequence,
        dtype=workload.dtype,
        candidates=tuple(candidates),
        note=note,
    )


def _tune(job: _Job, mesh: OnMesh) -> list[Tuned]:
    """The products on a mesh at their best, with runners-up."""
    machine = job.ground.machine(mesh.shape)
    tuned: dict[MatmulProblem, Tuned] = {}
    for choices in mesh.choices:
        if choices.problem not in tuned:
            tuned[choices.problem] = tune_choices(choices, machine)
    return [tuned[problem] for problem in mesh.problems]


def _candidate(
    entry: Matmul2d, found: list[tuple[int, OnMesh]], tuned: list[Tuned], job: _Job, base: str
) -> Candidate:
    cluster, workload = job.ground.cluster, job.workload
    seconds = sum(item.estimate.total_s for item in tuned)
    peaks: dict[MatmulProblem, int] = {}
    traffic: dict[str, int] = {}
    for item in tuned:
        if item.problem not in peaks:
            peaks[item.problem] = entry.peak_bytes(item.problem, item.config)
        for axis, moved in entry.traffic(item.problem, item.config, 0).items():
            traffic[axis] = traffic.get(axis, 0) + moved
    runner_up = ""
    if len(found) > 1:
        (best_ps, _), (other_ps, other) = found
        runner_up = f"{'x'.join(map(str, other.shape))} is {100 * (other_ps / best_ps - 1):.1f} % slower"
    size = len(PASSES)
    return Candidate(
        algorithm=entry.name,
        base=base if base != entry.name else "",
        mesh_shape=found[0][1].shape,
        block_s=seconds,
        utilisation=sum(item.problem.flops for item in tuned)
        / cluster.num_chips
        / cluster.chip.peak(workload.dtype)
        / seconds,
        traffic_bytes=traffic,
        layers=tuple(
            _layer_plan(layer, tuned[size * i : size * (i + 1)], peaks, workload, flipped)
            for i, (layer, flipped) in enumerate(zip(job.layers, job.transposed(), strict=True))
        ),
        runner_up=runner_up,
    )


def _layer_plan(
    layer: FcLayer,
    products: list[Tuned],
    peaks: dict[MatmulProblem, int],
    workload: Workload,
    transposed: bool,
) -> LayerPlan:
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
                runner_up=tuned.why,
            )
        )
    return LayerPlan(
        name=layer.name,
        tokens=workload.tokens,
        in_features=layer.in_features,
        out_features=layer.out_features,
        stationary=stationary,
        transposed=transposed,
        reason=reason,
        passes=tuple(passes),
    )
