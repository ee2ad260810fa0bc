"""Entries that run an algorithm at MeshSlice's slice counts, as the MeshSlice paper compares them (section 4.2).

Wang and SUMMA are unrolled there to the number of turns that MeshSlice's autotuner chose for the same product.
`wang[S=meshslice]` is that baseline; plain `wang` is tuned to its own best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshweave.algorithms.matmul2d import ALGORITHMS, Config, Matmul2d, MatmulProblem
from meshweave.algorithms.matmul2d.common.restricted import Restricted
from meshweave.base.errors import UnsupportedError, did_you_mean

LEADER = "meshslice"
FOLLOWERS: dict[str, str] = {
    f"{base}[S={LEADER}]": base for base in ("wang", "summa") if base in ALGORITHMS and LEADER in ALGORITHMS
}
"""Name in a plan, and the entry of the table that it runs."""

Product = tuple[int, int, int, str]
"""(M, N, K, dataflow): what a slice count belongs to, whatever the mesh."""


def product_of(problem: MatmulProblem) -> Product:
    return problem.m, problem.n, problem.k, problem.dataflow


def planned_names(asked: Sequence[str]) -> tuple[str, ...]:
    """What a plan of the algorithms asked for holds: each once, and followers of those asked for with their
    leader. Raises UnsupportedError for an unknown name or none at all."""
    for name in asked:
        if name not in ALGORITHMS and name not in FOLLOWERS:
            known = (*ALGORITHMS, *FOLLOWERS)
            raise UnsupportedError(f"there is no algorithm '{name}'{did_you_mean(name, known)}")
    if not asked:
        raise UnsupportedError(f"no algorithm named; there are {', '.join(ALGORITHMS)}")
    implied = [name for name, base in FOLLOWERS.items() if base in asked and LEADER in asked]
    return tuple(dict.fromkeys((*asked, *implied)))


def follower(name: str, counts: Mapping[Product, int]) -> Matmul2d:
    """The entry called `name` in `FOLLOWERS`, at these slice counts. It keeps all that its base may choose
    besides the count, which fits wherever it fits the leader: both cut the same dim of the same product."""
    base = ALGORITHMS[FOLLOWERS[name]]

    def candidates(problem: MatmulProblem) -> Iterator[Config]:
        slices = (1,) * counts[product_of(problem)]
        yield from dict.fromkeys(replace(config, slices=slices) for config in base.candidates(problem))

    return Restricted(base, name, candidates)
