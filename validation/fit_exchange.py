"""Fit the constants of dispatch and combine (`cost.exchange`) on measured exchanges, and write the catalog.

python validation/fit_exchange.py MEASURED.csv

MEASURED.csv has the columns of AIConfigurator's tables of exchanges between experts (ai-dynamo/aiconfigurator,
Apache-2.0): device, library, nodes, ranks, tokens_per_rank, hidden, topk, experts, dtype, sms, dispatch_us,
combine_us. Of each library, op and place (inside a host, between hosts) at most four constants are fitted on rows
of 64 tokens and more. The mean error of each is written beside them; rows that were not fitted are scored besides,
by halves.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from meshweave.cost.exchange import ExchangeBytes, ExchangeConstants, bytes_s, share_with

CATALOG = Path(__file__).parents[1] / "src/meshweave/catalog/exchange.toml"
LINKS = {"H100-SXM5-80GB": 450e9, "H200-SXM": 450e9, "B200-SXM": 900e9, "B300-SXM": 900e9, "GB200": 900e9}
NIC = 50e9
LEAST_TOKENS = 64
MULTIPROCESSORS = {"deepep": 20}
_BEGIN = {
    "base_s": 3e-5,
    "unit_bytes_per_s": 1.5e10,
    "inside_share": 0.8,
    "between_share": 0.8,
    "sent": 1.0,
}
_UNITS = "unit_bytes_per_s"
FITS = (
    (
        "deepep",
        "hosts",
        "inside",
        "DeepEP normal, SGLang 0.5.12",
        (1,),
        ("unit_bytes_per_s", "inside_share", "sent"),
    ),
    (
        "deepep",
        "hosts",
        "between",
        "DeepEP normal, SGLang 0.5.0",
        (2, 4, 8),
        ("unit_bytes_per_s", "between_share"),
    ),
    ("trtllm_one_sided", "ranks", "inside", "TRT-LLM 1.2.0rc6 NVLinkOneSided", None, ("inside_share",)),
    ("trtllm_two_sided", "ranks", "inside", "TRT-LLM 1.2.0rc6 NVLinkTwoSided", None, ("inside_share",)),
)
"""Name, what it sends, place, library in the table, numbers of nodes, and what is fitted beside `base_s`."""

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
        arriving = own * share_with(ranks, experts, chosen, 1, 1) * ranks
        between = (
            own * share_with(number, experts, chosen, 1, 1) * (number - 1) if nodes and number > 1 else 0.0
        )
        bytes_of = ExchangeBytes(own, arriving, between)
        rows.append((bytes_of, LINKS[row["device"]], int(row["sms"] or 0), float(row[f"{op}_us"]) * 1e-6))
    return rows


def fitted(rows: list[Row], names: tuple[str, ...]) -> ExchangeConstants:
    """Return the constants of these names, and `base_s`, with the least errors."""
    names = ("base_s", *names)

    def constants(x: np.ndarray) -> ExchangeConstants:
        return ExchangeConstants(**dict(zip(names, map(float, np.exp(x)), strict=True)))

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


def main(path: str) -> None:
    """Fit all libraries, and write them."""
    with Path(path).open() as file:
        table = list(csv.DictReader(file))
    lines = ["# Written by validation/fit_exchange.py; cost.exchange has the formula.",
             "# Measured exchanges: ai-dynamo/aiconfigurator @095f58a (Apache-2.0).", "",
             "[libraries.all_to_all] # ours: no table of measurements has it", 'sends = "copies"']  # fmt: skip
    lines += [f"{place}.{op} = {{ base_s = 2e-05, inside_share = 0.7, between_share = 0.8 }}"
              for place in ("inside", "between") for op in ("dispatch", "combine")]  # fmt: skip
    written = set()
    for name, sends, place, library, nodes, names in FITS:
        if name not in written:
            lines += ["", f"[libraries.{name}]", f'sends = "{sends}"']
            lines += [f"multiprocessors = {MULTIPROCESSORS[name]}"] if name in MULTIPROCESSORS else []
            written.add(name)
        for op in ("dispatch", "combine"):
            rows = rows_of(table, library, nodes, op)
            order = np.random.default_rng(0).permutation(len(rows))
            halves = [[rows[number] for number in order[half::2]] for half in (0, 1)]
            scores = [error(fitted(halves[half], names), halves[1 - half]) for half in (0, 1)]
            of = fitted(rows, names)
            text = f"{library}, {op}: mean error {100 * np.mean(scores):.1f} % of {len(rows)} rows, held out"
            print(text, flush=True)
            values = ", ".join(f"{key} = {value:.4g}" for key, value in vars(of).items())
            both = (place, "between") if place == "inside" and nodes is None else (place,)
            lines += [f"# {text}", *(f"{each}.{op} = {{ {values} }}" for each in both)]
    CATALOG.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
