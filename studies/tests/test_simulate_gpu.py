"""`meshweave simulate-gpu`: what is shown, written, and refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.catalog import gpu_names
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.gpu import load_gpu
from meshweave.ir.program.text import to_text
from meshweave.trace import Counter, Trace, to_chrome
from meshweave_studies.t3.programs import SlicedProduct, overlapped_program

ROOT = Path(__file__).parents[2]
PROGRAM = """
program("sublayer")
tp = mesh((8,), ("x",))
A = tensor((1024, 1024), "float16")
B = tensor((512, 1024), "float16")
C = tensor((1024, 512), "float16")
a = input(A, tp[S(1)])
b = input(B, tp[S(1)])
c = output(C, tp[R])
acc = scratch((1024, 512), "float16", on=tp)
part = scratch((128, 512), "float16", on=tp)
compute = lane()
with tp:
    matmul(acc, a, b, transpose_b=True, lane=compute)
    reduce_scatter(part, acc, over="tp.x", dim=0, lane=compute)
    all_gather(c, part, over="tp.x", dim=0, lane=compute)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "sublayer.txt"
    path.write_text(PROGRAM)
    return str(path)


def test_a_program_without_work_takes_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, report = tmp_path / "idle.txt", tmp_path / "report.html"
    path.write_text(
        "".join(
            line
            for line in PROGRAM.replace("512", "0").splitlines(True)
            if "_scatter" not in line and "_gather" not in line
        )
    )
    assert run_app(["simulate-gpu", str(path), "--cluster", "t3-8", "--report", str(report)]) == 0
    assert "0 ns; memory moved 0 B, 0.0 % of what it could" in " ".join(capsys.readouterr().out.split())
    assert run_app(["simulate-gpu", str(path), "--cluster", "t3-8", "--json"]) == 0


def test_kernels_traffic_and_waits_are_shown_and_written(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, report = tmp_path / "trace.json", tmp_path / "report.html"
    given = ["simulate-gpu", program, "--cluster", "t3-8", "--trace", str(trace), "--report", str(report)]
    assert run_app(given) == 0
    out = capsys.readouterr().out
    for word in ("t3-80cu in detail", "reduce_scatter", "product read", "waited behind computing"):
        assert word in out
    events = json.loads(trace.read_text())["traceEvents"]
    counted = {event["name"] for event in events if event["ph"] == "C"}
    assert counted == {"memory requests, GB/s", "queue, entries", "waiting, % of cycles"}
    moved = 1024 * 512 * 2 * 7 // 8
    bins = [event for event in events if event["name"] == "memory requests, GB/s"]
    assert run_app(["simulate-gpu", program, "--cluster", "t3-8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)[0]
    assert data["memory_bytes"]["all_gather_write"] == moved == data["memory_bytes"]["all_gather_read"]
    assert max(event["args"]["all gather write"] for event in bins) > 0
    assert data["duration_s"] == pytest.approx(sum(k["end_s"] - k["start_s"] for k in data["kernels"]) + 2e-6)
    page = report.read_text()
    assert (
        page.count("<polygon") == len(data["memory_bytes"]) + 1 + 3
        and "communication behind computing" in page
    )
    assert not re.search("nan|inf[^o]", re.sub("<style>.*?</style>", "", page, flags=re.DOTALL))


def test_a_cluster_file_names_a_gpu_by_catalog_or_file(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = ROOT / "src" / "meshweave" / "catalog"
    (tmp_path / "gpu.toml").write_text((catalog / "gpus" / "t3-80cu.toml").read_text())
    text = (catalog / "clusters" / "t3-8.toml").read_text()
    (tmp_path / "own.toml").write_text(text.replace('gpu = "t3-80cu"', 'gpu = "gpu.toml"'))
    assert run_app(["simulate-gpu", program, "--cluster", str(tmp_path / "own.toml"), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)[0]
    assert run_app(["simulate-gpu", program, "--cluster", "t3-8", "--json"]) == 0
    assert own["duration_s"] == json.loads(capsys.readouterr().out)[0]["duration_s"]
    (tmp_path / "without.toml").write_text(text.replace('gpu = "t3-80cu"', ""))
    assert run_app(["simulate-gpu", program, "--cluster", str(tmp_path / "without.toml")]) == 2
    assert "has no GPU in detail" in capsys.readouterr().err
    assert run_app(["simulate", program, "--cluster", str(tmp_path / "without.toml"), "--json"]) == 0
    assert "links" in json.loads(capsys.readouterr().out)[0]  # of the fast model
    (tmp_path / "wrong.toml").write_text(text.replace('gpu = "t3-80cu"', 'gpu = "t3-80c"'))
    assert run_app(["simulate-gpu", program, "--cluster", str(tmp_path / "wrong.toml")]) == 2
    assert "t3-80cu" in capsys.readouterr().err


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file with T3's product, whose computing and communication share memory."""
    path = tmp_path_factory.mktemp("fused") / "fused.txt"
    path.write_text(to_text(overlapped_program(SlicedProduct(2048, 1024, 64, 8))))
    return str(path)


def _simulated(fused: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run_app(["simulate-gpu", fused, "--cluster", "t3-8", "--json", *options]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)[0]
    return data


def test_arbitration_is_chosen_and_shown(fused: str, capsys: pytest.CaptureFixture[str]) -> None:
    aware = "--arbitration=communication-aware"
    plain, tight, free = (
        _simulated(fused, options, capsys)
        for options in ([], [aware, "--threshold=1", "--starvation=10000"], [aware, "--threshold=none"])
    )
    assert plain["arbitration"]["policy"] == "round-robin" and plain["waited_share"]["held"] == 0
    assert tight["arbitration"] == {
        "policy": "communication-aware",
        "threshold": 1,
        "starvation_cycles": 10000,
    }
    assert free["arbitration"]["threshold"] is None and free["waited_share"]["held"] == 0
    assert tight["waited_share"]["held"] > 0 and tight["duration_s"] > free["duration_s"]
    soon = _simulated(fused, [aware, "--threshold=1", "--starvation=1"], capsys)
    assert soon["waited_share"]["held"] < tight["waited_share"]["held"]
    first = _simulated(fused, ["--arbitration=compute-first"], capsys)
    assert first["waited_share"]["compute_behind"] < plain["waited_share"]["compute_behind"]
    for data in (plain, tight):
        requests, queue, waits = data["over_time"]
        moved = sum(map(sum, requests["values"].values())) * 1e9 * 1e-6
        assert moved == pytest.approx(sum(data["memory_bytes"].values()))
        assert len(queue["times_s"]) == len(queue["values"]["mean of channels"])
        assert data["queue_entries"]["most"] == max(queue["values"]["mean of channels"])
        cycles = sum(waits["values"]["communication held back"]) / 100 * 1e-6 / data["duration_s"]
        assert cycles == pytest.approx(data["waited_share"]["held"], rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--threshold=5"], "--arbitration communication-aware"),
        (["--arbitration=compute-first", "--starvation=5"], "--arbitration communication-aware"),
        (
            ["--arbitration=communication-aware", "--threshold=few"],
            "'few' is no number of entries; give 1 to",
        ),
        (["--arbitration=communication-aware", "--threshold=0"], "give 1 to"),
        (["--arbitration=communication-aware", "--starvation=0"], "--starvation"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    program: str, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["simulate-gpu", program, "--cluster", "t3-8", *options]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_the_fast_model_runs_there_too(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["simulate", program, "--cluster", "t3-8", "--json", "--fast"]) == 0
    assert "links" in json.loads(capsys.readouterr().out)[0]


@pytest.mark.parametrize("options", [[], ["--svg=x.svg"], ["--against=estimate"]])
def test_the_fast_model_is_asked_for(
    program: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its times are others, so that neither model stands in for the other."""
    monkeypatch.chdir(tmp_path)
    assert run_app(["simulate", program, "--cluster", "t3-8", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "simulate-gpu" in error and "--fast" in error
    assert not (tmp_path / "x.svg").exists()


def test_counters_hold_until_they_change() -> None:
    counter = Counter(3, "queue", (0, 10**6, 2 * 10**6), {"a": (1.0, 1.0, 2.0)})
    events = to_chrome([Trace("p", "s", (), (counter,))])["traceEvents"]
    assert [(event["ts"], event["args"], event["pid"]) for event in events] == [
        (0.0, {"a": 1.0}, 3),
        (2.0, {"a": 2.0}, 3),
    ]


def test_every_gpu_of_the_catalog_has_the_memory_that_its_source_says() -> None:
    bytes_per_s = {"t3-80cu": 1.024e12, "a100": 2.039e12, "h100": 3.352e12, "mi210": 1.6384e12}
    for name in gpu_names():
        gpu = load_gpu(name)
        memory = gpu.memory
        assert memory.timing.rc >= memory.timing.ras + memory.timing.rp
        assert gpu.cache.num_bytes // gpu.cache.line_bytes % gpu.cache.lines_per_set == 0
        if name in bytes_per_s:
            assert memory.bytes_per_s == pytest.approx(bytes_per_s[name], rel=1e-3)


def test_the_catalog_lists_gpus_and_prints_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["catalog", "gpus"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in gpu_names())
    assert run_app(["catalog", "t3-80cu", "--toml"]) == 0
    assert "compute_units = 80" in capsys.readouterr().out
    assert run_app(["catalog", "gpus", "h100", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["derived"]["memory_bytes_per_s"] == load_gpu("h100").memory.bytes_per_s


def test_clusters_of_the_catalog_agree_with_their_gpus() -> None:
    for name in ("t3-8", "t3-16"):
        cluster = load_cluster(name)
        gpu = load_gpu(cluster.chip.gpu)
        assert cluster.chip.peak("float16") == gpu.flops_per_s
        assert cluster.chip.memory_bytes_per_s == gpu.memory.channels * 32 * gpu.memory.clock_hz


def test_a_program_of_too_many_turns_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = """program("long")
tp = mesh((4,), ("x",))
A = tensor((8, 8), "float32")
a = input(A, tp[S(0)])
b = scratch((8, 8), "float32", on=tp)
dma = lane()
with tp:
    for turn in range(300000):
        put(at((tp.x + 1) % 4, b[2 * tp.x:2 * tp.x + 2, :]), a, release=release(), lane=dma, name="gather")
"""
    path = tmp_path / "long.txt"
    path.write_text(text)
    assert run_app(["simulate-gpu", str(path), "--cluster", "t3-8"]) == 2
    assert "has more than 200,000 ops" in capsys.readouterr().err
