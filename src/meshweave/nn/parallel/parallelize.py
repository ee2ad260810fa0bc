"""`meshweave.parallelize`: a plan put into a model, after a proof that its layers compute what they did before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshweave.algorithms.block import BlockConfig
from meshweave.algorithms.block.problem import Overlap
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.execute.torch.call_order import call_order, require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.host_memory import keep_freed_memory
from meshweave.nn.hosted.adapters import TakenAdapter, all_trained, put_in, without_adapters
from meshweave.nn.hosted.expert_parts import is_experts
from meshweave.nn.hosted.model import HostedModel
from meshweave.nn.hosted.offered import offer_methods
from meshweave.nn.hosted.parts import names_of
from meshweave.nn.parallel.features import refuse_features
from meshweave.nn.parallel.known import is_hosted, recognised, title_of, why_unlikely
from meshweave.nn.parallel.model import ParallelModel
from meshweave.nn.parallel.optimizers import watch_optimizers
from meshweave.nn.parallel.plans import PlanLike, ResolvedPlan, device_type_of, resolve
from meshweave.nn.parallel.reports import ModelSettings
from meshweave.nn.parallel.same_model import ranks_of, require_same_model
from meshweave.nn.parallel.seeds import keep_generators, share_generators
from meshweave.nn.parallel.structure import ModelMap, check_modules
from meshweave.nn.parallel.takeable import check_takeable, check_unaltered, forget_recorders
from meshweave.nn.parallel.trials import Trials, by_trial
from meshweave.nn.parallel.whole_values import watch_values
from meshweave.nn.prove.check import check_layers

_LOG = logging.getLogger(__name__)


def parallelize(
    module: nn.Module,
    plan: PlanLike,
    device_mesh: DeviceMesh | None = None,
    *,
    mapping: ModelMap | None = None,
    config: BlockConfig | None = None,
    overlap: Overlap | None = None,
    check: bool = True,
    context: TorchContext | None = None,
    broadcast_weights: bool = False,
    debug_every: int = 0,
    trials: Trials | None = None,
) -> ParallelModel:
    """Put a plan into a model of torch, in place: its layers then run the programs of the plan's strategy.

    Every rank of the mesh has the same module, with the same weights or on the meta device, and calls this. Models
    of transformers run by the code of their class, those of plain torch in the style of GPT-2 and Llama are
    recognised by the names of their modules. What is refused stays as it was.

    Args:
        module: the model.
        plan: the name of a strategy ("megatron_sp", "atp", "meshslice_block", ...), which takes its sizes from
            `device_mesh`, or from its name ("megatron:4", "atp:2x2"); a `Parallelism`, a `Step`, what
            `meshweave.plan` returned, or the path of a plan file; or "auto", with `trials`, for the fastest of
            some that are tried.
        device_mesh: a mesh with a dim for each axis of the strategy: one for "megatron" and "zero3", two for "atp"
            and "summa_block", three for "25d_block". None makes one of all ranks, on the
            model's kind of device, for a plan with sizes.
        mapping: which modules of a model of plain torch are which, where they are not recognised.
        config: chunks of the batch and slices of 2D products; None as the plan says.
        overlap: "sites" takes a plan that counts on overlap "layers" all the same. Here communication runs beside
            the product that it belongs to, and nothing else; None refuses a plan that counts on more.
        check: prove first that layers compute what the model's own forward pass does, as `prove` does, on copies
            with few layers and words; False trains it unproved, and says so in the log.
        context: deadline and liveness of every wait for other ranks, here and in the layers; default: that of the
            default process group, 60 s. The same one may be given to `pipeline` and `Checkpoints`.
        broadcast_weights: the weights of the mesh's first rank are those of all. Without, ranks that have others
            are an error.
        debug_every: in the first forward call and in each `debug_every`-th ranks compare all that they must have
            alike, copies of weights and modes of modules among it; 0 for the first alone.
        trials: what plan "auto" tries, on copies of the model; the table of it is `trials` of the result. Ignored
            with another plan.

    Returns:
        The model, to train: see `ParallelModel`.

    Raises:
        UnsupportedError: the model is none that is known, has parameters that would not take part, or hooks,
            wrappers or gradients that would be lost; there is no such strategy; degrees have pipeline ranks and
            no `device_mesh` is given, or shard weights in groups of replicas; or `mapping` is given for a
            model of transformers.
        LayoutError: `module` is no `nn.Module`; "auto" comes without `trials` or with a mesh; the plan does not
            fit the mesh, or the sizes of the model do not fit the plan; or ranks give other models, arguments,
            versions or settings: on all of them, before anything is replaced.
        PlanError: the plan counts on overlap that is not obtained here, or no plan of `trials` could be run.
        DescriptionError: a plan file is wrong.
        ProofError: the model is not what it was taken for; it is as it was.
        RankLostError, DeadlineError: other ranks are missing or late.
        BindError: other ranks are in another call, or there is no process group.
    """
    if not isinstance(module, nn.Module):
        raise LayoutError(
            f"parallelize takes a model, and was given {type(module).__name__}: make the torch.nn.Module first, "
            "as AutoModelForCausalLM.from_config does of a config of transformers"
        )
    require_process_group()
    device = device_type_of(module) if device_mesh is None else device_mesh.device_type
    if isinstance(plan, str) and plan == "auto":
        options: dict[str, Any] = {
            "mapping": mapping, "config": config, "overlap": overlap, "context": context,
            "broadcast_weights": broadcast_weights, "debug_every": debug_every,
        }  # fmt: skip
        with keep_generators(device):
            make = partial(parallelize, **options)
            chosen: ParallelModel = by_trial(module, device_mesh, trials, make, check=check, context=context)
        share_generators(chosen.strategy)
        return chosen
    own = context or TorchContext.default(device)
    given = {
        "plan": plan, "mapping": mapping, "config": config, "overlap": overlap, "check": check,
        "debug_every": debug_every,
    }  # fmt: skip
    with share_refusal(own, ranks_of(device_mesh), "parallelize"), keep_generators(device):
        forget_recorders(module)
        check_unaltered(module)
        require_same_model(own, module, device_mesh, given, broadcast_weights=broadcast_weights)
        before = dict(module.named_parameters())
        with without_adapters(module, is_hosted(module)) as adapters:
            resolved = resolve(plan, device_mesh, config, overlap, context, device)
            try:
                model = _made(module, mapping, resolved, check, debug_every, adapters)
            except UnsupportedError as error:
                if is_hosted(module) and (words := why_unlikely(module)):
                    raise UnsupportedError(f"{words} ({error})") from error
                raise
            put_in(model, adapters)
        if not model.strategy.is_alone:  # ranks count calls alike, and have had some since the last model
            model.agreement.number = call_order(own).sequence(model.strategy.mesh.ranks).count
    share_generators(model.strategy)
    if device == "cpu":
        keep_freed_memory()
    model.context = context
    watch_optimizers(model.agreement, before)
    watch_values(model.agreement)
    refuse_features(module, model.names.layers, isinstance(model, HostedModel), offer_methods(model))
    return model


def _made(
    module: nn.Module,
    mapping: ModelMap | None,
    plan: ResolvedPlan,
    check: bool,
    debug_every: int,
    adapters: Sequence[TakenAdapter],
) -> ParallelModel:
    """Return a model with a plan in it, which is proved first if `check`."""
    adapted = tuple(each.path for each in adapters)
    title, names, make = _maker(module, mapping, plan)
    is_own = not isinstance(names, ModelMap)
    check_takeable(module, names.embedding, names.head, names.positions, adds_bias=is_own)
    strategy = plan.strategy
    if check:
        _LOG.info("proving the plan on copies of the layers of %s", type(module).__name__)
        with all_trained(module):
            proved = check_layers(module, names, strategy, lambda part: make(part, "", 0), title)
        return make(module, proved, debug_every, adapted)
    level = logging.WARNING if strategy.rank == strategy.mesh.ranks[0] else logging.DEBUG
    _LOG.log(level, "%s is parallelised unproved: check=False", type(module).__name__)
    return make(module, "nothing (check=False)", debug_every, adapted)


def _maker(
    module: nn.Module, mapping: ModelMap | None, plan: ResolvedPlan
) -> tuple[str, Any, Callable[..., ParallelModel]]:
    """Return what a model is taken for, the names of its modules, and what parallelises it or a copy in place.

    The last takes the model and the arguments of `ModelSettings.of`.
    """
    strategy = plan.strategy
    if "expert" in strategy.roles.expert_dims and not any(map(is_experts, module.modules())):
        raise LayoutError(
            f"the plan has ranks that share experts, and {type(module).__name__} has no experts: give expert=1"
        )
    if is_hosted(module):
        if mapping is not None:
            raise UnsupportedError(
                f"{type(module).__name__} runs by its own code: leave out mapping=, which is for plain torch"
            )
        title, own = title_of(module), names_of(module)
        settings = ModelSettings(strategy, title, plan.recompute)
        return title, own, lambda part, *rest: HostedModel(part, settings.of(*rest))
    title, names = ("as mapped", mapping) if mapping is not None else recognised(module)
    check_modules(module, names)
    settings = ModelSettings(strategy, title, plan.recompute)
    return title, names, lambda part, *rest: ParallelModel(part, names, settings.of(*rest))
