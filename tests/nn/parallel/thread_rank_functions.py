"""What ranks do in tests of models that several threads of a rank use."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshweave.base.errors import UnsupportedError
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.lanes import LaneThreads
from meshweave.nn.parallel.linear import ParallelLinear
from meshweave.nn.parallel.strategy import LayerStrategy


def used_meanwhile(context: RankContext, payload: Mapping[str, Any]) -> list[Any]:
    """Return how far a product is off that another thread asks for with other operands, and what that is told."""
    torch.manual_seed(0)
    ours = TorchContext(liveness=context.liveness, deadline_s=30.0)
    whole = nn.Linear(8, 8, bias=False).double()
    mesh = init_device_mesh("cpu", (context.num_ranks,))
    strategy = LayerStrategy.of("megatron", mesh, context=ours)
    layer = ParallelLinear(copy.deepcopy(whole), strategy, place="out")
    x, said = torch.randn(2, 3, 8).double(), list[str]()
    part = x.chunk(context.num_ranks, -1)[context.rank].contiguous()
    layer(part)

    def other() -> None:
        try:
            layer(9 * part)
        except UnsupportedError as error:
            said.append(str(error))

    run_lane = LaneThreads._run_lane

    def meanwhile(*args: Any) -> None:
        if not said:
            said.append("")
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(30)
        run_lane(*args)

    with mock.patch.object(LaneThreads, "_run_lane", meanwhile):
        made = layer(part)
    return [float((each - whole(x)).abs().max()) for each in (made, layer(part))] + said[1:]
