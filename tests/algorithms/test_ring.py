"""Rings beside products: parts travel both ways, and the steps of one turn are one operation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.ring_costs import iteration_counts
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import load_cluster
from meshweave.estimate import skeleton_ps
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Permute
from meshweave.ir.program.release import CollectiveStep
from meshweave.ir.work import work_of
from plain_simulator.reference import simulate


def ring(parts: int, turns: int, dataflow: str = "os", name: str = "wang", size: int = 64) -> Program:
    problem = Matmul2dProblem(size, size, size, (1, parts), dataflow)  # type: ignore[arg-type]
    return PRODUCTS_2D[name].program(problem, Matmul2dConfig((1,) * turns))


def moves(program: Program, lane: str) -> list[Permute]:
    ops = (bound.op for bound in program.ops_on_rank(0))
    return [op for op in ops if isinstance(op, Permute) and op.lane == lane]


@pytest.mark.parametrize("turns", [2, 3, 4, 5])
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
@pytest.mark.parametrize("parts", [8, 9])
def test_as_many_launches_as_turns_that_move_something(dataflow: str, turns: int, parts: int) -> None:
    """MeshSlice, section 4.2: turn 0 moves nothing, and each further one pays for a launch once per direction."""
    program = ring(parts, turns, dataflow)
    machine = Machine.of(load_cluster(f"tpu-v4-pod:{parts}"), program)
    left_out = int(parts == 8 and turns > 3)  # the last turn is one step, and there is none of it backwards
    for lane, steps, without in (("col", 4, 0), ("col_back", (parts - 1) // 2, left_out)):
        ops = moves(program, lane)
        launches = [price(work_of(program, op), machine).launch_ps for op in ops]
        assert len(ops) == steps
        assert len([launch for launch in launches if launch]) == turns - 1 - without


@pytest.mark.parametrize("dataflow", ["os", "ls"])
def test_turns_are_dealt_the_same_steps_of_both_directions(dataflow: str) -> None:
    program = ring(8, 3, dataflow)
    pair = [CollectiveStep("send_recv", index, 2, num_directions=2) for index in (0, 1)]
    assert [op.step for op in moves(program, "col")] == 2 * pair
    assert [op.step for op in moves(program, "col_back")] == [
        *pair,
        CollectiveStep("send_recv", 0, 1, num_directions=2),
    ]
    assert (
        len({op.shift for op in moves(program, "col")} | {op.shift for op in moves(program, "col_back")}) == 2
    )


@pytest.mark.parametrize("dataflow", ["os", "ls"])
def test_two_parts_take_one_plain_step(dataflow: str) -> None:
    program = ring(2, 4, dataflow)
    assert [op.step for op in moves(program, "col")] == [None]
    assert [lane.name for lane in program.lanes if lane.name.startswith("col")] == ["col"]


def test_no_more_turns_than_steps_and_home() -> None:
    assert [iteration_counts(parts) for parts in (1, 2, 3, 4, 5, 8)] == [
        [1],
        [2],
        [2],
        [2, 3],
        [2, 3],
        [2, 3, 4, 5],
    ]
    assert ring(6, 4) == ring(6, 9)


@pytest.mark.parametrize("overlap", ["row", "col"])
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
@pytest.mark.parametrize("turns", [2, 3])
def test_the_other_collective_waits_for_products_of_both_directions(
    dataflow: str, overlap: str, turns: int
) -> None:
    problem = Matmul2dProblem(1200, 1200, 1200, (5, 4), dataflow)  # type: ignore[arg-type]
    config = Matmul2dConfig((1,) * turns, overlap=overlap)  # type: ignore[arg-type]
    program = PRODUCTS_2D["wang"].program(problem, config)
    pod = load_cluster("tpu-v4-pod:20")
    machine = Machine.of(replace(pod, chip=replace(pod.chip, gemm_tile=None)), program)
    skeleton = PRODUCTS_2D["wang"].skeleton(problem, config)
    estimated = skeleton_ps(skeleton, lambda work: price(work, machine).total_ps)
    simulated = max(span.end_ps for span in simulate(program, machine, contention=False).spans)
    assert abs(estimated - simulated) <= 20


@pytest.mark.parametrize("name", ["wang", "tp1d", "fsdp"])
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_links_let_both_directions_pass(name: str, dataflow: str) -> None:
    """By simulation a ring takes what its closed form says: no direction waits for the other's links."""
    program = ring(8, 3, dataflow, name, 1 << 10)
    machine = Machine.of(load_cluster("tpu-v4-pod:8"), program)
    alone, met = (
        simulate(program, machine, contention=contention).duration_s for contention in (False, True)
    )
    assert met == pytest.approx(alone, rel=1e-3)


def test_the_memory_of_a_rank_is_that_of_its_place_on_the_mesh() -> None:
    ranks = (3, 2, 1, 0)
    problem, config = Matmul2dProblem(7, 9, 5, (2, 2), ranks=ranks), Matmul2dConfig()
    entry = PRODUCTS_2D["wang"]
    program = entry.program(problem, config)
    assert [entry.peak_bytes(problem, config, rank) for rank in ranks] == [
        peak_bytes(program, r) for r in ranks
    ]


@pytest.mark.parametrize("name", ["wang", "tp1d", "fsdp"])
@pytest.mark.parametrize("parts", [2, 3, 4, 5, 6, 9])
def test_the_memory_of_a_ring_is_that_of_its_program(name: str, parts: int) -> None:
    entry = PRODUCTS_2D[name]
    for shape in (
        shape for size in (parts, 2 * parts) for shape in entry.mesh_shapes(size) if parts in shape
    ):
        for dataflow, size in itertools.product(entry.dataflows, (1, 2 * parts, 2 * parts + 1)):
            problem = Matmul2dProblem(size, size, size, shape, dataflow)
            for config in entry.candidates(problem):
                assert entry.peak_bytes(problem, config) == peak_bytes(entry.program(problem, config), 0)
