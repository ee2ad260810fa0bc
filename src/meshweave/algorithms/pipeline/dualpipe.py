"""DualPipeV: forwards overlap with backwards, stages lie in a V (DeepSeek-AI, arXiv 2412.19437; DualPipe).

Stages go down the ranks and back up, as in `zbv`. In the middle of a step every action is a forward of one
micro-batch with the backward of another, so that transfers and all-to-alls of one overlap with the products of the
other. The ends of the step have input and weight gradients apart, which fill what would be bubble. The phases are
those of the authors' repository (github.com/deepseek-ai/DualPipe, DualPipeV).

DualPipe itself, from which this is cut, runs the model in both directions at once and keeps two copies of each
stage. An `Action` names a stage that one rank holds, so DualPipe has no counterpart here.
"""

from __future__ import annotations

from meshweave.algorithms.pipeline.actions import Schedule, folded
from meshweave.algorithms.pipeline.phases import Phase, actions_of_phases
from meshweave.base.errors import LayoutError


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Return the DualPipeV schedule, with stages i and 2 P - 1 - i on rank i of P.

    Raises:
        LayoutError: there is no rank, or there are fewer micro-batches than stages.
    """
    if num_ranks < 1 or num_micro_batches < 2 * num_ranks:
        raise LayoutError(
            f"DualPipeV needs as many micro-batches as stages: {2 * max(num_ranks, 1)} or more for "
            f"{max(num_ranks, 1)} ranks, not {num_micro_batches}"
        )
    actions = []
    for rank in range(num_ranks):
        stages = (rank, 2 * num_ranks - 1 - rank)
        actions.append(
            actions_of_phases(_phases(rank, num_ranks, num_micro_batches), stages, num_micro_batches)
        )
    return Schedule(folded(num_ranks), num_micro_batches, tuple(actions))


def _phases(rank: int, num_ranks: int, count: int) -> list[Phase]:
    """Return the phases of a rank: "0" is its stage on the way down, "1" the one on the way up."""
    last, behind = rank == num_ranks - 1, num_ranks - 1 - rank
    middle = count - 2 * num_ranks + rank + 1
    phases: list[Phase] = [
        (2 * behind, "F0"),
        (rank + 1, "F0 F1"),
        (behind, "I1 W F1"),
        # The last rank turns around by itself, so its first pair depends on each other and does not overlap.
        (1, "F0 B1 F1+B0" if last else "F0+B1 F1+B0"),
        (middle - 1, "F0+B1 F1+B0"),
        (behind, "B1 F1+B0"),
    ]
    # The second half of the last 2 (rank + 1) backwards is split; then the split ones give what W fills in.
    whole = rank + 1
    pairs = ["B1 B0"] * (whole // 2) + (["B1 I0"] if whole % 2 else []) + ["I1 I0"] * (whole // 2)
    phases += [(1, pair) for pair in pairs]
    phases += [(behind, "W I0"), (rank + 1, "W")]
    return phases
