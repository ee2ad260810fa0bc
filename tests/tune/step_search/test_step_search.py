"""The search of a step against the enumeration of its space, and what it refuses."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.pipeline.action_times import ActionTimes, peak_stashes
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.step import Parallelism, StepProblem, load_stack, memory_of, step_of
from meshweave.algorithms.step.bounds import LayerBounds, step_bound_s
from meshweave.algorithms.step.orders import DegreeSizes
from meshweave.algorithms.step.parts import ChoicePart, LayoutPart, StepTree, row_key
from meshweave.algorithms.step.pipeline import least_makespan_ps, num_stashes, time_pipeline
from meshweave.algorithms.step.problem import DEGREES
from meshweave.algorithms.step.space import StepLayout
from meshweave.base.errors import DescriptionError, MeshweaveError, UnsupportedError
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.describe.model.memory import Recompute
from meshweave.tune.step_search import SpaceOptions, StepRanking, StepSearch, StepSpace
from meshweave.tune.step_search.reasons import defaults_text
from sampling import examples

SMALL = mw.Transformer("small", 4, 1024, 8, 8, 128, 4096, 32000, False, "a test")
GATED = mw.Transformer("gated", 3, 1024, 8, 2, 128, 2816, 32000, True, "a test", tied_embeddings=False)


def hosts(num_hosts: int, chips_per_host: int) -> Cluster:
    """Return H100 hosts of any size, whose memory has tensors alone."""
    cluster = mw.load_cluster("dgx-h100:16")
    network = cluster.network
    assert isinstance(network, HostsNetwork)
    shape = {"num_hosts": num_hosts, "chips_per_host": chips_per_host, "nics_per_host": 2}
    fields = {name: getattr(network, name) for name in ("intra", "nic")}
    chip = replace(cluster.chip, runtime="none")
    return Cluster(f"{num_hosts}x{chips_per_host}", chip, HostsNetwork(**shape, **fields), "a test")


def searched(problem: StepProblem, options: SpaceOptions, memory_bytes: int) -> StepRanking:
    return StepSearch(StepSpace(problem, options), memory_bytes).ranking()


def enumerated(
    problem: StepProblem, options: SpaceOptions, memory_bytes: int
) -> dict[tuple[object, ...], float]:
    """Return the least time of each set of degrees and strategy, of all configurations that fit."""
    rows: dict[tuple[object, ...], float] = {}
    for choice in StepSpace(problem, options).choices():
        try:
            if memory_of(problem, choice).total > memory_bytes:
                continue
            seconds = step_of(problem, choice).time_s
        except MeshweaveError:
            continue
        key = choice.data, choice.pipeline, choice.context, choice.tensor, choice.strategy, choice.experts
        rows[key] = min(seconds, rows.get(key, seconds))
    return rows


@examples(10)
@given(
    model=st.sampled_from((SMALL, GATED)),
    shape=st.sampled_from(((1, 4), (2, 2), (1, 3))),
    batch=st.sampled_from((4, 6)),
    strategies=st.sampled_from(
        (("megatron_sp",), ("collective_block", "megatron"), ("meshslice_block", "atp"))
    ),
    zero=st.sampled_from(((0,), (0, 1), (1, 3))),
    recompute=st.sampled_from((("none",), ("none", "full"), ("selective", "full"))),
    memory=st.sampled_from((1e9, 2e9, 3e9, 80e9)),
)
def test_the_search_loses_nothing(
    model: mw.Transformer,
    shape: tuple[int, int],
    batch: int,
    strategies: tuple[str, ...],
    zero: tuple[int, ...],
    recompute: tuple[str, ...],
    memory: float,
) -> None:
    problem = StepProblem(model, hosts(*shape), batch, 1024)
    options = SpaceOptions(
        strategies=strategies,
        zero=zero,
        recompute=recompute,  # type: ignore[arg-type]
        schedules=("1f1b", "zbv"),
        virtual_stages=(1, 2),
    )
    ranking = searched(problem, options, int(memory))
    rows = enumerated(problem, options, int(memory))
    assert bool(ranking.rows) == bool(rows)
    for row, seconds in zip(ranking.rows[: ranking.num_exact], sorted(rows.values()), strict=False):
        assert row.time_s == pytest.approx(seconds, rel=1e-12)
    for row in ranking.rows:
        assert row.memory_bytes <= memory
        assert row.time_s >= rows[row_key(row.parallelism)] * (1 - 1e-12)


@examples(20)
@given(
    degrees=st.permutations((1, 2, 4, 2)),
    order=st.permutations(DEGREES),
    shape=st.sampled_from(((4, 4), (2, 8), (1, 16), (8, 2))),
)
def test_orders_that_are_left_out_equal_one_that_is_not(
    degrees: list[int], order: list[str], shape: tuple[int, int]
) -> None:
    data, pipeline, context, tensor = degrees
    problem = StepProblem(SMALL, hosts(*shape), 16, 2048)
    fixed = {"data": data, "pipeline": pipeline, "context": context, "tensor": tensor}
    time_s = step_of(problem, Parallelism(**fixed, order=tuple(order))).time_s  # type: ignore[arg-type]
    kept = StepSpace(problem).orders((data, pipeline, context, tensor))
    assert (
        min(abs(step_of(problem, Parallelism(**fixed, order=each)).time_s / time_s - 1) for each in kept)
        < 1e-9
    )


@examples(30)
@given(
    strategy=st.sampled_from(
        ("megatron", "megatron_sp", "atp", "collective_block", "meshslice_block", "wang_block")
    ),
    cluster=st.sampled_from(("dgx-h100:64", "tpu-v4:64", "tpu-v5e:64", "atp-ic6")),
    model=st.sampled_from((SMALL, GATED, mw.load_model("llama-2-7b"))),
    ranks=st.sampled_from((1, 2, 4, 8)),
    size=st.sampled_from((1, 2, 3, 4, 8)),
    context=st.sampled_from((1, 2, 4)),
    recompute=st.sampled_from(("none", "selective", "full")),
    attention=st.sampled_from(("flash", "plain")),
)
def test_a_layer_takes_at_least_its_kernels(
    strategy: str,
    cluster: str,
    model: mw.Transformer,
    ranks: int,
    size: int,
    context: int,
    recompute: str,
    attention: str,
) -> None:
    problem = StepProblem(model, mw.load_cluster(cluster), 256, 2048, attention=attention)  # type: ignore[arg-type]
    bounds = LayerBounds(StepSpace(problem))
    tensor = ranks if strategy.startswith("megatron") else (max(ranks // 2, 1), min(ranks, 2))
    context = 1 if strategy.endswith("block") else min(context, problem.cluster.num_chips // ranks)
    layout = StepLayout(1, 1, context, tensor, strategy, DEGREES)
    again: Recompute = recompute  # type: ignore[assignment]
    least, middle = bounds.kernels_s(layout, size, again), bounds.layer_s(layout, size, again)
    whole = bounds.recomputed_s(layout, size, again)
    assert least <= middle * (1 + 1e-9) and middle <= whole * (1 + 1e-9)
    assert least > 0 and (recompute != "none" or middle == pytest.approx(whole, rel=1e-12))


@examples(30)
@given(
    layers=st.integers(4, 23),
    pipeline=st.sampled_from((1, 2, 4)),
    schedule=st.sampled_from((("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("zb-h1", 1), ("zbv", 2))),
    rounds=st.integers(1, 4),
    recompute=st.sampled_from(("none", "full")),
)
def test_a_step_takes_at_least_its_bounds(
    layers: int, pipeline: int, schedule: tuple[str, int], rounds: int, recompute: str
) -> None:
    name, virtual = schedule if pipeline > 1 else ("1f1b", 1)
    if pipeline * virtual > layers:
        return
    problem = StepProblem(replace(SMALL, num_layers=layers), hosts(1, 4), 4 * rounds, 1024)
    layout = StepLayout(4 // pipeline, pipeline, 1, 1, "megatron_sp", DEGREES)
    choice = layout.choice(1, name, virtual, 0, recompute)  # type: ignore[arg-type]
    bounds, count = LayerBounds(StepSpace(problem)), rounds * pipeline
    layer_s = bounds.recomputed_s(layout, 1, recompute)  # type: ignore[arg-type]
    bound_s = step_bound_s(layers, pipeline, name, virtual, count, layer_s, bounds.head_s(layout, 1))
    time_s = step_of(problem, choice).time_s
    assert bound_s <= time_s * (1 + 1e-9)


def test_bounds_have_the_layers_of_a_stack_that_divides_them_by_cost() -> None:
    nanotron = load_stack("nanotron")
    problem = StepProblem(
        mw.load_model("llama-3-8b"), mw.load_cluster("dgx-h100:16"), 32, 4096, stack=nanotron
    )
    tree = StepTree(StepSpace(problem), problem.usable_bytes())
    layout = StepLayout(2, 4, 1, 2, "megatron_sp", DEGREES)
    part = LayoutPart(tree, DegreeSizes(2, 4, 1, 2), layout, 8, "full", 0.0)
    choices = list(tree.branches(part, math.inf))
    assert choices
    for choice in choices:
        assert isinstance(choice, ChoicePart)
        for config in tree.branches(choice, math.inf):
            assert isinstance(config, Parallelism)
            assert choice.bound_s <= step_of(problem, config).time_s * (1 + 1e-9)


def test_fixed_degrees_are_kept() -> None:
    plan = mw.plan(
        SMALL,
        hosts(2, 4),
        batch=8,
        sequence=1024,
        tp=2,
        pp=[2, 4],
        cp=1,
        zero=[0, 1],
        recompute="none",
        vp=1,
        dtype="bfloat16",
    )
    degrees = [record.degrees for record in plan.step.ranked]
    assert {each.tensor for each in degrees if isinstance(each.tensor, int)} <= {2}
    assert {each.pipeline for each in degrees} == {2, 4}
    assert {(each.recompute, each.virtual_stages) for each in degrees} == {("none", 1)}
    assert {each.zero for each in degrees} <= {0, 1}


@pytest.mark.parametrize(
    ("shape", "batch"), [((3, 5), 15), ((1, 7), 7), ((17, 1), 17), ((1, 1), 2), ((13, 1), 4)]
)
def test_strange_clusters_have_a_plan_or_a_reason(shape: tuple[int, int], batch: int) -> None:
    try:
        plan = mw.plan(SMALL, hosts(*shape), batch=batch, sequence=1024, strategy="megatron_sp", zero=[0, 1])
    except UnsupportedError as error:
        assert "\n" not in str(error) and str(shape[0] * shape[1]) in str(error)
        assert shape == (13, 1)
    else:
        assert plan.step.best.degrees.num_chips == shape[0] * shape[1]
        assert shape != (13, 1), "13 is no divisor of 4, and more than 4 stages"


def test_a_slow_tree_has_a_plan() -> None:
    slow = mw.load_cluster("atp-ic6")
    fixed = {"strategy": "megatron_sp", "zero": 1, "recompute": "none", "vp": 1, "cp": 1, "micro_batch": 1}
    plan = mw.plan(SMALL, slow, batch=slow.num_chips, sequence=1024, **fixed)
    assert plan.step.best.degrees.num_chips == slow.num_chips


def test_what_does_not_fit_says_what_is_least() -> None:
    with pytest.raises(
        UnsupportedError, match=r"fits in 950 kB a chip, 5 % kept free: the smallest takes [0-9.]+ MB \(dp"
    ):
        mw.plan(SMALL, hosts(1, 4), batch=4, sequence=1024, memory_bytes=10**6)


NARROW = {
    "strategy": "megatron_sp", "schedule": "1f1b", "vp": 1, "cp": 1, "micro_batch": 1,
    "order": ("tensor", "context", "data", "pipeline"), "num_exact": 1,
}  # fmt: skip


def test_memory_of_a_plan_is_the_sum_of_its_parts() -> None:
    """What tables, files and reports print of each row: bytes by kind, and in all."""
    plan = mw.plan(SMALL, hosts(1, 4), batch=16, sequence=1024, **NARROW)
    for row in (plan.step.best, *plan.step.ranked):
        assert row.memory_bytes == sum(row.memory_parts.values()) <= plan.step.memory_limit_bytes
        assert min(row.memory_parts.values()) >= 0


@pytest.mark.parametrize(("limit", "has_shorter"), [(180e6, False), (480e6, True), (500e6, True)])
def test_what_is_said_to_fit_does(limit: float, has_shorter: bool) -> None:
    """A plan that does not fit names chips, sequences and memory a chip; with each of them there is a plan."""
    with pytest.raises(UnsupportedError, match=r"of which [0-9.]+ MB are .*what would fit") as refused:
        mw.plan(SMALL, hosts(1, 4), batch=64, sequence=4096, memory_bytes=int(limit), **NARROW)
    text = str(refused.value)
    chips, shorter = (re.search(words, text) for words in (r"(\d+) chips \(", r"sequences of (\d+) tokens"))
    assert chips and bool(shorter) == has_shorter
    of = {"memory_bytes": int(limit), "recompute": "full", **NARROW}
    assert mw.plan(SMALL, hosts(int(chips[1]) // 4, 4), batch=64, sequence=4096, **of)
    if shorter:
        assert mw.plan(SMALL, hosts(1, 4), batch=64, sequence=int(shorter[1]), **of)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tpp": 2}, DescriptionError, "did you mean"),
        ({"strategy": "megatrom"}, UnsupportedError, "did you mean 'megatron'"),
        ({"tp": 0}, DescriptionError, "at least 1"),
        ({"zero": 4}, DescriptionError, "from 0 to 3"),
        ({"order": ("data",)}, DescriptionError, "each of"),
        ({"tp": 3}, UnsupportedError, "tp 3 does not divide its 4 chips"),
        ({"ep": 2}, UnsupportedError, "ep 2 is for experts, of which its model has none"),
        ({"etp": 2}, UnsupportedError, "etp 2 is for experts, of which its model has none"),
    ],
)
def test_wrong_options_are_one_line(
    options: dict[str, object], error: type[MeshweaveError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        mw.plan(SMALL, hosts(1, 4), batch=4, sequence=1024, **options)
    assert "\n" not in str(caught.value)


def test_a_search_has_an_answer_before_it_prices_what_it_finds() -> None:
    """An early answer fits, is that of a search that ends at once, and changes nothing of one that goes on."""
    problem = StepProblem(SMALL, hosts(2, 4), 32, 512)
    options, most = SpaceOptions(), 2**31

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    stopped = StepSearch(StepSpace(problem, options), most, progress=interrupt)
    stopped._search = interrupt_before  # type: ignore[method-assign]
    ranking = stopped.ranking()
    (row,) = ranking.rows
    assert not ranking.is_complete and ranking.front == ranking.rows
    assert memory_of(problem, row.parallelism).total <= most
    assert row.time_s == step_of(problem, row.parallelism).time_s

    tight = StepSearch(StepSpace(problem, options), row.memory_bytes - 1)
    tight.answer_early(tight._tree.parts)
    assert tight.early is None or memory_of(problem, tight.early.config).total < row.memory_bytes

    plain = StepSearch(StepSpace(replace(problem), options), most)
    plain.answer_early = lambda parts: None  # type: ignore[method-assign]
    with_answer, without = searched(replace(problem), options, most), plain.ranking()
    assert [(row.parallelism, row.time_s) for row in with_answer.rows] == [
        (row.parallelism, row.time_s) for row in without.rows
    ]
    assert with_answer.count == without.count


def interrupt_before(part: object) -> None:
    """End a search before it looks at anything."""
    raise KeyboardInterrupt


def test_an_interrupted_search_gives_the_best_so_far() -> None:
    problem = StepProblem(SMALL, hosts(2, 4), 16, 1024)
    search = StepSearch(StepSpace(problem), problem.cluster.chip.memory_bytes)

    def interrupt(done: int, total: int) -> None:
        if search.rows:
            raise KeyboardInterrupt

    search.progress = interrupt
    ranking = search.ranking()
    assert ranking.rows and not ranking.is_complete

    def interrupt_at_once(done: int, total: int) -> None:
        raise KeyboardInterrupt

    nothing = StepSearch(StepSpace(problem), 1, progress=interrupt_at_once)
    with pytest.raises(KeyboardInterrupt):
        nothing.ranking()


def test_faster_links_are_never_slower() -> None:
    plan = mw.plan(SMALL, hosts(2, 2), batch=8, sequence=1024, sensitivity=True, strategy="megatron_sp", cp=1)
    nics, inside = plan.step.sensitivity[:2], plan.step.sensitivity[2:]
    for faster, slower in (nics, inside):
        assert faster.same_s <= plan.step.best.step_s <= slower.same_s
        assert faster.best_s <= faster.same_s and slower.best_s <= slower.same_s


def test_measured_collectives_inside_a_host_change_with_its_links() -> None:
    plan = mw.plan(
        "llama-2-7b", "dgx-h100:8", batch=8, sequence=1024, sensitivity=True, tp=8, strategy="megatron_sp"
    )
    faster, slower = plan.step.sensitivity
    assert "inside hosts" in faster.change
    assert faster.same_s < 0.95 * plan.step.best.step_s and slower.same_s > 1.05 * plan.step.best.step_s


@pytest.mark.parametrize(("name", "virtual"), [("zb-h1", 1), ("zbv", 2), ("1f1b", 1), ("1f1b", 3)])
def test_stashes_in_closed_form_are_those_of_the_schedule(name: str, virtual: int) -> None:
    for ranks in (2, 3, 4, 5):
        for count in (ranks, 2 * ranks, 3 * ranks, 5 * ranks):
            schedule = "interleaved-1f1b" if virtual == 3 else name
            request = ScheduleRequest(ranks * virtual, count, virtual)
            made = schedule_by_name(schedule, request, ActionTimes.uniform(ranks * virtual))
            assert num_stashes(name, ranks, virtual, count) == peak_stashes(made)


@examples(30)
@given(
    name=st.sampled_from(("zb-h1", "zbv")),
    ranks=st.integers(2, 5),
    rounds=st.integers(2, 4),
    seed=st.integers(0, 10**6),
    transfer=st.sampled_from((0, 7, 40)),
)
def test_zero_bubble_schedules_take_at_least_their_bound(
    name: str, ranks: int, rounds: int, seed: int, transfer: int
) -> None:
    virtual = 2 if name == "zbv" else 1
    stages = ranks * virtual
    drawn = random.Random(seed)
    parts = [tuple(drawn.randint(50, 150) for _ in range(stages)) for _ in range(3)]
    times = ActionTimes(*parts, (transfer,) * (stages - 1))
    count = rounds * ranks
    least = least_makespan_ps(name, ranks, virtual, count, times)
    assert least <= time_pipeline(name, ranks, virtual, count, times).makespan_ps


def test_a_plan_says_which_defaults_of_a_step_are_not_the_best() -> None:
    """The line follows from the fields of both configurations: setting those in `mw.step` gives the winner."""
    for chips, options in (
        (8, {}),
        (8, {"tp": 2, "zero": 0, "memory_bytes": 1 << 40}),
        (16, {"cp": 1, "vp": 1, "recompute": "none", "schedule": "1f1b"}),
    ):
        steps = mw.plan("llama-2-7b", f"dgx-h100:{chips}", batch=16, sequence=2048, **options).step
        assert steps.defaults is not None
        fixed = {name: value for name, value in options.items() if name != "memory_bytes"}
        default = mw.step("llama-2-7b", f"dgx-h100:{chips}", batch=16, sequence=2048, **fixed)
        assert steps.defaults.mfu == default.mfu and steps.defaults.memory_bytes == default.memory.total
        text, best = defaults_text(steps), steps.best.degrees
        named = {name for name in type(best).model_fields if f" {name} " in f" {text.split(': ')[-1]} "}
        differing = {name for name in named if getattr(best, name) != getattr(steps.defaults.degrees, name)}
        assert named == differing
        changed = {name: getattr(best, name) for name in differing}
        again = mw.algorithms.step_of(default.problem, replace(default.parallelism, **changed))
        assert again.time_s == steps.best.step_s
        assert ("does not fit" in text) == (default.memory.total > steps.memory_limit_bytes)
    refused = mw.plan("llama-2-7b", "dgx-h100:16", batch=8, sequence=2048).step
    assert "cannot be laid out: " in defaults_text(refused) and refused.defaults is None
    same = steps.model_copy(update={"defaults": steps.best})
    assert defaults_text(same) == ""


def test_a_reserve_stays_free() -> None:
    """A share, or bytes, of the chip's memory or of the one given; what leaves nothing is refused."""
    options = {"batch": 16, "sequence": 2048, "tp": 1, "pp": 1, "cp": 1}
    for reserve, memory_bytes, kept in ((0.05, None, 4e9), (0.0, 60 * 10**9, 0), (6e9, 60 * 10**9, 6e9)):
        asked = {**options, "reserve": reserve, "memory_bytes": memory_bytes}
        steps = mw.plan("llama-2-7b", "dgx-h100:8", **asked).step
        assert steps.reserve_bytes == kept
        assert steps.memory_limit_bytes + kept == (memory_bytes or 80 * 10**9)
        assert all(row.memory_bytes <= steps.memory_limit_bytes for row in (*steps.ranked, *steps.front))
    for reserve in (80e9, -0.1, "5%", float("nan")):
        with pytest.raises(DescriptionError, match="reserve"):
            mw.plan("llama-2-7b", "dgx-h100:8", reserve=reserve, **options)  # type: ignore[arg-type]
    step = mw.step("llama-2-7b", "dgx-h100:8", batch=16, sequence=2048, zero=1, micro_batch=2)
    with pytest.raises(DescriptionError, match="a reserve of 5 % leaves nothing of 1 B a chip"):
        step.problem.usable_bytes(1)
    bare = mw.algorithms.StepProblem(
        step.problem.model,
        step.problem.cluster,
        16,
        2048,
        reserve=step.memory.total,
        stack=step.problem.stack,
    )
    assert bare.usable_bytes(2 * step.memory.total) == step.memory.total
    assert (
        step.fits()
        and not mw.algorithms.step_of(
            replace(bare, reserve=80e9 - step.memory.total + 1), step.parallelism
        ).fits()
    )
