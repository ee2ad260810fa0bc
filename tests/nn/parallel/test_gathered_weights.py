"""What a bucket gathers of a weight is what the product takes of it, by every strategy and around each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

import torch
import torch.distributed as dist
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshweave.algorithms.block import BlockAlgorithm
from meshweave.algorithms.block.roles import DATA_ROLES, RING
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.algorithms.step import Parallelism
from meshweave.algorithms.step.executed import zero_refusal
from meshweave.algorithms.step.space import tensor_strategies
from meshweave.algorithms.step.strategies import StrategyAround
from meshweave.algorithms.table import STRATEGIES
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.nn.parallel.buckets import KeptParameter
from meshweave.nn.parallel.linear import ParallelLinear, Place
from meshweave.nn.parallel.parameters import ParameterLayout
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.units import FeatureUnits
from sampling import examples

RANKS = 24
HIDDEN = 12


@pytest.fixture(autouse=True, scope="module")
def a_world_without_messages() -> Iterator[None]:
    """Let this process be the first of `RANKS`, which say nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def around(entry: BlockAlgorithm, zero: int | None, has_ring: bool) -> BlockAlgorithm:
    """Return a strategy with an axis of data parallelism, of context parallelism, both or neither around it."""
    roles = [*([] if zero is None else [DATA_ROLES[zero]]), *([RING] if has_ring else [])]
    return StrategyAround(entry, tuple(roles)) if roles else entry


def strategies_of(entry: BlockAlgorithm, sizes: tuple[int, ...]) -> list[LayerStrategy]:
    """Return a strategy as each rank of a mesh sees it.

    Raises LayoutError where the mesh does not fit.
    """
    rest = RANKS // math.prod(sizes)
    names = tuple(f"axis{at}" for at in range(len(sizes) + 1))
    mesh = init_device_mesh("cpu", (rest, *sizes), mesh_dim_names=names)[names[1:]]
    first = LayerStrategy.of(entry.name, mesh, entry=entry)
    return [
        LayerStrategy(first.name, first.roles, first.mesh, first.config, rank, mesh)
        for rank in first.mesh.ranks
    ]


def gathered(kept: KeptParameter, ranks: list[LayerStrategy], whole: torch.Tensor) -> torch.Tensor:
    """Return what the ranks that share a parameter along the gathered axes have of it together."""
    here = kept.strategy.coordinates
    if not kept.gathered:
        return kept.layout.local(whole, kept.strategy)
    members = [
        each
        for each in ranks
        if all(
            a == b
            for at, (a, b) in enumerate(zip(each.coordinates, here, strict=True))
            if at not in kept.gathered
        )
    ]
    rows = torch.full((len(members), kept.max_kept_elements), -1.0)
    for row, member in zip(rows, members, strict=True):
        own = kept.layout.local(whole, member).flatten()
        row[: own.numel()] = own
    out = torch.full(kept.used_shape, -2.0)
    for value, arrived in kept.pairs(out, rows):
        value.copy_(arrived)
    return out


@pytest.mark.parametrize("name", tensor_strategies())
def test_what_plans_are_told_of_parts_of_parts_is_what_modules_refuse(name: str) -> None:
    for zero, sizes in itertools.product(
        range(len(DATA_ROLES)), ((2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1))
    ):
        data, *tensor = sizes
        said = zero_refusal(Parallelism(data=data, tensor=(tensor[0], tensor[1]), zero=zero, strategy=name))
        refused = False
        try:
            ranks = strategies_of(around(STRATEGIES.named(name), zero, False), sizes)
            _ = ParallelLinear(nn.Linear(HIDDEN, HIDDEN, False), ranks[0], place="in").kept["weight"].gathered
        except LayoutError:  # of meshes or dims that do not fit
            continue
        except UnsupportedError:
            refused = True
        assert refused == bool(said), (zero, sizes)


def test_gathered_parts_of_ranks_of_which_others_keep_more() -> None:
    """Five features on two ranks: those with fewer gather rows as long as those of the others."""
    ranks = strategies_of(around(STRATEGIES.named("megatron"), 3, False), (2, 2, 1))
    linear = nn.Linear(HIDDEN, 5, False)
    whole = torch.arange(float(linear.weight.numel())).view_as(linear.weight)
    first = ParallelLinear(linear, ranks[0], place="in").kept["weight"]
    for rank in ranks:
        kept = KeptParameter(rank, first.layout, first.used, first.terms)
        wanted = ParameterLayout(first.layout.sides, first.used).local(whole, rank)
        assert torch.equal(gathered(kept, ranks, whole), wanted), rank.rank


@pytest.mark.parametrize("name", sorted(each.name for each in STRATEGIES.values()))
@examples(80, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_gathered_parts_are_what_products_take(name: str, data: st.DataObject) -> None:
    zero, has_ring = data.draw(st.sampled_from([None, *range(len(DATA_ROLES))])), data.draw(st.booleans())
    entry = around(STRATEGIES.named(name), zero, has_ring)
    shapes = itertools.product((1, 2, 3), repeat=len(entry.roles))
    sizes = data.draw(
        st.sampled_from([each for each in shapes if math.prod(each) > 1 and not RANKS % math.prod(each)])
    )
    place: Place = data.draw(st.sampled_from(("in", "out")))
    units, parts = data.draw(st.sampled_from([2, 4, 6, 8])), data.draw(st.sampled_from([1, 3]))
    parts, inner = parts if place == "in" else 1, 2 * units
    linear = nn.Linear(HIDDEN, parts * inner, False) if place == "in" else nn.Linear(inner, HIDDEN, False)
    whole = torch.arange(float(linear.weight.numel())).view_as(linear.weight)
    try:
        ranks = strategies_of(entry, sizes)
        made = ParallelLinear(linear, ranks[0], place=place, units=FeatureUnits(units, parts=parts))
        first = made.kept["weight"]
        _ = first.gathered
    except LayoutError:
        return
    except UnsupportedError as error:
        assert "weights in parts along" in str(error)
        assert zero and isinstance(STRATEGIES.named(name), IncludedProducts)
        return
    for rank in ranks:
        kept = KeptParameter(rank, first.layout, first.used, first.terms)
        wanted = ParameterLayout(first.layout.sides, first.used, parts).local(whole, rank)
        assert torch.equal(gathered(kept, ranks, whole), wanted), (name, zero, rank.mesh.shape, rank.rank)


def test_strategies_are_made_anew_in_another_world() -> None:
    """Device meshes of two worlds are equal, and the groups of the first are gone."""

    def made() -> tuple[LayerStrategy, object]:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        return LayerStrategy.of("megatron", mesh), mesh

    first, _ = made()
    assert made()[0] is first
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    other, mesh = made()
    assert other is not first
    assert other.device_mesh is mesh
