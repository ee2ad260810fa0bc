"""What ranks do in tests of which models are taken: refusals that leave a model as it was, features, meta."""

from __future__ import annotations

import copy
import functools
import importlib.util
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import small_models
import torch
import torch.distributed as dist
from architecture_rank_functions import outcome
from plain_models import HIDDEN, PlainGpt, PlainLlama
from reference_models import make
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize
from meshweave.nn.weights.load import load_weights
from meshweave.nn.weights.save import save_weights


def tried(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each of the payload's functions gives, by name."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with small_models.quiet():
        folder = Path(payload["folder"])
        answers = {name: globals()[name](mesh, folder) for name in payload["names"]}
        return {**answers, "few": few(mesh, payload["kinds"])}


def few(mesh: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """Return by type of model and strategy whether a small model is exact, refused, wrong, or crashes."""
    shape = (mesh.size(),)
    strategies = [("megatron", shape), ("zero3", shape)]
    cases = [{"kind": kind, "strategies": strategies, "options": {"check": False}} for kind in kinds]
    return {case["kind"]: outcome(case, {shape: mesh})["strategies"] for case in cases}


# --- refusals -----------------------------------------------------------------------------------------------


def _llama(**options: Any) -> Any:
    return make("llama", **options)


def _hooked() -> nn.Module:
    model = _llama()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
    return model


def _patched() -> nn.Module:
    model = _llama()
    before = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: before(x) * 2
    return model


def _subclass() -> nn.Module:
    model = _llama()

    class Doubled(type(model)):  # type: ignore[misc]
        @functools.wraps(type(model).forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.pop("labels", None)
            out = super().forward(*args, **kwargs)
            out.logits = 2 * out.logits
            if labels is not None:
                out.loss = self.loss_function(out.logits, labels, self.config.vocab_size)
            return out

    model.__class__ = Doubled
    return model


class _Scaled(nn.Module):
    """A norm of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(HIDDEN).double()), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (HIDDEN,), 1 + self.weight, self.eps)


def _other_norm(model: Any) -> nn.Module:
    model.model.layers[-1].input_layernorm = _Scaled()
    return model


def _adapter() -> nn.Module:
    model = _llama()

    class LoraLinear(nn.Linear):
        __module__ = "peft.tuners.lora.layer"

    model.model.layers[1].self_attn.q_proj = LoraLinear(16, 16, bias=False).double()
    return model


def _wrapped() -> nn.Module:
    model = _llama()
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    return model


def _quantised() -> nn.Module:
    model = PlainLlama(layers=2).double()
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.requires_grad_(False)
    model.model.layers[1].mlp.down_proj.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)
    return model


def _of(change: Callable[[Any], Any], **options: Any) -> nn.Module:
    model = PlainLlama(layers=2, **options).double()
    change(model)
    return model


def _gates_of_one(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj = nn.Linear(HIDDEN, 20).double()


def _without_gate(model: Any) -> None:
    del model.model.layers[1].mlp.gate_proj


def _extra(model: Any) -> None:
    model.model.layers[1].self_attn.q_norm = nn.LayerNorm(4).double()


def _last_norm(model: Any) -> None:
    model.model.norm = _Scaled()


def _wrong_heads(model: Any) -> None:
    model.model.layers[1].self_attn.num_kv_heads = 2


def _compiled() -> nn.Module:
    model = _llama()
    model.model.layers[1].compile(backend="eager")
    return model


def _custom_attention() -> nn.Module:
    model = _llama()
    model.config._attn_implementation = "mine"
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "hook": (_hooked, "forward hooks"),
    "forward": (_patched, "a forward of its own"),
    "blocks of heads": (lambda: small_models.make_model("codegen"), "does not run under megatron"),
    "another norm of transformers": (
        lambda: _other_norm(_llama()),
        "_Scaled computes with parameters of its own",
    ),
    "another norm": (lambda: _other_norm(PlainLlama(layers=2).double()), "computes something else"),
    "the last norm": (lambda: _of(_last_norm), "computes something else"),
    "adapter": (_adapter, "merge others"),
    "wrapped": (_wrapped, "wrap the layers after parallelize"),
    "quantised": (_quantised, "quantised"),
    "compiled": (_compiled, "compile the blocks after parallelize"),
    "one bias": (lambda: _of(_gates_of_one), "have a bias"),
    "no gate": (lambda: _of(_without_gate), "gate_proj"),
    "extra": (lambda: _of(_extra), "q_norm"),
    "heads": (lambda: _of(_wrong_heads), "features for 4 heads of queries and 2 of keys"),
    "attention": (_custom_attention, "is not a valid attention"),
}


def refusals(mesh: Any, folder: Path) -> list[str]:
    """Return what is wrong with a refusal, or with a model after it: nothing."""
    wrong = []
    tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(0))
    for name, (made, words) in REFUSED.items():
        torch.manual_seed(0)
        model = made()
        given = None if name in ("quantised", "compiled", "no gate", "attention", "heads") else tokens
        before = _state(model, given)
        try:
            parallelize(model, "megatron", mesh)
            wrong.append(f"{name}: taken")
        except MeshweaveError as error:
            if words not in str(error) or "\n" in str(error):
                wrong.append(f"{name}: {error}")
        if not _same(before, _state(model, given)):
            wrong.append(f"{name}: changed")
    return wrong


def _state(model: Any, tokens: Tensor | None) -> tuple[Any, ...]:
    """Return the modules, their attributes and tensors of a model, and what it computes of tokens."""
    modules = [(name, id(child), type(child)) for name, child in model.named_modules()]
    attributes = [sorted(map(str, vars(child))) for child in model.modules()]
    out = None
    if tokens is not None:
        with torch.no_grad():
            out = model(tokens)
            out = getattr(out, "logits", out)
    tensors = [(name, id(tensor)) for name, tensor in model.named_parameters()]
    return modules, attributes, tensors, list(model.state_dict()), out


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    is_same_out = before[-1] is None or torch.equal(before[-1], after[-1])
    return before[:-1] == after[:-1] and is_same_out


# --- features -----------------------------------------------------------------------------------------------


def features(mesh: Any, folder: Path) -> dict[str, str]:
    """Return what is said of features that a parallelised model has not."""
    torch.manual_seed(0)
    module = _llama()
    made = parallelize(module, "megatron", mesh, check=False)
    tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(0))
    tries: dict[str, Callable[[], Any]] = {
        "push_to_hub": lambda: module.push_to_hub("x"),
        "resize_token_embeddings": lambda: module.resize_token_embeddings(30),
        "add_adapter": lambda: module.add_adapter(None),
        "past_key_values": lambda: module(tokens, past_key_values=object()),
        "inputs_embeds": lambda: module(inputs_embeds=torch.zeros(2, 8, 16)),
        "use_cache": lambda: module(tokens, use_cache=True),
        "output_attentions": lambda: module(tokens, output_attentions=True),
        "output_hidden_states": lambda: module(tokens, output_hidden_states=True),
        "states by the config": lambda: _with_states(module)(tokens),
        "return_dict": lambda: module(tokens, return_dict=False),
        "unknown": lambda: module(tokens, lables=tokens),
        "labels of another shape": lambda: module(tokens, labels=tokens[:, 1:]),
        "labels and targets": lambda: module(tokens, labels=tokens, targets=tokens),
        "deepcopy": lambda: copy.deepcopy(module),
        "deepcopy of the model": lambda: copy.deepcopy(made),
        "pickle": lambda: pickle.dumps(module),
        "save": lambda: torch.save(module, folder / f"x{dist.get_rank()}.pt"),
        "custom loss": lambda: _with_loss(module)(tokens, labels=tokens),
        "inner": lambda: module.model(tokens),
        "inner save": lambda: module.model.save_pretrained(folder),
        "ddp": lambda: nn.parallel.DistributedDataParallel(module),
        "ddp around": lambda: nn.parallel.DistributedDataParallel(made),
        "fsdp around": lambda: fully_shard(made),
        "taken for a module": lambda: torch.optim.SGD(made.parameters()),
        "lora": lambda: _with_lora(module),
        "lora around": lambda: _with_lora(made),
        "again": lambda: parallelize(module, "megatron", mesh),
        "another norm": lambda: _with_norm(module, tokens),
    }
    said = {}
    for name, do in tries.items():
        try:
            do()
            said[name] = "nothing"
        except MeshweaveError as error:
            said[name] = str(error)
        except Exception as error:
            said[name] = f"RAW {type(error).__name__}: {error}"
    return said


class _Tuner(nn.Module):
    """What PEFT does first with a model that gets an adapter (`BaseTuner.__init__` of its 0.21)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.targets = [name for name, _ in model.named_modules()]
        self.model = model
        if not hasattr(self, "peft_config"):
            raise RuntimeError("adapters were put in")
        self.peft_config["default"] = object()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def _with_lora(model: Any) -> None:
    """Put adapters into a model: with PEFT where it is installed."""
    if importlib.util.find_spec("peft") is None:
        _Tuner(model)
    else:
        import peft

        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def _with_norm(module: Any, tokens: Tensor) -> None:
    """Call a model in which a module was put around a norm, as adapters do."""
    before = module.model.norm
    module.model.norm = nn.Sequential(before)
    try:
        module(tokens, targets=tokens)
    finally:
        module.model.norm = before


def _with_states(module: Any) -> Any:
    def call(tokens: Tensor) -> Any:
        module.config.output_hidden_states = True
        try:
            return module(tokens)
        finally:
            module.config.output_hidden_states = False

    return call


def _with_loss(module: Any) -> Any:
    module.loss_function = lambda *args, **kwargs: torch.zeros(())
    return module


def harmless(mesh: Any, folder: Path) -> dict[str, float]:
    """Return how far losses and gradients are off where arguments and settings change nothing."""
    torch.manual_seed(0)
    module: Any = _subclass()
    whole = copy.deepcopy(module)
    tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(0))
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[0, 6:], labels[0, 6:] = 0, -100
    module.gradient_checkpointing_enable()
    parallelize(module, "megatron", mesh, check=False)
    off = {"enabled before": float(not all(block.gradient_checkpointing for block in module.model.layers))}
    for name, given in {
        "ones": {"attention_mask": torch.ones_like(tokens), "use_cache": False, "labels": tokens},
        "right": {"attention_mask": mask, "labels": labels, "return_dict": True},
        "positions": {"position_ids": torch.arange(8)[None], "labels": tokens, "logits_to_keep": 0},
    }.items():
        off[name] = _difference(module, whole, tokens, given)
    for kwargs in ({}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}):
        module.gradient_checkpointing_enable(**kwargs)
        off[f"checkpointing {sorted(kwargs)}"] = _difference(module, whole, tokens, {"labels": tokens})
    runs: list[int] = []
    layers = list(module.model.layers)
    layers[0].mlp.forward = _counted(layers[0].mlp.forward, runs)
    module(tokens, labels=tokens).loss.backward()
    off["calls of a layer"] = len(runs)
    module.gradient_checkpointing_disable()
    runs.clear()
    module(tokens, labels=tokens).loss.backward()
    off["calls without"] = len(runs)
    module.gradient_checkpointing_enable(every_n_layers=2)
    off["every layer"] = float([each.gradient_checkpointing for each in layers] != [True, False])
    module.gradient_checkpointing_disable()
    module.model.layers[0] = checkpoint_wrapper(layers[0])
    runs.clear()
    off["wrapped"] = _difference(module, whole, tokens, {"labels": tokens})
    off["calls of a wrapped layer"] = len(runs)
    return off


def _counted(call: Callable[..., Any], runs: list[int]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        runs.append(1)
        return call(*args)

    return counted


def _difference(module: Any, whole: Any, tokens: Tensor, given: dict[str, Any]) -> float:
    for model in (module, whole):
        model.zero_grad()
        with small_models.KeepDoubles():
            model.last = model(tokens, **given).loss
            model.last.backward()
    worst = abs(float(module.last) - float(whole.last))
    expected = dict(whole.named_parameters())
    for name, parameter in module.named_parameters():
        wanted = expected[name.replace("_checkpoint_wrapped_module.", "")].grad
        worst = max(worst, float((parameter.grad.full_tensor() - wanted).abs().max()))
    return worst


def one_optimizer(mesh: Any, folder: Path) -> str:
    """Return what is said of one optimizer for several models that lie elsewhere on each rank: nothing."""
    tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(0))
    parameters, models, others = [], [], []
    for number in range(6):
        torch.manual_seed(number)
        models.append(parallelize(PlainLlama(layers=1 + number % 2), "megatron", mesh, check=False))
        parameters += models[-1].module.parameters()
        others.append([PlainLlama(layers=1) for _ in range((number * 5 + dist.get_rank() * 3) % 7)])
        del others[number // 2 :: 2]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for model in models:
        model.loss(tokens, tokens).backward()
    try:
        optimizer.step()
    except MeshweaveError as error:
        return str(error)
    return ""


# --- models made on the meta device -------------------------------------------------------------------------


def meta(mesh: Any, folder: Path) -> dict[str, Any]:
    """Return losses of models made without memory and filled, and that of the original."""
    torch.manual_seed(0)
    whole = _llama(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0})
    save_weights(whole, folder / "weights")
    tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = float(whole(tokens, labels=tokens).loss)
    losses = []
    for kind in ("rebuilt", "no memory", "not rebuilt"):  # of which the first is proved, too
        with torch.device("meta"):
            empty = type(whole)._from_config(whole.config).double()
        if kind == "not rebuilt":
            empty.model.rotary_emb.config = None
        made = parallelize(empty, "megatron", mesh, check=kind == "rebuilt")
        if kind == "no memory":
            load_weights(made.module, folder / "weights")
        else:
            made.module.to_empty(device="cpu")
            for buffer in made.module.buffers():
                buffer.data.fill_(9.0)
            load_weights(made.module, folder / "weights")
        losses.append(float(made.module(tokens, labels=tokens).loss.detach()))
    return {"expected": expected, "losses": losses}


class _Slope(nn.Module):
    """An activation with a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.full((), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x)


def meta_activation(mesh: Any, folder: Path) -> list[str]:
    """Return what is said of an activation with a buffer made without memory, before and after it is filled."""
    with torch.device("meta"):
        empty = PlainLlama()
        empty.model.layers[0].mlp.act_fn = _Slope()
    made = parallelize(empty, "megatron", mesh, check=False)
    made.module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.fill_(0.1)
    tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(0))
    said = []
    for _ in range(2):
        try:
            made.loss(tokens, tokens)
            said.append("")
        except MeshweaveError as error:
            said.append(str(error))
        with torch.no_grad():
            made.module.model.layers[0].mlp.act_fn.slope.fill_(0.1)
    return said


def plain_words(mesh: Any, folder: Path) -> list[str]:
    """Return that a plain model around transformers' layers is refused, and a plain one by names is not."""
    model = nn.Module()
    model.model, model.lm_head = _llama().model, nn.Linear(16, 24, bias=False).double()
    said = []
    for module in (model, PlainGpt(layers=1)):
        try:
            said.append(parallelize(module, "megatron", mesh, check=False).report.model)
        except MeshweaveError as error:
            said.append(str(error))
    return said
