"""`meshweave plan`: the degrees of parallelism of a training step; with --products, the products of one block."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_origin, get_type_hints

import typer

from meshweave.algorithms.step.stacks import SAME_STACK, stack_names
from meshweave.base.errors import DescriptionError, printable
from meshweave.base.outputs import write_file
from meshweave.cli.option_fields import option, refuse_given, with_options
from meshweave.cli.options import (
    BARE_CHIP_BYTES,
    JSON_HELP,
    OldSequenceOption,
    output,
    print_json,
    progress_bar,
    read_bytes,
    read_sequence,
)
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.describe.model.workload import Workload
from meshweave.describe.scores import MARGIN

if TYPE_CHECKING:
    from meshweave.algorithms.step import StepProblem
    from meshweave.tune.plan import Plan
    from meshweave.tune.plan_records import StepsRecord

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A catalog model (gpt3), a TOML file, a Hugging Face config.json or its folder, or an id whose "
        "config is in Hugging Face's cache."
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        help="A catalog cluster or a TOML file; ':N' sets the number of chips (dgx-h100:512). Or words, such as "
        "'16 x H100, 8 a host' or '2 hosts of 8 H100'."
    ),
]
_SAME = " and ".join(f"{name} is {stack}" for name, stack in SAME_STACK.items())
_RESERVE = "5%"


@dataclass(frozen=True)
class PlanVerbOptions:
    """The step that is planned, what is fixed of it, and what is shown and written."""

    batch: int | None = option(
        None, "Sequences of a step. With --products, half the number of chips if left out."
    )
    sequence: int = option(2048, "Tokens per sequence.")
    seq: OldSequenceOption = None
    dtype: str = option("bfloat16", "Element type of activations and weights.")
    fix: str = option(
        "",
        "Fix what the search would choose: dp, pp, cp, tp (8 or 2x4), vp, ep, etp, strategy, zero, schedule, "
        "micro_batch, recompute, order; 'tp=8,pp=16', alternatives with colons, 'zero=0:1'.",
    )
    memory: str | None = option(None, "Memory of a chip, such as 76GB. Default: what its description says.")
    reserve: str = option(
        _RESERVE, "What stays free of a chip's memory: a share such as 5%, or bytes such as 4GB."
    )
    table: bool = option(False, "Print the ranking, and time against memory.")
    sensitivity: bool = option(False, "Say what faster and slower links would change.")
    stack: str | None = option(
        None,
        "Software that executes the step: its overheads are added, and only what it executes is searched. "
        f"{', '.join((*stack_names(), *SAME_STACK))}; ideal adds nothing and executes all. meshweave is this "
        f"library's runtime with compiled blocks; {_SAME}. Default: meshweave, or ideal for a model with experts.",
    )
    overlap: str = option(
        "sites",
        "What communication of a layer runs beside: sites, for its own product alone, as in a model of "
        "mw.parallelize; layers, for all that a program of the whole layer could have beside it.",
    )
    precision: str | None = option(
        None,
        "Recipe by which products of layers run below 16 bits: fp8-delayed, fp8-current, fp8-token, "
        "fp8-block, mxfp8, nvfp4 or mxfp4. One that was not measured on the chip is refused, or priced as another "
        "one, which is said.",
    )
    margin: float = option(
        MARGIN,
        "Share of its time by which a strategy that no published run has must be faster than those that "
        "published runs have, to be chosen. 0 chooses the fastest by prediction.",
        min=0,
        max=0.99,
    )
    price: float | None = option(None, "Price of a chip-hour: adds the price of tokens to the table.", min=0)
    products: bool = option(False, "Plan the products of one block on all chips, and nothing else.")
    algorithms: str = option("all", "With --products: names separated by commas, or 'all'.")
    out: Path | None = output("Write the plan here as JSON, for `simulate` and `run`.", "--out", "--save")
    report: Path | None = output("Write a page here: tables, timelines and curves, self-contained HTML.")
    json: bool = option(False, JSON_HELP)


@with_options
def plan(model: ModelArgument, cluster: ClusterOption, options: PlanVerbOptions) -> None:
    """Choose the degrees of parallelism of a training step, within the memory of a chip.

    The search covers data, pipeline, context and tensor degrees, strategies within a layer, micro-batches,
    schedules, ZeRO levels, recomputation, and the order in which degrees are laid on the cluster. It prints the
    best, the runner-up and why, and what to do next. Ctrl-C prints the best so far.

    Example: meshweave plan gpt3 --cluster dgx-h100:512 --batch 1536 --sequence 2048 --fix tp=8
    """
    target, architecture = load_cluster(cluster), load_model(model)
    sequence = read_sequence(options.sequence, options.seq)
    batch = max(target.num_chips // 2, 1) if options.batch is None else options.batch
    workload = Workload(batch, sequence, options.dtype)
    if options.products:
        from meshweave.cli.plan_products import plan_products

        _refuse_with_products(options)
        outputs = options.out, options.report, options.json
        plan_products(architecture, target, workload, options.algorithms, outputs)
        return
    if options.algorithms != "all":
        raise DescriptionError("--algorithms is for products; add --products, or give --fix strategy=...")
    if options.batch is None:
        raise DescriptionError("the plan of a step needs --batch, the sequences of a step; give --batch 1024")
    from meshweave.algorithms.step import StepProblem, load_stack
    from meshweave.algorithms.step.stacks import default_stack

    stack = load_stack(options.stack or default_stack(architecture))
    problem = StepProblem(architecture, target, batch, sequence, options.dtype, stack=stack)
    reserve = read_reserve(options.reserve)
    problem = replace(
        problem,
        overlap=options.overlap,  # type: ignore[arg-type]
        reserve=reserve,
        precision=options.precision,
    )
    _plan_step(problem, options)


_OF_A_STEP = (
    "fix",
    "memory",
    "table",
    "sensitivity",
    "price",
    "stack",
    "overlap",
    "reserve",
    "precision",
    "margin",
)
"""The options that a plan of products does not have."""


def _refuse_with_products(options: PlanVerbOptions) -> None:
    for name in _OF_A_STEP:
        if getattr(options, name) != getattr(PlanVerbOptions, name):
            raise DescriptionError(f"--{name} is for the plan of a step; leave out --products")


def _plan_step(problem: StepProblem, given: PlanVerbOptions) -> None:
    from meshweave.cli.plan_tables import print_plan
    from meshweave.describe.machine.left_out import costs_left_out
    from meshweave.tune.step_search.planner import plan_step, space_options

    if given.price is not None and not math.isfinite(given.price):
        raise DescriptionError(f"--price is {given.price}; give dollars of a chip-hour, such as 2.5")
    if given.json:
        refuse_given(given, ("price",), "--json", "has the plan, which has no prices")
    options = space_options(read_fixed(given.fix), problem.stack)
    memory_bytes = None if given.memory is None else read_bytes("--memory", given.memory, BARE_CHIP_BYTES)
    if memory_bytes == 0:
        raise DescriptionError("--memory is 0; give the bytes of a chip, such as 76GB")
    with progress_bar("planning", plain_lines=True) as progress:
        chosen = plan_step(
            problem,
            options,
            memory_bytes=memory_bytes,
            sensitivity=given.sensitivity,
            margin=given.margin,
            progress=progress,
        )
    if given.report is not None:
        _write_page(given.report, problem, chosen)
    if given.out is not None:
        chosen.save(given.out)
    if given.json:
        print_json(chosen.model_dump(mode="json"))
    else:
        left_out = costs_left_out(problem.cluster)
        print_plan(chosen, left_out, table=given.table, price=given.price)
        for path in (given.out, given.report):
            if path is not None:
                typer.echo(f"written to {path}")
    if not chosen.step.is_complete:
        raise typer.Exit(130)


def _write_page(path: Path, problem: StepProblem, chosen: Plan) -> None:
    from meshweave.algorithms.step import layer_timeline, step_of, step_timeline
    from meshweave.report.step_page import step_page
    from meshweave.tune.step_search.curves import step_curves
    from meshweave.tune.step_search.planner import parallelism_of
    from meshweave.tune.step_search.reasons import choice_text

    steps = chosen.step
    choices = [parallelism_of(record) for record in steps.ranked[:2]]
    priced = list(zip(("best", "runner-up"), (step_of(problem, choice) for choice in choices), strict=False))
    timelines = [(name, step_timeline(step)) for name, step in priced]
    layers = ((f"a layer of the {name}", layer_timeline(step)) for name, step in priced)
    timelines += [(title, timeline) for title, timeline in layers if timeline is not None]
    with progress_bar("curves of the report", plain_lines=True) as progress:
        curves = step_curves(problem, choices, steps.memory_limit_bytes, progress)
    write_file(path, step_page(chosen, choice_text, *_reasons(steps), timelines, curves))


def _reasons(steps: StepsRecord) -> tuple[str, str]:
    """Return what the runner-up costs, and what to do next."""
    from meshweave.tune.step_search.reasons import advice, difference_text

    other = steps.runner_up
    return "" if other is None else difference_text(steps.best, other), advice(steps)


def read_reserve(text: str) -> float:
    """Return the memory of a chip that stays free: 0.05 for the share "5%" or "0.05", 4e9 for the bytes "4GB".

    Raises DescriptionError or LayoutError for other text.
    """
    share = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?) ?%|(0\.[0-9]{1,9})", text.strip())
    if share is None and "%" not in text:
        return float(read_bytes("--reserve", text, BARE_CHIP_BYTES))
    if share is None or (share[1] and float(share[1]) >= 100):
        raise DescriptionError(
            f"--reserve '{printable(text)}' is no share below 100%, such as 5%, and no bytes, such as 4GB"
        )
    return float(share[1]) / 100 if share[1] else float(share[2])


def read_fixed(text: str) -> dict[str, list[object]]:
    """Return the values that the text of `--fix` allows for each keyword of `mw.plan` in it.

    "tp=2x4,zero=0:1,strategy=megatron_sp" gives {"tp": [(2, 4)], "zero": [0, 1], "strategy": ["megatron_sp"]}.
    Names of strategies and the like are not checked.

    Raises DescriptionError for other text.
    """
    readers = _readers()
    fixed: dict[str, list[object]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, values = part.partition("=")
        if not equals or not values or name not in readers:
            raise DescriptionError(
                f"--fix '{part}' is not a name and a value, such as tp=8; names are {', '.join(readers)}"
            )
        if name in fixed:
            raise DescriptionError(f"--fix gives {name} twice; give alternatives with colons: {name}=1:2")
        fixed[name] = [readers[name](name, value) for value in values.split(":")]
    return fixed


def fixed_names() -> tuple[str, ...]:
    """Return the keywords of `mw.plan` that `--fix` takes, such as "tp"."""
    return tuple(_readers())


def _readers() -> dict[str, Callable[[str, str], object]]:
    """Return what reads each keyword that `mw.plan` fixes, by its type."""
    from meshweave.algorithms.step.options import PlanOptions, ProblemOptions, StepOptions, Tensor

    hints = get_type_hints(StepOptions)
    names = (name for name in get_type_hints(PlanOptions) if name not in get_type_hints(ProblemOptions))
    by_type: dict[object, Callable[[str, str], object]] = {int: _number, Tensor: _tensor}
    return {
        name: _order if get_origin(hints[name]) is tuple else by_type.get(hints[name], _word)
        for name in names
    }


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or not value.isascii() or len(value) > 9:
        raise DescriptionError(f"--fix {name}={value}: give a whole number, such as {name}=2")
    return int(value)


def _tensor(name: str, value: str) -> int | tuple[int, int]:
    if "x" not in value:
        return _number(name, value)
    rows, _, columns = value.partition("x")
    return _number(name, rows), _number(name, columns)


def _word(name: str, value: str) -> str:
    return value


def _order(name: str, value: str) -> tuple[str, ...]:
    return tuple(value.split("-"))
