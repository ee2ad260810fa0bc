"""Unit tasks: every element goes once to each rank that needs it, and cutting loses and repeats none."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_reshards import box, elements, numbered, problems

from meshweave.algorithms.reshard import (
    STRATEGIES,
    ReshardProblem,
    TensorMove,
    UnitTask,
    plan_reshard,
    unit_tasks,
)
from meshweave.algorithms.reshard.multicast import Strategy, multicasts_of
from meshweave.algorithms.reshard.resources import routes_of
from meshweave.algorithms.reshard.tasks import (
    TensorPiece,
    cut_piece,
    equal_shares,
    in_chunks,
    kinds_of_chunks,
    num_messages,
    with_tail,
)
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout import Layout, Partial, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.spec import layout_of_spec
from meshweave.describe.machine.cluster import load_cluster
from sampling import examples

LINE = Mesh.of("line", (2,), ("x",))


@examples(100)
@given(problems())
def test_every_element_comes_once_to_each_rank_that_needs_it(problem: ReshardProblem) -> None:
    tasks = unit_tasks(problem)
    for number, item in enumerate(problem.moves):
        for rank in item.dst.mesh.ranks:
            shard = np.zeros(item.dst.local_shape(item.shape, rank), int)
            for task in tasks:
                for piece in task.pieces if rank in task.destinations else ():
                    if piece.tensor_index == number:
                        shard[box(piece.dst_offsets, piece.shape)] += 1
            assert (shard == 1).all()


@examples(100)
@given(problems())
def test_pieces_lie_where_they_say_and_on_all_who_hold_them(problem: ReshardProblem) -> None:
    for task in unit_tasks(problem):
        assert task.num_bytes == sum(piece.num_bytes for piece in task.pieces) > 0
        for piece in task.pieces:
            item = problem.moves[piece.tensor_index]
            held = {rank: numbered(item.src, item.shape, rank) for rank in item.src.mesh.ranks}
            wanted = {rank: numbered(item.dst, item.shape, rank) for rank in item.dst.mesh.ranks}
            part = held[task.sources[0]][box(piece.src_offsets, piece.shape)]
            assert part.shape == piece.shape and part.size * item.element_bytes == piece.num_bytes
            for rank in task.sources:
                np.testing.assert_array_equal(held[rank][box(piece.src_offsets, piece.shape)], part)
            for rank in task.destinations:
                np.testing.assert_array_equal(wanted[rank][box(piece.dst_offsets, piece.shape)], part)
            assert {rank for rank in held if np.isin(part, held[rank]).any()} == set(task.sources)
            assert {rank for rank in wanted if np.isin(part, wanted[rank]).any()} == set(task.destinations)


@examples(100)
@given(problems())
def test_no_two_tasks_have_the_same_holders_and_needers(problem: ReshardProblem) -> None:
    tasks = unit_tasks(problem)
    assert len({(task.sources, task.destinations) for task in tasks}) == len(tasks)
    assert unit_tasks(problem) == tasks


# --- examples --------------------------------------------------------------------------------------------


def two_squares(src: str, dst: str, shape: tuple[int, ...] = (4, 4)) -> tuple[UnitTask, ...]:
    """From ranks 0 to 3 to ranks 4 to 7, both as 2 by 2."""
    first, second = (Mesh.of(name, (2, 2), ("x", "y"), at) for name, at in (("a", 0), ("b", 4)))
    item = TensorMove("m", shape, "float32", layout_of_spec(src, first), layout_of_spec(dst, second))
    return unit_tasks(ReshardProblem((item,)))


def test_a_row_each_to_halves_is_four_tasks() -> None:
    """Task 1 of figure 2 of AlpaComm (MLSys '23)."""
    tasks = two_squares("S01R", "S0R")
    assert [(task.sources, task.destinations) for task in tasks] == [
        ((0,), (4, 5)),
        ((1,), (4, 5)),
        ((2,), (6, 7)),
        ((3,), (6, 7)),
    ]
    assert [task.pieces for task in tasks[:2]] == [
        (TensorPiece(0, (0, 0), (at, 0), (1, 4), 16),) for at in range(2)
    ]


def test_halves_to_halves_are_two_tasks() -> None:
    """Task 2 of that figure, the meshes the other way round."""
    tasks = two_squares("S0R", "S0R")
    assert [(task.sources, task.destinations) for task in tasks] == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    assert tasks[0].pieces == (TensorPiece(0, (0, 0), (0, 0), (2, 4), 32),)


@pytest.mark.parametrize(
    ("src", "dst", "count"),
    [("S0R", "S0R", 2), ("RR", "S0R", 2), ("RR", "RR", 1), ("S01R", "RS01", 16), ("S0S1", "S1S0", 4)],
)
def test_known_numbers_of_tasks(src: str, dst: str, count: int) -> None:
    assert len(two_squares(src, dst)) == count


def test_nothing_and_a_scalar() -> None:
    assert two_squares("S0R", "S0R", (0, 4)) == ()
    (task,) = two_squares("", "", ())
    assert task.pieces == (TensorPiece(0, (), (), (), 4),)


def test_tensors_with_the_same_ways_are_one_task() -> None:
    src, dst = Layout(LINE, (Shard(0),)), Layout(Mesh.of("to", (2,), ("x",), 2), (Shard(0),))
    one, other = TensorMove("a", (4,), "float32", src, dst), TensorMove("b", (6, 3), "int16", src, dst)
    tasks = unit_tasks(ReshardProblem((one, other)))
    assert [[piece.tensor_index for piece in task.pieces] for task in tasks] == [[0, 1], [0, 1]]


# --- cutting ---------------------------------------------------------------------------------------------


@st.composite
def pieces(draw: st.DrawFn, item: int = 0) -> TensorPiece:
    """Of a tensor with as many dims as its number says."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=item, max_size=item)))
    src, dst = (tuple(draw(st.integers(0, 5)) for _ in shape) for _ in range(2))
    return TensorPiece(item, src, dst, shape, math.prod(shape) * draw(st.sampled_from([1, 2, 4, 8])))


any_piece = st.integers(0, 3).flatmap(pieces)
several = st.lists(any_piece, max_size=4)


def check_parts(whole: list[TensorPiece], parts: list[TensorPiece]) -> None:
    """Each element of each piece is in one part, in its place, and weighs what it did."""
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for into, all_of in ((1, whole), (-1, parts)):
        for piece in all_of:
            assert elements(piece) > 0
            for at in np.ndindex(piece.shape):
                where = tuple(
                    tuple(a + b for a, b in zip(ends, at, strict=True))
                    for ends in (piece.src_offsets, piece.dst_offsets)
                )
                weighs = found.setdefault((piece.tensor_index, *where), [0, 0])  # type: ignore[arg-type]
                weighs[0] += into
                weighs[1] += into * piece.num_bytes // elements(piece)
    assert all(left == [0, 0] for left in found.values())


def element_bytes(pieces: list[TensorPiece]) -> int:
    return max((piece.num_bytes // elements(piece) for piece in pieces), default=0)


@examples(200)
@given(any_piece, st.integers(1, 400))
def test_a_piece_is_cut_into_parts_of_so_many_bytes_at_most(piece: TensorPiece, most: int) -> None:
    parts = list(cut_piece(piece, most))
    check_parts([piece], parts)
    assert max(part.num_bytes for part in parts) <= max(most, element_bytes([piece]))
    if piece.num_bytes <= most:
        assert parts == [piece]
    assert len(parts) <= max(-(-2 * piece.num_bytes // most), 1)  # none are needlessly small


@examples(200)
@given(several, st.integers(1, 12))
def test_chunks_are_a_share_of_the_bytes_at_most(whole: list[TensorPiece], count: int) -> None:
    chunks = list(in_chunks(whole, count))
    check_parts(whole, chunks)
    assert num_messages(whole, count) == len(chunks)
    share = -(-sum(piece.num_bytes for piece in whole) // count)
    assert max((part.num_bytes for part in chunks), default=0) <= max(share, element_bytes(whole))


@examples(200)
@given(several, st.integers(1, 12), st.none() | st.integers(1, 200))
def test_kinds_of_chunks_count_all_chunks(whole: list[TensorPiece], count: int, tail: int | None) -> None:
    chunks = in_chunks(whole, count)
    expected = Counter(_kind(chunk) for chunk in (chunks if tail is None else with_tail(chunks, tail)))
    counted: Counter[Any] = Counter()
    for chunk, times in kinds_of_chunks(whole, count, tail):
        counted[_kind(chunk)] += times
    assert counted == expected and all(counted.values())


def _kind(piece: TensorPiece) -> tuple[Any, ...]:
    return piece.tensor_index, piece.shape, piece.num_bytes, piece.is_strided


@examples(200)
@given(several, st.integers(1, 5))
def test_lots_are_of_nearly_equal_size(whole: list[TensorPiece], count: int) -> None:
    lots = equal_shares(whole, count)
    total = sum(piece.num_bytes for piece in whole)
    assert len(lots) == count
    check_parts(whole, [piece for lot in lots for piece in lot])
    for lot in lots:
        off = abs(sum(piece.num_bytes for piece in lot) - total / count)
        assert off <= max(total / count / 8, element_bytes(whole)) + 1


def test_a_lot_has_whole_boxes_again() -> None:
    """It is made of parts of rows: those of a row continue one another, and then the rows do."""
    piece = TensorPiece(0, (0, 0), (3, 5), (6, 1000), 6000)
    assert equal_shares([piece], 2) == [
        (TensorPiece(0, (0, 0), (3, 5), (3, 1000), 3000),),
        (TensorPiece(0, (3, 0), (6, 5), (3, 1000), 3000),),
    ]


# --- what is refused -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    plain = Layout(LINE, (Replicate(),))
    with pytest.raises(LayoutError, match=r"w: the source layout line\[P\] is partial") as caught:
        TensorMove("w", (4,), "float32", Layout(LINE, (Partial(),)), plain)
    assert "\n" not in str(caught.value)
    with pytest.raises(LayoutError, match=r"w, destination: line\[S\(1\)\]: S\(1\) names a dim") as caught:
        TensorMove("w", (4,), "float32", plain, Layout(LINE, (Shard(1),)))
    assert "\n" not in str(caught.value)
    with pytest.raises(LayoutError, match="no tensor to reshard"):
        ReshardProblem(())
    with pytest.raises(LayoutError, match="2 ranks have a host, 1 a NIC"):
        HostTopology((0, 0), (0,), 1, 1)
    with pytest.raises(LayoutError, match="at least 1 byte per second"):
        HostTopology((0,), (0,), 0, 1)
    with pytest.raises(LayoutError, match="9 ranks do not fit the 8 chips"):
        HostTopology.of(load_cluster("p3.8xlarge"), 9)


def test_a_plan_needs_known_names_and_a_network_of_all_ranks() -> None:
    plain = Layout(LINE, (Replicate(),))
    problem = ReshardProblem((TensorMove("w", (4,), "float32", plain, plain),))
    network = HostTopology((0, 1), (0, 0), 1, 1)
    with pytest.raises(UnsupportedError, match=r"no strategy 'broadcasts'.*broadcast"):
        plan_reshard(problem, network, strategy="broadcasts")
    with pytest.raises(UnsupportedError, match="no order 'worst'"):
        plan_reshard(problem, network, order="worst")
    with pytest.raises(LayoutError, match="the host network has 1 ranks, and rank 1 takes part"):
        plan_reshard(problem, HostTopology((0,), (0,), 1, 1))


def test_the_host_network_of_a_cluster_has_its_hosts_and_nics() -> None:
    hosts = HostTopology.of(load_cluster("p3.8xlarge").with_chips(12), 9)
    assert hosts.host_of == (0, 0, 0, 0, 1, 1, 1, 1, 2) and set(hosts.nic_of) == {0}
    assert (hosts.nic_bytes_per_s, hosts.local_bytes_per_s) == (1_250_000_000, 150_000_000_000)
    assert hosts.nic(5) == (1, 0)
    assert len(set(HostTopology.of(load_cluster("tpu-v4-pod:16")).host_of)) == 16


@given(st.lists(st.integers(1, 7), max_size=3), st.integers(1, 200))
@examples(100)
def test_a_short_tail_loses_and_repeats_nothing(sizes: list[int], most: int) -> None:
    shape = tuple(sizes)
    whole = TensorPiece(0, (0,) * len(shape), (0,) * len(shape), shape, 4 * math.prod(shape))
    count = np.zeros(shape, np.uint8)
    parts = list(with_tail([whole], most))
    for part in parts:
        count[tuple(slice(at, at + size) for at, size in zip(part.src_offsets, part.shape, strict=True))] += 1
        assert part.num_bytes == 4 * math.prod(part.shape)
    assert (count == 1).all()
    assert parts[-1].num_bytes <= max(2 * most, 4)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=lambda strategy: strategy.name)
def test_an_order_is_chosen_by_what_multicasts_cost_on_their_routes(strategy: Strategy) -> None:
    """Of four ranks that have all, over two NICs, one sends or two do: packing is shared by these alone."""
    ranks = range(16)
    hosts = HostTopology(
        tuple(rank // 4 for rank in ranks),
        tuple(rank % 2 for rank in ranks),
        *(10**9, 10**10, 1e-5, 1e-6),
        pack_launch_s=5e-6,
        pack_bytes_per_s=2e10,
    )
    src, dst = Mesh.of("src", (4,), ("x",)), Mesh("dst", (2, 4), ("x", "y"), tuple(range(4, 12)))
    move = TensorMove(
        "t", (64, 4096), "float32", Layout(src, (Replicate(),)), Layout(dst, (Replicate(), Shard(1)))
    )
    everywhere = replace(move, dst=Layout(dst, (Replicate(), Replicate())))
    for each in (move, everywhere):
        (task, *_) = unit_tasks(ReshardProblem((each,)))
        for multicast in multicasts_of(task, hosts, strategy):
            cost = strategy.cost(multicast, hosts, 1)
            for route in routes_of(0, multicast, hosts, strategy):
                assert strategy.cost(route.multicast, hosts, 1) == cost
