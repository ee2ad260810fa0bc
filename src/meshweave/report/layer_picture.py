"""The graph of a layer as SVG: nodes top to bottom, edges that skip nodes at the left, weights at the right."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import Features, LayerNode, NodeWeight
from meshweave.report.svg import GREY, INK, LETTER, chart_frame, chart_heading

_ROW, _TOP, _BOX, _LEFT = 40, 60, 26, 110
_WIDTH, _NODE, _LARGEST = 960, 250, 200
_COLOURS = {"attention": "#3b6fb6", "feed_forward": "#2a9d76"}
_WEIGHT = "#d9822b"


def draw_layer(layer: LayerGraph, title: str) -> str:
    """Return the picture. A weight is as wide as its columns and as dark as it has rows, beside the widest."""
    places = {layer.input: _TOP - _ROW, **{n.out: _TOP + _ROW * i for i, n in enumerate(layer.nodes)}}
    drawn = [chart_heading(title), *_input(layer)]
    for node in layer.nodes:
        drawn += _edges(node, places)
    widest = max((_columns(w) for node in layer.nodes for w in node.parameters), default=1)
    for node in layer.nodes:
        drawn += _node(node, places[node.out], widest)
    height = _TOP + _ROW * len(layer.nodes) + 24
    keys = "".join(
        f'<rect x="{16 + 130 * i}" y="{height - 18}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{34 + 130 * i}" y="{height - 8}">{name.replace("_", "-")}</text>'
        for i, (name, colour) in enumerate({**_COLOURS, "weights": _WEIGHT}.items())
    )
    return chart_frame(title, _WIDTH, height, (*drawn, keys))


def _input(layer: LayerGraph) -> Iterator[str]:
    x, y = _LEFT + _NODE / 2, _TOP - _ROW + 14
    text = f"{layer.input}: {_features(layer.features[layer.input])}"
    yield f'<text x="{x}" y="{y}" text-anchor="middle" fill="{GREY}">{escape(text)}</text>'


def _edges(node: LayerNode, places: dict[str, int]) -> Iterator[str]:
    """Yield a line from each maker to the node: straight from the row above, else around at the left."""
    top = places[node.out]
    for edge in node.ins:
        begin = places[edge] + (_BOX if places[edge] >= _TOP else 18)
        if places[edge] == top - _ROW:
            x = _LEFT + _NODE / 2
            yield f'<path d="M{x} {begin} V{top}" stroke="{INK}" fill="none"/>'
            yield f'<path d="M{x - 4} {top - 6} L{x} {top} L{x + 4} {top - 6}" stroke="{INK}" fill="none"/>'
            continue
        out = _LEFT - 18 - min(70.0, (top - places[edge]) / _ROW * 7)
        middle, start = top + _BOX / 2, begin - _BOX / 2 if places[edge] >= _TOP else begin - 8
        yield (
            f'<path d="M{_LEFT} {start} H{out + 10} Q{out} {start} {out} {start + 10} V{middle - 10} '
            f'Q{out} {middle} {out + 10} {middle} H{_LEFT}" stroke="{GREY}" fill="none"/>'
            f'<path d="M{_LEFT - 6} {middle - 4} L{_LEFT} {middle} L{_LEFT - 6} {middle + 4}" stroke="{GREY}" '
            'fill="none"/>'
        )


def _node(node: LayerNode, y: int, widest: int) -> Iterator[str]:
    name, made = type(node).__name__, f"{node.out}: {_features(node.makes)}"
    words = f"{name} of {', '.join(node.ins)} makes {made}"
    yield (
        f'<rect x="{_LEFT}" y="{y}" width="{_NODE}" height="{_BOX}" rx="4" fill="{_COLOURS[node.group]}">'
        f"<title>{escape(words)}</title></rect>"
        f'<text x="{_LEFT + 10}" y="{y + 17}" fill="white" font-weight="bold">{escape(name)}</text>'
        f'<text x="{_LEFT + _NODE - 10}" y="{y + 17}" fill="white" text-anchor="end">{escape(made)}</text>'
    )
    x = _LEFT + _NODE + 20.0
    matrices = [weight for weight in node.parameters if weight.kind not in ("norm", "bias")]
    for weight in matrices:
        wide = max(6.0, _LARGEST * _columns(weight) / widest)
        yield (
            f'<rect x="{x:.1f}" y="{y + 3}" width="{wide:.1f}" height="{_BOX - 6}" fill="{_WEIGHT}" '
            f'fill-opacity="0.75"><title>{escape(_weight(weight))}</title></rect>'
            f'<text x="{x + wide + 8:.1f}" y="{y + 17}">{escape(_weight(weight))}</text>'
        )
        x += wide + 8 + LETTER * len(_weight(weight)) + 16
    small = ", ".join(weight.name for weight in node.parameters if weight not in matrices)
    if small:
        yield f'<text x="{x:.1f}" y="{y + 17}" fill="{GREY}">{escape(small)}</text>'


def _columns(weight: NodeWeight) -> int:
    return weight.sides[-1].size


def _weight(weight: NodeWeight) -> str:
    many = f"{weight.experts} x " if weight.experts > 1 else ""
    sides = " x ".join(str(side.size) for side in weight.sides)
    return f"{weight.name} {many}{sides}, {count_text(weight.size)}"


def count_text(parameters: int) -> str:
    """Return a number of parameters in millions, or in billions."""
    return f"{parameters / 1e6:.3g} M" if parameters < 1e9 else f"{parameters / 1e9:.3g} B"


def _features(features: Features) -> str:
    size = f"{features.count} x {features.unit}" if features.unit > 1 else f"{features.count}"
    return f"{features.dim} {size}"
