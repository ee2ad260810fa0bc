"""Software stacks by name: their constants, fitted on published training runs, and what they do by default.

`catalog/stacks.toml` has the constants of time, `catalog/fragmentation.toml` that of memory, and
`catalog/stack_runs.toml` what each stack can execute. Fitted by
`validation/fit_stacks.py` and `validation/fit_memory.py` on half of the families of published runs (`meshweave
reproduce published` scores the others). The table below has what is no constant.

"meshweave" is the library's own runtime on PyTorch, and the default. No run of it was published; its constants are
those of `_FITTED_AS`, whose runs are PyTorch's too.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshweave.algorithms.step.precision import PRECISIONS
from meshweave.algorithms.step.software_stack import SoftwareStack, UnfusedKernels
from meshweave.algorithms.step.stack_runs import StackRuns
from meshweave.algorithms.table import SCHEDULES, STRATEGIES
from meshweave.base.errors import DescriptionError, did_you_mean
from meshweave.describe.files import parse_table
from meshweave.describe.machine.host import HostRates
from meshweave.describe.model.transformer import Transformer

_FILE, _MEMORY_FILE, _RUNS_FILE = "stacks.toml", "fragmentation.toml", "stack_runs.toml"
IDEAL = "ideal"
"""The stack that adds nothing: kernels and communication alone."""
DEFAULT_STACK = "meshweave"
"""The stack of `mw.step`, `mw.plan` and the command line where none is named."""
KERNELS_OF_ATTENTION = {
    "llm-foundry": "triton-1",
    "torchtitan": "flash-2",
    "nanotron": "flash-2",
    "megatron-core": "transformer-engine",
    "maxtext": "splash",
}
"""The kernel of attention of a stack, with rates in `catalog/stacks.toml`. The own runtime has none: it takes the
kernel that PyTorch chooses, which on an H100 ran at the rates of the catalog (docs/guide/gpu.md, kernels)."""
SAME_STACK = {"megatron-lm": "megatron-core", "megatron-bridge": "megatron-core"}
"""Further names that `load_stack` takes, each with the stack that it stands for."""
_FITTED_AS = {"meshweave": "torchtitan", "meshweave-eager": "torchtitan"}
"""The stack that has the constants of one on whose runs nothing could be fitted."""

# Bytes of kernels that are not fused, counted from the code of each stack for 16-bit activations. An eager PyTorch
# kernel reads its operands and writes its result; autograd adds gradients that arrive from several users.

_MEGATRON = {
    "forward": UnfusedKernels(residual=2, heads=4, kernels=1),
    "backward": UnfusedKernels(residual=14, heads=30, ffn=2, kernels=9),
}
"""megatron/model/transformer.py of 2021. Forward: masks of two fused bias-dropout-adds (1 + 1), context made
contiguous (2 + 2). Backward: two gradients of dropout (2 + 1 + 2) and sums for biases (2); of the copied context
(2 + 2), of the scale of scores (4 + 4), of the split of queries, keys and values (6 + 6), and their bias (6)."""
_LLM_FOUNDRY = {"backward": UnfusedKernels(residual=4, heads=32, ffn=2, kernels=7)}
"""llmfoundry/models/layers/attention.py and flash_attn_triton.py: sums of products for its gradient (2 + 2), zeros
(4) and a cast (4 + 2) of the fp32 gradient of queries, that of chunks (6 + 6); sums for biases (6, 2, 2, 2)."""
_TORCHTITAN = {
    "forward": UnfusedKernels(residual=64, heads=24, keys=24, ffn=4, kernels=23),
    "backward": UnfusedKernels(residual=182, heads=24, keys=24, ffn=8, kernels=40),
}
"""torchtitan/models/norms.py and llama/model.py of 2024, eager. Forward: RMSNorm in fp32, twice: a cast (2 + 4),
squares (4 + 4), their mean (4), a product (4 + 4), a cast (4 + 2), the gain (2 + 2), less the 4 of one kernel;
rotation in fp32 (6 + 8 + 6) of queries and keys; copies of keys and values for all heads (2 + 2 each); silu and a
product for one kernel. Backward: RMSNorm 92, less 10, twice; rotation and copies; silu; sums of the gradients that
arrive from three and from two products (6 + 6 + 6)."""
_NANOTRON = {
    "forward": UnfusedKernels(heads=8, keys=28, ffn=4, kernels=14),
    "backward": UnfusedKernels(heads=12, keys=28, ffn=16, kernels=9),
}
"""nanotron/models/llama.py of 2025. Forward: queries, keys and values made contiguous (4 each), keys and values
joined and made contiguous (8 + 8), rotated (4, 4); silu and a product for one kernel. Backward: the same the other
way round, and the gradients of both halves of the gated activation joined."""
_COPIES = (
    UnfusedKernels(residual=16, heads=8, keys=8, ffn=12, kernels=11),
    UnfusedKernels(residual=24, heads=12, keys=8, ffn=16, kernels=15),
)
"""nn/parallel/ops.py. Forward, _multiply: operands are copied into the program (residual 4 + 4; heads 4; ffn 4),
and results out of it (residual 4 + 4; heads 4; keys 8; ffn 8). Backward, _multiply_back: so are the gradients that
arrive (as results), the operands (as forward) and the gradients of these (likewise)."""
_MESHWEAVE = {
    "regathers": True,
    "sharding": "fsdp",
    "copies": _COPIES,
    "gradient_passes": (5.0, 2.0),
    "stops_early": True,
}
"""The runtime of `nn.parallel`. Weights and their gradients are copied into programs and out of them (two each),
and gradients added (a read, and a read and a write). It runs all of the table of algorithms; attention is a kernel
that keeps no scores, and is not computed again by itself."""
_EAGER = {
    "forward": UnfusedKernels(residual=32, heads=20, keys=20, ffn=4, kernels=15),
    "backward": UnfusedKernels(residual=44, heads=20, keys=20, ffn=8, kernels=16),
}
"""nn/parallel/{norm,attention,block}.py. Forward: norms of a cast to fp32 (2 + 4), the kernel (4 + 4) and a cast
back (4 + 2), less the 4 of one kernel, twice; rotation of queries and keys: two products (4 + 4), halves joined
(2 + 4), their sum (6); silu and a product for one kernel. Backward: norms 32, less 10, twice; rotation; silu."""
_BIASED_EXPERTS = UnfusedKernels(residual=28, ffn=16), UnfusedKernels(residual=40, ffn=20)
"""megatron/core/transformer/moe/experts.py (TEGroupedMLP) and fusions/fused_bias_geglu.py of 2025. Forward: biases
times weights of the choice in fp32 (4), added (2 + 4 + 4), experts joined (4 + 4), a cast (4 + 2); both halves of
what the activation reads clamped (4 each) and joined (8). Backward: a cast (2 + 4), one of the sum (4 + 2), the
gradients of biases and of weights (4 + 4 each, and a sum of 4 each), experts joined (2 + 2); clamps (6 each) and
halves joined (8)."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "meshweave": {"recomputes_gate": True, **_MESHWEAVE},
    "meshweave-eager": {**_MESHWEAVE, **_EAGER},
    "megatron-2021": {
        "runs_programs": False,
        "blocks_transfers": True,
        "attention": "plain",
        **_MEGATRON,
    },
    "megatron-deepspeed": {
        "runs_programs": False,
        "blocks_transfers": True,
        "waits_for_tensor": True,
        "gradient_passes": (1.0, 2.0),
        "attention": "plain",
        "loss": "sharded",
        "logit_bytes": (36.0, 10.0),
        **_MEGATRON,
    },
    "llm-foundry": {
        "runs_programs": False,
        "regathers": True,
        "sharding": "fsdp",
        "loss": "eager",
        "gradient_passes": (3.0, 3.0),
        **_LLM_FOUNDRY,
    },
    "torchtitan": {
        "runs_programs": False,
        "sharding": "fsdp2",
        "loss": "eager",
        "copies_norm_inputs": True,
        "gradient_passes": (1.0, 1.0),
        "gather_passes": 2.0,
        "stops_early": True,
        **_TORCHTITAN,
    },
    "nanotron": {
        "runs_programs": False,
        "gradient_passes": (1.0, 2.0),
        "waits_for_gathers": True,
        "waits_for_tensor": True,
        "keeps_gathered": True,
        "sums_after": True,
        "adds_gradients_late": True,
        "buckets_gradients": True,
        "layers_by_cost": True,
        "keeps_joint_qkv": True,
        "sliced_weights": 6,
        "loss": "sharded",
        "logit_bytes": (36.0, 10.0),
        **_NANOTRON,
    },
    "megatron-core": {
        "runs_programs": False,
        "grouped_experts": False,
        "biased_experts": _BIASED_EXPERTS,
        "hides_tensor": True,
    },
    "maxtext": {"runs_programs": False, "sharding": "fsdp", "stops_early": True, "recomputes_gate": True},
}
"""What a stack does where nobody says otherwise, and what it can execute: `meshweave` is the runtime with compiled
blocks, whose compiler fuses what stands between products. megatron-2021 is Megatron-LM before fused attention and
overlapped transfers; its products add gradients of weights to those of the micro-batches before. nanotron does
that in a pass of its own (a read, and a read and a write of the sum). FSDP of PyTorch up to 2.1, which
llm-foundry runs, joins gradients (a read and a write), casts them for the reduction (a read, a write) and
divides them before it (a read, a write): torch/distributed/fsdp, _post_backward_hook. FSDP2 joins and casts in
one kernel, and copies out what it gathers. Checkpoints of PyTorch from 2.1 on stop early
(torch.utils.checkpoint, set_checkpoint_early_stop). nanotron's loss (parallel/tensor_parallel/functional.py,
sharded_cross_entropy): a cast to fp32 (2 + 4), the greatest (4), a difference, an exponential (8 + 8), their
sum (4) and a quotient (8); its gradient scaled (8) and cast back (6). Its ZeRO-1 (distributed.py,
all_gather_coalesced; optim/zero.py) gathers a list of buffers, one a replica: of six tensors a layer (queries,
keys and values are one, and gate and up). It is not wrapped for replicas (trainer.py, make_ddp): the fp32
gradients of a rank are one buffer, which is summed after the last backward part (training_step,
reduce_scatter=False), and all of it is clipped (optim/clip_grads.py). Its products wait for their collectives and
autograd keeps what they multiplied, gathered, unless asked otherwise (tp_linear_async_communication;
differentiable_all_gather). megatron-core is Megatron-Core with Transformer Engine, as NeMo and Megatron-Bridge run
it: norms, rotations, activations and sums of the residual are a kernel each, as a block counts them, and products
add to gradients (megatron/core/fusions); its recipes of dense models have collectives of tensor ranks in rings
inside of products (megatron/bridge, recipes and training/comm_overlap.py: RingExchangeOverlapCfg), but not in
NVFP4. maxtext is MaxText on TPUs: XLA fuses what stands between products and computes only what is read of a layer
that runs again; weights are in fp32, sharded over a slice, and cast as they are gathered (configs/base.yml)."""


def stack_names() -> tuple[str, ...]:
    """Return the names of software stacks, the default first; "ideal", which adds nothing, is none of them."""
    return tuple(_DEFAULTS)


def default_stack(model: Transformer) -> str:
    """Return the name of the default stack: the library's runtime, or "ideal" for a model with experts."""
    return IDEAL if model.is_routed else DEFAULT_STACK


def is_executed_here(name: str) -> bool:
    """Return whether this library's runtime executes plans of a stack: one of its own stacks, or "ideal"."""
    return name == IDEAL or _DEFAULTS.get(name, {"runs_programs": False}).get("runs_programs", True)


@lru_cache(maxsize=1)
def published_strategies() -> tuple[str, ...]:
    """Return the tensor-parallel strategies that `catalog/stack_runs.toml` names for any stack, in table order."""
    runs = [of_stack.strategies for of_stack in _stack_runs().values() if of_stack.strategies is not None]
    return tuple(name for name in STRATEGIES if any(name in strategies for strategies in runs))


def fitted_as(name: str) -> str:
    """Return the name of the stack on whose published runs the constants of stack `name` were fitted."""
    return _FITTED_AS.get(name, name)


@lru_cache(maxsize=1)
def stack_table() -> dict[str, Any]:
    """Return the contents of `catalog/stacks.toml`: constants of stacks, and ratios of attention rates."""
    return _catalog_table(_FILE)


@lru_cache(maxsize=1)
def _fragmentation() -> dict[str, Any]:
    return _catalog_table(_MEMORY_FILE)


@lru_cache(maxsize=1)
def _stack_runs() -> dict[str, StackRuns]:
    """Return what stacks execute. Raises DescriptionError where a name is none of the table of algorithms."""
    runs = {}
    for stack, given in _catalog_table(_RUNS_FILE).items():
        lists: dict[str, Any] = {
            kind: tuple(value) if isinstance(value, list) else value for kind, value in given.items()
        }
        for kind, known in (("strategies", STRATEGIES), ("schedules", SCHEDULES), ("precisions", PRECISIONS)):
            for name in lists.get(kind, ()):
                if name not in known:
                    hint = did_you_mean(name, tuple(known))
                    raise DescriptionError(
                        f"{_RUNS_FILE}: {stack} has {kind} '{name}', which is not known{hint}"
                    )
        runs[stack] = StackRuns(**lists)
    return runs


def _catalog_table(name: str) -> dict[str, Any]:
    return parse_table((files("meshweave") / "catalog" / name).read_text("utf-8"), name, "toml")


def load_stack(name: str = DEFAULT_STACK) -> SoftwareStack:
    """Return a software stack by its name or one of `SAME_STACK`; "ideal" is one that adds no time or memory.

    Raises:
        DescriptionError: no stack has this name.
    """
    if name == "none":
        warnings.warn('meshweave: stack "none" is "ideal" now', DeprecationWarning, stacklevel=2)
        name = IDEAL
    name = SAME_STACK.get(name, name)
    if name == IDEAL:
        return SoftwareStack()
    if name not in _DEFAULTS:
        known = (IDEAL, *stack_names(), *SAME_STACK)
        raise DescriptionError(f"no stack '{name}'{did_you_mean(name, known)}; known: {', '.join(known)}")
    constants = {
        **stack_table().get("stacks", {}).get(fitted_as(name), {}),
        "fragmentation": _fragmentation().get(fitted_as(name), 0.0),
    }
    if "host" in constants:
        constants["host"] = HostRates(**constants["host"])
    if "routed_hosts" in constants:
        hosts = constants["routed_hosts"].items()
        constants["routed_hosts"] = tuple((chip, HostRates(**rates)) for chip, rates in hosts)
    constants["attention_shares"] = attention_shares(KERNELS_OF_ATTENTION.get(name, ""))
    runs = _stack_runs()[name]
    return SoftwareStack(name, sustains=True, runs=runs, **constants, **_DEFAULTS[name])


def attention_shares(kernel: str) -> tuple[tuple[str, float], ...]:
    """Return (beginning of chip names, FLOP rate of attention kernel `kernel` over the measured one) pairs.

    The rates are ratios; () for an unknown kernel. `kernel` is a value of `KERNELS_OF_ATTENTION`.
    """
    return tuple(stack_table().get("attention", {}).get(kernel, {}).items())
