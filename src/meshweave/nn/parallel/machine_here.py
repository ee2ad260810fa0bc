"""The machine at hand as a cluster, whose constants are measured with as many ranks as will train.

All ranks compute at once, as they will in training, each by itself, micro-batches of two sizes: these give the
seconds to launch the kernels of a layer, and those for each row. Messages are timed as a layer sends them: by a
bound program, between products. Ranks that share cores are then not at the same place, and one that has waited
needs a core again. A sum over P ranks takes launch + 2 (P - 1) latency seconds beside its bytes (Thakur et al.,
Optimization of Collective Communication Operations in MPICH, 2005; MeshSlice, ISCA '25, section 3.2.2): groups of
two sizes give both. These are sums of two linear layers, which together are half a layer of the model: what ranks
that share them take more than one by itself, as torch runs them, on its part of the tokens. What running such a
layer adds is in it. Where each rank has a core of its own a product follows the layers, as one does in a layer,
and ranks wait for that which ends it last; ranks that share cores wait for each other anyway. Two ranks exchange
sums, more use a ring, as most layers do (`lower_small_sums`). Gathers of weights in parts, and scatters of
gradients, are timed likewise, each of as many weights as a layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from meshweave.algorithms.block.data_parallel import DataParallel, ZeroThree
from meshweave.algorithms.block.megatron import Megatron
from meshweave.algorithms.step import Parallelism, StepProblem, load_stack, step_of
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import SwitchNetwork
from meshweave.describe.model.transformer import Transformer
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.all_ranks import AllRanks
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.parallel.timed_here import BETWEEN, TwoLayers, added_s, each_s, group_mesh, sum_over

STACK = replace(
    load_stack("ideal"),
    name="measured",
    overlap=0.0,
    blocks_transfers=True,
    waits_for_tensor=True,
    waits_for_gathers=True,
    copies=load_stack("meshweave").copies,
)
"""What the runtime does where ranks share the cores of a host: messages take a core as products do, and hide
behind nothing. The rest is in what is measured."""
SUMMED_BYTES = (1 << 21, 1 << 23)
"""Bytes of the two sums that tell the rate of messages: both are rings."""
_AGREED_BYTES = 1 << 12
"""Bytes of what ranks compare, and more."""
OPTIMIZER_BYTES = 28
"""AdamW in fp32 reads weight, gradient and two moments, and writes all but the gradient: 7 words a parameter."""
_ROUNDS, _HALVINGS = 4, 16
_MOST_BYTES, _LEAST_SHARED_S = 64 << 20, 1e-6
_LEAST_SHARE = 0.1
"""Of a large sum at least so much is its bytes, however near to a small one it was measured."""
_MOST_MOVED = 1 << 23
"""Bytes of weights, and of activations of a group, that are timed; more take longer by the rate of messages."""
_SHARES_CORES = 1.5
"""How many times as fast a rank computes alone where ranks are taken to share cores."""
_SHARDS_WEIGHTS = 3
"""The level of ZeRO that gathers weights."""
_AGREED = 2  # small sums of a call in which ranks share layers or weights: what they compare, and the loss
_GUESS_FLOPS_PER_S, _GUESS_LAUNCH_S, _LEAST_FLOP_S = 1e10, 1e-5, 1e-16


class TimedMove(NamedTuple):
    """One collective that was timed: the bytes of its whole tensor, and the seconds that it takes."""

    num_bytes: int
    seconds: float


_NOTHING = TimedMove(0, 0.0)


@dataclass(frozen=True)
class MeasuredStep:
    """Seconds of the parts of a step of a model, on the slowest rank while all ranks run theirs.

    Attributes:
        compute_s: by the number of sequences of a micro-batch, seconds of its forward and backward on one rank.
        optimizer_s: seconds of a step of AdamW on all parameters.
        sums: by the number of ranks in a group, one all-reduce of a layer's activations for all sequences of the
            group: half of what tensor parallelism adds to forward and backward of two linear layers, which have
            two such sums; all groups run at once. The group sizes are the smallest divisor from 2 on of the
            number of ranks, and that number. Empty for one rank.
        ring_s: for two sizes in bytes, seconds that a ring all-reduce over all ranks adds to a product, or takes
            by itself if that is more. Empty for one rank.
        replicas_s: seconds of forward and backward of the larger number of sequences on each rank, the all-reduce
            of `agreed_s` and one collective that sums all gradients, one after the other. 0 for one rank.
        agreed_s: seconds that one all-reduce of 4 KiB over all ranks adds to a product, as ranks compare what
            they give a call. 0 for one rank.
        num_parameters: all of the model, each of which is trained.
        num_ranks: the number of ranks that measured together.
        sharing: how many times as fast a rank computes while the others wait, as it gets their cores; 1 or more.
        gather: one all-gather of weights as large as a layer's, sharded over all ranks: a quarter of what ZeRO-3
            adds to two linear layers, with two gathers and two reduce-scatters. (0, 0) for one rank.
    """

    compute_s: Mapping[int, float]
    optimizer_s: float
    sums: Mapping[int, TimedMove]
    ring_s: Mapping[int, float]
    replicas_s: float
    agreed_s: float
    num_parameters: int
    num_ranks: int
    sharing: float = 1.0
    gather: TimedMove = _NOTHING

    def is_replicas(self, parallelism: Parallelism, batch: int) -> bool:
        """Return whether a step of `batch` sequences by `parallelism` is the measured plain data parallelism.

        That is data parallelism on all ranks, two or more, each with the larger measured number of sequences in
        one micro-batch. `batch` is the number of sequences of all ranks.
        """
        rows = max(self.compute_s)
        plain = Parallelism(data=self.num_ranks, micro_batch=rows)
        kept = {name: getattr(plain, name) for name in ("strategy", "schedule", "virtual_stages", "order")}
        return batch == rows * self.num_ranks > rows and replace(parallelism, **kept) == plain


def measure_step(
    compute: Callable[[int], object],
    optimize: Callable[[], object],
    rows: Sequence[int],
    model: Transformer,
    sequence: int,
    context: TorchContext | None = None,
) -> MeasuredStep:
    """Measure the seconds of the parts of a training step on this machine. Collective over all ranks of the world.

    Args:
        compute: called with a number of sequences: runs forward and backward of so many, on this rank alone.
        optimize: makes a step of AdamW on whole parameters in fp32.
        rows: one or two sizes of a micro-batch, in sequences. The larger is to be that of a rank in data
            parallelism alone, whose step is measured.
        model: what is measured, of which each parameter is trained.
        sequence: tokens of a sequence.
        context: deadline and liveness of waits; default: that of the default process group.

    Raises:
        RankLostError, DeadlineError: other ranks are missing or late.
    """
    among = AllRanks.of(context)
    compute_s = {count: among.median_s(lambda count=count: compute(count)) for count in rows}  # type: ignore[misc]
    most, is_first = max(rows), among.context.rank in (0, None)
    one_s = among.median_s(lambda: compute(most) if is_first else None)
    sharing, optimizer_s = max(compute_s[most] / one_s, 1.0), among.median_s(optimize)
    num_ranks = len(among.ranks)
    fewest = next((count for count in range(2, num_ranks) if num_ranks % count == 0), num_ranks)
    sums, ring_s, gather = dict[int, TimedMove](), dict[int, float](), _NOTHING
    replicas_s = agreed_s = 0.0
    if num_ranks > 1:
        every = LayerStrategy.of(DataParallel.name, group_mesh(among, num_ranks), context=context)
        ring_s = {size: added_s(among, sum_over(every, size)) for size in SUMMED_BYTES}
        all_bytes = torch.float32.itemsize * model.num_parameters
        summed = sum_over(every, min(all_bytes, _MOST_BYTES), is_whole=True)
        agreed = sum_over(every, _AGREED_BYTES, is_whole=True)
        agreed_s = max(added_s(among, agreed), 0.0)
        replicas_s = among.median_s(lambda: (compute(most), agreed(), summed()))
        if all_bytes > _MOST_BYTES:
            replicas_s += (all_bytes / _MOST_BYTES - 1) * each_s(among, summed)
        word, most_words = torch.float32.itemsize, _MOST_MOVED // torch.float32.itemsize
        tokens = max(min(most * sequence, most_words // model.hidden // num_ranks), 1)
        inner = max(min(max(graph.num_weights for _, graph in model.runs), most_words) // model.hidden, 4)
        between = BETWEEN if sharing < _SHARES_CORES else 1
        halves = TwoLayers(among, tokens, model.hidden, inner // 4, between)
        for ranks in sorted({fewest, num_ranks}):
            sum_s = halves.added_s(ranks, Megatron.name, ranks * tokens) / 2
            sums[ranks] = TimedMove(word * ranks * tokens * model.hidden, max(sum_s, _LEAST_SHARED_S))
        gather_s = replace(halves, inner=inner).added_s(num_ranks, ZeroThree.name, tokens) / 4
        gather = TimedMove(word * inner * model.hidden, max(gather_s, _LEAST_SHARED_S))
    return MeasuredStep(
        compute_s, optimizer_s, sums, ring_s, replicas_s, agreed_s,
        model.num_parameters, num_ranks, sharing, gather,
    )  # fmt: skip


def measured_problem(
    measured: MeasuredStep, model: Transformer, batch: int, sequence: int, memory_bytes: int
) -> StepProblem:
    """Return the problem of a step on this machine, in fp32, whose predicted times are those measured.

    On one rank `step_of` then predicts what was measured. Where `batch` is the larger measured number of sequences
    times the number of ranks, `overlap` of the problem's `stack`, the share (0 to 1) of data-parallel
    communication that overlaps with the backward pass, is fitted so that plain data parallelism takes the measured
    time; other plans are priced with it, too. For other batches it is 0.

    Args:
        measured: the measured times.
        model: whose parts were measured.
        batch: sequences of a step, of all ranks together.
        sequence: tokens of a sequence.
        memory_bytes: the memory that each rank has.

    Raises LayoutError or UnsupportedError where a step of these sizes cannot be priced.
    """
    cluster = _cluster(measured, model, sequence, memory_bytes)
    problem = StepProblem(model, cluster, batch, sequence, "float32", stack=STACK)
    rows = max(measured.compute_s)
    if measured.num_ranks == 1 or batch != rows * measured.num_ranks:
        return problem
    replicas = Parallelism(data=measured.num_ranks, micro_batch=rows)
    taken_s = measured.replicas_s + measured.optimizer_s
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        shared = replace(problem, stack=replace(STACK, overlap=share))
        low, high = (share, high) if step_of(shared, replicas).time_s > taken_s else (low, share)
    return replace(problem, stack=replace(STACK, overlap=(low + high) / 2))


def step_here_s(problem: StepProblem, parallelism: Parallelism, measured: MeasuredStep) -> float:
    """Estimate the seconds of a step on this machine, where ranks of a pipeline share the CPU cores.

    For the plain data parallelism that was measured they are the measured ones, else those of `step_of`. In a
    pipeline, ranks compute `measured.sharing` times as fast while others wait; the estimate is the larger of two
    bounds, the step at equal shares of the cores less its bubble, and the whole step at the faster speed. Two
    small sums over ranks, of what they compare in a call and of the loss, are added; not for replicas without
    ZeRO-3, where both go in one message beside the backward pass.

    Args:
        problem: made by `measured_problem` of `measured`.
        parallelism: the degrees of the step.
        measured: the parts of a step, measured.

    Raises LayoutError or UnsupportedError where `parallelism` does not fit the problem.
    """
    if measured.is_replicas(parallelism, problem.batch):
        return measured.replicas_s + measured.optimizer_s
    step = step_of(problem, parallelism)
    is_apart = parallelism.data != parallelism.num_ranks or parallelism.zero == _SHARDS_WEIGHTS
    apart_s, sharing = _AGREED * measured.agreed_s if is_apart else 0.0, measured.sharing
    if parallelism.pipeline == 1 or sharing <= 1:
        return step.time_s + apart_s
    chip = problem.cluster.chip
    faster = replace(
        chip, launch_s=chip.launch_s / sharing, memory_bytes_per_s=sharing * chip.memory_bytes_per_s,
        peak_flops_per_s=tuple((dtype, sharing * rate) for dtype, rate in chip.peak_flops_per_s),
        effective_flops_per_s=sharing * chip.effective_flops_per_s,
    )  # fmt: skip
    alone = step_of(replace(problem, cluster=replace(problem.cluster, chip=faster)), parallelism)
    return max(step.time_s - step.parts.bubble, alone.time_s) + apart_s


def _cluster(measured: MeasuredStep, model: Transformer, sequence: int, memory_bytes: int) -> Cluster:
    """Return the machine as a cluster."""
    local = load_cluster("local-cpu")
    assert isinstance(local.network, SwitchNetwork)
    switch, link = local.network, local.network.axis(0)
    if measured.num_ranks > 1:
        link = _link_of_messages(measured, link)
    memory_rate = OPTIMIZER_BYTES * measured.num_parameters / max(measured.optimizer_s, 1e-9)

    def cluster(launch_s: float, flops_per_s: float, num_chips: int) -> Cluster:
        chip = replace(
            local.chip, name="a process of this machine", peak_flops_per_s=(("float32", flops_per_s),),
            effective_flops_per_s=flops_per_s, launch_s=launch_s, memory_bytes=memory_bytes,
            memory_bytes_per_s=memory_rate, source="measured",
        )  # fmt: skip
        network = replace(switch, size=num_chips, link=link)
        return replace(local, name="this machine", chip=chip, network=network, source="measured")

    def estimated_s(rows: int, launch_s: float, flops_per_s: float) -> float:
        problem = StepProblem(
            model, cluster(launch_s, flops_per_s, 1), rows, sequence, "float32", stack=STACK
        )
        step = step_of(problem, Parallelism(micro_batch=rows))
        return step.time_s - step.optimizer_s

    return cluster(*_fitted(estimated_s, measured.compute_s), measured.num_ranks)


def _link_of_messages(measured: MeasuredStep, link: NetworkAxis) -> NetworkAxis:
    """Return a link with the rate of messages, and the constants of sums, gathers and messages, by what was timed.

    The rate is that of two large sums, by which the bytes of what was timed are taken off: half of it at most.
    Where the smallest groups are all ranks, or sharing among more takes no longer, all that is left of a sum is
    messages. A gather is timed of all ranks; among fewer it is taken to last as long, but for its bytes. One of
    activations, which is a program of its own, lasts no less than half a sum. A message lasts half a sum of the
    fewest ranks.
    """
    small, large = SUMMED_BYTES
    num_ranks, large_s = measured.num_ranks, measured.ring_s[large]
    passes = 2 * (num_ranks - 1) / num_ranks
    grown_s = max(large_s - measured.ring_s[small], _LEAST_SHARE * large_s, 1e-9)
    rate = max(passes * (large - small) / grown_s, 1.0)
    by_ranks = {
        ranks: max(taken_s - 2 * (ranks - 1) / ranks * num_bytes / rate, taken_s / 2)
        for ranks, (num_bytes, taken_s) in measured.sums.items()
    }
    fewest = min(by_ranks)
    most_s, fewest_s = by_ranks[num_ranks], by_ranks[fewest]
    latency_s = (most_s - fewest_s) / 2 / (num_ranks - fewest) if fewest < num_ranks else 0.0
    launch_s = fewest_s - 2 * (fewest - 1) * latency_s
    if latency_s <= 0 or launch_s < 0:
        latency_s, launch_s = most_s / 2 / (num_ranks - 1), 0.0
    num_bytes, part_s = measured.gather
    gathered_s = max(part_s - passes / 2 * num_bytes / rate, part_s / 2, most_s / 2)
    sums = CommConstants(rate, latency_s, launch_s)
    gathers = CommConstants(rate, 0.0, gathered_s)
    message = CommConstants(rate, fewest_s / 2, 0.0)
    return replace(
        link, name="messages", source="measured", link_bytes_per_s=rate, link_latency_s=latency_s,
        launch_s=launch_s, constants=(("all_reduce", sums), ("all_gather", gathers), ("send_recv", message)),
    )  # fmt: skip


def _fitted(
    estimated_s: Callable[[int, float, float], float], measured_s: Mapping[int, float]
) -> tuple[float, float]:
    """Return seconds of a launch and FLOP/s by which estimates are what was measured.

    An estimate is near linear in the seconds of a launch and of a FLOP; where it bends, as a kernel becomes bound
    by memory, it is followed. Where both sizes cannot be met, the larger is; of one size a launch costs nothing.
    """
    launch_s, flop_s = _GUESS_LAUNCH_S, 1 / _GUESS_FLOPS_PER_S
    for _ in range(_ROUNDS):
        lines = []
        for rows, seconds in measured_s.items():
            here = estimated_s(rows, launch_s, 1 / flop_s)
            by_launch = (estimated_s(rows, 2 * launch_s + 1e-7, 1 / flop_s) - here) / (launch_s + 1e-7)
            by_flop = (estimated_s(rows, launch_s, 1 / (2 * flop_s)) - here) / flop_s
            lines.append((by_launch, by_flop, seconds - here + by_launch * launch_s + by_flop * flop_s))
        (a, b, c), (d, e, f) = lines[0], lines[-1]
        determinant = a * e - b * d
        if len(lines) == 2 and determinant:
            launch_s, flop_s = (c * e - b * f) / determinant, (a * f - c * d) / determinant
        else:
            launch_s = -1.0
        if flop_s < _LEAST_FLOP_S:
            launch_s, flop_s = max((f - e * _LEAST_FLOP_S) / d, 0.0), _LEAST_FLOP_S
        elif launch_s < 0:
            launch_s, flop_s = 0.0, max(f / e, _LEAST_FLOP_S)
    return launch_s, 1 / flop_s
