"""What a rank has of the residual, as code of a model sees it that knows nothing of ranks.

The code of a layer reads from the shape of the residual how many tokens there are, and shapes queries and keys by
it. Where a rank has fewer tokens of the residual than of attention, as with sequence parallelism, the shape that
code sees is that with the tokens of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshweave.algorithms.block.roles import TOKENS, AxisDims, Side, num_parts
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.execute.torch import compat
from meshweave.nn.parallel.strategy import LayerStrategy


class ResidualPart(Tensor):  # type: ignore[misc]
    """A part (batch, sequence, features) of the residual; its `shape` counts the tokens of this rank's attention.

    Attributes:
        ratio: (r, t): a rank has r times as many sequences, and t times as many tokens of each, in attention as in
            this part.
    """

    ratio: ClassVar[tuple[int, int]] = (1, 1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch on the part as it is; only sizes that it returns or takes are of attention."""
        first = args[0] if args else None
        if func in (_SHAPE, Tensor.size) and isinstance(first, cls):
            told = cls._told(super().__torch_function__(_SHAPE, types, (first,)))
            return told if len(args) == 1 and not kwargs else told[(kwargs or {}).get("dim", *args[1:])]
        if func in (Tensor.view, Tensor.reshape) and isinstance(first, cls):
            args = (first, *cls._real(super().__torch_function__(_SHAPE, types, (first,)), args[1:]))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def _told(cls, shape: torch.Size) -> torch.Size:
        if len(shape) != 3:
            return shape
        return torch.Size((shape[0] * cls.ratio[0], shape[1] * cls.ratio[1], shape[2]))

    @classmethod
    def _real(cls, own: torch.Size, wanted: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of `view` for what is there, where a shape is given that was told."""
        sizes = tuple(wanted[0]) if len(wanted) == 1 and isinstance(wanted[0], tuple | list) else wanted
        if len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
            return wanted
        told = own if len(own) == 2 else cls._told(own)
        rows, tokens = cls.ratio
        known = [size for size in sizes if size > 0]
        if len(known) == 2 and len(told) == 3 and sizes[0] == -1 and sizes[1:] == tuple(told[1:]):
            return (-1, sizes[1] // tokens, sizes[2])
        if len(known) == 3 and sizes[0] * sizes[1] * sizes[2] == own.numel() * rows * tokens:
            return (sizes[0] // rows, sizes[1] // tokens, sizes[2])
        return wanted


_SHAPE = Tensor.shape.__get__


@lru_cache(64)
def _part_class(ratio: tuple[int, int]) -> type[ResidualPart]:
    return type("ResidualPart", (ResidualPart,), {"ratio": ratio})


def as_plain(x: Tensor) -> Tensor:
    """Return a `ResidualPart` as a plain tensor with its real shape; another tensor is returned as it is."""
    return x.as_subclass(Tensor) if isinstance(x, ResidualPart) else x


@dataclass
class Tokens:
    """The tokens of a step, and what ranks have of them; one object for all modules of a model.

    Attributes:
        strategy: the strategy on its ranks.
        ids: the tokens (batch, sequence) of all ranks; None outside of a forward pass.
        given: this rank's part of the residual, where a pass begins with it and not with the embedding; else None.
        held: (batch, sequence) of all ranks, for a layer that is computed again in a backward pass.
        place: the layout of what is computed now, of the residual or of inner features: for each mesh axis the dim
            that it splits, or "".
        last: for how many last tokens of a sequence there are logits; 0 for all.
        last_position: the greatest position that any rank has, a tensor (); None where each rank has that position
            itself.
        ratio: that of `ResidualPart`.
    """

    strategy: LayerStrategy
    ids: Tensor | None = None
    given: Tensor | None = None
    place: AxisDims = ()
    held: tuple[int, int] = (0, 0)
    last: int = 0
    last_position: Tensor | None = None
    ratio: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        roles, mesh = self.strategy.roles, self.strategy.mesh.shape
        rows, tokens = (
            num_parts(roles.residual, mesh, (word,)) // num_parts(roles.core(True), mesh, (word,))
            for word in TOKENS
        )
        self.ratio = rows, tokens

    def check(self, ids: Tensor) -> None:
        """Raise LayoutError where tokens `ids` (batch, sequence) of all ranks cannot be shared out to the ranks.

        Each rank must have some, in the residual and in every part of a layer. The batch or sequence of which a
        rank has more in parts of a layer than in the residual must be a multiple of the number of ranks that share
        it.
        """
        shape, roles = self.strategy.mesh.shape, self.strategy.roles
        last = tuple(parts - 1 for parts in shape)  # those of the rank with fewest
        for at, word in enumerate(TOKENS):
            size = int(ids.shape[at])
            for dims in (roles.residual, roles.core(True), roles.core(False)):
                start, end = self.strategy.span(Side(word, size), dims, last)
                most = num_parts(dims, shape, (word,))
                if start == end or (self.ratio[at] > 1 and size % most):
                    raise LayoutError(
                        f"{word} {size} is not shared out to {most} ranks as layers that run the model's own code "
                        f"take it: give {'a multiple' if self.ratio[at] > 1 else 'more, such that each has some'}"
                    )

    def core_span(self, sequence: int) -> tuple[int, int]:
        """Return (first, end): this rank's attention has tokens `first` to `end` - 1 of `sequence` in each row."""
        return self.strategy.span(self.strategy.tokens(1, sequence)[1], self.strategy.roles.core(True))

    @property
    def sizes(self) -> tuple[int, int]:
        """Return (batch, sequence) of all ranks, in a forward pass or when a backward pass computes a layer again.

        Raises UnsupportedError outside of both.
        """
        if self.ids is None and (torch.compiler.is_compiling() or compat.is_in_backward()):
            return self.held
        ids = self.current_ids()
        return int(ids.shape[0]), int(ids.shape[1])

    def rows_of(self, x: Tensor, dims: AxisDims) -> Tensor:
        """Return x (batch * sequence, features), this rank's rows, as (batch, sequence, features).

        `dims` is the layout of x: for each mesh axis the dim that it splits, or "".
        """
        batch, sequence = (
            stop - start
            for start, stop in (self.strategy.span(s, dims) for s in self.strategy.tokens(*self.sizes))
        )
        return x.unflatten(0, (batch, sequence))

    def kept_rows(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return (rows, sizes): the rows of x (batch, sequence, features) whose tokens get logits, by `last`.

        Sizes are (batch, sequence) of these tokens over all ranks.
        """
        batch, sequence = self.sizes
        if not self.last or self.last >= sequence:
            return x, (batch, sequence)
        return x[:, -self.last :], (batch, self.last)

    def told(self, x: Tensor) -> Tensor:
        """Return x, this rank's part of the residual (batch, sequence, features), as a `ResidualPart`, uncopied.

        The result has the same elements, but its `shape` is (batch * ratio[0], sequence * ratio[1], features),
        with as many tokens as the rank has in attention. With ratio (1, 1) it is x itself. `as_plain` undoes it.
        """
        return x if self.ratio == (1, 1) else x.as_subclass(_part_class(self.ratio))

    def uncompiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run`, excluded from torch.compile where `ratio` is not (1, 1).

        A graph would not know that the `shape` which code sees differs from the real one.
        """
        if self.ratio == (1, 1):
            return run
        reason = (
            f"{self.strategy.name} tells the code of a model that a rank has more tokens than it has, which "
            "graphs do not know: it runs uncompiled, without fullgraph; data_parallel, zero3 and megatron are "
            "compiled"
        )
        made: Callable[..., Any] = torch.compiler.disable(run, reason=reason)
        return made

    def stand_in(self) -> Tensor:
        """Return zeros in the shape of `given`, for the code before the first layer that runs.

        That layer is then given the residual itself. The code may change the zeros in place.
        """
        assert self.given is not None
        return self.told(torch.zeros_like(self.given, requires_grad=False))

    def current_ids(self) -> Tensor:
        """Return `ids`. Raises UnsupportedError outside of a forward pass of the whole model."""
        if self.ids is None:
            raise UnsupportedError("a part of a parallelised model is called by itself: call the whole model")
        return self.ids
