"""What the mesh axes of a plan do for experts.

The innermost `expert_tensor` ranks of a stage split each expert; the next `expert` groups of these have different
experts. Which degrees of parallelism these ranks are of otherwise makes no difference.
"""

from __future__ import annotations

import math
from itertools import pairwise

from meshweave.algorithms.block.roles import AxisDims, Dim
from meshweave.algorithms.step import Parallelism
from meshweave.algorithms.step.problem import Degree
from meshweave.base.errors import LayoutError

PlanAxis = tuple[Degree, int, int]
"""(degree, size, stride) of a mesh axis; the stride is the difference of the ranks of neighbours along it."""


def with_experts(p: Parallelism, axes: list[PlanAxis]) -> tuple[list[PlanAxis], AxisDims]:
    """Return (axes, roles): the mesh axes of a plan, some of them cut, and for each what it does for experts.

    A role is "inner" if the axis splits each expert, "expert" if its ranks have different experts, "" if they have
    equal ones. Axes are (degree, size, stride), the stride being the difference of the ranks of neighbours along
    the axis, and keep their order. The innermost `expert_tensor` ranks share one expert; `expert` groups of these
    have all experts. An axis of data parallelism is cut in two, the outer one first, where one of these sets of
    ranks ends inside it; in three where both do.

    Raises LayoutError where such a set ends inside an axis of another degree, or cuts an axis unevenly.
    """
    within: dict[PlanAxis, int] = {}
    for axis in sorted(axes, key=lambda axis: axis[2]):
        within[axis] = math.prod(other[1] for other in within)
    out: list[PlanAxis] = []
    roles: list[Dim] = []
    for axis in axes:
        degree, size, stride = axis
        first, last = within[axis], within[axis] * size
        cuts = [cut for cut in (p.expert_tensor, p.expert_tensor * p.expert) if first < cut < last]
        ends = [first, *dict.fromkeys(cuts), last]
        if cuts and (degree != "data" or any(end % start for start, end in pairwise(ends))):
            raise LayoutError(
                f"parallelism: expert {p.expert} x expert_tensor {p.expert_tensor} divides {size} ranks of "
                f"{degree}, of which {first} neighbours are one; give a product that these divide, "
                "or that divides data"
            )
        for start, end in reversed(list(pairwise(ends))):
            out.append((degree, end // start, stride * (start // first)))
            roles.append(_role(p, start, end // start))
    return out, tuple(roles)


def _role(p: Parallelism, first: int, size: int) -> Dim:
    """Return what an axis does for experts; `first` ranks inside of it are alike to it."""
    if size == 1 or first >= p.expert_tensor * p.expert:
        return ""
    return "inner" if first < p.expert_tensor else "expert"
