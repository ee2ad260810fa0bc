"""ZB-1p and ZB-2p: zero-bubble schedules from measured times, under a memory limit (arXiv 2401.10241, 3.1).

The heuristic of Qi et al.: run the pipeline forward in time, and let each idle rank choose by rules.

- Before its first input gradient, a rank runs as many forwards as its memory takes. The last of them may delay
  that gradient, or the rank waits for it: the first choice.
- Then input gradients and forwards take turns; or gradients go first (the second choice).
- A rank that would wait runs a weight gradient: if it fits into the wait; or also if waiting would make this rank
  the one with the largest bubble; or always (the third choice).
- Where memory is full, a weight gradient makes room. What is left of them comes last.

All combinations of the choices are tried and the best is kept, ZB-H1 among them. A rank's span is from its first
begin to its last end. The best has the least longest span of all ranks, which is the paper's cost, and then the
shortest step. With many micro-batches, combinations are compared on fewer, and the best few are written out in
full. The paper has one choice more, to skip a forward that the next rank cannot use yet; here the best schedule
has never been one with it.

A stash counts as `StashLimit.whole` from the forward to the input gradient, and as `StashLimit.rest` from there to
the weight gradient. ZB-1p has the memory of 1F1B's first rank, p whole stashes; ZB-2p has 2 p.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.action_times import ActionTimes, time_schedule
from meshweave.algorithms.pipeline.actions import Action, ActionKind, Schedule
from meshweave.algorithms.pipeline.zb_h1 import zb_h1
from meshweave.base.errors import LayoutError

_COMPARED = 3
"""Micro-batches a rank on which combinations are compared."""
_WRITTEN = 2
"""Combinations that are written out in full, of those that are best on fewer micro-batches."""
_LARGE = 1 << 14
"""Ranks times micro-batches from which one combination is written out in full."""
_NEVER = 1 << 62


@dataclass(frozen=True)
class StashLimit:
    """The memory of each rank for stashes (what a stage keeps of a micro-batch for its backward), in any unit.

    Attributes:
        limit: the most that all stashes of a rank may take together.
        whole: size of a micro-batch's stash from its forward to its input gradient.
        rest: size of what stays of the stash from then until its weight gradient.

    Raises:
        LayoutError: not even one micro-batch fits, or a size is negative.
    """

    limit: int
    whole: int = 1
    rest: int = 1

    def __post_init__(self) -> None:
        if min(self.whole, self.rest) < 0 or self.limit < max(self.whole, self.rest):
            raise LayoutError(
                f"a limit of {self.limit} holds not even one stash, of {max(self.whole, self.rest)}"
            )

    def peak(self, order: Sequence[Action]) -> int:
        """Return the most memory that stashes take at once, in the unit of `limit`, on a rank that runs `order`.

        Overlap actions (a forward with a backward) in `order` are ignored.
        """
        live = peak = 0
        for action in order:
            if action.kind is ActionKind.FORWARD:
                live += self.whole
            elif action.kind is ActionKind.INPUT_GRAD:
                live += self.rest - self.whole
            elif action.kind is ActionKind.WEIGHT_GRAD:
                live -= self.rest
            elif action.kind is ActionKind.BACKWARD:
                live -= self.whole
            peak = max(peak, live)
        return peak


def zb_auto(num_micro_batches: int, times: ActionTimes, stashes: StashLimit) -> Schedule:
    """Return the best schedule that the module's heuristic makes, one stage per rank, within the memory limit.

    The best has the least longest span of a rank from first begin to last end, then the least makespan.

    Args:
        num_micro_batches: micro-batches of a step.
        times: ticks of actions, by stage; of transfers, from each stage to the next.
        stashes: the memory limit of each rank.

    Raises:
        LayoutError: there is no stage or no micro-batch, or times of transfers are not one for each edge.
    """
    num_ranks = len(times.forward)
    if min(num_ranks, num_micro_batches) < 1:
        raise LayoutError("a pipeline has one rank and one micro-batch or more")
    if len(times.transfer) != num_ranks - 1:
        raise LayoutError(f"{num_ranks} stages have {num_ranks - 1} edges, not {len(times.transfer)}")
    compared = min(num_micro_batches, _COMPARED * num_ranks)
    runs = [_ForwardRun(compared, times, stashes, choices) for choices in _CHOICES]
    by_cost = {run.cost(): run for run in reversed(runs)}
    best = [by_cost[cost] for cost in sorted(by_cost)]
    if compared < num_micro_batches:
        best = best[: 1 if num_ranks * num_micro_batches >= _LARGE else _WRITTEN]
        best = [_ForwardRun(num_micro_batches, times, stashes, run.choices) for run in best]
    first = min(best, key=_ForwardRun.cost)
    classic = zb_h1(num_ranks, num_micro_batches)
    if max(map(stashes.peak, classic.actions)) <= stashes.limit and _cost(classic, times) < first.cost():
        return classic
    return first.schedule()


def _cost(schedule: Schedule, times: ActionTimes) -> tuple[int, int]:
    """Return the longest span of a rank between its first begin and last end, and the time of the step."""
    timed = time_schedule(schedule, times, TransferRuntime.BUFFERED)
    spans = (ends[-1] - begins[0] for begins, ends in zip(timed.begins, timed.ends, strict=True))
    return max(spans), timed.duration


@dataclass(frozen=True)
class ListChoices:
    """The choices that the rules of the module's docstring leave open.

    Attributes:
        delays_first_gradient: whether the last forwards before the first input gradient may delay it.
        gradients_first: whether an input gradient that can begin before the next forward would end goes first;
            else the two take turns.
        fill: when a rank that would wait runs a weight gradient: "fitting", if it fits into the wait; "growing",
            also if waiting would make this rank's bubble the largest; "always".
    """

    delays_first_gradient: bool
    gradients_first: bool
    fill: str


_CHOICES = tuple(
    ListChoices(*values) for values in product((False, True), (False, True), ("fitting", "growing", "always"))
)


@dataclass
class _RankState:
    """What a rank has run, and when its next inputs arrive."""

    forwards: int = 0
    input_grads: int = 0
    weight_grads: int = 0
    free_at: int = 0
    bubble: int = 0
    ran_forward_last: bool = False
    activations: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    actions: list[tuple[ActionKind, int]] = field(default_factory=list)
    first_begin: int = _NEVER


class _ForwardRun:
    """A run of the pipeline forward in time, by one combination of choices."""

    def __init__(
        self, num_micro_batches: int, times: ActionTimes, stashes: StashLimit, choices: ListChoices
    ) -> None:
        self.count, self.times, self.stashes, self.choices = num_micro_batches, times, stashes, choices
        self.ranks = [_RankState() for _ in times.forward]
        self.ranks[0].activations = [0] * num_micro_batches
        self._events, self._largest_bubble = [(0, 0)], 0
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now >= self.ranks[rank].free_at:
                self._choose(rank, now)

    def cost(self) -> tuple[int, int]:
        """Return (longest span of a rank from first begin to last end, makespan of the step), in ticks."""
        return (
            max(state.free_at - state.first_begin for state in self.ranks),
            max(state.free_at for state in self.ranks),
        )

    def schedule(self) -> Schedule:
        """Return the actions that the run chose, as a schedule."""
        actions = (
            tuple(Action(kind, rank, micro_batch) for kind, micro_batch in state.actions)
            for rank, state in enumerate(self.ranks)
        )
        return Schedule(tuple(range(len(self.ranks))), self.count, tuple(actions))

    def _choose(self, rank: int, now: int) -> None:
        """Begin an action on an idle rank, or come back when the next input that is on its way arrives."""
        state = self.ranks[rank]
        forward_at = self._forward_at(rank, now)
        gradient_at = self._gradient_at(rank, now)
        waits = not state.input_grads and not self.choices.delays_first_gradient
        if waits and forward_at + self.times.forward[rank] > gradient_at:
            forward_at = _NEVER
        prefers_gradient = self._prefers_gradient(rank, now, forward_at, gradient_at)
        next_at = min(forward_at, gradient_at)
        if next_at <= now:
            ready_gradient = gradient_at <= now and (prefers_gradient or forward_at > now)
            self._begin(rank, now, ActionKind.INPUT_GRAD if ready_gradient else ActionKind.FORWARD)
        elif state.weight_grads < state.input_grads and self._fills(rank, now, next_at):
            self._begin(rank, now, ActionKind.WEIGHT_GRAD)
        elif next_at < _NEVER:
            heapq.heappush(self._events, (next_at, rank))

    def _forward_at(self, rank: int, now: int) -> int:
        """Return when the next forward can begin, as far as that is known."""
        state, stashes = self.ranks[rank], self.stashes
        if state.forwards >= len(state.activations):
            return _NEVER
        flying, due = state.forwards - state.input_grads, state.input_grads - state.weight_grads
        kept = (flying + 1) * stashes.whole + due * stashes.rest
        # The oldest input gradient must fit once weight gradients have made room.
        if max(kept, (flying + 1) * stashes.whole + max(0, stashes.rest - stashes.whole)) > stashes.limit:
            return _NEVER
        return max(now, state.activations[state.forwards])

    def _gradient_at(self, rank: int, now: int) -> int:
        """Return when the next input gradient can begin, as far as that is known."""
        state, stashes = self.ranks[rank], self.stashes
        if state.input_grads >= min(state.forwards, len(state.gradients)):
            return _NEVER
        flying, due = state.forwards - state.input_grads, state.input_grads - state.weight_grads
        if (flying - 1) * stashes.whole + (due + 1) * stashes.rest > max(
            stashes.limit, flying * stashes.whole + due * stashes.rest
        ):
            return _NEVER
        return max(now, state.gradients[state.input_grads])

    def _prefers_gradient(self, rank: int, now: int, forward_at: int, gradient_at: int) -> bool:
        state = self.ranks[rank]
        if forward_at == _NEVER or gradient_at == _NEVER:
            return gradient_at != _NEVER
        if not state.input_grads:
            return gradient_at <= now
        if self.choices.gradients_first:
            return gradient_at <= forward_at + self.times.forward[rank]
        return state.ran_forward_last

    def _fills(self, rank: int, now: int, until: int) -> bool:
        """Return whether a rank that has nothing else until then runs a weight gradient."""
        wait = until - now
        if wait <= 0:
            return False
        if wait >= self.times.weight_grad[rank] or self.choices.fill == "always":
            return True
        return self.choices.fill == "growing" and self.ranks[rank].bubble + wait > self._largest_bubble

    def _begin(self, rank: int, now: int, kind: ActionKind) -> None:
        """Run an action, and tell the neighbours when its result arrives."""
        state, times = self.ranks[rank], self.times
        if state.first_begin == _NEVER:
            state.first_begin = now
        else:
            state.bubble += now - state.free_at
            self._largest_bubble = max(self._largest_bubble, state.bubble)
        if kind is ActionKind.FORWARD:
            micro_batch, ends = state.forwards, now + times.forward[rank]
            state.forwards += 1
            if rank + 1 < len(self.ranks):
                self._deliver(rank + 1, self.ranks[rank + 1].activations, ends + times.transfer[rank])
            else:
                state.gradients.append(ends)
        elif kind is ActionKind.INPUT_GRAD:
            micro_batch, ends = state.input_grads, now + times.input_grad[rank]
            state.input_grads += 1
            if rank:
                self._deliver(rank - 1, self.ranks[rank - 1].gradients, ends + times.transfer[rank - 1])
        else:
            micro_batch, ends = state.weight_grads, now + times.weight_grad[rank]
            state.weight_grads += 1
        if kind is not ActionKind.WEIGHT_GRAD:
            state.ran_forward_last = kind is ActionKind.FORWARD
        state.actions.append((kind, micro_batch))
        state.free_at = ends
        heapq.heappush(self._events, (ends, rank))

    def _deliver(self, rank: int, arrivals: list[int], at: int) -> None:
        """Note when a value arrives, and let the rank choose anew at once if it is idle."""
        arrivals.append(at)
        state = self.ranks[rank]
        heapq.heappush(self._events, (max(state.free_at, at), rank))
