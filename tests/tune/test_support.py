"""What `support` says beside what the parts say themselves: over the catalog, and by what a plan then does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import meshweave as mw
from meshweave.algorithms.step.precision import PRECISIONS
from meshweave.algorithms.step.stacks import IDEAL, fitted_as, stack_names
from meshweave.base.errors import MeshweaveError
from meshweave.describe.catalog import clusters, models
from meshweave.describe.scores import run_scores, runs_on
from meshweave.tune.support import Support, support_of

RNG = random.Random(20261123)
PAIRS = [(model, RNG.choice(clusters())) for model in models()]


def known(model: str, cluster: str) -> Support:
    """Return the support in the first dtype that the chip has a peak in."""
    machine = mw.load_cluster(cluster)
    return support_of(mw.load_model(model), machine, dtype=machine.chip.peak_flops_per_s[0][0])


@pytest.mark.parametrize(("model", "cluster"), PAIRS)
def test_what_is_executed_can_be_priced_and_what_is_refused_cannot(model: str, cluster: str) -> None:
    """For a strategy and for each stack: `mw.step` gives a step, or the error whose text stands there."""
    said = known(model, cluster)
    chips = said.num_chips
    options = {"batch": chips, "sequence": said.sequence, "dtype": said.dtype}
    line = RNG.choice(said.strategies)
    if "no plan has it" in line.why:
        assert mw.load_model(model).is_routed
    elif line.verdict == "executed":
        degree = int(line.why.removeprefix("tensor ").split(";")[0].split(", ")[-1])
        tensor = degree if line.subject.startswith("megatron") else (1, degree)
        mw.step(model, cluster, tp=tensor, strategy=line.subject, **options)  # by the model's usual stack
    else:
        assert line.verdict == "refused" and line.why
    for line in said.stacks:
        if line.verdict != "refused":
            mw.step(model, cluster, stack=line.subject, **options)
            continue
        with pytest.raises(MeshweaveError) as refused:
            mw.step(model, cluster, stack=line.subject, **options)
        assert str(refused.value) == line.why


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-b200", "tpu-v4-pod"])
def test_precisions_are_those_that_a_step_takes(cluster: str) -> None:
    verdicts = {line.subject: line for line in known("llama-3-8b", cluster).prediction}
    for name in PRECISIONS:
        try:
            mw.step("llama-3-8b", cluster, batch=4096, sequence=2048, precision=name, stack=IDEAL)
        except MeshweaveError as error:
            assert verdicts[name].verdict == "refused" and verdicts[name].why == str(error)
        else:
            assert verdicts[name].verdict in ("measured", "modelled")


def test_every_stack_and_what_has_no_price_is_named() -> None:
    said = known("gpt3", "dgx-h100")
    assert {line.subject for line in said.stacks} == {*stack_names(), IDEAL}
    assert any(line.verdict == "not priced" and "sparse attention" in line.why for line in said.prediction)
    assert "published runs on H100" in said.runs


def test_runs_of_every_file_judge_and_those_of_a_stack_are_told_by_precision() -> None:
    """Runs below 16 bits are evidence too, and no stack is judged by runs of others."""
    told = known("llama-3-8b", "tpu-v6e:256")
    (maxtext,) = (line for line in told.stacks if line.subject == "maxtext")
    assert (
        maxtext.verdict == "measured" and "published runs on TPU v6e with maxtext, predicted" in maxtext.why
    )
    assert "published runs on TPU v6e, predicted" in told.runs
    told = known("llama-3-8b", "dgx-h200")
    assert "published runs on H200-SXM-141GB below 16 bits, predicted" in told.runs
    for cluster in ("dgx-h100", "dgx-a100", "gb200-nvl72", "tpu-v5e"):
        told = known("llama-3-8b", cluster)
        chip = mw.load_cluster(cluster).chip.name
        for line in told.stacks:
            of = [
                score
                for score in run_scores()
                if (score.chip, score.stack, score.is_routed) == (chip, fitted_as(line.subject), False)
            ]
            judged = [score for score in of if not score.fitted]
            for is_low, words in ((False, " with {}, "), (True, " with {} below 16 bits, ")):
                number = sum(bool(score.precision) == is_low for score in judged)
                runs = "published runs" if number > 1 else "published run"
                phrase = f"{runs} on {chip}{words.format(fitted_as(line.subject))}predicted"
                assert (phrase in line.why) == bool(number), (line, number)
            assert ("none is left to judge by" in line.why) == bool(of and not judged)


def test_runs_that_constants_were_fitted_on_and_kernels_that_nobody_ran_are_no_evidence() -> None:
    told = known("llama-3-8b", "tpu-v5e:256")
    (maxtext,) = (line for line in told.stacks if line.subject == "maxtext")
    assert "fitted on 15 published runs on TPU v5e, and none is left to judge by" in maxtext.why
    assert "software was fitted on the 15 that are known" in told.runs
    (products,) = (line for line in told.prediction if line.subject == "products in bfloat16")
    assert products.verdict == "modelled" and "a compiler expects" in products.why


TRIED = json.loads((Path(__file__).parents[2] / "validation/results/architectures.json").read_text())["tried"]


@pytest.mark.parametrize("cluster", ["dgx-h100:8", "dgx-a100:8"])
def test_what_runs_a_model_with_experts_is_told_apart_from_what_prices_it(cluster: str) -> None:
    """As saved trials have it: strategies that split rows are refused, the others run."""
    routed = [each for each in TRIED if "a router reads whole rows" in each["said"]]
    outcomes = {
        name: {each["strategies"][f"{name}:{sizes}"] for each in routed}
        for name, sizes in (("megatron", "4"), ("megatron_sp", "4"), ("atp", "2x2"))
    }
    assert len(routed) > 5 and all(len(each) == 1 for each in outcomes.values())
    told = known("mixtral-8x7b", cluster)
    verdicts = {line.subject: line for line in told.strategies}
    for name, (outcome,) in outcomes.items():
        assert verdicts[name].verdict == {"exact": "executed", "refused": "refused"}[outcome]
    assert "reads whole rows of the residual, which atp splits" in verdicts["atp"].why
    assert (
        verdicts["megatron_sp"].why.startswith("tensor 2, 4, 8") and "plan" not in verdicts["megatron_sp"].why
    )
    assert "no plan has it: megatron gives each of 8 ranks all tokens" in verdicts["megatron"].why
    assert {line.verdict for line in told.schedules} == {"executed"}
    stacks = {line.subject: line for line in told.stacks}
    assert (
        stacks["meshweave"].verdict == "refused" and "were not fitted; stack ideal" in stacks["meshweave"].why
    )
    dense = {score.error for score in runs_on(mw.load_cluster(cluster).chip.name, "megatron-core", False)}
    own = runs_on(mw.load_cluster(cluster).chip.name, "megatron-core", False, is_routed=True)
    assert ("of models with experts" in stacks["megatron-core"].why) == bool(own)
    assert bool(own) == (cluster == "dgx-h100:8") and not {score.error for score in own} & dense
