"""What the README takes as given: a model of transformers, and a batch."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshweave as mw

__all__ = ["LlamaForCausalLM", "config", "mw", "targets", "tokens", "torch"]

config = LlamaConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
torch.manual_seed(0)  # every rank makes the same model
tokens, targets = torch.arange(32).reshape(4, 8) % 24, torch.arange(1, 33).reshape(4, 8) % 24
