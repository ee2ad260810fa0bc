"""Collectives in two levels, between hosts and inside them, compute what they did, on all NICs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.cost.machine import Machine
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import HostsNetwork
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.ops import AllGather, ReduceScatter
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_hosts, lower_rings
from meshweave.simulate.engine import simulate
from sampling import examples

CHIP = Chip("c", (("float32", 1e12),), 1e12, 1 << 34, 1e12)


def product(mesh: tuple[int, int], dataflow: str) -> tuple[Program, dict[str, np.ndarray]]:
    problem = Matmul2dProblem(24, 24, 24, mesh, dataflow)  # type: ignore[arg-type]
    program = PRODUCTS_2D["collective"].program(problem, Matmul2dConfig())
    rng = np.random.default_rng(5)
    names = {buffer.tensor for buffer in program.buffers if buffer.kind == "input"}
    return program, {
        tensor.name: rng.integers(-5, 5, tensor.shape).astype(tensor.dtype)
        for tensor in program.tensors
        if tensor.name in names
    }


def levels(program: Program) -> set[str]:
    ops = (op for op in program.ops() if isinstance(op, (AllGather, ReduceScatter)))
    return {op.over.rpartition(".")[2] for op in ops if isinstance(op.over, str)}


@examples(12)
@given(
    st.sampled_from([(1, 6), (1, 8), (1, 12), (2, 4), (2, 6)]),
    st.sampled_from(["os", "ls", "rs"]),
    st.sampled_from([2, 3]),
    st.booleans(),
)
def test_two_levels_compute_the_same(
    mesh: tuple[int, int], dataflow: str, chips: int, as_rings: bool
) -> None:
    program, inputs = product(mesh, dataflow)
    lowered = lower_hosts(program, chips)
    if mesh[1] % chips == 0 and mesh[1] > chips:
        assert {"host", "chip"} <= levels(lowered)
    else:
        assert lowered == program
    if as_rings:
        lowered = lower_rings(lowered)
    assert validate(lowered).skipped == ()
    assert parse(to_text(lowered)) == lowered
    before, after = run_numpy(program, inputs).outputs, run_numpy(lowered, inputs, seed=1).outputs
    for tensor, value in before.items():
        np.testing.assert_array_equal(after[tensor], value)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_rails_take_the_bytes_of_one_part_of_each_host(kind: str) -> None:
    """Between 3 hosts of 4 chips each NIC carries 2 parts, inside each chip 3 times 3 parts."""
    part, size = 1 << 20, 12
    shapes = (part, size * part) if kind == "all_gather" else (size * part, part)
    program = parse(f"""
program("one")
tp = mesh((12,), ("x",))
s = scratch(({shapes[0]},), "int8", on=tp)
o = scratch(({shapes[1]},), "int8", on=tp)
net = lane()
with tp:
    zero(s, lane=net)
    {kind}(o, s, over="tp.x", dim=0, lane=net)
""")
    lowered = lower_hosts(program, 4)
    cluster = Cluster(
        "box", CHIP, HostsNetwork(3, 4, NetworkAxis("in", 4e9), 4, NetworkAxis("nic", 1e9)), "a test"
    )
    result = simulate(lowered, Machine.of(cluster, lowered))
    carried = {link.link[:3]: link.carried_bytes for link in result.links}
    assert {carried["nic-out", host, nic] for host in range(3) for nic in range(4)} == {2 * part}
    assert {carried["out", chip, 0] for chip in range(12)} == {9 * part}
    expected = 2 * part / 1e9 + 9 * part / 4e9
    assert result.duration_s == pytest.approx(expected, rel=0.02)


def test_what_has_no_hosts_stays() -> None:
    program, _ = product((2, 4), "os")
    for chips in (1, 3, 8):
        lowered = lower_hosts(program, chips)
        assert (lowered == program) == (chips != 1)
    assert lower_hosts(program, 2, lambda op: False) == program
