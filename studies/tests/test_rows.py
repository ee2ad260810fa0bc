"""What must hold of the MeshSlice section whatever the constants are, and that every row and figure computes."""

from __future__ import annotations

import random
from xml.etree import ElementTree

import pytest

from meshweave.algorithms.matmul2d import DATAFLOWS, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.cost.machine import mesh_machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.network import RingNetwork
from meshweave.tune.product import tune_product
from meshweave_studies.meshslice import rows as paper
from meshweave_studies.meshslice.figures import FIGURES, figures
from meshweave_studies.meshslice.study import ExperimentSizes, MeshSliceStudy, distinct_products
from meshweave_studies.meshslice.times import Timer, sum_timings
from meshweave_studies.pictures import pictures
from meshweave_studies.published import MODELS, PublishedRow, published_rows

SMALL = ExperimentSizes(chips=16, sizes=(4, 16), tall_mesh=(8, 2), fixed_batch=8)


@pytest.fixture(scope="module")
def study() -> MeshSliceStudy:
    return MeshSliceStudy("tpu-v4-pod", Timer("estimate"))


@pytest.fixture(scope="module")
def small() -> MeshSliceStudy:
    return MeshSliceStudy("tpu-v4-pod", Timer("estimate"), SMALL)


def test_every_published_row_has_a_function() -> None:
    rows = published_rows(paper.PAPER)
    assert {row.id for row in rows} == set(paper.OURS)
    assert len({row.id for row in rows}) == len(rows)
    assert all(row.where and row.unit and row.what for row in rows)


@pytest.mark.parametrize("row", published_rows(paper.PAPER), ids=lambda row: row.id)
def test_rows_compute_at_small_sizes(row: PublishedRow, small: MeshSliceStudy) -> None:
    for model in row.models:
        judged = paper.rows.row(small, row, model)
        assert judged.verdict
        assert judged.ours is not None or "--by simulate" in judged.reason


def test_progress_counts_rows(small: MeshSliceStudy) -> None:
    seen: list[tuple[int, int]] = []
    paper.rows(small, ["flops", "peak_time"], lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_flops_per_chip_and_block(study: MeshSliceStudy) -> None:
    for row in paper.rows(study, ["flops", "peak_time", "dataflows"]):
        assert row.ours == pytest.approx(row.published, rel=1e-3)


def test_traffic_of_25d_and_of_meshslice_with_dp_is_the_papers(study: MeshSliceStudy) -> None:
    """1.6 GB against 336 MB, read off the programs. (The paper counts 7 MB more for copies of the weights.)"""
    shown = {row.id: row.ours for row in paper.rows(study, ["bytes_25d", "bytes_meshslice_dp"])}
    assert shown["bytes_25d"] == pytest.approx(1.63, rel=0.01)
    assert shown["bytes_meshslice_dp"] == pytest.approx(336, rel=0.025)


def test_what_any_constants_must_give(study: MeshSliceStudy) -> None:
    """The order of the algorithms at 256 chips, and that MeshSlice is never slower than Collective."""
    ids = ["order", "never_slower", "fastest", "mesh_effect"]
    for row in paper.rows(study, ids):
        assert row.ours is not None
        assert row.ours > 2 if row.id == "mesh_effect" else row.ours == 0, row


def test_a_block_has_eight_distinct_products(study: MeshSliceStudy) -> None:
    for model in MODELS:
        assert len(distinct_products(study.problems(study.weak_scaling_block(model), (32, 8)))) == 8


def test_1d_baselines_run_on_a_ring(small: MeshSliceStudy) -> None:
    chosen = small.chosen(small.weak_scaling_block("gpt3"), "tp1d")
    assert chosen is not None and isinstance(chosen.cluster.network, RingNetwork) and chosen.shape == (1, 16)


def test_an_algorithm_without_a_mesh_has_no_time(study: MeshSliceStudy) -> None:
    assert study.utilisation(study.weak_scaling_block("gpt3", 32), "cannon") is None


def implied_percent(gain: float, end_to_end: float) -> float:
    """Return the share in percent that a gain in the fully connected layers and one end to end imply.

    With the fully connected layers as 1 and the rest as r: (1 + g + r) / (1 + r) = 1 + G, so r = (g - G) / G.
    """
    rest = (gain - end_to_end) / end_to_end
    return 100 * rest / (1 + rest)


def test_shares_that_two_gains_imply() -> None:
    assert implied_percent(13.8, 12.0) == pytest.approx(13.0, abs=0.1)
    assert implied_percent(26.0, 23.4) == pytest.approx(10.0, abs=0.1)


def test_end_to_end_gains_lie_below_those_of_the_fully_connected_layers(small: MeshSliceStudy) -> None:
    rows = {(row.id, row.model): row.ours for row in paper.rows(small, ["over_wang", "end_to_end"])}
    for model in MODELS:
        inner, outer = rows["over_wang", model], rows["end_to_end", model]
        assert inner is not None and outer is not None and 0 < outer < inner


def test_timings_add_up(small: MeshSliceStudy) -> None:
    chosen = small.chosen(small.weak_scaling_block("gpt3"), "meshslice")
    assert chosen is not None
    whole = chosen.timing(small.timer)
    again = sum_timings(small.timer.timing(p, chosen.entry, c, chosen.cluster) for p, c in chosen.products)
    assert whole == again
    assert whole.compute_s <= whole.total_s <= whole.serial_s * (1 + 1e-9)


def test_simulation_answers_in_the_same_form() -> None:
    """Collectives of one mesh axis meet no others; on so few chips, copies and products share memory, though."""
    study = MeshSliceStudy(
        "tpu-v4-pod", Timer("simulate"), ExperimentSizes(chips=4, sizes=(4,), tall_mesh=(2, 2), fixed_batch=2)
    )
    chosen = study.chosen(study.weak_scaling_block("gpt3"), "meshslice")
    assert chosen is not None
    simulated, estimated = chosen.timing(study.timer), chosen.timing(study.estimates)
    assert simulated.total_s == pytest.approx(estimated.total_s, rel=0.08)
    assert simulated.communication_s == pytest.approx(estimated.communication_s, rel=0.05)
    for row in paper.rows(study, ["picks_mesh", "communication_error"]):
        assert row.ours == 0


def test_figures_have_data_and_pictures(small: MeshSliceStudy) -> None:
    steps: list[tuple[int, int]] = []
    computed = figures(small, (), lambda done, total: steps.append((done, total)))
    assert [figure.number for figure in computed] == list(FIGURES)
    assert steps[-1][0] == steps[-1][1]
    for figure in computed:
        assert figure.markdown().startswith(f"## Figure {figure.number}")
        for model, svg in pictures(figure).items():
            assert model in svg
            ElementTree.fromstring(svg)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_meshslice_is_never_slower_than_collective(count: int) -> None:
    """Over random products and meshes: it may always take one slice."""
    rng = random.Random(0)
    pods = {n: load_cluster(f"tpu-v4-pod:{n}") for n in (4, 16, 64, 256)}
    for _ in range(count):
        chips = rng.choice(list(pods))
        shape = rng.choice(PRODUCTS_2D["meshslice"].mesh_shapes(chips))
        sizes = [8 * rng.randint(1, 6000) if rng.random() < 0.5 else rng.randint(8, 60000) for _ in range(3)]
        problem = Matmul2dProblem(sizes[0], sizes[1], sizes[2], shape, rng.choice(DATAFLOWS), "bfloat16")
        at = mesh_machine(pods[chips], shape, ("row", "col"), "tp")
        times = [
            tune_product(PRODUCTS_2D[n], problem, at).estimate.total_s for n in ("meshslice", "collective")
        ]
        assert times[0] <= times[1], problem
