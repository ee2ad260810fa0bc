"""What the ranks of test_step_watch run: products of which one rank comes late."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import meshweave as mw
from meshweave.base.errors import MeshweaveError
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.matmul2d import matmul2d
from meshweave.nn.step_watch import StepWatch
from meshweave.tune.step_search import SpaceOptions


def refusal_of(call: Callable[[], Any]) -> str:
    """Return what a call is refused with."""
    try:
        call()
    except MeshweaveError as error:
        return str(error)
    return ""


def late_steps(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Rank 1 is late in every step; every second is recorded, and a warning comes after two of them."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("row", "col"))
    shared = TorchContext(liveness=context.liveness, deadline_s=30)
    watch = StepWatch("h100-node", every=2, share=0.5, steps=2, context=shared)
    a, b, wide = torch.ones(8, 4), torch.ones(8, 4), torch.ones(128, 64)
    warned_at, words = [], []
    for number in range(6):
        with warnings.catch_warnings(record=True) as caught, watch.step():
            warnings.simplefilter("always")
            if context.rank == 1:
                time.sleep(0.03)
            for x, y, shape in ((a, b, (8, 8, 8)), (wide, wide, (128, 128, 128))):
                matmul2d(x, y, mesh=mesh, shape=shape, algorithm="collective", ring_ways=0, context=shared)
            if number == 0:
                assert shared.recorder is None
        if caught:
            warned_at.append(number)
            words += [str(one.message) for one in caught]
    comparison = watch.latest
    assert comparison is not None
    same_ops = [
        (one.kind, one.label) == (other.kind, other.label)
        for one, other in zip(comparison.measured.spans, comparison.predicted.spans, strict=True)
    ]
    products = [span for span in comparison.predicted.spans if span.kind == "matmul"]
    sizes = len({span.end_ps - span.start_ps for span in products})
    rows = [(row.kind, row.where, row.measured_s) for row in comparison.rows]
    step = mw.step("llama-2-7b", "h100-node", batch=8, sequence=512, dp=8, zero=3, dtype="float32")
    moved = mw.step("llama-2-7b", "dgx-h100:8", batch=8, sequence=512, dp=8)
    return {
        "warned_at": warned_at,
        "words": words,
        "rows": rows,
        "same": all(same_ops) and bool(same_ops),
        "sizes": sizes,
        "factors": (comparison.level_factors, comparison.product_factor),
        "new_plan": str(watch.replan(step, SpaceOptions(pipeline=(1,), tensor=(1, 2)))),
        "refusal": refusal_of(lambda: watch.replan(moved)),
    }


def lost_in_exchange(context: Any, payload: Mapping[str, Any]) -> None:
    """Rank 1 is lost after its part of a recorded step; the others write what they are told."""
    shared = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("row", "col"))
    watch = StepWatch("h100-node", every=1, context=shared)
    a, b, began = torch.ones(9, 3), torch.ones(9, 3), 0.0
    try:
        for number in range(2):
            with watch.step():
                matmul2d(
                    a, b, mesh=mesh, shape=(9, 9, 9), algorithm="collective", ring_ways=0, context=shared
                )
                began = time.monotonic()
                if number and context.rank == 1:
                    os.kill(os.getpid(), getattr(signal, payload["signal"]))
    except MeshweaveError as error:
        said = [
            type(error).__name__,
            list(getattr(error, "missing", ())),
            time.monotonic() - began,
            str(error),
        ]
        Path(payload["folder"], f"{context.rank}.json").write_text(json.dumps(said))
        raise
