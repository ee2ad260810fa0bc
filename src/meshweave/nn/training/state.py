"""What a rank has to save of a training: modules, optimizer and random state, as tensors with global names.

names                         tensors
----------------------------  --------------------------------------------------------------------------------
`model.<name>`                parameters and buffers, by their names in the modules
`optimizer.<name>.<key>`      what the optimizer keeps of the parameter of that name, such as `exp_avg` and `step`
`random.<rank>`               the state of the random number generator of a rank

Names do not depend on where a tensor lies, so another mesh or other stages load them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshweave.base.errors import DescriptionError, LayoutError
from meshweave.nn.training.checkpoints import Checkpoints, Saved
from meshweave.nn.training.pieces import Ranges, ShardPieces


class TrainingState:
    """The state of a training on one rank.

    Args:
        modules: of this rank, such as its stages. Names of parameters must differ among them.
        optimizer: of some or all of their parameters.
        rank: this rank.
        places: how ranks share the model, as JSON. A training that goes on at the same places has the random
            states that it had; at other places they are drawn from `seed` and the step.
        seed: see `places`.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizer: Optimizer,
        *,
        rank: int,
        places: Any = None,
        seed: int = 0,
    ) -> None:
        self._modules, self._optimizer = list(modules), optimizer
        self._rank, self._places, self._seed = rank, places, seed
        self._names: dict[Tensor, str] = {}
        names = [name for module in self._modules for name, _ in module.named_parameters()]
        if len(names) > len(set(names)):
            twice = next(name for name in names if names.count(name) > 1)
            raise LayoutError(f"two modules have a parameter '{twice}'; names must differ among modules")
        self._ranges: dict[str, Ranges] = {}
        for module in self._modules:
            self._names |= {parameter: name for name, parameter in module.named_parameters()}
            self._ranges |= _fused_ranges(module)

    def save(self, checkpoints: Checkpoints, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Save the state after `step` steps; `notes` are kept with it. Raises what `Checkpoints.save` does."""
        tensors = self._model() | self._optimized() | {f"random.{self._rank}": torch.get_rng_state()}
        own = {"places": self._places, "groups": self._groups()}
        checkpoints.save(step, tensors, {"training": own, "notes": dict(notes or {})})

    def load(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        """Load the state after `step` steps in place. Return the notes that were kept with it.

        Raises:
            DescriptionError: the checkpoint is of another model or optimizer.
        """
        own = checkpoints.notes(step).get("training", {})
        if len(own.get("groups", ())) != len(self._optimizer.param_groups):
            raise DescriptionError(
                f"the checkpoint's optimizer has {len(own.get('groups', ()))} groups of parameters, this one "
                f"{len(self._optimizer.param_groups)}"
            )
        self._fill_optimizer()
        tensors = self._model() | self._optimized()
        random = torch.get_rng_state()
        is_same = own.get("places") == self._places
        if is_same:
            tensors[f"random.{self._rank}"] = random
        notes = checkpoints.load(step, tensors)
        for group, saved in zip(self._optimizer.param_groups, own["groups"], strict=True):
            group.update(saved)
        if is_same:
            torch.set_rng_state(random)
        else:
            torch.manual_seed((self._seed * 1_000_003 + step) * 65_537 + self._rank)
        return dict(notes["notes"])

    def _saved(self, name: str, value: Tensor) -> Saved:
        """Return a tensor that lies as the parameter `name`, as checkpoints take it."""
        value = value.detach()
        is_fused = name in self._ranges and isinstance(value, DTensor)
        return ShardPieces.of(value, self._ranges[name]) if is_fused else value

    def _model(self) -> dict[str, Saved]:
        return {
            f"model.{name}": self._saved(name, value)
            for module in self._modules
            for name, value in module.state_dict().items()
        }

    def _optimized(self) -> dict[str, Saved]:
        return {
            f"optimizer.{self._names[parameter]}.{key}": self._saved(self._names[parameter], value)
            for parameter, kept in self._optimizer.state.items()
            for key, value in kept.items()
            if isinstance(value, Tensor)
        }

    def _groups(self) -> list[dict[str, Any]]:
        """Return the settings of the optimizer's groups that JSON has."""
        simple = (bool, int, float, str, list, tuple, type(None))
        return [
            {key: value for key, value in group.items() if key != "params" and isinstance(value, simple)}
            for group in self._optimizer.param_groups
        ]

    def _fill_optimizer(self) -> None:
        """Let a fresh optimizer make its state: one step with gradients of zero and a rate of zero."""
        if self._optimizer.state:
            return
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        self._optimizer.step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _fused_ranges(module: nn.Module) -> dict[str, Ranges]:
    """Return the ranges of positions that this rank has of each fused parameter of a parallelised module."""
    ranges: dict[str, Ranges] = {}
    for path, child in module.named_modules():
        for name, layout in getattr(child, "layouts", {}).items():
            if layout.parts > 1:
                ranges[f"{path}.{name}" if path else name] = layout.ranges(child.layer_strategy)
    return ranges
