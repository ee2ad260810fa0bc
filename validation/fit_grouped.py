"""Fit the constants of experts (`cost.grouped`) on measured layers, and write them to the catalog.

python validation/fit_grouped.py MEASURED.csv [DEVICE]

fits all chips, or one and keeps what the catalog has of others.

MEASURED.csv has the columns of AIConfigurator's tables of mixture-of-experts kernels (ai-dynamo/aiconfigurator,
Apache-2.0): device, backend, kernel, dtype, tokens, hidden, inter, topk, experts, tp, ep, distribution,
latency_ms.
A library runs other kernels for other models. Those of one chip, library, kernel and dtype have ten constants.
Half of the rows, drawn by a seed, is fitted and the other half scored, and the other way round: that is the error
which is written beside the constants, which are then fitted on all rows. A second error is of shapes (hidden,
inter, experts) of which no row was fitted. A chip's constants in a dtype are those of the library with the least
first error over all of its kernels, and of the kernel that it runs most, if that ran more than one shape.

What was timed is computed as that source does it (`collector/helper.py` and `collect_moe.py` there): popularities
are drawn from a bounded power law, no expert has more rows than there are tokens, and the most loaded rank is
timed; balanced rows are dealt by a stride, and rank 0 is timed. Some of SGLang's Triton rows are of tokens with a
copy here alone, and every copy whose expert is elsewhere is computed by expert 0.
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from meshweave.cost.grouped import TILE_ROWS, Array, ExpertRows, GroupedConstants, grouped_seconds

CATALOG = Path(__file__).parents[1] / "src/meshweave/catalog/grouped.toml"
WITHOUT_GATE = {(1024, 2688), (2048, 5120), (2688, 1856), (8192, 5120)}
"""(hidden, inner) of models without a gate."""
ALL_GATED = "SGLang 0.5.10"
"""A library that was timed with a gate for these models too."""
ELSEWHERE_TO_EXPERT_0 = {"SGLang 0.5.10": (8, 16, 128, 160, 256, 512), "SGLang 0.5.14": (8,)}
"""Of a library, the numbers of experts whose Triton rows compute copies of other ranks' experts."""
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
"""The chip's kernels in the catalog, its processors, and where the fit begins: FLOP/s in bf16, bytes/s."""
RATE = {"fp8": 2.0, "fp8_block": 2.0, "nvfp4": 4.0, "w4a8_mxfp4_mxfp8": 2.0}
"""Of a dtype's products, over bf16's."""
LIKE = {
    "H200-SXM": "H100-SXM5-80GB", "H800-SXM5-80GB": "H100-SXM5-80GB", "H100-SXM-96GB-500W": "H100-SXM5-80GB",
    "GB200": "B200-SXM", "B300-SXM": "B200-SXM", "GB300": "B200-SXM",
}  # fmt: skip
KERNELS = {"moe_torch_flow_nongated": "moe_torch_flow_cutlass"}
"""Names of the source for the same kernel."""
MOST_ERROR = 0.15
"""A library with a greater error has kernels that ten constants do not describe: it is left out."""
WIDTHS = np.array([1, 0.3, 0.3, 1, 1, 1, 1, 1.5, 1, 1.5])
PULL = 0.05
"""Constants that rows say nothing of stay where the fit begins: PULL widths of error for each width off."""
_DRAWS = 12
_FOLDS = 4
_SEED = 0
_HIGHEST = 128
Layer = tuple[int, int, int, int, str]
"""Tokens, experts, experts of a token, ranks, distribution."""


def topped_up(rows: Array, copies: int, most: int) -> Array:
    """Return the rows of each rank's experts, shape (ranks, experts of a rank), with `copies` more.

    Ranks take one in turn for their expert with the fewest rows, none above `most`.
    """
    out = rows.copy()
    while copies > 0 and (out < most).any():
        open_ranks = np.flatnonzero((out < most).any(axis=1))
        each, more = divmod(copies, len(open_ranks))
        for turn, rank in enumerate(open_ranks):
            mine = out[rank].copy()
            share = min(each + (turn < more), int((most - mine).sum()))
            low, high = int(mine.min()), most
            while low < high:
                level = (low + high + 1) // 2
                low, high = (level, high) if np.maximum(level - mine, 0).sum() <= share else (low, level - 1)
            out[rank] = np.maximum(mine, low)
            rest = share - int((out[rank] - mine).sum())
            out[rank, np.flatnonzero(out[rank] == low)[:rest]] += 1
            copies -= share
    return out


@lru_cache(maxsize=4096)
def drawn_rows(layer: Layer) -> tuple[tuple[Array, int], ...]:
    """Return draws of the timed rank: the rows of each expert, and of how many tokens it has copies."""
    tokens, experts, chosen, ranks, distribution = layer
    own, copies = experts // ranks, tokens * chosen
    if distribution == "balanced":
        stride, token = -(-experts // chosen), np.arange(tokens)[:, None]
        first = token if tokens >= stride else token * stride / tokens
        choices = (first + np.arange(chosen) * stride).astype(int) % experts
        mine = choices < own
        return ((np.bincount(choices[mine], minlength=own).astype(float), int(mine.any(1).sum())),)
    exponent, random, out = float(distribution.rpartition("_")[2]), np.random.default_rng(_SEED), []
    low, high = (1.0, tokens * 0.8) if copies > experts else (0.01, 2.0)
    ends = low ** (1 - exponent), high ** (1 - exponent)
    for _ in range(_DRAWS):
        drawn = ((ends[1] - ends[0]) * random.random(experts) + ends[0]) ** (1 / (1 - exponent))
        counts = np.round(drawn / drawn.sum() * copies).astype(int).reshape(ranks, own)
        over = int(np.maximum(counts - tokens, 0).sum())
        counts = topped_up(np.minimum(counts, tokens), over, tokens)
        missing = copies - int(counts.sum())
        counts = topped_up(counts, missing, tokens) if missing > 0 else -topped_up(-counts, -missing, 0)
        most_loaded = counts.sum(1).argmax()
        counts[[0, most_loaded]] = counts[[most_loaded, 0]]
        order = np.argsort(-counts.ravel(), kind="stable")
        choices = np.repeat(order, counts.ravel()[order]).reshape(chosen, tokens)
        out.append((counts[0].astype(float), int((choices < own).any(0).sum())))
    return tuple(out)


def rows_of(table: list[dict[str, str]]) -> tuple[ExpertRows, Array]:
    """Return the layers of a table, and their seconds."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in table:
        names = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep")
        tokens, hidden, inter, chosen, experts, tensor, ranks = (int(row[name]) for name in names)
        is_plain = (hidden, inter) in WITHOUT_GATE and row["backend"] != ALL_GATED
        draws = drawn_rows((tokens, experts, chosen, ranks, row["distribution"]))
        if (
            ranks > 1
            and row["kernel"].endswith("fused_moe_triton")
            and row["dtype"] in ("bfloat16", "fp8_block")
            and experts in ELSEWHERE_TO_EXPERT_0.get(row["backend"], ())
        ):
            draws = tuple((np.r_[d[0] + n * chosen - d.sum(), d[1:]], n) for d, n in draws)
            tokens = np.mean([n for _, n in draws])
        held = np.mean([draw.sum() for draw, _ in draws])
        height = min(max(2 ** np.ceil(np.log2(tokens * chosen / experts)), 8), _HIGHEST)
        columns["tokens"].append(tokens)
        columns["absent"].append(max(tokens * chosen - held, 0))
        columns["absent_tiles"].append(columns["absent"][-1] / height)
        columns["hidden"].append(hidden)
        columns["inner"].append(inter // tensor)
        columns["columns"].append(1 if is_plain else 2)
        columns["rows"].append(held)
        columns["active"].append(max(np.mean([(draw > 0).sum() for draw, _ in draws]), 1.0))
        tiles = [[np.ceil(draw / rows).sum() for rows in TILE_ROWS] for draw, _ in draws]
        columns["tiles"].append(np.mean(tiles, axis=0))
    seconds = np.array([float(row["latency_ms"]) * 1e-3 for row in table])
    return ExpertRows(**{name: np.array(values, dtype=float) for name, values in columns.items()}), seconds


def part_of(rows: ExpertRows, numbers: Array) -> ExpertRows:
    """Return some of the layers."""
    return ExpertRows(**{name: values[numbers] for name, values in vars(rows).items()})


@dataclass(frozen=True)
class Fit:
    """Layers to fit, their seconds, and what is known of the chip and dtype (`CHIPS`, `ITEM_BYTES`, `RATE`)."""

    rows: ExpertRows
    seconds: Array
    units: int
    flops_per_s: float
    bytes_per_s: float
    item_bytes: float

    def part(self, numbers: Array) -> Fit:
        """Return the fit of some of the layers."""
        return replace(self, rows=part_of(self.rows, numbers), seconds=self.seconds[numbers])

    def constants(self, x: Array) -> GroupedConstants:
        """Return constants of the numbers of a fit, which have no bounds."""
        out = np.exp(np.clip(x, -40, 40))
        return GroupedConstants(
            self.units, self.item_bytes, *(float(number) for number in out[:5]),
            float(1 + min(out[5], np.exp(3.0))), *(float(number) for number in out[6:]),
        )  # fmt: skip

    def fitted(self) -> GroupedConstants:
        """Return the constants with the least errors."""
        unit = self.bytes_per_s * 4 / self.units
        begin = np.log([2e-5, self.flops_per_s, unit, self.bytes_per_s, 1e-6, 2, 1, 0.3, 0.3, 3e-7])

        def errors(x: Array) -> Array:
            out = np.log(grouped_seconds(self.constants(x), self.rows) / self.seconds)
            return np.r_[out, np.clip(PULL * (x - begin) / WIDTHS, -3, 3)]

        random, best = np.random.default_rng(_SEED), None
        for scale in (0.0, 0.5):
            start = begin + scale * random.standard_normal(len(begin))
            result = least_squares(errors, start, loss="soft_l1", f_scale=0.1, max_nfev=200)
            best = result if best is None or result.cost < best.cost else best
        assert best is not None
        return self.constants(best.x)

    def errors(self, folds: list[Array]) -> Array:
        """Return the errors of rows that were not fitted: those of each fold, by constants of the others."""
        out = np.full(len(self.seconds), np.nan)
        for fold in folds if len(folds) > 1 else []:
            others = np.setdiff1d(np.arange(len(out)), fold)
            scored = self.part(fold)
            predicted = grouped_seconds(self.part(others).fitted(), scored.rows)
            out[fold] = np.abs(predicted / scored.seconds - 1)
        return out


def folds_of(table: list[dict[str, str]]) -> tuple[list[Array], list[Array]]:
    """Return the rows as two halves drawn by a seed, and as folds that share no shape."""
    order = np.random.default_rng(_SEED).permutation(len(table))
    shapes = [(row["hidden"], row["inter"], row["experts"]) for row in table]
    names = sorted(set(shapes))
    folds = np.random.default_rng(_SEED + 1).permutation(len(names)) % _FOLDS
    of_rows = np.array([folds[names.index(shape)] for shape in shapes])
    return [order[::2], order[1::2]], [np.flatnonzero(of_rows == fold) for fold in sorted(set(folds))]


def main(path: str, only: str = "") -> None:
    """Fit all chips and dtypes, or those of one device, print their errors, and write the best library of each."""
    groups: dict[tuple[str, str, str], dict[str, list[dict[str, str]]]] = {}
    with Path(path).open() as file:
        for row in csv.DictReader(file):
            if only in ("", row["device"]):
                kernel = KERNELS.get(row["kernel"], row["kernel"])
                kernels = groups.setdefault((row["device"], row["dtype"], row["backend"]), defaultdict(list))
                kernels[kernel].append(row)
    best: dict[tuple[str, str], dict[str, Any]] = {}
    if only:
        for name, of in tomllib.loads(CATALOG.read_text())["chips"].items():
            best |= {(name, dtype): entry for dtype, entry in of.items() if name != CHIPS[only][0]}
    least: dict[tuple[str, str], float] = {}
    for (device, dtype, backend), kernels in sorted(groups.items()):
        chip, units, flops, memory = CHIPS[device]
        fits, scored = [], []
        for kernel, table in sorted(kernels.items(), key=lambda item: -len(item[1])):
            fit = Fit(*rows_of(table), units, flops * RATE.get(dtype, 1.0), memory, ITEM_BYTES[dtype])
            halves, shapes = folds_of(table)
            errors, unseen = fit.errors(halves), float(fit.errors(shapes).mean())
            fits.append((fit, {"library": backend, "kernel": kernel, "held_out_error": float(errors.mean()),
                               "unseen_error": unseen}))  # fmt: skip
            scored.append(errors)
            label = f"{device} {dtype} {backend} {kernel}: {len(table)} rows"
            print(f"{label}, {100 * errors.mean():.1f} %, unseen shapes {100 * unseen:.1f} %", flush=True)
        error = float(np.concatenate(scored).mean())
        print(f"{device} {dtype} {backend}: {100 * error:.1f} %", flush=True)
        fit, entry = fits[0]
        if not np.isnan(entry["unseen_error"]) and error <= min(MOST_ERROR, least.get((chip, dtype), 1.0)):
            least[chip, dtype] = error
            best[chip, dtype] = entry | {"constants": vars(fit.fitted())}
    lines = ["# Written by validation/fit_grouped.py; cost.grouped has the formula."]
    lines.append("# Measured layers: ai-dynamo/aiconfigurator @095f58a (Apache-2.0).")
    lines += ["", "[like] # chips of the same multiprocessors, whose constants are those of the chip named"]
    lines += [f'"{chip}" = "{other}"' for chip, other in LIKE.items()]
    for (chip, dtype), entry in sorted(best.items()):
        lines += ["", f'[chips."{chip}"."{dtype}"]', f'library = "{entry["library"]}"']
        lines += [f'kernel = "{entry["kernel"]}"']
        lines += [f"{name} = {entry[name]:.3f}" for name in ("held_out_error", "unseen_error")]
        lines += [f'[chips."{chip}"."{dtype}".constants]']
        lines += [f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}"
                  for name, value in entry["constants"].items()]  # fmt: skip
    CATALOG.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
