"""The state dict of a Llama: its tensors by name, and their layouts in training and in serving.

Names and shapes are those of `LlamaForCausalLM` in Hugging Face's transformers (models/llama/modeling_llama.py):
the weight of a linear layer is (out_features, in_features).

A trainer has a mesh of axes (fsdp, tp), a server one of (replica, tp). Along tp, the projections
into heads and into the FFN are sharded by rows, `o_proj` and `down_proj` by columns, embeddings by the vocabulary,
and norms not at all (Megatron-LM; PyTorch's plan of ColwiseParallel and RowwiseParallel). A trainer also shards
the rows of every tensor along fsdp. If tp shards rows too, fsdp shards those of each tp rank, which torch's
`fully_shard` calls `_StridedShard(0, split_factor=tp)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.base.errors import DescriptionError, LayoutError, UnsupportedError
from meshweave.base.limits import MODEL_TENSORS
from meshweave.describe.layout import Layout, Placement, Replicate, Shard, StridedShard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.model.transformer import Transformer

ParameterSharding = Literal["rows", "columns", "whole"]
"""The dim that tensor parallelism shards: dim 0, dim 1 or none."""

TRAINER_AXES = ("fsdp", "tp")
SERVER_AXES = ("replica", "tp")


@dataclass(frozen=True)
class Parameter:
    """A tensor of a state dict: its name, its global shape, and the dim that tensor parallelism shards."""

    name: str
    shape: tuple[int, ...]
    sharding: ParameterSharding


def llama_parameters(model: Transformer) -> tuple[Parameter, ...]:
    """Return the parameters of a Llama of these sizes, in the order of its modules; without a head if it is tied.

    Biases, which some of its kin have, are left out.

    Raises:
        UnsupportedError: the FFN is not gated, layers differ or have experts, or the module of a weight is not
            known.
        DescriptionError: the vocabulary is unknown, or there are more than `base.limits.MODEL_TENSORS` tensors.
    """
    if not model.gated_ffn:
        raise UnsupportedError(
            f"model {model.name}: its FFN is not gated; only the state dicts of Llama and its kin are known"
        )
    if model.is_routed or len(model.layers) > 1:
        what = "it has experts" if model.is_routed else "its layers differ"
        raise UnsupportedError(
            f"model {model.name}: {what}; only the state dicts of Llama and its kin are known"
        )
    if model.vocab_size is None:
        raise DescriptionError(f"model {model.name}: vocab_size is missing, which its embedding needs")
    if any(not weight.modules for weight in model.layer.parameters):
        raise UnsupportedError(
            f"model {model.name}: the names of its norms after parts are not known; give a Llama"
        )
    rows: list[tuple[str, tuple[int, ...], ParameterSharding]] = []
    for weight in sorted(model.layer.parameters, key=lambda weight: weight.kind == "norm"):
        for module, size in weight.modules:
            if weight.kind == "norm":
                rows.append((module, (size,), "whole"))
            else:
                sharding: ParameterSharding = "rows" if weight.sides[0].dim == "hidden" else "columns"
                rows.append((module, (size, weight.sides[0].size), sharding))
    if (count := len(rows) * model.num_layers + 3) > MODEL_TENSORS.most:
        raise DescriptionError(f"model {model.name}: {MODEL_TENSORS.refusal(count)}")
    table = model.vocab_size, model.hidden
    return (
        Parameter("model.embed_tokens.weight", table, "rows"),
        *(
            Parameter(f"model.layers.{number}.{name}.weight", shape, kind)
            for number in range(model.num_layers)
            for name, shape, kind in rows
        ),
        Parameter("model.norm.weight", (model.hidden,), "whole"),
        *(() if model.tied_embeddings else (Parameter("lm_head.weight", table, "rows"),)),
    )


def trainer_layout(parameter: Parameter, mesh: Mesh) -> Layout:
    """Return the layout of a parameter under FSDP and tensor parallelism, on a mesh (fsdp, tp).

    Raises:
        LayoutError: the mesh has not two axes. Their names are not checked.
    """
    _check(mesh, "trainer", TRAINER_AXES)
    placements: dict[ParameterSharding, tuple[Placement, Placement]] = {
        "rows": (StridedShard(0, mesh.shape[1]), Shard(0)),
        "columns": (Shard(0), Shard(1)),
        "whole": (Shard(0), Replicate()),
    }
    return Layout(mesh, placements[parameter.sharding])


def server_layout(parameter: Parameter, mesh: Mesh) -> Layout:
    """Return the layout of a parameter in replicas of a tensor-parallel server, on a mesh (replica, tp).

    Raises:
        LayoutError: the mesh has not two axes. Their names are not checked.
    """
    _check(mesh, "server", SERVER_AXES)
    placements: dict[ParameterSharding, Placement] = {
        "rows": Shard(0),
        "columns": Shard(1),
        "whole": Replicate(),
    }
    return Layout(mesh, (Replicate(), placements[parameter.sharding]))


def _check(mesh: Mesh, owner: str, axes: tuple[str, str]) -> None:
    if len(mesh.shape) != 2:
        raise LayoutError(
            f"mesh {mesh.name}: a {owner} has two axes, {' and '.join(axes)}, not {len(mesh.shape)}"
        )
