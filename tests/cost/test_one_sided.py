"""What gets, puts and accumulates cost between two chips, and the routes of a full mesh."""

from __future__ import annotations

import pytest

from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.ir.program.parse import parse
from meshweave.simulate import simulate
from plain_simulator import reference


def machine(cluster: Cluster) -> Machine:
    return Machine(cluster, (Mesh.of("tp", (cluster.num_chips,), ("x",)),))


def test_routes_of_a_full_mesh() -> None:
    """Tiles of a package have a link; so have tiles at the same place. Others cross their own package first."""
    pvc = machine(load_cluster("pvc-node"))
    assert pvc.path(4, 4) == ()
    assert pvc.path(4, 5) == (("inner", 4, 5, 0),)
    assert pvc.path(4, 10) == (("link", 4, 10, 0),)
    assert pvc.path(4, 11) == (("inner", 4, 5, 0), ("link", 5, 11, 0))
    assert pvc.weighted_link_rate(("inner", 4, 5, 0)) == 230 * 10**9
    assert pvc.weighted_link_rate(("link", 5, 11, 0)) == 26_500_000_000


def test_each_pair_has_its_own_rate() -> None:
    pvc, h100 = machine(load_cluster("pvc-node")), machine(load_cluster("h100-node"))
    assert pvc.one_sided_constants(0, 1, adds=False).rate == 230 * 10**9
    assert pvc.one_sided_constants(0, 2, adds=False).rate == 26_500_000_000
    assert pvc.one_sided_constants(0, 1, adds=True).rate == 184 * 10**9  # 80 % of a copy
    assert pvc.one_sided_constants(0, 3, adds=True).rate == 21_200_000_000
    assert pvc.one_sided_constants(0, 3, adds=True).flops_per_byte == 0
    assert h100.one_sided_constants(0, 3, adds=True).flops_per_byte == round(0.152 * 67e12 / 360e9)
    assert h100.one_sided_constants(0, 3, adds=False).flops_per_byte == 0


@pytest.mark.parametrize("is_beside", [False, True])
def test_accumulates_slow_products(is_beside: bool) -> None:
    """While it runs, an accumulate takes 15 % of the FLOP rate of the chip that issued it."""
    give = "    accumulate(at(1, d(1)), d, lane=y)" if is_beside else ""
    program = parse(
        f"""
program("beside")
tp = mesh((8,), ("x",))
g = scratch((4096, 4096), "float32", on=tp, slots=3)
d = scratch((65536, 4096), "float32", on=tp, slots=2)
x = lane()
y = lane()
if rank == 0:
    zero(d, lane=y)
    zero(g, lane=y)
    zero(g(1), lane=y)
    matmul(g(2), g, g(1), lane=x)
{give}
"""
    )
    h100 = Machine.of(load_cluster("h100-node"), program)
    run = simulate(program, h100)
    (product,) = [span for span in run.spans(0) if span.kind == "matmul"]
    share = h100.one_sided_constants(0, 1, adds=True).flops_per_byte * 360e9 / 67e12
    assert share == pytest.approx(0.152, abs=0.003)
    expected_s = 2 * 4096**3 / 67e12 / ((1 - share) if is_beside else 1)
    assert (product.end_ps - product.start_ps) / 1e12 == pytest.approx(expected_s, rel=1e-6)
    assert reference.simulate(program, h100).spans == run.trace().spans
