"""The product that counts its tiles, in Triton's interpreter, against the dense one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")

CHECK = """
import torch
from meshweave.execute.cuda.tracked_product import tracked_product
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float16, torch.float32):  # its bf16 products are wrong (Triton 3.9)
    for (m, n, k), regions, adds in (((48, 40, 24), 3, False), ((32, 16, 33), 2, True), ((64, 33, 16), 4, True)):
        a = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
        b = torch.randint(-2, 3, (n, k), generator=generator).to(dtype).t()
        out = torch.ones(m, n) if adds else torch.full((m, n), float("nan"))
        counters = torch.zeros(regions, dtype=torch.int32)
        for run in (1, 2):
            block = {"block": (16, 16, 16), "num_programs": 5}
            tiles = tracked_product(a, b, out, counters, regions - 1, adds=adds, **block)
            expected = a.float() @ b.float()
            assert torch.equal(out, run * expected + 1 if adds else expected), (dtype, m, adds)
            assert counters.tolist() == [run * tiles] * regions, counters
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton")
def test_tiles_are_right_and_counted_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when a kernel is defined."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", CHECK], env=env, check=True, timeout=120)
