"""Constants of local processes: what is run for them, and that they are recovered from what it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import ALGORITHMS, Matmul2dConfig, Matmul2dProblem
from meshweave.check.local_constants import ConstantPrograms, fit_local_constants
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import with_axes
from meshweave.ir.program import Program
from meshweave.lower import lower_rings
from meshweave.simulate import simulate

LOCAL = load_cluster("local-cpu")


def _program(name: str, slices: int = 1, dataflow: str = "os") -> Program:
    sizes = {"os": (256, 256, 512), "ls": (256, 512, 256), "rs": (512, 256, 256)}[dataflow]
    problem = Matmul2dProblem(*sizes, (2, 2), dataflow)  # type: ignore[arg-type]
    return lower_rings(ALGORITHMS[name].program(problem, Matmul2dConfig((1,) * slices)), 1)


def _slower(messages: float, flops_per_s: float) -> Cluster:
    network = with_axes(
        LOCAL.network,
        lambda axis: replace(
            axis,
            link_bytes_per_s=axis.link_bytes_per_s / messages,
            link_latency_s=axis.link_latency_s * messages,
        ),
    )
    chip = LOCAL.chip.with_flops_per_s(flops_per_s)
    chip = replace(chip, memory_bytes_per_s=chip.memory_bytes_per_s / messages)
    return replace(LOCAL, chip=chip, network=network)


@given(
    name=st.sampled_from(["collective", "meshslice"]),
    dataflow=st.sampled_from(["os", "ls", "rs"]),
    slices=st.sampled_from([2, 4, 8]),
    messages=st.floats(0.2, 30.0),
    flops_per_s=st.floats(1e9, 2e11),
    start_s=st.floats(0.0, 5e-3),
)
def test_the_constants_of_a_machine_are_recovered(
    name: str, dataflow: str, slices: int, messages: float, flops_per_s: float, start_s: float
) -> None:
    """A machine that is as the model says is predicted as it is, from other programs than the one predicted."""
    program = _program(name, slices if name == "meshslice" else 1, dataflow)
    true = _slower(messages, flops_per_s)
    programs = ConstantPrograms.of(program)
    measured = [start_s, *(start_s + _seconds(made, true) for made in (programs.transfers, programs.work))]
    constants = fit_local_constants(programs, measured, LOCAL)
    predicted = constants.predict(program)
    assert predicted.duration_s == pytest.approx(_seconds(program, true) + start_s, rel=0.05)
    assert constants.link.link_bytes_per_s == pytest.approx(LOCAL.network.axis(0, 1).link_bytes_per_s / messages, rel=1e-3)  # fmt: skip
    assert len(predicted.spans) == sum(len(program.ops_on_rank(rank)) for rank in program.ranks)


def _seconds(program: Program, cluster: Cluster) -> float:
    return simulate(program, Machine.of(cluster, program)).duration_s


@pytest.mark.parametrize(
    ("name", "slices"), [("collective", 1), ("meshslice", 6), ("wang", 2), ("cannon", 1)]
)
def test_what_is_run_for_constants_has_the_ops_of_the_program(name: str, slices: int) -> None:
    program = _program(name, slices) if name == "meshslice" else _program(name)
    programs = ConstantPrograms.of(program)
    kinds = {bound.op.kind for rank in program.ranks for bound in program.ops_on_rank(rank)}
    in_transfers = {bound.op.kind for rank in program.ranks for bound in programs.transfers.ops_on_rank(rank)}
    assert in_transfers == kinds - {"matmul"}
    count = [bound.op.kind for bound in program.ops_on_rank(0)].count("matmul")
    work = [bound.op.kind for bound in programs.work.ops_on_rank(0)]
    assert 1 <= work.count("matmul") <= count
    if name == "meshslice":
        assert work.count("matmul") == slices // 2 and work.count("permute") == slices
    if name == "collective":
        assert set(work) <= {"matmul", "copy"}
    assert len(programs.lanes.ops_on_rank(0)) == len(program.lanes)
