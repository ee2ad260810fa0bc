"""Seeded cases for a fidelity run: products that no constant was fitted on, sized for a lab's rates."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.algorithms.matmul2d import DATAFLOWS, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import estimate_skeleton
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton
from meshweave.ir.work import Transfer
from meshweave.lower import lower_chains, lower_rings
from meshweave_lab.bench.yardsticks import balanced_flops_per_s, matmul_machine

MIN_MESSAGE_BYTES = 32 * 1024
SHORTEST_S, LONGEST_S = 0.2, 1.5
_LOCAL_SIZES = (32, 48, 64, 80, 112, 128, 160)
"""Of the stationary matrix on a rank. Small, so that real products are much shorter than their paced time."""
_SLICE_COUNTS = (2, 3, 4, 6, 8, 12, 16)
_ATTEMPTS = 200


@dataclass(frozen=True)
class FidelityCase:
    """A product by one algorithm, which the lab runs and simulates.

    Attributes:
        number: its place in the list of a seed.
        ring_directions: of the rings that collectives become, 1 or 2.
        flops_per_s: the rate to which each rank is slowed.
    """

    number: int
    algorithm: str
    problem: Matmul2dProblem
    config: Matmul2dConfig
    ring_directions: int
    flops_per_s: float

    def __str__(self) -> str:
        p = self.problem
        config = f" {self.config}" if self.config != Matmul2dConfig() else ""
        return f"{self.algorithm}{config} {p.dataflow} {p.m} x {p.n} x {p.k}"

    @cached_property
    def program(self) -> Program:
        """The program that runs: collectives lowered to rings, broadcasts to chains."""
        program = PRODUCTS_2D[self.algorithm].program(self.problem, self.config)
        return lower_chains(lower_rings(program, 1 if self.ring_directions == 1 else 2))

    @cached_property
    def skeleton(self) -> Skeleton:
        """The algorithm's skeleton, for the estimate."""
        return PRODUCTS_2D[self.algorithm].skeleton(self.problem, self.config)


def reached_share_of_pace(cluster: Cluster) -> float:
    """Return which share of the pace products reach on a paced rank: the chip's effective over its peak rate."""
    chip = cluster.chip
    return chip.effective_flops_per_s / dict(chip.peak_flops_per_s).get("float32", chip.effective_flops_per_s)


def with_pace_of_ranks(cluster: Cluster, flops_per_s: float) -> Cluster:
    """Return the cluster with its ranks paced at another rate; products reach the same share of it."""
    peaks = tuple((dtype, flops_per_s) for dtype, _ in cluster.chip.peak_flops_per_s)
    effective = flops_per_s * reached_share_of_pace(cluster)
    return replace(cluster, chip=replace(cluster.chip.with_flops_per_s(effective), peak_flops_per_s=peaks))


def seeded_cases(
    seed: int,
    count: int,
    cluster: Cluster,
    mesh_shape: tuple[int, ...],
    names: Sequence[str] | None = None,
) -> list[FidelityCase]:
    """Return `count` cases, the same for the same arguments; case i is the same however many there are.

    The algorithms (`names`, or all) that can use the mesh take turns. Dataflow, sizes and configuration are drawn
    so that by estimate on `cluster` a run takes 0.2 to 1.5 s, computing takes 0.5 to 2 times as long as
    communicating, and no message is smaller than 32 KiB.

    Raises:
        UnsupportedError: no algorithm can use this mesh, or one has no such case on it.
    """
    ranks = math.prod(mesh_shape)
    usable = [name for name in names or PRODUCTS_2D if mesh_shape in PRODUCTS_2D[name].mesh_shapes(ranks)]
    if not usable:
        shape = "x".join(map(str, mesh_shape))
        raise UnsupportedError(f"none of {', '.join(names or PRODUCTS_2D)} can use a {shape} mesh")
    return [
        _draw(number, usable[number % len(usable)], random.Random(f"{seed}/{number}"), cluster, mesh_shape)
        for number in range(count)
    ]


def _draw(
    number: int, name: str, rng: random.Random, cluster: Cluster, mesh_shape: tuple[int, ...]
) -> FidelityCase:
    for _ in range(_ATTEMPTS):
        dataflow = rng.choice([d for d in DATAFLOWS if d in PRODUCTS_2D[name].dataflows])
        first, second = (rng.choice(_LOCAL_SIZES) * size for size in mesh_shape[:2])
        ratio = 2 ** rng.uniform(-1, 1)
        target_s = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** rng.uniform(0.1, 0.9)
        count = rng.choice(_SLICE_COUNTS)
        # The sliced dim follows from the time: first a guess, then in proportion.
        step = 8 * math.lcm(*mesh_shape) * (count if name == "meshslice" else 4)
        sliced = step * max(1, 4096 // step)
        for is_guess in (True, False, False):
            sizes = {
                "os": (first, second, sliced),
                "ls": (first, sliced, second),
                "rs": (sliced, second, first),
            }
            problem = Matmul2dProblem(*sizes[dataflow], mesh_shape, dataflow)
            pace = balanced_flops_per_s(problem, cluster, ratio)
            machine = matmul_machine(with_pace_of_ranks(cluster, pace), problem)
            config = _pick(name, problem, count, rng)
            if config is None:
                break
            case = FidelityCase(number, name, problem, config, 2 if max(mesh_shape) > 2 else 1, pace)
            estimated_s = estimate_skeleton(case.skeleton, machine).total_s
            fits = SHORTEST_S <= estimated_s <= LONGEST_S and _smallest_bytes(case) >= MIN_MESSAGE_BYTES
            if fits and not is_guess:
                return case
            sliced = step * max(1, round(sliced * target_s / estimated_s / step))
    shape = "x".join(map(str, mesh_shape))
    raise UnsupportedError(
        f"no product by {name} on a {shape} mesh of {cluster.name} takes {SHORTEST_S} to {LONGEST_S} s with "
        "messages of 32 KiB; give links of 10 Mbit/s to 10 Gbit/s"
    )


def _pick(name: str, problem: Matmul2dProblem, count: int, rng: random.Random) -> Matmul2dConfig | None:
    if name in ("meshslice", "meshslice_dp"):
        return Matmul2dConfig((1,) * count)
    candidates: Iterator[Matmul2dConfig] = PRODUCTS_2D[name].candidates(problem)
    limit = max(_SLICE_COUNTS)
    if name == "meshslice_tapered":
        offered = [c for c in candidates if len(set(c.slices)) > 1 and c.slice_count <= limit]
    else:
        offered = [c for c in candidates if c.slice_count <= limit]
    return rng.choice(offered) if offered else None


def _smallest_bytes(case: FidelityCase) -> int:
    """Return the bytes of the smallest message of any transfer, once lowered."""
    works = [task.work for _, task in case.skeleton.counted_tasks()]
    return min(
        (
            work.part_bytes
            // (case.ring_directions if work.kind in ("all_gather", "reduce_scatter") else work.packets)
            for work in works
            if isinstance(work, Transfer)
        ),
        default=MIN_MESSAGE_BYTES,
    )
