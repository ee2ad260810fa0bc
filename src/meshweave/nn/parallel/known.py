"""Which classes of models are recognised, and what of their configs is computed: one table.

A class is known by its exact name, for its code says what its names of modules do not: multipliers, layers without
rotary embedding, interleaved pairs. Of its config each field has its default, which was tried, but for those of
which the value is read off the model's modules or changes nothing that is computed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from meshweave.base.errors import UnsupportedError, printable
from meshweave.nn.parallel.structure import LayerMap, ModelMap

TRIED = "5.23"
"""The version of transformers whose classes were compared with their parallelised models."""
_LIBRARY = "transformers."
_LOG = logging.getLogger(__name__)
_COMPUTED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta",
    "rope_scaling", "max_position_embeddings", "attention_dropout", "tie_word_embeddings", "pad_token_id",
    "bos_token_id", "eos_token_id", "initializer_range", "use_cache", "pretraining_tp", "architectures",
    "dtype", "torch_dtype", "id2label", "label2id", "num_labels", "problem_type", "transformers_version",
    "name_or_path", "chunk_size_feed_forward", "decoder_start_token_id", "sep_token_id", "tokenizer_class",
    "model_type", "finetuning_task", "task_specific_params", "prefix", "tf_legacy_loss", "torchscript",
    "tie_encoder_decoder", "use_bfloat16",
)  # fmt: skip
"""Fields that modules show, or that change nothing in a forward pass for training."""
_SHARED = {
    "is_causal": True, "attention_chunk_size": None, "sliding_window": None, "partial_rotary_factor": 1.0,
    "quantization_config": None, "is_heterogeneous": False, "loss_type": "ForCausalLM",
    "gradient_checkpointing": False,
}  # fmt: skip
"""Fields that code shared by all classes reads off any config, with the value that changes nothing."""
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_PARTS = ("torch.nn.modules.", "transformers.activations", "transformers.pytorch_utils")

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
_NANO_GPT = ModelMap(
    "transformer.wte",
    "transformer.h",
    LayerMap("ln_1", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj", "mlp.gelu", fused="attn.c_attn"),
    "transformer.ln_f",
    "lm_head",
    positions="transformer.wpe",
    dropout="transformer.drop",
    has_causal_loss=False,
)
PLAIN = {"Llama": _LLAMA, "GPT-2": _GPT2, "nanoGPT": _NANO_GPT}
"""The maps of models of plain torch, by the names of their modules."""


def _no_window(config: Any, number: int) -> int | None:
    return None


def _one_window(config: Any, number: int) -> int | None:
    window = config.sliding_window
    return None if window is None else int(window)


def _window_by_layer(config: Any, number: int) -> int | None:
    if getattr(config, "sliding_window", None) is None:
        return None
    if not getattr(config, "layer_types", None):
        raise UnsupportedError(
            f"transformers {_version()} does not say in config.layer_types which layers have the window of "
            f"{config.sliding_window}; give sliding_window=None, or take {TRIED}"
        )
    kind = config.layer_types[number]
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedError(
            f"config.layer_types has '{printable(kind)}' for layer {number}, which is not computed"
        )
    return int(config.sliding_window) if kind == "sliding_attention" else None


@dataclass(frozen=True)
class KnownClass:
    """A class of transformers whose models are recognised.

    Attributes:
        title: how it is called.
        configs: the classes of config that it was tried with.
        names: which of its modules are which.
        fields: fields of the config whose value is read off the modules, beside those that all have.
        window: the window of a layer, of the config and the layer's number.
    """

    title: str
    configs: tuple[str, ...]
    names: ModelMap
    fields: tuple[str, ...] = ()
    window: Callable[[Any, int], int | None] = _no_window


_GPT2_FIELDS = (
    "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout",
)  # fmt: skip
_WINDOWS = ("sliding_window", "layer_types")
KNOWN = {
    "llama.modeling_llama.LlamaForCausalLM": KnownClass(
        "Llama",
        ("LlamaConfig", "InternLM3Config", "IQuestCoderConfig"),
        _LLAMA,
        ("attention_bias", "mlp_bias"),
    ),
    "qwen2.modeling_qwen2.Qwen2ForCausalLM": KnownClass(
        "Qwen2",
        ("Qwen2Config",),
        _LLAMA,
        (*_WINDOWS, "use_sliding_window", "max_window_layers"),
        _window_by_layer,
    ),
    "mistral.modeling_mistral.MistralForCausalLM": KnownClass(
        "Mistral", ("MistralConfig",), _LLAMA, ("sliding_window",), _one_window
    ),
    "ministral.modeling_ministral.MinistralForCausalLM": KnownClass(
        "Ministral", ("MinistralConfig",), _LLAMA, _WINDOWS, _window_by_layer
    ),
    "cwm.modeling_cwm.CwmForCausalLM": KnownClass(
        "CWM", ("CwmConfig",), _LLAMA, (*_WINDOWS, "mlp_bias"), _window_by_layer
    ),
    "seed_oss.modeling_seed_oss.SeedOssForCausalLM": KnownClass(
        "Seed-OSS",
        ("SeedOssConfig",),
        _LLAMA,
        ("attention_bias", "attention_out_bias", "mlp_bias", "residual_dropout"),
    ),
    "gpt2.modeling_gpt2.GPT2LMHeadModel": KnownClass(
        "GPT-2",
        ("GPT2Config",),
        _GPT2,
        _GPT2_FIELDS,
    ),
}
"""The classes that are recognised, by module and name within transformers.models."""


def recognised(module: nn.Module) -> tuple[str, ModelMap]:
    """Return the title and map of a model: of a class of transformers that is in the table, or of plain torch.

    Models of plain torch are recognised by the names of their modules. Raises UnsupportedError, naming what is not
    computed, where a model is none that is known.
    """
    kind = type(module)
    if any(base.__module__.startswith(_LIBRARY) for base in kind.__mro__):
        return _of_transformers(module)
    for name, child in module.named_modules():
        if any(base.__module__.startswith(f"{_LIBRARY}models.") for base in type(child).__mro__):
            raise UnsupportedError(
                f"{kind.__name__} has {name}, a {type(child).__name__} of transformers, in a class of its own, "
                "whose forward is not known; give mapping=ModelMap(...), and it is compared with its original"
            )
    lacking = {}
    for title, names in PLAIN.items():
        if not (missing := names.missing(module)):
            return title, names
        lacking[title] = missing
    said = "; ".join(f"no {title}: it has no module {missing}" for title, missing in lacking.items())
    raise UnsupportedError(f"{kind.__name__} is no model known here ({said}); give mapping=ModelMap(...)")


def _of_transformers(module: nn.Module) -> tuple[str, ModelMap]:
    kind = type(module)
    config: Any = getattr(module, "config", None)
    known = KNOWN.get(f"{kind.__module__}.{kind.__qualname__}".removeprefix(f"{_LIBRARY}models."))
    if known is None or not kind.__module__.startswith(f"{_LIBRARY}models."):
        listed = ", ".join(path.rpartition(".")[2] for path in KNOWN)
        raise UnsupportedError(
            f"{kind.__name__} is none of the classes of transformers that are known ({listed}); where its "
            "layers are those of a ModelMap, give mapping=mw.nn.ModelMap(...), and it is compared with its "
            "original"
        )
    if type(config).__name__ not in known.configs:
        raise UnsupportedError(
            f"{kind.__name__} with a {type(config).__name__}: known with {', '.join(known.configs)}"
        )
    _check_parts(module)
    _check_config(config, known)
    layers = getattr(module.get_submodule(known.names.layers), "__len__", lambda: 0)()
    if config.num_hidden_layers != layers:
        raise UnsupportedError(
            f"{known.names.layers} has {layers} layers; config.num_hidden_layers is {config.num_hidden_layers}"
        )
    title = f"{known.title} (transformers {_version()})"
    if not _version().startswith(f"{TRIED}."):
        title = f"{known.title} (transformers {_version()}, not tried: {TRIED} is)"
        _LOG.warning("%s; nothing but a comparison with its original says that it is computed", title)
    return title, replace(known.names, window=known.window)


def is_hosted(module: nn.Module) -> bool:
    """Return whether a model is run by its own code: of a class of transformers that is not in the table."""
    kind = type(module)
    return kind.__module__.startswith(f"{_LIBRARY}models.") and (
        f"{kind.__module__}.{kind.__qualname__}".removeprefix(f"{_LIBRARY}models.") not in KNOWN
    )


def title_of(module: nn.Module) -> str:
    """Return what a model that runs by its own code is called."""
    return f"{type(module).__name__} (transformers {_version()})"


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _check_parts(module: nn.Module) -> None:
    """Raise UnsupportedError where a module is none that its model's class, torch or transformers has."""
    own = type(module).__module__
    for name, child in module.named_modules():
        forward = inspect.unwrap(type(child).forward)
        for where in (type(child).__module__, forward.__module__):
            if where != own and not where.startswith(_PARTS):
                raise UnsupportedError(
                    f"{name or type(module).__name__}: {type(child).__name__} of {where} stands in a "
                    f"{type(module).__name__}, which was tried without; take it out, or give mapping="
                )


def _check_config(config: Any, known: KnownClass) -> None:
    """Raise UnsupportedError where a field of a config that changes what is computed has a value that is not."""
    import transformers

    of_generation: Any = transformers.GenerationConfig  # configs of transformers 4 have its fields, too
    defaults, computed = vars(type(config)()), {*_COMPUTED, *known.fields, *vars(of_generation())}
    for name, default in {**_SHARED, **defaults}.items():
        if name in computed or name.startswith("_"):
            continue
        value = getattr(config, name, default)
        if value != default and not (value is None and name in _SHARED):
            raise UnsupportedError(
                f"{type(config).__name__} has {name}={printable(value)}, which is not computed; known is "
                f"{printable(default)}"
            )
    attention = getattr(config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        raise UnsupportedError(
            f"attention '{printable(attention)}' is none that is known to be causal softmax attention ("
            f"{', '.join(filter(None, _ATTENTION))})"
        )
