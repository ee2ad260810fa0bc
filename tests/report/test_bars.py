"""Bars as a picture: well-formed, to scale, one colour per family."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from meshweave.report.bars import Bar, Group, bar_chart

SVG = "{http://www.w3.org/2000/svg}"
GROUPS = [
    Group(
        "ratio 0.5 & <first>",
        (
            Bar("meshslice S=8", 1.2, 1.1, 1.5, "1.20 x", (1.1, None), "meshslice"),
            Bar("DTensor", 3.0, 3.0, 3.0, "3.00 x"),
        ),
    ),
    Group("ratio 1", (Bar("meshslice S=4", 1.5, 1.4, 1.6, "1.50 x", (1.25, 1.3), "meshslice"),)),
]


def chart() -> ElementTree.Element:
    text = bar_chart("rivals", GROUPS, "time over bound", mark_names=("theory", "estimate"), line_at=1.0)
    return ElementTree.fromstring(text)


def boxes(svg: ElementTree.Element) -> dict[str, ElementTree.Element]:
    found = {}
    for box in svg.findall(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None:
            found[str(title.text).partition(":")[0]] = box
    return found


def test_bars_are_to_scale_and_families_share_a_colour() -> None:
    bars = boxes(chart())
    widths = {name: float(box.attrib["width"]) for name, box in bars.items()}
    assert widths["DTensor"] / widths["meshslice S=4"] == pytest.approx(2.0, rel=1e-2)
    assert bars["meshslice S=8"].attrib["fill"] == bars["meshslice S=4"].attrib["fill"]
    assert bars["meshslice S=8"].attrib["fill"] != bars["DTensor"].attrib["fill"]


def test_marks_that_are_known_are_drawn_with_their_value() -> None:
    titles = [str(title.text) for title in chart().iter(f"{SVG}title")]
    assert "meshslice S=8, theory: 1.10" in titles and "meshslice S=4, estimate: 1.30" in titles
    assert not any("S=8, estimate" in title or "DTensor, " in title for title in titles)


@pytest.mark.parametrize("line_at", [1.0, 7.0])
def test_everything_lies_inside_the_picture(line_at: float) -> None:
    svg = ElementTree.fromstring(bar_chart("rivals", GROUPS, "time over bound", line_at=line_at))
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    for text in svg.findall(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height
    assert "ratio 0.5 & <first>" in [text.text for text in svg.iter(f"{SVG}text")]
    lines = [float(each.attrib["x1"]) for each in svg.iter() if "stroke-dasharray" in each.attrib]
    assert lines and all(0 <= x <= width for x in lines)


def test_nothing_to_draw_is_no_picture() -> None:
    assert bar_chart("none", [], "x") == bar_chart("none", [Group("empty", ())], "x") == ""
