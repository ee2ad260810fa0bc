"""`reproduce kernels`: files of measured kernels, their scores, and the saved results of the fit."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshweave.base.errors import DescriptionError
from meshweave.calibrate.cluster_toml import kernels_toml
from meshweave.calibrate.kernel_fit import Hardware, fit_products
from meshweave.cli.app import run_app
from meshweave.cost.attention import attention_seconds
from meshweave.cost.libraries import collective_seconds
from meshweave.cost.products import product_seconds
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.kernels import AttentionConstants, CollectiveConstants, ProductConstants
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.describe.machine.measured_file import (
    MEASURED,
    PRODUCTS,
    SHIPPED,
    parse_measured,
    product_dtypes,
    shipped_measured,
)
from meshweave_studies.kernels.fits import fit_attention, fit_collective
from meshweave_studies.kernels.score import catalog_kernels, score_kernels
from meshweave_studies.kernels.tables import results_page
from sampling import mostly_slow

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text())
GEMM = "device,dtype,m,n,k,latency_ms\n"


def error_of(text: str) -> str:
    with pytest.raises(DescriptionError) as raised:
        parse_measured(text, "f.csv")
    (line,) = str(raised.value).splitlines()
    return line


def test_the_kind_follows_from_the_columns() -> None:
    kinds = [shipped_measured(name).kind for name in SHIPPED]
    assert kinds == ["products", "attention", "collectives", "products", "attention", "products"]
    turned = parse_measured("k,latency_ms,more,n,m,dtype,device\n3,0.5,x,2,1,fp8,H\n\n", "f.csv")
    assert turned.kind == PRODUCTS and turned.rows[0].sizes == (1, 2, 3)
    assert turned.rows[0].seconds == 0.5e-3
    both = parse_measured(
        "device,dtype,out_dtype,m,n,k,latency_ms\nT,bfloat16,float32,1,2,3,1\n", "f.csv"
    ).rows
    assert product_dtypes(both[0].group) == ("bfloat16", "float32")
    assert product_dtypes("fp8") == ("fp8", "fp8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.csv: line 1: has the columns nothing; give m, n, k; or batch_size,"),
        ("a,b\n1,2\n", "f.csv: line 1: has the columns a, b; give m, n, k"),
        ("m,n,k,latency_ms,device\n", "f.csv: line 1: no column 'dtype'"),
        (GEMM, "f.csv: has no rows; give one at least"),
        (GEMM + "H,fp8,1,2,3\n", "f.csv: line 2: has 5 values where line 1 has 6 columns"),
        (GEMM + "H,fp8,1,2,3,1\nH,fp8,1,x,3,1\n", "f.csv: line 3, column n: 'x' is no whole number"),
        (GEMM + "H,fp8,0,2,3,1\n", "f.csv: line 2, column m: '0' is no whole number from 1"),
        (GEMM + "H,fp8,1,2,3,nan\n", "f.csv: line 2, column latency_ms: 'nan' is no number of milliseconds"),
        (GEMM + "H,bf16,1,2,3,1\n", "f.csv: line 2, column dtype: 'bf16' is no dtype here"),
        (GEMM + ",fp8,1,2,3,1\n", "f.csv: line 2, column device: '' is no name of a device"),
        (
            "device,op,num_gpus,bytes,latency_ms\nH,gather,2,8,1\n",
            "line 2, column op: 'gather' is no collective",
        ),
        (
            "device,op,num_gpus,bytes,latency_ms\nH,all_gather,1,8,1\n",
            "line 2, column num_gpus: '1' is too few",
        ),
        (
            "device,dtype,out_dtype,m,n,k,latency_ms\nT,bfloat16,f32,1,2,3,1\n",
            "line 2, column out_dtype: 'f32' is no dtype here",
        ),
        ("m,m,n,k,dtype,device,latency_ms\n", "f.csv: line 1: column 'm' stands twice"),
    ],
)
def test_bad_files(text: str, message: str) -> None:
    assert message in error_of(text)


def test_seeded_damage_is_one_line_and_never_an_exception() -> None:
    draw, refused = random.Random(18), 0
    for name in SHIPPED:
        lines = shipped_text(name).splitlines()[:6]
        for _ in range(120):
            text = list("\n".join(lines) + "\n")
            for _ in range(draw.randint(1, 3)):
                text[draw.randrange(len(text))] = draw.choice([*"\0\n\r,\"'-e.9 é", ""])
            try:
                parse_measured("".join(text), "f.csv")
            except DescriptionError as error:
                refused += 1
                assert str(error).startswith("f.csv: ") and "\n" not in str(error)
    assert refused > 100


def shipped_text(name: str) -> str:
    return (ROOT / "src" / "meshweave" / "catalog" / "kernels" / name).read_text()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gemm.csv"
    rows = "H100-SXM5-80GB,bfloat16,4096,4096,4096,0.2\nL40S,bfloat16,64,64,64,0.01\n"
    file.write_text(GEMM + rows)
    assert run_app(["reproduce", "kernels", "--cases", str(file), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["products"]
    assert [(x["device"], x["method"], x["rows"]) for x in scores] == [
        ("H100-SXM5-80GB", "model", 1),
        ("H100-SXM5-80GB", "table", 1),
        ("L40S", "no constants", 1),
    ]
    constants = load_kernels("h100-sxm5-80gb").product("bfloat16")
    assert constants is not None
    seconds = float(product_seconds(constants, 4096, 4096, 4096, 2))
    assert scores[0]["mean"] == pytest.approx(abs(seconds / 0.2e-3 - 1), abs=1e-4)
    assert run_app(["reproduce", "kernels", "--cases", str(file)]) == 0
    assert "| L40S | bfloat16 | no constants | all | 1 | - | - | - |" in capsys.readouterr().out
    file.write_text(GEMM + rows + "H,fp8,1,2,3,-1\n")
    assert run_app(["reproduce", "kernels", "--cases", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "gemm.csv: line 4, column latency_ms: '-1' is no number" in line


def test_rows_of_all_files_that_ship_are_scored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the first row of each file: two files have products, and two have attentions."""
    first = {name: replace(of, rows=of.rows[:1]) for name in SHIPPED if (of := shipped_measured(name))}
    monkeypatch.setattr("meshweave.describe.machine.measured_file.shipped_measured", first.__getitem__)
    assert run_app(["reproduce", "kernels", "--json"]) == 0
    scored = [score["device"] for of in json.loads(capsys.readouterr().out).values() for score in of]
    assert {of.rows[0].device for of in first.values()} <= {*scored} and len(scored) >= len(SHIPPED)


def test_rows_that_constants_made_have_no_error() -> None:
    kernels = load_kernels("a100-sxm4-80gb")
    products = kernels.product("bfloat16")
    assert products is not None
    lines = [
        f"A,bfloat16,{m},{n},{k},{1e3 * float(product_seconds(products, m, n, k, 2))!r}"
        for m, n, k in ((1, 64, 64), (300, 4096, 512), (8192, 8192, 8192))
    ]
    scores = score_kernels(parse_measured(GEMM + "\n".join(lines), "f"), lambda _: kernels, lambda *_: None)
    assert [(score.subset, score.rows, score.worst) for score in scores] == [
        ("m >= 256", 2, 0.0),
        ("m < 256", 1, 0.0),
    ]


def test_fits_find_the_constants_that_made_the_times(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    sizes = np.exp(draw.uniform(np.log(16), np.log(8192), (200, 3))).round()
    made = ProductConstants("gpu", 108, 2.5e14, 1e11, 2e-6, 3e-6, 1.5e12, 0.7, 2.0, 0.5, 0.02)
    seconds = product_seconds(made, *sizes.T, 2)
    fitted = fit_products(sizes, seconds, Hardware(108, 312e12, 2.039e12), "gpu", 2)
    errors = np.abs(product_seconds(fitted, *sizes.T, 2) / seconds - 1)
    assert errors.mean() < 0.01
    columns = np.stack([2.0 ** draw.integers(0, 9, 80), 2.0 ** draw.integers(8, 14, 80), np.full(80, 128.0)])
    heads, length, width = columns
    num_bytes = 8 * heads * length * width
    attention = AttentionConstants(132, 64, 6e14, 1e-6, 1e-5, 2e12, 0.4, 1.5, 0.02)
    seconds = attention_seconds(attention, heads, length, length, width, num_bytes, True)
    fit = fit_attention(
        np.column_stack([heads, length, width, num_bytes]), seconds, Hardware(132, 989e12, 3e12)
    )
    again = attention_seconds(fit, heads, length, length, width, num_bytes, True)
    assert np.abs(again / seconds - 1).mean() < 0.01
    chips, size = 2.0 ** draw.integers(1, 4, 80), 2.0 ** draw.integers(10, 30, 80)
    collective = CollectiveConstants(5e-6, 1e-6, 5e10, 8e-6, 5e-7, 3e11, 2e-9, 0.4)
    seconds = collective_seconds(collective, "all_reduce", chips, size)
    of = fit_collective("all_reduce", chips, size, seconds)
    assert np.abs(collective_seconds(of, "all_reduce", chips, size) / seconds - 1).mean() < 0.02


def test_a_kernels_file_is_read_as_written(tmp_path: Path) -> None:
    kernels = load_kernels("h200-sxm")
    (tmp_path / "mine.toml").write_text(kernels_toml(kernels, ["a comment"]))
    assert load_kernels("mine.toml", tmp_path) == kernels
    text = (ROOT / "src/meshweave/catalog/clusters/dgx-h100.toml").read_text()
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(text.replace('kernels = "h100-sxm5-80gb"', 'kernels = "mine.toml"'))
    assert load_cluster(cluster).chip.kernels == kernels
    table = '[[tables]]\ndtypes = ["bfloat16"]\nfile = "gemm.csv"\ndevice = "X"\ndtype = "bfloat16"\n'
    (tmp_path / "mine.toml").write_text(f'name = "X"\nsource = "a test"\noutside = "error"\n{table}')
    (tmp_path / "gemm.csv").write_text(GEMM + "X,bfloat16,8,8,8,0.5\nY,bfloat16,8,8,8,0.7\n")
    read = load_cluster(cluster).chip.kernels
    assert read is not None and read.outside == "error"
    assert read.tables[0][1].points == ((8, 8, 8, 0.5e-3),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "X"\n', "source"),
        ('name = "X"\nsource = "s"\n[[products]]\ndtypes = ["bf16"]\n', "products"),
        (
            'name = "X"\nsource = "s"\n[elementwise]\nlaunch_s = -1\nmemory_bytes_per_s = 1e9\n',
            "elementwise.launch_s",
        ),
        (
            'name = "X"\nsource = "s"\n[[tables]]\ndtypes = ["bfloat16"]\nfile = "gpu_gemm.csv"\n'
            'device = "none"\ndtype = "fp8"\n',
            "has no products of none in fp8",
        ),
    ],
)
def test_bad_kernels_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(DescriptionError, match=re.escape(message)) as raised:
        load_kernels("bad.toml", tmp_path)
    assert "bad.toml" in str(raised.value)


@pytest.mark.parametrize("name", mostly_slow(sorted(MEASURED), 2))
def test_the_committed_constants_are_those_of_the_saved_results(name: str) -> None:
    """Scores of the committed constants on all rows are near those of parts that were not fitted."""
    measured = shipped_measured(name)
    for score in score_kernels(measured, catalog_kernels, lambda *_: None):
        saved = next(
            x
            for x in RESULTS["held_out"][measured.kind]
            if (x["device"], x["group"], x["method"], x["subset"])
            == (score.device, score.group, "model", score.subset)
        )
        assert score.rows == saved["rows"]
        assert score.mean is not None and score.mean < saved["mean"] + 0.01, (score, saved)


def test_the_page_is_generated() -> None:
    committed = (ROOT / "validation" / "results" / "kernels.md").read_text()
    assert results_page(RESULTS) == committed, "run python validation/fit_kernels.py"
