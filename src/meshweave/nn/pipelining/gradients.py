"""Gradients of a stage's parameters during a step: fresh at its begin, added to `.grad` at its end.

Where several data-parallel ranks add up gradients, those of all parameters are one vector, which the program
reduces; its last element is the sum of the losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshweave.base.errors import UnsupportedError


@dataclass
class StageGradients:
    """The gradients of one stage.

    Attributes:
        parameters: those that have gradients.
        vector: gradients of all parameters and the sum of losses; None where nothing is reduced.
    """

    parameters: list[nn.Parameter]
    vector: Tensor | None = None

    def __post_init__(self) -> None:
        self._previous: list[Tensor | None] = []

    @classmethod
    def of(cls, module: nn.Module, *, is_reduced: bool, number: int) -> StageGradients:
        """Return the gradients of a module; of stage `number`, for errors.

        Raises:
            UnsupportedError: gradients are reduced, and parameters have several dtypes or are no plain tensors.
        """
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not is_reduced:
            return cls(parameters)
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        plain = all(type(parameter) is nn.Parameter for parameter in parameters)
        if len(kinds) > 1 or not plain:
            what = "of several dtypes or devices" if plain else "that are no plain tensors"
            raise UnsupportedError(
                f"stage {number} has parameters {what}: on several data-parallel ranks they must be plain tensors "
                "of one dtype"
            )
        dtype, device = next(iter(kinds), (torch.float64, torch.device("cpu")))
        size = sum(parameter.numel() for parameter in parameters) + 1
        return cls(parameters, torch.zeros(size, dtype=dtype, device=device))

    def begin(self) -> None:
        """Put earlier gradients aside, so that those of this step start from nothing."""
        self._previous = [
            None if parameter.grad is None else parameter.grad.detach() for parameter in self.parameters
        ]
        if self.vector is None:
            for parameter in self.parameters:
                parameter.grad = None
            return
        start, base = 0, self.vector.data_ptr()
        for number, parameter in enumerate(self.parameters):
            previous = self._previous[number]
            if previous is not None and base <= previous.data_ptr() < base + self.vector.nbytes:
                self._previous[number] = previous.clone()  # of the last step, in this memory
            parameter.grad = self.vector[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def end(self, divisor: int) -> None:
        """Divide the gradients of this step, and add them to earlier ones."""
        with torch.no_grad():
            if divisor != 1:
                if self.vector is not None:
                    self.vector[:-1].div_(divisor)
                else:
                    for parameter in self.parameters:
                        if parameter.grad is not None:
                            parameter.grad.div_(divisor)
            for parameter, previous in zip(self.parameters, self._previous, strict=True):
                if previous is not None:
                    parameter.grad = previous if parameter.grad is None else parameter.grad.add_(previous)
        self._previous = []
