"""`meshweave.parallelize`: a plan in a user's model, whose layers then run the programs of the plan's strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from meshweave.algorithms.block import BlockConfig
from meshweave.algorithms.block.problem import Overlap
from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.base.errors import MeshweaveError
from meshweave.execute.torch.call_order import require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.block import ParallelBlock
from meshweave.nn.parallel.dropout import ShardDropout
from meshweave.nn.parallel.embedding import ParallelEmbedding, ParallelPositions
from meshweave.nn.parallel.features import (
    AroundModule,
    ForwardArguments,
    PlacedModules,
    refuse_features,
)
from meshweave.nn.parallel.known import recognised
from meshweave.nn.parallel.linear import LinearGroup, ParallelLinear
from meshweave.nn.parallel.loss import VocabularyLoss
from meshweave.nn.parallel.moves import PlacedMove
from meshweave.nn.parallel.norm import ParallelNorm
from meshweave.nn.parallel.optimizers import watch_optimizers
from meshweave.nn.parallel.parameters import fill, on_meta
from meshweave.nn.parallel.plans import PlanLike, resolve
from meshweave.nn.parallel.rotary import Rotary, UnfilledBuffers
from meshweave.nn.parallel.same_model import ranks_of, require_same_model
from meshweave.nn.parallel.step_agreement import StepAgreement
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.structure import ModelMap, check_modules, heads_of, uncovered
from meshweave.nn.parallel.takeable import check_takeable, check_unaltered
from meshweave.nn.parallel.tied import TiedWeight
from meshweave.nn.parallel.tokens import TokenLimits
from meshweave.nn.prove.check import check_layers

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelReport:
    """What `parallelize` has replaced in a model, and what it has left.

    Attributes:
        model: what the model was recognised as.
        strategy: the name of the strategy, and its mesh.
        replaced: the names of modules with what stands there now.
        left: the names of modules that were left, each with the reason.
        overlap: what communication runs beside.
        proved: what was compared with the model's own forward pass.
    """

    model: str
    strategy: str
    replaced: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]
    overlap: str
    proved: str

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.strategy}", f"replaced: {len(self.replaced)} modules"]
        lines += [f"  {name}: {what}" for name, what in self.replaced]
        lines.append(f"left: {len(self.left)} modules")
        lines += [f"  {name}: {why}" for name, why in self.left]
        lines += [f"overlap: {self.overlap}", f"proved: {self.proved}"]
        return "\n".join(lines)


class ParallelOutput(NamedTuple):
    """What a parallelised module returns: the loss where there are targets, else logits on every rank."""

    loss: Tensor | None
    logits: Tensor | None


class ParallelModel(AroundModule):
    """A model whose layers run on the ranks of a strategy; made by `parallelize`.

    Every rank of the mesh gives the same tokens, all of them, and takes its part.

    Attributes:
        module: the user's module, changed in place. Its parameters are DTensors under their old names.
        strategy: the strategy on its ranks.
        report: what was replaced, and what was left.
        blocks: the layers.
        context: what `parallelize` was given, kept for as long as the model is.
    """

    def __init__(
        self,
        module: nn.Module,
        names: ModelMap,
        strategy: LayerStrategy,
        title: str,
        recompute: bool,
        proved: str = "",
        debug_every: int = 0,
    ) -> None:
        self.module, self.names, self.strategy, self.recompute = module, names, strategy, recompute
        self.context: TorchContext | None = None
        self._arguments = ForwardArguments(module, names.has_causal_loss)
        self._new: dict[str, ParallelEmbedding | ParallelPositions | ParallelNorm | ParallelLinear] = {}
        self._plan_layers()
        self._plan_ends()
        self._activations = UnfilledBuffers(module, self._names_of_activations())
        self._take()
        names_of = {name for name, child in module.named_modules() if isinstance(child, _OURS)}
        self.report = ParallelReport(
            title,
            f"{strategy.name} on {'x'.join(map(str, strategy.mesh.shape))} ranks",
            tuple((n, type(module.get_submodule(n)).__name__) for n in sorted(names_of)),
            tuple((name, "no part of the map computes with it") for name in uncovered(module, names_of)),
            overlap_of(strategy),
            proved,
        )
        positions = None if self.positions is None else int(self.positions.weight.shape[0])
        limits = TokenLimits(self.embedding.words, self.head.site.units, positions)
        of_blocks = [(b.after_attention, b.after_feed_forward, b.core.dropout) for b in self.blocks]
        draws = any(each.is_shared for each in (self.dropout, *chain.from_iterable(of_blocks)))
        self.agreement = StepAgreement(
            module, strategy, limits, draws=draws, recompute=recompute, debug_every=debug_every
        )
        self._placed = PlacedModules(module, names.layers)
        module.forward = self.forward

    # --- replacing: all is planned, and may be refused, before the first module is replaced -----------------

    def _plan_layers(self) -> None:
        names, module = self.names, self.module
        check_modules(module, names)
        self.blocks: list[ParallelBlock] = []
        for number, layer in enumerate(module.get_submodule(names.layers)):
            heads = names.heads or heads_of(module, number, names)
            where = f"{names.layers}.{number}"
            self.blocks.append(ParallelBlock(layer, names.layer, heads, self.strategy, where))

    def _plan_ends(self) -> None:
        names, strategy, module, new = self.names, self.strategy, self.module, self._new
        table, head = module.get_submodule(names.embedding), module.get_submodule(names.head)
        self.embedding = new[names.embedding] = ParallelEmbedding(on_meta(table), strategy, names.embedding)
        self.positions: ParallelPositions | None = None
        if names.positions:
            wpe = on_meta(module.get_submodule(names.positions))
            self.positions = new[names.positions] = ParallelPositions(wpe, strategy, names.positions)
        self.norm = new[names.norm] = ParallelNorm(module.get_submodule(names.norm), strategy, names.norm)
        self.tied: TiedWeight | None = None
        if table.weight is head.weight:
            self.tied = TiedWeight(self.embedding, strategy)
            self.head = self.tied.head(on_meta(head), names.head)
        else:
            self.head = ParallelLinear(on_meta(head), strategy, place="in", name=names.head)
        new[names.head] = self.head
        self._head_group = LinearGroup([self.head])
        p = dropout_of(module, names.dropout)
        self.dropout = ShardDropout(p, strategy, strategy.roles.residual)
        self.vocabulary = VocabularyLoss(self.head.site.units, strategy)
        self.rotary: Rotary | None = None
        if names.rotary:
            width = self.blocks[0].core.heads.width
            self.rotary = Rotary(module, names.rotary, strategy, width)

    def _names_of_activations(self) -> list[str]:
        names, count = self.names, len(self.blocks)
        return [f"{names.layers}.{number}.{names.layer.activation}" for number in range(count)]

    def _take(self) -> None:
        """Replace the modules by what was planned for them."""
        names, module = self.names, self.module
        layers = module.get_submodule(names.layers)
        for number, (block, layer) in enumerate(zip(self.blocks, layers, strict=True)):
            block.take(layer)
            layers[number] = block
        for path, new in self._new.items():
            if new is self.head and self.tied is not None:
                new.weight = self.embedding.weight
            else:
                fill(new, module.get_submodule(path), path)
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, new)

    # --- running --------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the residual before the first layer, of tokens (batch, sequence)."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(tokens.shape[1]).to(x.dtype)
        return self.dropout(x, self.module.training)

    def run_blocks(
        self, x: Tensor, batch: int, sequence: int, blocks: Iterable[nn.Module] | None = None
    ) -> Tensor:
        """Return this rank's part of the residual after some layers, by default all."""
        rotary = None if self.rotary is None else self.rotary(x, sequence)
        self._activations.fill(x.device)
        # Of the module: a layer may have been wrapped since, to be computed again or compiled.
        for block in self.module.get_submodule(self.names.layers) if blocks is None else blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, batch, sequence, rotary, use_reentrant=False)
            elif getattr(block, "gradient_checkpointing", False) and block.training:
                x = block._gradient_checkpointing_func(block.__call__, x, batch, sequence, rotary)
            else:
                x = block(x, batch, sequence, rotary)
        return x

    def local_logits(self, x: Tensor, batch: int, sequence: int) -> Tensor:
        """Return this rank's part of the logits, of the residual after the last layer."""
        normal = self.norm(x, batch, sequence)
        if self.tied is not None:
            return self.tied.logits(self._head_group, normal, batch, sequence)
        return self._head_group(normal, batch, sequence)[0]

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over all tokens, of this rank's part of the residual after the last layer."""
        return self.vocabulary(self.local_logits(x, *targets.shape), targets)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over all tokens, equal on all ranks, to call `backward` of.

        Args:
            tokens: (batch, sequence), the same on every rank of the mesh.
            targets: as tokens: for each the token that is to be foretold, or -100 for none.
        """
        loss: Tensor = self.module(tokens, targets=targets).loss
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, sequence, vocabulary) on every rank."""
        logits: Tensor = self.module(tokens).logits
        return logits

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, whose gradients are added to those of the parameters."""
        loss = self.loss(tokens, targets)
        loss.backward()
        return loss.detach()

    def forward(
        self, input_ids: Tensor | None = None, *args: Any, targets: Tensor | None = None, **given: Any
    ) -> ParallelOutput:
        """Return the logits, or with labels or targets the loss: the `forward` of the module.

        Args:
            input_ids: tokens (batch, sequence).
            *args: as the module took them: labels, tokens of which each is foretold by those before it, for models
                of transformers, else the same as targets. Others must change nothing.
            **given: the same by name.
            targets: per token the one that is to be foretold, or -100 for none.
        """
        refused = None
        try:
            targets = self._arguments.targets(input_ids, args, given, targets)
            self._placed.check()
        except MeshweaveError as error:  # on this rank: others hear of it
            refused, targets = error, None
        tokens = input_ids if isinstance(input_ids, Tensor) else None
        if torch.compiler.is_compiling():
            self.agreement.check(tokens, targets, refused)
            return self._run(input_ids, targets)
        with self.agreement.beside(tokens, targets, refused):
            return self._run(input_ids, targets)

    def _run(self, input_ids: Tensor | None, targets: Tensor | None) -> ParallelOutput:
        assert input_ids is not None
        x = self.run_blocks(self.embed(input_ids), *input_ids.shape)
        if targets is not None:
            return ParallelOutput(self.head_loss(x, targets), None)
        logits = self.local_logits(x, *input_ids.shape)
        return ParallelOutput(None, self.vocabulary.whole_logits(logits, *input_ids.shape))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


_OURS = (ParallelLinear, ParallelNorm, ParallelEmbedding, ParallelPositions)


def overlap_of(strategy: LayerStrategy) -> str:
    """Return what communication runs beside in layers whose products are programs of their own, in words."""
    if strategy.is_alone:
        return "nothing is communicated"
    if strategy.config.chunks == 1:
        return "communication runs beside the product that it belongs to, where its program has slices"
    return (
        f"communication of {strategy.config.chunks} chunks runs beside the product that it belongs to, and not "
        "beside another product, attention or a norm, as a program of a whole layer has it"
    )


def dropout_of(module: nn.Module, path: str) -> float:
    """Return the probability of a dropout module; 0 without one."""
    return float(module.get_submodule(path).p) if path else 0.0


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
) -> ParallelModel:
    """Put a plan into a model of torch, in place: its layers then run the programs of the plan's strategy.

    Every rank of the mesh has the same module, with the same weights or on the meta device, and calls this. Models
    of transformers are recognised by their class and config (`meshweave.nn.parallel.known`), those of plain torch
    in the style of GPT-2 and Llama by the names of their modules. What is refused stays as it was.

    Args:
        module: the model.
        plan: the name of a strategy ("megatron_sp", "atp", "meshslice_block", ...), which takes its sizes from
            `device_mesh`; a `Parallelism`, a `Step`, what `meshweave.plan` returned, or the path of a plan file.
        device_mesh: a mesh with a dim for each axis of the strategy: one for "megatron" and "zero3", two for "atp"
            and "summa_block", three for "25d_block". None makes one of all ranks for a plan with sizes.
        mapping: which modules of the model are which, where they are not recognised.
        config: chunks of the batch and slices of 2D products; None as the plan says.
        overlap: communication runs beside the product that it belongs to, and nothing else. "sites" accepts that
            for a plan that was priced with overlap "layers", and counts on it.
        check: prove first that layers compute what the model's own forward pass does, as `prove` does, on copies
            with few layers and words; False trains it unproved, and says so in the log.
        context: deadline and liveness of every wait for other ranks, here and in the layers; default: that of the
            default process group, 60 s. The same one may be given to `pipeline` and `Checkpoints`.
        broadcast_weights: the weights of the mesh's first rank are those of all. Without, ranks that have others
            are an error.
        debug_every: forward calls between two in which ranks compare all that they must have alike, copies of
            weights and modes of modules among it, as they do in the first; 0 for the first alone.

    Returns:
        The model, to train: see `ParallelModel`.

    Raises:
        UnsupportedError: the model is none that is known, or has parameters that would not take part.
        LayoutError: the plan does not fit the mesh, or the sizes of the model do not fit the plan; or ranks give
            other models, arguments, versions or settings: on all of them, before anything is replaced.
        PlanError: the plan counts on overlap that is not obtained here.
        ProofError: the model is not what it was taken for; it is as it was.
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    require_process_group()
    own = context or TorchContext.default(device_mesh.device_type if device_mesh is not None else "cpu")
    given = {
        "plan": plan, "mapping": mapping, "config": config, "overlap": overlap, "check": check,
        "debug_every": debug_every,
    }  # fmt: skip
    with share_refusal(own, ranks_of(device_mesh), "parallelize"):
        check_unaltered(module)
        require_same_model(own, module, device_mesh, given, broadcast_weights=broadcast_weights)
        resolved = resolve(plan, device_mesh, config, overlap, context)
        title, names = ("as mapped", mapping) if mapping is not None else recognised(module)
        check_modules(module, names)
        check_takeable(module, names.embedding, names.head, names.positions)
        strategy, recompute = resolved.strategy, resolved.recompute
        proved = "nothing (check=False)"
        if check:
            proved = check_layers(
                module,
                names,
                strategy,
                lambda part: ParallelModel(part, names, strategy, title, recompute),
                title,
            )
        else:
            level = logging.WARNING if strategy.rank == strategy.mesh.ranks[0] else logging.DEBUG
            _LOG.log(level, "%s is parallelised unproved: check=False", type(module).__name__)
        before = dict(module.named_parameters())
        model = ParallelModel(module, names, strategy, title, recompute, proved, debug_every)
    _seed_alike(strategy)
    model.context = context
    _seed_alike(strategy)
    watch_optimizers(model.agreement, before)
    refuse_features(module, names.layers)
    return model


def _seed_alike(strategy: LayerStrategy) -> None:
    """Seed torch's default generator with a number of the first rank, on all ranks of the mesh."""
    if strategy.is_alone:
        return
    axis = (Side("", 1),)
    terms: AxisDims = tuple("partial" if size > 1 else "" for size in strategy.mesh.shape)
    first = PlacedMove(strategy, axis, terms, strategy.roles.nowhere, has_tokens=False)
    own = torch.initial_seed() % (1 << 50) if strategy.rank == strategy.mesh.ranks[0] else 0
    torch.manual_seed(
        int(first.sized(1, 1, torch.float64).run(torch.tensor([float(own)], dtype=torch.float64)))
    )
