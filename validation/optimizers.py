"""Train a small Llama by every optimizer class of some packages, on two ranks and beside it on one process.

Writes validation/results/optimizers.md: per class and strategy whether the parameters after three steps are those
of one process in double precision, or what is said. Run: python validation/optimizers.py
With modules, or module:Class, it prints these: python validation/optimizers.py torch.optim schedulefree
Packages that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests/nn/parallel"

from meshweave.execute.ranks.launch import launch  # noqa: E402

PACKAGES = {
    "torch.optim": "torch", "transformers.optimization": "transformers", "timm.optim": "timm",
    "pytorch_optimizer": "pytorch-optimizer", "torch_optimizer": "torch-optimizer",
    "schedulefree": "schedulefree", "lion_pytorch": "lion-pytorch", "prodigyopt": "prodigyopt",
    "muon": "muon-optimizer", "apollo_torch": "apollo-torch", "galore_torch": "galore-torch",
}  # fmt: skip
"""Modules that list optimizers, and the packages that bring them."""
STRATEGIES = ("data_parallel", "zero3", "megatron", "pipeline")
OUTCOMES = ("crash", "wrong", "error", "refused", "not run", "exact")
"""What may become of a strategy, the worst first. An error is not of this library; what is not run fails alone."""
AT_ONCE = 24
"""Classes that one start of the ranks tries."""


def classes(module: str) -> list[str]:
    """Return the names of the optimizer classes that a module lists; none where it is not installed."""
    base: Any = importlib.import_module("torch.optim").Optimizer
    with contextlib.suppress(ImportError, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        listed = vars(importlib.import_module(module)).items()
        return sorted(
            name
            for name, kind in listed
            if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and not name.startswith("_")
            and kind.__module__.partition(".")[0] == module.partition(".")[0]
        )  # fmt: skip
    return []


def run(cases: Sequence[tuple[str, str]], kept: Path | None = None) -> list[dict[str, tuple[str, str]]]:
    """Return per case, (module, class), what each strategy gave: the outcome of the worse rank, and why.

    `kept` is a file of rows, a line each, that is read first and goes on to grow.
    """
    lines = kept.read_text().splitlines() if kept and kept.exists() else ()
    rows = {tuple(case): row for case, row in map(json.loads, lines)}
    while left := [case for case in cases if case not in rows]:
        new = dict(zip(left, _launched(left[:AT_ONCE], STRATEGIES), strict=False))
        rows |= new
        if kept:
            with kept.open("a") as file:
                file.writelines(json.dumps(each) + "\n" for each in new.items())
        print(f"{len(cases) - len(left) + len(new)} of {len(cases)}", file=sys.stderr, flush=True)
    return [rows[case] for case in cases]


def _launched(part: Sequence[Any], strategies: Sequence[str]) -> list[dict[str, tuple[str, str]]]:
    """Return the rows of some cases; where ranks fail each half is tried by itself, at last each strategy."""
    payload = {"cases": part, "strategies": strategies}
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))}
    try:
        target = "optimizer_rank_functions:sweep"
        ranks = launch(target, 2, payload, timeout_s=60 + 6 * len(part), deadline_s=20, env=env)
    except Exception as error:
        if len(part) > 1:
            half = len(part) // 2
            return _launched(part[:half], strategies) + _launched(part[half:], strategies)
        if len(strategies) > 1:
            apart = [_launched(part, [each])[0] for each in strategies]
            return [{name: said for row in apart for name, said in row.items()}]
        return [{strategies[0]: ("crash", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])}]
    return [
        {
            name: min((row[name] for row in of_case), key=lambda said: OUTCOMES.index(said[0]))
            for name in strategies
        }
        for of_case in zip(*ranks, strict=True)
    ]


def table(cases: Sequence[tuple[str, str]], rows: Sequence[dict[str, tuple[str, str]]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "# Optimizers on two ranks",
        "",
        "Each class of a package trains a small Llama in double precision for three steps by its defaults, with "
        "lr 0.01. Exact: all parameters within 1e-9 of one process or, where a class carries a change of 1e-13 in "
        "gradients further than that, within a thousand times as much. An error is one of torch or the package. "
        "What is not run fails on one process, or needs a closure in a pipeline. Made by "
        "`validation/optimizers.py`.",
        "",
    ]
    for module in dict.fromkeys(module for module, _ in cases):
        own = [row for (of, _), row in zip(cases, rows, strict=True) if of == module]
        lines.append(
            f"- {module} of {PACKAGES[module]} {importlib.metadata.version(PACKAGES[module])}, {len(own)}:"
        )
        for strategy in STRATEGIES:
            found = Counter(row[strategy][0] for row in own)
            counts = ", ".join(f"{found[each]} {each}" for each in reversed(OUTCOMES) if found[each])
            lines.append(f"    - {strategy}: {counts}")
    lines += [
        "",
        f"| class | {' | '.join(STRATEGIES)} | what is said |",
        "|---" * (2 + len(STRATEGIES)) + "|",
    ]
    for (module, name), row in zip(cases, rows, strict=True):
        said = next((why for what, why in row.values() if what != "exact"), "")
        said = said.replace("|", "/").replace("](", "] (")
        cells = " | ".join(row[each][0] for each in STRATEGIES)
        lines.append(f"| {module}.{name} | {cells} | {said[:150]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try the classes of the modules that are named, and print what came of it; or of all, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="modules, or module:Class; default: all")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="rows so far, from which it goes on")
    given = parser.parse_args()
    cases: list[tuple[str, str]] = []
    for each in given.modules or PACKAGES:
        module, _, name = each.partition(":")
        cases += [(module, found) for found in ([name] if name else classes(module))]
    text = table(cases, run(cases, given.kept))
    if given.modules:
        print(text)
    else:
        (HERE / "results/optimizers.md").write_text(text)


if __name__ == "__main__":
    main()
