"""What a layer takes: attention in a ring as without one, and collectives of sliced weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshweave.algorithms.step import Parallelism, StepProblem
from meshweave.algorithms.step.data_parallel import data_parallel_time
from meshweave.algorithms.step.layers import layer_time
from meshweave.algorithms.step.stacks import load_stack
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model


def problem_of(num_chips: int, sequence: int = 32768) -> StepProblem:
    """Return steps of a catalog model on a catalog cluster."""
    cluster = load_cluster("dgx-h100").with_chips(num_chips)
    return StepProblem(load_model("llama-3-8b"), cluster, num_chips, sequence, overlap="layers")


@pytest.mark.parametrize("context", [2, 4])
def test_attention_in_a_ring_takes_its_share_of_attention_without_one(context: int) -> None:
    # its sums so far are in fp32, which once made it attention of fp32 tensors
    problem = problem_of(4)
    alone = layer_time(problem, Parallelism(data=4))
    ring = layer_time(problem, Parallelism(data=4 // context, context=context))
    for part in ("forward", "backward"):
        whole_s, share_s = getattr(alone, part).compute_s, getattr(ring, part).compute_s
        assert whole_s / context <= share_s * 1.01 and share_s <= 1.25 * whole_s / context, part


def test_sliced_weights_take_an_operation_for_each_tensor_and_replica() -> None:
    problem = problem_of(16, 4096)
    nanotron = replace(load_stack("nanotron"), sliced_weights=0)
    whole = replace(problem, stack=nanotron)
    sliced = replace(problem, stack=replace(nanotron, sliced_weights=6))
    for shards in (8, 16):
        p = Parallelism(data=shards, tensor=16 // shards, zero=1)
        added = (
            data_parallel_time(sliced, p).gather_s - data_parallel_time(whole, p).gather_s,
            data_parallel_time(sliced, p).table_gather_s - data_parallel_time(whole, p).table_gather_s,
        )
        assert added == pytest.approx((6 * shards * nanotron.launch_s, shards * nanotron.launch_s))
        assert data_parallel_time(sliced, p).reduce_s > data_parallel_time(whole, p).reduce_s
    for none in (Parallelism(data=16), Parallelism(data=1, tensor=16, zero=1)):
        assert data_parallel_time(sliced, none) == data_parallel_time(whole, none)
