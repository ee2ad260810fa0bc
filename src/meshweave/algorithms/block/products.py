"""The 2D products that layers include: programs and skeletons by algorithm, sizes and slices, each made once."""

from __future__ import annotations

from functools import lru_cache

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.table import PRODUCTS_2D
from meshweave.ir.program import Program
from meshweave.ir.skeleton import Skeleton

_KEPT = 4096
"""So many products are kept: those of a search over meshes and slices."""


@lru_cache(_KEPT)
def product_config(name: str, problem: Matmul2dProblem, slices: int, packets: int = 1) -> Matmul2dConfig:
    """Return the candidate of a 2D product that has the most slices up to `slices`; the fewest if all have more.

    Among all candidates those with the largest number of packets up to `packets` are considered.

    Args:
        name: the name of an algorithm of `matmul2d`.

    Raises:
        UnsupportedError: there is no algorithm of this name.
    """
    configs = list(PRODUCTS_2D.named(name).candidates(problem))
    fitting = max(config.packets for config in configs if config.packets <= packets)
    configs = [config for config in configs if config.packets == fitting]
    few = [config for config in configs if config.slice_count <= slices]
    if few:
        return max(few, key=lambda config: config.slice_count)
    return min(configs, key=lambda config: config.slice_count)


@lru_cache(_KEPT)
def product_program(name: str, problem: Matmul2dProblem, slices: int, packets: int = 1) -> Program:
    """Return the program of a 2D product by the algorithm `name`, in the config that `product_config` returns.

    Equal arguments return the same object, so that it is proved only once.
    """
    return PRODUCTS_2D.named(name).program(problem, product_config(name, problem, slices, packets))


@lru_cache(_KEPT)
def product_skeleton(name: str, problem: Matmul2dProblem, slices: int, packets: int = 1) -> Skeleton:
    """Return the skeleton of a 2D product by the algorithm `name`, in the config that `product_config` returns."""
    return PRODUCTS_2D.named(name).skeleton(problem, product_config(name, problem, slices, packets))
