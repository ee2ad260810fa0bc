"""`meshweave bench fused`: its options and table, and a run in a lab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshweave.cli.app import run_app
from meshweave_lab import Lab
from meshweave_lab.bench import fused
from meshweave_lab.bench.fused import OURS, RIVALS, FusedOp, FusedTimes, chosen, fused_problem, transfer_s
from meshweave_lab.cli.bench_fused import table

LABS = Path(__file__).parents[2] / "examples" / "labs"
LAB = LABS / "switch-4x1-50mbit.toml"
OPS: tuple[FusedOp, ...] = ("reduce-scatter", "all-gather")


@pytest.mark.parametrize("op", OPS)
def test_rivals_stand_before_ours_with_their_fastest_tiles(op: FusedOp) -> None:
    problem = fused_problem((64, 32, 32), 4, op)
    choices = chosen(problem, op, Lab.load(LAB).description.cluster())
    assert [choice.algorithm for choice in choices] == [*RIVALS[op], *OURS[op]]
    assert [choice.tiles is not None for choice in choices] == [False] * 2 + [True] * len(OURS[op])


def test_a_rank_moves_all_rows_but_its_own() -> None:
    assert transfer_s(fused_problem((8, 6, 4), 4, "reduce-scatter"), "reduce-scatter", 1.0) == 6 * 6 * 4
    assert transfer_s(fused_problem((8, 6, 4), 4, "all-gather"), "all-gather", 1.0) == 6 * 4 * 4


def test_the_table_has_a_line_for_each_rival() -> None:
    rows = [
        FusedTimes("looped", "", (0.3, 0.1, 0.2), 0.25, 0.1, 0.0),
        FusedTimes("t3", "tiles of 2 x 4 by rows", (0.11,), 0.1, 0.1, 0.0),
    ]
    head, *lines = table(rows)
    assert head.split() == ["median", "over", "bound", "simulated", "tiles"]
    assert [line.split()[0] for line in lines] == ["looped", "t3"]
    assert "200 ms" in lines[0] and "2.000" in lines[0] and "250 ms" in lines[0]
    assert "1.100" in lines[1] and lines[1].endswith("tiles of 2 x 4 by rows")
    assert rows[1].to_json()["over_bound"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--op", "broadcast"], "'broadcast' is not one of"),
        (["--ratio", "0"], "--ratio is 0; it must be positive"),
        (["--ratio", "nan"], "--ratio is nan; it must be positive"),
        (["--m", "2"], "t3_sequential: 2 rows of C leave some of 4 ranks without any"),
        (["--lab", str(LABS / "switch-4x2.toml")], "a rank to a host; give a lab of kind switch"),
        (["--lab", str(LABS / "two-groups-8.toml")], "a rank to a host; give a lab of kind switch"),
        (["--cluster", "dgx-h100"], "has 8 chips, the lab 4 ranks"),
        (["--repeat", "0"], "repeat must be 1 to 100"),
        (["--out", "/"], "cannot write"),
    ],
)
def test_mistakes_are_said(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert run_app(["bench", "fused", "--lab", str(LAB), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_result_is_written_and_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = [FusedTimes("looped", "", (0.1,), 0.1, 0.1, 0.0), FusedTimes("t3", "", (0.1,), 0.1, 0.1, 2.0)]
    monkeypatch.setattr(fused, "bench_fused", lambda *given, **named: wrong)
    out = tmp_path / "out.json"
    assert run_app(["bench", "fused", "--lab", str(LAB), "--json", "--out", str(out)]) != 0
    assert "t3: differs from the dense product by 2" in capsys.readouterr().err
    assert json.loads(out.read_text())["rivals"][1]["error"] == 2.0


@pytest.mark.parametrize("op", OPS)
def test_what_was_measured_is_printed_and_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: FusedOp
) -> None:
    asked: dict[str, Any] = {}

    def measured(lab: Any, sizes: Any, ratio: float, **given: Any) -> list[FusedTimes]:
        asked.update(given, sizes=sizes, ratio=ratio)
        return [FusedTimes("t3", "", (0.11,), 0.1, 0.1, 0.0)]

    monkeypatch.setattr(fused, "bench_fused", measured)
    out = tmp_path / "out.json"
    given = ["--m", "64", "--ratio", "2", "--repeat", "3", "--out", str(out)]
    assert run_app(["bench", "fused", "--lab", str(LAB), "--op", op, *given]) == 0
    assert capsys.readouterr().out.startswith(f"{op}, 64 x 512 x 512 at ratio 2, bound 100 ms")
    assert asked["op"] == op and asked["repeat"] == 3 and asked["sizes"] == (64, 512, 512)
    assert run_app(["bench", "fused", "--lab", str(LAB), "--op", op, *given, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(out.read_text()) and record["op"] == op
    assert record["rivals"][0]["algorithm"] == "t3" and record["not_run"]


@pytest.mark.lab
@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_lab_measures_the_dense_product(
    nothing_left: None, capsys: pytest.CaptureFixture[str], op: FusedOp
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    given = ["--m", "256", "--n", "128", "--k", "128", "--repeat", "2", "--timeout", "90", "--json"]
    assert run_app(["bench", "fused", "--lab", str(LAB), "--op", op, *given]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["algorithm"] for row in record["rivals"]] == [*RIVALS[op], *OURS[op]]
    for row in record["rivals"]:
        assert row["error"] < 1e-3 and len(row["times_s"]) == 2
        assert min(row["times_s"]) > 0.8 * row["bound_s"]
