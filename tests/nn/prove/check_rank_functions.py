"""What ranks do in tests of the proof that `parallelize` makes: models that look like others, and are not."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import plain_models
import torch
from plain_models import PlainAttention, PlainGpt, PlainLlama, PlainLlamaLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize


class Multiplied(PlainLlama):
    """What is added to the residual is multiplied."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = 3.0 * self.model.embed_tokens(tokens)
        angles = self.model.rotary_emb(x, torch.arange(tokens.shape[1])[None])
        for layer in self.model.layers:
            x = layer(x, angles)
        return self.lm_head(self.model.norm(x))


class Capped(PlainLlama):
    """Logits have a soft cap."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).div(2).tanh().mul(2)


class PairedAttention(PlainAttention):
    """Features are turned in pairs that stand side by side."""

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (each[..., : self.head_dim // 2].repeat_interleave(2, -1) for each in angles)
        q, k = (y * cos + torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2) * sin for y in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class WindowedAttention(PlainAttention):
    """A window that is an attribute under a name that the library does not read."""

    attention_window = 0

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = angles
        q, k = (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin for y in (q, k))
        at = torch.arange(x.shape[1])
        far = at[:, None] - at[None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=(far >= 0) & (far < self.attention_window))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Unturned(PlainLlamaLayer):
    """A layer without rotary embedding."""

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = angles
        return super().forward(x, (torch.ones_like(cos), torch.zeros_like(sin)))


def _paired() -> nn.Module:
    model = PlainLlama(layers=2)
    for layer in model.model.layers:
        layer.self_attn.__class__ = PairedAttention
    return model


def _windowed() -> nn.Module:
    model = PlainLlama(layers=3)
    model.model.layers[2].self_attn.__class__ = WindowedAttention
    model.model.layers[2].self_attn.attention_window = 2048
    return model


def _one_layer_unturned() -> nn.Module:
    model = PlainLlama(layers=4)
    model.model.layers[3].__class__ = Unturned
    return model


def _gpt_with_scale() -> nn.Module:
    model = PlainGpt(layers=2)
    model.config = SimpleNamespace(n_head=plain_models.HEADS)
    for layer in model.transformer.h:
        layer.attn.scaling = 0.3  # which forward does not use
    return model


class OwnLoss(PlainGpt):
    """A GPT that returns logits and, for targets, a loss, in which -1 marks tokens without."""

    smoothing = 0.0

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = super().forward(tokens)
        if targets is None:
            return logits, None
        pairs = logits.flatten(0, 1), targets.flatten()
        return logits, F.cross_entropy(*pairs, ignore_index=-1, label_smoothing=self.smoothing)


def _smoothed() -> nn.Module:
    model = OwnLoss(layers=2)
    model.smoothing = 0.1
    return model


OTHERS = {
    "multiplied": (lambda: Multiplied(layers=2), ("a factor of 3 is missing",)),
    "capped": (lambda: Capped(layers=2), ("logits", "soft cap")),
    "paired": (_paired, ("self_attn.o_proj", "rotary")),
    "windowed": (_windowed, ("layer 2 alone", "model.layers.2.self_attn.o_proj", "window", "from token 7")),
    "unturned": (_one_layer_unturned, ("layer 3 alone", "model.layers.3.self_attn.o_proj", "rotary")),
    "smoothed": (_smoothed, ("loss of targets", "another loss than the mean cross entropy")),
    "scaled": (_gpt_with_scale, ("attn.c_proj", "scale")),
}
"""Models that have the modules of others, and words that must be said of each."""


def checked(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of each model, whether refused ones are as they were, and the logs."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (context.num_ranks,), mesh_dim_names=("tp",))
    said: dict[str, Any] = {name: _said(make, mesh) for name, (make, _) in OTHERS.items()}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("meshweave").addHandler(handler)
    states = []
    for check in (True, False):
        torch.manual_seed(4)
        model = OwnLoss(layers=2, dropout=0.5)
        made = parallelize(model, "megatron_sp", mesh, check=check)
        states.append(torch.get_rng_state().tolist())
        said[f"check={check}"] = made.report.proved
    return said | {"logs": records, "same random numbers": states[0] == states[1]}


def _said(make: Any, mesh: DeviceMesh) -> str:
    torch.manual_seed(3)
    model = make()
    before = [(name, id(child)) for name, child in model.named_modules()]
    before += [(name, id(p)) for name, p in model.named_parameters()]
    try:
        parallelize(model, "megatron", mesh)
    except MeshweaveError as error:
        after = [(name, id(child)) for name, child in model.named_modules()]
        after += [(name, id(p)) for name, p in model.named_parameters()]
        return str(error) if before == after else f"changed: {error}"
    return ""


SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48,
    "vocab_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 4096,
    "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "Llama": ("Llama", {}, True),
    "Llama, fewer keys": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, True),
    "Llama 3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
            }
        },
        True,
    ),
    "Qwen2": ("Qwen2", {}, True),
    "Qwen2, windows": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 2}, True
    ),
    "Mistral": ("Mistral", {"sliding_window": 1024}, True),
    "GPT2": ("GPT2", {}, True),
    "Granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
        False,
    ),
    "SmolLM3": ("SmolLM3", {}, False),
    "Helium": ("Helium", {"head_dim": 8}, False),
    "Ernie4_5": ("Ernie4_5", {}, False),
}  # fmt: skip
"""Models of transformers: class, sizes, and whether every strategy runs them; others run by their own code."""


def _apart(made: Any, whole: Any) -> str:
    """Return "" where a step has the loss and the gradients of the original, else what it has."""
    generator = torch.Generator().manual_seed(7)
    tokens, targets = torch.randint(0, 48, (2, 4, 8), generator=generator)
    loss = float(made.step(tokens, targets))
    logits = whole(tokens).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    wanted.backward()
    worst = max(
        float((_full(got.grad) - right.grad).abs().max())
        for (_, got), (_, right) in zip(made.module.named_parameters(), whole.named_parameters(), strict=True)
        if right.grad is not None
    )
    is_right = abs(loss - float(wanted)) < 1e-6 and worst < 1e-6  # norms of transformers are of float32
    return "" if is_right else f"wrong: loss {loss} for {float(wanted)}, gradients off by {worst}"


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def of_transformers(context: RankContext, payload: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of models of transformers, with memory and on the meta device; "" where they are exact.

    Those with memory are of float64 and take a step beside the original; by the second strategy, of bfloat16.
    """
    import transformers

    torch.set_num_threads(1)
    said = {}
    for number, (strategy, shape) in enumerate(payload["strategies"]):
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("depth", "row", "col")[-len(shape) :])
        for at, (name, (kind, sizes, _)) in enumerate(TRANSFORMERS.items()):
            if name not in payload.get("models", TRANSFORMERS):
                continue
            own = {"n_embd": 32, "n_head": 4, "n_layer": 3} if kind == "GPT2" else {**SIZES, **sizes}
            config = getattr(transformers, f"{kind}Config")(**own)
            if kind == "GPT2":
                config.vocab_size = 48
            make = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
            device = ("cpu", "meta")[(number + at) % 2]
            torch.manual_seed(3)  # processes start with seeds of their own
            with torch.device(device):
                model = make(config)
            is_compared = device == "cpu" and number != 1
            if device == "cpu":
                model = model.double().eval() if is_compared else model.bfloat16()  # no dropout
            whole = copy.deepcopy(model)
            try:
                made = parallelize(model, strategy, mesh)
                said[f"{name}, {strategy}, {device}"] = _apart(made, whole) if is_compared else ""
            except MeshweaveError as error:
                said[f"{name}, {strategy}, {device}"] = f"{type(error).__name__}: {error}"
            except Exception:
                said[f"{name}, {strategy}, {device}"] = f"crash: {traceback.format_exc()}"
    return said
