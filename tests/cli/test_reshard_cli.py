"""`meshweave reshard`: tables, files, a model's state dict, and mistakes in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from damage import CONFIG, HOSTS, changed_json, changed_lines
from test_fuzz import VALUES, Case

from meshweave.cli.app import run_app
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse
from meshweave.tune import reshard as tune_reshard
from sampling import scaled

PAPER = ("--shape", "1024,1024,512", "--dtype", "float32", "--cluster", "p3.8xlarge")
CASE_5 = ("--from", "2x4 S1RR", "--to", "2x4 S0RR", *PAPER)
SMALL = ("--from", "2x4 S0RR", "--to", "2x4 RS01R", "--shape", "16,16,8", "--cluster", "p3.8xlarge")


def run_reshard(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = run_app(["reshard", *args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def read_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    status, out, err = run_reshard(capsys, *args, "--json")
    assert (status, err) == (0, "")
    data: dict[str, Any] = json.loads(out)
    return data


def test_strategies_and_orders_beside_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """Case 5 of AlpaComm's table 2: 4 columns of 512 MB to two hosts each, over NICs of 1.25 GB/s."""
    status, out, err = run_reshard(capsys, *CASE_5)
    assert (status, err) == (0, "")
    assert "4 unit tasks of 4 pieces; at least 2.15 GB between hosts" in out
    assert "busiest NIC needs 859 ms" in out and "chosen: broadcast, order best" in out
    for words in (
        "local_all_gather",
        "naive",
        "2.00",
        "peak memory: ",
        "(host 0)",
        "host 2: 8-11",
    ):
        assert words in out, words


def test_json_holds_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    data = read_json(
        capsys, *CASE_5, "--strategy", "send_recv,broadcast", "--order", "best,naive", "--simulate"
    )
    assert [(plan["strategy"], plan["order"]) for plan in data["plans"]] == [
        (strategy, order) for strategy in ("send_recv", "broadcast") for order in ("best", "naive")
    ]
    assert data["num_chips"] == 16 and data["bound_s"] == pytest.approx(0.859, rel=1e-3)
    for plan in data["plans"]:
        assert plan["simulated_s"] == pytest.approx(plan["predicted_s"], rel=0.02)
        assert plan["bytes_across_hosts"] >= data["least_bytes_across_hosts"] == 1 << 31
    chosen = data["chosen"]
    assert (chosen["strategy"], chosen["order"]) == ("broadcast", "best")
    assert chosen["peak_memory"]["before_and_after_bytes"] == 1 << 30 and chosen["peak_memory"]["fits_a_chip"]
    ends = [turn["end_s"] for turn in chosen["schedule"]]
    assert max(ends) == chosen["predicted_s"] and chosen["schedule"][0]["hosts"][0]["host"] == 2


def test_where_meshes_begin(capsys: pytest.CaptureFixture[str]) -> None:
    in_place = read_json(capsys, *SMALL, "--to-at", "0")
    assert in_place["to"]["ranks"] == list(range(8)) and in_place["num_chips"] == 8
    assert in_place["chosen"]["peak_memory"]["before_and_after_bytes"] == (8 + 2) * 16 * 8 * 2
    apart = read_json(capsys, *SMALL, "--at", "8", "--to-at", "0")
    assert apart["from"]["ranks"] == list(range(8, 16)) and apart["num_chips"] == 16
    by_host = read_json(
        capsys, "--from", "2x3 RRR", "--to", "3x2 RRR", *PAPER, "--row-per-host", "--strategy", "broadcast"
    )
    assert by_host["from"]["ranks"] == [0, 1, 2, 4, 5, 6] and by_host["num_chips"] == 20
    assert by_host["to"]["ranks"] == [8, 9, 12, 13, 16, 17]


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, trace, out = tmp_path / "lines.svg", tmp_path / "trace.json", tmp_path / "program.txt"
    args = (*SMALL, "--svg", str(svg), "--trace", str(trace), "--out", str(out))
    status, said, _ = run_reshard(capsys, *args)
    assert status == 0 and said.count("written: ") == 3
    picture = svg.read_text()
    ElementTree.fromstring(picture)
    assert "host 3" in picture and "S0RR on a 2x4 mesh" in picture and "broadcast, order best" in picture
    names = {e["args"].get("name") for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "M"}
    assert any(name and name.startswith("rank 8") for name in names), names
    assert validate(parse(out.read_text())).skipped == ()
    assert run_app(["simulate", str(out), "--cluster", "p3.8xlarge"]) == 0
    capsys.readouterr()
    assert run_reshard(capsys, *SMALL, "--ranks", "5,9", "--svg", str(svg))[0] == 0
    assert ">rank 5<" in svg.read_text() and ">rank 0<" not in svg.read_text()


def test_a_long_schedule_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_reshard(
        capsys, *SMALL[:-2], "--cluster", "dgx-h100", "--to", "8x4 RRS01", "--shape", "16,16,64"
    )
    assert "more (--json has all)" in out


def test_more_than_a_chip_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """In place, where nothing leaves a rank."""
    args = ("--from", "4 RRR", "--to", "4 RRR", "--to-at", "0", *PAPER)
    _, out, _ = run_reshard(capsys, *args, "--dtype", "float64", "--shape", "1024,1024,1024")
    assert "17.2 GB before and after" in out and "; more than the 16 GB of a chip" in out
    assert "nothing is sent" in out


def test_too_large_to_simulate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_reshard, "MAX_SIMULATED_OPS", 2100)
    status, out, _ = run_reshard(capsys, *CASE_5, "--simulate", "--order", "best")
    assert status == 0 and "too large" in out and "ops, more than the 2,100" in out
    data = read_json(capsys, *CASE_5, "--simulate", "--order", "best", "--strategy", "broadcast,send_recv")
    assert [plan["simulated_s"] is None for plan in data["plans"]] == [True, False]
    status, _, err = run_reshard(capsys, *CASE_5, "--svg", str(tmp_path / "lines.svg"))
    assert status == 2 and "no picture" in err and not list(tmp_path.iterdir())


def test_a_state_dict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A small model, from FSDP 2 x TP 2 to two replicas of TP 2, is told of as a tensor is."""
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    more = {"model_type": "llama", "vocab_size": 128, "tie_word_embeddings": False}
    config.write_text(json.dumps(sizes | more))
    args = (str(config), "--from", "2x2", "--to", "2x2", "--cluster", "p3.8xlarge")
    data = read_json(capsys, *args, "--simulate")
    assert data["num_tensors"] == 21 and data["num_chips"] == 8
    parameters = 2 * 128 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert data["least_bytes_across_hosts"] == 2 * parameters
    out = tmp_path / "program.txt"
    status, said, _ = run_reshard(capsys, *args, "--out", str(out))
    assert status == 0 and f"{parameters:,} parameters of bfloat16, FSDP x TP on a 2x2 mesh" in said
    assert validate(parse(out.read_text())).skipped == ()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*SMALL, "--cluster", "p3.8xlarge:8"), "8 chips, and ranks 0 to 15 need one each; 16 would do"),
        (
            (*SMALL, "--cluster", "8 x A100, 4 a host, 1 x 100Gb"),
            "8 chips, and ranks 0 to 15 need one each; 16",
        ),
        ((*SMALL, "--at", "3", "--cluster", "p3.8xlarge:8"), "20 would do"),
        ((*SMALL, "--to", "4x4 RS01R", "--cluster", "tpu-v4-4x4"), "cannot have 24 chips"),
        ((*SMALL, "--cluster", "p3.8xlagre"), "did you mean 'p3.8xlarge'"),
        ((*SMALL, "--from", ""), "--from is given an empty word"),
        ((*SMALL, "--from", " "), "--from ' ' does not begin"),
        (SMALL[2:], "Missing option '--from'"),
        ((*SMALL, "--from", "2x4"), "--from says nothing about how the tensor lies"),
        ((*SMALL, "--from", "2by4 S0RR"), "does not begin with the shape of a mesh"),
        ((*SMALL, "--from", "99x99 S0RR"), "at most 6 axes and 4096 ranks"),
        ((*SMALL, "--from", "2x4 S0R"), "spec 'S0R' is for 2 dims, and --shape has 3"),
        ((*SMALL, "--to", "2x4 S7RR"), "mesh axis 7"),
        ((*SMALL, "--to", "2x4 XYZ"), "--to: spec 'XYZ'"),
        ((*SMALL, "--shape", "16x16"), "sizes separated by commas"),
        ((*SMALL, "--shape", "16,0,8"), "sizes of at least 1"),
        ((*SMALL, "--dtype", "float23"), "did you mean 'float32'"),
        ((*SMALL, "--strategy", "broadcats"), "did you mean 'broadcast'"),
        ((*SMALL, "--order", ","), "no order named"),
        ((*SMALL, "--ranks", "17"), "rank 17 is in neither mesh"),
        ((*SMALL, "--at", "-1"), "--at gives the first rank"),
        ((*SMALL, "--row-per-host", "--at", "2"), "does not fit a host of 4 chips"),
        ((*SMALL, "--svg", "/nonexistent/lines.svg"), "cannot write"),
        ((*SMALL[:4], *SMALL[6:]), "neither a model nor a tensor"),
        (("llama-2-7b", *SMALL), "--shape is for one tensor"),
        (("llama-2-7b", *SMALL[:4], *SMALL[6:]), "the axes fsdp and tp"),
        (("gpt3", "--from", "2x4", "--to", "2x2", "--cluster", "dgx-h100"), "FFN is not gated"),
        (("--from", "64x64 S01R", "--to", "64x64 RS01", "--shape", "64,64", *SMALL[6:]), "smaller meshes"),
        (
            (*SMALL, "--to", "8x8 RRR", "--shape", "1048576,1024,1024", "--dtype", "float64"),
            "smaller problem",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    status, out, err = run_reshard(capsys, *args)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_damaged_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case, rng = Case(tmp_path), random.Random(31)
    options = (
        "--from",
        "--to",
        "--shape",
        "--dtype",
        "--cluster",
        "--at",
        "--to-at",
        "--strategy",
        "--order",
    )
    values = (
        *VALUES,
        "4 RS0R",
        "2x2x2 S012RR",
        "2x4 S01RR",
        "2 RRR",
        "4x4 RRS^{01}",
        "2x4 S0RR",
        "8,8,8",
        "naive",
    )
    for _ in range(scaled(400)):
        args = list(SMALL)
        for _ in range(rng.randrange(1, 3)):
            option = rng.choice((*options, "--ranks", "--simulate", "--row-per-host", "--json", "--bogus"))
            flag = option in ("--simulate", "--row-per-host", "--json")
            args += [option] if flag else [option, rng.choice(values)]
        if rng.random() < 0.1:
            del args[rng.randrange(len(args))]
        case.check(["reshard", *args])
    case.judge(scaled(400))


def test_damaged_clusters_and_models(tmp_path: Path) -> None:
    case, rng = Case(tmp_path), random.Random(32)
    config = CONFIG | {"model_type": "llama"}
    for number in range(scaled(200)):
        if number % 2:
            path = case.file("cluster.toml", changed_lines(rng, HOSTS))
            case.check(["reshard", *SMALL[:-2], "--cluster", path, "--strategy", "broadcast", "--simulate"])
        else:
            path = case.file("config.json", changed_json(rng, config))
            args = ["--from", "2x2", "--to", "1x2", "--cluster", "dgx-h100", "--order", "best"]
            case.check(["reshard", path, *args, "--strategy", "broadcast"])
    case.judge(scaled(200))
