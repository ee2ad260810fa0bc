"""Memory and FLOPs of a step against the closed forms of the papers they come from."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from meshweave.base.errors import DescriptionError
from meshweave.describe.catalog import models
from meshweave.describe.model import load_model
from meshweave.describe.model.memory import RECOMPUTES, activation_bytes, chip_memory, step_flops
from meshweave.describe.model.workload import Workload

GPT3 = load_model("gpt3")
WORK = Workload(8, 2048)


def test_activations_of_a_gpt_block_are_equation_1_of_korthikanti() -> None:
    s, b, h, a = WORK.sequence, WORK.batch, GPT3.hidden, GPT3.num_heads
    assert activation_bytes(GPT3, WORK) == s * b * h * (34 + Fraction(5 * a * s, h))
    assert activation_bytes(GPT3, WORK, "selective") == 34 * s * b * h
    assert activation_bytes(GPT3, WORK, "full") == 2 * s * b * h


def test_flops_of_a_gpt_step_are_equation_7_of_korthikanti() -> None:
    s, b, h, layers, v = WORK.sequence, WORK.batch, GPT3.hidden, GPT3.num_layers, GPT3.vocab_size
    assert v is not None
    factor = 1 + Fraction(s, 6 * h) + Fraction(v, 12 * h * layers)
    assert step_flops(GPT3, WORK, "all") == 72 * b * s * layers * h * h * factor


def test_mixed_precision_adam_takes_16_bytes_per_parameter() -> None:
    """ZeRO, section 3.1: 2 + 2 + 12; its example of 1.5 billion parameters takes at least 24 GB."""
    memory = chip_memory(GPT3, WORK, 1)
    assert memory.state_bytes == 16 * GPT3.num_parameters
    assert memory.optimizer_bytes == 12 * GPT3.num_parameters
    assert chip_memory(GPT3, replace(WORK, dtype="float32"), 1).state_bytes == 16 * GPT3.num_parameters


@pytest.mark.parametrize("name", models())
def test_everything_is_sharded_over_all_chips(name: str) -> None:
    model = load_model(name)
    whole, part = chip_memory(model, WORK, 1), chip_memory(model, WORK, 64)
    for kind in RECOMPUTES:
        assert 0 <= 64 * part.total_bytes(kind) - whole.total_bytes(kind) < 64 * 4
    totals = [part.total_bytes(kind) for kind in RECOMPUTES]
    assert totals == sorted(totals, reverse=True)


def test_a_gated_ffn_and_grouped_heads_count_what_they_keep() -> None:
    """Llama 3 70B by hand: h 8192, 64 query and 8 key-value heads of 128, f 28672."""
    model, work = load_model("llama-3-70b"), Workload(1, 1024)
    per_token = 2 * (8192 + 2 * 8192 + 2 * 1024) + 8192 + 2 * (8192 + 4 * 28672) + 8192 + 4 * 8192
    assert activation_bytes(model, work, "selective") == 1024 * per_token


def test_what_fits_is_said() -> None:
    memory = chip_memory(GPT3, Workload(128, 2048), 256)
    assert memory.least_recompute(memory.total_bytes("selective")) == "selective"
    assert memory.least_recompute(memory.state_bytes) is None
    assert "fits with selective recomputation" in memory.summary(memory.total_bytes("selective"))
    assert "does not fit" in memory.summary(1)
    assert memory.summary(10**15).endswith("TB: fits")


def test_mistakes() -> None:
    with pytest.raises(DescriptionError, match="at least 1"):
        chip_memory(GPT3, WORK, 0)
    with pytest.raises(DescriptionError, match="not trained in int8"):
        chip_memory(GPT3, replace(WORK, dtype="int8"), 4)
