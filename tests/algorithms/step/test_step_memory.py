"""Memory of a step: the closed forms of the papers, and what sharding divides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.step import least_memory, memory_of
from meshweave.algorithms.step.framework_memory import ActivationRule, layer_activations
from meshweave.algorithms.step.stacks import load_stack
from meshweave.algorithms.step.stages import layer_costs, stage_layers
from meshweave.base.errors import DescriptionError
from meshweave.describe.model.memory import Recompute, activation_bytes
from sampling import examples

CLUSTER = mw.load_cluster("dgx-a100:64")
SIZES = st.sampled_from([1, 2, 4, 8])


def framework(**does: Any) -> mw.SoftwareStack:
    """Return a stack that runs no programs, whose memory is that of the closed forms."""
    return mw.SoftwareStack(runs_programs=False, **does)


def framework_problem(*sizes: Any, **options: Any) -> mw.algorithms.StepProblem:
    """Return a problem of such a stack."""
    return mw.algorithms.StepProblem(*sizes, **{"stack": framework(), **options})


def gpt(heads: int, width: int, layers: int = 8) -> mw.Transformer:
    """Return a GPT whose feed-forward part is four times as wide as its residual."""
    return mw.Transformer(
        "gpt", layers, heads * width, heads, heads, width, 4 * heads * width, 51200, False, "-"
    )


@examples(40)
@given(SIZES, st.sampled_from([8, 16, 64]), st.sampled_from([64, 128]), st.integers(1, 4))
def test_activations_are_those_of_korthikanti(size: int, heads: int, width: int, micro_batch: int) -> None:
    """Equations 1, 2 and 4 and table 2 of Reducing Activation Recomputation, with s = 1024."""
    model, s, b, t = gpt(heads, width), 1024, micro_batch, size
    h, a = model.hidden, heads
    problem = framework_problem(model, CLUSTER, 64, s, attention="plain", dropout=True)

    def bytes_of(strategy: str, recompute: ActivationRule) -> int:
        p = mw.Parallelism(tensor=t, strategy=strategy, micro_batch=b)
        return layer_activations(problem, p, recompute)

    whole = s * b * h
    assert bytes_of("megatron", "none") == whole * 10 + whole * 24 // t + 5 * a * s * s * b // t
    assert bytes_of("megatron_sp", "none") == whole * 34 // t + 5 * a * s * s * b // t
    assert bytes_of("megatron_sp", "selective") == whole * 34 // t
    assert bytes_of("megatron", "full") == 2 * whole
    assert bytes_of("megatron_sp", "full") == 2 * whole // t
    flash = replace(problem, attention="flash")
    kept = layer_activations(flash, mw.Parallelism(tensor=t, micro_batch=b), "none")
    assert kept == whole * 34 // t + 4 * a * s * b // t


@examples(20)
@given(st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from(["none", "selective", "full"]))
def test_one_chip_keeps_what_the_model_does(gated: bool, groups: int, recompute: Recompute) -> None:
    model = replace(gpt(8, 64), num_kv_heads=groups, gated_ffn=gated)
    problem = framework_problem(model, CLUSTER, 64, 512, attention="plain", dropout=True)
    whole = activation_bytes(model, mw.Workload(2, 512), recompute)
    assert layer_activations(problem, mw.Parallelism(micro_batch=2), recompute) == whole


@examples(30)
@given(st.integers(0, 3), SIZES, SIZES, st.sampled_from([None, 2]))
def test_states_are_those_of_zero(zero: int, tensor: int, pipeline: int, group: int | None) -> None:
    """2, 4 (in fp32) and 12 bytes a parameter of weights, gradients and Adam, divided from their stage on."""
    model = gpt(16, 64)
    data = 64 // (tensor * pipeline)
    group = group if data % 2 == 0 else None
    problem = framework_problem(model, CLUSTER, 64, 512)
    p = mw.Parallelism(data, pipeline, tensor=tensor, zero=zero, zero_group=group)
    memory = memory_of(problem, p)
    layers = sum(x.in_features * x.out_features for x in model.fc_layers()) * model.num_layers
    table = 51200 * model.hidden
    counts = [layers // (pipeline * tensor)] * pipeline
    counts[0] += table // tensor
    if pipeline > 1:
        counts[-1] += table // tensor
    shards = group or data
    for stage, count in zip(memory.ranks, counts, strict=True):
        assert stage.weights == 2 * count // (shards if zero == 3 else 1)
        assert stage.gradients == 4 * count // (shards if zero >= 2 else 1)
        assert stage.optimizer == 12 * count // (shards if zero >= 1 else 1)
        assert stage.total == sum(vars(stage).values())


@examples(20)
@given(SIZES, st.sampled_from([1, 2]), st.integers(1, 4))
def test_a_rank_keeps_what_is_in_flight(pipeline: int, virtual: int, rounds: int) -> None:
    """Of a rank that is no end: stashes times the layers of a stage times what a layer keeps."""
    model = gpt(16, 64, layers=16)
    virtual = virtual if pipeline > 1 else 1
    problem = framework_problem(model, CLUSTER, 64 // pipeline * pipeline * rounds, 512, dropout=False)
    p = mw.Parallelism(64 // pipeline, pipeline, virtual_stages=virtual)
    memory, micro_batches = memory_of(problem, p), problem.batch // p.data
    layer = layer_activations(problem, p, "none")
    for rank in range(pipeline - 1):
        ahead = 2 * (pipeline - rank) - 1 + (virtual - 1) * pipeline if virtual > 1 else pipeline - rank
        kept = min(micro_batches * virtual, ahead)
        assert memory.ranks[rank].activations == kept * 16 // (pipeline * virtual) * layer


@examples(60)
@given(st.data())
def test_parts_add_up_and_the_peak_is_the_fullest_rank(data: st.DataObject) -> None:
    """Of every rank, under any stack: no part is negative, and more sharding or recomputation keeps no more."""
    draw = data.draw
    pipeline, tensor, zero = draw(SIZES), draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 3))
    flags = (
        "layers_by_cost",
        "keeps_joint_qkv",
        "adds_gradients_late",
        "buckets_gradients",
        "recomputes_gate",
    )
    stack = framework(
        fragmentation=draw(st.sampled_from([0.0, 0.2])),
        sharding=draw(st.sampled_from(["zero", "fsdp", "fsdp2"])),
        **{name: draw(st.booleans()) for name in flags},
    )
    gated, tied = draw(st.booleans()), draw(st.booleans())
    model = replace(gpt(16, 64), gated_ffn=gated, tied_embeddings=tied)
    loss = draw(st.sampled_from(["fused", "eager", "sharded"]))
    problem = framework_problem(
        model, CLUSTER, 512, draw(st.sampled_from([64, 1024])), loss=loss, stack=stack
    )
    p = mw.Parallelism(64 // (pipeline * tensor), pipeline, tensor=tensor, zero=zero)
    p = replace(p, recompute=draw(st.sampled_from(["none", "selective", "full"])))
    memory = memory_of(problem, p)
    for rank in memory.ranks:
        assert rank.total == sum(vars(rank).values()) and min(vars(rank).values()) >= 0
    assert memory.total == max(rank.total for rank in memory.ranks) == least_memory(problem, p).total
    if zero < 3:
        more = memory_of(problem, replace(p, zero=zero + 1))
        states = [[x.weights + x.gradients + x.optimizer for x in each.ranks] for each in (memory, more)]
        assert all(a >= b - 2 for a, b in zip(*states, strict=True))
    assert memory_of(problem, replace(p, recompute="none")).total >= memory.total - memory.peak.buffers


def test_a_rank_with_both_ends_has_both_tables() -> None:
    """In a V the first rank has the last stage too; a table that both ends share is there once."""
    tied = gpt(16, 64)
    apart = replace(tied, tied_embeddings=False)
    p = mw.Parallelism(16, 4, virtual_stages=2, schedule="zbv")
    once, twice = (memory_of(framework_problem(m, CLUSTER, 64, 512), p).ranks for m in (tied, apart))
    table = 2 * 51200 * tied.hidden
    assert twice[0].weights - once[0].weights == table == once[0].weights - once[1].weights
    assert once[1:] == twice[1:]
    step = mw.algorithms.step_of(framework_problem(tied, CLUSTER, 128, 512), p)
    assert step.stages.data_parallel.tied_s == 0 and mw.simulation.simulate_step(step).time_s > 0


def test_fragmentation_is_a_named_share() -> None:
    problem = framework_problem(gpt(16, 64), CLUSTER, 64, 512, stack=framework(fragmentation=0.1))
    peak = memory_of(problem, mw.Parallelism(64)).peak
    assert peak.fragmentation == pytest.approx(0.1 * (peak.activations + peak.buffers), abs=1)


@pytest.mark.parametrize(("zero", "sharding"), [(2, "zero"), (3, "zero"), (3, "fsdp"), (3, "fsdp2")])
@pytest.mark.parametrize("seq", [16, 512, 8192])
def test_sharded_units_are_whole_one_after_the_other(zero: int, sharding: str, seq: int) -> None:
    """Layers, embedding and head are units; FSDP has one unit of both tables, which stays gathered."""
    stack = framework(sharding=sharding)  # type: ignore[arg-type]
    model = replace(gpt(16, 64), tied_embeddings=False)
    problem = framework_problem(model, CLUSTER, 64, seq, stack=stack)
    plain, sharded = (memory_of(problem, mw.Parallelism(64, zero=level)).peak for level in (0, zero))
    layer = sum(x.in_features * x.out_features for x in model.fc_layers())
    table = 51200 * model.hidden
    gathered = 2 * 2 * layer if zero == 3 else 0
    if sharding == "zero":
        of_table = 4 + (2 if zero == 3 else 0)
        loss, back, end = gathered + of_table * table, gathered + 4 * layer, gathered + of_table * table
    else:
        root = 2 * 2 * table + (max(2 * 2 * table, gathered) if sharding == "fsdp2" else 0)
        loss, back = gathered + root + 2 * table, gathered + root + 2 * table + (4 + 2) * layer
        end = gathered + root + 2 * (4 + 2) * table
    kept = layer_activations(problem, mw.Parallelism(64), "none") * model.num_layers
    kept_after = plain.activations - 4 * 51200 * seq - kept
    working = 2 * seq * 2 * model.ffn_hidden
    last = kept + kept_after
    moments = {"loss": last + 4 * 51200 * seq + loss, "layer": last + working + back}
    moments["end"] = kept_after - 2 * 2 * seq * model.hidden + end
    assert sharded.activations + sharded.buffers == max(moments.values())
    sizes = (4, 8) if sharding != "zero" else (2, 12)
    count = model.num_layers * layer + 2 * table
    assert sharded.weights == sizes[0] * count // (64 if zero == 3 else 1)
    assert sharded.optimizer == sizes[1] * count // 64


@examples(40)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 50), st.integers(0, 100))
def test_layers_by_cost_end_a_stage_above_its_share(layers: int, stages: int, layer: int, head: int) -> None:
    counts = stage_layers(layers, stages, (layer, head))
    assert sum(counts) == layers and len(counts) == stages
    done, total = 0, layers * layer + head
    for stage, count in enumerate(counts):
        done += count * layer
        if done < layers * layer:
            assert done * stages > total * (stage + 1) or count == 0
            assert count <= 1 or (done - layer) * stages <= total * (stage + 1)


def test_nanotron_divides_by_cost() -> None:
    """80 layers and a head as dear as 1.1 of them, over 16 stages: `build_model` gives the first stage six."""
    model = mw.Transformer("80B", 80, 8192, 64, 64, 128, 28672, 131072, True, "-", False)
    problem = framework_problem(model, CLUSTER, 64, 512, stack=load_stack("nanotron"))
    assert stage_layers(80, 16, layer_costs(problem)) == (6, *[5] * 13, 6, 3)
    assert layer_costs(replace(problem, stack=framework())) is None


def test_every_second_product_is_kept_under_selective_checkpointing() -> None:
    model = replace(gpt(16, 64), gated_ffn=True, num_kv_heads=4)
    problem = framework_problem(model, CLUSTER, 64, 512)
    h, g, f = model.hidden, 4 * 64, model.ffn_hidden
    for rule, products in (("operators", h + g + f + h), ("compiled-operators", h + g + f)):
        kept = layer_activations(problem, mw.Parallelism(), rule)  # type: ignore[arg-type]
        assert kept == 512 * (2 * (h + h + products) + 4 * 16)
        peak = memory_of(problem, mw.Parallelism(64), rule).peak  # type: ignore[arg-type]
        assert kept * model.num_layers < peak.activations < memory_of(problem, mw.Parallelism(64)).total


def test_gradients_that_wait_and_buckets_are_counted() -> None:
    model = gpt(16, 64)
    problem = framework_problem(model, CLUSTER, 64, 1)
    late, buckets = (
        replace(problem, stack=framework(**{name: True}))
        for name in ("adds_gradients_late", "buckets_gradients")
    )
    plain = memory_of(problem, mw.Parallelism(64)).peak
    assert memory_of(late, mw.Parallelism(64)).peak.buffers == plain.weights
    assert memory_of(buckets, mw.Parallelism(64)).peak.gradients == plain.gradients + plain.weights
    assert memory_of(buckets, mw.Parallelism(64, zero=1)).peak.gradients == plain.gradients
    late_loss = replace(problem, sequence=512, loss="eager")
    logits = 512 * 51200
    eager, fused = (
        memory_of(each, mw.Parallelism(64)).peak for each in (late_loss, replace(late_loss, loss="fused"))
    )
    assert eager.buffers - fused.buffers == 8 * logits and eager.fragmentation == 2 * logits
    copies = replace(problem, stack=framework(copies_norm_inputs=True))
    more = layer_activations(copies, mw.Parallelism(), "none") - layer_activations(
        problem, mw.Parallelism(), "none"
    )
    assert more == 2 * 4 * model.hidden
    joint = replace(problem, stack=framework(keeps_joint_qkv=True))
    more = layer_activations(joint, mw.Parallelism(), "none") - layer_activations(
        problem, mw.Parallelism(), "none"
    )
    assert more == 2 * 2 * model.hidden


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, ()),
        ({"data": 2}, (2,)),
        ({"data": 4, "tensor": 2, "pipeline": 8}, (4, 2, 8)),
        ({"data": 4, "tensor": (2, 4), "strategy": "meshslice_block"}, (4, 2, 4)),
        ({"data": 8, "zero": 3, "zero_group": 2}, (2, 4)),
        ({"data": 2, "context": 4}, (4, 8)),
    ],
)
def test_context_and_communicators_are_terms_outside_of_the_allocator(
    options: dict[str, Any], groups: tuple[int, ...]
) -> None:
    """One communicator a group of ranks that a step communicates in; none of them are in `allocated`."""
    p = mw.Parallelism(**options)
    cluster = mw.load_cluster(f"dgx-h100:{p.num_ranks}")
    problem = framework_problem(mw.load_model("gpt3"), cluster, 64, 2048)
    peak, cuda = memory_of(problem, p).peak, cluster.chip.driver
    assert peak.context == cuda.context_bytes > 400e6
    assert peak.communication == sum(cuda.pair_bytes if size == 2 else cuda.group_bytes for size in groups)
    assert peak.total == peak.allocated + peak.context + peak.communication
    bare = replace(cluster, chip=replace(cluster.chip, runtime="none"))
    alone = memory_of(replace(problem, cluster=bare), p).peak
    assert alone.total == alone.allocated == peak.allocated


def test_ranks_that_share_experts_and_replicas_of_experts_are_groups_too() -> None:
    problem = replace(
        framework_problem(mw.load_model("mixtral-8x7b"), mw.load_cluster("dgx-h100:16"), 64, 2048),
        stack=load_stack("megatron-core"),
    )
    alone, shared = (
        memory_of(problem, mw.Parallelism(data=16, expert=expert)).peak.communication for expert in (1, 4)
    )
    assert shared == alone + 2 * problem.cluster.chip.driver.group_bytes


def test_runtimes_are_named_and_known() -> None:
    assert (
        mw.load_cluster("tpu-v5p").chip.runtime == "tpu"
        and mw.load_cluster("local-cpu").chip.runtime == "none"
    )
    with pytest.raises(DescriptionError, match="there is no runtime 'cud'"):
        replace(CLUSTER.chip, runtime="cud")


@pytest.mark.parametrize("zero_group", [2, 4, 8])
def test_a_group_of_zero_may_hold_more_ranks_than_there_are_replicas_of_data(zero_group: int) -> None:
    degrees = {"batch": 8, "sequence": 2048, "dp": 2, "cp": 4, "zero": 3}
    step = mw.step("llama-2-7b", "dgx-h100:8", **degrees, zero_group=zero_group)  # type: ignore[arg-type]
    none = mw.step("llama-2-7b", "dgx-h100:8", **degrees)  # type: ignore[arg-type]
    assert (step.memory.total == none.memory.total) == (zero_group == 8)
    assert step.memory.total >= none.memory.total
