"""Three readings of what the parts of a stage take, each fixed before any row was computed with it.

`flops`: the FLOPs of `models` at one rate. Transfers on hosts of eight A100 with a NIC of 200 Gb/s for each.

`kernels`: products by the A100's constants for their shapes; attention and element-wise operations, listed in
`layer_operations`, each as a roofline of the chip's peak and its memory. Transfers as for `flops`.

`profiled`: the authors' own times of the parts and of a transfer, equal for all stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshweave.cost.compute import call_s
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import HostsNetwork
from meshweave.describe.model.workload import Workload
from meshweave.ir.work import Compute
from meshweave_studies.layer_operations import Direction, ops_besides_fc_layers
from meshweave_studies.zero_bubble.models import (
    BYTES_PER_ELEMENT,
    SEQUENCE,
    VOCABULARY,
    Slots,
    TrainedModel,
)

HOSTS = "dgx-a100"
"""The paper: up to 32 A100 SXM 80 GB on four hosts, joined by RoCE of a rate that it does not state. Taken: the
200 Gb/s for each GPU of NVIDIA's host with these GPUs."""
FLOPS_PER_S = 142e12
"""Narayanan et al. (SC '21), table 1, the smallest model: what training reaches of an A100's 312 TFLOP/s."""
DTYPE = "float16"
LOSS_BYTES = 38, 14
"""Bytes a logit, forward and backward, that the loss moves through memory: Megatron-LM's cross entropy casts to
fp32, finds the greatest, subtracts, exponentiates, sums and divides, one pass each; its gradient scales and
casts."""
EMBEDDING_BYTES = 9
"""Bytes an element, each way, of look-up and dropout with its mask."""


@dataclass(frozen=True)
class ProfiledTimes:
    """Milliseconds of the parts of a stage and of a transfer, as the authors measured them."""

    forward: float
    input_grad: float
    weight_grad: float
    transfer: float


PROFILED = {
    "1.5B": ProfiledTimes(18.522, 18.086, 9.337, 0.601),
    "6.2B": ProfiledTimes(29.718, 29.444, 19.927, 0.527),
    "14.6B": ProfiledTimes(11.347, 11.248, 8.132, 0.377),
    "28.3B": ProfiledTimes(10.419, 10.207, 7.715, 0.408),
}
"""The paper's appendix. Quoted from memory, not read verbatim."""

PartSeconds = tuple[float, float, float]
"""Of a forward, an input gradient and a weight gradient."""


@dataclass(frozen=True)
class ReadTimes:
    """What a model takes by a reading.

    Attributes:
        parts: by stage, the seconds of a forward, an input gradient and a weight gradient of one micro-batch.
        cluster: a chip for each GPU, and the network between them.
    """

    parts: tuple[PartSeconds, ...]
    cluster: Cluster


Reading = Callable[[TrainedModel, int], ReadTimes]


def by_flops(model: TrainedModel, per_gpu: int) -> ReadTimes:
    """Return the times of a model by the reading `flops`, with `per_gpu` stages on a GPU."""
    parts = []
    for stage in model.stages(per_gpu):
        forward, backward, weights = (flops / FLOPS_PER_S for flops in model.flops(stage))
        parts.append((forward, backward, weights))
    return ReadTimes(tuple(parts), hosts(model))


def by_kernels(model: TrainedModel, per_gpu: int) -> ReadTimes:
    """Return the times of a model by the reading `kernels`, with `per_gpu` stages on a GPU."""
    cluster = hosts(model)
    parts = tuple(_kernel_seconds(model, stage, cluster) for stage in model.stages(per_gpu))
    return ReadTimes(parts, cluster)


def by_profile(model: TrainedModel, per_gpu: int) -> ReadTimes:
    """Return the times of a model by the reading `profiled`, with `per_gpu` stages on a GPU.

    Several stages of a GPU share the time of the one that they are cut from.
    """
    times = PROFILED[model.name]
    parts = tuple(
        milliseconds / 1000 / per_gpu for milliseconds in (times.forward, times.input_grad, times.weight_grad)
    )
    count = model.gpus * per_gpu
    return ReadTimes(((parts[0], parts[1], parts[2]),) * count, _measured_network(model, times))


READINGS: dict[str, Reading] = {"flops": by_flops, "kernels": by_kernels, "profiled": by_profile}
"""By name."""


def hosts(model: TrainedModel) -> Cluster:
    """Return the hosts of a model's GPUs."""
    return load_cluster(HOSTS).with_chips(model.gpus)


def _measured_network(model: TrainedModel, times: ProfiledTimes) -> Cluster:
    """Return hosts on which a transfer of the model takes the profiled time, within a host and between hosts."""
    rate = model.boundary_bytes / (times.transfer / 1000)
    cluster = hosts(model)
    network = cluster.network
    assert isinstance(network, HostsNetwork)

    def at_rate(axis: NetworkAxis) -> NetworkAxis:
        return replace(axis, link_bytes_per_s=rate)

    return replace(cluster, network=replace(network, intra=at_rate(network.intra), nic=at_rate(network.nic)))


def _kernel_seconds(model: TrainedModel, stage: Slots, cluster: Cluster) -> PartSeconds:
    """Return the seconds of the parts of a stage by shapes."""
    tokens, h = model.tokens, model.hidden
    products = [(layer.out_features, layer.in_features) for layer in model.transformer.fc_layers()]
    products = products * stage.layers + [(VOCABULARY, h)] * stage.has_head
    forward = sum(product_s(cluster, tokens, out, into) for out, into in products)
    backward = sum(product_s(cluster, tokens, into, out) for out, into in products)
    weights = sum(product_s(cluster, into, out, tokens) for out, into in products)
    forward += stage.layers * _besides_products_s(model, cluster, "forward")
    backward += stage.layers * _besides_products_s(model, cluster, "backward")
    memory = cluster.chip.memory_bytes_per_s
    embedding = tokens * h * EMBEDDING_BYTES * stage.has_embedding / memory
    logits = tokens * VOCABULARY * stage.has_head / memory
    return (
        forward + embedding + LOSS_BYTES[0] * logits,
        backward + embedding + LOSS_BYTES[1] * logits,
        weights,
    )


def product_s(cluster: Cluster, m: int, n: int, k: int) -> float:
    """Return the seconds of a product (m, k) by (k, n) in fp16 on a chip of the cluster."""
    work = Compute("matmul", 2 * m * n * k, dims=(m, n, k), item_bytes=BYTES_PER_ELEMENT, dtype=DTYPE)
    return call_s(work, cluster.chip)


def _besides_products_s(model: TrainedModel, cluster: Cluster, direction: Direction) -> float:
    """Return the seconds of a layer's attention and element-wise operations."""
    operations = ops_besides_fc_layers(model.transformer, Workload(model.micro_batch, SEQUENCE, DTYPE))
    chip = cluster.chip
    peak = dict(chip.peak_flops_per_s)[DTYPE]
    return sum(
        max(operation.flops / peak, operation.bytes / chip.memory_bytes_per_s)
        for operation in operations
        if operation.direction == direction
    )
