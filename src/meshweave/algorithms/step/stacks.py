"""Software stacks by name: their constants, fitted on published training runs, and what they do by default.

`catalog/stacks.toml` has the constants of time and `catalog/fragmentation.toml` that of memory. Fitted by
`validation/fit_stacks.py` and `validation/fit_memory.py` on half of the families of published runs (`meshweave
reproduce published` scores the others). The table below has what is no constant.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshweave.algorithms.step.problem import SoftwareStack, UnfusedKernels
from meshweave.base.errors import DescriptionError, did_you_mean
from meshweave.describe.files import parse_table

_FILE, _MEMORY_FILE = "stacks.toml", "fragmentation.toml"

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
_DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron-2021": {"blocks_transfers": True, **_MEGATRON},
    "llm-foundry": {"regathers": True, "sharding": "fsdp", "gradient_passes": (3.0, 3.0), **_LLM_FOUNDRY},
    "torchtitan": {
        "sharding": "fsdp2",
        "copies_norm_inputs": True,
        "gradient_passes": (1.0, 1.0),
        "gather_passes": 2.0,
        "stops_early": True,
        **_TORCHTITAN,
    },
    "nanotron": {
        "gradient_passes": (1.0, 2.0),
        "waits_for_gathers": True,
        "adds_gradients_late": True,
        "buckets_gradients": True,
        "layers_by_cost": True,
        "keeps_joint_qkv": True,
        "logit_bytes": (36.0, 10.0),
        **_NANOTRON,
    },
}
"""What a stack does where nobody says otherwise. megatron-2021 is Megatron-LM before fused attention and
overlapped transfers; its products add gradients of weights to those of the micro-batches before. nanotron does
that in a pass of its own (a read, and a read and a write of the sum). FSDP of PyTorch up to 2.1, which
llm-foundry runs, joins gradients (a read and a write), casts them for the reduction (a read, a write) and
divides them before it (a read, a write): torch/distributed/fsdp, _post_backward_hook. FSDP2 joins and casts in
one kernel, and copies out what it gathers. Checkpoints of PyTorch from 2.1 on stop early
(torch.utils.checkpoint, set_checkpoint_early_stop). nanotron's loss (parallel/tensor_parallel/functional.py,
sharded_cross_entropy): a cast to fp32 (2 + 4), the greatest (4), a difference, an exponential (8 + 8), their
sum (4) and a quotient (8); its gradient scaled (8) and cast back (6)."""


def stack_names() -> tuple[str, ...]:
    """Return the names of software stacks that have fitted constants."""
    return tuple(_DEFAULTS)


@lru_cache(maxsize=1)
def stack_table() -> dict[str, Any]:
    """Return `catalog/stacks.toml`: constants of stacks, and rates of kernels of attention."""
    return _catalog_table(_FILE)


@lru_cache(maxsize=1)
def _fragmentation() -> dict[str, Any]:
    return _catalog_table(_MEMORY_FILE)


def _catalog_table(name: str) -> dict[str, Any]:
    return parse_table((files("meshweave") / "catalog" / name).read_text("utf-8"), name, "toml")


def load_stack(name: str) -> SoftwareStack:
    """Return a software stack by its name, or for "none" one that adds nothing.

    Raises:
        DescriptionError: no stack has this name.
    """
    if name == "none":
        return SoftwareStack()
    if name not in _DEFAULTS:
        known = ("none", *stack_names())
        raise DescriptionError(f"no stack '{name}'{did_you_mean(name, known)}; known: {', '.join(known)}")
    constants = {
        **stack_table().get("stacks", {}).get(name, {}),
        "fragmentation": _fragmentation().get(name, 0.0),
    }
    return SoftwareStack(name, sustains=True, **constants, **_DEFAULTS[name])
