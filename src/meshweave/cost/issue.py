"""What issuing an op takes the host of its rank, in picoseconds (`describe.machine.host`), as the core reads it.

Ops are issued in the order of the program, one after the other. A call without FLOPs and bytes issues nothing.
"""

from __future__ import annotations

from meshweave.base.units import to_ps
from meshweave.describe.machine.host import HostRates


def host_columns(host: HostRates) -> tuple[int, int, int, int]:
    """Return (kernel, collective, transfer, waits) of a host.

    The first three are the picoseconds of issuing one of each. The last is 1 if the host waits for the end of
    each collective before it issues what follows, else 0.
    """
    return to_ps(host.kernel_s), to_ps(host.collective_s), to_ps(host.transfer_s), int(host.waits)
