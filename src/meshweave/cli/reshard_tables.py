"""What `meshweave reshard` tells of its plans, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from meshweave.algorithms.reshard.plan import ReshardPlan, Turn
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.reshard_problem import Asked
from meshweave.cli.reshard_runs import Run

FIRST, LAST = 12, 3
"""Turns shown of a long schedule, from its beginning and its end."""


def to_json(asked: Asked, runs: Sequence[Run], chosen: Run) -> dict[str, Any]:
    plan = chosen.plan
    rank, held, scratch = chosen.peak
    return {
        "what": asked.what,
        "cluster": asked.cluster.name,
        "num_chips": asked.cluster.num_chips,
        "from": {"mesh": list(asked.src.shape), "ranks": list(asked.src.ranks)},
        "to": {"mesh": list(asked.dst.shape), "ranks": list(asked.dst.ranks)},
        "num_tensors": len(asked.problem.items),
        "num_unit_tasks": len(plan.tasks),
        "num_pieces": _num_pieces(plan),
        "bound_s": plan.bound_s,
        "least_bytes_across_hosts": plan.least_bytes_across_hosts,
        "plans": [
            {
                "strategy": run.plan.strategy.name,
                "order": run.plan.order,
                "predicted_s": run.plan.predicted_s,
                "simulated_s": run.simulated_s,
                **({"not_simulated": run.note} if run.note else {}),
                "bytes_across_hosts": run.plan.bytes_across_hosts,
                "num_messages": run.plan.num_messages,
            }
            for run in runs
        ],
        "chosen": {
            "strategy": plan.strategy.name,
            "order": plan.order,
            "predicted_s": plan.predicted_s,
            "simulated_s": chosen.simulated_s,
            "peak_memory": {
                "rank": rank,
                "before_and_after_bytes": held,
                "scratch_bytes": scratch,
                "bytes": held + scratch,
                "fits_a_chip": held + scratch <= asked.cluster.chip.memory_bytes,
            },
            "schedule": [_turn(plan, turn) for turn in plan.turns],
        },
    }


def _turn(plan: ReshardPlan, turn: Turn) -> dict[str, Any]:
    hosts = [{"host": plan.fabric.host_of[ranks[0]], "ranks": list(ranks)} for ranks in turn.cast.hosts]
    return {
        "start_s": turn.start_s,
        "end_s": turn.end_s,
        "senders": list(turn.cast.senders),
        "hosts": hosts,
        "inside_one_host": turn.cast.is_local,
        "bytes": turn.cast.num_bytes,
        "num_pieces": len(turn.cast.pieces),
        "num_chunks": turn.chunks,
    }


def _num_pieces(plan: ReshardPlan) -> int:
    return sum(len(task.pieces) for task in plan.tasks)


# --- text -----------------------------------------------------------------------------------------------


def print_found(asked: Asked, runs: Sequence[Run], chosen: Run, took_s: float) -> None:
    from rich.console import Console

    plan = chosen.plan
    console = Console(width=max(Console().width, 124) if not Console().is_terminal else None, highlight=False)
    console.print(asked.what, markup=False)
    tasks, pieces = _count(len(plan.tasks), "unit task"), _count(_num_pieces(plan), "piece")
    console.print(
        f"{tasks} of {pieces}; at least {format_bytes(plan.least_bytes_across_hosts)} between hosts, which the "
        f"busiest NIC needs {format_s(plan.bound_s)} for"
    )
    console.print(_plans_table(runs))
    for run in runs:
        if run.note:
            console.print(f"{run.title}: not simulated: {run.note}", markup=False)
    console.print(f"chosen: {chosen.title}; {len(runs)} planned in {format_s(took_s)}")
    rank, held, scratch = chosen.peak
    console.print(
        f"peak memory: {format_bytes(held + scratch)} at most, on rank {rank}: {format_bytes(held)} before and "
        f"after together, {format_bytes(scratch)} of scratch{_beyond(asked, held + scratch)}"
    )
    console.print(_schedule_table(plan) if plan.turns else "nothing is sent: every rank has what it needs")


def _beyond(asked: Asked, num_bytes: int) -> str:
    room = asked.cluster.chip.memory_bytes
    return f"; more than the {format_bytes(room)} of a chip" if num_bytes > room else ""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _plans_table(runs: Sequence[Run]) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    is_simulated = any(run.simulation is not None or run.note for run in runs)
    columns = [
        "strategy",
        "order",
        "predicted",
        "x bound",
        *(["simulated", "x bound"] if is_simulated else []),
    ]
    for column in (*columns, "between hosts", "x least", "messages"):
        table.add_column(column, justify="left" if column in columns[:2] else "right", no_wrap=True)
    for run in runs:
        plan, simulated_s = run.plan, run.simulated_s
        cells = [format_s(plan.predicted_s), _over(plan.predicted_s, plan.bound_s)]
        if is_simulated:
            if simulated_s is None:
                cells += ["too large", "-"]
            else:
                cells += [format_s(simulated_s), _over(simulated_s, plan.bound_s)]
        moved, least = plan.bytes_across_hosts, plan.least_bytes_across_hosts
        cells += [format_bytes(moved), _over(moved, least), f"{plan.num_messages:,}"]
        table.add_row(plan.strategy.name, plan.order, *cells)
    return table


def _over(value: float, least: float) -> str:
    return f"{value / least:.2f}" if least else "-"


def _schedule_table(plan: ReshardPlan) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="schedule", title_justify="left")
    for column in ("start", "end", "from", "to, the first rank of each host first", "bytes", "chunks"):
        left = column.startswith(("from", "to"))
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    for turn in _shortened(plan.turns):
        if turn is None:
            table.add_row("...", "", "", f"{len(plan.turns) - FIRST - LAST:,} more (--json has all)", "", "")
            continue
        senders = turn.cast.senders
        table.add_row(
            format_s(turn.start_s),
            format_s(turn.end_s),
            _ranks(senders) + ("" if turn.cast.is_local else f" (host {_hosts(plan, senders)})"),
            "inside host " + _where(plan, turn) if turn.cast.is_local else _where(plan, turn),
            format_bytes(turn.cast.num_bytes),
            str(turn.chunks),
        )
    return table


def _shortened(turns: Sequence[Turn]) -> Iterator[Turn | None]:
    if len(turns) <= FIRST + LAST + 1:
        yield from turns
        return
    yield from turns[:FIRST]
    yield None
    yield from turns[-LAST:]


def _hosts(plan: ReshardPlan, ranks: Sequence[int]) -> str:
    return _ranks(tuple(dict.fromkeys(plan.fabric.host_of[rank] for rank in ranks)))


def _where(plan: ReshardPlan, turn: Turn) -> str:
    """`host 2: 9, 10, 11, 8; ...` of at most four hosts."""
    shown = [f"{plan.fabric.host_of[ranks[0]]}: {_ranks(ranks)}" for ranks in turn.cast.hosts[:4]]
    more = len(turn.cast.hosts) - len(shown)
    text = "; ".join(shown) if turn.cast.is_local else "; ".join(f"host {one}" for one in shown)
    return f"{text}; {more} hosts more" if more else text


def _ranks(ranks: Sequence[int]) -> str:
    """`8-11` for a run of ranks in order, else all with commas, else the first few."""
    runs: list[list[int]] = [[ranks[0]]]
    for before, rank in pairwise(ranks):
        if rank == before + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
