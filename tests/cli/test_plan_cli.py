"""`meshweave plan` of a step: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshweave as mw
from meshweave.base.errors import DescriptionError
from meshweave.cli.app import run_app
from meshweave.tune import load_plan
from meshweave.tune.plan import Plan

SMALL = ("llama-2-7b", "--cluster", "dgx-h100:8", "--batch", "16", "--sequence", "2048")
QUICK = "strategy=megatron_sp,cp=1,micro_batch=1,vp=1,schedule=1f1b,zero=1"


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = run_app(["plan", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert run_app(["plan", *SMALL, "--fix", QUICK, "--save", str(path), "--sensitivity", "--json"]) == 0
    return path


def test_the_text_is_the_best_the_runner_up_and_what_next(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = called(capsys, *SMALL, "--fix", QUICK)
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if line.strip()]
    assert [line.split()[0] for line in lines if not line.startswith(" ")][1:5] == [
        "best",
        "runner-up",
        "error",
        "next",
    ]
    assert "% MFU" in out and "% slower" in out and "--table" in out
    assert len(lines) <= 9


def test_the_table_has_what_the_plan_has(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    status, out, _ = called(capsys, *SMALL, "--fix", QUICK, "--table", "--price", "2")
    steps = load_plan(path).step
    assert status == 0
    for word in ("HFU", "tensor", "context", "transfers", "data", "bubble", "memory", "price/Mtok"):
        assert word in out
    for record in steps.ranked:
        assert f"{record.tokens_per_s_per_chip:.0f}" in out
    assert "less memory for more time" in out


def test_a_saved_plan_is_what_was_printed(path: Path) -> None:
    plan = load_plan(path)
    assert plan.kind == "step" and plan.format == "meshweave-plan-3"
    steps = plan.step
    times = [record.step_s for record in steps.ranked]
    assert times == sorted(times) and steps.is_complete and steps.num_exact == 2
    for record in steps.ranked:
        assert sum(record.parts_s.values()) == pytest.approx(record.step_s, rel=1e-6)
        assert sum(record.memory_parts.values()) == record.memory_bytes <= steps.memory_limit_bytes
        assert record.degrees.num_chips == 8 and record.degrees.zero in (0, 1)
    assert len(steps.sensitivity) == 2
    memory = [record.memory_bytes for record in steps.front]
    assert memory == sorted(memory, reverse=True)
    with pytest.raises(DescriptionError, match="--products"):
        _ = plan.best


def test_plans_of_the_first_format_are_still_read(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    args = ["--products", "--algorithms", "collective", "--out", str(file), "--json"]
    assert (
        run_app(["plan", "gpt3", "--cluster", "tpu-v4-pod:4", "--batch", "2", "--sequence", "64", *args]) == 0
    )
    data = json.loads(file.read_text())
    new = load_plan(file)
    for key in ("kind", "steps", "description"):
        del data[key]
    file.write_text(json.dumps(data | {"format": "meshweave-plan-1"}))
    assert load_plan(file).best == new.best
    with pytest.raises(DescriptionError, match="meshweave plan"):
        _ = new.step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "products"}, "candidates"),
        ({"format": "meshweave-plan-1"}, "meshweave-plan-2"),
        ({"num_chips": 16}, "8 chips, not the 16"),
        ({"steps": None}, "steps"),
    ],
)
def test_a_contradictory_plan_is_one_line(
    path: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DescriptionError, match=message) as caught:
        load_plan(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize("verb", [["run"], ["verify"]])
def test_verbs_of_products_say_what_a_step_is_not(
    capsys: pytest.CaptureFixture[str], path: Path, verb: list[str]
) -> None:
    status = run_app([*verb, str(path)])
    err = capsys.readouterr().err
    assert status == 2 and err.count("\n") == 1 and "--products" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*SMALL, "--fix", "tp"], "such as tp=8"),
        ([*SMALL, "--fix", "pt=8"], "names are data, dp, pipeline, pp"),
        ([*SMALL, "--fix", "tp=eight"], "whole number"),
        ([*SMALL, "--fix", "tp=2,tp=4"], "twice"),
        ([*SMALL, "--fix", "strategy=megatron,tp=2x2"], "leave out tp 2x2, or strategy megatron"),
        ([*SMALL, "--fix", "schedule=zbv,pp=1"], "leave out pp 1, or schedule zbv"),
        (
            ["gpt-oss-20b", *SMALL[1:], "--fix", "ep=16"],
            "ep 16 does not divide the ranks of a stage, at most 8",
        ),
        (["gpt-oss-20b", *SMALL[1:], "--stack", "meshweave"], "costs of stack meshweave were not fitted"),
        ([*SMALL, "--fix", "tp=3"], "tp 3 does not divide its 8 chips"),
        ([*SMALL, "--fix", "tp=8,pp=16"], "tp 8 x pp 16 is 128 ranks, more than its 8 chips"),
        ([*SMALL, "--fix", "pp=64"], "pp 64 is more than its 8 chips"),
        ([*SMALL, "--fix", "tp=2,pp=2,cp=1,dp=1"], "is 4 ranks, fewer than its 8 chips"),
        ([*SMALL, "--fix", "vp=40"], "leave out vp"),
        (
            [*SMALL, "--fix", "vp=2,schedule=zb-h1"],
            "vp 2 is no number of stages a rank of zb-h1; leave out vp",
        ),
        ([*SMALL, "--fix", "strategy=zero3"], "zero3 shares the batch; give data= and zero="),
        ([*SMALL, "--fix", "strategy=25d_block"], "25d_block has 3 mesh axes"),
        ([*SMALL, "--fix", "micro_batch=3"], "in micro-batches of 3"),
        ([*SMALL, "--sequence", "256", "--fix", "cp=8"], "parts of 128 tokens of a sequence of 256"),
        (["llama-2-7b", "--cluster", "dgx-h100:8", "--batch", "6", "--fix", "dp=8"], "the batch of 6"),
        (["llama-2-7b", "--cluster", "dgx-h100:40", "--batch", "80", "--fix", "pp=40"], "its 32 layers"),
        (
            ["llama-2-7b", "--cluster", "dgx-h100:24", "--batch", "24", "--fix", "tp=3,strategy=megatron"],
            "its 32 heads",
        ),
        (["llama-2-7b", "--cluster", "dgx-h100:1", "--batch", "4"], "1 chip of dgx-h100 fits"),
        ([*SMALL, "--fix", "zero=7"], "from 0 to 3"),
        ([*SMALL, "--fix", "recompute=some"], "there are none, selective, full"),
        ([*SMALL, "--fix", "order=data"], "innermost first"),
        ([*SMALL, "--memory", "lots"], "no number of bytes"),
        ([*SMALL, "--memory", "80"], "--memory 80: 80 what? Give a unit, such as 80GB"),
        ([*SMALL, "--memory", "81920"], "81920 what?"),
        ([*SMALL, "--reserve", "4"], "--reserve 4: 4 what? Give a unit, such as 4GB"),
        (
            ["gpt3", "--cluster", "sixty four H100s", "--batch", "4"],
            "such as '64 x H100, 8 a host, 8 x 400Gb'; clu",
        ),
        ([*SMALL, "--memory", "1MB"], "fits in 950 kB a chip, 5 % kept free: the smallest takes"),
        ([*SMALL, "--algorithms", "meshslice"], "--products"),
        ([*SMALL, "--products", "--table"], "leave out --products"),
        ([*SMALL, "--micro-batch", "2"], "No such option: --micro-batch; give --fix micro_batch=VALUE"),
        ([*SMALL, "--tapering", "2"], "No such option: --tapering"),
        (["llama-2-7b", "--cluster", "dgx-h100:8"], "--batch"),
        (["llama-2-7b", "--cluster", "dgx-h100:8", "--batch", "0"], "batch"),
        (["llama-2-7b", "--cluster", "dgx-h100:13", "--batch", "8"], "give 8 or 16"),
        (["llama-2-7b", "--cluster", "dgx-h100:99999999999", "--batch", "8"], "over the limit of 65,536"),
        (["llama-2-7b", "--cluster", "99999999999 x H100", "--batch", "8"], "over the limit of 65,536"),
        ([*SMALL, "--memory", "0GB"], "--memory is 0; give the bytes of a chip"),
        ([*SMALL, "--price", "inf"], "--price is inf; give dollars"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    status, out, err = called(capsys, *args)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


FIVE = ("dgx-h100", {"num_hosts = 1": "num_hosts = 3", "chips_per_host = 8": "chips_per_host = 5"})
SLOW = ("atp-ic1", {"link_bytes_per_s = 7.425e9": "link_bytes_per_s = 1e8"})
CATALOG = Path(mw.__file__).parent / "catalog" / "clusters"


@pytest.mark.parametrize(
    ("cluster", "batch", "fixed"),
    [
        (FIVE, 30, ""),
        (SLOW, 16, ""),
        ("dgx-h100:7", 14, ""),
        ("dgx-h100:8", 7, ""),
        ("dgx-h100:8", 16, "vp=5"),
    ],
    ids=["3 hosts of 5", "a slow tree", "7 chips", "7 sequences", "5 stages a rank"],
)
def test_odd_clusters_and_prime_numbers_have_a_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cluster: Any, batch: int, fixed: str
) -> None:
    name = cluster
    if isinstance(cluster, tuple):
        text = (CATALOG / f"{cluster[0]}.toml").read_text()
        for old, new in cluster[1].items():
            assert old in text
            text = text.replace(old, new)
        name = str(tmp_path / "odd.toml")
        Path(name).write_text(text)
    fix = ",".join(filter(None, ("strategy=megatron_sp,micro_batch=1,recompute=none,cp=1", fixed)))
    status, out, err = called(
        capsys, "llama-2-7b", "--cluster", name, "--batch", str(batch), "--fix", fix, "--sensitivity"
    )
    assert (status, err) == (0, "") and "runner-up" in out
    assert out.count("\nwith ") == (4 if cluster == FIVE else 2)


def test_an_interrupted_plan_prints_the_best_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    plan: Plan = load_plan(path)
    steps = plan.step.model_copy(update={"is_complete": False, "num_exact": 0})
    stopped = plan.model_copy(update={"steps": steps})
    monkeypatch.setattr("meshweave.tune.step_search.planner.plan_step", lambda *args, **options: stopped)
    status, out, err = called(capsys, *SMALL)
    assert status == 130 and "best so far" in out and "runner-up" in out
    assert err.startswith("interrupted")


def test_what_a_plan_of_products_leaves_out_is_said_of_one_algorithm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cannon's algorithm has no mesh of eight chips, so that one algorithm is left."""
    args = ("llama-2-7b", "--cluster", "dgx-h100:8", "--products", "--algorithms", "cannon,collective")
    status, out, _ = called(capsys, *args)
    assert status == 0 and "have no mesh shape for cannon" in " ".join(out.split())
