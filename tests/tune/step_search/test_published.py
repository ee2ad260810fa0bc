"""A plan has a strategy that published runs have, unless another wins by more than predictions are off."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshweave as mw
from meshweave.algorithms.step import StepProblem, load_stack
from meshweave.algorithms.step.stacks import DEFAULT_STACK, IDEAL, published_strategies, stack_names
from meshweave.base.errors import DescriptionError
from meshweave.cli.app import run_app
from meshweave.describe.scores import MARGIN, run_scores
from meshweave.tune.plan import Plan
from meshweave.tune.plan_records import StepRecord
from meshweave.tune.step_search import SpaceOptions, StepSearch, StepSpace
from sampling import examples

OWN = "meshslice_block"
PROBLEM = StepProblem(
    mw.load_model("llama-3-8b"), mw.load_cluster("dgx-h100:16"), 64, 4096, stack=load_stack(DEFAULT_STACK)
)
GIVEN: dict[str, Any] = {
    "batch": 64,
    "sequence": 4096,
    "zero": 1,
    "recompute": "none",
    "schedule": "1f1b",
    "vp": 1,
}


def _plan(margin: float, cluster: str = "dgx-h100:16", **options: Any) -> Plan:
    given = GIVEN | {"strategy": [OWN, "megatron_sp", "atp"]} | options
    return mw.plan("llama-3-8b", cluster, margin=margin, **given)


def _has_published(record: StepRecord) -> bool:
    return record.degrees.tensor_ranks == 1 or record.degrees.strategy in published_strategies()


@examples(12)
@given(
    st.sampled_from((0.0, 0.002, 0.02, 0.05, 0.3)), st.sampled_from((8, 16, 32)), st.sampled_from((16, 64))
)
def test_the_best_is_the_fastest_or_one_of_published_runs_within_the_margin(
    margin: float, chips: int, batch: int
) -> None:
    cluster = f"dgx-h100:{chips}"
    try:
        fastest = _plan(0.0, cluster, batch=batch, tp=8).step
    except mw.MeshweaveError:
        return
    chosen = _plan(margin, cluster, batch=batch, tp=8).step
    published = _plan(0.0, cluster, batch=batch, tp=8, strategy="megatron_sp").step.best.step_s
    if _has_published(fastest.best):
        assert (chosen.best, chosen.margin) == (fastest.best, 0)
    elif published < (1 + margin) * fastest.best.step_s:
        assert chosen.best.step_s == pytest.approx(published) and _has_published(chosen.best)
        assert chosen.runner_up == fastest.best and chosen.margin == margin
        assert [row.step_s for row in chosen.ranked[1:]] == sorted(row.step_s for row in chosen.ranked[1:])
    else:
        assert (chosen.best, chosen.margin) == (fastest.best, 0)


def test_what_is_preferred_is_said_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(0.3, tp=8)
    best, other = plan.step.best, plan.step.runner_up
    assert other is not None and other.degrees.strategy != "megatron_sp" and other.step_s < best.step_s
    said = plan.summary()
    assert "% faster: " in said
    assert f"no published run has {other.degrees.strategy}, so that it must win by 30 %" in said
    command = "plan llama-3-8b --cluster dgx-h100:16 --batch 64 --sequence 4096 --fix tp=8,zero=1 --margin"
    for margin, is_faster in (("0.3", True), ("0", False)):
        assert run_app([*command.split(), margin]) == 0
        assert ("% faster: " in capsys.readouterr().out) == is_faster
    plan.save(tmp_path / "plan.json")
    assert mw.tune.load_plan(tmp_path / "plan.json").step.best == best
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "odd.json").write_text(text.replace('"margin": 0.3', '"margin": 0.0'))
    with pytest.raises(DescriptionError, match="fastest first"):
        mw.tune.load_plan(tmp_path / "odd.json")


@pytest.mark.parametrize("options", [{"stack": IDEAL}, {"strategy": OWN}])
def test_kernels_alone_and_a_strategy_that_is_given_have_no_other(options: dict[str, Any]) -> None:
    assert _plan(0.3, tp=8, **options).step == _plan(0.0, tp=8, **options).step


@pytest.mark.parametrize("strategies", [(OWN,), (OWN, "megatron_sp")])
def test_what_is_preferred_is_found_beside_one_exact_row(strategies: tuple[str, ...]) -> None:
    space = StepSpace(PROBLEM, SpaceOptions(data=(2,), strategies=strategies, tensor=((2, 4), 8)))
    fastest = StepSearch(space, 200 * 10**9, 1).ranking().rows[0]
    chosen = StepSearch(space, 200 * 10**9, 1, margin=0.9).ranking()
    assert fastest.parallelism.strategy == OWN and fastest in chosen.rows
    assert chosen.is_published_first == (len(strategies) > 1)
    assert chosen.rows[0].parallelism.strategy == strategies[-1]


def test_an_interrupted_search_leaves_the_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    space = StepSpace(PROBLEM, SpaceOptions(data=(2,), strategies=(OWN, "megatron_sp"), tensor=((2, 4), 8)))
    whole = StepSearch(space, 200 * 10**9, 1, margin=0.9)

    def interrupt(*done: int) -> None:
        if len(whole.rows) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(whole, "progress", interrupt)
    ranking = whole.ranking()
    assert not ranking.is_complete and not ranking.is_published_first
    assert [row.time_s for row in ranking.rows] == sorted(row.time_s for row in ranking.rows)


@pytest.mark.parametrize("margin", [-0.1, 1.0, float("nan")])
def test_a_margin_is_a_share(margin: float) -> None:
    with pytest.raises(DescriptionError, match="margin is"):
        _plan(margin)


def test_the_margin_is_what_predictions_are_off_by() -> None:
    errors = [abs(s.error) for s in run_scores() if not (s.fitted or s.is_routed or s.precision)]
    assert round(median(errors), 2) == MARGIN


def test_published_strategies_are_those_that_others_execute() -> None:
    own = [name for name in stack_names() if load_stack(name).runs.strategies is None]
    others = [load_stack(name).runs.strategies or () for name in stack_names() if name not in own]
    assert set(published_strategies()) == {name for strategies in others for name in strategies}
    assert own and published_strategies()
