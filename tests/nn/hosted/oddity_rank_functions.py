"""What ranks do in tests of legal calls and configs that few models have: rows without keys, one head of keys."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import small_models
import torch
import torch.distributed as dist
from hosted_rank_functions import worst
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.parallelize import parallelize

NEXT_TO_NOTHING = 1e-13
"""A probability of dropout by which nothing is dropped, and the code that drops runs."""
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 8,
}
SCALED = {
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        "max_position_embeddings": 8,
    },
    "longrope": {"rope_parameters": _LONG},
}


def tried(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each of the payload's functions gives, by its name, the type of model and the strategy."""
    torch.set_num_threads(1)
    said: dict[str, Any] = {}
    with small_models.quiet():
        for name, kind, strategy in payload["cases"]:
            key = " ".join((name, kind, strategy))
            try:
                with small_models.KeepDoubles():
                    said[key] = globals()[name](kind, strategy)
            except MeshweaveError as error:
                said[key] = f"{type(error).__name__}: {error}"
    return said


def _parallel(whole: Any, strategy: str) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize(copy.deepcopy(whole), strategy, mesh)


def _off(whole: Any, made: Any, **given: Any) -> list[float]:
    """Return how far the loss of a call is from the model's own, and gradients."""
    whole.zero_grad()
    made.module.zero_grad()
    wanted = whole(use_cache=False, **given).loss
    wanted.backward()
    loss = made.module(use_cache=False, **given).loss
    loss.backward()
    return [abs(float(loss) - float(wanted)), worst(made.module, whole)]


def _padded(tokens: Tensor) -> dict[str, Tensor]:
    """Return a mask of rows that are padded left, and labels."""
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[2, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def unseen(kind: str, strategy: str) -> list[float]:
    """Return how far dropout of attention is from none, of next to nothing, where some queries see no key."""
    whole = small_models.make_model(kind)
    dropping = copy.deepcopy(whole)
    for child in dropping.modules():
        if hasattr(child, "attention_dropout"):
            child.attention_dropout = NEXT_TO_NOTHING
    made = _parallel(dropping, strategy)
    return _off(whole, made, **_padded(small_models.batch()[0]))


def masked(kind: str, strategy: str) -> list[float]:
    """Return how far a call with padding is from the model's own."""
    whole = small_models.make_model(kind)
    return _off(whole, _parallel(whole, strategy), **_padded(small_models.batch()[0]))


def reaching(kind: str, strategy: str) -> dict[str, list[float]]:
    """Return how far angles are from the model's own that follow from the last position, which one rank has."""
    off = {}
    tokens = small_models.batch()[0]
    positions = torch.arange(16).repeat(4, 1)
    positions[:2] = torch.arange(4).repeat(4)
    for name, changes in SCALED.items():
        whole = small_models.make_model(kind, changes)
        made = _parallel(whole, strategy)
        for length in (16, 6, 12):
            given = {} if strategy == "ring_attention" else {"position_ids": positions[:, -length:]}
            own = tokens[:, :length]
            off[f"{name} {length}"] = _off(whole, made, input_ids=own, labels=own, **given)
    return off


def one_head_of_keys(kind: str, strategy: str) -> list[float]:
    """Return how far a model with a norm of its one head of keys is from its own."""
    whole = small_models.make_model(kind, {"num_key_value_heads": 1})
    tokens = small_models.batch()[0]
    return _off(whole, _parallel(whole, strategy), input_ids=tokens, labels=tokens)


def set_afterwards(kind: str, strategy: str) -> list[float]:
    """Return how far a model is from its own of which a module gets another number after `parallelize`."""
    whole: Any = small_models.make_model(kind)
    made = _parallel(whole, strategy)
    tokens = small_models.batch()[0]
    places = {"gpt2": ("transformer.ln_f", "eps"), "gpt_oss": ("model.layers.0.mlp.experts", "alpha")}
    path, name = places.get(kind, ("model.norm", "variance_epsilon"))
    for module in (whole, made.module):
        setattr(module.get_submodule(path), name, 0.5)
    return _off(whole, made, input_ids=tokens, labels=tokens)


def low_rank(kind: str, strategy: str) -> list[float]:
    """Return how far a model is from its own of which two linear layers are in the place of one."""
    whole: Any = small_models.make_model(kind)
    mlp = whole.model.layers[0].mlp
    inner, hidden = mlp.up_proj.weight.shape
    parts = [torch.nn.Linear(hidden, 8, bias=False), torch.nn.Linear(8, inner, bias=False)]
    mlp.up_proj = torch.nn.Sequential(*parts).double()
    tokens = small_models.batch()[0]
    return _off(whole, _parallel(whole, strategy), input_ids=tokens, labels=tokens)


def packed(kind: str, strategy: str) -> list[float]:
    """Return how far documents in one row, in a call without a cache, are from the model's own."""
    whole = small_models.make_model(kind)
    tokens = small_models.batch()[0]
    positions = torch.arange(16).remainder(6).expand(4, -1)
    return _off(whole, _parallel(whole, strategy), input_ids=tokens, labels=tokens, position_ids=positions)


def generated(kind: str, strategy: str) -> bool:
    """Return whether tokens are those of the model, which is parallelised where no gradients are computed."""
    whole = small_models.make_model(kind).eval()
    tokens = small_models.batch()[0]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        made = _parallel(whole, strategy)
        return torch.equal(
            whole.generate(tokens, **options),
            made.module.generate(tokens, **options),  # type: ignore[operator]
        )


def too_long(kind: str, strategy: str) -> None:
    """Give a model more tokens than it has learned positions."""
    small = {"n_positions": 16, "max_position_embeddings": 16}
    made = _parallel(small_models.make_model(kind, small), strategy)
    tokens = torch.zeros(4, 20, dtype=torch.int64)
    made.loss(tokens, tokens)


def scaled(kind: str, strategy: str) -> list[float]:
    """Return how far rows of the embedding in bfloat16 are from the model's own, and its factor."""
    whole = small_models.make_model(kind, {"scale_embedding": True}).to(torch.bfloat16)
    made = _parallel(whole, strategy)
    rows: list[Tensor] = []
    made.embedding.register_forward_hook(lambda _, __, out: rows.append(out))
    tokens = small_models.batch()[0]
    made.loss(tokens, tokens)
    wanted: Any = whole.get_input_embeddings()  # type: ignore[operator]
    return [float((rows[0] - wanted(tokens)).abs().max()), made.embedding.scale]
