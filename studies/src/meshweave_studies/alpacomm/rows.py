"""What AlpaComm says of its microbenchmarks and of its load balance, computed here, row by row.

`training_rows` has what it says of whole training steps.

Zhuang et al.: On Optimizing the Communication of Model Parallelism (MLSys '23).
"""

from __future__ import annotations

from collections.abc import Callable

from meshweave.algorithms.reshard.broadcast import MAX_CHUNKS, MIN_CHUNK_BYTES
from meshweave_studies.alpacomm import training_rows
from meshweave_studies.alpacomm.cases import CASES
from meshweave_studies.alpacomm.readings import BANDWIDTH, READINGS
from meshweave_studies.alpacomm.study import (
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
from meshweave_studies.published import PaperRows, published_rows
from meshweave_studies.verdict import OurValue

PAPER = "alpacomm"
STRATEGY = {"send-recv": SEND_RECV, "all-gather": ALL_GATHER, "broadcast": BROADCAST}
REORDERED = (3, 4, 9)
CROSSING = (7, 8)


def parse_number(subject: str) -> int:
    """Return the number in "case3" or "hosts3"."""
    return int("".join(filter(str.isdigit, subject)))


def _longer(ours: float, than: float) -> float:
    """Return by how many percent `ours` is longer."""
    return round(100 * (ours / than - 1), 6)


def _by_case(values: dict[int, float]) -> str:
    return ", ".join(f"case {number}: {value:.3f}" for number, value in values.items())


# --- figure 5 -------------------------------------------------------------------------------------


def send_recv_linear(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the time of send/recv to 4 GPUs of one host over that to 1 (figure 5 a, section 5.1.1)."""
    seconds = [study.one_to_many(STRATEGY[subject], 1, gpus).seconds for gpus in (1, 4)]
    return OurValue(seconds[1] / seconds[0])


def flat_in_host(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return by how many percent 4 GPUs of one host take longer than 1 (figure 5 a, section 5.1.1)."""
    one_s, four_s = (study.one_to_many(STRATEGY[subject], 1, gpus).seconds for gpus in (1, 4))
    return OurValue(_longer(four_s, one_s))


def _hosts(study: AlpaCommStudy, strategy: str, hosts: int) -> float:
    return study.one_to_many(strategy, hosts, GPUS_PER_HOST).seconds


def flat_over_hosts(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return by how many percent 4 hosts of 2 GPUs take longer than 1 (figure 5 b, sections 3.1 and 5.1.1)."""
    chunks = study.one_to_many(STRATEGY[subject], 4, GPUS_PER_HOST).chunks
    one_s, four_s = (_hosts(study, STRATEGY[subject], hosts) for hosts in (1, 4))
    return OurValue(_longer(four_s, one_s), f"K = {chunks}")


def gather_over_hosts(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return by how many percent 2 hosts of 2 GPUs take longer than 1 (figure 5 b, section 5.1.1)."""
    one_s, two_s = (_hosts(study, STRATEGY[subject], hosts) for hosts in (1, 2))
    return OurValue(_longer(two_s, one_s))


def gather_two_t(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the all-gather's time over t, the bytes over the rate of a NIC (section 3.1)."""
    hosts = parse_number(subject)
    t = study.bound_s(hosts, GPUS_PER_HOST)
    formula = study.closed_form(ALL_GATHER, hosts, GPUS_PER_HOST) / t
    return OurValue(_hosts(study, ALL_GATHER, hosts) / t, f"our formula: {formula:.3f}")


def uneven_drop(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return by how many percent an all-gather to 3 GPUs, or 3 hosts, takes longer than to 4 (figure 5)."""

    def seconds(count: int) -> float:
        if subject == "hosts":
            return _hosts(study, ALL_GATHER, count)
        return study.one_to_many(ALL_GATHER, 1, count).seconds

    return OurValue(_longer(seconds(3), seconds(4)))


# --- figure 6 -------------------------------------------------------------------------------------


def nvlink(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the time of send/recv over that of the all-gather in a case (figure 6, section 5.1.2)."""
    number = parse_number(subject)
    return OurValue(study.case(number, SEND_RECV).seconds / study.case(number, ALL_GATHER).seconds)


def similar(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the time of the all-gather over that of the broadcast in a case (figure 6, section 5.1.2)."""
    number = parse_number(subject)
    best = study.case(number, ALL_GATHER, OWN_ORDER).seconds / study.case(number).seconds
    detail = f"all-gather in the best order: {best:.3f}" if study.rivals == "planned" else ""
    return OurValue(study.over_gather(number), detail)


def gather_crosses(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the largest time of the all-gather over the broadcast in cases 7 and 8, whose receivers are in
    several hosts (figure 6).
    """
    each = {number: study.over_gather(number) for number in CROSSING}
    return OurValue(max(each.values()), _by_case(each))


def reordered(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the time of the all-gather over that of the broadcast in a case where order matters (figure 6)."""
    number = parse_number(subject)
    return OurValue(study.over_gather(number), f"{study.case(number).tasks} unit tasks")


def most_by_order(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the largest gain by order and balance in cases 3, 4 and 9, as a ratio of times: all tasks one after
    another over the bound (figure 6).
    """
    each = {number: study.most_by_order(number) for number in REORDERED}
    return OurValue(max(each.values()), _by_case(each))


def most_by_broadcast(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the time of the all-gather over that of the broadcast in a case, by the formulas (figure 6)."""
    number = parse_number(subject)
    return OurValue(study.most_by_broadcast(number), f"simulated: {study.over_gather(number):.3f}")


def more_in_case4(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the gain of the broadcast in case 4, with 64 unit tasks, over the larger gain of cases 3 and 9
    (figure 6).
    """
    each = {number: study.over_gather(number) for number in REORDERED}
    return OurValue(each[4] / max(each[3], each[9]), _by_case(each))


# --- figure 8 -------------------------------------------------------------------------------------


def _naive(study: AlpaCommStudy, number: int) -> OurValue:
    strictly = study.over_best(number, NAIVE)
    detail = f"strictly one task after another: {strictly:.3f}" if study.naive_order != NAIVE else ""
    return OurValue(study.over_best(number, study.naive_order), detail)


def alike(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the time of the slower of naive and balanced order over the best order in a case (figure 8, section
    5.3.1).
    """
    number = parse_number(subject)
    naive = _naive(study, number)
    assert naive.value is not None
    return OurValue(max(naive.value, study.over_best(number, RIVAL_ORDER)), naive.detail)


def naive_congests(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the time of the naive order over the best order in a case (figure 8, section 5.3.1)."""
    return _naive(study, parse_number(subject))


def balance_congests(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return the time of the balanced order over the best order in a case (figure 8, section 5.3.1)."""
    return OurValue(study.over_best(parse_number(subject), RIVAL_ORDER))


def none_idle(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return by how many percent the best order takes longer than the bound of the NICs, the most of all cases
    (figure 8).
    """
    runs = {number: study.case(number) for number in CASES}
    each = {number: _longer(run.seconds, run.bound_s) for number, run in runs.items()}
    return OurValue(max(each.values()), _by_case(each))


def optimal(study: AlpaCommStudy, subject: str) -> OurValue:
    """Return by how many percent the best order takes longer than the optimum, the most of all cases (figure 8).

    Both times are those of the planner's model. There is no value where OR-tools is not installed.
    """
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
    **training_rows.OURS,
}
"""For each id of the file the function that computes it."""

rows = PaperRows(PAPER, OURS, reading=READINGS[BANDWIDTH])


# --- what the numbers say together ----------------------------------------------------------------


def findings(study: AlpaCommStudy) -> tuple[str, ...]:
    """Return sentences: what bandwidth alone explains of the published gains, and what our machine leaves out."""
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
    is_free = study.network.nic_latency_s <= 0 and study.network.local_latency_s <= 0
    prices = "bandwidth alone" if is_free else "the prices of this reading"
    uneven = ", ".join(str(number) for number in CASES if study.uneven(number)) or "none"
    out = [
        f"Order. With {prices}, all tasks one after another take {limit:.1f}x the bound in cases {cases}, "
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
    name, least_kib = study.cluster.name, MIN_CHUNK_BYTES >> 10
    chunks = f"a broadcast goes in K = {MAX_CHUNKS} chunks at most, none smaller than {least_kib} KiB"
    if is_free:
        out.append(
            f"{name} has no latencies and no launch costs here, for want of a source: small messages cost "
            f"nothing, and {chunks}. Where messages cost something fewer chunks are best."
        )
    else:
        out.append(f"{name} has latencies: {chunks}, and as many as they and the filling of the chain say.")
    if EXACT not in orders():
        out.append("OR-tools is not installed, so the optimum of figure 8 is left out.")
    return tuple(out)
