"""Cross entropy of logits whose vocabulary lies on several ranks: no rank has all logits of a token.

The greatest logit, the sum of exponentials and the logit of the target are reductions over the vocabulary (Shoeybi
et al., Megatron-LM, 2019, section 3). A rank that has all words of its tokens computes torch's own cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.algorithms.block.roles import TOKENS, AxisDims, Side
from meshweave.base.errors import UnsupportedError
from meshweave.nn.parallel.awaited import awaited_mean
from meshweave.nn.parallel.embedding import local_tokens
from meshweave.nn.parallel.moves import Mover, PlacedMove, terms
from meshweave.nn.parallel.numbered_sum import NumberedSum
from meshweave.nn.parallel.strategy import LayerStrategy

IGNORED = -100
"""The target of tokens that have no loss, as in torch."""


SumBeside = Callable[[Tensor, Callable[[float], object]], Callable[[], None] | None]
"""What `awaited_mean` takes as `begin`."""


class VocabularyLoss:
    """Mean cross entropy over the tokens of all ranks, of logits whose words lie on several ranks.

    Args:
        words: the size of the vocabulary.
        strategy: how ranks share tokens and words.

    Attributes:
        sum_beside: begins the sum of a loss term over ranks in a message that carries something else as well, as
            `begin` of `awaited_mean` does; None where losses are always summed by themselves.
    """

    def __init__(self, words: int, strategy: LayerStrategy) -> None:
        self.strategy, dims = strategy, strategy.roles.core(False)
        self.words = Side("inner", words)
        self.first, self.end = strategy.span(self.words, dims)
        self.token_dims: AxisDims = tuple(dim if dim in TOKENS else "" for dim in dims)
        partial = terms(tuple(d if d in (*TOKENS, "inner") else "" for d in dims), ("inner",))
        self.greatest = Mover(PlacedMove(strategy, (), partial, self.token_dims, op="max"))
        self.sums = Mover(PlacedMove(strategy, (Side("", 2),), partial, self.token_dims))
        replicated = strategy.roles.replicated
        over_tokens = terms(self.token_dims, TOKENS)
        self.total = NumberedSum(strategy, 1, over_tokens)
        self.sum_beside: SumBeside | None = None
        vocabulary = (self.words,)
        self.whole = Mover(
            PlacedMove(strategy, vocabulary, dims, replicated),
            PlacedMove(strategy, vocabulary, replicated, dims),
        )

    def __call__(self, logits: Tensor, targets: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """Return the mean loss, equal on all ranks: an `AwaitedTensor` where `sum_beside` sums it.

        Args:
            logits: this rank's part of (batch, sequence, words).
            targets: (batch, sequence), all of them; `IGNORED` where there is no loss.
            num_items: by what the sum is divided; None for the number of tokens that have a loss.
        """
        sizes = tuple(targets.shape)
        here = local_tokens(targets, self.strategy, self.token_dims)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        if self.end - self.first == self.words.count:
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), here.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        else:
            loss = self._shared(logits, here, sizes)
        count = (targets != IGNORED).sum() if num_items is None else num_items
        mean = None
        if self.sum_beside is not None and not torch.compiler.is_compiling():
            mean = awaited_mean(loss, count, self.sum_beside)
        return _once(self.total(loss[None])[0] / count if mean is None else mean)

    def _shared(self, logits: Tensor, here: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the sum of losses of the tokens that this rank has, where ranks share the words."""
        greatest = (
            logits.detach().amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
        )
        greatest = self.greatest(greatest, *sizes)[..., None]
        is_here = (here >= self.first) & (here < self.end)
        places = ((here - self.first) * is_here)[..., None]
        shifted = logits - greatest
        target = shifted.gather(-1, places) if logits.shape[-1] else shifted.sum(-1, keepdim=True)
        target = target.masked_fill(~is_here[..., None], 0.0)  # the logit of a word that is left out is -inf
        terms_of = torch.cat((shifted.exp().sum(-1, keepdim=True), target), -1)
        sums = self.sums(terms_of, *sizes)
        losses = (sums[..., 0].log() - sums[..., 1]) * (here != IGNORED)
        return losses.sum()

    def whole_logits(self, logits: Tensor, batch: int, sequence: int) -> Tensor:
        """Return the logits (batch, sequence, words) of all tokens and words, on every rank. Collective.

        `logits` is this rank's part of them; `batch` and `sequence` are global numbers, of the tokens that have
        logits.
        """
        return _once(self.whole(logits, batch, sequence))


def _once(result: Tensor) -> Tensor:
    """Return a result whose gradients have no gradients, and say so; compilers say it themselves."""
    if result.requires_grad and not torch.compiler.is_compiling():
        result.register_hook(_plain_gradient)
    return result


def _plain_gradient(grad: Tensor) -> Tensor:
    """Return a gradient as a plain tensor. Raise UnsupportedError where it is to be differentiated.

    It is a DTensor where what is computed of parameters, as a penalty of weights, was added to the result.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "create_graph=True: gradients of gradients are not computed on a parallelised model; penalties of "
            "gradients, and second derivatives, take a model on one rank"
        )
    return grad.full_tensor() if isinstance(grad, DTensor) else grad
