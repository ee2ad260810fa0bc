"""The critical path: by hand where it can be said by hand, and in any case without a gap."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.cost.machine import Machine
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import TorusNetwork
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.lower import lower_rings
from meshweave.simulate.critical import CriticalPath, critical_path
from meshweave.simulate.engine import simulate
from meshweave.simulate.partners import Partners
from sampling import scaled

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))
CHIP = Chip("test", (("float32", 1e12),), 1e12, 1 << 30, 1e12)
MS = 10**9
"""Picoseconds."""


def torus(latency_s: float = 0.0, launch_s: float = 0.0, chips: int = 4) -> Cluster:
    constants = tuple((kind, CommConstants(1e9, latency_s, launch_s)) for kind in ("all_gather", "send_recv"))
    axes = tuple(NetworkAxis(name, 1e9, latency_s, 1, constants, launch_s) for name in ("row", "col"))  # type: ignore[arg-type]
    return Cluster("test", CHIP, TorusNetwork(axes, None, chips, True), "a test")


def program(body: str, ranks: int = 4, lanes: str = "x = lane()\ny = lane()") -> Program:
    """Shards `s` of 1 MB, 1 ms over a link; products of `g`, 2 ms."""
    text = f"""
program("test")
tp = mesh((1, {ranks}), ("row", "col"))
s = scratch((1000, 250), "float32", on=tp, slots=4)
g = scratch((1000, 1000), "float32", on=tp, slots=4)
{lanes}
with tp:
"""
    return parse(text + "".join(f"    {line}\n" for line in body.strip("\n").splitlines()))


def path_of(made: Program, cluster: Cluster, logical: bool = False) -> CriticalPath:
    run = simulate(made, Machine.of(cluster, made, logical))
    path = critical_path(run)
    follows(path)
    assert path.duration_ps == run.duration_ps
    return path


def follows(path: CriticalPath) -> None:
    """Step after step from 0 to the end, every picosecond in one category, and no bound above the duration."""
    at = 0
    for step in path.segments:
        assert step.start_ps == at < step.end_ps and step.category != "wait"
        at = step.end_ps
    assert at == path.duration_ps == sum(path.ps_by_category.values())
    assert sum(path.transfer_ps_by_axis.values()) == path.ps_by_category["transfer"]
    assert all(bound.time_ps <= path.duration_ps for bound in path.bounds)
    assert path.verdict.startswith("bound by ")


def names(path: CriticalPath) -> list[tuple[int, str]]:
    return [(step.rank, step.kind) for step in path.segments]


def test_products_one_after_the_other_are_the_path() -> None:
    path = path_of(
        program("""
matmul(g(1), g(2), g(3), lane=x)
matmul(g(1), g(2), g(3), lane=x)
all_gather(g(0), s, over="tp.col", dim=1, lane=y)
"""),
        torus(),
    )
    assert [step.kind for step in path.segments] == ["matmul", "matmul"]
    assert path.ps_by_category["compute"] == path.duration_ps == 4 * MS
    assert path.bounds[0].name == "compute" and path.duration_over_bound == 1.0
    assert (
        path.verdict == "bound by compute: 100 % of the critical path are products; 1.00 x the compute bound"
    )


def test_a_gather_is_launch_steps_and_transfers() -> None:
    path = path_of(program('all_gather(g, s, over="tp.col", dim=1, lane=x)'), torus(1e-4, 5e-4))
    assert [step.kind for step in path.segments] == ["all_gather"]
    wanted = {"launch": MS // 2, "sync": 3 * MS // 10, "transfer": 3 * MS}
    assert {name: ps for name, ps in path.ps_by_category.items() if ps} == wanted
    assert path.transfer_ps_by_axis == {"tp.col": 3 * MS} and path.slowed_ps == 0
    assert path.bounds[0].name == "link" and path.bounds[0].time_ps == 3 * MS
    assert path.verdict.startswith("bound by links of axis tp.col: 79 % of the critical path are transfers")


def test_sharing_a_link_slows_the_path() -> None:
    gather = 'all_gather(g({0}), s({0}), over="tp.col", dim=1, lane={1})'
    path = path_of(program(gather.format(0, "x") + "\n" + gather.format(1, "y")), torus())
    assert path.duration_ps == 6 * MS and path.slowed_ps == 3 * MS


def test_launches_can_be_what_bounds() -> None:
    path = path_of(program('all_gather(g, s, over="tp.col", dim=1, lane=x)'), torus(0.0, 1.0))
    assert path.verdict.startswith("bound by launches: 100 %")
    assert path_of(program("copy(g, g(1), lane=x)"), torus()).verdict.startswith("bound by memory: 100 %")


def test_the_path_goes_on_with_a_partner_that_came_late() -> None:
    """Rank 0 waits for what rank 1 sends after a product, and then multiplies itself."""
    made = program(
        """
if rank == 1:
    matmul(g(1), g(2), g(3), lane=x)
    copy(s, g(1)[:, 0:250], lane=x)
    send(s, peer=0, tag=0, lane=x)
if rank == 0:
    recv(s(1), peer=1, tag=0, lane=x)
    matmul(g(1), g(2), g(3), lane=x)
""",
        ranks=2,
    )
    path = path_of(made, torus(chips=2))
    assert names(path) == [(1, "matmul"), (1, "copy"), (0, "recv"), (0, "matmul")]
    assert path.segments[2].end_ps - path.segments[2].start_ps == MS
    assert path.ps_by_category["compute"] == 4 * MS and path.ps_by_category["transfer"] == MS
    assert path.transfer_ps_by_axis == {"point-to-point messages": MS}


def test_of_a_permute_only_neighbours_are_partners() -> None:
    """Rank 3 of 6 multiplies first: ranks 2 and 4 wait for it; the others exchange nothing with it."""
    made = program(
        """
if rank == 3:
    matmul(g(1), g(2), g(3), lane=x)
permute(s(1), s, over="tp.col", shift=1, lane=x)
""",
        ranks=6,
    )
    run = simulate(made, Machine.of(torus(chips=6), made))
    partners = Partners(run)
    ops = {rank: int(run.starts[rank + 1]) - 1 for rank in range(6)}
    waits = {rank: partners.wait_ps(op) for rank, op in ops.items()}
    assert waits == {0: 0, 1: 0, 2: 2 * MS, 3: 0, 4: 2 * MS, 5: 0}
    path = path_of(made, torus(chips=6))
    assert [kind for _, kind in names(path)] == ["matmul", "permute"] and path.segments[0].rank == 3


def test_of_a_broadcast_nobody_waits_for_those_behind_the_next() -> None:
    made = program(
        """
if rank == 3:
    matmul(g(1), g(2), g(3), lane=x)
broadcast(s(1), s, over="tp.col", root=0, packets=2, lane=x)
"""
    )
    run = simulate(made, Machine.of(torus(), made))
    partners = Partners(run)
    waits = [partners.wait_ps(int(run.starts[rank + 1]) - 1) for rank in range(4)]
    assert waits[0] == waits[1] == 0 and waits[2] > 0


def test_an_op_that_waits_its_turn_goes_on_with_what_its_lane_waited_for() -> None:
    """The second gather is free from the start; its lane, two wide, holds it behind the first."""
    path = path_of(
        program(
            """
matmul(g(1), g(2), g(3), lane=y)
copy(s, g(1)[:, 0:250], lane=x)
all_gather(g(2), s(1), over="tp.col", dim=1, lane=x)
""",
            lanes="x = lane(width=2)\ny = lane()",
        ),
        torus(),
    )
    assert [step.kind for step in path.segments] == ["matmul", "all_gather"]


def test_an_empty_program_is_bound_by_nothing() -> None:
    made = parse(
        'program("nothing")\ntp = mesh((2,), ("x",))\nx = lane()\nwith tp:\n    fence(over="tp", lane=x)\n'
    )
    path = critical_path(simulate(made, Machine.of(torus(chips=2), made)))
    assert path.segments == () and path.duration_over_bound is None and "nothing" in path.verdict


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_every_golden_program_has_a_path_without_gaps(path: Path) -> None:
    made = parse(path.read_text())
    path_of(made, load_cluster("local-cpu:64"))


@pytest.mark.parametrize("name", PRODUCTS_2D)
def test_every_algorithm_has_a_path_without_gaps(name: str) -> None:
    """Random sizes, mostly uneven, on pods with two-way rings; lowered to rings as well.

    By default of few slices: hundreds of them take seconds, and repeat the same steps.
    """
    most = scaled(40)
    rng, entry = random.Random(name), PRODUCTS_2D[name]
    shapes = [shape for chips in (4, 8, 16) for shape in entry.mesh_shapes(chips)]
    for _ in range(scaled(4)):
        shape = rng.choice(shapes)
        sizes = (rng.randrange(64, 2000) for _ in range(3))
        problem = Matmul2dProblem(*sizes, shape, rng.choice(entry.dataflows), "bfloat16")
        offered = list(entry.candidates(problem))
        made = entry.program(
            problem, rng.choice([one for one in offered if one.slice_count <= most] or offered)
        )
        cluster = load_cluster(f"tpu-v4-pod:{problem.num_chips}")
        path_of(made, cluster)
        path_of(lower_rings(made, 2), cluster)


def test_a_logical_mesh_is_slowed_by_its_longer_ways() -> None:
    """A 2x8 mesh on a torus of 4x4: its rings of 8 take links of both axes."""
    problem = Matmul2dProblem(4096, 4096, 4096, (2, 8), "os", "bfloat16")
    entry = PRODUCTS_2D["collective"]
    made = entry.program(problem, next(entry.candidates(problem)))
    cluster = load_cluster("tpu-v4-4x4")
    assert path_of(made, cluster, logical=True).duration_ps > 0
