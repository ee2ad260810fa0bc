"""The host of a rank: the CPU thread that issues a rank's operations to its chip, one after the other.

    issued(i) = issued(i - 1) + what issuing operation i takes
    begin(i)  = max(issued(i), when its stream is free, when its data are there)

An operation so begins at the latest of three times, and not after their sum: a host ahead of its chip costs
nothing. What is issued does not shrink with the work, so that small operations take as long as the host takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshweave.base.errors import DescriptionError
from meshweave.describe.files import Duration, key


@dataclass(frozen=True)
class HostRates:
    """Seconds that a rank's host takes to issue operations. All zero: a host that is never waited for.

    Attributes:
        kernel_s: for a kernel: a product, a call, a copy.
        collective_s: for a collective of several ranks.
        transfer_s: for a message to or from one other rank.
        layer_s: for the Python code of a layer's forward part, besides its kernels. The backward part is run by
            the autograd engine, without it.
        waits: whether the host waits for the end of each collective before it issues what follows.

    Raises:
        DescriptionError: one is negative.
    """

    kernel_s: Annotated[Duration, key("for a kernel, from 0 to 1e6")] = 0.0
    collective_s: Annotated[Duration, key("for a collective, from 0 to 1e6")] = 0.0
    transfer_s: Annotated[Duration, key("for a message to or from one rank, from 0 to 1e6")] = 0.0
    layer_s: Annotated[Duration, key("for the Python code of a layer's forward part, from 0 to 1e6")] = 0.0
    waits: Annotated[bool, key("whether it waits for the end of each collective, true or false")] = False

    def __post_init__(self) -> None:
        if min(self.kernel_s, self.collective_s, self.transfer_s, self.layer_s) < 0:
            raise DescriptionError("host: seconds to issue an operation are negative; give at least 0")
