"""Price a layer, and embedding and loss, on the ranks that share them: estimates of the programs of blocks.

A layer is the program that `algorithms.block` writes for one layer under a strategy, on the chips that its ranks
occupy. Communication that its lanes do not hide is exposed. Gradients of replicated weights are reduced once a
step, not for each micro-batch; `algorithms.step.data_parallel` prices that.

Where layers are of several kinds, `layer_time` is their mean over the model, and `mean_layer_time` that over the
layers of a stage, where their order is known.

With context parallelism each rank has tokens from all over a sequence, so that in each turn of the ring every rank
attends to half of the keys (Brandon et al., Striped Attention, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshweave.algorithms.block import BlockConfig
from meshweave.algorithms.block.pieces import Piece
from meshweave.algorithms.step.block_tasks import PartTime, compute_ps, priced_work
from meshweave.algorithms.step.block_time import LayerBlock, layer_block, layer_key, unquantized_block
from meshweave.algorithms.step.framework_memory import logit_elements
from meshweave.algorithms.step.hidden_exchanges import hidden_exchanges
from meshweave.algorithms.step.host import IssueCounts
from meshweave.algorithms.step.host_time import issued_s, stalls_s, unfused_of
from meshweave.algorithms.step.problem import Parallelism, StepProblem
from meshweave.algorithms.step.quantizing import added_passes
from meshweave.algorithms.step.software_stack import UnfusedKernels
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.base.units import to_s
from meshweave.cost.calls import with_counts
from meshweave.ir.work import Compute, matmul_work


@dataclass(frozen=True)
class LayerTime:
    """The time of one micro-batch in one layer, or in embedding, or in last norm, logits and loss.

    Attributes:
        forward, backward: the two parts, without recomputation.
        recompute: what the backward part computes again.
        issued_s: seconds in which the host issues (forward, backward, recompute); 0 without a known host.
        hidden: what exchanges of tokens that run beside another micro-batch add to `forward` and to `backward`,
            included there: computing that they slow down, less (negative) communication.
    """

    forward: PartTime
    backward: PartTime
    recompute: PartTime = field(default_factory=PartTime)
    issued_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    hidden: tuple[PartTime, PartTime] = (PartTime(), PartTime())

    def beside_others(self, share: float) -> LayerTime:
        """Return the mean time where only a `share` (0 to 1) of the micro-batches hides exchanges of tokens."""
        first, last = ((1 - share) * part for part in self.hidden)
        return replace(self, forward=self.forward - first, backward=self.backward - last)

    @property
    def issued_back_s(self) -> float:
        """Return the seconds in which the host issues the backward part and its recomputation together."""
        return self.issued_s[1] + self.issued_s[2]


def layer_time(problem: StepProblem, parallelism: Parallelism) -> LayerTime:
    """Return the time of one micro-batch in one layer: the mean over kinds of layers, weighted by their shares.

    Raises UnsupportedError for an unknown strategy, LayoutError if the layer does not fit it.
    """

    def mean() -> LayerTime:
        times = [(share, _layer_time(kind, parallelism)) for share, kind in problem.kinds]
        return times[0][1] if len(times) == 1 else _mean(times)

    key = layer_key(parallelism), parallelism.recompute, _of_replicas(parallelism)
    return problem.once("layers", key, mean)


def mean_layer_time(problem: StepProblem, parallelism: Parallelism, counts: tuple[float, ...]) -> LayerTime:
    """Return the time of one micro-batch in one layer of a stage, the mean over the stage's layers.

    `counts` has the number of the stage's layers of each of `problem.kinds`, not all 0.
    """

    def mean() -> LayerTime:
        total, kinds = sum(counts), [kind for _, kind in problem.kinds]
        own = ((count, kind) for count, kind in zip(counts, kinds, strict=True) if count)
        return _mean([(count / total, layer_time(kind, parallelism)) for count, kind in own])

    key = layer_key(parallelism), parallelism.recompute, _of_replicas(parallelism), counts
    return problem.once("stages of kinds", key, mean)


def _mean(times: list[tuple[float, LayerTime]]) -> LayerTime:
    """Return the mean of the times of kinds of layers by their shares."""
    parts, issued_s = [PartTime() for _ in range(5)], [0.0, 0.0, 0.0]
    for share, time in times:
        for number, part in enumerate((time.forward, time.backward, time.recompute, *time.hidden)):
            parts[number] += share * part
        for number, each_s in enumerate(time.issued_s):
            issued_s[number] += share * each_s
    forward, backward, recompute, *hidden = parts
    return LayerTime(
        forward, backward, recompute, (issued_s[0], issued_s[1], issued_s[2]), (hidden[0], hidden[1])
    )


def ends_time(problem: StepProblem, parallelism: Parallelism) -> tuple[LayerTime, LayerTime]:
    """Return the times of one micro-batch in (the embedding; last norm, logits and loss).

    Both are 0 for a model without a vocabulary size.
    """
    return problem.once("ends", layer_key(parallelism), lambda: _ends_time(problem, parallelism))


def _of_replicas(parallelism: Parallelism) -> tuple[bool, bool, bool]:
    """Return what decides which copies the stack makes (`_added_s`, `_accumulation_s`)."""
    p = parallelism
    return p.replicas > 1, p.zero > 0, p.zero == 3


def _layer_time(problem: StepProblem, parallelism: Parallelism) -> LayerTime:
    block = layer_block(problem, parallelism)
    first, whole = block.forward.part, block.whole.part
    added = _parts_added_s(block, parallelism)
    stalls = stalls_s(block, parallelism, added)
    hidden = hidden_exchanges(block)
    forward = first + PartTime(added[0], host_s=stalls[0]) + hidden[0]
    backward = whole - first + PartTime(added[1], host_s=stalls[1]) + hidden[1]
    again = PartTime()
    if parallelism.recompute == "full":
        again = forward
        if problem.stack.stops_early:
            again = again - PartTime(_last_product_s(problem, parallelism))
    elif parallelism.recompute == "selective":
        fused_s, plain_s = _attention_s(problem, parallelism, "forward")
        again = PartTime(plain_s) + (block.ring or PartTime(fused_s, 0.0, first.context_s))
    return LayerTime(forward, backward, again, issued_s(block, parallelism), hidden)


def _parts_added_s(block: LayerBlock, parallelism: Parallelism) -> tuple[float, float]:
    """Return what the software stack, and plain attention, add to the forward and to the backward part."""
    kernels = block.forward.kernels, block.whole.kernels - block.forward.kernels
    of = block.problem, parallelism
    return _added_s(*of, kernels[0], "forward"), _added_s(*of, kernels[1], "backward")


PIECES_AT_ENDS: tuple[Piece, Piece] = ("embedding", "head")

Split = tuple[PartTime, PartTime]
"""Times of a backward part without recomputation: (gradient of the residual, gradients of weights)."""


def layer_split(problem: StepProblem, parallelism: Parallelism, counts: tuple[float, ...]) -> Split | None:
    """Return (time of the gradient of a layer's input, time of its weights' gradients) for one micro-batch.

    The second includes the accumulation of gradients; both leave out recomputation. They are means over a stage of
    `counts` layers of each of `problem.kinds`, or for () over the model. None where tasks are not priced one by
    one (`LayerBlock.split`).
    """
    key = layer_key(parallelism), parallelism.recompute, _of_replicas(parallelism), counts
    return problem.once("layers in two", key, lambda: _layer_split(problem, parallelism, counts))


def _layer_split(problem: StepProblem, parallelism: Parallelism, counts: tuple[float, ...]) -> Split | None:
    totals = PartTime(), PartTime()
    shares = [count / sum(counts) for count in counts] or [share for share, _ in problem.kinds]
    for share, (_, kind) in zip(shares, problem.kinds, strict=True):
        block = layer_block(kind, parallelism)
        split = block.split
        if split is None:
            return None
        late_s = _accumulation_s(kind, parallelism)
        soon_s = _parts_added_s(block, parallelism)[1] - late_s
        added = zip(totals, split, (soon_s, late_s), strict=True)
        soon, late = (total + share * (part + PartTime(more_s)) for total, part, more_s in added)
        totals = soon, late
    return totals


def ends_split(problem: StepProblem, parallelism: Parallelism) -> tuple[Split, Split] | None:
    """Return the `Split` times of (the embedding; last norm, logits and loss) for one micro-batch.

    None where tasks are not priced one by one (`LayerBlock.split`).
    """
    return problem.once("ends in two", layer_key(parallelism), lambda: _ends_split(problem, parallelism))


def _ends_split(problem: StepProblem, parallelism: Parallelism) -> tuple[Split, Split] | None:
    begins, _ = ends_time(problem, parallelism)
    none = PartTime(), PartTime()
    vocabulary = problem.model.vocab_size
    if not vocabulary:
        return none, none
    split, plain = (unquantized_block(problem, parallelism, each).split for each in (vocabulary, 0))
    if split is None or plain is None:
        return None
    logits_s = eager_logits_s(problem, parallelism, problem.stack.logit_bytes[1])
    head = split[0] - plain[0] + PartTime(logits_s), split[1] - plain[1] - begins.backward
    return (PartTime(), begins.backward), head


def hidden_between_sites_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the seconds per layer and micro-batch that `problem.overlap` saves compared with overlap "sites".

    A site is a product with its communication; with "sites" they run one by one. Recomputation is left out.
    """
    own = layer_time(problem, parallelism)
    by_sites = layer_time(replace(problem, overlap="sites"), parallelism)
    hidden = by_sites.forward + by_sites.backward - own.forward - own.backward
    return hidden.total_s


def extra_s(problem: StepProblem, parallelism: Parallelism) -> tuple[float, float, float]:
    """Return the seconds that software adds to a layer (of the first kind) per micro-batch, beyond its program.

    They are (forward, backward with recomputation, that share of the second which belongs to weight gradients).
    """
    forward_s, backward_s = _parts_added_s(layer_block(problem, parallelism), parallelism)
    if parallelism.recompute == "full":
        skipped_s = _last_product_s(problem, parallelism) if problem.stack.stops_early else 0.0
        backward_s += max(forward_s - skipped_s, 0.0)
    elif parallelism.recompute == "selective":
        backward_s += _attention_s(problem, parallelism, "forward")[1]
    return forward_s, backward_s, _accumulation_s(problem, parallelism)


def best_config(problem: StepProblem, parallelism: Parallelism) -> BlockConfig:
    """Return the strategy's fastest config for a layer of the first kind, forward and backward together."""
    return layer_block(problem, parallelism).config


def bare_layer_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the seconds of one micro-batch in one layer, forward and backward, the mean over kinds of layers.

    Recomputation and waits for the host are left out. Raises LayoutError where the strategy does not fit.
    """
    total_s, gap_s = 0.0, problem.stack.gap_s
    for share, kind in problem.kinds:
        block = layer_block(kind, parallelism)
        hidden_s = sum(part.total_s for part in hidden_exchanges(block))
        added_s = least_added_s(kind, parallelism) + gap_s * block.whole.kernels
        total_s += share * (block.whole.part.total_s + hidden_s + added_s)
    return total_s


def least_added_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the seconds that software and plain attention add to a layer per micro-batch, forward and backward.

    Gaps between kernels count only for kernels that the layer's program does not have.
    """
    return sum(_added_s(problem, parallelism, 0, part) for part in ("forward", "backward"))


def _added_s(problem: StepProblem, parallelism: Parallelism, num_kernels: int, part: str) -> float:
    """Return the seconds that the software stack, and plain attention, add to a part of so many kernels."""
    unfused, passes = unfused_of(problem, parallelism, part), added_passes(problem, parallelism, part)
    added_s = _software_s(problem, parallelism, num_kernels + passes.kernels, unfused)
    added_s += streamed_s(problem, passes.num_bytes)
    if part == "backward":
        added_s += _accumulation_s(problem, parallelism)
    if problem.attention_kind == "plain":
        added_s += _attention_s(problem, parallelism, part)[1]
    return added_s


def _software_s(
    problem: StepProblem, parallelism: Parallelism, num_kernels: int, unfused: UnfusedKernels
) -> float:
    """Return the seconds that the software stack adds to a part of a layer that has so many kernels without it."""
    rows, columns = parallelism.tensor_mesh
    roles = strategy_of(parallelism).roles[-2:]
    shared = parallelism.context
    for role, size in zip(roles, (rows, columns), strict=True):
        shared *= size if role.residual else 1
    tokens = parallelism.micro_batch * problem.sequence
    inner = parallelism.context * parallelism.tensor_size
    moved = tokens * sum(
        getattr(unfused, name) * size / (shared if name == "residual" else inner)
        for name, size in problem.model.layer.counts.items()
    )
    return (num_kernels + unfused.kernels) * problem.stack.gap_s + streamed_s(problem, moved)


def _accumulation_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the seconds of the stack's passes over a layer's gradients of weights, and its gathered weights."""
    layer = problem.model.layer
    own = -(-layer.num_weights // parallelism.tensor_size) + layer.num_whole_weights
    own += layer.num_expert_weights // (parallelism.expert * parallelism.expert_tensor)
    in_weights, in_gradients = problem.stack.gradient_passes
    moved = own * (in_weights * problem.item_bytes + in_gradients * problem.gradient_bytes)
    if parallelism.zero == 3:
        gathers = 2  # forward and backward, of which the time is counted backward
        moved += gathers * own * problem.stack.gather_passes * problem.item_bytes
    return streamed_s(problem, moved)


def _last_product_s(problem: StepProblem, parallelism: Parallelism) -> float:
    """Return the seconds of the last product of a layer's forward part."""
    tokens = -(-parallelism.micro_batch * problem.sequence // parallelism.context)
    last = problem.model.layer.linears[-1]
    inner = -(-last.operand.size // parallelism.tensor_size)
    work = matmul_work(tokens, last.result.size, inner, problem.dtype)
    return call_s(problem, priced_work(work, problem.products))


def streamed_s(problem: StepProblem, num_bytes: float) -> float:
    """Return the seconds in which one chip moves `num_bytes` bytes through its memory element-wise; 0 for none."""
    if num_bytes <= 0:
        return 0.0
    moved = round(num_bytes)
    return call_s(
        problem, Compute("call", max(moved // 4, 1), moved, dtype=problem.dtype, call="elementwise")
    )


def call_s(problem: StepProblem, work: Compute) -> float:
    """Return the seconds of one computing op on one chip of the problem's cluster."""
    return to_s(compute_ps(problem, with_counts(work)))


def _attention_s(problem: StepProblem, parallelism: Parallelism, direction: str) -> tuple[float, float]:
    """Return the seconds of attention as the block has it, and what plain attention adds to them.

    Plain attention multiplies all pairs of tokens twice forward and four times backward. A causal softmax reads
    half of the scores and writes all, and backward reads half of two tensors (Megatron-LM, megatron/fused_kernels/
    scaled_upper_triang_masked_softmax.h). Dropout reads and writes all, and its mask.
    """
    item, batch = problem.item_bytes, parallelism.micro_batch
    (node,) = problem.model.layer.attentions
    heads, width = -(-node.heads // parallelism.tensor_size), node.width
    queries = -(-problem.sequence // parallelism.context)
    part = "" if direction == "forward" else "input_grad"
    keys = node.mean_keys(problem.sequence)
    operands = item * batch * heads * width * (2 * queries + 2 * problem.sequence)
    shape = (batch, heads, queries, keys, width)
    moved = operands * (2 if part else 1)
    fused = Compute("call", 0, moved, dtype=problem.dtype, call="attention", shape=shape, part=part)
    fused_s = call_s(problem, fused)
    if problem.attention_kind == "flash":
        return fused_s, 0.0
    scores = batch * heads * queries * problem.sequence
    products = [matmul_work(queries, problem.sequence, width, problem.dtype, batch * heads)]
    products.append(matmul_work(queries, width, problem.sequence, problem.dtype, batch * heads))
    times = 1 if direction == "forward" else 2
    plain_s = times * sum(call_s(problem, each) for each in products)
    moved = scores * item * (3 if times == 1 else 4) // 2
    moved += scores * (2 * item + 1) if problem.has_dropout else 0
    softmax = Compute("call", 5 * scores, moved, dtype=problem.dtype, call="softmax")
    return fused_s, plain_s + call_s(problem, softmax) - fused_s


def eager_logits_s(problem: StepProblem, parallelism: Parallelism, num_bytes: float) -> float:
    """Return a rank's seconds to move `num_bytes` per logit of a micro-batch in memory; 0 if the loss is fused."""
    if problem.loss_kind == "fused":
        return 0.0
    logits = logit_elements(problem, parallelism)
    work = Compute("call", logits, round(num_bytes * logits), dtype=problem.dtype, call="elementwise")
    return call_s(problem, work)


def _ends_time(problem: StepProblem, parallelism: Parallelism) -> tuple[LayerTime, LayerTime]:
    vocabulary = problem.model.vocab_size
    if not vocabulary:
        none = LayerTime(PartTime(), PartTime())
        return none, none
    logits_s = [eager_logits_s(problem, parallelism, each) for each in problem.stack.logit_bytes]
    begins, ends = (_piece_time(problem, parallelism, piece) for piece in PIECES_AT_ENDS)
    forward, backward = ends.forward + PartTime(logits_s[0]), ends.backward + PartTime(logits_s[1])
    issued = ends.issued_s
    if problem.host is not None and problem.loss_kind != "fused":
        more_s = IssueCounts(_LOSS_KERNELS).seconds(problem.host, problem.stack.graphs)
        issued = issued[0] + more_s, issued[1] + more_s, 0.0
    return begins, LayerTime(forward, backward, issued_s=issued)


_LOSS_KERNELS = 3
"""Of a loss in steps beyond a fused one: a cast, log-softmax and a sum; zeros, its gradient and a cast."""


def _piece_time(problem: StepProblem, parallelism: Parallelism, piece: Piece) -> LayerTime:
    """Return what one micro-batch takes in an end of the model alone, beside whose communication no layer runs."""
    block = layer_block(problem, parallelism)
    forward, whole = (block.piece(training, piece) for training in (False, True))
    host, graphs, issued = problem.host, problem.stack.graphs, (0.0, 0.0, 0.0)
    if host is not None:
        ahead, back = IssueCounts(forward.kernels), IssueCounts(whole.kernels - forward.kernels)
        issued = ahead.seconds(host, graphs), back.seconds(host, graphs), 0.0
    return LayerTime(forward.part, whole.part - forward.part, issued_s=issued)
