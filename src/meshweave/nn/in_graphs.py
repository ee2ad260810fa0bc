"""Products inside of graphs that torch traces (`torch.compile`, AOTAutograd, fake tensors): one node each.

Dynamo puts a call of `matmul` into its graph whole (`allow_in_graph`), with arguments that a graph can have:
tensors, numbers and text. What traces that graph further meets the product of the local parts as an op,
`meshweave::product`. Tuning and binding happen at its first run, and not while a graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshweave.base.errors import LayoutError
from meshweave.execute.torch import compat
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.custom_ops import LocalFunction, LocalOp

PRODUCT = LocalOp("product")

PlacementText = tuple[str, int | str, int]
"""A placement as a graph can have it: its kind, its dim or operation, and its split factor."""


def placement_texts(placements: Sequence[Placement] | None) -> tuple[PlacementText, ...] | None:
    """Return placements as text, which a graph can hold as constants; None stays None.

    Raises LayoutError for placements that have no text.
    """
    if placements is None:
        return None
    texts: list[PlacementText] = []
    for placement in placements:
        if isinstance(placement, Replicate):
            texts.append(("R", 0, 0))
        elif isinstance(placement, Partial):
            texts.append(("P", placement.reduce_op, 0))
        elif type(placement) is Shard:
            texts.append(("S", placement.dim, 0))
        elif compat.is_strided_shard(placement):
            texts.append(("T", placement.dim, placement.split_factor))
        else:
            raise LayoutError(f"placement {placement!r} is none of Shard, Replicate, Partial, _StridedShard")
    return tuple(texts)


def placements_from(texts: Sequence[PlacementText] | None) -> tuple[Placement, ...] | None:
    """Return the placements whose `placement_texts` are `texts`; None stays None."""
    if texts is None:
        return None
    make: dict[str, Callable[[Any, int], Placement]] = {
        "R": lambda _, __: Replicate(),
        "P": lambda operation, _: Partial(operation),
        "S": lambda dim, _: Shard(dim),
        "T": compat.strided_shard,
    }
    return tuple(make[kind](what, factor) for kind, what, factor in texts)


class LocalPlan(Protocol):
    """A distributed product C = A B that is tuned and bound on this rank."""

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return this rank's shard of C from its shards of A and B, in new memory. Collective."""


class TracedProduct(LocalFunction):
    """A distributed product C = A B as a function of a compiled graph, planned at its first run.

    Args:
        title: what it multiplies, in words.
        identity: text that differs between any two products of a process that may not share a plan.
        shape: (rows, columns) of this rank's shard of C.
        plan: tunes and binds the product, all ranks together; called outside of any trace.
    """

    def __init__(
        self, title: str, identity: str, shape: tuple[int, int], plan: Callable[[], LocalPlan]
    ) -> None:
        super().__init__(title, identity)
        self.shape, self._plan = shape, plan

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return [this rank's shard of C], from `inputs`, its shards of A and B. Collective."""
        a, b = inputs
        return [self._plan().multiply(a, b).contiguous()]

    def empty(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return [an empty tensor of the shape of this rank's shard of C, of the operands' dtype]."""
        return [inputs[0].new_empty(self.shape)]


class TracedProducts(dict[Any, TracedProduct]):
    """The traced products of a `TorchContext` by key; kept as long as the context, since graphs name them by
    text.
    """


def traced_product(
    context: TorchContext,
    key: Any,
    title: str,
    shape: tuple[int, int],
    plan: Callable[[], LocalPlan],
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """Return this rank's shard of C = A B, computed by one node of the graph that is being traced.

    Args:
        context: the ranks' context, which keeps the product for later calls with the same key.
        key: which product of the context this is; hashable, and its `repr` is the same text for equal keys.
        title: what it multiplies, in words.
        shape: (rows, columns) of this rank's shard of C.
        plan: tunes and binds the product at its first run, all ranks together; called outside of any trace.
        a, b: this rank's shards of A and B.
    """
    known = context.cache(TracedProducts)
    product = known.get(key)
    if product is None:
        product = known[key] = TracedProduct(title, f"{context.number} {key!r}", shape, plan)
    (result,) = PRODUCT(product, [a, b])
    return result


def context_of(number: int, device: str) -> TorchContext:
    """Return the context that has `number` in this process; for -1, the default one of `device`, such as "cuda".

    Raises BindError where no context has this number any more.
    """
    return TorchContext.default(device) if number < 0 else TorchContext.numbered(number)


allow_in_graph = torch.compiler.allow_in_graph

CLUSTER_NO_CONSTANT = "a described cluster is no constant of a graph; name it as in the catalog"
"""Why the graph breaks at a product that is given one."""
