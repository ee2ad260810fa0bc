"""Descriptions say which of their costs are zero."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshweave.cli.app import run_app
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.left_out import costs_left_out, unmeasured_kernels
from meshweave.describe.machine.levels import link_levels
from meshweave.describe.machine.network import with_axes


def test_zero_costs_are_named_and_others_are_not() -> None:
    for name in ("dgx-h100", "dgx-a100", "tpu-v4-pod"):
        assert not costs_left_out(load_cluster(name)), name
    assert "nvlink, nic costs nothing" in costs_left_out(load_cluster("p3.8xlarge"))
    assert "synchronising on x, y costs" in costs_left_out(load_cluster("tpu-v5e"))
    assert link_levels(load_cluster("tpu-v5e"))[0][0] == "links of x, y", "one slice crosses no other links"
    dgx = load_cluster("dgx-h100")
    bare = replace(
        dgx, network=with_axes(dgx.network, lambda axis: replace(axis, launch_s=0.0, link_latency_s=0.0))
    )
    assert "costs nothing" in costs_left_out(bare)


def test_rates_that_nobody_measured_are_named_by_dtype() -> None:
    v100, h100 = (load_cluster(name).chip for name in ("p3.8xlarge", "dgx-h100"))
    assert "priced at the peak of its datasheet, 125 TFLOP/s" in unmeasured_kernels(v100, "float16")
    assert not unmeasured_kernels(h100, "bfloat16") and unmeasured_kernels(h100, "float32")
    fitted = load_cluster("tpu-v4-pod").chip
    assert "at 91.54 % of the peak of its datasheet, 249 TFLOP/s" in unmeasured_kernels(fitted, "bfloat16")


def test_a_plan_says_so_beside_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan",
        "--products",
        "llama-2-7b",
        "--batch",
        "8",
        "--dtype",
        "float16",
        "--algorithms",
        "collective",
        "--cluster",
    ]
    assert run_app([*arguments, "p3.8xlarge"]) == 0
    assert "costs nothing" in " ".join(capsys.readouterr().out.split())
    assert run_app([*arguments, "dgx-h100:32"]) == 0
    assert "costs nothing" not in " ".join(capsys.readouterr().out.split())
