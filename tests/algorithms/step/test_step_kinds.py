"""Layers of other graphs, and of several kinds, in the price of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.step import simulate_step, step_of
from meshweave.algorithms.step.layers import bare_layer_s, layer_time
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.stage_layers import stage_kinds
from meshweave.algorithms.table import STRATEGIES
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.describe.model.memory import step_flops
from meshweave.describe.model.workload import Workload
from meshweave.ir.work import Transfer, traffic
from meshweave.tune.step_search import StepSearch, StepSpace

CLUSTER = load_cluster("dgx-h100:8")
LLAMA = load_model("llama-3-8b")
EIGHT = Parallelism(data=2, tensor=4)


def model(**own: Any) -> Transformer:
    """Return a Llama of another architecture."""
    return replace(LLAMA, architecture=replace(LLAMA.architecture, **own))


def problem(**own: Any) -> StepProblem:
    """Return a step of it on long sequences."""
    return StepProblem(model(**own), CLUSTER, 16, 16384)


def test_a_window_takes_the_time_of_the_keys_that_it_leaves() -> None:
    whole, windowed = problem(), problem(window=1024)
    times = [step_of(each, EIGHT).time_s for each in (whole, windowed)]
    saved = [step_flops(each.model, each.workload) for each in (whole, windowed)]
    assert times[1] < times[0] and saved[1] < saved[0]
    pairs = 1024 * 1025 // 2 + (16384 - 1024) * 1024
    layers, heads = LLAMA.num_layers, LLAMA.num_heads * LLAMA.head_dim
    assert saved[0] - saved[1] == 12 * 16 * layers * heads * (16384 * 16385 // 2 - pairs)
    assert step_flops(model(window=20000), Workload(16, 16384)) == saved[0]


def test_layers_of_two_kinds_take_the_mean_of_both() -> None:
    mixed = problem(window=1024, windowed_layers=8)
    kinds = [layer_time(each, EIGHT).forward.total_s for each in (problem(window=1024), problem())]
    layer = layer_time(mixed, EIGHT)
    assert layer.forward.total_s == pytest.approx((8 * kinds[0] + 24 * kinds[1]) / 32, rel=1e-12)
    whole = layer.forward.total_s + layer.backward.total_s
    assert bare_layer_s(mixed, EIGHT) == pytest.approx(whole, rel=1e-9)


def test_parts_beside_each_other_are_reduced_once() -> None:
    block = BlockProblem(2, 8, 16, 4, 4, 4, 32, (4, 1), family="llama")
    entry = STRATEGIES["megatron"]
    sizes = replace(LLAMA, hidden=16, num_heads=4, num_kv_heads=4, head_dim=4, ffn_hidden=32)
    graphs = [
        replace(sizes, architecture=replace(sizes.architecture, residual=kind)).layer
        for kind in ("", "parallel", "parallel with one norm")
    ]
    moved = [
        sum(traffic(entry.program(replace(block, graph=graph), BlockConfig()), 0).values())
        for graph in graphs
    ]
    assert moved[1] == moved[0] * 3 // 4  # forward one sum in place of two; backward one for each norm
    assert moved[2] == moved[0] // 2
    by_sites = entry.skeleton(replace(block, graph=graphs[2]), BlockConfig(overlap="sites"))
    assert (
        sum(isinstance(task.work, Transfer) for _, task in by_sites.counted_tasks()) == 4
    )  # as models run them


def test_norms_after_parts_take_time() -> None:
    plain, sandwich = (step_of(problem(norms=kind), EIGHT).time_s for kind in ("", "before and after"))
    assert plain < sandwich < 1.1 * plain


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_each_kind_reduces_its_own_weights(pipeline: int, zero: int) -> None:
    """Of four dense layers and four with experts, in one stage or one each; replicas set the pace."""
    config = {
        "model_type": "deepseek_v2", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16,
        "vocab_size": 32000, "intermediate_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 4, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    of = StepProblem(transformer_from_config(config, "half"), load_cluster("dgx-h100:64"), 128, 256)
    parallelism = Parallelism(64 // pipeline, pipeline, expert=2, zero=zero, strategy="megatron_sp")
    step = step_of(of, parallelism)
    assert step.parts.data > 0.3 * step.time_s
    assert simulate_step(step).time_s == pytest.approx(step.time_s, rel=0.05)


def test_the_search_of_two_kinds_finds_the_best_of_all() -> None:
    small = replace(model(window=512, windowed_layers=5), num_layers=16)
    mixed = StepProblem(small, CLUSTER, 16, 4096)
    search = StepSearch(StepSpace(mixed), CLUSTER.chip.memory_bytes)
    best = search.ranking().rows[0]
    others = (
        Parallelism(data=d, tensor=8 // d, strategy=s)
        for d in (1, 2, 4, 8)
        for s in ("megatron", "megatron_sp")
    )
    times = [step_of(mixed, each) for each in others]
    fitting = [each.time_s for each in times if each.memory.total <= mixed.usable_bytes()]
    assert best.time_s <= min(fitting, default=math.inf) * (1 + 1e-9)


def test_kinds_of_stages_are_counted_once_a_step() -> None:
    model = load_model("deepseek-v3")
    problem = StepProblem(model, load_cluster("dgx-h100:64"), 64, 4096)
    kinds = stage_kinds(problem, (16, 15, 15, 15))
    assert kinds == ((3.0, 13.0), (0.0, 15.0), (0.0, 15.0), (0.0, 15.0))
    assert stage_kinds(problem, [16, 15, 15, 15]) is kinds
    assert stage_kinds(problem, (2, 59)) == ((2.0, 0.0), (1.0, 58.0))
