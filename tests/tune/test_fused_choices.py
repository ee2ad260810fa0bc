"""Which fused products are chosen, on rings side by side, and against another program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshweave.algorithms.universal import universal_program
from meshweave.algorithms.universal.problem import UniversalProblem
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Placement, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import to_text
from meshweave.tune.fused import faster_than as fused_faster_than
from meshweave.tune.fused import fused_choices, tune_fused
from meshweave.tune.universal import tune_universal

S0, S1, R = Shard(0), Shard(1), Replicate()
SIZES = 64, 32, 32


def two_rings(a: Placement, b: Placement, c: Placement) -> UniversalProblem:
    mesh = Mesh.of("m", (2, 2), ("dp", "tp"))
    layouts = (Layout(mesh, pair) for pair in ((S0, a), (R, b), (S0, c)))
    return UniversalProblem(*SIZES, *layouts)


def paced(cluster: Cluster, pace: float) -> Cluster:
    return replace(cluster, chip=cluster.chip.with_flops_per_s(pace))


def test_rings_side_by_side_are_one_valid_program_of_both() -> None:
    for choice in fused_choices(two_rings(S1, S0, S0), load_cluster("local-cpu")):
        assert choice.program.ranks == (0, 1, 2, 3)
        validate(choice.program)
        assert parse(to_text(choice.program)) == choice.program
        inputs = {
            f"{name}_{ring}": np.arange(rows * columns).reshape(rows, columns) % (3 + ring)
            for ring in range(2)
            for name, rows, columns in (("A", 32, 32), ("B", 32, 32))
        }
        outputs = run_numpy(choice.program, inputs).outputs
        for ring in range(2):
            np.testing.assert_array_equal(outputs[f"C_{ring}"], inputs[f"A_{ring}"] @ inputs[f"B_{ring}"])


def test_rings_that_share_no_link_take_as_long_together_as_one_alone() -> None:
    cluster = load_cluster("local-cpu")
    problem = two_rings(S0, S1, S1)
    together = {str((one.algorithm, one.tiles)): one.simulated_s for one in fused_choices(problem, cluster)}
    mesh = Mesh.of("tp", (2,), ("x",))
    alone = UniversalProblem(32, 32, 32, *(Layout(mesh, (placement,)) for placement in (S0, S1, S1)))
    for one in fused_choices(alone, cluster):
        assert together.pop(str((one.algorithm, one.tiles))) == one.simulated_s
    assert not together


def test_a_fused_product_is_taken_only_where_it_is_simulated_to_be_faster() -> None:
    """Where products take time the fused one wins, where they take none the universal one; never by a tie."""
    cluster, problem = load_cluster("local-cpu"), two_rings(S1, S0, S0)
    for pace, is_taken in ((1e8, True), (1e14, False)):
        machine = paced(cluster, pace)
        tuned = tune_universal(problem, RankRates.of(machine))
        choice = fused_faster_than(problem, universal_program(problem, tuned.config), machine)
        assert (choice is not None) == is_taken
        if choice is not None:
            assert choice == tune_fused(problem, machine)
            assert fused_faster_than(problem, choice.program, machine) is None
        assert tune_fused(problem, machine, by_tiles=True).tiles is not None


def test_ranks_that_the_cluster_does_not_have_are_not_priced() -> None:
    mesh = Mesh("far", (2,), ("x",), (4, 9))
    problem = UniversalProblem(8, 8, 8, *(Layout(mesh, (placement,)) for placement in (S1, S0, S0)))
    config = tune_universal(problem, RankRates.of(load_cluster("local-cpu"))).config
    assert fused_faster_than(problem, universal_program(problem, config), load_cluster("local-cpu")) is None
