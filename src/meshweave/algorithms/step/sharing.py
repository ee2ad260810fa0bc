"""What layers and collectives of their weights take of each other's links, where both run at once.

A transfer of tensor or context ranks and a collective of replicas that pass the same link get the rates of
`cost.flows` while both flow. So the part of a layer takes longer, and the collective too.
"""

from __future__ import annotations

from collections.abc import Callable

from meshweave.algorithms.step.block_time import LayerBlock, layer_block, layer_key
from meshweave.algorithms.step.data_parallel import APART, Sharing, lane_collectives, mean_sharing
from meshweave.algorithms.step.placement import machine_of, replica_groups
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.cost.flows import shared_rates
from meshweave.cost.machine import Machine
from meshweave.cost.price import Price, price
from meshweave.ir.work import CopyExchange, Transfer

Sharings = tuple[Sharing, Sharing, Sharing]
"""Of gathers with the forward part of a layer, and of gathers and reductions with the backward part."""
_RINGS = ("all_gather", "reduce_scatter", "all_reduce")


def sharings(problem: StepProblem, parallelism: Parallelism) -> Sharings:
    """Return what parts of a layer, and collectives of a layer's weights, take of each other's links.

    The backward part has its recomputation. Of layers of several kinds the first one counts.
    """
    p = parallelism
    if not problem.stack.overlap or p.tensor_size * p.context == 1 or p.replicas == 1:
        return APART, APART, APART
    key = layer_key(p), p.recompute == "full", p.zero, p.shards, replica_groups(p)
    return problem.once("sharing", key, lambda: _sharings(problem, p))


def _sharings(problem: StepProblem, parallelism: Parallelism) -> Sharings:
    block, is_repeated = layer_block(problem.kinds[0][1], parallelism), parallelism.recompute == "full"
    gathers, sums = (_of_lane(block, is_repeated, lane) for lane in lane_collectives(problem, parallelism))
    return gathers[0], gathers[1], sums[1]


def _of_lane(
    block: LayerBlock, is_repeated: bool, lane: tuple[tuple[Transfer, int], ...]
) -> tuple[Sharing, Sharing]:
    """Return the sharing of the collectives of a lane with the forward and the backward part of a layer."""
    of: list[tuple[Sharing, Sharing]] = []
    seconds: list[float] = []
    for work, stride in lane:
        machine = machine_of(block.problem, (("row", work.num_ranks, stride),))
        cost = price(work, machine)
        forward, whole = block.beside(_shared(block.machine, machine, work, cost))
        again = forward if is_repeated else (0.0, 0.0)
        backward = (both - first + more for first, both, more in zip(forward, whole, again, strict=True))
        flowing = cost.flow_ps / max(cost.total_ps, 1)
        of.append((Sharing(*forward, flowing), Sharing(*backward, flowing)))
        seconds.append(cost.total_ps)
    first, second = (mean_sharing([each[part] for each in of], seconds) for part in (0, 1))
    return first, second


def _shared(
    machine: Machine, other: Machine, collective: Transfer, cost: Price
) -> Callable[[Transfer], tuple[int, int]]:
    """Return what gives the picoseconds that a transfer takes longer beside a collective, and that this loses."""
    known: dict[Transfer, tuple[int, int]] = {}
    rate, flows = _message_rate(other, collective, cost), other.flows(collective.axis)

    def shared(work: Transfer) -> tuple[int, int]:
        if work not in known:
            known[work] = 0, 0
            if work.num_ranks > 1 and not isinstance(work, CopyExchange):
                own = price(work, machine)
                rates = _message_rate(machine, work, own), rate
                left = shared_rates(machine.flows(work.axis), flows, rates)
                longer = rates[0] / left[0] * own.flow_ps
                known[work] = round(longer) - own.flow_ps, round(longer * (1 - left[1] / rates[1]))
        return known[work]

    return shared


def _message_rate(machine: Machine, work: Transfer, cost: Price) -> float:
    """Return the bytes per second of each message of a transfer."""
    return cost.rate_per_s / (machine.num_directions(work.axis) if work.kind in _RINGS else 1)
