"""The generator of dropout, which all ranks of a model have in one state."""

from __future__ import annotations

import torch

from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.nn.parallel.moves import PlacedMove
from meshweave.nn.parallel.strategy import LayerStrategy


def seed_alike(strategy: LayerStrategy) -> None:
    """Seed torch's default generator with a number drawn on the first rank, on all ranks of the mesh.

    Collective.
    """
    if strategy.is_alone:
        return
    axis = (Side("", 1),)
    terms: AxisDims = tuple("partial" if size > 1 else "" for size in strategy.mesh.shape)
    first = PlacedMove(strategy, axis, terms, strategy.roles.nowhere, has_tokens=False)
    own = torch.initial_seed() % (1 << 50) if strategy.rank == strategy.mesh.ranks[0] else 0
    torch.manual_seed(
        int(first.sized(1, 1, torch.float64).run(torch.tensor([float(own)], dtype=torch.float64)))
    )
