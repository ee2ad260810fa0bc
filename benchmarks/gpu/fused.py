"""Track and trigger on one GPU: what counting tiles costs, and copies that start as regions are whole.

python benchmarks/gpu/fused.py [--folder FOLDER]    # measure on a CUDA device, save tracked.json, triggered.json
TRITON_INTERPRET=1 python benchmarks/gpu/fused.py --dry    # small products on a CPU; saves nothing

Products are those of T3's sub-layers in bfloat16, in as many regions as there are ranks. "Untracked" is the same
kernel without its counters. Copies go to memory of the same device, or to the host's by a copy engine. One device
cannot tell how fast copies to another one are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshweave.execute.cuda.tiling import Block
from meshweave.execute.cuda.tracked_product import TrackedProduct, TrackedRegion
from meshweave.execute.cuda.trigger import StreamWords, copy_when_whole
from meshweave_studies.t3.models import FUTURE, LARGE, STUDIED, sub_layers

if TYPE_CHECKING:
    from device import KeptRows

BLOCKS = (
    Block(128, 256, 64, 8, 3),
    Block(128, 256, 64, 8, 4),
    Block(256, 128, 64, 8, 3),
    Block(128, 128, 64, 4, 4),
    Block(128, 128, 64, 8, 3),
)
REPETITIONS = 20
LLAMA = ((8192, 4096, 512, 8), (8192, 4096, 1792, 8), (8192, 8192, 1024, 8), (8192, 8192, 3584, 8))
"""Products before the reduce-scatter of Llama 3 8B and 70B on 8 ranks: of attention, and of the other part."""
DRY_SHAPES = ((48, 40, 32, 3), (64, 32, 16, 4))


def shapes() -> list[tuple[int, int, int, int]]:
    """Return rows, columns, depth and ranks of the products of the paper's sub-layers, each once."""
    products = [layer.product for layer in sub_layers(*STUDIED, *LARGE, *FUTURE)]
    paper = [(of.rows, of.columns, of.depth, of.ranks) for of in products]
    return list(dict.fromkeys([*LLAMA, *paper]))


class Case:
    """A product on one rank: its operands, a result in regions and their counters."""

    def __init__(self, rows: int, columns: int, depth: int, ranks: int, device: torch.device) -> None:
        """Take memory, with random operands."""
        dtype = torch.bfloat16
        self.a = torch.randn(rows, depth, device=device).to(dtype)
        self.b = torch.randn(depth, columns, device=device).to(dtype)
        self.out = torch.zeros(rows, columns, device=device, dtype=dtype)
        self.counters = torch.zeros(ranks, device=device, dtype=torch.int32)
        size = rows // ranks
        self.regions = [  # in the order of rank 0 of a ring: its neighbour's part first, its own last
            TrackedRegion(self.a[at : at + size], self.b, self.out[at : at + size], self.counters[at // size])
            for at in range(rows - size, -1, -size)
        ]

    def product(self, block: Block | None, *, counts: bool = True) -> TrackedProduct:
        """Return the kernel, tracked or not."""
        return TrackedProduct(self.regions, block=block, counts=counts)

    def error(self, product: TrackedProduct) -> float:
        """Return the largest error of a run, relative to the largest element of the dense product."""
        self.out.zero_()
        self.counters.zero_()
        product()
        dense = self.a.float() @ self.b.float()
        assert [int(region.counter) for region in self.regions] == list(product.num_tiles)
        return float((self.out.float() - dense).abs().max() / dense.abs().max())


def medians_s(runs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the median seconds of each run, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(REPETITIONS + 3 if device.type == "cuda" else 2):
        for name, run in runs.items():
            seconds = timed_s(run, device)
            if repetition >= 3 or device.type != "cuda":
                times[name].append(seconds)
    return {name: statistics.median(listed) for name, listed in times.items()}


def timed_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a run on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000)  # the host queues all of the run meanwhile
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3


def product_row(
    shape: tuple[int, int, int, int], blocks: Sequence[Block], device: torch.device
) -> dict[str, Any]:
    """Measure one product: tracked, untracked, and cuBLAS's."""
    case = Case(*shape, device)
    by_block = {}
    for block in blocks:
        try:
            product = case.product(block)
            assert case.error(product) < 0.02, (shape, block)
            by_block[block] = medians_s({"tracked": product}, device)["tracked"]
        except RuntimeError as error:  # a block that does not fit the device
            print(f"{shape} {block}: {str(error).splitlines()[0]}")
    best = min(by_block, key=lambda block: by_block[block])
    runs = {
        "tracked": case.product(best),
        "untracked": case.product(best, counts=False),
        "cublas": lambda: torch.mm(case.a, case.b, out=case.out),
    }
    return {
        "shape": shape,
        "block": asdict(best),
        **{f"{k}_s": v for k, v in medians_s(runs, device).items()},
    }


class TriggeredCopies:
    """A product on one stream, and on another the copies of its regions, which start as regions are whole."""

    def __init__(self, case: Case, block: Block, target: Tensor) -> None:
        """Bind the product and the parts of `target` that its regions go to."""
        device = case.out.device
        self._case, self._product, self._words = case, case.product(block), StreamWords(device)
        self._compute, self._dma = torch.cuda.Stream(device), torch.cuda.Stream(device)
        size = len(target) // len(case.regions)
        self._parts = list(reversed(target.split(size)))  # as the regions are listed
        self._runs = 0
        case.counters.zero_()

    def product(self) -> None:
        """Queue the product alone."""
        self._runs += 1
        with self._beside(self._compute):
            self._product()

    def copies(self) -> None:
        """Queue the copies alone."""
        with self._beside(self._dma):
            for region, part in zip(self._case.regions, self._parts, strict=True):
                part.copy_(region.out, non_blocking=True)

    def together(self) -> None:
        """Queue the product and the copies that it triggers."""
        caller = torch.cuda.current_stream()
        for stream in (self._compute, self._dma):
            stream.wait_stream(caller)
        self._runs += 1
        with torch.cuda.stream(self._compute):
            self._product()
        with torch.cuda.stream(self._dma):
            for region, part, tiles in zip(
                self._case.regions, self._parts, self._product.num_tiles, strict=True
            ):
                assert region.counter is not None
                copy_when_whole(self._words, part, region.out, region.counter, self._runs * tiles)
        for stream in (self._compute, self._dma):
            caller.wait_stream(stream)

    @contextmanager
    def _beside(self, stream: Any) -> Iterator[None]:
        caller = torch.cuda.current_stream()
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            yield
        caller.wait_stream(stream)


def triggered_rows(
    shape: tuple[int, int, int, int], block: Block, device: torch.device
) -> list[dict[str, Any]]:
    """Measure a product beside copies of its regions, to the same device and to the host."""
    rows = []
    for where in ("same device", "host"):
        case = Case(*shape, device)
        target = torch.empty_like(case.out)
        if where == "host":
            target = torch.empty(case.out.shape, dtype=case.out.dtype, pin_memory=True)
        copies = TriggeredCopies(case, block, target)
        runs = {"product": copies.product, "copies": copies.copies, "together": copies.together}
        times = medians_s(runs, device)
        assert torch.equal(target.to(device), case.out), (shape, where)
        rows.append({"shape": shape, "copies_to": where, **{f"{name}_s": of for name, of in times.items()}})
    return rows


def main() -> None:
    """Measure and save, or try it on a CPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where results go; default benchmarks/results/gpu")
    parser.add_argument("--parts", default="tracked,triggered", help="which of them, between commas")
    parser.add_argument("--dry", action="store_true", help="small products on a CPU, in Triton's interpreter")
    arguments = parser.parse_args()
    if arguments.dry:
        for shape in DRY_SHAPES:
            row = product_row(shape, [Block(16, 16, 16)], torch.device("cpu"))
            print(f"{row['shape']}: tracked tiles are right and counted")
        return
    from device import FOLDER, KeptRows

    device, folder = torch.device("cuda:0"), (arguments.folder or FOLDER).resolve()
    parts = {"tracked": tracked, "triggered": triggered}
    for part in arguments.parts.split(","):
        parts[part](KeptRows(folder, "tracked"), KeptRows(folder, "triggered"), device)


def tracked(products: KeptRows, copies: KeptRows, device: torch.device) -> None:
    """Measure the products that are not measured yet."""
    for shape in shapes():
        of = products.keep(str(shape), partial(product_row, shape, BLOCKS, device))
        of_untracked, of_cublas = (of["tracked_s"] / of[f"{name}_s"] for name in ("untracked", "cublas"))
        print(
            f"{shape}: {of['tracked_s'] * 1e6:.0f} us, {of_untracked:.3f} x untracked, {of_cublas:.3f} x cuBLAS",
            *of["block"].values(),
            flush=True,
        )


def triggered(products: KeptRows, copies: KeptRows, device: torch.device) -> None:
    """Measure copies beside the products that are measured."""
    for key, row in products.rows.items():
        block = Block(**row["block"])
        for of in copies.keep(key, partial(triggered_rows, row["shape"], block, device)):
            ratio = of["together_s"] / max(of["product_s"], of["copies_s"])
            print(f"{of['shape']} copies to {of['copies_to']}: together {ratio:.3f} x the longer", flush=True)


if __name__ == "__main__":
    main()
