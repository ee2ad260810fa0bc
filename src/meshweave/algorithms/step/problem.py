"""The problem of a training step, and one choice of its parallelism."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeVar, get_args

from meshweave.algorithms.block.megatron import MegatronSequence
from meshweave.algorithms.block.problem import Overlap
from meshweave.algorithms.pipeline import PipelineAlgorithm
from meshweave.algorithms.pipeline.one_f_one_b import OneForwardOneBackward
from meshweave.algorithms.step.precision import Precision, ProductDtypes, precision_named
from meshweave.algorithms.step.rates import attention_reading, with_rates, without_casts
from meshweave.algorithms.step.software_stack import AttentionKind, LossKind, SoftwareStack
from meshweave.algorithms.step.user_names import require_tensor
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.deprecated import renamed_field
from meshweave.base.errors import DescriptionError, LayoutError, did_you_mean, require_count, require_number
from meshweave.base.units import DTYPES, dtype_bytes, format_bytes
from meshweave.cost.exchange import library_of
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.host import HostRates
from meshweave.describe.model.memory import RECOMPUTES, OptimizerStates, Recompute
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload

Result = TypeVar("Result")
Degree = Literal["tensor", "context", "data", "pipeline"]
DEGREES: tuple[Degree, ...] = ("tensor", "context", "data", "pipeline")
"""The degrees, innermost first: neighbouring chips are of one tensor-parallel group."""

_STATES = {"adam": (2, 4), "adam-bf16": (2, 2), "adam-8bit": (2, 1), "sgd": (0, 4), "momentum": (1, 4)}
OPTIMIZERS = {name: OptimizerStates(*each) for name, each in _STATES.items()}


@dataclass(frozen=True)
class Parallelism:
    """How a step is laid on chips. The product of the degrees is the number of chips.

    Attributes:
        data: replicas of the model, each with its share of the batch.
        pipeline: pipeline ranks.
        context: ranks that share sequences, by ring attention.
        tensor: ranks that share each layer, or a mesh (d1, d2) of them.
        strategy: how these share it: a name of `algorithms.block`, such as "megatron_sp", "megatron", "atp" or
            "meshslice_block".
        zero: what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights.
        zero_group: how many of the ranks with equal weights shard among themselves, neighbours first; others have
            copies (hybrid sharding); None for all.
        expert: ranks that share the experts of a layer. These are neighbours among the ranks of a stage, whichever
            degrees these ranks have for the rest of the layer.
        expert_tensor: ranks that share each expert, neighbours of each other.
        schedule: a name of `algorithms.pipeline.by_name`; "1f1b" with several virtual stages is interleaved.
        virtual_stages: stages on each pipeline rank.
        micro_batch: sequences that go through the pipeline together, on each replica.
        recompute: what the backward part computes again (Korthikanti et al., MLSys '23): "none", "selective" for
            attention, "full" for layers.
        order: the degrees, innermost first: chips next to each other differ in the first one.

    Raises:
        LayoutError: a degree is below 1, `zero`, `recompute` or `order` is unknown, or `zero_group` or the
            degrees of experts do not divide the ranks that they share. Strategy and schedule are not checked.
    """

    data: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int | tuple[int, int] = 1
    strategy: str = MegatronSequence.name
    zero: int = 0
    schedule: str = OneForwardOneBackward.name
    virtual_stages: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    order: tuple[Degree, ...] = DEGREES
    zero_group: int | None = None
    expert: int = 1
    expert_tensor: int = 1

    def __post_init__(self) -> None:
        counts = ["data", "pipeline", "context", "virtual_stages", "micro_batch", "expert", "expert_tensor"]
        for name in counts + ["zero_group"] * (self.zero_group is not None):
            count = require_count(getattr(self, name), f"parallelism: {name}", LayoutError)
            object.__setattr__(self, name, count)
        tensor = require_tensor(self.tensor, "parallelism: tensor", LayoutError)
        object.__setattr__(self, "tensor", tensor)
        if self.zero not in range(4):
            raise LayoutError(f"parallelism: zero is {self.zero!r}; give 0, 1, 2 or 3")
        object.__setattr__(self, "zero", int(self.zero))
        if self.recompute not in RECOMPUTES:
            known = ", ".join(RECOMPUTES)
            raise LayoutError(f"parallelism: recompute is '{self.recompute}'; give one of {known}")
        if self.replicas % (self.zero_group or 1):
            raise LayoutError(
                f"parallelism: zero_group is {self.zero_group}; give a divisor of the {self.replicas} ranks with "
                "equal weights"
            )
        if self.stage_ranks % (self.expert * self.expert_tensor):
            raise LayoutError(
                f"parallelism: expert {self.expert} x expert_tensor {self.expert_tensor} does not divide the "
                f"{self.stage_ranks} ranks of a stage; give a divisor"
            )
        order = tuple(self.order) if isinstance(self.order, list | tuple) else ()
        if sorted(order) != sorted(DEGREES):
            raise LayoutError(f"parallelism: order is {self.order}; give {', '.join(DEGREES)}, each once")
        object.__setattr__(self, "order", order)

    @property
    def schedule_entry(self) -> PipelineAlgorithm:
        """Return the schedule for `virtual_stages` stages a rank. Raises UnsupportedError for an unknown name."""
        return SCHEDULES.named(self.schedule).for_stages(self.virtual_stages)

    @property
    def tensor_mesh(self) -> tuple[int, int]:
        """Return the sizes (d1, d2) of the mesh of tensor ranks: (tensor, 1) where `tensor` is a number."""
        return self.tensor if isinstance(self.tensor, tuple) else (self.tensor, 1)

    @property
    def tensor_size(self) -> int:
        """Return the number of tensor-parallel ranks, which share each layer."""
        return math.prod(self.tensor_mesh)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks: the product of the degrees."""
        return self.data * self.pipeline * self.context * self.tensor_size

    @property
    def stage_ranks(self) -> int:
        """Return the number of ranks of each pipeline rank: data times context times tensor."""
        return self.data * self.context * self.tensor_size

    @property
    def experts(self) -> tuple[int, int]:
        """Return (expert, expert_tensor): ranks that divide the experts, and ranks that shard each one."""
        return self.expert, self.expert_tensor

    @property
    def expert_replicas(self) -> int:
        """Return the number of ranks that hold the same experts."""
        return self.stage_ranks // (self.expert * self.expert_tensor)

    @property
    def expert_shards(self) -> int:
        """Return over how many ranks with the same experts ZeRO shards these, if its level shards at all."""
        inside = self.shards * self.tensor_size // (self.expert * self.expert_tensor)
        return math.gcd(self.expert_replicas, max(inside, 1))

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the pipeline."""
        return self.pipeline * self.virtual_stages

    @property
    def replicas(self) -> int:
        """Return the number of ranks that work with equal weights: data times context."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Return the number of ranks over which ZeRO shards, if its level shards at all."""
        return self.zero_group or self.replicas

    def size(self, degree: Degree) -> int:
        """Return the size of a degree ("tensor", "context", "data" or "pipeline")."""
        return self.tensor_size if degree == "tensor" else int(getattr(self, degree))

    def stride(self, degree: Degree) -> int:
        """Return how many chips apart neighbours of a degree are: the product of the degrees inside it."""
        inside = self.order[: self.order.index(degree)]
        return math.prod(self.size(each) for each in inside)


@renamed_field("seq", "sequence", product_dtype="precision")
@dataclass(frozen=True)
class StepProblem:
    """What a training step computes, and on which cluster.

    Attributes:
        batch: sequences of a step, of all replicas together.
        sequence: tokens of a sequence.
        dtype: of weights and activations.
        gradient_dtype: of accumulated gradients and of their reduction.
        optimizer: "adam", "momentum" or "sgd"; "adam-bf16" and "adam-8bit" keep their states in 16 and 8 bits.
        precision: the recipe by which products of layers run below 16 bits, such as "fp8-block" (`PRECISIONS`);
            None for `dtype`.
        attention: "flash": one kernel that keeps no scores; "plain": two products and a softmax that keep them;
            None: as the stack has it.
        attention_share: the FLOP rate of the attention kernel over that of the chip's constants; below 1 for an
            older kernel; None: that of the stack's kernel.
        loss: "fused": logits are kept in fp32 and become their own gradient; "eager": as PyTorch's cross entropy
            of logits in 16 bits does it, with a cast, an output of log-softmax that is kept, and a cast back;
            "sharded": in as many passes, with softmax over a sharded vocabulary that becomes its own gradient;
            None: as the stack has it.
        dropout: whether dropout follows each half of a layer, whose masks are kept; None: as in GPT-3, where the
            feed-forward part is not gated.
        stack: what the software adds, in constants.
        overlap: what the communication of a layer overlaps with: "sites", the product that it belongs to, as in a
            model of `meshweave.parallelize`; "layers", whatever a program of the whole layer lets it overlap with.
        reserve: what stays free of a chip's memory: a share below 1, or bytes.
        dispatcher: how copies of tokens travel to experts: a name of `cost.exchange`.
        imbalance: how unevenly tokens go to experts: the exponent of a power law of the popularity of experts; 0
            for evenly (`algorithms.step.routing`).

    Raises:
        DescriptionError: a size is out of range, a name unknown, or the chip has no peak in `dtype`.
    """

    model: Transformer
    cluster: Cluster
    batch: int
    sequence: int
    dtype: str = "bfloat16"
    gradient_dtype: str = "float32"
    optimizer: str = "adam"
    precision: str | None = None
    attention: AttentionKind | None = None
    attention_share: float | None = None
    loss: LossKind | None = None
    dropout: bool | None = None
    stack: SoftwareStack = field(default_factory=SoftwareStack)
    overlap: Overlap = "sites"
    reserve: float = 0.05
    dispatcher: str = "all_to_all"
    imbalance: float = 0.0

    def __post_init__(self) -> None:
        workload = Workload(self.batch, self.sequence, self.dtype)
        self.cluster.chip.peak(workload.dtype)
        object.__setattr__(self, "batch", workload.batch)
        object.__setattr__(self, "sequence", workload.sequence)
        for name, known in (
            ("gradient_dtype", tuple(name for name in DTYPES if "float" in name)),
            ("optimizer", tuple(OPTIMIZERS)),
            ("attention", (None, *get_args(AttentionKind))),
            ("loss", (None, *get_args(LossKind))),
            ("overlap", get_args(Overlap)),
        ):
            word = getattr(self, name)
            if word not in known:
                raise DescriptionError(
                    f"step: unknown {name} '{word}'{did_you_mean(word, filter(None, known))}; known: "
                    f"{', '.join(filter(None, known))}"
                )
        if self.dropout not in (None, False, True):
            raise DescriptionError(f"step: dropout is {self.dropout!r}; give True, False or None")
        object.__setattr__(self, "dropout", None if self.dropout is None else bool(self.dropout))
        numbers = [("reserve", 0.0, "a share below 1, or bytes"), ("imbalance", 0.0, "at least 0")]
        if self.attention_share is not None:
            numbers.append(("attention_share", math.ulp(0.0), "a positive number"))
        for name, least, right in numbers:
            number = require_number(getattr(self, name), least, f"step: {name}", right, DescriptionError)
            object.__setattr__(self, name, number)
        library_of(self.dispatcher)
        if self.precision is not None:
            precision_named(self.precision).dtype_on(self.cluster.chip)

    @property
    def recipe(self) -> Precision | None:
        """Return the low-precision recipe of the layers' products; None if they run in `dtype`."""
        return None if self.precision is None else precision_named(self.precision)

    @property
    def products(self) -> ProductDtypes | None:
        """Return the dtypes by which forward, dgrad and wgrad products are priced; None without a recipe."""
        recipe, chip = self.recipe, self.cluster.chip
        return None if recipe is None else self.once("products", "", partial(recipe.products_on, chip))

    @property
    def hides_tensor(self) -> bool:
        """Return whether tensor collectives run inside of products; False below 8 bits and with experts."""
        is_narrow = self.recipe is not None and self.recipe.item_bytes < 1
        return self.stack.hides_tensor and not (is_narrow or self.model.is_routed)

    def gathered_bytes(self, weights: int) -> int:
        """Return the bytes in which ZeRO all-gathers `weights` weights of layers (a count)."""
        return round(weights * (self.item_bytes if self.recipe is None else self.recipe.gathered_bytes))

    @property
    def precision_reading(self) -> str:
        """Return words on the other dtype by which `precision` is priced; "" if its own, or for None."""
        return "" if self.recipe is None else self.recipe.reading_on(self.cluster.chip)

    def usable_bytes(self, memory_bytes: int | None = None) -> int:
        """Return `memory_bytes` (None: a chip's) less `reserve`. Raises DescriptionError if nothing is left."""
        whole = self.cluster.chip.memory_bytes if memory_bytes is None else memory_bytes
        usable = whole - math.ceil(self.reserve * whole if self.reserve < 1 else self.reserve)
        if usable < 1:
            raise DescriptionError(
                f"step: a reserve of {self.reserve_text} leaves nothing of {format_bytes(whole)} a chip; give "
                "less of it, or more memory"
            )
        return usable

    @property
    def reserve_text(self) -> str:
        """Return the reserve in words: a share as per cent, else bytes."""
        return f"{100 * self.reserve:g} %" if self.reserve < 1 else format_bytes(self.reserve)

    @property
    def kinds(self) -> tuple[tuple[float, StepProblem], ...]:
        """Return for each kind of layer (its share of the layers, 0 to 1; this problem with that kind alone)."""
        kept = self.cache("kinds")
        if not kept:
            kinds, count = self.model.kinds, self.model.num_layers
            shares = ((number / count, replace(self, model=model)) for number, model in kinds)
            kept[""] = ((1.0, self),) if len(kinds) == 1 else tuple(shares)
        kinds_of: tuple[tuple[float, StepProblem], ...] = kept[""]
        return kinds_of

    @property
    def attention_kind(self) -> AttentionKind:
        """Return "flash" or "plain": `attention` if given, else the stack's."""
        return self.attention or self.stack.attention

    @property
    def attention_rate(self) -> float:
        """Return the factor on the attention FLOP rate: `attention_share`, or the stack's for "flash", or 1."""
        if self.attention_share is not None:
            return self.attention_share
        known = self.stack.attention_share(self.cluster.chip) if self.attention_kind == "flash" else None
        return 1.0 if known is None else known[1]

    @property
    def attention_reading(self) -> str:
        """Return words on how flash attention is priced if neither fitted on this chip nor given; else ""."""
        is_given = self.attention_share is not None or self.attention_kind != "flash"
        return "" if is_given else attention_reading(self.stack, self.cluster.chip, self.dtype)

    @property
    def loss_kind(self) -> LossKind:
        """Return "fused", "eager" or "sharded": `loss` if given, else the stack's."""
        return self.loss or self.stack.loss

    @property
    def workload(self) -> Workload:
        """Return the step's sequences, tokens per sequence and dtype."""
        return Workload(self.batch, self.sequence, self.dtype)

    @property
    def has_dropout(self) -> bool:
        """Return whether a layer has dropout: `dropout` if given, else whether its FFN has no gate."""
        return not self.model.gated_ffn if self.dropout is None else self.dropout

    @property
    def item_bytes(self) -> int:
        """Return the bytes of one weight or activation."""
        return dtype_bytes(self.dtype)

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of one accumulated gradient."""
        return dtype_bytes(self.gradient_dtype)

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes of optimizer state per parameter, with an fp32 copy of weights below fp32."""
        return OPTIMIZERS[self.optimizer].total_bytes + (4 if self.item_bytes < 4 else 0)

    @property
    def priced_cluster(self) -> Cluster:
        """Return the cluster with this step's rates of attention and products (without casts under a recipe)."""

        def priced() -> Cluster:
            cluster = with_rates(self.cluster, self.dtype, self.attention_rate, self.stack.sustains)
            return cluster if self.products is None else without_casts(cluster)

        return self.once("cluster", "", priced)

    @property
    def host(self) -> HostRates | None:
        """Return a host's seconds per operation it issues: the stack's, else the cluster's, else None."""
        routed = self.stack.routed_hosts if self.model.is_routed else ()
        chip = self.cluster.chip.name
        host = next((rates for name, rates in routed if chip.startswith(name)), None)
        return host or self.stack.host or self.cluster.host

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without what is cached, which is computed again."""
        return {name: value for name, value in vars(self).items() if name != "_cache"}

    def cache(self, kind: str) -> dict[Any, Any]:
        """Return the dictionary, by key, in which results of a `kind` (any name) are cached for this problem."""
        return self._cache[kind]

    @cached_property
    def _cache(self) -> defaultdict[str, dict[Any, Any]]:
        return defaultdict(dict)

    def once(self, kind: str, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Return `compute()`, which is called once for each kind and key of this problem, and then cached."""
        known = self._cache[kind]
        if key not in known:
            known[key] = compute()
        result: Result = known[key]
        return result
