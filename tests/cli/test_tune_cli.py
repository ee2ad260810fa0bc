"""`meshweave tune`: layouts and schedules of one product."""

from __future__ import annotations

import json

import pytest

from meshweave.cli.app import run_app

SMALL = ("--m", "64", "--n", "32", "--k", "48", "--cluster", "h100-node:4")


def called(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = run_app(["tune", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_layouts_are_listed_best_first_within_memory(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys, "layouts", *SMALL, "--count", "8", "--json")
    unlimited = json.loads(out)
    assert status == 0 and len(unlimited) == 8
    times = [entry["estimate_s"] for entry in unlimited]
    assert times == sorted(times)
    assert unlimited[0]["moved_bytes"] == 0, "with enough memory every rank has what it needs"
    limit = 9000
    status, out, _ = called(capsys, "layouts", *SMALL, "--memory", f"{limit} B", "--json")
    within = json.loads(out)
    assert status == 0 and within
    assert all(entry["matrix_bytes"] + entry["extra_bytes"] <= limit for entry in within)
    assert within[0]["estimate_s"] >= times[0]


def test_given_layouts_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys, "layouts", *SMALL, "--a", "2x2", "--c", "2x2x1", "--json")
    assert status == 0
    assert {(entry["a"], entry["c"]) for entry in json.loads(out)} == {("2 x 2", "2 x (2 x 1)")}
    status, out, _ = called(capsys, "layouts", *SMALL, "--a", "2x2")
    assert status == 0 and "C (64, 32) = A (64, 48) B (48, 32)" in out and "computed with" in out


def test_schedules_are_simulated_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    grids = ("--a", "2x2", "--b", "2x2", "--c", "4x1")
    status, out, _ = called(capsys, "schedule", *SMALL, *grids, "--max-states", "100", "--json")
    data = json.loads(out)
    assert status == 0 and data["config"].startswith("stationary")
    schedules = data["schedules"]
    assert {entry["kind"] for entry in schedules} == {"direct", "greedy", "cost-greedy", "exhaustive"}
    assert [e["simulated_s"] for e in schedules] == sorted(e["simulated_s"] for e in schedules)
    (exhaustive,) = [entry for entry in schedules if entry["kind"] == "exhaustive"]
    assert exhaustive["bound_s"] <= exhaustive["staged_s"]
    status, out, _ = called(capsys, "schedule", *SMALL, *grids, "--kind", "direct,greedy")
    assert status == 0 and "direct" in out and "exhaustive  " not in out


def test_a_config_that_only_the_cluster_has_is_given_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    """`show --config` knows no cluster, by whose rates messages are ordered."""
    args = ("algorithm", "reshard_send_recv", "--cluster", "dgx-h100:16", "--algorithm", "reshard_send_recv")
    status, out, _ = called(capsys, *args, "--json")
    assert status == 0 and {row["number"] for row in json.loads(out)} == {None}
    status, out, _ = called(capsys, *args)
    assert status == 0 and " - " in out
    status, out, _ = called(capsys, "algorithm", "cannon", "--cluster", "dgx-h100:4", "--json")
    assert all(row["number"] is not None for row in json.loads(out))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["layouts", *SMALL, "--memory", "1kB"], "the matrices alone take"),
        (["layouts", *SMALL, "--memory", "lots"], "no number of bytes"),
        (["layouts", *SMALL, "--a", "3x2"], "4 processes"),
        (["layouts", *SMALL, "--dtype", "float7"], "float7"),
        (["layouts", *SMALL, "--m", "0"], "--m"),
        (["layouts", *SMALL[:-1], "tpu-v4-pod:4096"], "at most 64"),
        (
            ["schedule", *SMALL[:-1], "tpu-v4-pod:64"],
            "3,072 local products on all ranks, over the limit of 2,048",
        ),
        (["schedule", *SMALL, "--kind", "greedi"], "did you mean 'greedy'"),
        (["schedule", *SMALL, "--kind", ","], "list of names is empty"),
        (["schedule", *SMALL, "--c", "2by2"], "ROWSxCOLS"),
        (["layout"], "layouts"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    status, out, err = called(capsys, *args)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_step_is_on_the_cluster_of_its_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = called(capsys, "algorithm", "step", "--cluster", "dgx-h100:8")
    assert (status, out) == (2, "") and "--cluster changes nothing: the problem of step is on 4 chips" in err
