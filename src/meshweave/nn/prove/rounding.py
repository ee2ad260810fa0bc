"""What rounding does to each tensor of a model, measured on the model itself, and how far another one may be."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch

from meshweave.nn.prove.runs import ModelRun
from meshweave.nn.prove.state import WIDE

EXACT = 1e-9
"""The error in double precision, relative to a tensor's norm, that the order of sums explains."""
_ROUNDINGS = 8.0
"""How many times the original's own rounding, in its type, the error of a parallelised model may be, and"""
_ROUNDINGS_OF_HALVES = 3.0
"""in half precision, where the rounding of operands is most of it, and the same in both."""


class Rounding:
    """The errors that rounding explains, by tensor.

    A tensor's error is the distance of its values in the model's own type from those in double precision, over
    their norm. It may be small by chance, that of a loss most of all. So in half precision a tensor is allowed at
    least what is usual: the largest error of outputs and losses, and the median of those of gradients.

    Args:
        dtype: in which the parallelised model was run.
        right: the original in double precision, or where memory is short in single precision or its own type.
        own: the original in its own type; None where only one of the two runs was made, which is then `right`.
    """

    def __init__(self, dtype: torch.dtype, right: ModelRun, own: ModelRun | None) -> None:
        self._dtype, self._is_measured = dtype, own is not None
        self._errors: dict[str, float] = {}
        self._usual: dict[str, float] = {}
        if own is None or dtype == WIDE:
            return
        values = [(name, own.values.get(name), right.values[name]) for name in right.values]
        grads = [(name, own.grads.get(name), right.grads[name]) for name in right.grads]
        for pairs, usual in ((values, max), (grads, statistics.median)):
            errors = dict(_errors(pairs))
            most = usual(errors.values()) if errors else 0.0
            self._errors |= errors
            self._usual |= dict.fromkeys((name for name, _, _ in pairs), most)

    def allowed(self, name: str) -> tuple[float, float]:
        """Return (relative, absolute): the error of tensor `name` that rounding explains.

        `relative` is a norm over the norm of the tensor; `absolute` is an additional difference per element.
        """
        if self._dtype == WIDE:
            return EXACT, 0.0
        finfo = torch.finfo(self._dtype)
        is_half = finfo.bits <= 16
        if not self._is_measured:
            return min(256 * finfo.eps, 0.05), 0.0
        least, times = (finfo.eps, _ROUNDINGS_OF_HALVES) if is_half else (64 * finfo.eps, _ROUNDINGS)
        usual = self._usual.get(name, 0.0) if is_half else 0.0
        if name not in self._errors:
            return least + times * usual, finfo.eps
        return least + times * max(self._errors[name], usual), 0.0


def _errors(
    pairs: Iterable[tuple[str, torch.Tensor | None, torch.Tensor | None]],
) -> Iterable[tuple[str, float]]:
    """Yield the relative distance of each tensor from what it should be, less those that are zero or missing."""
    for name, own, right in pairs:
        if own is not None and right is not None and (norm := float(right.double().norm())):
            yield name, float((own.double() - right.double()).norm()) / norm
