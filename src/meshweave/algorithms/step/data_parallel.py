"""Price data parallelism: reductions of gradients and gathers of weights, beside the layers or after them.

Ranks that have equal weights (data and context) reduce the gradients of a layer when its backward part ends, in a
lane beside the backward parts of the layers before it. Weights are gathered likewise ahead of the forward part (Li
et al., VLDB '20; Rajbhandari et al., SC '20; Zhao et al., PyTorch FSDP, VLDB '23):

    zero 0    gradients summed in the last micro-batch
    zero 1    reduced and scattered in the last micro-batch; weights gathered once, ahead of the first forward part
    zero 2    reduced and scattered in each micro-batch; weights as in 1
    zero 3    as 2; weights gathered for each forward and backward part of each micro-batch

Where only a group of them shards, the shards of gradients are then summed over the groups. An embedding table that
is the head's as well has its gradient summed over the first and the last pipeline rank besides.

Tables are reduced and gathered as layers are: the head's before all layers in the lane of the backward part and
after them in that of the forward part; the embedding's the other way round, with nothing to hide it. PyTorch's
FSDP gathers both before the first layer, and reduces both after the last one.

Where a stack slices weights for its collectives, it copies each rank's slice of each tensor out of what was
gathered. Where it sums after the backward part, ZeRO-1 sums whole gradients there, and nothing hides that.

Two lanes of n equal layers, c seconds of computing and r of communication each, end after n c + r if c > r, else
after c + n r: the recurrence that a skeleton of these tasks has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.algorithms.step.memory import (
    ShardedParameters,
    kinds_parameters,
    rank_of_head,
    table_parameters,
)
from meshweave.algorithms.step.placement import (
    Groups,
    collective_s,
    collective_steps,
    expert_replica_groups,
    expert_sharding_groups,
    message_s,
    replica_groups,
    sharding_groups,
)
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.ir.work import Transfer


@dataclass(frozen=True)
class DataParallelTime:
    """Seconds of the collectives of a layer's weights, the mean over kinds, and of an embedding table's gradient.

    Attributes:
        reduce_s: the reduction of one layer's gradients.
        gather_s: the all-gather of one layer's weights; 0 without ZeRO.
        table_s: the reduction of the gradient of an embedding table.
        table_gather_s: the all-gather of such a table; 0 without ZeRO.
        tied_s: the sum of the table's gradient over the first and the last pipeline rank, where they share the
            table.
    """

    reduce_s: float
    gather_s: float
    table_s: float
    table_gather_s: float
    tied_s: float


@dataclass(frozen=True)
class Sharing:
    """How a layer's forward or backward part and collectives of weights beside it delay each other on links.

    Attributes:
        added_s: seconds by which the part takes longer if bytes of such collectives flow all the time.
        lost_s: seconds by which these collectives are then behind.
        flowing: the share (0 to 1) of the collectives' seconds in which their bytes flow.
    """

    added_s: float = 0.0
    lost_s: float = 0.0
    flowing: float = 1.0

    def hides(self, part_s: float) -> tuple[float, float]:
        """Return how much communication runs beside a part, and how much that slows the part down.

        Args:
            part_s: seconds of the part without collectives beside it.

        Returns:
            (seconds of collectives, as they take alone, that run beside the part; seconds that each of these adds
            to the part).
        """
        beside_s = part_s + self.added_s - self.lost_s
        if self == APART or beside_s <= 0:
            return part_s, 0.0
        hidden_s = part_s / (self.flowing * part_s / beside_s + 1 - self.flowing)
        return hidden_s, self.flowing * self.added_s / beside_s


APART = Sharing()
"""Of a part and collectives that share no links."""


def mean_sharing(of: Sequence[Sharing], seconds: Sequence[float]) -> Sharing:
    """Return the mean `Sharing` of collectives that run one after the other beside a layer's part.

    `flowing` is weighted by the time of each collective, `added_s` and `lost_s` by the share of that time in which
    its bytes flow. The result is `APART`, no sharing, if these times are 0.

    Args:
        of: the sharing of each collective.
        seconds: the time of each collective, in any unit that is the same for all.
    """
    total = sum(seconds)
    if not total or all(each == APART for each in of):
        return APART
    pairs = [(each, taken / total) for each, taken in zip(of, seconds, strict=True)]
    flowing = sum(share * each.flowing for each, share in pairs)
    if not flowing:
        return APART
    added_s, lost_s = (
        sum(share * each.flowing * getattr(each, name) for each, share in pairs) / flowing
        for name in ("added_s", "lost_s")
    )
    return Sharing(added_s, lost_s, flowing)


def data_parallel_time(
    problem: StepProblem, parallelism: Parallelism, counts: tuple[float, ...] = ()
) -> DataParallelTime:
    """Return the seconds of the data-parallel collectives of one layer's weights, and of an embedding table.

    Args:
        counts: how many layers a stage has of each of `problem.kinds`; seconds of a layer are the mean over these
            layers. () for the mean over the model.
    """
    p = parallelism
    layout = p.data, p.pipeline, p.context, p.tensor_size, p.order, p.experts
    key = layout, p.zero, p.zero_group, rank_of_head(p), counts
    return problem.once("replicas", key, lambda: _data_parallel_time(problem, p, counts))


def _data_parallel_time(
    problem: StepProblem, parallelism: Parallelism, counts: tuple[float, ...]
) -> DataParallelTime:
    table = table_parameters(problem, parallelism)
    table_s = _reduce_s(problem, parallelism, table * problem.gradient_bytes)
    tied_s = table_gather_s = 0.0
    if problem.model.tied_embeddings and rank_of_head(parallelism) and table:
        axis = parallelism.pipeline, parallelism.stride("pipeline")
        tied_s = message_s(problem, *axis, table * problem.gradient_bytes)
    if parallelism.zero and table:
        shards, _ = sharding_groups(parallelism)
        table_gather_s = collective_s(problem, "all_gather", shards, table * problem.item_bytes)
    slice_s = _slice_s(problem, parallelism)
    table_gather_s += slice_s if table else 0.0
    reduce_s = gather_s = 0.0
    total = sum(counts)
    shares = [count / total for count in counts] or [share for share, _ in problem.kinds]
    for share, of_layer in zip(shares, kinds_parameters(problem, parallelism), strict=True):
        own_reduce_s, own_gather_s = (
            _layer_s(problem, parallelism, of_layer, slice_s) if share else (0.0, 0.0)
        )
        reduce_s, gather_s = reduce_s + share * own_reduce_s, gather_s + share * own_gather_s
    return DataParallelTime(reduce_s, gather_s, table_s, table_gather_s, tied_s)


def _layer_s(
    problem: StepProblem, parallelism: Parallelism, of_layer: ShardedParameters, slice_s: float
) -> tuple[float, float]:
    """Return the seconds of the reduction and the gather of the weights of a layer; `slice_s` as `_slice_s`."""
    weights, gather_s = of_layer.others, 0.0
    if parallelism.zero:
        shards, _ = sharding_groups(parallelism)
        gather_s = collective_s(problem, "all_gather", shards, problem.gathered_bytes(weights))
    reduce_s = _reduce_s(problem, parallelism, weights * problem.gradient_bytes)
    if of_layer.experts:
        own_reduce_s, own_gather_s = _experts_s(problem, parallelism, of_layer.experts)
        reduce_s, gather_s = reduce_s + own_reduce_s, gather_s + own_gather_s
    return reduce_s, gather_s + problem.stack.sliced_weights * slice_s


def sums_after(problem: StepProblem, parallelism: Parallelism) -> bool:
    """Return whether ZeRO-1 sums whole gradients after the last backward part, overlapped with nothing."""
    return parallelism.zero == 1 and problem.stack.sums_after


def _slice_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the seconds in which a stack copies the slices of one tensor, one for each rank that shards it."""
    is_sliced = problem.stack.sliced_weights and parallelism.zero and parallelism.shards > 1
    issue_s = problem.host.kernel_s if problem.host else problem.stack.launch_s
    return parallelism.shards * issue_s if is_sliced else 0.0


def _experts_s(problem: StepProblem, parallelism: Parallelism, experts: int) -> tuple[float, float]:
    """Return the seconds of the reduction and the gather of the experts of a layer, over their own replicas."""
    num_bytes = experts * problem.gradient_bytes
    if not parallelism.zero:
        return collective_s(problem, "all_reduce", expert_replica_groups(parallelism), num_bytes), 0.0
    shards, copies = expert_sharding_groups(parallelism)
    reduce_s = collective_s(problem, "reduce_scatter", shards, num_bytes)
    reduce_s += collective_s(problem, "all_reduce", copies, -(-num_bytes // parallelism.expert_shards))
    return reduce_s, collective_s(problem, "all_gather", shards, problem.gathered_bytes(experts))


def _reduce_s(problem: StepProblem, parallelism: Parallelism, num_bytes: int) -> float:
    """Return the seconds in which gradients of so many bytes are summed, and scattered under ZeRO."""
    if not num_bytes:
        return 0.0
    return sum(collective_s(problem, *each) for each in _reductions(problem, parallelism, num_bytes))


def _reductions(
    problem: StepProblem, parallelism: Parallelism, num_bytes: int
) -> tuple[tuple[str, Groups, int], ...]:
    """Return the (kind, groups, bytes) of the collectives that sum gradients, and scatter them under ZeRO."""
    if not parallelism.zero or sums_after(problem, parallelism):
        return (("all_reduce", replica_groups(parallelism), num_bytes),)
    shards, copies = sharding_groups(parallelism)
    return (
        ("reduce_scatter", shards, num_bytes),
        ("all_reduce", copies, -(-num_bytes // parallelism.shards)),
    )


def lane_collectives(
    problem: StepProblem, parallelism: Parallelism
) -> tuple[tuple[tuple[Transfer, int], ...], tuple[tuple[Transfer, int], ...]]:
    """Return the collectives (that gather weights, that sum gradients) of a layer's weights except experts'.

    Each is (collective, chips between neighbours in its group). No weights are gathered without ZeRO. Of several
    kinds of layers the first counts.
    """
    weights = kinds_parameters(problem, parallelism)[0].others
    gathers: tuple[tuple[str, Groups, int], ...] = ()
    if parallelism.zero:
        shards, _ = sharding_groups(parallelism)
        gathers = (("all_gather", shards, problem.gathered_bytes(weights)),)
    sums = _reductions(problem, parallelism, weights * problem.gradient_bytes)
    first, second = (tuple(step for each in of for step in collective_steps(*each)) for of in (gathers, sums))
    return first, second


def exposed_s(
    layers: int,
    compute_s: float,
    communication_s: float,
    overlap: float,
    queued_s: float = 0.0,
    sharing: Sharing = APART,
) -> float:
    """Return the seconds by which communication lengthens `layers` layers that compute one after the other.

    Each layer's communication follows its computing, as reductions do, in a lane that runs one collective at a
    time. Gathers come before the computing, which is the same, reversed in time.

    Args:
        layers: number of layers.
        compute_s, communication_s: seconds of one layer's computing, and of its communication.
        overlap: share (0 to 1) of the communication that may overlap with the computing of other layers.
        queued_s: seconds of other communication in the same lane, before that of the layers (for gathers: after).
        sharing: how a layer's computing and this communication delay each other on links.
    """
    waits_s = (1 - overlap) * (layers * communication_s + queued_s)
    return waits_s + sum(beside_s(layers, compute_s, overlap * communication_s, overlap * queued_s, sharing))


def beside_s(
    layers: int, compute_s: float, communication_s: float, queued_s: float, sharing: Sharing
) -> tuple[float, float]:
    """Return (seconds from the end of the layers to the end of their communication, seconds added to the layers).

    The layers take longer where they share links with their communication. The arguments are those of `exposed_s`,
    with an overlap of 1.
    """
    hides_s, slows = sharing.hides(compute_s)
    tail = queued_s + layers * (communication_s - hides_s)
    if layers:
        tail = max(tail, communication_s, hides_s + layers * (communication_s - hides_s))
    tail = max(tail, 0.0)
    return tail, slows * (queued_s + layers * communication_s - tail)


def exposed_both_s(
    layers: int,
    compute_s: float,
    moved_s: tuple[float, float],
    overlap: float,
    queued_s: float = 0.0,
    sharing: tuple[Sharing, Sharing] = (APART, APART),
) -> float:
    """Return the seconds by which gathers and reductions lengthen the backward part of `layers` layers.

    The weights of a layer are gathered before the gradients of the one after it are reduced. So of n layers the
    first computes beside the second gather, the last beside the last reduction but one, and those between beside
    a gather and a reduction each.

    Args:
        layers, compute_s, overlap, queued_s: as of `exposed_s`.
        moved_s: (seconds of the gather of one layer, seconds of its reduction).
        sharing: (of gathers, of reductions) with a layer's computing, as of `exposed_s`.
    """
    both = mean_sharing(sharing, moved_s)
    if layers < 2 or not all(moved_s):
        return exposed_s(layers, compute_s, sum(moved_s), overlap, queued_s, both)
    hides_s, slows = both.hides(compute_s)
    gather_s, reduce_s = (overlap * each for each in moved_s)
    moving_s = max(hides_s, overlap * queued_s + gather_s) + max(hides_s, reduce_s)
    moving_s += (layers - 2) * max(hides_s, gather_s + reduce_s)
    waits_s = (1 - overlap) * (layers * sum(moved_s) + queued_s)
    tail = gather_s + reduce_s + max(moving_s - layers * hides_s, 0.0)
    return tail + slows * max(layers * (gather_s + reduce_s) + overlap * queued_s - tail, 0.0) + waits_s
