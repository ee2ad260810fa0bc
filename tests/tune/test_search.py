"""The fast search gives what trying everything gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2d, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.matmul2d.common.problem import AXES, MESH
from meshweave.algorithms.matmul2d.meshslice import MeshSlice
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cost.machine import mesh_machine
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.workload import Workload
from meshweave.estimate import TimedSkeleton, estimate_skeleton
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.work import Work
from meshweave.tune import plan_model
from meshweave.tune.meshes import MeshSearchSpace
from meshweave.tune.plan import Candidate
from meshweave.tune.product import SearchCounts, tune_product
from meshweave.tune.search import _ModelSearch
from meshweave.tune.unrolled import UNROLLED, planned_names, sizes_of, unrolled_entry
from sampling import examples

CLUSTERS = ("tpu-v4-pod:4", "tpu-v4-pod:8", "tpu-v4-pod:16", "dgx-h100:8", "dgx-a100:16", "local-cpu:12")
slow = examples(30, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def blocks(draw: st.DrawFn) -> Transformer:
    """A small model, of sizes that divide and that do not."""
    heads, head_dim = draw(st.integers(1, 8)), draw(st.sampled_from([16, 64, 100]))
    hidden = draw(st.sampled_from([heads * head_dim, 96, 512, 1000]))
    ffn = draw(st.sampled_from([hidden, 4 * hidden, 333]))
    return Transformer("random", 1, hidden, heads, heads, head_dim, ffn, None, False, "a test")


Row = tuple[int, tuple[int, ...], list[tuple[Matmul2dProblem, Matmul2dConfig, int]]]


def tried(entry: Matmul2d, model: Transformer, cluster: Cluster, workload: Workload) -> list[Row]:
    """Every shape in the order of time, each with its products at the first of their fastest configurations."""
    ground = MeshSearchSpace(cluster)
    job = _ModelSearch(model.fc_layers(), workload, ground, SearchCounts())
    rows: list[Row] = []
    for shape in ground.shapes(entry):
        machine = mesh_machine(cluster, shape, AXES[: len(shape)], MESH)

        def cost_ps(work: Work, machine=machine) -> int:
            return price(work, machine).total_ps

        best = []
        for problem in job.problems(entry, shape):
            times = [
                (TimedSkeleton(entry.skeleton(problem, config), cost_ps).total_ps(), number, config)
                for number, config in enumerate(entry.candidates(problem))
            ]
            total_ps, _, config = min(times, key=lambda item: item[:2])
            best.append((problem, config, total_ps))
        rows.append((sum(item[2] for item in best), shape, best))
    return sorted(rows, key=lambda row: row[0])


def assert_same(candidate: Candidate, rows: list[Row]) -> None:
    _, shape, best = rows[0]
    passes = [item for layer in candidate.layers for item in layer.passes]
    assert candidate.mesh_shape == shape
    assert [(p.config, round(p.total_s * 10**12)) for p in passes] == [item[1:] for item in best]
    if len(rows) > 1:
        text = f"{'x'.join(map(str, rows[1][1]))} is {100 * (rows[1][0] / rows[0][0] - 1):.1f} % slower"
        assert candidate.runner_up == text


@slow
@given(
    blocks(),
    st.sampled_from(CLUSTERS),
    st.integers(1, 8),
    st.sampled_from([64, 100, 2048]),
    st.sets(st.sampled_from(sorted(PRODUCTS_2D)), min_size=1, max_size=3),
)
def test_search_finds_what_trying_everything_finds(
    model: Transformer, cluster_name: str, batch: int, sequence: int, names: set[str]
) -> None:
    cluster = load_cluster(cluster_name)
    workload = Workload(batch, sequence, cluster.chip.peak_flops_per_s[0][0])
    asked = tuple(sorted(names))
    if not any(MeshSearchSpace(cluster).shapes(PRODUCTS_2D[name]) for name in asked):
        with pytest.raises(UnsupportedError, match="no mesh shape"):
            plan_model(model, cluster, workload, asked)
        return
    plan = plan_model(model, cluster, workload, asked)
    counts = {}
    for name in planned_names(asked):
        if name in UNROLLED:
            entry = unrolled_entry(name, counts)
        else:
            entry = PRODUCTS_2D[name]
        if not MeshSearchSpace(cluster).shapes(entry):
            assert name in plan.note
            continue
        rows = tried(entry, model, cluster, workload)
        if name == "meshslice":
            counts = {sizes_of(problem): config.slice_count for problem, config, _ in rows[0][2]}
        assert_same(plan.candidate(name), rows)


@st.composite
def offers(draw: st.DrawFn) -> tuple[Matmul2d, Matmul2dProblem, Matmul2dConfig, Cluster]:
    """An algorithm, a product on one of its meshes, one of the configurations that it offers, and a cluster."""
    entry = PRODUCTS_2D[draw(st.sampled_from(sorted(PRODUCTS_2D)))]
    chips = draw(st.sampled_from([4, 8, 16]))
    shapes = [shape for shape in entry.mesh_shapes(chips) if max(shape) <= 8]
    if not shapes:
        shapes = [shape for n in range(1, 17) for shape in entry.mesh_shapes(n)]
    size = st.integers(1, 80) | st.sampled_from([64, 128, 512, 12288])
    problem = Matmul2dProblem(
        *draw(st.tuples(size, size, size)),
        draw(st.sampled_from(shapes)),
        draw(st.sampled_from(entry.dataflows)),
        "bfloat16",
    )
    config = draw(st.sampled_from(list(entry.candidates(problem))))
    return entry, problem, config, load_cluster(draw(st.sampled_from(["tpu-v4-pod:16", "dgx-h100:16"])))


@examples(300, suppress_health_check=[HealthCheck.too_slow])
@given(offers())
def test_no_bound_is_above_the_time(offer: tuple[Matmul2d, Matmul2dProblem, Matmul2dConfig, Cluster]) -> None:
    entry, problem, config, cluster = offer
    shape = problem.mesh_shape
    machine = mesh_machine(cluster, shape, AXES[: len(shape)], MESH)

    def cost_ps(work: Work) -> int:
        return price(work, machine).total_ps

    timed = TimedSkeleton(entry.skeleton(problem, config), cost_ps)
    total_ps = timed.total_ps()
    assert timed.lower_bound_ps() <= total_ps
    floor = entry.config_lower_bound(problem, config)
    if floor is not None:
        assert TimedSkeleton(floor, cost_ps).total_ps() <= total_ps
    least = entry.lower_bounds(problem)
    if least is not None:
        assert min(TimedSkeleton(skeleton, cost_ps).total_ps() for skeleton in least) <= total_ps


@examples(200, suppress_health_check=[HealthCheck.too_slow])
@given(offers())
def test_closed_forms_of_peak_memory(
    offer: tuple[Matmul2d, Matmul2dProblem, Matmul2dConfig, Cluster],
) -> None:
    entry, problem, config, _ = offer
    assert entry.peak_bytes(problem, config) == peak_bytes(entry.program(problem, config), 0)


def test_most_of_a_large_space_is_not_followed() -> None:
    tally = SearchCounts()
    cluster = load_cluster("tpu-v4-pod:256")
    plan_model(load_model("gpt3"), cluster, Workload(128, 2048), ("summa",), counts=tally)
    assert tally.num_exact < tally.num_configs / 2


def test_followers_take_the_slice_counts_of_meshslice() -> None:
    cluster, names = load_cluster("tpu-v4-pod:16"), tuple(UNROLLED)
    plan = plan_model(load_model("gpt3"), cluster, Workload(8, 2048), ("meshslice", "wang", "summa"))
    assert set(names) <= {candidate.algorithm for candidate in plan.candidates}
    leader = [item.slices for layer in plan.candidate("meshslice").layers for item in layer.passes]
    for name in names:
        candidate = plan.candidate(name)
        assert candidate.base == candidate.entry_name == UNROLLED[name]
        passes = [item for layer in candidate.layers for item in layer.passes]
        most = {"row": candidate.mesh_shape[0] // 2 + 1, "col": candidate.mesh_shape[1] // 2 + 1}
        ring = name.startswith("wang")
        assert [len(item.slices) for item in passes] == [
            min(max(len(slices), 2), most[item.overlap]) if ring else len(slices)
            for slices, item in zip(leader, passes, strict=True)
        ]
        assert candidate.block_s >= plan.candidate(UNROLLED[name]).block_s or name.startswith("summa")
    alone = plan_model(load_model("gpt3"), cluster, Workload(8, 2048), names[:1])
    assert [candidate.algorithm for candidate in alone.candidates] == [*names[:1]]
    assert alone.best == plan.candidate(names[0])


def test_tapered_is_never_slower_than_equal_slices() -> None:
    cluster = load_cluster("tpu-v4-pod:16")
    plan = plan_model(load_model("gpt3"), cluster, Workload(8, 2048), ("meshslice", "meshslice_tapered"))
    pairs = zip(plan.candidate("meshslice_tapered").layers, plan.candidate("meshslice").layers, strict=True)
    assert plan.candidate("meshslice_tapered").block_s <= plan.candidate("meshslice").block_s
    assert any(len(set(item.slices)) > 1 for layer, _ in pairs for item in layer.passes)


def test_every_choice_says_what_it_gains() -> None:
    plan = plan_model(load_model("gpt3"), load_cluster("tpu-v4-pod:16"), Workload(8, 2048), ("meshslice",))
    for layer in plan.best.layers:
        for item in layer.passes:
            assert item.runner_up.startswith("S=")
            assert item.runner_up.endswith("% slower")


def test_an_algorithm_without_a_mesh_is_left_out_by_name() -> None:
    """Cannon's mesh is square, which 8 chips are not."""
    model, cluster, workload = load_model("gpt3"), load_cluster("tpu-v4-pod:8"), Workload(4, 2048)
    plan = plan_model(model, cluster, workload, ("cannon", "collective"))
    assert [candidate.algorithm for candidate in plan.candidates] == ["collective"]
    assert "cannon" in plan.note
    with pytest.raises(UnsupportedError, match="no mesh shape for cannon"):
        plan_model(model, cluster, workload, ("cannon",))


def test_unknown_names_are_user_errors() -> None:
    with pytest.raises(UnsupportedError, match=r"did you mean 'wang\[S=meshslice\]'"):
        planned_names(("wang[S=meshslce]",))
    with pytest.raises(UnsupportedError, match="no algorithm named"):
        planned_names(())


class OutputStationaryOnly(MeshSlice):
    dataflows = ("os",)


def test_a_product_without_a_dataflow_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = OutputStationaryOnly()
    assert not any(lacking.gradients(problem) for problem in lacking.examples())
    monkeypatch.setitem(PRODUCTS_2D.entries, "os_only", lacking)
    asked = load_model("gpt3"), load_cluster("tpu-v4-pod:16"), Workload(8, 2048)
    said = "the layers need the dataflows ls and rs, which os_only lacks"
    assert f"Left out: {said}." in plan_model(*asked, ["collective", "os_only"]).note
    with pytest.raises(UnsupportedError, match=said):
        plan_model(*asked, ["os_only"])


def test_one_product_can_be_tuned_by_itself() -> None:
    cluster = load_cluster("tpu-v4-pod:16")
    entry = PRODUCTS_2D["meshslice"]
    problem = Matmul2dProblem(16384, 12288, 12288, (4, 4), "ls", "bfloat16")
    machine = mesh_machine(cluster, (4, 4), AXES[:2], MESH)
    tuned = tune_product(entry, problem, machine)
    times = sorted(
        estimate_skeleton(entry.skeleton(problem, config), machine).total_s
        for config in entry.candidates(problem)
    )
    assert [tuned.estimate.total_s, tuned.runner_up_s] == times[:2]
    assert tuned.margin_text == f"{tuned.runner_up} is {100 * (times[1] / times[0] - 1):.1f} % slower"
    with pytest.raises(LayoutError, match="for a 2x8 mesh, the machine has 4x4"):
        tune_product(entry, replace(problem, mesh_shape=(2, 8)), machine)
    with pytest.raises(UnsupportedError, match="no dataflow ls; it has os"):
        tune_product(OutputStationaryOnly(), problem, machine)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixtral-8x7b", ["products of experts left out"]),
        ("deepseek-v3", ["products of experts left out", "the first 3 of 61 layers, without experts"]),
        ("llama-2-7b", []),
    ],
)
def test_a_plan_of_products_says_what_of_the_model_it_leaves_out(name: str, said: list[str]) -> None:
    plan = plan_model(load_model(name), load_cluster("dgx-h100:8"), Workload(8, 64), ("collective",))
    own = load_model(name).not_priced_at(64)
    assert plan.not_priced[len(said) :] == own
    assert all(words in text for words, text in zip(said, plan.not_priced, strict=False))
