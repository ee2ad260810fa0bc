"""A plan of products as one HTML page, which loads nothing; its charts and tables need no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from meshweave.base.units import format_bytes, format_s
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.model.memory import ChipMemory
from meshweave.report.chart import Series, line_chart
from meshweave.report.page import bar, key, notes, page, table
from meshweave.report.timeline import timeline_svg

if TYPE_CHECKING:
    from meshweave.tune.explain import PlanExplanation, ProductTimeline
    from meshweave.tune.plan import Candidate, PassPlan

_SLOW = 4
_PRODUCT, _EXPOSED, _FREE = "#3b6fb6", "#d9822b", "#e9edf2"


def plan_page(explanation: PlanExplanation, memory: ChipMemory | None = None) -> str:
    """Return the HTML page of a plan of products.

    It has the algorithms, the layers, simulated timelines, and the times of other mesh shapes and slice counts;
    with `memory` also the memory of a chip that trains the whole model.
    """
    plan, best, cluster = explanation.plan, explanation.plan.best, explanation.cluster
    title = f"{plan.model} on {plan.num_chips} chips of {plan.cluster}"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="quiet">Batch {plan.batch} x {plan.sequence} tokens, {escape(plan.dtype)}. A plan by '
            "meshweave for the fully connected layers of one transformer block, forward and both backward "
            f"products. {escape(plan.unmeasured)}</p>",
            notes(plan.not_priced),
            _lead(explanation),
            _algorithms(explanation),
            _layers(explanation),
            _memory(memory, cluster, best) if memory else "",
            _timelines(explanation),
            _mesh_charts(explanation),
            _slice_charts(explanation),
            _sources(explanation),
        ]
    )
    return page(title, body)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _sum(candidate: Candidate, field: str) -> float:
    return float(sum(getattr(item, field) for layer in candidate.layers for item in layer.passes))


def peak_memory_bytes(candidate: Candidate) -> int:
    """Return the most bytes that any one product of a candidate holds on a chip, with operands and buffers."""
    return max(item.peak_bytes for layer in candidate.layers for item in layer.passes)


def _lead(explanation: PlanExplanation) -> str:
    plan, titles = explanation.plan, explanation.titles
    best = plan.best
    text = (
        f"<b>{escape(titles[best.algorithm])}</b> on a <b>{_shape(best.mesh_shape)}</b> mesh: "
        f"{format_s(best.block_s)} per block, {100 * best.utilisation:.1f} % of the chips' peak."
    )
    if len(plan.candidates) > 1:
        second = plan.candidates[1]
        gain = 100 * (second.block_s / best.block_s - 1)
        text += (
            f" That is {gain:.1f} % faster than {escape(titles[second.algorithm])}, at its own best "
            f"on {_shape(second.mesh_shape)}."
        )
    return f'<p class="lead">{text}</p>'


def _algorithms(explanation: PlanExplanation) -> str:
    plan = explanation.plan
    axes = sorted(
        {axis for c in plan.candidates for axis in c.traffic_bytes},
        key=lambda axis: ("row", "col", "depth").index(axis.split(".")[-1]),
    )
    words = {"row": "bytes between rows", "col": "bytes between columns", "depth": "bytes along depth"}
    head = ["algorithm", "mesh", "time", "", "of peak", "exposed", "launch", "transfer", "sync"]
    head += [words[axis.split(".")[-1]] for axis in axes] + ["peak memory", "next best mesh"]
    rows = []
    for c in plan.candidates:
        exposed = _sum(c, "exposed_s")
        cells = [
            escape(explanation.titles[c.algorithm]),
            _shape(c.mesh_shape),
            format_s(c.block_s),
            bar([(c.block_s - exposed, _PRODUCT), (exposed, _EXPOSED)], c.block_s, 80),
            f"{100 * c.utilisation:.1f} %",
            format_s(exposed),
            *(format_s(_sum(c, name)) for name in ("launch_s", "transfer_s", "sync_s")),
            *(format_bytes(c.traffic_bytes.get(axis, 0)) for axis in axes),
            format_bytes(peak_memory_bytes(c)),
            escape(c.runner_up).replace(" is ", ": +").replace(" slower", "") or "-",
        ]
        rows.append(cells)
    return (
        "<h2>Algorithms, each at its best</h2>"
        + table(head, rows, ("algorithm", "", "next best mesh"), {0: "best"})
        + f'<p class="quiet">{key(_PRODUCT, "products run")}{key(_EXPOSED, "exposed: no product runs")}. '
        "Of peak: FLOPs over those at the chips' peak. Launch, transfer and sync add up over all communication, "
        "hidden or not, so they may exceed what is exposed. Bytes are those that one chip moves along each mesh "
        "axis; peak memory is that of the product that needs most.</p>"
    )


def _layers(explanation: PlanExplanation) -> str:
    best = explanation.plan.best
    head = ["layer", "pass", "dataflow", "M x N x K", "slices", "time", "", "exposed"]
    head += ["peak memory", "next best"]
    longest = max((item.total_s for layer in best.layers for item in layer.passes), default=0.0)

    def cells(name: str, item: PassPlan) -> list[str]:
        times = bar([(item.total_s - item.exposed_s, _PRODUCT), (item.exposed_s, _EXPOSED)], longest)
        return [
            escape(name),
            item.name.replace("_", " "),
            item.dataflow,
            f"{item.m} x {item.n} x {item.k}",
            escape(str(item.config).removeprefix("S=")),
            format_s(item.total_s),
            times,
            format_s(item.exposed_s),
            format_bytes(item.peak_bytes),
            escape(item.runner_up) or "-",
        ]

    rows: list[list[str]] = []
    kinds = {}
    for layer in best.layers:
        kinds[len(rows)] = "group"
        rows += [cells("" if number else layer.name, item) for number, item in enumerate(layer.passes)]
    why = "".join(
        f"<li><b>{escape(layer.name)}</b>: {layer.stationary.upper()} stays put, {escape(layer.reason)}.</li>"
        for layer in best.layers
    )
    return (
        f"<h2>Layers with {escape(explanation.titles[best.algorithm])}</h2>"
        + table(head, rows, ("layer", "pass", "dataflow", "", "next best"), kinds)
        + f"<p>The largest matrix of a layer stays put in all three of its products:</p><ul>{why}</ul>"
    )


def _memory(memory: ChipMemory, cluster: Cluster, best: Candidate) -> str:
    have = cluster.chip.memory_bytes
    kinds = {"none": "no recomputation", "selective": "selective recomputation", "full": "full recomputation"}
    colours = ("#3b6fb6", "#7fa3d1", "#5f6b7a", "#d9822b")
    states = (memory.weight_bytes, memory.gradient_bytes, memory.optimizer_bytes)
    widest = max(have, *(memory.total_bytes(kind) for kind in memory.activation_bytes))
    rows = []
    for kind, activations in memory.activation_bytes.items():
        used = memory.total_bytes(kind)
        amounts = [float(a) for a in (*states, activations)]
        parts = [*zip(amounts, colours, strict=True), (max(0.0, float(have - used)), _FREE)]
        verdict = "fits" if used <= have else f"{format_bytes(used - have)} too much"
        cells = [kinds[kind], *(format_bytes(a) for a in amounts), format_bytes(used), verdict]
        rows.append([*cells, bar(parts, widest, 260)])
    names = ["weights", "gradients", "Adam", "activations"]
    keys = "".join(key(colour, name) for colour, name in zip(colours, names, strict=True))
    return (
        f"<h2>Memory of one chip ({format_bytes(have)})</h2>"
        + table(["activations with", *names, "all", "", " "], rows, ("activations with", "", " "))
        + f'<p class="quiet">{keys}{key(_FREE, "free")}. The whole model under 2D tensor parallelism over all '
        "chips, everything sharded. Weights, gradients and Adam after Rajbhandari et al., ZeRO (2020), section "
        "3.1; activations after Korthikanti et al. (2023), equation 1. The buffers of the products, at most "
        f"{format_bytes(peak_memory_bytes(best))} at a time, shards of their operands included, come on top.</p>"
    )


def _timelines(explanation: PlanExplanation) -> str:
    plan, compared = explanation.plan, explanation.compared_timelines
    if not compared:
        return ""
    where = "on the planned meshes"
    if explanation.are_reduced:
        where = (
            f"not on {plan.num_chips} chips but on the nearest mesh of {explanation.reduced_ranks} or about as "
            "many, each chip with a local product of the planned size; so products take as long and gathered "
            "matrices are as large, while rings have fewer steps"
        )

    shown = {line.title.split(":")[0] for line in compared}
    left_out = [title for title in explanation.titles.values() if title not in shown]
    fastest = min(line.trace.duration_s for line in compared)
    slow = [line for line in compared if line.trace.duration_s > _SLOW * fastest]

    def drawn(lines: Sequence[ProductTimeline]) -> str:
        return f'<div class="wide">{timeline_svg([(line.title, line.trace) for line in lines])}</div>'

    return (
        "<h2>Timelines of one chip</h2>"
        f"<p>Simulated with contention, {where}. The forward product of the largest "
        "layer with each algorithm, all on one scale of time:</p>"
        + drawn([line for line in compared if line not in slow])
        + (f"<p>Those that take over {_SLOW} times as long, on a scale of their own:</p>" if slow else "")
        + (drawn(slow) if slow else "")
        + (f"<p>Could not be simulated so: {escape(', '.join(left_out))}.</p>" if left_out else "")
        + "<details><summary>All products with the best algorithm</summary>"
        + f"{drawn(explanation.own_timelines)}</details>"
    )


def _mesh_charts(explanation: PlanExplanation) -> str:
    plan, meshes = explanation.plan, explanation.mesh_curves
    flat, deep = [], []
    shapes = sorted({shape for curve in meshes.values() for shape, _ in curve if len(shape) == 2})
    rows = sorted({shape[0] for curve in meshes.values() for shape, _ in curve if len(shape) == 3})
    for c in plan.candidates:
        title, curve = explanation.titles[c.algorithm], sorted(meshes[c.algorithm])
        two = [(float(shapes.index(s)), t * 1e3, s) for s, t in curve if len(s) == 2]
        flat.append(_marked(title, two, c.mesh_shape))
        for depth in sorted({s[2] for s, _ in curve if len(s) == 3}):
            three = [(float(s[0]), t * 1e3, s) for s, t in curve if s[2:] == (depth,)]
            deep.append(_marked(f"{title}, depth {depth}", three, c.mesh_shape))
    title, y_label = "Time of one block by mesh shape", "time of one block (ms)"
    ticks = [(float(i), _shape(shape)) for i, shape in enumerate(shapes)]
    charts = [
        line_chart(
            title, [x for x in flat if x.points], "rows x columns", y_label, x_ticks=ticks, y_text=_ms
        ),
        line_chart(
            f"{title}, with a third axis",
            [x for x in deep if x.points],
            f"rows (columns = {plan.num_chips} / rows / depth)",
            y_label,
            x_ticks=[(float(count), str(count)) for count in rows],
            x_log=True,
            y_text=_ms,
        ),
    ]
    return (
        "<h2>Mesh shapes</h2><p>Every product at its best slice count on each mesh shape. Rings mark the planned "
        "shapes.</p>" + "".join(f'<div class="wide">{chart}</div>' for chart in charts if chart)
    )


def _marked(
    title: str, points: Sequence[tuple[float, float, tuple[int, ...]]], chosen: tuple[int, ...]
) -> Series:
    ringed = tuple(i for i, (_, _, shape) in enumerate(points) if shape == chosen)
    return Series(title, tuple((x, y) for x, y, _ in points), ringed)


def _ms(value: float) -> str:
    return format_s(value / 1e3)


def _slice_charts(explanation: PlanExplanation) -> str:
    candidate = explanation.sliced
    if candidate is None:
        return ""
    charts = []
    for layer in candidate.layers:
        curves = explanation.slice_curves[layer.name]
        series = []
        for item in layer.passes:
            points = tuple((float(count), seconds * 1e3) for count, seconds in curves[item.name])
            chosen = tuple(i for i, (s, _) in enumerate(curves[item.name]) if s == item.config.slice_count)
            series.append(Series(item.name.replace("_", " "), points, chosen))
        charts.append(
            line_chart(
                f"{layer.name} ({layer.in_features} to {layer.out_features})",
                series,
                "slice count S (powers of two at equal distances)",
                "time (ms)",
                x_log=True,
                y_text=_ms,
                height=270,
            )
        )
    title = escape(explanation.titles[candidate.algorithm])
    return (
        f"<h2>Slice counts</h2><p>{title} on its {_shape(candidate.mesh_shape)} mesh: few slices hide little, "
        "many cost a launch each. Rings mark the planned counts.</p>"
        + "".join(f'<div class="wide">{chart}</div>' for chart in charts)
    )


def _sources(explanation: PlanExplanation) -> str:
    cluster = explanation.cluster
    sources = {f"Cluster {cluster.name}": cluster.source, f"Chip {cluster.chip.name}": cluster.chip.source}
    sources |= explanation.sources
    rows = "".join(f"<li><b>{escape(k)}</b>: {escape(v)}</li>" for k, v in sources.items() if v)
    note = escape(explanation.plan.note)
    return f"<h2>What this leaves out, and sources</h2><p>{note}</p><ul>{rows}</ul>"
