"""Figures 2 and 3 of Slicing Is All You Need, and what its text says of them."""

from __future__ import annotations

import json

import pytest

from meshweave.algorithms.universal import UniversalConfig, universal_program
from meshweave.cli.app import run_app
from meshweave.cost.compute import call_s
from meshweave.describe.layout.shapes import near_square
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.validate import validate
from meshweave.ir.work import Compute
from meshweave_studies.published import published_rows
from meshweave_studies.slicing import rows as paper
from meshweave_studies.slicing.figures import figure
from meshweave_studies.slicing.partitionings import (
    BLOCK,
    COLUMN,
    INNER,
    NAMED,
    OUTER,
    TRADITIONAL,
    divisors,
    every_partitioning,
    local_products,
    partitioned_problem,
)
from meshweave_studies.slicing.readings import READINGS, with_waves
from meshweave_studies.slicing.study import LAYERS, LAYERS_ON_MACHINES, STATIONARY, SlicingStudy
from meshweave_studies.verdict import Tolerance

PVC1, H1002 = LAYERS_ON_MACHINES["pvc-mlp1"], LAYERS_ON_MACHINES["h100-mlp2"]


@pytest.fixture(scope="module")
def study() -> SlicingStudy:
    machines = {"pvc": load_cluster("pvc-node"), "h100": load_cluster("h100-node")}
    return SlicingStudy(machines, batches=(1024, 4096))


def test_every_row_of_the_file_is_computed() -> None:
    rows = published_rows(paper.PAPER)
    assert {row.id for row in rows} == {*paper.OURS, *paper.BY_LAYER}
    for row in rows:
        assert set(row.models) <= (set(LAYERS) if row.id in paper.BY_LAYER else set(LAYERS_ON_MACHINES))


def test_partitionings() -> None:
    assert len([cuts for group in every_partitioning().values() for cuts in group]) == 28
    assert near_square(12) == (3, 4) and near_square(7) == (1, 7)
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert partitioned_problem(TRADITIONAL, (24, 24, 24), 12, (2, 1)) is None


@pytest.mark.parametrize(
    "cuts", [cuts for group in NAMED.values() for cuts in group], ids=lambda cuts: f"{cuts.name} {cuts.c}"
)
@pytest.mark.parametrize("copies", [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_named_partitionings_give_right_programs(cuts, copies) -> None:  # type: ignore[no-untyped-def]
    problem = partitioned_problem(cuts, (8, 16, 12), 4, copies)
    for stationary in STATIONARY if problem else ():
        assert problem is not None
        config = UniversalConfig(stationary, num_slices=local_products(problem))
        validate(universal_program(problem, config))


@pytest.mark.parametrize(("cuts", "count"), [(COLUMN, 12), (INNER, 12), (OUTER[1], 12), (TRADITIONAL, 12)])
def test_local_products_are_overlaps_of_tiles(cuts, count) -> None:  # type: ignore[no-untyped-def]
    problem = partitioned_problem(cuts, LAYER, 12, (1, 1))
    assert problem is not None and local_products(problem) == count


LAYER = (4096, *LAYERS["mlp1"])


def test_what_communicates_nothing_is_left_out(study: SlicingStudy) -> None:
    """A and B whole on every device leave nothing to move."""
    assert study.seconds(H1002, COLUMN, 1024, "c", (8, 1)) is None
    assert study.seconds(H1002, COLUMN, 1024, "c", (1, 1)) is not None


FULL_SIZE = pytest.mark.slow
"""Twelve devices, as in the paper; by default four show the same."""


@pytest.mark.parametrize("chips", [4, pytest.param(12, marks=FULL_SIZE)])
def test_nothing_is_faster_than_the_peak(chips: int, study: SlicingStudy) -> None:
    study = on_pvc(study, chips)
    for name in NAMED:
        for point in study.curve(PVC1, name).points:
            assert 0 < study.percent_of_peak(PVC1, point.batch, point.seconds) <= 100.001
    for cut in ("row", "column"):
        seconds, _ = study.dtensor(PVC1, cut, 1024)
        assert 0 < study.percent_of_peak(PVC1, 1024, seconds) < 100  # nothing overlaps


@pytest.mark.parametrize(
    ("chips", "names"),
    [(4, ("column block", "inner product")), pytest.param(12, tuple(NAMED), marks=FULL_SIZE)],
)
def test_rows_and_figures_agree(chips: int, names: tuple[str, ...], study: SlicingStudy) -> None:
    study = on_pvc(study, chips, names)
    (row,) = paper.rows(study, ["copies_of_column"])
    assert row.ours == 1 and row.verdict == "holds"
    panel = figure(study, 2).panels[0]
    assert panel.columns[:2] == ("batch", "column block (S-C)")
    assert [line[0] for line in panel.rows] == ["1024", "4096"]
    assert panel.notes[0] == "column block (S-C): copies 1, 1"


def on_pvc(study: SlicingStudy, chips: int, names: tuple[str, ...] = tuple(NAMED)) -> SlicingStudy:
    machines = {"pvc": study.machines["pvc"].with_chips(chips)}
    return SlicingStudy(machines, study.batches, {name: NAMED[name] for name in names})


def test_a_tie_is_no_lead() -> None:
    assert Tolerance(0, "more").judge(0, 0.0) == "differs"
    assert Tolerance(0, "more").judge(0, 0.1) == "holds"
    assert Tolerance(0, "least").judge(0, 0.0) == "holds"


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["reproduce", "slicing", "--rows", "copies_of_column", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["paper"] == "slicing" and data["clusters"][0]["name"] == "pvc-node"
    assert data["rows"][0]["verdict"] == "holds" and data["figures"] == []
    assert run_app(["reproduce", "slicing", "--figures", "9"]) == 2
    assert "figures: 2, 3" in capsys.readouterr().err
    for machine, rows in (
        ("h100-node:1", ("leaders",)),
        ("h100-node:2", ("--reading", "cut", "mixed_copies")),
    ):
        *reading, row = rows
        assert run_app(["reproduce", "slicing", "--pvc", machine, *reading, "--rows", row]) == 2
        assert "give a machine of more" in capsys.readouterr().err


def test_products_in_whole_waves_are_never_faster_than_at_the_peak() -> None:
    for name in ("h100-node", "pvc-node"):
        cluster = load_cluster(name)
        chip = with_waves(cluster).chip
        for m, n, k in ((128, 49152, 1536), (1000, 6144, 12288), (16384, 6144, 12288), (100, 100, 12288)):
            work = Compute("matmul", 2 * m * n * k, dims=(m, n, k), item_bytes=4, dtype="float32")
            assert call_s(work, chip) >= call_s(work, cluster.chip)
    assert with_waves(load_cluster("dgx-a100")) == load_cluster("dgx-a100")


def test_a_reading_says_which_factors_are_tried(
    study: SlicingStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    pvc = {"pvc": load_cluster("pvc-node"), "h100": load_cluster("h100-node")}
    cut = SlicingStudy(pvc, reading=READINGS["cut"])
    everything = SlicingStudy(pvc)
    case = LAYERS_ON_MACHINES["pvc-mlp2"]
    assert {ab for ab, _ in cut.copies(case, BLOCK)} == {1, 2, 3}
    assert {ab for ab, _ in cut.copies(case, OUTER[0])} == {1, 2, 3, 4, 6}
    for partitioning in (BLOCK, COLUMN, TRADITIONAL):
        assert set(cut.copies(case, partitioning)) < set(everything.copies(case, partitioning))
    assert run_app(["reproduce", "slicing", "--reading", "whole"]) == 2
    assert "readings: all-factors, cut, shapes" in capsys.readouterr().err
