"""A table of which the first and the last stage of a pipeline each have a copy: embedding and head are one tensor.

After a step both have the sum of their gradients, with the same bits (Narayanan et al., Efficient Large-Scale
Language Model Training, SC '21): optimizers of equal settings keep the copies equal. Each sum also carries a
checksum of the copies. On a CPU it is looked at, so that copies that differ are not trained on; on CUDA it is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import AxisDims, Side
from meshweave.algorithms.block.sites import MoveSite, move_program
from meshweave.base.errors import LayoutError
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch import compat
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.checksums import checksum
from meshweave.nn.pipelining.gradients import num_local_elements
from meshweave.nn.pipelining.parallel_stage import ParallelStage
from meshweave.nn.pipelining.stage_problem import StagePlaces
from meshweave.nn.products import DTYPES

_DIGITS = 4
"""Numbers below 128 that stand for a copy: sums of two are exact in every dtype."""


class TiedTable:
    """This rank's copies, one or two, of a table that the first and the last stage of a pipeline share.

    Raises LayoutError unless the meshes of the two stages have the same ranks, or one shape and no rank in common.
    """

    def __init__(
        self, copies: Mapping[int, nn.Parameter], places: StagePlaces, context: TorchContext
    ) -> None:
        self._copies = dict(copies)
        self._bound: BoundProgram | None = None
        first, last = places.meshes[0], places.meshes[-1]
        if first.ranks == last.ranks:
            return
        if first.shape != last.shape or set(first.ranks) & set(last.ranks):
            raise LayoutError(
                "embedding and head are one tensor: the first and the last stage sum its gradients rank by rank, "
                f"and lie on meshes of {first.shape} and {last.shape}; give both one shape, on the same ranks or "
                "on others"
            )
        (own,) = self._copies.values()
        size = num_local_elements(own) + _DIGITS  # of one length, where ranks do not share it evenly
        axes = ("end", *(f"axis{number}" for number in range(len(first.shape))))
        mesh = Mesh("ends", (2, *first.shape), axes, (*first.ranks, *last.ranks))
        apart: AxisDims = tuple("" for _ in first.shape)
        site = MoveSite((Side("", size),), ("partial", *apart), ("", *apart))
        program = move_program(site, mesh, DTYPES[own.dtype])
        self._bound = bind(program, context.rank or 0, {}, context=context)

    @classmethod
    def of(
        cls, stages: Mapping[int, nn.Module], places: StagePlaces, context: TorchContext
    ) -> TiedTable | None:
        """Return the copies of the tied table that stages of this rank train; None if there are none.

        Collective among the ranks of the first and the last stage. Raises LayoutError where their meshes have
        neither the same ranks, nor one shape and no rank in common.
        """
        copies = {
            number: stage.tied
            for number, stage in stages.items()
            if isinstance(stage, ParallelStage) and stage.tied is not None and stage.tied.requires_grad
        }
        return cls(copies, places, context) if copies else None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def sum_gradients(self) -> None:
        """Set the gradient of each copy to the sum of both. Collective among the first and last stage's ranks.

        Raises LayoutError, and sets nothing, where a copy on this rank has no gradient or, on a CPU, copies
        differ.
        """
        copies = list(self._copies.values())
        grads = compat.local_tensors(copy.grad for copy in copies if copy.grad is not None)
        if len(grads) != len(copies):
            raise LayoutError("embedding and head are one tensor, and a stage has no gradient of it")
        numbers = list(map(_digits, compat.local_tensors(copies)))
        if self._bound is None:
            total, both = grads[0] + grads[-1], numbers[0] + numbers[-1]
        else:
            given = self._bound.inputs["x"]
            given[: grads[0].numel()].copy_(grads[0].flatten())
            given[-_DIGITS:].copy_(numbers[0])
            self._bound.run(self._bound.inputs)
            made = self._bound.outputs["y"]
            total, both = made[: grads[0].numel()].view(grads[0].shape), made[-_DIGITS:]
        if both.device.type == "cpu" and both.tolist() != (2 * numbers[0]).tolist():
            raise LayoutError(
                "embedding and head are one tensor, and the copies of the first and the last stage have grown "
                "apart; load the same weights, and step, scale and clip gradients of both stages alike"
            )
        for grad in grads:
            grad.copy_(total)


def _digits(copy: Tensor) -> Tensor:
    """Return numbers that stand for the bits of a tensor."""
    number = checksum(copy)
    shifts = torch.arange(64 - 7 * _DIGITS, 64, 7, device=number.device)
    return (number >> shifts) & 127
