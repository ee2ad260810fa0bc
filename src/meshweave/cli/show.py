"""`meshweave show`: print a program, proved sound, or what a plan chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import ALGORITHMS, PRODUCTS_2D
from meshweave.base.errors import LayoutError, ProgramError, printable
from meshweave.base.limits import CHECKED_STEPS, LISTED_STEPS
from meshweave.cli.entries import (
    ConfigOption,
    SettingsOption,
    is_file,
    is_plan_file,
    read_program_or_entry,
)
from meshweave.cli.option_fields import refuse_given, with_options
from meshweave.cli.options import JSON_HELP, print_json, read_mesh, read_plan, read_slices
from meshweave.describe.files import format_value
from meshweave.execute.jax.source import jax_source
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.text import op_to_text, to_text
from meshweave.ir.work import traffic
from meshweave.lower import lower_rings, write_out_per_rank

_OF_A_PRODUCT = ("dataflow", "m", "n", "k", "mesh", "slices", "block", "dtype")
"""The options that choose a 2D product."""
MAX_SIZE = 2**40
"""More elements along a dim than anything has; a slip of the keyboard."""


@dataclass(frozen=True)
class ShowOptions:
    """The problem and config of a program, and the form in which it is shown."""

    dataflow: Annotated[str, typer.Option(help="os, ls or rs: which matrix stays put.")] = "os"
    m: Annotated[int, typer.Option("--m", help="Rows of C.")] = 512
    n: Annotated[int, typer.Option("--n", help="Columns of C.")] = 512
    k: Annotated[int, typer.Option("--k", help="Summed dim.")] = 512
    mesh: Annotated[str, typer.Option(help="Mesh shape, ROWSxCOLS.")] = "2x2"
    slices: Annotated[str, typer.Option(help="Slice count (4) or relative widths (1:2:1).")] = "4"
    block: Annotated[int, typer.Option(help="Neighbouring elements that stay together in a slice.")] = 8
    dtype: Annotated[str, typer.Option(help="Element type.")] = "float32"
    rings: Annotated[
        int, typer.Option(help="Lower collectives to rings in 1 or 2 directions, or 0: none.")
    ] = 0
    rank: Annotated[
        int | None, typer.Option(help="Print only what this rank executes, with plain numbers.")
    ] = None
    expand: Annotated[bool, typer.Option("--expand", help="Write every op out per rank.")] = False
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check", help="Validate before printing. Default: where that takes seconds at most."
        ),
    ] = None
    settings: SettingsOption = field(default_factory=list)
    config: ConfigOption = 0
    form: Annotated[
        str, typer.Option("--as", help="text, or jax: the source of a function for jax.shard_map.")
    ] = "text"
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False


@with_options
def show(
    what: Annotated[
        str,
        typer.Argument(
            help="An algorithm (meshslice, collective), or a program text file, or a plan, or '-'."
        ),
    ],
    options: ShowOptions,
) -> None:
    """Print a program: its text form parses back to the same program. Of a plan, print what it chose.

    It is validated first: views, partners, deadlock, races, and, on index labels, what it computes.

    Of a 2D product the options choose sizes, mesh and slices. Any algorithm takes --set and --config instead.

    Example: meshweave show collective

    More:    meshweave show meshslice --dataflow ls --mesh 2x4 --slices 4 --rings 1
             meshweave show 1f1b --set micro_batches=8 --config 1
             meshweave show meshslice --rings 1 --as jax
    """
    if is_plan_file(what):
        _show_plan(what, options)
        return
    _check_form(options.form, options.json or options.expand or options.rank is not None)
    if options.rings not in (0, 1, 2):
        raise LayoutError(f"a ring runs in 1 or 2 directions, or 0 for none, not {options.rings}")
    if options.settings or options.config or not _is_product(what):
        why = "is given by --set and --config here" if _is_product(what) else "is no 2D product"
        refuse_given(options, _OF_A_PRODUCT, what, why)
        program = read_program_or_entry(what, options.settings, options.config)
    else:
        program = _product(what, options)
        for name in ("slices", "block"):
            if name not in PRODUCTS_2D[what].config_fields:
                refuse_given(options, (name,), what, f"is the same program with any --{name}")
    if options.rings:
        program = lower_rings(program, 1 if options.rings == 1 else 2)
    if options.rank is not None and options.rank not in program.ranks:
        known = f"{program.ranks[0]} to {program.ranks[-1]}" if program.ranks else "none"
        raise LayoutError(f"program {printable(program.name)} has ranks {known}, not {options.rank}")
    verdict = _verdict(what, program, options.check)
    if options.expand:
        _require_listable(what, program)
        program = write_out_per_rank(program)
    if options.rank is not None or options.json or options.form == "jax":
        _require_listable(what, program, None if options.rank is None else (options.rank,))
    if options.json:
        print_json(_to_json(program, verdict, program.ranks if options.rank is None else (options.rank,)))
        return
    typer.echo(jax_source(program) if options.form == "jax" else _text(program, options.rank), nl=False)
    typer.echo(f"# {verdict}", err=True)


def _show_plan(path: str, options: ShowOptions) -> None:
    """Print the summary of a plan. Raises LayoutError for options that only programs have."""
    if replace(options, json=False) != ShowOptions():
        raise LayoutError(f"{printable(path)} is a plan, which has no options but --json here")
    plan = read_plan(path)
    if options.json:
        print_json(plan.model_dump(mode="json"))
    else:
        typer.echo(plan.summary())


def _text(program: Program, rank: int | None) -> str:
    """Return the text of a program, or what one rank executes, with plain numbers."""
    if rank is None:
        return to_text(program)
    bound = program.expanded.ops_on_rank(rank)
    return "".join(f"{'.'.join(map(str, op.key)):<10} {op_to_text(op.op)}\n" for op in bound)


def _check_form(form: str, has_form_of_text: bool) -> None:
    """Raise LayoutError for a form that there is not, or options that only the text has."""
    if form not in ("text", "jax") or (form == "jax" and has_form_of_text):
        raise LayoutError(f"--as {printable(form)}: give text, or jax without --json, --expand and --rank")


def _verdict(what: str, program: Program, check: bool | None) -> str:
    """Return in words what a check has shown. Raises ProgramError where the program is wrong."""
    if check is False:
        return "not checked"
    if check is None and not is_file(what) and what in ALGORITHMS and not ALGORITHMS[what].is_proved:
        return f"not checked: its calls have no equations; `meshweave verify {what}` runs it"
    try:
        if check is None and not program.has_steps_within(CHECKED_STEPS):
            return f"not checked: {CHECKED_STEPS.refusal()}; --check takes longer"
        if check:
            _require_listable(what, program)
        validation = validate(program)
    except ProgramError as error:
        raise ProgramError(f"{printable(what)}: {error}") from None
    return "; ".join(filter(None, [*(validation.skipped or ["valid"]), validation.replicas_text]))


def _require_listable(what: str, program: Program, ranks: tuple[int, ...] | None = None) -> None:
    """Raise ProgramError where ranks (default: all) have more steps than are written out."""
    if not program.has_steps_within(LISTED_STEPS, ranks):
        raise ProgramError(
            f"{printable(what)}: {LISTED_STEPS.refusal()}; print its text, or one of its ranks"
        )


def _to_json(program: Program, verdict: str, ranks: Sequence[int]) -> dict[str, Any]:
    return {
        "name": program.name,
        "text": to_text(program),
        "verdict": verdict,
        "ranks": {
            str(rank): {"peak_bytes": peak_bytes(program, rank), "traffic_bytes": traffic(program, rank)}
            for rank in ranks
        },
    }


def _is_product(what: str) -> bool:
    return not is_file(what) and what in PRODUCTS_2D


def _product(what: str, options: ShowOptions) -> Program:
    """Return the program of the 2D product that the options choose."""
    sizes = options.m, options.n, options.k
    for option, size in zip(("--m", "--n", "--k", "--block"), (*sizes, options.block), strict=True):
        if not 1 <= size <= MAX_SIZE:
            raise LayoutError(f"{option} is {format_value(size)}; give 1 to {MAX_SIZE}")
    mesh, dataflow = read_mesh(options.mesh), options.dataflow
    product = Matmul2dProblem(*sizes, mesh, dataflow, options.dtype)  # type: ignore[arg-type]
    return PRODUCTS_2D[what].program(product, Matmul2dConfig(read_slices(options.slices), options.block))
