"""Programs to simulate, each on its machine: products of a plan, or one program; and their simulated runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from meshweave.algorithms.matmul2d import Matmul2d
from meshweave.algorithms.matmul2d.common.passes import PassName, pass_problem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError, ProgramError, UnsupportedError
from meshweave.base.limits import CHECKED_STEPS
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.describe.machine.cluster import Cluster, gives_chips, load_cluster
from meshweave.estimate import estimate
from meshweave.ir.program import Program
from meshweave.ir.program.declarations import check_header, check_statements
from meshweave.lower import lower_chains, lower_rings
from meshweave.simulate import LinkUse, Simulation, simulate
from meshweave.simulate.critical import CriticalPath, critical_path
from meshweave.simulate.rank_timeline import RankTimeline, rank_timeline
from meshweave.simulate.result import LinkClass, busiest_links, link_classes, mean_parts
from meshweave.tune.explain import entry_of, resized, title_of
from meshweave.tune.plan import Candidate, Plan
from meshweave.tune.plan_description import planned_cluster
from meshweave.tune.product import tune_product
from meshweave.tune.ranked import num_ops
from meshweave.tune.selection import select_candidates, select_layers, select_passes, select_products

MAX_UNCONTENDED_OPS = 200_000
"""Of all ranks. Without contention a program is simulated in Python, which takes a second for some 50,000 ops."""

_STATIONARY = {"os": "output-stationary", "ls": "left-stationary", "rs": "right-stationary"}

LoweredTo = Literal["none", "rings", "chains"]
"""What collectives are written out as before a simulation: rings of permutes, or chains of messages."""


@dataclass(frozen=True)
class SimulationCase:
    """A program on a machine, to be simulated.

    Attributes:
        title: heading for a drawing of this run alone.
        name, note: what tells the run from others of the same subject, such as "MeshSlice" and "S=8".
        subject: in words, what is computed and on which machine.
        closed_form_s: a function that computes the time without contention, in seconds.
    """

    title: str
    name: str
    note: str
    subject: str
    program: Program
    machine: Machine
    closed_form_s: Callable[[], float]

    @property
    def num_ops(self) -> int:
        """Return an estimate of the number of ops: those of the first rank, times the ranks."""
        return num_ops(self.program)

    @property
    def centre(self) -> int:
        """Return the global rank in the middle of the first mesh: at index size // 2 along each of its axes."""
        mesh = self.program.meshes[0]
        position = 0
        for size in mesh.shape:
            position = position * size + size // 2
        return mesh.ranks[position]


@dataclass(frozen=True)
class SimulatedCase:
    """A case with its simulation and its critical path.

    `ranks` are the global ranks to show. `closed_form_s` are the estimated seconds without contention; None if
    they were not asked for.
    """

    case: SimulationCase
    run: Simulation
    path: CriticalPath
    ranks: tuple[int, ...]
    closed_form_s: float | None = None

    @property
    def over_closed_form(self) -> float | None:
        """Return simulated seconds over `closed_form_s`, less 1: 0.1 is a tenth slower; None without that."""
        return self.run.duration_s / self.closed_form_s - 1 if self.closed_form_s else None

    @property
    def chip(self) -> str:
        """Return the mesh coordinates of the first rank shown, in words: `chip (8, 8)`."""
        rank = self.ranks[0]
        mesh = next(mesh for mesh in self.run.program.meshes if rank in mesh)
        return f"chip ({', '.join(map(str, mesh.coords(rank)))})"

    def timeline(self, rank: int, title: str, note: str = "") -> RankTimeline:
        """Return what one global rank does over time, lane (issue queue) by lane, to be drawn.

        `title` is the heading of the drawing and `note` a text beside it.
        """
        return rank_timeline(self.run, rank, title, note)

    def link_classes(self) -> list[LinkClass]:
        """Return the loads of links in groups of one kind and direction, that with the busiest link first."""
        return link_classes(self.run)

    def busiest_links(self, count: int) -> list[LinkUse]:
        """Return the `count` links with the largest utilisation."""
        return busiest_links(self.run, count)

    def mean_parts(self) -> dict[str, float]:
        """Return {part: seconds, averaged over ranks} of what ops spend time on: `compute_s`, `wait_s`, ...

        The times of ops that overlap on a rank are added, so that the sum may exceed the duration.
        """
        return mean_parts(self.run)

    def to_json(self, num_links: int) -> dict[str, Any]:
        """Return the run as JSON values, with its `num_links` busiest links. All times are in seconds.

        Keys: titles and counts of program, cluster and run; "duration_s"; "estimate_s", the closed form if it
        was asked for; "mean" and "ranks", the parts of a rank's time; "links"; and "critical_path".
        """
        run = self.run
        return {
            "title": self.case.title,
            "what": self.case.subject,
            "program": run.program.name,
            "cluster": run.machine.cluster.name,
            "num_chips": run.machine.cluster.num_chips,
            "logical": run.machine.logical,
            "num_ranks": len(run.ranks),
            "num_ops": run.num_ops,
            "num_events": run.num_events,
            "duration_s": run.duration_s,
            **({} if self.closed_form_s is None else {"estimate_s": self.closed_form_s}),
            "mean": self.mean_parts(),
            "ranks": {str(rank): run.parts(rank) | {"exposed_s": run.exposed_s(rank)} for rank in self.ranks},
            "links": [
                {
                    "link": list(use.link),
                    "name": use.name,
                    "bytes": use.carried_bytes,
                    "bytes_per_s": use.rate_bytes_per_s,
                    "utilisation": use.utilisation,
                }
                for use in self.busiest_links(num_links)
            ],
            "critical_path": _path_json(self.path),
        }


def _path_json(path: CriticalPath) -> dict[str, Any]:
    return {
        "verdict": path.verdict,
        "parts_s": {name: to_s(ps) for name, ps in path.ps_by_category.items()},
        "transfer_s": {axis: to_s(ps) for axis, ps in path.transfer_ps_by_axis.items()},
        "slowed_s": to_s(path.slowed_ps),
        "bounds_s": {bound.name: to_s(bound.time_ps) for bound in path.bounds},
        "over_bound": path.duration_over_bound,
        "steps": [
            {
                "rank": segment.rank,
                "label": segment.label,
                "kind": segment.kind,
                "start_s": to_s(segment.start_ps),
                "end_s": to_s(segment.end_ps),
            }
            for segment in path.segments
        ],
    }


def simulate_case(
    case: SimulationCase, ranks: Sequence[int] = (), *, closed_form: bool = False, limited: bool = False
) -> SimulatedCase:
    """Simulate a case, contention included.

    Args:
        ranks: ranks to show. Default: the one in the middle of the mesh, the one that ends last, and the first.
        closed_form: whether to compute the time without contention beside it.
        limited: refuse what takes more than seconds, as `base.limits` says.

    Raises:
        ProgramError: the program cannot run, or is over a limit.
        UnsupportedError: the closed form of so long a program takes too long.
    """
    if limited and closed_form and not case.program.has_steps_within(CHECKED_STEPS):
        raise UnsupportedError(f"--against estimate: the program {CHECKED_STEPS.refusal()}")
    run = simulate(case.program, case.machine, limited=limited)
    path = critical_path(run)
    first = case.program.ranks[0]
    last = path.segments[-1].rank if path.segments else first
    shown = tuple(ranks) or tuple(dict.fromkeys((case.centre, last, first)))
    return SimulatedCase(case, run, path, shown, case.closed_form_s() if closed_form else None)


def program_case(
    program: Program, cluster: str, *, logical: bool = False, lowered_to: LoweredTo = "none"
) -> SimulationCase:
    """Return a program as a case to be simulated.

    Args:
        cluster: as for `load_cluster`; where it does not give the number of chips, there is one for each rank
            from 0 to the program's highest.
        logical: lay meshes on a torus that does not carry them, over links of several hops.
        lowered_to: what collectives are first written as: "rings" of permutes, "chains" of messages; or "none".

    Raises:
        MeshweaveError: the program is not consistent or has no mesh, or the cluster is unknown or cannot
            carry its meshes.
    """
    if not program.meshes:
        raise ProgramError("a program without a mesh runs on no ranks")
    check_header(program)  # the core takes any numbers; a tensor of negative size would take no time
    check_statements(program)
    sized = _sized(load_cluster(cluster), cluster, max(program.ranks) + 1)
    machine = Machine.of(sized, program, logical)
    shapes = " and ".join("x".join(map(str, mesh.shape)) for mesh in program.meshes[:3])
    subject = f"{shapes} mesh on {sized.num_chips} chips of {sized.name}"
    closed_form_s = partial(_uncontended_s, program, machine)
    case = SimulationCase(program.name, program.name, "", subject, program, machine, closed_form_s)
    return _lowered(case, lowered_to)


def plan_cases(
    plan: Plan,
    cluster: str | None = None,
    *,
    layer: str,
    passes: Sequence[str] | None = None,
    algorithms: Sequence[str] | None = None,
    mesh_shape: tuple[int, ...] | None = None,
    logical: bool = False,
    lowered_to: LoweredTo = "none",
) -> list[SimulationCase]:
    """Return products of a plan as cases to be simulated, by algorithm and pass.

    Args:
        cluster: name or file of a cluster; None for the plan's own. Without ":N" at its end it is resized to as
            many chips as the mesh has ranks, where it comes in that size.
        passes, algorithms: None for all.
        mesh_shape: another mesh for all algorithms, with slices tuned for it. Where no algorithms are named,
            those without such a mesh are left out.
        logical: lay meshes on a torus that does not carry them, over links of several hops.
        lowered_to: what collectives are first written as: "rings" of permutes, "chains" of messages; or "none".

    Raises:
        DescriptionError: the plan has no such layer, pass or algorithm, or the catalog no such cluster.
        LayoutError: a named algorithm, or every one, has no such mesh.
    """
    select_layers(plan, [layer])
    wanted = None if passes is None else select_passes(passes)
    whole = planned_cluster(plan) if cluster is None else load_cluster(cluster)
    cases: list[SimulationCase] = []
    for candidate in select_candidates(plan, algorithms):
        if mesh_shape is not None and not _has_mesh(candidate, mesh_shape):
            if algorithms is None:
                continue
            raise LayoutError(f"{candidate.algorithm} has no {'x'.join(map(str, mesh_shape))} mesh")
        shape = mesh_shape or candidate.mesh_shape
        sized = _sized(whole, cluster, math.prod(shape))
        cases += _candidate_cases(plan, candidate, sized, logical, layer, wanted, shape)
    if not cases:
        raise LayoutError(f"no algorithm of the plan has a {'x'.join(map(str, mesh_shape or ()))} mesh")
    return [_lowered(case, lowered_to) for case in cases]


def _has_mesh(candidate: Candidate, shape: tuple[int, ...]) -> bool:
    return shape in PRODUCTS_2D.named(candidate.entry_name).mesh_shapes(math.prod(shape))


def _candidate_cases(
    plan: Plan,
    candidate: Candidate,
    cluster: Cluster,
    logical: bool,
    layer: str,
    passes: tuple[PassName, ...] | None,
    shape: tuple[int, ...],
) -> Iterator[SimulationCase]:
    """Yield the products of one algorithm; on another mesh than the planned one, with slices tuned for it."""
    machine = mesh_machine(cluster, shape, AXES[: len(shape)], MESH, logical)
    entry, mesh = PRODUCTS_2D.named(candidate.entry_name), "x".join(map(str, shape))
    for product in select_products(plan, algorithms=[candidate.algorithm], layers=[layer], passes=passes):
        planned, pass_plan = product.layer, product.pass_plan
        sizes = planned.tokens, planned.in_features, planned.out_features
        problem = pass_problem(
            planned.stationary, pass_plan.name, *sizes, shape, plan.dtype, transposed=planned.transposed
        )
        if shape == candidate.mesh_shape:
            config = pass_plan.config
        else:
            config = tune_product(entry_of(candidate), problem, machine).config
        yield SimulationCase(
            product.title(config),
            title_of(candidate),
            str(config) if config.slice_count > 1 else "",
            f"{plan.model} {layer} {pass_plan.name.replace('_', ' ')}: {problem.m} x {problem.n} x {problem.k} "
            f"{plan.dtype}, {_STATIONARY[problem.dataflow]}, {mesh} mesh of {cluster.name}",
            entry.program(problem, config),
            machine,
            partial(_closed_form_s, entry, problem, config, machine),
        )


def _sized(cluster: Cluster, named: str | None, num_ranks: int) -> Cluster:
    """Return a cluster with `num_ranks` chips, if it comes in that size, or as it is if `named` gives its chips.

    `named` is what the cluster was loaded by; None for that of a plan.
    """
    return cluster if named is not None and gives_chips(named) else resized(cluster, num_ranks)


def _lowered(case: SimulationCase, lowered_to: LoweredTo) -> SimulationCase:
    if lowered_to == "none":
        return case
    program, machine = case.program, case.machine
    if lowered_to == "chains":
        return replace(case, program=lower_chains(program))
    axes = [f"{mesh.name}.{axis}" for mesh in program.meshes for axis in mesh.axes]
    both = all(machine.num_directions(axis) == 2 for axis in axes)
    return replace(case, program=lower_rings(program, 2 if both else 1))


def _closed_form_s(
    entry: Matmul2d, problem: Matmul2dProblem, config: Matmul2dConfig, machine: Machine
) -> float:
    return entry.estimate(problem, config, machine).total_s


def _uncontended_s(program: Program, machine: Machine) -> float:
    """Return a program's time without contention, in seconds: each op takes its closed form."""
    count = num_ops(program)
    if count > MAX_UNCONTENDED_OPS:
        raise UnsupportedError(
            f"--against estimate takes a program of at most {MAX_UNCONTENDED_OPS} ops; this has about {count}"
        )
    return estimate(program, machine).total_s
