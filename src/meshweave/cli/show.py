"""`meshweave show`: print a program, proved sound."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshweave.algorithms.matmul2d import Config, MatmulProblem, algorithm
from meshweave.base.errors import LayoutError, ProgramError
from meshweave.cli.options import JSON_HELP, print_json, read_mesh, read_slices
from meshweave.describe.files import read_text, shown
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse
from meshweave.ir.program.text import op_to_text, to_text
from meshweave.ir.work import traffic
from meshweave.lower import lower_rings, per_rank

MAX_SIZE = 2**40
"""More elements along a dim than anything has; a slip of the keyboard."""


def show(
    what: Annotated[
        str, typer.Argument(help="An algorithm (meshslice, collective), or a program text file, or '-'.")
    ],
    dataflow: Annotated[str, typer.Option(help="os, ls or rs: which matrix stays put.")] = "os",
    m: Annotated[int, typer.Option("--m", help="Rows of C.")] = 512,
    n: Annotated[int, typer.Option("--n", help="Columns of C.")] = 512,
    k: Annotated[int, typer.Option("--k", help="Summed dim.")] = 512,
    mesh: Annotated[str, typer.Option(help="Mesh shape, ROWSxCOLS.")] = "2x2",
    slices: Annotated[str, typer.Option(help="Slice count (4) or relative widths (1:2:1).")] = "4",
    block: Annotated[int, typer.Option(help="Neighbouring elements that stay together in a slice.")] = 8,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "float32",
    rings: Annotated[int, typer.Option(help="Lower collectives to rings of this many ways: 0, 1 or 2.")] = 0,
    rank: Annotated[
        int | None, typer.Option(help="Print only what this rank executes, with plain numbers.")
    ] = None,
    expand: Annotated[bool, typer.Option("--expand", help="Write every op out per rank.")] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Validate before printing.")] = True,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Print a program: its text form parses back to the same program.

    It is validated first: views, partners, deadlock, races, and, on index labels, what it computes.

    Example: meshweave show meshslice --dataflow ls --mesh 2x4 --slices 4 --rings 1
    """
    if rings not in (0, 1, 2):
        raise LayoutError(f"a ring has 1 or 2 ways, or 0 for none, not {rings}")
    program = _program(what, dataflow, (m, n, k), mesh, slices, block, dtype)
    if rings:
        program = lower_rings(program, 1 if rings == 1 else 2)
    verdict = "not checked"
    if check:
        try:
            validation = validate(program)
        except ProgramError as error:
            raise ProgramError(f"{what}: {error}") from None
        verdict = "; ".join(validation.skipped) or "valid"
    if expand:
        program = per_rank(program)
    if rank is not None and rank not in program.ranks:
        raise LayoutError(
            f"program {program.name} has ranks {program.ranks[0]} to {program.ranks[-1]}, not {rank}"
        )
    if json:
        shown = program.ranks if rank is None else (rank,)
        print_json(
            {
                "name": program.name,
                "text": to_text(program),
                "verdict": verdict,
                "ranks": {
                    str(r): {"peak_bytes": peak_bytes(program, r), "traffic_bytes": traffic(program, r)}
                    for r in shown
                },
            }
        )
    elif rank is not None:
        for bound in program.on_rank(rank):
            typer.echo(f"{'.'.join(map(str, bound.key)):<10} {op_to_text(bound.op)}")
    else:
        typer.echo(to_text(program), nl=False)
    if not json:
        typer.echo(f"# {verdict}", err=True)


def _program(
    what: str, dataflow: str, sizes: tuple[int, int, int], mesh: str, slices: str, block: int, dtype: str
) -> Program:
    if what == "-":
        return parse(sys.stdin.read())
    path = Path(what)
    if path.suffix or path.exists():
        try:
            return parse(read_text(path))
        except ProgramError as error:
            raise ProgramError(f"{what}: {error}") from None
    for option, size in zip(("--m", "--n", "--k", "--block"), (*sizes, block), strict=True):
        if not 1 <= size <= MAX_SIZE:
            raise LayoutError(f"{option} is {shown(size)}; give 1 to {MAX_SIZE}")
    problem = MatmulProblem(*sizes, read_mesh(mesh), dataflow, dtype)  # type: ignore[arg-type]
    return algorithm(what).program(problem, Config(read_slices(slices), block))
