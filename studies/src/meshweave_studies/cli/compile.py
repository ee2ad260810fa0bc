"""`meshweave compile`: compile planned products for TPUs that need not be there, and say what overlaps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.base.errors import UnsupportedError, require_known
from meshweave.base.outputs import write_file
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.options import JSON_HELP, OutputOption, print_json, read_names, read_plan
from meshweave.report.tables import text_console, text_table
from meshweave_studies.tpu.targets import TPU_TARGETS, TpuTarget

if TYPE_CHECKING:
    from meshweave.ir.program import Program
    from meshweave.tune.selection import PlannedProduct
    from meshweave_studies.tpu.compiled import CompiledProgram
    from meshweave_studies.tpu.scheduled_module import ModuleCollective

TOPOLOGIES = {
    target.topology: target for target in TPU_TARGETS.values() if target.kernels and not target.options
}
"""The target of each topology: of TPU v4, one core of each chip, for which the catalog has kernels. Kernels of v6e
are of products that were compiled with an option, which programs are not."""


def compile_plan(
    plan: Annotated[Path, typer.Argument(help="A plan written by `meshweave plan --products --out`.")],
    topology: Annotated[str, typer.Option(help="What to compile for: v4:4x4x1 or v5e:4x4.")] = "v4:4x4x1",
    layer: Annotated[str, typer.Option(help="Layer of the plan (qkv, out, ff1, ff2).")] = "ff1",
    passes: Annotated[
        str, typer.Option("--pass", help="forward, backward_data, backward_weight or all.")
    ] = "forward",
    algorithms: Annotated[
        str,
        typer.Option("--algorithm", help="Algorithms of the plan, separated by commas; 'best'; or 'all'."),
    ] = "best",
    emission: Annotated[
        str,
        typer.Option(
            help="The form for XLA: collectives, fused-gathers, fused, rings, ordered-rings; or 'all'."
        ),
    ] = "fused",
    text: Annotated[
        Path | None, OutputOption(help="Write the scheduled module of the last one here.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Compile planned products ahead of time with XLA's compiler for TPUs, and read the scheduled modules.

    No TPU is needed, but jax and libtpu are: pip install 'meshweave[tpu]'. Each collective is synchronous,
    asynchronous or fused; shown are the products between its start and its end, bytes and the cycles that the
    compiler expects, and the time of the schedule beside the prediction of the program. A compilation takes
    10 to 100 s of one core.

    Example: meshweave compile plan.json --topology v5e:4x4 --layer ff1 --algorithm meshslice
    """
    from meshweave.tune.selection import select_products
    from meshweave_studies.tpu.compiled import EMISSIONS, compile_program, emission_named

    target = _target(topology)
    emissions = list(EMISSIONS.values()) if emission == "all" else [emission_named(emission)]
    loaded = read_plan(plan)
    names = [loaded.best.algorithm] if algorithms == "best" else read_names(algorithms)
    chosen = select_products(loaded, algorithms=names, layers=[layer], passes=read_names(passes))
    listed: list[dict[str, Any]] = []
    for planned in chosen:
        for each in emissions:
            compiled = compile_program(_program(planned, loaded.dtype), target, each)
            title = f"{planned.title()}, as {each.name}"
            said = report(compiled)
            listed.append({"title": title, "emission": each.name, **said})
            if not json:
                _print(title, compiled, said)
            if text is not None:
                write_file(text, compiled.text)
    if json:
        print_json(listed)
    elif len(listed) > 1:
        fastest = min(listed, key=lambda said: said["expected_s"])
        print(f"fastest by its schedule: {fastest['title']}, {format_s(fastest['expected_s'])}")


def _program(planned: PlannedProduct, dtype: str) -> Program:
    from meshweave.algorithms.matmul2d import Matmul2dProblem
    from meshweave.algorithms.table import PRODUCTS_2D

    passed, candidate = planned.pass_plan, planned.candidate
    shape = tuple(candidate.mesh_shape)
    problem = Matmul2dProblem(passed.m, passed.n, passed.k, shape, passed.dataflow, dtype)
    return PRODUCTS_2D.named(candidate.entry_name).program(problem, passed.config)


def _target(topology: str) -> TpuTarget:
    require_known(topology, TOPOLOGIES, "there is no topology", UnsupportedError, "give one of")
    return TOPOLOGIES[topology]


def report(compiled: CompiledProgram) -> dict[str, Any]:
    """Return what the command prints of a compiled program, as JSON values."""
    time, axes = compiled.time(), compiled.axes
    return {
        "program": compiled.program.name,
        "target": compiled.target.name,
        "topology": compiled.target.topology,
        "collectives": [
            {
                "name": one.name,
                "kind": one.kind,
                "mode": one.mode,
                "axis": one.axis(axes),
                "sent_bytes": one.sent_bytes,
                "products_between": len(one.products),
                "cycles_between": one.cycles_between,
            }
            for one in compiled.module.collectives
        ],
        "beside": sum(bool(one.products) for one in compiled.module.collectives),
        "exposed_within": compiled.module.num_exposed_within,
        "product_cycles": sum(product.cycles for product in compiled.module.products),
        "products": len(compiled.module.products),
        "expected_s": time.total_s,
        "product_s": time.product_s,
        "other_s": time.other_s,
        "exposed_s": time.exposed_s,
        "predicted_s": compiled.predicted_s(),
        "peak_bytes": compiled.peak_bytes,
        "compile_cpu_s": compiled.compile_s,
    }


def _print(title: str, compiled: CompiledProgram, said: dict[str, Any]) -> None:
    console = text_console(110)
    time, axes = compiled.time(), compiled.axes
    counted: Counter[tuple[str, ...]] = Counter(_row(one, axes) for one in compiled.module.collectives)
    left = ("collective", "axis", "mode")
    head = ("count", *left, "sent each", "products between", "cycles between")
    rows = [(str(count), *row) for row, count in counted.items()]
    console.print(text_table(head, rows, left, title=title))
    parts = (time.product_s, time.other_s, time.exposed_s)
    products, others, waiting = (format_s(part) for part in parts)
    console.print(
        f"{compiled.target.topology}: schedule {format_s(time.total_s)} expected (products {products}, other "
        f"fusions {others}, waiting {waiting}), program {format_s(compiled.predicted_s())} predicted; "
        f"{format_bytes(compiled.peak_bytes)} a device; {said['beside']} of {len(said['collectives'])} "
        f"collectives have a product beside them, {said['exposed_within']} between products have none; "
        f"compiled in {format_s(compiled.compile_s)}"
    )


def _row(one: ModuleCollective, axes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    between = f"{one.cycles_between:,}" if one.products else "-"
    return (
        one.kind,
        one.axis(axes),
        one.mode,
        format_bytes(one.sent_bytes),
        str(len(one.products)),
        between,
    )
