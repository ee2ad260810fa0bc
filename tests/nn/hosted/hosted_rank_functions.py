"""What ranks do in tests of models that run by their own code: pipelines, weights of files, dropout, sizes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_models
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import meshweave as mw
from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize
from meshweave.nn.weights.load import load_weights

UNTIED = {"tie_word_embeddings": False}
TOLERANCE = 1e-9


def tried(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each of the payload's functions gives, by its name and the type of model."""
    torch.set_num_threads(1)
    folder = Path(payload["folder"])
    with small_models.quiet():
        return {f"{name} {kind}": one(name, kind, folder) for name, kind in payload["cases"]}


def one(name: str, kind: str, folder: Path) -> Any:
    """Return what a function gives of a type of model, or what is said."""
    computed_again = name in ("dropped", "uneven")  # in backward passes, where no mode is
    try:
        with contextlib.nullcontext() if computed_again else small_models.KeepDoubles():
            return globals()[name](kind, folder)
    except MeshweaveError as error:
        return f"{type(error).__name__}: {error}"


def _model(kind: str, changes: Mapping[str, Any] | None = None) -> Any:
    return small_models.make_model(kind, changes)


def worst(module: Any, whole: Any) -> float:
    """Return the largest difference of a gradient that a module has, by the largest element of all."""
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    wanted, off = dict(whole.named_parameters(remove_duplicate=False)), 0.0
    for name, parameter in module.named_parameters():
        got, right = parameter.grad, wanted[name].grad
        if (got is None) != (right is None):
            return float("inf")
        if got is not None:
            got = got.full_tensor() if isinstance(got, DTensor) else got
            off = max(off, float((got - right).abs().max()) / largest)
    return off


def pipelined(kind: str, folder: Path) -> float:
    """Return how far gradients of two stages on two ranks each are from the model's own, or the loss is.

    Micro-batches have unequal numbers of targets.
    """
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    whole = _model(kind, UNTIED)
    number = mesh.get_local_rank("pp")
    made = parallelize(copy.deepcopy(whole), "megatron", mesh["tp"])
    stage = mw.nn.ParallelStage(made, number, number + 1, 16)
    tokens, targets = small_models.batch()
    targets[0], targets[1, 5:] = -100, -100
    pipeline = mw.pipeline(
        {number: stage}, "1f1b", micro_batches=2, meshes=mesh, outputs={number: [stage.example(2)]},
        loss_fn=stage.loss if number else None,
    )  # fmt: skip
    loss, wanted = pipeline.step(tokens, targets), small_models.loss_of(whole, tokens, targets)
    wanted.backward()
    return max(worst(made.module, whole), 0.0 if loss is None else abs(float(loss) - float(wanted)))


def loaded(kind: str, folder: Path) -> dict[str, Any]:
    """Return the loss of a model that was made without memory, and of its original; and whether names are kept."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole, path = _model(kind), folder / kind
    if dist.get_rank() == 0:
        whole.save_pretrained(path)
    dist.barrier()
    config = type(whole.config).from_pretrained(path)
    with torch.device("meta"):
        empty = type(whole)._from_config(config).double()
    empty.tie_weights()
    empty.train()
    made = parallelize(empty, "megatron", mesh)
    load_weights(made.module, path)
    tokens, targets = small_models.batch()
    own, state = whole.state_dict(), made.module.state_dict()
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()
    }
    return {
        "loss": float(made.loss(tokens, targets).detach()),
        "wanted": float(small_models.loss_of(whole, tokens, targets).detach()),
        "names": sorted(own) == sorted(state),
        "values": all(torch.equal(own[name], full[name].to(own[name].dtype)) for name in own),
    }


def dropped(kind: str, folder: Path) -> dict[str, Any]:
    """Return losses with dropout of a model on this rank, computed again or not, and that without."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole = _model(kind)
    config = whole.config
    for name, value in vars(config).items():
        if "dropout" in name or name.endswith("pdrop"):
            object.__setattr__(config, name, 0.3 if isinstance(value, float) else value)
    torch.manual_seed(0)
    own = small_models.randomise(type(whole)._from_config(config)).float()
    tokens, targets = small_models.batch()
    made = parallelize(own, "megatron_sp", mesh)
    answers: dict[str, Any] = {"without": float(small_models.loss_of(whole, tokens, targets).detach())}
    for key in ("plain", "again", "checkpointed"):
        made.recompute = key == "again"
        if key == "checkpointed":
            made.module.gradient_checkpointing_enable()
        torch.manual_seed(7)
        loss = made.loss(tokens, targets)
        loss.backward()
        answers[key] = float(loss.detach())
        grads = [_copy(p.grad) for p in made.module.parameters() if p.grad is not None]
        answers[f"gradients {key}"] = float(sum(grad.double().abs().sum() for grad in grads))
        made.module.zero_grad()
    return answers


def _copy(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def uneven(kind: str, folder: Path) -> float:
    """Return how far gradients are from the model's own where ranks have unequal numbers of sequences."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole = _model(kind).float()
    made = parallelize(copy.deepcopy(whole), "zero3", mesh)
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, 48, (7, 12), generator=generator) for _ in range(2))
    made.module.gradient_checkpointing_enable()
    made.loss(tokens, targets).backward()
    logits = whole(input_ids=tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return worst(made.module, whole)


def in_rings(kind: str, folder: Path) -> dict[str, float]:
    """Return how far losses and gradients are from the model's own where ranks of a ring share heads.

    Groups of heads are shared evenly, unevenly, and so few that ranks have equal ones.
    """
    off = {}
    plan = mw.Parallelism(context=2, tensor=dist.get_world_size() // 2, strategy="megatron")
    for heads, groups in ((4, 4), (6, 3), (4, 1)):
        sizes = {"hidden_size": 48, "num_attention_heads": heads, "num_key_value_heads": groups}
        whole = _model(kind, sizes)
        made = parallelize(copy.deepcopy(whole), plan, check=False)
        tokens, targets = small_models.batch()
        loss, right = made.step(tokens, targets), small_models.loss_of(whole, tokens, targets)
        right.backward()
        off[f"{heads} heads in {groups} groups"] = max(abs(float(loss - right)), worst(made.module, whole))
    return off


def _staged(own: Any, schedule: str = "1f1b") -> tuple[Any, Any]:
    """Return a model of which this rank has one of two stages, and the pipeline."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    number = mesh.get_local_rank("pp")
    made = parallelize(own, "megatron", mesh["tp"])
    stage = mw.nn.ParallelStage(made, number, number + 1, 16)
    return made, mw.pipeline(
        {number: stage}, schedule, micro_batches=2, meshes=mesh, outputs={number: [stage.example(2)]},
        loss_fn=stage.loss if number else None,
    )  # fmt: skip


def tied(kind: str, folder: Path) -> dict[str, Any]:
    """Return how far weights are after steps of a pipeline whose ends share a table, saved and loaded between."""
    whole = _model(kind)
    table = whole.get_input_embeddings().weight
    assert table is whole.get_output_embeddings().weight, kind
    tokens, targets = small_models.batch()
    reference = torch.optim.AdamW(whole.parameters(), lr=0.01)
    own = copy.deepcopy(whole)
    for number, schedule in enumerate(("1f1b", "zb-h1")):
        made, pipeline = _staged(own, schedule)
        optimizer = torch.optim.AdamW(made.module.parameters(), lr=0.01)
        state = mw.TrainingState([made.module], optimizer, rank=dist.get_rank())
        if number:
            state.load(mw.Checkpoints(folder / kind), 1)
        for model, rates, step in (
            (whole, reference, lambda: small_models.loss_of(whole, tokens, targets).backward()),
            (made, optimizer, lambda pipeline=pipeline: pipeline.step(tokens, targets)),
        ):
            rates.zero_grad()
            step()
            rates.step()
            assert model
        if not number:
            checkpoints = mw.Checkpoints(folder / kind)
            state.save(checkpoints, 1)
            checkpoints.wait()
            own = _model(kind)
    off = max(_apart(made.module, whole), _of_one_stage(kind, folder / kind, whole, tokens, targets))
    with torch.no_grad():
        if pipeline.places.num_stages - 1 in pipeline._stages:
            made.head.weight.mul_(1.001)
    try:
        pipeline.step(tokens, targets)
    except MeshweaveError as error:
        return {"off": off, "apart": str(error)}
    return {"off": off, "apart": "not seen"}


def _apart(module: Any, whole: Any) -> float:
    """Return the largest difference of a weight that a module has."""
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    return max(
        float((_copy(own.detach()) - wanted[name].detach()).abs().max())
        for name, own in module.named_parameters()
    )


def _of_one_stage(kind: str, folder: Path, whole: Any, tokens: Tensor, targets: Tensor) -> float:
    """Return how far weights are after the second step where one stage loads what two have saved."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    made = parallelize(_model(kind), "megatron", mesh, check=False)
    optimizer = torch.optim.AdamW(made.module.parameters(), lr=0.01)
    mw.TrainingState([made.module], optimizer, rank=dist.get_rank()).load(mw.Checkpoints(folder), 1)
    made.step(tokens, targets)
    optimizer.step()
    return _apart(made.module, whole)


def compiled(kind: str, folder: Path) -> dict[str, Any]:
    """Return how far gradients are where layers, or the whole model, are compiled."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole = _model(kind)
    tokens, targets = small_models.batch()
    small_models.loss_of(whole, tokens, targets).backward()
    answers: dict[str, Any] = {}
    for strategy in ("megatron", "megatron_sp", "zero3"):
        for what in ("layers", "fullgraph", "model"):
            torch._dynamo.reset()
            own = copy.deepcopy(whole)
            own.zero_grad()
            made = parallelize(own, strategy, mesh, check=False)
            run = made.module
            if what == "model":
                run = torch.compile(run, backend="eager")
            else:
                for layer in made.blocks:
                    layer.compile(fullgraph=what == "fullgraph", backend="aot_eager")
            try:
                run(tokens, targets=targets).loss.backward()
                answers[f"{strategy} {what}"] = worst(made.module, whole)
            except Exception as error:
                answers[f"{strategy} {what}"] = f"{type(error).__name__}: {error}"
    return answers


def checkpointed(kind: str, folder: Path) -> float:
    """Return how far gradients are of a model with layers that were to be computed again before parallelize."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole = _model(kind)
    tokens, targets = small_models.batch()
    small_models.loss_of(whole, tokens, targets).backward()
    own = _model(kind)
    own.gradient_checkpointing_enable()
    made = parallelize(own, "zero3", mesh)
    made.loss(tokens, targets).backward()
    return worst(made.module, whole)


def sharded(kind: str, folder: Path) -> float:
    """Return how far gradients are of layers that FSDP2 shards over a data axis beside tensor parallelism."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    whole = _model(kind)
    made = parallelize(copy.deepcopy(whole), "megatron_sp", mesh["tp"])
    for layer in made.blocks:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(made.module, mesh=mesh["dp"])
    tokens, targets = small_models.batch()
    own = [part.chunk(2)[mesh.get_local_rank("dp")] for part in (tokens, targets)]
    made.step(*own)
    made.module.zero_grad()  # a second step, whose weights FSDP2 gathers into the memory of the first
    made.step(*own)
    small_models.loss_of(whole, tokens, targets).backward()
    return worst(made.module, whole)


def resumed(kind: str, folder: Path) -> float:
    """Return how far weights are from those of steps without a stop; one strategy saves, another loads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole = _model(kind)
    reference = torch.optim.AdamW(whole.parameters(), lr=0.01)
    tokens, targets = small_models.batch()
    own = copy.deepcopy(whole)
    for number, strategy in enumerate(("megatron_sp", "zero3")):
        made = parallelize(own, strategy, mesh)
        optimizer = torch.optim.AdamW(made.module.parameters(), lr=0.01)
        state = mw.TrainingState([made.module], optimizer, rank=dist.get_rank())
        if number:
            state.load(mw.Checkpoints(folder / f"resumed {kind}"), 1)
        reference.zero_grad()
        small_models.loss_of(whole, tokens, targets).backward()
        reference.step()
        optimizer.zero_grad()
        made.step(tokens, targets)
        optimizer.step()
        if not number:
            checkpoints = mw.Checkpoints(folder / f"resumed {kind}")
            state.save(checkpoints, 1)
            checkpoints.wait()
            own = _model(kind)
    return _apart(made.module, whole)
