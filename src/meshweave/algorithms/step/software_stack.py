"""What a software stack adds to the physics of a step: named constants, and what its code does."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from meshweave.algorithms.step.stack_runs import StackRuns
from meshweave.base.errors import DescriptionError
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.host import HostRates

_SHARDINGS = ("zero", "fsdp", "fsdp2")
AttentionKind = Literal["flash", "plain"]
LossKind = Literal["fused", "eager", "sharded"]


@dataclass(frozen=True)
class UnfusedKernels:
    """The bytes that a stack's kernels move in one layer beyond those that a block counts, by the tensor moved.

    A block counts each norm, activation and sum as one kernel that reads what it needs and writes its result. The
    numbers follow from the code of a stack (`algorithms.step.stacks`); they are no constants.

    Attributes:
        residual: bytes for each element of the residual, shared by ranks as the strategy shares it.
        heads: for each element of the queries (tokens x heads x width), shared by tensor-parallel ranks.
        keys: likewise for each element of the keys.
        ffn: likewise for each element of the feed-forward part's inner features.
        kernels: how many kernels these are.
    """

    residual: float = 0.0
    heads: float = 0.0
    keys: float = 0.0
    ffn: float = 0.0
    kernels: int = 0

    def __add__(self, other: UnfusedKernels) -> UnfusedKernels:
        """Return the sums of both objects' bytes and of their numbers of kernels."""
        names = (each.name for each in fields(self))
        return UnfusedKernels(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class SoftwareStack:
    """What a software stack adds to the physics, in named constants. The default adds nothing.

    Attributes:
        name: the name of the stack.
        overlap: the share (0 to 1) of data-parallel communication that may overlap with the backward part (for
            gradients) or the forward part (for weights); 0 where the stack waits for it.
        launch_s: seconds that pass on the chip between two kernels of a layer, where they are issued one by one.
        step_s: seconds of a step outside the model: data, logging, norms of gradients.
        fragmentation: bytes that the allocator cannot use, as a share of activations and buffers, besides the gaps
            that the loss leaves (`framework_memory.LOGIT_BYTES`).
        regathers: whether ZeRO-2 gathers weights for each micro-batch, as FSDP's SHARD_GRAD_OP does, and not once
            a step. It says what the stack does; it is no constant.
        blocks_transfers: whether pipeline ranks wait for each transfer that they send, as Megatron-LM did before
            it overlapped them. It is no constant either.
        host: how fast its host issues operations; None for the figures of the cluster, if it has any.
        routed_hosts: (beginning of chip names, rates) in place of `host` for models with experts: a routed layer
            issues more than the kernels that are counted here, and waits for the counts of the experts.
        graphs: whether each part of a layer is captured in a graph, which the host issues at once. This and what
            follows say what the stack's code does, and are no constants.
        captured: the share of the kernels of a layer with experts that are captured in graphs; the others wait for
            the counts of the experts.
        overlaps_exchanges: whether the exchange of tokens with experts of one micro-batch overlaps with the
            computing of another, in the forward part of the one and the backward part of the other.
        forward, backward: the kernels of each part that are not fused.
        copies: the kernels, forward and backward, that copy operands into a program of a product and results out
            of it where products communicate: with tensor ranks; backward with replicas, forward if these shard.
        biased_experts: the passes, forward and backward, of experts that add biases, where these are no part of a
            product: bytes for each element of their results (`residual`) and of their inner features (`ffn`).
        gradient_passes: reads and writes of the gradients of a layer's weights that the stack makes for each
            micro-batch, besides the products: in the dtype of weights, and in that of accumulated gradients.
        gather_passes: reads and writes of a layer's whole weights after each gather, as FSDP2 copies them out.
        attention, loss: the kinds of attention and loss that it has where a step says none, as of `StepProblem`.
        attention_shares: the FLOP rate of its kernel of attention over that of a chip's constants, by how names of
            chips begin; 1 on others.
        logit_bytes: bytes a logit through memory that a loss in steps moves beyond a fused one, forward and
            backward. PyTorch: a cast to fp32 (2 + 4) and log-softmax (4 + 4), where a fused one reads 2; zeros for
            the gradient (4), that of log-softmax (4 + 4 + 4) and a cast back (4 + 2), where it reads and writes 4.
        waits_for_tensor: whether nothing overlaps with the collectives of a layer.
        hides_tensor: whether a product multiplies the parts of an operand as tensor ranks send them, and sends
            those of a result as it has them, in layers without experts and in 8 bits or more.
        waits_for_gathers: whether nothing overlaps with gathers of weights, as where an optimizer issues them.
        sums_after: whether ZeRO-1 sums whole gradients after the last backward part, without overlap, and takes
            the norm of all of them and scales them, not of a shard.
        keeps_gathered: whether a layer's operands that tensor ranks gathered are kept for the backward part as
            they are, and not gathered again there.
        stops_early: whether full recomputation of a layer ends before its last product, of which nothing is kept.
        sustains: whether products run at the share of their rate that chips sustain in published training
            (`sustained_share` of their kernels) and not at the rate of products alone.
        sharding: how weights are kept where ZeRO-3 shards them, no constant either. "zero": in 16 bits, beside a
            sharded copy in fp32 (Rajbhandari et al.); "fsdp": in fp32, cast as they are gathered (PyTorch's mixed
            precision); "fsdp2": gathered besides in a buffer of its own, and copied out of that.
        adds_gradients_late: whether 16-bit gradients of all weights live until the backward part of a micro-batch
            ends, and are then added to those of the ones before.
        buckets_gradients: whether replicas without ZeRO copy 16-bit gradients into buckets that hold all of them,
            as PyTorch's DistributedDataParallel does.
        recomputes_gate: whether the product of the gated activation is computed again for the gradient of the one
            that follows, as compilers do, and not kept.
        copies_norm_inputs: whether norms keep their input in fp32, and what they multiply by the gain, as norms
            that are written out in PyTorch do.
        layers_by_cost: whether layers are divided among stages by their multiplications and the head's, as in
            nanotron, and not evenly.
        keeps_joint_qkv: whether queries are a view of one tensor of queries, keys and values, all of which is
            kept for them; where there are as many key/value heads as heads.
        sliced_weights: tensors of weights a layer, of each of which the collectives of ZeRO-1 copy every replica's
            slice by an operation of its own, as nanotron does; 0 where they move one buffer.
        grouped_experts: whether one kernel multiplies for all experts of a rank and activates between its
            products, as libraries that serve models do. Else each expert has products of its own, which share the
            chip in several streams, and what stands between them passes through memory, as in Transformer Engine.
        runs_programs: whether it runs the program of a step, as the library's own runtime does: its memory is that
            of the program. For others it is counted in closed form (`framework_memory`), by the attributes above.
        runs: what the stack can execute.

    Raises:
        DescriptionError: `overlap` is not from 0 to 1, `launch_s`, `step_s` or `fragmentation` is negative, or
            `sharding` is unknown.
    """

    name: str = "ideal"
    overlap: float = 1.0
    launch_s: float = 0.0
    step_s: float = 0.0
    fragmentation: float = 0.0
    regathers: bool = False
    blocks_transfers: bool = False
    host: HostRates | None = None
    routed_hosts: tuple[tuple[str, HostRates], ...] = ()
    graphs: bool = False
    captured: float = 0.0
    overlaps_exchanges: bool = False
    forward: UnfusedKernels = UnfusedKernels()
    backward: UnfusedKernels = UnfusedKernels()
    copies: tuple[UnfusedKernels, UnfusedKernels] = (UnfusedKernels(), UnfusedKernels())
    biased_experts: tuple[UnfusedKernels, UnfusedKernels] = (UnfusedKernels(), UnfusedKernels())
    gradient_passes: tuple[float, float] = (0.0, 0.0)
    gather_passes: float = 0.0
    attention: AttentionKind = "flash"
    attention_shares: tuple[tuple[str, float], ...] = ()
    loss: LossKind = "fused"
    logit_bytes: tuple[float, float] = (12.0, 18.0)
    waits_for_tensor: bool = False
    hides_tensor: bool = False
    waits_for_gathers: bool = False
    sums_after: bool = False
    keeps_gathered: bool = False
    stops_early: bool = False
    sustains: bool = False
    sharding: Literal["zero", "fsdp", "fsdp2"] = "zero"
    adds_gradients_late: bool = False
    buckets_gradients: bool = False
    recomputes_gate: bool = False
    copies_norm_inputs: bool = False
    layers_by_cost: bool = False
    keeps_joint_qkv: bool = False
    sliced_weights: int = 0
    grouped_experts: bool = True
    runs_programs: bool = True
    runs: StackRuns = field(default_factory=StackRuns)

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise DescriptionError(f"stack {self.name}: overlap is {self.overlap}; give a share from 0 to 1")
        if min(self.launch_s, self.step_s, self.fragmentation) < 0:
            raise DescriptionError(f"stack {self.name}: a constant is negative; give at least 0")
        if self.sharding not in _SHARDINGS:
            raise DescriptionError(
                f"stack {self.name}: sharding is '{self.sharding}'; give one of {', '.join(_SHARDINGS)}"
            )

    def attention_share(self, chip: Chip) -> tuple[str, float] | None:
        """Return the entry (beginning of chip names, share) of `attention_shares` that holds for `chip`, or None.

        The share is the FLOP rate of the stack's attention kernel over that of the chip's constants. An entry
        for the chip's own name comes before one for `chip.fitted_as`.
        """
        shares = self.attention_shares
        return next(
            (each for name in (chip.name, chip.fitted_as) for each in shares if name.startswith(each[0])),
            None,
        )

    @property
    def kernels_alone(self) -> SoftwareStack:
        """Return a stack that does the same work and adds nothing: the kernels and communication of `self` alone.

        It groups experts, hides collectives and exchanges, ends recomputation early and divides layers as `self`
        does, and has its kernel of attention where that is faster than the measured one.
        """
        names = ("grouped_experts", "hides_tensor", "overlaps_exchanges", "stops_early", "layers_by_cost")
        faster = tuple((chip, share) for chip, share in self.attention_shares if share > 1)
        return SoftwareStack(attention_shares=faster, **{name: getattr(self, name) for name in names})

    @property
    def gap_s(self) -> float:
        """Return the idle seconds on a chip between two kernels of a layer; 0 if layers are captured in graphs."""
        return 0.0 if self.graphs else self.launch_s
