"""What ranks do in tests of training with parallel models: torch's own features beside them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import reference_models
import small_models
import torch
import torch.distributed as dist
from plain_models import HIDDEN, WORDS, PlainGpt, PlainLlama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from meshweave.algorithms.step import Parallelism, StepProblem, step_of
from meshweave.base.errors import MeshweaveError, PlanError
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.linear import ParallelLinear
from meshweave.nn.parallel.model import ParallelModel
from meshweave.nn.parallel.parallelize import parallelize


def features(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each of the payload's features gives, by name."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return {name: globals()[f"_{name}"](mesh) for name in payload["features"]}


def _model(kind: str = "plain llama", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return reference_models.make(kind, **options)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, WORDS, (4, 8), generator=generator) for _ in range(2))
    return tokens, targets


def _gradients(model: ParallelModel) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor().clone() for n, p in model.module.named_parameters() if p.grad is not None}


def _worst(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in a)


def _optimizer(mesh: DeviceMesh) -> float:
    """Three steps of AdamW with clipped gradients: the largest difference of a weight, relative."""
    model = _model()
    whole = copy.deepcopy(model)
    made = parallelize(model, "megatron_sp", mesh, check=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, made.module)]
    tokens, targets = _batch()
    for _ in range(3):
        loss = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        made.step(tokens, targets)
        for one, optimizer in zip((whole, made.module), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: p.detach() for name, p in whole.named_parameters()}
    return _worst({name: p.full_tensor().detach() for name, p in made.module.named_parameters()}, expected)


def _generators(mesh: DeviceMesh) -> list[bool]:
    """Whether torch's generator is the first rank's of before, after each model; ranks are seeded apart."""
    kept = []
    for model in (_model(), small_models.make_model("helium"), small_models.make_model("helium")):
        for check in (True, False):
            torch.manual_seed(7)
            torch.rand(3)
            first = torch.get_rng_state()
            if mesh.get_rank():
                torch.manual_seed(8)
            parallelize(copy.deepcopy(model), "zero3", mesh, check=check)
            kept.append(torch.equal(torch.get_rng_state(), first))
    return kept


def _checkpointing(mesh: DeviceMesh) -> float:
    """Layers computed again backward, with dropout: the largest difference of a gradient, relative."""
    found = []
    for again in (False, True):
        made = parallelize(_model("plain gpt", dropout=0.3), "megatron_sp", mesh, check=False)
        torch.manual_seed(7)
        tokens, targets = _batch()
        x = made.embed(tokens)
        for block in made.blocks:
            x = checkpoint(block, x, *tokens.shape, use_reentrant=False) if again else block(x, *tokens.shape)
        made.head_loss(x, targets).backward()
        found.append(_gradients(made))
    return _worst(*found)


def _dropout(mesh: DeviceMesh) -> dict[str, Any]:
    """Masks of this rank for a tensor that ranks share out and for one that they all have."""
    from meshweave.nn.parallel.dropout import ShardDropout
    from meshweave.nn.parallel.strategy import LayerStrategy

    strategy = LayerStrategy.of("megatron", mesh)
    torch.manual_seed(3)
    x = torch.ones(64)
    split = ShardDropout(0.5, strategy, ("inner", ""))(x, True)
    copied = ShardDropout(0.5, strategy, ("", ""))(x, True)
    return {"split": split.tolist(), "copied": copied.tolist()}


def _norms(mesh: DeviceMesh) -> list[float]:
    """Rows far from 0 whose features ranks share: how far a layer norm and its gradient are off, relative."""
    from meshweave.nn.parallel.norm import ParallelNorm
    from meshweave.nn.parallel.strategy import LayerStrategy

    own = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("row", "col"))
    norm = nn.LayerNorm(64, dtype=torch.float64)
    made = ParallelNorm(copy.deepcopy(norm).float(), LayerStrategy.of("atp", own), "norm")
    generator = torch.Generator().manual_seed(0)
    arriving, x = torch.randn(2, 2, 3, 64, generator=generator)
    x = 1000 + 0.01 * x
    found = []
    for module, parts in ((norm, 1), (made, mesh.size())):
        wide = torch.float64 if parts == 1 else torch.float32
        given, grad = (
            each.chunk(parts, -1)[mesh.get_local_rank() % parts].to(wide) for each in (x, arriving)
        )
        given.requires_grad_()
        out = module(given) if parts == 1 else module(given, *x.shape[:2])
        out.backward(grad)
        found.append((out.detach(), given.grad))
    start = mesh.get_local_rank() * (64 // mesh.size())
    right = [each[..., start : start + 64 // mesh.size()] for each in found[0]]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[1], right, strict=True)]


def _meta(mesh: DeviceMesh) -> dict[str, Any]:
    """A model made without memory, then filled: names, and the difference of a gradient of its sum of weights."""
    with torch.device("meta"):
        empty = PlainLlama()
    made = parallelize(empty, "megatron_sp", mesh)
    is_meta = all(p.is_meta for p in made.module.parameters())
    made.module.to_empty(device="cpu")
    whole = _model()
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        wanted = dict(whole.named_parameters())
        for name, parameter in made.module.named_parameters():
            parameter.copy_(distribute_tensor(wanted[name].float(), mesh, parameter.placements))
    tokens, targets = _batch()
    loss = float(made.loss(tokens, targets).detach())
    expected = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
    return {"is_meta": is_meta, "difference": abs(loss - expected.item())}


def _autocast(mesh: DeviceMesh) -> dict[str, Any]:
    """bfloat16 products of float32 weights: dtypes, and differences of loss and gradients from one process."""
    model = _model().float()
    whole = copy.deepcopy(model)
    made = parallelize(model, "megatron_sp", mesh, check=False)
    tokens, targets = _batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = made.loss(tokens, targets)
        expected = nn.functional.cross_entropy(whole(tokens).flatten(0, 1).float(), targets.flatten())
    loss.backward()
    expected.backward()
    own = _gradients(made)
    theirs = {name: p.grad for name, p in whole.named_parameters()}
    return {
        "dtypes": sorted({str(grad.dtype) for grad in own.values()}),
        "loss": abs(loss.item() - expected.item()),
        "gradients": _worst(own, theirs),
    }


def _by_hand(mesh: DeviceMesh) -> float:
    """Two linear layers placed by hand: the largest difference of the result."""
    torch.manual_seed(0)
    first, second = nn.Linear(HIDDEN, 24).double(), nn.Linear(24, HIDDEN).double()
    x = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    expected = second(torch.relu(first(x)))
    up = ParallelLinear(first, "megatron_sp", mesh, place="in")
    down = ParallelLinear(second, "megatron_sp", mesh, place="out")
    y = down(torch.relu(up(x.chunk(mesh.size(), 1)[mesh.get_local_rank()])))
    return float((y - expected.chunk(mesh.size(), 1)[mesh.get_local_rank()]).abs().max())


def _refusals(mesh: DeviceMesh) -> list[str]:
    """What is said of models and plans that do not fit."""
    said = []

    class Strange(PlainGpt):
        def __init__(self) -> None:
            super().__init__()
            self.transformer.h[0].attn.q_norm = nn.LayerNorm(4)

    for module, plan in (
        (nn.Linear(2, 2), "megatron"), (Strange(), "megatron"), (PlainLlama(), "megatrom"),
        (PlainLlama(), "25d_block"), (PlainGpt(dropout=0.1), "ring_attention"),
    ):  # fmt: skip
        try:
            parallelize(module, plan, mesh)
            said.append("")
        except MeshweaveError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def _unheard(mesh: DeviceMesh) -> dict[str, str]:
    """What is said of hooks that do and do not run, of transforms, and of states of whole parameters."""

    def hooked(path: str, is_patched: bool = False) -> None:
        made = parallelize(_model(), "megatron_sp", mesh, check=False)
        part = made.module.get_submodule(path)
        if is_patched:
            part.forward = lambda x: 2 * x
        else:
            part.register_forward_hook(lambda *given: None)
        made.loss(*_batch())

    def pruned() -> None:
        made = parallelize(small_models.make_model("llama"), "data_parallel", mesh, check=False)
        prune.l1_unstructured(made.module.lm_head, "weight", 0.5)
        made.loss(*_batch())

    def put(name: str, shape: tuple[int, ...], is_tied: bool = False) -> None:
        model: Any = _model()
        if is_tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        made = parallelize(model, "data_parallel", mesh, check=False)
        given = nn.Parameter(torch.ones(shape, dtype=torch.float64))
        own = made.embedding.weight
        own = nn.Parameter(own.detach().clone()) if is_tied else own
        setattr(made.module.lm_head, name, given if shape else own)
        made.loss(*_batch())

    def transformed() -> None:
        made = parallelize(_model(), "megatron_sp", mesh, check=False)
        torch.func.grad(lambda scale: scale * made.loss(*_batch()))(torch.ones((), dtype=torch.float64))

    def stepped(is_loaded: bool) -> None:
        model = _model()
        whole = copy.deepcopy(model)
        made = parallelize(model, "megatron_sp", mesh, check=False)
        theirs, own = (torch.optim.AdamW(each.parameters()) for each in (whole, made.module))
        if is_loaded:
            for parameter in whole.parameters():
                parameter.grad = torch.ones_like(parameter)
            theirs.step()
            own.load_state_dict(theirs.state_dict())
        made.step(*_batch())
        with torch.inference_mode():
            own.step()

    said = {}
    for name, call in {
        "head": lambda: hooked("lm_head"),
        "part": lambda: hooked("model.layers.0.mlp"),
        "patched": lambda: hooked("model.layers.0.mlp.gate_proj", is_patched=True),
        "norm": lambda: hooked("model.norm"),
        "pruned": pruned,
        "plain": lambda: put("weight", (WORDS, HIDDEN)),
        "tied": lambda: put("weight", ()),
        "untied": lambda: put("weight", (), is_tied=True),
        "added": lambda: put("bias", (WORDS,)),
        "transform": transformed,
        "states": lambda: stepped(True),
        "no states": lambda: stepped(False),
    }.items():
        try:
            call()
            said[name] = ""
        except MeshweaveError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def _overlap(mesh: DeviceMesh) -> list[str]:
    """What is said of steps by the overlap that they were priced with, and of the first where less is accepted."""
    said = []
    chosen = Parallelism(tensor=mesh.size(), micro_batch=4)
    for overlap, accepted in (("layers", None), ("sites", None), ("layers", "sites")):
        problem = StepProblem(load_model("llama-3-8b"), load_cluster("dgx-h100:2"), 4, 2048, overlap=overlap)
        try:
            made = parallelize(PlainLlama(), step_of(problem, chosen), mesh, overlap=accepted, check=False)
            said.append(made.report.strategy)
        except PlanError as error:
            said.append(str(error))
    return said


def _compiled(mesh: DeviceMesh) -> dict[str, Any]:
    """Layers compiled one by one: graphs and breaks, and the largest difference of a gradient, relative."""
    from torch._dynamo.utils import counters

    found = []
    for is_compiled in (False, True):
        made = parallelize(_model(), "megatron_sp", mesh, check=False)
        if is_compiled:
            for block in made.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        made.step(*_batch())
        found.append(_gradients(made))
    return {"difference": _worst(*found), "graph_breaks": sum(counters["graph_break"].values())}


def _compiled_whole(mesh: DeviceMesh) -> dict[str, Any]:
    """A whole model compiled: the difference of a gradient, and what is said of other tokens on a rank."""
    found = []
    for is_compiled in (False, True):
        made = parallelize(_model(), "megatron_sp", mesh, check=False)
        module = torch.compile(made.module, backend="eager") if is_compiled else made.module
        tokens, targets = _batch()
        module(tokens, targets=targets).loss.backward()
        found.append(_gradients(made))
    try:
        module(tokens.roll(dist.get_rank(), 0), targets=targets)
    except MeshweaveError as error:
        return {"difference": _worst(*found), "said": str(error)}
    return {"difference": _worst(*found), "said": ""}


def _compiled_step(mesh: DeviceMesh) -> float:
    """A compiled step of an optimizer of copies: the largest difference of a weight, relative."""
    found = []
    for is_compiled in (False, True):
        made = parallelize(_model(), "data_parallel", mesh, check=False)
        optimizer = torch.optim.SGD(made.module.parameters(), lr=0.1)
        made.step(*_batch())
        step: Any = optimizer.step
        (torch.compile(lambda step=step: step(), backend="eager") if is_compiled else step)()
        found.append({name: p.full_tensor().detach() for name, p in made.module.named_parameters()})
    return _worst(*found)


def _fsdp(mesh: DeviceMesh) -> float:
    """FSDP2 over a data axis around tensor-parallel layers: the largest difference of a gradient, relative."""
    from torch.distributed.fsdp import fully_shard

    both = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = _model()
    whole = copy.deepcopy(model)
    made = parallelize(model, "megatron_sp", both["tp"])
    for block in made.blocks:
        fully_shard(block, mesh=both["dp"])
    fully_shard(made.module, mesh=both["dp"])
    tokens, targets = _batch()
    own = [part.chunk(2)[both["dp"].get_local_rank()] for part in (tokens, targets)]
    made.step(*own)
    made.module.zero_grad()  # a second step, whose weights FSDP2 gathers into the memory of the first
    made.step(*own)
    nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten()).backward()
    theirs = {name: p.grad for name, p in whole.named_parameters()}
    assert all(isinstance(p.grad, DTensor) for p in made.module.parameters())
    return _worst(_gradients(made), theirs)


def _curve(mesh: DeviceMesh) -> float:
    """The losses of 200 steps of AdamW: the largest relative difference from those of one process."""
    worst = 0.0
    for kind, strategy in (("plain gpt", "megatron_sp"), ("plain llama", "zero3")):
        model = _model(kind)
        whole = copy.deepcopy(model)
        made = parallelize(model, strategy, mesh, check=False)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (whole, made.module)]
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(200):
            tokens = torch.randint(0, WORDS, (4, 1), generator=generator) + torch.arange(9)
            tokens = tokens % WORDS
            tokens, targets = tokens[:, :-1], tokens[:, 1:]
            loss = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            own = made.step(tokens, targets)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            worst = max(worst, abs(own.item() - losses[-1]) / losses[-1])
        assert losses[-1] < 0.5 * losses[0], losses[:: len(losses) - 1]
    return worst
