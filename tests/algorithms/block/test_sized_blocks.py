"""Skeletons of blocks for any number of sequences, and kernels by roles, against those that are written."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.nodes import kernels_of
from meshweave.algorithms.block.sized import FlatTask
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.base.errors import LayoutError
from meshweave.cost.calls import with_counts
from meshweave.estimate import skeleton_ps
from meshweave.ir.skeleton import Task
from meshweave.ir.work import Compute, Work
from sampling import examples

PLAIN = [entry for entry in ENTRIES if not isinstance(entry, IncludedProducts)]
MESHSLICE = next(entry for entry in ENTRIES if entry.name == "meshslice_block")

PROBLEMS = st.builds(
    BlockProblem,
    batch=st.integers(1, 9),
    sequence=st.sampled_from((6, 64)),
    hidden=st.sampled_from((8, 10, 32)),
    heads=st.sampled_from((4, 8)),
    kv_heads=st.sampled_from((1, 2, 4)),
    head_dim=st.just(4),
    ffn=st.sampled_from((12, 32)),
    family=st.sampled_from(("gpt", "llama")),
    training=st.booleans(),
    dtype=st.just("bfloat16"),
    vocabulary=st.sampled_from((0, 50)),
    biases=st.booleans(),
)
SHAPES = st.lists(st.integers(1, 4), min_size=3, max_size=3)


def laid(entry: BlockAlgorithm, problem: BlockProblem, shape: list[int]) -> BlockProblem | None:
    """Return a problem on a mesh of a strategy, or None where it does not fit."""
    problem = replace(problem, mesh_shape=tuple(shape[: len(entry.roles)]))
    return problem if entry.refusal(problem) is None else None


def duration(work: Work) -> int:
    """Return some picoseconds that differ between works."""
    return 1 + sum(map(ord, repr(work))) % 97


def makespan(steps: list[FlatTask]) -> int:
    """Return when the last step ends: each waits for its lane and for those that it names."""
    lanes: dict[str, int] = {}
    ends: list[int] = []
    for lane, work, after, times, _ in steps:
        begin = max([lanes.get(lane, 0), *(ends[other] for other in after)])
        lanes[lane] = begin + times * duration(work)
        ends.append(lanes[lane])
    return max(ends)


@examples(60)
@given(entry=st.sampled_from(PLAIN), problem=PROBLEMS, shape=SHAPES)
def test_tasks_of_a_size_are_those_that_are_written(
    entry: BlockAlgorithm, problem: BlockProblem, shape: list[int]
) -> None:
    placed = laid(entry, problem, shape)
    if placed is None:
        return
    try:
        written = entry.skeleton(placed, BlockConfig()).phases[0].tasks
    except LayoutError:
        return
    sized = entry.sized_skeleton(replace(placed, batch=1))
    steps = sized.steps(sized.sequences(placed.batch), BlockConfig())
    tasks = [task for task in written if isinstance(task, Task)]
    expected = [(x.lane, x.work, tuple(int(name) for name, _ in x.after), x.times) for x in tasks]
    assert [tuple(step[:4]) for step in steps] == expected


@examples(20)
@given(problem=PROBLEMS, shape=SHAPES, sequences=st.integers(1, 3), slices=st.sampled_from((1, 2, 4)))
def test_products_of_a_size_take_as_long_as_those_that_are_written(
    problem: BlockProblem, shape: list[int], sequences: int, slices: int
) -> None:
    problem = replace(problem, mesh_shape=tuple(shape[:2]), batch=sequences * shape[0])
    config = BlockConfig(slices=slices)
    sized = MESHSLICE.sized_skeleton(replace(problem, batch=1))
    steps = sized.steps(sequences, config)
    assert makespan(steps) == skeleton_ps(MESHSLICE.skeleton(problem, config), duration)


@examples(60)
@given(entry=st.sampled_from(PLAIN), problem=PROBLEMS, shape=SHAPES)
def test_kernels_by_roles_are_among_those_that_are_written(
    entry: BlockAlgorithm, problem: BlockProblem, shape: list[int]
) -> None:
    """As many FLOPs of products, at most as many of other calls, and at most as many bytes."""
    placed = laid(entry, replace(problem, training=True, vocabulary=0), shape)
    if placed is None:
        return
    try:
        skeleton = entry.skeleton(placed, BlockConfig())
    except LayoutError:
        return
    kernels = [(kernel.times, kernel.work) for kernel in kernels_of(placed, entry.roles_of(placed))]
    tasks = [(count, task.work) for count, task in skeleton.counted_tasks() if isinstance(task.work, Compute)]
    for call in ("", "norm", "elementwise", "reduction"):
        least, written = (
            [(count, with_counts(work)) for count, work in each if work.call == call]
            for each in (kernels, tasks)
        )
        assert sum(n * work.bytes for n, work in least) <= sum(n * work.bytes for n, work in written)
        flops = [sum(n * work.flops for n, work in each) for each in (least, written)]
        assert flops[0] == flops[1] if not call else flops[0] <= flops[1]
    products = sorted(work.dims for _, work in kernels if work.kind == "matmul")
    assert products == sorted(work.dims for _, work in tasks if work.kind == "matmul")
