"""The layers of a stage in loops: the first and the last alone, what is between them in runs that repeat.

The first and the last layer stand alone, because the residual comes from and goes to other buffers there. Where
layers are of several kinds, a run has a pattern of kinds, such as four windows and one layer of all keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshweave.ir.program.expressions import Index, Var

LAYER = Var("l")
"""The number of the turn, in loops over layers."""


@dataclass(frozen=True)
class LayerAt:
    """A layer of a stage.

    Attributes:
        kind: the name of its kind (its unit), such as "layer0".
        place: its number among the layers of the stage, from 0.
        number: its number among the layers of the stage that are of its kind, from 0.
        after: the layer after it in the model; None for the last one of the stage. Its own `after` is None.
    """

    kind: str
    place: Index
    number: Index
    after: LayerAt | None = None


@dataclass(frozen=True)
class LayerRun:
    """Layers `start` to `start + turns * len(kinds) - 1` of a stage, whose kinds repeat: a loop of `turns` turns.

    Attributes:
        kinds: the kinds of the layers of one turn.
        before: the kinds of the layers of the stage before the run.
        next: the kind of the layer after the run, "" for none; with several turns always that of its first
            layer.
    """

    start: int
    turns: int
    kinds: tuple[str, ...]
    before: tuple[str, ...]
    next: str

    def layers(self, *, backwards: bool) -> Iterator[LayerAt]:
        """Yield the layers of one turn in the order of the pass, the last one first if `backwards`.

        Where the run has several turns, the `place` and `number` of a layer are expressions in `LAYER`, the number
        of the turn. It counts from 0 in the order of the pass: backwards, turn 0 has the last layers of the run.
        """
        count = len(self.kinds) + bool(self.next)
        order: list[LayerAt] = []
        for offset in reversed(range(count)):
            order.append(replace(self._layer(offset, backwards), after=self._bare(order)))
        order = order[::-1][: len(self.kinds)]
        yield from reversed(order) if backwards else order

    @staticmethod
    def _bare(later: list[LayerAt]) -> LayerAt | None:
        return replace(later[-1], after=None) if later else None

    def _layer(self, offset: int, backwards: bool) -> LayerAt:
        """Return the layer so far from the first one of a turn, at most the one after the turn."""
        kinds = (*self.kinds, self.next)
        kind = kinds[offset]
        number = self.before.count(kind) + kinds[:offset].count(kind)
        place = self._at_turn(self.start + offset, len(self.kinds), backwards)
        return LayerAt(kind, place, self._at_turn(number, self.kinds.count(kind), backwards))

    def _at_turn(self, first: int, step: int, backwards: bool) -> Index:
        """Return a number that is `first` in the first turn, and grows by `step` each turn."""
        if self.turns == 1:
            return first
        return first + (self.turns - 1) * step - LAYER * step if backwards else LAYER * step + first


def layer_runs(kinds: Sequence[str]) -> tuple[LayerRun, ...]:
    """Return the layers of a stage as runs, in order; the first and the last layer have a run each.

    `kinds` are the names of the layers' kinds, in order: "a", "b", "c", "b", "c", "b" gives runs of "a", of
    "b", "c" in two turns, and of "b".
    """
    count = len(kinds)
    runs: list[LayerRun] = []
    at = 0
    while at < count:
        period, turns = (1, 1) if at in (0, count - 1) else _longest(kinds[at : count - 1])
        if turns > 1 and kinds[at + period * turns] != kinds[at]:
            turns -= 1
        stop = at + period * turns
        following = kinds[stop] if stop < count else ""
        runs.append(LayerRun(at, turns, tuple(kinds[at : at + period]), tuple(kinds[:at]), following))
        at = stop
    return tuple(runs)


def _longest(kinds: Sequence[str]) -> tuple[int, int]:
    """Return the shortest period of the most layers that repeat from the first one on, and its turns."""
    best = 1, 1
    for period in range(1, len(kinds) // 2 + 1):
        turns = 1
        while list(kinds[turns * period : (turns + 1) * period]) == list(kinds[:period]):
            turns += 1
        if turns > 1 and turns * period > best[0] * best[1]:
            best = period, turns
    return best
