"""`meshweave verify`: every planned product at reduced size, in process and on local processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from meshweave.cli.entries import SettingsOption, is_file, read_entry
from meshweave.cli.option_fields import option, refuse_given, with_options
from meshweave.cli.options import JSON_HELP, print_json, progress_bar, read_names, read_plan
from meshweave.report.tables import text_console, text_table

if TYPE_CHECKING:
    from meshweave.check import VerifyReport


_OF_A_PLAN = ("ranks", "layer", "algorithms", "max_dim", "rings", "seed", "timeout")
"""The options that choose products of a plan, and how they are run."""


@dataclass(frozen=True)
class VerifyOptions:
    """Which products are verified, at which size, and how."""

    ranks: int = option(4, "Local processes, and size of the meshes.")
    layer: str = option("all", "A layer of the plan (qkv, out, ff1, ff2), several with commas, or 'all'.")
    algorithms: str = option("all", "Algorithms of the plan, with commas, or 'all'.", "--algorithm")
    max_dim: int = option(512, "Sizes are reduced in proportion until no dim is larger.")
    rings: int = option(
        1, "On processes, run collectives as rings in 1 or 2 directions, or 0: as gloo's own."
    )
    seed: int = option(0, "Seed of the operands.")
    timeout: float = option(300.0, "Seconds after which the processes are stopped.")
    settings: SettingsOption = field(default_factory=list)
    json: bool = option(False, JSON_HELP)


@with_options
def verify(
    what: Annotated[
        str, typer.Argument(help="A plan written by `meshweave plan --out`, or an algorithm of any family.")
    ],
    options: VerifyOptions,
) -> int | None:
    """Check every planned product at reduced size: forward and both backward products of every layer.

    (a) In this process, on numpy: the program is validated, on index labels too, and run in several legal
    orders and lowered to rings. (b) On local processes over gloo, started once for all products. Both must
    give exactly the dense product. What cannot be checked is listed with the reason.

    Of an algorithm, the relations of its contract are proved for its configs, in this process: the program is
    sound and computes the reference in any legal order, and bytes and memory are those of the closed forms.

    Exit status 0: all that was checked is right; 1: something is wrong; 2: the input is.

    Example: meshweave verify plan.json --ranks 4

    More:    meshweave verify cannon
    """
    from meshweave import check

    if not is_file(what):
        refuse_given(options, _OF_A_PLAN, what, "is an algorithm, which is proved in this process")
        return _verify_entry(what, options.settings, options.json)
    refuse_given(options, ("settings",), what, "is a plan, and no algorithm")
    plan = read_plan(what)
    with progress_bar("checking", plain_lines=True) as progress:
        report = check.verify(
            plan,
            num_ranks=options.ranks,
            layers=read_names(options.layer),
            algorithms=read_names(options.algorithms),
            max_dim=options.max_dim,
            num_ring_directions=options.rings,  # type: ignore[arg-type]
            seed=options.seed,
            timeout_s=options.timeout,
            progress=progress,
        )
    if options.json:
        print_json(report.to_json())
    else:
        _print(report)
    return 1 if report.num_wrong else 0


def _verify_entry(name: str, settings: list[str], json: bool) -> int:
    """Prove the contract of an algorithm for its examples, or for the problem that the settings give."""
    from dataclasses import asdict

    from meshweave.check.contract import prove_contract

    entry, problem = read_entry(name, settings)
    problems = [problem] if settings else list(entry.examples())
    proofs = [proof for problem in problems for proof in prove_contract(entry, problem)]
    num_wrong = sum(proof.is_wrong for proof in proofs)
    if json:
        print_json({"proofs": [asdict(proof) for proof in proofs], "wrong": num_wrong})
        return 1 if num_wrong else 0
    for proof in proofs:
        if proof.unproved and not proof.num_ops:
            typer.echo(f"{name}, {proof.config}: {proof.unproved}")
            continue
        verdict = proof.failed or ", ".join(filter(None, [f"right, {proof.num_ops} ops", proof.replicas]))
        typer.echo(f"{name}, {proof.config}: {verdict}{proof.unproved and '; not proved: ' + proof.unproved}")
    num_right = sum(proof.num_ops > 0 and not proof.is_wrong for proof in proofs)
    num_skipped = len(proofs) - num_right - num_wrong
    typer.echo(f"{num_right} configs right, {num_wrong} wrong, {num_skipped} skipped")
    return 1 if num_wrong else 0


def _print(report: VerifyReport) -> None:
    _print_table(report)
    for verification in report.verifications:
        if verification.failed:
            typer.echo(f"{verification.title}: {verification.failed}")
        if verification.replicas:
            typer.echo(f"{verification.title}: {verification.replicas}")
        if verification.unproved:
            typer.echo(f"{verification.title}: not proved: {verification.unproved}")
    for name, reason in _skipped(report):
        typer.echo(f"skipped: {name}: {reason}")
    if report.not_run:
        typer.echo(f"skipped: all products on processes: {report.not_run}")
    right = len(report.verifications) - report.num_wrong
    typer.echo(f"{right} products right, {report.num_wrong} wrong, {len(report.skipped)} skipped")


def _print_table(report: VerifyReport) -> None:
    rows = []
    for verification in report.verifications:
        product = verification.product
        assert product is not None and product.problem is not None
        problem = product.problem
        rows.append(
            (
                product.algorithm,
                product.planned.layer.name,
                product.planned.pass_plan.name.replace("_", " "),
                problem.dataflow,
                "x".join(map(str, problem.mesh_shape)),
                f"{problem.m} x {problem.n} x {problem.k}",
                str(product.config).removeprefix("S="),
                _verdict(verification.error_in_process, verification.failed),
                "-" if report.not_run else _verdict(verification.error_on_processes, verification.failed),
            )
        )
    left = ("algorithm", "layer", "pass", "dataflow")
    head = (*left, "mesh", "M x N x K", "slices", "in process", "processes")
    title = f"products at reduced size on {report.num_ranks} ranks"
    text_console(130).print(text_table(head, rows, left, title=title))


def _verdict(error: float | None, failed: str) -> str:
    if error is None:
        return "failed" if failed else "-"
    return "exact" if error == 0 else f"WRONG by {error:g}"


def _skipped(report: VerifyReport) -> Iterator[tuple[str, str]]:
    """Yield what was skipped and why; the products of an algorithm in one line where the reason is the same."""
    for name in dict.fromkeys(product.algorithm for product in report.skipped):
        products = [product for product in report.skipped if product.algorithm == name]
        if len({product.skipped for product in products}) == 1 and len(products) > 1:
            yield f"{name} ({len(products)} products)", products[0].skipped
        else:
            yield from ((product.title, product.skipped) for product in products)
