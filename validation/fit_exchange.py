"""Fit the constants of dispatch and combine (`cost.exchange`) on measured exchanges, and write the catalog.

python validation/fit_exchange.py MEASURED.csv DOCUMENTED.csv

MEASURED.csv has the columns of AIConfigurator's tables of exchanges between experts (ai-dynamo/aiconfigurator,
Apache-2.0): device, library, nodes, ranks, tokens_per_rank, hidden, topk, experts, dtype, sms, dispatch_us,
combine_us, and dispatch_notify_us and combine_notify_us, which are added: ranks tell each other counts first. Of
each library, op and place (inside a host, between hosts) at most four constants are fitted on rows of 64 tokens
and more. The mean error of each is written beside them; rows that were not fitted are scored besides, by halves.

DeepEP's test between hosts gives each host a group of experts, and lets a token choose of four groups at most
(tests/test_internode.py). Its rows of 8 hosts are scored and not fitted: dispatch moves at 17 GB/s a NIC there
however many tokens or multiprocessors there are, a third of what it does on 2 and 4 hosts, and combine does so
from 16,384 tokens on, below that at the full rate. That is a network of that machine and no library.

DOCUMENTED.csv has bandwidths that libraries document themselves: source, library, hardware, ep, nodes,
tokens_per_rank, hidden, topk, dispatch_dtype, sms, op, bandwidth_GBps, bound_by, note. Of Hybrid-EP whole
calls of its Torch API in 16 bits are fitted, as training sends them. Its bandwidths count what arrives at a
rank, own tokens among it, where NVLink bounds it, and what is for hosts, the own one among them, where NICs
do (readings of its test).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from meshweave.cost.exchange import ExchangeBytes, ExchangeConstants, bytes_s, chance_of_expert

CATALOG = Path(__file__).parents[1] / "src/meshweave/catalog/exchange.toml"
LINKS = {"H100-SXM5-80GB": 450e9, "H200-SXM": 450e9, "B200-SXM": 900e9, "B300-SXM": 900e9, "GB200": 900e9}
NIC = 50e9
LEAST_TOKENS = 64
MULTIPROCESSORS = {"deepep": 20, "hybridep": 16}
LOCAL_EXPERTS = 8
"""Experts of a rank in the exchanges that Hybrid-EP documents."""
_BEGIN = {
    "base_s": 3e-5,
    "unit_bytes_per_s": 1.5e10,
    "inside_share": 0.8,
    "between_share": 0.8,
    "sent": 1.0,
    "host_s": 1e-5,
}
TOP_HOSTS = 4
"""The most hosts that a token goes to in DeepEP's test, each with one group of experts."""
_UNITS = "unit_bytes_per_s"
FITS = (
    (
        "deepep",
        "hosts",
        "inside",
        "DeepEP normal, SGLang 0.5.12",
        (1,),
        ("base_s", "unit_bytes_per_s", "inside_share", "sent"),
    ),
    (
        "deepep",
        "hosts",
        "between",
        "DeepEP normal, SGLang 0.5.0",
        (2, 4),
        ("base_s", "host_s", "unit_bytes_per_s", "between_share"),
    ),
    (
        "trtllm_one_sided",
        "ranks",
        "inside",
        "TRT-LLM 1.2.0rc6 NVLinkOneSided",
        None,
        ("base_s", "inside_share"),
    ),
    (
        "trtllm_two_sided",
        "ranks",
        "inside",
        "TRT-LLM 1.2.0rc6 NVLinkTwoSided",
        None,
        ("base_s", "inside_share"),
    ),
)
"""Name, what it sends, place, library in the table, numbers of nodes, and what is fitted."""
BASE_S = 4e-5
"""Seconds of a documented exchange of nothing, about those of DeepEP: of one size they cannot be fitted."""

DOCUMENTED = (
    ("hybridep", "hosts", "inside", "HybridEP", "NVLink", ("unit_bytes_per_s", "inside_share")),
    ("hybridep", "hosts", "between", "HybridEP", "RDMA", ("unit_bytes_per_s", "between_share")),
)
"""Likewise of documented exchanges: the library there, and what bounds it."""

Row = tuple[ExchangeBytes, float, int, float]
"""Bytes, the rate of a link, multiprocessors, and seconds."""


def rows_of(table: list[dict[str, str]], library: str, nodes: tuple[int, ...] | None, op: str) -> list[Row]:
    """Return the measured exchanges of a library."""
    rows = []
    for row in table:
        number, ranks = int(row["nodes"]), int(row["ranks"])
        if row["library"] != library or (nodes and number not in nodes) or not row[f"{op}_us"]:
            continue
        tokens, hidden = int(row["tokens_per_rank"]), int(row["hidden"])
        if tokens < LEAST_TOKENS or row["device"] not in LINKS:
            continue
        chosen, experts = int(row["topk"]), int(row["experts"])
        item = {"fp8": 1 + 4 / 128, "nvfp4": 0.5625}.get(row["dtype"], 2.0) if op == "dispatch" else 2.0
        own = tokens * hidden * item
        hosts = number if nodes else 1  # those of NVL72 are all over NVLink
        groups = hosts, min(hosts, TOP_HOSTS)
        arriving = own * chance_of_expert(ranks, experts, chosen, *groups) * ranks
        between = own * chance_of_expert(hosts, experts, chosen, *groups) * (hosts - 1) if hosts > 1 else 0.0
        seconds = (float(row[f"{op}_us"]) + float(row[f"{op}_notify_us"] or 0)) * 1e-6
        bytes_of = ExchangeBytes(own, arriving, between, hosts)
        rows.append((bytes_of, LINKS[row["device"]], int(row["sms"] or 0), seconds))
    return rows


def documented_rows(table: list[dict[str, str]], library: str, bound: str, op: str) -> list[Row]:
    """Return the exchanges that a library documents."""
    rows = []
    for row in table:
        if (row["library"], row["bound_by"], row["op"]) != (library, bound, op) or "Torch API" not in row[
            "note"
        ]:
            continue
        if row["dispatch_dtype"] == "FP8":
            continue
        ranks, hosts = int(row["ep"]), int(row["nodes"] or 1)
        chosen, experts = int(row["topk"]), LOCAL_EXPERTS * ranks
        own = int(row["tokens_per_rank"]) * int(row["hidden"]) * 2.0
        arriving = own * chance_of_expert(ranks, experts, chosen, 1, 1) * ranks
        of_hosts = own * chance_of_expert(hosts, experts, chosen, 1, 1) if hosts > 1 else 0.0
        counted = arriving if bound == "NVLink" else of_hosts * hosts
        link = next(rate for name, rate in LINKS.items() if name.startswith(row["hardware"].split()[0]))
        seconds = counted / (float(row["bandwidth_GBps"]) * 1e9)
        rows.append(
            (ExchangeBytes(own, arriving, of_hosts * (hosts - 1), hosts), link, int(row["sms"]), seconds)
        )
    return rows


def fitted(rows: list[Row], names: tuple[str, ...]) -> ExchangeConstants:
    """Return the constants of these names with the least errors; `base_s` is `BASE_S` where it is none of them."""

    def constants(x: np.ndarray) -> ExchangeConstants:
        return ExchangeConstants(**{"base_s": BASE_S, **dict(zip(names, map(float, np.exp(x)), strict=True))})

    def errors(x: np.ndarray) -> np.ndarray:
        return np.log(predicted(constants(x), rows) / np.array([row[3] for row in rows]))

    start = np.log([_BEGIN[name] for name in names])
    return constants(least_squares(errors, start, loss="soft_l1", f_scale=0.1).x)


def predicted(of: ExchangeConstants, rows: list[Row]) -> np.ndarray:
    """Return the seconds of exchanges by their constants."""
    return np.array([bytes_s(of, moved, link, NIC, units) for moved, link, units, _ in rows])


def error(of: ExchangeConstants, rows: list[Row]) -> float:
    """Return the mean error."""
    seconds = np.array([row[3] for row in rows])
    return float(np.mean(np.abs(predicted(of, rows) / seconds - 1)))


def main(path: str, documented: str) -> None:
    """Fit all libraries, and write them."""
    table, told = ([*csv.DictReader(Path(each).read_text().splitlines())] for each in (path, documented))
    lines = ["# Written by validation/fit_exchange.py; cost.exchange has the formula.",
             "# Measured exchanges: ai-dynamo/aiconfigurator @095f58a (Apache-2.0).",
             "# Documented ones: deepseek-ai/DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md (MIT).", "",
             "[libraries.all_to_all] # ours: no table of measurements has it", 'sends = "copies"']  # fmt: skip
    lines += [f"{place}.{op} = {{ base_s = 2e-05, inside_share = 0.7, between_share = 0.8 }}"
              for place in ("inside", "between") for op in ("dispatch", "combine")]  # fmt: skip
    written = set()
    for name, sends, place, library, where, names in (*FITS, *DOCUMENTED):
        if name not in written:
            lines += ["", f"[libraries.{name}]", f'sends = "{sends}"']
            lines += [f"multiprocessors = {MULTIPROCESSORS[name]}"] if name in MULTIPROCESSORS else []
            written.add(name)
        for op in ("dispatch", "combine"):
            if isinstance(where, str):
                rows = documented_rows(told, library, where, op)
            else:
                rows = rows_of(table, library, where, op)
            order = np.random.default_rng(0).permutation(len(rows))
            halves = [[rows[number] for number in order[half::2]] for half in (0, 1)]
            scores = [error(fitted(halves[half], names), halves[1 - half]) for half in (0, 1)]
            of = fitted(rows, names)
            text = f"{library}, {op}: mean error {100 * np.mean(scores):.1f} % of {len(rows)} rows, held out"
            others = rows_of(table, library, (8,), op) if where == (2, 4) else []
            text += f"; {100 * error(of, others):.1f} % of {len(others)} rows of 8 hosts" if others else ""
            print(text, flush=True)
            values = ", ".join(
                f"{key} = {value:.4g}" for key, value in vars(of).items() if value or key != "host_s"
            )
            both = (place, "between") if place == "inside" and where is None else (place,)
            lines += [f"# {text}", *(f"{each}.{op} = {{ {values} }}" for each in both)]
    CATALOG.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
