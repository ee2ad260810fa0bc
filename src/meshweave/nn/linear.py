"""`meshweave.nn.universal_linear`: under it, the linear layers of a model of DTensors are `meshweave.matmul`s."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from meshweave.base.errors import LayoutError
from meshweave.describe.machine.cluster import Cluster
from meshweave.execute.torch import compat
from meshweave.execute.torch.call_order import require_process_group, share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.autocast import autocast_operands
from meshweave.nn.custom_ops import refuse_second_derivative
from meshweave.nn.dtensor import MatrixView, mesh_of, require_member, size_text
from meshweave.nn.in_graphs import (
    CLUSTER_NO_CONSTANT,
    allow_in_graph,
    context_of,
    placement_texts,
    placements_from,
)
from meshweave.nn.matmul import (
    matmul,
    save_operands,
)
from meshweave.nn.matmul_plans import MatmulOptions, Overlap, check_dtypes, checked_placements, multiply
from meshweave.nn.shard_spec import ShardSpec
from meshweave.nn.transports import Transport

_LINEAR = torch.nn.functional.linear
_MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


class universal_linear(TorchFunctionMode):  # type: ignore[misc]
    """A context in which `torch.nn.functional.linear` of DTensors, so `torch.nn.Linear`, is a `meshweave.matmul`.

    Input, weight and bias may have any placements; none is resharded, and the bias is added once, also where the
    result is a partial sum. Under autograd each gradient has the placements of what it is of, with Replicate
    where that is partial; `backward()` may be called inside or outside. Calls without DTensors are left alone,
    and so are functions that torch computes in one piece, such as
    `torch.nn.functional.multi_head_attention_forward`. What torch.autocast casts is cast.

    Args:
        out: the placements of each result, one per dim of the input's device mesh; negative dims count from the
            last. None takes, for each kind of call, what is cheapest of Shard and Replicate.
        transport: "messages", "shared" memory of one host, "mpi", "symmetric" memory on CUDA; "auto": shared
            where all ranks are processes of one host with tensors on the CPU, else messages.
        cluster: the machine, described or named as in the catalog, for which each product is tuned; None takes,
            over messages, what moves fewest bytes.
        context: process groups, deadline and liveness; by default those of the default process group.
        overlap: "slices", by the universal product; "fused", tile by tile where a fused product takes the
            operands, else "slices"; "auto", what is faster on `cluster`, "slices" without one.
        matmul: also do the matrix products of two DTensors, `a @ b`, `torch.matmul` and `torch.mm`, where b has
            two dims. For them `overlap` "fused" is "auto".

    Calls raise what `meshweave.matmul` raises, and LayoutError where some of the tensors are no DTensors.
    """

    def __init__(
        self,
        out: Sequence[Placement] | None = None,
        *,
        transport: Transport = "auto",
        cluster: Cluster | str | None = None,
        context: TorchContext | None = None,
        overlap: Overlap = "auto",
        matmul: bool = False,
    ) -> None:
        super().__init__()
        self.out, self.transport, self.cluster, self.context = out, transport, cluster, context
        self.overlap, self.matmul = overlap, matmul

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _LINEAR and any(isinstance(one, DTensor) for one in (*args, *kwargs.values())):
            return self._linear(*args, **kwargs)
        if self.matmul and func in _MATMULS and not kwargs and len(args) == 2:
            a, b = args
            if isinstance(a, DTensor) and isinstance(b, DTensor) and b.ndim == 2 and a.ndim > 0:
                overlap: Overlap = "slices" if self.overlap == "slices" else "auto"
                return matmul(
                    a,
                    b,
                    self.out,
                    transport=self.transport,
                    cluster=self.cluster,
                    context=self.context,
                    overlap=overlap,
                )
        return func(*args, **kwargs)

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> DTensor:
        """Return input @ weight.t() + bias, as `torch.nn.functional.linear` is inside of the context."""
        return self._linear(input, weight, bias)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> DTensor:
        given = {"input": input, "weight": weight, "bias": bias}
        plain = [name for name, one in given.items() if one is not None and not isinstance(one, DTensor)]
        if plain:
            raise LayoutError(
                f"linear of DTensors with a plain {' and '.join(plain)}: make every one a DTensor, by "
                "distribute_tensor(tensor, device_mesh, placements) or, of local parts, DTensor.from_local"
            )
        if torch.compiler.is_dynamo_compiling():
            return self._linear_in_graph(input, weight, bias)
        require_process_group()
        require_member(input.device_mesh, "linear")
        device_type = input.device_mesh.device_type
        context = self.context or TorchContext.default(device_type)
        title = f"linear of {size_text(input.shape)} with weight {size_text(weight.shape)}"
        with share_refusal(context, mesh_of(input.device_mesh).ranks, title):
            return self._checked_linear(input, weight, bias, context)

    def _linear_in_graph(self, input: DTensor, weight: DTensor, bias: DTensor | None) -> DTensor:
        if not (self.cluster is None or isinstance(self.cluster, str)):
            return self._uncompiled_linear(input, weight, bias)
        number = -1 if self.context is None else self.context.number
        out = placement_texts(self.out)
        return _linear_in_graph(input, weight, bias, out, self.transport, self.cluster, number, self.overlap)

    @torch.compiler.disable(reason=CLUSTER_NO_CONSTANT)  # type: ignore[untyped-decorator]
    def _uncompiled_linear(self, input: DTensor, weight: DTensor, bias: DTensor | None) -> DTensor:
        return self._linear(input, weight, bias)

    def _options(self, device_type: str, context: TorchContext) -> MatmulOptions:
        options = MatmulOptions.of(
            device_type, "auto", self.transport, self.cluster, context, overlap=self.overlap
        )
        return replace(options, is_lenient=True)

    def _checked_linear(
        self, input: DTensor, weight: DTensor, bias: DTensor | None, context: TorchContext
    ) -> DTensor:
        if weight.ndim != 2 or input.ndim < 1 or input.shape[-1] != weight.shape[1]:
            raise LayoutError(
                f"input of shape {tuple(input.shape)} and weight of shape {tuple(weight.shape)} make no linear "
                "layer: (..., K) and (N, K)"
            )
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise LayoutError(f"bias has shape {tuple(bias.shape)}; it must be ({weight.shape[0]},)")
        device_type = input.device_mesh.device_type
        options = self._options(device_type, context)
        input, weight, bias = autocast_operands(device_type, input, weight, bias)
        check_dtypes(input=input, weight=weight, **({} if bias is None else {"bias": bias}))
        placements = checked_placements(self.out, input.ndim)
        result: DTensor = _LinearFunction.apply(input, weight, bias, placements, options)
        return result


@allow_in_graph  # type: ignore[untyped-decorator]
def _linear_in_graph(
    input: DTensor,
    weight: DTensor,
    bias: DTensor | None,
    out: Any,
    transport: Transport,
    cluster: str | None,
    number: int,
    overlap: Overlap,
) -> DTensor:
    """Return a linear layer of `universal_linear` whose arguments are those of a graph."""
    context = context_of(number, input.device_mesh.device_type)
    mode = universal_linear(
        placements_from(out), transport=transport, cluster=cluster, context=context, overlap=overlap
    )
    return mode(input, weight, bias)


class _LinearFunction(torch.autograd.Function):  # type: ignore[misc]
    """x W^T + bias. Its own function, and no product of `W.t()`, so that W's gradient lies in memory as W does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: DTensor,
        weight: DTensor,
        bias: DTensor | None,
        out: tuple[Placement, ...] | None,
        options: MatmulOptions,
    ) -> DTensor:
        """Return the result, and keep what gradients need."""
        save_operands(ctx, x, weight)
        operands = [operand for operand in (x, weight, bias) if operand is not None]
        ctx.shapes = [operand.shape for operand in operands]
        ctx.specs, ctx.options = [ShardSpec.of(operand).gradient for operand in operands], options
        shape = torch.Size((*x.shape[:-1], weight.shape[0]))
        target = ShardSpec(x.device_mesh, out)
        result = multiply(MatrixView(x), MatrixView(weight, is_transposed=True), shape, target, options)
        if bias is not None:
            compat.local_tensor(result).add_(_bias_row(bias, result, options))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        refuse_second_derivative("a linear layer of DTensors")
        x, weight = ctx.saved_tensors
        ctx.versions.check()
        grad, shapes, specs, options = MatrixView(grads[0]), ctx.shapes, ctx.specs, ctx.options
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply(grad, MatrixView(weight), shapes[0], specs[0], options)
        if ctx.needs_input_grad[1]:
            transposed = replace(grad, is_transposed=True)
            grad_weight = multiply(transposed, MatrixView(x), shapes[1], specs[1], options)
        if ctx.needs_input_grad[2]:
            ones = _ones(math.prod(grads[0].shape[:-1]), grads[0])
            grad_bias = multiply(MatrixView(ones), grad, shapes[2], specs[2], options)
        return grad_x, grad_weight, grad_bias, None, None


def _bias_row(bias: DTensor, result: DTensor, options: MatmulOptions) -> Tensor:
    """Return this rank's part of a bias (local columns,) for each row of its part of a result; all terms of a sum
    together have it once.

    It is the product of a one with the bias, which gets it from wherever it lies, and shares out a partial sum.
    """
    last = result.ndim - 1
    placements = []
    for placement in result.placements:
        if compat.is_sharded(placement):
            if placement.dim != last:
                placement = Replicate()
            elif compat.is_strided_shard(placement):
                placement = compat.strided_shard(0, placement.split_factor)
            else:
                placement = Shard(0)
        placements.append(placement)
    target = ShardSpec(result.device_mesh, tuple(placements))
    ones = MatrixView(_ones(1, result))
    return compat.local_tensor(multiply(ones, MatrixView(bias), bias.shape, target, options))


def _ones(count: int, like: DTensor) -> DTensor:
    """Return a vector of ones that every rank has."""
    ones = torch.ones(count, dtype=like.dtype, device=compat.local_tensor(like).device)
    mesh = like.device_mesh
    vector: DTensor = DTensor.from_local(ones, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return vector
