"""What transformers and torch offer that a parallelised model has not: one line each, that names what to use."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import call, is_
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.execute.torch import compat
from meshweave.nn.parallel.call_facts import CallInputs
from meshweave.nn.parallel.loss import IGNORED
from meshweave.nn.parallel.takeable import HOOKS

_SAVE = "mw.save_weights(module, folder) writes whole weights that from_pretrained reads"
_EARLIER = "do it before parallelize"
_ADAPTERS = "PEFT puts adapters into the model before parallelize, which takes LoRA of linear layers"
_METHODS = {
    "generate": f"tokens are not generated from parts of a model; {_SAVE}",
    "save_pretrained": _SAVE,
    "push_to_hub": f"{_SAVE}; push that folder",
    **dict.fromkeys(("add_adapter", "load_adapter", "set_adapter"), _ADAPTERS),
    "forward": "call the whole model",
    "_init_weights": "it goes by classes of layers, which are others now; initialise parameters by their names",
    "__deepcopy__": f"it has process groups and parts of weights, which are not copied; {_SAVE}",
    "share_memory": "memory of a rank's parts is not shared with other processes; share a model on one rank",
    "__reduce_ex__": f"it has process groups, which are not pickled; save its state_dict, or {_SAVE}",
}
"""Methods that are refused, each with what to use; other methods of transformers are to be called earlier."""
_KEPT = {
    "forward", "to", "half", "float", "cuda", "train", "eval", "can_generate", "num_parameters",
    "get_memory_footprint", "get_input_embeddings", "get_output_embeddings", "get_decoder", "get_encoder",
    "get_parameter_or_buffer", "gradient_checkpointing_enable", "gradient_checkpointing_disable",
    "activation_checkpointing_enable", "activation_checkpointing_disable", "enable_input_require_grads",
    "disable_input_require_grads", "get_experts_implementation", "is_remote_code",
    "named_non_persistent_buffers", "add_model_tags", "is_backend_compatible",
    "set_is_initialized_for_modules", "mark_tied_weights_as_initialized", "get_expanded_tied_weights_keys",
    "get_total_byte_count", "estimate_tokens", "floating_point_ops", "post_init",
}  # fmt: skip
"""Methods of transformers that read, or go on working."""
_ARGUMENTS = {
    "attention_mask": "models of plain torch take no masks, but of the end of rows whose labels there are -100",
    "position_ids": "positions of models of plain torch count from 0",
    "inputs_embeds": "give input_ids",
    "output_hidden_states": "take them from hooks on .blocks",
    "output_attentions": "weights of attention are not kept",
    "output_router_logits": "set it in the model's config, for all calls",
    "return_dict": "the result has loss and logits by these names",
    **dict.fromkeys(("logits_to_keep", "num_logits_to_keep"), "all logits are computed; labels gather none"),
    "num_items_in_batch": "the loss is the mean over all tokens; Trainer takes models of transformers",
    "shift_labels": "give targets=",
}
"""Arguments of forward passes that are refused where they would change something, each with what to use."""
_OF_CONFIG = {"output_hidden_states": True, "output_attentions": True, "return_dict": False}
"""What a configuration of transformers may give in the place of an argument, and would change the result."""
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "use_cache": (False,), "output_hidden_states": (False,), "output_attentions": (False,),
    "return_dict": (True,), "logits_to_keep": (0,), "num_logits_to_keep": (0,),
}  # fmt: skip
_IN_PLACE = "change values in place, as parameter.copy_(values) does under torch.no_grad()"


def refuse_features(module: nn.Module, layers: str, runs_own_code: bool, offered: Iterable[str] = ()) -> None:
    """Make the methods of transformers that would not work on a parallelised model raise UnsupportedError.

    Copying, pickling, shared memory, DDP, adapters of PEFT and loading tensors placed otherwise are refused, too.

    Args:
        module: the model, changed in place.
        layers: the name of its list of layers.
        runs_own_code: whether modules in it that hold this list run their own `forward`; else that is refused.
        offered: names of methods of the module itself that stay as they are.
    """
    for child in module.modules():
        if child is module or hasattr(child, "save_pretrained"):
            refused = _of_transformers(type(child)) | {"__deepcopy__", "__reduce_ex__", "share_memory"}
            for name in sorted(refused - {*offered} if child is module else refused & {*_METHODS}):
                setattr(child, name, _refusal(type(child).__name__, name))
    while not runs_own_code and (layers := layers.rpartition(".")[0]):
        inner = module.get_submodule(layers)
        inner.forward = _refusal(type(inner).__name__, "forward")
    module._ddp_params_and_buffers_to_ignore = _WithoutDdp()
    module.peft_config = _WithoutAdapters()
    module.register_load_state_dict_pre_hook(_refuse_other_layouts)


def _of_transformers(kind: type) -> set[str]:
    """Return the names of methods that a class has of transformers, but for those that go on working."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("transformers.")]
    named = (
        item for base in bases for item in vars(base).items() if item[0][0] != "_" or item[0] in _METHODS
    )
    return {name for name, value in named if inspect.isfunction(value)} - _KEPT


class PlacedModules:
    """The modules and parameters that a parallelised model computes with, noted so that `check` finds changes.

    Args:
        module: the parallelised model.
        layers: the name of its list of layers; each may be wrapped later, for the model calls what is there.
        called: the modules that the model calls, so that hooks on them run; None for all.
    """

    def __init__(self, module: nn.Module, layers: str, called: Iterable[Any] | None = None) -> None:
        placed = [
            (owner._modules, name, child, f"{path}.{name}" if path else name)
            for path, owner in module.named_modules()
            for name, child in owner._modules.items()
            if path != layers
        ]
        every, firsts = module.named_parameters(remove_duplicate=False), dict[int, str]()
        self._firsts = {name: firsts.setdefault(id(p), name) for name, p in every if isinstance(p, DTensor)}
        self._memory = {name: _memory(module.get_parameter(name)) for name in firsts.values()}
        owners = [
            (owner._parameters, key, f"{path}.{key}" if path else key, owner, len(owner._parameters))
            for path, owner in module.named_modules()
            for key in owner._parameters
        ]
        self._placed, self._owners = list(zip(*placed, strict=True)), list(zip(*owners, strict=True))
        self._passed: tuple[list[int], list[Callable[[], Tensor | None]]] = [], []
        named = () if called is None else module.named_modules()
        are_called = {id(module), *map(id, called or ())}
        self._uncalled = [(path, vars(child)) for path, child in named if id(child) not in are_called]
        self._unused_hooks = [own[kind] for _, own in self._uncalled for kind in HOOKS]

    def check(self) -> None:
        """Raise UnsupportedError, naming the first module replaced, or with what would not run, or the first
        parameter added, replaced, tied or removed since it was noted, on the meta device or with `.data` set.
        """
        unused = [(path, own["forward"]) for path, own in self._uncalled if "forward" in own]
        if any(self._unused_hooks):
            hooked = [(path, own[kind]) for path, own in self._uncalled for kind in HOOKS]
            unused += [(path, hook) for path, hooks in hooked for hook in hooks.values()]
        if name := next((path for path, each in unused if _is_of_user(each)), None):
            raise UnsupportedError(
                f"{name} has a hook, or a forward set on it, which would not run: its layer computes with its "
                "weights, and does not call it; those of whole layers, norms, activations, the embedding and the "
                "model run"
            )
        modules, names, children, _ = self._placed
        if not all(map(is_, map(dict.get, modules, names), children)):
            self._check_modules()
        tables, keys, *_ = self._owners
        parameters = [each for each in map(dict.get, tables, keys) if isinstance(each, DTensor)]
        numbers, held = [*map(len, tables), *_numbers(parameters)], compat.local_tensors(parameters)
        before, own = self._passed
        if numbers != before or not all(map(is_, held, map(call, own))):
            self._check_memory()
            self._passed = numbers, list(map(weakref.ref, held))

    def _check_modules(self) -> None:
        for modules, name, child, path in zip(*self._placed, strict=True):
            now = modules.get(name)
            if now is not child:
                raise UnsupportedError(
                    f"{path} is a {type(now).__name__} that was put there after parallelize, and is not computed; "
                    "adapters are merged before it, and wrappers go around whole layers"
                )

    def _check_memory(self) -> None:
        seen: dict[int, str] = {}
        for parameters, key, name, owner, count in zip(*self._owners, strict=True):
            parameter = parameters.get(key)
            if key not in parameters and not hasattr(type(owner), key):  # which is computed at each use
                raise UnsupportedError(
                    f"{name} is no parameter any more, as after pruning, and ranks would use the one of the last "
                    "call: do it before parallelize, and make it permanent"
                )
            own = name in self._firsts and isinstance(parameter, Tensor)
            at = seen.setdefault(id(parameter), name) if isinstance(parameter, DTensor) and own else ""
            is_other = own and at != self._firsts[name]  # of tied ones the first name
            if is_other or (len(parameters) > count and type(owner).__module__.startswith("meshweave.")):
                put = name if is_other else f"a parameter beside {name}"
                raise UnsupportedError(
                    f"{put} was put there after parallelize, and is not computed: {_IN_PLACE}, or do it before"
                )
            if isinstance(parameter, DTensor):
                if compat.local_tensor(parameter).is_meta:
                    raise UnsupportedError(
                        f"{name} is on the meta device: to_empty() gives it memory, and load_weights or an "
                        "initialisation values, before a call"
                    )
                self._check_data(name, parameter)

    def _check_data(self, name: str, parameter: DTensor) -> None:
        """Raise UnsupportedError where `.data` of a parameter was assigned: a DTensor takes no notice of it."""
        now = _memory(parameter)
        before = self._memory.get(name, now)
        if now[0] != before[0] and before[1]() is compat.local_tensor(parameter):
            raise UnsupportedError(
                f"{name}.data was assigned, of which a DTensor takes no notice: {_IN_PLACE}"
            )
        self._memory[name] = now


def _is_of_user(hook: Any) -> bool:
    """Return whether a hook is none of those by which `mw.prove` looks at modules."""
    return not str(getattr(hook, "__module__", "")).startswith("meshweave.")


def _memory(parameter: DTensor) -> tuple[int, Callable[[], Tensor | None]]:
    """Return the number of a DTensor's own memory, in which nothing lies, and what says its local tensor."""
    (number,) = _numbers([parameter])
    return number, weakref.ref(compat.local_tensor(parameter))


def _numbers(tensors: Sequence[Tensor]) -> list[int]:
    """Return numbers of the memory of tensors: of a DTensor its own, not that of its local tensor."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


class _WithoutDdp:
    """Stands where DDP looks for parameters to leave out when it is made around a model."""

    def __iter__(self) -> NoReturn:
        raise UnsupportedError(
            "DDP does not take parameters that are DTensors; take FSDP2 (fully_shard) over another mesh dim, "
            "or a plan with an axis of data parallelism"
        )


def _refuse_other_layouts(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: Any
) -> None:
    """Raise LayoutError where tensors of a state dict cannot stand for the parameters of a parallelised model."""
    assigns = metadata.get("assign_to_params_buffers", False)
    for name, own in module.named_parameters():
        given = state.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(given, Tensor):
            continue
        if not isinstance(given, DTensor):
            raise LayoutError(
                f"{name} of this state dict is a whole tensor, and the model's lies on ranks: "
                "mw.load_weights(module, folder) reads whole weights"
            )
        if given.device_mesh.get_coordinate() != own.device_mesh.get_coordinate():
            raise LayoutError(
                f"{name} of this state dict is the part of another rank, which saved it: each rank saves and "
                "loads its own, or all save by mw.save_weights(module, folder) or mw.Checkpoints"
            )
        if assigns and (given.device_mesh, given.placements) != (own.device_mesh, own.placements):
            raise LayoutError(
                f"{name} of this state dict lies as {given.placements}, the model's as {own.placements}: load it "
                "without assign=True"
            )


class _WithoutAdapters:
    """Stands where PEFT lists the adapters of a model before it puts the first one into it."""

    def update(self, *args: Any) -> NoReturn:
        """Raise UnsupportedError, as `__setitem__` does."""
        self["adapters"] = args

    def __setitem__(self, name: str, config: Any) -> NoReturn:
        raise UnsupportedError(
            "adapters are not put into a parallelised model: get_peft_model() comes before parallelize, which "
            "takes LoRA of linear layers; merge_and_unload() others and parallelize the result"
        )


class NoModuleError(UnsupportedError, AttributeError):
    """Raised where a wrapper is used as an `nn.Module`; its attribute `module` is one."""


class AroundModule:
    """A wrapper that has an `nn.Module` as `module`, and is itself no `nn.Module`.

    Reading an attribute that an `nn.Module` would have raises NoModuleError, iteration UnsupportedError.
    """

    _ddp_params_and_buffers_to_ignore = _WithoutDdp()

    if not TYPE_CHECKING:  # other attributes than these are to be declared

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self).__name__
            if name.startswith("__") or not hasattr(nn.Module, name):
                raise AttributeError(f"'{kind}' object has no attribute '{name}'")
            raise NoModuleError(f"a {kind} is no nn.Module and has no {name}: take its .module")

    def __iter__(self) -> NoReturn:
        kind = type(self).__name__
        raise UnsupportedError(f"a {kind} is no nn.Module, and no list of them: take its .module")


def _refusal(model: str, name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{model} is parallelised, without {name}: {_METHODS.get(name, _EARLIER)}")

    refuse.__name__ = name
    return refuse


class ForwardArguments:
    """The arguments of a module's own forward pass, which callers still give once it is parallelised.

    Args:
        module: the module; the arguments are those of the `forward` of its class.
        has_shift: whether labels are shifted by one to make targets.
    """

    def __init__(self, module: nn.Module, has_shift: bool) -> None:
        self.module, self.has_shift = module, has_shift
        names = list(inspect.signature(type(module).forward).parameters)[2:]
        self.names = names if {"labels", "targets"} & {*names} else ["labels"][: not (names and has_shift)]

    def inputs(
        self, tokens: Tensor | None, args: tuple[Any, ...], given: dict[str, Any], targets: Tensor | None
    ) -> CallInputs:
        """Return what a call computes with beside tokens, after a check: targets and the arguments it takes.

        Args:
            tokens: the first argument, (batch, sequence).
            args, given: further arguments of the forward, by position and by name.
            targets: for each token the one to predict; None to make them of the argument `labels`, if it is given.

        Raises:
            LayoutError: tokens are no tensor, there are too many arguments, targets and labels are both given, or
                an argument has a shape or value that a subclass does not take.
            UnsupportedError: an argument, or a loss function set on the module, that is not computed.
        """
        if len(args) > len(self.names):
            said = ", ".join(("tokens", *self.names))
            raise LayoutError(f"forward takes {said} by position, and targets= or labels= by name")
        given = {**self._of_config(), **dict(zip(self.names, args, strict=False)), **given}
        labels, targets = given.pop("labels", None), given.pop("targets", targets)
        if labels is not None and targets is not None:
            raise LayoutError("labels and targets= are both given: give one of them")
        if labels is not None and self.has_shift:
            targets = given.pop("shift_labels", None)
        if not isinstance(tokens, Tensor):
            raise LayoutError("give input_ids: whole numbers (batch, sequence)")
        taken = {}
        for name, value in given.items():
            if value is None:
                continue
            if self.takes(name, value, tokens):
                taken[name] = value
            elif not self._changes_nothing(name, value, tokens, labels, targets):
                raise UnsupportedError(f"{name} is not computed: {self.why_not(name)}")
        if labels is None or targets is not None:
            return self.call_inputs(tokens, targets, taken)
        if "_loss_function" in vars(self.module):
            raise UnsupportedError(
                "loss_function is not computed: the loss is that of causal language models"
            )
        shifts = self.has_shift and labels.ndim == 2  # other shapes are told to all ranks
        if shifts:
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return self.call_inputs(tokens, labels, taken)

    def _of_config(self) -> dict[str, Any]:
        """Return the arguments that the configuration of the model gives to each call that does not."""
        configs = [vars(each).get("config") for each in (self.module, *self.module.children())]
        has = {name: [getattr(each, name, None) for each in configs] for name in _OF_CONFIG}
        return {name: value for name, value in _OF_CONFIG.items() if any(each is value for each in has[name])}

    def why_not(self, name: str) -> str:
        """Return, as text for an error, why the argument `name` has no effect, or what to use in its place."""
        return _ARGUMENTS.get(name, "forward does not take it")

    def takes(self, name: str, value: Any, tokens: Tensor) -> bool:
        """Return whether calls on `tokens` compute with the argument `name`; False for all in this class.

        Subclasses return True for some, and raise MeshweaveError for a `value` of these that they do not compute.
        """
        return False

    def call_inputs(self, tokens: Tensor, targets: Tensor | None, taken: Mapping[str, Any]) -> CallInputs:
        """Return the inputs of a call on `tokens`: `targets`, and the arguments `taken`, by name."""
        return CallInputs(targets, taken)

    def _changes_nothing(
        self, name: str, value: Any, tokens: Tensor, labels: Tensor | None, targets: Tensor | None
    ) -> bool:
        """Return whether an argument has the value by which a forward pass is as without it."""
        if name == "attention_mask" and isinstance(value, Tensor) and value.shape == tokens.shape:
            return _is_at_end(value.bool(), labels if targets is None else targets)
        if name == "position_ids" and isinstance(value, Tensor):
            fits = value.shape[-1:] == tokens.shape[1:]
            return fits and bool((value == torch.arange(tokens.shape[1], device=value.device)).all())
        return not isinstance(value, Tensor) and value in _NOTHING.get(name, ())


def _is_at_end(mask: Tensor, targets: Tensor | None) -> bool:
    """Return whether a mask leaves out nothing, or tokens at the ends of rows that have no targets."""
    if bool(mask.all()):
        return True
    if targets is None or targets.shape != mask.shape:
        return False
    is_suffix = bool((mask[:, 1:] <= mask[:, :-1]).all())
    return is_suffix and bool((targets[~mask] == IGNORED).all())
