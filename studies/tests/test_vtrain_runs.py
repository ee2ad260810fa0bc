"""vTrain's runs on one host: few are fitted, the others judge; and runs that no score counts."""

from __future__ import annotations

from importlib.resources import files
from statistics import mean

from meshweave_studies.training_runs.cases import case_of
from meshweave_studies.training_runs.left_out import left_out_reason
from meshweave_studies.training_runs.rows import PublishedRun, parse_runs
from meshweave_studies.training_runs.score import predict
from meshweave_studies.training_runs.split import is_fitted_run


def runs_of(name: str) -> tuple[PublishedRun, ...]:
    return parse_runs(files("meshweave_studies").joinpath("published", name).read_text("utf-8"), name)


def test_runs_of_2_and_4_gpus_are_fitted() -> None:
    runs = runs_of("vtrain_runs.csv")
    assert len(runs) == 407
    fitted = {run.chips for run in runs if is_fitted_run(run)}
    assert fitted == {"2 A100", "4 A100"}


def test_nothing_is_computed_again_on_one_host() -> None:
    for run in runs_of("vtrain_runs.csv")[::80]:
        again = {choice.recompute for choice in case_of(run).choices}
        assert again == ({"full"} if run.chips.startswith("512") else {"none"})


def test_runs_on_8_gpus_are_predicted_within_their_goal() -> None:
    """Of degree 4 and below, every eighth: within 10 % in the mean."""
    judged = [run for run in runs_of("vtrain_runs.csv") if run.chips == "8 A100" and run.counts["tp"] < 8]
    errors = [abs(predict(case_of(run)).seconds / run.value - 1) for run in judged[::8]]
    assert mean(errors) < 0.1


def test_less_than_15_percent_of_dense_runs_are_left_out() -> None:
    dense = runs_of("dense_runs.csv")
    left = [run for run in dense if left_out_reason(run)]
    assert all("Llama3.1 405B" not in run.model for run in left)
    others = [run for run in runs_of("training_runs.csv") if left_out_reason(run)]
    assert (len(left), len(others)) == (15, 0)
