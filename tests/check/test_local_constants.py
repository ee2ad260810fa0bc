"""Constants of local processes: what is run for them, and that they are recovered from what it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.check.local_constants import (
    ConstantPrograms,
    LocalConstants,
    fit_local_constants,
    part_of_product,
)
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.network import with_axes
from meshweave.ir.program import Program
from meshweave.lower import lower_rings
from meshweave.simulate import simulate
from sampling import examples

LOCAL = load_cluster("local-cpu")


def _problem(dataflow: str) -> Matmul2dProblem:
    sizes = {"os": (256, 256, 512), "ls": (256, 512, 256), "rs": (512, 256, 256)}[dataflow]
    return Matmul2dProblem(*sizes, (2, 2), dataflow)  # type: ignore[arg-type]


def _programs(name: str, slices: int = 1, dataflow: str = "os") -> tuple[Program, ConstantPrograms]:
    problem, config = _problem(dataflow), Matmul2dConfig((1,) * slices)
    part = part_of_product(problem, config)
    made = [lower_rings(PRODUCTS_2D[name].program(*one), 1) for one in ((problem, config), part)]
    return made[0], ConstantPrograms.of(made[1])


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


def _seconds(program: Program, cluster: Cluster) -> float:
    return simulate(program, Machine.of(cluster, program)).duration_s


@examples(6)
@given(
    name=st.sampled_from(["collective", "meshslice", "wang"]),
    dataflow=st.sampled_from(["os", "ls", "rs"]),
    slices=st.sampled_from([2, 4, 8]),
    messages=st.floats(0.5, 30.0),
    flops_per_s=st.floats(1e9, 1e11),
)
def test_the_constants_of_a_machine_are_recovered(
    name: str, dataflow: str, slices: int, messages: float, flops_per_s: float
) -> None:
    """A machine that is as the model says is predicted as it is, from a part of the product."""
    program, programs = _programs(name, slices if name == "meshslice" else 1, dataflow)
    true = _slower(messages, flops_per_s)
    constants = fit_local_constants(programs, [_seconds(made, true) for made in programs.listed], LOCAL)
    assert _seconds(program, constants.cluster) == pytest.approx(_seconds(program, true), rel=0.03)
    nominal = LOCAL.network.axis(0, 1).link_bytes_per_s
    assert constants.link.link_bytes_per_s == pytest.approx(nominal / messages, rel=1e-3)


@pytest.mark.parametrize("name", ["collective", "meshslice", "wang", "cannon", "summa"])
def test_what_is_run_for_constants_is_a_part_of_the_product(name: str) -> None:
    slices = 4 if name == "meshslice" else 1
    program, programs = _programs(name, slices)
    whole, transfers, work = (
        [bound.op.kind for bound in made.ops_on_rank(0)] for made in (program, *programs.listed)
    )
    assert "matmul" in work and set(transfers) == set(work) - {"matmul"}
    assert len(transfers) == len(work) - work.count("matmul")
    if name == "meshslice":
        assert 4 * len(work) == 3 * len(whole)
    sizes = [tensor.shape for tensor in programs.work.tensors]
    assert sizes == [(256, 384), (384, 256), (256, 256)]


def test_a_process_alone_has_no_rate_of_messages() -> None:
    alone, two = (LocalConstants(LOCAL.with_chips(count)) for count in (1, 2))
    assert str(two).startswith("messages ") and {*two.to_json()} > {*alone.to_json()}
    assert str(alone).startswith("products ") and {*alone.to_json()} == {"memory_bytes_per_s", "flops_per_s"}
