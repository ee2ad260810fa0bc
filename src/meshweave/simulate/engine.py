"""The simulator: discrete events in a C++ core, for thousands of ranks.

An op that is issued waits for its partners, then for its launch and synchronisation, then its amounts flow: FLOPs
through the rank's compute engine, what products and copies read and write through its memory, messages through the
memories of both ends and the links between them, max-min fairly where flows meet. Collectives run message by
message. `tests/plain_simulator` has the same model in plain Python, in full.

The core gets the program as a template in columns and expands it itself. Only the routes between chips are found
here, because `cost.machine` knows which link carries what. The same program gives the same integers as in
plain Python, op by op.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from meshweave._core import Core, ProgramFault
from meshweave.base.errors import MeshweaveError, ProgramError
from meshweave.base.limits import (
    CHECKED_STEPS,
    SIMULATED_MESSAGES,
    SIMULATED_OPS,
    SIMULATED_RANK_OPS,
    SIMULATED_ROUTES,
    Limit,
)
from meshweave.base.units import to_ps
from meshweave.cost.calls import flops_per_s
from meshweave.cost.compute import engine_amount, shape_s
from meshweave.cost.libraries import sized_price
from meshweave.cost.machine import Machine
from meshweave.cost.placed import Link
from meshweave.cost.price import price
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.host import HostRates
from meshweave.describe.machine.links import COMM_KINDS
from meshweave.describe.machine.network import HostsNetwork, RingNetwork, TorusNetwork
from meshweave.ir.analysis.dataflow import analyse, untimed_order
from meshweave.ir.columns.op_fields import Column
from meshweave.ir.program import Program
from meshweave.simulate.columns import Columns
from meshweave.simulate.result import Simulation

# --- the host of a rank -----------------------------------------------------------------------------------

# What issuing an op takes the host of its rank, in picoseconds (`describe.machine.host`), as the core reads it.
#
# Ops are issued in the order of the program, one after the other. A call without FLOPs and bytes issues nothing.


def host_columns(host: HostRates) -> tuple[int, int, int, int]:
    """Return (kernel, collective, transfer, waits) of a host.

    The first three are the picoseconds of issuing one of each. The last is 1 if the host waits for the end of
    each collective before it issues what follows, else 0.
    """
    return to_ps(host.kernel_s), to_ps(host.collective_s), to_ps(host.transfer_s), int(host.waits)


# --- engine -----------------------------------------------------------------------------------------------

IMAGE_ROUTES = 5
"""What the core adds to the number of a route that leads to an image of a rank (`cost.folded`)."""
_IDLE = "too many statements"
"""In the core's words for loops that turn and turn and do nothing."""


def simulate(
    program: Program, machine: Machine | Cluster | str | Path, *, limited: bool = False
) -> Simulation:
    """Return the simulation of a program on a machine, with contention; its times are integer picoseconds.

    Args:
        machine: a machine, or a cluster, its name or file, on which the meshes of the program are laid.
        limited: refuse a program whose simulation takes more than seconds: one over `SIMULATED_OPS` or another
            such limit of `base.limits`.

    Raises:
        ProgramError: partners disagree, the program deadlocks, an expression does not fit, or it is over a
            limit.
        LayoutError: the machine was made for other meshes, or its network does not carry one.
        UnsupportedError: the machine cannot place a group, an op reads another rank's memory in place, a call
            has neither FLOPs nor a known kind of work, or a product is outside of a table of measured ones.
    """
    program = Program.given(program).expanded
    machine = Machine.under(machine, program)
    machine.require(program)
    try:
        columns = Columns(program, machine.copies)
        if limited:
            columns.data["max_ops"][0] = SIMULATED_OPS.most
        core = Core(columns.data)
        if limited:
            _require(SIMULATED_RANK_OPS, int(np.diff(core.starts()).max(initial=0)))
            _require(SIMULATED_MESSAGES, columns.most_messages(core.rows()))
        machine_columns = _machine_columns(machine, columns.priced_axes, columns.rated_work)
        machine_columns["work_flops"] = _work_flops(machine, core, columns)
        machine_columns["sized"] = _sized(machine, core, columns)
        machine_columns["exchange_ps"] = _exchanges(machine, columns)
        book = _routes(machine)
        wanted = core.routes(machine_columns["num_directions"], machine_columns["rails"])
        if limited:
            _require(SIMULATED_ROUTES, len(wanted) // 3)
        book.add(wanted, columns, machine_columns)
        outputs = core.run(machine_columns)
    except ProgramFault as fault:
        raise _explain_fault(program, fault) from None
    except MeshweaveError:
        raise
    except OverflowError:  # a column holds 64 bits
        raise ProgramError("a size in this program is too large to be simulated") from None
    except ValueError as error:  # what the core refuses to read, such as a buffer without slots
        raise ProgramError(f"this program makes no sense to the simulator: {error}") from None
    return Simulation(program, machine, columns.ranks, core.starts(), core.rows(), outputs, tuple(book.links))


def _require(limit: Limit, count: int) -> None:
    """Raise ProgramError where a program is over a limit."""
    if count > limit.most:
        raise ProgramError(f"the program {limit.refusal(count)}")


def _machine_columns(machine: Machine, names: list[str], works: list[tuple[str, str]]) -> dict[str, Column]:
    chip = machine.cluster.chip
    constants = [
        (to_ps(known.launch_s), to_ps(known.sync_s), machine.rate(name, kind))
        for name in names
        for kind in COMM_KINDS
        for known in (machine.constants(name, kind),)
    ]
    return {
        "chip": _column(
            int(chip.effective_flops_per_s),
            int(chip.memory_bytes_per_s),
            to_ps(chip.launch_s),
            *(chip.gemm_tile or (0, 0, 0)),
            machine.cluster.send_buffer_bytes,
            int(isinstance(machine.cluster.network, (TorusNetwork, RingNetwork))),
            to_ps(chip.pack_launch_s),
            int(chip.pack_bytes_per_s),
        ),
        "host": _column(*(host_columns(machine.cluster.host) if machine.cluster.host else ())),
        "flop_rates": _column(*(flops_per_s(chip, call, dtype) for call, dtype in works)),
        "num_directions": _column(*(machine.num_directions(name) for name in names)),
        "rails": _column(*(int(machine.uses_rails(name)) for name in names)),
        "one_link": _column(*(max(int(machine.axis(name).link_bytes_per_s), 1) for name in names)),
        "constants": _column(*(value for row in constants for value in row)),
    }


def _work_flops(machine: Machine, core: Core, columns: Columns) -> Column:
    """Return the FLOPs at the engine's rate of each different work, -1 where its rate says; none without shapes.

    Raises UnsupportedError for a product that is outside of a table of measured ones.
    """
    chip = machine.cluster.chip
    if chip.kernels is None:
        return _column()
    return _column(
        *(
            -1 if shape_s(work, chip) is None else engine_amount(work, chip)
            for work in columns.works(core.works())
        )
    )


def _sized(machine: Machine, core: Core, columns: Columns) -> Column:
    """Return the prices of collectives that depend on their size, in rows as the core reads them."""
    rows: list[int] = []
    if not isinstance(machine.cluster.network, HostsNetwork):
        return _column()
    for row, comm, count, part_bytes in core.collectives().reshape(-1, 4).tolist():
        known = sized_price(machine.priced, columns.priced_axes[row], COMM_KINDS[comm], count, part_bytes)
        if known is not None:
            rows += (row, comm, count, part_bytes, known.launch_ps, known.sync_ps, known.rate, known.route)
    return _column(*rows)


def _exchanges(machine: Machine, columns: Columns) -> Column:
    """Return what the exchange of each op as written takes on each priced axis: the price that estimates have.

    It is -1 of other ops, and on axes that the exchange does not run on.
    """
    out = np.full((len(columns.exchanges), len(columns.priced_axes)), -1, dtype=np.int64)
    for row, works in enumerate(columns.exchanges):
        for axis, work in works.items():
            out[row, axis] = price(work, machine.priced).total_ps
    return out.reshape(-1)


def _column(*values: int) -> Column:
    return np.array(values, dtype=np.int64)


class _Routes:
    """A cache of the numbered links of a machine, and of routes over them.

    A link of a route is its number times 8 plus its weight, as the core reads it.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.links: dict[Link, int] = {}
        self.rates: list[int] = []
        self.known: dict[tuple[int, int, int], list[int]] = {}

    def add(self, wanted: Column, columns: Columns, into: dict[str, Column]) -> None:
        """Add the links and rates of the wanted routes to the columns `into`.

        Each row of `wanted` is (position of the source, position of the target, kind of route; `IMAGE_ROUTES`
        more for a route to an image). For a program with one-sided ops or messages, the costs over each route
        are added as well.
        """
        rows, ranks = wanted.reshape(-1, 3), columns.ranks
        pairs = np.column_stack((ranks[rows[:, 0]], ranks[rows[:, 1]], rows[:, 2])).tolist()
        routes = [self.known.get(pair) or self._route(*pair) for pair in map(tuple, pairs)]
        into["route_starts"] = np.cumsum([0, *map(len, routes)], dtype=np.int64)
        into["route_links"] = _column(*(link for route in routes for link in route))
        into["link_rates"] = _column(*self.rates)
        into["one_sided"] = _column(*self._one_sided(pairs) if columns.has_pair_costs else ())

    def _one_sided(self, pairs: list[list[int]]) -> Iterator[int]:
        for source, target, _ in pairs:
            for adds in (False, True):
                constants = self.machine.one_sided_constants(source, target, adds)
                yield from (constants.launch_ps, constants.sync_ps, constants.rate, constants.flops_per_byte)

    def _route(self, source: int, target: int, number: int) -> list[int]:
        route = []
        machine, kind = self.machine, number % IMAGE_ROUTES
        to_image = number >= IMAGE_ROUTES
        path = (machine.image_path if to_image else machine.path)(source, target, kind)
        for link in path:
            if link not in self.links:
                self.links[link] = len(self.links)
                self.rates.append(machine.weighted_link_rate(link))
            route.append(8 * self.links[link] + machine.link_weight(link, kind))
        self.known[source, target, number] = route
        return route


@lru_cache(maxsize=32)
def _routes(machine: Machine) -> _Routes:
    return _Routes(machine)


def _explain_fault(program: Program, fault: ProgramFault) -> ProgramError:
    """Return the core's error in the words of the Python analysis, which knows labels and buffers."""
    message, rank, op = fault.args
    if _IDLE in message:  # reading it here would take hours
        return ProgramError(message, rank=rank if rank >= 0 else None)
    try:
        if program.has_steps_within(CHECKED_STEPS):  # else a long search for words would help nobody
            untimed_order(analyse(program))
        known = rank >= 0 and op >= 0 and program.has_steps_within(CHECKED_STEPS, (rank,))
        label = program.ops_on_rank(rank)[op].label if known else None
    except ProgramError as error:
        return error
    except IndexError:
        label = None
    return ProgramError(message, op=label, rank=rank if rank >= 0 else None)
