"""Times of steps of models with several kinds of layers: they do not depend on what was priced before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import meshweave as mw
from meshweave.algorithms.step import StepProblem, load_stack, step_of
from meshweave.algorithms.step.algorithm import TRAINING_STEP
from meshweave.algorithms.step.layers import bare_layer_s, layer_time
from meshweave.algorithms.step.space import SpaceOptions
from meshweave.algorithms.step.stages import stages_of
from meshweave.algorithms.step.write_units import _kind_names
from meshweave.base.errors import DescriptionError
from meshweave.describe.model.routed import FeedForward, GroupedHeads, composed_layer
from sampling import mostly_slow

DEEPSEEK = mw.load_model("deepseek-v3")
CLUSTER = mw.load_cluster("dgx-h100:512")
DEGREES = mw.Parallelism(data=64, pipeline=8, expert=64, micro_batch=1, strategy="megatron_sp")


def test_a_step_takes_what_it_takes_whatever_was_priced_before() -> None:
    stack = replace(load_stack("ideal"), copies=load_stack("torchtitan").copies)
    fresh, used = (StepProblem(DEEPSEEK, CLUSTER, 512, 4096, stack=stack) for _ in range(2))
    sharded = replace(DEGREES, zero=3)
    step_of(used, DEGREES)
    assert step_of(fresh, sharded).time_s == step_of(used, sharded).time_s


def test_a_layer_whose_exchanges_overlap_takes_no_less_than_its_bound() -> None:
    stack = replace(load_stack("ideal"), overlaps_exchanges=True)
    problem = StepProblem(DEEPSEEK, CLUSTER, 512, 4096, stack=stack)
    layer = layer_time(problem, DEGREES)
    assert bare_layer_s(problem, DEGREES) <= (layer.forward + layer.backward).total_s * (1 + 1e-9)


def test_stages_split_the_backward_part_of_the_kinds_that_they_have() -> None:
    narrow, wide = (composed_layer(4096, GroupedHeads(32, 8, 128), FeedForward(4096 * n)) for n in (1, 8))
    model = replace(DEEPSEEK, num_layers=8, hidden=4096, layers=((4, narrow), (4, wide)))
    problem = StepProblem(model, mw.load_cluster("dgx-h100:8"), 64, 4096, stack=load_stack("ideal"))
    degrees = mw.Parallelism(data=2, pipeline=2, tensor=2, micro_batch=1, schedule="zb-h1")
    stages = stages_of(problem, degrees)
    assert list(stages.layers) == [4, 4]
    for time in stages.times:
        assert time.split_s is not None
        assert (
            1 <= sum(time.split_s) / time.backward_s < 1.2
        )  # apart, gradients of weights hide fewer messages
    assert stages.times[1].split_s[0] > 2 * stages.times[0].split_s[0]


@pytest.mark.parametrize("counts", mostly_slow([(2, 1, 2), (4, 3), (3, 2), (1, 4, 4)], 1), ids=str)
def test_no_part_of_a_search_has_a_bound_above_its_steps(counts: tuple[int, ...]) -> None:
    """Of layers of several kinds in a known order: the rank with most layers may have the fast ones."""
    rng = random.Random(1)
    graphs = [composed_layer(512, GroupedHeads(4, 4, 128), FeedForward(512 * width)) for width in (4, 12)]
    runs = tuple((count, graphs[turn % 2]) for turn, count in enumerate(counts))
    model = replace(DEEPSEEK, num_layers=sum(counts), hidden=512, layers=runs, vocab_size=1024)
    problem = StepProblem(model, mw.load_cluster("dgx-h100:4"), 32, 1024, stack=load_stack("ideal"))
    tree, checked = TRAINING_STEP, 0
    for layouts in tree.branches(problem) or ():
        layout_parts = list(tree.branches(problem, layouts) or ())
        for layout in rng.sample(layout_parts, min(len(layout_parts), 25)):
            for choice in tree.branches(problem, layout) or ():
                for degrees in tree.branches(problem, choice) or ():
                    assert isinstance(degrees, mw.Parallelism)
                    least_s = max(
                        tree.lower_bound(problem, part, is_tight=True) for part in (layout, choice, degrees)
                    )
                    assert least_s <= step_of(problem, degrees).time_s * (1 + 1e-9)
                    checked += 1
    assert checked > 50


def test_ranks_sum_their_terms_of_the_gradient_of_shared_keys() -> None:
    """Latent attention gathers the latent forward, and scatters the sum of its gradient backward."""
    latent = replace(DEEPSEEK, num_layers=1, layers=((1, DEEPSEEK.layers[0][1]),), vocab_size=None)
    options: Any = {"tp": 4, "strategy": "megatron_sp", "stack": "ideal"}
    step = mw.step(latent, "dgx-h100:4", batch=1, sequence=1024, **options)
    program = TRAINING_STEP.program(step.problem, step.parallelism).expanded
    moved = [str(op) for op, _ in program.unbound_ops_on_rank(0) if "kva0" in str(op)]
    assert sum("all_gather" in op for op in moved) == sum("reduce_scatter" in op for op in moved) == 1


def test_units_of_many_kinds_are_in_the_order_of_kinds() -> None:
    graphs = [composed_layer(64, GroupedHeads(4, 4, 16), FeedForward(64 + 64 * kind)) for kind in range(12)]
    model = replace(DEEPSEEK, num_layers=12, hidden=64, layers=tuple((1, graph) for graph in graphs))
    problem = StepProblem(model, mw.load_cluster("dgx-h100:8"), 8, 512)
    assert _kind_names(problem) == [f"layer{number}" for number in range(12)]
    assert [kind.model.layer for _, kind in problem.kinds] == graphs


@pytest.mark.parametrize(
    "name", ["strategies", "schedules", "recompute", "zero", "tensor", "pipeline", "orders"]
)
def test_a_search_among_nothing_is_refused(name: str) -> None:
    with pytest.raises(DescriptionError, match=f"{name} has no value to search"):
        SpaceOptions(**{name: ()})
