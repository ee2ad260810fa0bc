"""Parallelize every causal language model of the installed transformers, small and random, on four ranks.

Writes validation/results/architectures.json and .md: per type of model whether loss and all gradients are
those of the model itself in double precision, or what the refusal says. Run: python validation/architectures.py
With another version of transformers before the installed one (PYTHONPATH), counts go to architectures_versions.md:
PYTHONPATH=DIR python validation/architectures.py --ranks 1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests/nn/parallel"
sys.path.insert(0, str(TESTS))

import small_models  # noqa: E402

from meshweave.execute.ranks.launch import launch  # noqa: E402

STRATEGIES = (
    ("megatron", (4,)), ("atp", (2, 2)), ("megatron_sp", (4,)), ("zero3", (4,)), ("ring_attention", (4,)),
    ("all_to_all_heads", (4,)), ("pipeline", (2, 2)),
)  # fmt: skip
ALONE = (("megatron", (1,)),)
"""What is tried on one rank: which classes are known and how their configs are read does not depend on ranks."""
TRIED = "5.23"
"""The version of transformers of which all types are tried."""
ODD = [
    "cwm",
    "gpt-sw3",
    "gpt2",
    "internlm3",
    "iquestcoder",
    "llama",
    "ministral",
    "mistral",
    "qwen2",
    "seed_oss",
]
"""Types that are tried by odd configs, too."""
AT_ONCE = 8
"""Models that one start of the ranks tries: their memory goes with the ranks."""

OUTCOMES = ("crash", "wrong", "refused", "exact")
"""What may become of a strategy, the worst first."""
_BROKEN = ("this context is broken", "calls are out of order", "left early")
"""What ranks say that are out of step since an earlier run: they start anew, with the proof, as by default."""


def cases(kinds: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Return the cases: each type by its defaults, and some types by odd configs too."""
    made = [{"kind": kind} for kind in kinds or small_models.names()]
    with small_models.quiet():
        for case in list(made):
            if case["kind"] in ODD:
                odd = small_models.odd_configs(case["kind"])
                made += [{"kind": case["kind"], "changes": changes} for changes in odd]
    return [{**case, "strategies": STRATEGIES[: 2 if "changes" in case else None]} for case in made]


def run(
    of: Sequence[dict[str, Any]], num_ranks: int = 4, kept: Path | None = None, seconds: float = math.inf
) -> list[dict[str, Any]]:
    """Return what the cases gave on the first of so many ranks, which start anew every now and then.

    Args:
        kept: a file of rows, a line each, that is read first and goes on to grow: what it has is not tried.
        seconds: after which no ranks are started any more; fewer rows are returned then.
    """
    began = time.monotonic()
    lines = kept.read_text().splitlines() if kept and kept.exists() else ()
    rows = {_case_key(row): row for row in map(json.loads, lines)}
    while time.monotonic() - began < seconds:
        left = [case for case in of if _case_key(case) not in rows]
        if not left:
            break
        new = _launched(left[:AT_ONCE], num_ranks)
        rows |= {_case_key(row): row for row in new}
        if kept:
            with kept.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
        print(f"{len(of) - len(left) + len(new)} of {len(of)}", file=sys.stderr, flush=True)
    return [rows[_case_key(case)] for case in of if _case_key(case) in rows]


def _case_key(of: dict[str, Any]) -> str:
    """Return what tells a case, or a row of it, from the others: the type and what its config changes."""
    return json.dumps([of["kind"], of.get("changes", {})], sort_keys=True)


def _launched(part: Sequence[dict[str, Any]], num_ranks: int) -> list[dict[str, Any]]:
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))}
    try:
        ranks = launch(
            "architecture_rank_functions:sweep", num_ranks, {"cases": part}, timeout_s=600, env=env
        )
    except Exception as error:
        if len(part) == 1:
            said = ["crash", f"{type(error).__name__}: {error}"[:300]]
            named = {f"{name}:{'x'.join(map(str, shape))}": said for name, shape in part[0]["strategies"]}
            return [{"kind": part[0]["kind"], "changes": part[0].get("changes", {}), "strategies": named}]
        return [row for case in part for row in _launched([case], num_ranks)]
    rows = [worst(of_case) for of_case in zip(*ranks, strict=True)]
    told = [json.dumps(row) for row in rows]
    broken = next((at for at, text in enumerate(told) if any(words in text for words in _BROKEN)), None)
    if broken is None:
        return rows
    if len(part) == len(part[0]["strategies"]) == 1:
        if part[0].get("options", {}).get("check"):
            return [_crashed(rows[0])]
        return _launched([{**part[0], "options": {**part[0].get("options", {}), "check": True}}], num_ranks)
    if len(part) > 1:  # a run that fails breaks what comes after it in the same processes
        apart = [_launched([part[broken]], num_ranks)[0]]
        return (
            rows[:broken] + apart + (_launched(part[broken + 1 :], num_ranks) if part[broken + 1 :] else [])
        )
    apart = [_launched([{**part[0], "strategies": [each]}], num_ranks)[0] for each in part[0]["strategies"]]
    return [{**rows[0], "strategies": {k: v for row in apart for k, v in row["strategies"].items()}}]


def _crashed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which ranks that are out of step count as a crash, whatever they say of it."""
    return {**row, "strategies": {name: ["crash", why] for name, (_, why) in row["strategies"].items()}}


def options() -> dict[str, dict[str, Any]]:
    """Return the columns of the table: `parallelize` as it is called by default."""
    return {"tried": {}}


def excluded() -> dict[str, str]:
    """Return the types that are no dense decoders with softmax attention, each with the reason."""
    listed = tomllib.loads((HERE / "dense_decoders.toml").read_text())["excluded"]
    return {kind: reason for reason, kinds in listed.items() for kind in kinds.split()}


def outcome(row: dict[str, Any]) -> str:
    """Return the worst outcome of a row: crash, wrong, refused, exact; or that there is no model."""
    if "error" in row:
        return "no model"
    found = {strategy[0] for strategy in row["strategies"].values()}
    return next(kind for kind in OUTCOMES if kind in found)


def worst(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a case with the worst that any rank says of each strategy."""
    first = of_ranks[0]
    if any("error" in row for row in of_ranks):
        return first
    strategies = {
        name: min((row["strategies"][name] for row in of_ranks), key=lambda said: OUTCOMES.index(said[0]))
        for name in first["strategies"]
    }
    return {**first, "strategies": strategies}


def table(columns: dict[str, list[dict[str, Any]]]) -> str:
    """Return the rows in Markdown."""
    import transformers

    (rows,) = columns.values()
    named = [f"{name}:{'x'.join(map(str, shape))}" for name, shape in STRATEGIES]
    lines = ["# Causal language models of transformers on four ranks", ""]
    lines += [
        f"transformers {transformers.__version__}; small random models in double precision; loss and gradients "
        "within 1e-9 of the model's own. Under Megatron each is proved by `parallelize` first, under others where "
        "it is not exact. A pipeline is two stages, each with Megatron on two ranks. Made by "
        "`validation/architectures.py`. `validation/dense_decoders.toml` says which types are no dense decoders "
        "with softmax attention, and why.",
        "",
    ]
    reasons = excluded()
    plain = [row for row in rows if not row["changes"] and "error" not in row]
    dense = [row for row in plain if row["kind"] not in reasons]
    for words, some in (("dense decoders with softmax attention", dense), ("all types", plain)):
        counts = ", ".join(f"{_exact(some, name)} {name.partition(':')[0]}" for name in named)
        lines.append(f"- exact of {len(some)} {words}: {counts}")
    odd = Counter(outcome(row) for row in rows if row["changes"])
    lines += [
        f"- odd configs of some types: {_counts(odd)}",
        "",
        f"| type | config | class | {' | '.join(name.partition(':')[0] for name in named)} | what is said |",
        "|---" * (4 + len(named)) + "|",
    ]
    for row in rows:
        changes = ", ".join(f"{name}={value}" for name, value in row["changes"].items())
        cells = " | ".join(row.get("strategies", {}).get(name, [""])[0] for name in named)
        words = said(row).replace("|", "/")[:150]
        lines.append(f"| {row['kind']} | {changes} | {row.get('class', '')} | {cells} | {words} |")
    return "\n".join(lines) + "\n"


def _exact(rows: Sequence[dict[str, Any]], strategy: str) -> int:
    return sum(row["strategies"].get(strategy, [""])[0] == "exact" for row in rows)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{found[kind]} {kind}" for kind in (*OUTCOMES[::-1], "no model"))


def said(row: dict[str, Any]) -> str:
    """Return what was said of a row that is not exact."""
    of_strategies = (strategy[1] for strategy in row.get("strategies", {}).values() if strategy[0] != "exact")
    return str(row.get("error") or next(of_strategies, ""))


def short(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with what was said once."""
    found = {name: strategy[0] for name, strategy in row.get("strategies", {}).items()}
    kept = {name: row[name] for name in ("kind", "class", "changes") if row.get(name)}
    return {**kept, "strategies": found, "said": said(row)}


def _lines(rows: list[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(row) for row in rows)


def write(columns: dict[str, list[dict[str, Any]]]) -> None:
    """Write the results."""
    folder = HERE / "results"
    rows = {column: [short(row) for row in of_column] for column, of_column in columns.items()}
    text = ",\n".join(f'"{column}": [\n{_lines(of_column)}\n]' for column, of_column in rows.items())
    (folder / "architectures.json").write_text(f"{{\n{text}\n}}\n")
    (folder / "architectures.md").write_text(table(columns))


def write_version(columns: dict[str, list[dict[str, Any]]], num_ranks: int) -> None:
    """Add the counts of a version to those of others, and what was wrong or crashed."""
    import transformers

    path = HERE / "results/architectures_versions.json"
    versions = json.loads(path.read_text()) if path.exists() else {}
    counted = versions.setdefault(f"{transformers.__version__} on {num_ranks}", {})
    for column, rows in columns.items():
        for of, is_odd in (("types", False), ("odd configs", True)):
            found = Counter(outcome(row) for row in rows if bool(row["changes"]) == is_odd)
            if found:
                counted[f"{of}, {column}"] = dict(sorted(found.items()))
    path.write_text(json.dumps(dict(sorted(versions.items())), indent=1) + "\n")
    lines = [
        "# Causal language models of other versions of transformers",
        "",
        f"All types were tried with transformers {TRIED}. Made by `validation/architectures.py --ranks`, "
        "with the other version on PYTHONPATH: all types by their defaults, or the known ones alone where few are "
        "counted, and odd configs of some types.",
        "",
        "| transformers on ranks | of | exact | refused | wrong | crash | no model |",
        "|---|---|---|---|---|---|---|",
    ]
    for version, of_version in sorted(versions.items()):
        for what, counts in of_version.items():
            cells = " | ".join(
                str(counts.get(kind, 0)) for kind in ("exact", "refused", "wrong", "crash", "no model")
            )
            lines.append(f"| {version} | {what} | {cells} |")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Try the types that are named, or all, and write or print what came of it."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="types of models; default: all")
    parser.add_argument("--ranks", type=int, choices=(1, 4), default=4)
    parser.add_argument("--kept", type=Path, metavar="FILE", help="rows so far, from which it goes on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing more after these")
    given = parser.parse_args()
    listed = small_models.names()
    every = cases([kind for kind in given.types if kind in listed] or None)
    if given.ranks == 1:
        every = [{**case, "strategies": ALONE} for case in every]
    columns = {
        name: run([{**case, "options": options_} for case in every], given.ranks, given.kept, given.seconds)
        for name, options_ in options().items()
    }
    if any(len(rows) < len(every) for rows in columns.values()):
        return
    if not transformers.__version__.startswith(f"{TRIED}."):
        write_version(columns, given.ranks)
    elif given.types or given.ranks == 1:
        print(table(columns))
    else:
        write(columns)


if __name__ == "__main__":
    main()
