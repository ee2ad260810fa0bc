"""Ways in which a step of one rank of a training run may differ from that of others, beside those of models."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from plain_models import WORDS
from torch import nn
from ways_to_differ import HARMLESS, NOT_COMPARED, WAYS, way

__all__ = ["WAYS"]


# --- what is given in a step ----------------------------------------------------------------------------------


@way("step", "other tokens")
def _other_tokens(s: Any) -> None:
    s.tokens = (s.tokens + 1) % WORDS


@way("step", "other tokens")
def _one_token(s: Any) -> None:
    s.tokens[2, 3] = (s.tokens[2, 3] + 1) % WORDS


@way("step", "other tokens")
def _rows_in_another_order(s: Any) -> None:
    s.tokens = s.tokens.flip(0)


@way("later", "refused: attention_mask is not computed")
def _a_mask_of_one_rank(s: Any) -> None:
    s.given = {"attention_mask": torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]] * 4)}


@way("later", "other tokens")
def _tokens_of_the_third_step(s: Any) -> None:
    s.tokens = s.tokens.roll(1, 1)


@way("step", "other tokens")
def _a_row_less(s: Any) -> None:
    s.tokens, s.targets = s.tokens[1:], s.targets[1:]


@way("step", "other tokens")
def _shorter_rows(s: Any) -> None:
    s.tokens, s.targets = s.tokens[:, :4], s.targets[:, :4]


@way("later", "other tokens")
def _a_row_less_in_the_third_step(s: Any) -> None:
    s.tokens, s.targets = s.tokens[1:], s.targets[1:]


@way("step", "other tokens")
def _tokens_of_int32(s: Any) -> None:
    s.tokens = s.tokens.int()


@way("step", "other tokens")
def _a_token_out_of_range(s: Any) -> None:
    s.tokens[0, 0] = WORDS + 75


@way("later", "other tokens")
def _a_token_out_of_range_in_the_third_step(s: Any) -> None:
    s.tokens[0, 0] = WORDS + 75


@way("step", "other targets")
def _other_targets(s: Any) -> None:
    s.targets = (s.targets.clamp(0) + 1) % WORDS


@way("step", "other targets")
def _an_ignored_target(s: Any) -> None:
    s.targets[1, 1] = -100


@way("later", "other targets")
def _targets_of_the_third_step(s: Any) -> None:
    s.targets = s.targets.roll(1, 1)


@way("step", "other targets")
def _no_targets(s: Any) -> None:
    s.targets = None


@way("step", "other modes")
def _evaluation(s: Any) -> None:
    s.made.module.eval()


@way("step", "other modules in training")
def _evaluation_of_a_module_that_nothing_uses(s: Any) -> None:
    s.made.module.add_module("spare", nn.Identity().eval())


@way("step", "other modes")
def _no_gradients(s: Any) -> None:
    s.around = torch.no_grad


@way("step", "other modes")
def _autocast(s: Any) -> None:
    s.around = lambda: torch.autocast("cpu", torch.bfloat16)


@way("later", "other modes")
def _autocast_in_the_third_step(s: Any) -> None:
    s.around = lambda: torch.autocast("cpu", torch.bfloat16)


@way("step", "other settings")
def _precision_of_products_after(s: Any) -> None:
    torch.set_float32_matmul_precision("high")


# --- the generator ---------------------------------------------------------------------------------------------


@way("step", "other generator", dropout=0.2, strategy="megatron")
def _seed_of_dropout(s: Any) -> None:
    torch.manual_seed(100)


@way("later", "other generator", dropout=0.2, strategy="megatron")
def _a_draw_before_the_third_step(s: Any) -> None:
    torch.rand(1)


@way("model", HARMLESS)
def _seed_before(s: Any) -> None:
    torch.manual_seed(100)


@way("step", NOT_COMPARED, dropout=0.2)
def _seed_of_dropout_of_parts(s: Any) -> None:
    """No two ranks have the same part of the residual, and masks of parts are drawn apart."""
    torch.manual_seed(100)


@way("step", HARMLESS)
def _seed_without_dropout(s: Any) -> None:
    torch.manual_seed(100)


@way("step", HARMLESS)
def _seeds_of_python(s: Any) -> None:
    random.seed(5)


# --- parameters after parallelize ------------------------------------------------------------------------------


@way("step", "other parameters")
def _frozen_after(s: Any) -> None:
    s.made.module.lm_head.weight.requires_grad_(False)


@way("step", "other copies")
def _a_copy_of_a_gain(s: Any) -> None:
    s.made.norm.weight.to_local().data[0] += 1e-7


@way("later", "other copies", every=3)
def _a_copy_that_drifts(s: Any) -> None:
    s.made.norm.weight.to_local().data[0] += 1e-7


# --- the optimizer -----------------------------------------------------------------------------------------------


@way("step", "other optimizer")
def _learning_rate(s: Any) -> None:
    s.optimizer.param_groups[0]["lr"] *= 2


@way("step", "other optimizer")
def _betas(s: Any) -> None:
    s.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


@way("step", "other optimizer")
def _weight_decay(s: Any) -> None:
    s.optimizer.param_groups[0]["weight_decay"] = 0.3


@way("step", "other optimizer")
def _another_optimizer(s: Any) -> None:
    s.optimizer = torch.optim.SGD(s.made.module.parameters(), lr=0.01)


@way("step", "other optimizer")
def _foreach(s: Any) -> None:
    s.optimizer.param_groups[0]["foreach"] = False


@way("step", "other optimizer")
def _a_parameter_that_is_not_optimized(s: Any) -> None:
    s.optimizer.param_groups[0]["params"].pop()


@way("later", "other progress")
def _learning_rate_of_the_third_step(s: Any) -> None:
    s.optimizer.param_groups[0]["lr"] *= 2


@way("step", "other gradients")
def _clipping(s: Any) -> None:
    s.clip = 0.01


@way("step", "other gradients")
def _no_clipping(s: Any) -> None:
    s.clip = None


@way("step", "other gradients")
def _scale_of_gradients(s: Any) -> None:
    s.scale = 0.5


@way("step", "other gradients")
def _a_gradient_less(s: Any) -> None:
    s.drops_a_gradient = True


@way("later", "other progress")
def _a_step_left_out(s: Any) -> None:
    s.skips_optimizer = True


@way("later", "other progress")
def _gradients_that_are_not_cleared(s: Any) -> None:
    s.clears = False


# --- calls -------------------------------------------------------------------------------------------------------


@way("later", "other progress|out of order|differ", error="LayoutError|BindError")
def _a_backward_left_out(s: Any) -> None:
    s.skips_backward = True


@way("later", "other progress|out of order|differ", error="LayoutError|BindError")
def _a_forward_more(s: Any) -> None:
    s.forwards = 2


# --- the process -------------------------------------------------------------------------------------------


@way("model", HARMLESS)
def _environment(s: Any) -> None:
    s.patch_item(os.environ, "OMP_NUM_THREADS", "2")
    s.patch_item(os.environ, "SOME_VARIABLE", "1")


@way("model", HARMLESS)
def _threads(s: Any) -> None:
    torch.set_num_threads(2)


@way("model", HARMLESS)
def _working_folder(s: Any) -> None:
    here = Path.cwd()
    s.stack.callback(os.chdir, here)
    os.chdir(tempfile.gettempdir())


@way("model", HARMLESS)
def _memory_of_a_parameter(s: Any) -> None:
    weight = s.model.transformer.h[0].mlp.c_fc.weight
    weight.data = weight.data.t().contiguous().t()


@way("model", HARMLESS)
def _an_attribute_of_a_rank(s: Any) -> None:
    s.model.local_rank, s.model._cache = 7, {}


@way("step", HARMLESS)
def _memory_of_tokens(s: Any) -> None:
    s.tokens = s.tokens.t().contiguous().t()


@way("step", HARMLESS)
def _order_of_names_of_options(s: Any) -> None:
    for group in s.optimizer.param_groups:
        items = list(group.items())
        group.clear()
        group.update(reversed(items))
