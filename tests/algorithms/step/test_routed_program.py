"""Programs of steps with experts: what is sent, summed and computed, and what is refused."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.step import Step, load_stack, simulate_step, step_program
from meshweave.algorithms.step.block_program import lay_step, step_pieces, write_step
from meshweave.algorithms.step.block_time import layer_block
from meshweave.algorithms.step.memory import layer_parameters
from meshweave.algorithms.step.routing import expert_ranks, rank_loads
from meshweave.algorithms.step.write_units import layer_names
from meshweave.base.errors import LayoutError, ProgramError, UnsupportedError
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.machine.host import HostRates
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.execute.numpy import run_numpy
from meshweave.ir.program import parse, to_text
from meshweave.ir.program.expressions import evaluate
from meshweave.ir.program.ops import AllGather, AllReduce, Call, Exchange, Op, ReduceScatter
from meshweave.ir.work import work_of
from sampling import examples

MIXTRAL = transformer_from_config(
    {
        "model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000, "intermediate_size": 7168, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral",
)  # fmt: skip
LATENT = transformer_from_config(
    {
        "model_type": "deepseek_v3", "num_hidden_layers": 6, "hidden_size": 2048, "num_attention_heads": 16,
        "vocab_size": 32000, "intermediate_size": 8192, "moe_intermediate_size": 1024, "n_routed_experts": 32,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 2, "q_lora_rank": 512,
        "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "n_group": 4, "topk_group": 2,
    },
    "latent",
)  # fmt: skip


def made(model: mw.Transformer = MIXTRAL, chips: int = 16, **options: Any) -> Step:
    """Return a step of four micro-batches a pipeline on hosts."""
    options = {"sequence": 2048, "batch": 4 * chips, **options}
    return mw.step(model, f"dgx-h100:{chips}", **options)


def ops_of_rank_0(step: Step) -> list[Op]:
    """Return the ops of rank 0 as they run, without folding."""
    program = step_program(step).expanded
    return [bound.op for bound in program.ops_on_rank(0)]


# --- what is sent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recompute", "each"), [("none", 4), ("full", 6)]
)  # dispatch and combine, their gradients, and both again
@pytest.mark.parametrize("degrees", [{"ep": 8}, {"ep": 2}, {"ep": 4, "etp": 2, "tp": 2}, {"ep": 4, "pp": 2}])
def test_each_layer_and_micro_batch_exchanges_copies_at_the_price_of_the_estimate(
    degrees: dict[str, int], recompute: str, each: int
) -> None:
    step = made(recompute=recompute, **degrees)
    laid = lay_step(step.stages, folds=False)
    program = laid.program.expanded
    exchanges = [bound.op for bound in program.ops_on_rank(0) if isinstance(bound.op, Exchange)]
    copies = [op for op in exchanges if op.library]
    layers = step.stages.layers[0]
    assert len(copies) == each * layers * step.num_micro_batches
    assert Counter(op.carries for op in copies)["combine"] == len(copies) // 2
    block = layer_block(step.problem, step.parallelism)
    taken = Counter(price(work_of(program, op), laid.machine).total_ps for op in copies)
    expected = {
        price(work, block.machine).total_ps
        for work in block._transfers
        if work.kind in ("dispatch", "combine")
    }
    assert set(taken) == expected
    if "etp" in degrees:
        gathered = [op for op in exchanges if not op.library]
        assert len(gathered) == len(copies)


def test_an_exchange_takes_its_price_in_the_simulation() -> None:
    step = made(ep=8, tp=2)
    laid = lay_step(step.stages)
    trace = simulate_step(step).simulation.trace()
    program = laid.program.expanded
    price_ps = {
        price(work_of(program, bound.op), laid.machine).total_ps
        for bound in program.ops_on_rank(0)
        if isinstance(bound.op, Exchange)
    }
    spans = [span for span in trace.spans if span.kind == "exchange" and span.rank == 0]
    assert spans and {span.end_ps - span.start_ps for span in spans} <= price_ps


# --- what is summed -------------------------------------------------------------------------------------------


def moved(step: Step) -> Counter[tuple[str, str]]:
    """Return the elements of whole buckets in collectives of replicas of rank 0, by kind and by whose they are."""
    program, total = step_program(step).expanded, Counter[tuple[str, str]]()
    for op, env in program.unbound_ops_on_rank(0):
        if not isinstance(op, (AllGather, ReduceScatter, AllReduce)) or ".replica" not in str(op.over):
            continue
        (run,) = (op.out if isinstance(op, AllGather) else op.src).selectors
        mesh = str(op.over).partition(".")[0][0]
        total[op.kind, {"e": "experts", "r": "others"}[mesh]] += evaluate(run.stop, env) - evaluate(
            run.start, env
        )
    return total


@pytest.mark.parametrize(("zero", "gathers", "reductions"), [(0, 0, 1), (1, 1, 1), (2, 1, 4), (3, 8, 4)])
@pytest.mark.parametrize("degrees", [{"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2, "etp": 2, "tp": 4}])
def test_experts_are_summed_and_gathered_over_their_own_replicas(
    zero: int, gathers: int, reductions: int, degrees: dict[str, int]
) -> None:
    """Of 4 micro-batches. What the estimate prices for a layer is what the program moves for it."""
    step = made(zero=zero, **degrees, batch=4 * 16 // degrees.get("tp", 1))
    assert step.num_micro_batches == 4
    of_layer, total = layer_parameters(step.problem, step.parallelism), moved(step)
    experts = MIXTRAL.num_layers * of_layer.experts
    kind = "reduce_scatter" if zero else "all_reduce"
    assert total[kind, "experts"] == pytest.approx(reductions * experts, rel=1e-4)
    assert total["all_gather", "experts"] == pytest.approx(gathers * experts, rel=1e-4)
    tables = 2 * 32000 * 2048 // step.parallelism.tensor_size
    others = MIXTRAL.num_layers * of_layer.others + tables
    assert total[kind, "others"] == pytest.approx(
        reductions * others, rel=2e-3
    )  # the estimate leaves norms out


def test_experts_without_replicas_are_summed_nowhere() -> None:
    total = moved(made(ep=8, chips=8, zero=1))
    assert not total["reduce_scatter", "experts"] and not total["all_gather", "experts"]
    assert total["reduce_scatter", "others"]


def test_gradients_of_experts_wait_for_their_products() -> None:
    """The calls that add gradients of experts read what the gradient of the experts writes, in every layer."""
    ops = ops_of_rank_0(made(ep=4, chips=8))
    products = [
        op for op in ops if isinstance(op, Call) and op.work == "experts" and op.part == "weight_grad"
    ]
    added = [op for op in ops if isinstance(op, Call) and op.fn == "accumulate_layer_experts"]
    assert len(products) == len(added) > 0
    written = {view.buffer for op in products for view in op.outs}
    for op in added:
        assert {view.buffer for view in op.ins[:-1]} <= written


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)]
)
@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_are_added_once_before_others_overwrite_them(schedule: str, stages: int, zero: int) -> None:
    """Also where gradients of weights are computed apart: those of experts come with those of tokens."""
    step = made(ep=4, pp=2, schedule=schedule, vp=stages, zero=zero)
    verb, waiting, added = "pack" if zero else "accumulate", set[tuple[str, object]](), 0
    for op in ops_of_rank_0(step):
        if not isinstance(op, Call):
            continue
        read, written = (
            {(view.buffer, view.slot) for view in views if "layer_experts_d" in view.buffer}
            - {(view.buffer, view.slot) for view in views if "layer_experts_dw_" in view.buffer}
            for views in (op.ins, op.outs)
        )
        if op.fn == f"{verb}_layer_experts":
            assert read and read <= waiting
            waiting -= read
            added += 1
        elif written:
            assert op.part == "weight_grad" and not written & waiting
            waiting |= written
    of_rank = zip(step.stages.layers, step.stages.stage_ranks, strict=True)
    layers = sum(count for count, rank in of_rank if rank == 0)
    assert added == layers * step.num_micro_batches
    assert not waiting
    if not zero:  # else reductions of each micro-batch queue, with or without experts
        assert simulate_step(step).time_s == pytest.approx(step.time_s, rel=0.08)


def test_layers_are_in_the_order_of_the_model() -> None:
    assert layer_names(made(LATENT, ep=8).problem) == ("layer0",) * 2 + ("layer1",) * 4


# --- time -----------------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw a step of a model with experts on 16 chips of hosts."""
    tensor, pipeline = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 4)))
    stage = 16 // pipeline
    expert = draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if size <= stage]))
    each = draw(st.sampled_from([size for size in (1, 1, 2, 4) if size * expert <= stage]))
    options: dict[str, Any] = {
        "tp": tensor,
        "pp": pipeline,
        "ep": expert,
        "etp": each,
        "vp": draw(st.sampled_from((1, 2))) if pipeline > 1 else 1,
        "schedule": draw(st.sampled_from(("1f1b", "gpipe"))) if pipeline > 1 else "1f1b",
        "zero": draw(st.integers(0, 3)),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "dispatcher": draw(st.sampled_from(["all_to_all", "deepep"])),
        "imbalance": draw(st.sampled_from([0.0, 0.0, 0.8])),
    }
    model = draw(st.sampled_from([MIXTRAL, LATENT]))
    try:
        return made(model, batch=16 // (tensor * pipeline) * draw(st.sampled_from([4, 8])), **options)
    except LayoutError:
        return made(MIXTRAL, ep=4, zero=options["zero"])


TOLERANCE = 0.12
"""Traffic of several kinds shares links in a simulation, and stages are priced by the mean of their layers."""


@examples(6)
@given(steps())
def test_the_simulation_of_any_step_with_experts_is_near_to_its_estimate(step: Step) -> None:
    assert step.time_s == pytest.approx(simulate_step(step).time_s, rel=TOLERANCE)


def test_ranks_of_a_skewed_group_have_copies_of_their_own_and_wait_for_the_first() -> None:
    step = made(ep=8, chips=8, imbalance=0.8)
    loads = rank_loads(step.problem, step.parallelism)
    ranks = expert_ranks(step.problem, step.parallelism)
    assert ranks is not None and loads[0] == ranks.load
    assert list(loads) == sorted(loads, reverse=True) and sum(loads) == pytest.approx(8, rel=0.02)
    program = step_program(step).expanded
    rows = [
        next(
            bound.op.shape[0]
            for bound in program.ops_on_rank(rank)
            if isinstance(bound.op, Call) and bound.op.work == "experts"
        )
        for rank in range(8)
    ]
    assert rows == [math.ceil(2048 * 2 * load) for load in loads]
    made_s = simulate_step(step)
    assert made_s.time_s == pytest.approx(step.time_s, rel=0.03)
    computing = [made_s.simulation.parts(rank)["compute_s"] for rank in range(8)]
    assert computing[0] == max(computing) > min(computing)


@pytest.mark.parametrize("model", [MIXTRAL, LATENT])
@pytest.mark.parametrize("captured", [0.0, 0.75, 1.0])
def test_hosts_issue_layers_with_experts_at_their_own_rate_without_what_graphs_capture(
    model: mw.Transformer, captured: float
) -> None:
    hosts = (("H", HostRates(4e-4)),)
    step = made(model, 8, ep=8, stack=replace(load_stack("ideal"), routed_hosts=hosts, captured=captured))
    assert simulate_step(step).time_s == pytest.approx(step.time_s, rel=0.05)
    assert (step.parts.host > 0) == (captured < 1)


def test_experts_of_their_own_products_have_the_time_of_the_estimate() -> None:
    step = made(ep=4, chips=8, stack=replace(load_stack("ideal"), grouped_experts=False))
    assert any(isinstance(op, Call) and op.work == "matmul_batch" for op in ops_of_rank_0(step))
    assert simulate_step(step).time_s == pytest.approx(step.time_s, rel=0.05)


@pytest.mark.parametrize(
    ("options", "fold"),
    [
        ({"ep": 8, "zero": 1}, 4),  # a host has a whole group of experts
        ({"ep": 32, "zero": 1}, 4),  # it has a part of it
        ({"ep": 16, "tp": 4, "zero": 0}, 4),
        ({"ep": 16, "pp": 2, "zero": 1}, 2),
        ({"ep": 8, "etp": 2, "tp": 2, "zero": 3}, 4),
        ({"ep": 8, "tp": 2, "pp": 2, "order": ("pipeline", "tensor", "context", "data")}, 4),
        ({"ep": 2, "tp": 2, "pp": 2, "order": ("tensor", "pipeline", "context", "data"), "zero": 2}, 4),
        ({"ep": 8, "tp": 2, "order": ("data", "tensor", "context", "pipeline")}, 1),  # experts lie across
        ({"ep": 16, "zero": 1, "imbalance": 0.8}, 2),  # a group whose ranks differ is simulated whole
    ],
)
def test_equal_ranks_of_groups_of_experts_are_folded(options: dict[str, Any], fold: int) -> None:
    step = made(replace_layers(LATENT, 3), 32, batch=64, sequence=512, **options)
    folded, every = simulate_step(step), simulate_step(step, folds=False)
    assert folded.fold == fold
    assert folded.simulation.duration_s == every.simulation.duration_s


def replace_layers(model: mw.Transformer, count: int) -> mw.Transformer:
    """Return a model with one dense layer and fewer others."""
    (_, dense), (_, routed) = model.layers
    return replace(model, num_layers=count, layers=((1, dense), (count - 1, routed)), config="")


def test_a_program_of_experts_is_read_back_from_its_text() -> None:
    program = lay_step(made(ep=4, chips=8, batch=16).stages).program
    assert parse(to_text(program)) == program


# --- refusals -------------------------------------------------------------------------------------------------


def test_what_a_program_of_experts_does_not_have_is_refused_by_name() -> None:
    step = made(ep=4)
    with pytest.raises(UnsupportedError, match="compute no values"):
        write_step(step.stages)
    with pytest.raises(UnsupportedError, match="do not say what they hold"):
        step_pieces(step.stages)
    with pytest.raises(UnsupportedError, match="shards over all replicas"):
        simulate_step(made(ep=4, zero=1, zero_group=4))
    beside = replace(load_stack("ideal"), overlaps_exchanges=True)
    with pytest.raises(UnsupportedError, match="beside the computing of another"):
        simulate_step(made(ep=4, stack=beside))


EXCHANGE = """
program("one exchange")
tp = mesh((2,), ("row",))
X = tensor((2, 4), "float32")
x = input(X, tp[S(0)])
y = temp(X, tp[S(0)])
lane0 = lane()
with tp:
    exchange(outs=(y,), ins=(x,), carries="dispatch", num_ranks=2, part_bytes=16, over="tp.row", lane=lane0)
"""


def test_an_exchange_is_neither_run_nor_proved() -> None:
    program = parse(EXCHANGE)
    with pytest.raises(ProgramError, match="neither run nor proved"):
        run_numpy(program, {"X": np.ones((2, 4), np.float32)})
    with pytest.raises(ProgramError, match="neither run nor proved"):
        mw.validate(program)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_ranks": 0}, "has 0 ranks"),
        ({"carries": '"broadcast"'}, "carries 'broadcast'"),
        ({"experts": 3}, "of 3 experts on 2 ranks"),
        ({"groups": 3}, "groups of 4 experts"),
        ({"load": 0.0}, "a load of 0.0"),
    ],
)
def test_an_exchange_whose_terms_make_no_sense_has_no_price(change: dict[str, object], words: str) -> None:
    terms = {
        "carries": '"dispatch"',
        "num_ranks": 2,
        "part_bytes": 16,
        "tokens": 1,
        "experts": 4,
        "load": 1.5,
    }
    given = ", ".join(f"{name}={value}" for name, value in {**terms, "library": '"deepep"', **change}.items())
    program = parse(EXCHANGE.replace('carries="dispatch", num_ranks=2, part_bytes=16', given))
    with pytest.raises(ProgramError, match=words):
        mw.simulate(program, Machine.of(mw.load_cluster("dgx-h100:8"), program))


@pytest.mark.slow
def test_a_step_of_deepseek_v3_on_2048_chips_is_simulated_in_a_minute() -> None:
    step = mw.step("deepseek-v3", "dgx-h100:2048", batch=15360, sequence=4096, pp=16, ep=64, zero=1)
    begin = time.perf_counter()
    simulated = simulate_step(step)
    assert time.perf_counter() - begin < 60
    assert simulated.fold == 16
    assert simulated.time_s == pytest.approx(step.time_s, rel=0.04)
