"""Optimizers of parallelised models: ranks compare their settings, and the gradients, at their first step.

A hook of torch's on the steps of all optimizers finds those that hold parameters of a model here. One that was
made before `parallelize` holds parameters that the model no longer has, and would train nothing: it is refused.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch import compat
from meshweave.nn.parallel.agreed import difference, without_addresses
from meshweave.nn.parallel.local_steps import mixes_parameters, restore_parameter_groups, step_locally
from meshweave.nn.parallel.model_words import copy_words
from meshweave.nn.parallel.step_agreement import StepAgreement

_WHAT = "all ranks to compare the optimizers of a parallelised model"
_MIXES = (
    "this {} steps a parameter otherwise beside others, as by a norm over all of them or by random numbers, and a "
    "stage of a pipeline has some of them: take one that steps each parameter by itself, or no pipeline"
)
_replaced: Any = WeakIdKeyDictionary()
_known: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[StepAgreement]]] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []
"""Torch's handles of what runs with each step: once in a process, whichever models came and went."""
_probes: weakref.WeakKeyDictionary[StepAgreement, GradientProbe] = weakref.WeakKeyDictionary()
"""By model, in the order in which they were parallelised: ranks compare one after another."""


def watch_optimizers(agreement: StepAgreement, replaced: Mapping[str, nn.Parameter]) -> None:
    """Check from now on the steps of all optimizers that hold parameters of a model.

    At the first step of one, ranks compare its class, settings, groups of parameters and the gradients. The step
    raises LayoutError on all ranks where these differ, and where the optimizer holds parameters that the model no
    longer has.

    Args:
        agreement: that of the model.
        replaced: the parameters that the model had before `parallelize`, by name.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    own = {id(parameter) for parameter in agreement.module.parameters()}
    for name, parameter in replaced.items():
        if id(parameter) not in own:
            _replaced[parameter] = name
    _probes[agreement] = GradientProbe(agreement.module)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    agreements = _known.get(optimizer)
    if agreements is None:
        agreements = _known[optimizer] = _first_step(optimizer)
    for reference in agreements:
        agreement = reference()
        if agreement is not None:
            agreement.progress.steps += 1
            agreement.progress.options |= option_words(optimizer)
    if agreements:
        step_locally(optimizer, has_arguments=any(each is not None for each in (*args[1:], *kwargs.values())))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    restore_parameter_groups(optimizer)


@torch.compiler.disable(reason="ranks compare outside of graphs")  # type: ignore[untyped-decorator]
def _first_step(optimizer: Optimizer) -> list[weakref.ref[StepAgreement]]:
    """Return the models whose parameters an optimizer holds, once their ranks have compared it.

    Raises LayoutError where ranks differ, or where it holds parameters that are in no model any more.
    Raises UnsupportedError where it holds those of a stage of a pipeline, and steps them by those of others.
    """
    held = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    for parameter in held.values():
        if (name := _replaced.get(parameter)) is not None:
            raise LayoutError(
                f"this {type(optimizer).__name__} holds {name} as it was before parallelize, which the model "
                "no longer has: it would train nothing; make it after parallelize, of model.module.parameters()"
            )
    agreements = []
    for agreement, probe in list(_probes.items()):
        named = {name: each for name, each in agreement.module.named_parameters() if id(each) in held}
        if named:
            if agreement.is_stage and mixes_parameters(optimizer):
                raise UnsupportedError(_MIXES.format(type(optimizer).__name__))
            gradients = ((name, each.grad) for name, each in named.items() if each.grad is not None)
            has = {name: "none" if each.grad is None else "there" for name, each in named.items()}
            places = {id(each): name for name, each in named.items()}
            of_it = [
                [places[id(p)] for p in group["params"] if id(p) in places]
                for group in optimizer.param_groups
            ]
            groups = {f"group {at}": ", ".join(names) for at, names in enumerate(of_it)}
            agreement.compare(
                {
                    "optimizer": {"class": type(optimizer).__name__, **option_words(optimizer), **groups},
                    "gradients": has,
                    **copy_words("gradients", gradients),
                },
                _WHAT,
            )
            probe.compare(agreement)
            agreements.append(weakref.ref(agreement))
    return agreements


def option_words(optimizer: Optimizer) -> dict[str, str]:
    """Return the settings of an optimizer as text by name, such as "lr of group 0", for comparison between ranks.

    "its state" says whose shards its state holds: those of this rank, those of another rank whose file was loaded,
    or none.
    """
    words = {"its state": _whose_state(optimizer)}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                value = value.tolist() if isinstance(value, Tensor) else value
                words[f"{key} of group {number}"] = without_addresses(repr(value))
    return words


def _whose_state(optimizer: Optimizer) -> str:
    """Return in words which rank's part the state of an optimizer is, which may come from a file.

    Raises LayoutError where it is of whole parameters, of which ranks have parts.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(parameter, DTensor)
                and not isinstance(value, DTensor)
                and _is_whole(value, parameter)
            ):
                raise LayoutError(
                    f"{key} of this {type(optimizer).__name__} is of a whole parameter, as another optimizer has "
                    "saved it, and ranks have parts: torch.distributed.checkpoint.state_dict."
                    "set_optimizer_state_dict(..., options=StateDictOptions(full_state_dict=True)) divides it"
                )
            if isinstance(parameter, DTensor) and isinstance(value, DTensor):
                place = value.device_mesh.get_coordinate()
                is_own = place == parameter.device_mesh.get_coordinate()
                return (
                    "of this rank"
                    if is_own
                    else f"of the rank at {place}, which saved it: each saves its own"
                )
    return "none"


def _is_whole(value: Any, parameter: DTensor) -> bool:
    """Return whether a state that is no DTensor has the shape of all of a parameter that ranks have in parts."""
    if not isinstance(value, Tensor) or not value.ndim or value.shape != parameter.shape:
        return False
    return not all(each.is_replicate() for each in parameter.placements)


class GradientProbe:
    """Finds the factor by which gradients are scaled between a backward pass and the first optimizer step.

    It keeps up to 64 elements of one gradient as each backward pass leaves them, until `compare`.

    Args:
        module: the parallelised model; the gradient is that of its first trained DTensor with elements on this
            rank.
    """

    _COUNT = 64

    def __init__(self, module: nn.Module) -> None:
        self._before: Tensor | None = None
        self._parameter: Tensor | None = None
        self._hooks: list[Any] = []
        for parameter in module.parameters():
            if isinstance(parameter, DTensor) and parameter.requires_grad and self._own(parameter).numel():
                self._parameter = parameter
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._keep))
                break

    @classmethod
    def _own(cls, tensor: Tensor) -> Tensor:
        return compat.local_tensor(tensor).detach().reshape(-1)[: cls._COUNT]

    def _keep(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._before = self._own(parameter.grad).to(torch.float64, copy=True)

    def compare(self, agreement: StepAgreement) -> None:
        """Raise LayoutError, on all ranks, where ranks scaled the gradient by different factors. Collective.

        A rank whose elements were scaled by different factors, as by clipping by value, is left out. To be called
        once: afterwards gradients are no longer watched. The ranks are those of `agreement`.
        """
        for hook in self._hooks:
            hook.remove()
        factor = self._factor()
        self._before = self._parameter = None
        ranks = agreement.strategy.mesh.ranks
        device = torch.device(agreement.strategy.device_mesh.device_type)
        said = exchange(agreement.context(device), ranks, json.dumps(factor), _WHAT, topic="scaled gradients")
        factors = {rank: json.loads(text) for rank, text in said.items() if text != "null"}
        least, most = min(factors.values(), default=0.0), max(factors.values(), default=0.0)
        if most - least > 2 * _TOLERANCE * min(abs(least), abs(most)):
            words = {
                rank: {"their factor before the step": f"{factor:.3g}"} for rank, factor in factors.items()
            }
            raise LayoutError(difference("gradients", words))

    def _factor(self) -> float | None:
        """Return by what the gradient was multiplied; None where that is not the same for all of its elements."""
        if self._before is None or self._parameter is None or self._parameter.grad is None:
            return None
        after, before = self._own(self._parameter.grad).double(), self._before
        factors = (after / before)[before.abs() > before.abs().max() / 100]
        if not factors.numel() or float(factors.max() - factors.min()) > _TOLERANCE * float(
            factors.abs().max()
        ):
            return None
        return float(factors.median())


_TOLERANCE = 0.02  # the rounding of bfloat16 twice
