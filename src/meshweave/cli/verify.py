"""`meshweave verify`: every planned product at reduced size, in process and on local processes."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from meshweave.algorithms.matmul2d import MatmulProblem, algorithm
from meshweave.algorithms.matmul2d.common.passes import pass_problem
from meshweave.base.errors import DescriptionError, LayoutError, MeshweaveError, nearest
from meshweave.cli.options import JSON_HELP, print_json, progress_bar
from meshweave.execute.numpy import run_numpy
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.text import to_text
from meshweave.lower import lower_rings
from meshweave.nn.rehearse import Rehearsal, operand, read_log, reduced
from meshweave.tune import Plan, load_plan
from meshweave.tune.plan import Candidate, LayerPlan, PassPlan
from meshweave.tune.search import Progress

ORDER_SEEDS = (None, 1, 2)
"""Orders in which each product runs in process: that of the program, and two other legal ones."""


def verify(
    plan: Annotated[Path, typer.Argument(help="A plan written by `meshweave plan --out`.")],
    ranks: Annotated[int, typer.Option(help="Local processes, and size of the meshes.")] = 4,
    layer: Annotated[
        str, typer.Option(help="A layer of the plan (qkv, out, ff1, ff2), several with commas, or 'all'.")
    ] = "all",
    algorithms: Annotated[
        str, typer.Option("--algorithm", help="Algorithms of the plan, with commas, or 'all'.")
    ] = "all",
    max_dim: Annotated[
        int, typer.Option(help="Sizes are reduced in proportion until no dim is larger.")
    ] = 512,
    rings: Annotated[
        int, typer.Option(help="On processes, run collectives as rings of 1 or 2 ways, or 0: as gloo's own.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the operands.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which the processes are stopped.")] = 300.0,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> int | None:
    """Check every planned product at reduced size: forward and both backward products of every layer.

    (a) In this process, on numpy: the program is validated, on index labels too, and run in several legal
    orders and lowered to rings. (b) On local processes over gloo, started once for all products. Both must
    give exactly the dense product. What cannot be checked is listed with the reason.

    Exit status 0: all that was checked is right; 1: something is wrong; 2: the input is.

    Example: meshweave verify plan.json --ranks 4
    """
    loaded = load_plan(plan)
    if not 1 <= ranks <= 64:
        raise LayoutError(f"{ranks} local processes: give 1 to 64")
    if not (8 <= max_dim <= 4096 and 0 < timeout < 1e6 and 0 <= seed < 1 << 63):
        raise LayoutError("max-dim must be 8 to 4096, timeout positive seconds, seed at least 0")
    if rings not in (0, 1, 2):
        raise LayoutError(f"a ring has 1 or 2 ways, or 0 for none, not {rings}")
    products = _products(loaded, layer, algorithms, ranks, max_dim)
    if all(product.skipped for product in products):
        raise LayoutError(
            f"nothing to check on {ranks} ranks: {products[0].algorithm}: {products[0].skipped}"
        )
    checked = _in_process([p for p in products if not p.skipped], rings, seed)
    not_run = _on_processes(checked, ranks, rings, seed, timeout)
    report = {
        "ranks": ranks,
        "processes": not_run or "ran",
        "products": [product.to_json() for product in checked],
        "skipped": [product.to_json() for product in products if product.skipped],
        "wrong": sum(product.is_wrong for product in checked),
    }
    if json:
        print_json(report)
    else:
        _print(checked, products, not_run, ranks)
    return 1 if report["wrong"] else 0


@dataclass
class _Product:
    """One product and what was found: an error against the dense product, or why there is none."""

    algorithm: str
    layer: str
    item: PassPlan
    problem: MatmulProblem | None
    program: Program | None
    skipped: str = ""
    numpy_error: float | None = None
    gloo_error: float | None = None
    failed: str = ""
    unproved: str = ""

    @property
    def title(self) -> str:
        return f"{self.algorithm}, {self.layer} {self.item.name.replace('_', ' ')}"

    @property
    def is_wrong(self) -> bool:
        return bool(self.failed or self.numpy_error or self.gloo_error)

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"algorithm": self.algorithm, "layer": self.layer, "pass": self.item.name}
        if self.problem is None or self.skipped:
            return shown | {"reason": self.skipped}
        p = self.problem
        return shown | {
            "dataflow": p.dataflow,
            "mesh_shape": list(p.mesh_shape),
            "m_n_k": [p.m, p.n, p.k],
            "config": str(self.item.config),
            "max_abs_error_in_process": self.numpy_error,
            "max_abs_error_on_processes": self.gloo_error,
            "failed": self.failed,
            "unproved": self.unproved,
        }


# --- what is to be checked ------------------------------------------------------------------------------


def _products(plan: Plan, layers: str, algorithms: str, ranks: int, max_dim: int) -> list[_Product]:
    names = [c.algorithm for c in plan.candidates] if algorithms == "all" else _listed(algorithms)
    known = [item.name for item in plan.best.layers]
    wanted = known if layers == "all" else _listed(layers)
    for name in wanted:
        if name not in known:
            raise DescriptionError(
                f"the plan has no layer '{name}'{nearest(name, known)}; it has {', '.join(known)}"
            )
    return [
        product
        for candidate in map(plan.candidate, names)
        for layer in candidate.layers
        if layer.name in wanted
        for product in _products_of(candidate, layer, ranks, max_dim)
    ]


def _listed(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise DescriptionError("the list of names is empty; give some, with commas between, or 'all'")
    return names


def _products_of(candidate: Candidate, layer: LayerPlan, ranks: int, max_dim: int) -> Iterator[_Product]:
    entry, name = algorithm(candidate.entry), candidate.algorithm
    shapes = entry.meshes(ranks)
    if not shapes:
        for item in layer.passes:
            yield _Product(name, layer.name, item, None, None, f"{entry.name} has no mesh of {ranks} ranks")
        return
    planned = layer.tokens, layer.in_features, layer.out_features
    small = reduced(planned, candidate.mesh_shape, shapes, max_dim)
    step = 8 * max(small.mesh_shape)
    for item in layer.passes:
        config = item.config
        # In proportion a dim may become smaller than the planned slices of it; those stay.
        needed = min(-(-config.slice_count * config.block // step) * step, max_dim)
        sizes = (small.tokens, small.in_features, small.out_features)
        t, i, o = (max(size, min(needed, whole)) for size, whole in zip(sizes, planned, strict=True))
        problem = pass_problem(
            layer.stationary, item.name, t, i, o, small.mesh_shape, "float32", transposed=layer.transposed
        )
        problem = replace(problem, dataflow=item.dataflow)
        try:
            yield _Product(name, layer.name, item, problem, entry.program(problem, config))
        except LayoutError as error:
            reason = f"{config} does not fit at this size ({error}); raise --max-dim"
            yield _Product(name, layer.name, item, problem, None, reason)


# --- (a) in process -------------------------------------------------------------------------------------


def _in_process(products: Sequence[_Product], rings: int, seed: int) -> list[_Product]:
    with progress_bar("checking in process") as progress:
        for number, product in enumerate(products):
            try:
                product.numpy_error = _numpy_error(product, rings, seed)
            except MeshweaveError as error:
                product.failed = f"in process: {error}"
            progress(number + 1, len(products))
    return list(products)


def _numpy_error(product: _Product, rings: int, seed: int) -> float:
    """The largest absolute error over all orders, as planned and lowered to rings. Raises ProgramError."""
    problem, program = product.problem, product.program
    assert problem is not None and program is not None
    a, b = operand(problem, "a", seed), operand(problem, "b", seed)
    dense = (a.T if problem.dataflow == "rs" else a) @ (b.T if problem.dataflow == "ls" else b)
    validation = validate(program)
    product.unproved = "; ".join(validation.skipped)
    error = 0.0
    lowered = lower_rings(program, 2 if rings == 2 else 1)
    low_flow = validate(lowered, labels=False).flow
    runs = [(program, validation.flow, order) for order in ORDER_SEEDS] + [(lowered, low_flow, 3)]
    for what, flow, order in runs:
        out = run_numpy(what, {"A": a, "B": b}, seed=order, flow=flow).outputs["C"]
        error = max(error, float(np.nan_to_num(np.abs(out - dense), nan=np.inf).max()))
    return error


# --- (b) on processes -----------------------------------------------------------------------------------


def _on_processes(products: Sequence[_Product], ranks: int, rings: int, seed: int, timeout: float) -> str:
    """Fills in the errors of what is sound in process. Returns why nothing ran, or ""."""
    jobs = [product for product in products if not product.failed]
    if not jobs:
        return "no product is sound in process"
    try:
        import torch.distributed  # noqa: F401

        from meshweave.execute.ranks.launch import RankError, launch
    except ImportError:
        return "torch is missing: pip install 'meshweave[torch]'"
    rehearsals = [
        _rehearsal(product, rings, seed, max(timeout - 10, timeout / 2)).to_json() for product in jobs
    ]
    with tempfile.TemporaryDirectory(prefix="meshweave-verify-") as folder:
        payload = {"rehearsals": rehearsals, "log": folder}
        failure = ""
        try:
            with _followed(folder, len(jobs)):
                launch("meshweave.nn.rehearse:rehearse_all", ranks, payload, timeout_s=timeout)
        except (MeshweaveError, RankError) as error:
            failure = " ".join(str(error).split())
        logs = [read_log(folder, rank) for rank in range(ranks)]
    _fill_in(jobs, logs, failure)
    return ""


def _rehearsal(product: _Product, rings: int, seed: int, deadline_s: float) -> Rehearsal:
    assert product.problem is not None and product.program is not None
    program = lower_rings(product.program, 2 if rings == 2 else 1) if rings else product.program
    return Rehearsal(to_text(program), product.problem, 0, seed, deadline_s)


def _fill_in(jobs: Sequence[_Product], logs: Sequence[list[dict[str, Any]]], failure: str) -> None:
    """What the ranks logged, by product; the first that not all ranks ended is the one that failed."""
    for number, product in enumerate(jobs):
        lines = [line for log in logs for line in log if line["number"] == number]
        errors = [line["error"] for line in lines if "error" in line]
        if errors:
            product.gloo_error = max(errors)
        if len(errors) < len(logs):
            product.failed = f"on processes: {failure or 'a rank gave no result'}"
            for later in jobs[number + 1 :]:
                later.failed = f"on processes: not run, for {product.title} failed"
            return


@contextmanager
def _followed(folder: str, total: int) -> Iterator[None]:
    """Shows progress by what rank 0 has logged."""
    ended = threading.Event()

    def follow(progress: Progress) -> None:
        while not ended.wait(0.25):
            progress(len(read_log(folder, 0)), total)

    with progress_bar("checking on processes") as progress:
        thread = threading.Thread(target=follow, args=(progress,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


# --- report ---------------------------------------------------------------------------------------------


def _print(checked: Sequence[_Product], products: Sequence[_Product], not_run: str, ranks: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 130)
    title = f"products at reduced size on {ranks} ranks"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    left = ("algorithm", "layer", "pass", "dataflow")
    for column in (*left, "mesh", "M x N x K", "slices", "in process", "processes"):
        table.add_column(column, justify="left" if column in left else "right")
    for product in checked:
        p = product.problem
        assert p is not None
        table.add_row(
            product.algorithm,
            product.layer,
            product.item.name.replace("_", " "),
            p.dataflow,
            "x".join(map(str, p.mesh_shape)),
            f"{p.m} x {p.n} x {p.k}",
            str(product.item.config).removeprefix("S="),
            _verdict(product.numpy_error, product.failed),
            "-" if not_run else _verdict(product.gloo_error, product.failed),
        )
    console.print(table)
    for product in checked:
        if product.failed:
            typer.echo(f"{product.title}: {product.failed}")
        if product.unproved:
            typer.echo(f"{product.title}: not proved: {product.unproved}")
    for name, reasons in _reasons(products).items():
        typer.echo(f"skipped: {name}: {reasons}")
    if not_run:
        typer.echo(f"skipped: all products on processes: {not_run}")
    wrong, skipped = sum(p.is_wrong for p in checked), sum(bool(p.skipped) for p in products)
    typer.echo(f"{len(checked) - wrong} products right, {wrong} wrong, {skipped} skipped")


def _verdict(error: float | None, failed: str) -> str:
    if error is None:
        return "failed" if failed else "-"
    return "exact" if error == 0 else f"WRONG by {error:g}"


def _reasons(products: Sequence[_Product]) -> dict[str, str]:
    """Why products were skipped, those of an algorithm in one where the reason is the same."""
    out: dict[str, str] = {}
    for name in dict.fromkeys(product.algorithm for product in products):
        mine = [product for product in products if product.algorithm == name and product.skipped]
        if len({product.skipped for product in mine}) == 1 and len(mine) > 1:
            out[f"{name} ({len(mine)} products)"] = mine[0].skipped
        else:
            out |= {product.title: product.skipped for product in mine}
    return out
