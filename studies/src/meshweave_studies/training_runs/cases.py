"""Turn a published run into a step to predict: model, cluster, batch, degrees and software stack.

A row states some of that in columns and some in words. Where it leaves the micro-batch or the number of virtual
stages open, all choices are priced and the fastest that fits is taken, as the authors would have. What else is
open is a reason not to predict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product

from meshweave.algorithms.step import Parallelism, SoftwareStack, StepProblem, UnfusedKernels
from meshweave.algorithms.step.framework_memory import ActivationRule
from meshweave.base.errors import MeshweaveError
from meshweave.describe.model.memory import Recompute
from meshweave.describe.model.transformer import Transformer
from meshweave_studies.training_runs.clusters import cluster_of
from meshweave_studies.training_runs.left_out import left_out_reason
from meshweave_studies.training_runs.models import NoPredictionError, model_of, with_source_columns
from meshweave_studies.training_runs.routed_runs import (
    dispatcher_of,
    expert_share,
    on_expert_ranks,
    recipe_of,
)
from meshweave_studies.training_runs.rows import PublishedRun
from meshweave_studies.training_runs.stacks import RunStack, software_of, stack_of

_OPEN_MICRO_BATCHES = (1, 2, 4, 8)
_MOST_MICRO_BATCHES = 2**14
"""More of them on a pipeline than any run has, and than schedules are made of in a second."""
_PRECISIONS = (
    (r"nvfp4", (), "nvfp4"),
    (r"mxfp8|fp8-mx", (), "mxfp8"),
    (r"rowwise", ("torchtitan",), "fp8-token"),
    (r"fp8|float8", ("Megatron-Bridge", "torchtitan"), "fp8-current"),
    (r"fp8|float8", (), "fp8-delayed"),
)
"""Patterns of a row's words, words of its source, any of which names it (none: any source), and the recipe.

That FP8 of Megatron-Bridge and of torchtitan has scales that follow from the tensor itself, and that of NeMo,
llm-foundry, dgxc-benchmarking and MLPerf 5.0 scales of the last steps, is a reading: rows say FP8 alone.
"""
_UNKNOWN_PRECISION = re.compile(r"mxfp4|mxfp6|fp4|int8", re.IGNORECASE)
_SCHEDULES = (("zb-1p", "zb-1p"), ("zb-2p", "zb-2p"), ("zb-h1", "zb-h1"), ("zb-v", "zbv"))


@dataclass(frozen=True)
class RunCase:
    """A run that can be predicted.

    Attributes:
        stack: the software that ran.
        choices: the parallelism; several where the source leaves something open.
        recomputed_share: the share of layers that compute their forward part again; selective recomputation of
            operations is read as half, or by multiplications where a row names products that are kept.
        kept: what the forward part keeps, where it is not what the parallelism says.
    """

    run: PublishedRun
    stack: RunStack
    problem: StepProblem
    choices: tuple[Parallelism, ...]
    recomputed_share: float = 1.0
    kept: ActivationRule | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Return what makes two rows figures of the same run."""
        of, model = self.problem, self.problem.model
        shape = model.num_layers, model.hidden, model.layer.counts["ffn"]
        sizes = of.cluster.name, of.cluster.num_chips, of.batch, of.sequence
        return *shape, *sizes, self.stack.name, of.precision, self.choices


def _adapted(software: SoftwareStack, words: _Words) -> SoftwareStack:
    """Return a stack as a run says that it was: by autocast, or compiled."""
    if words.is_amp:
        software = replace(software, stops_early=True)
    if not words.is_compiled:
        return software
    return replace(
        software,
        forward=UnfusedKernels(),
        backward=UnfusedKernels(),
        recomputes_gate=True,
        copies_norm_inputs=False,
    )


def case_of(
    run: PublishedRun,
    constants: SoftwareStack | None = None,
    attention: float | None = None,
    *,
    experts: bool = False,
) -> RunCase:
    """Return the problem and parallelism of a run.

    Args:
        constants: those of the stack; by default those that ship with the package.
        attention: the rate of its kernel of attention over the measured one; by default that of the stack.
        experts: whether runs of models with experts are predicted.

    Raises:
        NoPredictionError: it cannot be predicted; the reason.
    """
    try:
        return _case_of(run, constants, attention, experts)
    except MeshweaveError as error:
        raise NoPredictionError(str(error)) from None


def _case_of(
    run: PublishedRun, constants: SoftwareStack | None, attention: float | None, experts: bool
) -> RunCase:
    """Return what `case_of` does. Raises MeshweaveError, too, for what is no step of any run."""
    if reason := left_out_reason(run):
        raise NoPredictionError(reason)
    run = with_source_columns(run)
    model, stack = model_of(run, experts=experts), stack_of(run)
    precision = precision_of(run)
    if stack.needs_precision and not precision and not re.search(r"bf16|fp16", run.config, re.IGNORECASE):
        raise NoPredictionError("the precision is not stated")
    cluster, words = cluster_of(run), _Words(run)
    # sources print what the allocator has, in memory of which makers' sizes leave out the rest
    cluster = replace(cluster, chip=replace(cluster.chip, runtime="none"))
    degrees = _degrees(run, words, cluster.num_chips)
    degrees = replace(degrees, zero=_zero_level(words, stack, degrees), zero_group=words.sharding(degrees))
    seq = run.count("seq")
    if seq is None:
        raise NoPredictionError("the sequence length is not stated")
    batch, choices = _choices(run, words, stack, model, degrees)
    software = _adapted(software_of(stack) if constants is None else constants, words)
    if model.is_routed:
        recipe = recipe_of(run)
        software = replace(software, captured=recipe.captured, overlaps_exchanges=recipe.overlaps)
        if recipe.fuses_biases:
            software = replace(software, biased_experts=SoftwareStack().biased_experts)
    gradient_dtype = "float32" if words.is_amp else stack.gradient_dtype
    problem = StepProblem(
        model, cluster, batch, seq, stack.dtype, gradient_dtype, attention_share=attention,
        loss=stack.compiled_loss if words.is_compiled else None, stack=software, overlap="layers", reserve=0.0,
        precision=precision, dispatcher=dispatcher_of(run, cluster) if model.is_routed else "all_to_all",
    )  # fmt: skip
    share = expert_share(model, seq) if words.recomputes_experts else words.recomputed_of(model, seq)
    return RunCase(run, stack, problem, choices, share, words.kept_operators)


def _choices(
    run: PublishedRun, words: _Words, stack: RunStack, model: Transformer, degrees: Parallelism
) -> tuple[int, tuple[Parallelism, ...]]:
    """Return the sequences of a step, and what a run leaves open of its parallelism. Raises NoPredictionError."""
    micro, batch = _batch(run, words, stack, degrees.data)
    recompute = stack.recomputes_instead or words.recompute or stack.recompute
    choices = tuple(
        replace(degrees, micro_batch=size, virtual_stages=virtual, recompute=recompute)
        for size, virtual in product(
            (micro,) if micro else _OPEN_MICRO_BATCHES, _virtual_stages(run, words, model, stack, degrees)
        )
        if batch % (size * degrees.data) == 0
    )
    if choices and degrees.pipeline > 1:
        most = batch // (degrees.data * min(choice.micro_batch for choice in choices))
        if most > _MOST_MICRO_BATCHES:
            raise NoPredictionError(f"{most} micro-batches are more than {_MOST_MICRO_BATCHES}")
    if not choices:
        raise NoPredictionError(
            f"{degrees.data} replicas of whole micro-batches do not divide {batch} sequences"
        )
    if not words.is_sequence_parallel(stack.is_sequence_parallel):
        choices = tuple(replace(choice, strategy="megatron") for choice in choices)
    if model.is_routed:
        choices = tuple(on_expert_ranks(run, choice) for choice in choices)
    return batch, choices


def precision_of(run: PublishedRun) -> str | None:
    """Return the recipe of the products of a run's layers, None for 16 bits. Raises NoPredictionError."""
    words = f"{run.config} {run.source.rpartition(':')[2]}"
    for pattern, sources, name in _PRECISIONS:
        if re.search(pattern, words, re.IGNORECASE) and (
            not sources or any(s in run.source for s in sources)
        ):
            return name
    if _UNKNOWN_PRECISION.search(words):
        raise NoPredictionError("products in eight or four bits by a recipe that is not known")
    return None


class _Words:
    """Read the column `config` of a run."""

    def __init__(self, run: PublishedRun) -> None:
        self.text = run.config.lower()
        self.source = run.source.lower()

    def number(self, pattern: str) -> int | None:
        """Return the number that stands in a pattern's group; None where the words do not match."""
        match = re.search(pattern, self.text)
        return int(match[1]) if match else None

    @property
    def zero(self) -> int:
        """Return the level of ZeRO."""
        stated = self.number(r"zero-?(\d)")
        if stated is not None:
            return stated
        if "shard_grad_op" in self.text:
            return 2
        shards = self.number(r"[fh]sdp ?=?(\d+)")
        return 3 if "full_shard" in self.text or (shards or 0) > 1 else 0

    def sharding(self, degrees: Parallelism) -> int | None:
        """Return how many replicas shard among themselves where others have copies ("HSDP=n"); None for all."""
        group = self.number(r"hsdp ?=?(\d+)")
        return group if group is not None and group < degrees.replicas else None

    @property
    def recompute(self) -> Recompute | None:
        """Return what is recomputed; None where the words do not say."""
        if re.search(r"full recompute|recompute=full|full ac|actckpt=true", self.text):
            return "full"
        if "selective recompute of" in self.text:  # of modules that it names
            return "full" if self.recomputes_experts else "none"
        if re.search(r"\bsac\b", self.text):
            return "full"
        if "selective" in self.text:
            return "selective"
        return "none" if "actckpt=false" in self.text else None

    @property
    def recomputes_experts(self) -> bool:
        """Return whether the part of a layer that has its experts is computed again, and no other."""
        return bool(re.search(r"selective recompute of [\w, ]*\bmoe\b", self.text))

    @property
    def recomputed_share(self) -> float:
        """Return the share of layers that are recomputed: half where every other product is kept (torchtitan)."""
        return 0.5 if re.search(r"\bsac\b", self.text) else 1.0

    def recomputed_of(self, model: Transformer, sequence: int) -> float:
        """Return the share of layers whose forward part is computed again, by multiplications.

        "full recompute but qkv, out" names the products whose results are kept, and "attention" what attention
        gives. The last product's result is not needed.
        """
        kept = re.search(r"full recompute but ((?:\w+(?:, )?)+)", self.text)
        if kept is None:
            return self.recomputed_share
        *products, _ = model.layer.linears
        names = kept[1].split(", ")
        attention = model.layer.attention_flops(sequence) / (2 * sequence)
        sizes = {node.name: node.operand.size * node.result.size for node in products}
        again = sum(size for name, size in sizes.items() if name not in names)
        attended = 0.0 if "attention" in names else attention
        return (again + attended) / (sum(sizes.values()) + attention)

    @property
    def kept_operators(self) -> ActivationRule | None:
        """Return which results of operators are kept under selective activation checkpointing; None without it."""
        if not re.search(r"\bsac\b", self.text):
            return None
        return "compiled-operators" if self.is_compiled else "operators"

    @property
    def is_compiled(self) -> bool:
        """Return whether a compiler fused element-wise operations: nothing is left of the stack's own."""
        return bool(re.search(r"\bcompiled?\b", self.text))

    @property
    def is_amp(self) -> bool:
        """Return whether Composer ran in mixed precision "DEFAULT", which reduces in fp32, on PyTorch 2.1.

        llm-foundry's tables with "amp_bf16" say DEFAULT, those with "bf16" PURE, and ran on PyTorch 1.13.
        """
        return "amp_" in self.text

    @property
    def schedule(self) -> str:
        """Return the schedule's name in `algorithms.pipeline.by_name`."""
        return next((name for word, name in _SCHEDULES if word in self.text), "1f1b")

    @property
    def is_interleaved(self) -> bool:
        """Return whether the words say that stages are interleaved."""
        return "1f1b-i" in self.text or "interleaved" in self.text

    def is_sequence_parallel(self, default: bool) -> bool:
        """Return whether norms and dropout are sharded over tensor ranks."""
        return default or "sequence parallel" in self.text


def _degrees(run: PublishedRun, words: _Words, num_chips: int) -> Parallelism:
    """Return the degrees, all else by default. Raises NoPredictionError."""
    named = {name: run.count(name) or words.number(rf"\b{name} ?=?(\d+)") for name in ("tp", "pp", "cp")}
    is_stated = any(named.values()) or run.count("dp") or words.zero
    if "zero bubble" in words.source:
        named["pp"], is_stated = named["pp"] or num_chips, True
    if not is_stated and num_chips > 1:
        raise NoPredictionError("the degrees of parallelism are not stated")
    tensor, pipeline, context = (named[name] or 1 for name in ("tp", "pp", "cp"))
    if num_chips % (tensor * pipeline * context):
        shares = f"tp {tensor} x pp {pipeline} x cp {context}"
        raise NoPredictionError(f"{num_chips} chips are no whole number of replicas of {shares}")
    data = num_chips // (tensor * pipeline * context)
    if run.count("dp") not in (None, data):
        raise NoPredictionError(f"dp {run.count('dp')} is stated, and the chips are enough for {data}")
    return Parallelism(data, pipeline, context, tensor, zero=words.zero, schedule=words.schedule)


def _zero_level(words: _Words, stack: RunStack, degrees: Parallelism) -> int:
    """Return the level of ZeRO of a run: what its words say, or what its software does.

    torchtitan shards over data and context ranks (its mesh "dp_shard_cp"). With pipeline ranks weights stay
    gathered for all micro-batches, and gradients are reduced with the last one, as ZeRO-1 communicates
    (torchtitan/parallelisms/parallelize_llama.py, reshard_after_forward; torch.distributed.pipelining).
    """
    if stack.name == "torchtitan" and "fsdp" in words.text and degrees.replicas > 1:
        return 1 if degrees.pipeline > 1 else 3
    return max(degrees.zero, stack.zero)


def _batch(run: PublishedRun, words: _Words, stack: RunStack, data: int) -> tuple[int | None, int]:
    """Return the sequences of a micro-batch, None where open, and of a step. Raises NoPredictionError.

    torchtitan cuts a rank's batch (LBS) into as many micro-batches as there are pipeline ranks, where nobody says
    otherwise (torchtitan/parallelisms/pipelining_utils.py, build_pipeline_schedule).
    """
    micro, batch = run.count("mbs"), run.count("gbs")
    if batch is not None:
        return micro if stack.accumulates else batch // data, batch
    local = words.number(r"\blbs(\d+)")
    if local:
        return micro or max(local // (words.number(r"\bpp ?=?(\d+)") or 1), 1), local * data
    micro_batches = words.number(r"(\d+) micro-?batches")
    if micro and micro_batches:
        return micro, micro * micro_batches * data
    if micro and "scaling_benchmarks.py comment" in words.source:
        return micro, micro * data
    raise NoPredictionError("the batch is not stated")


def _virtual_stages(
    run: PublishedRun, words: _Words, model: Transformer, stack: RunStack, degrees: Parallelism
) -> tuple[int, ...]:
    """Return the numbers of virtual stages that the row allows."""
    stated, pipeline = run.count("vp"), degrees.pipeline
    if pipeline == 1 or stated:
        return (stated or 1,) if pipeline > 1 else (1,)
    if words.is_interleaved and "zero bubble" in words.source:
        return ((model.num_layers + 2) // pipeline,)  # every layer is a stage (Zero Bubble, section 4)
    if not (words.is_interleaved or stack.interleaves):
        return (1,)
    layers = model.num_layers // pipeline
    numbers = tuple(number for number in range(1, layers + 1) if layers % number == 0)
    return tuple(number for number in numbers if number > 1) or (1,) if words.is_interleaved else numbers
