"""More faults, one in each model: those of loading, of heads and vocabularies, and of loops that train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from faults import FAULTS as FIRST
from faults import Made, Mlp, Wrapped, _change, _fully, _local, _styled, gpt, llama
from plain_models import HIDDEN, WORDS, PlainLlama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshweave.nn.parallel.attention import turned
from meshweave.nn.parallel.model import ParallelModel
from meshweave.nn.parallel.ops import multiply
from meshweave.nn.parallel.parallelize import parallelize

# --- loading --------------------------------------------------------------------------------------------------


def heads_in_another_order(mesh: DeviceMesh) -> Made:
    model, made = gpt(mesh)
    queries = _local(made.module.transformer.h[0].attn.c_attn.weight)[: HIDDEN // mesh.size()]
    queries.copy_(queries.roll(4, 0).roll(1, 1))
    return model, made, {}


def a_fused_weight_cut_as_one(mesh: DeviceMesh) -> Made:
    """Queries, keys and values are cut as one matrix, not each by itself."""
    model, made = gpt(mesh)
    _fill_rows(
        made.module.transformer.h[0].attn.c_attn.weight, model.transformer.h[0].attn.c_attn.weight.detach()
    )
    return model, made, {}


def _fill_rows(weight: Tensor, whole: Tensor) -> None:
    own = _local(weight)
    own.copy_(whole[dist.get_rank() * len(own) :][: len(own)])


def a_weight_that_is_transposed(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    whole = model.model.layers[0].self_attn.q_proj.weight.detach().t()
    _fill_rows(made.module.model.layers[0].self_attn.q_proj.weight, whole)
    return model, made, {}


def gate_and_up_exchanged_by_name(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    mlp = made.module.model.layers[0].mlp
    _exchange(mlp.gate_proj.weight, mlp.up_proj.weight)
    return model, made, {}


def layers_exchanged(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    for one, other in zip(*(layer.parameters() for layer in made.module.model.layers), strict=True):
        _exchange(one, other)
    return model, made, {}


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = _local(one).clone()
    _local(one).copy_(_local(other))
    _local(other).copy_(kept)


def rounded_weights(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    for parameter in made.module.model.layers[1].parameters():
        _local(parameter).copy_(_local(parameter).bfloat16())
    return model, made, {}


def a_bias_of_keys_left_out(mesh: DeviceMesh) -> Made:
    model, made = gpt(mesh)
    own = HIDDEN // mesh.size()
    _local(made.module.transformer.h[0].attn.c_attn.bias)[own : 2 * own] = 0
    return model, made, {}


def a_copy_that_ddp_did_not_make(mesh: DeviceMesh) -> Made:
    torch.manual_seed(9)
    model = Mlp()
    own = copy.deepcopy(model)
    made = nn.parallel.DistributedDataParallel(own)
    if dist.get_rank() == 1:
        own.up.weight.data[0, 0] += 0.1
    return model, made, {}


def a_parameter_too_many(mesh: DeviceMesh) -> Made:
    model, made = _fully(mesh)
    made.model.extra = nn.Parameter(torch.zeros(3))
    return model, made, {}


# --- heads, norms, vocabularies -------------------------------------------------------------------------------


def keys_of_another_group(mesh: DeviceMesh) -> Made:
    """Heads of keys are repeated one after another, not each in its place."""
    torch.manual_seed(3)
    model = PlainLlama(layers=2, kv_heads=2)
    made = parallelize(copy.deepcopy(model), "data_parallel", mesh, check=False)
    _attend(
        made, 0, lambda q, k, v, mask: (_scores(q, _tiled(k, q)).masked_fill(~mask, -torch.inf), _tiled(v, q))
    )
    return model, made, {}


def _tiled(keys: Tensor, queries: Tensor) -> Tensor:
    return keys.repeat(1, queries.shape[1] // keys.shape[1], 1, 1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def capped_scores(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    _attend(
        made, 1, lambda q, k, v, mask: ((50 * (_scores(q, k) / 50).tanh()).masked_fill(~mask, -torch.inf), v)
    )
    return model, made, {}


def _attend(made: ParallelModel, number: int, change: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Let a layer attend with other scores."""
    width = made.blocks[number].core.heads.width

    def attend(q: Tensor, k: Tensor, v: Tensor, rotary: Any, *_: Any) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, width)) for x in (q, k, v))
        cos, sin = (x.unsqueeze(2) for x in rotary)
        q, k, v = (x.transpose(1, 2) for x in (turned(q, cos, sin), turned(k, cos, sin), v))
        scores, v = change(q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril())
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    made.blocks[number].core = attend


def features_of_heads_by_turns(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    block = made.blocks[0]
    block.core = Wrapped(block.core, lambda out: out.unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2))
    return model, made, {}


def rotary_of_one_rank(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    if dist.get_rank() == 1:
        made.rotary = Wrapped(made.rotary, lambda pair: tuple(each.roll(1, 1) for each in pair))
    return model, made, {}


def rotary_of_half_a_head(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    keeps = torch.tensor([1.0, 0.0] * 2)
    made.rotary = Wrapped(made.rotary, lambda pair: (pair[0] * keeps + 1 - keeps, pair[1] * keeps))
    return model, made, {}


def positions_of_the_first_rank(mesh: DeviceMesh) -> Made:
    """Each rank of a ring counts its tokens from 0."""
    model, made = llama(mesh, "ring_attention")
    rotary = made.rotary
    assert rotary is not None

    def first(x: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        cos, sin = rotary.module(x, torch.arange(sequence // mesh.size())[None])
        return cos, sin

    made.rotary = first
    return model, made, {}


def gate_and_up_exchanged(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    block = made.blocks[1]
    block.into_feed_forward = Wrapped(block.into_feed_forward, lambda parts: parts[::-1])
    return model, made, {}


class PlusOne(nn.Module):
    """A norm whose gain is counted from one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (HIDDEN,)) * (1 + self.weight)


def a_gain_counted_from_zero(mesh: DeviceMesh) -> Made:
    torch.manual_seed(1)
    model = Mlp()
    model.norm = PlusOne()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    made = parallelize_module(copy.deepcopy(model), mesh, plan)
    made.norm.forward = lambda x: nn.functional.rms_norm(x, (HIDDEN,), made.norm.weight)
    return model, made, {}


def another_activation_of_styles(mesh: DeviceMesh) -> Made:
    model, made = _styled(mesh)
    made.forward = lambda x: made.last(x + made.down(nn.functional.gelu(made.up(made.norm(x)))))
    return model, made, {}


def a_last_epsilon(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.norm.eps = 1.2e-5
    return model, made, {}


def rows_of_the_next_word(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    made.embedding.register_forward_pre_hook(lambda _, given: ((given[0] + 1) % WORDS,))
    return model, made, {}


def a_padding_row_that_trains(mesh: DeviceMesh) -> Made:
    torch.manual_seed(3)
    model = PlainLlama(layers=2)
    model.model.embed_tokens = nn.Embedding(WORDS, HIDDEN, padding_idx=3)
    made = parallelize(copy.deepcopy(model), "megatron", mesh, check=False)
    made.embedding.padding_row = None
    return model, made, {}


def words_that_are_padding(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)

    def masked(logits: Tensor) -> Tensor:
        return torch.cat((logits[..., :-2], torch.full_like(logits[..., -2:], -1e4)), -1)

    made.vocabulary.whole = Wrapped(made.vocabulary.whole, masked)
    return model, made, {}


def a_loss_over_all_tokens(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    own = made.vocabulary
    made.vocabulary = Wrapped(own, lambda loss: loss)
    made.vocabulary.__class__ = type(
        "All", (Wrapped,), {"__call__": lambda _, x, t, *n: own(x, t, *n) * (t != -100).sum() / t.numel()}
    )
    return model, made, {}


def a_head_whose_gradient_is_dropped(mesh: DeviceMesh) -> Made:
    """The table gets the gradient of what is looked up in it, and none of the logits."""
    model, made = gpt(mesh)
    tied = made.tied
    assert tied is not None

    def logits(group: Any, x: Tensor, batch: int, sequence: int) -> Tensor:
        weight = made.embedding.weight.to_local().detach()
        for mover in tied.movers:
            weight = mover(weight, 1, 1)
        return multiply(x.contiguous(), [weight], group.number, batch, sequence)[0]

    tied.logits = logits
    return model, made, {}


def a_second_call_that_differs(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    calls: list[int] = []

    def later(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 1.1 if len(calls) > 1 else x

    _change(made.embedding, later)
    return model, made, {}


# --- loops that train -----------------------------------------------------------------------------------------


def _after(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    def after(module: nn.Module) -> None:
        for parameter in module.parameters():
            change(parameter.grad)

    return {"after_backward": after}


def gradients_of_four_batches_averaged(mesh: DeviceMesh) -> Made:
    model, made = _fully(mesh)
    return model, made, _after(lambda grad: grad.mul_(1 / 4))


def clipped_by_a_norm_of_one_rank(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)
    return model, made, _after(lambda grad: grad.mul_(0.01 / float(_local(grad).norm())))


def a_gradient_that_drifts(mesh: DeviceMesh) -> Made:
    model, made = llama(mesh)

    def after(module: nn.Module) -> None:
        if dist.get_rank() == 1:
            _local(module.model.norm.weight.grad).mul_(1 + 1e-13)

    return model, made, {"after_backward": after}


def ddp_that_sums(mesh: DeviceMesh) -> Made:
    torch.manual_seed(9)
    model = Mlp()
    made = nn.parallel.DistributedDataParallel(copy.deepcopy(model))

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    made.register_comm_hook(None, hook)
    return model, made, {}


def a_mesh_of_each_rank_alone(mesh: DeviceMesh) -> Made:
    torch.manual_seed(7)
    model = PlainLlama(layers=2)
    both = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("data", "shards"))
    return model, fully_shard(copy.deepcopy(model), mesh=both["shards"]), {"data_mesh": mesh}


# --- models of transformers -----------------------------------------------------------------------------------


def of_transformers(kind: str, **sizes: Any) -> nn.Module:
    """Return a small random model of transformers."""
    import transformers

    torch.manual_seed(5)
    own: dict[str, Any] = {
        "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48,
        "vocab_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "GPT2":
        own = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 48, "n_positions": 64}
    make = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    model: nn.Module = make(getattr(transformers, f"{kind}Config")(**own, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = float(parameter.ndim == 1 and name.endswith("weight"))
            parameter.copy_(gain + 0.2 * torch.randn(parameter.shape))
    return model


def _taken(mesh: DeviceMesh, model: nn.Module) -> tuple[nn.Module, ParallelModel]:
    return model, parallelize(copy.deepcopy(model), "megatron", mesh, check=False)


def a_window_of_one_more(mesh: DeviceMesh) -> Made:
    model, made = _taken(mesh, of_transformers("Mistral", sliding_window=6))
    for block in made.blocks:
        block.core.heads = replace(block.core.heads, window=7)
    return model, made, {}


def a_buffer_of_another_base(mesh: DeviceMesh) -> Made:
    model, made = _taken(mesh, of_transformers("Llama"))
    made.module.model.rotary_emb.inv_freq.mul_(1.001)
    return model, made, {}


def a_scale_in_bfloat16(mesh: DeviceMesh) -> Made:
    model, made = _taken(mesh, of_transformers("Llama").bfloat16())
    core = made.blocks[0].core
    core.heads = replace(core.heads, scale=core.heads.scale * 1.01)
    return model, made, {}


def another_scale_under_mixed_fsdp(mesh: DeviceMesh) -> Made:
    model = of_transformers("Llama")
    made = fully_shard(
        copy.deepcopy(model), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    made.model.layers[0].self_attn.scaling *= 1.5
    return model, made, {}


def a_twentieth_under_mixed_fsdp(mesh: DeviceMesh) -> Made:
    """Logits are off by 5 % of their size, where rounding to bfloat16 has them off by 0.5 %."""
    torch.manual_seed(7)
    model = PlainLlama(layers=2)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    made = fully_shard(copy.deepcopy(model), mesh=mesh, mp_policy=narrow)
    made.lm_head.register_forward_hook(lambda module, given, out: 1.05 * out)
    return model, made, {}


FAULTS: dict[Callable[[DeviceMesh], Made], tuple[str, ...]] = {
    heads_in_another_order: ("attn.c_attn.weight", "shard [0:8+16:24+32:40, 0:16]", "in another order"),
    a_fused_weight_cut_as_one: ("attn.c_attn.weight", "rank 0 has positions 0:24 along dim 0"),
    a_weight_that_is_transposed: ("layers.0.self_attn.q_proj.weight", "a part of the transpose"),
    gate_and_up_exchanged_by_name: (
        "mlp.gate_proj.weight",
        "the numbers of model.layers.0.mlp.up_proj.weight",
    ),
    layers_exchanged: (
        "layers.0.self_attn.q_proj.weight",
        "numbers of model.layers.1.self_attn.q_proj.weight",
    ),
    rounded_weights: ("layers.1.self_attn.q_proj.weight", "rounded to bfloat16"),
    a_bias_of_keys_left_out: ("h.0.attn.c_attn.bias", "only at positions"),
    a_copy_that_ddp_did_not_make: ("up.weight", "rank 1", "copies drift"),
    a_parameter_too_many: ("model.extra", "the original has none"),
    keys_of_another_group: ("layers.0.self_attn.o_proj", "groups"),
    capped_scores: ("layers.1.self_attn.o_proj", "cap"),
    features_of_heads_by_turns: ("layers.0.self_attn.o_proj", "in another order"),
    rotary_of_one_rank: ("layers.0.self_attn.o_proj", "on rank 1", "rotary"),
    rotary_of_half_a_head: ("layers.0.self_attn.o_proj", "rotary", "from token 1"),
    positions_of_the_first_rank: ("model.rotary_emb", "rank 1 has the shard of rank 0"),
    gate_and_up_exchanged: ("layers.1.mlp.act_fn", "gate and up exchanged"),
    a_gain_counted_from_zero: ("output of norm",),
    another_activation_of_styles: ("input of down", "activation"),
    a_last_epsilon: ("output of model.norm", "epsilon"),
    rows_of_the_next_word: ("output of model.embed_tokens", "rows of its table"),
    a_padding_row_that_trains: ("gradient of model.embed_tokens.weight", "only at positions 3 along dim 0"),
    words_that_are_padding: ("logits", "only at positions 22, 23 along dim 2", "no module before"),
    a_loss_over_all_tokens: ("loss", "46 of 48 have a target"),
    a_head_whose_gradient_is_dropped: ("gradient of lm_head.weight", "one tensor", "one of its uses"),
    a_second_call_that_differs: ("model.embed_tokens", "1.1 times"),
    gradients_of_four_batches_averaged: ("gradient of lm_head.weight", "a factor of 4 is missing"),
    clipped_by_a_norm_of_one_rank: ("gradient of lm_head.weight", "a factor of its own"),
    a_gradient_that_drifts: ("gradient of model.norm.weight", "rank 1", "copies of it drift apart"),
    ddp_that_sums: ("gradient of last", "times too large: scaled twice"),
    a_mesh_of_each_rank_alone: ("gradient of lm_head.weight", "an average over ranks", "is missing"),
    a_twentieth_under_mixed_fsdp: ("logits",),
}
"""Faults, and words that must be said of each."""

OF_TRANSFORMERS: dict[Callable[[DeviceMesh], Made], tuple[str, ...]] = {
    a_window_of_one_more: ("layers.0.self_attn.o_proj", "window", "from token 6 of sequences on"),
    a_buffer_of_another_base: ("buffer model.rotary_emb.inv_freq", "1.001 times"),
    a_scale_in_bfloat16: ("layers.0.self_attn.o_proj", "scale"),
    another_scale_under_mixed_fsdp: ("logits",),
}
"""The same of models of transformers."""

FEW = (
    "a_replica_that_drifts", "gains_that_are_not_summed", "no_rotary",
    "dropout_that_is_active", "a_bias_on_every_rank", "a_frozen_weight",
    "a_product_that_is_not_summed", "gradients_of_copies_that_are_not_summed",
    "a_root_left_out",
    "a_weight_that_is_transposed", "gate_and_up_exchanged_by_name", "rounded_weights", "a_bias_of_keys_left_out",
    "features_of_heads_by_turns", "gate_and_up_exchanged", "words_that_are_padding", "a_loss_over_all_tokens",
    "a_head_whose_gradient_is_dropped", "clipped_by_a_norm_of_one_rank", "a_mesh_of_each_rank_alone",
    "a_twentieth_under_mixed_fsdp",
)  # fmt: skip
"""Those of each kind that run by default."""


def chosen(which: str) -> dict[Callable[[DeviceMesh], Made], tuple[str, ...]]:
    """Return a few faults, the first ones, or the others with those of models of transformers."""
    if which == "few":
        return {fault: words for fault, words in (FIRST | FAULTS).items() if fault.__name__ in FEW}
    return FIRST if which == "first" else FAULTS | OF_TRANSFORMERS
