"""The parts of an op's time are those that it was priced with, on links between hosts and inside them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from random_programs import random_machine, random_program

from meshweave.algorithms.step.compose import step
from meshweave.algorithms.step.program import simulate_step
from meshweave.base.errors import LayoutError, MeshweaveError, ProgramError
from meshweave.base.units import to_ps
from meshweave.cost.machine import Machine
from meshweave.cost.packing import message_price, op_price
from meshweave.cost.price import Price
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.host import HostRates
from meshweave.estimate.uncontended import estimate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Recv, Send
from meshweave.ir.program.parse import parse
from meshweave.ir.work import work_of
from meshweave.simulate.critical import critical_path
from meshweave.simulate.engine import simulate
from meshweave.simulate.rank_timeline import rank_timeline
from plain_simulator.issue import is_joined, issue_ps

ALONE = {
    "a gather": 'all_gather(g, s, over="tp.x", dim=1, lane=l)',
    "a gather in a host": 'with ranks(0, 1, 2, 3):\n    all_gather(g[:, :1024], s, over="four.x", dim=1, lane=l)',
    "a sum": 'all_reduce(g, g, over="tp.x", lane=l)',
    "a message": "if tp.x == 0:\n    send(s, peer={far}, lane=l)\nif tp.x == {far}:\n    recv(s, peer=0, lane=l)",
    "a packed message": "if tp.x == 0:\n    send(s[:, :7], peer={far}, lane=l)\n"
    "if tp.x == {far}:\n    recv(s[:, 7:14], peer=0, lane=l)",
    "a put": "if tp.x == 0:\n    put(at({far}, s), s, lane=l)",
    "a get": "if tp.x == 0:\n    get(s, at({far}, s), lane=l)",
    "an addition": "if tp.x == 0:\n    accumulate(at({far}, s), s, lane=l)",
    "an addition at home": "if tp.x == 0:\n    accumulate(at(0, s), s(1), lane=l)",
}


def program(body: str) -> Program:
    text = """
program("alone")
tp = mesh((16,), ("x",))
four = mesh((4,), ("x",))
s = scratch((1024, 256), "bfloat16", on=tp, slots=2)
g = scratch((1024, 4096), "bfloat16", on=tp)
l = lane()
with tp:
"""
    return parse(text + "".join(f"    {line}\n" for line in body.splitlines()))


def priced(made: Program, machine: Machine) -> Price:
    """Of the first op of rank 0."""
    op = made.ops_on_rank(0)[0].op
    if not isinstance(op, Send):
        return op_price(work_of(made, op), op, 0, machine)
    assert isinstance(op.peer, int)
    (recv,) = (bound.op for bound in made.ops_on_rank(op.peer))
    assert isinstance(recv, Recv)
    return message_price(made, op, recv, (0, op.peer), machine)


@pytest.mark.parametrize(
    "cluster", ["dgx-h100:16", "a3-mega:16", "gb200-nvl72:16", "pvc-node:16", "tpu-v4-pod:16"]
)
@pytest.mark.parametrize("far", [1, 11])
@pytest.mark.parametrize("name", sorted(ALONE))
def test_an_op_alone_has_the_parts_of_its_price(name: str, far: int, cluster: str) -> None:
    described = load_cluster(cluster)
    described = replace(described, chip=replace(described.chip, pack_launch_s=3e-6, pack_bytes_per_s=1e10))
    made = program(ALONE[name].format(far=far))
    machine = Machine.of(described, made, logical=True)
    run, cost = simulate(made, machine), priced(made, machine)
    parts = {part: to_ps(seconds) for part, seconds in run.parts(0).items() if seconds}
    expected = {"launch_s": cost.launch_ps + cost.pack_ps, "sync_s": cost.sync_ps}
    assert {part: parts.get(part, 0) for part in expected} == expected
    path = critical_path(run)
    assert path.ps_by_category["launch"] == expected["launch_s"]
    assert path.ps_by_category["sync"] == expected["sync_s"]


@pytest.mark.parametrize("name", ["a message", "a packed message", "a put", "a get", "an addition"])
@pytest.mark.parametrize("far", [1, 11])
def test_what_two_ranks_do_alone_takes_its_closed_form_wherever_they_are(name: str, far: int) -> None:
    made = program(ALONE[name].format(far=far))
    machine = Machine.of(load_cluster("dgx-h100:16"), made)
    assert estimate(made, machine).total_s == simulate(made, machine).duration_s


HOSTED = """
for i in range(3):
    copy(s(1), s, lane=l)
    all_gather(g, s, over="tp.x", dim=1, lane=l)
"""


@pytest.mark.parametrize("waits", [False, True])
def test_what_the_host_issues_is_on_the_path(waits: bool) -> None:
    """A tenth of a millisecond each. A host that waits begins anew behind each of the three gathers."""
    made = program(HOSTED.strip())
    cluster = replace(load_cluster("dgx-h100:16"), host=HostRates(1e-4, 1e-4, 1e-4, waits=waits))
    run = simulate(made, Machine.of(cluster, made))
    path = critical_path(run)
    assert path.ps_by_category["host"] == 6 * 10**8 and path.ps_by_category["wait"] == 0
    assert sum(path.ps_by_category.values()) == run.duration_ps
    assert [one.kind for one in path.segments] == ["host", "all_gather"] * (3 if waits else 1)
    assert path.verdict.startswith("bound by the host: ")


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_on_any_machine_a_host_is_on_the_path_for_as_long_as_it_issues(first: int) -> None:
    found = 0
    for seed in range(first, first + 100):
        draw = random.Random(seed)
        made = random_program(draw, 4)
        machine = random_machine(draw, made)
        host = None if machine is None else machine.cluster.host
        if machine is None or host is None:
            continue
        try:
            run = simulate(made, machine)
        except MeshweaveError:
            continue
        path = critical_path(run)
        assert sum(path.ps_by_category.values()) == run.duration_ps and not path.ps_by_category["wait"]
        for one in path.segments:
            if one.kind != "host":
                continue
            ops = [bound.op for bound in made.ops_on_rank(one.rank)]
            joined = [at for at in range(one.index) if host.waits and is_joined(ops[at])]
            issued = ops[joined[-1] + 1 if joined else 0 : one.index + 1]
            assert one.end_ps - one.start_ps == sum(issue_ps(made, op, host) for op in issued)
            found += 1
    assert found


def test_packing_that_never_ends_is_refused() -> None:
    """18446748 bytes at 1 byte/s: in 64 bits of picoseconds it would be some 4 s."""
    text = """
program("slow")
tp = mesh((2,), ("x",))
s = scratch((4611687, 2), "float32", on=tp)
l = lane()
with tp:
    if tp.x == 0:
        send(s[:, :1], peer=1, lane=l)
    if tp.x == 1:
        recv(s[:, :1], peer=0, lane=l)
"""
    made, cluster = parse(text), load_cluster("dgx-h100:2")
    slow = replace(cluster, chip=replace(cluster.chip, pack_bytes_per_s=1.0))
    with pytest.raises(ProgramError, match="longer than 53 days"):
        simulate(made, Machine.of(slow, made))


def test_a_folded_step_has_the_path_of_the_whole() -> None:
    priced = step("llama-2-7b", "dgx-h100:32", batch=64, sequence=2048, tp=2, pp=2)
    folded, whole = (simulate_step(priced, folds=folds) for folds in (True, False))
    assert (folded.fold, whole.fold) == (2, 1)
    one, other = (critical_path(run.simulation) for run in (folded, whole))
    assert one.ps_by_category == other.ps_by_category and one.slowed_ps == other.slowed_ps


def test_a_machine_of_another_program_is_refused() -> None:
    small = parse('program("s")\ntp = mesh((4,), ("x",))\n')
    made = program(ALONE["a gather"])
    for chips, words in ((16, "another mesh tp than that of alone"), (8, "another mesh tp")):
        machine = Machine.of(load_cluster(f"dgx-h100:{chips}"), small)
        for ask in (simulate, estimate):
            with pytest.raises(LayoutError, match=words):
                ask(made, machine)
    bare = Machine(load_cluster("dgx-h100:8"), ())
    with pytest.raises(LayoutError, match="16 ranks do not fit the 8 chips"):
        simulate(made, bare)


@pytest.mark.parametrize("rank", [-1, 1, 3, 99])
def test_a_rank_that_was_not_simulated_is_refused(rank: int) -> None:
    text = """
program("some")
tp = mesh((2,), ("x",), ranks=(0, 2))
s = scratch((8,), "float32", on=tp)
l = lane()
with tp:
    zero(s, lane=l)
"""
    made = parse(text)
    run = simulate(made, Machine.of(load_cluster("dgx-h100:4"), made))
    for ask in (
        run.parts,
        run.exposed_s,
        lambda of: list(run.spans(of)),
        lambda of: rank_timeline(run, of, "t"),
    ):
        with pytest.raises(LayoutError, match=f"2 ranks, 0 to 2; {rank} is none of them"):
            ask(rank)
