"""The software that ran published training runs: what it does by default, and its few constants.

What a stack does is configuration: precision, the kernel of attention, what is recomputed, whether stages are
interleaved. What remains are constants with a name (`algorithms.step.SoftwareStack`), at most five a stack, in
`catalog/stacks.toml`, written by `validation/fit_stacks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshweave.algorithms.step import SoftwareStack, load_stack
from meshweave.algorithms.step.stack_runs import StackRuns
from meshweave.algorithms.step.stacks import attention_shares
from meshweave.describe.model.memory import Pairs, Recompute
from meshweave_studies.training_runs.rows import PublishedRun


@dataclass(frozen=True)
class RunStack:
    """What a source's software does where its rows say nothing else.

    Attributes:
        words: words of a source, any of which names this stack.
        name: its name (`algorithms.step.stack_names`); "ideal" where it has no constants.
        dtype: of weights and activations.
        gradient_dtype: of gradients that are accumulated and reduced.
        compiled_loss: the loss, as of `StepProblem`, where the row says that the model was compiled.
        memory_of_first_rank: whether the memory that it prints is that of the first rank, and not of the fullest.
        recompute: what is computed again where a row does not say.
        recomputes_instead: what is computed again where rows cannot be right; None: what they say.
        is_sequence_parallel: whether norms and dropout are sharded over tensor ranks.
        zero: the level of ZeRO where a row names none, or a lower one.
        interleaves: whether all numbers of virtual stages are tried where a row states none.
        needs_precision: whether a row is predicted only if it states its precision.
        accumulates: whether a step may have several micro-batches where rows state none.
        pairs: which pairs of tokens it counts in FLOPs of the model.
        counts_embedding: whether it counts the embedding's table beside the head's where these are two, or are one
            that the first and the last stage share.
        does: what else the software does, by attributes of `SoftwareStack`.
    """

    words: tuple[str, ...]
    name: str = "ideal"
    dtype: str = "bfloat16"
    gradient_dtype: str = "float32"
    compiled_loss: Literal["fused", "eager"] = "fused"
    memory_of_first_rank: bool = False
    recompute: Recompute = "none"
    recomputes_instead: Recompute | None = None
    is_sequence_parallel: bool = True
    zero: int = 0
    interleaves: bool = False
    needs_precision: bool = False
    accumulates: bool = True
    pairs: Pairs = "all"
    counts_embedding: bool = False
    does: Mapping[str, Any] = field(default_factory=dict)


_MEGATRON = RunStack(
    ("2205.05198", "Megatron-LM README", "Zero Bubble"),
    "megatron-2021",
    "float16",
    is_sequence_parallel=False,
)
"""Megatron-LM before fused attention and overlapped transfers."""
_DEEPSPEED = RunStack(
    ("vTrain",),
    "megatron-deepspeed",
    "float16",
    gradient_dtype="float16",
    recompute="full",
    is_sequence_parallel=False,
)
"""Megatron-DeepSpeed of 2021-22. Its runs on one host state full recomputation, and cannot have had it: products
alone would take 97 % of what the rows of degree 1 on 2 GPUs state for a whole layer."""
_MEGATRON_CORE = RunStack(
    ("Megatron-Bridge", "Megatron-Core", "NeMo 24.07", "dgxc-benchmarking", "MLPerf Training"),
    "megatron-core",
    zero=1,
    needs_precision=True,
)
_STACKS = (
    _MEGATRON,
    replace(
        _MEGATRON,
        words=("2104.04473",),
        gradient_dtype="float16",
        recompute="full",
        interleaves=True,
        # Asynchronous all-reduces and products that add to gradients came later.
        does={"waits_for_tensor": True, "gradient_passes": (1.0, 2.0)},
    ),
    replace(_DEEPSPEED, words=("ground_truth_single",), recomputes_instead="none"),
    _DEEPSPEED,
    RunStack(("llm-foundry",), "llm-foundry", gradient_dtype="bfloat16"),
    RunStack(("torchtitan benchmarks/llama3_h100_202412",), "torchtitan", compiled_loss="eager"),
    RunStack(("torchtitan",), "torchtitan"),
    RunStack(("nanotron",), "nanotron", memory_of_first_rank=True, counts_embedding=True),
    replace(_MEGATRON_CORE, words=("Megatron-MoE-ModelZoo", "Megatron-LM dev"), pairs="causal"),
    _MEGATRON_CORE,
    RunStack(("MaxText", "maxtext"), "maxtext", accumulates=False),
)
_ZERO_3 = RunStack(
    (),
    "megatron-2021",
    "float16",
    "float16",
    recompute="full",
    does={"overlap": 1.0, "runs": StackRuns()},
)
"""DeepSpeed, with which Narayanan et al. ran ZeRO-3: the model is Megatron's, collectives run beside it."""
_UNKNOWN = RunStack((), does={"attention_shares": attention_shares("flash-2"), "loss": "eager"})


def stack_of(run: PublishedRun) -> RunStack:
    """Return the software of a run, by its source; for an unknown source one without constants."""
    if "2104.04473" in run.source and "zero-3" in run.config.lower():
        return _ZERO_3
    return next((stack for stack in _STACKS if any(word in run.source for word in stack.words)), _UNKNOWN)


def software_of(stack: RunStack) -> SoftwareStack:
    """Return a stack as `StepProblem` takes it, with the constants that ship with the package."""
    return replace(load_stack(stack.name), runs_programs=False, **stack.does)
