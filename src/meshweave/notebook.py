"""What a notebook shows of a plan, a step, a simulation, a trace, the graph of a layer and a program.

Each is HTML with inline styles, without scripts: notebooks of any make show it, and it prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from html import escape

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.block.laid_out import laid_out
from meshweave.algorithms.block.megatron import MegatronSequence
from meshweave.algorithms.block.problem import ExpertRanks
from meshweave.algorithms.step import Step
from meshweave.algorithms.step.block_time import block_of, layer_block
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.base.units import format_bytes, format_s, to_ps
from meshweave.describe.model.layer import LayerGraph
from meshweave.ir.program import Program
from meshweave.ir.program.text import to_text
from meshweave.report.layer_picture import count_text, draw_layer
from meshweave.report.program_picture import draw_program
from meshweave.report.simulation_picture import draw_rank_timelines
from meshweave.report.step_page import MEMORY_COLOURS, PART_COLOURS, named_parts
from meshweave.simulate import Simulation
from meshweave.simulate.rank_timeline import RankTimeline, Stretch, rank_timeline
from meshweave.trace import Trace
from meshweave.tune.plan import Plan
from meshweave.tune.plan_records import StepRecord
from meshweave.tune.step_search.planner import step_record
from meshweave.tune.step_search.reasons import choice_text

NUM_ROWS, NUM_RANKS, MAX_TEXT = 12, 4, 20_000
SHOWN_STRATEGY = MegatronSequence()
"""How a layer is laid on `NUM_RANKS` ranks where it is shown by itself; a step shows its own."""
MAX_OPS = 50_000
"""Ops of a rank, or spans of a trace, of which a timeline is drawn."""


@singledispatch
def html_of(value: object) -> str:
    """Return what a notebook shows of an object, as HTML with inline styles.

    Plans, steps, simulations, traces, layer graphs and programs have pictures or tables; others their `repr`.
    """
    return f"<pre>{escape(repr(value))}</pre>"


@html_of.register
def _(plan: Plan) -> str:
    if plan.steps is None:
        names = ("algorithm", "mesh", "a block", "of the peak", "next best mesh")
        candidates = [
            (
                escape(each.algorithm),
                "x".join(map(str, each.mesh_shape)),
                format_s(each.block_s),
                f"{100 * each.utilisation:.1f} %",
                escape(each.runner_up),
            )
            for each in plan.candidates[:NUM_ROWS]
        ]
        return _framed(plan.summary().splitlines()[0], _table(names, candidates))
    slowest = max(record.step_s for record in plan.steps.ranked[:NUM_ROWS])
    head = ("configuration", "a step", "", "MFU", "tokens/s per chip", "memory")
    rows = [
        (
            escape(choice_text(record.degrees)),
            format_s(record.step_s),
            _stack(named_parts(record), PART_COLOURS, slowest),
            f"{100 * record.mfu:.1f} %",
            f"{record.tokens_per_s_per_chip:.0f}",
            format_bytes(record.memory_bytes),
        )
        for record in plan.steps.ranked[:NUM_ROWS]
    ]
    words = f'<pre style="white-space:pre-wrap">{escape(plan.summary())}</pre>'
    text = f"<details><summary>in words</summary>{words}</details>"
    used = _used(PART_COLOURS, plan.steps.ranked[:NUM_ROWS])
    return _framed(plan.summary().splitlines()[0], f"{_table(head, rows)}{_keys(used)}{text}")


@html_of.register
def _(step: Step) -> str:
    record = step_record(step)
    chip = step.problem.cluster.chip.memory_bytes
    kinds = {name: float(record.memory_parts.get(name, 0)) for name in MEMORY_COLOURS}
    rows = [
        ("time", format_s(record.step_s), _stack(named_parts(record), PART_COLOURS, record.step_s, 420)),
        (
            "memory",
            f"{format_bytes(record.memory_bytes)} of {format_bytes(chip)}",
            _stack(kinds, MEMORY_COLOURS, max(chip, record.memory_bytes), 420),
        ),
    ]
    first, *rest = str(step).splitlines()
    keys = _keys(_used(PART_COLOURS, [record])) + _keys({k: MEMORY_COLOURS[k] for k, v in kinds.items() if v})
    laid = choice_text(record.degrees)
    text = f'<pre style="white-space:pre-wrap">{escape(chr(10).join(rest))}</pre>'
    return _framed(f"{first}: {laid}", f"{_table(('', '', ''), rows)}{keys}{text}{_layers(step)}")


def _layers(step: Step) -> str:
    """Return each kind of layer on the ranks that share it, to be opened."""
    p, drawn = step.parallelism, []
    for share, kind in step.problem.kinds:
        block, layer = block_of(kind, p, training=False), kind.model.layer
        laid = laid_out(block, layer_block(kind, p).config, strategy_of(p).roles_of(block))
        which = f"{100 * share:.0f} % of the layers" if share < 1 else "a layer"
        on = " x ".join(f"{name} {size}" for name, size in laid.axes) or "one rank"
        title = f"{which} by {p.strategy} on {on}, {laid.tokens} tokens of a micro-batch"
        drawn.append(draw_layer(layer, title, laid))
    return f"<details><summary>a layer, its shards and its moves</summary>{''.join(drawn)}</details>"


@html_of.register
def _(run: Simulation) -> str:
    ranks = [int(rank) for rank in run.ranks[:NUM_RANKS]]
    lines = [rank_timeline(run, rank, f"rank {rank}") for rank in ranks if _is_drawn(run, rank)]
    title, whole = f"{run.program.name}, simulated", f"{len(run.ranks)} ranks, {format_s(run.duration_s)}"
    parts = run.parts(ranks[0])
    head = tuple(name.removesuffix("_s") for name in parts)
    seconds = _table(head, [tuple(format_s(value) if value else "0" for value in parts.values())])
    rest = f"<p>Seconds of rank {ranks[0]}, whether they overlap or not:</p>{seconds}"
    if not lines:
        return _framed(f"{title}: {whole}", rest)
    return _framed("", draw_rank_timelines(title, lines, subtitle=whole) + rest)


def _is_drawn(run: Simulation, rank: int) -> bool:
    place = run.position(rank)
    return int(run.starts[place + 1] - run.starts[place]) <= MAX_OPS


@html_of.register
def _(trace: Trace) -> str:
    ranks = sorted({span.rank for span in trace.spans})
    title = f"{trace.program}, {trace.source}: {len(ranks)} ranks, {format_s(trace.duration_s)}"
    lines = [] if len(trace.spans) > MAX_OPS else [_timeline(trace, rank) for rank in ranks[:NUM_RANKS]]
    names = trace.source in ("simulate", "estimate")
    return _framed("" if lines else title, draw_rank_timelines(title, lines, names=names))


def _timeline(trace: Trace, rank: int) -> RankTimeline:
    begin = min(span.start_ps for span in trace.spans)
    lanes: dict[str, list[Stretch]] = {}
    for span in sorted((s for s in trace.spans if s.rank == rank), key=lambda span: span.start_ps):
        stretch = Stretch(span.activity, span.start_ps - begin, span.end_ps - begin, span.label)
        lanes.setdefault(span.lane, []).append(stretch)
    shown = tuple((lane, tuple(stretches)) for lane, stretches in lanes.items())
    return RankTimeline(f"rank {rank}", "", shown, to_ps(trace.duration_s))


@html_of.register
def _(layer: LayerGraph) -> str:
    count = sum(weight.size for weight in layer.parameters)
    title = f"a layer of {len(layer.nodes)} nodes, {count_text(count)} parameters"
    ranks, hidden = NUM_RANKS, layer.features[layer.input].size
    shared = ExpertRanks(min(ranks, layer.num_experts)) if layer.num_experts > 1 else None
    block = BlockProblem(
        1, 2048, hidden, 1, 1, 1, 1, (ranks, 1), dtype="bfloat16", graph=layer, experts=shared
    )
    laid = laid_out(block, BlockConfig(), SHOWN_STRATEGY.roles_of(block))
    on = f"{title}; by {SHOWN_STRATEGY.name} on {ranks} ranks, {laid.tokens} tokens"
    return _framed("", draw_layer(layer, on, laid))


@html_of.register
def _(program: Program) -> str:
    text = to_text(program)
    shown = (
        text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n... {len(text) - MAX_TEXT} characters more"
    )
    whole = f"<details><summary>the program as text</summary><pre>{escape(shown)}</pre></details>"
    return _framed("", f"{draw_program(program)}{whole}")


# --- parts of the HTML --------------------------------------------------------------------------------------


def _framed(title: str, body: str) -> str:
    head = f"<b>{escape(title)}</b>" if title else ""
    return (
        f'<div style="max-width:980px;overflow-x:auto;font-variant-numeric:tabular-nums">{head}{body}</div>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells as HTML, the first column to the left."""
    sides = ["left", *["right"] * (len(head) - 1)]
    top = "".join(
        f'<th style="text-align:{s};padding-right:6px">{escape(n)}</th>'
        for n, s in zip(head, sides, strict=True)
    )
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:{s};white-space:nowrap;padding:1px 6px 1px 0">{c}</td>'
            for c, s in zip(row, sides, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if any(head) else ''}<tbody>{lines}</tbody></table>"


def _stack(amounts: Mapping[str, float], colours: Mapping[str, str], whole: float, width: int = 180) -> str:
    """Return a bar of amounts beside each other; `whole` is as wide as `width` pixels."""
    parts = "".join(
        f'<span title="{escape(name)}: {100 * amount / whole:.1f} %" style="display:inline-block;height:13px;'
        f'width:{width * amount / whole:.1f}px;background:{colours[name]}"></span>'
        for name, amount in amounts.items()
        if amount > 0 and name in colours
    )
    return f'<span style="display:inline-flex;width:{width}px;background:#e9edf2">{parts}</span>'


def _used(colours: Mapping[str, str], records: Sequence[StepRecord]) -> dict[str, str]:
    return {k: c for k, c in colours.items() if any(named_parts(record)[k] > 0 for record in records)}


def _keys(colours: Mapping[str, str]) -> str:
    boxes = "".join(
        f'<span style="margin-right:14px;white-space:nowrap"><span style="display:inline-block;width:11px;'
        f'height:11px;background:{colour};margin-right:5px"></span>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<div style="font-size:12px;margin:4px 0">{boxes}</div>'
