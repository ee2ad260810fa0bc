"""The inputs that a proof gives to a model and its original, and how it gets outputs and losses of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.base.errors import UnsupportedError
from meshweave.nn.prove.state import takes

LossOf = Callable[..., Tensor]
"""(module, *inputs) -> the loss, a tensor without dims."""

IGNORED = -100
_TOKENS = 24


@dataclass(frozen=True)
class Given:
    """The inputs of a proof, equal on all ranks.

    Attributes:
        inputs: arguments of the module, each with the batch as its first dim.
        targets: for each token the one to predict, or `IGNORED`; None where inputs are no tokens.
        loss: a function (module, *inputs) that returns the loss; None for the cross entropy of the module's logits
            with `targets`, or without targets a weighted mean of its output.
        parts: the number of data-parallel ranks, over which the rows are split as by `torch.tensor_split`.
        part: the index of the part that this rank takes, from 0.
    """

    inputs: tuple[Any, ...]
    targets: Tensor | None
    loss: LossOf | None = None
    parts: int = 1
    part: int = 0

    def rows(self, part: int) -> Given:
        """Return the inputs with only the rows of part number `part`, from 0, of the `parts`."""

        def taken(value: Any) -> Any:
            is_rows = isinstance(value, Tensor) and value.ndim
            return value.tensor_split(self.parts)[part] if is_rows else value

        targets = None if self.targets is None else taken(self.targets)
        return Given(tuple(map(taken, self.inputs)), targets, self.loss)

    def cast(self, dtype: torch.dtype | None) -> Given:
        """Return the inputs with floating-point tensors cast to `dtype`; for None unchanged."""

        def taken(value: Any) -> Any:
            return (
                value.to(dtype)
                if isinstance(value, Tensor) and value.is_floating_point() and dtype
                else value
            )

        return replace(self, inputs=tuple(map(taken, self.inputs)))

    def loss_hint(self, name: str) -> str:
        """Return the likely cause, as text, where logits agree and a loss does not; "" if none is known.

        `name` is "loss of labels", "loss of targets" or "loss".
        """
        if name == "loss of targets":
            return (
                "forward of the original returns for targets another loss than the mean cross entropy of its "
                "logits, which is computed here: compute its own of the logits, outside of forward"
            )
        if self.targets is None:
            return ""
        kept = int((self.targets != IGNORED).sum())
        return (
            f"what is made of the logits: the number of tokens that it is averaged over ({kept} of "
            f"{self.targets.numel()} have a target), or a sum over words or ranks"
        )


def generated(model: nn.Module, ranks: int, like: torch.device, sizes: tuple[int, int] | None) -> Given:
    """Return seeded inputs for a model: tokens where it has a vocabulary, else rows of random features.

    Args:
        model: the original.
        ranks: the number by which the chosen batch and sequence are divisible; unused with `sizes`.
        like: the device of the inputs.
        sizes: (batch, sequence); None to choose them.

    Raises UnsupportedError where the model has neither a vocabulary nor a linear layer.
    """
    generator = torch.Generator().manual_seed(31)
    batch, sequence = sizes or (max(2, ranks), ranks * max(1, -(-_TOKENS // ranks)))
    words = vocabulary_of(model)
    if words:
        shape = batch, sequence
        tokens, targets = (torch.randint(0, words, shape, generator=generator).to(like) for _ in range(2))
        targets[:, 1 % sequence] = IGNORED
        return Given((tokens,), targets)
    linear = next((child for child in model.modules() if isinstance(child, nn.Linear)), None)
    if linear is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no embedding and no linear layer to tell what it takes; give inputs="
        )
    rows = torch.randn(batch, sequence, linear.in_features, generator=generator)
    return Given((rows.to(like, next(model.parameters()).dtype),), None)


def vocabulary_of(model: nn.Module) -> int:
    """Return the vocabulary size: the configuration's `vocab_size`, the first embedding's rows, or else 0.

    It is at most the rows of the table of tokens, where the model says which embedding that is.
    """
    table = next((child for child in model.modules() if isinstance(child, nn.Embedding)), None)
    if table is None:
        return 0
    said = getattr(getattr(model, "config", None), "vocab_size", None)
    words = said if isinstance(said, int) else int(table.num_embeddings)
    try:
        own = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return words
    return min(words, int(own.num_embeddings)) if isinstance(own, nn.Embedding) else words


def outputs_of(module: nn.Module, given: Given) -> dict[str, Tensor]:
    """Return the results of a module by name: "logits", or "output" where `given` has no targets; and "loss".

    "loss" is `loss_of` the logits or output. If the module takes labels or targets and returns a loss itself, that
    is under "loss of labels" or "loss of targets". With `given.loss` there is only "loss", the result of that
    function. DTensors are gathered whole, which is collective.

    Raises UnsupportedError where the module returns neither a tensor nor logits.
    """
    if given.loss is not None:
        return {"loss": whole(given.loss(module, *given.inputs))}
    named = arguments_of(module, given)
    word = next((each for each in _OWN if each in named), "")
    out = module(*given.inputs, **named)
    alone = out if isinstance(out, Tensor) and not out.ndim and word else None
    if alone is not None:  # it returns logits where there are no targets
        del named[word]
        out = module(*given.inputs, **named)
    logits = whole(_tensor_of(out))
    outputs = {"logits" if given.targets is not None else "output": logits}
    own = alone if alone is not None else _loss_of(out, word) if word else None
    if own is not None:
        outputs[_OWN[word]] = whole(own)
    outputs["loss"] = loss_of(logits, given.targets)
    return outputs


def arguments_of(module: nn.Module, given: Given) -> dict[str, Any]:
    """Return keyword arguments to call a module with, beside inputs: no cache, and targets if it takes them."""
    named: dict[str, Any] = {"use_cache": False} if takes(module.forward, "use_cache") else {}
    wrapped = getattr(module, "module", module)
    word = next((each for each in _OWN if takes(module.forward, each) or takes(wrapped.forward, each)), "")
    if given.targets is not None and word:
        named[word] = given.targets if word == "labels" else without_ignored(given.targets)
    return named


_OWN = {"labels": "loss of labels", "targets": "loss of targets"}
"""Under which name the loss stands that a module returns for an argument."""


def without_ignored(targets: Tensor) -> Tensor:
    """Return targets with negative ones replaced by token 0: losses such as nanoGPT's ignore -1, not -100."""
    return targets.clamp(min=0)


def _loss_of(out: Any, word: str) -> Tensor | None:
    """Return the loss in what a module returned; None where it has none, or it is no number."""
    own = getattr(out, "loss", None)
    values = list(out.values()) if isinstance(out, Mapping) else out
    if own is None and word == "targets" and isinstance(values, list | tuple):
        own = next((each for each in values if isinstance(each, Tensor) and not each.ndim), None)
    return own if isinstance(own, Tensor) and not own.ndim else None


def _tensor_of(out: Any) -> Tensor:
    """Return the tensor of what a module returned: its logits, or the first one."""
    if isinstance(out, Tensor):
        return out
    named = getattr(out, "logits", None)
    if isinstance(named, Tensor):
        return named
    values: Sequence[Any] = list(out.values()) if isinstance(out, Mapping) else out
    if isinstance(values, list | tuple):
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                return value
    raise UnsupportedError(f"{type(out).__name__} is returned, which has no logits; give loss=")


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor gathered whole, which is collective, or a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(out: Tensor, targets: Tensor | None) -> Tensor:
    """Return the mean cross entropy () of logits `out` (..., words) with the `targets` (...) not `IGNORED`.

    Without targets, or where they have another shape, it is the mean of all elements of `out` times fixed weights
    between -1 and 1, which are the same for each row.
    """
    if targets is not None and out.shape[:-1] == targets.shape:
        logits = out if out.dtype == torch.float64 else out.float()
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    weights = torch.arange(math.prod(out.shape[1:]), device=out.device, dtype=out.dtype)
    return (out.flatten(1) * (weights * 1.7).sin()).mean()
