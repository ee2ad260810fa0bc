"""Bound programs as CUDA graphs: what a run issues is captured once and replayed, without Python for each op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.issue import Execute


def check_graph(context: TorchContext, *, is_one_sided: bool, is_timed: bool) -> None:
    """Raise UnsupportedError where a program cannot be a CUDA graph: not on CUDA, `is_one_sided` or `is_timed`."""
    if context.device.type != "cuda":
        raise UnsupportedError(f"a graph is of CUDA, this context's tensors are on {context.device}")
    if is_one_sided:
        raise UnsupportedError("a program with one-sided ops is no graph: its waits count from run to run")
    if is_timed:
        raise UnsupportedError("a graph has no times of ops: bind without trace")


class CapturedRun:
    """Runs a program once as it is, since libraries set up at a first use, then captures it as a CUDA graph.

    Functions of `call` ops must be fit for capture: torch functions on tensors of the device that do not wait for
    the device.
    """

    def __init__(self, execute: Execute, device: torch.device) -> None:
        """Keep `execute`, which runs the program once on CUDA `device`. Nothing is captured yet."""
        self._execute, self._device = execute, device
        self._is_warm = False
        self._graph: Any = None

    def __call__(self) -> Mapping[int, tuple[int, int]]:
        """Run the program once: the first call issues it, the second captures and replays it, later ones replay.

        Return {}, or at the first call what `execute` returns.
        """
        if self._graph is None and not self._is_warm:
            self._is_warm = True
            return self._execute()
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        return {}

    def _captured(self) -> Any:
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and of heartbeats go on beside the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._execute()
        return graph
