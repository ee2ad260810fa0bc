"""The graph of a layer as SVG: nodes top to bottom, edges that skip nodes at the left, weights at the right.

Laid on ranks, each edge and each weight is cut as it lies there, the part of the first rank dark; between nodes
stands what is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from meshweave.base.units import format_bytes
from meshweave.describe.model.layer import LayerGraph
from meshweave.describe.model.nodes import Features, LayerNode, NodeWeight
from meshweave.report.svg import GREY, INK, LETTER, chart_frame, chart_heading

if TYPE_CHECKING:
    from meshweave.algorithms.block.laid_out import LaidLayer, Moved, Shards

_TOP, _BOX, _GAP, _CHIP, _LEFT = 76, 26, 14, 20, 110
_WIDTH, _NODE, _LARGEST = 980, 250, 180
_EDGE_W, _MOST_LINES = 44, 16
_COLOURS = {"attention": "#3b6fb6", "feed_forward": "#2a9d76"}
_WEIGHT, _MOVE, _EDGE = "#d9822b", "#a8324a", "#57606a"


def draw_layer(layer: LayerGraph, title: str, laid: LaidLayer | None = None) -> str:
    """Return the SVG picture of a layer's graph.

    The width of a weight is in proportion to its columns.

    Args:
        laid: the layer on ranks (`laid_out`): how each edge and weight is sharded, and what ranks exchange, are
            drawn too. None for the graph alone.
    """
    rows = [_Row(node, laid) for node in layer.nodes]
    y = _TOP
    for row in rows:
        y = row.put(y)
    places = {layer.input: _TOP - _BOX - _GAP, **{row.node.out: row.y for row in rows}}
    bottoms = {layer.input: _TOP - _GAP - 8, **{row.node.out: row.y + _BOX for row in rows}}
    drawn = [chart_heading(title), *_input(layer, laid)]
    before = layer.input
    for row in rows:
        drawn += _edges(row.node, places, bottoms, before)
        before = row.node.out
    widest = max((_columns(w) for node in layer.nodes for w in node.parameters), default=1)
    for row in rows:
        drawn += _node(row.node, row.y, widest, laid)
        drawn += row.chips()
    keys = {**_COLOURS, "weights": _WEIGHT} | ({"moves": _MOVE} if laid else {})
    drawn += [
        f'<rect x="{16 + 120 * i}" y="{y}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{34 + 120 * i}" y="{y + 10}">{name.replace("_", "-")}</text>'
        for i, (name, colour) in enumerate(keys.items())
    ]
    if laid:
        drawn.append(f'<text x="{16 + 120 * len(keys)}" y="{y + 10}">dark: the part of the first rank</text>')
    for line in _whole(laid):
        y += 18
        drawn.append(f'<text x="16" y="{y + 12}" fill="{GREY}">{escape(line)}</text>')
    return chart_frame(title, _WIDTH, y + 24, drawn)


class _Row:
    """A node with what ranks exchange before, within and after it; `y` is the top of its box once it is put."""

    def __init__(self, node: LayerNode, laid: LaidLayer | None) -> None:
        self.node, self.y = node, 0
        known = (laid.before, laid.within, laid.after) if laid else ({}, {}, {})
        several = bool(laid and len(laid.axes) > 1)
        self._texts = [[_moved(each, several) for each in of.get(node.out, ())] for of in known]
        self._places: list[tuple[int, str]] = []

    def put(self, y: int) -> int:
        """Place the node from `y` (pixels) downwards, and return the y at which the next one begins."""
        before, within, after = self._texts
        for text in before:
            self._places.append((y, text))
            y += _CHIP
        self.y, y = y, y + _BOX
        for text in within:
            self._places.append((y + 1, f"in it: {text}"))
            y += _CHIP
        for text in after:
            y += _GAP // 2
            self._places.append((y, text))
            y += _CHIP - _GAP // 2
        return y + _GAP

    def chips(self) -> Iterator[str]:
        """Yield the SVG of what ranks exchange, each text in a frame at its place; `put` comes before."""
        for y, text in self._places:
            wide = LETTER * len(text) + 14
            x = _LEFT + _NODE / 2 - wide / 2
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_CHIP - 4}" rx="8" fill="white" '
                f'stroke="{_MOVE}"/><text x="{_LEFT + _NODE / 2}" y="{y + 12}" text-anchor="middle" '
                f'font-size="11" fill="{_MOVE}">{escape(text)}</text>'
            )


def _moved(moved: Moved, with_axis: bool) -> str:
    many = f"{moved.times} x " if moved.times > 1 else ""
    axis = f" along {moved.axis}" if with_axis else ""
    return f"{many}{moved.kind}{axis}, {moved.num_ranks} ranks: {format_bytes(moved.num_bytes)}"


def _whole(laid: LaidLayer | None) -> Iterable[str]:
    """Return lines on what forward and backward move together: how many of each kind, and their bytes."""
    if laid is None:
        return ()
    kinds: dict[str, tuple[int, int]] = {}
    for each in laid.moved:
        count, size = kinds.get(each.kind, (0, 0))
        kinds[each.kind] = count + each.times, size + each.times * each.num_bytes
    if not kinds:
        return ("nothing moves, forward or backward",)
    words = (f"{count} x {kind} ({format_bytes(size)})" for kind, (count, size) in kinds.items())
    return (f"forward and backward together: {', '.join(words)}",)


def _input(layer: LayerGraph, laid: LaidLayer | None) -> Iterator[str]:
    x, y = _LEFT + _NODE / 2, _TOP - _GAP - 12
    text = f"{layer.input}: {_features(layer.features[layer.input])}"
    yield f'<text x="{x}" y="{y}" text-anchor="middle" fill="{GREY}">{escape(text)}</text>'
    if laid:
        yield from _edge_shards(layer.input, laid, y - 15)


def _edges(node: LayerNode, places: dict[str, int], bottoms: dict[str, int], before: str) -> Iterator[str]:
    """Yield a line from each maker to the node: straight from the row above, else around at the left."""
    top = places[node.out]
    for edge in node.ins:
        begin = bottoms[edge]
        if edge == before:
            x = _LEFT + _NODE / 2
            yield f'<path d="M{x} {begin} V{top}" stroke="{INK}" fill="none"/>'
            yield f'<path d="M{x - 4} {top - 6} L{x} {top} L{x + 4} {top - 6}" stroke="{INK}" fill="none"/>'
            continue
        out = _LEFT - 18 - min(70.0, (top - places[edge]) / 40 * 7)
        middle, start = top + _BOX / 2, begin - _BOX / 2 if places[edge] >= _TOP else begin - 8
        yield (
            f'<path d="M{_LEFT} {start} H{out + 10} Q{out} {start} {out} {start + 10} V{middle - 10} '
            f'Q{out} {middle} {out + 10} {middle} H{_LEFT}" stroke="{GREY}" fill="none"/>'
            f'<path d="M{_LEFT - 6} {middle - 4} L{_LEFT} {middle} L{_LEFT - 6} {middle + 4}" stroke="{GREY}" '
            'fill="none"/>'
        )


def _node(node: LayerNode, y: int, widest: int, laid: LaidLayer | None) -> Iterator[str]:
    name, made = type(node).__name__, f"{node.out}: {_features(node.makes)}"
    words = f"{name} of {', '.join(node.ins)} makes {made}"
    yield (
        f'<rect x="{_LEFT}" y="{y}" width="{_NODE}" height="{_BOX}" rx="4" fill="{_COLOURS[node.group]}">'
        f"<title>{escape(words)}</title></rect>"
        f'<text x="{_LEFT + 10}" y="{y + 17}" fill="white" font-weight="bold">{escape(name)}</text>'
        f'<text x="{_LEFT + _NODE - 10}" y="{y + 17}" fill="white" text-anchor="end">{escape(made)}</text>'
    )
    x = _LEFT + _NODE + 20.0
    if laid:
        yield from _edge_shards(node.out, laid, y + 3)
        x += _EDGE_W + 24
    matrices = [weight for weight in node.parameters if weight.kind not in ("norm", "bias")]
    for weight in matrices:
        wide = max(6.0, _LARGEST * _columns(weight) / widest)
        shards = laid.weights[weight.name] if laid else None
        yield from _cut_box(x, y + 3, wide, _BOX - 6, shards, _WEIGHT, _weight(weight, shards))
        text = _weight(weight, shards)
        if x + wide + 8 + LETTER * len(text) > _WIDTH:
            text = weight.name
        yield f'<text x="{x + wide + 8:.1f}" y="{y + 17}">{escape(text)}</text>'
        x += wide + 8 + LETTER * len(text) + 16
    small = ", ".join(weight.name for weight in node.parameters if weight not in matrices)
    if small:
        yield f'<text x="{x:.1f}" y="{y + 17}" fill="{GREY}">{escape(small)}</text>'


def _edge_shards(edge: str, laid: LaidLayer, y: float) -> Iterator[str]:
    shards = laid.edges[edge]
    tokens, features = shards.sides
    text = f"{edge}: {_parts(tokens, 'tokens')} and {_parts(features, 'features')}"
    yield from _cut_box(_LEFT + _NODE + 20, y, _EDGE_W, _BOX - 6, shards, _EDGE, text)


def _parts(count: int, what: str) -> str:
    return f"{what} in {count} parts" if count > 1 else f"all {what}"


def _cut_box(
    x: float, y: float, wide: float, high: float, shards: Shards | None, colour: str, words: str
) -> Iterator[str]:
    """Yield a box, rows down and columns across, cut into its shards; that of the first rank is dark."""
    whole = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    if shards is None:
        yield f'<rect {whole} fill="{colour}" fill-opacity="0.75"><title>{escape(words)}</title></rect>'
        return
    yield f'<rect {whole} fill="{colour}" fill-opacity="0.25"><title>{escape(words)}</title></rect>'
    rows, columns = (1, *shards.sides)[-2:]
    rows *= shards.experts
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide / columns:.1f}" height="{high / rows:.1f}" '
        f'fill="{colour}" fill-opacity="0.85"><title>{escape(words)}</title></rect>'
    )
    lines = "".join(
        f"M{x + wide * i / columns:.1f} {y:.1f} v{high:.1f}" for i in range(1, _lines(columns))
    ) + "".join(f"M{x:.1f} {y + high * i / rows:.1f} h{wide:.1f}" for i in range(1, _lines(rows)))
    if lines:
        yield f'<path d="{lines}" stroke="white" fill="none"/>'


def _lines(parts: int) -> int:
    """Return how many parts are told apart by lines: none where they would be finer than can be seen."""
    return parts if parts <= _MOST_LINES else 1


def _columns(weight: NodeWeight) -> int:
    return weight.sides[-1].size


def _weight(weight: NodeWeight, shards: Shards | None) -> str:
    many = f"{weight.experts} x " if weight.experts > 1 else ""
    sides = " x ".join(str(side.size) for side in weight.sides)
    share = f", 1/{shards.count} a rank" if shards and shards.count > 1 else ""
    return f"{weight.name} {many}{sides}, {count_text(weight.size)}{share}"


def count_text(parameters: int) -> str:
    """Return a number of parameters as text in millions or billions: `124 M`, `1.3 B`."""
    return f"{parameters / 1e6:.3g} M" if parameters < 999.5e6 else f"{parameters / 1e9:.3g} B"


def _features(features: Features) -> str:
    size = f"{features.count} x {features.unit}" if features.unit > 1 else f"{features.count}"
    return f"{features.dim} {size}"
