"""Where the time of work on a GPU goes: kernels by class, from torch.profiler's trace."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CLASSES = (
    ("attention", r"flash|fmha|sdpa|attention|dot_do_o|convert_dq"),
    ("product", r"gemm|nvjet|cutlass|cublas|splitk|wgrad|xmma"),
    ("optimizer", r"multi_tensor_apply|adam"),
    ("loss", r"softmax|nll_loss|cross_entropy"),
    ("norm", r"layer_?norm|rms_?norm|gammabeta"),
    ("embedding", r"embedding|indexing|index_select|gather"),
    ("compiled", r"^triton"),
    ("copy", r"^mem(cpy|set)|copy_kernel|catarray"),
    ("elementwise", r"elementwise|reduce_kernel|dropout|distribution"),
)
"""Classes of kernels and what their names contain, the first that fits."""


def class_of(kernel: str) -> str:
    """Return the class of a kernel by its name."""
    return next((name for name, words in CLASSES if re.search(words, kernel.lower())), "other")


def profile(work: Callable[[], None], listed: int = 30) -> dict[str, Any]:
    """Return what kernels ran in `work`: seconds and number by class, seconds with any running, the longest."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summary(
        [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")], listed
    )


def summary(events: list[dict[str, Any]], listed: int) -> dict[str, Any]:
    """Return seconds and numbers of kernels, of events with name, ts and dur in microseconds."""
    by_class: dict[str, list[float]] = {}
    by_name: dict[str, list[float]] = {}
    for event in events:
        for table, key in ((by_class, class_of(event["name"])), (by_name, event["name"])):
            entry = table.setdefault(key, [0.0, 0])
            entry[0] += event["dur"] * 1e-6
            entry[1] += 1
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:listed]
    return {
        "busy_s": _busy_s(events),
        "kernels": len(events),
        "classes": {name: {"s": s, "count": count} for name, (s, count) in sorted(by_class.items())},
        "longest": [{"name": name[:160], "s": s, "count": count} for name, (s, count) in longest],
    }


def _busy_s(events: list[dict[str, Any]]) -> float:
    """Return the seconds in which at least one kernel ran."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return busy * 1e-6
