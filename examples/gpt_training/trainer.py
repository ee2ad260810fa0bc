"""The training of one rank: its stages, with shared layers where ranks share them, in a pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshweave as mw
from gpt_training.layout import FOLDED, mesh_for, schedule_name, stages_of
from gpt_training.models import ModelSize, build, layers_of, loss_of, names_in, stage_of
from gpt_training.text import TEXT, ByteBatches


@dataclass(frozen=True)
class TrainOptions:
    """What to train, and how.

    Attributes:
        batch: windows of a step, over all ranks.
        lr: the highest learning rate, after `warmup` steps; it stays.
        clip: the largest norm of all gradients.
        save_every: steps between checkpoints; 0 saves none.
        folder: of checkpoints.
        deadline_s: seconds that a wait for other ranks may take.
    """

    size: ModelSize = field(default_factory=ModelSize)
    parallelism: mw.Parallelism = field(default_factory=mw.Parallelism)
    batch: int = 16
    lr: float = 3e-3
    warmup: int = 20
    clip: float = 1.0
    seed: int = 0
    text: Path = TEXT
    folder: Path | None = None
    save_every: int = 0
    deadline_s: float = 30.0
    dtype: torch.dtype = torch.float32


class Trainer:
    """A training on one rank. All ranks make one, and call the same methods in the same order.

    Attributes:
        num_steps: how many steps were trained, those before a resumption included.
        last_saved: the step of the last checkpoint that was begun here, or gone on from.
        waits: counts how long this rank waits for others in what meshweave runs.
        context: what all of it runs in.
    """

    def __init__(self, options: TrainOptions) -> None:
        chosen = options.parallelism
        self.options, self.num_steps = options, 0
        self.last_saved: int | None = None
        self.mesh = mesh_for(chosen)
        self.rank = dist.get_rank()
        torch.manual_seed(options.seed * 65_537 + self.rank)
        self.context = mw.TorchContext(deadline_s=options.deadline_s)
        self.waits = self.context.count_waits()
        own = stages_of(chosen, self.mesh.get_local_rank("pp"))
        self.stages: dict[int, nn.Module] = {number: self._stage(number) for number in own}
        rows = chosen.micro_batch
        self.pipeline = mw.pipeline(
            self.stages,
            schedule_name(chosen),
            micro_batches=self.num_micro_batches,
            loss_fn=self._loss,
            meshes=self.mesh,
            recompute=range(chosen.num_stages) if chosen.recompute == "full" else (),
            outputs=self._examples(rows),
            context=self.context,
        )
        parameters = [each for stage in self.stages.values() for each in stage.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        size = options.size
        self.data = ByteBatches(options.text, sequence=size.sequence, batch=options.batch, seed=options.seed)
        self.state = mw.nn.TrainingState(
            self.modules, self.optimizer, rank=self.rank, places=_places(chosen), seed=options.seed
        )
        self.checkpoints = mw.Checkpoints(options.folder, context=self.context) if options.folder else None

    @property
    def modules(self) -> list[nn.Module]:
        """Return the parts of the model that this rank has, with the names that parameters have in the whole."""
        stages = self.stages.values()
        return [stage.module if isinstance(stage, mw.nn.ParallelStage) else stage for stage in stages]

    @property
    def num_micro_batches(self) -> int:
        """Return the micro-batches of a step. Raises LayoutError where the batch has no whole number of them."""
        chosen, batch = self.options.parallelism, self.options.batch
        rows = chosen.data * chosen.micro_batch
        if batch < 1 or batch % rows:
            raise mw.errors.LayoutError(
                f"a batch of {batch} has no whole number of micro-batches of {chosen.micro_batch} rows on each of "
                f"{chosen.data} replicas"
            )
        return batch // rows

    def _stage(self, number: int) -> nn.Module:
        chosen = self.options.parallelism
        model = build(self.options.size, self.options.seed).to(self.options.dtype)
        if chosen.tensor_size == 1:
            return stage_of(model, number, chosen.num_stages)
        size, names = self.options.size, self.mesh.mesh_dim_names[2:]
        own = self.mesh[names if len(names) > 1 else names[0]]
        parallel = mw.parallelize(model, chosen.strategy, own, mapping=names_in(size), context=self.context)
        return mw.nn.ParallelStage(
            parallel, *layers_of(size.num_layers, number, chosen.num_stages), size.sequence
        )

    def _examples(self, rows: int) -> dict[int, list[Tensor]]:
        """Return what stages pass on, so that they need not run once without memory to find that out."""
        size = self.options.size
        whole = torch.zeros(rows, size.sequence, size.hidden, dtype=self.options.dtype)
        return {
            number: [stage.example(rows) if isinstance(stage, mw.nn.ParallelStage) else whole]
            for number, stage in self.stages.items()
        }

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch, on the last stage."""
        last = self.stages[self.options.parallelism.num_stages - 1]
        return (
            last.loss(output, targets) if isinstance(last, mw.nn.ParallelStage) else loss_of(output, targets)
        )

    # --- steps -----------------------------------------------------------------------------------------------

    def step(self) -> Tensor | None:
        """Train on the next batch. Return the loss on ranks of the last stage, else None."""
        tokens, targets = next(self.data)
        self.optimizer.zero_grad()
        loss = self.pipeline.step(tokens, targets)
        self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min((self.num_steps + 1) / max(self.options.warmup, 1), 1.0)
        self.optimizer.step()
        self.num_steps += 1
        every = self.options.save_every
        if self.checkpoints is not None and every and self.num_steps % every == 0:
            self.save()
        return loss

    def _clip(self) -> None:
        """Scale gradients so that the norm of all of them, on all stages, is `clip` at most."""
        if math.isinf(self.options.clip):
            return
        parameters = [each for stage in self.stages.values() for each in stage.parameters()]
        shards: dict[int, list[Tensor]] = {}
        for gradient in (each.grad for each in parameters if each.grad is not None):
            copies, local = _copies_and_shard(gradient)
            shards.setdefault(copies * self.options.parallelism.data, []).append(local)
        squares = [
            torch.nn.utils.get_total_norm(own).double() ** 2 / copies for copies, own in shards.items()
        ]
        square = torch.stack(squares).sum()
        with self.context.guard("the norm of gradients of all stages", range(dist.get_world_size())):
            dist.all_reduce(square)
        # In fp32, which hides in what order the sum was made, so that stages change no bit of a step.
        torch.nn.utils.clip_grads_with_norm_(parameters, self.options.clip, square.sqrt().to(torch.float32))

    @property
    def waits_s(self) -> float:
        """Return the seconds that this rank has waited for others in programs, bubbles included."""
        return self.waits.waits_s

    def on_first_rank(self, values: list[float], *, is_from_last_stage: bool) -> list[float]:
        """Return on all ranks what one rank gives: the first, or the first of the last stage."""
        chosen = self.options.parallelism
        last = 0 if chosen.schedule in FOLDED else chosen.pipeline - 1
        source = int(self.mesh.mesh[last].flatten()[0]) if is_from_last_stage else 0
        given = torch.tensor(values, dtype=torch.float64)
        with self.context.guard("what the last stage has to say of its loss", range(dist.get_world_size())):
            dist.broadcast(given, source)
        return [float(each) for each in given]

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save everything beside what follows."""
        assert self.checkpoints is not None
        self.state.save(self.checkpoints, self.num_steps, {"data": self.data.state_dict()})
        self.last_saved = self.num_steps

    def resume(self) -> int | None:
        """Go on from the last whole checkpoint, whatever ranks wrote it. Return its step; None without one."""
        assert self.checkpoints is not None
        step = self.checkpoints.latest()
        if step is not None:
            notes = self.state.load(self.checkpoints, step)
            self.data.load_state_dict(notes["data"])
            self.num_steps = self.last_saved = step
        return step

    def close(self) -> None:
        """Wait for the last checkpoint, and for all ranks."""
        if self.checkpoints is not None:
            self.checkpoints.wait()


def _copies_and_shard(gradient: Tensor) -> tuple[int, Tensor]:
    """Return how many ranks of a layer have the same part of a gradient, and this rank's part."""
    if not isinstance(gradient, DTensor):
        return 1, gradient
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate()), gradient.to_local()


def _places(chosen: mw.Parallelism) -> dict[str, Any]:
    tensor = list(chosen.tensor_mesh)
    return {"data": chosen.data, "pipeline": chosen.pipeline, "tensor": tensor, "stages": chosen.num_stages}


def train(trainer: Trainer, num_steps: int) -> list[float]:
    """Train until `num_steps` steps were trained. Return the losses of these steps, on all ranks."""
    losses = []
    while trainer.num_steps < num_steps:
        loss = trainer.step()
        losses.append(float(loss) if loss is not None else math.nan)
    return trainer.on_first_rank(losses, is_from_last_stage=True)
