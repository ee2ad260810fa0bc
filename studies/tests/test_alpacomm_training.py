"""AlpaComm's training runs: the committed rows are what the command computes, and the variants are ordered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshweave.describe.machine.cluster import load_cluster
from meshweave_studies.alpacomm import rows as paper
from meshweave_studies.alpacomm.figures import figures, picture
from meshweave_studies.alpacomm.models import ALL_CASES, CASES, FITTED, GptShape, UNetShape
from meshweave_studies.alpacomm.study import AlpaCommStudy
from meshweave_studies.alpacomm.training import (
    ALL_GATHER,
    BOUND,
    BROADCAST,
    DELAYED,
    EAGER,
    OVERLAP,
    VARIANTS,
)
from meshweave_studies.alpacomm.training_rows import FEW, OURS
from meshweave_studies.published import published_rows

RESULTS = Path(__file__).parents[2] / "validation" / "results"
QUICK = tuple(case for case, of in ALL_CASES.items() if of.operators == 1)
"""Cases whose layouts are the same on both hosts, so that a transfer is one message a GPU."""


@pytest.fixture(scope="module")
def study() -> AlpaCommStudy:
    return AlpaCommStudy(load_cluster("p3.8xlarge"))


def committed() -> dict[tuple[str, str], dict[str, object]]:
    data = json.loads((RESULTS / "alpacomm-p3.8xlarge.json").read_text(encoding="utf-8"))
    return {(row["id"], row["model"]): row for row in data["rows"] if row["id"] in OURS}


# --- models -------------------------------------------------------------------------------------------------


def test_models_have_the_parameters_of_their_names() -> None:
    sizes = {name: sum(stage.parameters for stage in case.shape.stages) for name, case in CASES.items()}
    assert sizes["U-Transformer 1B"] / 1e9 == pytest.approx(1.0, rel=0.06)
    assert sizes["U-Transformer 2.1B"] / 1e9 == pytest.approx(2.1, rel=0.03)
    assert sizes["GPT 1.3B (2, 2, 2)"] / 1e9 == pytest.approx(1.3, rel=0.1)
    assert sizes["GPT 2.6B (4, 1, 2)"] / 1e9 == pytest.approx(2.6, rel=0.08)


def test_stages_are_as_equal_as_layers_allow() -> None:
    for case in CASES.values():
        first, second = (stage.flops for stage in case.shape.stages)
        assert abs(first - second) / (first + second) < 0.05
    layers = GptShape(2048, 24)
    assert sum(stage.kept for stage in layers.stages) == 24 * 1024 * 2048


def test_what_crosses_a_u_transformer() -> None:
    c = 480
    unet = UNetShape(c)
    # After layer 9 (4C at 8 x 8), the residuals of 2C at 16 x 16 and C at 32 x 32 are still to be read.
    assert unet.split == 10
    assert unet.boundary == (4 * c * 64 + 2 * c * 256 + c * 1024,)


# --- steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", QUICK)
def test_each_technique_is_no_slower_than_what_it_adds_to(study: AlpaCommStudy, case: str) -> None:
    seconds = [study.training.step(case, name).seconds for name in VARIANTS]
    assert seconds == sorted(seconds, reverse=True)
    assert study.training.share_of_bound(case) > 90
    assert study.training.faster(case, BROADCAST, ALL_GATHER) == 1.0  # nothing is replicated


@pytest.mark.parametrize("case", QUICK)
def test_a_stage_is_never_shorter_than_its_work(study: AlpaCommStudy, case: str) -> None:
    of = ALL_CASES[case]
    nvlink = 150e9
    busy_s = max(of.part_s(stage, 4, nvlink) for stage in of.shape.stages) * of.micro_batches
    assert study.training.step(case, BOUND).seconds >= busy_s


def test_eager_keeps_three_stashes_where_1f1b_keeps_two(study: AlpaCommStudy) -> None:
    one_by_one, eager = (study.training.step(QUICK[1], name).stash_bytes for name in (OVERLAP, EAGER))
    assert eager[0] * 2 == one_by_one[0] * 3 and eager[1] == one_by_one[1]
    assert study.training.step(QUICK[1], DELAYED).delay >= 0


# --- rows and figures ---------------------------------------------------------------------------------------


def test_rows_are_as_committed(study: AlpaCommStudy) -> None:
    saved = committed()
    for entry in published_rows(paper.PAPER):
        if entry.id in ("end_to_end", "overlap_gain", "eager_gain", "few_micro_batches", "closer", "table_1"):
            for subject in entry.models:
                if subject in QUICK or subject not in ALL_CASES:
                    assert paper.rows.row(study, entry, subject).to_json() == saved[entry.id, subject]


@pytest.mark.slow
def test_all_rows_are_as_committed(study: AlpaCommStudy) -> None:
    assert [row.to_json() for row in paper.rows(study, list(OURS))] == list(committed().values())


def test_the_fit_is_the_nearest_of_its_grid(study: AlpaCommStudy) -> None:
    (entry,) = (row for row in published_rows(paper.PAPER) if row.id == "signal_gain_fitted")
    assert entry.fitted
    published = entry.values[FITTED]
    ours = study.training.faster(FITTED, BOUND, ALL_GATHER)
    assert abs(ours - published) < 0.02  # a step of the grid moves it by 0.04


def test_table_1_is_exact() -> None:
    rows = [row for (name, _), row in committed().items() if name == "table_1"]
    assert len(rows) == 5 and all(row["ours"] == row["published"] for row in rows)
    assert {row["verdict"] for row in rows} == {"ours alone"}  # not counted


def test_the_bound_is_nearly_reached() -> None:
    saved = committed()
    assert saved["share_of_bound_goal", "lowest"]["verdict"] == "holds"
    assert all(saved["share_of_bound", case]["verdict"] == "holds" for case in CASES)


def test_figure_9(study: AlpaCommStudy) -> None:
    (figure,) = figures(study, (9,))
    (panel,) = figure.panels
    assert panel.columns == ("case", BROADCAST, OVERLAP, EAGER, "bound")
    assert str(panel.rows[0][0]).endswith(f", {FEW} micro-batches")
    saved = json.loads((RESULTS / "alpacomm-p3.8xlarge-figure-9.json").read_text(encoding="utf-8"))
    assert [figure.to_json()] == saved["figures"]
    assert "TFLOP/s" in picture(figure, panel)
