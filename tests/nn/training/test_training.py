"""Training, stopped and gone on with: the losses are those of a training that was never stopped."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.base.errors import RankLostError
from meshweave.execute.ranks.launch import launch
from meshweave.nn.training.folder import whole_steps

EXAMPLES = Path(__file__).parents[3] / "examples"
HERE = {"PYTHONPATH": f"{Path(__file__).parent}:{EXAMPLES}"}
DEADLINE_S = 20
FAR = 1000
"""Steps that no training here reaches before it is killed."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {"parallel": "dp=2"}),
    "pp2": (2, {"parallel": "pp=2"}),
    "dp2 pp2": (4, {"parallel": "dp=2,pp=2"}),
    "pp4": (4, {"parallel": "pp=4", "schedule": "zb-h1"}),
    "interleaved": (2, {"parallel": "pp=2,vp=2"}),
    "dp4": (4, {"parallel": "dp=4"}),
    "tp2": (2, {"parallel": "tp=2"}),
    "tp2 pp2": (4, {"parallel": "tp=2,pp=2"}),
    "tp2 pp2 zb": (4, {"parallel": "tp=2,pp=2", "schedule": "zb-h1"}),
    "tp4": (4, {"parallel": "tp=4"}),
    "tp2 dp2": (4, {"parallel": "tp=2,dp=2", "strategy": "megatron"}),
    "tp2x2": (4, {"parallel": "tp=2x2", "strategy": "atp"}),
}
"""Ranks and options of each; those without data parallelism add up gradients in one order."""
UNEVEN_LAYOUTS = ("one", "tp2", "tp2 pp2", "tp2 pp2 zb", "tp4", "tp2x2")
ONE_ORDER = ("one", "pp2", "pp4", "interleaved")


def trained(num_ranks: int, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the ranks of a launch say of each case, which is the same on all of them."""
    answers = launch("training_rank_functions:trains", num_ranks, {"cases": cases}, timeout_s=400, env=HERE)
    for each in answers:
        assert [case["losses"] for case in each] == [case["losses"] for case in answers[0]]
    return answers[0]


@pytest.mark.gloo
def test_a_training_goes_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    size = {"sequence": 7, "hidden": 24, "num_heads": 3, "num_kv_heads": 3}  # two ranks share neither evenly
    case = {"folder": str(tmp_path), "size": size}
    stopped, on_stages, straight = trained(
        2,
        {**case, "parallel": "tp=2,micro_batch=4", "until": 2, "save_every": 2},
        {**case, "parallel": "pp=2,micro_batch=4", "until": 4, "resume": True},
        {**case, "parallel": "dp=2,micro_batch=2", "until": 4, "folder": ""},
    )
    assert stopped["losses"] == pytest.approx(straight["losses"][:2], rel=1e-12)
    assert on_stages["begun"] == 2
    assert on_stages["losses"] == pytest.approx(straight["losses"][2:], rel=1e-12)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("saved_on", LAYOUTS)
def test_saved_on_one_layout_and_resumed_on_any_other(saved_on: str, style: str, tmp_path: Path) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 2 if style == "llama" else 4}
    save_and_resume(saved_on, LAYOUTS, {"style": style, "num_layers": 4, "sequence": 7, **heads}, tmp_path)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("saved_on", UNEVEN_LAYOUTS)
def test_heads_that_ranks_do_not_share_evenly(saved_on: str, style: str, tmp_path: Path) -> None:
    """Three heads, or six of queries and three of keys and values, on two and four ranks."""
    heads = {"num_heads": 6 if style == "llama" else 3, "num_kv_heads": 3, "hidden": 24}
    save_and_resume(
        saved_on, UNEVEN_LAYOUTS, {"style": style, "num_layers": 2, "sequence": 7, **heads}, tmp_path
    )


def save_and_resume(saved_on: str, layouts: Iterable[str], size: dict[str, Any], folder: Path) -> None:
    """Save on one layout, go on on all, and compare the losses with those of a training that never stopped."""

    def case(name: str) -> dict[str, Any]:
        options = LAYOUTS[name][1]
        parallel = ",".join(filter(None, [options.get("parallel"), "micro_batch=2"]))
        return {**options, "parallel": parallel, "size": size, "folder": str(folder)}

    ranks = LAYOUTS[saved_on][0]
    straight, _ = trained(
        ranks, {**case(saved_on), "folder": "", "until": 5}, {**case(saved_on), "until": 3, "save_every": 3}
    )
    for resumed_on in layouts:
        (resumed,) = trained(LAYOUTS[resumed_on][0], {**case(resumed_on), "until": 5, "resume": True})
        assert resumed["begun"] == 3
        if saved_on == resumed_on or {saved_on, resumed_on} <= set(ONE_ORDER):
            assert resumed["losses"] == straight["losses"][3:], resumed_on
        else:
            assert resumed["losses"] == pytest.approx(straight["losses"][3:], rel=1e-12), resumed_on


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_two_hundred_steps_follow_the_curve_of_one_process(style: str) -> None:
    case = {"size": {"style": style, "hidden": 32, "ffn_hidden": 64}, "until": 200}
    (alone,) = trained(1, {**case, "parallel": "micro_batch=2"})
    (together,) = trained(4, {**case, "parallel": "tp=2,pp=2,micro_batch=2"})
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert alone["losses"][-1] < 0.75 * alone["losses"][0]


def killed_and_resumed(folder: Path, layout: dict[str, Any], num_ranks: int, draw: random.Random) -> None:
    """Kill a rank at a moment of a training that saves each step; go on, and compare the losses."""
    victim, after_s = draw.randrange(num_ranks), draw.uniform(0.0, 0.6)
    case = {**layout, "folder": str(folder / "checkpoints"), "save_every": 1}
    kill = {"rank": victim, "after_s": after_s, "log": str(folder)}
    with pytest.raises(RankLostError) as lost:
        launch(
            "training_rank_functions:trains",
            num_ranks,
            {"cases": [{**case, "until": FAR, "kill": kill}]},
            timeout_s=180,
            deadline_s=DEADLINE_S,
            interval_s=0.1,
            stale_s=1.0,
            env=HERE,
        )
    assert lost.value.missing == (victim,)
    survivors = {rank: words for rank, words in lost.value.reports.items() if rank != victim}
    assert len(survivors) == num_ranks - 1
    assert all(f"rank {victim}" in words for words in survivors.values()), survivors
    killed_at = float((folder / "killed").read_text())
    for rank in survivors:
        assert float((folder / str(rank)).read_text()) - killed_at < DEADLINE_S
    steps = whole_steps(folder / "checkpoints")
    last = steps[-1] if steps else 0
    resumed, straight = trained(
        num_ranks,
        {**case, "resume": True, "until": last + 2, "save_every": 0},
        {**layout, "until": last + 2},
    )
    assert resumed["begun"] == (last or None)
    assert resumed["losses"] == straight["losses"][last:]


@pytest.mark.gloo
def test_a_rank_that_is_killed_is_named_and_its_training_goes_on(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, {"parallel": "pp=2"}, 2, random.Random(0))


@pytest.mark.gloo
@pytest.mark.slow
def test_so_it_is_at_twenty_moments(tmp_path: Path) -> None:
    draw = random.Random(1)
    for number in range(20):
        ranks, layout = draw.choice(
            [(2, "dp=2"), (2, "pp=2"), (4, "dp=2,pp=2"), (4, "pp=4"), (3, "dp=1,pp=3")]
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        killed_and_resumed(folder, {"parallel": layout, "size": {"num_layers": 4}}, ranks, draw)
        shutil.rmtree(folder)
