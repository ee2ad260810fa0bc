"""Numbers of validation/papers.md are those of the saved results."""

from __future__ import annotations

import itertools
import json
import runpy
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from meshweave.algorithms.step.stacks import load_stack
from meshweave_studies.alpacomm.readings import RIVAL_ROWS
from meshweave_studies.atp.framework import HOST_OF
from meshweave_studies.atp.readings import RATES
from meshweave_studies.atp.readings import READINGS as READINGS_OF_ATP
from meshweave_studies.t3.readings import TABLE_1, VARIATIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "validation" / "papers.md").read_text(encoding="utf-8")
GPTS = ("GPT 1.3B (2, 2, 2)", "GPT 2.6B (2, 2, 2)", "GPT 2.6B (4, 1, 2)")
U_TRANSFORMERS = tuple(f"U-Transformer {size}" for size in ("1B", "2.1B", "2.1B, fp32", "2.1B, fitted"))
SUB_LAYER_READINGS = ("occupancy", "link-75", "link-90", "occupancy-75", "rows", "occupancy-plain-sets")
ATP_READINGS = ("atp", *(f"atp-{name}" for name in READINGS_OF_ATP if name != RATES))
T3_TABLES = ("t3", *(f"t3-{name}" for name in SUB_LAYER_READINGS))
GAINS = ("zb_1p", "zb_2p", "interleaved")


def saved(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        (ROOT / "validation" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )["rows"]
    return rows


ALPACOMM, ZERO_BUBBLE = saved("alpacomm-p3.8xlarge"), saved("zero-bubble-dgx-a100")


def section(title: str) -> str:
    """Return the text of a section of any level, its lines joined."""
    start = PAGE.index(f"# {title}\n")
    level = PAGE[:start].rsplit("\n", 1)[1] + "#"
    return PAGE[start:].split(f"\n{level} ", 1)[0]


def counts(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row["verdict"] for row in rows)


def test_counts_of_alpacomm() -> None:
    of = counts([row for row in ALPACOMM if row["counts"]])
    text = " ".join(section("AlpaComm").split())
    assert (
        f"{len(ALPACOMM)} rows on `p3.8xlarge`, of which {of.total()} count: {of['holds']} hold, "
        f"{of['near']} are near, {of['differs']} differ."
    ) in text


@pytest.mark.parametrize(
    ("label", "name", "cases", "digits", "unit"),
    [
        ("eager-1F1B over all-gather without overlap | 1.5x", "end_to_end", U_TRANSFORMERS, 2, "x"),
        ("1F1B with overlap over broadcast without | 1.30x", "overlap_gain", U_TRANSFORMERS, 2, "x"),
        ("eager-1F1B over 1F1B with overlap | 1.15x", "eager_gain", U_TRANSFORMERS, 2, "x"),
        (
            "overlap slower than eager-1F1B, 4 micro-batches | 3 %",
            "few_micro_batches",
            U_TRANSFORMERS,
            0,
            " %",
        ),
        ("share of the bound | over 75 %", "share_of_bound", U_TRANSFORMERS, 0, " %"),
        ("eager-1F1B over all-gather without overlap | 1.1x", "end_to_end", GPTS, 2, "x"),
        ("share of the bound | over 75 %", "share_of_bound", GPTS, 0, " %"),
    ],
)
def test_rows_of_alpacomms_training(
    label: str, name: str, cases: tuple[str, ...], digits: int, unit: str
) -> None:
    rows = {row["model"]: row for row in ALPACOMM if row["id"] == name}
    ours = ", ".join(f"{rows[case]['ours']:.{digits}f}{unit}" for case in cases)
    verdicts = ", ".join(rows[case]["verdict"] for case in cases)
    assert f"| {label} | {ours} | {verdicts} |" in section("Training")


def test_prose_of_alpacomms_training() -> None:
    values = {(row["id"], row["model"]): row["ours"] for row in ALPACOMM}
    text = " ".join(section("Training").split())
    delay = max(value for (name, _), value in values.items() if name == "delay_gain")
    for sentence in (
        f"{values['share_of_bound_goal', 'lowest']:.1f} % at least",
        f"{values['signal_gain', 'largest']:.2f} times the all-gathers",
        f"eager-1F1B gains {values['end_to_end', U_TRANSFORMERS[3]]:.2f}x",
        f"add {100 * (delay - 1):.1f} % at most",
    ):
        assert sentence in text


def test_prose_of_alpacomms_readings() -> None:
    tables = {name: saved(f"alpacomm-{name}") for name in ("p3.8xlarge", "messages", "alpa")}
    values = {name: {(row["id"], row["model"]): row["ours"] for row in rows} for name, rows in tables.items()}
    alpa, text = values["alpa"], " ".join(section("Readings of AlpaComm").split())
    scan = ROOT / "benchmarks" / "results" / "reshard_packing.json"
    packing = json.loads(scan.read_text(encoding="utf-8"))["rows"]
    ratios = {
        rivals: [list(one["over_broadcast"].values()) for one in packing if one["rivals"] == rivals]
        for rivals in ("planned", "public")
    }
    planned = [ratio for of_rate in ratios["planned"] for ratio in of_rate]
    changes = [
        abs(ours / values["p3.8xlarge"][key] - 1)
        for key, ours in values["messages"].items()
        if key[0] in RIVAL_ROWS and isinstance(ours, float) and values["p3.8xlarge"][key] >= 1
    ]
    for sentence in (
        f"{alpa['uneven_drop', 'gpus']:.0f} % longer than 4",
        f"3 hosts {alpa['uneven_drop', 'hosts']:.0f} %",
        f"case 8 gives {alpa['gather_crosses', 'largest']:.2f}x",
        f"({alpa['similar', 'case5']:.3f} and {alpa['similar', 'case6']:.3f})",
        f"over 4 hosts it takes {alpa['gather_two_t', 'hosts4']:.2f} t",
        f"Ratios change by {100 * max(changes):.1f} % at most",
        f"the all-gather takes {min(planned):.1f} to {max(planned):.1f} times",
        f"falls from {max(ratios['public'][0]):.1f} to {min(ratios['public'][-1]):.1f}",
    ):
        assert sentence in text, sentence


def test_zero_bubble() -> None:
    text, of = section("Zero Bubble"), counts(ZERO_BUBBLE)
    assert (
        f"{len(ZERO_BUBBLE)} rows of table 4 on `dgx-a100`, fitted to nothing: {of['holds']} hold, "
        f"{of['near']} are near, {of['differs']} differ."
    ) in text
    labels = {"flops": "FLOPs at one rate", "kernels": "kernels by shape", "profiled": "the authors' profile"}
    for reading, label in labels.items():
        errors = [errors_of(f"{gain}_{reading}") for gain in GAINS]
        every = [error for of_gain in errors for error in of_gain]
        cells = [f"{mean(map(abs, every)):.1f}", *(f"{mean(of_gain):+.1f}" for of_gain in errors)]
        assert f"| {label} | {' | '.join(cells)} | {max(every, key=abs):+.1f} |" in text
    memory = [
        error for name in ("1f1b", "interleaved", "zb_1p", "zb_2p") for error in errors_of(f"memory_{name}")
    ]
    assert f"{min(memory):+.1f} to {max(memory):+.1f} % off" in " ".join(text.split())


def errors_of(name: str) -> list[float]:
    return [100 * (row["ours"] / row["published"] - 1) for row in ZERO_BUBBLE if row["id"] == name]


def test_the_page_of_t3s_constants_is_that_of_the_saved_numbers() -> None:
    script = runpy.run_path(str(ROOT / "validation" / "t3_constants.py"))
    rows = script["saved"]()
    assert set(rows) <= {TABLE_1, *VARIATIONS}
    assert script["OUT"].with_suffix(".md").read_text(encoding="utf-8") == script["page"](rows)


def test_prose_of_few_micro_batches() -> None:
    details = [row["detail"] for row in ALPACOMM if row["id"] == "few_micro_batches"]
    slower = [dict(part.split(": ") for part in detail.split("; ")[1].split(", ")) for detail in details]
    assert {of["2"] for of in slower} == {"0.0 %"} and len(slower) == 4
    least = min(float(of[count].removesuffix(" %")) for of in slower for count in ("3", "8", "16"))
    assert f"with 3 and more overlap alone is {least:.0f} % slower at least" in " ".join(
        section("Training").split()
    )


def test_prose_of_atps_readings() -> None:
    rows = [row for row in saved("atp-framework") if row["counts"]]
    table_3 = [row for row in rows if row["id"].startswith("table3_")]
    differ = {row["model"] for row in table_3 if row["verdict"] == "differs"}
    assert {model for model in differ if model[:3] in ("ic2", "ic3")} == {"ic3-m2"}
    assert "all rows of IC2 and IC3 hold or are near, but for M2 on IC3" in " ".join(
        section("Readings of ATP").split()
    )
    holds = {}
    for name in ATP_READINGS:
        of = counts([row for row in saved(name) if row["counts"]])
        assert of["holds"] + of["near"] < 2 / 3 * of.total()
        holds[name] = of["holds"]
    assert max(holds, key=lambda name: holds[name]) == "atp-framework-host"
    host = load_stack(HOST_OF).host
    assert host is not None and host.waits
    kernel, layer = f"{1e6 * host.kernel_s:.0f} us", f"{1e3 * host.layer_s:.1f} ms"
    assert f"kernels ({kernel} each) and the Python code of a layer ({layer})" in " ".join(
        section("Readings of ATP").split()
    )
    chosen = {
        row["model"]: row["ours"]
        for row in saved("atp-framework-host")
        if row["id"] == "simulated_choice" and row["model"][:3] in ("ic2", "ic3")
    }
    assert {model for model, columns in chosen.items() if columns == 1} == {"ic3-m1", "ic3-m2"}
    assert set(chosen.values()) == {1, 2}
    choices = [
        row["ours"] for row in rows if row["id"] == "simulated_choice" and row["model"][:3] in ("ic2", "ic3")
    ]
    assert set(choices) == {2}


def test_prose_of_slicings_shapes() -> None:
    before, after = (
        {(row["id"], row["model"]): row for row in saved(name) if row["counts"]}
        for name in ("slicing-pvc-node-h100-node", "slicing-shapes")
    )
    missed = {key for key, row in before.items() if row["verdict"] == "differs"}
    mended = {key for key in missed if after[key]["verdict"] == "holds"}
    named = ("column_over_inner", "pvc-mlp1"), ("leaders", "pvc-mlp2"), ("c_stays_on_h100", "h100-mlp2")
    assert len(missed) == 9 and mended == set(named)
    assert all(after[key]["ours"] < 0.5 for key in named[1:])


def test_prose_of_t3s_constants() -> None:
    rows = runpy.run_path(str(ROOT / "validation" / "t3_constants.py"))["saved"]()
    base = rows[TABLE_1]["mca_faster"]
    quiet = [
        name
        for name in rows
        if name.split(" ")[0] in ("threshold", "memory.starvation", "memory.age_limit", "memory.turn_limit")
    ]
    assert len(quiet) == 10
    assert all(abs(rows[name]["mca_faster"] - base) <= 1.05 for name in quiet)
    assert set(rows) == {TABLE_1, *VARIATIONS}


def test_prose_of_t3s_thresholds() -> None:
    rows = runpy.run_path(str(ROOT / "validation" / "t3_constants.py"))["saved_thresholds"]()
    assert len(rows) == 16 and {row["threshold"] for row in rows.values()} == {65}
    for name, row in rows.items():
        for entries in ("5", "10", "30"):
            assert row[f"{entries} drained"] >= row[entries] - 0.05
            if name.endswith(("FC-1", "FC-2")):
                assert row[entries] - row["own"] <= 2.15
            if name.endswith("OP"):
                assert row[entries] < row["own"]
    assert all(row["65 drained"] == row["65"] == row["own"] for row in rows.values())
    mended = [row["5 drained"] - row["5"] for row in rows.values()]
    assert max(mended) > 5
    worst = max(1 - row["5"] / row["own"] for name, row in rows.items() if name.endswith("OP"))
    assert f"cost OPs up to {100 * worst:.0f} % of their gain" in " ".join(section("Readings of T3").split())


def test_the_page_of_what_t3_proposes_is_that_of_the_saved_numbers() -> None:
    script = runpy.run_path(str(ROOT / "validation" / "t3_consumer.py"))
    saved_rows = json.loads(script["OUT"].read_text(encoding="utf-8"))
    assert script["OUT"].with_suffix(".md").read_text(encoding="utf-8") == script["page"](saved_rows)


def test_prose_of_t3s_readings() -> None:
    holds = {
        name: counts([row for row in saved(f"t3-{name}") if row["counts"]])["holds"]
        for name in SUB_LAYER_READINGS
    }
    assert max(holds, key=lambda name: holds[name]) == "occupancy"
    held = (
        ("mca", "geomean"),
        ("mca", "max"),
        ("ideal_case", "T-NLG TP 16, FC-1"),
        ("ideal_case", "Mega-GPT-2 TP 16, OP"),
    )
    for name in ("link-75", "link-90"):
        verdicts = {(row["id"], row["model"]): row["verdict"] for row in saved(f"t3-{name}")}
        assert {verdicts[row] for row in held} == {"holds"}
        assert {verdicts["near_memory", degree] for degree in ("TP 8", "TP 16")} == {"differs"}
    details = {(row["id"], row["model"]): row["detail"] for row in saved("t3-link-90")}
    assert details["ideal_overlap", "max"] == "T-NLG TP 16, FC-1"
    of = {name: {(row["id"], row["model"]): row for row in saved(name)} for name in T3_TABLES}
    off = {
        name: {
            key: abs(rows[key]["ours"] - rows[key]["published"])
            for key in itertools.product(("t3", "mca"), ("geomean", "max"))
        }
        for name, rows in of.items()
    }
    within = {key: {name.removeprefix("t3-") for name in off if off[name][key] <= 5} for key in off["t3"]}
    assert within["mca", "geomean"] & within["mca", "max"] == {"link-75", "link-90", "occupancy-75"}
    assert within["t3", "max"] == {"occupancy", "occupancy-plain-sets"} and not within["t3", "geomean"]
    nearest = min(one["t3", "geomean"] for one in off.values())
    assert f"the nearest is {nearest:.1f} points above" in " ".join(section("Readings of T3").split())
    for rows in of.values():
        assert rows["t3", "geomean"]["ours"] > rows["t3", "geomean"]["published"]
        assert rows["mca_over_t3", "geomean"]["verdict"] == "differs"
