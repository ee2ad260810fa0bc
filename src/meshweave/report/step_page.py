"""The plan of a training step as one HTML page: nothing is loaded; a few lines of script sort its table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from meshweave.base.units import format_bytes, format_s
from meshweave.report.chart import Series, line_chart
from meshweave.report.page import page

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshweave.tune.plan import Plan
    from meshweave.tune.plan_records import DegreesRecord, StepRecord, StepsRecord

_PARTS = {
    "compute": ("computing", "#3b6fb6"),
    "recompute": ("recomputation", "#7fa3d1"),
    "ends": ("embedding and loss", "#5f6b7a"),
    "tensor": ("tensor", "#d9822b"),
    "context": ("context", "#c0504d"),
    "transfers": ("transfers", "#8064a2"),
    "data": ("data", "#b8860b"),
    "bubble": ("bubble", "#9aa5b1"),
    "optimizer": ("optimizer", "#4f9d69"),
    "software": ("software", "#6b7b8c"),
}
_MEMORY = {
    "weights": "#3b6fb6",
    "gradients": "#7fa3d1",
    "optimizer": "#5f6b7a",
    "activations": "#d9822b",
    "buffers": "#b8860b",
    "fragmentation": "#9aa5b1",
}

_STYLE = """
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; }
td.l { white-space: normal; min-width: 210px; } .stack { display: flex; height: 13px; min-width: 120px; }
.stack span { display: block; height: 13px; }
@media (prefers-color-scheme: dark) {
  body { background: #14191f; color: #dfe5ec; } .quiet { color: #9fabb8; } th { color: #b6c1cd; }
  th, td { border-color: #2b343e; } .lead, tr.best td { background: #1d2731; } .wide > svg { background: #fff; }
}
@media (max-width: 600px) {
  body { margin: 12px auto; padding: 0 10px; font-size: 14px; } h1 { font-size: 20px; } h2 { margin-top: 26px; }
}
"""

_SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, column = [...head.parentElement.children].indexOf(head);
  const body = head.closest("table").tBodies[0], up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.children[column].dataset.value ?? row.children[column].textContent;
  const order = (a, b) => isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b);
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)));
};
"""


def step_page(plan: Plan, choice_text: Callable[[DegreesRecord], str], difference: str, advice: str) -> str:
    """Return the page of the plan of a step.

    Args:
        choice_text: writes a configuration in words.
        difference: what the runner-up costs; "" without one.
        advice: what to do next.
    """
    steps = plan.step
    title = f"{plan.model} on {plan.num_chips} chips of {plan.cluster}"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="quiet">{plan.batch} sequences of {plan.sequence} tokens, {escape(plan.dtype)}; at most '
            f"{format_bytes(steps.memory_limit_bytes)} a chip. A plan of a training step by meshweave.</p>",
            _lead(steps, choice_text, difference, advice),
            _ranking(steps, choice_text),
            _memory(steps, choice_text),
            _front(steps),
            _sensitivity(steps, choice_text),
            f"<h2>What this leaves out</h2><p>{escape(plan.note)}</p>",
        ]
    )
    return page(title, body, style=_STYLE, script=_SCRIPT)


def _lead(
    steps: StepsRecord, choice_text: Callable[[DegreesRecord], str], difference: str, advice: str
) -> str:
    best = steps.best
    text = (
        f"<b>{escape(choice_text(best.degrees))}</b>: {format_s(best.step_s)} a step, {100 * best.mfu:.1f} % MFU, "
        f"{best.tokens_per_s_per_chip:.0f} tokens/s per chip, {format_bytes(best.memory_bytes)}."
    )
    if steps.runner_up is not None:
        text += f" Next: {escape(choice_text(steps.runner_up.degrees))}, {escape(difference)}."
    stopped = "" if steps.is_complete else " The search was stopped: these are the best so far."
    return f'<p class="lead">{text} {escape(advice)}.{stopped}</p>'


def _stack(amounts: Mapping[str, float], colours: Mapping[str, str], whole: float) -> str:
    parts = "".join(
        f'<span title="{escape(name)}" '
        f'style="width:{100 * amount / whole:.2f}%;background:{colours[name]}"></span>'
        for name, amount in amounts.items()
        if name in colours and amount > 0
    )
    return f'<div class="stack">{parts}</div>'


def _keys(colours: Mapping[str, str]) -> str:
    return "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(name)}'
        for name, colour in colours.items()
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[tuple[str, float | str]]]) -> str:
    """Return a table that its heads sort; a cell is HTML and the value to sort by."""
    top = "".join(
        f'<th class="{"l" if i == 0 else ""}">'
        + (f'<button type="button">{escape(name)}</button>' if name else "")
        + "</th>"
        for i, name in enumerate(head)
    )
    lines = "".join(
        f'<tr class="{"best" if number == 0 else ""}">'
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
    slowest = steps.ranked[-1].step_s
    colours = dict(_PARTS.values())
    rows: list[Sequence[tuple[str, float | str]]] = []
    for record in steps.ranked:
        parts = {name: record.parts_s.get(part, 0.0) for part, (name, _) in _PARTS.items()}
        exposed = sum(record.parts_s.get(part, 0.0) for part in ("tensor", "context", "transfers", "data"))
        text = choice_text(record.degrees)
        rows.append(
            [
                (escape(text), text),
                (format_s(record.step_s), record.step_s),
                (_stack(parts, colours, slowest), record.step_s),
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
        + f'<p class="quiet">{_keys(colours)}. The best configuration of each set of degrees and strategy. '
        "Exposed: communication that nothing hides. A click on a head sorts.</p>"
    )


def _percent(record: StepRecord, part: str) -> tuple[str, float]:
    share = record.parts_s.get(part, 0.0) / record.step_s
    return f"{100 * share:.1f} %", share


def _memory(steps: StepsRecord, choice_text: Callable[[DegreesRecord], str]) -> str:
    whole = float(max(steps.memory_limit_bytes, *(record.memory_bytes for record in steps.ranked)))
    rows = []
    for record in steps.ranked:
        text = choice_text(record.degrees)
        amounts = {name: float(record.memory_parts.get(name, 0)) for name in _MEMORY}
        cells: list[tuple[str, float | str]] = [(escape(text), text), (_stack(amounts, _MEMORY, whole), 0.0)]
        cells += [(format_bytes(amount), amount) for amount in amounts.values()]
        rows.append(cells)
    return (
        "<h2>Memory of the fullest chip</h2>"
        + _table(["configuration", "", *_MEMORY], rows)
        + f'<p class="quiet">{_keys(_MEMORY)}; the width is {format_bytes(whole)}.</p>'
    )


def _front(steps: StepsRecord) -> str:
    if len(steps.front) < 2:
        return ""
    points = tuple((record.memory_bytes / 1e9, record.step_s) for record in reversed(steps.front))
    chart = line_chart(
        "Time against memory",
        [Series("none of those priced is both faster and smaller", points)],
        "memory of the fullest chip (GB)",
        "step (s)",
        x_ticks=[(x, f"{x:.0f}") for x, _ in points],
        y_text=format_s,
    )
    return f'<h2>Less memory for more time</h2><div class="wide">{chart}</div>'


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
