"""An example that torchrun starts, on ranks that are forked instead: importing takes most of a short run."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from meshweave.nn import RankContext


def run_script(context: RankContext, payload: Mapping[str, Any]) -> str:
    """Return what a script prints, which makes a process group of its own by the environment, at `port`."""
    dist.barrier()  # a rank that leaves earlier breaks connections that another still makes
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(payload["port"])
    sys.argv = [payload["script"], *payload["arguments"]]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(payload["script"], run_name="__main__")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the worker ends a group
    return out.getvalue()
