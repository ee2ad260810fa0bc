"""`meshweave pipeline`: prove, time and draw a pipeline schedule in torch's CSV, or write one."""

from __future__ import annotations

import typer

from meshweave.algorithms.pipeline.action_graph import TransferRuntime
from meshweave.algorithms.pipeline.action_times import ActionTimes, time_schedule
from meshweave.algorithms.pipeline.actions import Schedule
from meshweave.algorithms.pipeline.by_name import ScheduleRequest, schedule_by_name
from meshweave.algorithms.pipeline.torch_csv import schedule_from_csv, schedule_to_csv
from meshweave.algorithms.pipeline.transfer_order import list_transfers
from meshweave.algorithms.table import SCHEDULES
from meshweave.base.errors import LayoutError, MeshweaveError, UnsupportedError, printable
from meshweave.base.limits import (
    SCHEDULE_BYTES,
    SCHEDULE_CELLS,
    SCHEDULE_FORWARDS,
    SCHEDULE_STAGES,
    Limit,
)
from meshweave.base.outputs import write_file
from meshweave.cli.entries import is_file
from meshweave.cli.option_fields import refuse_given, with_options
from meshweave.cli.options import print_json
from meshweave.cli.pipeline_options import (
    ScheduleTextOptions,
    What,
    read_compute_times,
    read_runtime,
    transfer_times,
)
from meshweave.cli.pipeline_tables import (
    ShownSchedule,
    headline,
    print_schedules,
    schedules_page,
    schedules_picture,
    to_json,
)
from meshweave.describe.files import read_stdin, read_text

_OF_A_NAME = ("stages", "micro_batches", "per_rank", "delay", "stash_rest")
"""The options of schedules given by name."""


@with_options
def pipeline(what: What, options: ScheduleTextOptions) -> None:
    """Prove that a pipeline schedule ends, time it, and draw it; or write one as torch's CSV.

    Of a file, or with --beside, --out or --json, a table is printed: the step, the bubble of each rank, the
    transfers that nothing hides, and the stashes that are kept. A schedule given by name alone is printed as CSV,
    for torch.distributed.pipelining and torchtitan's pipeline_parallel_schedule_csv.

    A file that lacks an action, or never ends, is refused; of a deadlock the cycle of actions is named.

    Example: meshweave pipeline eager-1f1b --stages 4 --micro-batches 16 > eager.csv

    Example: meshweave pipeline eager.csv --transfer 0.4ms --svg eager.svg

    More:    meshweave pipeline eager-1f1b --beside 1f1b --micro-batches 16 --transfer 0.4ms --report both.html
             meshweave pipeline zb-2p --stages 8 --micro-batches 24 --forward 18.5ms --input-grad 18.1ms \
--weight-grad 9.3ms --transfer 0.6ms --stash-rest 0.37 --out zb.csv
    """
    chosen = read_runtime(options.runtime)
    request, costs = _read_request(options), _Costs(options)
    names = [what] if options.beside is None else [what, options.beside]
    _refuse_unread(names, options)
    shown = [_prepare(name, request, costs, chosen) for name in names]
    written = _csv_of(shown[0], options.with_transfers) if _is_named(what) else None
    if options.out is not None and written is None:
        raise UnsupportedError(
            f"--out writes a schedule given by name, and {printable(what)} is a file already"
        )
    if options.svg is not None:
        write_file(options.svg, schedules_picture(shown, chosen))
    if options.report is not None:
        write_file(options.report, schedules_page(shown, chosen))
    if options.out is not None and written is not None:
        write_file(options.out, written)
    if options.json:
        print_json(to_json(shown, chosen))
    elif written is not None and options.out is None and options.beside is None:
        typer.echo(written, nl=False)
        typer.echo(f"# {headline(shown[0], chosen)}", err=True)
    else:
        print_schedules(shown, chosen)
        for path in (options.out, options.svg, options.report):
            if path is not None:
                typer.echo(f"written: {path}")


def _refuse_unread(names: list[str], options: ScheduleTextOptions) -> None:
    """Raise DescriptionError where an option is given that would change nothing of the schedules `names`."""
    what, named = " and ".join(names), [name for name in names if _is_named(name)]
    if not named:
        refuse_given(options, _OF_A_NAME, what, "lists all of its actions")
    if set(named) <= set(SCHEDULES):  # of an unknown name the error lists them all
        for option in ("delay", "stash_rest"):
            readers = [name for name, entry in SCHEDULES.items() if option in entry.config_fields]
            if not set(named) & set(readers):
                refuse_given(options, (option,), what, f"is not {' or '.join(readers)}")
    if options.cluster is None:
        refuse_given(options, ("activation", "chips_per_rank"), "the command", "has no --cluster")
    has_csv = _is_named(names[0]) and (options.out is not None or not (options.json or options.beside))
    if not has_csv:
        refuse_given(options, ("with_transfers",), "the command", "writes no CSV")


class _Costs:
    """The options that say how long actions take; where a schedule puts its stages may change the transfers."""

    def __init__(self, options: ScheduleTextOptions) -> None:
        self.options = options

    def times(self, stage_ranks: tuple[int, ...]) -> ActionTimes:
        """Return the times of a schedule's actions in picoseconds; `stage_ranks` has each stage's pipeline rank.

        Raises LayoutError or DescriptionError where an option is wrong.
        """
        given = self.options
        texts = given.forward, given.input_grad, given.weight_grad
        compute = read_compute_times(len(stage_ranks), texts)
        transfer = transfer_times(
            stage_ranks, given.transfer, given.cluster, given.activation, given.chips_per_rank
        )
        return ActionTimes(compute.forward, compute.input_grad, compute.weight_grad, transfer)


def _read_request(given: ScheduleTextOptions) -> ScheduleRequest:
    for option, value, least, most in (
        ("--stages", given.stages, 1, SCHEDULE_STAGES.most),
        ("--micro-batches", given.micro_batches, 1, SCHEDULE_FORWARDS.most),
        ("--per-rank", given.per_rank, 0, SCHEDULE_STAGES.most),
        ("--delay", given.delay, 0, SCHEDULE_FORWARDS.most),
    ):
        if not least <= value <= most:
            raise LayoutError(f"{option} is {value}; give {least} to {most}")
    if not 0 <= given.stash_rest <= 1:
        raise LayoutError(f"--stash-rest is {given.stash_rest}; give 0 to 1")
    return ScheduleRequest(given.stages, given.micro_batches, given.per_rank, given.delay, given.stash_rest)


def _refuse_over(limit: Limit, count: int, what: str) -> None:
    if count > limit.most:
        raise LayoutError(f"{printable(what)}: {limit.refusal(count)}; give fewer stages or micro-batches")


def _is_named(what: str) -> bool:
    return what in SCHEDULES or not is_file(what)


def _prepare(what: str, request: ScheduleRequest, costs: _Costs, runtime: TransferRuntime) -> ShownSchedule:
    """Return a schedule, given by name or file, proved and timed with its transfers."""
    if not _is_named(what):
        text = read_stdin(SCHEDULE_BYTES) if what == "-" else read_text(what, SCHEDULE_BYTES)
        _refuse_over(SCHEDULE_CELLS, text.count(",") + text.count("\n"), what)
        _refuse_over(SCHEDULE_STAGES, text.count("\n"), what)
        schedule = schedule_from_csv(text, what)
        times = costs.times(schedule.stage_ranks)
    else:
        schedule, times = _named(what, request, costs)
    try:
        lists = not schedule.has_communication and schedule.num_ranks > 1
        with_them = list_transfers(schedule, times) if lists else schedule
        return ShownSchedule(what, time_schedule(with_them, times, runtime), lists)
    except MeshweaveError as error:
        raise type(error)(f"{printable(what)}: {error}", *_further(error)) from None


def _further(error: MeshweaveError) -> tuple[object, ...]:
    return (error.cycle,) if hasattr(error, "cycle") else ()


def _named(what: str, request: ScheduleRequest, costs: _Costs) -> tuple[Schedule, ActionTimes]:
    """Return the schedule of a name; where its stages lie may change the time of transfers."""
    flat = costs.times(tuple(range(request.num_stages)))
    schedule = schedule_by_name(what, request, flat)
    if schedule.stage_ranks == tuple(range(request.num_stages)):
        return schedule, flat
    return schedule, costs.times(schedule.stage_ranks)


def _csv_of(shown: ShownSchedule, with_transfers: bool) -> str:
    schedule = shown.timed.schedule
    if with_transfers:
        return schedule_to_csv(schedule)
    orders = (tuple(a for a in order if not a.kind.communicates) for order in schedule.actions)
    return schedule_to_csv(Schedule(schedule.stage_ranks, schedule.num_micro_batches, tuple(orders)))
