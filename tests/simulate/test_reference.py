"""The reference simulator: what it must get right by hand calculation, and that it is deterministic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError, ProgramError
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import SwitchNetwork, TorusNetwork
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.work import Transfer
from meshweave.lower import lower_rings
from meshweave.trace import check_order
from plain_simulator.flows import Flow, FlowTable, amount_left
from plain_simulator.reference import simulate

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))
CHIP = Chip("test", (("float32", 1e12),), 1e12, 1 << 30, 1e12)


def torus(ways: int = 1, latency_s: float = 0.0, launch_s: float = 0.0, chips: int = 4) -> Cluster:
    constants = tuple(
        (kind, CommConstants(ways * 1e9, latency_s, launch_s)) for kind in ("all_gather", "send_recv")
    )
    axes = tuple(NetworkAxis(name, 1e9, latency_s, ways, constants, launch_s) for name in ("row", "col"))  # type: ignore[arg-type]
    return Cluster("test", CHIP, TorusNetwork(axes, None, chips, True), "a test")


def program(body: str, mesh: str = '(1, 4), ("row", "col")', lanes: tuple[str, ...] = ("x", "y")) -> Program:
    text = f"""
program("test")
tp = mesh({mesh})
s = scratch((1000, 250), "float32", on=tp, slots=4)
g = scratch((1000, 1000), "float32", on=tp, slots=4)
"""
    text += "".join(f"{lane} = lane()\n" for lane in lanes)
    return parse(text + "with tp:\n" + "".join(f"    {line}\n" for line in body.strip().splitlines()))


def seconds(cluster: Cluster, body: str, **kwargs: object) -> float:
    made = program(body, **kwargs)  # type: ignore[arg-type]
    return simulate(made, Machine.of(cluster, made)).duration_s


GATHER = 'all_gather(g, s, over="tp.col", dim=1, lane=x)'


def test_a_collective_costs_launch_and_steps() -> None:
    """t_launch + (P - 1) (t_sync + shard / bw): 1 MB shards at 1 GB/s."""
    assert seconds(torus(latency_s=1e-4, launch_s=5e-4), GATHER) == pytest.approx(
        5e-4 + 3 * (1e-4 + 1e-3), abs=1e-12
    )


def test_two_ways_halve_the_transfer() -> None:
    assert seconds(torus(ways=2), GATHER) == pytest.approx(1.5e-3, abs=1e-12)


def test_lanes_overlap_and_a_lane_does_not() -> None:
    """Products in one lane, a gather in another; in one lane they follow each other."""
    matmul = "matmul(g(1), g(2), g(3), lane={})"
    one, two = (f"{GATHER}\n{matmul.format(lane)}" for lane in ("x", "y"))
    assert seconds(torus(), one) == pytest.approx(3e-3 + 2e-3, abs=1e-12)
    assert seconds(torus(), two) == pytest.approx(3e-3, abs=1e-12)


def test_two_collectives_on_one_axis_share_its_links() -> None:
    both = GATHER + '\nall_gather(g(1), s(1), over="tp.col", dim=1, lane=y)'
    assert seconds(torus(), both) == pytest.approx(6e-3, abs=1e-12)


def test_collectives_on_different_axes_do_not_meet() -> None:
    mesh = '(4, 4), ("row", "col")'
    both = GATHER + '\nall_gather(g(1)[:, :], s(1), over="tp.row", dim=1, lane=y)'
    assert seconds(torus(chips=16), both, mesh=mesh) == pytest.approx(3e-3, abs=1e-12)


def test_products_of_two_lanes_share_the_engine() -> None:
    both = "matmul(g, g(2), g(3), lane=x)\nmatmul(g(1), g(2), g(3), lane=y)"
    assert seconds(torus(), both) == pytest.approx(4e-3, abs=1e-12)


def test_a_ring_step_by_step_costs_what_the_collective_costs() -> None:
    """With equal shards: the same launch, steps and bytes, and the own part's copy besides."""
    cluster = torus(latency_s=1e-4, launch_s=5e-4)
    whole = program(GATHER)
    ring = lower_rings(whole)
    machine = Machine.of(cluster, whole)
    copy_s = 2 * 1e6 / 1e12
    assert simulate(ring, machine).duration_s == pytest.approx(
        simulate(whole, machine).duration_s + copy_s, abs=1e-12
    )


def test_a_permute_by_two_crosses_two_links() -> None:
    """Each link carries two of the four messages, so they run at half rate."""
    text = 'permute(s(1), s, over="tp.col", shift={}, lane=x)'
    assert seconds(torus(), text.format(1)) == pytest.approx(1e-3, abs=1e-12)
    assert seconds(torus(), text.format(2)) == pytest.approx(2e-3, abs=1e-12)


def test_a_switch_port_is_shared_by_senders() -> None:
    axis = NetworkAxis("port", 1e9)
    cluster = Cluster("test", CHIP, SwitchNetwork(axis, 4), "a test")
    made = parse("""
program("incast")
tp = mesh((4,), ("x",))
s = scratch((1000, 250), "float32", on=tp, slots=4)
one = lane(order="ready", width=3)
with tp:
    for r in range(3):
        if rank == r + 1:
            send(s, peer=0, tag=r, lane=one)
        if rank == 0:
            recv(s(r + 1), peer=r + 1, tag=r, lane=one)
""")
    assert simulate(made, Machine.of(cluster, made)).duration_s == pytest.approx(3e-3, abs=1e-11)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_goldens_run_in_the_order_the_program_demands(path: Path) -> None:
    made = parse(path.read_text())
    flow = analyse(made)
    machine = Machine.of(load_cluster("tpu-v4-pod:16"), made)
    trace = simulate(flow, machine)
    assert check_order(trace, flow) > 0
    assert simulate(flow, machine) == trace


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_send_buffer_only_frees_senders(path: Path) -> None:
    """Nothing takes longer in fifo lanes where messages do not meet, and the program's order is kept."""
    made = parse(path.read_text())
    flow = analyse(made)
    cluster = load_cluster("tpu-v4-pod:16")
    buffered = replace(cluster, send_buffer_bytes=1 << 30)
    plain, early = (simulate(flow, Machine.of(c, made), contention=False) for c in (cluster, buffered))
    check_order(early, flow)
    if all(lane.order == "fifo" for lane in made.lanes):
        assert all(early.span_of[node].end_ps <= plain.span_of[node].end_ps for node in flow.nodes())
    if not {"send", "permute"} & {span.kind for span in plain.spans}:
        assert early == plain
    check_order(simulate(flow, Machine.of(buffered, made)), flow)


def test_a_send_that_the_buffer_takes_ends_at_once_and_its_receive_does_not() -> None:
    made = parse("""
program("pair")
tp = mesh((2,), ("x",))
s = scratch((1000, 250), "float32", on=tp, slots=2)
one = lane()
with ranks(0):
    send(s, peer=1, lane=one)
with ranks(1):
    recv(s(1), peer=0, lane=one)
""")
    for room, sent_s in ((0, 1.1e-3), (999_999, 1.1e-3), (1_000_000, 1e-4)):
        cluster = replace(torus(latency_s=1e-4, chips=2), send_buffer_bytes=room)
        trace = simulate(made, Machine.of(cluster, made))
        assert trace.span_of[0, 0].end_ps / 1e12 == pytest.approx(sent_s, abs=1e-12)
        assert trace.span_of[1, 0].end_ps / 1e12 == pytest.approx(1.1e-3, abs=1e-12)


def test_a_permute_lasts_until_its_own_part_has_come_where_the_buffer_takes_what_it_sends() -> None:
    """Rank 3 begins 2 ms late: rank 2 cannot send to it before, and rank 0 has nothing from it before."""
    body = 'if rank == 3:\n    matmul(g(1), g(2), g(3), lane=x)\npermute(s(1), s, over="tp.col", shift=1, lane=x)'
    made = program(body)
    ends = []
    for room in (0, 1 << 20):
        trace = simulate(made, Machine.of(replace(torus(), send_buffer_bytes=room), made))
        ends.append([max(s.end_ps for s in trace.spans if s.rank == rank) / 1e9 for rank in range(4)])
    assert ends[0] == pytest.approx([3.0, 1.0, 3.0, 3.0], abs=1e-6)
    assert ends[1] == pytest.approx([3.0, 1.0, 2.0, 3.0], abs=1e-6)


def test_equal_inputs_give_equal_traces_of_a_product() -> None:
    problem = Matmul2dProblem(512, 384, 640, (2, 4), "rs", "bfloat16")
    made = lower_rings(PRODUCTS_2D["meshslice"].program(problem, Matmul2dConfig((1, 2, 1))), 2)
    machine = Machine.of(load_cluster("tpu-v4-pod:8"), made)
    first = simulate(made, machine)
    assert simulate(made, machine).to_json() == first.to_json()


def test_a_deadlock_is_told_not_waited_for() -> None:
    made = parse("""
program("stuck")
tp = mesh((2,), ("x",))
s = scratch((4,), "float32", on=tp, slots=2)
one = lane()
with ranks(0):
    send(s, peer=1, lane=one)
    recv(s(1), peer=1, lane=one)
with ranks(1):
    send(s, peer=0, lane=one)
    recv(s(1), peer=0, lane=one)
""")
    with pytest.raises(ProgramError, match="deadlock"):
        simulate(made, Machine.of(torus(), made))


def test_too_many_ranks_for_the_cluster() -> None:
    with pytest.raises(LayoutError, match="16 ranks do not fit the 8 chips"):
        made = program(GATHER, mesh='(4, 4), ("row", "col")')
        Machine.of(torus(chips=8), made)


def test_max_min_shares_are_fair_and_use_what_caps_leave() -> None:
    """Three flows on a link of 90; one is capped at 10, the others get 40 each."""
    table = FlowTable({"link": 90}.__getitem__)  # type: ignore[arg-type]
    flows = [Flow({"link": 1}, cap, amount_left(1)) for cap in (10, 1000, 1000)]
    for flow in flows:
        table.start(flow)
    assert table.share(0) == flows
    assert [flow.rate for flow in flows] == [10, 40, 40]
    table.end(flows[0])
    assert table.share(0) == flows[1:]
    assert [flow.rate for flow in flows[1:]] == [45, 45]


def test_a_flow_uses_its_weight_times_its_rate() -> None:
    """Of 90 units, weights 2 and 1 leave a share of 30 to both; of a link of 25 one has less, the other gains."""
    table = FlowTable({"memory": 90, "link": 25}.__getitem__)  # type: ignore[arg-type]
    heavy, light = Flow({"memory": 2}, 1000, amount_left(1)), Flow({"memory": 1}, 1000, amount_left(1))
    table.start(heavy)
    table.start(light)
    table.share(0)
    assert (heavy.rate, light.rate) == (30, 30)
    table.end(heavy)
    slow = Flow({"memory": 2, "link": 1}, 1000, amount_left(1))
    table.start(slow)
    table.share(0)
    assert (slow.rate, light.rate) == (25, 40)


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "reduce", "all_to_all", "fence", "permute"])
def test_every_kind_of_transfer_has_a_price(kind: str) -> None:
    machine = Machine.of(torus(latency_s=1e-6), program(GATHER))
    cost = price(Transfer(kind, "tp.col", 4, 1000, packets=2), machine)
    assert cost.total_ps > 0
    assert price(Transfer(kind, "tp.col", 1, 1000), machine).amount == 0


def test_broadcast_is_pipelined_in_packets() -> None:
    """D packets over P - 1 hops take P + D - 2 steps of size / D bytes."""
    machine = Machine.of(torus(), program(GATHER))
    assert price(Transfer("broadcast", "tp.col", 4, 1000, packets=10), machine).amount == 12 * 100
