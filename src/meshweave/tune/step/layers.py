"""Price a layer, and embedding and loss, on the ranks that share them: estimates of the programs of blocks.

A layer is the program that `algorithms.block` writes for one layer under a strategy, on the chips that its ranks
occupy. Communication that its lanes do not hide is exposed. Gradients of replicated weights are reduced once a
step, not for each micro-batch; `tune.step.data_parallel` prices that.

With context parallelism each rank has tokens from all over a sequence, so that in each turn of the ring every rank
attends to half of the keys (Brandon et al., Striped Attention, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshweave.algorithms.block import ENTRIES, BlockAlgorithm, BlockConfig, BlockProblem
from meshweave.algorithms.block.layer import GRADIENTS
from meshweave.algorithms.block.roles import IDLE, RING, AxisRole
from meshweave.algorithms.block.two_d import IncludedProducts
from meshweave.base.errors import LayoutError, UnsupportedError, did_you_mean
from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.cost.machine import Machine
from meshweave.cost.price import price
from meshweave.cost.product_table import item_bytes
from meshweave.describe.model.workload import Workload
from meshweave.estimate import Estimate, estimate_skeleton
from meshweave.estimate.spans import TaskSpan, task_spans
from meshweave.ir.skeleton import Part, Phase, Skeleton, Task
from meshweave.ir.work import Compute, Transfer, Work, matmul_work
from meshweave.tune.step.placement import block_axes, machine_of
from meshweave.tune.step.problem import Parallelism, StepProblem

EAGER_LOGIT_BYTES = (10, 10)
"""Bytes a logit through memory that a loss in steps moves beyond a fused one, forward and backward: a cast to fp32
(2 + 4) and an output of log-softmax (4); its gradient in fp32 (4) and a cast back (4 + 2)."""

_BY_NAME = {entry.name: entry for entry in ENTRIES}


@dataclass(frozen=True)
class PartTime:
    """Seconds of a piece of work: computing, and exposed communication of tensor and context parallelism."""

    compute_s: float = 0.0
    tensor_s: float = 0.0
    context_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole."""
        return self.compute_s + self.tensor_s + self.context_s

    def __add__(self, other: PartTime) -> PartTime:
        return PartTime(
            self.compute_s + other.compute_s,
            self.tensor_s + other.tensor_s,
            self.context_s + other.context_s,
        )

    def __sub__(self, other: PartTime) -> PartTime:
        return self + -1.0 * other

    def __rmul__(self, factor: float) -> PartTime:
        return PartTime(factor * self.compute_s, factor * self.tensor_s, factor * self.context_s)


@dataclass(frozen=True)
class LayerTime:
    """The time of one micro-batch in one layer, or in embedding, or in last norm, logits and loss.

    Attributes:
        forward, backward: the two parts, without recomputation.
        recompute: what the backward part computes again.
    """

    forward: PartTime
    backward: PartTime
    recompute: PartTime = PartTime()


def strategy_of(problem: StepProblem, parallelism: Parallelism) -> BlockAlgorithm:
    """Return the strategy of a layer, with rings of context around it where there are such.

    Raises:
        UnsupportedError: there is no such strategy.
        LayoutError: it is one of data or context parallelism, or its mesh does not fit.
    """
    entry = _BY_NAME.get(parallelism.strategy)
    if entry is None:
        raise UnsupportedError(
            f"there is no strategy '{parallelism.strategy}'{did_you_mean(parallelism.strategy, _BY_NAME)}"
        )
    roles = entry.roles
    if len(roles) != 2:
        raise LayoutError(f"{entry.name} has {len(roles)} mesh axes; a step has strategies of two")
    if roles[0].residual == "batch" and roles[1] is IDLE:
        raise LayoutError(f"{entry.name} shares the batch; give data= and zero= instead of this strategy")
    if roles[0].operand_in == "sequence":
        raise LayoutError(f"{entry.name} shares sequences; give context= instead of this strategy")
    if parallelism.context == 1:
        return entry
    if roles[0].residual == "batch":
        raise LayoutError(f"{entry.name} shares tokens already; give context=1")
    return StrategyAround(entry, (RING,))


class StrategyAround(BlockAlgorithm):
    """A strategy on the last two mesh axes, and other roles on the axes before them."""

    source = "Liu et al., Ring Attention with Blockwise Transformers, 2023"

    def __init__(self, inner: BlockAlgorithm, around: tuple[AxisRole, ...]) -> None:
        self.name = f"{inner.name} with context"  # type: ignore[misc]
        self.title = f"{inner.title} with {' and '.join(role.name for role in around)}"  # type: ignore[misc]
        self.roles: tuple[AxisRole, ...] = (*around, *inner.roles)  # type: ignore[misc]


def layer_time(problem: StepProblem, parallelism: Parallelism) -> LayerTime:
    """Return what one micro-batch takes in one layer. Raises LayoutError where the strategy does not fit."""
    known = problem.cache("layers")
    key = _key(parallelism), parallelism.recompute
    if key not in known:
        known[key] = _layer_time(problem, parallelism)
    layer: LayerTime = known[key]
    return layer


def ends_time(problem: StepProblem, parallelism: Parallelism) -> tuple[LayerTime, LayerTime]:
    """Return what one micro-batch takes before the first layer (embedding), and after the last (norm to loss)."""
    known = problem.cache("ends")
    key = _key(parallelism)
    if key not in known:
        known[key] = _ends_time(problem, parallelism)
    first, last = known[key]
    return first, last


def _key(parallelism: Parallelism) -> tuple[object, ...]:
    return parallelism.strategy, parallelism.micro_batch, block_axes(parallelism)


def _block(
    problem: StepProblem, parallelism: Parallelism, training: bool, vocabulary: int = 0
) -> BlockProblem:
    shape = tuple(size for _, size, _ in block_axes(parallelism))
    work = Workload(parallelism.micro_batch, problem.seq, problem.dtype)
    block = BlockProblem.of(problem.model, work, shape, training=training)
    return replace(block, vocabulary=vocabulary)


def _layer_time(problem: StepProblem, parallelism: Parallelism) -> LayerTime:
    bare, whole, _ = _split_time(problem, parallelism, 0, problem.product_dtype)
    added_s = _added_s(problem, parallelism)
    forward, backward = bare + PartTime(added_s[0]), whole - bare + PartTime(added_s[1])
    again = PartTime()
    if parallelism.recompute == "full":
        again = forward
    elif parallelism.recompute == "selective":
        again = PartTime(sum(_attention_s(problem, parallelism, "forward")))
    return LayerTime(forward, backward, again)


def _added_s(problem: StepProblem, parallelism: Parallelism) -> tuple[float, float]:
    """Return the seconds that the software and plain attention add to the forward and to the backward part."""
    kernels = _split_time(problem, parallelism, 0, problem.product_dtype)[2]
    extra = _software_s(problem, parallelism, kernels[0]), _software_s(problem, parallelism, kernels[1])
    attention = _attention_s(problem, parallelism, "forward"), _attention_s(problem, parallelism, "backward")
    return extra[0] + attention[0][1], extra[1] + attention[1][1] + _accumulation_s(problem, parallelism)


def extra_s(problem: StepProblem, parallelism: Parallelism) -> tuple[float, float]:
    """Return the seconds that a layer takes, forward and backward, beyond the ops of its program."""
    forward_s, backward_s = _added_s(problem, parallelism)
    if parallelism.recompute == "full":
        backward_s += forward_s
    elif parallelism.recompute == "selective":
        backward_s += _attention_s(problem, parallelism, "forward")[1]
    return forward_s, backward_s


def best_config(problem: StepProblem, parallelism: Parallelism) -> BlockConfig:
    """Return the config of the strategy with which a layer is priced."""
    return _training_time(problem, parallelism, 0, problem.product_dtype)[2]


def bare_layer_s(problem: StepProblem, parallelism: Parallelism) -> tuple[float, float]:
    """Return `least_layer_s` of the forward part, and of forward and backward. Raises as that does."""
    forward, whole, _ = _split_time(problem, parallelism, 0, problem.product_dtype)
    return forward.total_s, whole.total_s


def layer_spans(problem: StepProblem, parallelism: Parallelism) -> tuple[TaskSpan, ...] | None:
    """Return when the tasks of `least_layer_s` run, or None where broadcasts are chains. Raises as that does."""
    _, _, config = _training_time(problem, parallelism, 0, problem.product_dtype)
    block = _block(problem, parallelism, True)
    skeleton = _skeleton(problem, parallelism, block, config, problem.product_dtype)
    machine = machine_of(problem, block_axes(parallelism))
    return task_spans(skeleton, lambda work: price(work, machine).total_ps)


def least_layer_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the seconds of one micro-batch in one layer, forward and backward, without what the software adds.

    It is a lower bound of `layer_time`, computed in half of the time. Raises LayoutError where the strategy does
    not fit.
    """
    return _training_time(problem, parallelism, 0, problem.product_dtype)[0].total_s


def _split_time(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int = 0, product_dtype: str | None = None
) -> tuple[PartTime, PartTime, tuple[int, int]]:
    """Return the times of the forward part and of both, and the kernels in each part, at the best config."""
    known = problem.cache("blocks")
    key = _key(parallelism), vocabulary, product_dtype
    if key not in known:
        whole, count, config = _training_time(problem, parallelism, vocabulary, product_dtype)
        block = _block(problem, parallelism, False, vocabulary)
        forward, first = _block_time(problem, parallelism, block, config, product_dtype)
        known[key] = forward, whole, (first, count - first)
    forward, whole, kernels = known[key]
    return forward, whole, kernels


def _training_time(
    problem: StepProblem, parallelism: Parallelism, vocabulary: int, product_dtype: str | None
) -> tuple[PartTime, int, BlockConfig]:
    """Return the time of both parts together, their number of kernels, and the best config."""
    known = problem.cache("wholes")
    key = _key(parallelism), vocabulary, product_dtype
    if key not in known:
        entry = strategy_of(problem, parallelism)
        block = _block(problem, parallelism, True, vocabulary)
        if (reason := entry.refusal(block)) is not None:
            raise LayoutError(f"{entry.name} {reason}")
        slices = isinstance(entry, IncludedProducts)
        configs = list(entry.candidates(block)) if slices else [BlockConfig()]
        timed = [
            (*_block_time(problem, parallelism, block, config, product_dtype), config) for config in configs
        ]
        known[key] = min(timed, key=lambda each: each[0].total_s)
    whole, count, config = known[key]
    return whole, count, config


def _block_time(
    problem: StepProblem,
    parallelism: Parallelism,
    block: BlockProblem,
    config: BlockConfig,
    product_dtype: str | None,
) -> tuple[PartTime, int]:
    """Return the estimate of a block without the reductions of gradients of weights, and its number of kernels."""
    machine = machine_of(problem, block_axes(parallelism))
    skeleton = _skeleton(problem, parallelism, block, config, product_dtype)
    time = estimate_skeleton(skeleton, machine)
    tasks = list(skeleton.counted_tasks())
    context_s = 0.0
    if parallelism.context > 1:
        context_s = sum(
            count * _seconds(task.work, machine) for count, task in tasks if _axis(task.work) == "depth"
        )
    share = min(context_s / time.communication_s, 1.0) if time.communication_s else 0.0
    exposed_s = max(_exposed_s(time), 0.0)
    part = PartTime(time.total_s - exposed_s, exposed_s * (1 - share), exposed_s * share)
    return part, sum(count for count, task in tasks if isinstance(task.work, Compute))


def _skeleton(
    problem: StepProblem,
    parallelism: Parallelism,
    block: BlockProblem,
    config: BlockConfig,
    product_dtype: str | None,
) -> Skeleton:
    """Return the skeleton that is priced of a block; it does not depend on where the ranks lie."""
    known = problem.cache("skeletons")
    entry = strategy_of(problem, parallelism)
    key = entry.name, block, config, product_dtype
    if key not in known:
        known[key] = _adapted(_without_gradients(entry.skeleton(block, config)), product_dtype)
    skeleton: Skeleton = known[key]
    return skeleton


def _exposed_s(time: Estimate) -> float:
    return time.total_s - time.compute_s - time.copy_s


def _seconds(work: Work, machine: Machine) -> float:
    return to_s(price(work, machine).total_ps)


def _axis(work: Work) -> str:
    return work.axis.rpartition(".")[2] if isinstance(work, Transfer) else ""


def _without_gradients(skeleton: Skeleton) -> Skeleton:
    """Return a skeleton without the tasks in the lanes of reductions of gradients of weights."""
    phases = []
    for phase in skeleton.phases:
        dropped = {
            task.name
            for task in phase.tasks
            if isinstance(task, Task) and task.lane.endswith(f"_{GRADIENTS}")
        }
        tasks: list[Task | Part] = []
        for task in phase.tasks:
            if task.name in dropped:
                continue
            if isinstance(task, Task):
                after = tuple(wait for wait in task.after if wait[0] not in dropped)
                task = replace(task, after=after)
            else:
                waits = ((lane, tuple(x for x in names if x not in dropped)) for lane, names in task.after)
                task = replace(task, after=tuple((lane, names) for lane, names in waits if names))
            tasks.append(task)
        phases.append(Phase(phase.turns, tuple(tasks)))
    return Skeleton(tuple(phases))


def _adapted(skeleton: Skeleton, product_dtype: str | None) -> Skeleton:
    """Return a skeleton with products in `product_dtype`, and with ring attention to half of the keys a turn."""

    def changed(task: Task | Part) -> Task | Part:
        if isinstance(task, Part):
            inner = task.skeleton if product_dtype is None else _adapted(task.skeleton, product_dtype)
            return replace(task, skeleton=inner)
        work = task.work
        if not isinstance(work, Compute):
            return task
        if work.kind == "matmul" and product_dtype is not None:
            return replace(
                task, work=replace(work, dtype=product_dtype, item_bytes=item_bytes(product_dtype))
            )
        if work.call == "attention" and work.shape[3] == work.shape[2] > 1:
            shape = (*work.shape[:3], work.shape[3] // 2 + 1, work.shape[4])
            return replace(task, work=with_counts(replace(work, flops=0, shape=shape)))
        return task

    return Skeleton(
        tuple(replace(phase, tasks=tuple(changed(task) for task in phase.tasks)) for phase in skeleton.phases)
    )


def _software_s(problem: StepProblem, parallelism: Parallelism, num_kernels: int) -> float:
    """Return the seconds that the software stack adds to a part of a layer with so many kernels."""
    stack = problem.stack
    rows, columns = parallelism.tensor_mesh
    roles = strategy_of(problem, parallelism).roles[-2:]
    shared = parallelism.context
    for role, size in zip(roles, (rows, columns), strict=True):
        shared *= size if role.residual else 1
    elements = -(-parallelism.micro_batch * problem.seq * problem.model.hidden // shared)
    one_pass = 0.0
    if stack.extra_passes:
        moved = 2 * elements * problem.item_bytes
        one_pass = call_s(problem, Compute("call", elements, moved, dtype=problem.dtype, call="elementwise"))
    return num_kernels * stack.launch_s + stack.extra_passes * one_pass


def _accumulation_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the seconds of the pass that accumulates gradients of a layer; 0 without one."""
    if not problem.stack.accumulates:
        return 0.0
    weights = sum(layer.in_features * layer.out_features for layer in problem.model.fc_layers())
    own = -(-weights // parallelism.tensor_size)
    moved = own * (problem.item_bytes + 2 * problem.gradient_bytes)
    return call_s(problem, Compute("call", own, moved, dtype=problem.dtype, call="elementwise"))


def call_s(problem: StepProblem, work: Compute) -> float:
    """Return the seconds of work on one chip of the cluster."""
    return _seconds(with_counts(work), machine_of(problem, (("row", 1, 1),)))


def _attention_s(problem: StepProblem, parallelism: Parallelism, direction: str) -> tuple[float, float]:
    """Return the seconds of attention as the block has it, and what plain attention adds to them.

    Plain attention multiplies all pairs of tokens twice forward and four times backward. Softmax reads and writes
    all scores, and so does its mask.
    """
    model, item = problem.model, problem.item_bytes
    heads = -(-model.num_heads // parallelism.tensor_size)
    queries = -(-problem.seq // parallelism.context)
    batch, width = parallelism.micro_batch, model.head_dim
    part = "" if direction == "forward" else "input_grad"
    keys = problem.seq // 2 + 1
    operands = item * batch * heads * width * (2 * queries + 2 * problem.seq)
    shape = (batch, heads, queries, keys, width)
    moved = operands * (2 if part else 1)
    fused = Compute("call", 0, moved, dtype=problem.dtype, call="attention", shape=shape, part=part)
    fused_s = call_s(problem, fused)
    if problem.attention == "flash":
        return fused_s, 0.0
    scores = batch * heads * queries * problem.seq
    products = [matmul_work(queries, problem.seq, width, problem.dtype, batch * heads)]
    products.append(matmul_work(queries, width, problem.seq, problem.dtype, batch * heads))
    times = 1 if direction == "forward" else 2
    plain_s = times * sum(call_s(problem, each) for each in products)
    moved = scores * (2 * item + (1 if problem.has_dropout else 0)) * (2 if problem.has_dropout else 1)
    softmax = Compute("call", 5 * scores, moved * times, dtype=problem.dtype, call="softmax")
    return fused_s, plain_s + call_s(problem, softmax) - fused_s


def eager_logits_s(problem: StepProblem, parallelism: Parallelism, num_bytes: int) -> float:
    """Return the seconds of passes of so many bytes a logit, where the loss is not fused."""
    if problem.loss == "fused":
        return 0.0
    tokens = parallelism.micro_batch * problem.seq
    logits = -(-tokens * (problem.model.vocab_size or 0) // (parallelism.tensor_size * parallelism.context))
    work = Compute("call", logits, num_bytes * logits, dtype=problem.dtype, call="elementwise")
    return call_s(problem, work)


def _ends_time(problem: StepProblem, parallelism: Parallelism) -> tuple[LayerTime, LayerTime]:
    vocabulary = problem.model.vocab_size
    if not vocabulary:
        none = LayerTime(PartTime(), PartTime())
        return none, none
    forward, whole, _ = _split_time(problem, parallelism, vocabulary)
    plain, all_plain, _ = _split_time(problem, parallelism)
    logits_s = [eager_logits_s(problem, parallelism, num_bytes) for num_bytes in EAGER_LOGIT_BYTES]
    ends_forward = forward - plain + PartTime(logits_s[0])
    ends_backward = (whole - forward) - (all_plain - plain) + PartTime(logits_s[1])
    begins = _embedding_time(problem, parallelism)
    return begins, LayerTime(ends_forward - begins.forward, ends_backward - begins.backward)


def _embedding_time(problem: StepProblem, parallelism: Parallelism) -> LayerTime:
    """Return what one micro-batch takes in the embedding alone."""
    entry, config = strategy_of(problem, parallelism), best_config(problem, parallelism)
    machine = machine_of(problem, block_axes(parallelism))
    parts = []
    for training in (False, True):
        block = _block(problem, parallelism, training, problem.model.vocab_size or 0)
        time = estimate_skeleton(_without_gradients(entry.skeleton(block, config, "embedding")), machine)
        exposed_s = max(_exposed_s(time), 0.0)
        parts.append(PartTime(time.total_s - exposed_s, exposed_s))
    return LayerTime(parts[0], parts[1] - parts[0])
