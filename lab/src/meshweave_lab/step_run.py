"""Run a training step of a transformer as its Program: on this rank's weights, over `torch.distributed`.

The program is that of the step, the very one that is simulated: a pipeline of layers on all replicas with the
programs of its blocks inside, its messages, gathers of weights and reductions of gradients, and an optimizer at
its end (Adam: Kingma and Ba, 2015, algorithm 1). Its calls compute what `algorithms.step.functions` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor as Values
from torch.optim.adam import adam

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.functions import Functions
from meshweave.algorithms.contract import Array, Arrays
from meshweave.algorithms.step import Step
from meshweave.algorithms.step.block_program import WrittenStep, write_step
from meshweave.algorithms.step.functions import StepFunctions, local_bucket
from meshweave.algorithms.step.write_units import block_of_piece
from meshweave.base.errors import UnsupportedError
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.lower import lower_rings


@dataclass(frozen=True)
class Adam:
    """Adam without weight decay. `step` counts from 1."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def update(self, w: Array, m: Array, v: Array, dw: Array, step: int) -> tuple[Array, Array, Array]:
        """Return weights and both moments after a step: what torch's fused kernel computes in a run."""
        first, second = self.betas
        m = first * m + (1 - first) * dw
        v = second * v + (1 - second) * dw * dw
        scale = math.sqrt(1 - second**step)
        w = w - (self.lr / (1 - first**step)) * m / (v**0.5 / scale + self.eps)
        return w, m, v


class StepRun:
    """A step bound to this rank; all ranks of its cluster make it together, and run it together.

    Args:
        step: a step on as many chips as there are ranks, with weights in float32.
        weights: the weights of the whole model by name, as those of a block of all its layers.
        optimizer: how weights are updated.
        functions: what the calls of blocks compute.
        liveness, deadline_s: as of `TorchContext`.

    Raises:
        UnsupportedError: the step has no program, dtypes other than float32, layers of several kinds, a model
            without a vocabulary or with one table for both ends, or a vocabulary that tensor-parallel ranks do not
            share evenly.

    Attributes:
        program: the program of the step.
    """

    def __init__(
        self,
        step: Step,
        weights: Arrays,
        *,
        optimizer: Adam | None = None,
        functions: Callable[[BlockProblem], Functions] = functions_of,
        liveness: Any = None,
        deadline_s: float = 60.0,
    ) -> None:
        _check(step)
        self.step, self._optimizer, self._count = step, optimizer or Adam(), 0
        self._context = TorchContext(liveness=liveness, deadline_s=deadline_s)
        assert self._context.rank is not None
        self.rank = rank = self._context.rank
        written: WrittenStep = write_step(step.stages)
        self._written, self.program = written, lower_rings(written.program)
        self._own = {name: self._kept(weights, name) for name in self._buckets()}
        self._moments = {
            name: (torch.zeros_like(own), torch.zeros_like(own)) for name, own in self._own.items()
        }
        block = block_of_piece(step.problem, step.parallelism, "head", step.parallelism.data)
        self._functions = StepFunctions(
            written.units, functions(block), written.mesh_of(rank), rank, self._update, torch.zeros
        )
        tensors: dict[str, Values] = {}
        for (unit, stage), own in self._own.items():
            tensors |= {f"{prefix}{stage}_{unit}": own for prefix in ("w", "new")}
        table = self._functions.table()
        self._bound = bind(self.program, rank, tensors, context=self._context, calls=table)

    def _buckets(self) -> Iterator[tuple[str, int]]:
        """Yield (unit, stage) of the buckets that this rank has."""
        for stage, place in self._written.stages.items():
            if self.rank in place.mesh:
                yield from ((unit, stage) for unit in place.layers)

    def _kept(self, weights: Arrays, bucket: tuple[str, int]) -> Values:
        """Return what this rank has of a bucket of a whole model's weights."""
        (name, stage), written = bucket, self._written
        place = written.stages[stage]
        where = place.mesh, place.replicas, written.settings, self.rank
        return torch.from_numpy(local_bucket(written.units[name], weights, place.layers[name], *where))

    def _update(self, bucket: tuple[str, int], w: Values, dw: Values) -> Values:
        of, (m, v), w = self._optimizer, self._moments[bucket], w.clone()
        before = torch.tensor(float(self._count - 1))  # which the kernel counts on
        adam(
            [w], [dw], [m], [v], [], [before],
            fused=True, amsgrad=False, beta1=of.betas[0], beta2=of.betas[1], lr=of.lr, weight_decay=0.0,
            eps=of.eps, maximize=False,
        )  # fmt: skip
        return w

    def run(self, tokens: Array, targets: Array) -> float:
        """Run one step, and return this rank's share of the loss: over all ranks it adds up to that of all tokens.

        Args:
            tokens, targets: (batch, sequence) of the whole step.
        """
        self._count += 1
        of = self._functions
        of.tokens, of.targets = (np.asarray(each, np.float32) for each in (tokens, targets))
        of.loss = 0.0
        self._bound.run({})
        return of.loss / self._written.loss_copies

    def worst_difference(self, weights: Arrays) -> float:
        """Return the largest difference of this rank's weights from those of a whole model, given by name.

        One that is no number counts as infinite.
        """
        worst = 0.0
        for bucket, own in self._own.items():
            apart = (own - self._kept(weights, bucket)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            worst = max(worst, float(apart.max()))
        return worst

    def close(self) -> None:
        """End threads and groups."""
        self._context.close()


def _check(step: Step) -> None:
    """Raise UnsupportedError for what a run does not do."""
    problem, model = step.problem, step.problem.model
    ranks = step.parallelism.tensor_size
    refused = {
        "other dtypes than float32": {problem.dtype, problem.gradient_dtype} != {"float32"},
        "layers of several kinds": len(problem.kinds) > 1,
        "a model without a vocabulary": not model.vocab_size,
        f"a vocabulary that {ranks} ranks do not divide": bool((model.vocab_size or 0) % ranks),
        "one table for embedding and head": model.tied_embeddings,
    }
    for what, is_there in refused.items():
        if is_there:
            raise UnsupportedError(
                f"a step cannot be run with {what} here; it can be estimated and simulated"
            )
