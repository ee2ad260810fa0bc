"""Nodes of autograd between the parameters that a rank keeps and what modules compute with.

`OwnParts` takes this rank's part of each parameter. `UsedTogether` makes of those of a bucket what is used, and
begins the sum of their gradients. `GatherAgain` lets a backward pass gather what was freed after the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshweave.execute.torch import compat
from meshweave.nn.parallel.buckets import ParameterBucket
from meshweave.nn.parallel.put_gradients import put_gradients
from meshweave.nn.saved_versions import check_versions, versions


@dataclass(eq=False)
class GatheredBucket:
    """A bucket after its all-gather, whose memory can be freed and filled again.

    Attributes:
        bucket: the parameters.
        own: this rank's shard of each parameter.
    """

    bucket: ParameterBucket
    own: tuple[Tensor, ...]

    def fill_again(self, flat: Tensor) -> None:
        """Gather the bucket again into `flat` (its `num_used` elements), if the storage of `flat` was freed.

        Collective: the storage must be freed on all ranks or on none.
        """
        storage = flat.untyped_storage()
        if not storage.size():
            storage.resize_(flat.numel() * flat.element_size())
            # Not by its name, for what autograd keeps of it is the same as before.
            self.bucket.fill(self.bucket.views(flat.data), self.own)


Sums = list[Callable[[], list[Tensor]]]
"""What ends sums of gradients that have begun, and returns those to which no rank has given a term."""


class OwnParts(torch.autograd.Function):  # type: ignore[misc]
    """An autograd node from parameters to this rank's parts of them; its backward part ends the gradient sums.

    Args:
        sums: the functions that end sums of gradients that have begun; the backward part calls and removes them.
        last: a bucket of the last of the parameters, which are used as they are kept: its sum of gradients, the
            last of a backward pass, begins here. None if there is no such bucket.
        *parameters: DTensors.
    """

    @staticmethod
    def forward(
        ctx: Any, sums: Sums, last: ParameterBucket | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Return this rank's shard of each parameter, and note their versions for the backward part."""
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.last, ctx.parameters = sums, last, parameters
        ctx.versions = versions(parameters) if any(ctx.needs_input_grad) else []
        parts = compat.local_tensors(parameters)
        own = list(map(Tensor.view_as, parts, parts))
        ctx.shapes = [] if last is None else [part.shape for part in parts[-len(last.kept) :]]
        if not all(ctx.needs_input_grad[2:]):
            frozen = [mine for mine, each in zip(own, parameters, strict=True) if not each.requires_grad]
            ctx.mark_non_differentiable(*frozen)
        return tuple(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Wait for the sums of gradients, and put gradients into `.grad` where autograd would do nothing else.

        Return for each parameter the gradient that is left to autograd, else None, as where no rank has one: an
        optimizer passes over such a parameter. Raises RuntimeError where a parameter was changed in place since
        the forward part.
        """
        if ctx.last is not None:
            first = len(grads) - len(ctx.shapes)
            needs = ctx.needs_input_grad[2 + first :]
            grads = (*grads[:first], *_begun(ctx.last, ctx.shapes, ctx.sums, grads[first:], needs))
        empty = list[Tensor]()
        while ctx.sums:
            empty += ctx.sums.pop(0)()
        if empty:
            grads = tuple(None if any(grad is each for each in empty) else grad for grad in grads)
        check_versions(ctx.parameters, ctx.versions)
        return None, None, *put_gradients(ctx.parameters, grads, ctx.next_functions)


def _begun(
    bucket: ParameterBucket,
    shapes: Sequence[torch.Size],
    sums: Sums,
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return memory for the sums of gradients, which have begun; None for what has no gradient.

    Args:
        shapes: of what this rank keeps.
        sums: gets what ends them.
        needs: of which parameters there are gradients.
    """
    made: list[Tensor | None] = [None] * len(grads)
    places = [at for at, is_needed in enumerate(needs) if is_needed]
    if any(grads[at] is not None for at in places):
        own = bucket.subset(tuple(places))
        summed, end = own.begin_sum([grads[at] for at in places], [shapes[at] for at in places])
        sums.append(end)
        for at, grad in zip(places, summed, strict=True):
            made[at] = grad
    return made


class UsedTogether(torch.autograd.Function):  # type: ignore[misc]
    """An autograd node from a bucket's parts, which `OwnParts` has made, to its parameters as they are used.

    Its backward part begins the sum of their gradients, which ends in that of `OwnParts`, the last to run. Until
    then the gradients between the two nodes are memory without values, which no other code reads: `OwnParts`
    gives each parameter to one bucket alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        bucket: ParameterBucket,
        gathered: list[tuple[GatheredBucket, Tensor]],
        sums: Sums,
        *own: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the parameters of `bucket` as products use them, from this rank's shards `own`.

        Collective where they are gathered. Then (the gathered bucket, its memory of `num_used` elements) is
        appended to `gathered`. The backward part appends to `sums` the function that ends the sum of gradients.
        """
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.sums, ctx.shapes = bucket, sums, [each.shape for each in own]
        frozen = [not each.requires_grad for each in own]
        if bucket.kept[0].gathered:
            flat = own[0].new_empty(bucket.num_used)
            bucket.fill(views := bucket.views(flat), own)
            gathered.append((GatheredBucket(bucket, tuple(each.detach() for each in own)), flat))
        else:
            views = [each.view_as(each) for each in own]
        ctx.mark_non_differentiable(
            *(view for view, is_frozen in zip(views, frozen, strict=True) if is_frozen)
        )
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Begin the sum of gradients; return memory for this rank's part of each, None for a missing gradient."""
        return None, None, None, *_begun(ctx.bucket, ctx.shapes, ctx.sums, grads, ctx.needs_input_grad[3:])


class GatherAgain(torch.autograd.Function):  # type: ignore[misc]
    """The identity, for results of code that uses gathered parameters; its backward gathers them again."""

    @staticmethod
    def forward(
        ctx: Any, gathered: list[tuple[GatheredBucket, Tensor]], *results: Tensor
    ) -> tuple[Tensor, ...]:
        """Return views of `results`, and save the `gathered` memory of buckets for the backward part."""
        ctx.set_materialize_grads(False)
        ctx.buckets = [bucket for bucket, _ in gathered]
        ctx.save_for_backward(*(flat for _, flat in gathered))
        return tuple([x.view_as(x) for x in results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gather freed buckets again; return None for `gathered`, then `grads` as they are. Collective."""
        for bucket, flat in zip(ctx.buckets, ctx.saved_tensors, strict=True):
            bucket.fill_again(flat)
        return None, *grads
