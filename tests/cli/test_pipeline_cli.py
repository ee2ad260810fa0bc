"""`meshweave pipeline`: schedules written, proved, timed and drawn, and mistakes in one line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from meshweave.algorithms.pipeline.torch_csv import schedule_from_csv
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.units import to_ps
from meshweave.cli.app import run_app
from meshweave.cli.pipeline_options import transfer_times

HANGS = (
    "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,"
    "2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,"
    "3RECV_F1,3F1,3B1,3SEND_B1,1RECV_B0,1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1\n"
)


def run_pipeline(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = run_app(["pipeline", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def read_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    status, out, err = run_pipeline(capsys, *args, "--json")
    assert (status, err) == (0, "")
    data: dict[str, Any] = json.loads(out)
    return data


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_named_schedule_is_printed_as_csv_and_read_again(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, text, err = run_pipeline(capsys, name, "--stages", "4", "--micro-batches", "6")
    assert status == 0 and err.startswith(f"# {name}: ") and "proved to end (strict)" in err
    schedule = schedule_from_csv(text)
    assert (schedule.num_stages, schedule.num_micro_batches, schedule.has_communication) == (4, 6, False)
    path = tmp_path / "plan.csv"
    path.write_text(text, newline="")
    asked = (name, "--micro-batches", "6"), (str(path),)
    one, other = (read_json(capsys, *what)["schedules"][0] for what in asked)
    assert {**one, "name": ""} == {**other, "name": ""}
    assert name in run_pipeline(capsys, "no schedule")[2]


def test_both_forms_are_written_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "zbv.csv"
    base = ("zbv", "--stages", "4", "--micro-batches", "5", "--transfer", "0.2ms")
    status, out, _ = run_pipeline(capsys, *base, "--with-transfers", "-o", str(path))
    assert status == 0 and f"written: {path}" in out and "1RECV_F0" in path.read_text()
    assert path.read_bytes().endswith(b"\r\n")
    status, out, err = run_pipeline(capsys, str(path), "--transfer", "0.2ms")
    assert (status, err) == (0, "") and "its own transfers" in out and "peak stashes" in out


def test_two_schedules_beside_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, page = tmp_path / "both.svg", tmp_path / "both.html"
    base = ("eager-1f1b", "--beside", "1f1b", "--micro-batches", "16", "--transfer", "0.4ms")
    status, out, err = run_pipeline(capsys, *base, "--svg", str(svg), "--report", str(page))
    assert (status, err) == (0, "")
    assert "eager-1f1b: 4 ranks of one stage" in out and "waits 400 us for 0SEND_F0 before 1F0" in out
    titles = [
        item.text for item in ElementTree.fromstring(svg.read_text()).iter() if item.tag.endswith("title")
    ]
    assert sum(title.startswith("3B15") for title in titles) == 2
    assert any("waits for 2SEND_F0: 400 us" in title for title in titles)
    assert any(title.startswith("0SEND_F3") for title in titles)
    assert "exposed transfer" in page.read_text() and "<table>" in page.read_text()
    data = read_json(capsys, *base)
    eager, plain = data["schedules"]
    assert eager["step_s"] < plain["step_s"] and eager["num_exposed"] < plain["num_exposed"]
    for item in (eager, plain):
        for rank in item["ranks"]:
            parts = rank["compute_s"] + rank["bubble_s"] + rank["exposed_s"]
            assert parts == pytest.approx(item["step_s"])


def test_a_deadlock_is_refused_with_its_cycle(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hangs.csv"
    path.write_text(HANGS)
    status, out, err = run_pipeline(capsys, str(path))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert f"error: {path}: this schedule never ends: " in err
    for action in ("0SEND_F1 (rank 0, action 4)", "1RECV_F1 (rank 1, action 4)", "1SEND_F0", "2RECV_F0"):
        assert action in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(HANGS.encode())))
    assert run_pipeline(capsys, "-", "--runtime", "buffered")[0] == 0


def test_transfers_from_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight chips a rank fill a host of dgx-h100, so transfers go through NICs; of two a rank all stay inside."""
    base = ("1f1b", "--cluster", "dgx-h100", "--activation", "64MiB", "--chips-per-rank")
    inside, outside = (read_json(capsys, *base, chips)["schedules"][0] for chips in ("2", "8"))
    own = read_json(capsys, "1f1b", "--transfer", "0")["schedules"][0]
    assert own["step_s"] < inside["step_s"] and own["step_s"] < outside["step_s"]


def test_transfers_share_links_and_the_slowest_chip_counts() -> None:
    """Four chips of a rank send through the one NIC of their host; of six chips some stay inside it."""
    inside, between, _ = transfer_times((0, 1, 2, 3), "0", "16 x H100, 8 a host, 1 x 400Gb", "16MiB", 4)
    assert inside < to_ps(2e-5) and 0 < between - to_ps(2**24 / 50e9) < to_ps(2e-5)
    straddling, outside, same = transfer_times((0, 1, 2, 2), "0", "dgx-h100", "16MiB", 6)
    assert straddling == outside > to_ps(2**24 / 6 / 50e9) and same == 0


WRONG = {
    ("1f2b",): "there is no schedule '1f2b' (did you mean '1f1b'?)",
    ("missing.csv",): "missing.csv",
    ("a" * 300,): "there is no schedule 'aaa",
    ("1f1b", "--runtime", "loose"): "there is no runtime 'loose'; there are strict, batched, buffered",
    ("1f1b", "--forward", "1"): "--forward '1' is no time of at most 10000 s, such as 1.5ms or 20us",
    ("1f1b", "--forward", "1ms,2ms"): "--forward '1ms,2ms' has 2 times; give one, or 4",
    ("1f1b", "--transfer", "1ms,2ms"): "--transfer '1ms,2ms' has 2 times; give one, or 3",
    ("1f1b", "--stages", "0"): "--stages is 0; give 1 to 4096",
    ("1f1b", "--stages", "2000", "--micro-batches", "2000"): "has 4,000,000 forwards",
    ("zbv", "--stages", "5"): "ZB-V: two stages a rank",
    ("dualpipev", "--stages", "4", "--micro-batches", "3"): "4 stages need as many micro-batches, not 3",
    ("interleaved-1f1b", "--stages", "6", "--per-rank", "4"): "6 stages are not a multiple of 4 a rank",
    ("1f1b", "--cluster", "dgx-h100", "--transfer", "1ms"): "give --transfer or --cluster",
    ("1f1b", "--cluster", "dgx-h100", "--activation", "much"): "--activation 'much' is no number of bytes",
    ("zb-2p", "--stash-rest", "2"): "--stash-rest is 2.0; give 0 to 1",
}


@pytest.mark.parametrize(("args", "words"), WRONG.items(), ids=map(" ".join, WRONG))
def test_mistakes_end_with_2_and_one_line(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run_pipeline(capsys, *args)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert words in err


def test_a_file_is_not_written_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("0F0,0B0\n")
    status, _, err = run_pipeline(capsys, str(path), "-o", str(tmp_path / "two.csv"))
    assert status == 2 and "--out writes a schedule given by name" in err
    status, out, _ = run_pipeline(capsys, str(path))
    assert status == 0 and "1 rank of one stage" in out and "no transfers" in out
