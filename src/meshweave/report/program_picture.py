"""A program as SVG: where its tensors lie on ranks, and what a rank does in the order of its program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import islice

from meshweave.base.units import format_bytes
from meshweave.ir.program import Program
from meshweave.ir.program.ops import COMPUTE_KINDS, Collective, Op
from meshweave.ir.program.written import Buffer
from meshweave.report.chart import COLOURS
from meshweave.report.svg import GREY, chart_frame, chart_heading

MAX_TENSORS, MAX_OPS, MAX_MOVES = 8, 48, 8
_MOST_RANKS = 64
"""Shards of tensors are drawn up to so many ranks."""
_WIDTH, _SHARD_W, _SHARD_H = 960, 150, 96
_OP, _LANE = 15, 22
_ACTIVITY = {"compute": "#3b6fb6", "move": "#8a97a6", "communicate": "#d9822b"}


@dataclass(frozen=True)
class _DrawnOp:
    lane: str
    activity: str
    text: str
    moved: tuple[str, int]
    """Its description without its number ("put with rank 3"), and the bytes of `_words`."""


def draw_program(program: Program, rank: int | None = None) -> str:
    """Return the SVG picture of a program: how its tensors are sharded, and the ops of one rank in order.

    Drawn are at most `MAX_TENSORS` tensors, of programs of up to 64 ranks, and the first `MAX_OPS` ops.

    Args:
        rank: the rank whose ops are drawn; None for the program's first.
    """
    own = program.ranks[0] if rank is None else rank
    drawn, y = [chart_heading(f"{program.name}: {len(program.ranks)} ranks")], 40.0
    laid = [buffer for buffer in program.buffers if buffer.tensor and buffer.layout][:MAX_TENSORS]
    if len(program.ranks) <= _MOST_RANKS and laid:
        for number, buffer in enumerate(laid):
            column, row = number % 5, number // 5
            at = (16 + column * (_SHARD_W + 38.0), y + row * (_SHARD_H + 54.0))
            drawn += _shards(program, buffer, *at)
        y += (1 + (len(laid) - 1) // 5) * (_SHARD_H + 54)
    ops = [*islice(_ops(program, own), MAX_OPS + 1)]
    lanes = list(dict.fromkeys(op.lane for op in ops))
    left = 16 + 7 * max(map(len, lanes), default=0) + 8
    more = f"; the first {MAX_OPS}" if len(ops) > MAX_OPS else ""
    drawn.append(f'<text x="16" y="{y + 16:.0f}" font-weight="bold">rank {own}, op by op{more}</text>')
    y += 26
    for number, lane in enumerate(lanes):
        at_y = y + _LANE * number
        drawn.append(f'<text x="{left - 8}" y="{at_y + 13:.0f}" text-anchor="end">{escape(lane)}</text>')
        drawn.append(
            f'<rect x="{left}" y="{at_y:.0f}" width="{min(len(ops), MAX_OPS) * _OP}" height="{_LANE - 4}" '
            'fill="#eef1f4"/>'
        )
    for number, op in enumerate(ops[:MAX_OPS]):
        drawn.append(
            f'<rect x="{left + number * _OP}" y="{y + _LANE * lanes.index(op.lane):.0f}" width="{_OP - 1}" '
            f'height="{_LANE - 4}" fill="{_ACTIVITY[op.activity]}"><title>{escape(op.text)}</title></rect>'
        )
    y += _LANE * len(lanes) + 22
    for number, (name, colour) in enumerate(
        {"product or call": "compute", "copy or add": "move", "communication": "communicate"}.items()
    ):
        drawn.append(
            f'<rect x="{16 + 140 * number}" y="{y - 10:.0f}" width="12" height="12" fill="{_ACTIVITY[colour]}"/>'
            f'<text x="{34 + 140 * number}" y="{y:.0f}">{name}</text>'
        )
    for line in _moves(ops[:MAX_OPS]):
        y += 18
        drawn.append(f'<text x="16" y="{y + 6:.0f}">{escape(line)}</text>')
    return chart_frame(program.name, _WIDTH, int(y + 16), drawn)


def _moves(ops: list[_DrawnOp]) -> list[str]:
    """Return what the drawn ops move between ranks, alike ones in one line."""
    alike: dict[str, list[int]] = {}
    for op in ops:
        if op.activity == "communicate":
            alike.setdefault(op.moved[0], []).append(op.moved[1])
    lines = [f"{len(each)} x {words}, {format_bytes(sum(each))} in all" for words, each in alike.items()]
    return [*lines[:MAX_MOVES], *([f"and {len(lines) - MAX_MOVES} more"] if len(lines) > MAX_MOVES else [])]


def _shards(program: Program, buffer: Buffer, x: float, y: float) -> Iterator[str]:
    """Yield a tensor cut into its shards, along two dims of which those that are cut come first."""
    assert buffer.tensor is not None and buffer.layout is not None
    shape = program.tensor_of[buffer.tensor].shape
    held: dict[tuple[tuple[tuple[int, int], ...], ...], list[int]] = {}
    for rank in buffer.layout.mesh.ranks:
        held.setdefault(buffer.layout.intervals(shape, rank), []).append(rank)
    cut = [dim for dim in range(len(shape)) if len({box[dim] for box in held}) > 1]
    dims = sorted((cut + [dim for dim in reversed(range(len(shape))) if dim not in cut])[:2])
    if not dims:
        return
    rows, cols = (dims[0], dims[1]) if len(dims) == 2 else (None, dims[0])
    tall = _SHARD_H if rows is not None else 24
    sizes = " x ".join(map(str, shape))
    yield (
        f'<text x="{x:.0f}" y="{y + 10:.0f}"><tspan font-weight="bold">{escape(buffer.name)}</tspan>'
        f'<tspan fill="{GREY}" dx="6">{sizes}</tspan></text>'
    )
    partial = ", partial sums" if buffer.layout.partial_axes else ""
    for number, (box, ranks) in enumerate(held.items()):
        text = f"{buffer.name}: ranks {_ranks(ranks)}{partial}"
        first = True
        for top, bottom in box[rows] if rows is not None else ((0, 1),):
            for begin, end in box[cols]:
                whole_h = shape[rows] if rows is not None else 1
                x0, wide = x + _SHARD_W * begin / shape[cols], _SHARD_W * (end - begin) / shape[cols]
                y0, high = y + 18 + tall * top / whole_h, tall * (bottom - top) / whole_h
                yield (
                    f'<rect x="{x0:.1f}" y="{y0:.1f}" width="{wide:.1f}" height="{high:.1f}" '
                    f'fill="{COLOURS[number % len(COLOURS)]}" fill-opacity="0.25" stroke="white">'
                    f"<title>{escape(text)}</title></rect>"
                )
                label = _ranks(ranks)
                if first and wide > 6.6 * len(label) and high > 12:
                    yield (
                        f'<text x="{x0 + wide / 2:.1f}" y="{y0 + high / 2 + 4:.1f}" text-anchor="middle" '
                        f'font-size="11">{label}</text>'
                    )
                first = False


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]},{ranks[1]},.. ({len(ranks)})"


def _ops(program: Program, rank: int) -> Iterator[_DrawnOp]:
    for number, (op, env) in enumerate(program.unbound_ops_on_rank(rank)):
        bound = program.resolve(op, env, rank)
        activity = "compute" if op.kind in ("matmul", "call") else "move"
        if op.kind not in COMPUTE_KINDS:
            activity = "communicate"
        words, written = _words(program, bound, rank)
        yield _DrawnOp(op.lane, activity, f"{number}: {words}, {format_bytes(written)}", (words, written))


def _words(program: Program, op: Op, rank: int) -> tuple[str, int]:
    """Return an op in words (name and kind, with whom, what it writes), and the bytes it writes on this rank.

    Of a send, put or accumulate, which write elsewhere, they are the bytes that leave.
    """
    text = op.name if op.name and op.name != op.kind else op.kind
    text += f" ({op.kind})" if text != op.kind else ""
    if isinstance(op, Collective):
        text += f" among ranks {_ranks(list(program.group(op.over, rank)))}"
    far = next((view.rank for _, view in op.accesses() if view.rank is not None), None)
    if isinstance(peer := getattr(op, "peer", far), int):
        text += f" with rank {peer}"
    written = [view for view in op.writes if view.rank is None]
    if written:
        text += f", writes {', '.join(dict.fromkeys(view.buffer for view in written))}"
    moved = op.reads if op.kind in ("send", "put", "accumulate") else written
    return text, sum(program.view_bytes(view) for view in moved)
