"""Programs of reshards: what arrives, how often it is sent, and in which order."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_reshards import Case, cases, fine, numbered, values

from meshweave.algorithms.reshard import (
    STRATEGIES,
    ReshardPlan,
    ReshardProblem,
    TensorMove,
    plan_reshard,
    reshard_program,
)
from meshweave.base.units import dtype_bytes
from meshweave.cost.fabric import HostTopology, Nic
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.spec import layout_of_spec
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.dataflow import analyse
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import AllGather, Copy, Recv, Send
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.ir.program.views import View
from sampling import examples

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
orders = st.sampled_from(["naive", "balance", "best"])
quick = examples(25)


def slices(view: View) -> tuple[slice, ...]:
    return tuple(slice(selector.start, selector.stop) for selector in view.selectors)  # type: ignore[union-attr]


def turn(op: Send | Recv) -> bool:
    """Whether a message says only that a NIC is free."""
    return op.name == "turn"


# --- values ----------------------------------------------------------------------------------------------


@every_strategy
@quick
@given(case=cases(), order=orders)
def test_programs_are_proven_and_move_the_shards(strategy: str, case: Case, order: str) -> None:
    program = reshard_program(case.plan(strategy, order))
    assert validate(program).skipped == ()
    inputs = {f"X{number}": values(item) for number, item in enumerate(case.problem.moves)}
    flow = analyse(program)
    for seed in (None, 1):
        found = run_numpy(program, inputs, seed=seed, flow=flow)
        for number, item in enumerate(case.problem.moves):
            for rank in item.dst.mesh.ranks:
                expected = inputs[f"X{number}"].reshape(-1)[numbered(item.dst, item.shape, rank)]
                np.testing.assert_array_equal(found.memory[rank, f"y{number}", 0], expected)


@every_strategy
@quick
@given(case=cases(), order=orders)
def test_every_element_is_written_once(strategy: str, case: Case, order: str) -> None:
    program = reshard_program(case.plan(strategy, order))
    written = {
        (rank, f"y{number}"): np.zeros(item.dst.local_shape(item.shape, rank), int)
        for number, item in enumerate(case.problem.moves)
        for rank in item.dst.mesh.ranks
    }
    for rank, ops in program.ops_by_rank.items():
        for bound in ops:
            assert isinstance(bound.op, (Send, Recv, Copy, AllGather))
            if not isinstance(bound.op, Send) and bound.op.out.buffer.startswith("y"):
                written[rank, bound.op.out.buffer][slices(bound.op.out)] += 1
    assert all((counts == 1).all() for counts in written.values())


@every_strategy
@examples(15)
@given(case=cases(), order=orders)
def test_programs_are_read_back_from_their_text(strategy: str, case: Case, order: str) -> None:
    program = reshard_program(case.plan(strategy, order))
    assert parse(to_text(program)) == program


# --- bytes -----------------------------------------------------------------------------------------------


def across_hosts(program: Program, network: HostTopology) -> int:
    """Bytes between hosts, op by op; around the ring of a gather every member takes in all parts but its own."""
    total = 0
    for rank, ops in program.ops_by_rank.items():
        for bound in ops:
            match bound.op:
                case Send(peer=int(peer)) as send if not turn(send):
                    far = network.host_of[rank] != network.host_of[peer]
                    total += far * program.view_bytes(send.src)
                case AllGather(over=tuple(over)) as gather:
                    before = over[over.index(rank) - 1]
                    far = network.host_of[before] != network.host_of[rank]
                    total += far * (program.view_bytes(gather.out) - program.view_bytes(gather.src))
    return total


@every_strategy
@quick
@given(case=cases(), order=orders)
def test_bytes_and_messages_are_those_of_the_program(strategy: str, case: Case, order: str) -> None:
    plan = case.plan(strategy, order)
    program = reshard_program(plan)
    sends = [bound.op for ops in program.ops_by_rank.values() for bound in ops if isinstance(bound.op, Send)]
    assert plan.num_messages == sum(not turn(send) for send in sends)
    assert plan.bytes_across_hosts == across_hosts(program, case.network) >= plan.least_bytes_across_hosts
    if strategy == "broadcast":
        assert plan.bytes_across_hosts == plan.least_bytes_across_hosts


@every_strategy
@quick
@given(case=cases(), order=orders)
def test_no_message_is_larger_than_asked_for(strategy: str, case: Case, order: str) -> None:
    program = reshard_program(case.plan(strategy, order))
    for ops in program.ops_by_rank.values():
        for bound in ops:
            if isinstance(bound.op, (Send, AllGather)):
                view = bound.op.src if isinstance(bound.op, Send) else bound.op.out
                assert program.view_bytes(view) <= case.message_bytes or view.num_elements == 1
                if isinstance(bound.op, Send) and turn(bound.op):
                    assert view.num_elements == 1


@quick
@given(case=cases())
def test_local_bytes_are_those_of_the_tensors_before_and_after(case: Case) -> None:
    plan = case.plan("broadcast")
    program = reshard_program(plan)
    for rank in program.ranks:
        held = [
            math.prod(program.local_shape(buffer.name, rank)) * dtype_bytes(buffer.dtype)
            for buffer in program.buffers
            if buffer.kind != "scratch" and rank in program.mesh_of[buffer.mesh]
        ]
        assert plan.local_bytes(rank) == sum(held)


# --- times -----------------------------------------------------------------------------------------------


def held_nics(plan: ReshardPlan, number: int) -> set[tuple[str, Nic]]:
    """By the turn: the senders' NICs on their way out, the NIC of the first rank of each host on its way in."""
    multicast = plan.multicasts[number].multicast
    if multicast.is_local:
        return set()
    out = {("out", plan.network.nic(rank)) for rank in multicast.senders}
    return out | {("in", plan.network.nic(host[0])) for host in multicast.hosts}


@every_strategy
@quick
@given(case=cases(), order=orders)
def test_a_nic_serves_one_turn_at_a_time(strategy: str, case: Case, order: str) -> None:
    plan = case.plan(strategy, order)
    spans: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for number, one in enumerate(plan.multicasts):
        assert one.start_s >= 0 and one.end_s <= plan.predicted_s
        nics = held_nics(plan, number)
        for nic in {"all"} if plan.serial and nics else nics:
            spans[nic].append((one.start_s, one.start_s + one.cost.occupied_s))
    tiny = 1e-12 * len(plan.multicasts)  # a schedule counts in picoseconds
    for held in spans.values():
        for before, after in pairwise(sorted(held)):
            assert before[1] <= after[0] * (1 + 1e-9) + tiny


@every_strategy
@quick
@given(case=cases(), order=orders)
def test_no_plan_is_faster_than_its_bound(strategy: str, case: Case, order: str) -> None:
    plan = case.plan(strategy, order)
    assert plan.predicted_s >= plan.bound_s * (1 - 1e-9) - 1e-12 * len(plan.multicasts)


@examples(20)
@given(case=cases(), strategy=st.sampled_from(sorted(STRATEGIES)))
def test_the_same_arguments_give_the_same_plan(case: Case, strategy: str) -> None:
    plan = case.plan(strategy)
    assert plan == case.plan(strategy)
    assert to_text(reshard_program(plan)) == to_text(reshard_program(case.plan(strategy)))


def overlapping() -> ReshardProblem:
    """Two tensors; ranks 2 to 5 are on both meshes."""
    src, dst = Mesh("p", (3, 2), ("x", "y"), (5, 0, 3, 1, 4, 2)), Mesh.of("q", (2, 3), ("x", "y"), 2)
    return ReshardProblem(
        tuple(
            TensorMove(name, (8, 12), dtype, layout_of_spec(before, src), layout_of_spec(after, dst))
            for name, dtype, before, after in (("a", "float32", "S0R", "RS1"), ("b", "int64", "RR", "S01R"))
        )
    )


def digest() -> str:
    network = HostTopology((0, 0, 1, 1, 2, 2, 3, 3), (0, 1) * 4, 10**6, 10**8, 1e-6)
    texts = []
    with fine():
        for strategy in STRATEGIES:
            for order in ("naive", "best"):
                plan = plan_reshard(overlapping(), network, strategy=strategy, order=order)
                texts.append(to_text(reshard_program(plan)))
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def test_every_process_makes_the_same_plan() -> None:
    """Ranks plan by themselves, each with hashes of its own."""
    code = "import test_reshard_program; print(test_reshard_program.digest())"
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {digest()}


# --- examples --------------------------------------------------------------------------------------------


def test_what_stays_where_it_is_sends_nothing() -> None:
    layout = layout_of_spec("S01R", Mesh.of("p", (2, 2), ("x", "y")))
    problem = ReshardProblem((TensorMove("a", (8, 8), "float32", layout, layout),))
    plan = plan_reshard(problem, HostTopology((0, 0, 1, 1), (0,) * 4, 1, 1))
    assert plan.multicasts == () and plan.predicted_s == plan.bound_s == plan.bytes_across_hosts == 0
    ops = [bound.op for ops in reshard_program(plan).ops_by_rank.values() for bound in ops]
    assert len(ops) == 4 and all(isinstance(op, Copy) for op in ops)


def test_hosts_that_hold_a_part_are_sent_none() -> None:
    """Rank 1 gets it from rank 0 beside it; ranks 2 and 3 of the other host get one copy together."""
    src, dst = Mesh.of("p", (1,), ("x",)), Mesh.of("q", (3,), ("x",), 1)
    item = TensorMove("a", (100,), "uint8", layout_of_spec("R", src), layout_of_spec("R", dst))
    plan = plan_reshard(ReshardProblem((item,)), HostTopology((0, 0, 1, 1), (0,) * 4, 10, 1000))
    assert plan.bytes_across_hosts == plan.least_bytes_across_hosts == 100
    assert [turn.multicast.is_local for turn in plan.multicasts] == [True, False]
    assert plan.bound_s == 10 and plan.predicted_s == pytest.approx(10.1)


def test_two_nics_of_a_host_share_what_it_sends() -> None:
    """One tensor on two ranks, each behind a NIC of its own: half leaves through either."""
    src, dst = Mesh.of("p", (2,), ("x",)), Mesh.of("q", (2,), ("x",), 2)
    item = TensorMove("a", (64, 4), "float64", layout_of_spec("RR", src), layout_of_spec("RR", dst))
    network = HostTopology((0, 0, 1, 1), (0, 1, 0, 1), 1024, 1 << 30)
    with fine():
        plan = plan_reshard(ReshardProblem((item,)), network)
    assert plan.bound_s == 1
    assert plan.predicted_s == pytest.approx(1, rel=0.02)
    assert {turn.multicast.senders for turn in plan.multicasts} == {(0,), (1,)}
