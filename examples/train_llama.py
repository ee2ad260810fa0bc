"""Train a model of transformers on four processes that share its layers.

    torchrun --nproc-per-node 4 examples/train_llama.py [STRATEGY or PLAN]

The strategy is "megatron_sp:4" where none is given; a plan file is of as many chips as there are processes.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import meshweave as mw


def main() -> None:
    """Train for some steps on one batch of random tokens, and print the losses."""
    dist.init_process_group()
    torch.manual_seed(0)  # the same weights and tokens on every rank
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)  # or AutoModelForCausalLM.from_pretrained(...)
    parallel = mw.parallelize(model, sys.argv[1] if len(sys.argv) > 1 else "megatron_sp:4")
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=3e-3)
    tokens = torch.randint(0, config.vocab_size, (4, 65))
    for step in range(10):
        optimizer.zero_grad()
        loss = parallel.loss(tokens[:, :-1], tokens[:, 1:])  # targets are the tokens that follow
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
