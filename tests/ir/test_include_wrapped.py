"""A program inside of another is equal to itself in all readings; two side by side do not slow each other down."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from including import side_by_side, wrapped

from meshweave.algorithms.contract import Algorithm
from meshweave.algorithms.table import ALGORITHMS
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.estimate import estimate
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.ir.skeleton import skeleton_of
from meshweave.ir.work import traffic
from meshweave.lower import lower_chains, lower_one_sided, lower_rings, read_in_place, write_out_per_rank
from meshweave.simulate import simulate
from plain_simulator.reference import simulate as reference_simulate
from sampling import mostly_slow

Entry = Algorithm[Any, Any]
PROVED = {name: entry for name, entry in ALGORITHMS.items() if entry.is_proved}


def draw_case(entry: Entry) -> tuple[Any, Program]:
    """One problem and the program of one candidate, others in every run."""
    problem = random.choice(list(entry.examples()))
    return problem, entry.program(problem, random.choice(list(entry.candidates(problem))))


def cluster_for(program: Program) -> Cluster:
    return load_cluster(f"tpu-v4-pod:{max(max(program.ranks) + 1, 4)}")


def assert_wrapped_is_equal(program: Program) -> None:
    outer = wrapped(program)
    assert parse(to_text(outer)) == outer
    assert [note.removeprefix("inner: ") for note in validate(outer).skipped] == list(
        validate(program).skipped
    )
    for rank in program.ranks:
        assert traffic(outer, rank) == traffic(program, rank)
        assert peak_bytes(outer, rank) == peak_bytes(program, rank)
    machine = Machine.of(cluster_for(program), program, logical=True)
    outer_machine = Machine.of(cluster_for(program), outer, logical=True)
    # A mesh that an included program brings along has another name where that program is included in turn.
    places = [
        [(mesh.axes, mesh.shape, mesh.ranks) for mesh in each.meshes] for each in (machine, outer_machine)
    ]
    assert places[0] == places[1]
    assert estimate(outer, outer_machine) == estimate(program, machine)
    inner_run, outer_run = simulate(program, machine), simulate(outer, outer_machine)
    for name in ("issued_ps", "ended_ps"):
        np.testing.assert_array_equal(outer_run.outputs[name], inner_run.outputs[name])


def assert_same_bits(entry: Entry, problem: Any, program: Program, outer: Program) -> None:
    draw = np.random.default_rng(0)
    inputs = {  # not exact, so that another order of additions would show
        name: (value * draw.random(value.shape)).astype(value.dtype)
        for name, value in entry.random_inputs(problem).items()
    }
    functions = entry.functions(problem)
    outputs = run_numpy(program, inputs, calls=functions).outputs
    for name, value in run_numpy(outer, inputs, calls=functions).outputs.items():
        assert value.tobytes() == outputs[name].tobytes()


@pytest.mark.parametrize("entry", mostly_slow(PROVED.values(), 20), ids=lambda entry: entry.name)
def test_wrapped_program_is_equal_to_itself(entry: Entry) -> None:
    problem, program = draw_case(entry)
    assert_wrapped_is_equal(program)
    assert_same_bits(entry, problem, program, wrapped(program))


@pytest.mark.slow
@pytest.mark.parametrize("entry", PROVED.values(), ids=PROVED)
def test_every_wrapped_program_is_equal_to_itself(entry: Entry) -> None:
    for problem in entry.examples():
        for config in entry.candidates(problem):
            program = entry.program(problem, config)
            assert_wrapped_is_equal(program)
            assert_same_bits(entry, problem, program, wrapped(program))


@pytest.mark.parametrize("entry", mostly_slow(PROVED.values(), 30), ids=lambda entry: entry.name)
def test_ranks_may_be_any(entry: Entry) -> None:
    """On ranks in any order, with gaps: the same numbers, and each rank moves what the one it stands for moves."""
    problem, program = draw_case(entry)
    ranks = random.sample(range(2 * max(program.ranks) + 2), len(program.ranks))
    outer = wrapped(program, dict(zip(program.ranks, ranks, strict=True)))
    assert [note.removeprefix("inner: ") for note in validate(outer).skipped] == list(
        validate(program).skipped
    )
    assert_same_bits(entry, problem, program, outer)
    for rank, stands_for in zip(ranks, program.ranks, strict=True):
        assert traffic(outer, rank) == traffic(program, stands_for)


@pytest.mark.parametrize("name", ["collective", "summa", "cannon"])
def test_lowering_reaches_into_includes(name: str) -> None:
    entry = ALGORITHMS[name]
    problem = next(entry.examples())
    program = entry.program(problem, next(entry.candidates(problem)))
    machine = Machine.of(cluster_for(program), program, logical=True)
    for lower in (lambda p: lower_rings(p, 2), lower_chains):
        outer, lowered = lower(wrapped(program)), lower(program)
        assert outer.includes and [op.kind for op in outer.expanded.ops()] == [
            op.kind for op in lowered.ops()
        ]
        assert validate(outer).skipped == ()
        assert simulate(outer, machine).duration_s == simulate(lowered, machine).duration_s


def test_what_works_rank_by_rank_works_on_the_expanded_program() -> None:
    entry = ALGORITHMS["universal"]
    problem = next(entry.examples())
    program = entry.program(problem, next(entry.candidates(problem)))
    for lower in (lower_one_sided, write_out_per_rank, read_in_place):
        outer_ops, ops = (
            [(rank, bound.op.kind) for rank in p.ranks for bound in p.ops_on_rank(rank)]
            for p in (lower(wrapped(program)), lower(program))
        )
        assert outer_ops == ops


def test_skeleton_of_a_wrapped_program_has_the_same_work() -> None:
    entry = ALGORITHMS["collective"]
    problem = next(entry.examples())
    program = entry.program(problem, next(entry.candidates(problem)))
    works = [
        [task.work for phase in skeleton_of(p).phases for task in phase.tasks]
        for p in (program, wrapped(program))
    ]
    assert works[0] == works[1] != []


@pytest.mark.parametrize(
    ("left", "right"), [("collective", "meshslice"), ("summa", "cannon"), ("1f1b", "wang")]
)
def test_two_side_by_side_take_the_time_of_the_longer(left: str, right: str) -> None:
    """On a switch, where ranks share no link; both simulators and the estimate."""
    programs = []
    for name in (left, right):
        entry = ALGORITHMS[name]
        problem = next(entry.examples())
        programs.append(entry.program(problem, next(entry.candidates(problem))))
    both = side_by_side(*programs)
    cluster = replace(load_cluster("dgx-h100:64"), name="wide")
    assert validate(both).skipped == ()
    machine = Machine.of(cluster, both)
    alone = [Machine.of(cluster, program) for program in programs]
    for time_of in (
        lambda p, m: estimate(p, m).total_s,
        lambda p, m: reference_simulate(p, m).duration_s,
        lambda p, m: simulate(p, m).duration_s,
    ):
        times = [time_of(program, its) for program, its in zip(programs, alone, strict=True)]
        assert time_of(both, machine) == max(times) > 0
