"""A small GPT and a small Llama in plain torch. Nothing here knows of ranks, except that a part may be absent.

Both take tokens (rows, sequence) and return logits (rows, sequence, vocabulary).
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw


@dataclass(frozen=True)
class ModelSize:
    """The size of a model.

    Attributes:
        style: "gpt" (learned positions, layer norm, GELU; queries, keys and values in one matrix) or "llama"
            (rotary positions, RMS norm, SwiGLU).
        num_kv_heads: heads of keys and values, which queries of a llama share in groups.
        dropout: the share of elements that the residual branches drop.

    Raises:
        DescriptionError: a size is below 1, or heads do not fit.
    """

    style: str = "gpt"
    num_layers: int = 4
    hidden: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    ffn_hidden: int = 512
    vocab_size: int = 256
    sequence: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if isinstance(size, int) and size < 1:
                raise mw.errors.DescriptionError(f"{name} is {size}; give at least 1")
        if self.hidden % self.num_heads or self.num_heads % self.num_kv_heads:
            raise mw.errors.DescriptionError(
                f"{self.num_heads} heads, {self.num_kv_heads} of keys and values, and hidden {self.hidden}: each "
                "is to divide the next larger one"
            )
        if self.style == "llama" and self.head_dim % 2:
            raise mw.errors.DescriptionError(f"heads of a llama have an even width, and not {self.head_dim}")
        if self.style == "gpt" and self.num_kv_heads != self.num_heads:
            raise mw.errors.DescriptionError(
                f"a gpt has as many heads of keys and values as of queries, {self.num_heads}; a llama shares them"
            )

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.hidden // self.num_heads

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


class Attention(nn.Module):
    """Causal self-attention; queries may share keys and values in groups."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = size.num_heads, size.num_kv_heads, size.head_dim
        bias, kv = size.style == "gpt", size.num_kv_heads * size.head_dim
        if size.style == "gpt":
            self.qkv_proj = nn.Linear(size.hidden, size.hidden + 2 * kv, bias=True)
        else:
            self.q_proj = nn.Linear(size.hidden, size.hidden, bias=False)
            self.k_proj = nn.Linear(size.hidden, kv, bias=False)
            self.v_proj = nn.Linear(size.hidden, kv, bias=False)
        self.o_proj = nn.Linear(size.hidden, size.hidden, bias=bias)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        """Return what attention adds to x (rows, sequence, hidden); `angles` are those of a Llama, else None."""
        rows, sequence, _ = x.shape
        if hasattr(self, "qkv_proj"):
            parts = self.qkv_proj(x).chunk(3, -1)
        else:
            parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.view(rows, sequence, -1, self.head_dim).transpose(1, 2) for part in parts)
        if angles is not None:
            q, k = rotated(q, *angles), rotated(k, *angles)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.o_proj(mixed.transpose(1, 2).reshape(rows, sequence, -1)))


class Rotary(nn.Module):
    """The angles by which positions rotate queries and keys (Su et al., 2021), as transformers gives them."""

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        self.width, self.base = width, base

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (rows, sequence, width) of positions (rows, sequence), in the dtype of `x`."""
        halves = torch.arange(0, self.width, 2, device=x.device, dtype=torch.float32)
        angles = positions[..., None] * self.base ** (-halves / self.width)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


Angles = tuple[Tensor, Tensor] | None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys (rows, heads, sequence, width), rotated."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class GptMlp(nn.Module):
    """The feed-forward part of a GPT."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.up_proj = nn.Linear(size.hidden, size.ffn_hidden)
        self.down_proj = nn.Linear(size.ffn_hidden, size.hidden)
        self.act_fn = nn.GELU()
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return what it adds to x (rows, sequence, hidden)."""
        return self.dropout(self.down_proj(self.act_fn(self.up_proj(x))))


class LlamaMlp(nn.Module):
    """The gated feed-forward part of a Llama."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.ffn_hidden, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.ffn_hidden, bias=False)
        self.down_proj = nn.Linear(size.ffn_hidden, size.hidden, bias=False)
        self.act_fn = nn.SiLU()
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return what it adds to x (rows, sequence, hidden)."""
        return self.dropout(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Block(nn.Module):
    """One layer: attention and feed-forward part, each normed before and added to the residual."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.input_layernorm = _norm(size)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = _norm(size)
        self.mlp = GptMlp(size) if size.style == "gpt" else LlamaMlp(size)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        """Return the residual x (rows, sequence, hidden) after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


def _norm(size: ModelSize) -> nn.Module:
    return nn.LayerNorm(size.hidden) if size.style == "gpt" else nn.RMSNorm(size.hidden, eps=1e-5)


class LanguageModel(nn.Module):
    """A GPT or a Llama. A stage of it lacks what belongs to other stages, and keeps the names of the rest."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed_tokens: nn.Module | None = nn.Embedding(size.vocab_size, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden) if size.style == "gpt" else None
        self.rotary_emb = Rotary(size.head_dim) if size.style == "llama" else None
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm: nn.Module | None = _norm(size)
        self.lm_head: nn.Module | None = nn.Linear(size.hidden, size.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (rows, sequence, vocabulary) of tokens (rows, sequence); a stage gives the residual on."""
        if self.embed_tokens is not None:
            at = torch.arange(x.shape[1], device=x.device)
            x = self.embed_tokens(x)
            if self.positions is not None:
                x = x + self.positions(at)
        at = torch.arange(x.shape[1], device=x.device)
        angles = self.rotary_emb(x, at[None]) if self.rotary_emb is not None else None
        for layer in self.layers:
            x = layer(x, angles) if isinstance(layer, Block) else x
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


def build(size: ModelSize, seed: int = 0) -> LanguageModel:
    """Return the whole model with the weights of `seed`; the global random state stays as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LanguageModel(size)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
    return model


def names_in(size: ModelSize) -> mw.nn.ModelMap:
    """Return which modules are which, for `meshweave.parallelize`."""
    is_llama = size.style == "llama"
    attention = {"fused": "self_attn.qkv_proj"}
    if is_llama:
        attention = {name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")}
    layer = mw.nn.LayerMap(
        attention_norm="input_layernorm",
        **attention,
        out="self_attn.o_proj",
        feed_forward_norm="post_attention_layernorm",
        gate="mlp.gate_proj" if is_llama else "",
        up="mlp.up_proj",
        down="mlp.down_proj",
        activation="mlp.act_fn",
    )
    positions = {"rotary": "rotary_emb"} if is_llama else {"positions": "positions"}
    return mw.nn.ModelMap(
        "embed_tokens", "layers", layer, "norm", "lm_head", has_causal_loss=False, **positions
    )


def layers_of(num_layers: int, number: int, num_stages: int) -> tuple[int, int]:
    """Return the first layer of a stage, and that after the last; stages differ by one layer at most."""
    return -(-num_layers * number // num_stages), -(-num_layers * (number + 1) // num_stages)


def stage_of(model: LanguageModel, number: int, num_stages: int) -> LanguageModel:
    """Return stage `number` of a model, with parameters of its own under the names that they have in the model."""
    num_layers = len(model.layers)
    first, end = layers_of(num_layers, number, num_stages)
    own = copy.copy(model)
    own._modules = dict(model._modules)
    own.layers = nn.ModuleList(
        layer if first <= at < end else nn.Identity() for at, layer in enumerate(model.layers)
    )
    if number > 0:
        own.embed_tokens = own.positions = None
    if number < num_stages - 1:
        own.norm = own.lm_head = None
    return copy.deepcopy(own)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a micro-batch."""
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, targets.flatten())
