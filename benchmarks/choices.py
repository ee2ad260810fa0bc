"""What `mw.parallelize(model, "auto")` chooses on one host, beside what else a user would take there.

    python benchmarks/choices.py [--ranks 2,4] [--models gpt2,llama,gemma2] [--rows 2,4,8] [--save NAME]

For each number of ranks, model and rows for each rank the choice is made as a user makes it, with no plans given.
Then steps of the chosen plan, of each other that was tried, of torch's DDP and of FSDP2 run by turns in the same
processes, AdamW among them. Saved are the median steps, by how much the chosen one is slower than the fastest,
what was predicted, and how long the choice took.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rivals
import torch
import torch.distributed as dist
from machine import save
from torch import Tensor, nn

import meshweave as mw
from meshweave.nn.parallel.trials import mesh_for

SIZE = "small"
ROUNDS, STEPS = 15, 2
NEAR = 0.15
"""How far off a prediction may be."""
WITHIN, WITHOUT_TRIALS = 0.05, 0.15
"""By how much the choice may be slower than the fastest: with trials, and by predictions alone."""


def judged(context: mw.nn.RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the median seconds of a step of everything that was tried, of DDP and of FSDP2, by turns."""
    torch.set_num_threads(1)
    model = rivals.build(payload["model"], SIZE)
    *_, sequence = rivals.SIZES[SIZE]
    tokens = torch.randint(0, rivals.WORDS, (payload["rows"] * context.num_ranks, sequence))
    began = time.monotonic()
    chosen = mw.parallelize(copy.deepcopy(model), "auto", trials=mw.nn.Trials(tokens, tokens), check=False)
    took_s = time.monotonic() - began
    assert chosen.trials is not None
    table = chosen.trials
    steps = {}
    for trial in table.trials:
        if trial.measured_s is not None:
            plan = trial.plan
            made = mw.parallelize(copy.deepcopy(model), plan, mesh_for(plan, model), check=False)
            steps[trial.words] = _step(lambda made=made: made.loss(tokens, tokens), made.module)  # type: ignore[misc]
    for name in ("DDP", "FSDP2"):
        loss, module = rivals._theirs(copy.deepcopy(model), name, tokens)
        steps[name] = _step(loss, module)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS + 1):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            dist.barrier()
            start = time.monotonic()
            for _ in range(STEPS):
                steps[name]()
            dist.barrier()
            if number:
                times[name].append((time.monotonic() - start) / STEPS)
    return {
        "chosen": table.chosen.words,
        "took_s": took_s,
        "predicted_s": {trial.words: trial.predicted_s for trial in table.trials},
        "tried_s": {trial.words: trial.measured_s for trial in table.trials},
        "measured_s": {name: statistics.median(each) for name, each in times.items()},
    }


def _step(loss: Callable[[], Tensor], module: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def main() -> None:
    """Make all choices, print how good they are, and save them where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--models", default="gpt2,llama,gemma2")
    parser.add_argument("--rows", default="2,4,8")
    parser.add_argument("--save")
    options = parser.parse_args()
    env = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    answer = []
    cases = itertools.product(
        map(int, options.ranks.split(",")), options.models.split(","), map(int, options.rows.split(","))
    )
    for ranks, model, rows in cases:
        said = mw.launch("choices:judged", ranks, {"model": model, "rows": rows}, timeout_s=500, env=env)[0]
        answer.append({"model": model, "ranks": ranks, "rows": rows, **said, **_judgement(said)})
        row = answer[-1]
        print(
            f"{model}, {ranks} ranks, {rows} rows each: {said['chosen']}, {row['slower']:+.1%} to "
            f"{row['fastest']}; by predictions {row['foretold']}, {row['slower_untried']:+.1%}; "
            f"{said['took_s']:.0f} s",
            flush=True,
        )
    good = sum(row["slower"] <= WITHIN for row in answer)
    untried = sum(row["slower_untried"] <= WITHOUT_TRIALS for row in answer)
    print(f"within {WITHIN:.0%}: {good} of {len(answer)}; untried within {WITHOUT_TRIALS:.0%}: {untried}")
    pairs = [pair for row in answer for pair in row["pairs"]]
    print(f"pairs in the measured order: {sum(pairs)} of {len(pairs)}")
    errors = sorted(abs(error) for row in answer for error in row["errors"].values())
    near = sum(error <= NEAR for error in errors)
    print(
        f"predictions: median {statistics.median(errors):.0%} off, {near} of {len(errors)} within {NEAR:.0%}"
    )
    if options.save:
        print(f"saved {save(options.save, answer)}")


def _judgement(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return how much slower the choice is than the fastest, tried or foretold, and how good predictions are.

    A pair is two plans whose measured steps differ by 20 % at least, and whether predictions have their order.
    """
    measured, predicted = said["measured_s"], said["predicted_s"]
    fastest = min(measured, key=measured.__getitem__)
    known = {name: seconds for name, seconds in predicted.items() if seconds is not None and name in measured}
    foretold = min(known, key=known.__getitem__)
    pairs = [
        (known[a] < known[b]) == (measured[a] < measured[b])
        for a, b in itertools.combinations(known, 2)
        if max(measured[a], measured[b]) >= 1.2 * min(measured[a], measured[b])
    ]
    return {
        "fastest": fastest,
        "slower": measured[said["chosen"]] / measured[fastest] - 1,
        "foretold": foretold,
        "slower_untried": measured[foretold] / measured[fastest] - 1,
        "pairs": pairs,
        "errors": {name: seconds / measured[name] - 1 for name, seconds in known.items()},
    }


if __name__ == "__main__":
    main()
