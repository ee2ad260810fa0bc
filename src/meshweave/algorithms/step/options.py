"""The keywords of `mw.step` and `mw.plan` with their types, for type checkers and editors."""

from __future__ import annotations

from typing import TypedDict

from meshweave.algorithms.block.problem import Overlap
from meshweave.algorithms.step.problem import Degree
from meshweave.algorithms.step.software_stack import AttentionKind, LossKind, SoftwareStack
from meshweave.describe.model.memory import Recompute

Tensor = int | tuple[int, int]
"""A tensor degree: the ranks of a one-dimensional strategy, or the mesh (d1, d2) of another."""


class ProblemOptions(TypedDict, total=False):
    """What a step computes, beside model, cluster, batch and sequence: attributes of `StepProblem`."""

    dtype: str
    gradient_dtype: str
    optimizer: str
    precision: str | None
    attention: AttentionKind | None
    attention_share: float | None
    loss: LossKind | None
    dropout: bool | None
    stack: SoftwareStack | str
    overlap: Overlap
    reserve: float
    dispatcher: str
    imbalance: float


class StepOptions(ProblemOptions, total=False):
    """The keywords of `mw.step`: attributes of `StepProblem` and `Parallelism`, and short names of degrees."""

    data: int
    dp: int
    pipeline: int
    pp: int
    context: int
    cp: int
    tensor: Tensor
    tp: Tensor
    virtual_stages: int
    vp: int
    strategy: str
    zero: int
    zero_group: int | None
    expert: int
    ep: int
    expert_tensor: int
    etp: int
    schedule: str
    micro_batch: int
    recompute: Recompute
    order: tuple[Degree, ...]


class PlanOptions(ProblemOptions, total=False):
    """The keywords of `mw.plan` that fix a choice: a value, or a list of values to choose among."""

    data: int | list[int]
    dp: int | list[int]
    pipeline: int | list[int]
    pp: int | list[int]
    context: int | list[int]
    cp: int | list[int]
    tensor: Tensor | list[Tensor]
    tp: Tensor | list[Tensor]
    virtual_stages: int | list[int]
    vp: int | list[int]
    strategy: str | list[str]
    zero: int | list[int]
    schedule: str | list[str]
    micro_batch: int | list[int]
    recompute: Recompute | list[Recompute]
    order: tuple[Degree, ...] | list[tuple[Degree, ...]]
    expert: int | list[int]
    ep: int | list[int]
    expert_tensor: int | list[int]
    etp: int | list[int]
