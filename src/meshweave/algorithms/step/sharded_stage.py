"""Price what collectives of a stage's weights add to each of its parts, where every micro-batch has its own."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.algorithms.step.data_parallel import APART, DataParallelTime, Sharing, exposed_both_s
from meshweave.algorithms.step.layers import LayerTime
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.sharing import Sharings


@dataclass(frozen=True)
class ShardedStage:
    """What gathers of weights and reductions of gradients add to a stage under ZeRO-2 and 3, per micro-batch.

    Attributes:
        key: (number of layers of the stage, whether it is the first, whether it is the last).
        of: the seconds of the collectives of a layer and of an embedding table.
        ends: the times of embedding and head, of which the stage has those that `key` says. The first gather and
            the last reduction of a part overlap with them.
        sharing: how collectives and parts of a layer delay each other on links.
    """

    problem: StepProblem
    parallelism: Parallelism
    key: tuple[int, bool, bool]
    of: DataParallelTime
    ends: tuple[LayerTime, LayerTime]
    sharing: Sharings

    def _added_s(
        self,
        overlap: float,
        compute_s: float,
        moved_s: tuple[float, float],
        table_s: float,
        sharing: tuple[Sharing, Sharing],
        *beside: tuple[bool, float, float],
    ) -> float:
        """Return the seconds by which a part is longer whose layers compute and move so long each.

        Args:
            overlap: share (0 to 1) of the collectives that may overlap with other work.
            moved_s: seconds of the gather and of the reduction of a layer.
            table_s: seconds of a table's collective.
            sharing: of gathers and of reductions with the part of a layer.
            beside: (whether the stage has an end of the model, seconds of a collective before or after all layers,
                seconds of that end, which hide it).
        """
        count, is_first, is_last = self.key
        head = int(is_last and not (is_first and self.problem.model.tied_embeddings))
        alone, queued = (
            (is_first + head, 0) if self.problem.stack.sharding != "zero" else (int(is_first), head)
        )
        exposed = exposed_both_s(count, compute_s, moved_s, overlap, queued * table_s, sharing)
        hidden = sum(min(overlap * move_s, end_s) for is_here, move_s, end_s in beside if is_here and count)
        return alone * table_s + max(exposed - hidden, 0.0)

    def gathers_s(self, compute_s: float) -> float:
        """Return the seconds that gathers of weights add to the stage's forward part of one micro-batch.

        0 below ZeRO-2, and for ZeRO-2 where the stack gathers weights once per step. `compute_s` is the seconds of
        one layer's forward part.
        """
        zero, stack = self.parallelism.zero, self.problem.stack
        if zero < 2 or (zero == 2 and not stack.regathers):
            return 0.0
        gather_s, end_s = self.of.gather_s, self.ends[0].forward.total_s
        overlap = 0.0 if stack.waits_for_gathers else stack.overlap
        beside = self.key[1], gather_s, end_s
        return self._added_s(
            overlap,
            compute_s,
            (gather_s, 0.0),
            self.of.table_gather_s,
            (self.sharing.gathers[0], APART),
            beside,
        )

    def reduces_s(self, compute_s: float, parts: tuple[bool, bool] = (True, True)) -> float:
        """Return the seconds that gathers and reductions add to the stage's backward part of one micro-batch.

        0 below ZeRO-2.

        Args:
            compute_s: seconds of one layer's backward part.
            parts: (whether the part computes gradients of the residual, for which ZeRO-3 gathers weights; whether
                it computes gradients of weights, which are reduced).
        """
        if self.parallelism.zero < 2:
            return 0.0
        stack, again_s = self.problem.stack, 0.0
        if self.parallelism.zero == 3 and parts[0]:
            again_s = self.of.gather_s
        reduce_s, table_s = (self.of.reduce_s, self.of.table_s) if parts[1] else (0.0, 0.0)
        waited_s = 0.0
        if stack.waits_for_gathers:  # and each gather shares its links with the reduction of the layer before
            shared_s = min(again_s, reduce_s)
            waited_s, again_s, reduce_s = again_s + shared_s, 0.0, reduce_s - shared_s
        backs_s = [end.backward.total_s for end in self.ends]
        beside = (self.key[1], reduce_s, backs_s[0]), (self.key[2], again_s, backs_s[1])
        sharing = (
            (APART, APART) if parts == (False, True) else (self.sharing.gathers[1], self.sharing.sums)
        )  # it has no transfers
        moved_s = again_s, reduce_s
        added_s = self._added_s(stack.overlap, compute_s, moved_s, table_s, sharing, *beside)
        return self.key[0] * waited_s + added_s
