"""Reshards on simulated hosts: the formulas, the cases of the paper, and both simulators alike."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_reshards import Case, cases

from meshweave.algorithms.reshard import (
    STRATEGIES,
    ReshardPlan,
    ReshardProblem,
    TensorMove,
    plan_reshard,
    reshard_program,
)
from meshweave.algorithms.reshard.tasks import TensorPiece
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.describe.layout import Layout, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.spec import layout_of_spec
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import HostsNetwork
from meshweave.simulate import engine
from plain_simulator import reference
from sampling import examples

CLUSTER = load_cluster("p3.8xlarge").with_chips(20)
CHIPS = 4
"""On each of its five hosts."""


def mesh(name: str, shape: tuple[int, int], first_host: int) -> Mesh:
    """A row on each host, from `first_host` on."""
    rows, columns = shape
    ranks = [CHIPS * (first_host + row) + column for row in range(rows) for column in range(columns)]
    return Mesh(name, shape, ("x", "y"), tuple(ranks))


def simulated_s(plan: ReshardPlan) -> float:
    program = reshard_program(plan)
    return engine.simulate(program, Machine.of(CLUSTER, program)).duration_s


# --- one sender ------------------------------------------------------------------------------------------


def one_sender(hosts: int, ranks: int, strategy: str) -> tuple[ReshardPlan, float]:
    """The plan, and the seconds in which one copy crosses a NIC."""
    src, dst = mesh("p", (1, 1), 0), mesh("q", (hosts, ranks), 1)
    shape = (1536, 4096)
    item = TensorMove("a", shape, "float32", layout_of_spec("RR", src), layout_of_spec("RR", dst))
    plan = plan_reshard(ReshardProblem((item,)), HostTopology.of(CLUSTER), strategy=strategy)
    return plan, 4 * math.prod(shape) / 1.25e9


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_one_sender_takes_what_the_formulas_say(hosts: int, ranks: int) -> None:
    plan, t = one_sender(hosts, ranks, "broadcast")
    (turn,) = plan.multicasts
    assert turn.chunks == (1 if hosts * ranks == 1 else 128)
    assert simulated_s(plan) == pytest.approx(t * (turn.chunks + hosts - 1) / turn.chunks, rel=0.001)
    for strategy, seconds in (("send_recv", hosts * ranks * t), ("local_all_gather", hosts * t)):
        plan, _ = one_sender(hosts, ranks, strategy)
        assert simulated_s(plan) == pytest.approx(seconds, rel=0.02)
    plan, _ = one_sender(hosts, ranks, "global_all_gather")
    seconds = t if hosts == 1 else t + t * (1 - 1 / (hosts * ranks))
    assert seconds * (1 - 1e-9) <= simulated_s(plan) <= 1.25 * seconds  # parts wait for parts


# --- the paper's cases -----------------------------------------------------------------------------------

LARGE = (1024, 1024, 512)
Sides = tuple[str, str, tuple[int, int], tuple[int, int], tuple[int, ...]]
TABLE_2: dict[int, Sides] = {
    1: ("S0RR", "S0RR", (2, 4), (2, 4), LARGE),
    2: ("RRR", "S0RR", (2, 4), (2, 4), LARGE),
    3: ("RS0R", "S0RR", (2, 4), (2, 4), LARGE),
    4: ("RS01R", "S01RR", (2, 4), (2, 4), LARGE),
    5: ("S1RR", "S0RR", (2, 4), (2, 4), LARGE),
    6: ("S0RR", "S0RR", (2, 4), (3, 4), (3072, 1024, 170)),
    7: ("S1RR", "RRR", (1, 4), (2, 4), LARGE),
    8: ("RRR", "RRR", (2, 3), (3, 2), LARGE),
    9: ("RS0R", "RRS0", (2, 4), (2, 4), LARGE),
}


@cache
def case_of(number: int, order: str) -> tuple[ReshardPlan, float]:
    """Of table 2 of AlpaComm (MLSys '23), as a plan and simulated seconds."""
    before, after, src, dst, shape = TABLE_2[number]
    first, second = mesh("p", src, 0), mesh("q", dst, src[0])
    item = TensorMove("a", shape, "float32", layout_of_spec(before, first), layout_of_spec(after, second))
    plan = plan_reshard(ReshardProblem((item,)), HostTopology.of(CLUSTER), order=order)
    return plan, simulated_s(plan)


@pytest.mark.parametrize("number", TABLE_2)
def test_the_cases_of_the_paper_take_little_more_than_the_bound(number: int) -> None:
    plan, seconds = case_of(number, "best")
    assert plan.bound_s * (1 - 1e-9) <= seconds <= 1.03 * plan.bound_s
    assert seconds == pytest.approx(plan.predicted_s, rel=0.02)


@pytest.mark.parametrize("number", [3, 4, 9])
def test_an_order_nearly_doubles_what_two_sending_hosts_get_through(number: int) -> None:
    assert case_of(number, "naive")[1] / case_of(number, "best")[1] >= 1.8


# --- both simulators -------------------------------------------------------------------------------------


def random_hosts(draw: Random, num_ranks: int) -> Cluster:
    """Rates and latencies of messages differ inside and between hosts, and from those of gathers."""

    def axis(name: str) -> NetworkAxis:
        def constants() -> CommConstants:
            return CommConstants(
                draw.choice([7, 10007, 999983]), draw.choice([0, 1e-6]), draw.choice([0, 3e-6])
            )

        own = tuple((kind, constants()) for kind in ("send_recv", "all_gather") if draw.random() < 0.7)
        return NetworkAxis(name, draw.choice([11, 10007, 1_000_003]), draw.choice([0, 2e-6]), 1, own)

    per_host = draw.randint(1, 4)
    hosts = HostsNetwork(-(-num_ranks // per_host), per_host, axis("intra"), draw.randint(1, 3), axis("nic"))
    chip = Chip("c", (("float32", 1e12),), 1e12, 1 << 30, draw.choice([10007, 1e9]))
    return Cluster("random", chip, hosts, "a test", send_buffer_bytes=draw.choice([0, 20, 1 << 20]))


@examples(40)
@given(
    cases(), st.sampled_from(sorted(STRATEGIES)), st.sampled_from(["naive", "best"]), st.integers(0, 2**32)
)
def test_both_simulators_say_the_same(case: Case, strategy: str, order: str, seed: int) -> None:
    cluster = random_hosts(Random(seed), case.problem.ranks[-1] + 1)
    case = replace(case, network=HostTopology.of(cluster))
    program = reshard_program(case.plan(strategy, order))
    machine = Machine.of(cluster, program)
    found, expected = engine.simulate(program, machine).trace(), reference.simulate(program, machine)
    by_op = [sorted(one.spans, key=lambda span: (span.rank, span.index)) for one in (found, expected)]
    assert by_op[0] == by_op[1]


def test_a_host_that_passes_on_and_sends_does_one_after_the_other() -> None:
    """Rank 0 sends to hosts 1 and 2 while rank 5, of host 1, has something for rank 1."""
    items = (
        TensorMove("a", (1024, 4096), "float32", at(0), at(4, 8)),
        TensorMove("b", (1024, 4096), "float32", at(5), at(1)),
    )
    plan = plan_reshard(ReshardProblem(items), HostTopology.of(CLUSTER))
    assert [hop for turn in plan.multicasts for hop in turn.multicast.hosts] == [(8,), (4,), (1,)]
    assert simulated_s(plan) == pytest.approx(plan.predicted_s, rel=0.02)


def at(*ranks: int) -> Layout:
    return Layout(Mesh(f"on{ranks[0]}", (len(ranks),), ("x",), ranks), (Replicate(),))


def test_naive_runs_one_task_after_another_also_from_one_sender() -> None:
    """Rank 4 sends its half only when it has the other one."""
    src, dst = Mesh("p", (2,), ("x",), (0, 4)), Mesh("q", (2,), ("x",), (4, 8))
    item = TensorMove("a", (2048, 2048), "float32", Layout(src, (Shard(0),)), Layout(dst, (Shard(0),)))
    plan = plan_reshard(ReshardProblem((item,)), HostTopology.of(CLUSTER), order="naive")
    assert simulated_s(plan) == pytest.approx(2 * 2048 * 1024 * 4 / 1.25e9, rel=0.02)


# --- packing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src_spec", "dst_spec", "is_strided"), [("S0R", "S0R", False), ("RS0", "S0R", True)]
)
def test_plans_count_what_strided_pieces_pack(src_spec: str, dst_spec: str, is_strided: bool) -> None:
    """One sender and one receiver of each message: the plan is the sum of bytes, launches and packing."""
    chip = replace(CLUSTER.chip, pack_launch_s=1e-5, pack_bytes_per_s=2.5e8)
    packs = replace(CLUSTER, chip=chip)
    src, dst = mesh("p", (2, 1), 0), mesh("q", (2, 1), 2)
    layouts = layout_of_spec(src_spec, src), layout_of_spec(dst_spec, dst)
    problem = ReshardProblem((TensorMove("a", (1024, 512), "float32", *layouts),))
    plans = [
        plan_reshard(problem, HostTopology.of(cluster), strategy="send_recv") for cluster in (CLUSTER, packs)
    ]
    program = reshard_program(plans[1])
    simulated = engine.simulate(program, Machine.of(packs, program)).duration_s
    assert plans[1].predicted_s == pytest.approx(simulated, rel=0.1)
    assert (plans[1].predicted_s > 1.5 * plans[0].predicted_s) == is_strided


def test_a_piece_is_strided_by_its_shards() -> None:
    shards = [
        ((4, 6), (4, 6), False),
        ((2, 6), (4, 6), False),
        ((4, 3), (4, 6), True),
        ((1, 3), (4, 6), False),
    ]
    for shape, shard, is_strided in shards:
        piece = TensorPiece(0, (0, 0), (0, 0), shape, math.prod(shape), shard, ())
        assert piece.is_strided == (is_strided, False)


@pytest.mark.parametrize(
    ("ranks", "src", "dst", "strategy", "low"),
    [
        (range(4), Shard(0), Shard(1), "local_all_gather", 0.9),  # inside a host: ports are shared
        (range(4), Shard(0), Replicate(), "send_recv", 0.7),
        (range(0, 16, 4), Shard(0), Shard(1), "send_recv", 0.9),  # all ranks send and receive at once
        (range(0, 16, 4), Shard(0), Replicate(), "broadcast", 0.9),
        (range(8), Shard(0), Shard(1), "send_recv", 0.95),  # a rank has messages inside and between hosts
        (range(8), Shard(0), Replicate(), "local_all_gather", 0.95),
    ],
)
def test_ranks_that_send_and_receive_take_what_the_plan_says(
    ranks: range, src: Placement, dst: Placement, strategy: str, low: float
) -> None:
    all_ranks = Mesh("m", (len(ranks),), ("x",), tuple(ranks))
    move = TensorMove("T", (1920, 1920), "float32", Layout(all_ranks, (src,)), Layout(all_ranks, (dst,)))
    plan = plan_reshard(ReshardProblem((move,)), HostTopology.of(CLUSTER), strategy=strategy)
    assert low < plan.predicted_s / simulated_s(plan) < 1.02
