"""Lower bounds of the time of a step, by which the search rules configurations out.

Each bound is a time that no step with some of its choices fixed can go under, at its own sizes:

    kernels     the products and the attention of a layer on a rank, without communication and element-wise work
    layers      the layers of the busiest pipeline rank, as laid, for every micro-batch, and those of others once

Both follow from the model of a step: a layer computes in one lane, so that it takes at least what these kernels
take one after the other. Tests compare them with prices, and the search with the whole enumeration.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from meshweave.algorithms.block import BlockAlgorithm
from meshweave.algorithms.block.nodes import Kernel, kernels_of
from meshweave.algorithms.step.block_tasks import compute_ps, priced_work
from meshweave.algorithms.step.block_time import block_of
from meshweave.algorithms.step.layers import bare_layer_s, ends_time, layer_time, least_added_s
from meshweave.algorithms.step.orders import DegreeSizes, place_on_levels
from meshweave.algorithms.step.pipeline import ranks_of_stages
from meshweave.algorithms.step.placement import expert_axes
from meshweave.algorithms.step.precision import PRODUCT_PARTS
from meshweave.algorithms.step.problem import Degree, Parallelism, StepProblem
from meshweave.algorithms.step.space import StepLayout, StepSpace, ranks_of
from meshweave.algorithms.step.stage_layers import rank_layers, stage_layers
from meshweave.algorithms.step.strategies import strategy_of
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.units import to_s
from meshweave.describe.machine.levels import level_sizes
from meshweave.describe.model.memory import Recompute
from meshweave.ir.work import Compute, matmul_work

_SLICE_BLOCK = 8
"""Elements of a block of MeshSlice: where each rank has whole blocks, all slices are equal."""

_ANY = Parallelism().schedule
"""A schedule for choices of which only layers are priced."""


def _mean_weights(problem: StepProblem) -> float:
    """Return the weights of a layer that a token is multiplied by, of layers of several kinds on average."""
    if not problem.model.layers:
        return problem.model.layer.num_weights
    return sum(share * kind.model.layer.num_active_weights for share, kind in problem.kinds)


class LayerBounds:
    """Lower bounds of a layer's time, forward and backward, for the layouts of a space."""

    def __init__(self, space: StepSpace) -> None:
        self._problem = space.problem
        self._levels = level_sizes(self._problem.cluster.network)
        chip = self._problem.cluster.chip
        rates = (*chip.peak_flops_per_s, *chip.dtype_flops_per_s, *chip.call_flops_per_s)
        self._most_flops_per_s = max(chip.effective_flops_per_s, *(rate for _, rate in rates))
        self._kernels: dict[tuple[object, ...], tuple[float, float]] = {}
        self._added: dict[tuple[object, ...], float] = {}
        self._layers: dict[tuple[StepLayout, int], float] = {}
        self._places: dict[tuple[object, ...], StepLayout] = {}

    def flops_s(self, sizes: DegreeSizes) -> float:
        """Return a lower bound of the seconds that a rank computes for its share of one layer and one sequence.

        That is the FLOPs of forward and backward, divided by the context and tensor degrees and by the chip's
        highest FLOP rate. Layers of several kinds count as their mean.
        """
        sequence = self._problem.sequence
        attention = sum(
            share * kind.model.layer.attention_flops(sequence) for share, kind in self._problem.kinds
        )
        flops = 6 * sequence * _mean_weights(self._problem) + 3 * attention
        return flops / self._most_flops_per_s / (sizes.context * sizes.tensor)

    def with_empty_cache(self) -> LayerBounds:
        """Return bounds of the same space that share the cached prices of kernels with these.

        They start without priced layers, and `representative` chooses its layouts anew.
        """
        other = copy(self)
        other._layers, other._places = {}, {}
        return other

    def kernels_s(self, layout: StepLayout, micro_batch: int, recompute: Recompute = "none") -> float:
        """Return a lower bound of the seconds of one layer and micro-batch, forward and backward, on a rank.

        It holds wherever the ranks lie: it counts products, attention and what the software adds, and no
        communication. With `recompute` "full" the forward products and attention count twice. Layers of several
        kinds count as their mean. `micro_batch` is in sequences.

        Raises:
            LayoutError: the strategy does not fit.
        """
        sizes = layout.tensor, layout.context, layout.experts
        key = layout.strategy, sizes, micro_batch
        with_data = *key, layout.data > 1
        if with_data not in self._added:
            choice = layout.choice(micro_batch, _ANY, 1, 0, "none")
            if key not in self._kernels:
                self._kernels[key] = self._of_kernels(choice)
            self._added[with_data] = least_added_s(self._problem, choice)
        forward_s, both_s = self._kernels[key]
        return both_s + self._added[with_data] + (forward_s if recompute == "full" else 0.0)

    def layer_s(self, layout: StepLayout, micro_batch: int, recompute: Recompute = "none") -> float:
        """Return a lower bound of a layer's seconds for one micro-batch, forward and backward, in a layout.

        It includes exposed communication; of recomputation it counts the kernels alone, and no waits for the host.
        `micro_batch` is in sequences.

        Raises:
            LayoutError: the strategy does not fit.
        """
        layout = self.representative(layout)
        key = layout, micro_batch
        if key not in self._layers:
            self._layers[key] = bare_layer_s(self._problem, layout.choice(micro_batch, _ANY, 1, 0, "none"))
        again_s = self.kernels_s(layout, micro_batch, recompute) - self.kernels_s(layout, micro_batch)
        return self._layers[key] + again_s

    def head_s(self, layout: StepLayout, micro_batch: int) -> float:
        """Return the seconds of last norm, logits and loss for a micro-batch (in sequences), forward and backward.

        Raises:
            LayoutError: the strategy does not fit.
        """
        _, head = ends_time(
            self._problem, self.representative(layout).choice(micro_batch, _ANY, 1, 0, "none")
        )
        return max(head.forward.total_s + head.backward.total_s, 0.0)

    def recomputed_s(self, layout: StepLayout, micro_batch: int, recompute: Recompute) -> float:
        """Return the seconds of a layer for one micro-batch: forward, backward and recomputation.

        They are those of `layer_time`; with `recompute` "none" they leave out waits for the host. `micro_batch` is
        in sequences.

        Raises:
            LayoutError: the strategy does not fit.
        """
        if recompute == "none":
            return self.layer_s(layout, micro_batch)
        layer = layer_time(
            self._problem, self.representative(layout).choice(micro_batch, _ANY, 1, 0, recompute)
        )
        return layer.forward.total_s + layer.backward.total_s + layer.recompute.total_s

    def representative(self, layout: StepLayout) -> StepLayout:
        """Return the first layout asked for among those whose layers take as long as those of `layout`.

        Layers take equally long where strategy, tensor, context and expert degrees are equal, groups lie on
        links of the same levels, and all layouts have several replicas or all have one.
        """
        sizes: dict[Degree, int] = {"tensor": ranks_of(layout.tensor), "context": layout.context}
        places = (
            place_on_levels(self._levels, size, layout.stride(degree))
            for degree, size in sizes.items()
            if size > 1
        )
        degrees = layout.tensor, layout.context, layout.data > 1
        key = layout.strategy, *degrees, *places, *self._experts(layout)
        return self._places.setdefault(key, layout)

    def _experts(self, layout: StepLayout) -> Iterator[tuple[object, ...]]:
        """Yield the expert degrees and the links on which ranks that share experts communicate, if they do."""
        if layout.experts != (1, 1):
            yield layout.experts
            for _, size, stride in expert_axes(layout.choice(1, _ANY, 1, 0, "none")):
                yield place_on_levels(self._levels, size, stride)

    def _of_kernels(self, choice: Parallelism) -> tuple[float, float]:
        """Return the least seconds of the forward part of a layer, and of both parts."""
        entry = strategy_of(choice)
        forward_s = backward_s = 0.0
        for share, kind in self._problem.kinds:
            block, sums = block_of(kind, choice), {"forward": 0, "backward": 0}
            for kernel in kernels_of(block, entry.roles_of(block)):
                sums[kernel.part] += kernel.times * self._least_ps(kernel, entry, choice.tensor_mesh)
            forward_s += share * to_s(sums["forward"])
            backward_s += share * to_s(sums["backward"])
        return forward_s, forward_s + backward_s

    def _least_ps(self, kernel: Kernel, entry: BlockAlgorithm, mesh: tuple[int, int]) -> int:
        """Return the least picoseconds of a kernel, which a 2D product may have cut into slices."""
        work = kernel.work
        if work.kind != "matmul" or entry.max_equal_slices == 1:
            return self._compute_ps(work)
        size = work.dims[kernel.sliced]
        is_even = all(size % (parts * _SLICE_BLOCK) == 0 for parts in mesh)
        if entry.max_equal_slices is None or not is_even:
            return int(work.flops / self._most_flops_per_s * 1e12)
        counts = (count for count in range(1, entry.max_equal_slices + 1) if size % count == 0)
        return min(count * self._compute_ps(_sliced(work, kernel.sliced, count)) for count in counts)

    def _compute_ps(self, work: Compute) -> int:
        products = self._problem.products
        if products is None or len(set(products)) == 1:
            return compute_ps(self._problem, priced_work(work, products))
        return min(compute_ps(self._problem, priced_work(work, products, part)) for part in PRODUCT_PARTS)


def _sliced(work: Compute, dim: int, count: int) -> Compute:
    """Return one of `count` equal slices of a product along one of its dims m, n and k."""
    m, n, k = (size // count if place == dim else size for place, size in enumerate(work.dims))
    return matmul_work(m, n, k, work.dtype)


def step_bound_s(
    num_layers: int,
    pipeline: int,
    schedule: str,
    virtual: int,
    num_micro_batches: int,
    layer_s: float,
    head_s: float = 0.0,
    costs: tuple[int, int] | None = None,
    are_alike: bool = True,
) -> float:
    """Return a lower bound of a step's seconds from the seconds of one layer, and of head and loss.

    Every pipeline rank works on every micro-batch, and the rank of the last stage also on head and loss. Where the
    schedule `waits_at_ends`, that rank also idles while the first micro-batch passes the first stages of the other
    ranks forward, and the last one passes them backward, as in 1F1B (Narayanan et al. 2021, section 2.2);
    zero-bubble schedules fill that time. Where layers differ, the busiest rank takes at least the mean of all.

    Args:
        num_layers: layers of the model.
        pipeline, virtual: pipeline ranks, and stages on each.
        schedule: the schedule's name, such as "1f1b".
        num_micro_batches: micro-batches of a step through each pipeline.
        layer_s: seconds of one layer for one micro-batch, forward and backward.
        head_s: seconds of last norm, logits and loss for one micro-batch, forward and backward.
        costs: (of a layer, of the head) by which layers are divided among stages (`stage_layers`); None: evenly.
        are_alike: whether every stage's layers take `layer_s` on average; else only those of the whole model do.
    """
    if not are_alike:
        return num_micro_batches * max((num_layers * layer_s + head_s) / pipeline, head_s)
    layers = rank_layers(num_layers, schedule, pipeline, virtual, costs)
    head = ranks_of_stages(schedule, pipeline, virtual)[-1]
    of_head = num_micro_batches * (layers[head] * layer_s + head_s)
    if pipeline > 1 and SCHEDULES[schedule].for_stages(virtual).waits_at_ends:
        of_head += sum(stage_layers(num_layers, pipeline * virtual, costs)[: pipeline - 1]) * layer_s
    return max(num_micro_batches * max(layers) * layer_s, of_head)
