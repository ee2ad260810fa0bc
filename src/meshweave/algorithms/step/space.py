"""The space of configurations of a training step: degrees, strategies, micro-batches, ZeRO, recomputation, order.

A *layout* says where the chips go: the four degrees, the strategy within a layer and its mesh, and the order in
which the degrees are laid on the levels of the cluster. A *choice* adds what a layout leaves open: sequences
per micro-batch, schedule, stages per pipeline rank, ZeRO level, recomputation.

Divisibility rules, each of a training stack: the data degree divides the batch, and a micro-batch divides a
replica's share of it (Megatron-LM, `arguments.py`); a one-dimensional tensor degree divides the heads; the
context degree cuts a sequence into equal parts of at least `MIN_CONTEXT_TOKENS` tokens; a pipeline has a layer
for every stage at least, evenly or not. `algorithms.step.check_step` refuses what else cannot be laid out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

from meshweave.algorithms.block import BlockAlgorithm
from meshweave.algorithms.pipeline import PipelineAlgorithm
from meshweave.algorithms.step.options import Tensor
from meshweave.algorithms.step.orders import DegreeSizes, Order, distinct_orders
from meshweave.algorithms.step.problem import DEGREES, Degree, Parallelism, StepProblem
from meshweave.algorithms.step.software_stack import SoftwareStack
from meshweave.algorithms.step.stack_checks import check_runs, schedule_run
from meshweave.algorithms.step.stack_runs import ZERO_LEVELS
from meshweave.algorithms.step.strategies import refusal_in_step
from meshweave.algorithms.step.user_names import require_tensor
from meshweave.algorithms.table import SCHEDULES, STRATEGIES
from meshweave.base.errors import DescriptionError, UnsupportedError, did_you_mean, listed, require_count
from meshweave.describe.layout.shapes import divisors_of
from meshweave.describe.model.memory import RECOMPUTES, Recompute

MIN_CONTEXT_TOKENS = 128
MAX_MICRO_BATCH = 64


@dataclass(frozen=True)
class SpaceOptions:
    """What a search may choose among. A tuple of one value fixes it; None leaves it open.

    Strategies and schedules are names of the table, by default those with `is_searched` that a step may have.

    Attributes:
        data, pipeline, context: degrees to choose among.
        tensor: tensor degrees to choose among: numbers of ranks, or meshes (d1, d2).
        orders: orders of the degrees, the innermost first; None for all that differ on the cluster.
        expert, expert_tensor: degrees of experts to choose among.
        micro_batches: sequences of a micro-batch.
        virtual_stages: stages per pipeline rank; None for those that each schedule lists (`stages_per_rank`).

    Raises:
        UnsupportedError: a name is unknown, or a strategy is none for the tensor ranks of a step.
        DescriptionError: a number is out of range, or an order has not each degree once.
    """

    data: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    tensor: tuple[Tensor, ...] | None = None
    strategies: tuple[str, ...] = field(default_factory=lambda: searched(tensor_strategies()))
    zero: tuple[int, ...] = ZERO_LEVELS
    schedules: tuple[str, ...] = field(default_factory=lambda: searched(SCHEDULES))
    virtual_stages: tuple[int, ...] | None = None
    micro_batches: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] = RECOMPUTES
    orders: tuple[Order, ...] | None = None
    expert: tuple[int, ...] | None = None
    expert_tensor: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if () in vars(self).values():
            name = next(name for name, values in vars(self).items() if values == ())
            raise DescriptionError(f"{name} has no value to search; give some, or leave it out")
        for name, known in (
            ("strategies", tuple(tensor_strategies())),
            ("schedules", tuple(SCHEDULES)),
            ("recompute", RECOMPUTES),
        ):
            for word in getattr(self, name):
                if name == "strategies" and (reason := _refusal_by_name(word)):
                    raise UnsupportedError(f"strategies: {word} {reason}")
                if word not in known:
                    raise UnsupportedError(
                        f"{name}: there is no '{word}'{did_you_mean(word, known)}; there are {listed(known)}"
                    )
        named = "data", "pipeline", "context", "virtual_stages", "micro_batches", "expert", "expert_tensor"
        for name in named:
            if (numbers := getattr(self, name)) is not None:
                counts = tuple(require_count(number, name, DescriptionError) for number in numbers)
                object.__setattr__(self, name, counts)
        if self.tensor is not None:
            tensors = tuple(require_tensor(tensor, "tensor", DescriptionError) for tensor in self.tensor)
            object.__setattr__(self, "tensor", tensors)
        for level in self.zero:
            if level not in ZERO_LEVELS:
                raise DescriptionError(f"zero is {level!r}; give a level from 0 to 3")
        for order in self.orders or ():
            words = list(map(str, order)) if isinstance(order, list | tuple) else [str(order)]
            if sorted(words) != sorted(DEGREES):
                raise DescriptionError(
                    f"order is {'-'.join(words)}; give each of {', '.join(DEGREES)} once, the innermost first"
                )

    @classmethod
    def of_stack(cls, stack: SoftwareStack, **given: Any) -> SpaceOptions:
        """Return options with `given` attributes, and for all others what a stack executes.

        Raises:
            UnsupportedError: a name is unknown, a strategy is none for the tensor ranks of a step, or the stack
                does not execute what is given.
            DescriptionError: a number is out of range, or an order has not each degree once.
        """
        options = cls(**given)
        narrowed: dict[str, Any] = {}
        for kind in ("strategies", "schedules", "zero", "recompute"):
            values = getattr(options, kind)
            if kind in given:
                for value in values:
                    check_runs(stack, kind, value)
            elif (runs := stack.runs.values_of(kind)) is not None:
                narrowed[kind] = tuple(value for value in values if value in runs) or values
        for degree in DEGREES:
            values = getattr(options, degree)
            if degree in stack.runs.degrees:
                continue
            if values is None:
                narrowed[degree] = (1,)
            elif any(value not in (1, (1, 1)) for value in values):
                check_runs(stack, "degrees", degree)
        if options.virtual_stages is not None and (runs := stack.runs.schedules) is not None:
            schedules = narrowed.get("schedules", options.schedules)
            run = [schedule_run(name, number) for name in schedules for number in options.virtual_stages]
            if not set(run).intersection(runs):
                check_runs(stack, "schedules", run[0])
        return replace(options, **narrowed)


def tensor_strategies() -> dict[str, BlockAlgorithm]:
    """Return by name the strategies that the tensor-parallel ranks of a step may use."""
    return {name: entry for name, entry in STRATEGIES.items() if refusal_in_step(entry) is None}


def _refusal_by_name(name: str) -> str | None:
    """Return why a strategy of the table is none for tensor ranks; None for another name."""
    entry = STRATEGIES.get(name)
    return None if entry is None else refusal_in_step(entry)


def searched(entries: Mapping[str, BlockAlgorithm] | Mapping[str, PipelineAlgorithm]) -> tuple[str, ...]:
    """Return the names of those `entries` that a search tries by default (`is_searched`)."""
    return tuple(name for name, entry in entries.items() if entry.is_searched)


def ranks_of(tensor: Tensor) -> int:
    """Return the number of ranks of a tensor degree, given as a number or a mesh (d1, d2)."""
    return tensor if isinstance(tensor, int) else tensor[0] * tensor[1]


@dataclass(frozen=True)
class StepLayout:
    """The layout of a step: degrees, strategy within a layer, order, and experts (expert, expert_tensor)."""

    data: int
    pipeline: int
    context: int
    tensor: Tensor
    strategy: str
    order: Order
    experts: tuple[int, int] = (1, 1)

    def stride(self, degree: Degree) -> int:
        """Return how many chips apart neighbours of a degree are: the product of the degrees inside it."""
        sizes = {"data": self.data, "pipeline": self.pipeline, "context": self.context}
        sizes["tensor"] = ranks_of(self.tensor)
        return math.prod(sizes[inner] for inner in self.order[: self.order.index(degree)])

    def choice(
        self, micro_batch: int, schedule: str, virtual: int, zero: int, recompute: Recompute
    ) -> Parallelism:
        """Return the configuration with this layout and these arguments, which a layout leaves open.

        Args:
            micro_batch: sequences of a micro-batch.
            schedule: name of a pipeline schedule.
            virtual: stages per pipeline rank.
            zero: ZeRO level, 0 to 3.
        """
        return Parallelism(
            data=self.data,
            pipeline=self.pipeline,
            context=self.context,
            tensor=self.tensor,
            strategy=self.strategy,
            zero=zero,
            schedule=schedule,
            virtual_stages=virtual,
            micro_batch=micro_batch,
            recompute=recompute,
            order=self.order,
            expert=self.experts[0],
            expert_tensor=self.experts[1],
        )


@dataclass(frozen=True)
class StepSpace:
    """All configurations of a problem that obey the options and the rules of divisibility.

    Attributes:
        given: the options; None for all that the stack of the problem executes.
    """

    problem: StepProblem
    given: SpaceOptions | None = None

    @cached_property
    def options(self) -> SpaceOptions:
        """Return `given`, or without it all that the stack of the problem executes."""
        return SpaceOptions.of_stack(self.problem.stack) if self.given is None else self.given

    @cached_property
    def degrees(self) -> tuple[DegreeSizes, ...]:
        """Return all sizes of the four degrees whose product is the number of chips, fewest model ranks first.

        Model ranks are tensor times pipeline times context. Sizes that the options or the rules of divisibility
        exclude are left out.
        """
        chips = self.problem.cluster.num_chips
        divisors = divisors_of(chips)
        sizes = []
        for tensor in divisors:
            for pipeline in (n for n in divisors if chips % (tensor * n) == 0):
                for context in (n for n in divisors if chips % (tensor * pipeline * n) == 0):
                    data = chips // (tensor * pipeline * context)
                    sizes.append(DegreeSizes(data, pipeline, context, tensor))
        allowed = filter(self._allows, sizes)
        return tuple(
            sorted(allowed, key=lambda of: (of.tensor * of.pipeline * of.context, of.context, of.pipeline))
        )

    def _allows(self, sizes: DegreeSizes) -> bool:
        problem, options = self.problem, self.options
        data, pipeline, context, tensor = sizes
        given = ((options.data, data), (options.pipeline, pipeline), (options.context, context))
        return (
            all(allowed is None or number in allowed for allowed, number in given)
            and (options.tensor is None or tensor in {ranks_of(item) for item in options.tensor})
            and problem.batch % data == 0
            and pipeline <= problem.model.num_layers
            and (context == 1 or problem.sequence % context == 0)
            and (context == 1 or problem.sequence // context >= MIN_CONTEXT_TOKENS)
        )

    def tensors(self, ranks: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (strategy, tensor degree) for `ranks` tensor-parallel ranks.

        The degree is `ranks` for a one-dimensional strategy, else the shape (d1, d2) of a mesh of as many ranks.
        A single rank has the first strategy of the options alone.
        """
        options, heads = self.options, self.problem.model.layer.attentions[0].heads
        if ranks == 1:
            yield options.strategies[0], 1
            return
        given = options.tensor
        for strategy in options.strategies:
            if STRATEGIES[strategy].is_one_dimensional:
                if heads % ranks == 0 and (given is None or ranks in given or (ranks, 1) in given):
                    yield strategy, ranks
                continue
            for columns in divisors_of(ranks)[1:]:
                mesh = (ranks // columns, columns)
                if given is None or mesh in given or ranks in given:
                    yield strategy, mesh

    def layouts(self, sizes: DegreeSizes) -> Iterator[StepLayout]:
        """Yield the layouts with these sizes, one per strategy, tensor mesh, order and expert degrees."""
        data, pipeline, context, tensor = sizes
        for strategy, mesh in self.tensors(tensor):
            for order in self.orders(sizes):
                for experts in self.experts(sizes):
                    yield StepLayout(data, pipeline, context, mesh, strategy, order, experts)

    def experts(self, sizes: DegreeSizes) -> tuple[tuple[int, int], ...]:
        """Return the (expert, expert_tensor) degrees to try on the ranks of a stage.

        A model without experts has ((1, 1),), or () where the options exclude it. Unless the options give
        `expert_tensor`, it is 1 or the tensor degree.
        """
        experts = max(graph.num_experts for _, graph in self.problem.model.runs)
        options, ranks = self.options, sizes.data * sizes.context * sizes.tensor
        if experts == 1:
            given = options.expert, options.expert_tensor
            return ((1, 1),) if all(values is None or 1 in values for values in given) else ()
        pairs = []
        for tensor in options.expert_tensor or tuple(dict.fromkeys((1, sizes.tensor))):
            for expert in divisors_of(math.gcd(experts, ranks // tensor) if ranks % tensor == 0 else 1):
                if (options.expert is None or expert in options.expert) and ranks % (expert * tensor) == 0:
                    pairs.append((expert, tensor))
        return tuple(pairs)

    def orders(self, sizes: DegreeSizes) -> tuple[Order, ...]:
        """Return the orders in which to lay the degrees on the chips, each with the innermost degree first.

        They are those of the options; else those that differ in the links on which a degree communicates, the
        order of `DEGREES` first.
        """
        if self.options.orders is not None:
            return self.options.orders
        return distinct_orders(self.problem.cluster, sizes)

    def micro_batches(self, data: int) -> tuple[int, ...]:
        """Return the micro-batch sizes to try, in sequences, ascending: divisors of a replica's batch.

        `data` is the data degree. The sizes are those that the options name; where they name none, 1 and sizes
        up to `MAX_MICRO_BATCH`, each at least twice the one before.
        """
        share, given = self.problem.batch // data, self.options.micro_batches
        if given is not None:
            return tuple(size for size in divisors_of(share) if size in given)
        sizes = [1]
        for size in divisors_of(share):
            if 2 * sizes[-1] <= size <= MAX_MICRO_BATCH:
                sizes.append(size)
        return tuple(sizes)

    def schedules(self, pipeline: int, num_micro_batches: int) -> tuple[tuple[str, int], ...]:
        """Return the pairs (schedule, stages per pipeline rank) that accept these ranks and micro-batches.

        Those that the stack does not run, or that have more stages than the model has layers, are left out.

        One pipeline rank has one pair, with one stage, or none if the options exclude one stage a rank.
        """
        key = pipeline, num_micro_batches
        if key not in self._schedules:
            self._schedules[key] = self._schedules_of(*key)
        return self._schedules[key]

    @cached_property
    def _schedules(self) -> dict[tuple[int, int], tuple[tuple[str, int], ...]]:
        return {}

    def _schedules_of(self, pipeline: int, num_micro_batches: int) -> tuple[tuple[str, int], ...]:
        options, runs = self.options, self.problem.stack.runs.schedules
        if pipeline == 1:
            if options.virtual_stages is not None and 1 not in options.virtual_stages:
                return ()  # a pipeline is wanted
            alone = (name for name in options.schedules if SCHEDULES[name].takes_stages(1))
            return tuple((name, 1) for name in islice(alone, 1))
        pairs = []
        for name in options.schedules:
            for virtual in options.virtual_stages or SCHEDULES[name].stages_per_rank:
                if pipeline * virtual > self.problem.model.num_layers:
                    continue
                if runs is not None and schedule_run(name, virtual) not in runs:
                    continue
                if _takes(name, pipeline, virtual, num_micro_batches):
                    pairs.append((name, virtual))
        return tuple(pairs)

    def choices(self) -> Iterator[Parallelism]:
        """Yield every configuration, even those that do not fit in memory or that `step_of` refuses."""
        for sizes in self.degrees:
            for layout in self.layouts(sizes):
                for size in self.micro_batches(sizes.data):
                    count = self.problem.batch // sizes.data // size
                    for schedule, virtual in self.schedules(sizes.pipeline, count):
                        for recompute in self.options.recompute:
                            for zero in self.zero_levels(sizes.data, sizes.context):
                                yield layout.choice(size, schedule, virtual, zero, recompute)

    def zero_levels(self, data: int, context: int) -> tuple[int, ...]:
        """Return the ZeRO levels to try with `data` x `context` replicas; for 1 replica the first level alone."""
        levels = self.options.zero
        return levels[:1] if data * context == 1 else levels


@lru_cache(maxsize=8192)
def _takes(schedule: str, pipeline: int, virtual: int, num_micro_batches: int) -> bool:
    return SCHEDULES[schedule].for_stages(virtual).takes(pipeline, virtual, num_micro_batches)
