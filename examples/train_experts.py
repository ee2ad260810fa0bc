"""Train a small routed model of transformers, its experts on ranks of their own, with checkpoints.

    torchrun --nproc-per-node 4 examples/train_experts.py --data 2 --tensor 2 --expert 4 --folder out
    torchrun --nproc-per-node 4 examples/train_experts.py --data 4 --expert 2 --folder out --resume

It learns bytes of a text with Mixtral's layers: the router is the class's own, and its auxiliary loss keeps
experts busy. A training that is resumed goes on at another layout. At the end transformers reads what was saved.
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import meshweave as mw

TEXT = Path(__file__).parent / "gpt_training/genesis.txt.gz"
SEQUENCE, BATCH = 64, 8


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=int, default=2, help="replicas of attention")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share each layer's attention")
    parser.add_argument("--expert", type=int, default=4, help="ranks that share the experts of a layer")
    parser.add_argument("--expert-tensor", type=int, default=1, help="ranks that share each expert")
    parser.add_argument("--zero", type=int, default=1, help="what data-parallel ranks shard, 0 to 3")
    parser.add_argument("--experts", type=int, default=8, help="experts of a layer")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train")
    parser.add_argument(
        "--steps", type=int, default=10**9, help="how many steps at most, those before included"
    )
    parser.add_argument("--folder", type=Path, default=Path("experts-out"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    return parser.parse_args()


def model_of(experts: int) -> transformers.MixtralForCausalLM:
    """Return a Mixtral of bytes with random weights."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.01, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and targets of a step, the same on all ranks."""
    starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([text[start : start + SEQUENCE + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train on all ranks."""
    given = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plan = mw.Parallelism(
        data=given.data,
        tensor=given.tensor,
        expert=given.expert,
        expert_tensor=given.expert_tensor,
        zero=given.zero,
    )
    model = mw.parallelize(model_of(given.experts), plan)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=3e-3)
    state = mw.nn.TrainingState([model.module], optimizer, rank=rank)
    checkpoints, step = mw.Checkpoints(given.folder / "steps"), 0
    if given.resume and (latest := checkpoints.latest()) is not None:
        state.load(checkpoints, latest)
        step = latest
    text = torch.frombuffer(bytearray(gzip.decompress(TEXT.read_bytes())), dtype=torch.uint8).long()
    begun, first, is_over = time.monotonic(), step, False
    while step < given.steps and not is_over:
        optimizer.zero_grad()
        loss = model.loss(*batch(text, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
        step += 1
        late = torch.tensor(float(time.monotonic() - begun > given.seconds))
        dist.all_reduce(late)
        is_over = bool(late)
        if rank == 0 and (step % 20 == 0 or step == first + 1):
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    state.save(checkpoints, step)
    checkpoints.wait()
    model.module.save_pretrained(given.folder / "model")
    if rank == 0:
        read = transformers.MixtralForCausalLM.from_pretrained(given.folder / "model")
        tokens, targets = batch(text, step)
        logits = read(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        print(
            f"step {step} saved; transformers reads it: loss {float(loss.detach()):.3f} without the auxiliary one"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
