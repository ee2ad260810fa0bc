"""`meshweave.parallelize`: a plan in a user's model, whose layers then run the programs of the plan's strategy."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshweave.base.errors import MeshweaveError
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.block import ParallelBlock
from meshweave.nn.parallel.call_facts import CallInputs, check_anomaly_mode, check_transforms
from meshweave.nn.parallel.dropout import ShardDropout
from meshweave.nn.parallel.embedding import ParallelEmbedding, ParallelPositions
from meshweave.nn.parallel.features import AroundModule, ForwardArguments, PlacedModules
from meshweave.nn.parallel.linear import LinearGroup, ParallelLinear
from meshweave.nn.parallel.loss import VocabularyLoss
from meshweave.nn.parallel.norm import ParallelNorm
from meshweave.nn.parallel.parameters import fill, on_meta
from meshweave.nn.parallel.reports import ModelSettings, ParallelReport
from meshweave.nn.parallel.rotary import Rotary, UnfilledBuffers
from meshweave.nn.parallel.step_agreement import StepAgreement
from meshweave.nn.parallel.strategy import overlap_of
from meshweave.nn.parallel.structure import (
    ModelMap,
    check_mode,
    check_modules,
    check_read,
    dropout_of,
    heads_of,
    uncovered,
)
from meshweave.nn.parallel.tied import TiedWeight
from meshweave.nn.parallel.tokens import TokenLimits
from meshweave.nn.parallel.trials import TrialTable
from meshweave.nn.parallel.uses import KeepsParameters, used_throughout


class ParallelOutput(NamedTuple):
    """What a parallelised module returns: the loss where there are targets, else whole logits; the other is None.

    Both are equal on all ranks of the mesh.
    """

    loss: Tensor | None
    logits: Tensor | None


class LogitsFirst(NamedTuple):
    """A `ParallelOutput` in the order of models whose forward takes `targets`, as nanoGPT's does."""

    logits: Tensor | None
    loss: Tensor | None


class ParallelModel(AroundModule):
    """A model whose layers run on the ranks of a strategy; made by `parallelize`.

    Every rank of the mesh gives the same tokens, all of them, and takes its part.

    Attributes:
        module: the user's module, changed in place. Its parameters are DTensors under their old names.
        strategy: the strategy on its ranks.
        report: which modules were replaced and which were left, what overlaps, and what was proved.
        blocks: the layers.
        context: the context that `parallelize` was given, kept for as long as the model is; None without.
        trials: the plans that were tried, where the plan was "auto"; else None.
    """

    def __init__(self, module: nn.Module, names: ModelMap, settings: ModelSettings) -> None:
        self.module, self.names, self.recompute = module, names, settings.recompute
        self.strategy = strategy = settings.strategy
        self.context: TorchContext | None = None
        self.trials: TrialTable | None = None
        self._arguments = ForwardArguments(module, names.has_causal_loss)
        has_targets = "targets" in inspect.signature(module.forward).parameters
        self._output: type[ParallelOutput | LogitsFirst] = LogitsFirst if has_targets else ParallelOutput
        self._new: dict[str, ParallelEmbedding | ParallelPositions | ParallelNorm | ParallelLinear] = {}
        self._plan_layers()
        self._plan_ends()
        self._activations = UnfilledBuffers(module, self._names_of_activations())
        self._take()
        names_of = {name for name, child in module.named_modules() if isinstance(child, _OURS)}
        self.report = ParallelReport(
            settings.title,
            f"{strategy.name} on {'x'.join(map(str, strategy.mesh.shape))} ranks",
            tuple((n, type(module.get_submodule(n)).__name__) for n in sorted(names_of)),
            tuple((name, "no part of the map computes with it") for name in uncovered(module, names_of)),
            overlap_of(strategy),
            settings.proved,
        )
        positions = None if self.positions is None else int(self.positions.weight.shape[0])
        limits = TokenLimits(self.embedding.words, self.head.site.units, positions)
        of_blocks = [(b.after_attention, b.after_feed_forward, b.core.dropout) for b in self.blocks]
        draws = any(each.is_shared for each in (self.dropout, *chain.from_iterable(of_blocks)))
        self.agreement = StepAgreement(module, settings, limits, draws)
        self.vocabulary.sum_beside = self.agreement.sum_beside
        self.blocks[-1].is_followed = False
        first: list[KeepsParameters] = (
            [self.embedding] if self.positions is None else [self.positions, self.embedding]
        )
        layers = [block.use for block in reversed(self.blocks)]
        self.throughout = used_throughout(strategy, [self.head, self.norm], layers, first)
        called = [[b, b.attention_norm, b.feed_forward_norm, b.activation] for b in self.blocks]
        ends = self.embedding, self.positions, self.norm
        self._placed = PlacedModules(module, names.layers, [*ends, *chain.from_iterable(called)])
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
        """Return this rank's part (batch, sequence, features) of the residual before the first layer. Collective.

        Args:
            tokens: (batch, sequence), all of them, equal on all ranks.
        """
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(tokens.shape[1]).to(x.dtype)
        return self.dropout(x, self.module.training)

    def run_blocks(
        self, x: Tensor, batch: int, sequence: int, blocks: Iterable[nn.Module] | None = None
    ) -> Tensor:
        """Return this rank's part of the residual after some layers. Collective.

        Args:
            x: this rank's part (batch, sequence, features) of the residual before them.
            batch: the number of sequences of all ranks.
            sequence: the tokens of each, of all ranks.
            blocks: these layers, in order; None for all.
        """
        rotary = None if self.rotary is None else self.rotary(x, sequence)
        self._activations.fill(x.device)
        # Of the module: a layer may have been wrapped since, to be computed again or compiled.
        for number, block in enumerate(
            self.module.get_submodule(self.names.layers) if blocks is None else blocks
        ):
            self.throughout.reach(number)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, batch, sequence, rotary, use_reentrant=False)
            else:
                x = block(x, batch, sequence, rotary)
        return x

    def local_logits(self, x: Tensor, batch: int, sequence: int) -> Tensor:
        """Return this rank's part (batch, sequence, words) of the logits. Collective.

        Args:
            x: this rank's part (batch, sequence, features) of the residual after the last layer, before the last
                norm.
            batch: the number of sequences of all ranks.
            sequence: the tokens of each, of all ranks.
        """
        self.throughout.reach(len(self.blocks))
        normal = self.norm(x, batch, sequence)
        if self.tied is not None:
            return self.tied.logits(self._head_group, normal, batch, sequence)
        return self._head_group(normal, batch, sequence)[0]

    def head_loss(self, x: Tensor, targets: Tensor, num_items: float | None = None) -> Tensor:
        """Return the mean cross entropy over the tokens of all ranks, equal on all of them. Collective.

        Args:
            x: this rank's part (batch, sequence, features) of the residual after the last layer, before the last
                norm.
            targets: (batch, sequence), all of them on every rank; -100 where there is no loss.
            num_items: by what the sum is divided; None for the number of tokens that have a loss.
        """
        return self.vocabulary(self.local_logits(x, *targets.shape), targets, num_items)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy over all tokens with a target, equal on all ranks, to call `backward` of.

        A routed model of transformers that computes an auxiliary loss adds it. Where the sum over ranks runs
        beside the backward pass, the loss is an `AwaitedTensor`: what reads it waits, and raises where ranks find
        that they differ.

        Args:
            tokens: (batch, sequence), the same on every rank of the mesh.
            targets: as tokens: for each the token that is to be predicted, or -100 for none.
        """
        loss: Tensor = self.module(tokens, targets=targets).loss
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, sequence, vocabulary) of tokens (batch, sequence), whole on every rank.

        Collective; every rank gives the same tokens.
        """
        logits: Tensor = self.module(tokens).logits
        return logits

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward, adding to the parameters' gradients, and return the detached mean loss.

        The optimizer does not step. The loss is the mean over the tokens of all ranks.

        Args:
            tokens: (batch, sequence), the same on every rank of the mesh.
            targets: as tokens: for each the token to predict (already shifted), or -100 for none.
        """
        loss = self.loss(tokens, targets)
        loss.backward()
        return loss.detach()

    def forward(
        self, input_ids: Tensor | None = None, *args: Any, targets: Tensor | None = None, **given: Any
    ) -> ParallelOutput | LogitsFirst:
        """Return the logits, or with labels or targets the loss: the module's `forward`. Collective.

        Args:
            input_ids: tokens (batch, sequence), the same on every rank of the mesh.
            *args: arguments after the tokens, in the order of the module's own forward. Labels become targets,
                shifted by one where the module's own forward shifts them. Other arguments may be refused.
            **given: the same by name.
            targets: per token the one that is to be predicted, or -100 for none; labels beside them are refused.

        Raises:
            LayoutError: ranks give other arguments, tokens or arguments do not fit the model, or labels and
                targets are both given.
            UnsupportedError: an argument would change the result, and is not computed; since `parallelize` a
                module or the loss function was replaced, `.data` of a parameter assigned, or a hook added that
                would not run; a parameter is on the meta device; `detect_anomaly` looks for nan; or `torch.func`
                transforms the call.
            RankLostError, DeadlineError, BindError: other ranks are missing, late, or in another call.
        """
        if torch.compiler.is_compiling():
            return self._run(input_ids, self._checked(input_ids, args, given, targets))
        out: ParallelOutput = self._uncompiled(input_ids, args, given, targets)
        return out

    def _given(
        self, input_ids: Any, args: tuple[Any, ...], given: dict[str, Any], targets: Tensor | None
    ) -> tuple[Tensor | None, CallInputs, MeshweaveError | None]:
        """Return tokens and inputs of a call, and why this rank refuses them; None if it takes them."""
        tokens = input_ids if isinstance(input_ids, Tensor) else None
        check_transforms()  # nothing is compared inside of these
        try:
            inputs = self._arguments.inputs(input_ids, args, given, targets)
            self._placed.check()
            if isinstance(self.names, ModelMap):  # else the model's own code drops
                self._check_dropout(self.names.dropout)
            check_anomaly_mode()
        except MeshweaveError as error:  # on this rank: others hear of it
            return tokens, CallInputs(), error
        return tokens, inputs, None

    def _check_dropout(self, path: str) -> None:
        """Raise UnsupportedError where dropout, that after the embedding at `path`, is other than was read."""
        if path:
            check_read(path, dropout_of(self.module, path), self.dropout.p)
            check_mode(path, self.module.get_submodule(path), self.module)
        for block in self.blocks:
            block.check_dropout()

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="ranks compare what they give a call outside of graphs: compile the blocks, or without fullgraph"
    )
    def _checked(
        self, input_ids: Any, args: tuple[Any, ...], given: dict[str, Any], targets: Tensor | None
    ) -> CallInputs:
        """Return the inputs of a call that a compiler runs, after ranks have compared them."""
        tokens, inputs, refused = self._given(input_ids, args, given, targets)
        with self.agreement.beside(tokens, inputs, refused):
            return inputs

    @torch.compiler.disable(reason="it runs where a compiler has given up")  # type: ignore[untyped-decorator]
    def _uncompiled(
        self, input_ids: Any, args: tuple[Any, ...], given: dict[str, Any], targets: Tensor | None
    ) -> ParallelOutput | LogitsFirst:
        """Return what `forward` does, without graphs but of layers that are compiled by themselves."""
        tokens, inputs, refused = self._given(input_ids, args, given, targets)
        with self.agreement.beside(tokens, inputs, refused):
            return self._run(input_ids, inputs)

    def _run(self, input_ids: Tensor | None, inputs: CallInputs) -> ParallelOutput | LogitsFirst:
        if torch.compiler.is_compiling():
            return self._computed(input_ids, inputs)
        is_compiled_here = any(map(is_compiled, self.module.get_submodule(self.names.layers)))
        if self.strategy.is_alone and (is_compiled_here or self.throughout.is_computed):
            return self._computed(
                input_ids, inputs
            )  # a layer that is computed again then saves the same tensors
        parameters = self.throughout.parameters()
        if not self.throughout.are_here(parameters):
            return self._computed(input_ids, inputs)
        with self.throughout.open([]) if is_compiled_here else self.throughout.open_by_layer(parameters):
            return self._computed(input_ids, inputs)

    def _computed(self, input_ids: Tensor | None, inputs: CallInputs) -> ParallelOutput | LogitsFirst:
        assert input_ids is not None
        x = self.run_blocks(self.embed(input_ids), *input_ids.shape)
        if inputs.targets is not None:
            return self._output(loss=self.head_loss(x, inputs.targets), logits=None)
        logits = self.local_logits(x, *input_ids.shape)
        return self._output(loss=None, logits=self.vocabulary.whole_logits(logits, *input_ids.shape))

    def prune(self, first: int, end: int) -> None:
        """Remove what other pipeline stages have: this one keeps layers `first` to `end` - 1, under their names.

        The embedding stays where `first` is 0, the last norm and the head where `end` is the number of layers.
        Other layers become `nn.Identity`. From now on each module gathers its own parameters.
        """
        names, module = self.names, self.module
        layers = module.get_submodule(names.layers)
        for number, block in enumerate(self.blocks):
            block.opens = False
            if not first <= number < end:
                layers[number] = nn.Identity()
        self._divide_table(first, end)
        gone = [] if first == 0 else [names.embedding, names.positions]
        gone += [] if end == len(self.blocks) else [names.norm, names.head]
        for path in filter(None, gone):
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, None)

    def _divide_table(self, first: int, end: int) -> None:
        """Let the head of a stage without the embedding have their table, under the name that the embedding has.

        States of optimizers are saved under it.
        """
        if self.tied is not None and first and end == len(self.blocks):
            self.tied.keep_in(self.head)
            names = {f"{self.names.head}.weight": f"{self.names.embedding}.weight"}
            self.module.__dict__["_meshweave_tied"] = names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


_OURS = (ParallelLinear, ParallelNorm, ParallelEmbedding, ParallelPositions)


def is_compiled(layer: nn.Module) -> bool:
    """Return whether a layer runs compiled, by `compile()` or in a wrapper, also inside a checkpoint wrapper."""
    layer = layer._modules.get("_checkpoint_wrapped_module", layer)
    return vars(layer).get("_compiled_call_impl") is not None or "_orig_mod" in layer._modules
