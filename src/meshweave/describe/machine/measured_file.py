"""Files of measured kernels: comma-separated rows, each one product, attention or collective on one device.

    device,dtype,m,n,k,latency_ms            (and out_dtype, where C has another one)
    device,batch_size,sequence,num_heads,num_key_value_heads,head_dim,latency_ms
    device,nccl,op,num_gpus,bytes,latency_ms

Which it is follows from the columns, whose order does not matter; further columns are left alone. `bytes` is
the size of nccl-tests: of the whole result of an all-gather, of the whole input of the others. Attention is
causal, in bfloat16.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from meshweave.base.errors import did_you_mean, printable
from meshweave.base.limits import MEASUREMENTS
from meshweave.describe.files import fail, read_text

PRODUCTS, ATTENTION, COLLECTIVES = "products", "attention", "collectives"
_COUNTS = {
    PRODUCTS: ("m", "n", "k"),
    ATTENTION: ("batch_size", "sequence", "num_heads", "num_key_value_heads", "head_dim"),
    COLLECTIVES: ("num_gpus", "bytes"),
}
_GROUPS = {PRODUCTS: ("dtype",), ATTENTION: (), COLLECTIVES: ("op",)}
_TIME = "latency_ms"
_OUT_DTYPE = "out_dtype"
_TO = " to "
_OPS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}
LOW_PRECISIONS = ("fp8", "fp8_tensor", "fp8_block", "nvfp4")
"""Precisions of products below 16 bits, by how operands are scaled.

fp8: one scale per row of A and column of B; fp8_tensor: one per tensor; fp8_block: one per 1 x 128 part of A and
128 x 128 block of B; nvfp4: 4 bits, one per 16 elements. A is cast within the measured time, B before.
"""
_DTYPES = ("bfloat16", "float16", "float32", *LOW_PRECISIONS)
_MOST = 2**48
MEASURED = (
    "gpu_gemm.csv",
    "gpu_attention.csv",
    "gpu_collectives.csv",
    "gpu_gemm_lowp.csv",
    "gpu_attention_blackwell.csv",
)
"""The files of the catalog with measured times."""
TPU_PRODUCTS = "tpu_gemm.csv"
"""The file of the catalog with products as the TPU compiler expects them."""
SHIPPED = (*MEASURED, TPU_PRODUCTS)
"""The files of the catalog."""


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """One measured kernel.

    Attributes:
        group: the dtype of a product or attention ("bfloat16 to float32": C has another one), or the kind of a
            collective.
        sizes: (m, n, k); (batch, sequence, heads, key/value heads, head dim); or (chips, bytes).
    """

    device: str
    group: str
    sizes: tuple[int, ...]
    seconds: float


def product_dtypes(group: str) -> tuple[str, str]:
    """Return the dtypes of the operands and of C, of a `group` such as "bfloat16" or "bfloat16 to float32"."""
    dtype, _, out_dtype = group.partition(_TO)
    return dtype, out_dtype or dtype


@dataclass(frozen=True)
class MeasuredKernels:
    """Measured kernels of one kind: `PRODUCTS`, `ATTENTION` or `COLLECTIVES`."""

    kind: str
    rows: tuple[MeasuredKernel, ...]


def read_measured(path: str | Path) -> MeasuredKernels:
    """Return the measured kernels in a file.

    Raises:
        DescriptionError: the file cannot be read, or is wrong; the error names file, line and column of the
            first wrong row.
    """
    return parse_measured(read_text(path), path)


def shipped_measured(name: str) -> MeasuredKernels:
    """Return the measured kernels that come with the package under a name of `SHIPPED`."""
    return parse_measured((files("meshweave") / "catalog" / "kernels" / name).read_text("utf-8"), name)


def parse_measured(text: str, file: str | Path) -> MeasuredKernels:
    """Return the measured kernels in `text`, the content of a file.

    Args:
        file: what errors name.

    Raises:
        DescriptionError: the text is no such table, has no rows or too many, or a row is wrong; the error names
            `file`, and line and column of the first wrong row.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        kind = _kind(header, file)
        rows = tuple(_rows(reader, header, kind, file))
    except csv.Error as error:
        fail(file, f"line {reader.line_num}", f"is no row of comma-separated values ({error})")
    if len(rows) > MEASUREMENTS.most:
        fail(file, "", MEASUREMENTS.refusal(len(rows)))
    if not rows:
        fail(file, "", "has no rows; give one at least")
    return MeasuredKernels(kind, rows)


def _kind(header: list[str], file: str | Path) -> str:
    for name, count in Counter(header).items():
        if name and count > 1:
            fail(file, "line 1", f"column '{printable(name)}' stands twice")
    kind = next((kind for kind, counts in _COUNTS.items() if set(counts) <= set(header)), None)
    if kind is None:
        wanted = "; or ".join(", ".join(counts) for counts in _COUNTS.values())
        shown = printable(", ".join(header)[:100]) or "nothing"
        fail(file, "line 1", f"has the columns {shown}; give {wanted}, with device and {_TIME}")
    needed = ("device", *_GROUPS[kind], *_COUNTS[kind], _TIME)
    for name in needed:
        if name not in header:
            wanted = f"{kind} need {', '.join(needed)}"
            fail(file, "line 1", f"no column '{name}'{did_you_mean(name, header)}; {wanted}")
    return kind


def _rows(
    reader: Iterator[list[str]], header: list[str], kind: str, file: str | Path
) -> Iterator[MeasuredKernel]:
    line = 1
    for values in reader:
        line = reader.line_num  # type: ignore[attr-defined]
        if not any(value.strip() for value in values):
            continue
        if len(values) != len(header):
            fail(file, f"line {line}", f"has {len(values)} values where line 1 has {len(header)} columns")
        row = {name: value.strip() for name, value in zip(header, values, strict=True)}
        yield _row(row, kind, file, line)


def _row(row: dict[str, str], kind: str, file: str | Path, line: int) -> MeasuredKernel:
    def bad(column: str, wanted: str) -> None:
        fail(file, f"line {line}, column {column}", f"'{printable(row[column][:60])}' is {wanted}")

    if not row["device"]:
        bad("device", "no name of a device")
    group = "bfloat16"
    if kind == PRODUCTS:
        group = row["dtype"]
        if group not in _DTYPES:
            bad("dtype", f"no dtype here{did_you_mean(group, _DTYPES)}; give one of {', '.join(_DTYPES)}")
        out_dtype = row.get(_OUT_DTYPE) or group
        if out_dtype not in _DTYPES:
            bad(
                _OUT_DTYPE,
                f"no dtype here{did_you_mean(out_dtype, _DTYPES)}; give one of {', '.join(_DTYPES)}",
            )
        group += _TO + out_dtype if out_dtype != group else ""
    elif kind == COLLECTIVES:
        if row["op"] not in _OPS:
            bad("op", f"no collective here{did_you_mean(row['op'], _OPS)}; give one of {', '.join(_OPS)}")
        group = _OPS[row["op"]]
    sizes = []
    for name in _COUNTS[kind]:
        text = row[name]
        if not (text.isascii() and text.isdigit() and len(text) < 16 and 1 <= int(text) <= _MOST):
            bad(name, f"no whole number from 1 to {_MOST}")
        sizes.append(int(text))
    if kind == COLLECTIVES and sizes[0] < 2:
        bad("num_gpus", "too few for a collective; give at least 2")
    if kind == ATTENTION and sizes[2] % sizes[3]:
        bad("num_key_value_heads", f"no divisor of the {sizes[2]} heads")
    try:
        milliseconds = float(row[_TIME])
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < 1e9:
        bad(_TIME, "no number of milliseconds above 0 and below 1e9")
    return MeasuredKernel(row["device"], group, tuple(sizes), milliseconds * 1e-3)
