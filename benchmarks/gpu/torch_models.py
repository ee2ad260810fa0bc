"""Transformers in plain PyTorch, written as users write them, for measuring training steps on one GPU.

Llama blocks are those of torchtitan: `RMSNorm`, separate projections, rotary embedding by complex numbers in fp32,
SDPA, SwiGLU. With `functions` "written out" norm and rotary embedding are those of Hugging Face transformers, one
operation after another. GPT blocks have `LayerNorm`, biases, one projection of Q, K and V, and GELU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class TrainingRun:
    """A model and how it is trained on one device.

    Attributes:
        family: "llama" or "gpt".
        micro_batch, accumulation: sequences of a micro-batch, and micro-batches of a step.
        compiled: whether each layer and the loss go through torch.compile.
        recompute: "none", or "full" for every layer by torch.utils.checkpoint.
        gradients: dtype in which gradients are kept and accumulated; weights are bfloat16, Adam's states and its
            copy of the weights float32.
        functions: "torch" for norms of torch, "written out" for those of Hugging Face.
        dropout: the probability after each half of a layer.
        attention: the kernel of attention, "default" for the one that SDPA chooses.
    """

    name: str
    family: Literal["llama", "gpt"]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int
    accumulation: int
    compiled: bool = False
    recompute: Literal["none", "full"] = "none"
    gradients: Literal["float32", "bfloat16"] = "float32"
    functions: Literal["torch", "written out"] = "torch"
    dropout: float = 0.0
    attention: Literal["default", "flash-2"] = "default"


class WrittenOutNorm(nn.Module):
    """RMSNorm as Hugging Face's LlamaRMSNorm computes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., width) over its root mean square, times the weight."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    """Return x (b, s, heads, d) after rotary embedding by complex numbers in fp32, as torchtitan computes it."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None, :]).flatten(3).type_as(x)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (b, heads, s, d) after rotary embedding as Hugging Face's apply_rotary_pos_emb computes it."""
    left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class LlamaLayer(nn.Module):
    """A layer of Llama."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.heads, self.kv_heads, width = run.heads, run.kv_heads, run.hidden // run.heads
        self.is_written_out = run.functions == "written out"

        def norm() -> nn.Module:
            return WrittenOutNorm(run.hidden) if self.is_written_out else nn.RMSNorm(run.hidden, eps=1e-6)

        self.attention_norm, self.ffn_norm = norm(), norm()
        self.wq = nn.Linear(run.hidden, run.heads * width, bias=False)
        self.wk = nn.Linear(run.hidden, run.kv_heads * width, bias=False)
        self.wv = nn.Linear(run.hidden, run.kv_heads * width, bias=False)
        self.wo = nn.Linear(run.heads * width, run.hidden, bias=False)
        self.w1 = nn.Linear(run.hidden, run.ffn, bias=False)
        self.w2 = nn.Linear(run.ffn, run.hidden, bias=False)
        self.w3 = nn.Linear(run.hidden, run.ffn, bias=False)

    def forward(self, x: Tensor, position: tuple[Tensor, ...]) -> Tensor:
        """Return the residual (b, s, hidden) after the layer."""
        h = x + self._attend(self.attention_norm(x), position)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))

    def _attend(self, x: Tensor, position: tuple[Tensor, ...]) -> Tensor:
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, self.heads, -1)
        k = self.wk(x).view(b, s, self.kv_heads, -1)
        v = self.wv(x).view(b, s, self.kv_heads, -1).transpose(1, 2)
        if self.is_written_out:
            cos, sin = position
            q, k = (rotate_halves(each.transpose(1, 2), cos, sin) for each in (q, k))
        else:
            q, k = (rotate_complex(each, position[0]).transpose(1, 2) for each in (q, k))
        grouped = self.heads != self.kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class GptLayer(nn.Module):
    """A layer of GPT."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.heads, self.dropout = run.heads, run.dropout
        self.attention_norm, self.ffn_norm = nn.LayerNorm(run.hidden), nn.LayerNorm(run.hidden)
        self.qkv = nn.Linear(run.hidden, 3 * run.hidden)
        self.out = nn.Linear(run.hidden, run.hidden)
        self.ff1, self.ff2 = nn.Linear(run.hidden, run.ffn), nn.Linear(run.ffn, run.hidden)

    def forward(self, x: Tensor, position: tuple[Tensor, ...]) -> Tensor:
        """Return the residual (b, s, hidden) after the layer."""
        b, s, h = x.shape
        q, k, v = (
            each.view(b, s, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.attention_norm(x)).split(h, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._drop(self.out(y.transpose(1, 2).reshape(b, s, h)))
        return x + self._drop(self.ff2(F.gelu(self.ff1(self.ffn_norm(x)), approximate="tanh")))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class PlainTransformer(nn.Module):
    """A decoder-only transformer with its loss."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.run, is_llama = run, run.family == "llama"
        self.embedding = nn.Embedding(run.vocab, run.hidden)
        self.position = None if is_llama else nn.Embedding(run.seq, run.hidden)
        self.layers = nn.ModuleList((LlamaLayer if is_llama else GptLayer)(run) for _ in range(run.layers))
        self.norm = nn.RMSNorm(run.hidden, eps=1e-6) if is_llama else nn.LayerNorm(run.hidden)
        self.head = nn.Linear(run.hidden, run.vocab, bias=False)
        if not is_llama:
            self.head.weight = self.embedding.weight
        self.loss: Any = torch.compile(token_loss, dynamic=False) if run.compiled else token_loss
        self._angles: tuple[Tensor, ...] = ()

    def compile_layers(self) -> None:
        """Compile each layer; layers of equal shapes share the code."""
        for layer in self.layers:
            layer.compile(dynamic=False)

    def angles(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return what rotary embedding multiplies by, () for GPT."""
        run = self.run
        if run.family == "llama" and not self._angles:
            width = run.hidden // run.heads
            rates = 1.0 / 1e4 ** (torch.arange(0, width, 2, device=device).float() / width)
            angle = torch.outer(torch.arange(run.seq, device=device).float(), rates)
            if run.functions == "torch":
                self._angles = (torch.polar(torch.ones_like(angle), angle),)
            else:
                both = torch.cat((angle, angle), dim=-1)
                self._angles = both.cos().bfloat16(), both.sin().bfloat16()
        return self._angles

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Return the residual (b, s, hidden) after all layers, for tokens (b, s)."""
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position.weight
        angles = self.angles(tokens.device)
        for layer in self.layers:
            if self.run.recompute == "full":
                x = checkpoint(layer, x, angles, use_reentrant=False)
            else:
                x = layer(x, angles)
        return x

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of tokens (b, s)."""
        logits = self.head(self.norm(self.hidden_states(tokens)))
        return self.loss(logits, targets)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits (b, s, vocabulary), computed in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


class MixedAdam:
    """AdamW on fp32 copies of bfloat16 weights, with the norm of gradients clipped at 1.

    With fp32 gradients each gradient is added to an fp32 one as soon as it is there, and freed (Megatron-LM's main
    gradients). With bfloat16 gradients autograd adds them up; the update casts them, some weights at a time.
    """

    def __init__(self, run: TrainingRun, model: nn.Module, rate: float = 1e-4) -> None:
        self.params = list(model.parameters())
        self.is_wide = run.gradients == "float32"
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.wide: list[Tensor] = []
        fused = self.params[0].is_cuda
        if self.is_wide:
            self.wide = [torch.zeros_like(master) for master in self.masters]
            for param, wide in zip(self.params, self.wide, strict=True):
                param.register_post_accumulate_grad_hook(_adder(wide))
        groups = [list(range(len(self.params)))] if self.is_wide else _portions(self.params)
        self.optimizers = [
            (group, torch.optim.AdamW([self.masters[i] for i in group], lr=rate, fused=fused))
            for group in groups
        ]

    def step(self) -> None:
        """Update the weights and drop the gradients."""
        if self.is_wide:
            for master, wide in zip(self.masters, self.wide, strict=True):
                master.grad = wide
            nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        else:
            nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        with torch.no_grad():
            for group, optimizer in self.optimizers:
                self._update([self.params[i] for i in group], [self.masters[i] for i in group], optimizer)
            if self.is_wide:
                torch._foreach_zero_(self.wide)

    def _update(
        self, params: list[nn.Parameter], masters: list[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        if not self.is_wide:
            for param, master in zip(params, masters, strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        torch._foreach_copy_(params, masters)
        for master in masters:
            master.grad = None


def _adder(wide: Tensor) -> Any:
    def add(param: Tensor) -> None:
        assert param.grad is not None
        wide.add_(param.grad)
        param.grad = None

    return add


def _portions(params: list[nn.Parameter], most: int = 100_000_000) -> list[list[int]]:
    """Return the numbers of parameters in groups of at most so many elements, or of one."""
    groups: list[list[int]] = []
    room = 0
    for number, param in enumerate(params):
        if param.numel() > room:
            groups.append([])
            room = max(most, param.numel())
        groups[-1].append(number)
        room -= param.numel()
    return groups
