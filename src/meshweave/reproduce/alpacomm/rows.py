"""What AlpaComm says of its microbenchmarks and of its load balance, computed here, row by row.

Zhuang et al.: On Optimizing the Communication of Model Parallelism (MLSys '23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshweave.algorithms.reshard.broadcast import LEAST_CHUNK_BYTES, MOST_CHUNKS
from meshweave.reproduce.alpacomm.cases import CASES
from meshweave.reproduce.alpacomm.study import (
    ALL_GATHER,
    BROADCAST,
    EXACT,
    GPUS_PER_HOST,
    NAIVE,
    OWN_ORDER,
    RIVAL_ORDER,
    SEND_RECV,
    AlpaCommStudy,
    orders,
)
from meshweave.reproduce.published import PublishedRow, judge_rows, published_rows
from meshweave.reproduce.verdict import JudgedRow, OurValue
from meshweave.tune.search import Progress

PAPER = "alpacomm"
STRATEGY = {"send-recv": SEND_RECV, "all-gather": ALL_GATHER, "broadcast": BROADCAST}
REORDERED = (3, 4, 9)
CROSSING = (7, 8)


def parse_number(what: str) -> int:
    """Return the number in "case3" or "hosts3"."""
    return int("".join(filter(str.isdigit, what)))


def _longer(ours: float, than: float) -> float:
    """Return by how many percent `ours` is longer."""
    return round(100 * (ours / than - 1), 6)


def _by_case(values: dict[int, float]) -> str:
    return ", ".join(f"case {number}: {value:.3f}" for number, value in values.items())


# --- figure 5 -------------------------------------------------------------------------------------


def send_recv_linear(study: AlpaCommStudy, what: str) -> OurValue:
    seconds = [study.one_to_many(STRATEGY[what], 1, gpus).seconds for gpus in (1, 4)]
    return OurValue(seconds[1] / seconds[0])


def flat_in_host(study: AlpaCommStudy, what: str) -> OurValue:
    one, four = (study.one_to_many(STRATEGY[what], 1, gpus).seconds for gpus in (1, 4))
    return OurValue(_longer(four, one))


def _hosts(study: AlpaCommStudy, strategy: str, hosts: int) -> float:
    return study.one_to_many(strategy, hosts, GPUS_PER_HOST).seconds


def flat_over_hosts(study: AlpaCommStudy, what: str) -> OurValue:
    chunks = study.one_to_many(STRATEGY[what], 4, GPUS_PER_HOST).chunks
    one, four = (_hosts(study, STRATEGY[what], hosts) for hosts in (1, 4))
    return OurValue(_longer(four, one), f"K = {chunks}")


def gather_over_hosts(study: AlpaCommStudy, what: str) -> OurValue:
    one, two = (_hosts(study, STRATEGY[what], hosts) for hosts in (1, 2))
    return OurValue(_longer(two, one))


def gather_two_t(study: AlpaCommStudy, what: str) -> OurValue:
    hosts = parse_number(what)
    t = study.bound_s(hosts, GPUS_PER_HOST)
    formula = study.closed_form(ALL_GATHER, hosts, GPUS_PER_HOST) / t
    return OurValue(_hosts(study, ALL_GATHER, hosts) / t, f"our formula: {formula:.3f}")


def uneven_drop(study: AlpaCommStudy, what: str) -> OurValue:
    def seconds(count: int) -> float:
        if what == "hosts":
            return _hosts(study, ALL_GATHER, count)
        return study.one_to_many(ALL_GATHER, 1, count).seconds

    return OurValue(_longer(seconds(3), seconds(4)))


# --- figure 6 -------------------------------------------------------------------------------------


def nvlink(study: AlpaCommStudy, what: str) -> OurValue:
    number = parse_number(what)
    return OurValue(study.case(number, SEND_RECV).seconds / study.case(number, ALL_GATHER).seconds)


def similar(study: AlpaCommStudy, what: str) -> OurValue:
    number = parse_number(what)
    best = study.case(number, ALL_GATHER, OWN_ORDER).seconds / study.case(number).seconds
    return OurValue(study.over_gather(number), f"all-gather in the best order: {best:.3f}")


def gather_crosses(study: AlpaCommStudy, what: str) -> OurValue:
    each = {number: study.over_gather(number) for number in CROSSING}
    return OurValue(max(each.values()), _by_case(each))


def reordered(study: AlpaCommStudy, what: str) -> OurValue:
    number = parse_number(what)
    return OurValue(study.over_gather(number), f"{study.case(number).tasks} unit tasks")


def most_by_order(study: AlpaCommStudy, what: str) -> OurValue:
    each = {number: study.most_by_order(number) for number in REORDERED}
    return OurValue(max(each.values()), _by_case(each))


def most_by_broadcast(study: AlpaCommStudy, what: str) -> OurValue:
    number = parse_number(what)
    return OurValue(study.most_by_broadcast(number), f"simulated: {study.over_gather(number):.3f}")


def more_in_case4(study: AlpaCommStudy, what: str) -> OurValue:
    each = {number: study.over_gather(number) for number in REORDERED}
    return OurValue(each[4] / max(each[3], each[9]), _by_case(each))


# --- figure 8 -------------------------------------------------------------------------------------


def _naive(study: AlpaCommStudy, number: int) -> OurValue:
    strictly = study.over_best(number, NAIVE)
    detail = f"strictly one task after another: {strictly:.3f}" if study.naive_order != NAIVE else ""
    return OurValue(study.over_best(number, study.naive_order), detail)


def alike(study: AlpaCommStudy, what: str) -> OurValue:
    number = parse_number(what)
    naive = _naive(study, number)
    assert naive.value is not None
    return OurValue(max(naive.value, study.over_best(number, RIVAL_ORDER)), naive.detail)


def naive_congests(study: AlpaCommStudy, what: str) -> OurValue:
    return _naive(study, parse_number(what))


def balance_congests(study: AlpaCommStudy, what: str) -> OurValue:
    return OurValue(study.over_best(parse_number(what), RIVAL_ORDER))


def none_idle(study: AlpaCommStudy, what: str) -> OurValue:
    runs = {number: study.case(number) for number in CASES}
    each = {number: _longer(run.seconds, run.bound_s) for number, run in runs.items()}
    return OurValue(max(each.values()), _by_case(each))


def optimal(study: AlpaCommStudy, what: str) -> OurValue:
    if EXACT not in orders():
        return OurValue(None, reason="OR-tools is not installed: pip install 'meshweave[exact]'")
    return OurValue(
        max(
            _longer(study.case(number).predicted_s, study.case(number, BROADCAST, EXACT).predicted_s)
            for number in CASES
        )
    )


OURS: dict[str, Callable[[AlpaCommStudy, str], OurValue]] = {
    "send_recv_linear": send_recv_linear,
    "flat_in_host": flat_in_host,
    "flat_over_hosts": flat_over_hosts,
    "gather_over_hosts": gather_over_hosts,
    "gather_two_t": gather_two_t,
    "uneven_drop": uneven_drop,
    "nvlink": nvlink,
    "similar": similar,
    "gather_crosses": gather_crosses,
    "reordered": reordered,
    "most_by_order": most_by_order,
    "most_by_broadcast": most_by_broadcast,
    "more_in_case4": more_in_case4,
    "alike": alike,
    "naive_one_sender": naive_congests,
    "naive_congests": naive_congests,
    "balance_congests": balance_congests,
    "none_idle": none_idle,
    "optimal": optimal,
}


def row(study: AlpaCommStudy, entry: PublishedRow, what: str) -> JudgedRow:
    """Return one row, computed for a case, a strategy or a number of receivers."""
    return entry.beside(what, OURS[entry.id](study, what))


def rows(
    study: AlpaCommStudy, ids: Sequence[str] = (), progress: Progress = lambda done, total: None
) -> list[JudgedRow]:
    """All rows, or those with these ids, computed. Raises UnsupportedError for an unknown id."""
    return judge_rows(PAPER, lambda entry, what: row(study, entry, what), ids, progress)


# --- what the numbers say together ----------------------------------------------------------------


def findings(study: AlpaCommStudy) -> tuple[str, ...]:
    """What bandwidth alone can explain of the published gains and what not, and what our machine leaves out."""
    stated = {entry.id: entry.values for entry in published_rows(PAPER)}
    least, most = stated["reordered"]["case3"], stated["most_by_order"]["largest"]
    limit = max(study.most_by_order(number) for number in REORDERED)
    gains = ", ".join(f"{study.over_gather(number):.1f}" for number in REORDERED)
    cases = f"{', '.join(map(str, REORDERED[:-1]))} and {REORDERED[-1]}"
    tasks = ", ".join(str(study.case(number).tasks) for number in REORDERED)
    crossing = "; ".join(
        f"case {number}: {study.most_by_broadcast(number):.1f}x by the formulas, "
        f"{study.over_gather(number):.1f}x simulated"
        for number in CROSSING
    )
    uneven = ", ".join(str(number) for number in CASES if study.uneven(number)) or "none"
    out = [
        f"Order. With bandwidth alone, all tasks one after another take {limit:.1f}x the bound in cases {cases}, "
        "which have two sending hosts: no order or balance wins more. Over the all-gather in the order of its "
        f"balance we win {gains}x. The published {least:g}x to {most:g}x are {least / limit:.1f} to "
        f"{most / limit:.1f} times that limit, so they also contain costs of the rival's implementation.",
        f"Broadcast. What it can win over an all-gather with receivers in several hosts: {crossing}. "
        f"Published: up to {stated['gather_crosses']['largest']:g}x.",
        "Which costs those are is conjecture: launches and synchronisation of groups for each unit task "
        f"({tasks} of them in cases {cases}), senders that share a NIC at once, and parts of unequal size, of "
        "which the paper says that its rival cannot handle them. Such parts can explain figure 5 at 3, and of "
        f"the nine cases only: {uneven}.",
    ]
    name, least_kib = study.cluster.name, LEAST_CHUNK_BYTES >> 10
    chunks = f"a broadcast goes in K = {MOST_CHUNKS} chunks at most, none smaller than {least_kib} KiB"
    if study.network.nic_latency_s <= 0 and study.network.local_latency_s <= 0:
        out.append(
            f"{name} has no latencies and no launch costs here, for want of a source: small messages cost "
            f"nothing, and {chunks}. Where messages cost something fewer chunks are best."
        )
    else:
        out.append(f"{name} has latencies: {chunks}, and as many as they and the filling of the chain say.")
    if EXACT not in orders():
        out.append("OR-tools is not installed, so the optimum of figure 8 is left out.")
    return tuple(out)
