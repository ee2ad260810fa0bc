"""A model's whole state dict in one schedule: every element arrives once, and few bytes are needed beside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from meshweave.algorithms.reshard import (
    STRATEGIES,
    ReshardPlan,
    ReshardProblem,
    TensorMove,
    plan_reshard,
    reshard_program,
)
from meshweave.cost.fabric import HostTopology
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.state_dict import llama_parameters, server_layout, trainer_layout
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import On, Program
from meshweave.ir.program.ops import Copy, Recv
from meshweave.ir.program.views import Range, View


def planned(
    model: Transformer, trainer: tuple[int, int], server: tuple[int, int], strategy: str = "broadcast"
) -> ReshardPlan:
    src = Mesh.of("trainer", trainer, ("fsdp", "tp"))
    dst = Mesh.of("server", server, ("replica", "tp"), src.num_ranks)
    items = (
        TensorMove(one.name, one.shape, "bfloat16", trainer_layout(one, src), server_layout(one, dst))
        for one in llama_parameters(model)
    )
    chips = -(-(src.num_ranks + dst.num_ranks) // 8) * 8
    # Bytes alone: a NIC takes 2,300 messages, whose launches would come on top of the bound.
    network = replace(
        HostTopology.of(load_cluster("dgx-h100").with_chips(chips)), nic_latency_s=0.0, local_latency_s=0.0
    )
    return plan_reshard(ReshardProblem(tuple(items)), network, strategy=strategy)


def written(
    program: Program, plan: ReshardPlan, wanted: set[int]
) -> dict[tuple[int, int], NDArray[np.uint8]]:
    """How often each element of the outputs of `wanted` items is written, by item and rank."""
    counts = {
        (number, rank): np.zeros(plan.problem.moves[number].dst.local_shape(item.shape, rank), np.uint8)
        for number, item in enumerate(plan.problem.moves)
        if number in wanted
        for rank in item.dst.mesh.ranks
    }
    for statement in program.body:
        assert isinstance(statement, On) and isinstance(statement.where, tuple)
        ((rank,), (op,)) = statement.where, statement.body
        if not isinstance(op, Recv | Copy) or not op.out.buffer.startswith("y"):
            continue
        if (number := int(op.out.buffer[1:])) in wanted:
            counts[number, rank][_slices(op.out)] += 1
    return counts


def _slices(view: View) -> tuple[slice, ...]:
    found = []
    for one in view.selectors:
        assert isinstance(one, Range) and isinstance(one.start, int) and isinstance(one.stop, int)
        found.append(slice(one.start, one.stop))
    return tuple(found)


def test_llama_2_7b_from_64_ranks_to_8() -> None:
    plan = planned(load_model("llama-2-7b"), (8, 8), (4, 2))
    program = reshard_program(plan)
    names = {item.name: number for number, item in enumerate(plan.problem.moves)}
    looked_at = {
        names[name]
        for name in (
            "model.embed_tokens.weight",
            "model.layers.7.self_attn.k_proj.weight",
            "model.layers.31.mlp.down_proj.weight",
            "model.norm.weight",
        )
    }
    counts = written(program, plan, looked_at)
    assert len(counts) == 4 * 8
    for (number, rank), found in counts.items():
        assert (found == 1).all(), (plan.problem.moves[number].name, rank)
    parameters = 6_738_415_616
    assert plan.bytes_across_hosts == plan.least_bytes_across_hosts == 2 * parameters
    assert plan.predicted_s < 1.05 * plan.bound_s  # chains inside hosts wait for each other's lanes
    peaks = {rank: plan.local_bytes(rank) + plan.scratch_bytes(rank) for rank in plan.problem.ranks}
    # Half of the model and its norms (65 of 4096) on a server, and not 1 % beside it.
    assert parameters < max(peaks.values()) < 1.01 * parameters


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_small_llama_is_proved(strategy: str) -> None:
    sizes = {
        "hidden": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden": 48,
        "vocab_size": 56,
    }
    small = replace(load_model("llama-2-7b"), name="small", num_layers=1, **sizes)
    plan = planned(small, (4, 2), (2, 4), strategy)
    assert validate(reshard_program(plan)).skipped == ()
