"""Entries that run an algorithm at MeshSlice's slice counts, as the MeshSlice paper compares them (section 4.2).

Wang and SUMMA are unrolled there to the number of steps that MeshSlice's autotuner chose for the same product.
`wang[S=meshslice]` is that baseline; plain `wang` is tuned to its own best.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.meshslice import MeshSlice
from meshweave.algorithms.matmul2d.summa import Summa
from meshweave.algorithms.matmul2d.wang import Wang
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import UnsupportedError, require_known
from meshweave.describe.machine.cluster import Cluster

# --- restricted candidates --------------------------------------------------------------------------------

# A 2D product under another name and with fewer candidates, for fair comparisons.


def restricted(
    base: Matmul2d, name: str, chosen: Callable[[Matmul2dProblem], Iterator[Matmul2dConfig]]
) -> Matmul2d:
    """Return the algorithm `base` under another name, with the candidates that `chosen` yields for a problem.

    Comparisons need this: Wang's algorithm at the slice count that was best for MeshSlice, for example.
    """

    def candidates(problem: Matmul2dProblem, cluster: Cluster | None = None) -> Iterator[Matmul2dConfig]:
        return chosen(problem)

    entry = copy.copy(base)
    entry.name, entry.candidates = name, candidates  # type: ignore[misc, method-assign]
    return entry


# --- unrolled ---------------------------------------------------------------------------------------------

REFERENCE_ALGORITHM = MeshSlice.name
UNROLLED: dict[str, str] = {f"{base}[S={REFERENCE_ALGORITHM}]": base for base in (Wang.name, Summa.name)}
"""Name in a plan, and the entry of the table that it runs."""

ProductSizes = tuple[int, int, int, str]
"""(M, N, K, dataflow): what a slice count belongs to, whatever the mesh."""


def sizes_of(problem: Matmul2dProblem) -> ProductSizes:
    """Return (M, N, K, dataflow) of a problem, which do not depend on its mesh."""
    return problem.m, problem.n, problem.k, problem.dataflow


def planned_names(requested: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithms that a plan holds: each requested name once, then the variants that they imply.

    "wang" and "meshslice" together imply "wang[S=meshslice]", "summa" and "meshslice" "summa[S=meshslice]".

    Raises:
        UnsupportedError: a name is unknown, or there is none.
    """
    for name in requested:
        require_known(name, (*PRODUCTS_2D, *UNROLLED), "there is no algorithm", UnsupportedError)
    if not requested:
        raise UnsupportedError(f"no algorithm named; there are {', '.join(PRODUCTS_2D)}")
    implied = [
        name for name, base in UNROLLED.items() if base in requested and REFERENCE_ALGORITHM in requested
    ]
    return tuple(dict.fromkeys((*requested, *implied)))


def unrolled_entry(name: str, counts: Mapping[ProductSizes, int]) -> Matmul2d:
    """Return the algorithm `name`, such as `wang[S=meshslice]`, which slices each product as MeshSlice does.

    Its candidates for a product are the configs of plain `wang` or `summa` with `counts[sizes_of(problem)]` slices
    in place of their own; of Wang's algorithm with the number of iterations that it then runs. They raise KeyError
    for a product that `counts` lacks.

    Args:
        name: a key of `UNROLLED`.
        counts: the number of slices by (M, N, K, dataflow).
    """
    base = PRODUCTS_2D[UNROLLED[name]]

    def candidates(problem: Matmul2dProblem) -> Iterator[Matmul2dConfig]:
        slices = (1,) * counts[sizes_of(problem)]
        configs = (replace(config, slices=slices) for config in base.candidates(problem))
        if isinstance(base, Wang):
            configs = (replace(each, slices=(1,) * base.num_iterations(problem, each)) for each in configs)
        yield from dict.fromkeys(configs)

    return restricted(base, name, candidates)
