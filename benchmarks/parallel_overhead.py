"""What parallelised layers cost in Python: one process against the plain model, and a small layer on two ranks.

    python benchmarks/parallel_overhead.py [--save NAME]

The ratio is of CPU times of steps of the same Llama, plain and parallelised on a mesh of one rank, taken in turns;
it is the median of those of the rounds. Gradients are cleared before each step, and once more with gradients that
add up.

The cost of a layer on two ranks is what a step of a tiny model takes more with each more layer. Its products take
next to nothing, so that it is what calls cost. Of all of it (`layer_s`) that in calls of torch.distributed is
`transport_s`, that in threads of gloo `gloo_threads_s`, that of a plain layer `plain_layer_s`; the rest is
`python_s`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "nn" / "parallel"))
from plain_models import PlainLlama, sized_llama

ROUNDS = 31
LAYERS = (2, 10)


def _cpu_s(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def alone(context: mw.nn.RankContext, payload: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step on one rank, and the ratios of parallelised to plain steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = sized_llama(hidden=512, layers=2, heads=8, width=1408, words=256)
    made = mw.parallelize(copy.deepcopy(whole), "megatron", init_device_mesh("cpu", (1,)), check=False)
    tokens = torch.randint(0, 256, (2, 128))

    def plain() -> None:
        nn.functional.cross_entropy(whole(tokens).flatten(0, 1), tokens.flatten()).backward()

    def parallel() -> None:
        made.loss(tokens, tokens).backward()

    answer = {}
    for name, clears in (("ratio", True), ("ratio_adding_up", False)):
        ratios, seconds = [], []
        for number in range(payload["rounds"]):
            times = {}
            for step, module in ((plain, whole), (parallel, made.module))[:: 1 if number % 2 else -1]:
                if clears:
                    module.zero_grad()
                times[step] = _cpu_s(step)
            ratios.append(times[parallel] / times[plain])
            seconds.append(times[plain])
        answer |= {name: statistics.median(ratios[1:]), "plain_s": statistics.median(seconds[1:])}
    return answer


def _python_s() -> float:
    """Return the CPU seconds so far of all threads of this process that run Python."""
    clocks = (time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident)
    return sum(map(time.clock_gettime, clocks))


class _TimedWork:
    """A work of torch.distributed whose waits are counted."""

    def __init__(self, work: Any, clock: TransportClock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *timeout: Any) -> Any:
        return self._clock.timed(self._work.wait, *timeout)


class TransportClock:
    """Counts the CPU seconds that threads of Python spend in calls of torch.distributed, in `seconds`.

    It takes the place of these functions from where it is made on.
    """

    NAMES = (
        "isend", "irecv", "all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
        "reduce_scatter_single",
    )  # fmt: skip

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in self.NAMES:
            if hasattr(dist, name):
                setattr(dist, name, self._around(getattr(dist, name)))

    def timed(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what a call returns, and count it."""
        began = time.thread_time()
        result = call(*args, **options)
        self.seconds += time.thread_time() - began
        return result

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def posted(*args: Any, **options: Any) -> Any:
            work = self.timed(call, *args, **options)
            return work if work is None else _TimedWork(work, self)

        return posted


def _step_s(step: Callable[[], object], rounds: int, clock: TransportClock) -> tuple[float, float, float]:
    """Return the median CPU seconds of steps: of all threads, those of Python, and calls of torch.distributed."""
    rows = []
    for _ in range(rounds):
        began, transport_s = _python_s(), clock.seconds
        rows.append((_cpu_s(step), _python_s() - began, clock.seconds - transport_s))
    everything, python, transport = (statistics.median(each) for each in zip(*rows, strict=True))
    return everything, python, transport


def of_a_layer(context: mw.nn.RankContext, payload: Mapping[str, Any]) -> dict[str, float]:
    """Return the CPU seconds of this rank per layer and step of a tiny model, parallelised and plain."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (payload["ranks"],))
    torch.manual_seed(0)  # all ranks have the same tokens
    tokens = torch.randint(0, 24, (2, 8))
    clock = TransportClock()
    times: dict[str, list[tuple[float, float, float]]] = {"parallel": [], "plain": []}
    for layers in LAYERS:
        torch.manual_seed(0)
        model = PlainLlama(layers=layers)
        made = mw.parallelize(copy.deepcopy(model), payload["strategy"], mesh, check=False)

        def parallel(made: mw.nn.ParallelModel = made) -> None:
            made.module.zero_grad()
            made.step(tokens, tokens)

        def plain(model: nn.Module = model) -> None:
            model.zero_grad()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

        for name, step in (("parallel", parallel), ("plain", plain)):
            for _ in range(5):
                step()
            times[name].append(_step_s(step, payload["rounds"], clock))
    num_layers = LAYERS[1] - LAYERS[0]
    layer_s, threads_s, transport_s = (
        (many - few) / num_layers for few, many in zip(*times["parallel"], strict=True)
    )
    plain_s = (times["plain"][1][0] - times["plain"][0][0]) / num_layers
    return {
        "layer_s": layer_s,
        "plain_layer_s": plain_s,
        "transport_s": transport_s,
        "gloo_threads_s": layer_s - threads_s,
        "python_s": threads_s - transport_s - plain_s,
    }


def main() -> None:
    """Print the measurements, and save them where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    name = parser.parse_args().save
    here = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
    result: dict[str, Any] = {"rounds": ROUNDS}
    result["alone"] = mw.launch("parallel_overhead:alone", 1, {"rounds": ROUNDS}, timeout_s=200, env=here)[0]
    for strategy in ("megatron", "megatron_sp"):
        payload = {"ranks": 2, "strategy": strategy, "rounds": ROUNDS}
        result[strategy] = mw.launch("parallel_overhead:of_a_layer", 2, payload, timeout_s=200, env=here)[0]
    payload = {"ranks": 1, "strategy": "megatron", "rounds": ROUNDS}
    one = mw.launch("parallel_overhead:of_a_layer", 1, payload, timeout_s=100, env=here)
    result["one rank"] = one[0]
    print(json.dumps(result, indent=1))
    if name is not None:
        print(f"saved {save(name, result)}")


if __name__ == "__main__":
    main()
