"""What tokens and targets a model takes: a table that ranks share has nothing for a token that no rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshweave.base.errors import LayoutError
from meshweave.nn.parallel.loss import IGNORED


@dataclass(frozen=True)
class TokenLimits:
    """The tokens and targets that a model takes.

    Attributes:
        words: the size of the table of tokens: a token is below it.
        targets: the number of logits of a token: a target is below it, or -100.
        positions: the most tokens of a sequence; None without a table of positions.
    """

    words: int
    targets: int
    positions: int | None = None

    def check(self, tokens: Tensor | None, targets: Tensor | None = None) -> None:
        """Raise LayoutError where the model does not take tokens or targets (batch, sequence); None passes."""
        if problem := self.problem(tokens, targets):
            raise LayoutError(problem)

    def problem(self, tokens: Tensor | None, targets: Tensor | None) -> str:
        """Return a sentence why the model does not take tokens or targets (batch, sequence); "" where it does.

        What is None is not checked. Where all are in the vocabulary, each of the two takes one reduction and one
        copy to the host.
        """
        if tokens is not None:
            if problem := self._kind_problem("tokens", tokens, (torch.int64, torch.int32)):
                return problem
            if self.positions is not None and tokens.shape[1] > self.positions:
                return (
                    f"a sequence of {tokens.shape[1]} tokens, and the model has {self.positions} learned "
                    "positions; give shorter ones"
                )
            least, most = torch.stack(tokens.aminmax()).tolist()
            if least < 0 or most >= self.words:
                return _outside("tokens", tokens, (tokens < 0) | (tokens >= self.words), self.words, "")
        if targets is None:
            return ""
        if problem := self._kind_problem("targets", targets, (torch.int64,)):
            return problem
        if tokens is not None and targets.shape != tokens.shape:
            shapes = f"targets are of shape {tuple(targets.shape)}, tokens of {tuple(tokens.shape)}"
            return f"{shapes}; give one for each token"
        if targets is tokens and self.targets >= self.words:
            return ""  # they were looked at
        least, most = torch.stack(targets.aminmax()).tolist()
        if least >= 0 and most < self.targets:
            return ""
        outside = ((targets < 0) | (targets >= self.targets)) & (targets != IGNORED)
        if bool(outside.any()):
            return _outside("targets", targets, outside, self.targets, f", or {IGNORED} for none")
        return ""

    def _kind_problem(self, name: str, given: Tensor, dtypes: tuple[torch.dtype, ...]) -> str:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        if given.dtype not in dtypes:
            return f"{name} are {str(given.dtype).removeprefix('torch.')}; give {known}"
        if given.is_meta:
            return f"{name} are on the meta device, where nothing has numbers; give them on that of the model"
        if given.ndim != 2 or not given.numel():
            return (
                f"{name} are of shape {tuple(given.shape)}; give (batch, sequence), and at least one of each"
            )
        return ""


def _outside(name: str, given: Tensor, outside: Tensor, words: int, or_else: str) -> str:
    places = outside.nonzero().tolist()
    row, column = places[0]
    more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
    return (
        f"{name}[{row}, {column}] is {int(given[row, column])}{more}: the vocabulary has {words} words, 0 to "
        f"{words - 1}{or_else}"
    )
