"""Lower bounds of how long schedules take, in closed form: a few paths through their actions.

In 1F1B rank j of P has w = P - j micro-batches in flight. Let C be the ticks of its forward and backward, and R
those of a micro-batch's round trip from there through the later ranks and back. A path through rank j takes M C
for M micro-batches, less (w - 1) C and plus R for each round trip in it, plus once what the ranks before it take.
"""

from __future__ import annotations

from meshweave.algorithms.pipeline.action_times import ActionTimes


def whole_ticks(times: ActionTimes) -> list[int]:
    """Return for each stage the ticks of one micro-batch: forward, input gradient and weight gradient.

    `times.saved` is not subtracted.
    """
    return [sum(each) for each in zip(times.forward, times.input_grad, times.weight_grad, strict=True)]


def least_of_looped(num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
    """Return a lower bound of a step's makespan, in ticks, for whole backwards on stages dealt out in turn.

    It is the largest sum of a rank's fill, work and drain: the rank begins when the first micro-batch has come
    through the ranks before it, never waits after that, and these end after it. `times` have no `saved`
    (`ActionTimes.joined`).
    """
    before, best, whole = 0, 0, whole_ticks(times)
    for rank in range(num_ranks):
        best = max(best, before + micro_batches * sum(whole[rank::num_ranks]))
        before += whole[rank] + 2 * (times.transfer[rank] if rank < len(times.transfer) else 0)
    return best


def least_of_split(is_folded: bool, num_ranks: int, micro_batches: int, times: ActionTimes) -> int:
    """Return a lower bound of a step's makespan, in ticks, for backwards split into input and weight gradient.

    `is_folded` says whether two stages lie on each rank in a V; else each rank has one. The result is the largest
    bound of a rank: the rank begins when the ranks before it have sent it the first micro-batch, and never waits
    after that. Its last input gradient, which follows all its forwards and input gradients, goes back through the
    ranks before it. `times` have no `saved` (`ActionTimes.joined`).
    """
    last = len(times.forward) - 1
    best = before = after = 0
    for rank in range(num_ranks):
        own = (rank, last - rank) if is_folded else (rank,)
        urgent = sum(times.forward[stage] + times.input_grad[stage] for stage in own)
        weights = sum(times.weight_grad[stage] for stage in own)
        busy, back = micro_batches * (urgent + weights), micro_batches * urgent + after + times.weight_grad[0]
        best = max(best, before + busy, before + back)
        hop = times.transfer[rank] if rank < len(times.transfer) else 0
        before, after = before + times.forward[rank] + hop, after + times.input_grad[rank] + hop
    return best


def longest_of_1f1b(micro_batches: int, times: ActionTimes) -> int:
    """Return a lower bound of the makespan of a step of 1F1B, in ticks.

    It is the longest of some paths through one rank's actions and round trips of micro-batches through later ranks
    (see the module). `times` have no `saved` (`ActionTimes.joined`), and one stage per rank.
    """
    whole = whole_ticks(times)
    before, best, size = 0, 0, len(whole)
    after = sum(whole) + 2 * sum(times.transfer)
    for rank, cycle in enumerate(whole):
        after -= cycle  # through later ranks and back
        window = min(size - rank, micro_batches)
        forward, backward = times.forward[rank], cycle - times.forward[rank]
        if micro_batches <= window:
            gain = max(0, after - (micro_batches - 1) * min(forward, backward))
        else:
            first, last = after - (window - 1) * forward, after - (window - 1) * backward
            others = ((micro_batches - 1) // window - 1) * (after - (window - 1) * cycle)
            gain = max(0, first, last, first + last, first + last + others)
        best = max(best, before + micro_batches * cycle + gain)
        hop = 2 * (times.transfer[rank] if rank < len(times.transfer) else 0)
        before, after = before + cycle + hop, after - hop
    return best
