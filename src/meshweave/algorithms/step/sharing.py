"""What layers take of the links of other traffic that runs beside them, and that of theirs.

Other traffic is collectives of weights, and messages between stages. Where it passes the same link as a transfer
of tensor or context ranks, both get the rates of `cost.flows` while both flow. So both take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshweave.algorithms.block.problem import MESH
from meshweave.algorithms.step.block_tasks import PartTime
from meshweave.algorithms.step.block_time import LayerBlock, layer_block, layer_key
from meshweave.algorithms.step.data_parallel import APART, Sharing, lane_collectives, mean_sharing
from meshweave.algorithms.step.layers import LayerTime
from meshweave.algorithms.step.memory import boundary_bytes
from meshweave.algorithms.step.placement import machine_of, replica_groups
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.cost.flows import Flows, shared_rates
from meshweave.cost.machine import Machine
from meshweave.cost.price import Price, price
from meshweave.describe.model.memory import Recompute
from meshweave.ir.work import CopyExchange, Transfer


@dataclass(frozen=True)
class Sharings:
    """How the parts of a layer, and other traffic beside them, delay each other on links.

    Attributes:
        gathers: of gathers of weights (with the forward part, with the backward part).
        sums: of sums of gradients with the backward part.
        messages: of messages between pipeline stages (with the forward part, with the backward part).
    """

    gathers: tuple[Sharing, Sharing] = (APART, APART)
    sums: Sharing = APART
    messages: tuple[Sharing, Sharing] = (APART, APART)


_RINGS = ("all_gather", "reduce_scatter", "all_reduce")


def sharings(problem: StepProblem, parallelism: Parallelism) -> Sharings:
    """Return how the parts of a layer, and other traffic beside them, delay each other on links.

    The backward part includes its recomputation. Of layers of several kinds the first one counts.
    """
    p = parallelism
    if p.tensor_size * p.context == 1 or p.replicas * p.pipeline == 1:
        return Sharings()
    key = layer_key(p), p.recompute, p.zero, p.shards, replica_groups(p), p.pipeline, p.stride("pipeline")
    return problem.once("sharing", key, lambda: _sharings(problem, p))


def beside_messages(layer: LayerTime, sharing: Sharings, message_s: float) -> LayerTime:
    """Return a layer's time, longer by sharing links with pipeline messages of `message_s` seconds.

    One message runs beside the forward part and one beside the backward part; what they add counts as `tensor_s`.
    """
    if sharing.messages == (APART, APART):
        return layer
    parts = layer.forward.total_s, layer.backward.total_s + layer.recompute.total_s
    pairs = zip(sharing.messages, parts, strict=True)
    forward, backward = (PartTime(tensor_s=each.hides(part_s)[1] * message_s) for each, part_s in pairs)
    return replace(layer, forward=layer.forward + forward, backward=layer.backward + backward)


def _sharings(problem: StepProblem, p: Parallelism) -> Sharings:
    block, lanes = layer_block(problem.kinds[0][1], p), lane_collectives(problem, p)
    message = Transfer("permute", f"{MESH}.row", p.pipeline, boundary_bytes(problem, p))
    messages = ((message, p.stride("pipeline")),) if p.pipeline > 1 else ()
    beside = lanes if problem.stack.overlap and p.replicas > 1 else ((), ())
    gathers, sums, sent = (_of_lane(block, p.recompute, lane) for lane in (*beside, messages))
    return Sharings(gathers, sums[1], sent)


def _of_lane(
    block: LayerBlock, recompute: Recompute, lane: tuple[tuple[Transfer, int], ...]
) -> tuple[Sharing, Sharing]:
    """Return the sharing of the collectives of a lane with the forward and the backward part of a layer."""
    of: list[tuple[Sharing, Sharing]] = []
    seconds: list[float] = []
    links = {link for axis in block.axes for link in block.machine.flows(axis)}
    for work, stride in lane:
        machine = machine_of(block.problem, (("row", work.num_ranks, stride),))
        cost = price(work, machine)
        seconds.append(cost.total_ps)
        if links.isdisjoint(machine.flows(work.axis)):
            of.append((APART, APART))
            continue
        forward, whole, ring = block.delays_s(_shared(block.machine, machine, work, cost))
        again = {"full": forward, "selective": ring}.get(recompute, (0.0, 0.0))
        added_s, lost_s = (
            both - first + more for first, both, more in zip(forward, whole, again, strict=True)
        )
        flowing = cost.flow_ps / max(cost.total_ps, 1)
        of.append((Sharing(*forward, flowing), Sharing(added_s, lost_s, flowing)))
    first, second = (mean_sharing([each[part] for each in of], seconds) for part in (0, 1))
    return first, second


def _shared(
    machine: Machine, other: Machine, collective: Transfer, cost: Price
) -> Callable[[Transfer], tuple[int, int]]:
    """Return what gives the picoseconds that a transfer takes longer beside a collective, and that this loses."""
    known: dict[Transfer, tuple[int, int]] = {}
    rate, flows = _message_rate(other, collective, cost), _flows(other, collective)

    def shared(work: Transfer) -> tuple[int, int]:
        if work not in known:
            known[work] = 0, 0
            if work.num_ranks > 1 and not isinstance(work, CopyExchange):
                own = price(work, machine)
                rates = _message_rate(machine, work, own), rate
                left = shared_rates(_flows(machine, work), flows, rates)
                longer = rates[0] / left[0] * own.flow_ps
                known[work] = round(longer) - own.flow_ps, round(longer * (1 - left[1] / rates[1]))
        return known[work]

    return shared


def _flows(machine: Machine, work: Transfer) -> Flows:
    return machine.flows(work.axis, one_way=work.kind not in _RINGS)


def _message_rate(machine: Machine, work: Transfer, cost: Price) -> float:
    """Return the bytes per second of each message of a transfer."""
    return cost.rate_per_s / (machine.num_directions(work.axis) if work.kind in _RINGS else 1)
