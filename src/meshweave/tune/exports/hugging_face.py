"""A plan as the `tp_plan` of Hugging Face transformers (integrations/tensor_parallel.py of transformers 5)."""

from __future__ import annotations

import json

from meshweave.base.errors import UnsupportedError
from meshweave.tune.exports.row import Export, PlannedRow

_LAYERS = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}
"""The matrices of a layer of Llama, Qwen2 and Mistral, by the names of their modules."""


def to_hugging_face(row: PlannedRow) -> Export:
    """Return the `tp_plan` for `from_pretrained` of a model whose layers are named as Llama's.

    Raises UnsupportedError where transformers has no such strategy.
    """
    degrees = row.degrees
    row.require_megatron("transformers")
    if not row.model.gated_ffn:
        raise UnsupportedError(
            f"transformers has no tensor-parallel style for the layers of {row.model.name}, whose matrices are "
            "stored transposed and fused; mw.parallelize runs them"
        )
    tensor = row.tensor
    if row.model.num_kv_heads % tensor:
        raise UnsupportedError(
            f"transformers cuts {row.model.num_kv_heads} key/value heads among {tensor} ranks, and they do not "
            "divide; mw.parallelize has copies of them"
        )
    plan = {f"model.layers.*.{name}": style for name, style in _LAYERS.items()} if tensor > 1 else {}
    if tensor > 1 and not row.model.tied_embeddings:
        plan["lm_head"] = "colwise_gather_output"
    left_out = []
    if tensor > 1 and degrees.strategy == "megatron_sp":
        left_out.append(
            "megatron_sp shares the tokens between the matrices of a layer; a tp_plan keeps them whole, so that "
            "it sums with all-reduces and needs more memory for norms."
        )
    for name, size in (
        ("data", degrees.data),
        ("context", degrees.context),
        ("pipeline", degrees.pipeline),
    ):
        if size > 1:
            left_out.append(f"{name.capitalize()} parallelism of {size} is not in a tp_plan.")
    if degrees.zero:
        left_out.append(f"ZeRO {degrees.zero} is FSDP's or DeepSpeed's to set, and not in a tp_plan.")
    if degrees.recompute != "none":
        left_out.append(
            f"{degrees.recompute.capitalize()} recomputation is gradient_checkpointing of the Trainer, which "
            "computes whole layers again."
        )
    if row.plan.batch > degrees.micro_batch * degrees.data:
        left_out.append(
            f"A micro-batch of {degrees.micro_batch} is per_device_train_batch_size of the Trainer, with "
            f"gradient_accumulation_steps for the batch of {row.plan.batch}."
        )
    text = (
        f"tp_plan = {json.dumps(plan, indent=4)}\n"
        "model = AutoModelForCausalLM.from_pretrained(name, tp_plan=tp_plan)"
    )
    return Export("hf", {"tp_plan": plan, "tp_size": tensor}, text, tuple(left_out))
