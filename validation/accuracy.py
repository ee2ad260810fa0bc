"""Score all published data anew, and say what drifted against the last release: a part of each release.

    python validation/accuracy.py            # the page; status 1 where a median is gone, or a point worse
    python validation/accuracy.py --save     # these are the numbers of a release from now on

Published runs by source (those of models with experts apart), collectives across hosts, and kernels by device,
dtype and kind, each as its verb of `meshweave reproduce` scores it. Labs are not run again: what they measured is
predicted again (`lab_scores`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SAVED, PAGE = RESULTS / "accuracy.json", RESULTS / "accuracy.md"
PUBLISHED = RESULTS.parents[1] / "studies" / "src" / "meshweave_studies" / "published"
MOST_DRIFT = 0.01
"""By how much a median may grow: a point."""
VERBS = {
    "runs": ("published",),
    "runs with experts": ("published", "--experts"),
    "dense runs": ("published", "--cases", f"{PUBLISHED}/dense_runs.csv"),
    "vTrain": ("published", "--cases", f"{PUBLISHED}/vtrain_runs.csv"),
    "collectives across hosts": ("nccl",),
    "kernels": ("kernels",),
}
Scores = dict[str, dict[str, Any]]
"""Of each group the median of its absolute errors, and of those that have rows the error of each, by its name."""


@dataclass(frozen=True)
class Drift:
    """A group whose median, or a row whose error, is another than in the last release."""

    name: str
    before: float
    now: float

    @property
    def is_worse(self) -> bool:
        """Return whether it is off by more than a point more than before."""
        return round(abs(self.now) - abs(self.before) - MOST_DRIFT, 6) > 0


def scored() -> Scores:
    """Return the scores of every group."""
    from lab_scores import lab_scores  # here, for it imports the labs' benchmarks

    made: Scores = {}
    for kind, verb in VERBS.items():
        command = [sys.executable, "-m", "meshweave", "reproduce", *verb, "--json"]
        data = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        made |= dict(_of_kernels(data) if verb == ("kernels",) else _of_rows(kind, data))
    return made | {f"lab: {name}": _scores(errors) for name, errors in lab_scores()}


def _of_rows(kind: str, data: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    rows: dict[str, dict[str, float]] = {}
    for number, row in enumerate(data["rows"] if isinstance(data, dict) else data):
        if not row["counts"] or row["predicted"] is None:
            continue
        group = f"{kind}: {row['source']}"
        name = f"{row.get('line', number)}: {row.get('model') or row['kind']}"
        rows.setdefault(group, {})[name] = row["predicted"] / row["published"] - 1
    yield from ((group, _scores(errors)) for group, errors in rows.items())


def _scores(errors: Mapping[str, float]) -> dict[str, Any]:
    """Return the errors of rows, rounded, and the median of their sizes."""
    rows = {name: round(error, 4) for name, error in errors.items()}
    return {"median": round(median(map(abs, rows.values())), 4), "rows": rows}


def _of_kernels(data: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, scores in data.items():
        for each in scores:
            words = (each["device"], each["group"], each["method"], each["subset"])
            if each["median"] is None:  # no constants of this device
                continue
            yield f"kernels: {kind}, {', '.join(words)}", {"median": each["median"]}


def drifts(before: Scores, now: Scores) -> tuple[list[Drift], list[Drift], list[str]]:
    """Return medians and rows that changed, the worst first, and groups or rows that only one release has."""
    medians, rows, others = [], [], sorted(before.keys() ^ now.keys())
    for name in before.keys() & now.keys():
        one, other = before[name], now[name]
        if one["median"] != other["median"]:
            medians.append(Drift(name, one["median"], other["median"]))
        old, new = one.get("rows", {}), other.get("rows", {})
        others += [f"{name}, row {row}" for row in sorted(old.keys() ^ new.keys())]
        rows += [Drift(f"{name}, row {row}", old[row], new[row]) for row in old.keys() & new.keys()]
    moved = [row for row in rows if row.before != row.now]
    for each in (medians, moved):
        each.sort(key=lambda drift: (abs(drift.before) - abs(drift.now), drift.name))
    return medians, moved, others


def page(before: Scores, now: Scores) -> str:
    """Return the page: medians by group, and what drifted."""
    medians, rows, others = drifts(before, now)
    lines = [
        "# Accuracy against the last release",
        "",
        "Written by `make accuracy`. Errors are predicted over published, or over measured in a lab, less one.",
        "",
    ]
    lines += ["| group | rows | median error |", "|---|---:|---:|"]
    for name, of in sorted(now.items()):
        lines.append(f"| {name} | {len(of['rows']) if 'rows' in of else ''} | {100 * of['median']:.1f} % |")
    lines += ["", f"## Drift: {len(medians)} medians, {len(rows)} rows", ""]
    lines += ["| what | last release | now | |", "|---|---:|---:|---|"] if medians or rows else []
    for drift in (*medians, *rows):
        worse = "worse" if drift.is_worse else ""
        lines.append(f"| {drift.name} | {100 * drift.before:+.1f} % | {100 * drift.now:+.1f} % | {worse} |")
    lines += ["", *(f"- only one release has {name}" for name in others)] if others else []
    return "\n".join(lines) + "\n"


def failures(before: Scores, now: Scores) -> list[str]:
    """Return a line for each median that is worse by more than a point, and each group or row that is gone."""
    worse = [drift for drift in drifts(before, now)[0] if drift.is_worse]
    lines = [
        f"worse: {each.name}: {100 * each.before:.1f} % before, {100 * each.now:.1f} % now" for each in worse
    ]
    gone = sorted(before.keys() - now.keys())
    for name in sorted(before.keys() & now.keys()):
        rows = before[name].get("rows", {}).keys() - now[name].get("rows", {}).keys()
        gone += [f"{name}, row {row}" for row in sorted(rows)]
    return lines + [f"gone: {name}: scored in the last release" for name in gone]


def main() -> None:
    """Score, write the page, and end with status 1 where a median got worse by more than a point, or is gone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="keep these scores as those of the release")
    given = parser.parse_args()
    now = scored()
    before = json.loads(SAVED.read_text()) if SAVED.exists() else now
    PAGE.write_text(page(before, now))
    if given.save:
        SAVED.write_text(json.dumps(now, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    failed = failures(before, now)
    print(*failed, f"{len(now)} groups scored; written to {PAGE}", sep="\n")
    raise SystemExit(bool(failed) and not given.save)


if __name__ == "__main__":
    main()
