"""Rivals measured in a lab: the right numbers, and times that cannot be under the bound."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.cli.app import run_app
from meshweave.cost.machine import mesh_machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave_lab import Lab
from meshweave_lab.bench.rank import running_order
from meshweave_lab.bench.results import MeasuredRound, RivalTimes, Round
from meshweave_lab.bench.rivals import DTENSOR, choose_rivals
from meshweave_lab.bench.rounds import LayerCase, layer_rounds, unpaced_rounds
from meshweave_lab.bench.shapes import ShapeComparison
from meshweave_lab.bench.yardsticks import balanced_flops_per_s, bound_s, ideal_cluster, matmul_machine
from meshweave_lab.cli.bench_tables import NOT_COMPARABLE, gain_lines, picture, table

LABS = Path(__file__).parents[2] / "examples" / "labs"
LAB = LABS / "torus-2x2.toml"
CALIBRATED = """
name = "measured-2x2"
source = "made up for a test"
[chip]
name = "core"
source = "made up"
peak_flops_per_s = { float32 = 1e10 }
effective_flops_per_s = 1e10
memory_bytes = 1e9
memory_bytes_per_s = 1e9
[network]
kind = "torus"
shape = [2, 2]
"""
AXIS = """
[[network.axes]]
name = "{}"
source = "made up"
link_bytes_per_s = 6.25e6
link_latency_s = 5e-3
launch_s = 5e-3
"""


@pytest.fixture
def calibrated(tmp_path):
    path = tmp_path / "calibrated.toml"
    path.write_text(CALIBRATED + AXIS.format("row") + AXIS.format("col"))
    return path


def result(name, *runs_s, error=0.0, estimate_s=None):
    return RivalTimes(name, name.split()[0], runs_s, 1.0, 1.25, estimate_s, error)


def measured(*results, flops_per_s=1e9):
    described = Round(Matmul2dProblem(64, 64, 64, (2, 2)), (), flops_per_s, 1.0)
    report = {"num_products": 10, "num_overruns": 1} if flops_per_s else None
    return MeasuredRound(described, results, (report, report), 0.0)


def test_the_pace_balances_compute_and_communication():
    lab, problem = Lab.load(LAB), Matmul2dProblem(256, 256, 4096, (2, 2))
    pace = balanced_flops_per_s(problem, lab.cluster(), 2.0)
    machine = mesh_machine(ideal_cluster(lab.cluster(), pace), (2, 2), ("row", "col"), "tp")
    assert bound_s(problem, machine) == pytest.approx(problem.flops / 4 / pace)


@pytest.mark.parametrize(
    ("name", "shape", "groups"),
    [("switch-4x2", (4, 2), 2), ("two-groups-8", (2, 4), 4), ("bridged-pairs-8", (4, 2), 2)],
)
def test_groups_behind_one_nic_or_uplink_share_it_in_pace_bound_and_theory(name, shape, groups):
    cluster = Lab.load(LABS / f"{name}.toml").cluster()
    problem = Matmul2dProblem(256, 256, 4096, shape, "os")
    pace = balanced_flops_per_s(problem, cluster, 1.0)
    machine = matmul_machine(ideal_cluster(cluster, pace), problem)
    slow_s = problem.traffic_bytes(0)["tp.row"] * groups / machine.rate("tp.row", "all_gather")
    assert bound_s(problem, machine) == pytest.approx(slow_s)
    assert problem.flops / 8 / pace == pytest.approx(slow_s)
    (one,) = choose_rivals(problem, cluster, ["collective"], with_baselines=False)
    theory_s, exact = one.estimate_s(problem, machine), machine.axis("tp.row").link_latency_s
    assert exact == machine.axis("tp.col").link_latency_s == 0  # without latency
    assert theory_s == pytest.approx(2 * slow_s, rel=1e-3)  # one after the other


def test_algorithms_that_cannot_use_the_mesh_are_left_out():
    lab = Lab.load(LAB)
    names = [
        case.algorithm
        for case in choose_rivals(Matmul2dProblem(64, 64, 64, (2, 2)), lab.cluster(), ["cannon", "25d"])
    ]
    assert "cannon" in names and "25d" not in names


def test_tapered_is_no_second_meshslice_and_widths_are_named():
    problem = Matmul2dProblem(256, 256, 4096, (2, 2))
    rivals = choose_rivals(
        problem,
        Lab.load(LAB).cluster(),
        ["meshslice_tapered"],
        [(1,) * 4, (1, 2, 2, 1)],
        with_baselines=False,
    )
    tapered, even, given = rivals
    assert len(set(tapered.config.slices)) > 1
    assert (even.name, given.name) == ("meshslice S=4", "meshslice 1:2x2:1")
    assert given.family == "meshslice" and given.config.slices == (1, 2, 2, 1)


def test_measured_constants_make_coarser_slices(calibrated):
    lab, problem = Lab.load(LAB).cluster(), Matmul2dProblem(96, 96, 2048, (2, 2))
    counts = [
        choose_rivals(problem, cluster, ["meshslice"], with_baselines=False)[0].config.slice_count
        for cluster in (lab, load_cluster(str(calibrated)))
    ]
    assert counts[1] < counts[0]


@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_every_pass_of_a_layer_has_its_product_and_rivals(dataflow):
    lab = Lab.load(LAB).cluster()
    passes = ("forward", "backward_data", "backward_weight")
    layer = LayerCase((96, 64, 128), (2, 2), dataflow, passes, [0.5, 0], list(PRODUCTS_2D))
    rounds = layer_rounds(layer, lab, lab)
    assert [one.ratio for one in rounds] == [0.5, None] * 3
    assert [one.pass_name for one in rounds] == [name for name in passes for _ in range(2)]
    assert rounds[0].problem == Matmul2dProblem(96, 64, 128, (2, 2), dataflow)
    for one in rounds:
        assert one.problem.flops == 2 * 96 * 64 * 128
        assert set(DTENSOR) <= set(one.rivals)
        assert all(case.payload(one.problem) for case in one.rivals)
    assert {one.problem.dataflow for one in rounds} == {"os", "ls", "rs"}
    assert len(unpaced_rounds(rounds)) == 3


def test_an_axis_of_two_gets_a_one_way_ring():
    lab = Lab.load(LABS / "torus-8x2-50mbit.toml")
    problem = Matmul2dProblem(64, 64, 256, (8, 2))
    (case,) = choose_rivals(problem, lab.cluster(), ["collective"], with_baselines=False)
    lanes = {lane.name for lane in case.program(problem).lanes}
    assert "row_back" in lanes and "col_back" not in lanes


@pytest.mark.parametrize("count", [1, 2, 5, 8, 12])
def test_turns_are_orders_in_which_neighbours_change(count):
    orders = [running_order(count, repetition) for repetition in range(6)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    if count >= 5:
        before = {order[(order.index(0) - 1) % count] for order in orders}
        assert len(before) > 1 and len({order[0] for order in orders}) > 1


def test_results_know_their_spread_and_are_ranked_by_median():
    slow, quick = result("slow", 3.0, 1.0, 2.0, 10.0, 2.5), result("quick", 2.0, error=0.5)
    assert (slow.median_s, slow.fastest_s, slow.slowest_s) == (2.5, 1.0, 10.0)
    assert slow.quartiles_s == (2.0, 3.0) and quick.quartiles_s == (2.0, 2.0)
    assert slow.over_bound == 2.5 and slow.over_theory == 2.0 and slow.over_estimate is None
    one = measured(slow, quick)
    assert [rival.name for rival in one.ranked()] == ["quick", "slow"]
    assert one.overruns == (2, 20)
    assert json.loads(json.dumps(one.to_json()))["results"][0]["runs_s"] == [3.0, 1.0, 2.0, 10.0, 2.5]


def test_the_table_is_aligned_within_100_columns():
    one = measured(
        result("meshslice_tapered 1:2:4x30:2:1:1:2:3:4:5", 1.21, 1.2345, estimate_s=1.1),
        result("DTensor", 2.0),
    )
    head, names, first, second, pace = table(one, "heading")
    assert head == "heading" and first.index("meshslice") == second.index("DTensor") == 2
    assert max(map(len, (names, first, second))) <= 100
    assert first.index("1.22 s") + len("1.22 s") == second.index("2 s") + len("2 s")
    assert "x estimate" in names and "2 of 20" in pace
    assert "WRONG by 0.5" in table(measured(result("bad", 1.0, error=0.5)), "")[2]


def test_a_rival_that_starts_from_more_stands_apart():
    """However fast it is, it leads neither the table nor the picture, and both say what it starts from."""
    apart, same = DTENSOR[1].name, DTENSOR[0].name
    one = measured(result(apart, 0.5), result(same, 3.0), result("meshslice S=4", 2.0))
    assert [times.name for times in one.ranked()] == ["meshslice S=4", same, apart]
    lines = table(one, "heading")
    assert lines[4].strip() == NOT_COMPARABLE and lines[5].strip().startswith(apart)
    svg = picture([one, one], ["first", "second"], "title")
    headings = ["first<", "second<", f"{NOT_COMPARABLE} (first)", f"{NOT_COMPARABLE} (second)"]
    places = [svg.index(f">{text}") for text in headings]
    assert places == sorted(places) and svg.index(f"{apart}<") > places[2]
    assert "what gathering them takes is not counted" in svg


def test_shapes_are_compared_with_the_first():
    comparison = ShapeComparison(
        ("4x4", "8x2"), (measured(result("a S=8", 3.0), result("b", 1.0)), measured(result("a S=4", 2.0)))
    )
    assert comparison.gains()["a"][1]["measured"] == 1.5
    assert comparison.gains()["b"][1]["measured"] is None
    assert any("1.50 on 8x2" in line for line in gain_lines(comparison))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ratio", "1,x"], "ratio 'x' is no number"),
        (["--ratio", "-1"], "a ratio of -1"),
        (["--ratio", ","], "no ratio given"),
        (["--pass", "backwards"], "there is no pass 'backwards'"),
        (["--dataflow", "ss"], "dataflow 'ss'"),
        (["--widths", "4"], "--slices takes counts"),
        (["--slices", "1:2"], "--widths takes relative widths"),
        (["--cluster", "tpu-v4-4x4"], "16 chips, the lab 4 ranks"),
        (["--out", "/"], "cannot write"),
        (["--repeat", "0"], "repeat must be 1 to 100"),
    ],
)
def test_mistakes_are_one_line(capsys, options, said):
    assert run_app(["bench", "matmul", "--lab", str(LAB), *options]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("labs", "said"),
    [
        ([LAB], "name two with --labs"),
        ([LAB, LABS / "torus-4x4-50mbit.toml"], "4, 16 ranks"),
        ([LAB, LABS / "switch-4x2.toml"], "is no 2D torus"),
    ],
)
def test_shapes_need_toruses_of_as_many_ranks(capsys, labs, said):
    assert run_app(["bench", "shapes", "--labs", ",".join(map(str, labs))]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.gloo
def test_rivals_give_the_dense_product_take_their_time_and_are_kept(
    nothing_left, tmp_path, capsys, calibrated
):
    """Paced and unpaced, of two passes, with extra widths and estimates, as the command line runs them."""
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    out, svg = tmp_path / "out.json", tmp_path / "plot.svg"
    sizes = ["--m", "96", "--n", "96", "--k", "2048", "--pass", "forward,backward_data", "--repeat", "2"]
    rivals = ["--algorithms", "meshslice,collective", "--widths", "1:2:1", "--cluster", str(calibrated)]
    written = ["--out", str(out), "--svg", str(svg), "--timeout", "90"]
    assert run_app(["bench", "matmul", "--lab", str(LAB), *sizes, *rivals, "--unpaced", *written]) == 0
    text = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["machine"]["cores"] and record["lab"]["network"]["kind"] == "torus"
    assert record["cluster"]["name"] == "measured-2x2"
    assert [(one["pass"], one["ratio"]) for one in record["rounds"]] == [
        ("forward", 1.0),
        ("backward_data", 1.0),
        ("forward", None),
        ("backward_data", None),
    ]
    for one in record["rounds"]:
        times = {rival["name"]: rival for rival in one["results"]}
        assert {"meshslice 1:2:1", "collective", *(rival.name for rival in DTENSOR)} <= set(times)
        for rival in times.values():
            assert rival["error"] == 0 and len(rival["runs_s"]) == 2
            assert rival["fastest_s"] <= rival["median_s"] <= rival["slowest_s"]
        assert times["collective"]["estimate_s"] > 0 and times[DTENSOR[0].name]["estimate_s"] is None
        assert (times["collective"]["theory_s"] is None) == (one["ratio"] is None)
        if one["ratio"]:
            # Token buckets let a burst through.
            assert all(rival["median_s"] > 0.8 * rival["bound_s"] for rival in times.values())
            assert all(report["num_products"] > 0 for report in one["pace"])
        else:
            assert one["pace"] == [None] * 4
    paced, free = (
        next(rival for rival in record["rounds"][at]["results"] if rival["name"] == "collective")
        for at in (0, 2)
    )
    assert free["median_s"] < paced["median_s"]
    assert text.count("x estimate") == 4 and "unpaced" in text and max(map(len, text.splitlines())) <= 130
    assert len(list(ElementTree.fromstring(svg.read_text()).iter())) > 60
    again = [MeasuredRound.from_json(one) for one in record["rounds"]]
    assert [one.to_json()["results"] for one in again] == [
        MeasuredRound.from_json(json.loads(json.dumps(one.to_json()))).to_json()["results"] for one in again
    ]
    assert again[0].results[0].median_s == record["rounds"][0]["results"][0]["median_s"]


@pytest.mark.parametrize(
    ("name", "bytes_per_s"),
    [("torus-2x2", 12.5e6), ("switch-4x2", 12.5e6 + 2.4e9), ("bridged-pairs-8", 46e6)],
)
def test_a_rank_of_any_lab_receives_over_all_of_its_links(name, bytes_per_s, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
    monkeypatch.syspath_prepend(str(LABS.parents[1] / "benchmarks"))
    from universal_placements import incoming_bytes_per_s

    assert incoming_bytes_per_s(Lab.load(LABS / f"{name}.toml")) == bytes_per_s
