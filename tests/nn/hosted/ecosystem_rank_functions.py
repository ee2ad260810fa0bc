"""What ranks do in tests of habits of torch and transformers: each beside the same on one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import plain_models
import small_models
import torch
import torch.distributed as dist
from habit_rank_functions import mesh_of
from hosted_rank_functions import worst
from plain_models import PlainGpt
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshweave as mw
from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize

IGNORED = -100
OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "adafactor": lambda given: torch.optim.Adafactor(given, lr=1e-2),
    "adafactor foreach": lambda given: torch.optim.Adafactor(given, lr=1e-2, foreach=True),
    "adafactor of transformers": lambda given: _of_transformers(given),
    "muon": lambda given: torch.optim.Muon([each for each in given if each.ndim == 2], lr=1e-2),
    "sgd fused": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True),
}


def tried(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each of the payload's functions gives, by its name, the type of model and the strategy."""
    torch.set_num_threads(1)
    said = {}
    with small_models.quiet():
        for name, kind, strategy in payload["cases"]:
            try:
                with small_models.KeepDoubles():
                    said[f"{name} {kind} {strategy}"] = globals()[name](
                        kind, strategy, Path(payload["folder"])
                    )
            except MeshweaveError as error:
                said[f"{name} {kind} {strategy}"] = f"{type(error).__name__}: {error}"
    return said


def _pair(kind: str, strategy: str) -> tuple[Any, Any]:
    whole = small_models.make_model(kind)
    return whole, parallelize(copy.deepcopy(whole), strategy, mesh_of(strategy), check=False)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _off(made: Any, whole: Any) -> float:
    """Return the largest difference of a weight from that of one process, relative."""
    own = dict(made.named_parameters())
    pairs = [(_whole(own[name]), each.detach()) for name, each in whole.named_parameters()]
    return max(float((one - two).abs().max() / two.abs().max()) for one, two in pairs)


def _of_transformers(given: list[Tensor]) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(given, lr=1e-2, scale_parameter=True, relative_step=False)


def stepped(kind: str, strategy: str, folder: Path) -> dict[str, float]:
    """Return how far weights are off after three steps, by optimizers that look at more than single elements."""
    return {name: _after_steps(make, *_pair(kind, strategy)) for name, make in OPTIMIZERS.items()}


def _after_steps(make: Callable[[list[Tensor]], Any], whole: Any, made: Any) -> float:
    optimizers = [make(list(model.parameters())) for model in (whole, made.module)]
    for number in range(3):
        tokens, targets = small_models.batch(number)
        losses = small_models.loss_of(whole, tokens, targets), made.loss(tokens, targets)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return _off(made.module, whole)


def compiled(kind: str, strategy: str, folder: Path) -> float:
    """Return how far losses and gradients of a compiled model are off, of batches of several sizes."""
    torch._dynamo.reset()
    if kind == "plain":
        torch.manual_seed(1)
        whole: Any = PlainGpt(layers=1).double()
        made = parallelize(copy.deepcopy(whole), strategy, mesh_of(strategy), check=False)
    else:
        whole, made = _pair(kind, strategy)
    module, off = torch.compile(made.module, backend="aot_eager"), 0.0
    for rows, length in ((8, 16), (4, 12)):
        tokens, targets = (each.repeat(2, 1)[:rows, :length] for each in small_models.batch(length))
        if kind == "plain":
            tokens, targets = tokens % plain_models.WORDS, targets % plain_models.WORDS
            right = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
        else:
            right = small_models.loss_of(whole, tokens, targets)
        loss = module(tokens, targets=targets).loss
        for each in (loss, right):
            each.backward()
        off = max(off, abs(float(loss.detach() - right.detach())), worst(made.module, whole))
    return off


class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    """Rows of tokens whose ends are padding."""

    def __len__(self) -> int:
        """Return how many there are."""
        return 32

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        """Return a row, its mask and its labels."""
        tokens = torch.randint(0, small_models.WORDS, (16,), generator=torch.Generator().manual_seed(at))
        mask = (torch.arange(16) < 16 - at % 5).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def trained(kind: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Return how far what transformers' Trainer makes of a model is from a loop on one process, and its files."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    whole, made = _pair(kind, strategy)
    arguments = TrainingArguments(
        output_dir=str(folder / f"{kind} {strategy}"), use_cpu=True, per_device_train_batch_size=4, max_steps=3,
        gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1,
        report_to=[],
        save_strategy="steps", save_steps=3, save_only_model=True, disable_tqdm=True, max_grad_norm=0.5,
        parallelism_config=mw.nn.accelerate_config(made),
    )  # fmt: skip
    trainer = InOrder(made.module, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    wanted = _by_hand(whole, losses)
    predicted = trainer.predict(Rows())
    whole.eval()
    batch = torch.utils.data.default_collate([Rows()[at] for at in range(32)])
    with torch.no_grad():
        out = whole(**batch)
    return {
        "losses": max(abs(one - two) for one, two in zip(losses, wanted, strict=True)),
        "weights": _off(made.module, whole),
        "logits": float((_once(predicted.predictions) - out.logits).abs().max()),
        "files": sorted(
            each.name for each in Path(arguments.output_dir, "checkpoint-3").glob("*.safetensors")
        ),
    }


def _once(predictions: Any) -> Tensor:
    """Return what Trainer has gathered of every rank, batch by batch, of the first one."""
    return torch.tensor(predictions).unflatten(0, (4, dist.get_world_size(), 8))[:, 0].flatten(0, 1)


def _by_hand(whole: Any, losses: list[float]) -> list[float]:
    """Return the losses of the same steps of AdamW on one process."""
    optimizer, made, rows = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.0), [], Rows()
    for number in range(len(losses)):
        halves = [
            torch.utils.data.default_collate([rows[8 * number + 4 * half + at] for at in range(4)])
            for half in range(2)
        ]
        count = sum(int((half["labels"][:, 1:] != IGNORED).sum()) for half in halves)
        total = 0.0
        for half in halves:
            loss = whole(**half, num_items_in_batch=count).loss
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        made.append(total)
    return made


def refused(kind: str, strategy: str, folder: Path) -> dict[str, str]:
    """Return what is said of habits that parameters on ranks do not have."""
    tokens, targets = small_models.batch()
    made = parallelize(small_models.make_model(kind), strategy, mesh_of(strategy), check=False)
    module: Any = made.module
    module.config._attn_implementation = (
        "eager"  # of torch's kernels of attention there are no second derivatives
    )
    optimizer = torch.optim.AdamW(module.parameters())
    made.loss(tokens, targets).backward()
    optimizer.step()
    hidden = torch.randn(4, 16, small_models.HIDDEN, dtype=torch.float64)
    calls: dict[str, Callable[[], Any]] = {
        "second derivatives": lambda: torch.autograd.grad(
            made.loss(tokens, targets), [next(module.parameters())], create_graph=True
        ),
        "anomalies": lambda: _watched(made, tokens, targets),
        "class of a norm": lambda: _patched(kind, made, tokens, targets),
        "head": lambda: module.lm_head(hidden),
        "layer": lambda: made.blocks[0](hidden),
        "DDP": lambda: nn.parallel.DistributedDataParallel(module),
        "weights of a rank": lambda: module.load_state_dict(_of_first(module.state_dict())),
        "state of a rank": lambda: _resumed(made, _of_first(optimizer.state_dict()), tokens, targets),
        "shared": lambda: module.share_memory(),
        "initial": lambda: module.apply(module._init_weights),
        "data": lambda: _assigned(made, tokens, targets),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except MeshweaveError as error:
            said[name] = str(error)
    return said


def _watched(made: Any, tokens: Tensor, targets: Tensor) -> None:
    with torch.autograd.detect_anomaly():
        made.loss(tokens, targets)


def _patched(kind: str, made: Any, tokens: Tensor, targets: Tensor) -> None:
    norm: Any = type(small_models.make_model(kind).get_submodule("model.norm"))
    with mock.patch.object(norm, "forward", lambda self, x: 2 * x):
        made.loss(tokens, targets)


def _of_first(state: Any) -> Any:
    """Return what the first rank has saved, as all ranks read it."""
    file = io.BytesIO()
    torch.save(state, file)
    given = [file.getvalue()]
    dist.broadcast_object_list(given)
    return torch.load(io.BytesIO(given[0]), weights_only=False)


def _resumed(made: Any, state: Any, tokens: Tensor, targets: Tensor) -> None:
    optimizer = torch.optim.AdamW(made.module.parameters())
    optimizer.load_state_dict(state)
    made.loss(tokens, targets).backward()
    optimizer.step()


def _assigned(made: Any, tokens: Tensor, targets: Tensor) -> None:
    parameter = next(made.module.parameters())
    parameter.data = parameter.data * 0.5
    made.loss(tokens, targets)
