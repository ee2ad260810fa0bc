"""The saved scores that ship with the wheel, and what a plan says of them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from importlib.resources import files
from statistics import median

import pytest

from meshweave.algorithms.step.stacks import DEFAULT_STACK, fitted_as
from meshweave.cli.app import run_app
from meshweave.describe.catalog import clusters
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.scores import error_of_runs_like, evidence_on, run_scores


def test_the_table_is_small_and_of_chips_of_the_catalog() -> None:
    assert len((files("meshweave") / "catalog" / "scores.csv").read_bytes()) < 100_000
    chips = {load_cluster(name).chip.name for name in clusters()}
    assert len(run_scores()) > 200 and {score.chip for score in run_scores()} <= chips
    assert {score.fitted for score in run_scores()} == {True, False}


def test_errors_are_those_of_models_on_which_nothing_was_fitted_and_of_their_kind() -> None:
    for chip, is_routed in itertools.product({score.chip for score in run_scores()}, (False, True)):
        of = [s for s in run_scores() if (s.chip, s.fitted, s.is_routed) == (chip, False, is_routed)]
        errors = [abs(score.error) for score in of if not score.precision]
        said = error_of_runs_like(chip, is_routed=is_routed)
        kind = " of models with experts" if is_routed else ""
        assert errors or said.startswith(f"no published run{kind.replace('models', 'a model')}")
        begins = f"{len(errors)} published runs{kind} on {chip}, "
        assert said.startswith(begins) if len(errors) > 1 else not errors[1:]
        off = f"median off by {100 * median(errors):.1f} %" if len(errors) > 1 else "off by"
        assert not errors or off in said
        if low := [score for score in of if score.precision]:
            told = error_of_runs_like(chip, is_low=True, is_routed=is_routed)
            assert told.startswith(f"{len(low)} ") or len(low) == 1
    assert error_of_runs_like("abacus") == "no published run on abacus has a saved score"


def test_runs_of_dense_models_say_nothing_of_experts() -> None:
    assert "of dense models" not in error_of_runs_like("H100-SXM5-80GB", is_routed=True)
    assert error_of_runs_like("A100-SXM4-80GB", is_routed=True) == (
        "no published run of a model with experts on A100-SXM4-80GB has a saved score; those of dense models say "
        "nothing of it"
    )
    tried, why = evidence_on("A100-SXM4-80GB", "llm-foundry", is_routed=True)
    assert not tried and why.startswith("no published run of llm-foundry with a model with experts")


def test_runs_of_another_stack_are_named_the_most_first() -> None:
    chip = "H100-SXM5-80GB"
    runs = [
        score for score in run_scores() if (score.chip, score.fitted, score.precision) == (chip, False, "")
    ]
    stacks = Counter(score.stack for score in runs if not score.is_routed)
    assert "torchtitan" not in stacks and len(stacks) > 1
    named = ", ".join(name for name, _ in stacks.most_common())
    said = error_of_runs_like(chip, "torchtitan", asked="meshweave")
    assert f"on {chip} (runs of {named}; none of meshweave), predicted" in said
    assert "none of" not in error_of_runs_like(chip, "nanotron")
    assert "with nanotron, whose constants mine has, predicted" in error_of_runs_like(
        chip, "nanotron", asked="mine"
    )


def test_the_worst_is_no_smaller_than_the_median_as_it_is_printed() -> None:
    for chip, stack in {(score.chip, score.stack) for score in run_scores()}:
        for number in itertools.product((False, True), repeat=2):
            said = error_of_runs_like(chip, stack, is_low=number[0], is_routed=number[1])
            if read := re.search(r"median off by ([0-9.]+) %.* worst ([0-9.]+) %", said):
                assert float(read[1]) <= float(read[2]), said


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
    chip = load_cluster(cluster).chip.name
    line = f"error      {error_of_runs_like(chip, fitted_as(DEFAULT_STACK), asked=DEFAULT_STACK)}"
    assert line in capsys.readouterr().out.splitlines()
