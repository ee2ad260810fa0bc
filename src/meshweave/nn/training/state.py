"""What a rank has to save of a training: modules, optimizer and random state, as tensors with global names.

names                         tensors
----------------------------  --------------------------------------------------------------------------------
`model.<name>`                parameters and buffers, by their names in the modules
`optimizer.<name>.<key>`      what the optimizer keeps of the parameter of that name, such as `exp_avg` and `step`
`random.<rank>`               the state of torch's random number generator of a rank
`random.<rank>.<device>`      that of the device that the rank uses, such as `cuda`, where it is not the CPU

Names do not depend on the mesh or the stages, so that others load them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshweave.base.errors import LayoutError
from meshweave.execute.torch import compat
from meshweave.nn.parallel.parameters import ranges_of
from meshweave.nn.training.checkpoints import Checkpoints
from meshweave.nn.training.manifest import Manifest, checked_notes
from meshweave.nn.training.pieces import Ranges, Saved, ShardPieces
from meshweave.nn.weights.blocks import other_copy, sizes_of, sums_of_parts
from meshweave.nn.weights.slots import plain_name


class TrainingState:
    """The state of a training on one rank.

    Args:
        modules: of this rank, such as its stages. Names of parameters and buffers must differ among them.
        optimizer: of some or all of their parameters, and of no others.
        rank: this rank.
        places: a JSON value that says how ranks share the model. A training resumed with an equal value on as many
            ranks gets the random states that were saved. Else generators are seeded from `seed`, the step, and
            torch's present seed, which ranks that share a model must have set alike.
        seed: see `places`.

    Raises:
        LayoutError: two modules have a parameter or a buffer of one name.
        CheckpointError: `places` is no JSON.
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
        self._rank, self._seed = rank, seed
        self._places = checked_notes({"places": places})["places"]
        self._names: dict[Tensor, str] = {}
        seen: set[str] = set()
        for module in self._modules:
            names = {plain_name(name) for name in module.state_dict()}
            if twice := sorted(names & seen):
                raise LayoutError(f"two modules have a tensor '{twice[0]}'; names must differ among modules")
            seen |= names
        self._ranges: dict[str, Ranges] = {}
        for module in self._modules:
            tied = vars(module).get("_meshweave_tied", {})
            self._names |= {
                parameter: plain_name(tied.get(name, name)) for name, parameter in module.named_parameters()
            }
            self._ranges |= {
                plain_name(name): own for name, own in ranges_of(module).items() if _is_fused(own)
            }

    def save(self, checkpoints: Checkpoints, step: int, notes: Mapping[str, Any] | None = None) -> None:
        """Save the state after `step` steps in the background, with `notes`, which are JSON values. Collective.

        Raises:
            CheckpointError: on all ranks, where one of them has what cannot be saved, or an optimizer with a
                parameter of none of its modules; where ranks have other values of one parameter; where another
                job saves into the folder; or where the save before this one failed.
            RankLostError, DeadlineError: other ranks are missing or late, also in the save before this one.
        """
        tensors = {**self._model(), f"random.{self._rank}": torch.get_rng_state(), **self._of_devices()}
        wrong, sums = "", dict[str, dict[str, str]]()
        try:
            tensors |= self._optimized()
            if checkpoints.num_ranks > 1:
                sums = sums_of_parts((name, parameter) for parameter, name in self._names.items())
        except LayoutError as error:
            wrong = str(error)
        told = checkpoints.refuse_together(
            step, wrong and f"cannot be saved: {wrong}", [self._members(), sums]
        )
        if wrong := other_copy([each[1] for each in told]):  # on all ranks
            checkpoints.refuse_together(step, f"cannot be saved: {wrong}")
        members = _of_all_ranks([each[0] for each in told])
        own = {"places": self._places, "groups": self._groups(), "members": members}
        checkpoints.save(step, tensors, {"training": own, "notes": dict(notes or {})})

    def load(
        self,
        checkpoints: Checkpoints,
        step: int,
        *,
        casts: bool = False,
        extra: bool | Callable[[str], bool] = False,
    ) -> dict[str, Any]:
        """Load the state after `step` steps in place; return the notes that were saved with it. Collective.

        Parameters of which the checkpoint has no state of an optimizer, as before the first step, have none
        here afterwards. Groups of parameters get the settings that their parameters were saved with, in whichever
        order they are.

        Args:
            casts: whether a tensor of one floating-point dtype may be loaded into another.
            extra: whether the checkpoint may have tensors that no rank takes; or a function of a tensor's name
                that says it of that one.

        Raises:
            CheckpointError: the checkpoint is harmed, or of another model or optimizer, or an optimizer has state
                of a parameter of no module; on all ranks, and then nothing here has changed, unless the message
                says so.
            RankLostError, DeadlineError: other ranks are missing or late.
        """
        manifest = checkpoints.manifest(step)
        own, notes, wrong = self._checked(manifest.notes)
        stateful = {name.removeprefix("optimizer.").rpartition(".")[0] for name in _of_optimizer(manifest)}
        num_random = sum(name.removeprefix("random.").isdigit() for name in manifest.tensors)
        is_same = own.get("places") == self._places and num_random == checkpoints.num_ranks
        made: list[Tensor] = []
        if not wrong:
            try:
                made = self._fill_optimizer(stateful)
                self._optimized(stateful)
            except LayoutError as error:
                wrong = f"cannot be loaded: {error}"
            except Exception as error:
                wrong = f"cannot be loaded: the optimizer makes no state ({type(error).__name__}: {error})"
        try:
            here = _of_all_ranks(checkpoints.refuse_together(step, wrong, self._members()))
            settings, wrong = _settings_here(own["groups"], own.get("members"), here)
            if wrong:  # on all ranks
                checkpoints.refuse_together(step, wrong)
            random = self._load(checkpoints, manifest, stateful, is_same, casts, extra)
        except BaseException:
            for parameter in made:
                del self._optimizer.state[parameter]
            raise
        for parameter in [each for each in self._optimizer.state if self._names.get(each) not in stateful]:
            del self._optimizer.state[parameter]
        for group, saved in zip(self._optimizer.param_groups, settings, strict=True):
            for key, value in saved.items():
                if key in _NOT_SAVED:  # of earlier versions
                    continue
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        if random is not None:
            torch.set_rng_state(random)
        else:
            # Ranks that share a model were seeded alike, and stay so: their copies drop the same.
            seed = (self._seed * 1_000_003 + step) * 65_537 + torch.initial_seed() % 65_521
            torch.manual_seed(seed % 2**63)  # it takes no more bits
        return notes

    def _load(
        self,
        checkpoints: Checkpoints,
        manifest: Manifest,
        stateful: Collection[str],
        is_same: bool,
        casts: bool,
        extra: bool | Callable[[str], bool],
    ) -> Tensor | None:
        """Load the tensors. Return the random state, where it is one of these places."""
        random, of_devices, step = torch.get_rng_state(), self._of_devices(), manifest.step
        tensors = {**self._model(), **self._optimized(stateful)}
        numbers = {
            name: value for name, value in tensors.items() if not isinstance(value, Tensor | ShardPieces)
        }
        tensors |= {name: _as_tensor(value) for name, value in numbers.items()}
        if is_same:
            tensors[f"random.{self._rank}"] = random
            tensors |= {name: own for name, own in of_devices.items() if name in manifest.tensors}

        def is_extra(name: str) -> bool:
            return name.startswith("random.") or (extra(name) if callable(extra) else extra)

        saved_as = {
            plain_name(name): name for name in manifest.tensors
        }  # earlier versions kept names of wrappers
        given = {saved_as.get(name, name): value for name, value in tensors.items()}
        checkpoints.load(step, given, casts=casts, extra=is_extra)
        wrong = ""
        try:
            torch.Generator().set_state(random)
            for name, own in of_devices.items():
                if name in tensors:
                    torch.get_device_module(name.rpartition(".")[2]).set_rng_state(own)
        except RuntimeError:
            wrong = f"has a random.{self._rank} that is no state of a generator"
        try:
            self._take_made(tensors)
        except Exception as error:
            wrong = f"has a state that a module does not take ({type(error).__name__}: {error})"
        checkpoints.refuse_together(step, wrong and f"{wrong}; the tensors here have been read")
        for parameter, kept in self._optimizer.state.items():
            for key, value in kept.items():
                if (name := f"optimizer.{self._names[parameter]}.{key}") in numbers:
                    kept[key] = type(value)(tensors[name].item())
        return random if is_same else None

    def _checked(self, notes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
        """Return what `save` noted, the notes that it was given, and in words why they do not fit here."""
        own, given = notes.get("training"), notes.get("notes")
        groups = own.get("groups") if isinstance(own, dict) else None
        if not isinstance(own, dict) or not isinstance(given, dict) or not isinstance(groups, list):
            return {}, {}, "was not saved by a TrainingState"
        own.setdefault("places", None)
        if len(groups) != len(self._optimizer.param_groups):
            here = len(self._optimizer.param_groups)
            wrong = f"has an optimizer of {len(groups)} groups of parameters, and this one has {here}"
            return own, given, wrong
        for group in groups:
            if not isinstance(group, dict) or "params" in group or not all(map(_is_setting, group.values())):
                return own, given, "has settings of an optimizer that are no settings"
        members = own.get("members", [[]] * len(groups))  # earlier versions kept none
        are_lists = isinstance(members, list) and [type(names) for names in members] == [list] * len(groups)
        if not are_lists or not all(isinstance(name, str) for name in chain(*members)):
            return own, given, "has groups of an optimizer that are no lists of names"
        return own, given, ""

    def _saved(self, name: str, value: Tensor) -> Saved:
        """Return a tensor that lies as the parameter `name`, as checkpoints take it."""
        value = value.detach()
        ranges = self._ranges.get(name)
        if isinstance(value, DTensor) and ranges and sizes_of(ranges) == compat.local_tensor(value).shape:
            return ShardPieces.of(value, ranges)  # else it lies otherwise, as a state may
        return value

    def _of_devices(self) -> dict[str, Tensor]:
        """Return the states of the generators of devices other than the CPU that parameters are on."""
        kinds = {parameter.device.type for parameter in self._names} - {"cpu", "meta"}
        return {
            f"random.{self._rank}.{kind}": torch.get_device_module(kind).get_rng_state()
            for kind in sorted(kinds)
        }

    def _model(self) -> dict[str, Any]:
        return {
            f"model.{name}": self._saved(name, value) if isinstance(value, Tensor) else value
            for module in self._modules
            for name, value in ((plain_name(key), each) for key, each in module.state_dict().items())
        }

    def _take_made(self, tensors: Mapping[str, Any]) -> None:
        """Give modules what they had made for their `state_dict`, such as `_extra_state`, and was loaded."""
        for module in self._modules:
            own = {id(each) for each in (*module.parameters(), *module.buffers())}
            kept = module.state_dict(keep_vars=True)
            made = {
                name: tensors[f"model.{plain_name(name)}"]
                for name, value in kept.items()
                if id(value) not in own
            }
            if made:
                module.load_state_dict(made, strict=False)

    def _optimized(self, stateful: Collection[str] | None = None) -> dict[str, Any]:
        """Return what the optimizer keeps of parameters, of all or of those named, and None of nothing.

        What is neither a tensor nor a number stays what it is, and is refused where it is saved.
        """
        state: dict[str, Any] = {}
        for parameter, kept in self._optimizer.state.items():
            if (name := self._names.get(parameter)) is None:
                raise LayoutError("the optimizer has a parameter of no module here; give all modules")
            for key, value in kept.items():
                if value is not None and (stateful is None or name in stateful):
                    own = self._saved(name, value) if isinstance(value, Tensor) else value
                    state[f"optimizer.{name}.{key}"] = _as_tensor(own) if stateful is None else own
        return state

    def _groups(self) -> list[dict[str, Any]]:
        """Return the settings of the optimizer's groups that JSON has, rates that are tensors among them."""
        groups = [
            {key: _plain(value) for key, value in each.items()} for each in self._optimizer.param_groups
        ]
        return [{k: v for k, v in each.items() if k not in _NOT_SAVED and _is_setting(v)} for each in groups]

    def _members(self) -> list[list[str]]:
        """Return for each of the optimizer's groups the names of its parameters on this rank."""
        groups = self._optimizer.param_groups
        return [[self._names[each] for each in group["params"] if each in self._names] for group in groups]

    def _fill_optimizer(self, stateful: Collection[str]) -> list[Tensor]:
        """Let the optimizer make state of the parameters named that have none. Return these.

        It takes one step in which only they have gradients, of zero, at a rate of zero. Hooks on steps that
        others have set, such as one that averages weights, are not run.
        """
        groups = self._optimizer.param_groups
        parameters = [each for group in groups for each in group["params"]]
        made = [
            each
            for each in parameters
            if self._names.get(each) in stateful and not self._optimizer.state.get(each)
        ]
        if not made:
            return []
        gradients = [parameter.grad for parameter in parameters]
        rates = [group["lr"] for group in groups]
        lacking, hooks = set(made), compat.other_step_hooks(self._optimizer)
        for table, key, _ in hooks:
            del table[key]
        try:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter in lacking else None
            for group in groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            self._optimizer.step()
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            for table, key, hook in hooks:
                table[key] = hook
        return [each for each in made if each in self._optimizer.state]


_NOT_SAVED = ("params", "param_names")
"""Of an optimizer's groups: which parameters are in them on one rank; `members` of the notes has those of all."""


def _of_all_ranks(members: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Return for each group of an optimizer the names of its parameters on any rank, of those on each rank."""
    return [sorted({*chain.from_iterable(names)}) for names in zip_longest(*members, fillvalue=())]


def _settings_here(
    groups: Sequence[dict[str, Any]], members: Sequence[Sequence[str]] | None, here: Sequence[Sequence[str]]
) -> tuple[Sequence[dict[str, Any]], str]:
    """Return for each group here the settings that its parameters were saved with, or in words why not.

    Args:
        groups: the settings that were saved.
        members: the names of the parameters of each of these groups; None where they were not saved, and groups
            have the order of those here.
        here: the names of the parameters of each group here. One of which none was saved keeps its settings.
    """
    if members is None:
        return groups, ""
    was_in = {name: at for at, names in enumerate(members) for name in names}
    settings: list[dict[str, Any]] = []
    for names in here:
        first, *others = [name for name in names if name in was_in] or [""]
        settings.append(groups[was_in[first]] if first else {})
        if other := next((name for name in others if groups[was_in[name]] != settings[-1]), ""):
            return [], (
                f"has '{first}' and '{other}' in groups of an optimizer with different settings, and here they "
                "are in one; put parameters into groups as they were saved"
            )
    return settings, ""


def _of_optimizer(manifest: Manifest) -> list[str]:
    return [plain_name(name) for name in manifest.tensors if name.startswith("optimizer.")]


def _as_tensor(value: Any) -> Any:
    """Return a number as a tensor, and anything else as it is."""
    return torch.tensor(value, dtype=_OF_NUMBERS[type(value)]) if type(value) in _OF_NUMBERS else value


_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_fused(ranges: Ranges) -> bool:
    return any(len(runs) > 1 for runs in ranges)


def _is_setting(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return isinstance(value, bool | int | float | str | None)
