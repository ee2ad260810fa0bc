"""Runs drawn under each other: to scale, inside the picture, waiting set apart, idle left open."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.program.parse import parse
from meshweave.report.png import require_png, to_png
from meshweave.report.simulation_picture import draw_rank_timelines
from meshweave.simulate.engine import simulate
from meshweave.simulate.rank_timeline import RankTimeline, Stretch, rank_timeline

SVG = "{http://www.w3.org/2000/svg}"
MS = 10**9
TIMELINES = [
    RankTimeline(
        "slow & <sure>",
        "S=2",
        (
            ("compute", (Stretch("compute", 4 * MS, 8 * MS, "matmul 0"),)),
            (
                "row",
                (Stretch("wait", 0, MS, "gather 0 waits"), Stretch("communicate", MS, 4 * MS, "gather 0")),
            ),
        ),
        8 * MS,
    ),
    RankTimeline("fast", "", (("compute", (Stretch("compute", 0, 2 * MS, "matmul 1"),)),), 2 * MS),
]


def boxes(svg: ElementTree.Element) -> dict[str, ElementTree.Element]:
    found = {}
    for box in svg.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None:
            found[str(title.text).rpartition(":")[0]] = box
    return found


def drawn(timelines: list[RankTimeline], **options: object) -> ElementTree.Element:
    return ElementTree.fromstring(draw_rank_timelines("a title", timelines, **options))  # type: ignore[arg-type]


def test_all_timelines_share_one_scale_and_begin() -> None:
    found = boxes(drawn(TIMELINES))
    widths = {name: float(box.attrib["width"]) for name, box in found.items()}
    assert widths["matmul 0"] == pytest.approx(2 * widths["matmul 1"], rel=1e-3)
    assert widths["gather 0"] == pytest.approx(3 * widths["gather 0 waits"], rel=1e-3)
    at = {name: float(box.attrib["x"]) for name, box in found.items()}
    assert at["matmul 1"] == at["gather 0 waits"]
    assert at["matmul 0"] == pytest.approx(at["gather 0"] + widths["gather 0"], abs=0.1)
    assert found["gather 0"].attrib["fill"] != found["gather 0 waits"].attrib["fill"]


def test_everything_lies_inside_and_the_times_stand_clear_of_the_lanes() -> None:
    svg = drawn(TIMELINES, subtitle="below it")
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    texts = {"".join(text.itertext()): text for text in svg.iter(f"{SVG}text")}
    assert {"slow & <sure>S=2", "between rows", "compute", "below it", "8.00 ms", "2.00 ms"} <= set(texts)
    for text in texts.values():
        assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height
    ends = [float(box.attrib["x"]) + float(box.attrib["width"]) for box in boxes(svg).values()]
    assert max(ends) < float(texts["8.00 ms"].attrib["x"]) - 60


def test_it_brings_its_own_background() -> None:
    """So that text stays dark on light wherever it is shown."""
    first = next(drawn(TIMELINES).iter(f"{SVG}rect"))
    assert first.attrib["fill"] == "white" and float(first.attrib["width"]) == 899


def test_the_legend_has_what_occurs() -> None:
    texts = ["".join(text.itertext()) for text in drawn(TIMELINES).iter(f"{SVG}text")]
    assert {"product", "communication", "waiting for a partner", "idle"} <= set(texts)
    assert "copy or add" not in texts


def test_thousands_of_small_stretches_become_few() -> None:
    stretches = tuple(Stretch("compute", n * 1000, n * 1000 + 900, f"matmul {n}") for n in range(50_000))
    text = draw_rank_timelines("many", [RankTimeline("many", "", (("compute", stretches),), 50_000_000)])
    assert text.count("<rect") < 4000


def test_of_small_stretches_the_kind_that_lasts_longest_is_shown() -> None:
    stretches = tuple(
        Stretch(kind, n * 10 + part, n * 10 + part + took, kind)
        for n in range(10)
        for part, took, kind in ((0, 6, "move"), (6, 4, "compute"))
    )
    svg = drawn([RankTimeline("mixed", "", (("x", stretches),), MS)])
    (box,) = boxes(svg).values()
    assert box.attrib["fill"] == "#8a97a6" and "and 19 more" in str(box.findtext(f"{SVG}title"))


def test_nothing_to_draw_is_no_picture() -> None:
    assert draw_rank_timelines("none", []) == ""
    assert drawn([RankTimeline("idle", "", (), 0)]) is not None


def test_a_rank_of_a_simulation() -> None:
    """Lanes of axes in the order of the axes; what a rank waits for a late partner is told apart."""
    problem = Matmul2dProblem(512, 512, 512, (2, 2), "os", "float32")
    for name in ("wang", "meshslice"):
        made = PRODUCTS_2D[name].program(problem, Matmul2dConfig((1,) * 2))
        run = simulate(made, Machine.of(load_cluster("tpu-v4-pod:4"), made))
        timeline = rank_timeline(run, 3, name)
        assert [lane for lane, _ in timeline.lanes] == ["compute", "row", "col"]
        assert (
            timeline.duration_ps == run.duration_ps == max(p.end_ps for _, ps in timeline.lanes for p in ps)
        )
    made = parse("""
program("late")
tp = mesh((2,), ("x",))
s = scratch((1000, 1000), "float32", on=tp, slots=3)
one = lane()
with tp:
    if rank == 1:
        matmul(s, s(1), s(2), lane=one)
    if rank == 1:
        send(s, peer=0, tag=0, lane=one)
    if rank == 0:
        recv(s, peer=1, tag=0, lane=one)
""")
    run = simulate(made, Machine.of(load_cluster("local-cpu:2"), made))
    (lane,) = rank_timeline(run, 0, "late").lanes
    assert [stretch.activity for stretch in lane[1]] == ["wait", "communicate"]
    assert lane[1][0].end_ps == next(iter(run.spans(1))).end_ps


def test_as_png() -> None:
    pytest.importorskip("resvg_py", reason="resvg-py is not installed: no PNG pictures here")
    require_png()
    assert to_png(draw_rank_timelines("a title", TIMELINES)).startswith(b"\x89PNG")
