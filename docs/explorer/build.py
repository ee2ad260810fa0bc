"""Write the explorer: algorithms op by op, 30 saved plans and every published run, on one page that loads nothing.

python docs/explorer/build.py [explorer.html]      # `make docs` puts it beside the site
"""

from __future__ import annotations

import csv
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshweave as mw
from meshweave.ir.program.statements import On, Repeat, When
from meshweave.report.page import asset, page
from meshweave.report.step_page import MEMORY_COLOURS, PARTS

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
PLANS = FOLDER / "plans.json"
RUNS = ROOT / "studies" / "src" / "meshweave_studies" / "published" / "training_runs.csv"
ACCURACY = ROOT / "validation" / "results" / "accuracy.json"
ALGORITHMS = ("collective", "meshslice", "wang", "summa", "cannon")
MESH = (4, 4)
M, N, K = 8 * 2048, 49152, 12288
CLUSTER = "tpu-v4-pod:16"
COLUMNS = ("model", "chips", "tp", "pp", "cp", "dp", "ep", "gbs", "seq", "config", "metric")


def explorer_page() -> str:
    """Return the page."""
    data = {
        "runs": [_run(name) for name in ALGORITHMS],
        "mesh": MESH,
        "plans": json.loads(PLANS.read_text("utf-8"))["pairs"],
        "parts": dict(PARTS),
        "kinds": MEMORY_COLOURS,
        "published": list(_published()),
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    body = (FOLDER / "explorer.html").read_text("utf-8")
    body += f'<script type="application/json" id="data">{text}</script>'
    style = asset("step_page.css") + (FOLDER / "explorer.css").read_text("utf-8")
    return page("meshweave explorer", body, style=style, script=(FOLDER / "explorer.js").read_text("utf-8"))


# --- algorithms ---------------------------------------------------------------------------------------------


def _run(name: str) -> dict[str, Any]:
    """Return an algorithm in its best configuration, simulated: all ops of all ranks, and its text."""
    problem = mw.algorithms.Matmul2dProblem(M, N, K, MESH, "os", dtype="bfloat16")
    cluster = mw.load_cluster(CLUSTER)
    best = mw.rank(problem, cluster, algorithms=[name])[0]
    program = best.program
    run = mw.simulate(program, mw.Machine.of(cluster, program))
    lines = mw.ir.to_text(program).splitlines()
    line_of = _lines_of_ops(program, lines)
    lanes = [lane.name for lane in program.lanes]
    names: dict[str, int] = {}
    ranks = []
    for position, rank in enumerate(run.ranks.tolist()):
        begin = int(run.starts[position])
        ranks.append(
            [
                [
                    span.start_ps // 1000,  # nanoseconds
                    span.end_ps // 1000,
                    lanes.index(span.lane),
                    ("compute", "move", "communicate").index(span.activity),
                    names.setdefault(span.label.rsplit(" ", 1)[0], len(names)),
                    line_of[int(run.template_ops[begin + span.index])],
                ]
                for span in run.spans(rank)
            ]
        )
    return {
        "title": best.algorithm.title,
        "idea": str(inspect.getdoc(type(best.algorithm))).split("\n")[0],
        "config": str(best.config),
        "end": run.duration_ps // 1000,
        "lanes": lanes,
        "names": list(names),
        "text": lines,
        "ranks": ranks,
    }


def _lines_of_ops(program: mw.Program, lines: list[str]) -> list[int]:
    """Return the line of the text of each op of the template: statements stand on a line each, in their order."""
    at = next(number for number, line in enumerate(lines) if line.startswith(("with ", "for ", "if ")))
    found: list[int] = []

    def walk(body: tuple[Any, ...]) -> None:
        nonlocal at
        for statement in body:
            number, at = at, at + 1
            if isinstance(statement, On | Repeat | When):
                walk(statement.body)
            else:
                found.append(number)

    walk(program.body)
    assert at == len(lines), "a statement of the text is not on one line"
    return found


# --- published runs -----------------------------------------------------------------------------------------


def _published() -> Iterator[dict[str, Any]]:
    """Yield every published run, with the error of its prediction where it could be predicted."""
    scored: dict[int, tuple[float, bool]] = {}
    for group, of in json.loads(ACCURACY.read_text("utf-8")).items():
        if group.startswith("runs"):
            for name, error in of["rows"].items():
                scored[int(name.split(":")[0])] = error, group.startswith("runs with experts")
    with RUNS.open(encoding="utf-8", newline="") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            error, has_experts = scored.get(line, (None, False))
            yield {
                "source": row["source"].split(":")[0].split(" (")[0],
                **{name: row[name] for name in COLUMNS},
                "value": float(row["value"]),
                "error": error,
                "experts": int(has_experts),
                "line": line,
            }


def main() -> None:
    """Write the page."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "explorer.html")
    path.write_text(explorer_page(), encoding="utf-8")
    print(f"written: {path}, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
