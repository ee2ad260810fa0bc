"""The saved scores that ship with the wheel, and what a plan says of them."""

from __future__ import annotations

from importlib.resources import files
from statistics import median

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.catalog import clusters
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.scores import error_of_runs_like, run_scores


def test_the_table_is_small_and_of_chips_of_the_catalog() -> None:
    assert len((files("meshweave") / "catalog" / "scores.csv").read_bytes()) < 100_000
    chips = {load_cluster(name).chip.name for name in clusters()}
    assert len(run_scores()) > 200 and {score.chip for score in run_scores()} <= chips
    assert {score.fitted for score in run_scores()} == {True, False}


def test_errors_are_those_of_models_on_which_nothing_was_fitted() -> None:
    for chip in {score.chip for score in run_scores()}:
        of = [score for score in run_scores() if (score.chip, score.fitted) == (chip, False)]
        errors = [abs(score.error) for score in of if not score.precision]
        said = error_of_runs_like(chip)
        assert errors or said.startswith("no published run")
        assert (
            said.startswith(f"{len(errors)} published runs on {chip}, ")
            if len(errors) > 1
            else not errors[1:]
        )
        assert not errors or f"median off by {100 * median(errors):.1f} %" in said
        if low := [score for score in of if score.precision]:
            assert error_of_runs_like(chip, is_low=True).startswith(f"{len(low)} ") or len(low) == 1
    assert error_of_runs_like("abacus") == "no published run on abacus has a saved score"


@pytest.mark.parametrize("cluster", ["dgx-a100:8", "tpu-v4:8"])
def test_a_plan_names_the_error_of_runs_like_it(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "llama-2-7b",
        "--cluster",
        cluster,
        "--batch",
        "8",
        "--fix",
        "tp=8,pp=1,micro_batch=1,strategy=megatron",
    ]
    assert run_app(["plan", *given]) == 0
    line = f"error      {error_of_runs_like(load_cluster(cluster).chip.name)}"
    assert line in capsys.readouterr().out.splitlines()
