"""What issuing an op takes the host of its rank (`describe.machine.host`), in the order of the program.

A call without FLOPs and bytes issues nothing.
"""

from __future__ import annotations

from meshweave.base.units import to_ps
from meshweave.cost.calls import with_counts
from meshweave.describe.machine.host import HostRates
from meshweave.ir.program import Program
from meshweave.ir.program.ops import Accumulate, Call, Collective, Get, Op, Permute, Put, Recv, Send
from meshweave.ir.work import Compute, work_of


def issue_ps(program: Program, op: Op, host: HostRates) -> int:
    """Return the picoseconds in which a host issues an op."""
    if is_joined(op):
        return to_ps(host.collective_s)
    if isinstance(op, (Permute, Send, Recv, Get, Put, Accumulate)):
        return to_ps(host.transfer_s)
    if isinstance(op, Call):
        work = work_of(program, op)
        assert isinstance(work, Compute)
        work = with_counts(work)
        if not work.flops and not work.bytes:
            return 0
    return to_ps(host.kernel_s)


def is_joined(op: Op) -> bool:
    """Return whether an op is a collective, for whose end a host may wait."""
    return isinstance(op, Collective) and not isinstance(op, Permute)
