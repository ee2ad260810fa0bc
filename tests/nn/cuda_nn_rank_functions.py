"""What the ranks of test_cuda_products.py run, all on one device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import pipeline_models as models
import torch
from cuda_world import nccl_context
from fused_rank_functions import tracked_faults
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import meshweave
from meshweave.nn.linear import universal_linear
from meshweave.nn.matmul2d import matmul2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
"""The relative error, in the Frobenius norm, that rounding may make."""


def _random(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _check(wrong: list[str], case: str, dtype: torch.dtype, pairs: Mapping[str, Any]) -> None:
    for what, (value, expected) in pairs.items():
        error = _error(_whole(value), expected)
        if not error < BOUND[dtype]:
            wrong.append(f"{case}: {what} is off by {error:.2e}")


def products(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """Multiply DTensors on the device, forward and backward, against float64; return what is wrong."""
    wrong: list[str] = []
    with nccl_context(context) as ours:
        mesh = init_device_mesh("cuda", (context.num_ranks,))
        kinds = (Shard(0), Shard(1), Replicate())
        for dtype, (of_a, of_b, of_c) in itertools.product(DTYPES, itertools.product(kinds, repeat=3)):
            whole_a, whole_b = _random((96, 136), 1, dtype), _random((136, 80), 2, dtype)
            a = distribute_tensor(whole_a, mesh, [of_a]).requires_grad_()
            b = distribute_tensor(whole_b, mesh, [of_b]).requires_grad_()
            c = meshweave.matmul(a, b, [of_c], transport=payload["transport"], context=ours)
            weight = _random((96, 80), 3, dtype)
            (c * distribute_tensor(weight, mesh, [of_c])).sum().backward()
            wide = [x.double() for x in (whole_a, whole_b, weight)]
            pairs = {
                "C": (c, wide[0] @ wide[1]),
                "A'": (a.grad, wide[2] @ wide[1].T),
                "B'": (b.grad, wide[0].T @ wide[2]),
            }
            _check(wrong, f"matmul {dtype} {of_a} {of_b} {of_c}", dtype, pairs)
    return wrong


def fused(context: Any, payload: Mapping[str, Any]) -> list[Any]:
    """Compute fused layers by kernels that count their tiles; return what differs from dense ones."""
    with nccl_context(context) as ours:
        return list(tracked_faults(ours, "symmetric", "cuda"))


def two_d(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """Multiply shards of a 2D mesh, every dataflow, forward and backward; return what is wrong."""
    wrong: list[str] = []
    with nccl_context(context) as ours:
        mesh = init_device_mesh("cuda", tuple(payload["mesh"]), mesh_dim_names=("row", "col"))
        placements = [Shard(0), Shard(1)]
        cases = itertools.product(DTYPES, ("os", "ls", "rs"), (("meshslice", 2), ("collective", 1)))
        for dtype, dataflow, (algorithm, slices) in cases:
            m, n, k = 96, 80, 64
            whole_a = _random((k, m) if dataflow == "rs" else (m, k), 1, dtype)
            whole_b = _random((n, k) if dataflow == "ls" else (k, n), 2, dtype)
            weight = _random((m, n), 3, dtype)
            a, b, w = (
                distribute_tensor(x, mesh, placements).to_local().clone() for x in (whole_a, whole_b, weight)
            )
            a.requires_grad_()
            b.requires_grad_()
            c = matmul2d(
                a,
                b,
                mesh=mesh,
                shape=(m, n, k),
                dataflow=dataflow,
                algorithm=algorithm,
                slices=slices,
                context=ours,
            )
            (c * w).sum().backward()
            dense_a, dense_b = (x.double().requires_grad_() for x in (whole_a, whole_b))
            left = dense_a.T if dataflow == "rs" else dense_a
            dense = left @ (dense_b.T if dataflow == "ls" else dense_b)
            (dense * weight.double()).sum().backward()

            def whole(local: torch.Tensor) -> DTensor:
                return DTensor.from_local(local, mesh, placements, run_check=False)

            pairs = {
                "C": (whole(c.detach()), dense.detach()),
                "A'": (whole(a.grad), dense_a.grad),
                "B'": (whole(b.grad), dense_b.grad),
            }
            _check(wrong, f"matmul2d {dtype} {dataflow} {algorithm}", dtype, pairs)
    return wrong


def linear(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """Train linear layers of DTensors under universal_linear against plain ones; return what is wrong."""
    wrong: list[str] = []
    with nccl_context(context) as ours:
        mesh = init_device_mesh("cuda", (context.num_ranks,))
        for dtype, of in itertools.product(DTYPES, (Shard(0), Shard(1), Replicate())):
            torch.manual_seed(0)
            plain = nn.Linear(64, 48, device="cuda", dtype=dtype)
            whole = _random((32, 64), 5, dtype)

            def place(name: str, module: nn.Module, device_mesh: Any, of: Any = of) -> None:
                for key, param in list(module.named_parameters(recurse=False)):
                    kind = Shard(0) if key == "bias" and isinstance(of, Shard) else of
                    value = distribute_tensor(param.detach(), device_mesh, [kind])
                    module.register_parameter(key, nn.Parameter(value))

            wide = nn.Linear(64, 48, device="cuda", dtype=torch.float64)
            wide.load_state_dict(plain.state_dict())
            ours_linear = distribute_module(plain, mesh, place)
            with universal_linear(context=ours, transport=payload["transport"]):
                y = ours_linear(distribute_tensor(whole, mesh, [Shard(0)]))
            expected = wide(whole.double())
            y.full_tensor().float().pow(2).sum().backward()
            expected.pow(2).sum().backward()
            pairs = {
                "y": (y.detach(), expected.detach()),
                "weight'": (ours_linear.weight.grad, wide.weight.grad),
                "bias'": (ours_linear.bias.grad, wide.bias.grad),
            }
            _check(wrong, f"linear {dtype} {of}", dtype, pairs)
    return wrong


def pipelines(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """Train a pipeline of two ranks by several schedules against the whole model; return what is wrong."""
    wrong: list[str] = []
    batch, target = (x.cuda() for x in models.tokens(6))
    with nccl_context(context) as ours:
        for name, num_stages, micro_batches in (
            ("1f1b", 2, 3),
            ("gpipe", 2, 2),
            ("zb-h1", 2, 3),
            ("zbv", 4, 3),
        ):
            stages = [stage.cuda() for stage in models.gpt(num_stages)]
            whole = copy.deepcopy(stages)
            loss = models.cross_entropy(models.run_whole(whole, (), batch), target)
            loss.backward()
            ranks = (0, 1) if num_stages == 2 else (0, 1, 1, 0)
            own = {number: stages[number] for number, of in enumerate(ranks) if of == context.rank}
            pipeline = meshweave.pipeline(
                own,
                name,
                loss_fn=models.cross_entropy,
                context=ours,
                micro_batches=micro_batches,
                ranks=(0, 1),
            )
            found = pipeline.step(batch, target)
            if num_stages - 1 in own and not torch.allclose(found, loss, rtol=1e-9):
                wrong.append(f"{name}: loss {found} and not {loss}")
            for number, module in own.items():
                pairs = zip(module.named_parameters(), whole[number].parameters(), strict=True)
                for (label, param), expected in pairs:
                    if param.grad is None or not torch.allclose(
                        param.grad, expected.grad, rtol=1e-9, atol=1e-12
                    ):
                        wrong.append(f"{name}: gradient of {label} of stage {number}")
    return wrong


def reshards(context: Any, payload: Mapping[str, Any]) -> list[str]:
    """Move DTensors between meshes and placements of one device; return what is wrong."""
    wrong: list[str] = []
    with nccl_context(context) as ours:
        mesh = init_device_mesh("cuda", (context.num_ranks,))
        kinds = (Shard(0), Shard(1), Replicate())
        for dtype, of, to in itertools.product(DTYPES, kinds, kinds):
            whole = _random((37, 24), 7, dtype)
            x = distribute_tensor(whole, mesh, [of]).requires_grad_()
            y = meshweave.reshard(x, mesh, [to], context=ours)
            if y.placements != (to,) or not torch.equal(y.full_tensor(), whole):
                wrong.append(f"{dtype} {of} to {to}")
            (2 * y).sum().backward()
            if x.grad is None or not torch.equal(x.grad.full_tensor(), torch.full_like(whole, 2)):
                wrong.append(f"{dtype} {of} to {to}: gradient")
    return wrong
