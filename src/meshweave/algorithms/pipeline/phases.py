"""Orders of actions written as phases: which kind of action on which of a rank's stages, how often.

A symbol is a kind of action and the place of a stage among those of the rank, such as "F0" or "I1". The first F0
of a rank is of micro-batch 0, the next of micro-batch 1, and so on for each kind and stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshweave.algorithms.pipeline.actions import Action, ActionKind

Phase = tuple[int, str]
"""A number of repetitions, and the symbols of one, separated by spaces. "F0+B1" is an overlap."""


def actions_of_phases(
    phases: Iterable[Phase], stages: Sequence[int], num_micro_batches: int
) -> tuple[Action, ...]:
    """Return the actions of one rank that phases stand for, of micro-batches below `num_micro_batches` alone.

    A symbol is a kind of action and an index into `stages`, such as "F0". The first "F0" is of micro-batch 0, the
    next of micro-batch 1, and so on for each kind and stage. A whole backward ("B0") counts as an input and a
    weight gradient. "W" without a stage is the weight gradient of the rank's oldest input gradient ("I") that
    lacks one; it is left out if there is none.

    Args:
        phases: (repetitions, symbols separated by spaces), in order; "F0+B1" is an overlap.
        stages: the stages of the rank: "F0" is a forward of `stages[0]`.
        num_micro_batches: the micro-batches of a step.
    """
    writer = _PhaseWriter(stages, num_micro_batches)
    for repeats, symbols in phases:
        words = symbols.split()
        for _ in range(repeats):
            for word in words:
                writer.write(word)
    return tuple(writer.actions)


class _PhaseWriter:
    """Counts the micro-batches of each kind and stage."""

    def __init__(self, stages: Sequence[int], num_micro_batches: int) -> None:
        self.stages, self.limit = stages, num_micro_batches
        self.actions: list[Action] = []
        self._next: dict[tuple[ActionKind, int], int] = {}
        self._due: list[Action] = []

    def write(self, word: str) -> None:
        """Append the action of a symbol, unless its micro-batch is beyond the last."""
        if word == "W":
            if self._due:
                self._append(self._due.pop(0))
            return
        parts = [self._action(part) for part in word.split("+")]
        listed = [part for part in parts if part is not None]
        if len(listed) > 1:
            self.actions.append(Action(ActionKind.OVERLAP, -1, None, parts=tuple(listed)))
        elif listed:
            self._append(listed[0])

    def _action(self, symbol: str) -> Action | None:
        kind, place = ActionKind(symbol[0]), int(symbol[1:])
        stage = self.stages[place]
        # Input gradients and whole backwards share their count; so do weight gradients that name a stage.
        counted = ActionKind.INPUT_GRAD if kind is ActionKind.BACKWARD else kind
        micro_batch = self._next.get((counted, place), 0)
        self._next[counted, place] = micro_batch + 1
        if kind is ActionKind.BACKWARD:
            weight = (ActionKind.WEIGHT_GRAD, place)
            self._next[weight] = self._next.get(weight, 0) + 1
        if micro_batch >= self.limit:
            return None
        return Action(kind, stage, micro_batch)

    def _append(self, action: Action) -> None:
        self.actions.append(action)
        if action.kind is ActionKind.INPUT_GRAD:
            self._due.append(Action(ActionKind.WEIGHT_GRAD, action.stage, action.micro_batch))
