"""Which columns of the linear layers before it a head of attention reads, by derivatives of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshweave.base.errors import UnsupportedError

Columns = tuple[int, ...]


@dataclass(frozen=True)
class HeadColumns:
    """Which columns of the linear layers before attention each query head reads.

    A column is an output feature of such a linear layer.

    Attributes:
        heads: how many query heads there are.
        groups: how many groups of equally many consecutive heads share keys and values.
        width: features of a head after attention.
        of: for each linear layer, for each query head, the columns that it reads, ascending.
        features: for each linear layer the number of its columns.
    """

    heads: int
    groups: int
    width: int
    of: Mapping[str, tuple[Columns, ...]]
    features: Mapping[str, int]

    def of_units(self, name: str, units: int) -> list[Columns]:
        """Return, for each of `units` equal runs of heads, the columns of linear layer `name` that it reads.

        Columns of a run are ascending: 4 heads in 2 units -> columns of heads 0 and 1, then of heads 2 and 3.
        """
        own, count = self.of[name], self.heads // units
        runs = [own[unit * count : (unit + 1) * count] for unit in range(units)]
        return [tuple(sorted({column for head in run for column in head})) for run in runs]


def head_columns(operand: Tensor, points: Mapping[str, Tensor | None], heads: int, where: str) -> HeadColumns:
    """Return which columns of the linear layers before attention each head reads, by derivatives.

    Args:
        operand: (batch, sequence, features) after attention; each head has equally many consecutive features.
        points: for each linear layer its result, or what a norm of whole rows makes of it, in the graph of
            `operand`.
        heads: how many query heads there are.
        where: the name of the module of attention, for errors.

    Raises UnsupportedError where heads that share keys are not neighbours, groups are unequal, heads read
    different numbers of columns of a layer, or none, or a column is read by no head.
    """
    width = operand.shape[-1] // heads
    of_points: dict[str, list[Columns]] = {name: [] for name in points}
    for head in range(heads):
        read = _read(operand, list(points.values()), range(head * width, (head + 1) * width))
        for name, columns in zip(points, read, strict=True):
            of_points[name].append(columns)
    of_heads = [
        frozenset((name, c) for name in points for c in of_points[name][head]) for head in range(heads)
    ]
    groups: list[set[tuple[str, int]]] = []
    sizes: list[int] = []
    for own in of_heads:
        if groups and groups[-1] & own:
            groups[-1] |= own
            sizes[-1] += 1
        elif any(group & own for group in groups):
            raise UnsupportedError(f"{where}: heads that share keys do not follow each other")
        else:
            groups.append(set(own))
            sizes.append(1)
    if len(set(sizes)) != 1:
        raise UnsupportedError(f"{where}: groups of {sizes} heads share keys; equal ones are computed")
    features = {name: point.shape[-1] for name, point in points.items() if point is not None}
    for name, of_it in of_points.items():
        if not all(of_it):
            raise UnsupportedError(f"{where}: a head reads nothing of {name}")
        if len({len(columns) for columns in of_it}) != 1:
            raise UnsupportedError(f"{where}: heads read different numbers of columns of {name}")
        if len({c for columns in of_it for c in columns}) != features[name]:
            raise UnsupportedError(f"{where}: there are columns of {name} that no head reads")
    return HeadColumns(heads, len(groups), width, {k: tuple(v) for k, v in of_points.items()}, features)


def feature_parts(
    operand: Tensor, points: Mapping[str, Tensor | None], where: str
) -> dict[str, tuple[int, int]]:
    """Return how the inner features of a feed-forward part lie in the columns of the linear layers before it.

    It is read from derivatives of some features of `operand`, whose graph is kept.

    Args:
        operand: (..., inner features), what the linear layer after them is given, with its autograd graph.
        points: for each linear layer its result (..., columns), or what a norm of whole rows makes of it, in the
            graph of `operand`. None of them may be None.
        where: the name of the feed-forward part, for errors.

    Returns:
        For each linear layer (parts, unit): its columns are `parts` matrices side by side, in each of which a
            feature has `unit` neighbouring columns. (1, 1) is one matrix, (2, 1) two side by side, (1, 2) two
            whose columns alternate. {} where all derivatives are 0 and there are fewer than 63 features.

    Raises UnsupportedError where columns lie otherwise, or 64 features in a row were tried without a derivative.
    """
    features = operand.shape[-1]
    of_points: dict[str, set[tuple[int, int]]] = {}
    some = [0, features - 1, features // 2, *range(1, features)]
    for count, feature in enumerate(some):
        read = _read(operand, list(points.values()), range(feature, feature + 1))
        if not all(read) and count < _TRIED:  # of activations that are 0 there is no derivative
            continue
        for (name, point), columns in zip(points.items(), read, strict=True):
            assert point is not None
            fitting = _forms(features, point.shape[-1], feature, columns)
            if not fitting:
                raise UnsupportedError(
                    f"{where}: feature {feature} reads columns {columns[:6]} of {name}, as no feed-forward part "
                    "does; linear attention and state spaces are not computed"
                )
            of_points[name] = of_points.get(name, fitting) & fitting
        if count > 3:
            break
    return {name: max(forms) for name, forms in of_points.items()}


_TRIED = 64


def _forms(features: int, count: int, feature: int, columns: Columns) -> set[tuple[int, int]]:
    """Return how features may lie in `count` columns where one of them reads these columns."""
    parts = count // features
    forms = {
        (parts, 1): tuple(feature + part * features for part in range(parts)),
        (1, parts): tuple(range(feature * parts, (feature + 1) * parts)),
    }
    return {form for form, own in forms.items() if own == columns and parts * features == count}


def _read(operand: Tensor, points: Sequence[Tensor | None], features: range) -> list[Columns]:
    """Return the columns of each point that some features of the operand are computed from."""
    weights = torch.zeros_like(operand)
    own = weights[..., features.start : features.stop]
    own.copy_(torch.linspace(0.5, 1.5, own.numel(), dtype=own.dtype, device=own.device).view(own.shape).sin())
    grads = torch.autograd.grad(operand, points, weights, retain_graph=True, allow_unused=True)
    out: list[Columns] = []
    for grad in grads:
        if grad is None:
            out.append(())
            continue
        is_read = grad.flatten(0, -2).ne(0).any(0)
        out.append(tuple(is_read.nonzero().flatten().tolist()))
    return out
