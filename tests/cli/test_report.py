"""The page that `meshweave plan --products --report` writes: complete, self-contained, well-formed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshweave.algorithms.matmul2d import Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.cli.app import run_app
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave.report.chart import Series, line_chart
from meshweave.tune import plan_model
from meshweave.tune.explain import mesh_curve, same_local_product, slice_curve, timelines
from meshweave.tune.plan import Plan

POD = load_cluster("tpu-v4-pod:16")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_model(load_model("gpt3"), POD, Workload(8, 2048), ("meshslice", "collective"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    args = ["--algorithms", "meshslice,collective", "--report", str(path)]
    assert run_app(["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", *args]) == 0
    return path.read_text()


class Nesting(HTMLParser):
    """Checks that tags close in the order in which they opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []
    assert not {"link", "img", "iframe"} & set(nesting.seen)
    assert set(re.findall(r"https?://[^\"' <)]*", page)) == {"http://www.w3.org/2000/svg"} | {
        url for url in re.findall(r"https?://[^\"' <)]*", page) if url in POD.source
    }
    assert not re.search(r"(src|href)=|url\(|@import", page)
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(picture)


def test_the_page_says_all_there_is(page: str) -> None:
    for heading in ("Algorithms", "Layers", "Memory", "Timelines", "Mesh shapes", "Slice counts", "sources"):
        assert re.search(f"<h2>[^<]*{heading}", page), heading
    for word in (
        "launch",
        "transfer",
        "sync",
        "exposed",
        "peak memory",
        "stays put",
        "on the planned meshes",
    ):
        assert word in page, word
    assert "MeshSlice: ff1 forward" in page and "Collective: ff1 forward" in page
    assert "backward weight" in page
    assert "NaN" not in page and "nan" not in re.findall(r'[ xy12]="(nan)', page)


def test_a_plan_in_text_shows_the_split_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--algorithms", "meshslice,collective"]
    assert run_app(["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", *args]) == 0
    out = capsys.readouterr().out
    for word in ("launch", "transfer", "sync", "memory per chip: weights", "recomputation"):
        assert word in out


@pytest.mark.parametrize("option", ["--report", "--out"])
@pytest.mark.parametrize("name", ["nowhere/page.html", "."])
def test_what_cannot_be_written_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, name: str
) -> None:
    other = {"--report": "--out", "--out": "--report"}[option]
    args = [option, str(tmp_path / name), other, str(tmp_path / "other")]
    assert run_app(["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", *args]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_curves_hold_the_chosen_points(plan: Plan) -> None:
    """The curves are those the plan was chosen from: at its mesh and slices they have its times."""
    meshes = mesh_curve(plan, POD)
    for candidate in plan.candidates:
        curve = dict(meshes[candidate.algorithm])
        assert set(curve) == {(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)}
        assert curve[candidate.mesh_shape] == pytest.approx(candidate.block_s, rel=1e-9)
        assert (
            min(seconds for shape, seconds in curve.items() if min(shape) > 1) == curve[candidate.mesh_shape]
        )
    best = plan.best
    slices = slice_curve(plan, best, POD)
    for layer in best.layers:
        for item in layer.passes:
            points = dict(slices[layer.name][item.name])
            assert points[item.config.slice_count] == pytest.approx(item.total_s, rel=1e-9)
            assert min(points.values()) == points[item.config.slice_count]


def test_timelines_take_as_long_as_planned(plan: Plan) -> None:
    """At most 64 ranks: the planned mesh itself, so the simulator agrees with the estimate but for contention."""
    layer = plan.best.layers[2]
    (line,) = timelines(plan, POD, plan.best, [layer])
    assert "4x4 mesh" in line.title
    assert line.trace.duration_s == pytest.approx(layer.passes[0].total_s, rel=0.02)


@pytest.mark.parametrize("name", ["collective", "meshslice"])
@pytest.mark.parametrize("dataflow", ["os", "ls", "rs"])
def test_a_reduced_mesh_keeps_the_local_product(name: str, dataflow: str) -> None:
    problem = Matmul2dProblem(1024, 2048, 512, (8, 16), dataflow)  # type: ignore[arg-type]
    small = same_local_product(problem, (2, 8), PRODUCTS_2D[name].operand_placements(problem))
    assert small.mesh_shape == (2, 8)
    assert small.flops // small.num_chips == problem.flops // problem.num_chips
    assert small.sliced_size == problem.sliced_size


def test_a_chart_without_points_is_empty_and_one_point_is_drawn() -> None:
    assert line_chart("t", [], "x", "y") == ""
    picture = line_chart("a < b", [Series("one", ((4.0, 2.5),), (0,))], "x", "time (ms)", x_log=True)
    ElementTree.fromstring(picture)
    assert "a &lt; b" in picture and "time (ms)" in picture


@pytest.mark.parametrize("spread", [1.0, 7.0, 50.0, 1e5])
def test_a_chart_keeps_its_points_inside(spread: float) -> None:
    series = [Series("line", ((1.0, 3e-4), (2.0, 3e-4 * spread), (8.0, 2e-4 * spread + 1e-4)))]
    root = ElementTree.fromstring(line_chart("t", series, "x", "y", x_log=True))
    (line,) = [element for element in root if element.tag.endswith("polyline")]
    for x, y in (map(float, pair.split(",")) for pair in line.attrib["points"].split()):
        assert 60 < x < 960 and 30 <= y <= 330
