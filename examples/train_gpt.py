"""Train a small GPT or Llama on bytes of a text, on one to eight ranks, by any plan, with checkpoints.

    torchrun --nproc-per-node 4 examples/train_gpt.py --parallel tp=2,pp=2 --seconds 60
    torchrun --nproc-per-node 2 examples/train_gpt.py --plan plan.json --folder out --steps 200
    torchrun --nproc-per-node 4 examples/train_gpt.py --parallel dp=2,pp=2 --folder out --resume --steps 400

A training that is resumed goes on from the last whole checkpoint, on any number of ranks, with the batches that
follow. When a rank is lost, all others say which, and end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from gpt_training.layout import in_words, parallelism_from, parallelism_of_plan
from gpt_training.live import Events, LiveLine, Report
from gpt_training.models import ModelSize
from gpt_training.predict import fastest_tried, measured_problem, planned
from gpt_training.text import TEXT
from gpt_training.trainer import Trainer, TrainOptions

import meshweave as mw

REPORT_EVERY = 5
"""Steps between two times that ranks tell each other losses, and whether to stop."""
WATCH_EVERY = 20
"""Steps between two that are recorded and compared with what was predicted, with `--predict`."""


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what")
    what.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    what.add_argument("--layers", type=int, default=4)
    what.add_argument("--hidden", type=int, default=128)
    what.add_argument("--heads", type=int, default=4)
    what.add_argument("--kv-heads", type=int, help="default: as many as heads")
    what.add_argument("--sequence", type=int, default=128, help="bytes of a window")
    what.add_argument("--batch", type=int, default=16, help="windows of a step, over all ranks")
    what.add_argument("--text", type=Path, default=TEXT, help="a text file, or one that gzip made")
    how = parser.add_argument_group("how")
    how.add_argument("--plan", type=Path, help="a plan of a step, as `meshweave plan --out` writes it")
    how.add_argument(
        "--accept-sites",
        action="store_true",
        help="take a plan that counts on the overlap of whole layers, and do without that",
    )
    how.add_argument(
        "--parallel", default="", help="degrees: tp=2,pp=2,dp=2,vp=1,micro_batch=4; tp=2x2 is a mesh"
    )
    how.add_argument(
        "--predict", action="store_true", help="measure this machine first, and say what a step should take"
    )
    how.add_argument("--strategy", default="", help="how tensor-parallel ranks share layers (megatron_sp)")
    how.add_argument("--schedule", default="", help="of the pipeline (1f1b)")
    how.add_argument("--lr", type=float, default=3e-3)
    how.add_argument("--seed", type=int, default=0)
    until = parser.add_argument_group("until when, and what stays")
    until.add_argument(
        "--steps", type=int, help="end after this many steps, those before a resumption included"
    )
    until.add_argument("--seconds", type=float, help="end after this time (without --steps: 60)")
    until.add_argument("--folder", type=Path, help="of checkpoints and TensorBoard events")
    until.add_argument("--save-every", type=int, default=50, help="steps between checkpoints, with --folder")
    until.add_argument(
        "--resume", action="store_true", help="go on from the last whole checkpoint of --folder"
    )
    until.add_argument(
        "--deadline", type=float, default=30.0, help="seconds that a wait for other ranks may take"
    )
    until.add_argument("--json", action="store_true", help="print steps, losses and times as JSON at the end")
    return parser.parse_args()


def options_of(
    given: argparse.Namespace, num_ranks: int
) -> tuple[TrainOptions, mw.algorithms.Step | None, float | None]:
    """Return the options of a training, and if that is wanted a step of it and its seconds here; collective.

    Raises MeshweaveError where they do not fit.
    """
    if given.resume and given.folder is None:
        raise mw.errors.DescriptionError("--resume goes on from a checkpoint; name its folder with --folder")
    size = ModelSize(
        given.model,
        given.layers,
        given.hidden,
        given.heads,
        given.kv_heads or given.heads,
        4 * given.hidden if given.model == "gpt" else 8 * given.hidden // 3 // 16 * 16,
        sequence=given.sequence,
    )
    problem, measured = None, None
    if given.predict or given.parallel == "auto":
        problem, measured = measured_problem(size, given.batch, max(given.batch // num_ranks, 1))
    if given.plan:
        chosen = parallelism_of_plan(given.plan, num_ranks, accepts_sites=given.accept_sites)
    elif given.parallel == "auto":
        chosen = mw.Parallelism(data=num_ranks)  # until others are tried
    else:
        names = {"strategy": given.strategy, "schedule": given.schedule}
        chosen = parallelism_from(given.parallel, num_ranks, batch=given.batch, **names)
    options = TrainOptions(
        size=size,
        parallelism=chosen,
        batch=given.batch,
        lr=given.lr,
        seed=given.seed,
        text=given.text,
        folder=given.folder,
        save_every=given.save_every if given.folder else 0,
        deadline_s=given.deadline,
    )
    if given.parallel == "auto" and not given.plan:
        assert problem is not None and measured is not None
        table = fastest_tried(options, planned(problem, measured))
        options = replace(options, parallelism=table.chosen.plan)
        if dist.get_rank() == 0:
            print(table, file=sys.stderr)
    if problem is None or measured is None:
        return options, None, None
    step = mw.algorithms.step_of(problem, options.parallelism)
    seconds = mw.nn.step_here_s(problem, options.parallelism, measured)
    return options, step, seconds


def run(given: argparse.Namespace) -> None:
    """Train on this rank as the command line says."""
    options, expected, expected_s = options_of(given, dist.get_world_size())
    trainer = Trainer(options)
    is_first = trainer.rank == 0
    if given.resume:
        step = trainer.resume()
        if is_first:
            print(f"goes on from step {step}" if step else "no checkpoint yet", file=sys.stderr)
    report, line = Report(options.batch * options.size.sequence), LiveLine()
    watch = watch_of(trainer, expected)
    events = Events(options.folder / "events" if options.folder and is_first else None)
    if is_first:
        print(
            f"{given.model} on {dist.get_world_size()} ranks: {in_words(options.parallelism)}",
            file=sys.stderr,
        )
    seconds = given.seconds if given.seconds or given.steps else 60.0
    until = time.monotonic() + seconds if seconds else float("inf")
    wanted = given.steps or sys.maxsize
    is_over = trainer.num_steps >= wanted
    while not is_over:
        steps = train_some(trainer, report, min(REPORT_EVERY, wanted - trainer.num_steps), watch)
        [ends] = trainer.on_first_rank([float(time.monotonic() >= until)], is_from_last_stage=False)
        is_over = bool(ends) or trainer.num_steps >= wanted
        if is_first:
            line.show(report, expected_s, saved=trainer.last_saved)
            events.add(report, steps)
    if options.folder and trainer.last_saved != trainer.num_steps:
        trainer.save()
    trainer.close()
    if is_first:
        line.end()
        events.close()
        if watch and watch.latest:
            print(watch.latest, file=sys.stderr)
            print(watch.replan(expected), file=sys.stderr)
        if expected_s:
            print(
                f"a step: predicted {1e3 * expected_s:.0f} ms, measured {1e3 * report.step_s:.0f} ms (median)",
                file=sys.stderr,
            )
        if given.json:
            names = {"parallelism": in_words(options.parallelism), "predicted_step_s": expected_s}
            print(json.dumps({**names, **report.to_json()}))


def watch_of(trainer: Trainer, expected: mw.algorithms.Step | None) -> mw.StepWatch | None:
    """Return what compares steps with the prediction and warns, on the first rank; for layers that ranks share."""
    if expected is None or expected.parallelism.tensor_size == 1:
        return None
    if trainer.rank:
        warnings.simplefilter("ignore", mw.nn.FallingBehindWarning)
    return mw.StepWatch(expected.problem.cluster, every=WATCH_EVERY, context=trainer.context)


def train_some(trainer: Trainer, report: Report, count: int, watch: mw.StepWatch | None) -> list[int]:
    """Train some steps, add them to the report, and return their numbers."""
    losses, steps = [], []
    for _ in range(count):
        begin, waited_s = time.monotonic(), trainer.waits_s
        with watch.step() if watch else contextlib.nullcontext():
            loss = trainer.step()
        losses.append(float("nan") if loss is None else float(loss))
        report.seconds.append(time.monotonic() - begin)
        report.waits.append(trainer.waits_s - waited_s)
        steps.append(trainer.num_steps)
    report.steps += steps
    report.losses += trainer.on_first_rank(losses, is_from_last_stage=True)
    return steps


def main() -> None:
    """Join the other ranks and train; say in one line what went wrong, if anything."""
    given = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        mw.nn.join_ranks()
        run(given)
    except mw.MeshweaveError as error:
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # threads may be in waits for ranks that are lost
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
