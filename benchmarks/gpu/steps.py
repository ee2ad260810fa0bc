"""Training steps of plain PyTorch on one GPU, measured, beside what `mw.step` predicts.

python benchmarks/gpu/steps.py [--only WORDS] [--folder FOLDER]     # measure on a CUDA device, predict, save
python benchmarks/gpu/steps.py --predict [--folder FOLDER]          # predict what is saved again; needs no GPU

A row has the seconds of a step and of its phases, kernels by class, memory by torch's allocator, and predictions
with the catalog's H100 and no constants of software, and with those of the stack `torchtitan`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from device import FOLDER, save_rows
from profiles import profile
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_models import MixedAdam, PlainTransformer, TrainingRun

from meshweave.algorithms.step import layers
from meshweave.algorithms.step.block_time import block_of
from meshweave.algorithms.step.compose import step_of
from meshweave.algorithms.step.placement import block_axes, machine_of
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.stacks import load_stack, stack_table
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model.transformer import Transformer
from meshweave.ir.work import Compute, matmul_work

WARMUP, TIMED = 3, 5
SMALL = TrainingRun("", "llama", 24, 2048, 16, 16, 5632, 32000, 2048, 1, 4)
WIDE = TrainingRun("", "llama", 12, 4096, 32, 32, 11008, 32000, 4096, 1, 2)
GROUPED = TrainingRun("", "llama", 4, 4096, 32, 8, 14336, 128256, 8192, 1, 2)
GPT = TrainingRun("", "gpt", 24, 2048, 16, 16, 8192, 50304, 2048, 2, 2)
XL = TrainingRun("", "gpt", 48, 1600, 25, 25, 6400, 50304, 1024, 4, 2)

RUNS = (
    replace(SMALL, name="llama-24x2048 s2048 b1"),
    replace(SMALL, name="llama-24x2048 s2048 b4", micro_batch=4, accumulation=2),
    replace(
        SMALL,
        name="llama-24x2048 s2048 b4 bf16 gradients",
        micro_batch=4,
        accumulation=2,
        gradients="bfloat16",
    ),
    replace(
        SMALL,
        name="llama-24x2048 s2048 b4 written out",
        micro_batch=4,
        accumulation=2,
        functions="written out",
    ),
    replace(
        SMALL, name="llama-24x2048 s4096 b2 full", seq=4096, micro_batch=2, accumulation=2, recompute="full"
    ),
    replace(WIDE, name="llama-12x4096 s4096 b1"),
    replace(WIDE, name="llama-12x4096 s4096 b2 full", micro_batch=2, recompute="full"),
    replace(GROUPED, name="llama3-4x4096 s8192 b1"),
    replace(SMALL, name="llama-24x2048 s2048 b4 flash-2", micro_batch=4, accumulation=2, attention="flash-2"),
    replace(GPT, name="gpt-24x2048 s2048 b2"),
    replace(GPT, name="gpt-24x2048 s2048 b2 dropout", dropout=0.1),
    replace(GPT, name="gpt-24x2048 s2048 b4 full", micro_batch=4, recompute="full"),
    replace(XL, name="gpt2-xl s1024 b4"),
    replace(SMALL, name="llama-24x2048 s2048 b4 compiled", micro_batch=4, accumulation=2, compiled=True),
    replace(WIDE, name="llama-12x4096 s4096 b1 compiled", compiled=True),
    replace(GPT, name="gpt-24x2048 s2048 b2 compiled", compiled=True),
    replace(GROUPED, name="llama3-4x4096 s8192 b1 compiled", compiled=True),
)


# --- measuring --------------------------------------------------------------------------------------------------


class MeasuredTraining:
    """One run on a device: its model, optimizer and batch, and steps with events between their phases."""

    def __init__(self, run: TrainingRun, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.run = run
        with torch.device(device):
            self.model = PlainTransformer(run).to(torch.bfloat16)
        for param in self.model.parameters():
            torch.nn.init.normal_(param, std=0.02) if param.ndim > 1 else None
        self.adam = MixedAdam(run, self.model)
        shape = (run.accumulation, run.micro_batch, run.seq)
        self.tokens = torch.randint(run.vocab, shape, device=device)
        self.targets = torch.randint(run.vocab, shape, device=device)
        if run.compiled:
            self.model.compile_layers()

    def step(self, mark: Callable[[str], None] = lambda phase: None) -> None:
        """Train one step; call `mark` after each phase."""
        mark("begin")
        for tokens, targets in zip(self.tokens, self.targets, strict=True):
            loss = self.model(tokens, targets)
            mark("forward")
            loss.backward()
            mark("backward")
        self.adam.step()
        mark("optimizer")

    def timed_step(self) -> tuple[list[tuple[str, torch.cuda.Event]], float]:
        """Train one step; return its events and the seconds that the host took to issue it."""
        events: list[tuple[str, torch.cuda.Event]] = []

        def mark(phase: str) -> None:
            events.append((phase, torch.cuda.Event(enable_timing=True)))
            events[-1][1].record()

        begin = time.perf_counter()
        self.step(mark)
        return events, time.perf_counter() - begin


def measure(run: TrainingRun) -> dict[str, Any]:
    """Return what a run takes on the CUDA device: seconds, phases, kernels and memory."""
    if run.attention == "default":
        return _measured(run)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _measured(run)


def _measured(run: TrainingRun) -> dict[str, Any]:
    began = time.perf_counter()
    training = MeasuredTraining(run)
    for _ in range(WARMUP):
        training.step()
    torch.cuda.synchronize()
    warm_s = time.perf_counter() - began
    begin = time.perf_counter()
    steps = [training.timed_step() for _ in range(TIMED)]
    torch.cuda.synchronize()
    wall_s = (time.perf_counter() - begin) / TIMED
    times: dict[str, list[float]] = {}
    totals = []
    for events, _ in steps:
        totals.append(events[0][1].elapsed_time(events[-1][1]) * 1e-3)
        phases: dict[str, float] = {}
        for (_, before), (phase, after) in pairwise(events):
            phases[phase] = phases.get(phase, 0.0) + before.elapsed_time(after) * 1e-3
        for phase, seconds in phases.items():
            times.setdefault(phase, []).append(seconds)
    row = {
        "warmup_s": warm_s,
        "wall_s": wall_s,
        "step_s": statistics.median(totals),
        "steps_s": totals,
        "phases_s": {phase: statistics.median(seconds) for phase, seconds in times.items()},
        "host_s": statistics.median(host for _, host in steps),
        "memory": _memory(training),
    }
    row["profile"] = profile(training.step)
    row["gap_s"] = row["step_s"] - row["profile"]["busy_s"]
    return row


def _memory(training: MeasuredTraining) -> dict[str, int]:
    """Return bytes by torch's allocator: of states between steps, before each backward part, and at the peaks."""
    now = {"states": torch.cuda.memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    peaks: dict[str, int] = {}

    def mark(phase: str) -> None:
        peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated())
        now[f"after_{phase}"] = max(now.get(f"after_{phase}", 0), torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    training.step(mark)
    params = training.adam.params
    elements = sum(param.numel() for param in params)
    return {
        **now,
        **{f"peak_{phase}": peak for phase, peak in peaks.items() if phase != "begin"},
        "peak": max(peaks.values()),
        "reserved": torch.cuda.memory_reserved(),
        "parameters": elements,
    }


# --- predicting -------------------------------------------------------------------------------------------------


def problem_of(run: TrainingRun, stack: str) -> tuple[StepProblem, Parallelism]:
    """Return the step of a run for `mw.algorithms.step_of`, on one chip of the catalog's H100 cluster."""
    model = Transformer(
        run.name,
        run.layers,
        run.hidden,
        run.heads,
        run.kv_heads,
        run.hidden // run.heads,
        run.ffn,
        run.vocab,
        run.family == "llama",
        "benchmarks/gpu/steps.py",
        run.family == "gpt",
    )
    share = stack_table()["attention"].get(run.attention, {}).get("H100", 1.0)
    problem = StepProblem(
        model,
        load_cluster("dgx-h100:1"),
        run.micro_batch * run.accumulation,
        run.seq,
        gradient_dtype=run.gradients,
        attention_share=share,
        loss="eager",
        overlap="layers",
        dropout=run.dropout > 0,
        stack=replace(load_stack(stack), gradient_passes=(1.0, 2.0), runs_programs=False),
    )
    return problem, Parallelism(micro_batch=run.micro_batch, recompute=run.recompute)


def predict(run: TrainingRun) -> dict[str, Any]:
    """Return the predictions of a run: with no constants of software in parts, and with those of torchtitan."""
    problem, parallelism = problem_of(run, "ideal")
    bare = step_of(problem, parallelism)
    with_stack = step_of(*problem_of(run, "torchtitan"))
    memory, parts = bare.memory.peak, bare.parts
    kinds = kinds_of_work(problem, parallelism)
    kinds["elementwise"] = parts.compute + parts.recompute + parts.ends - sum(kinds.values())
    kinds["optimizer"] = parts.optimizer
    return {
        "step_s": bare.time_s,
        "torchtitan_step_s": with_stack.time_s,
        "mfu": bare.mfu,
        "parts_s": {name: value for name, value in asdict(parts).items() if value},
        "kinds_s": kinds,
        "memory": {**asdict(memory), "total": memory.allocated},
    }


def kinds_of_work(problem: StepProblem, parallelism: Parallelism) -> dict[str, float]:
    """Return the seconds of products, the head's included, and of attention in a step."""
    machine = machine_of(problem, block_axes(parallelism))
    model, count = problem.model, problem.batch // parallelism.micro_batch
    assert model.vocab_size is not None
    head = parallelism.micro_batch * problem.sequence, model.vocab_size, model.hidden
    shapes = [head, (head[0], head[2], head[1]), (head[2], head[1], head[0])]
    times = {
        "product": count * sum(layers.call_s(problem, matmul_work(*shape, problem.dtype)) for shape in shapes)
    }
    times["attention"] = 0.0
    for training in (True, False) if parallelism.recompute == "full" else (True,):
        config = layers.best_config(problem, parallelism)
        skeleton = strategy_of(parallelism).skeleton(block_of(problem, parallelism, training), config)
        for turns, task in skeleton.counted_tasks():
            if isinstance(task.work, Compute):
                kind = "product" if task.work.kind == "matmul" else task.work.call
                kind = {"matmul": "product", "causal_attention": "attention"}.get(kind, kind)
                if kind in times:
                    seconds = price(task.work, machine).total_ps * 1e-12
                    times[kind] += model.num_layers * count * turns * seconds
    return times


def kinds_measured(profile: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of kernels by the kinds that are predicted; what is left is element-wise."""
    classes = {name: entry["s"] for name, entry in profile["classes"].items()}
    kinds = {name: classes.pop(name, 0.0) for name in ("product", "attention", "optimizer")}
    return {**kinds, "elementwise": sum(classes.values())}


# --- the command ------------------------------------------------------------------------------------------------


def measured_row(run: TrainingRun) -> dict[str, Any]:
    """Return the row of a run; where it does not fit in memory, what the error says."""
    try:
        measured = measure(run)
    except torch.OutOfMemoryError as error:
        measured = {"error": str(error).splitlines()[0]}
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return {"run": asdict(run), "measured": measured}


def with_prediction(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its prediction, and with the errors of step and memory."""
    run = TrainingRun(**row["run"])
    measured, predicted = row["measured"], predict(run)
    out = {**row, "predicted": predicted}
    if "error" not in measured:
        measured["kinds_s"] = kinds_measured(measured["profile"])
        memory = measured["memory"]
        out["errors"] = {
            "step": predicted["step_s"] / measured["step_s"] - 1,
            "torchtitan_step": predicted["torchtitan_step_s"] / measured["step_s"] - 1,
            "allocated": predicted["memory"]["total"] / memory["peak"] - 1,
            "reserved": predicted["memory"]["total"] / memory["reserved"] - 1,
        }
    return out


def line_of(row: dict[str, Any]) -> str:
    """Return a row in one line."""
    measured, predicted = row["measured"], row["predicted"]
    if "error" in measured:
        return f"{row['run']['name']:45} {measured['error'][:60]}"
    kinds = {
        name: f"{1e3 * seconds:.0f} ({1e3 * predicted['kinds_s'][name]:.0f})"
        for name, seconds in measured["kinds_s"].items()
    }
    step, memory, errors = measured["step_s"], measured["memory"], row["errors"]
    return (
        f"{row['run']['name']:45} {1e3 * step:7.1f} ms, predicted {1e3 * predicted['step_s']:7.1f} "
        f"({errors['step']:+.1%}; torchtitan {errors['torchtitan_step']:+.1%}), "
        f"gaps {1e3 * measured['gap_s']:.0f}; "
        f"{memory['peak'] / 1e9:.1f} GB, predicted {predicted['memory']['total'] / 1e9:.1f} "
        f"({errors['allocated']:+.1%}) {kinds}"
    )


def main() -> None:
    """Measure and predict, or predict again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true", help="predict again what is saved; needs no GPU")
    parser.add_argument("--only", default="", help="runs whose names contain one of these, between commas")
    parser.add_argument("--most-s", type=float, default=600.0, help="begin no run after so many seconds")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where steps.json is")
    arguments = parser.parse_args()
    path = arguments.folder / "steps.json"
    if arguments.predict:
        saved = json.loads(path.read_text())
        saved["rows"] = [with_prediction(row) for row in saved["rows"]]
        path.write_text(json.dumps(saved, indent=1) + "\n")
        print("\n".join(map(line_of, saved["rows"])))
        return
    begin, rows = time.perf_counter(), []
    names = [run.name for run in RUNS]
    if arguments.only and path.exists():  # the other rows stay
        rows = json.loads(path.read_text())["rows"]
    for run in RUNS:
        if arguments.only and not any(word in run.name for word in arguments.only.split(",")):
            continue
        if time.perf_counter() - begin > arguments.most_s:
            print(f"{run.name}: left out, {arguments.most_s:.0f} s are over")
            continue
        rows = [row for row in rows if row["run"]["name"] != run.name]
        rows.append(with_prediction(measured_row(run)))
        print(line_of(rows[-1]), flush=True)
        rows.sort(key=lambda row: names.index(row["run"]["name"]))
        save_rows(arguments.folder, "steps", rows)


if __name__ == "__main__":
    main()
