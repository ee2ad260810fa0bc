"""Embeddings: rows of a table that ranks share, and learned positions of the tokens that a rank has."""

from __future__ import annotations

from torch import Tensor, nn

from meshweave.algorithms.block.roles import TOKENS, AxisDims, Side, gradient_dims, product
from meshweave.nn.parallel.buckets import KeptParameter
from meshweave.nn.parallel.moves import Mover, PlacedMove, terms
from meshweave.nn.parallel.parameters import ParameterLayout
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.uses import ParameterUse, entries_of


class ParallelEmbedding(nn.Module):  # type: ignore[misc]
    """A table (words, features), split as the second weight of a feed-forward part is; words are inner features.

    A rank looks up the tokens whose words it has, with rows of zeros for others; rows are then summed over ranks
    to the layout of the residual. As with an `nn.Embedding`, looking up `padding_idx` gives its row no gradient.

    Args:
        embedding: an `nn.Embedding` with the whole table, or with a weight on the meta device.
        strategy: how ranks share the table.
        name: its name in the model, for errors.

    Raises:
        LayoutError: DTensor has no placements for the part of the table that ranks keep.
    """

    def __init__(self, embedding: nn.Module, strategy: LayerStrategy, name: str) -> None:
        super().__init__()
        whole = embedding.weight
        self.words, self.features = (int(size) for size in whole.shape)
        self.layer_strategy, roles = strategy, strategy.roles
        sides = Side("inner", self.words), Side("hidden", self.features)
        used = roles.weight(False)
        self.stored = roles.stored(used, sides)
        layout = ParameterLayout(sides, self.stored)
        self.weight = layout.distribute(name, whole, strategy)
        self.layouts = {"weight": layout}
        self.token_dims: AxisDims = tuple(d if d in TOKENS else "" for d in roles.operand(False))
        self.first, self.end = strategy.span(sides[0], used)
        padding = getattr(embedding, "padding_idx", None)
        self.padding_row: int | None = None
        if padding is not None and self.first <= padding < self.end:
            self.padding_row = int(padding) - self.first
        arriving = gradient_dims(roles.product(False))
        natural = product(self.token_dims, arriving, TOKENS)
        of_table: AxisDims = tuple(
            "partial" if n == "partial" else u for n, u in zip(natural, used, strict=True)
        )
        self.kept = {"weight": KeptParameter(strategy, layout, used, of_table)}
        self.opened: dict[str, Tensor] = {}
        self.use = ParameterUse([entries_of([self])])
        landed = product(roles.operand(False), used, ("inner",))
        hidden = (Side("hidden", self.features),)
        self.leave = Mover(
            PlacedMove(strategy, hidden, landed, roles.residual),
            PlacedMove(strategy, hidden, roles.residual, arriving),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return this rank's part (batch, sequence, features) of the residual. Collective.

        Args:
            tokens: (batch, sequence), all of them, equal on all ranks.
        """
        batch, sequence = tokens.shape
        here = local_tokens(tokens, self.layer_strategy, self.token_dims)
        (table,) = self.use()
        if self.end - self.first == self.words:
            rows = nn.functional.embedding(here, table, self.padding_row)
        else:
            is_here = (here >= self.first) & (here < self.end)
            places = (here - self.first) * is_here
            rows = nn.functional.embedding(places, table, self.padding_row) * is_here[..., None]
        return self.leave(rows, batch, sequence)

    def extra_repr(self) -> str:
        """Return the global sizes of the table as text: "words, features"."""
        return f"{self.words}, {self.features}"


class ParallelPositions(nn.Module):  # type: ignore[misc]
    """A table of learned positions (positions, features), split over ranks only where the residual's features are.

    Args:
        embedding: an `nn.Embedding` with the whole table, or with a weight on the meta device.
        strategy: how ranks share the residual.
        name: its name in the model, for errors.
    """

    def __init__(self, embedding: nn.Module, strategy: LayerStrategy, name: str) -> None:
        super().__init__()
        whole, roles = embedding.weight, strategy.roles
        self.layer_strategy = strategy
        sides = Side("", int(whole.shape[0])), Side("hidden", int(whole.shape[1]))
        layout = ParameterLayout(sides, roles.gain)
        self.weight = layout.distribute(name, whole, strategy)
        self.layouts = {"weight": layout}
        self.kept = {"weight": KeptParameter(strategy, layout, roles.gain, terms(roles.residual, TOKENS))}
        self.opened: dict[str, Tensor] = {}
        self._use = ParameterUse([entries_of([self])])

    def forward(self, sequence: int) -> Tensor:
        """Return the embeddings of this rank's positions in the residual: (1, local tokens, local features).

        `sequence` is the global number of tokens of a sequence, whose positions are 0 to `sequence` - 1.
        """
        (table,) = self._use()
        start, stop = self.layer_strategy.span(Side("sequence", sequence), self.layer_strategy.roles.residual)
        return table[start:stop][None]


def local_tokens(tokens: Tensor, strategy: LayerStrategy, dims: AxisDims) -> Tensor:
    """Return a view of this rank's part of `tokens` (batch, sequence), which every rank is given whole.

    Args:
        strategy: the ranks that share the tokens.
        dims: for each mesh axis what it splits: "batch", "sequence" or "".
    """
    for at, side in enumerate(strategy.tokens(*tokens.shape)):
        start, stop = strategy.span(side, dims)
        tokens = tokens.narrow(at, start, stop - start)
    return tokens
