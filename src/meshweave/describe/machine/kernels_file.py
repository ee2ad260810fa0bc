"""The keys of a kernels file: the constants of a chip's products, attention, collectives, and measured tables.

A cluster file names one by `chip.kernels`: an entry of the catalog (`h100-sxm5-80gb`), or a TOML or JSON
file, found from the folder of the cluster file. `meshweave calibrate --device` writes one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from meshweave.base.errors import DescriptionError
from meshweave.base.units import DTYPES
from meshweave.describe.catalog import catalog_text, kernel_constants_names
from meshweave.describe.files import (
    Duration,
    FileModel,
    Name,
    Problem,
    Rate,
    fail,
    fail_with_all,
    file_model,
    is_path,
    load_table,
    parse_table,
    validate_table,
)
from meshweave.describe.like import table_like
from meshweave.describe.machine.kernels import (
    AttentionConstants,
    ChipKernels,
    CollectiveConstants,
    CpuProductConstants,
    ProductConstants,
    ProductTable,
    SystolicConstants,
)
from meshweave.describe.machine.measured_file import (
    LOW_PRECISIONS,
    PRODUCTS,
    SHIPPED,
    read_measured,
    shipped_measured,
)

KERNEL_DTYPES = (*DTYPES, *LOW_PRECISIONS)
"""Dtypes that kernels may have constants for. `fp8` includes the cast of A from bfloat16."""


class DtypesFile(FileModel):
    """A table of constants that some dtypes have."""

    dtypes: list[str] = Field(description="a list of dtypes that have these constants", min_length=1)


class ProductsFile(file_model(ProductConstants, DtypesFile)):  # type: ignore[misc]
    """One table of `products`: the constants of products in some dtypes; see `cost/products.py`."""


class SystolicFile(file_model(SystolicConstants, DtypesFile)):  # type: ignore[misc]
    """One table of `systolic`: the constants of products on systolic arrays; see `cost/systolic.py`."""

    window: Rate = Field(description="rows and columns of C for which operands are read once, at least 1")


class CpuProductsFile(file_model(CpuProductConstants, DtypesFile)):  # type: ignore[misc]
    """One table of `cpu_products`: the constants of products on a thread of a CPU; see `cost/products.py`."""


class AttentionFile(file_model(AttentionConstants, DtypesFile)):  # type: ignore[misc]
    """One table of `attention`: the constants of attention in some dtypes; see `cost/attention.py`."""


class KindFile(FileModel):
    """A table of constants that one kind of collective has."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"] = Field(
        description="all_gather, reduce_scatter, all_reduce or all_to_all"
    )


class CollectivesFile(file_model(CollectiveConstants, KindFile)):  # type: ignore[misc]
    """One table of `collectives`: the constants of one kind inside a host; see `cost/libraries.py`."""


class ElementwiseFile(FileModel):
    """The table `elementwise`: calls that stream through memory (norms, losses, element-wise work)."""

    launch_s: Duration = Field(description="seconds of a call of nothing, from 0 to 1e6")
    memory_bytes_per_s: Rate = Field(description="bytes per second that such calls read and write")


class TableFile(FileModel):
    """One table of `tables`: measured products, which then take the place of constants."""

    dtypes: list[str] = Field(description="a list of dtypes that these products are taken for", min_length=1)
    file: str = Field(
        "",
        description="a file of measured products (CSV), found from the folder of this file (or points); of a "
        "product that stands in it twice the fastest counts",
    )
    device: str = Field("", description="the device whose rows are taken, a string")
    dtype: str = Field("", description="the dtype whose rows are taken, a string")
    points: list[list[float]] = Field(
        [], description="the products themselves, in place of a file: a list of m, n, k and seconds each"
    )


class KernelsFile(FileModel):
    """The constants of a chip's kernels, and what they were fitted on."""

    name: Name = Field(description="the chip's name, a string of printable characters")
    source: str = Field(description="what the constants were fitted on, a string", min_length=1)
    outside: Literal["model", "error"] = Field(
        "model", description="what a product outside a table's ranges is: model (the constants) or error"
    )
    switch_reduces: bool = Field(
        False, description="true where the switch inside a host reduces (NVLink SHARP), else false"
    )
    sustained_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="the rate of products in steady training over that of `products`, at most 1",
    )
    products: list[ProductsFile] = Field(default_factory=list, description="a list of tables")
    systolic: list[SystolicFile] = Field(default_factory=list, description="a list of tables")
    cpu_products: list[CpuProductsFile] = Field(default_factory=list, description="a list of tables")
    attention: list[AttentionFile] = Field(default_factory=list, description="a list of tables")
    collectives: list[CollectivesFile] = Field(default_factory=list, description="a list of tables")
    elementwise: ElementwiseFile | None = Field(
        None, description="a table of launch_s and memory_bytes_per_s"
    )
    tables: list[TableFile] = Field(default_factory=list, description="a list of tables")


def load_kernels(name_or_path: str, folder: Path | None = None) -> ChipKernels:
    """Return the constants of a chip's kernels by a catalog name or from a TOML or JSON file.

    A file is found from `folder`; None is the working directory.

    Raises:
        DescriptionError: there is no such entry or file, or the description is wrong.
    """
    if name_or_path not in kernel_constants_names() and is_path(name_or_path):
        path = (folder or Path()) / name_or_path
        return replace(kernels_from(load_table(path), path, path.parent), reference=str(path.resolve()))
    return _from_catalog(name_or_path)


@lru_cache(maxsize=16)
def _from_catalog(name: str) -> ChipKernels:
    file = f"{name}.toml"
    kernels = kernels_from(parse_table(catalog_text("kernels", name), file, "toml"), file, None)
    return replace(kernels, reference=name)


def kernels_from(data: dict[str, Any], file: str | Path, folder: Path | None) -> ChipKernels:
    """Return the constants that the table of a kernels file describes, its key `like` merged.

    Args:
        file: what errors name.
        folder: where files of measured products are found from; None for the files in the catalog.

    Raises:
        DescriptionError: the description is wrong; the error names `file` and lists the problems.
    """
    top, problems = validate_table(KernelsFile, table_like("kernels", data, file))
    if top is None or problems:
        fail_with_all(file, problems)
    return kernels_of(top, file, folder)


def kernels_of(top: KernelsFile, file: str | Path, folder: Path | None) -> ChipKernels:
    """Return the constants of a checked kernels file.

    Args:
        file: what errors name.
        folder: where files of measured products are found from. None, or a name of the catalog that the folder
            lacks, takes those of the catalog.

    Raises:
        DescriptionError: a dtype is unknown, a value is out of range, or a file that the table names does not
            exist or is wrong.
    """
    for kind in ("products", "systolic", "cpu_products", "attention", "tables"):
        for at, entry in enumerate(getattr(top, kind)):
            unknown = [dtype for dtype in entry.dtypes if dtype not in KERNEL_DTYPES]
            if unknown:
                known = f"known dtypes: {', '.join(KERNEL_DTYPES)}"
                fail_with_all(
                    file, [Problem(f"{kind}.{at}.dtypes", f"unknown dtype '{unknown[0]}'; {known}")]
                )
    try:
        return ChipKernels(
            top.name,
            top.source,
            (
                *((d, ProductConstants(**_constants(x))) for x in top.products for d in x.dtypes),
                *((d, SystolicConstants(**_constants(x))) for x in top.systolic for d in x.dtypes),
                *((d, CpuProductConstants(**_constants(x))) for x in top.cpu_products for d in x.dtypes),
            ),
            tuple((d, AttentionConstants(**_constants(x))) for x in top.attention for d in x.dtypes),
            tuple((x.kind, CollectiveConstants(**_constants(x))) for x in top.collectives),
            (top.elementwise.launch_s, top.elementwise.memory_bytes_per_s) if top.elementwise else None,
            tuple((d, _table(x, folder)) for x in top.tables for d in x.dtypes),
            top.outside,
            top.switch_reduces,
            top.sustained_share,
        )
    except DescriptionError as error:
        fail(file, "", str(error))


def _constants(entry: FileModel) -> dict[str, Any]:
    return entry.model_dump(exclude={"dtypes", "kind"})


def _table(entry: TableFile, folder: Path | None) -> ProductTable:
    if entry.points:
        if any(len(point) != 4 or not all(size.is_integer() for size in point[:3]) for point in entry.points):
            raise DescriptionError("points of a table are m, n, k (whole numbers) and seconds each")
        return ProductTable(tuple((int(m), int(n), int(k), s) for m, n, k, s in entry.points), entry.file)
    if not (entry.file and entry.device and entry.dtype):
        raise DescriptionError("a table of products needs file, device and dtype, or points")
    shipped = folder is None or (entry.file in SHIPPED and not (folder / entry.file).exists())
    measured = shipped_measured(entry.file) if shipped else read_measured((folder or Path()) / entry.file)
    if measured.kind != PRODUCTS:
        raise DescriptionError(f"{entry.file} has {measured.kind}; give a file of products")
    rows: dict[tuple[int, ...], float] = {}
    for row in measured.rows:
        if (row.device, row.group) == (entry.device, entry.dtype):
            rows[row.sizes] = min(row.seconds, rows.get(row.sizes, row.seconds))
    if not rows:
        raise DescriptionError(f"{entry.file} has no products of {entry.device} in {entry.dtype}")
    return ProductTable.of(rows, f"{entry.file}: {entry.device}, {entry.dtype}")
