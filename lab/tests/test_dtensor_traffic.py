"""What DTensor moves, against counts by hand."""

import pytest
import torch.distributed as dist

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.layout import Partial, Replicate, Shard, Tile
from meshweave_lab.bench.dtensor_traffic import (
    DTensorCollective,
    PlacedProduct,
    dtensor_traffic,
    dtensor_traffics,
)

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
CUBE = (8, 8, 8)  # 256 bytes a matrix in float32


def kinds(traffic):
    by_rank = {tuple(collective.kind for collective in rank) for rank in traffic.collectives}
    assert len(by_rank) == 1
    return by_rank.pop()


def test_one_axis_by_hand():
    cases = {
        (R, R): (R, 0, ()),
        (S0, R): (S0, 0, ()),
        (R, S1): (S1, 0, ()),
        (S1, S0): (P, 0, ()),
        (P, R): (P, 0, ()),
        (S0, S0): (S0, 3 * 64, ("all_gather",)),
        (P, S1): (P, 3 * 64, ("all_gather",)),
        (P, P): (P, 2 * 3 * 256 // 4, ("all_reduce",)),
    }
    products = [PlacedProduct((a,), (b,), CUBE) for a, b in cases]
    for traffic, (out, received, collectives) in zip(
        dtensor_traffics((4,), products), cases.values(), strict=True
    ):
        assert traffic.out_placements == (out,)
        assert traffic.received_bytes_per_rank == (received,) * 4
        assert traffic.received_bytes == 4 * received
        assert kinds(traffic) == collectives


def test_two_axes_by_hand():
    """Each axis gathers one operand: this rank's 64 bytes meet those of the one other rank in the group."""
    traffic = dtensor_traffic((2, 2), (S0, S1), (S0, S1), CUBE)
    assert traffic.out_placements == (S0, S1)
    assert traffic.received_bytes_per_rank == (128,) * 4
    assert traffic.collectives == ((DTensorCollective("all_gather", 2, 64),) * 2,) * 4
    assert dtensor_traffic((2, 2), (R, R), (R, R), CUBE).received_bytes == 0


def test_a_wanted_result_is_redistributed():
    def of(a, b, out):
        traffic = dtensor_traffic((4,), (a,), (b,), CUBE, out=(out,))
        assert traffic.out_placements == (out,)
        return kinds(traffic), set(traffic.received_bytes_per_rank)

    assert of(S1, S0, S0) == (("reduce_scatter",), {3 * 256 // 4})
    assert of(S1, S0, R) == (("all_reduce",), {2 * 3 * 256 // 4})
    assert of(S0, R, R) == (("all_gather",), {3 * 64})
    assert of(R, R, S1) == ((), {0})  # local chunks


def test_an_all_to_all_counts_as_one():
    """On CPU DTensor emulates it by an all-gather, which would be four times as much."""
    traffic = dtensor_traffic((4,), (S0,), (R,), CUBE, out=(S1,))
    assert kinds(traffic) == ("all_to_all",)
    assert traffic.received_bytes_per_rank == (3 * 64 // 4,) * 4


def test_padding_is_moved_too():
    """Rows 2, 2, 1, 0 of five are gathered as if all were 2."""
    traffic = dtensor_traffic((4,), (S0,), (S0,), (5, 5, 5))
    assert traffic.out_placements == (S0,)
    assert traffic.received_bytes_per_rank == (3 * 2 * 5 * 4,) * 4


def test_ranks_differ_where_shards_do():
    """Every rank sums up its own columns of B with (2, 2): 3 and 2 of five."""
    traffic = dtensor_traffic((2, 2), (R, R), (P, S1), (4, 5, 4), out=(R, S1))
    assert traffic.out_placements == (R, S1)
    assert traffic.received_bytes_per_rank == (4 * 3 * 4, 4 * 2 * 4) * 2


def test_element_size():
    assert dtensor_traffic((2,), (S0,), (S0,), CUBE, "float64").received_bytes_per_rank == (256, 256)


def test_mistakes():
    with pytest.raises(LayoutError, match="float32"):
        dtensor_traffic((2,), (S0,), (S0,), CUBE, "float23")
    with pytest.raises(LayoutError, match="1 axes"):
        dtensor_traffic((2,), (S0, S0), (S0,), CUBE)
    with pytest.raises(LayoutError, match=r"no placement T\(0, 2, 0\)"):
        dtensor_traffic((2,), (Tile(0, 2),), (S0,), CUBE)
    with pytest.raises(UnsupportedError, match="sums"):
        dtensor_traffic((2,), (S0,), (R,), CUBE, out=(P,))
    with pytest.raises(LayoutError, match="1 axes"):
        dtensor_traffic((2,), (S0,), (R,), CUBE, out=(R, R))
    with pytest.raises(LayoutError, match="names a dim"):
        dtensor_traffic((2,), (S0,), (R,), CUBE, out=(Shard(5),))
    assert not dist.is_initialized()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(UnsupportedError, match="already"):
            dtensor_traffic((2,), (S0,), (S0,), CUBE)
    finally:
        dist.destroy_process_group()
