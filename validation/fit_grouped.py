"""Fit the constants of experts (`cost.grouped`) on measured layers, and write them to the catalog.

python validation/fit_grouped.py MEASURED.csv [DEVICE]

fits all chips, or one and keeps what the catalog has of others.

MEASURED.csv has the columns of AIConfigurator's tables of mixture-of-experts kernels (ai-dynamo/aiconfigurator,
Apache-2.0): device, backend, kernel, dtype, tokens, hidden, inter, topk, experts, tp, ep, distribution,
latency_ms.
Each chip, library and dtype has ten constants. Half of the rows, drawn by a seed, is fitted and the other half
scored, and the other way round: that is the error which is written beside the constants, which are then fitted on
all rows. A chip's constants in a dtype are those of the library with the least error.

Under a power law the timed rank is the most loaded one. Its rows are drawn as that source draws them
(`power_law_logits`): popularities from a bounded power law, experts dealt to ranks at random.
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from meshweave.cost.grouped import TILE_ROWS, Array, ExpertRows, GroupedConstants, grouped_seconds

CATALOG = Path(__file__).parents[1] / "src/meshweave/catalog/grouped.toml"
WITHOUT_GATE = {(1024, 2688), (2048, 5120), (2688, 1856), (8192, 5120)}
"""(hidden, inner) of models without a gate, which one library's rows are named for."""
ITEM_BYTES = {
    "bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625, "w4a16_mxfp4": 0.53125,
    "w4a8_mxfp4_mxfp8": 0.53125,
}  # fmt: skip
CHIPS = {
    "A100-SXM4-80GB": ("A100-SXM4-80GB", 108, 230e12, 1.5e12),
    "H100-SXM5-80GB": ("H100-SXM5-80GB", 132, 650e12, 2.8e12),
    "H200-SXM": ("H200-SXM", 132, 650e12, 4e12),
    "B200-SXM": ("B200-SXM", 148, 1500e12, 6e12),
    "GB200": ("GB200", 148, 1500e12, 6e12),
}
"""The chip's kernels in the catalog, its processors, and where the fit begins."""
LIKE = {
    "H200-SXM": "H100-SXM5-80GB", "H800-SXM5-80GB": "H100-SXM5-80GB", "H100-SXM-96GB-500W": "H100-SXM5-80GB",
    "GB200": "B200-SXM", "B300-SXM": "B200-SXM", "GB300": "B200-SXM",
}  # fmt: skip
MOST_ERROR = 0.2
"""A library with a greater error has kernels that ten constants do not describe: it is left out."""
_DRAWS = 12
_SEED = 0


@lru_cache(maxsize=4096)
def drawn_rows(tokens: int, experts: int, chosen: int, ranks: int, distribution: str) -> tuple[Array, ...]:
    """Return draws of the rows of each expert of the timed rank."""
    own, copies = experts // ranks, tokens * chosen
    if distribution == "balanced":
        if copies >= experts:
            return (np.full(own, copies / experts),)
        some = min(own, max(1, round(copies / ranks)))
        return (np.r_[np.ones(some), np.zeros(own - some)],)
    exponent, random, out = float(distribution.rpartition("_")[2]), np.random.default_rng(_SEED), []
    low, high = (1.0, tokens * 0.8) if copies > experts else (0.01, 2.0)
    ends = low ** (1 - exponent), high ** (1 - exponent)
    for _ in range(_DRAWS):
        drawn = ((ends[1] - ends[0]) * random.random(experts) + ends[0]) ** (1 / (1 - exponent))
        counts = np.round(drawn / drawn.sum() * copies)
        random.shuffle(counts)
        of_ranks = counts.reshape(ranks, own)
        out.append(of_ranks[of_ranks.sum(1).argmax()])
    return tuple(out)


def rows_of(table: list[dict[str, str]]) -> tuple[ExpertRows, Array]:
    """Return the layers of a table, and their seconds."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in table:
        names = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep")
        tokens, hidden, inter, chosen, experts, tensor, ranks = (int(row[name]) for name in names)
        is_plain = (hidden, inter) in WITHOUT_GATE and row["backend"].startswith("TRT")
        draws = drawn_rows(tokens, experts, chosen, ranks, row["distribution"])
        columns["tokens"].append(tokens)
        columns["hidden"].append(hidden)
        columns["inner"].append(inter // tensor)
        columns["columns"].append(1 if is_plain else 2)
        columns["rows"].append(np.mean([draw.sum() for draw in draws]))
        columns["active"].append(max(np.mean([(draw > 0).sum() for draw in draws]), 1.0))
        tiles = [[np.ceil(draw / rows).sum() for rows in TILE_ROWS] for draw in draws]
        columns["tiles"].append(np.mean(tiles, axis=0))
    seconds = np.array([float(row["latency_ms"]) * 1e-3 for row in table])
    return ExpertRows(**{name: np.array(values, dtype=float) for name, values in columns.items()}), seconds


def part_of(rows: ExpertRows, numbers: Array) -> ExpertRows:
    """Return some of the layers."""
    return ExpertRows(**{name: values[numbers] for name, values in vars(rows).items()})


def constants_of(x: Array, units: int, item_bytes: float) -> GroupedConstants:
    """Return constants of the numbers of a fit, which have no bounds."""
    launch, flops, memory, tile, wave, power, passes, slowdown, token, operand = np.clip(x, -40, 40)
    rate = float(np.exp(memory))
    return GroupedConstants(
        units, item_bytes, float(np.exp(launch)), float(np.exp(flops)), float(np.exp(operand)), rate,
        float(np.exp(tile)), float(1 / (1 + np.exp(-wave))), float(1 + np.exp(min(power, 3.0))),
        float(np.exp(passes)), float(np.exp(min(slowdown, 0.0))), float(np.exp(token)),
    )  # fmt: skip


def fitted(rows: ExpertRows, seconds: Array, chip: tuple[str, int, float, float], item: float) -> Array:
    """Return the numbers with the least errors."""
    _, units, flops, memory = chip
    unit = memory * 4 / units
    rates = np.log(flops), np.log(memory)
    times = np.log(2e-5), np.log(1e-6), np.log(1e-9)
    numbers = times[0], *rates, times[1], 0.0, np.log(2), 0.0, np.log(0.01), times[2], np.log(unit)
    begin = np.array(numbers)

    def errors(x: Array) -> Array:
        out: Array = np.log(grouped_seconds(constants_of(x, units, item), rows) / seconds)
        return out

    random, best = np.random.default_rng(_SEED), None
    for scale in (0.0, 0.5):
        start = begin + scale * random.standard_normal(len(begin))
        result = least_squares(errors, start, loss="soft_l1", f_scale=0.1, max_nfev=200)
        best = result if best is None or result.cost < best.cost else best
    assert best is not None
    found: Array = best.x
    return found


def held_out_error(
    rows: ExpertRows, seconds: Array, chip: tuple[str, int, float, float], item: float
) -> float:
    """Return the mean error of the rows that were not fitted."""
    order = np.random.default_rng(_SEED).permutation(len(seconds))
    errors = []
    for half in (0, 1):
        mine, others = order[half::2], order[1 - half :: 2]
        x = fitted(part_of(rows, mine), seconds[mine], chip, item)
        predicted = grouped_seconds(constants_of(x, chip[1], item), part_of(rows, others))
        errors += list(np.abs(predicted / seconds[others] - 1))
    return float(np.mean(errors))


def main(path: str, only: str = "") -> None:
    """Fit all chips and dtypes, or those of one device, and write the best library of each."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    with Path(path).open() as file:
        for row in csv.DictReader(file):
            if only in ("", row["device"]):
                groups[row["device"], row["dtype"], row["backend"]].append(row)
    best: dict[tuple[str, str], tuple[float, str, GroupedConstants]] = {}
    if only:
        for name, of in tomllib.loads(CATALOG.read_text())["chips"].items():
            kept = {(name, dtype): entry for dtype, entry in of.items() if name != CHIPS[only][0]}
            best |= {key: (x["held_out_error"], x["library"], GroupedConstants(**x["constants"]))
                     for key, x in kept.items() if x["held_out_error"] <= MOST_ERROR}  # fmt: skip
    for (device, dtype, backend), table in sorted(groups.items()):
        (rows, seconds), chip, item = rows_of(table), CHIPS[device], ITEM_BYTES[dtype]
        error = held_out_error(rows, seconds, chip, item)
        print(f"{device} {dtype} {backend}: {100 * error:.1f} %", flush=True)
        constants = constants_of(fitted(rows, seconds, chip, item), chip[1], item)
        if error > MOST_ERROR:
            continue
        if (chip[0], dtype) not in best or error < best[chip[0], dtype][0]:
            best[chip[0], dtype] = error, backend, constants
    lines = ["# Written by validation/fit_grouped.py; cost.grouped has the formula."]
    lines.append("# Measured layers: ai-dynamo/aiconfigurator @095f58a (Apache-2.0).")
    lines += ["", "[like] # chips of the same multiprocessors, whose constants are those of the chip named"]
    lines += [f'"{chip}" = "{other}"' for chip, other in LIKE.items()]
    for (chip_name, dtype), (error, backend, constants) in sorted(best.items()):
        lines += ["", f'[chips."{chip_name}"."{dtype}"]', f'library = "{backend}"']
        lines += [f"held_out_error = {error:.3f}", f'[chips."{chip_name}"."{dtype}".constants]']
        lines += [f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}"
                  for name, value in vars(constants).items()]  # fmt: skip
    CATALOG.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
