"""A model of transformers that runs by its own code, with linear layers, norms and tables that ranks share.

The forward pass is that of the model's class. What lies on several ranks is computed by programs of the strategy:
products, the table of words, norms of rows that are split, the loss. All between, as rotary embeddings, masks,
multipliers and activations, is the code of transformers on what a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import TOKENS, AxisDims, Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.autocast import autocast_operands
from meshweave.nn.hosted.anatomy import anatomy_of
from meshweave.nn.hosted.drops import RankDropout, sources_of
from meshweave.nn.hosted.inputs import (
    HostedArguments,
    causal_lm_output,
    splits_rows,
    taken_by,
    with_own_signature,
)
from meshweave.nn.hosted.last_position import share_last_position
from meshweave.nn.hosted.layer_plan import LayerReplacements
from meshweave.nn.hosted.layers import HostedLayer, LayerSpan, OtherStage, OtherStageModule, StopError
from meshweave.nn.hosted.linears import HostedLinear
from meshweave.nn.hosted.own_modules import HostedEmbedding, OwnModule, OwnTable, hosted_norm
from meshweave.nn.hosted.residual import Tokens, as_plain
from meshweave.nn.hosted.ring import run_in_ring
from meshweave.nn.hosted.routers import auxiliary_loss, check_auxiliary
from meshweave.nn.parallel.call_facts import CallInputs
from meshweave.nn.parallel.embedding import local_tokens
from meshweave.nn.parallel.features import PlacedModules
from meshweave.nn.parallel.linear import ParallelLinear
from meshweave.nn.parallel.loss import VocabularyLoss
from meshweave.nn.parallel.model import ParallelModel
from meshweave.nn.parallel.parameters import ParameterLayout, fill, on_meta
from meshweave.nn.parallel.reports import ModelSettings, ParallelReport
from meshweave.nn.parallel.rotary import UnfilledBuffers
from meshweave.nn.parallel.step_agreement import StepAgreement
from meshweave.nn.parallel.strategy import LayerStrategy, overlap_of
from meshweave.nn.parallel.tied import TiedWeight
from meshweave.nn.parallel.tokens import TokenLimits
from meshweave.nn.parallel.uses import ParameterUse, entries_of, used_throughout


class HostedModel(ParallelModel):
    """A model of transformers whose own forward pass runs on the ranks of a strategy; made by `parallelize`.

    Attributes:
        anatomy: its parts, as a trace of its forward pass shows them.
        tokens: the tokens of the step that runs, and what ranks have of them.
    """

    def __init__(self, module: nn.Module, settings: ModelSettings) -> None:
        self.module, self.recompute, self.context = module, settings.recompute, None
        self.strategy = strategy = settings.strategy
        self.anatomy = anatomy = anatomy_of(module, _device_of(module, strategy))
        self.names: Any = anatomy.names
        self.tokens = Tokens(strategy)
        sources = sources_of(module)
        self._drops = RankDropout(self.tokens, sources) if sources else None
        self._forward = self.tokens.uncompiled(type(module).forward.__get__(module))
        self._taken = taken_by(module)
        self._arguments = self.arguments = HostedArguments(
            module, anatomy.shifts_labels, strategy, self.recompute
        )
        self._new: dict[str, nn.Module] = {}
        self._then: list[Callable[[], None]] = []
        self._plan_ends()
        layers = module.get_submodule(anatomy.names.layers)
        uses = [
            LayerReplacements(
                layer, parts, f"{anatomy.names.layers}.{number}", self._new, self._then, self.tokens, module
            ).plan()
            for number, (layer, parts) in enumerate(zip(layers, anatomy.layers, strict=True))
        ]
        self._activations = UnfilledBuffers(module, self._without_memory(), anatomy.buffers)
        idle = self._idle()
        self._check_adapted(settings.adapted)
        self._replace(idle, uses)
        self.throughout = used_throughout(strategy, self._ends(False), uses[::-1], self._ends(True))
        self.report = self._reported(settings, idle)
        limits = TokenLimits(self.embedding.words, self.head.site.units)
        draws = self._drops is not None and not strategy.is_alone
        self.agreement = StepAgreement(module, settings, limits, draws)
        self.vocabulary.sum_beside = self.agreement.sum_beside
        self._placed = PlacedModules(module, anatomy.names.layers)
        module.forward = with_own_signature(self.forward, module)

    # --- replacing ------------------------------------------------------------------------------------------

    def _plan_ends(self) -> None:
        names, strategy, module, new = self.anatomy.names, self.strategy, self.module, self._new
        table, head = module.get_submodule(names.embedding), module.get_submodule(names.head)
        self.embedding = HostedEmbedding(on_meta(table), self.tokens, names.embedding, self.anatomy.scale)
        self.tied = TiedWeight(self.embedding, strategy) if table.weight is head.weight else None
        self.head = HostedHead(on_meta(head), self.tokens, names.head, self.tied)
        if self.tied is not None:
            self.head.weight = self.embedding.weight
        new[names.embedding], new[names.head] = self.embedding, self.head
        hidden = Side("hidden", self.embedding.features)
        for path, kind in self.anatomy.norms.items():
            norm = module.get_submodule(path)
            new[path] = hosted_norm(on_meta(norm), self.tokens, path, kind, strategy.roles.residual, hidden)
        for path in self.anatomy.ends:
            if "hidden" in strategy.roles.residual:
                raise UnsupportedError(
                    f"{path} computes on whole rows of the residual, which {strategy.name} splits"
                )
            new[path] = OwnModule(
                on_meta(module.get_submodule(path)), strategy, path, strategy.roles.residual
            )
        for path in self.anatomy.tables:
            new[path] = OwnTable(on_meta(module.get_submodule(path)), self.tokens, path)
        self.vocabulary = VocabularyLoss(self.head.site.units, strategy)

    def _idle(self) -> list[str]:
        """Return the names of parameters that take no part."""
        replaced = tuple(f"{path}." for path in self._new)
        return [name for name, _ in self.module.named_parameters() if not name.startswith(replaced)]

    def _check_adapted(self, names: Iterable[str]) -> None:
        """Raise UnsupportedError, naming it, for a layer whose adapter would not be computed."""
        for name in names:
            if not isinstance(self._new.get(name), HostedLinear):
                part = "the head" if name == self.names.head else "a part that each rank computes whole"
                raise UnsupportedError(
                    f"{name}: the adapter is of {part}, and linear layers that ranks share have adapters; leave "
                    "it out of target_modules, or merge it (merge_and_unload()) before parallelize"
                )

    def _without_memory(self) -> list[str]:
        """Return the names of modules that have buffers without memory, and whose code runs."""
        return [
            path
            for path, child in self.module.named_modules()
            if path
            and any(buffer is not None and buffer.is_meta for buffer in child._buffers.values())
            and isinstance(self._new.get(path), OwnModule | None)
        ]

    def _ends(self, are_before: bool) -> list[Any]:
        """Return the modules outside of layers that keep parameters: those before the layers, or after them."""
        anatomy = self.anatomy
        before = {anatomy.names.embedding, *anatomy.tables, *anatomy.norms_before}
        before |= {path for path, is_before in anatomy.ends.items() if is_before}
        names = [path for path in self._new if not path.startswith(f"{anatomy.names.layers}.")]
        return [self._new[path] for path in names if (path in before) == are_before]

    def _replace(self, idle: list[str], uses: list[ParameterUse]) -> None:
        """Replace the modules by what was planned for them."""
        module, names = self.module, self.anatomy.names
        for name in idle:
            owner, _, key = name.rpartition(".")
            whole = module.get_submodule(owner)._parameters[key]
            sides = tuple(Side("", int(size)) for size in whole.shape)
            layout = ParameterLayout(sides, self.strategy.roles.replicated)
            module.get_submodule(owner)._parameters[key] = layout.distribute(name, whole, self.strategy)
        for path, new in self._new.items():
            if path == names.head and self.tied is not None:
                new.weight = self.embedding.weight
                new.layouts.pop("weight")
            fill(new, module.get_submodule(path), path)
            owner, _, name = path.rpartition(".")
            new.train(module.get_submodule(path).training)
            setattr(module.get_submodule(owner), name, new)
        for change in self._then:
            change()
        self.blocks = list(module.get_submodule(names.layers))
        self.span = LayerSpan(len(self.blocks))
        self.calls = [
            HostedLayer(layer, number, self, use)
            for number, (layer, use) in enumerate(zip(self.blocks, uses, strict=True))
        ]
        for layer, call in zip(self.blocks, self.calls, strict=True):
            layer.__dict__["forward"] = self.tokens.uncompiled(call.__call__)
        self.calls[-1].is_followed = False
        share_last_position(module, self.tokens)
        self._ring_calls = None
        if self.strategy.roles.ring_axis is not None:
            heads = {
                f"{names.layers}.{number}.{part.path}".rstrip("."): part.columns.heads
                for number, parts in enumerate(self.anatomy.layers)
                for part in parts.attention
            }
            self._ring_calls = run_in_ring(module, self.tokens, heads)
            if "position_ids" not in self._taken:
                raise UnsupportedError(f"{type(module).__name__} takes no position_ids, which a ring needs")

    def _reported(self, settings: ModelSettings, idle: list[str]) -> ParallelReport:
        return ParallelReport(
            settings.title,
            f"{self.strategy.name} on {'x'.join(map(str, self.strategy.mesh.shape))} ranks",
            tuple((path, type(new).__name__) for path, new in sorted(self._new.items())),
            tuple((name, "no part of the forward pass computes with it") for name in idle),
            overlap_of(self.strategy),
            settings.proved,
        )

    # --- running --------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the residual before the first layer (batch, sequence, hidden). Collective.

        `tokens` are those of all ranks, (batch, sequence).
        """
        return self._through(tokens, None, LayerSpan(0, 0))

    def run_blocks(
        self, x: Tensor, batch: int, sequence: int, blocks: Iterable[nn.Module] | None = None
    ) -> Tensor:
        """Return this rank's part of the residual after consecutive layers `blocks`, None for all. Collective.

        Args:
            x: this rank's part of the residual before them, (batch, sequence, hidden).
            batch: the number of sequences of all ranks.
            sequence: the number of tokens of each.
        """
        numbers = [self.blocks.index(block) for block in (self.blocks if blocks is None else blocks)]
        if not numbers:
            return x
        span = LayerSpan(numbers[-1] + 1, numbers[0], stops=True)
        return self._through(self._any_tokens(x, batch, sequence), x, span)

    def local_logits(self, x: Tensor, batch: int, sequence: int) -> Tensor:
        """Return this rank's part of the logits (batch, sequence, words) of all tokens. Collective.

        x is its part of the residual after the last layer. `batch` and `sequence` are global numbers.
        """
        span = LayerSpan(len(self.blocks), len(self.blocks))
        return self._through(self._any_tokens(x, batch, sequence), x, span)

    def _any_tokens(self, x: Tensor, batch: int, sequence: int) -> Tensor:
        return torch.zeros(batch, sequence, dtype=torch.int64, device=x.device)

    def _computed(self, input_ids: Tensor | None, inputs: CallInputs) -> Any:
        assert input_ids is not None
        (batch, sequence), last = input_ids.shape, inputs.logits_to_keep
        has_mask = "attention_mask" in inputs.named or self.arguments.joins_documents(inputs.named)
        check_auxiliary(self.module, True, has_mask)
        self.tokens.last = last
        out = self._called(input_ids, None, LayerSpan(len(self.blocks)), inputs)
        logits, loss, whole = logits_of(out), None, None
        if inputs.targets is not None:
            loss = self.vocabulary(logits, inputs.targets, inputs.num_items)
            added = auxiliary_loss(self.module, out, batch * sequence)
            loss = loss if added is None else loss + added.to(loss.dtype)
        if inputs.targets is None or inputs.with_logits:
            whole = self.vocabulary.whole_logits(logits, batch, min(last or sequence, sequence))
        return causal_lm_output(loss, whole, out)

    def _through(self, ids: Tensor, given: Tensor | None, span: LayerSpan) -> Tensor:
        """Return what a span of the forward pass makes: the residual, or this rank's part of the logits."""
        self.tokens.last = 0
        try:
            return logits_of(self._called(ids, given, span, CallInputs()))
        except StopError as stop:
            return as_plain(stop.residual)

    def _called(self, ids: Tensor, given: Tensor | None, span: LayerSpan, inputs: CallInputs) -> Any:
        """Return what the forward pass of the model's class does of this rank's part of tokens and inputs."""
        tokens, strategy = self.tokens, self.strategy
        tokens.check(ids)
        self._activations.fill(ids.device)
        core: AxisDims = tuple(dim if dim in TOKENS else "" for dim in strategy.roles.core(True))
        named: dict[str, Any] = {"use_cache": False} if "use_cache" in self._taken else {}
        named |= self.arguments.local(inputs, ids.shape[0])
        own = local_tokens(ids, strategy, core)
        if self.arguments.joins_documents(inputs.named):
            named["attention_mask"] = torch.ones_like(own)
        positions = inputs.named.get("position_ids")
        last_position = positions.max() if positions is not None and splits_rows(strategy) else None
        if self._ring_calls is not None:
            start, end = tokens.core_span(int(ids.shape[1]))
            named["position_ids"] = torch.arange(start, end, device=ids.device).expand(own.shape[0], -1)
            self._ring_calls[0], last_position = 0, torch.tensor(ids.shape[1] - 1)
        before = tokens.ids, tokens.given, self.span
        tokens.ids, tokens.given, self.span, tokens.last_position = ids, given, span, last_position
        tokens.place = strategy.roles.residual
        try:
            with self.dropping():
                out = self._forward(input_ids=own, **named)
            self._require_ring(span)
        except (TypeError, AttributeError) as error:  # as of code of its own that computes with a mask
            self._require_ring(span, error)
            raise
        finally:
            tokens.ids, tokens.given, self.span = before
            tokens.last_position = None
        return out

    def _require_ring(self, span: LayerSpan, cause: Exception | None = None) -> None:
        """Raise UnsupportedError where attention is to run in a ring, and none has."""
        if self._ring_calls is not None and not self._ring_calls[0] and span.first == 0:
            kind = type(self.module).__name__
            raise UnsupportedError(
                f"{kind} computes attention by code of its own, which does not run in a ring"
            ) from cause

    def dropping(self) -> AbstractContextManager[Any]:
        """Return the context manager in which a forward pass runs.

        In training with dropout it is `RankDropout.around`, else one that does nothing.
        """
        return self._drops.around() if self._drops is not None and self.module.training else nullcontext()

    def prune(self, first: int, end: int) -> None:
        """Replace the modules of other pipeline stages by stand-ins; layers `first` to `end` - 1 stay.

        The names of modules stay the same. Raises UnsupportedError, where not all layers stay, if a norm is called
        twice, or the configuration asks for an auxiliary loss.
        """
        names, module = self.anatomy.names, self.module
        self.arguments.is_whole = (first, end) == (0, len(self.blocks))
        check_auxiliary(module, self.arguments.is_whole, False)
        if self.anatomy.norms_twice and (first, end) != (0, len(self.blocks)):
            twice = ", ".join(sorted(self.anatomy.norms_twice))
            raise UnsupportedError(f"{twice}: stages of a pipeline do not share a norm that is called twice")
        self._divide_table(first, end)
        layers = module.get_submodule(names.layers)
        for number, call in enumerate(self.calls):
            call.opens = False
            if not first <= number < end:
                form = self.anatomy.layers[number].results
                layers[number] = OtherStage(number, self, form)
        before = [
            names.embedding,
            *self.anatomy.tables,
            *(p for p, is_before in self.anatomy.ends.items() if is_before),
        ]
        after = [names.head, *(path for path, is_before in self.anatomy.ends.items() if not is_before)]
        for path in self.anatomy.norms:
            (before if path in self.anatomy.norms_before else after).append(path)
        gone = ([] if first == 0 else before) + ([] if end == len(self.blocks) else after)
        for path in gone:
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, OtherStageModule(self.tokens))


class HostedHead(ParallelLinear):
    """The head in the place of the model's own; it makes this rank's part of the logits."""

    def __init__(self, linear: nn.Module, tokens: Tokens, name: str, tied: TiedWeight | None) -> None:
        stored = None if tied is None or tied.is_shared else tied.wanted
        super().__init__(linear, tokens.strategy, place="in", name=name, stored=stored)
        self._tokens = tokens
        object.__setattr__(self, "tied", tied)
        if tied is not None:
            del self.kept["weight"]
        self._use = ParameterUse([entries_of([self])])

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return this rank's part (batch, sequence, words) of the logits of the tokens that get some. Collective.

        x is its part of the residual (batch, sequence, hidden), of all tokens; `Tokens.last` says which get
        logits.
        """
        rows, sizes = self._tokens.kept_rows(as_plain(x))
        if self.tied is not None:
            logits: Tensor = self.tied.logits(self.alone, rows, *sizes)
            for bias in self._use():
                (own,) = self.biases(bias)
                logits = logits + autocast_operands(logits.device.type, own)[0]
            return logits
        return self.alone(rows, *sizes)[0]


def logits_of(out: Any) -> Tensor:
    """Return the logits, as a plain tensor, from `out`, what the forward pass of a model's class returned.

    They are this rank's part of the logits.
    """
    logits: Tensor = out.logits if hasattr(out, "logits") else out[0]
    return as_plain(logits)


def _device_of(module: nn.Module, strategy: LayerStrategy) -> torch.device:
    device = next(module.parameters()).device
    return torch.device(strategy.device_mesh.device_type) if device.type == "meta" else device
