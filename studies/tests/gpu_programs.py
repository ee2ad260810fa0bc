"""A small GPU, and products with the reduce-scatter and the all-gather behind them: in turn, and fused."""

from __future__ import annotations

from meshweave.describe.machine.gpu import GpuFile, load_gpu
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse

LINK = {"link_bytes_per_s": 150 * 10**9, "link_ps": 500_000}

_HEAD = """
program("{name}")
tp = mesh(({p},), ("x",))
A = tensor(({m}, {kp}), "float16")
B = tensor(({n}, {kp}), "float16")
C = tensor(({m}, {n}), "float16")
a = input(A, tp[S(1)])
b = input(B, tp[S(1)])
c = output(C, tp[R])
acc = scratch(({m}, {n}), "float16", on=tp)
part = scratch(({s}, {n}), "float16", on=tp)
compute = lane()
dma = lane(order="ready", width=2)
with tp:
"""

_SEQUENTIAL = """
    matmul(acc, a, b, transpose_b=True, lane=compute)
    reduce_scatter(part, acc, over="tp.x", dim=0, lane=compute)
    all_gather(c, part, over="tp.x", dim=0, lane=compute)
"""

_FUSED = """
    zero(acc, lane=compute)
    fence(over="tp", lane=compute)
    product(a, b, (
        remote_map(at((tp.x + 1) % {p}, acc[{first}]), a=a[{first}]),
        *(dma_map(at((tp.x + 1) % {p}, acc[{own}]), acc[{own}], a=a[{own}], lane=dma) for s in range({p} - 2)),
        local(acc[{gathered}], a=a[{gathered}])), transpose_b=True, release=release(update=True), lane=compute)
    all_gather(c, acc[{gathered}], over="tp.x", dim=0, lane=compute)
"""


def small_gpu() -> GpuFile:
    """Return the machine of T3 with few compute units, a small cache and small tiles."""
    gpu = load_gpu("t3-80cu")
    cache = gpu.cache.model_copy(update={"num_bytes": 1 << 17, "banks": 4})
    memory = gpu.memory.model_copy(update={"channels": 4})
    changes = {
        "compute_units": 4,
        "flops_per_s": 6e12,
        "tile": [32, 32, 32],
        "cache": cache,
        "memory": memory,
    }
    return gpu.model_copy(update=changes)


def sequential(m: int, n: int, k: int, p: int) -> Program:
    """Return a product of (m, k) and (k, n) on each of p ranks, its reduce-scatter and its all-gather."""
    return _program("sequential", _SEQUENTIAL, m, n, k, p)


def fused(m: int, n: int, k: int, p: int) -> Program:
    """Return the same with the reduce-scatter in the product's stores and in tracked copies (T3, figure 9)."""
    return _program("fused", _FUSED, m, n, k, p)


def _program(name: str, body: str, m: int, n: int, k: int, p: int) -> Program:
    s = m // p

    def part(place: str) -> str:
        return f"{s} * {place}:{s} * {place} + {s}, :"

    places = {
        "first": part(f"((tp.x + {p - 1}) % {p})"),
        "own": part(f"((tp.x + {p - 2} - s) % {p})"),
        "gathered": part("tp.x"),
    }
    return parse((_HEAD + body).format(name=name, m=m, n=n, kp=k * p, p=p, s=s, **places))
