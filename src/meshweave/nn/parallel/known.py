"""What runs a model: the code of its class where that is of transformers, else layers by the names of modules."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from meshweave.base.errors import UnsupportedError
from meshweave.nn.parallel.structure import LayerMap, ModelMap

_MODELS = "transformers.models."

_LLAMA = ModelMap(
    "model.embed_tokens",
    "model.layers",
    LayerMap(
        "input_layernorm",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.up_proj",
        "mlp.down_proj",
        "mlp.act_fn",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        gate="mlp.gate_proj",
    ),
    "model.norm",
    "lm_head",
    rotary="model.rotary_emb",
)
_GPT2 = ModelMap(
    "transformer.wte",
    "transformer.h",
    LayerMap("ln_1", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj", "mlp.act", fused="attn.c_attn"),
    "transformer.ln_f",
    "lm_head",
    positions="transformer.wpe",
    dropout="transformer.drop",
)
_NANO_GPT = replace(_GPT2, layer=replace(_GPT2.layer, activation="mlp.gelu"), has_causal_loss=False)
PLAIN = {"Llama": _LLAMA, "GPT-2": _GPT2, "nanoGPT": _NANO_GPT}
"""The maps of models of plain torch, by the names of their modules."""


def is_hosted(module: nn.Module) -> bool:
    """Return whether the class of a model is one of transformers, or extends one; such a model runs its own
    code.
    """
    return any(base.__module__.startswith(_MODELS) for base in type(module).__mro__)


def title_of(module: nn.Module) -> str:
    """Return the name of a model of transformers in reports: `LlamaForCausalLM (transformers 4.57.0)`."""
    import transformers

    return f"{type(module).__name__} (transformers {transformers.__version__})"


def why_unlikely(module: nn.Module) -> str:
    """Return why a model of transformers cannot be parallelised: its class is none of the causal language models.

    "" for a causal language model, and for a class that is not of transformers.
    """
    from transformers.models.auto import modeling_auto

    listed = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    causal = {name for names in listed for name in ([names] if isinstance(names, str) else names)}
    if not is_hosted(module) or any(base.__name__ in causal for base in type(module).__mro__):
        return ""
    return (
        f"{type(module).__name__} is none of the causal language models of transformers, which are computed "
        "(ForCausalLM): classifiers, encoders and models without a head are not; torch's FSDP2 takes any module"
    )


def recognised(module: nn.Module) -> tuple[str, ModelMap]:
    """Return (title, map) of a plain torch model: the first key of `PLAIN` whose map names only modules it has.

    Raises UnsupportedError, which names the modules that are missing, for another model, and for one that has a
    module of transformers in a class that is not of transformers.
    """
    kind = type(module).__name__
    for name, child in module.named_modules():
        if is_hosted(child):
            raise UnsupportedError(
                f"{kind} has {name}, a {type(child).__name__} of transformers, in a class of its own, whose "
                "forward is not known; give a causal model of transformers, or one whose class extends it"
            )
    lacking = {}
    for title, names in PLAIN.items():
        if not (missing := names.missing(module)):
            return title, names
        lacking[title] = missing
    said = "; ".join(f"no {title}: it has no module {missing}" for title, missing in lacking.items())
    raise UnsupportedError(f"{kind} is no model known here ({said}); give mapping=ModelMap(...)")
