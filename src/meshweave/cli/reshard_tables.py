"""The output of `meshweave reshard`: tables and JSON of a comparison of plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from meshweave.algorithms.reshard.plan import ReshardPlan, ScheduledMulticast
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.reshard_problem import ReshardRequest
from meshweave.report.tables import text_console, text_table
from meshweave.tune.reshard import ReshardCandidate, ReshardComparison

if TYPE_CHECKING:
    from rich.table import Table

FIRST, LAST = 12, 3
"""Multicasts shown of a long schedule, from its beginning and its end."""


def to_json(request: ReshardRequest, comparison: ReshardComparison) -> dict[str, Any]:
    """Return a comparison as JSON values: the problem, the times of each plan, and the chosen plan's schedule.

    With the chosen plan is the peak memory of the rank that needs most. Keys name the units, seconds and bytes.
    """
    chosen = comparison.chosen
    plan = chosen.plan
    return {
        "what": request.what,
        "cluster": request.cluster.name,
        "num_chips": request.cluster.num_chips,
        "from": {"mesh": list(request.src.shape), "ranks": list(request.src.ranks)},
        "to": {"mesh": list(request.dst.shape), "ranks": list(request.dst.ranks)},
        "num_tensors": len(request.problem.moves),
        "num_unit_tasks": len(plan.tasks),
        "num_pieces": _num_pieces(plan),
        "bound_s": plan.bound_s,
        "least_bytes_across_hosts": plan.least_bytes_across_hosts,
        "plans": [
            {
                "strategy": candidate.plan.strategy.name,
                "order": candidate.plan.order,
                "predicted_s": candidate.plan.predicted_s,
                "simulated_s": candidate.simulated_s,
                **({"not_simulated": candidate.note} if candidate.note else {}),
                "bytes_across_hosts": candidate.plan.bytes_across_hosts,
                "num_messages": candidate.plan.num_messages,
            }
            for candidate in comparison.candidates
        ],
        "chosen": {
            "strategy": plan.strategy.name,
            "order": plan.order,
            "predicted_s": plan.predicted_s,
            "simulated_s": chosen.simulated_s,
            "peak_memory": _memory_json(chosen, request),
            "schedule": [_multicast_json(plan, scheduled) for scheduled in plan.multicasts],
        },
    }


def _memory_json(chosen: ReshardCandidate, request: ReshardRequest) -> dict[str, Any]:
    rank, local, scratch = chosen.peak_memory
    return {
        "rank": rank,
        "before_and_after_bytes": local,
        "scratch_bytes": scratch,
        "bytes": local + scratch,
        "fits_a_chip": local + scratch <= request.cluster.chip.memory_bytes,
    }


def _multicast_json(plan: ReshardPlan, scheduled: ScheduledMulticast) -> dict[str, Any]:
    hosts = [
        {"host": plan.network.host_of[ranks[0]], "ranks": list(ranks)} for ranks in scheduled.multicast.hosts
    ]
    return {
        "start_s": scheduled.start_s,
        "end_s": scheduled.end_s,
        "senders": list(scheduled.multicast.senders),
        "hosts": hosts,
        "inside_one_host": scheduled.multicast.is_local,
        "bytes": scheduled.multicast.num_bytes,
        "num_pieces": len(scheduled.multicast.pieces),
        "num_chunks": scheduled.chunks,
    }


def _num_pieces(plan: ReshardPlan) -> int:
    return sum(len(task.pieces) for task in plan.tasks)


# --- text -----------------------------------------------------------------------------------------------


def print_comparison(request: ReshardRequest, comparison: ReshardComparison) -> None:
    """Print the table of candidates, and the peak memory and the schedule of the chosen one."""
    chosen = comparison.chosen
    plan = chosen.plan
    console = text_console()
    console.print(request.what, markup=False)
    tasks, pieces = _count(len(plan.tasks), "unit task"), _count(_num_pieces(plan), "piece")
    console.print(
        f"{tasks} of {pieces}; at least {format_bytes(plan.least_bytes_across_hosts)} between hosts, which the "
        f"busiest NIC needs {format_s(plan.bound_s)} for"
    )
    console.print(_plans_table(comparison.candidates))
    for candidate in comparison.candidates:
        if candidate.note:
            console.print(f"{candidate.title}: not simulated: {candidate.note}", markup=False)
    console.print(
        f"chosen: {chosen.title}; {len(comparison.candidates)} planned in {format_s(comparison.planning_s)}"
    )
    rank, local, scratch = chosen.peak_memory
    console.print(
        f"peak memory: {format_bytes(local + scratch)} at most, on rank {rank}: {format_bytes(local)} before and "
        f"after together, {format_bytes(scratch)} of scratch{_memory_warning(request, local + scratch)}"
    )
    console.print(
        _schedule_table(plan) if plan.multicasts else "nothing is sent: every rank has what it needs"
    )


def _memory_warning(request: ReshardRequest, num_bytes: int) -> str:
    room = request.cluster.chip.memory_bytes
    return f"; more than the {format_bytes(room)} of a chip" if num_bytes > room else ""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _plans_table(candidates: Sequence[ReshardCandidate]) -> Table:
    is_simulated = any(candidate.simulation is not None or candidate.note for candidate in candidates)
    simulated = ("simulated", "x bound") if is_simulated else ()
    head = ("strategy", "order", "predicted", "x bound", *simulated, "between hosts", "x least", "messages")
    rows = []
    for candidate in candidates:
        plan, simulated_s = candidate.plan, candidate.simulated_s
        cells = [format_s(plan.predicted_s), _ratio(plan.predicted_s, plan.bound_s)]
        if is_simulated:
            if simulated_s is None:
                cells += ["too large", "-"]
            else:
                cells += [format_s(simulated_s), _ratio(simulated_s, plan.bound_s)]
        moved, least = plan.bytes_across_hosts, plan.least_bytes_across_hosts
        cells += [format_bytes(moved), _ratio(moved, least), f"{plan.num_messages:,}"]
        rows.append((plan.strategy.name, plan.order, *cells))
    return text_table(head, rows, ("strategy", "order"), whole=head)


def _ratio(value: float, least: float) -> str:
    return f"{value / least:.2f}" if least else "-"


def _schedule_table(plan: ReshardPlan) -> Table:
    left = ("from", "to, the first rank of each host first")
    rows = []
    for scheduled in _shortened(plan.multicasts):
        if scheduled is None:
            more = f"{len(plan.multicasts) - FIRST - LAST:,} more (--json has all)"
            rows.append(("...", "", "", more, "", ""))
            continue
        senders, is_local = scheduled.multicast.senders, scheduled.multicast.is_local
        row = (
            format_s(scheduled.start_s),
            format_s(scheduled.end_s),
            _ranks(senders) + ("" if is_local else f" (host {_hosts(plan, senders)})"),
            ("inside host " if is_local else "") + _where(plan, scheduled),
            format_bytes(scheduled.multicast.num_bytes),
            str(scheduled.chunks),
        )
        rows.append(row)
    whole = ("start", "end", "bytes", "packets")
    head = ("start", "end", *left, "bytes", "packets")
    return text_table(head, rows, left, title="schedule", whole=whole)


def _shortened(multicasts: Sequence[ScheduledMulticast]) -> Iterator[ScheduledMulticast | None]:
    if len(multicasts) <= FIRST + LAST + 1:
        yield from multicasts
        return
    yield from multicasts[:FIRST]
    yield None
    yield from multicasts[-LAST:]


def _hosts(plan: ReshardPlan, ranks: Sequence[int]) -> str:
    return _ranks(tuple(dict.fromkeys(plan.network.host_of[rank] for rank in ranks)))


def _where(plan: ReshardPlan, scheduled: ScheduledMulticast) -> str:
    """`host 2: 9, 10, 11, 8; ...` of at most four hosts."""
    shown = [f"{plan.network.host_of[ranks[0]]}: {_ranks(ranks)}" for ranks in scheduled.multicast.hosts[:4]]
    more = len(scheduled.multicast.hosts) - len(shown)
    text = "; ".join(shown) if scheduled.multicast.is_local else "; ".join(f"host {each}" for each in shown)
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
