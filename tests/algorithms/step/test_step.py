"""A step is its parts: blocks, the actions of a pipeline, collectives beside layers; and faster is not slower."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.pipeline.action_times import time_schedule
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.step import check_step, least_memory, least_step_s, memory_of
from meshweave.algorithms.step.data_parallel import exposed_both_s, exposed_s
from meshweave.algorithms.step.placement import axis_machine, replica_groups, sharding_groups
from meshweave.base.errors import DescriptionError, MeshweaveError
from meshweave.cost.machine import mesh_machine
from meshweave.cost.price import price
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import HostsNetwork, with_axes
from meshweave.estimate.skeletons import TimedSkeleton
from meshweave.ir.skeleton import Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer, Work
from sampling import examples

GPT = mw.Transformer("gpt", 8, 1024, 16, 16, 64, 4096, 51200, False, "made up")
LLAMA = mw.Transformer("llama", 8, 1024, 16, 8, 64, 2816, 32000, True, "made up", tied_embeddings=False)
HOSTS = mw.load_cluster("dgx-a100:32")
SQUARES = (1, 2, 4, 8)


@st.composite
def configurations(draw: st.DrawFn) -> tuple[mw.algorithms.StepProblem, mw.Parallelism]:
    """Draw a model on 32 chips, and degrees that fill them."""
    tensor, pipeline, context = (draw(st.sampled_from(SQUARES)) for _ in range(3))
    if tensor * pipeline * context > 32:
        tensor, context = 2, 1
    data = 32 // (tensor * pipeline * context)
    micro_batch, count = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4, 8]))
    problem = mw.algorithms.StepProblem(
        draw(st.sampled_from([GPT, LLAMA])),
        HOSTS,
        data * micro_batch * count,
        1024,
        attention=draw(st.sampled_from(["flash", "plain"])),
        stack=mw.SoftwareStack(overlap=draw(st.sampled_from([0.0, 0.5, 1.0]))),
    )
    parallelism = mw.Parallelism(
        data,
        pipeline,
        context,
        tensor,
        draw(st.sampled_from(["megatron", "megatron_sp", "atp"])),
        draw(st.integers(0, 3)),
        draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        1,
        micro_batch,
        draw(st.sampled_from(["none", "selective", "full"])),
        tuple(draw(st.permutations(mw.Parallelism().order))),
    )
    return problem, parallelism


@examples(50)
@given(configurations())
def test_parts_add_up_and_bounds_hold(drawn: tuple[mw.algorithms.StepProblem, mw.Parallelism]) -> None:
    problem, parallelism = drawn
    step = mw.algorithms.step_of(problem, parallelism)
    assert step.parts.total == pytest.approx(step.time_s)
    assert min(vars(step.parts).values()) >= -1e-9
    assert least_step_s(problem, parallelism) <= step.time_s * (1 + 1e-9)
    assert 0 < step.mfu <= step.hfu < 1
    assert step.memory == memory_of(problem, parallelism)
    assert least_memory(problem, parallelism).total <= step.memory.total
    assert step.fits(step.memory.total) and not step.fits(step.memory.total - 1)


@examples(25)
@given(configurations())
def test_the_pipeline_is_the_one_of_its_actions(
    drawn: tuple[mw.algorithms.StepProblem, mw.Parallelism],
) -> None:
    step = mw.algorithms.step_of(*drawn)
    p, times = step.parallelism, step.stages.action_times()
    if p.pipeline == 1:
        one = sum((*times.forward, *times.input_grad, *times.weight_grad))
        begin = sum(times.earliest)
        assert step.pipeline_s == pytest.approx((begin + one * step.num_micro_batches) * 1e-12)
        return
    request = ScheduleRequest(p.num_stages, step.num_micro_batches, p.virtual_stages)
    timed = time_schedule(schedule_by_name(p.schedule, request, times), times)
    assert step.pipeline_s == pytest.approx(timed.duration * 1e-12)


@examples(6)
@given(st.sampled_from([GPT, LLAMA]), st.integers(1, 3), st.integers(1, 4))
def test_one_chip_runs_one_block_after_another(model: mw.Transformer, micro_batch: int, count: int) -> None:
    bare = replace(model, vocab_size=None)
    chip = HOSTS.with_chips(1)
    step = mw.step(
        bare, chip, batch=micro_batch * count, sequence=512, micro_batch=micro_batch, stack="ideal"
    )
    block = BlockProblem.of(bare, mw.Workload(micro_batch, 512), (1, 1))
    entry = mw.algorithms.ALGORITHMS["megatron_sp"]
    machine = mesh_machine(step.problem.priced_cluster, (1, 1), ("row", "col"))
    layer_s = entry.estimate(block, BlockConfig(), machine).total_s
    assert step.time_s - step.parts.optimizer == pytest.approx(count * model.num_layers * layer_s)
    whole = mw.step(
        model, chip, batch=micro_batch * count, sequence=512, micro_batch=micro_batch, stack="ideal"
    )
    table = BlockProblem.of(model, mw.Workload(micro_batch, 512), (1, 1))
    ends = replace(table, vocabulary=model.vocab_size or 0)
    with_ends_s = entry.estimate(ends, BlockConfig(), machine).total_s
    assert whole.parts.ends == pytest.approx(count * (with_ends_s - layer_s))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("zero", "sharding"), [(2, "zero"), (3, "zero"), (3, "fsdp")])
def test_sharded_tables_move_in_each_micro_batch(zero: int, sharding: str, tied: bool) -> None:
    """Where nothing overlaps, a step has all gathers and reductions of layers and tables, one after the other."""
    stack = mw.SoftwareStack(overlap=0.0, sharding=sharding)  # type: ignore[arg-type]
    model = replace(GPT, tied_embeddings=tied)
    step = mw.step(model, HOSTS, batch=4 * HOSTS.num_chips, sequence=512, zero=zero, stack=stack)
    one, tables, layers = step.stages.data_parallel, 1 if tied else 2, model.num_layers
    gathers_s = layers * one.gather_s + tables * one.table_gather_s
    each_s = layers * one.reduce_s + tables * one.table_s
    if zero == 3:
        expected_s = 4 * (gathers_s + layers * one.gather_s + each_s)
    else:
        expected_s = 4 * each_s + gathers_s
    assert one.table_gather_s > 0
    assert step.parts.data == pytest.approx(expected_s)


@examples(12)
@given(configurations(), st.sampled_from(["chips", "nic", "intra"]))
def test_what_is_faster_is_not_slower(
    drawn: tuple[mw.algorithms.StepProblem, mw.Parallelism], faster: str
) -> None:
    """With one rate for all products: by shape, libraries choose other kernels and protocols."""
    problem, parallelism = drawn
    slow = replace(HOSTS, chip=HOSTS.chip.with_flops_per_s(1e14))
    if faster == "chips":
        fast = replace(slow, chip=slow.chip.with_flops_per_s(2e14))
    else:
        assert isinstance(slow.network, HostsNetwork)
        chosen = getattr(slow.network, faster)

        def doubled(axis: NetworkAxis) -> NetworkAxis:
            return replace(axis, link_bytes_per_s=2 * axis.link_bytes_per_s) if axis is chosen else axis

        fast = replace(slow, network=with_axes(slow.network, doubled))
    times = [
        mw.algorithms.step_of(replace(problem, cluster=each), parallelism).time_s for each in (slow, fast)
    ]
    assert times[1] <= times[0] * (1 + 1e-9)
    assert faster != "chips" or times[1] < times[0]


@examples(60)
@given(st.integers(0, 12), *[st.integers(0, 50)] * 3)
def test_collectives_beside_layers_are_two_lanes(
    layers: int, compute: int, communication: int, queued: int
) -> None:
    """Against the recurrence of a skeleton with a task of each kind for each layer, and one before them."""
    works: dict[Work, int] = {
        Compute("layer", 1): compute, Compute("sync", 1): communication, Compute("head", 1): queued
    }  # fmt: skip
    layer, sync, head = works
    turn = (Task("layer", "a", layer), Task("sync", "b", sync, (("layer", 0),)))
    skeleton = Skeleton((Phase(1, (Task("head", "b", head),)), Phase(layers, turn)))
    total = TimedSkeleton(skeleton, works.__getitem__).total_ps()
    assert exposed_s(layers, compute, communication, 1.0, queued) == total - layers * compute
    assert exposed_s(layers, compute, communication, 0.0, queued) == layers * communication + queued


@examples(200)
@given(st.integers(1, 9), *[st.integers(1, 30)] * 3, st.integers(0, 60))
def test_a_gather_runs_before_the_reduction_of_the_layer_after_it(
    layers: int, compute: int, gather: int, reduce: int, queued: int
) -> None:
    """Two lanes, layer by layer from the last one to the first; what is queued follows the first gather."""
    moving = gathered = gather
    computed = 0
    for layer in reversed(range(layers)):
        computed = max(computed, gathered) + compute
        moving += queued if layer == layers - 1 else 0
        if layer:
            moving = gathered = moving + gather
        moving = max(moving, computed) + reduce
    exposed = moving - layers * compute
    assert exposed_both_s(layers, compute, (gather, reduce), 1.0, queued) == exposed
    assert (
        exposed_both_s(layers, compute, (gather, reduce), 0.0, queued) == layers * (gather + reduce) + queued
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 3}, "no number of replicas fills it"),
        ({"tp": 8, "dp": 2}, "data=4 would fill it"),
        ({"tp": 32}, "too few for tensor 32"),
        ({"pp": 16}, "8 layers, too few for 16 stages"),
        ({"tp": 8, "micro_batch": 5}, "not a multiple of data 4 x micro-batch 5"),
        ({"tp": 8, "vp": 2}, "needs a pipeline"),
        ({"strategy": "zero3"}, "give data= and zero="),
        ({"strategy": "ring_attention"}, "give context="),
        ({"strategy": "megatrom"}, "did you mean 'megatron'"),
        ({"tp": (4, 2), "strategy": "meshslice_block", "cp": 2}, "give context=1"),
        ({"tp": (4, 2)}, "one mesh axis"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'"),
        ({"recompute": "some"}, "give one of none, selective, full"),
        ({"zero": 4}, "give 0, 1, 2 or 3"),
        ({"zero": 1, "zero_group": 3}, "give a divisor of the 32 ranks"),
        ({"order": ("data",)}, "each once"),
        ({"zeros": 1}, "no option 'zeros'"),
        ({"attention": "flashy"}, "unknown attention 'flashy'"),
    ],
)
def test_what_cannot_be_laid_out_is_said_in_a_line(options: dict[str, object], words: str) -> None:
    with pytest.raises(MeshweaveError) as caught:
        mw.step(GPT, HOSTS, batch=64, sequence=1024, **options, stack="ideal")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("of", [mw.step, mw.plan])
def test_a_dtype_without_a_peak_on_the_chip_is_refused_at_once(of: Any) -> None:
    with pytest.raises(DescriptionError, match=r"'bfloat16'.*it has float16, float32, float64$"):
        of("llama-2-7b", "p3.8xlarge:8", batch=8, sequence=512, tp=4)
    assert "% MFU" in str(mw.step("llama-2-7b", "p3.8xlarge:8", batch=8, sequence=512, tp=4, dtype="float16"))


def test_a_cluster_of_odd_hosts_and_a_slow_tree() -> None:
    odd = replace(HOSTS, network=replace(HOSTS.network, num_hosts=3, chips_per_host=5))
    step = mw.step(GPT, odd, batch=15, sequence=512, tp=5, zero=1, stack="ideal")
    assert step.parallelism.data == 3 and step.time_s > 0
    tree = mw.load_cluster("atp-ic1")
    assert mw.step(GPT, tree, batch=16, sequence=512, dtype="float16", tp=2, pp=2, stack="ideal").time_s > 0


def test_embedding_and_loss_may_be_stages_of_their_own() -> None:
    model = replace(GPT, num_layers=14)
    step = mw.step(model, HOSTS, batch=64, sequence=512, pp=8, vp=2, stack="ideal")
    assert step.stage_layers == (0, *[1] * 14, 0)


def test_what_a_stack_does_costs_time() -> None:
    """Waiting for transfers and a loss in steps take longer, and keep more."""
    options = {"batch": 64, "sequence": 512, "pp": 4, "tp": 2}
    plain = mw.step(GPT, HOSTS, **options, stack="ideal")
    blocking = mw.step(GPT, HOSTS, **options, stack=mw.SoftwareStack(blocks_transfers=True))
    assert plain.parts.transfers < blocking.parts.transfers
    (hop,) = set(plain.stages.transfers_s)
    assert blocking.parts.transfers == pytest.approx((2 * plain.num_micro_batches + 6) * hop, rel=0.5)
    turned = {**options, "vp": 2, "schedule": "zbv", "stack": mw.SoftwareStack(blocks_transfers=True)}
    times = mw.step(GPT, HOSTS, **turned).stages  # stages 3 and 4 are of one rank
    sent = [
        a - b for a, b in zip(times.action_times().forward, times.action_times(False).forward, strict=True)
    ]
    assert sent[3] == sent[7] == 0 and len({*sent[:3], *sent[4:7]}) == 1 and sent[0] > 0
    eager = mw.step(GPT, HOSTS, **options, loss="eager", stack="ideal")
    assert eager.time_s > plain.time_s and eager.memory.ranks[-1].total > plain.memory.ranks[-1].total
    assert pickle.loads(pickle.dumps(eager.problem)) == eager.problem


def test_an_optimizer_without_states_moves_none() -> None:
    options = {"batch": 64, "sequence": 512, "pp": 4, "tp": 2, "stack": "ideal"}
    steps = {name: mw.step(GPT, HOSTS, **options, optimizer=name) for name in ("adam", "momentum", "sgd")}
    adam, momentum, sgd = (each.optimizer_s for each in steps.values())
    assert (momentum / adam, sgd / adam) == pytest.approx((42 / 50, 34 / 50), rel=0.01)
    for step in (steps["adam"], steps["sgd"]):
        assert mw.simulation.simulate_step(step).time_s == pytest.approx(step.time_s, rel=0.05)


def test_degrees_lie_where_the_order_puts_them() -> None:
    """Eight neighbours are in one host; groups that take every eighth chip have a NIC each."""
    parallelism = mw.Parallelism(data=4, tensor=8)
    assert [parallelism.stride(degree) for degree in parallelism.order] == [1, 8, 8, 32]
    inside = axis_machine(HOSTS, (("row", 8, 1),)).host_span("tp.row")
    across = axis_machine(HOSTS, (("row", 4, 8),)).host_span("tp.row")
    assert inside is not None and across is not None
    assert (inside.num_hosts, across.num_hosts, across.groups_per_host) == (1, 4, 8)
    problem = mw.algorithms.StepProblem(GPT, HOSTS, 64, 1024)
    outside = mw.Parallelism(data=4, tensor=8, order=("data", "context", "tensor", "pipeline"))
    assert (
        mw.algorithms.step_of(problem, outside).parts.tensor
        > 2 * mw.algorithms.step_of(problem, parallelism).parts.tensor
    )


@examples(40)
@given(st.integers(1, 8), st.integers(2, 12), st.integers(1, 3))
def test_the_hosts_that_are_priced_stand_for_all(per_host: int, size: int, stride: int) -> None:
    """Also where a group fits in a host and does not divide it, so that others of its axis cross hosts."""
    assert isinstance(HOSTS.network, HostsNetwork)
    chips = 2 * math.lcm(per_host, size * stride)
    network = replace(HOSTS.network, num_hosts=chips // per_host, chips_per_host=per_host)
    cluster = replace(HOSTS, network=network)
    whole = mesh_machine(cluster, (chips // (size * stride), size, stride), ("outside", "row", "inside"))
    part = axis_machine(cluster, (("row", size, stride),))
    work = Transfer("all_reduce", "tp.row", size, 1 << 24)
    assert price(work, part) == price(work, whole)


def test_groups_with_equal_weights() -> None:
    order = ("tensor", "context", "data", "pipeline")
    p = mw.Parallelism(data=4, context=2, tensor=2, zero=3, zero_group=4, order=order)
    assert replica_groups(p) == ((8, 2),)
    assert sharding_groups(p) == (((4, 2),), ((2, 8),))
    apart = replace(p, order=("context", "tensor", "data", "pipeline"), zero_group=None)
    assert replica_groups(apart) == ((2, 1), (4, 4))
    check_step(mw.algorithms.StepProblem(GPT, HOSTS.with_chips(16), 16, 1024), p)


def test_attention_of_a_block_is_priced_by_its_shape() -> None:
    """The estimate of a block on chips with constants of attention is the uncontended time of its program."""
    problem = BlockProblem.of(LLAMA, mw.Workload(2, 512), (2, 1))
    entry = mw.algorithms.ALGORITHMS["megatron_sp"]
    machine = mesh_machine(HOSTS.with_chips(2), (2, 1), ("row", "col"))
    uncontended = mw.estimate(entry.program(problem, BlockConfig()), machine)
    assert entry.estimate(problem, BlockConfig(), machine).total_s == pytest.approx(
        uncontended.total_s, rel=1e-9
    )


def test_a_step_prints_as_a_line() -> None:
    step = mw.step("llama-2-7b", "dgx-h100:16", batch=32, sequence=2048, tp=2, pp=2, zero=1)
    assert re.fullmatch(
        r"<Step of llama-2-7b on 16 chips of dgx-h100: dp 4 pp 2 cp 1 tp 2, [\d.]+ m?s, [\d.]+ % MFU, [\d.]+ GB>",
        repr(step),
    )
