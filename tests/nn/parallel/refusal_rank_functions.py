"""What ranks do in tests of what models do not take: tokens, targets, shared weights, options of embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import reference_models
import torch
import torch.distributed as dist
from plain_models import HIDDEN, WORDS, PlainGpt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parametrizations

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize

STRATEGIES = ("megatron", "data_parallel", "zero3")


def refuse(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of tokens and of models, and differences of gradients, by name."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return {name: globals()[f"_{name}"](mesh) for name in payload["names"]}


def _make(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return reference_models.make("plain gpt", **options)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, WORDS, (4, 8), generator=generator) for _ in range(2))
    return tokens, targets


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except MeshweaveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _with(given: Tensor, value: int) -> Tensor:
    given = given.clone()
    given[1, 2] = value
    return given


def _tokens(mesh: DeviceMesh) -> dict[str, list[str]]:
    """What is said of tokens and targets that are out of range, of other kinds or too many, by strategy."""
    tokens, targets = _batch()
    cases = (
        (_with(tokens, 99), targets), (_with(tokens, -1), targets), (tokens, _with(targets, WORDS)),
        (tokens, _with(targets, -1)), (tokens.float(), targets), (tokens, targets[:, :4]),
        (tokens, targets.float()),
        (tokens.repeat(1, 5), targets.repeat(1, 5)), (tokens[:0], targets[:0]), (tokens[0], targets[0]),
        (_with(tokens, 99), None), (tokens.to("meta"), targets), (tokens, targets.to("meta")),
        (tokens, _with(targets, -100)),
    )  # fmt: skip
    said = {}
    for strategy in STRATEGIES:
        made = parallelize(_make(is_tied=strategy != "megatron"), strategy, mesh, check=False)
        said[strategy] = [_said(lambda t=t, y=y, made=made: made.forward(t, targets=y)) for t, y in cases]
    return said


def _nothing_to_learn(mesh: DeviceMesh) -> list[str]:
    """The loss where no token has a target, here and of torch."""
    tokens, targets = _batch()
    targets = torch.full_like(targets, -100)
    whole = _make()
    expected = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
    said = [str(expected.item())]
    for strategy in ("megatron", "data_parallel"):
        made = parallelize(copy.deepcopy(whole), strategy, mesh, check=False)
        losses = [made.loss(tokens, targets) for _ in range(2)]  # the second call compares less
        losses[-1].backward()
        said += [str(loss.item()) for loss in losses]
    return said


def _models(mesh: DeviceMesh) -> dict[str, list[Any]]:
    """What is said of models whose parameters cannot be taken over, and whether they are as they were."""
    answers = {}
    for name, change in CHANGES.items():
        model = _make(layers=2)
        change(model)
        before = [type(each) for each in model.modules()], [id(each) for each in model.parameters()]
        said = _said(lambda model=model: parallelize(model, "megatron", mesh))
        after = [type(each) for each in model.modules()], [id(each) for each in model.parameters()]
        answers[name] = [said, before == after]
    return answers


def _layer_twice(model: Any) -> None:
    model.transformer.h[1] = model.transformer.h[0]


def _module_twice(model: Any) -> None:
    model.transformer.h[1].mlp.c_fc = model.transformer.h[0].mlp.c_fc


def _parameter_twice(model: Any) -> None:
    model.transformer.h[1].ln_1.weight = model.transformer.h[0].ln_2.weight


def _three_names(model: Any) -> None:
    model.transformer.wpe.weight = model.lm_head.weight


def _one_memory(model: Any) -> None:
    first, second = model.transformer.h[0].attn.c_proj, model.transformer.h[1].attn.c_proj
    second.weight.data = first.weight.data


def _overlapping_memory(model: Any) -> None:
    both = torch.randn(HIDDEN + 4, HIDDEN, dtype=torch.float64)
    first, second = model.transformer.h[0].attn.c_proj, model.transformer.h[1].attn.c_proj
    first.weight.data, second.weight.data = both[:HIDDEN], both[4:]


def _tied_by_memory(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.transformer.wte.weight.data)


def _bias_of_a_tied_head(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.randn(WORDS, dtype=torch.float64))


def _parametrized(model: Any) -> None:
    parametrizations.weight_norm(model.transformer.h[1].mlp.c_fc)


def _hooked(model: Any) -> None:
    model.transformer.ln_f.weight.register_hook(lambda grad: 2 * grad)


def _with_gradient(model: Any) -> None:
    model(_batch()[0]).sum().backward()


def _max_norm(model: Any) -> None:
    model.transformer.wte.max_norm = 1.0


def _scaled_by_frequency(model: Any) -> None:
    model.transformer.wte.scale_grad_by_freq = True


def _sparse(model: Any) -> None:
    model.transformer.wte.sparse = True


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__.removeprefix("_"): change
    for change in (
        _layer_twice, _module_twice, _parameter_twice, _three_names, _one_memory, _overlapping_memory,
        _tied_by_memory, _bias_of_a_tied_head, _parametrized, _hooked, _with_gradient, _max_norm,
        _scaled_by_frequency, _sparse,
    )
}  # fmt: skip


def _worst(whole: nn.Module, made: Any) -> float:
    """Train a step of both; the largest difference of a gradient, infinite where just one has none."""
    tokens, targets = _batch()
    nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten()).backward()
    made.step(tokens, targets)
    worst = 0.0
    expected = dict(whole.named_parameters())
    for name, parameter in made.module.named_parameters():
        wanted = expected[name].grad
        assert parameter.requires_grad == expected[name].requires_grad, name
        if (parameter.grad is None) != (wanted is None):
            return float("inf")
        if wanted is not None:
            worst = max(worst, float((parameter.grad.full_tensor() - wanted).abs().max()))
    return worst


def _padding(mesh: DeviceMesh) -> dict[str, float]:
    """Gradients of tables with a word that pads, in turn on each rank, tied and not."""
    worst = {}
    for strategy in (*STRATEGIES, "megatron_sp"):
        for padding in (3, WORDS - 2):
            for is_tied in (True, False):
                whole = _make(is_tied=is_tied)
                whole.transformer.wte.padding_idx = padding
                made = parallelize(copy.deepcopy(whole), strategy, mesh, check=False)
                worst[f"{strategy} {padding} {is_tied}"] = _worst(whole, made)
    return worst


def _frozen(mesh: DeviceMesh) -> dict[str, float]:
    """Gradients where parameters are frozen on all ranks, by which of them and strategy."""
    worst = {}
    for strategy in STRATEGIES:
        for pattern in ("wte", "bias", "h.0", "mlp.c_fc.weight", "ln_", "lm_head"):
            whole = _make(layers=2, is_tied=False)
            for name, parameter in whole.named_parameters():
                parameter.requires_grad_(pattern not in name)
            made = parallelize(copy.deepcopy(whole), strategy, mesh, check=False)
            worst[f"{strategy} {pattern}"] = _worst(whole, made)
    return worst


def _alike(mesh: DeviceMesh) -> list[str]:
    """What is said of two steps of ranks that are alike, compared whole each time, by strategy: nothing."""
    said = []
    tokens, targets = _batch()
    for strategy, shape in ALIKE:
        for kind in ("plain gpt", "plain llama"):
            torch.manual_seed(0)
            names = ("depth", "row", "col")[-len(shape) :]
            own = init_device_mesh("cpu", shape, mesh_dim_names=names)
            made = parallelize(reference_models.make(kind), strategy, own, debug_every=1)
            optimizer = torch.optim.AdamW(made.module.parameters(), lr=0.01)

            def train(made: Any = made, optimizer: torch.optim.Optimizer = optimizer) -> None:
                for _ in range(3):
                    made.step(tokens, targets)
                    torch.nn.utils.clip_grad_norm_(made.module.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()

            if words := _said(train):
                said.append(f"{strategy} {kind}: {words}")
    return said


ALIKE: tuple[tuple[str, tuple[int, ...]], ...] = (
    *((name, (4,)) for name in ("megatron", "megatron_sp", "data_parallel", "zero1", "zero2", "zero3")),
    *((name, (4,)) for name in ("all_to_all_heads", "ring_attention")),
    *((name, (2, 2)) for name in ("atp", "collective_block", "meshslice_block", "wang_block", "summa_block")),
    ("25d_block", (1, 2, 2)),
)


def _stale_optimizer(mesh: DeviceMesh) -> str:
    """What is said of an optimizer that was made before the model was parallelised, at its first step."""
    model = PlainGpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = parallelize(model, "megatron", mesh, check=False)
    made.step(*_batch())
    return _said(optimizer.step)


def _norm_class(mesh: DeviceMesh) -> str:
    """What is said where the forward of a class of norms is replaced after `parallelize`, as a patch does."""
    made = parallelize(_make(), "megatron", mesh, check=False)
    with mock.patch.object(nn.LayerNorm, "forward", lambda self, x: 2 * x):
        return _said(lambda: made.loss(*_batch()))


def _meta(mesh: DeviceMesh) -> list[str]:
    """What is said of a call of a model without memory, by strategy."""
    said = []
    for strategy in STRATEGIES:
        with torch.device("meta"):
            model = reference_models.make("gpt2")
        made = parallelize(model, strategy, mesh, check=False)
        said.append(_said(lambda made=made: made.loss(*_batch())))  # type: ignore[misc]
    return said


def _others(mesh: DeviceMesh) -> dict[str, str]:
    """What is said of models of transformers that are none of causal language, by class."""
    import transformers

    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama, bert = (
        getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=0) for kind in ("Llama", "Bert")
    )
    made = (
        transformers.LlamaForSequenceClassification(llama), transformers.LlamaModel(llama),
        transformers.BertForMaskedLM(bert),
    )  # fmt: skip
    return {type(model).__name__: _said(lambda m=model: parallelize(m, "megatron", mesh)) for model in made}  # type: ignore[misc]


def _without_loss(mesh: DeviceMesh) -> list[str]:
    """What a rank says whose own layer fails in the third call, and what the others say of it."""
    tokens, targets = _batch()
    made = parallelize(_make(), "data_parallel", mesh, check=False)
    for _ in range(2):
        made.step(tokens, targets)
    if dist.get_rank() == 1:
        made.norm.register_forward_pre_hook(_fail)
    try:
        made.step(tokens, targets)
    except ArithmeticError as error:
        return [str(error)]
    except MeshweaveError as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def _inside(mesh: DeviceMesh) -> list[str]:
    """What is said of tokens that differ where another model is called inside of the call."""
    tokens, targets = _batch()
    outer, inner = (parallelize(_make(), "data_parallel", mesh, check=False) for _ in range(2))
    for made in (outer, inner):
        made.step(tokens, targets)
    outer.norm.register_forward_pre_hook(lambda *_: (inner.loss(tokens, targets), None)[1])
    said = [_said(lambda: outer.step(tokens, targets))]
    given = _with(tokens, (int(tokens[1, 2]) + 1) % WORDS) if dist.get_rank() == 1 else tokens
    return [*said, _said(lambda: outer.step(given, targets))]


def _fail(*given: Any) -> None:
    raise ArithmeticError("this layer fails")
