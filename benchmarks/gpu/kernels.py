"""Kernels on one GPU, measured, beside what the catalog's constants of an H100 and a calibration say.

python benchmarks/gpu/kernels.py [--folder FOLDER] [--parts products,...]   # measure on a CUDA device, save
python benchmarks/gpu/kernels.py --predict [--folder FOLDER]                # score what is saved again

Operands are random numbers: with ones or zeros a GPU takes less power and runs faster. A measurement is a
CUDA graph of launches over several sets of operands, of more bytes than the cache has, so that it has no
time of the host.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from device import FOLDER, save_rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshweave as mw
from meshweave.calibrate.cluster_toml import kernels_toml
from meshweave.calibrate.device import calibrate_device, draw_shapes
from meshweave.cost.calls import with_counts
from meshweave.cost.compute import shape_s
from meshweave.cost.products import product_s
from meshweave.describe.files import parse_table
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.kernels_file import kernels_from
from meshweave.describe.model import load_model
from meshweave.ir.work import Compute, matmul_work

SEED = 19
CACHE_BYTES = 128 << 20
LOOP_S = 0.01
Shape = tuple[int, int, int]


# --- timing -----------------------------------------------------------------------------------------------------


def graph_s(launches: Sequence[Callable[[], Any]], loop_s: float = LOOP_S) -> float:
    """Return the seconds of a launch: the median of five replays of a graph of all `launches`, some times over."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for launch in launches:
            launch()
        end.record()
    torch.cuda.synchronize()
    once_s = begin.elapsed_time(end) * 1e-3 / len(launches)
    turns = min(max(math.ceil(loop_s / max(once_s * len(launches), 1e-6)), 1), 200)

    def repeat() -> None:
        for _ in range(turns):
            for launch in launches:
                launch()

    graph, run = torch.cuda.CUDAGraph(), repeat
    try:
        with torch.cuda.graph(graph):
            repeat()
        run = graph.replay
    except RuntimeError as error:
        print(f"no graph: {str(error).splitlines()[0]}")
    times = []
    for _ in range(6):
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / (turns * len(launches)))
    return statistics.median(times[1:])


def copies_of(num_bytes: int) -> int:
    """Return how many sets of operands of so many bytes are more than the cache holds, at most 8."""
    return min(max(math.ceil(CACHE_BYTES / max(num_bytes, 1)), 1), 8)


def random_tensor(*shape: int) -> Tensor:
    """Return normal random numbers in bfloat16 on the device."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


# --- products ---------------------------------------------------------------------------------------------------


def random_products() -> list[Shape]:
    """Return 100 products as `meshweave calibrate` draws them, and 100 of larger sizes."""
    draw = random.Random(SEED)
    large: dict[Shape, None] = {}
    while len(large) < 100:
        m, n, k = (round(math.exp(draw.uniform(math.log(512), math.log(16384))) / 8) * 8 for _ in range(3))
        large[m, n, k] = None
    return [*draw_shapes(100, SEED, 2e12), *large]


def layer_products(tokens: int = 4096) -> list[tuple[str, Shape, str]]:
    """Return the products of layers of Llama-2-7B and GPT-3, forward and backward, by tensor parallelism."""
    rows = []
    for name in ("llama-2-7b", "gpt3"):
        for tp in (1, 2, 4, 8):
            for layer in load_model(name).fc_layers():
                splits_out = layer.name in ("qkv", "ff1")
                wide = layer.out_features // (tp if splits_out else 1)
                deep = layer.in_features // (1 if splits_out else tp)
                for part, shape, order in (
                    ("forward", (tokens, wide, deep), "nt"),
                    ("input gradient", (tokens, deep, wide), "nn"),
                    ("weight gradient", (wide, deep, tokens), "tn"),
                ):
                    rows.append((f"{name} tp {tp} {layer.name} {part}", shape, order))
    return rows


def product_row(name: str, shape: Shape, order: str = "nn") -> dict[str, Any]:
    """Return the seconds of C (m, n) = A (m, k) B (k, n); `order` says which operand lies transposed in memory."""
    m, n, k = shape

    def launch() -> Callable[[], Any]:
        a = random_tensor(k, m).t() if order[0] == "t" else random_tensor(m, k)
        b = random_tensor(n, k).t() if order[1] == "t" else random_tensor(k, n)
        out = torch.empty((m, n), device="cuda", dtype=torch.bfloat16)
        return lambda: torch.mm(a, b, out=out)

    copies = copies_of(2 * (m * k + k * n + m * n))
    return {
        "name": name,
        "shape": list(shape),
        "order": order,
        "s": graph_s([launch() for _ in range(copies)]),
    }


def products() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of random products and of those of layers."""
    return {
        "random products": [product_row("random", shape) for shape in random_products()],
        "layer products": [product_row(*case) for case in layer_products()],
    }


# --- attention --------------------------------------------------------------------------------------------------

ATTENTION = (
    (1, 32, 2048, 128),
    (1, 32, 4096, 128),
    (1, 32, 8192, 128),
    (1, 32, 16384, 128),
    (4, 16, 2048, 128),
    (2, 16, 4096, 128),
    (1, 12, 2048, 128),
    (4, 25, 1024, 64),
    (8, 16, 2048, 64),
)
"""Batch, heads, tokens and width of causal attention."""
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-2": SDPBackend.FLASH_ATTENTION}


def attention() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of causal attention, forward and backward, by the kernel that SDPA takes."""
    return {
        f"attention {name}": [row for shape in ATTENTION for row in _attention_rows(shape, backend)]
        for name, backend in BACKENDS.items()
    }


def _attention_rows(shape: tuple[int, int, int, int], backend: SDPBackend) -> list[dict[str, Any]]:
    b, h, s, d = shape

    def operands() -> list[Tensor]:  # as a layer has them: (b, s, h, d) in memory
        return [random_tensor(b, s, h, d).transpose(1, 2).requires_grad_() for _ in range(3)]

    copies = copies_of(2 * b * h * s * d * 8)
    sets = [operands() for _ in range(copies)]
    rows = []
    with sdpa_kernel(backend):

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        with torch.no_grad():
            forward_s = graph_s([lambda each=each: forward(*each) for each in sets])

        def both(each: list[Tensor]) -> None:
            torch.autograd.grad(forward(*each), each, grad)

        grad = random_tensor(b, s, h, d).transpose(1, 2)
        both_s = graph_s([lambda each=each: both(each) for each in sets])
    name = f"b {b} heads {h} tokens {s} width {d}"
    rows.append({"name": name, "part": "forward", "shape": list(shape), "s": forward_s})
    rows.append({"name": name, "part": "backward", "shape": list(shape), "s": both_s - forward_s})
    return rows


# --- element-wise passes ----------------------------------------------------------------------------------------

WIDTHS = ((8192, 2048), (8192, 4096), (16384, 4096), (8192, 11008))
PASSES: dict[str, tuple[int, Callable[..., Tensor], int]] = {
    "rms_norm": (1, lambda x: F.rms_norm(x, (x.shape[-1],)), 2),
    "layer_norm": (1, lambda x: F.layer_norm(x, (x.shape[-1],)), 2),
    "add": (2, lambda x, y: x + y, 3),
    "silu times": (2, lambda x, y: F.silu(x) * y, 3),
    "gelu": (1, lambda x: F.gelu(x, approximate="tanh"), 2),
    "copy": (1, lambda x: x.clone(), 2),
}
"""By name: operands, function, and how often a fused kernel moves the tensor through memory."""


def passes() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of element-wise passes, in eager mode and compiled."""
    rows: dict[str, list[dict[str, Any]]] = {"passes eager": [], "passes compiled": []}
    torch._dynamo.reset()
    for name, (count, function, moves) in PASSES.items():
        for kind, run in (("eager", function), ("compiled", torch.compile(function, dynamic=False))):
            for shape in WIDTHS:
                sets = [[random_tensor(*shape) for _ in range(count)] for _ in range(3)]
                seconds = graph_s([lambda each=each, run=run: run(*each) for each in sets])
                num_bytes = 2 * moves * math.prod(shape)
                row = {"name": name, "shape": list(shape), "bytes": num_bytes, "s": seconds}
                rows[f"passes {kind}"].append(row)
    return rows


# --- rates at length --------------------------------------------------------------------------------------------


def sustained(size: int = 8192, seconds: float = 4.0) -> dict[str, Any]:
    """Return FLOP/s of a large product, at first and after seconds, by what the numbers are, and the power."""
    out: dict[str, Any] = {"size": size}
    for name, make in (("random", torch.randn), ("ones", torch.ones), ("zeros", torch.zeros)):
        a, b = (make((size, size), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        c = torch.empty_like(a)
        torch.mm(a, b, out=c)
        torch.cuda.synchronize()
        time.sleep(1.0)
        windows, began = [], time.perf_counter()
        while time.perf_counter() - began < seconds:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(16):
                torch.mm(a, b, out=c)
            end.record()
            end.synchronize()
            windows.append((time.perf_counter() - began, 16 * 2 * size**3 / (begin.elapsed_time(end) * 1e-3)))
        late = [rate for at, rate in windows if at > seconds / 2]
        out[name] = {
            "first": windows[0][1],
            "first_100_ms": statistics.median(rate for at, rate in windows if at < 0.1),
            "sustained": statistics.median(late),
            **_power(),
        }
    return out


def _power() -> dict[str, float]:
    """Return what NVML reads right now: watts and the clock of the multiprocessors in MHz."""
    try:
        return {"watts": torch.cuda.power_draw() / 1000, "clock_mhz": float(torch.cuda.clock_rate())}
    except (ModuleNotFoundError, RuntimeError):
        return {}


def copies() -> list[dict[str, Any]]:
    """Return the bytes per second of copies within the device, read and written counted."""
    rows = []
    for num_bytes in (1 << 24, 1 << 27, 1 << 30, 1 << 32):
        x = torch.randn(num_bytes // 4, device="cuda")
        y = torch.empty_like(x)
        seconds = graph_s([lambda x=x, y=y: y.copy_(x)])
        rows.append({"bytes": 2 * num_bytes, "s": seconds, "bytes_per_s": 2 * num_bytes / seconds})
    return rows


# --- products of the library ------------------------------------------------------------------------------------


def library() -> list[dict[str, Any]]:
    """Return the seconds of a product by torch, by `mw.matmul` of DTensors and by `mw.nn.matmul2d`, of one rank.

    A difference is what a call costs: time of the host for small products, copies on the device for large ones.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    line, square = init_device_mesh("cuda", (1,)), init_device_mesh("cuda", (1, 1))
    rows = []
    for size in (256, 1024, 4096, 8192):
        a, b = random_tensor(size, size), random_tensor(size, size)
        da, db = (distribute_tensor(x, line, [Replicate()]) for x in (a, b))
        shape = (size, size, size)
        ways = {
            "torch.mm": lambda a=a, b=b: torch.mm(a, b),
            "mw.matmul": lambda da=da, db=db: mw.matmul(da, db, [Replicate()]),
            "mw.nn.matmul2d, 1 slice": lambda a=a, b=b, shape=shape: mw.nn.matmul2d(
                a, b, mesh=square, shape=shape, slices=1
            ),
            "mw.nn.matmul2d, 4 slices": lambda a=a, b=b, shape=shape: mw.nn.matmul2d(
                a, b, mesh=square, shape=shape, slices=4
            ),
        }
        for name, run in ways.items():
            rows.append({"name": name, "size": size, "s": eager_s(run)})
    dist.destroy_process_group()
    return rows


def eager_s(run: Callable[[], Any], loop_s: float = 0.05) -> float:
    """Return the seconds of a call in a loop of calls, with the time of the host where that is longer."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times, turns = [], 10
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(turns):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / turns)
        turns = min(max(int(loop_s / times[-1]), 5), 500)
    return statistics.median(times[1:])


# --- scoring ----------------------------------------------------------------------------------------------------


def predicted_s(kind: str, row: dict[str, Any]) -> float:
    """Return the seconds that the catalog's H100 gives a row."""
    chip = load_cluster("dgx-h100:1").chip
    if kind.endswith("products"):
        work = matmul_work(*row["shape"], "bfloat16")
    elif kind.startswith("attention"):
        b, h, s, d = row["shape"]
        is_back = row["part"] == "backward"
        moved = 2 * b * h * d * 4 * s * (2 if is_back else 1)
        part = "input_grad" if is_back else ""
        shape = (b, h, s, s // 2 + 1, d)  # a query sees half of the keys on average
        work = Compute("call", 0, moved, dtype="bfloat16", call="attention", shape=shape, part=part)
    else:
        work = Compute("call", row["bytes"], row["bytes"], dtype="bfloat16", call="elementwise")
    seconds = shape_s(with_counts(work), chip)
    assert seconds is not None
    return seconds


def score(errors: Iterable[float]) -> dict[str, float]:
    """Return the median, mean and worst of relative errors by size, and the median with its sign."""
    signed = list(errors)
    sizes = [abs(error) for error in signed]
    return {
        "rows": len(sizes),
        "median": statistics.median(sizes),
        "mean": statistics.fmean(sizes),
        "worst": max(sizes),
        "signed_median": statistics.median(signed),
    }


def scored(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the rows with predictions, and with scores by class and for constants calibrated here."""
    scores: dict[str, Any] = {}
    for kind, measured in rows["measured"].items():
        for row in measured:
            row["predicted_s"] = predicted_s(kind, row)
            row["error"] = row["predicted_s"] / row["s"] - 1
        by_part: dict[str, list[float]] = {}
        for row in measured:
            by_part.setdefault(f"{kind} {row['part']}" if "part" in row else kind, []).append(row["error"])
        scores |= {name: score(errors) for name, errors in by_part.items()}
    out = {**rows, "scores": scores}
    if "calibrated" in rows and "random products" in rows["measured"]:
        table = parse_table(rows["calibrated"]["toml"], "calibrated.toml", "toml")
        constants = kernels_from(table, "calibrated.toml", None).product("bfloat16")
        assert constants is not None
        for kind in ("random products", "layer products"):
            own = [product_s(constants, *row["shape"], 2) / row["s"] - 1 for row in rows["measured"][kind]]
            scores[f"{kind}, calibrated here"] = score(own)
    return out


def calibrated() -> dict[str, Any]:
    """Return what `meshweave calibrate --device cuda --dtype bfloat16` fits, and how well."""
    begin = time.perf_counter()
    found = calibrate_device("cuda", "bfloat16", 150, 3, 0)
    return {
        "s": time.perf_counter() - begin,
        "products": found.num_products,
        "mean_error": found.mean_error,
        "worst_error": found.worst_error,
        "toml": kernels_toml(found.kernels, [found.quality]),
    }


def main() -> None:
    """Measure and score, or score again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true", help="score again what is saved; needs no GPU")
    parser.add_argument("--parts", default="calibrate,products,attention,passes,copies,library,sustained")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where kernels.json is")
    arguments = parser.parse_args()
    path = arguments.folder / "kernels.json"
    if arguments.predict:
        saved = json.loads(path.read_text())
        saved["rows"] = scored(saved["rows"])
        path.write_text(json.dumps(saved, indent=1) + "\n")
        print_scores(saved["rows"])
        return
    torch.manual_seed(SEED)
    rows: dict[str, Any] = {"measured": {}}
    parts: dict[str, Callable[[], Any]] = {
        "products": products,
        "attention": attention,
        "passes": passes,
    }
    alone: dict[str, tuple[str, Callable[[], Any]]] = {
        "calibrate": ("calibrated", calibrated),
        "copies": ("copies", copies),
        "sustained": ("sustained", sustained),
        "library": ("library", library),
    }
    for part in arguments.parts.split(","):
        begin = time.perf_counter()
        if part in parts:
            rows["measured"] |= parts[part]()
        else:
            name, work = alone[part]
            rows[name] = work()
        save_rows(arguments.folder, "kernels", rows)
        torch.cuda.empty_cache()
        print(f"{part}: {time.perf_counter() - begin:.1f} s", flush=True)
    rows = scored(rows)
    save_rows(arguments.folder, "kernels", rows)
    print_scores(rows)


def print_scores(rows: dict[str, Any]) -> None:
    """Print the scores of all classes, one a line."""
    for name, each in rows["scores"].items():
        print(f"{name:40} " + ", ".join(f"{key} {value:.3f}" for key, value in each.items()))
    for name in ("sustained", "copies", "library"):
        print(name, json.dumps(rows.get(name)))


if __name__ == "__main__":
    main()
