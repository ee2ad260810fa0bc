"""What the ranks of test_clocks.py run."""

import time
from dataclasses import astuple

from meshweave.execute.torch.context import TorchContext
from meshweave_lab.fidelity.clocks import clock_offsets


def compare(context, payload):
    """This rank's offset as found, once for each skew per rank in nanoseconds."""
    shared = TorchContext(liveness=context.liveness, deadline_s=20.0)
    found = []
    for skew_ns in payload["skews_ns"]:
        if payload.get("dies") == context.rank:
            raise KeyError("boom")
        ahead_ns = skew_ns * context.rank
        found.append(astuple(clock_offsets(shared, clock=lambda ahead=ahead_ns: time.monotonic_ns() + ahead)))
    shared.close()
    return found
