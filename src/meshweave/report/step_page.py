"""The plan of a training step as one HTML page that loads nothing: tables to sort, timelines to zoom, curves.

`step_page.js` draws timelines and curves from the JSON in the page, and `step_page.css` styles them. Tables are
complete without a script.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from meshweave.base.units import format_bytes, format_s
from meshweave.report.page import asset, notes, page
from meshweave.report.step_data import step_data

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshweave.algorithms.step.timeline import StepTimeline
    from meshweave.tune.plan import Plan
    from meshweave.tune.plan_records import DegreesRecord, StepRecord, StepsRecord
    from meshweave.tune.step_search.curves import StepCurve

PARTS = {
    "compute": ("computing", "#3b6fb6"),
    "recompute": ("recomputation", "#7fa3d1"),
    "ends": ("embedding and loss", "#5f6b7a"),
    "tensor": ("tensor", "#d9822b"),
    "context": ("context", "#c0504d"),
    "transfers": ("transfers", "#8064a2"),
    "data": ("data", "#b8860b"),
    "bubble": ("bubble", "#9aa5b1"),
    "optimizer": ("optimizer", "#4f9d69"),
    "host": ("host", "#a0522d"),
    "software": ("software", "#6b7b8c"),
}
PART_COLOURS = dict(PARTS.values())
MEMORY_COLOURS = {
    "weights": "#3b6fb6",
    "gradients": "#7fa3d1",
    "optimizer": "#5f6b7a",
    "activations": "#d9822b",
    "buffers": "#b8860b",
    "fragmentation": "#9aa5b1",
    "context": "#6b7b8c",
    "communication": "#8064a2",
}


def step_page(
    plan: Plan,
    choice_text: Callable[[DegreesRecord], str],
    difference: str,
    advice: str,
    timelines: Sequence[tuple[str, StepTimeline]] = (),
    curves: Sequence[StepCurve] = (),
) -> str:
    """Return the HTML page of the plan of a step.

    Args:
        choice_text: returns a configuration in words.
        difference: how much slower or faster the runner-up is, and in which parts, in words; "" without one.
        advice: what to do next, in words.
        timelines: (title, timeline) of each; the first is shown when the page opens.
        curves: how the best configuration and the runner-up do with other numbers of chips, batches and links.
    """
    steps = plan.step
    title = f"{plan.model} on {plan.num_chips} chips of {plan.cluster}"
    data = step_data(steps, choice_text, timelines, curves)
    readings = plan.unmeasured, steps.priced_as, steps.attention_as
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="quiet">{plan.batch} sequences of {plan.sequence} tokens, {escape(plan.dtype)}. '
            f"A plan of a training step by meshweave.{escape(''.join(map(_sentence, readings)))}</p>",
            notes(plan.not_priced),
            _lead(steps, choice_text, difference, advice),
            _versus(steps, choice_text),
            _section("Timeline", "timelines", _TIMELINE_HELP) if timelines else "",
            _ranking(steps, choice_text),
            _section("With other chips, batches and links", "curves", _CURVES_HELP) if curves else "",
            _section("Time against memory", "front", _FRONT_HELP),
            _memory(steps, choice_text),
            _sensitivity(steps, choice_text),
            f"<h2>What this leaves out</h2><p>{escape(plan.note)}</p>",
            "<noscript><p>Timelines, curves and sorting need scripts.</p></noscript>",
            f'<script type="application/json" id="data">{data}</script>',
        ]
    )
    return page(title, body, style=asset("step_page.css"), script=asset("step_page.js"))


_TIMELINE_HELP = (
    "Numbers are micro-batches. Point at an op, or press it, for its name, start and duration. The wheel, two "
    "fingers or + and - zoom; drag to move; with the keyboard, arrows go from op to op and 0 shows all."
)
_CURVES_HELP = (
    "The best configuration and the runner-up as they are, with more or fewer replicas, micro-batches, or rate of "
    "the outer links; nothing is searched again. Hollow points do not fit in memory. The dashed line is this plan."
)
_FRONT_HELP = (
    "Filled and joined: configurations of which none priced is both faster and smaller. Hollow: the others of the "
    "table."
)


_PAIRS = {"causal": "with the pairs of tokens that a causal mask leaves", "all": "with all pairs of tokens"}


def _sentence(text: str) -> str:
    return f" {text}." if text else ""


def _section(title: str, name: str, text: str) -> str:
    return f'<h2>{title}</h2><p class="quiet">{text}</p><div id="{name}"></div>'


def _lead(
    steps: StepsRecord, choice_text: Callable[[DegreesRecord], str], difference: str, advice: str
) -> str:
    best, other = steps.best, steps.runner_up
    alone = "" if steps.ideal is None else f"; kernels and links alone {format_s(steps.ideal.step_s)}"
    tiles = (
        (format_s(best.step_s), f"a step on {escape(steps.stack)}{alone}"),
        (f"{100 * best.mfu:.1f} %", f"model FLOPs utilization, {_PAIRS[steps.pairs]}"),
        (f"{best.tokens_per_s_per_chip:.0f}", "tokens/s per chip"),
        (format_bytes(best.memory_bytes), f"of {steps.limit_text}, on the fullest chip"),
    )
    runner_up = "there is no other that fits"
    if other is not None:
        runner_up = f"{escape(choice_text(other.degrees))}<span class=quiet>{escape(difference)}</span>"
    stopped = "" if steps.is_complete else " The search was stopped: these are the best so far."
    answers: tuple[tuple[str, str], ...] = (
        ("best", f"<b>{escape(choice_text(best.degrees))}</b>"),
        ("runner-up", runner_up),
        ("next", f"{escape(advice)}.{stopped}"),
    )
    if reason := steps.reason_above(*(record.hfu for record in steps.ranked)):
        answers = (*answers, ("MFU, HFU", f"{escape(reason)}."))
    tiled = "".join(f"<div><b>{value}</b><span>{text}</span></div>" for value, text in tiles)
    answered = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in answers)
    return f'<div class="tiles">{tiled}</div><dl class="answer">{answered}</dl>'


def _versus(steps: StepsRecord, choice_text: Callable[[DegreesRecord], str]) -> str:
    """Return the parts of the time of the best and of the runner-up, as bars on one scale."""
    rows = [("best", steps.best), *([("runner-up", steps.runner_up)] if steps.runner_up else [])]
    whole = max(record.step_s for _, record in rows)
    bars = "".join(
        f"<div><span>{name}</span>{_stack(named_parts(record), PART_COLOURS, whole)}"
        f"<span>{format_s(record.step_s)}</span></div>"
        for name, record in rows
    )
    used = [name for name in PART_COLOURS if any(named_parts(record)[name] > 0 for _, record in rows)]
    table = _table(
        ["part", *(name for name, _ in rows)],
        [
            [
                (f'<span class="key" style="background:{PART_COLOURS[part]}"></span>{part}', part),
                *(
                    (
                        f"{format_s(seconds)} ({100 * seconds / record.step_s:.1f} %)" if seconds else "0",
                        seconds,
                    )
                    for _, record in rows
                    for seconds in (named_parts(record)[part],)
                ),
            ]
            for part in used
        ],
        marks_first=False,
    )
    return (
        f'<h2>Where the time goes</h2><div class="versus">{bars}</div>'
        f'<div class="keys">{_keys({name: PART_COLOURS[name] for name in used})}</div>'
        f"<details><summary>In numbers</summary>{table}</details>"
    )


def named_parts(record: StepRecord) -> dict[str, float]:
    """Return the seconds of each part of a step, by the part's name on the page; 0 for a part that it lacks."""
    return {name: record.parts_s.get(part, 0.0) for part, (name, _) in PARTS.items()}


def _stack(amounts: Mapping[str, float], colours: Mapping[str, str], whole: float) -> str:
    parts = "".join(
        f'<span title="{escape(name)}: {100 * amount / whole:.1f} %" '
        f'style="width:{100 * amount / whole:.2f}%;background:{colours[name]}"></span>'
        for name, amount in amounts.items()
        if name in colours and amount > 0
    )
    return f'<div class="stack">{parts}</div>'


def _keys(colours: Mapping[str, str]) -> str:
    return "".join(
        f'<span><span class="key" style="background:{colour}"></span>{escape(name)}</span>'
        for name, colour in colours.items()
    )


def _table(
    head: Sequence[str], rows: Sequence[Sequence[tuple[str, float | str]]], *, marks_first: bool = True
) -> str:
    """Return a table that its heads sort; a cell is HTML and the value to sort by."""
    top = "".join(
        f'<th class="{"l" if i == 0 else ""}">'
        + (f'<button type="button">{escape(name)}</button>' if name else "")
        + "</th>"
        for i, name in enumerate(head)
    )
    lines = "".join(
        f'<tr class="{"best" if number == 0 and marks_first else ""}">'
        + "".join(
            f'<td class="{"l" if i == 0 else ""}" data-value="{escape(str(value))}">{cell}</td>'
            for i, (cell, value) in enumerate(cells)
        )
        + "</tr>\n"
        for number, cells in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def _ranking(steps: StepsRecord, choice_text: Callable[[DegreesRecord], str]) -> str:
    head = ["configuration", "step", "", "tokens/s/chip", "MFU", "HFU", "memory", "exposed", "bubble"]
    slowest = max(record.step_s for record in steps.ranked)  # `margin` may put a slower one first
    rows: list[Sequence[tuple[str, float | str]]] = []
    for record in steps.ranked:
        exposed = sum(record.parts_s.get(part, 0.0) for part in ("tensor", "context", "transfers", "data"))
        text = choice_text(record.degrees)
        rows.append(
            [
                (escape(text), text),
                (format_s(record.step_s), record.step_s),
                (_stack(named_parts(record), PART_COLOURS, slowest), record.step_s),
                (f"{record.tokens_per_s_per_chip:.0f}", record.tokens_per_s_per_chip),
                (f"{100 * record.mfu:.1f} %", record.mfu),
                (f"{100 * record.hfu:.1f} %", record.hfu),
                (format_bytes(record.memory_bytes), record.memory_bytes),
                (f"{100 * exposed / record.step_s:.1f} %", exposed / record.step_s),
                _percent(record, "bubble"),
            ]
        )
    return (
        "<h2>Configurations</h2>"
        + _table(head, rows)
        + f'<div class="keys">{_keys(PART_COLOURS)}</div><p class="quiet">The best configuration of each set of '
        "degrees and strategy. Exposed: communication that nothing hides. A click on a head sorts.</p>"
    )


def _percent(record: StepRecord, part: str) -> tuple[str, float]:
    share = record.parts_s.get(part, 0.0) / record.step_s
    return f"{100 * share:.1f} %", share


def _memory(steps: StepsRecord, choice_text: Callable[[DegreesRecord], str]) -> str:
    whole = float(
        max(steps.memory_limit_bytes + steps.reserve_bytes, *(record.memory_bytes for record in steps.ranked))
    )
    rows = []
    for record in steps.ranked:
        text = choice_text(record.degrees)
        amounts = {name: float(record.memory_parts.get(name, 0)) for name in MEMORY_COLOURS}
        cells: list[tuple[str, float | str]] = [
            (escape(text), text),
            (_stack(amounts, MEMORY_COLOURS, whole), 0.0),
        ]
        cells += [(format_bytes(amount), amount) for amount in amounts.values()]
        rows.append(cells)
    return (
        "<h2>Memory of the fullest chip</h2>"
        + _table(["configuration", "", *MEMORY_COLOURS], rows)
        + f'<div class="keys">{_keys(MEMORY_COLOURS)}</div>'
        + f'<p class="quiet">The width is {format_bytes(whole)}.</p>'
    )


def _sensitivity(steps: StepsRecord, choice_text: Callable[[DegreesRecord], str]) -> str:
    if not steps.sensitivity:
        return ""
    lines = "".join(
        f"<li>{escape(record.change)}: {format_s(record.same_s)} for the best configuration; "
        + (
            "it stays the best"
            if record.best == 0
            else f"{escape(choice_text(steps.ranked[record.best].degrees))} takes {format_s(record.best_s)}"
        )
        + ".</li>"
        for record in steps.sensitivity
    )
    return f"<h2>Other links</h2><ul>{lines}</ul>"
