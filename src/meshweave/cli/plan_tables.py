"""What `meshweave plan` prints: the best, the runner-up and why, what to do next; the ranking on request."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from meshweave.base.units import format_bytes, format_s
from meshweave.report.tables import print_table
from meshweave.tune.plan import Plan
from meshweave.tune.plan_records import StepRecord, StepsRecord
from meshweave.tune.step_search.reasons import choice_text

_EXPOSED = ("tensor", "context", "transfers", "data")


def print_plan(plan: Plan, left_out: str, *, table: bool, price: float | None) -> None:
    """Print the plan of a step; with `table` or a price its ranking and its time against memory as well.

    Args:
        left_out: what the plan leaves out, in words; "" for nothing.
        price: dollars per chip-hour, for the price of tokens; None for none.
    """
    steps = plan.step
    typer.echo(plan.summary(price))
    typer.echo(f"           {_more(table, bool(steps.sensitivity))}")
    if not steps.is_complete:
        typer.echo("\nThe search was stopped: these are the best so far.")
    if steps.sensitivity:
        typer.echo()
    for record in steps.sensitivity:
        typer.echo(f"{_change(record.change, record.same_s, record.best_s, record.best, steps)}")
    if table or price is not None:
        _print_ranking(steps, price)
        _print_front(steps)
    if left_out:
        typer.echo(f"\n{left_out}")


def _more(table: bool, sensitivity: bool) -> str:
    flags = [
        words
        for words, is_shown in (
            ("the ranking with --table", table),
            ("other links with --sensitivity", sensitivity),
        )
        if not is_shown
    ]
    return f"see {' and '.join(flags)}" if flags else "keep the plan with --out plan.json"


def _change(change: str, same_s: float, best_s: float, best: int, steps: StepsRecord) -> str:
    percent = 100 * (same_s / steps.best.step_s - 1)
    text = f"with {change}: {format_s(same_s)} a step ({percent:+.1f} %)"
    if best == 0:
        return f"{text}, and the best stays"
    return f"{text}; {choice_text(steps.ranked[best].degrees)} would then win with {format_s(best_s)}"


def _print_ranking(steps: StepsRecord, price: float | None) -> None:
    head = ["", "configuration", "step", "tokens/s/chip", "MFU", "HFU", "memory", *_EXPOSED, "bubble"]
    if price is not None:
        head.append("price/Mtok")
    rows = []
    for number, record in enumerate(steps.ranked, 1):
        cells = [
            str(number),
            choice_text(record.degrees),
            format_s(record.step_s),
            f"{record.tokens_per_s_per_chip:.0f}",
            f"{100 * record.mfu:.1f} %",
            f"{100 * record.hfu:.1f} %",
            format_bytes(record.memory_bytes),
            *(_share(record, name) for name in (*_EXPOSED, "bubble")),
        ]
        rows.append(cells if price is None else [*cells, f"{record.usd_per_million_tokens(price):.3g}"])
    typer.echo()
    print_table(head, rows, 2)
    typer.echo(
        "tensor, context, transfers, data: exposed communication of each kind, as a share of the step; "
        "bubble: waiting for other pipeline ranks."
    )
    if any(record.degrees.expert > 1 for record in steps.ranked):
        typer.echo("tensor has the exchange of tokens with experts.")
    typer.echo(_pairs_text(steps))
    if reason := steps.reason_above(*(record.hfu for record in steps.ranked)):
        typer.echo(f"{reason}.")
    typer.echo(_searched(steps))


def _pairs_text(steps: StepsRecord) -> str:
    if steps.pairs == "all" or steps.best.mfu_all_pairs is None:
        return "MFU and HFU count all pairs of tokens, also those that a causal mask hides and kernels skip."
    return (
        "MFU and HFU count the pairs of tokens that a causal mask leaves. With all pairs, as PaLM counts, the "
        f"best has {100 * steps.best.mfu_all_pairs:.1f} % MFU; kernels skip masked pairs, so it may exceed 100 %."
    )


def _share(record: StepRecord, name: str) -> str:
    return f"{100 * record.parts_s.get(name, 0.0) / record.step_s:.1f} %"


def _searched(steps: StepsRecord) -> str:
    count = steps.searched
    before = "the first is preferred; after it " if steps.margin else ""
    exact = (
        f"{before}no other is faster than the first {steps.num_exact}"
        if steps.num_exact
        else "search not finished"
    )
    return (
        f"{count.get('nodes', 0)} layouts with a micro-batch; {count.get('priced', 0)} configurations priced, "
        f"the others ruled out by bounds, {count.get('over_memory', 0)} by memory; {exact}."
    )


def _print_front(steps: StepsRecord) -> None:
    if len(steps.front) < 2:
        return
    rows: list[Sequence[str]] = [
        [choice_text(record.degrees), format_s(record.step_s), format_bytes(record.memory_bytes)]
        for record in steps.front
    ]
    typer.echo("\nless memory for more time, of those priced:")
    print_table(["configuration", "step", "memory"], rows, 1)
