"""The core says what the reference says, op by op and to the picosecond."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from random_programs import random_cluster, random_machine, random_program

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import MeshweaveError, ProgramError
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.lower import lower_chains, lower_rings
from meshweave.simulate import engine
from meshweave.simulate.columns import Columns
from plain_simulator import reference
from sampling import examples

LONGEST_PS = 1 << 59
"""About a week; the core refuses runs that are not much longer, whose numbers leave 64 bits."""
SLOW_TO_DRAW = [HealthCheck.too_slow]
quick = examples(300, suppress_health_check=SLOW_TO_DRAW)
slow = examples(10_000, suppress_health_check=SLOW_TO_DRAW)
seeds = st.integers(0, 2**63)

SMALL = (1, 2, 3, 5, 7, 11, 17, 29, 53)
"""Rates at which every rounding shows."""


def spans(simulate: Any, program: Program, machine: Machine) -> Any:
    """All spans, or the class of the error: words may differ."""
    try:
        actual = simulate(program, machine)
    except MeshweaveError as error:
        return type(error)
    trace = actual.trace() if simulate is engine.simulate else actual
    if (
        max((span.end_ps for span in trace.spans), default=0) > LONGEST_PS
    ):  # the core refuses what takes years
        return ProgramError
    return sorted(trace.spans, key=lambda span: (span.rank, span.index))


def agree(program: Program, machine: Machine) -> None:
    actual, expected = (spans(one, program, machine) for one in (engine.simulate, reference.simulate))
    if actual != expected:  # a diff of all spans would take longer than the test
        pairs = (
            zip(actual, expected, strict=True)
            if isinstance(actual, list) and isinstance(expected, list)
            else ()
        )
        pytest.fail(str(next((pair for pair in pairs if pair[0] != pair[1]), (actual, expected)))[:1000])


def agree_on_random(seed: int, num_statements: int) -> None:
    draw = random.Random(seed)
    program = random_program(draw, num_statements)
    machine = random_machine(draw, program)
    if machine is not None:
        agree(program, machine)


@quick
@given(seeds, st.sampled_from([2, 5, 10]))
@example(1756, 30)  # an exchange over a whole mesh whose ranks are one axis of it
def test_random_programs_take_as_long_as_in_the_reference(seed: int, num_statements: int) -> None:
    agree_on_random(seed, num_statements)


@quick
@given(seeds)
def test_rates_of_a_few_units_are_rounded_alike(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("random_programs.RATES", SMALL)
        agree_on_random(seed, 6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@slow
@given(seeds, st.sampled_from([3, 8, 30]))
def test_many_random_programs_take_as_long_as_in_the_reference(seed: int, num_statements: int) -> None:
    agree_on_random(seed, num_statements)


# --- algorithms -----------------------------------------------------------------------------------------

MESHES = {
    name: [shape for n in range(1, 13) for shape in entry.mesh_shapes(n) if max(shape) <= 6]
    for name, entry in PRODUCTS_2D.items()
}


def algorithm(draw: random.Random) -> Program:
    """An entry of the table on one of its meshes, as it is or lowered."""
    entry = PRODUCTS_2D[draw.choice(sorted(PRODUCTS_2D))]
    sizes = [draw.choice([draw.randint(1, 40), 48, 1000 + draw.randint(0, 40)]) for _ in range(3)]
    shape = draw.choice(MESHES[entry.name])
    dtype = draw.choice(["float32", "bfloat16"])
    problem = Matmul2dProblem(sizes[0], sizes[1], sizes[2], shape, draw.choice(entry.dataflows), dtype)
    widths = tuple(draw.randint(1, 3) for _ in range(draw.randint(1, min(5, problem.sliced_size))))
    config = Matmul2dConfig(
        widths, draw.choice([1, 2, 3, 8]), draw.choice([1, 2, 5]), draw.choice(["row", "col"])
    )
    program = entry.program(problem, config)
    match draw.randrange(4):
        case 0:
            return lower_rings(program, 1)
        case 1:
            return lower_rings(program, 2)
        case 2:
            return lower_chains(program)
    return program


@examples(150, suppress_health_check=SLOW_TO_DRAW)
@given(seeds)
@example(2152)  # chains over a tree whose groups share its links
def test_algorithms_take_as_long_as_in_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    program = algorithm(draw)
    cluster = (
        load_cluster("tpu-v4-pod:16") if draw.random() < 0.2 else random_cluster(draw, len(program.ranks))
    )
    machine = random_machine(draw, program, cluster)
    if machine is not None:
        agree(program, machine)


# --- what else must hold --------------------------------------------------------------------------------


@examples(150, suppress_health_check=SLOW_TO_DRAW)
@given(seeds)
def test_edges_are_those_of_the_dataflow(seed: int) -> None:
    program = random_program(random.Random(seed))
    try:
        before = analyse(program).predecessors
    except ProgramError:
        return
    core = engine.Core(Columns(program).data)
    for position, rank in enumerate(program.ranks):
        edges: list[list[int]] = [[] for _ in before[rank]]
        for op, other in core.edges(position).reshape(-1, 2).tolist():
            edges[op].append(other)
        assert tuple(map(tuple, edges)) == before[rank]


@examples(40, suppress_health_check=SLOW_TO_DRAW)
@given(seeds)
def test_two_runs_are_equal_and_no_link_is_used_beyond_its_rate(seed: int) -> None:
    """On machines that are equal but not the same."""
    draw = random.Random(seed)
    program = algorithm(draw)
    first, second = (random_machine(random.Random(seed), program) for _ in range(2))
    if first is None or second is None:
        return
    one, other = engine.simulate(program, first), engine.simulate(program, second)
    assert one.outputs.keys() == other.outputs.keys()
    for name, values in one.outputs.items():
        np.testing.assert_array_equal(values, other.outputs[name])
    assert all(use.utilisation <= 1 for use in one.links)
    assert len({use.name for use in one.links}) == len(one.links)


SHARED = """
program("bytes")
tp = mesh((2, 4), ("row", "col"))
s = scratch((6, 10), "float32", on=tp)
g = scratch((6, 40), "float32", on=tp)
x = lane()
y = lane()
with tp:
    all_gather(g, s, over="tp.col", dim=1, lane=x)
    permute(s, g[:, :10], over="tp.col", shift=3, lane=y)
    reduce_scatter(s, g[:, :20], over="tp.row", dim=1, lane=x)
    all_to_all(g[:, :8], g[:, 8:16], over="tp.col", split_dim=1, concat_dim=1, lane=y)
    broadcast(s, s, over="tp.col", root=1, packets=3, lane=x)
    if tp.row == 0:
        send(s[:2, :], peer=rank + 4, lane=y)
    if tp.row == 1:
        recv(s[:2, :], peer=rank - 4, lane=y)
"""


def expected_bytes(machine: Machine) -> Counter[Any]:
    """Of `SHARED`, message by message."""
    moved: Counter[Any] = Counter()

    def message(source: int, target: int, amount: int) -> None:
        for link in machine.path(source, target):
            moved[link] += amount

    for row in range(2):
        group = [4 * row + col for col in range(4)]
        for at, rank in enumerate(group):
            following = group[(at + 1) % 4]
            message(rank, following, 3 * 6 * 10 * 4)  # a gather passes on three parts
            message(rank, group[(at + 3) % 4], 6 * 10 * 4)
            for other in group:
                message(rank, other, 6 * 2 * 4)
            if at != 0:  # a broadcast from place 1 ends at place 0
                message(rank, following, 3 * 6 * 10 * 4 // 3)
    for col in range(4):
        for rank in (col, col + 4):
            message(rank, (rank + 4) % 8, 6 * 10 * 4)
        message(col, col + 4, 2 * 10 * 4)
    return moved


@pytest.mark.parametrize("seed", range(12))
def test_links_carry_what_the_messages_weigh(seed: int) -> None:
    program = parse(SHARED)
    description = random_cluster(random.Random(seed), 8)
    machine = Machine.of(description, program, logical=True)
    actual = engine.simulate(program, machine)
    ways = {machine.num_directions(name) for name in ("tp.row", "tp.col")}
    carried = Counter({use.link: use.carried_bytes for use in actual.links})
    expected = expected_bytes(machine)
    if machine.has_rails:  # collectives go over all NICs of a host by routes of their own
        carried, expected = (
            Counter({link: count for link, count in of.items() if link[0] in ("out", "in")})
            for of in (carried, expected)
        )
    if ways == {1}:
        assert carried == expected
    else:  # two-way rings send half of a part each way: on a ring of links the same in total
        assert carried.total() == expected.total()


GATHER = """program("gather")
t = mesh((16,), ("r",))
X = tensor((16 * 4096,), "float32")
x = input(X, t[S(0)])
y = output(X, t[R])
net = lane()
with t:
    all_gather(y, x, over="t.r", dim=0, lane=net)
"""


def test_the_nics_of_a_host_carry_the_bytes_of_the_ring() -> None:
    program = parse(GATHER)
    uses = {
        use.link: use
        for use in engine.simulate(program, Machine(load_cluster("dgx-h100:16"), program.meshes)).links
    }
    out = uses["nics-out", 0, 0, 0]
    assert out.rate_bytes_per_s == 8 * 50_000_000_000
    assert out.carried_bytes == 15 * 4096 * 4


def test_links_are_those_of_this_run() -> None:
    programs = [parse(SEND.format(target=target)) for target in (1, 2, 1)]
    machine = Machine(load_cluster("dgx-h100:4"), programs[0].meshes)
    first, _, again = (
        [(each.link, each.carried_bytes) for each in engine.simulate(program, machine).links]
        for program in programs
    )
    assert first == again and all(carried for _, carried in first)


SEND = """program("send")
ranks = mesh((4,), ("x",))
X = tensor((4,), "float32")
x = input(X, ranks[R])
y = scratch((4,), "float32", on=ranks)
wire = lane()
with ranks(0):
    send(x[:], peer={target}, lane=wire)
with ranks({target}):
    recv(y[:], peer=0, lane=wire)
"""
