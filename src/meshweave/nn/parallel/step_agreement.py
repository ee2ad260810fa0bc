"""What ranks compare in each call of a parallelised model, before they believe what it returns.

A number of 64 bits stands for all that ranks must have alike in a call: tokens, targets, modes, the generator of
dropout, how many steps were taken. Its greatest and least are one all-reduce of 16 bytes, which runs beside the
forward pass; the first call, each `debug_every`-th and one of a new kind wait for it first and compare more.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshweave.base.errors import LayoutError, MeshweaveError
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.agreed import agree, digest
from meshweave.nn.parallel.checksums import checksum
from meshweave.nn.parallel.model_words import copy_words, parameter_words, setting_words
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.tokens import TokenLimits

_TARGETS_FACTOR = -7046029254386353131  # odd: targets that are tokens' count, too
_WHAT = "all ranks to compare what they give a parallelised model"


@dataclass
class Progress:
    """What a model has been through on this rank.

    Attributes:
        calls: forward calls so far.
        steps: steps of optimizers that hold its parameters.
        options: settings of these at their last steps, in words.
    """

    calls: int = 0
    steps: int = 0
    options: dict[str, str] = field(default_factory=dict)


class StepAgreement:
    """The comparisons of one model.

    Args:
        module: the model, parallelised.
        draws: whether ranks must have torch's generator in the same state where the model trains.
        debug_every: calls between two that compare all that the first one does; 0 for the first alone.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: LayerStrategy,
        limits: TokenLimits,
        *,
        draws: bool,
        recompute: bool,
        debug_every: int,
    ) -> None:
        self.module, self.strategy, self.limits = module, strategy, limits
        self.draws, self.recompute, self.debug_every = draws, recompute, debug_every
        self.progress = Progress()
        self._kinds: set[str] = set()
        self._children = list(module.modules())

    def context(self, device: torch.device) -> TorchContext:
        """Return the context that ranks talk in."""
        return TorchContext.default(device)

    @contextlib.contextmanager
    def call(self, tokens: Tensor, targets: Tensor | None) -> Iterator[None]:
        """Compare what ranks give a call that runs inside; see `begin`."""
        if torch.compiler.is_compiling():
            yield
            return
        check = self.begin(tokens, targets)
        try:
            yield
        except MeshweaveError as error:
            check.explain(error)
            raise
        check.end()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def begin(self, tokens: Tensor, targets: Tensor | None) -> CallCheck:
        """Return the check of a call, whose comparison has begun; all ranks call it.

        Raises:
            LayoutError: tokens or targets are none that the model takes, or ranks differ in a call that waits.
        """
        self.progress.calls += 1
        check = CallCheck(self, tokens, targets)
        words = check.words()
        kind = digest(words["modes"]) + str(check.shapes)
        is_due = self.debug_every > 0 and self.progress.calls % self.debug_every == 0
        is_whole = is_due or not self._kinds
        if is_whole:
            words |= self._all_words()
        check.start(words, is_whole=is_whole)
        is_new, _ = kind not in self._kinds, self._kinds.add(kind)
        problem = self.limits.problem(tokens, targets)
        if is_whole or is_new or problem or tokens.device.type != "cpu":
            check.end()
        if problem:
            raise LayoutError(problem)
        return check

    def _all_words(self) -> dict[str, Mapping[str, str]]:
        named = list(self.module.named_parameters())
        modes = {f"{name}.training": str(child.training) for name, child in self.module.named_modules()}
        return {
            "parameters": parameter_words(self.module),
            "settings": setting_words(),
            "modes of modules": modes,
            **copy_words("copies", named),
        }

    def cheap_words(self) -> dict[str, Mapping[str, str]]:
        """Return what ranks must have alike in every call but for tokens."""
        device = self.strategy.device_mesh.device_type
        is_cast = torch.is_autocast_enabled(device)
        modes = {
            "training": str(self.module.training),
            "modules in training": str(sum(child.training for child in self._children)),
            "gradients": str(torch.is_grad_enabled()),
            "autocast": str(torch.get_autocast_dtype(device)) if is_cast else "off",
            "recompute": str(self.recompute),
        }
        progress = {
            "optimizer steps": str(self.progress.steps),
            "forward calls": str(self.progress.calls),
            "gradients": "kept from before" if self._has_gradients() else "none from before",
            **self.progress.options,
        }
        words: dict[str, Mapping[str, str]] = {"modes": modes, "progress": progress}
        if self.draws and self.module.training:
            words["generator"] = {"state": f"#{int(checksum(torch.get_rng_state())):x}"}
        return words

    def _has_gradients(self) -> bool:
        first = next((p for p in self.module.parameters() if p.requires_grad), None)
        return first is not None and first.grad is not None

    def compare(self, words: Mapping[str, Mapping[str, str]], what: str = _WHAT) -> None:
        """Raise LayoutError, on all ranks, where they differ; all call it."""
        device = torch.device(self.strategy.device_mesh.device_type)
        agree(self.context(device), self.strategy.mesh.ranks, words, what)


class CallCheck:
    """The comparison of one call."""

    def __init__(self, owner: StepAgreement, tokens: Tensor, targets: Tensor | None) -> None:
        self.owner, self.tokens, self.targets = owner, tokens, targets
        self._words: dict[str, Mapping[str, str]] = {}
        self._work: Any = None
        self._is_whole = False
        self._number = torch.zeros(0)

    @property
    def shapes(self) -> list[str]:
        """Return shapes and dtypes of tokens and targets."""
        return [
            "none" if each is None else f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}"
            for each in (self.tokens, self.targets)
        ]

    def words(self) -> dict[str, Mapping[str, str]]:
        """Return what ranks must have alike but for the values of tokens and targets."""
        tokens, targets = self.shapes
        return {"tokens": {"shape": tokens}, "targets": {"shape": targets}, **self.owner.cheap_words()}

    def start(self, words: dict[str, Mapping[str, str]], *, is_whole: bool) -> None:
        """Begin to compare; `is_whole` where what some ranks have copies of is among the words."""
        strategy = self.owner.strategy
        self._words, self._is_whole = words, is_whole
        if strategy.is_alone:
            return
        own = int(digest(json_words(words))[:15], 16)  # type: ignore[arg-type]
        number = checksum(self.tokens) + own
        if self.targets is not None:
            number = number + checksum(self.targets) * _TARGETS_FACTOR
        self._number = torch.stack((number, ~number))
        context = self.owner.context(self.tokens.device)
        group = context.group_of(strategy.mesh.ranks)
        self._work = dist.all_reduce(self._number, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def end(self) -> None:
        """Raise LayoutError, on all ranks, where they differ; once all have started."""
        if self._work is None:
            return
        work, self._work = self._work, None
        strategy = self.owner.strategy
        context = self.owner.context(self.tokens.device)
        others = [rank for rank in strategy.mesh.ranks if rank != strategy.rank]
        with context.guard(_WHAT, others) as wait:
            work.wait(wait.timeout)
        greatest, least = self._number.tolist()
        is_other = greatest != ~least
        if is_other or self._is_whole:
            for name, given in (("tokens", self.tokens), ("targets", self.targets)):
                self._words[name] = {**self._words[name], **_values(name, given)}
            self.owner.compare(self._words)
            assert not is_other, "numbers of ranks differ, and nothing that they stand for"

    def explain(self, error: MeshweaveError) -> None:
        """Raise LayoutError for an error of a pass, where it came since ranks had given different things."""
        if self._work is None:
            return
        try:
            self.end()
        except LayoutError:
            raise
        except MeshweaveError:
            tokens, targets = self.shapes
            raise LayoutError(
                f"ranks gave the model other tokens, targets or modes in call {self.owner.progress.calls}; this one "
                f"tokens {tokens} and targets {targets}: {error}"
            ) from error


def json_words(words: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return words by subject as one text each; those of parts are of some ranks alone, and left out."""
    return {key: json.dumps(of_it, sort_keys=True) for key, of_it in words.items() if " of parts " not in key}


def _values(name: str, given: Tensor | None) -> dict[str, str]:
    """Return the first values of tokens or targets, and the checksum of all."""
    if given is None:
        return {}
    first = ", ".join(map(str, given.flatten()[:_SHOWN].tolist()))
    return {f"the first {name}": first, "values": f"#{int(checksum(given)):x}"}


_SHOWN = 6
