"""Programs compiled here for TPUs that are not there."""

from __future__ import annotations

import pytest

import meshweave as mw
from meshweave.execute.jax.tpu import TPU_TARGETS, has_tpu_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_tpu_compiler(), reason="needs the TPU compiler: pip install 'meshweave[tpu]'"),
]


@pytest.mark.parametrize("target", ["tpu-v4-core", "tpu-v5e"])
@pytest.mark.parametrize("emission", ["collectives", "rings"])
def test_a_product_is_compiled_and_read(target: str, emission: str) -> None:
    """Gathers are synchronous; permutes are asynchronous, and some have a product beside them."""
    from meshweave.execute.jax.compiled import compile_program, emission_named

    problem = mw.Matmul2dProblem(4096, 4096, 4096, (4, 4), dtype="bfloat16")
    program = mw.algorithm("meshslice").program(problem, mw.Matmul2dConfig((1,) * 4))
    compiled = compile_program(program, TPU_TARGETS[target], emission_named(emission))
    collectives = compiled.module.collectives
    sent = {
        axis: sum(one.sent_bytes for one in collectives if one.axis(compiled.axes) == axis)
        for axis in ("row", "col")
    }
    assert sent == {"row": 3 * 1024 * 1024 * 2, "col": 3 * 1024 * 1024 * 2}
    assert {one.mode for one in collectives} == {"asynchronous" if emission == "rings" else "synchronous"}
    assert any(one.products for one in collectives) == (emission == "rings")
    time = compiled.time()
    assert time.total_s >= time.product_s > 0.7 * 2 * 4096**3 / 16 / compiled.target.peak_flops_per_s
    assert compiled.peak_bytes > 3 * 1024 * 1024 * 2
