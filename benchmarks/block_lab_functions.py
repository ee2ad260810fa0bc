"""The functions of a GPT block as torch's fused kernels, so that real computing stays short beside the pace.

Shapes as in `meshweave.algorithms.block.functions`. Norms in two steps have no fused kernel: they are made of few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshweave.algorithms.block import BlockProblem
from meshweave.algorithms.block.folds import functions_of
from meshweave.algorithms.block.functions import Functions
from meshweave.algorithms.block.nodes.norm import EPSILON

_ATEN = torch.ops.aten


class FusedFunctions:
    """Layer norm, causal attention without grouped heads, and GELU (tanh form)."""

    def __init__(self, problem: BlockProblem) -> None:
        assert problem.family == "gpt" and problem.heads == problem.kv_heads, problem
        self.problem = problem

    def table(self) -> Functions:
        """Return the functions by name: those of the block where there is no fused one."""
        known = functions_of(self.problem)
        return {name: getattr(self, name, function) for name, function in known.items()}

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return _ATEN.native_layer_norm(x, x.shape[-1:], gain[0], gain[1], EPSILON)[0]

    def norm_grad(self, dy: Tensor, x: Tensor, gain: Tensor) -> Tensor:
        return self._norm_gradients(dy, x, gain, [True, False, False])[0]

    def norm_weight_grad(self, dy: Tensor, x: Tensor, so_far: Tensor) -> Tensor:
        _, of_gain, of_bias = self._norm_gradients(dy, x, so_far, [False, True, True])
        return so_far + torch.stack((of_gain, of_bias))

    @staticmethod
    def _norm_gradients(dy: Tensor, x: Tensor, gain: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        _, mean, scale = _ATEN.native_layer_norm(x, x.shape[-1:], None, None, EPSILON)
        return _ATEN.native_layer_norm_backward(dy, x, x.shape[-1:], mean, scale, gain[0], gain[1], mask)

    def _scaled(self, x: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features before gain and bias, and the reciprocal of their deviation."""
        mean, squares = (statistics / self.problem.hidden).split(1, -1)
        scale = torch.addcmul(squares + EPSILON, mean, mean, value=-1).rsqrt_()
        return (x - mean).mul_(scale), scale

    def statistics(self, x: Tensor) -> Tensor:
        return torch.stack((x.sum(-1), torch.linalg.vecdot(x, x)), -1)

    def normalize(self, x: Tensor, statistics: Tensor, gain: Tensor) -> Tensor:
        return torch.addcmul(gain[1], self._scaled(x, statistics)[0], gain[0])

    def norm_grad_sums(self, dy: Tensor, x: Tensor, statistics: Tensor, gain: Tensor) -> Tensor:
        arriving = dy * gain[0]
        along = torch.linalg.vecdot(arriving, self._scaled(x, statistics)[0])
        return torch.stack((arriving.sum(-1), along), -1)

    def normalize_grad(self, dy: Tensor, x: Tensor, statistics: Tensor, sums: Tensor, gain: Tensor) -> Tensor:
        scaled, scale = self._scaled(x, statistics)
        mean, along = (sums / self.problem.hidden).split(1, -1)
        return (dy * gain[0]).sub_(mean).addcmul_(scaled, along, value=-1).mul_(scale)

    def normalize_weight_grad(self, dy: Tensor, x: Tensor, statistics: Tensor, so_far: Tensor) -> Tensor:
        of_gain = self._scaled(x, statistics)[0].mul_(dy)
        return so_far + torch.stack((of_gain.flatten(0, -2).sum(0), dy.flatten(0, -2).sum(0)))

    def _parts(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, sequence, width)."""
        d = self.problem.head_dim
        units = self._head_columns(qkv, 3 * d)
        return units[..., :d], units[..., d : 2 * d], units[..., 2 * d :]

    def _head_columns(self, x: Tensor, width: int) -> Tensor:
        """Return columns of heads as (batch, heads, sequence, `width`), also where `x` is tokens x columns."""
        sequence, columns = self.problem.sequence, x.shape[-1]
        return x.reshape(-1, sequence, columns // width, width).transpose(1, 2)

    def attention(self, qkv: Tensor) -> list[Tensor]:
        q, k, v = self._parts(qkv)
        out, log_sums = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        rows = qkv.shape[:-1]
        return [out.transpose(1, 2).reshape(*rows, -1), log_sums.transpose(1, 2).reshape(*rows, -1)]

    def attention_grad(self, dout: Tensor, qkv: Tensor, out: Tensor, log_sums: Tensor) -> Tensor:
        d = self.problem.head_dim
        gradients = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            self._head_columns(dout, d),
            *self._parts(qkv),
            self._head_columns(out, d),
            self._head_columns(log_sums, 1)[..., 0],
            0.0,
            True,
        )
        return torch.cat(gradients, -1).transpose(1, 2).reshape(qkv.shape)

    def activation(self, y: Tensor) -> Tensor:
        return _ATEN.gelu(y, approximate="tanh")

    def activation_grad(self, dout: Tensor, y: Tensor) -> Tensor:
        return _ATEN.gelu_backward(dout, y, approximate="tanh")
