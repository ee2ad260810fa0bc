"""Programs compiled here for TPUs that are not there."""

from __future__ import annotations

import pytest

import meshweave as mw
from meshweave_studies.tpu.targets import TPU_TARGETS, has_tpu_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_tpu_compiler(), reason="needs the TPU compiler: pip install 'meshweave[tpu]'"),
]


# Mode of the collectives of MeshSlice in four slices, and how many of how many have a product beside them.
MADE = {
    ("tpu-v4-core", "collectives"): ({"synchronous"}, 0, 8),
    ("tpu-v4-core", "fused"): ({"synchronous", "fused"}, 6, 8),
    ("tpu-v4-core", "ordered-rings"): ({"asynchronous"}, 18, 24),
    ("tpu-v5e", "collectives"): ({"synchronous", "fused"}, 3, 8),
    ("tpu-v5e", "fused"): ({"synchronous", "fused"}, 6, 8),
    ("tpu-v5e", "rings"): ({"asynchronous"}, 6, 24),
}


@pytest.mark.parametrize(("target", "emission"), MADE)
def test_a_product_is_compiled_and_read(target: str, emission: str) -> None:
    """All but the first transfers of each axis run beside products where the emission puts them there."""
    from meshweave_studies.tpu.compiled import compile_program, emission_named

    problem = mw.algorithms.Matmul2dProblem(4096, 4096, 4096, (4, 4), dtype="bfloat16")
    program = mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 4))
    compiled = compile_program(program, TPU_TARGETS[target], emission_named(emission))
    collectives = compiled.module.collectives
    sent = {
        axis: sum(one.sent_bytes for one in collectives if one.axis(compiled.axes) == axis)
        for axis in ("row", "col")
    }
    assert sent == {"row": 3 * 1024 * 1024 * 2, "col": 3 * 1024 * 1024 * 2}
    modes, beside, count = MADE[target, emission]
    assert {one.mode for one in collectives} == modes and len(collectives) == count
    assert sum(bool(one.products) for one in collectives) == beside
    if emission in ("fused", "ordered-rings"):
        assert compiled.module.num_exposed_within == 0
    time = compiled.time()
    assert time.total_s >= time.product_s > 0.7 * 2 * 4096**3 / 16 / compiled.target.peak_flops_per_s
    assert (
        compiled.peak_bytes >= 3 * 1024 * 1024 * 2
    )  # shards of A, B and C; the rest may fit into vector memory
