"""T3: sub-layers are the products that they should be, and rows follow from their runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cli.app import run_app
from meshweave.describe.machine.gpu import load_gpu
from meshweave.execute.numpy import run_numpy
from meshweave_studies.gpu.kernels import Source
from meshweave_studies.papers import FIGURES, reproduce_t3, select
from meshweave_studies.pictures import pictures
from meshweave_studies.published import published_rows
from meshweave_studies.t3 import groups, orderings
from meshweave_studies.t3.end_to_end import Iteration, besides_products_s
from meshweave_studies.t3.groups import every_job, geomean_gain
from meshweave_studies.t3.models import MODELS, SubLayer, sub_layer_of, sub_layers
from meshweave_studies.t3.programs import (
    SlicedProduct,
    overlapped_program,
    sequential_program,
)
from meshweave_studies.t3.readings import READINGS, SUB_LAYER_ROWS, VARIATIONS, T3Reading
from meshweave_studies.t3.rows import OURS, PAPER
from meshweave_studies.t3.study import (
    FUSED_ALONE,
    GPU,
    GPU_2X,
    NEAR_MEMORY,
    SEQUENTIAL,
    T3,
    T3_MCA,
    GpuJob,
    T3Study,
    Times,
    last_sum_s,
    ring_times,
    simulate_job,
    traffic_curve,
)
from meshweave_studies.tables import html, markdown
from sampling import examples

SMALL = SlicedProduct(512, 256, 192, 4)


@examples(25)
@given(
    ranks=st.integers(2, 4),
    part=st.integers(1, 3),
    columns=st.integers(1, 4),
    depth=st.integers(1, 3),
    transposed=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**16),
)
def test_programs_give_the_product_on_every_rank(
    ranks: int, part: int, columns: int, depth: int, transposed: tuple[bool, bool], seed: int
) -> None:
    product = SlicedProduct(ranks * part, columns, depth, ranks, *transposed, dtype="float32")
    rng = np.random.default_rng(seed)
    a = rng.integers(-8, 9, (product.rows, depth * ranks)).astype(np.float32)
    b = rng.integers(-8, 9, (depth * ranks, columns)).astype(np.float32)
    inputs = {"A": a, "B": b}
    for program in (sequential_program(product), overlapped_program(product)):
        np.testing.assert_array_equal(run_numpy(program, inputs, seed=seed).outputs["C"], a @ b)


def test_parts_have_equal_rows() -> None:
    with pytest.raises(LayoutError, match="divide the rows"):
        SlicedProduct(10, 4, 4, 4)


# --- simulation -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study() -> T3Study:
    return T3Study()


def test_traffic_follows_from_the_counts_of_a_ring(study: T3Study) -> None:
    """Section 4.3: T3 reads a part once to send it, and neither writes nor reads the first part."""
    whole = 2 * SMALL.rows * SMALL.columns
    part = whole // SMALL.ranks
    fused = study.run(GpuJob(SMALL, T3)).traffic_bytes
    assert fused[Source.PRODUCT_WRITE] == fused[Source.REDUCE_SCATTER_WRITE] == whole - part
    assert fused[Source.REDUCE_SCATTER_READ] == whole - 2 * part
    assert fused == study.run(GpuJob(SMALL, T3_MCA)).traffic_bytes
    near = study.run(GpuJob(SMALL, NEAR_MEMORY)).traffic_bytes
    assert near[Source.REDUCE_SCATTER_READ] == near[Source.REDUCE_SCATTER_WRITE] == whole - part


def test_fewer_compute_units_take_longer(study: T3Study) -> None:
    job = GpuJob(SlicedProduct(1024, 512, 64, 4), SEQUENTIAL)
    whole, few = study.run(job), simulate_job(GpuJob(job.product, SEQUENTIAL, GPU, 4, 1))
    for kernel in ("product", "reduce_scatter"):
        assert few.kernel_ps(kernel) > whole.kernel_ps(kernel)
    assert few.kernel_ps("all_gather") >= whole.kernel_ps("all_gather")  # one unit can fill the link


def test_a_fused_product_without_communication_stores_all_and_sends_nothing(study: T3Study) -> None:
    fused, alone = (study.run(GpuJob(SMALL, what)) for what in (T3, FUSED_ALONE))
    assert alone.counters["sent_bytes"] == 0 < fused.counters["sent_bytes"]
    assert alone.traffic_bytes[Source.PRODUCT_WRITE] == SMALL.rows * SMALL.columns * 2
    assert (
        sum(alone.traffic_bytes[of] for of in (Source.REDUCE_SCATTER_READ, Source.REDUCE_SCATTER_WRITE)) == 0
    )
    assert [name for name, _, _ in alone.spans] == ["product"]
    assert alone.kernel_ps("product") <= fused.kernel_ps("product")


@pytest.mark.parametrize("reading", [*READINGS.values(), *VARIATIONS.values()], ids=lambda one: one.name)
def test_a_reading_changes_what_it_says_and_nothing_else(reading: T3Reading) -> None:
    before, after = load_gpu(GPU).model_dump(by_alias=True), reading.gpu(GPU).model_dump(by_alias=True)

    def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in table.items():
            out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return out

    changed = {key: value for key, value in flat(after).items() if flat(before)[key] != value}
    assert changed == {
        key: list(value) if isinstance(value, tuple) else value for key, value in reading.changes
    }
    assert not reading.changes or changed


def test_a_slower_link_takes_longer_and_a_threshold_is_used() -> None:
    slow = simulate_job(GpuJob(SMALL, SEQUENTIAL), READINGS["link-75"])
    assert slow.kernel_ps("all_gather") > simulate_job(GpuJob(SMALL, SEQUENTIAL)).kernel_ps("all_gather")
    held = simulate_job(GpuJob(SMALL, T3_MCA), VARIATIONS["threshold 5"])
    assert held.counters["threshold"] == 5


def test_a_reading_of_sub_layers_has_their_rows_alone() -> None:
    assert set(SUB_LAYER_ROWS) <= set(OURS)
    with pytest.raises(UnsupportedError, match="says nothing about row generation"):
        reproduce_t3(select("t3", ["generation"]), reading="occupancy")
    with pytest.raises(UnsupportedError, match="has no figures"):
        reproduce_t3(select("t3", figures=["14"]), reading="occupancy")


def test_runs_are_kept_and_do_not_depend_on_company(study: T3Study) -> None:
    job, other = GpuJob(SMALL, SEQUENTIAL), GpuJob(SMALL, T3)
    seen: list[tuple[int, int]] = []
    together = T3Study()
    together.prefetch([job, other, job], lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert together.run(job) is together.run(job)
    assert together.run(job).spans == study.run(job).spans


def test_curve_has_all_bytes(study: T3Study) -> None:
    one = study.run(GpuJob(SMALL, SEQUENTIAL))
    curve = traffic_curve(one, Source.REDUCE_SCATTER_WRITE, 3)
    total = sum(rate * 1e9 * 3e-6 for _, rate in curve)
    assert total == pytest.approx(one.traffic_bytes[Source.REDUCE_SCATTER_WRITE])


def test_the_larger_machine_has_twice_the_compute_and_nothing_else() -> None:
    small, large = (load_gpu(name).model_dump() for name in (GPU, GPU_2X))
    twice = {"compute_units": 160, "flops_per_s": 2 * small["flops_per_s"]}
    about = {key: large[key] for key in ("name", "source", "note")}
    assert large == {**small, **twice, **about}


# --- rows -------------------------------------------------------------------------------------------------------


def test_every_row_is_computed() -> None:
    ids = [row.id for row in published_rows(PAPER)]
    assert len(ids) == len(set(ids)) and set(ids) == set(OURS)


def test_theory_of_a_reduce_scatter(study: T3Study) -> None:
    """3/4 of the bytes over a link and three hops; the last part of four is read twice and written by memory."""
    theory, simulated = ring_times(study, 6)
    assert theory == pytest.approx(0.75 * 6 * 2**20 / 150e9 + 1.5e-6)
    assert last_sum_s(study, 6) == pytest.approx(3 * 1.5 * 2**20 / 1.024e12)
    assert simulated > theory


def test_names_of_sub_layers_lead_back() -> None:
    layers = sub_layers(*MODELS)
    assert [sub_layer_of(str(layer)) for layer in layers] == list(layers)
    assert len(groups.SMALL) == 16 and len(groups.BIG) == 12 and len(layers) == 44


@pytest.mark.parametrize("layer", [*sub_layers(*MODELS), *groups.GENERATED.values()], ids=str)
def test_sub_layers_have_the_flops_of_their_slice(layer: SubLayer) -> None:
    model, product = MODELS[layer.model], layer.product
    inner = {"OP": 1, "FC-2": 4, "FC-1": 4, "IP": 3}[layer.name] * model.hidden
    assert layer.flops * layer.degree == 2 * (layer.tokens or model.tokens) * model.hidden * inner
    assert product.rows % product.ranks == 0


def test_gains() -> None:
    times = Times(3.0, 2.0, 1.0, 1.5, 6.0, 5.0, 4.0)
    assert (times.ideal, times.ideal_near_memory) == (4.0, 4.0)
    assert times.gain("mca") == pytest.approx(50) and times.gain("t3") == pytest.approx(20)
    assert geomean_gain([0, 300]) == pytest.approx(100)
    one = Iteration(6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 3.0)
    assert one.gain("mca") == pytest.approx(25) and one.communication_share == pytest.approx(30)
    assert one.share_with_faster_products(2) == pytest.approx(100 * 3 / 8)
    assert besides_products_s("GPT-3", 32, "prompt") < besides_products_s("GPT-3", 32, "training")


@pytest.fixture
def known(study: T3Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reproductions find the run of one small sub-layer for every job, and simulate none."""
    runs = {what: study.run(GpuJob(SMALL, what)) for what in (SEQUENTIAL, T3, T3_MCA, NEAR_MEMORY)}
    whole = T3Study(_known={job: runs.get(job.what, runs[NEAR_MEMORY]) for job in every_job()})
    monkeypatch.setattr("meshweave_studies.papers.T3Study", lambda reading: whole)
    monkeypatch.setattr("meshweave_studies.t3.study.simulate_job", lambda job, reading: pytest.fail(str(job)))


@pytest.mark.usefixtures("known")
def test_all_jobs_of_rows_and_figures_are_known_beforehand() -> None:
    whole = reproduce_t3()
    assert len(whole.rows) == sum(len(row.models) for row in published_rows(PAPER))
    assert tuple(figure.number for figure in whole.figures) == FIGURES[PAPER]
    assert all(svg for figure in whole.figures for svg in pictures(figure).values())
    cases = {one.statement: one.cases for one in whole.orderings}
    assert (
        cases["T3-MCA is faster than T3"] == 28
        and cases["a reduce-scatter that adds near memory is faster"] == 28
    )
    assert cases["near memory gains more at TP 8 than at TP 16"] == 8
    assert cases["FC-2 gains more with twice the compute"] == 7
    assert all(
        f"| {one.statement} | {one.holds} | {one.cases} |" in markdown(whole) for one in whole.orderings
    )
    assert len(whole.to_json()["orderings"]) == len(cases) and "Orderings</h2>" in html(whole)
    assert any(text.startswith("End to end, by reading: counted") for text in whole.summary.findings)


def test_an_ordering_names_the_cases_in_which_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up: T3-MCA is slower than T3 in sub-layers of one model, and as fast in another's."""

    def times(study: T3Study, layers: Sequence[SubLayer], gpu: str = GPU) -> dict[SubLayer, Times]:
        t3 = {"T-NLG": 4.0, "PALM": 4.5}
        return {one: Times(3.0, 2.0, 1.0, 1.5, 6.0, t3.get(one.model, 5.0), 4.5) for one in layers}

    monkeypatch.setattr("meshweave_studies.t3.orderings.all_times", times)
    checked = [stated.check(T3Study()) for stated in orderings.STATED[:2]]
    assert [one.statement for one in checked] == ["T3 is faster than sequential", "T3-MCA is faster than T3"]
    assert (checked[0].wrong, checked[0].holds) == ((), 28)
    of_models = [f"T-NLG TP {degree}, {name}" for degree in (8, 16) for name in ("OP", "FC-2", "FC-1", "IP")]
    assert checked[1].wrong == (*of_models, *(f"PALM TP 32, {name}" for name in ("OP", "FC-2", "FC-1", "IP")))
    assert checked[1].holds == 16


@pytest.mark.usefixtures("known")
def test_cli(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["reproduce", "t3", "--rows", "generation", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["id"] for row in rows] == ["generation"] * 2
    assert run_app(["reproduce", "t3", "--figures", "7"]) == 2
    assert "figures: 4, 6, 14" in capsys.readouterr().err
    assert select(PAPER, ["mca"]).figures is None
