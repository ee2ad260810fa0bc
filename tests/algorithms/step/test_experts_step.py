"""Steps of models with experts: degrees, memory, where groups lie, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product

import numpy as np
import pytest

from meshweave.algorithms.step import (
    Parallelism,
    StepProblem,
    least_memory,
    load_stack,
    memory_of,
    step,
    step_of,
)
from meshweave.algorithms.step.checks import can_be_laid_out
from meshweave.algorithms.step.layers import layer_time
from meshweave.algorithms.step.placement import expert_axes, expert_replica_groups, expert_sharding_groups
from meshweave.algorithms.step.problem import DEGREES
from meshweave.algorithms.step.quantizing import added_passes, quantizing
from meshweave.algorithms.step.routing import chosen_shares, drawn_loads, expert_ranks
from meshweave.algorithms.step.space import SpaceOptions, StepSpace
from meshweave.algorithms.step.stages import stages_of
from meshweave.base.errors import DescriptionError, LayoutError, MeshweaveError, UnsupportedError
from meshweave.describe.catalog import models
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.host import HostRates
from meshweave.describe.model import load_model
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.tune.plan_description import planned_problem
from meshweave.tune.plan_file import load_plan
from meshweave.tune.plan_records import degrees_of
from meshweave.tune.step_search.planner import plan_step

MIXTRAL = transformer_from_config(
    {
        "model_type": "mixtral", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000, "intermediate_size": 3584, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral",
)  # fmt: skip
LATENT = transformer_from_config(
    {
        "model_type": "deepseek_v3", "num_hidden_layers": 7, "hidden_size": 1024, "num_attention_heads": 16,
        "vocab_size": 32000, "intermediate_size": 4096, "moe_intermediate_size": 512, "n_routed_experts": 32,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "q_lora_rank": 256,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    },
    "latent",
)  # fmt: skip


def problem(model=MIXTRAL, chips: int = 32, **more: object) -> StepProblem:  # type: ignore[no-untyped-def]
    """Return a step of 64 sequences of 2048 tokens."""
    return StepProblem(model, load_cluster(f"dgx-h100:{chips}"), 64, 2048, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [MIXTRAL, LATENT])
@pytest.mark.parametrize(
    "choice",
    [
        Parallelism(data=32, expert=8, zero=1),
        Parallelism(data=8, tensor=4, expert=4, expert_tensor=2),
        Parallelism(data=8, pipeline=4, expert=8, zero=3, recompute="full"),
        Parallelism(data=4, pipeline=4, tensor=2, expert=8, recompute="selective"),
    ],
)
def test_a_step_has_time_and_memory_that_add_up(model, choice: Parallelism) -> None:  # type: ignore[no-untyped-def]
    made = step_of(problem(model), choice)
    assert made.parts.total == pytest.approx(made.time_s, rel=1e-6)
    assert 0 < made.mfu < 1
    assert made.memory.total > 0


def test_experts_are_divided_by_their_own_degrees() -> None:
    weights = [
        memory_of(problem(), Parallelism(data=32, expert=ranks)).ranks[0].weights for ranks in (1, 2, 8)
    ]
    graph = MIXTRAL.layer
    others = 2 * (8 * (graph.num_weights + graph.num_whole_weights) + 2 * 32000 * 1024)
    each = [2 * 8 * graph.num_expert_weights // ranks for ranks in (1, 2, 8)]
    assert weights == [others + experts for experts in each]
    both = memory_of(problem(), Parallelism(data=16, tensor=2, expert=4, expert_tensor=2)).ranks[0].weights
    assert both == others // 2 + each[2] + 8 * graph.num_whole_weights


def test_replicas_of_experts_share_their_own_states() -> None:
    choice = Parallelism(data=32, expert=8, zero=1)
    assert choice.expert_replicas == choice.expert_shards == 4
    states = memory_of(problem(), choice).ranks[0].optimizer
    graph = MIXTRAL.layer
    others = 8 * (graph.num_weights + graph.num_whole_weights) + 2 * 32000 * 1024
    assert states == pytest.approx(12 * (others / 32 + graph.num_expert_weights * 8 / 8 / 4), rel=1e-4)


@pytest.mark.parametrize("tensor, context", [(1, 1), (4, 1), (2, 4)])
@pytest.mark.parametrize("expert", [1, 4, 8])
@pytest.mark.parametrize("zero", [1, 3])
def test_one_group_of_zero_is_none_also_for_experts(
    tensor: int, context: int, expert: int, zero: int
) -> None:
    degrees = {"data": 32 // tensor // context, "tensor": tensor, "context": context, "expert": expert}
    none = Parallelism(**degrees, zero=zero)  # type: ignore[arg-type]
    whole = replace(none, zero_group=none.replicas)
    assert whole.expert_shards == none.expert_shards == none.expert_replicas
    steps = step_of(problem(), none), step_of(problem(), whole)
    assert steps[0].time_s == pytest.approx(steps[1].time_s)
    assert steps[0].memory == steps[1].memory


def test_experts_are_sharded_inside_a_group_of_zero() -> None:
    counts = {16: 2, 8: 1, 4: 1, 32: 4, None: 4}
    for group, count in counts.items():
        choice = Parallelism(data=32, expert=8, zero=1, zero_group=group)
        assert choice.expert_shards == count
        shards, copies = expert_sharding_groups(choice)
        assert shards == (((count, 8),) if count > 1 else ())
        assert copies == (((4 // count, 8 * count),) if count < 4 else ())


@pytest.mark.parametrize(
    "expert, tensor", [(3, 1), (3, 4), (3, 2), (24, 1), (4, 3), (1, 3), (12, 2), (2, 12)]
)
def test_replicas_of_experts_are_all_ranks_that_have_the_same_ones(expert: int, tensor: int) -> None:
    for degrees in (
        {"data": 6, "tensor": 4},
        {"data": 3, "tensor": 8},
        {"data": 3, "tensor": 4, "context": 2},
    ):
        p = Parallelism(**degrees, expert=expert, expert_tensor=tensor)  # type: ignore[arg-type]
        try:
            axes = expert_axes(p)
        except LayoutError as error:
            assert "at unequal distances; give another order or other degrees" in str(error)
            continue
        groups = [(size, stride) for _, size, stride in axes] + list(expert_replica_groups(p))
        steps = [[stride * number for number in range(size)] for size, stride in groups]
        assert sorted(map(sum, product(*steps))) == list(range(24))


def test_the_chips_are_the_larger_of_both_sides() -> None:
    with pytest.raises(LayoutError, match="does not divide the 4 ranks of a stage"):
        Parallelism(data=2, tensor=2, pipeline=8, expert=8)


def test_dense_layers_lie_on_the_first_stage() -> None:
    memory = memory_of(problem(LATENT, 28 // 4 * 8 // 7 * 4), Parallelism(data=16, pipeline=2, expert=8))
    dense, routed = (graph for _, graph in LATENT.layers)
    own = [rank.weights // 2 for rank in memory.ranks]
    of_routed = routed.num_weights + routed.num_whole_weights + routed.num_expert_weights // 8
    of_dense = dense.num_weights + dense.num_whole_weights
    table = 32000 * 1024
    assert own in ([table + of_dense + n * of_routed, table + (6 - n) * of_routed] for n in (2, 3))


@pytest.mark.parametrize("order", list(permutations(DEGREES)))
def test_groups_of_experts_are_neighbours_in_a_stage(order: tuple) -> None:  # type: ignore[type-arg]
    sizes = {"tensor": 2, "context": 2, "data": 4, "pipeline": 3}
    for expert, tensor in product((1, 2, 4, 8, 16), (1, 2)):
        if expert * tensor > 16:
            continue
        choice = Parallelism(**sizes, order=order, expert=expert, expert_tensor=tensor)
        strides, stride = {}, 1
        for name in order:
            strides[name], stride = stride, stride * sizes[name]
        inner = [name for name in order if name != "pipeline"]
        ranks = [0]
        for name in inner:
            ranks = [base + i * strides[name] for i in range(sizes[name]) for base in ranks]
        group = ranks[: expert * tensor : tensor]
        steps = {b - a for a, b in pairwise(group)}
        own = ranks[:tensor]
        try:
            axes = {name: (size, stride) for name, size, stride in expert_axes(choice)}
        except LayoutError:
            assert len(steps) > 1 or len({b - a for a, b in pairwise(own)}) > 1
            continue
        if expert > 1:
            assert axes["rank"] == (expert, *steps)
        replicas = [0]
        for size, stride in expert_replica_groups(choice):
            replicas = [base + i * stride for i in range(size) for base in replicas]
        assert sorted(replicas) == sorted(ranks[:: expert * tensor])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"expert": 16}, "8 experts, not a multiple of expert 16"),
        ({"tensor": 4, "data": 8, "strategy": "megatron"}, "give megatron_sp"),
        ({"tensor": (2, 2), "data": 8, "strategy": "atp"}, "experts need whole"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(changed: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(LayoutError, match=words):
        step_of(problem(), replace(Parallelism(data=32, expert=4), **changed))


def test_a_model_without_experts_has_no_such_degrees() -> None:
    with pytest.raises(LayoutError, match="has no experts"):
        step_of(problem(replace(MIXTRAL, layers=(), config="")), Parallelism(data=32, expert=4))
    with pytest.raises(LayoutError, match="no ring yet"):
        step_of(problem(LATENT), Parallelism(data=16, context=2, expert=4))


def test_uneven_tokens_take_longer_and_more_memory() -> None:
    choice = Parallelism(data=32, expert=8)
    even, uneven = (step_of(problem(imbalance=share), choice) for share in (0.0, 1.0))
    assert uneven.time_s > 1.05 * even.time_s
    assert uneven.memory.total > even.memory.total
    ranks = expert_ranks(problem(imbalance=1.0), choice)
    assert ranks is not None
    assert 1.05 < ranks.load < 8
    few = expert_ranks(replace(problem(imbalance=1.0), sequence=4), Parallelism(data=4, tensor=8, expert=8))
    assert few is not None and few.load > 1.05  # each of 8 ranks has a part of 4 tokens
    with pytest.raises(DescriptionError, match="imbalance"):
        problem(imbalance=-1.0)


def test_choices_of_a_token_differ() -> None:
    shares = chosen_shares(np.array([0.5, 0.3, 0.1, 0.1]), 2)
    assert shares.sum() == pytest.approx(2)
    assert max(shares) <= 1
    assert min(drawn_loads(64, 8, 4, 4096, 0.0)) >= 1.0
    assert sum(drawn_loads(64, 8, 4, 4096, 0.0)) / 64 < 1.08


def test_a_plan_searches_degrees_of_experts_and_keeps_them(tmp_path) -> None:  # type: ignore[no-untyped-def]
    options = SpaceOptions(
        tensor=(1, 2), context=(1,), pipeline=(1, 2), strategies=("megatron_sp",), schedules=("1f1b",),
        micro_batches=(1, 2), zero=(0, 1), recompute=("none",), expert=(4, 8),
    )  # fmt: skip
    of = problem(chips=16)
    plan = plan_step(of, options)
    fastest = min(
        (step_of(of, choice) for choice in StepSpace(of, options).choices() if _fits(of, choice)),
        key=lambda made: made.time_s,
    )
    assert plan.step.best.step_s == pytest.approx(fastest.time_s)
    assert plan.step.best.degrees.expert == fastest.parallelism.expert > 1
    file = tmp_path / "plan.json"
    plan.save(file)
    assert planned_problem(load_plan(file)).model.layers == MIXTRAL.layers
    assert "expert" in file.read_text()


def test_a_problem_prices_as_one_that_has_priced_nothing_before() -> None:
    """What it keeps of other configurations is kept by all that it depends on."""
    options = SpaceOptions(
        tensor=(1, 2, 4), pipeline=(1, 2, 4), strategies=("megatron_sp",), zero=(0, 1, 3),
        recompute=("none", "full"),
    )  # fmt: skip
    of = problem(chips=16)
    choices = [choice for choice in StepSpace(of, options).choices() if can_be_laid_out(of, choice)]
    few = choices[:: len(choices) // 12]
    few += [replace(few[-1], zero=1, zero_group=1), few[0]]
    priced = [(step_of(of, choice).time_s, memory_of(of, choice)) for choice in few]
    for choice, own in zip(few, priced, strict=True):
        alone = replace(of)
        assert (step_of(alone, choice).time_s, memory_of(alone, choice)) == own, choice


def test_a_plan_of_experts_that_does_not_fit_says_what_would() -> None:
    """The smallest configuration is one that can be laid out, though some orders of its degrees cannot."""
    options = SpaceOptions(pipeline=(2,), tensor=(4,), expert=(8,), micro_batches=(1,))
    with pytest.raises(UnsupportedError, match=r"the smallest takes .*ep 8 .*what would fit: "):
        plan_step(problem(chips=16), options, memory_bytes=2 * 10**9)


def _fits(of: StepProblem, choice: Parallelism) -> bool:
    try:
        return memory_of(of, choice).total <= of.usable_bytes()
    except LayoutError:
        return False


def test_configurations_of_dense_models_are_written_as_before() -> None:
    dense, routed = (degrees_of(Parallelism(data=8, expert=ranks)).model_dump() for ranks in (1, 4))
    assert "expert" not in dense
    assert routed["expert"] == 4


def test_the_runtime_of_the_library_refuses_experts_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match="experts, on which the costs of stack meshweave were not fitted"
    ):
        step(MIXTRAL, "dgx-h100:32", 64, 2048, ep=8, stack="meshweave")
    assert step(MIXTRAL, "dgx-h100:32", 64, 2048, ep=8).problem.stack.name == load_stack("ideal").name


@pytest.mark.parametrize("name", [name for name in models() if load_model(name).is_routed])
def test_the_fullest_rank_of_layers_of_several_kinds_is_no_lower_than_any(name: str) -> None:
    """The search asks a few ranks alone: dense layers before others must not hide the fullest one."""
    model, cluster = load_model(name), load_cluster("dgx-h100:512")
    problem = StepProblem(model, cluster, batch=512, sequence=2048)
    for pipeline, expert, zero in ((1, 8, 1), (4, 8, 0), (16, 4, 1), (32, 8, 1)):
        laid = Parallelism(512 // pipeline, pipeline, zero=zero, expert=expert)
        try:
            expected = memory_of(problem, laid).peak.total
        except MeshweaveError:
            continue
        assert least_memory(problem, laid).total <= expected


def layer_of(choice: Parallelism, **stack: object):  # type: ignore[no-untyped-def]
    """Return the time of a routed layer under a stack that adds nothing but what is given."""
    of = replace(problem(dispatcher="deepep"), stack=replace(load_stack("ideal"), **stack))  # type: ignore[arg-type]
    return layer_time(of, choice)


def test_experts_of_their_own_products_pass_inner_features_through_memory() -> None:
    choice = Parallelism(data=32, expert=8, zero=1, micro_batch=2)
    of = replace(problem(precision="fp8-block"), stack=replace(load_stack("ideal"), grouped_experts=False))
    apart, grouped = (
        quantizing(of, choice, "forward"),
        quantizing(problem(precision="fp8-block"), choice, "forward"),
    )
    tokens, item = 2 * 2048, 1 + 4 / 128
    casts = (
        2 * (1024 + 3584) * (2 + 2 * item)
    )  # both operands of two copies of a token, read once and written twice
    assert apart.num_bytes - grouped.num_bytes == pytest.approx(tokens * casts)
    assert apart.kernels == grouped.kernels + 2
    own, fused = (layer_of(choice, grouped_experts=each) for each in (False, True))
    assert own.forward.compute_s != fused.forward.compute_s
    assert own.forward.tensor_s == fused.forward.tensor_s


def test_exchanges_run_beside_another_micro_batch() -> None:
    choice = Parallelism(data=32, expert=32, zero=1)
    alone, beside = (layer_of(choice, overlaps_exchanges=each) for each in (False, True))
    assert beside.forward.tensor_s + beside.backward.tensor_s < 0.5 * (
        alone.forward.tensor_s + alone.backward.tensor_s
    )
    computing = alone.forward.compute_s + alone.backward.compute_s
    more = beside.forward.compute_s + beside.backward.compute_s - computing
    assert 0 < more < 0.2 * computing  # the exchange has 20 of the multiprocessors
    assert beside.forward.total_s + beside.backward.total_s >= computing


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (2, 3)])
def test_the_first_forward_and_the_last_backward_part_have_nothing_beside_them(
    pipeline: int, virtual: int
) -> None:
    """Of m micro-batches m - 1 pairs hide their exchanges, whatever time the pipeline takes to fill and drain."""
    hidden_s = {}
    for micro_batches in (1, 2, 5):
        choice = Parallelism(data=8, expert=8, zero=1, pipeline=pipeline, virtual_stages=virtual)
        of = replace(problem(chips=8 * pipeline), batch=8 * micro_batches, dispatcher="deepep")
        times = []
        for overlaps in (False, True):
            stages = stages_of(
                replace(of, stack=replace(load_stack("ideal"), overlaps_exchanges=overlaps)), choice
            )
            turns = micro_batches + (pipeline - 1) / virtual
            times.append(turns * sum(time.forward_s + time.backward_s for time in stages.times))
        hidden_s[micro_batches] = times[0] - times[1]
    assert hidden_s[1] == 0 < hidden_s[2]
    assert hidden_s[5] == pytest.approx(4 * hidden_s[2])


def test_biases_of_experts_pass_through_memory_where_the_stack_does_not_add_them_in_products() -> None:
    """The rows of both products, in fp32 between; four copies of a token, 2880 hidden and inner features."""
    model, choice = load_model("gpt-oss-20b"), Parallelism(data=8, expert=8, zero=1, micro_batch=2)
    apart, fused = (problem(model, 8, stack=load_stack(name)) for name in ("megatron-core", "ideal"))
    rows = 2 * 2048 * 4
    for part, num_bytes in (("forward", 28 + 16), ("backward", 40 + 20)):
        assert added_passes(apart, choice, part).num_bytes == rows * 2880 * num_bytes
        assert added_passes(fused, choice, part).num_bytes == 0
    assert added_passes(problem(stack=apart.stack), choice, "forward").num_bytes == 0  # Mixtral has no biases


def test_hosts_of_routed_layers_issue_what_is_not_captured() -> None:
    hosts = (("H", HostRates(1e-3)),)
    choice = Parallelism(data=32, expert=8, zero=1)
    whole, part, none = (
        layer_of(choice, routed_hosts=hosts, captured=share).issued_s for share in (0.0, 0.75, 1.0)
    )
    assert part == pytest.approx([0.25 * each for each in whole]) and none == (0, 0, 0)
    assert layer_of(choice, routed_hosts=(("GB", HostRates(1e-3)),)).issued_s == (0, 0, 0)
    dense = StepProblem(load_model("llama-2-7b"), load_cluster("dgx-h100:32"), 64, 2048)
    assert replace(dense, stack=replace(load_stack("ideal"), routed_hosts=hosts)).host is None


def test_attention_that_is_computed_again_is_captured_as_the_first_time() -> None:
    stack = replace(load_stack("ideal"), host=HostRates(1e-3), captured=1.0)
    choice = Parallelism(data=32, expert=8, recompute="selective")
    assert layer_time(problem(stack=stack), choice).issued_s[2] == 0.0
    assert layer_time(problem(stack=replace(stack, captured=0.0)), choice).issued_s[2] == 1e-3
