"""The entry that solves a `UniversalProblem`, and what is common to all that do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshweave.algorithms.contract import Algorithm, Array, Arrays, ConfigT, Gradient, within
from meshweave.algorithms.universal.config import UniversalConfig, universal_configs
from meshweave.algorithms.universal.problem import UniversalProblem, transposed_layout
from meshweave.algorithms.universal.program import universal_program
from meshweave.algorithms.universal.reduction import replicas_have_same_bits
from meshweave.algorithms.universal.slicing import Slicing
from meshweave.algorithms.universal.volume import volume
from meshweave.cost.machine import Machine
from meshweave.cost.rates import RankRates
from meshweave.describe.layout import Layout, Partial, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import Estimate
from meshweave.estimate.universal import estimate_universal
from meshweave.ir.program import Program


class AnyLayoutProduct(Algorithm[UniversalProblem, ConfigT]):
    """An algorithm for products C (M, N) = A (M, K) B (K, N) of matrices in any layouts."""

    problem_type = UniversalProblem

    def reference(self, problem: UniversalProblem, inputs: Arrays) -> dict[str, Array]:
        """Return C = A B computed without sharding from global A (M, K) and B (K, N), as {"C": (M, N)}."""
        return {"C": inputs["A"] @ inputs["B"]}

    def placements(self, problem: UniversalProblem) -> dict[str, Layout]:
        """Return the layouts of "A", "B" and "C", by name: `problem.a`, `problem.b` and `problem.c`."""
        return {"A": problem.a, "B": problem.b, "C": problem.c}

    def gradients(self, problem: UniversalProblem) -> tuple[Gradient[UniversalProblem], ...]:
        """Return the problems of dA = dC B^T and dB = A^T dC, where dA has the layout of A, and dB that of B.

        Each term of a partial sum has the gradient of the sum, so a matrix that is partial along a mesh axis has
        a gradient that is replicated along it.
        """
        (m, n, k), dtype = problem.sizes, problem.dtype
        a, b, c = (_whole_sums(layout) for layout in (problem.a, problem.b, problem.c))
        order_a, order_b, order_c = problem.orders
        turned_a, turned_b = transposed_layout(problem.a), transposed_layout(problem.b)
        da = UniversalProblem(m, k, n, c, turned_b, a, dtype, (order_c, _flip(order_b), order_a))
        db = UniversalProblem(k, n, m, turned_a, c, b, dtype, (_flip(order_a), order_c, order_b))
        return (
            Gradient("A", da, {"A": "C", "B": "B"}, "C", frozenset("B")),
            Gradient("B", db, {"A": "A", "B": "C"}, "C", frozenset("A")),
        )


def _whole_sums(layout: Layout) -> Layout:
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements)
    return replace(layout, placements=placements)


def _flip(order: tuple[int, int] | None) -> tuple[int, int] | None:
    return None if order == (1, 0) else (1, 0)


class Universal(AnyLayoutProduct[UniversalConfig]):
    """A product in which one matrix stays in place.

    Panels of the other operands are read from other ranks' memory by gets, and a C that moves is updated there by
    accumulates.
    """

    name = "universal"
    title = "Universal"
    source = "Brock, Golin: Slicing Is All You Need"
    estimate_accuracy = within(1.0)  # a roofline has no order of ops

    def examples(self) -> Iterator[UniversalProblem]:
        """Yield products of matrices in unlike layouts: shards, replicas, partial sums, on one mesh or two."""
        square = Mesh.of("tp", (2, 2), ("row", "col"))
        sharded = Layout(square, (Shard(0), Shard(1)))
        yield UniversalProblem(8, 8, 8, sharded, sharded, sharded)
        yield UniversalProblem(
            7,
            9,
            10,
            Layout(square, (Replicate(), Partial())),
            Layout(square, (Shard(1), Replicate())),
            Layout(square, (Shard(0), Replicate())),
            "int64",
        )
        wide, flat = Mesh.of("tp", (2, 3), ("row", "col")), Mesh.of("flat", (6,), ("x",))
        yield UniversalProblem(
            11,
            13,
            5,
            Layout(wide, (Shard(0), Shard(1))),
            Layout(flat, (Shard(1),)),
            Layout(wide, (Partial(), Shard(1))),
        )

    def candidates(
        self, problem: UniversalProblem, cluster: Cluster | None = None
    ) -> Iterator[UniversalConfig]:
        """Yield the configs for which all replicas of C surely have the same bits, the simplest first.

        All have the default `num_slices` and `prefetch`; a tuner varies these itself. `cluster` is ignored.
        """
        return (
            config
            for config in universal_configs(problem)
            if replicas_have_same_bits(Slicing(problem, config))
        )

    def program(self, problem: UniversalProblem, config: UniversalConfig) -> Program:
        """Return the program of one-sided ops: get, put and accumulate in other ranks' memory, no send and recv.

        Raises:
            LayoutError: the config does not fit the problem (`check_config`).
            UnsupportedError: the schedule is not "direct", and the config has no rates.
        """
        return universal_program(problem, config)

    def estimate(self, problem: UniversalProblem, config: UniversalConfig, machine: Machine) -> Estimate:
        """Return the predicted time of a config by a roofline, from the FLOPs and bytes of each rank.

        Reductions before and after the products overlap with nothing. Products overlap with their transfers, but
        for one step (`estimate.universal`). All communication is in `transfer_s`. Of `machine` only the cluster is
        read.
        """
        if not math.prod(problem.sizes):
            return Estimate(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        parts = estimate_universal(
            volume(Slicing(problem, config)), RankRates.of(machine.cluster, problem.dtype)
        )
        transfer_s = parts.before_s + parts.transfer_s + parts.after_s
        return Estimate(parts.total_s, parts.compute_s, 0.0, 0.0, 0.0, transfer_s)


ENTRIES = (Universal(),)
