"""Time the program of a block on the ranks of a layer, without the reductions of gradients of weights.

The tasks of most strategies are written once for all micro-batches (`BlockAlgorithm.sized_skeleton`), and their
recurrence is followed for each size. Blocks that include 2D products have a skeleton for each size and number of
slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.block.pieces import Piece
from meshweave.algorithms.block.sized import BackwardPart, FlatTask
from meshweave.algorithms.step.block_tasks import (
    BlockTime,
    PartTime,
    PricedTasks,
    adapted_skeleton,
    estimated,
    is_call,
    without_gradients,
)
from meshweave.algorithms.step.host import IssuedTask
from meshweave.algorithms.step.placement import block_axes, expert_axes, machine_of
from meshweave.algorithms.step.precision import ProductDtypes
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.routing import expert_ranks
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.base.errors import LayoutError
from meshweave.base.units import to_s
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.describe.model.workload import Workload
from meshweave.estimate.timeline import TaskSpan, task_spans
from meshweave.ir.skeleton import Skeleton
from meshweave.ir.work import Transfer


@lru_cache(maxsize=8192)
def layer_key(parallelism: Parallelism) -> tuple[object, ...]:
    """Return a cache key of a `LayerBlock`: all of `parallelism` that its times depend on.

    It has the strategy, the sequences of a micro-batch, the mesh axes of a layer (name, size, stride), and the
    degrees and axes of experts.
    """
    p = parallelism
    experts = (p.expert, p.expert_tensor, expert_axes(p)) if p.expert * p.expert_tensor > 1 else ()
    return p.strategy, p.micro_batch, block_axes(p), experts


def block_of(
    problem: StepProblem, parallelism: Parallelism, training: bool = True, vocabulary: int = 0
) -> BlockProblem:
    """Return one layer (of the model's first kind) for one micro-batch on its context and tensor ranks.

    Args:
        training: whether the block is forward and backward; forward alone otherwise.
        vocabulary: words of the vocabulary of an embedding before the layer, and of norm, logits and loss after
            it; 0 for a layer without them.
    """
    shape = tuple(size for _, size, _ in block_axes(parallelism))
    work = Workload(parallelism.micro_batch, problem.sequence, problem.dtype)
    block = BlockProblem.of(problem.model, work, shape, training=training)
    return replace(block, vocabulary=vocabulary, experts=expert_ranks(problem, parallelism))


def layer_block(problem: StepProblem, parallelism: Parallelism) -> LayerBlock:
    """Return a layer (of the first kind) as laid on its ranks, with products in the problem's precision.

    Configurations with an equal `layer_key` get the same object.

    Raises:
        UnsupportedError: there is no such strategy.
        LayoutError: the strategy does not fit the ranks of a step (`strategy_of`).
    """
    return _block(problem, parallelism, 0, problem.products)


def unquantized_block(problem: StepProblem, parallelism: Parallelism, vocabulary: int) -> LayerBlock:
    """Return the layer with all products in the problem's `dtype`, even where its `precision` is a lower one.

    Embedding, head and loss are priced so. `vocabulary` is their number of words; 0 for a layer without them.
    """
    return _block(problem, parallelism, vocabulary, None)


def _block(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int, products: ProductDtypes | None
) -> LayerBlock:
    key = layer_key(parallelism), vocabulary, products
    return problem.once("blocks", key, lambda: LayerBlock(problem, parallelism, vocabulary, products))


class LayerBlock:
    """One layer, with or without embedding and head, on the ranks that share it, for one micro-batch.

    Times are seconds per micro-batch, on each rank alike. They leave out recomputation, reductions of gradients of
    weights, and waits for the host. `split`, `issued` and `ring` are None where tasks are not priced one by one:
    where the strategy includes 2D products whose slices may be unequal, or whose mesh rows do not divide the
    micro-batch.

    One object serves all configurations with an equal `layer_key`.

    Attributes:
        vocabulary: words of embedding and loss; 0 for a layer alone.
        products: the dtypes by which the three products of training are priced; None for the problem's dtype.
        machine: its ranks.
    """

    def __init__(
        self,
        problem: StepProblem,
        parallelism: Parallelism,
        vocabulary: int,
        products: ProductDtypes | None,
    ) -> None:
        self.problem = problem
        self.vocabulary = vocabulary
        self.products = products
        self._ranks = parallelism
        self._entry = strategy_of(parallelism)
        self._experts = expert_ranks(problem, parallelism)
        has_experts = problem.model.layer.num_experts > 1
        axes = block_axes(parallelism), expert_axes(parallelism) if has_experts else ()
        self.machine = machine_of(problem, *axes)
        self._transfers = problem.cache("transfers").setdefault(axes, {})

    @cached_property
    def _best(self) -> tuple[BlockTime, BlockConfig]:
        entry, block = self._entry, self._of(training=True)
        if (reason := entry.refusal(block)) is not None:
            raise LayoutError(f"{entry.name} {reason}")
        configs = (BlockConfig(),) if entry.max_equal_slices == 1 else entry.candidates(block)
        placed = (replace(config, overlap=self.problem.overlap) for config in configs)
        timed = ((self._time(True, config), config) for config in placed)
        return min(timed, key=lambda each: each[0].part.total_s)

    @property
    def config(self) -> BlockConfig:
        """Return the strategy's config (slice counts and overlap) with the least time of forward plus backward.

        Raises:
            LayoutError: the layer does not fit the strategy.
        """
        return self._best[1]

    @property
    def whole(self) -> BlockTime:
        """Return the time of forward and backward part together, in the config that is fastest for both parts.

        Raises:
            LayoutError: the layer does not fit the strategy.
        """
        return self._best[0]

    @cached_property
    def forward(self) -> BlockTime:
        """Return the time of the forward part, in the config that is fastest for both parts.

        Raises:
            LayoutError: the layer does not fit the strategy.
        """
        return self._time(False, self.config)

    @cached_property
    def split(self) -> tuple[PartTime, PartTime] | None:
        """Return the backward part as (time of the residual's gradient, time of the gradients of weights).

        None where tasks are not priced one by one. Raises LayoutError where the layer does not fit the strategy.
        """
        if self._is_estimated:
            return None
        first, last = (self._time(True, self.config, part).part for part in ("input_grad", "weight_grad"))
        return first - self.forward.part, last

    @property
    def issued(self) -> tuple[list[IssuedTask], list[IssuedTask]] | None:
        """Return the tasks of forward and backward part, each in the order in which the host issues them.

        None where tasks are not priced one by one. Raises LayoutError where the layer does not fit the strategy.
        """
        if self._is_estimated:
            return None
        forward, whole = (self._tasks(training, self.config, "") for training in (False, True))
        known = self.machine, self._transfers
        return forward.issued(*known), whole.issued(*known, len(forward))

    @cached_property
    def ring(self) -> PartTime | None:
        """Return the time of ring attention in the forward part, for recomputation that repeats it alone.

        It begins with the last element-wise call before attention and ends with the first one after it. None
        without context parallelism, or where tasks are not priced one by one.

        Raises:
            LayoutError: the layer does not fit the strategy.
        """
        priced = self._ring
        return None if priced is None else priced.time(*self._placed).part

    @cached_property
    def _ring(self) -> PricedTasks | None:
        if self._ranks.context == 1 or self._is_estimated:
            return None
        flat = self._flat(False, self.config, "")
        turns = [number for number, task in enumerate(flat) if is_call(task, "attention")]
        calls = [number for number, task in enumerate(flat) if is_call(task, "elementwise")]
        first = max((number for number in calls if number < turns[0]), default=turns[0])
        last = min((number for number in calls if number > turns[-1]), default=turns[-1])
        ring = [
            task._replace(after=tuple(other - first for other in task.after if other >= first))
            for task in flat[first : last + 1]
        ]
        return PricedTasks(ring, self.products, self.problem)

    @property
    def _placed(self) -> tuple[Machine, dict[Transfer, int], bool]:
        return self.machine, self._transfers, self.problem.stack.waits_for_tensor

    @property
    def axes(self) -> set[str]:
        """Return the mesh axes ("mesh.axis") along which tasks communicate; empty where `split` is None."""
        return set() if self._is_estimated else self._tasks(True, self.config, "").axes

    def delays_s(self, shared: Callable[[Transfer], tuple[int, int]]) -> tuple[tuple[float, float], ...]:
        """Return how long the layer and other traffic delay each other on shared links, in seconds.

        Args:
            shared: returns, for one transfer of the layer, (picoseconds that it takes longer, picoseconds by which
                the other traffic falls behind).

        Returns:
            The same two in seconds (`PricedTasks.delays_ps`), for the forward part, for forward and backward
            together, and for `ring`. (0, 0) where tasks are not priced one by one, and for `ring` where it is
            None.
        """
        parts: list[PricedTasks | None] = [None, None]
        if not self._is_estimated:
            parts = [self._tasks(training, self.config, "") for training in (False, True)]
        of = (each.delays_ps(*self._placed, shared) if each else (0, 0) for each in (*parts, self._ring))
        return tuple((to_s(more), to_s(less)) for more, less in of)

    def piece(self, training: bool, piece: Piece) -> BlockTime:
        """Return the time of embedding or head alone, without the layer, in the layer's config.

        Args:
            training: whether the time is of forward and backward; of forward alone otherwise.
            piece: "embedding", or "head" for last norm, logits and loss.

        Raises:
            LayoutError: the layer does not fit the strategy.
        """
        problem, entry, config = self.problem, self._entry, self.config
        block = block_of(problem, self._ranks, training, problem.model.vocab_size or 0)
        key = entry.name, block, config, piece  # wherever the ranks lie
        plain = problem.once("pieces", key, lambda: without_gradients(entry.skeleton(block, config, piece)))
        return self._estimated(plain)

    @property
    def spans(self) -> tuple[TaskSpan, ...] | None:
        """Return when each task of `whole` begins and ends, in picoseconds.

        None where broadcasts or reduces go along chains of ranks.

        Raises:
            LayoutError: the layer does not fit the strategy.
        """
        machine = self.machine
        return task_spans(self._skeleton(True, self.config), lambda work: price(work, machine).total_ps)

    def _of(self, training: bool) -> BlockProblem:
        return block_of(self.problem, self._ranks, training, self.vocabulary)

    @property
    def _is_estimated(self) -> bool:
        """Return whether there are products of chains, or that fall back to others in an uneven batch."""
        p, most = self._ranks, self._entry.max_equal_slices
        return most is None or (most > 1 and p.micro_batch % p.tensor_mesh[0] != 0)

    def _time(self, training: bool, config: BlockConfig, part: BackwardPart = "") -> BlockTime:
        if self._is_estimated:
            return self._estimated(self._skeleton(training, config))
        return self._tasks(training, config, part).time(*self._placed)

    def _estimated(self, skeleton: Skeleton) -> BlockTime:
        return estimated(skeleton, self.machine, self.problem.stack.waits_for_tensor)

    # --- one skeleton for all sizes -------------------------------------------------------------------------

    def _family(self, training: bool) -> tuple[object, ...]:
        """Return what a skeleton for all sizes depends on."""
        p = self._ranks
        return self._entry.name, p.tensor_mesh, p.context, training, self.vocabulary, self._experts

    def _tasks(self, training: bool, config: BlockConfig, part: BackwardPart) -> PricedTasks:
        key = self._family(training), self.products, self._ranks.micro_batch, config, part
        return self.problem.once(
            "steps", key, lambda: PricedTasks(self._flat(training, config, part), self.products, self.problem)
        )

    def _flat(self, training: bool, config: BlockConfig, part: BackwardPart) -> list[FlatTask]:
        """Return the tasks for the sequences of a micro-batch."""
        of = self.problem.once(
            "sized",
            self._family(training),
            lambda: self._entry.sized_skeleton(self._of(training), config.overlap),
        )
        return of.steps(of.sequences(self._ranks.micro_batch), config, part)

    # --- a skeleton for each size and config ----------------------------------------------------------------

    def _skeleton(self, training: bool, config: BlockConfig) -> Skeleton:
        """Return the skeleton that is priced; it does not depend on where the ranks lie."""
        entry, block, products = self._entry, self._of(training), self.products
        key = entry.name, block, config, products
        return self.problem.once(
            "skeletons",
            key,
            lambda: adapted_skeleton(without_gradients(entry.skeleton(block, config)), products),
        )
