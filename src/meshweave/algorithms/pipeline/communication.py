"""Puts sends and receives between the compute actions of a schedule, in an order that cannot deadlock.

The schedule is played once, with the times of its actions and no time for transfers. When an action ends,
what it made is sent: the send is issued next on its own pipeline rank, and the receive next on the other one,
which may be in the middle of an action of its own. So all sends, receives and actions stand in one order that
every rank follows, and even where a rank does one thing at a time, and every send waits for its receive, the first
of them that is not done can always go on. torch adds communication by the same rule (`_add_send_recv` in
torch/distributed/pipelining/schedules.py), one action of each rank at a time, whatever the actions take.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.pipeline.actions import MAKES_INPUT_GRAD, Action, ActionKind, Schedule
from meshweave.base.errors import LayoutError

Pairs = NDArray[np.int64]

Durations = Sequence[tuple[int, int, int]]
"""For each stage the time of a forward, an input gradient and a weight gradient, in any unit."""


@dataclass
class Steps:
    """A schedule as integers: each action is a step, (number of its template, micro-batch).

    A template is an action as it is for micro-batch 0, so that equal actions of all micro-batches share one.

    Attributes:
        templates: the different templates; micro-batches of an overlap's parts are relative to its first part.
        of_rank: for each pipeline rank its steps in order, as an array (steps, 2): the number of the template, and
            the micro-batch, -1 for actions that belong to none.
    """

    templates: list[Action] = field(default_factory=list)
    of_rank: list[Pairs] = field(default_factory=list)
    _numbers: dict[Action, int] = field(default_factory=dict)

    def number(self, template: Action) -> int:
        """Return the index of `template` in `templates`, to which it is added if it is new."""
        known = self._numbers.get(template)
        if known is None:
            known = self._numbers[template] = len(self.templates)
            self.templates.append(template)
        return known

    def schedule(self, like: Schedule) -> Schedule:
        """Return the steps as a `Schedule`, with the `stage_ranks` and number of micro-batches of `like`."""
        orders = (
            tuple(at_micro_batch(self.templates[number], at) for number, at in order.tolist())
            for order in self.of_rank
        )
        return replace(like, actions=tuple(orders))


def _pairs(flat: Sequence[int]) -> Pairs:
    return np.array(flat, dtype=np.int64).reshape(-1, 2)


def at_micro_batch(template: Action, micro_batch: int) -> Action:
    """Return the action that a template (`template_of`) stands for at micro-batch `micro_batch`.

    `micro_batch` is added to the micro-batches of an overlap's parts, which are offsets in a template. An action
    that belongs to no micro-batch is returned as it is.
    """
    if template.parts:
        parts = tuple(at_micro_batch(part, micro_batch + (part.micro_batch or 0)) for part in template.parts)
        return replace(template, parts=tuple(parts))
    if template.micro_batch is None:
        return template
    return Action(template.kind, template.stage, micro_batch, template.peer)


def template_of(action: Action) -> tuple[Action, int]:
    """Return (the action as it is for micro-batch 0, its micro-batch or -1 where it belongs to none).

    The forward of stage 2 and micro-batch 5 gives (its forward of micro-batch 0, 5). An overlap's micro-batch is
    that of its first part; those of its parts become offsets from it.
    """
    if action.parts:
        first = action.parts[0].micro_batch or 0
        parts = tuple(replace(part, micro_batch=(part.micro_batch or 0) - first) for part in action.parts)
        return replace(action, parts=parts), first
    if action.micro_batch is None:
        return action, -1
    return Action(action.kind, action.stage, 0, action.peer), action.micro_batch


def steps_of(schedule: Schedule) -> Steps:
    """Return the actions of a schedule as steps (integers), in the order in which they are listed."""
    steps = Steps()
    numbers: dict[tuple[ActionKind, int, int | None], int] = {}
    for order in schedule.actions:
        listed: list[int] = []
        for action in order:
            micro_batch = action.micro_batch
            known = None if micro_batch is None else numbers.get((action.kind, action.stage, action.peer))
            if known is not None and micro_batch is not None:
                listed += known, micro_batch
                continue
            template, at = template_of(action)
            number = steps.number(template)
            if micro_batch is not None:
                numbers[action.kind, action.stage, action.peer] = number
            listed += number, at
        steps.of_rank.append(_pairs(listed))
    return steps


def communicating_steps(
    schedule: Schedule, edges: Sequence[tuple[int, int]] | None = None, durations: Durations | None = None
) -> Steps:
    """Return the steps of a schedule with sends and receives added, unless it lists some already.

    Args:
        schedule: compute actions, with or without sends and receives.
        edges: (source stage, target stage) of each tensor that is passed on; None: each stage to the next.
        durations: for each stage the times of forward, input gradient and weight gradient, in any unit; None for
            1 each.

    Raises:
        LayoutError: an action waits for one that never runs, or that itself waits for it.
    """
    listed = steps_of(schedule)
    if any(template.kind.communicates for template in listed.templates):
        return listed
    if edges is None:
        edges = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    return _Play(schedule, listed, edges, durations or [(1, 1, 1)] * schedule.num_stages).run()


@dataclass(frozen=True)
class _Effect:
    """What a template waits for and makes: per part the offset of the micro-batch.

    Attributes:
        needs: (offset, key) of values; a key is 2 x stage for activations, and one more for gradients.
        makes: (offset, key, sends), where each send is (template on this rank, receiver, template there).
    """

    duration: int
    needs: tuple[tuple[int, int], ...]
    makes: tuple[tuple[int, int, tuple[tuple[int, int, int], ...]], ...]


class _Play:
    """Plays a schedule, one end of an action after the other."""

    def __init__(
        self, schedule: Schedule, listed: Steps, edges: Sequence[tuple[int, int]], durations: Durations
    ) -> None:
        self.schedule, self.durations = schedule, durations
        self.into: dict[int, list[int]] = defaultdict(list)
        self.out_of: dict[int, list[int]] = defaultdict(list)
        for source, target in edges:
            self.into[target].append(source)
            self.out_of[source].append(target)
        self.listed = listed
        self.steps = Steps(list(listed.templates), [], dict(listed._numbers))
        self.effects = [self._effect(template) for template in self.listed.templates]

    def _effect(self, template: Action) -> _Effect:
        needs: list[tuple[int, int]] = []
        makes: list[tuple[int, int, tuple[tuple[int, int, int], ...]]] = []
        inner: set[tuple[int, int]] = set()
        duration = 0
        for part in template.leaves:
            stage, offset = part.stage, part.micro_batch or 0
            forward, input_grad, weight_grad = self.durations[stage]
            if part.kind is ActionKind.FORWARD:
                duration += forward
                needs += [(offset, 2 * source) for source in self.into[stage]]
                makes.append((offset, 2 * stage, self._sends(ActionKind.FORWARD, stage)))
            elif part.kind in MAKES_INPUT_GRAD:
                duration += input_grad + (weight_grad if part.kind is ActionKind.BACKWARD else 0)
                needs += [(offset, 2 * stage), *((offset, 2 * target + 1) for target in self.out_of[stage])]
                makes.append((offset, 2 * stage + 1, self._sends(ActionKind.BACKWARD, stage)))
            elif part.kind is ActionKind.WEIGHT_GRAD:
                duration += weight_grad
                needs.append((offset, 2 * stage + 1))
            needs = [need for need in needs if need not in inner]
            inner.update(made[:2] for made in makes)
        return _Effect(max(duration, 1) if duration or makes else 0, tuple(needs), tuple(makes))

    def _sends(self, kind: ActionKind, stage: int) -> tuple[tuple[int, int, int], ...]:
        """Return the sends after a forward or a backward of a stage, each with its receive."""
        forward = kind is ActionKind.FORWARD
        send = ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD
        recv = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
        ranks, sends = self.schedule.stage_ranks, []
        for other in self.out_of[stage] if forward else self.into[stage]:
            if ranks[other] == ranks[stage]:
                continue
            is_near = abs(other - stage) == 1
            here = self.steps.number(Action(send, stage, 0, None if is_near else other))
            there = self.steps.number(Action(recv, other, 0, None if is_near else stage))
            sends.append((here, ranks[other], there))
        return tuple(sends)

    def run(self) -> Steps:
        """Return the steps with communication. Raises LayoutError if an action can never run."""
        num_ranks = self.schedule.num_ranks
        done: set[tuple[int, int]] = set()
        waiting: dict[tuple[int, int], list[int]] = {}
        at, running = [0] * num_ranks, [False] * num_ranks
        ends: list[tuple[int, int]] = []
        listed = [order.tolist() for order in self.listed.of_rank]
        orders: list[list[int]] = [[] for _ in listed]
        effects = self.effects

        def start(rank: int, now: int) -> None:
            while not running[rank] and at[rank] < len(listed[rank]):
                number, micro_batch = listed[rank][at[rank]]
                effect = effects[number]
                for offset, key in effect.needs:
                    value = key, micro_batch + offset
                    if value not in done:
                        waiting.setdefault(value, []).append(rank)
                        return
                orders[rank] += number, micro_batch
                if effect.duration:
                    running[rank] = True
                    heapq.heappush(ends, (now + effect.duration, rank))
                else:
                    at[rank] += 1

        for rank in range(num_ranks):
            start(rank, 0)
        while ends:
            now = ends[0][0]
            free: list[int] = []
            while ends and ends[0][0] == now:
                _, rank = heapq.heappop(ends)
                number, micro_batch = listed[rank][at[rank]]
                running[rank] = False
                at[rank] += 1
                free.append(rank)
                for offset, key, sends in effects[number].makes:
                    made = micro_batch + offset
                    done.add((key, made))
                    for here, other, there in sends:
                        orders[rank] += here, made
                        orders[other] += there, made
                    free += waiting.pop((key, made), ())
            for rank in sorted(set(free)):
                start(rank, now)
        self._check_ended(at, done)
        self.steps.of_rank = [_pairs(order) for order in orders]
        return self.steps

    def _check_ended(self, at: Sequence[int], done: set[tuple[int, int]]) -> None:
        for rank, order in enumerate(self.schedule.actions):
            if at[rank] == len(order):
                continue
            number, micro_batch = self.listed.of_rank[rank][at[rank]].tolist()
            key, of = next(
                (key, micro_batch + offset)
                for offset, key in self.effects[number].needs
                if (key, micro_batch + offset) not in done
            )
            what = "the backward" if key % 2 else "the forward"
            raise LayoutError(
                f"pipeline rank {rank} waits at {order[at[rank]]} for {what} of stage {key // 2}, "
                f"micro-batch {of}, which never runs, or only after it"
            )
