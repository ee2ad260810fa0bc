"""Times what ranks of this machine do together: sums by bound programs, and linear layers that they share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.algorithms.block.sites import MoveSite
from meshweave.nn.parallel.all_ranks import AllRanks
from meshweave.nn.parallel.linear import ParallelLinear
from meshweave.nn.parallel.programs import SizedMove
from meshweave.nn.parallel.seeds import keep_generators
from meshweave.nn.parallel.strategy import LayerStrategy

BETWEEN = 400
"""Rows and columns of the products that sums are timed between: some milliseconds on one core."""
_SUMS, _REPEATS, _REPEATS_BY_TURNS = 5, 5, 15


def group_mesh(among: AllRanks, ranks: int) -> DeviceMesh:
    """Return a device mesh of one dim over this rank's group, where the world is cut into groups of `ranks` ranks.

    Groups are of consecutive ranks. All ranks call it; `ranks` divides their number.
    """
    device, num_ranks = among.context.device.type, len(among.ranks)
    if ranks == num_ranks:
        return init_device_mesh(device, (ranks,))
    return init_device_mesh(device, (num_ranks // ranks, ranks), mesh_dim_names=("groups", "each"))["each"]


@dataclass(frozen=True)
class TwoLayers:
    """Two linear layers, from `features` to `inner` and back, to time on each rank alone and shared by ranks.

    Attributes:
        among: all ranks of the world.
        tokens: rows on which a rank runs both layers by itself, to compare with.
        features, inner: features of the input, and of what is between the layers.
        between: rows and columns of the square matrices whose product follows the layers, which no ranks share.
    """

    among: AllRanks
    tokens: int
    features: int
    inner: int
    between: int

    def added_s(self, ranks: int, strategy: str, tokens: int) -> float:
        """Return the seconds by which both layers, forward and backward, take longer if ranks share them.

        It is compared with each rank that runs them by itself on `self.tokens` rows; it is a median, and may be
        negative. Collective.

        Args:
            ranks: how many neighbours share them; all such groups run at once.
            strategy: name of the block strategy by which ranks share them.
            tokens: rows of the input that a rank has: those of its whole group under Megatron, its own under
                ZeRO-3.
        """
        context = self.among.context
        with context.device, keep_generators(context.device.type):
            first = nn.Linear(self.features, self.inner, bias=False)
            second = nn.Linear(self.inner, self.features, bias=False)
        shared_by = LayerStrategy.of(strategy, group_mesh(self.among, ranks), context=context)
        up = ParallelLinear(copy.deepcopy(first), shared_by, place="in")
        down = ParallelLinear(copy.deepcopy(second), shared_by, place="out")
        shared, alone = self._run(up, down, tokens), self._run(first, second, self.tokens)
        return self.among.median_more_s(_several(shared), _several(alone), _REPEATS_BY_TURNS) / _SUMS

    def _run(self, up: nn.Module, down: nn.Module, tokens: int) -> Callable[[], object]:
        """Return what runs two layers and the product after them forward and backward."""
        device = self.among.context.device
        x = torch.ones(1, tokens, self.features, requires_grad=True, device=device)
        square = torch.ones(self.between, self.between, requires_grad=True, device=device)

        def run() -> None:
            up.weight.grad = down.weight.grad = x.grad = square.grad = None
            (down(up(x)).sum() + (square @ square).sum()).backward()

        return run


def sum_over(strategy: LayerStrategy, num_bytes: int, *, is_whole: bool = False) -> Callable[[], object]:
    """Return a function that all-reduces `num_bytes` of float32 zeros over a strategy's ranks. Collective, both.

    Args:
        strategy: the strategy on its ranks.
        num_bytes: the size of each rank's tensor.
        is_whole: whether the sum is one collective of the backend, as of gradients in buckets; else messages.
    """
    device = torch.empty(0, device=strategy.device_mesh.device_type).device
    terms: AxisDims = tuple("partial" if size > 1 else "" for size in strategy.mesh.shape)
    site = MoveSite((Side("", num_bytes // torch.float32.itemsize),), terms, strategy.roles.replicated)
    bound = SizedMove(site, strategy, torch.float32, is_whole).bound_apart(device)
    bound.inputs["x"].zero_()
    return lambda: bound.run(bound.inputs)


def added_s(among: AllRanks, run: Callable[[], object]) -> float:
    """Return the seconds that a call of `run` adds to a product before it, or takes by itself if that is more.

    The product is one of square matrices of `BETWEEN` rows. What `run` adds is the least of the ranks' medians,
    what it takes by itself the greatest. Collective.
    """
    square = torch.ones(BETWEEN, BETWEEN, device=among.context.device)

    def product() -> None:
        square @ square

    def both() -> None:
        product()
        run()

    more_s = among.median_more_s(_several(both), _several(product), _REPEATS) / _SUMS
    return max(more_s, each_s(among, run))


def each_s(among: AllRanks, run: Callable[[], object]) -> float:
    """Return the seconds of a call of `run` on the slowest rank, the median of some series. Collective."""
    return among.median_s(_several(run), _REPEATS) / _SUMS


def _several(run: Callable[[], object]) -> Callable[[], object]:
    """Return what runs several times, one after the other."""
    return lambda: [run() for _ in range(_SUMS)]
