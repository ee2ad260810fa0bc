"""Bests of sweeps: the figure that orders a sweep, what it ran, and the network that it measured."""

from __future__ import annotations

import pytest

from meshweave.algorithms.step import step_of
from meshweave_studies.training_runs.best_of_sweeps import SweepCell, sweep_cells, sweep_options
from meshweave_studies.training_runs.cases import case_of
from meshweave_studies.training_runs.clusters import cluster_of
from meshweave_studies.training_runs.figures import embedding_flops, published_seconds
from meshweave_studies.training_runs.rows import PublishedRun, shipped_runs

RUNS = {run.line: run for run in shipped_runs()}
SHARED_TABLE, ONE_STAGE, OWN_TABLES = RUNS[50], RUNS[39], RUNS[40]
"""nanotron's runs of models with a shared table, on two stages and on one, and of one with two tables."""


@pytest.mark.parametrize(
    ("run", "tokens_per_s"), [(SHARED_TABLE, 33677.07), (ONE_STAGE, 4045.27), (OWN_TABLES, 3100.55)]
)
def test_nanotrons_mfu_counts_the_tables_of_all_ranks(run: PublishedRun, tokens_per_s: float) -> None:
    """The results have tokens per second and chip beside the MFU (jobs 14098656, 14028970, 14016421)."""
    case = case_of(run)
    of = case.problem
    seconds = published_seconds(case, step_of(of, case.choices[0]))
    assert of.batch * of.sequence / seconds / of.cluster.num_chips == pytest.approx(tokens_per_s, rel=3e-3)
    other = case_of(RUNS[2])
    assert embedding_flops(other, 8) == 0


def test_nics_carry_what_all_reduces_of_the_source_did() -> None:
    def rate(run: PublishedRun) -> float:
        return cluster_of(run).network.nic.link_bytes_per_s  # type: ignore[union-attr]

    assert rate(SHARED_TABLE) == rate(ONE_STAGE) == 22.5e9
    assert rate(RUNS[54]) == rate(RUNS[56]) == 50e9  # two hosts, and one
    assert all(
        rate(run) >= 22.5e9 for run in RUNS.values() if "H100" in run.chips and "nanotron" in run.source
    )


def test_pipelines_are_in_a_sweep_where_it_ran_them() -> None:
    assert [each.pipeline for each in sweep_options(8, 256)] == [(1,), (2, 4, 8)]
    assert len(sweep_options(256, 256)) == 2
    assert [each.pipeline for each in sweep_options(512, 256)] == [(1,)]


def test_a_cell_compares_figures_and_not_seconds() -> None:
    cell = SweepCell(1, "s", "m", "8 H100", "a", 1.1, True, "b", 1.0)
    assert cell.slower == pytest.approx(0.1) and not cell.holds
    fewer = SweepCell(1, "s", "m", "8 H100", "a", 1.1, True, "b", 1.0, work=0.95)
    assert fewer.slower == pytest.approx(0.045) and fewer.holds
    (found,) = sweep_cells([RUNS[56]])
    assert found.holds and "pp 2" in found.best, "one stage is faster, and its MFU lower"
