"""Gradients of a stage's parameters during a step: fresh at its begin, added to `.grad` at its end.

Where several data-parallel ranks add up gradients, those of all parameters are one vector, which the program
reduces; it ends with the sum of the losses. A parameter that is a DTensor has its local shard there. Shards
take as much room as the largest of any rank, so that the vectors of a stage's ranks are of one length.

A parameter that no micro-batch of any rank reaches has no gradient, as on one process. A rank that has none for it
adds a negative zero as its first element, and one that has some never does, so that the sum begins with one just
where nobody has any (IEEE 754-2019, section 6.3; `nn.parallel.buckets` does the same).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.execute.torch import compat
from meshweave.nn.parallel.buckets import is_negative_zero

_PARTS = 3
"""16-bit numbers whose sum is a number in single precision."""


def num_loss_elements(dtype: torch.dtype, ranks: int) -> int:
    """Return how many elements at the end of a vector of gradients of `dtype` hold the sum of losses.

    1 where the dtype has more than 16 bits, else 3 for each of `ranks` data-parallel ranks (see `LossSum`).
    """
    return 1 if dtype.itemsize > 2 else _PARTS * ranks


class LossSum:
    """The sum of losses at the end of a vector of gradients, which data-parallel ranks all-reduce in its dtype.

    In a dtype of 16 bits, each rank has three elements of its own there, to which other ranks add 0. The three add
    up to the rank's sum of losses in single precision.

    Args:
        elements: the last `num_loss_elements` of the vector.
        index: which of the data-parallel ranks this is, from 0.
    """

    def __init__(self, elements: Tensor, index: int) -> None:
        self._all, self._is_whole = elements, elements.dtype.itemsize > 2
        self._own = elements if self._is_whole else elements[index * _PARTS : (index + 1) * _PARTS]

    def add(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, a tensor () or of one element, to the sum of this rank."""
        if self._is_whole:
            self._own += loss
            return
        rest = self._own.sum(dtype=torch.float32) + loss.reshape(())
        for part in self._own:
            part.copy_(rest)
            rest = (rest - part).nan_to_num(0.0, 0.0, 0.0)  # of what is not finite the first part is all

    def total(self) -> Tensor:
        """Return the sum of losses, a tensor () in at least single precision.

        It is this rank's sum, and that of all ranks after the vector is all-reduced.
        """
        return self._all.sum(dtype=torch.promote_types(self._all.dtype, torch.float32))


@dataclass
class StageGradients:
    """The gradients of one stage's parameters.

    Attributes:
        parameters: those that require gradients, without the ones that another stage of this rank has taken.
        trained: all that require gradients.
        vector: the gradients of `parameters` one after the other, room for those of the rest of `trained`, and the
            sum of the losses; None where there is one data-parallel rank.
        losses: the sum of losses at the end of `vector`; None without a vector.
    """

    parameters: list[nn.Parameter]
    trained: list[nn.Parameter]
    vector: Tensor | None = None
    losses: LossSum | None = None

    def __post_init__(self) -> None:
        self._previous: list[Tensor | None] = []
        self._versions: list[int] = []
        self._given: list[Tensor] = []
        self._missing: dict[int, int] = {}  # by place: the version of the gradient that has nothing in it yet

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        ranks: int,
        index: int,
        number: int,
        device: torch.device,
        others: Iterable[StageGradients] = (),
    ) -> StageGradients:
        """Return the gradients of the parameters of a module; its `vector`, if any, is zeros.

        Args:
            module: the stage.
            ranks: the number of data-parallel ranks, whose gradients are summed; with 1 there is no `vector`.
            index: which of these this rank is, from 0.
            number: that of the stage, for errors.
            device: where the vector of a module without trained parameters lies.
            others: the gradients of stages of this rank whose backward passes end later. A parameter that the
                module shares with one of these is left to it.

        Raises:
            UnsupportedError: gradients are reduced, and parameters have several dtypes or devices, or are neither
                plain tensors nor DTensors.
        """
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        taken = {id(parameter) for other in others for parameter in other.parameters}
        own = [parameter for parameter in parameters if id(parameter) not in taken]
        if ranks == 1:
            return cls(own, parameters)
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        known = all(type(each) is nn.Parameter or isinstance(each, DTensor) for each in parameters)
        if len(kinds) > 1 or not known:
            what = "of several dtypes or devices" if known else "that are neither plain tensors nor DTensors"
            raise UnsupportedError(
                f"stage {number} has parameters {what}: on several data-parallel ranks they must be plain tensors "
                "or DTensors of one dtype"
            )
        dtype, device = next(iter(kinds), (torch.float64, device))
        size, more = sum(map(num_local_elements, parameters)), num_loss_elements(dtype, ranks)
        vector = torch.zeros(size + more, dtype=dtype, device=device)
        return cls(own, parameters, vector, LossSum(vector[size:], index))

    def check(self, module: nn.Module, number: int, splits: bool) -> None:
        """Raise LayoutError, naming a parameter, where other parameters are trained than in the first step.

        That is where a parameter requires a gradient and did not then or was another tensor, or is frozen since
        and data-parallel ranks sum its gradient. Raise UnsupportedError where a parameter has a hook to call after
        its gradient, and the schedule `splits` backward passes in two, which does not call it. `module` is stage
        `number`.
        """
        trained = set(map(id, self.trained))
        for name, parameter in module.named_parameters():
            if splits and _has_hook(parameter):
                raise UnsupportedError(
                    f"stage {number}: {name} has a post-accumulate gradient hook, which a backward in two parts "
                    "does not call; take a schedule with whole backwards, or do it after the step"
                )
            is_known = id(parameter) in trained
            if is_known and not parameter.requires_grad and self.vector is not None:
                change = "is frozen since the first step, in which ranks summed its gradient"
            elif not is_known and parameter.requires_grad:
                change = "requires a gradient, and did not in the first step or is another tensor since"
            else:
                continue
            raise LayoutError(f"stage {number}: {name} {change}; make a new pipeline of the stages")

    def begin(self) -> None:
        """Set gradients of earlier steps aside, so that the gradients of this step start from nothing.

        `.grad` becomes None; with a `vector`, a tensor in the parameter's part of the vector, which the program
        zeroes, with a version of its own.
        """
        self._previous = [
            None if parameter.grad is None else parameter.grad.detach() for parameter in self.parameters
        ]
        self._versions = [parameter._version for parameter in self.parameters]
        if self.vector is None:
            for parameter in self.parameters:
                parameter.grad = None
            return
        self._given = self._lying_in(self.vector)
        self._missing = {at: part._version for at, part in enumerate(compat.local_tensors(self._given))}
        for parameter, given in zip(self.parameters, self._given, strict=True):
            parameter.grad = given

    def after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a part of the backward pass that tells, once it has run, which parameters it has not reached."""
        if self.vector is None:
            return call

        def marked(*operands: Any) -> Any:
            out = call(*operands)
            self._mark()
            return out

        return marked

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _mark(self) -> None:
        """Let gradients begin with a negative zero just where nothing was added to them."""
        if not self._missing:
            return
        parts = compat.local_tensors(self._given)
        reached = [at for at, version in self._missing.items() if parts[at]._version != version]
        for at in reached:
            parts[at].flatten()[:1].add_(0.0)  # -0.0 becomes 0.0
            del self._missing[at]
        for at in self._missing:
            parts[at].data.flatten()[:1].fill_(-0.0)

    def _lying_in(self, vector: Tensor) -> list[Tensor]:
        """Return the gradient of each parameter in a vector that begins with all of them."""
        start, made = 0, []
        for parameter, local in zip(self.parameters, compat.local_tensors(self.parameters), strict=True):
            made.append(_like(parameter, vector[start : start + local.numel()].view(local.shape).data))
            start += num_local_elements(parameter)
        return made

    def check_kept(self, module: nn.Module, number: int, micro_batches: int) -> None:
        """Raise LayoutError where hooks on gradients made a step wrong. `module` is stage `number`.

        That is where one of several micro-batches had a parameter changed for the others, as by an optimizer's
        step, or where `.grad` is no longer the tensor in `vector`, if any, that ranks have summed.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for parameter, version in zip(self.parameters, self._versions, strict=True):
            if micro_batches > 1 and parameter._version != version and _has_hook(parameter):
                raise LayoutError(
                    f"stage {number}: {names[id(parameter)]} was changed during the step, after one of "
                    f"{micro_batches} micro-batches: let the optimizer step after the pipeline, not in a hook"
                )
        for parameter, given in zip(self.parameters if self._given else (), self._given, strict=True):
            if parameter.grad is not given:
                raise LayoutError(
                    f"stage {number}: the gradient of {names[id(parameter)]} was replaced during the step, and "
                    "ranks summed what was there; let hooks change it in place, or change it after the step"
                )

    def abandon(self) -> None:
        """Undo `begin`, after a step that failed: restore `.grad` as it was before `begin`."""
        for parameter, previous in zip(self.parameters, self._previous, strict=True):
            parameter.grad = previous
        self._previous, self._given, self._missing = [], [], {}

    def end(self, divisor: int) -> None:
        """Divide the gradients of this step by `divisor`, and add those that `begin` set aside.

        Gradients in the vector are copied out of it, since the next step overwrites the vector.
        """
        with torch.no_grad():
            if self.vector is not None:
                parts = compat.local_tensors(self._given)
                unreached = {at for at in self._missing if is_negative_zero(parts[at].flatten()[:1])}
                summed = self.vector[: sum(map(num_local_elements, self.parameters))] / divisor
                for at, made in enumerate(self._lying_in(summed)):
                    self.parameters[at].grad = None if at in unreached else made
            elif divisor != 1:
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(divisor)
            for parameter, previous in zip(self.parameters, self._previous, strict=True):
                if previous is not None:
                    parameter.grad = previous if parameter.grad is None else parameter.grad.add_(previous)
        self._previous, self._given, self._missing = [], [], {}


def num_local_elements(parameter: Tensor) -> int:
    """Return the number of elements of a tensor; of a DTensor, of the largest shard that any rank may have.

    Sharded dims are rounded up: (5, 3) with Shard(0) on 2 ranks -> 9.
    """
    if not isinstance(parameter, DTensor):
        return int(parameter.numel())
    sizes = list(parameter.shape)
    for placement, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            sizes[dim] = -(-sizes[dim] // ranks)
    return max(int(math.prod(sizes)), int(parameter.to_local().numel()))


def _has_hook(parameter: Tensor) -> bool:
    """Return whether a parameter has a post-accumulate hook, but for that by which ranks compare first steps."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(not str(getattr(hook, "__module__", "")).startswith("meshweave.") for hook in hooks)


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a local shard as a tensor that lies as `parameter` does."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
