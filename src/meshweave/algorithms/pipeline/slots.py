"""The slots of the buffers between stages: as many copies as values are alive at once, in a rank's order of
steps.

The value of micro-batch m lies in slot m mod k. So k is more than the distance of any two micro-batches whose
values are alive together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshweave.algorithms.pipeline.actions import MAKES_INPUT_GRAD, Action, ActionKind
from meshweave.algorithms.pipeline.communication import Steps
from meshweave.algorithms.pipeline.problem import Edge, PipelineProblem

Positions = NDArray[np.int64]

FIRST, LAST = 0, 1


def num_slots(
    problem: PipelineProblem, steps: Steps, spare: int, *, keeps_inputs: bool = False
) -> dict[str, int]:
    """Return the number of slots of each edge's buffers, by name; micro-batch m lies in slot m modulo that number.

    Edge (0, 1) has the activations "h0_1_out" at its source and "h0_1_in" at its target, and gradients "g0_1_out"
    and "g0_1_in". An edge inside a pipeline rank has the buffers "h0_1" and "g0_1" alone.

    Args:
        problem: its stages and edges.
        steps: the steps of all ranks, transfers included.
        spare: slots beyond those for values alive at once, so that a transfer need not wait for the end of a
            value's last use. No buffer has more slots than there are micro-batches.
        keeps_inputs: whether a stage reads its inputs and arriving gradients until its weight gradient. Else it
            reads inputs in its forward, and arriving gradients in its input gradient alone.
    """
    counts: dict[str, int] = {}
    for rank, order in enumerate(steps.of_rank):
        positions = _positions(steps, order, problem.micro_batches)
        for edge in problem.edges:
            here = tuple(problem.stage_ranks[stage] == rank for stage in (edge.source, edge.target))
            for name, write, read in _uses(edge, here, keeps_inputs):
                first = _at(positions, write, problem.micro_batches, FIRST)
                last = _at(positions, read, problem.micro_batches, LAST)
                alive = slots_needed(first, np.maximum(first, last))
                counts[name] = min(max(alive, 1) + spare, problem.micro_batches)
    return counts


class Stashes(NamedTuple):
    """How many slots, one for each micro-batch, a stage needs for what it keeps between two of its parts.

    Micro-batch m lies in slot m modulo that number. It is the most micro-batches that are between the two parts at
    once, or more if these micro-batches are not consecutive.

    Attributes:
        until_input_grad: between the forward part and the gradient of the stage's input.
        until_weight_grad: between the forward part and the gradient of its weights.
        between: between the gradient of its input and that of its weights.
    """

    until_input_grad: int = 1
    until_weight_grad: int = 1
    between: int = 1


def stash_slots(problem: PipelineProblem, steps: Steps, stage: int) -> Stashes:
    """Return how many slots stage number `stage` needs for what it keeps between its parts, at least 1 each.

    `steps` are the steps of all ranks, in order.
    """
    order = steps.of_rank[problem.stage_ranks[stage]]
    positions = _positions(steps, order, problem.micro_batches)

    def most(begin: str, end: str) -> int:
        first = _at(positions, (begin, stage, None), problem.micro_batches, FIRST)
        last = _at(positions, (end, stage, None), problem.micro_batches, LAST)
        return max(slots_needed(first, np.maximum(first, last)), 1)

    return Stashes(most("F", "G"), most("F", "L"), most("G", "L"))


_Step = tuple[str, int, int | None]
"""("F", "G", "L" for the last gradient, or how torch writes a transfer; stage; the stage at the other end)."""


def _uses(edge: Edge, here: tuple[bool, ...], keeps_inputs: bool) -> list[tuple[str, _Step, _Step]]:
    """Return (buffer, what writes it, what reads it) of an edge on one pipeline rank."""
    source, target = edge.source, edge.target
    made, used = ("F", source, None), ("L" if keeps_inputs else "F", target, None)
    grad_made, grad_used = ("G", target, None), ("L" if keeps_inputs else "G", source, None)
    if all(here):
        return [(f"h{edge.name}", made, used), (f"g{edge.name}", grad_made, grad_used)]
    if here[0]:
        return [
            (f"h{edge.name}_out", made, ("SEND_F", source, target)),
            (f"g{edge.name}_in", ("RECV_B", source, target), grad_used),
        ]
    if here[1]:
        return [
            (f"h{edge.name}_in", ("RECV_F", target, source), used),
            (f"g{edge.name}_out", grad_made, ("SEND_B", target, source)),
        ]
    return []


def _positions(steps: Steps, pairs: Positions, count: int) -> Mapping[_Step, tuple[Positions, Positions]]:
    """Return for each kind of step the first and the last position of each micro-batch, -1 for none."""
    positions: dict[_Step, tuple[Positions, Positions]] = defaultdict(
        lambda: (np.full(count, -1, np.int64), np.full(count, -1, np.int64))
    )
    for number in np.unique(pairs[:, 0]).tolist():
        at = np.flatnonzero(pairs[:, 0] == number)
        for part in steps.templates[number].leaves:
            for key in _steps_of(part):
                first, last = positions[key]
                of = pairs[at, 1] + (part.micro_batch or 0)
                last[of] = np.maximum(last[of], at)
                first[of[::-1]] = np.where(
                    first[of[::-1]] < 0, at[::-1], np.minimum(first[of[::-1]], at[::-1])
                )
    return positions


def _steps_of(part: Action) -> Iterator[_Step]:
    if part.kind is ActionKind.FORWARD:
        yield "F", part.stage, None
    if part.kind in MAKES_INPUT_GRAD:
        yield "G", part.stage, None
    if part.kind in MAKES_INPUT_GRAD or part.kind is ActionKind.WEIGHT_GRAD:
        yield "L", part.stage, None
    if part.kind.communicates:
        yield part.kind.value, part.stage, peer_of(part)


def peer_of(action: Action) -> int:
    """Return the number of the stage at the other end of a send or receive."""
    if action.peer is not None:
        return action.peer
    before = action.kind in (ActionKind.RECV_FORWARD, ActionKind.SEND_BACKWARD)
    return action.stage - 1 if before else action.stage + 1


def _at(
    positions: Mapping[_Step, tuple[Positions, Positions]], step: _Step, count: int, which: int
) -> Positions:
    return positions[step][which] if step in positions else np.full(count, -1, np.int64)


def slots_needed(first: Positions, last: Positions) -> int:
    """Return the least number n of slots so that value i can lie in slot i modulo n; 0 for no values.

    Value i is alive from position `first[i]` to position `last[i]` in a rank's order of steps. A negative
    `first` stands for a value that is never made.
    """
    order = np.argsort(first, kind="stable")
    order = order[first[order] >= 0]
    if not len(order):
        return 0
    begins, ends = first[order], last[order]
    reach = np.searchsorted(begins, ends, side="right")  # values begun before the end of each
    if (np.diff(order) > 0).all():
        return int((order[reach - 1] - order).max()) + 1
    most = 1
    for number, until in enumerate(reach.tolist()):
        together = order[number:until]
        most = max(most, int(np.abs(together - order[number]).max(initial=0)) + 1)
    return most
