"""A small GPT and a small Llama of plain torch, with modules named as in nanoGPT and transformers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS, WORDS, POSITIONS = 16, 4, 24, 32


class PlainRotary(nn.Module):
    """Cosines and sines of positions."""

    width = HIDDEN // HEADS

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        halves = torch.arange(0, self.width, 2, dtype=x.dtype)
        angles = positions[..., None] * 100.0 ** (-halves / self.width)
        angles = torch.cat((angles, angles), -1).to(x.dtype)
        return angles.cos(), angles.sin()


class PlainAttention(nn.Module):
    """Causal attention with grouped heads, three products before it."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, kv_heads, HIDDEN // HEADS
        for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            setattr(self, f"{name}_proj", nn.Linear(HIDDEN, heads * self.head_dim, bias=False))
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = angles
        q, k = (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PlainGatedFfn(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, HIDDEN, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PlainLlamaLayer(nn.Module):
    """A layer of a Llama."""

    def __init__(self, kv_heads: int, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2))
        self.self_attn, self.mlp = PlainAttention(kv_heads), PlainGatedFfn(width)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    """A Llama with the names of transformers."""

    def __init__(self, layers: int = 1, kv_heads: int = 4, width: int = 20) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(WORDS, HIDDEN)
        self.model.layers = nn.ModuleList(PlainLlamaLayer(kv_heads, width) for _ in range(layers))
        self.model.norm, self.model.rotary_emb = nn.RMSNorm(HIDDEN, eps=1e-5), PlainRotary()
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        angles = self.model.rotary_emb(x, torch.arange(tokens.shape[1])[None])
        for layer in self.model.layers:
            x = layer(x, angles)
        return self.lm_head(self.model.norm(x))


class PlainFusedAttention(nn.Module):
    """Causal attention with one product for queries, keys and values."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.n_head, self.attention_dropout = HEADS, dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        p = self.attention_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.resid_dropout(self.c_proj(out.transpose(1, 2).flatten(2)))


class PlainFfn(nn.Module):
    """GELU between two products."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)
        self.gelu, self.dropout = nn.GELU(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class PlainGptLayer(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp = PlainFusedAttention(dropout), PlainFfn(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGpt(nn.Module):
    """A GPT with the names of nanoGPT, and one tensor for embedding and head."""

    def __init__(self, layers: int = 1, width: int = 20, dropout: float = 0.0, is_tied: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_head=HEADS)
        self.transformer = nn.Module()
        self.transformer.wte, self.transformer.wpe = (
            nn.Embedding(WORDS, HIDDEN),
            nn.Embedding(POSITIONS, HIDDEN),
        )
        self.transformer.drop = nn.Dropout(dropout)
        self.transformer.h = nn.ModuleList(PlainGptLayer(width, dropout) for _ in range(layers))
        self.transformer.ln_f = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)
        if is_tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        own = self.transformer
        x = own.drop(own.wte(tokens) + own.wpe(torch.arange(tokens.shape[1])))
        for layer in own.h:
            x = layer(x)
        return self.lm_head(own.ln_f(x))


def sized_llama(hidden: int, layers: int, heads: int, width: int, words: int) -> PlainLlama:
    """Return a Llama of other sizes."""
    sizes = {"HIDDEN": hidden, "HEADS": heads, "WORDS": words}
    before = {name: globals()[name] for name in sizes}
    globals().update(sizes)
    model = PlainLlama(layers, heads, width)
    model.model.rotary_emb.width = hidden // heads
    globals().update(before)
    return model
