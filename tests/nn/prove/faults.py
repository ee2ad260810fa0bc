"""Models that were parallelised rightly, and with one fault each: by this library, by torch's styles, by FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from plain_models import HIDDEN, PlainGpt, PlainLlama
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from meshweave.nn.parallel.model import ParallelModel
from meshweave.nn.parallel.parallelize import parallelize

Made = tuple[nn.Module, Any, dict[str, Any]]
"""A model, what it was made, and more arguments of `prove`."""


def llama(mesh: DeviceMesh, strategy: str = "megatron") -> tuple[PlainLlama, ParallelModel]:
    torch.manual_seed(3)
    model = PlainLlama(layers=2)
    return model, parallelize(copy.deepcopy(model), strategy, mesh, check=False)


def gpt(mesh: DeviceMesh, strategy: str = "megatron", **options: Any) -> tuple[PlainGpt, ParallelModel]:
    torch.manual_seed(3)
    model = PlainGpt(layers=2, **options)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.3)
    return model, parallelize(copy.deepcopy(model), strategy, mesh, check=False)


class Wrapped:
    """Something callable whose result is changed, and that is the same else."""

    def __init__(self, inner: Any, change: Callable[[Any], Any]) -> None:
        self.inner, self.change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any) -> Any:
        return self.change(self.inner(*args))


def _change(module: nn.Module, change: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda _, __, out: change(out))


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def _next_ranks(tensor: Tensor) -> None:
    """Every rank takes the shard of the next one."""
    parts = [torch.empty_like(_local(tensor)) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, _local(tensor).contiguous())
    _local(tensor).copy_(parts[(dist.get_rank() + 1) % len(parts)])


# --- of this library ------------------------------------------------------------------------------------------


def shards_in_another_order(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    _next_ranks(made.module.model.layers[1].mlp.up_proj.weight)
    return model, made, {}


def one_weight_of_one_rank(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    if dist.get_rank() == 1:
        _local(made.module.model.layers[0].self_attn.k_proj.weight)[1, 2] += 1e-3
    return model, made, {}


def a_replica_that_drifts(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    if dist.get_rank() == 1:
        _local(made.module.model.norm.weight)[3] += 1e-4
    return model, made, {}


def another_epsilon(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.blocks[1].feed_forward_norm.eps = 1e-6
    return model, made, {}


def gains_that_are_not_summed(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh, "megatron_sp")
    norm = made.blocks[1].attention_norm
    object.__setattr__(norm, "_gains", lambda: (norm.weight.to_local(), None))
    return model, made, {}


def another_scale(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    core = made.blocks[0].core
    core.heads = replace(core.heads, scale=core.heads.scale * 1.05)
    return model, made, {}


def a_window(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.blocks[1].core.heads = replace(made.blocks[1].core.heads, window=9)
    return model, made, {}


def no_rotary(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.rotary = None
    return model, made, {}


def another_rotary_base(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    rotary = made.rotary
    made.rotary = Wrapped(rotary, lambda pair: tuple(each.roll(1, -1) for each in pair))
    return model, made, {}


def another_activation(mesh: DeviceMesh) -> Made:
    model, made = gpt(mesh)
    object.__setattr__(made.blocks[0], "activation", nn.GELU(approximate="tanh"))
    return model, made, {}


def a_loss_of_twice_the_size(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.vocabulary = Wrapped(made.vocabulary, lambda loss: 2 * loss)
    return model, made, {}


def gradients_scaled_by_ranks(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.module.lm_head.weight.register_hook(lambda grad: grad * dist.get_world_size())
    return model, made, {}


def dropout_that_is_active(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    _change(made.blocks[0], lambda x: nn.functional.dropout(x, 0.2))
    return model, made, {}


def a_bias_on_every_rank(mesh: DeviceMesh) -> Made:
    model, made = gpt(mesh)
    (linear,) = made.blocks[0].out_of_attention.linears
    biases = linear.biases
    object.__setattr__(linear, "biases", lambda own: [dist.get_world_size() * b for b in biases(own)])
    return model, made, {}


def a_multiplier(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    _change(made.embedding, lambda x: 3 * x)
    return model, made, {}


def a_soft_cap(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.vocabulary.whole = Wrapped(made.vocabulary.whole, lambda logits: logits.tanh())
    return model, made, {}


def positions_that_are_shifted(mesh: DeviceMesh) -> Made:
    model, made = gpt(mesh)
    _change(made.positions, lambda rows: rows.roll(1, 1))
    return model, made, {}


def a_frozen_weight(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.module.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    return model, made, {}


def a_mask_that_is_missing(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    core = made.blocks[0].core

    def attend(q: Tensor, k: Tensor, v: Tensor, rotary: Any, *_: Any) -> Tensor:
        width = core.heads.width
        q, k, v = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    made.blocks[0].core = attend
    return model, made, {}


def a_residual_left_out(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    block = made.blocks[1]
    block.after_attention = Wrapped(block.after_attention, lambda x: 0.5 * x)
    return model, made, {}


# --- of torch's styles ----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """A norm and two products, with a residual around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down, self.last = nn.Linear(4 * HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(self.up(self.norm(x)).relu()))


def _styled(mesh: DeviceMesh, **styles: Any) -> tuple[Mlp, nn.Module]:
    torch.manual_seed(5)
    model = Mlp()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), **styles}
    return model, parallelize_module(copy.deepcopy(model), mesh, {k: v for k, v in plan.items() if v})


def a_product_that_is_not_summed(mesh: DeviceMesh) -> Made:
    model, made = _styled(mesh, down=None)
    _shard_down(made, mesh)
    return model, made, {}


def _shard_down(made: nn.Module, mesh: DeviceMesh, sums: bool = False) -> None:
    """Give each rank its columns of `down`, and the whole bias, as a plain tensor in its forward."""
    down = made.down
    down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), mesh, [Shard(1)]))

    def forward(x: Tensor) -> Tensor:
        own = nn.functional.linear(x, down.weight.to_local(), down.bias)
        return DTensor.from_local(own, mesh, [Partial()], run_check=False).full_tensor() if sums else own

    down.forward = forward


def a_bias_before_the_sum(mesh: DeviceMesh) -> Made:
    model, made = _styled(mesh, down=None)
    _shard_down(made, mesh, sums=True)
    return model, made, {}


def columns_swapped(mesh: DeviceMesh) -> Made:
    model, made = _styled(mesh)
    _next_ranks(made.up.weight)
    return model, made, {}


def a_gradient_that_is_not_summed(mesh: DeviceMesh) -> Made:
    """The input of a product by columns gets a gradient from each rank, whose sum is left out."""
    model, made = _styled(mesh, up=None)
    up = made.up
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), mesh, [Shard(0)]))
    up.bias = nn.Parameter(distribute_tensor(up.bias.detach(), mesh, [Shard(0)]))
    up.forward = lambda x: nn.functional.linear(x, up.weight.to_local(), up.bias.to_local())
    return model, made, {}


def a_norm_on_parts_of_sequences(mesh: DeviceMesh) -> Made:
    """A norm that each rank computes for its tokens, whose gain is no DTensor."""
    model, made = _styled(mesh)
    norm = made.norm

    def forward(x: Tensor) -> Tensor:
        own = x.chunk(mesh.size(), 1)[mesh.get_local_rank()]
        out = nn.functional.layer_norm(own, (HIDDEN,), norm.weight, norm.bias, norm.eps)
        return DTensor.from_local(out, mesh, [Shard(1)], run_check=False).full_tensor()

    norm.forward = forward
    return model, made, {}


# --- of FSDP2 -------------------------------------------------------------------------------------------------


def _fully(mesh: DeviceMesh, whole: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    model = PlainLlama(layers=2)
    made = copy.deepcopy(model)
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    return model, fully_shard(made, mesh=mesh) if whole else made


def gradients_of_copies_that_are_not_summed(mesh: DeviceMesh) -> Made:
    both = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("copies", "shards"))
    model, made = _fully(both)
    made.set_requires_all_reduce(False)
    return model, made, {}


def gradients_summed_by_hand_again(mesh: DeviceMesh) -> Made:
    """A training loop sums what is summed already."""
    model, made = _styled(mesh)

    def again(module: nn.Module) -> None:
        for parameter in module.norm.parameters():
            dist.all_reduce(parameter.grad)

    return model, made, {"after_backward": again}


def a_shard_that_changed(mesh: DeviceMesh) -> Made:
    model, made = _fully(mesh)
    if dist.get_rank() == 1:
        _local(made.model.layers[1].mlp.gate_proj.weight)[0] = 0
    return model, made, {}


def a_root_left_out(mesh: DeviceMesh) -> Made:
    """What is in no layer is not under FSDP2: each rank has the gradients of its own batch."""
    model, made = _fully(mesh, whole=False)
    return model, made, {}


def another_epsilon_under_fsdp(mesh: DeviceMesh) -> Made:
    model, made = _fully(mesh)
    made.model.norm.eps = 1e-2
    return model, made, {}


FAULTS: dict[Callable[[DeviceMesh], Made], tuple[str, ...]] = {
    shards_in_another_order: (
        "layers.1.mlp.up_proj.weight",
        "wrong order of shards: rank 0 has the shard of rank 1",
    ),
    one_weight_of_one_rank: ("layers.0.self_attn.k_proj.weight", "rank 1", "only at positions 1 along dim 0"),
    a_replica_that_drifts: ("model.norm.weight", "rank 1", "copies drift"),
    another_epsilon: ("layers.1.post_attention_layernorm", "epsilon"),
    gains_that_are_not_summed: ("layers.1.input_layernorm.weight", "a sum over ranks", "is missing"),
    another_scale: ("layers.0.self_attn.o_proj", "rotary embedding, mask, window, scale"),
    a_window: ("layers.1.self_attn.o_proj", "window", "from token 9 of sequences on"),
    no_rotary: ("layers.0.self_attn.o_proj", "rotary", "from token 1"),
    another_rotary_base: ("layers.0.self_attn.o_proj", "rotary"),
    another_activation: ("transformer.h.0.mlp.", "activation"),
    a_loss_of_twice_the_size: ("loss", "it is 2 times"),
    gradients_scaled_by_ranks: ("gradient of lm_head.weight", "times too large: scaled twice"),
    dropout_that_is_active: ("dropout is active",),
    a_bias_on_every_rank: ("transformer.h.0.attn.c_proj", "its bias is added"),
    a_multiplier: ("model.embed_tokens", "3 times what it should be"),
    a_soft_cap: ("logits", "soft cap"),
    positions_that_are_shifted: ("transformer.wpe",),
    a_frozen_weight: ("layers.0.mlp.down_proj.weight", "the parallelised model has none"),
    a_mask_that_is_missing: ("layers.0.self_attn.o_proj", "mask"),
    a_residual_left_out: ("layers.1.post_attention_layernorm", "multiplier"),
    a_product_that_is_not_summed: ("output of down", "a sum over ranks", "is missing"),
    a_bias_before_the_sum: ("output of down", "bias is added"),
    columns_swapped: ("up.weight", "wrong order of shards"),
    a_gradient_that_is_not_summed: ("gradient of norm", "a sum over ranks"),
    a_norm_on_parts_of_sequences: ("gradient of norm", "a sum over ranks"),
    gradients_of_copies_that_are_not_summed: ("has none", "whose reduction is put off"),
    gradients_summed_by_hand_again: ("gradient of norm", "times too large: scaled twice"),
    a_shard_that_changed: ("layers.1.mlp.gate_proj.weight", "rank 1"),
    a_root_left_out: ("average over ranks", "is missing"),
    another_epsilon_under_fsdp: ("model.norm", "norm"),
}
"""Faults, and words that must be said of each."""


def right_models(mesh: DeviceMesh, thorough: bool) -> Iterator[tuple[str, Made]]:
    """Yield models that are parallelised rightly."""
    yield "megatron_sp", (*gpt(mesh, "megatron_sp", dropout=0.3), {})
    yield "styles", (*_styled(mesh), {})
    yield "fsdp2", (*_fully(mesh), {})
    model, _ = llama(mesh)
    yield "bfloat16", (model.bfloat16(), parallelize(copy.deepcopy(model), "megatron", mesh, check=False), {})
    torch.manual_seed(9)
    plain = Mlp()
    yield "ddp", (plain, nn.parallel.DistributedDataParallel(copy.deepcopy(plain)), {})
    lines = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "shards"))
    yield "each alone", (plain, fully_shard(copy.deepcopy(plain), mesh=lines["shards"]), {})
    if not thorough:
        return
    own = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    yield "compiled ddp", (plain, torch.compile(own, backend="aot_eager"), {})
    model, made = _fully(mesh, whole=False)
    made.model.layers = nn.ModuleList(map(checkpoint_wrapper, made.model.layers))
    yield "checkpoint wrappers under fsdp2", (model, fully_shard(made, mesh=mesh), {})
    for strategy in (
        "megatron",
        "data_parallel",
        "zero1",
        "zero2",
        "zero3",
        "all_to_all_heads",
        "ring_attention",
    ):
        yield strategy, (*llama(mesh, strategy), {})
        yield f"{strategy}, tied", (*gpt(mesh, strategy), {})
    both = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for strategy in ("atp", "meshslice_block", "summa_block", "wang_block", "collective_block"):
        yield strategy, (*llama(both, strategy), {})
    model, styled = _styled(both["tp"])
    yield "styles and fsdp2", (model, fully_shard(styled, mesh=both["dp"]), {})
    model, made = llama(both["tp"], "megatron")
    for block in made.blocks:
        fully_shard(block, mesh=both["dp"])
    fully_shard(made.module, mesh=both["dp"])
    yield "megatron and fsdp2", (model, made, {})
    torch.manual_seed(7)
    model = PlainLlama(layers=2)
    yield "hybrid fsdp2", (model, fully_shard(copy.deepcopy(model), mesh=both), {})
    from torch.distributed.fsdp import MixedPrecisionPolicy

    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    yield "mixed fsdp2", (model, fully_shard(copy.deepcopy(model), mesh=mesh, mp_policy=narrow), {})
    wide_sums = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yield "mixed, wide sums", (model, fully_shard(copy.deepcopy(model), mesh=mesh, mp_policy=wide_sums), {})
    styled_model, styled = _styled(both["tp"])
    yield "mixed styles and fsdp2", (styled_model, fully_shard(styled, mesh=both["dp"], mp_policy=narrow), {})
    model, made = llama(both["tp"], "megatron")
    for block in made.blocks:
        fully_shard(block, mesh=both["dp"], mp_policy=narrow)
    fully_shard(made.module, mesh=both["dp"], mp_policy=narrow)
    yield "mixed megatron and fsdp2", (model, made, {})
    model, styled = _styled(mesh)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(x).square().mean()

    yield (
        "a loss of one's own",
        (model, styled, {"inputs": torch.linspace(-1, 1, 8 * HIDDEN).view(2, 4, HIDDEN), "loss": loss}),
    )
