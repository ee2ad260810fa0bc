"""What `meshweave simulate` is to simulate: products of a plan, or one program, each on its machine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from meshweave.algorithms.matmul2d import Algorithm, Config, MatmulProblem, algorithm
from meshweave.algorithms.matmul2d.common.passes import PassName, pass_problem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH
from meshweave.base.errors import DescriptionError, LayoutError, ProgramError, UnsupportedError
from meshweave.cli.options import read_mesh
from meshweave.cli.planned import check_layer, product_title, products, read_passes
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.catalog import cluster_names
from meshweave.describe.files import read_text
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.estimate import estimate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.lower import lower_chains, lower_rings
from meshweave.report.curves import entry_of, title_of
from meshweave.tune import Plan, load_plan
from meshweave.tune.plan import Candidate
from meshweave.tune.product import tune_product

MAX_PLAIN_OPS = 200_000
"""Of all ranks. Without contention a program is simulated in Python, which takes a second for some 50,000 ops."""

_STAYS = {"os": "output-stationary", "ls": "left-stationary", "rs": "right-stationary"}


class Lower(StrEnum):
    none = "none"
    rings = "rings"
    chains = "chains"


@dataclass(frozen=True)
class Job:
    """One run. `name` and `note` are what a picture calls it, `what` says what it computes; `closed_form_s` is the
    time without contention, asked for only if wanted, as it may cost something."""

    title: str
    name: str
    note: str
    what: str
    program: Program
    machine: Machine
    closed_form_s: Callable[[], float]

    @property
    def num_ops(self) -> int:
        """About as many ops as there are: those of the first rank, times the ranks."""
        return len(self.program.ranks) * sum(1 for _ in self.program.written_on(self.program.ranks[0]))

    @property
    def centre(self) -> int:
        """The rank in the middle of the first mesh, which has no special place in any ring."""
        mesh = self.program.meshes[0]
        place = 0
        for size in mesh.shape:
            place = place * size + size // 2
        return mesh.ranks[place]


def read_jobs(
    what: str,
    cluster: str | None,
    logical: bool,
    lower: Lower,
    layer: str,
    passes: str,
    algorithms: str,
    mesh: str | None,
) -> list[Job]:
    """The jobs of a plan (a .json file), or of a program text. Raises MeshweaveError."""
    if what.endswith(".json"):
        jobs = list(_of_plan(load_plan(Path(what)), cluster, logical, layer, passes, algorithms, mesh))
    else:
        jobs = [_of_text(what, cluster, logical)]
    return [_lowered(job, lower) for job in jobs]


def _of_text(what: str, cluster: str | None, logical: bool) -> Job:
    if cluster is None:
        raise DescriptionError("a program says nothing about a machine; give --cluster NAME[:N] or FILE")
    found = load_cluster(cluster)
    text = sys.stdin.read() if what == "-" else read_text(what)
    try:
        program = parse(text)
    except ProgramError as error:
        raise ProgramError(f"{what}: {error}") from None
    if not program.meshes:
        raise ProgramError(f"{what}: a program without a mesh runs on no ranks")
    machine = Machine.of(_sized(found, cluster, len(program.ranks)), program, logical)
    name, sized = program.name, machine.cluster
    shapes = " and ".join("x".join(map(str, mesh.shape)) for mesh in program.meshes[:3])
    what = f"{shapes} mesh on {sized.num_chips} chips of {sized.name}"
    return Job(name, name, "", what, program, machine, partial(_plain, program, machine))


def _of_plan(
    plan: Plan,
    cluster: str | None,
    logical: bool,
    layer: str,
    passes: str,
    algorithms: str,
    mesh: str | None,
) -> Iterator[Job]:
    check_layer(plan, layer)
    wanted = read_passes(passes)
    shape = read_mesh(mesh) if mesh else None
    if cluster is None and plan.cluster not in cluster_names():
        raise DescriptionError(
            f"the plan is for {plan.cluster}, which the catalog does not have; give --cluster FILE"
        )
    named = cluster or plan.cluster
    found = load_cluster(named)
    planned = [candidate.algorithm for candidate in plan.candidates]
    names = planned if algorithms == "all" else planned[:1] if algorithms == "best" else algorithms.split(",")
    for candidate in [plan.candidate(name.strip()) for name in names]:
        if shape is not None and shape not in algorithm(candidate.entry).meshes(math.prod(shape)):
            if algorithms == "all":
                continue
            raise LayoutError(f"{candidate.algorithm} has no {'x'.join(map(str, shape))} mesh")
        on = _sized(found, named, math.prod(shape or candidate.mesh_shape))
        yield from _of_candidate(plan, candidate, on, logical, layer, wanted, shape or candidate.mesh_shape)


def _of_candidate(
    plan: Plan,
    candidate: Candidate,
    cluster: Cluster,
    logical: bool,
    layer: str,
    passes: tuple[PassName, ...],
    shape: tuple[int, ...],
) -> Iterator[Job]:
    """The products of one algorithm; on another mesh than the planned one, with slices tuned for it."""
    machine = mesh_machine(cluster, shape, AXES[: len(shape)], MESH, logical)
    entry = algorithm(candidate.entry)
    for chosen, item in products(candidate, layer, passes):
        sizes = chosen.tokens, chosen.in_features, chosen.out_features
        problem = pass_problem(
            chosen.stationary, item.name, *sizes, shape, plan.dtype, transposed=chosen.transposed
        )
        if shape == candidate.mesh_shape:
            config = item.config
        else:
            config = tune_product(entry_of(candidate), problem, machine).config
        mesh = "x".join(map(str, shape))
        yield Job(
            product_title(layer, item.name, candidate.algorithm, config),
            title_of(candidate),
            str(config) if config.slice_count > 1 else "",
            f"{plan.model} {layer} {item.name.replace('_', ' ')}: {problem.m} x {problem.n} x {problem.k} "
            f"{plan.dtype}, {_STAYS[problem.dataflow]}, {mesh} mesh of {cluster.name}",
            entry.program(problem, config),
            machine,
            partial(_closed_form, entry, problem, config, machine),
        )


def _sized(cluster: Cluster, named: str, ranks: int) -> Cluster:
    """A cluster for which no number of chips was given, at the program's size if it comes in that size."""
    if cluster.num_chips == ranks or named.rpartition(":")[2].isdecimal():
        return cluster
    try:
        return cluster.with_chips(ranks)
    except DescriptionError:
        return cluster


def _lowered(job: Job, lower: Lower) -> Job:
    if lower is Lower.none:
        return job
    program, machine = job.program, job.machine
    if lower is Lower.chains:
        lowered = lower_chains(program)
    else:
        axes = [f"{mesh.name}.{axis}" for mesh in program.meshes for axis in mesh.axes]
        lowered = lower_rings(program, 2 if all(machine.ways(axis) == 2 for axis in axes) else 1)
    return replace(job, program=lowered)


def _closed_form(entry: Algorithm, problem: MatmulProblem, config: Config, machine: Machine) -> float:
    return estimate(entry.skeleton(problem, config), machine).total_s


def _plain(program: Program, machine: Machine) -> float:
    """A program's time without contention, in seconds: each op takes its closed form."""
    from meshweave.simulate.reference import simulate

    ops = len(program.ranks) * sum(1 for _ in program.written_on(program.ranks[0]))
    if ops > MAX_PLAIN_OPS:
        raise UnsupportedError(
            f"--against estimate takes a program of at most {MAX_PLAIN_OPS} ops; this has about {ops}"
        )
    return simulate(program, machine, contention=False).duration_s
