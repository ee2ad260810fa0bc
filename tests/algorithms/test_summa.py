"""What is SUMMA's own: where its panels begin and end, who owns them, and what unrolling saves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import DATAFLOWS, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.summa_steps import SliceStep, slice_steps
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine, mesh_machine
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import with_axes
from meshweave.estimate import estimate_skeleton, skeleton_ps
from meshweave.estimate.chains import chain_period, launch_and_packet_ps
from meshweave.ir.program import On, Repeat
from meshweave.ir.program.ops import Broadcast, Reduce
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Transfer
from meshweave.lower import lower_chains
from meshweave.simulate import simulate
from sampling import examples, scaled

SUMMA = PRODUCTS_2D["summa"]


def _buffered(num_chips: int) -> Cluster:
    """Return a torus as in a lab: slow links without launch costs, a send buffer that takes every message."""
    cluster = replace(load_cluster(f"tpu-v4-pod:{num_chips}"), send_buffer_bytes=1 << 26)
    slow = with_axes(
        cluster.network,
        lambda axis: replace(
            axis, constants=(), launch_s=0.0, link_latency_s=1e-4, link_bytes_per_s=6.25e6, num_directions=1
        ),
    )
    return replace(cluster, network=slow, chip=cluster.chip.with_flops_per_s(1e9))


def config(turns: int, packets: int = 1) -> Matmul2dConfig:
    return Matmul2dConfig((1,) * turns, packets=packets)


@examples(300)
@given(st.data())
def test_turns_cover_the_dim_and_panels_lie_in_one_shard(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 90))
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    count = data.draw(st.integers(1, size))
    problem = Matmul2dProblem(8, 8, size, shape)
    turns = slice_steps(problem, count)
    assert len(turns) == count
    assert min(turn.width for turn in turns) > 0
    ends = [turn.start + turn.width for turn in turns]
    assert [turn.start for turn in turns] == [0, *ends[:-1]]
    assert ends[-1] == size
    for moving in (problem.horizontal, problem.vertical):
        each = problem.largest_part(size, moving.axis)
        for turn in turns:
            panels = turn.panels(problem, moving)
            assert sum(width for _, width in panels) == turn.width
            owners = [(turn.start + offset) // each for offset, _ in panels]
            assert owners == [(turn.start + offset + width - 1) // each for offset, width in panels]
            assert len(set(owners)) == len(owners)  # one broadcast per owner and turn


@pytest.mark.parametrize(
    ("shape", "count", "widths"),
    [
        ((4, 4), 4, [12] * 4),  # one shard each
        ((2, 4), 2, [24] * 2),  # unrolled: two columns, one row
        ((4, 4), 16, [3] * 16),
        ((2, 3), 6, [8] * 6),  # the common multiple, finer than the shards of both axes together
        ((2, 3), 4, [16, 8, 8, 16]),  # what these shards give
        ((4, 4), 3, [12, 24, 12]),  # no cut through a shard just to be even
        ((1, 1), 5, [9, 10, 9, 10, 10]),
    ],
)
def test_turns_end_at_shards_where_they_can(shape: tuple[int, int], count: int, widths: list[int]) -> None:
    turns = slice_steps(Matmul2dProblem(8, 8, 48, shape), count)
    assert [turn.width for turn in turns] == widths


def test_panels_of_uneven_shards() -> None:
    problem = Matmul2dProblem(8, 8, 31, (2, 3))  # rows hold 16 and 15 of k, columns 11, 11 and 9
    assert slice_steps(problem, 2) == (SliceStep(0, 16), SliceStep(16, 15))
    assert SliceStep(0, 16).panels(problem, problem.horizontal) == ((0, 11), (11, 5))
    assert SliceStep(0, 16).panels(problem, problem.vertical) == ((0, 16),)


@pytest.mark.parametrize("count", [0, 4])
def test_turns_without_elements_are_a_user_error(count: int) -> None:
    with pytest.raises(LayoutError, match=f"{count} turns over a dim of 3 elements; between 1 and 3"):
        slice_steps(Matmul2dProblem(8, 8, 3, (2, 2)), count)


@pytest.mark.parametrize("dataflow", DATAFLOWS)
def test_even_turns_are_a_loop(dataflow: str) -> None:
    """One template for all, however many: P turns of one broadcast per axis, as in the paper's figure 2."""
    program = SUMMA.program(Matmul2dProblem(64, 64, 64, (4, 4), dataflow), config(4, packets=8))  # type: ignore[arg-type]
    (where,) = program.body
    assert isinstance(where, On)
    (loop,) = where.body
    assert isinstance(loop, Repeat) and loop.count == 4
    moves = [op for op in program.ops() if isinstance(op, (Broadcast, Reduce))]
    assert [op.kind for op in moves] == (["broadcast"] * 2 if dataflow == "os" else ["broadcast", "reduce"])
    assert [str(op.root) for op in moves] == ["p", "p"]
    assert {op.packets for op in moves} == {8}


def test_synchronisations_grow_quadratically_with_the_mesh() -> None:
    """P broadcasts of P + D - 2 steps (section 2.3.3), where a gathering ring takes P - 1 in all."""
    cluster, packets = load_cluster("tpu-v4-pod:256"), 4
    for members in (4, 8, 16):
        machine = mesh_machine(cluster, (members, members), ("row", "col"))
        problem = Matmul2dProblem(4096, 4096, 4096, (members, members), "os", "bfloat16")
        sync_s = cluster.network.axis(0).comm("broadcast").sync_s
        for name, per_axis in (("summa", members * (members + packets - 2)), ("collective", members - 1)):
            chosen = config(members, packets) if name == "summa" else Matmul2dConfig()
            found = estimate_skeleton(PRODUCTS_2D[name].skeleton(problem, chosen), machine)
            assert found.sync_s == pytest.approx(2 * per_axis * sync_s)


@pytest.mark.parametrize("seed", range(scaled(6)))
def test_the_estimate_knows_that_chains_follow_each_other(seed: int) -> None:
    """Within 1 % of the simulation with contention, on meshes whose axes have links of their own."""
    draw = random.Random(seed)
    shape = draw.choice([(2, 2), (4, 4), (2, 8), (8, 4), (3, 5), (7, 2), (1, 8), (16, 4)])
    sizes = [draw.choice([1024, 4096, draw.randint(300, 9000)]) for _ in "mnk"]
    problem = Matmul2dProblem(*sizes, shape, draw.choice(DATAFLOWS), "bfloat16")
    chosen = draw.choice(list(SUMMA.candidates(problem)))
    program = SUMMA.program(problem, chosen)
    machine = Machine.of(load_cluster(f"tpu-v4-pod:{problem.num_chips}"), program)
    simulated = simulate(program, machine).duration_s
    assert SUMMA.estimate(problem, chosen, machine).total_s == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("members", [2, 3, 4, 8])
@pytest.mark.parametrize("packets", [1, 16])
def test_the_period_of_chains_is_that_which_is_followed(members: int, packets: int) -> None:
    machine = mesh_machine(load_cluster("tpu-v4-pod:8"), (1, members), ("row", "col"))
    work = Transfer("broadcast", "tp.col", members, 1 << 20, packets)
    launch_ps, packet_ps = launch_and_packet_ps(work, lambda one: price(one, machine).total_ps)

    def total(count: int) -> int:
        roots = tuple(number % members for number in range(count))
        chain = Task("b", "col", work, times=count, roots=roots)
        return skeleton_ps(Skeleton((Phase(1, (chain,)),)), lambda one: price(one, machine).total_ps)

    assert total(6) - total(5) == launch_ps + chain_period(members, packets, False) * packet_ps


@pytest.mark.parametrize(("packets", "roots"), [(1, "same"), (16, "same"), (1, "turn"), (16, "turn")])
def test_chains_from_one_root_follow_each_other_sooner_than_those_from_roots_in_turn(
    packets: int, roots: str
) -> None:
    """After D + 1 and D + 2 packets, by the theory in `estimate.chains`; the last takes P + D - 2 alone."""
    members, count = 8, 5
    work = Transfer("broadcast", "tp.col", members, 1 << 20, packets)
    chain = Task(
        "b", "col", work, times=count, roots=(0,) * count if roots == "same" else tuple(range(count))
    )
    machine = mesh_machine(load_cluster("tpu-v4-pod:8"), (1, members), ("row", "col"))
    launch_ps, packet_ps = launch_and_packet_ps(work, lambda one: price(one, machine).total_ps)
    follow = launch_ps + (packets + 1 + (roots == "turn")) * packet_ps
    alone = launch_ps + (packets + members - 2) * packet_ps
    total = skeleton_ps(Skeleton((Phase(1, (chain,)),)), lambda one: price(one, machine).total_ps)
    assert total == (count - 1) * follow + alone
    if roots == "turn":
        assert follow == launch_ps + chain_period(members, packets, False) * packet_ps


@pytest.mark.parametrize("packets", [1, 4, 16])
def test_a_send_buffer_lets_chains_follow_each_other_a_packet_sooner(packets: int) -> None:
    """After D packets from one root, which is what its link carries, and after D + 1 from roots in turn."""
    members, count = 8, 5
    cluster = _buffered(8)
    machine = mesh_machine(cluster, (1, members), ("row", "col"))
    work = Transfer("broadcast", "tp.col", members, 1 << 20, packets)
    _, packet_ps = launch_and_packet_ps(work, lambda one: price(one, machine).total_ps)

    def total(roots: tuple[int, ...]) -> int:
        chain = Task("b", "col", work, times=count, roots=roots)
        return skeleton_ps(
            Skeleton((Phase(1, (chain,)),)),
            lambda one: price(one, machine).total_ps,
            machine,
        )

    alone = (packets + members - 2) * packet_ps
    assert total((0,) * count) == pytest.approx((count - 1) * packets * packet_ps + alone, rel=0.01)
    assert total(tuple(range(count))) == pytest.approx(
        (count - 1) * (packets + 1) * packet_ps + alone, rel=0.01
    )


def test_an_idle_link_makes_up_for_its_burst() -> None:
    """A chain of one packet gains a burst on each of its hops, and never more than the packet takes."""
    members, packet_bytes = 8, 1 << 20
    work = Transfer("broadcast", "tp.col", members, packet_bytes)
    chain = Skeleton((Phase(1, (Task("b", "col", work, roots=(0,)),)),))
    bare = _buffered(8)
    took = []
    for burst_bytes in (0, packet_bytes // 4, packet_bytes // 2, 1 << 30):
        network = with_axes(bare.network, lambda axis, burst=burst_bytes: replace(axis, burst_bytes=burst))
        machine = mesh_machine(replace(bare, network=network), (1, members), ("row", "col"))
        took.append(estimate_skeleton(chain, machine).total_s)
    hop_s = packet_bytes / bare.network.axis(0).link_bytes_per_s
    hops = members - 1
    assert took[0] == pytest.approx(hops * hop_s, rel=0.01)
    assert took[1:3] == pytest.approx([hops * hop_s * 0.75, hops * hop_s * 0.5], rel=0.01)
    assert 0 <= took[3] < hop_s * 0.01


@pytest.mark.parametrize("seed", range(scaled(4)))
def test_the_estimate_of_a_lab_knows_its_send_buffer(seed: int) -> None:
    """Within 3 % of the simulation of the program as it runs there, broadcasts lowered to messages."""
    draw = random.Random(seed)
    sizes = [64 * draw.randint(8, 40) for _ in "mnk"]
    problem = Matmul2dProblem(*sizes, (4, 4), draw.choice(DATAFLOWS), "float32")
    chosen = config(draw.choice([4, 8]), draw.choice([1, 4]))
    program = lower_chains(SUMMA.program(problem, chosen))
    machine = Machine.of(_buffered(16), program)
    simulated = simulate(program, machine).duration_s
    assert SUMMA.estimate(problem, chosen, machine).total_s == pytest.approx(simulated, rel=0.03)


def test_offered_configurations_are_few() -> None:
    for shape in ((1, 1), (2, 2), (16, 16), (4, 15), (32, 8), (256, 1)):
        offered = list(SUMMA.candidates(Matmul2dProblem(4096, 4096, 4096, shape)))
        assert 1 <= len(offered) <= 40
        assert len(set(offered)) == len(offered)
    assert {c.packets for c in SUMMA.candidates(Matmul2dProblem(64, 64, 64, (2, 2)))} == {
        1
    }  # no hop to pipeline
